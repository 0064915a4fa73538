"""Random cases of every attention operator and layer, and the hashes of all that they give.

A change of structure must not change one bit. `SUBJECTS` has a function for each operator and
layer, which makes the case of a seed, runs it, and returns its results. No sum of inputs depends on
the machine, so a case is the same everywhere; results depend on the instruction set alone, and on
CUDA on the device. `buildtools/golden.py` compares the hashes with those of a file.

    python tests/kit/golden.py FILE CASES [SUBJECT ...]
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(x) for x in Path(__file__).parents[1].iterdir() if x.is_dir()]
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import cases
import dense_steps
import device
import engine
import golden_lines
import library
import numpy as np
import random_cases
import reference as ref
import reference_v4
import test_dense_absorbed
import v4_attend_cases
import v4_world
from dense_cases import MAIN_FORMATS, Dense, Mask
from library import sparse_mla
from paged_cases import LAYOUTS, Paged
from random_cases import Dice
from row_formats import E4M3_576
from varlen_cases import F16, Varlen

from sparse_mla.steps.v4 import COMPRESSED_DTYPES, INDEX_CACHE_DTYPES, KV_CACHE_DTYPES, PATHS


def dice_of(subject: str, seed: int) -> Dice:
    return Dice(seed, *subject.encode())


def lengths(dice: Dice, most_requests: int, longest_query: int, longest: int) -> list[tuple]:
    """(query tokens, keys) of requests; some have none of either, and queries may be more."""
    found = []
    for _ in range(int(dice.rng.integers(1, most_requests + 1))):
        n_q = dice.pick(1, 1, 1, 2, int(dice.rng.integers(0, longest_query + 1)))
        n_k = dice.pick(n_q, n_q + int(dice.rng.integers(longest)), int(dice.rng.integers(longest)))
        found.append((n_q, n_k))
    return found


def draw_mask(dice: Dice) -> Mask:
    window = int(dice.rng.integers(0, 90)), int(dice.rng.integers(-1, 20))
    return Mask(
        causal=dice.happens(0.6),
        window=dice.pick((-1, -1), (-1, -1), window),
        chunk=dice.pick(0, 0, 0, int(dice.rng.integers(1, 70))),
    )


# --- operators -----------------------------------------------------------------------------------


def run_lists(draw: Callable, seed: int) -> tuple:
    drawn = dataclasses.replace(draw(seed), late_keys=0, nan=None)
    case, _ = random_cases.make(drawn)
    # The square root of a mean is not the same on every machine.
    case.options["softmax_scale"] = float(f"{case.options['softmax_scale']:.2g}")
    kwargs = {**case.options, "num_splits": case.num_splits, "return_max_logits": drawn.max_logits}
    return sparse_mla.sparse_attention(case.q, case.kv, case.indices, **kwargs)


def sparse_attention(seed: int) -> tuple:
    return run_lists(random_cases.draw, seed)


def sparse_attention_512(seed: int) -> tuple:
    return run_lists(random_cases.draw_v4, seed)


def sparse_mla_dsv4(seed: int) -> np.ndarray:
    dice = dice_of("dsv4", seed)
    rng = dice.rng
    tokens, heads, page = int(rng.integers(1, 9)), dice.pick(1, 3, 16, 64), dice.pick(4, 64)
    window, topk = dice.pick(4, 20, 128), dice.pick(0, 3, 40, 300)
    pages = 400 // page + 1
    swa, compressed = (cases.random_bf16(rng, pages, page, 512, std=0.3) for _ in range(2))
    columns = window + topk
    indices = rng.integers(-1, pages * page, (tokens, columns)).astype(np.int32)
    lens = rng.integers(0, columns + 1, tokens).astype(np.int32)
    options = {"sinks": cases.make_sink(rng, heads)} if dice.happens(0.5) else {}
    query = cases.random_bf16(rng, tokens, heads, 512)
    return sparse_mla.sparse_mla_dsv4(
        query, swa, None, indices, compressed, lens, None, window=window,
        bmm1_scale=dice.pick(0.04, 0.4), **options,
    )  # fmt: skip


def mla_attention(seed: int) -> tuple:
    dice = dice_of("mla", seed)
    rng = dice.rng
    n = int(rng.integers(1, 5))
    is_uniform = dice.happens(0.15)
    lens = [(n if is_uniform else q, k) for q, k in lengths(dice, 5, 40, 300)]
    fmt = dice.pick("bf16", "fp8", *(name for name in MAIN_FORMATS if name != E4M3_576))
    is_576 = fmt in ("bf16", "fp8")
    mask = draw_mask(dice)
    if dice.happens(0.15):
        mask.cp = (int(rng.integers(3)), 3, dice.pick(1, 4, 16))
    case = Dense(
        [q for q, _ in lens], [k for _, k in lens],
        heads=dice.pick(1, 5, 16, 64, 128), fmt=fmt, block_size=dice.pick(1, 16, 64, 100),
        mask=mask, has_slots=dice.happens(0.2), is_uniform=is_uniform,
        is_pair=is_576 and dice.happens(0.3), e4m3=not is_576 and dice.happens(0.2),
        sink=dice.happens(0.3), softcap=dice.pick(0.0, 0.0, 0.0, 2.5),
        num_splits=dice.pick(0, 0, 0, 1, 2, 5), padding=0 if is_uniform else dice.pick(0, 0, 3),
        holes=dice.pick(0.0, 0.0, 0.1), missing=dice.pick(0, 0, 1), std=dice.pick(0.3, 1.0, 3.0),
        scale=dice.pick(0.04, 0.2), seed=seed,
    )  # fmt: skip
    return sparse_mla.mla_attention(*case.arguments(), **case.options)


def varlen_attention(seed: int) -> tuple:
    dice = dice_of("varlen", seed)
    lens = lengths(dice, 6, 70, 150)
    heads, kv_heads = dice.pick((1, 1), (4, 4), (4, 2), (16, 1), (12, 4), (48, 2))
    q_type = dice.pick("bf16", "bf16", "fp16", "e4m3")
    kv_type = q_type if q_type != "e4m3" else "bf16"
    pairs = dice.pick("", "", "qk", "k") if heads == kv_heads else ""
    case = Varlen(
        [q for q, _ in lens], [k for _, k in lens], heads=heads, kv_heads=kv_heads,
        dims=dice.pick((192, 128), (64, 64), (128, 128), (256, 256), (40, 24), (576, 512)),
        q_type=q_type, kv_type=dice.pick(kv_type, kv_type, "e4m3"), pairs=pairs,
        mask=draw_mask(dice), sink=dice.happens(0.3), softcap=dice.pick(0.0, 0.0, 0.0, 2.5),
        padding=dice.pick(0, 0, 4), is_spread=dice.happens(0.2),
        descales=dice.pick("", "number", "one", "rows", "column"),
        out_type=dice.pick(None, None, np.dtype(np.float32)), std=dice.pick(0.3, 1.0, 3.0),
        seed=seed,
    )  # fmt: skip
    rows = case.tokens + case.padding
    out = np.zeros(
        (rows, heads, case.dims[1]), case.out_type or (F16 if q_type == "fp16" else ref.BF16)
    )
    return sparse_mla.varlen_attention(*case.arguments(), **case.options, out=out)


def paged_attention(seed: int) -> tuple:
    """The file's hashes are those of the operator's first commit, as no older ones exist."""
    dice = dice_of("paged", seed)
    rng = dice.rng
    lens = lengths(dice, 6, 70, 150)
    is_decode = dice.happens(0.3)
    heads, kv_heads = dice.pick((1, 1), (8, 8), (8, 2), (16, 1), (32, 8))
    q_type = dice.pick("bf16", "bf16", "fp16", "e4m3")
    kv_type = q_type if q_type != "e4m3" else "bf16"
    has_qv = dice.happens(0.2)
    sizes = ((64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (40, 24), (576, 512))
    mask = draw_mask(dice)
    if dice.happens(0.15):
        mask.cp = (int(rng.integers(3)), 3, dice.pick(1, 4, 16))
    pads = [int(x) for x in rng.integers(0, 40, len(lens))]
    case = Paged(
        [1 if is_decode else q for q, _ in lens], [k for _, k in lens], heads=heads,
        kv_heads=kv_heads, dims=dice.pick((64, 512), (64, 64)) if has_qv else dice.pick(*sizes),
        q_type=q_type, kv_type=dice.pick(kv_type, kv_type, "e4m3"), mask=mask,
        sink=dice.happens(0.3), softcap=dice.pick(0.0, 0.0, 0.0, 2.5),
        padding=0 if is_decode else dice.pick(0, 0, 4), is_spread=dice.happens(0.3),
        descales=dice.pick("", "number", "one", "rows", "column"),
        out_type=dice.pick(None, None, np.dtype(np.float32)), std=dice.pick(0.3, 1.0, 3.0),
        page_size=dice.pick(1, 3, 16, 64, 256), layout=dice.pick(*LAYOUTS),
        has_slots=dice.happens(0.2), has_qv=has_qv, is_decode=is_decode,
        leftpad=dice.pick(None, pads) if mask.cp is None else None,
        holes=dice.pick(0.0, 0.0, 0.1), missing=dice.pick(0, 0, 1), seed=seed,
    )  # fmt: skip
    options = case.options
    if case.out_type is not None:
        options["out"] = np.zeros((case.tokens + case.padding, heads, case.dims[1]), case.out_type)
    return sparse_mla.paged_attention(*case.arguments(), **options)


def draw_states(dice: Dice, parts: int) -> tuple[list, list, dict]:
    """Rows and their lse, some of which are empty; values wider than a vector, and odd ones."""
    rng = dice.rng
    shape = int(rng.integers(1, 30)), dice.pick(1, 3, 16)
    width, dtype = dice.pick(512, 128, 24, 9), dice.pick(ref.BF16, np.float32, F16)
    outs = [
        rng.normal(0, 1, (*shape, width)).astype(np.float32).astype(dtype) for _ in range(parts)
    ]
    lses = [rng.normal(0, 4, shape).astype(np.float32) for _ in range(parts)]
    for lse in lses:
        lse[rng.random(shape) < 0.15] = -np.inf
    sink = {"attn_sink": cases.make_sink(rng, shape[1])} if dice.happens(0.4) else {}
    return outs, lses, sink


def merge_attn_states(seed: int) -> tuple:
    dice = dice_of("states", seed)
    (a, b), (lse_a, lse_b), options = draw_states(dice, 2)
    with_context = dice.pick(None, None, int(dice.rng.integers(len(a) + 1)))
    options["prefill_tokens_with_context"] = with_context
    return sparse_mla.merge_attn_states(a, lse_a, b, lse_b, **options)


def merge_attn_partials(seed: int) -> tuple:
    dice = dice_of("partials", seed)
    outs, lses, options = draw_states(dice, int(dice.rng.integers(1, 12)))
    if dice.happens(0.5):
        outs, lses = np.stack(outs), np.stack(lses)
    return sparse_mla.merge_attn_partials(outs, lses, **options)


# --- layers and their plans ----------------------------------------------------------------------


def facts_of(metadata) -> list:
    """All that a plan tells, but for the engine's own arrays and the workspaces."""
    found = []
    for name, x in sorted(vars(metadata).items()):
        is_own = "workspace" not in name and name not in ("slot_mapping", "block_table")
        if is_own and not name.startswith("_"):
            found += [name, *flatten(x)]
    return found


def flatten(x) -> Iterator:
    if isinstance(x, (list, tuple)):
        for each in x:
            yield from flatten(each)
    elif isinstance(x, dict):
        for key in sorted(x):
            yield from (key, *flatten(x[key]))
    elif hasattr(x, "shape"):
        yield device.host(x)
    elif dataclasses.is_dataclass(x):
        yield from facts_of(x)
    else:
        yield x


def v32_layer(seed: int) -> list:
    dice = dice_of("v32", seed)
    rng = dice.rng
    decodes, prefills = int(rng.integers(0, 5)), int(rng.integers(0, 4))
    threshold = dice.pick(1, 1, 3)
    lens = [dice.pick(1, threshold) for _ in range(decodes)]
    lens += [int(n) for n in rng.integers(threshold + 1, 30, prefills or int(decodes == 0))]
    seq_lens = [n + dice.pick(0, int(rng.integers(150))) for n in lens]
    batch = cases.make_batch(
        lens, seq_lens, block_size=dice.pick(1, 16, 64), pad_tokens=dice.pick(0, 0, 2), seed=seed
    )
    is_fp8, heads = dice.happens(0.75), dice.pick(2, 16, 33)
    path = dice.pick("mixed", "separate", "direct") if is_fp8 else "bf16"
    step = engine.make_step(batch, heads, topk=dice.pick(8, 48), seed=seed)
    config = engine.config(
        sparse_mla, num_heads=heads, fp8=is_fp8, path=path, block_size=batch.block_size,
        topk_tokens=48, decode_threshold=threshold, prefill_workspace_tokens=dice.pick(200, 400),
    )  # fmt: skip
    metadata = sparse_mla.MetadataBuilder(config).build(batch.common(sparse_mla))
    kv = step.fp8_cache if is_fp8 else step.bf16_cache(sparse_mla)
    options = {"attn_sink": step.attn_sink} if dice.happens(0.4) else {}
    layer = sparse_mla.SparseMLA(config)
    got = layer.forward(step.q, kv, step.topk_indices, metadata, **options)
    return [*got, *facts_of(metadata)]


def draw_dense(dice: Dice, seed: int) -> tuple[dense_steps.Case, dict]:
    rng = dice.rng
    decodes, prefills = int(rng.integers(0, 4)), int(rng.integers(0, 4))
    threshold = dice.pick(1, 1, 3)
    lens = [dice.pick(1, threshold) for _ in range(decodes)]
    lens += [int(n) for n in rng.integers(threshold + 1, 24, prefills or int(decodes == 0))]
    contexts = [int(c) if dice.happens(0.7) else 0 for c in rng.integers(0, 200, len(lens))]
    fmt = dice.pick("bfloat16", "fp8_ds_mla", "fp8_e4m3", "fp8_nope")
    case = dense_steps.Case(
        lens, contexts, heads=dice.pick(1, 5, 16), page=dice.pick(1, 16, 64), fmt=fmt,
        padding=dice.pick(0, 0, 3), seed=seed, threshold=threshold,
        rope=0 if fmt in ("fp8_e4m3", "fp8_nope") else 64,
        interleaved=dice.happens(0.7),
    )  # fmt: skip
    changes = {"path": dice.pick("separate", "separate", "mixed")}
    if changes["path"] == "separate":
        changes["context_plan"] = dice.pick("equal", "packed")
        rows = case.page * (prefills + 1) + dice.pick(0, 40, 300)
        changes["prefill_workspace_tokens"] = rows
    return case, changes


def dense_layer(seed: int) -> list:
    case, changes = draw_dense(dice_of("dense", seed), seed)
    got = case.run(**changes)
    return [got, *facts_of(case.metadata)]


def dense_layer_absorbed(seed: int) -> list:
    dice = dice_of("absorbed", seed)
    case, changes = draw_dense(dice, seed)
    scheme = dice.pick(None, None, *test_dense_absorbed.SCHEMES)
    layer = test_dense_absorbed.Layer(case, scheme=scheme)
    return [layer.run(**changes)]


def v4_attend(seed: int) -> list:
    dice = dice_of("attend", seed)
    rng = dice.rng
    ratio = dice.pick(*v4_attend_cases.RATIOS)
    lens = [dice.pick(1, 2, 1) for _ in range(int(rng.integers(0, 4)))]
    lens += [int(n) for n in rng.integers(3, 24, int(rng.integers(0, 3)) + (not lens))]
    contexts = [dice.pick(0, 3, 33, 150) for _ in lens]
    heads = dice.pick(1, 3, 16, 64)
    case = v4_attend_cases.make_case(
        ratio, dice.pick(*PATHS), lens, contexts, formats=dice.pick(*v4_attend_cases.FORMAT_PAIRS),
        heads=heads, padding=dice.pick(0, 2), e4m3=dice.happens(0.15), seed=seed,
    )  # fmt: skip
    metadata = case.build()
    got = case.layer.attend(case.q, case.caches, metadata, case.topk)
    tokens = case.batch.num_tokens
    return [*(x[:tokens] for x in got), *facts_of(metadata)]


class World(v4_world.World):
    """A layer whose projections give the same bits on every machine: sums in fp64, rounded."""

    def multiply(self, name: str, x: np.ndarray) -> np.ndarray:
        y = (ref.to_f32(x).astype(np.float64) @ self.matrices[name]).astype(np.float32)
        return y if name.endswith("wkv_wgate") else ref.to_bf16(y)


def v4_layer(seed: int) -> list:
    dice = dice_of("v4", seed)
    ratio = dice.pick(1, 4, 16)
    sizes = reference_v4.Sizes(
        window=dice.pick(1, 6, 20), swa_block_size=dice.pick(4, 16), block_size=dice.pick(16, 32),
        ratios=(4, 16), max_num_seqs=5, max_num_batched_tokens=60, max_model_len=96,
        decode_threshold=dice.pick(1, 4), prefill_chunk_size=dice.pick(1, 3),
    )  # fmt: skip
    heads, groups = dice.pick((2, 1), (4, 2))
    world = World(
        library.package, ratio, (23, 19, 16), seed=seed, kv=dice.pick(*KV_CACHE_DTYPES),
        compressed=dice.pick(None, *COMPRESSED_DTYPES) if ratio > 1 else None,
        index=dice.pick(*INDEX_CACHE_DTYPES) if ratio == 4 else INDEX_CACHE_DTYPES[0],
        quantized=dice.happens(0.5), sizes=sizes, heads=heads, groups=groups,
        topk=dice.pick(3, 64), options={"path": dice.pick(None, *PATHS)},
    )  # fmt: skip
    steps = [
        [(0, 0, 21), (1, 0, 5)],
        [(0, 21, 1), (1, 5, 13), (2, 0, 9)],
        [(0, 22, 1), (1, 18, 1), (2, 9, 7)],
    ]
    found = [world.step(parts, dice.pick(0, 2)) for parts in steps]
    return [*found, *(world.bytes_of(name) for name in sorted(world.memory))]


SUBJECTS = (
    sparse_attention, sparse_attention_512, sparse_mla_dsv4, mla_attention, varlen_attention,
    paged_attention, merge_attn_states, merge_attn_partials, v32_layer, dense_layer,
    dense_layer_absorbed, v4_attend, v4_layer,
)  # fmt: skip
ON_THE_CPU = {"v4_layer"} if device.ON_CUDA else set()  # the projections of its world are NumPy's


# --- hashes --------------------------------------------------------------------------------------


def digest_of(results) -> str:
    """A hash of all bits of results, and of their shapes and dtypes."""
    digest = hashlib.sha256()
    for x in flatten(results):
        if isinstance(x, np.ndarray):
            digest.update(f"{x.dtype} {x.shape} ".encode() + np.ascontiguousarray(x).tobytes())
        else:  # a number, a name, None or a slice
            digest.update(f"{x!r} ".encode())
    return digest.hexdigest()


def hashes_of(subject: Callable, count: int) -> list[str]:
    return golden_lines.lines_of([digest_of(subject(seed)) for seed in range(count)])


if __name__ == "__main__":
    to, count, *names = sys.argv[1:]
    names = {*names} or {x.__name__ for x in SUBJECTS} - ON_THE_CPU
    found = {x.__name__: x for x in SUBJECTS if x.__name__ in names}
    found = {name: hashes_of(subject, int(count)) for name, subject in found.items()}
    Path(to).write_text(json.dumps(found, indent=1) + "\n")
