"""Sentences of the pages whose numbers the code decides: each is written here with the numbers
computed, and must stand on its page. docs/mla.md has its own in test_page_facts.py, and
docs/formats.md in test_format_facts.py."""

from __future__ import annotations

import difflib
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference as ref
from operators import FACTS
from row_formats import FORMATS
from test_doc_numbers import MAX_SPLITS, constant, read
from v4_world import INDEX_HEADS, Q_LORA, RANK, World

import sparse_mla
from sparse_mla import _C, v4
from sparse_mla.ops.projection_weights import TILE, WEIGHT_GROUPS
from sparse_mla.v4 import lanes
from sparse_mla.v4.facts import INDEX_HEAD_SIZE

ROOT = Path(__file__).parents[2]
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def matched(path: str, pattern: str) -> tuple[str, ...]:
    """What the code has where a pattern says."""
    found = re.search(pattern, (ROOT / path).read_text())
    assert found, f"{path} has no {pattern}"
    return found.groups()


def default_of(thing: Any, name: str) -> Any:
    return inspect.signature(thing).parameters[name].default


def two_to(value: float) -> str:
    exponent = int(np.log2(value))
    assert 2.0**exponent == value
    return "2" + str(exponent).translate(RAISED)


V4 = v4.Config(64, max_num_seqs=1, max_num_batched_tokens=1, max_model_len=1)
KEYS, LATENT, ROPE = ref.HEAD_DIM, ref.V_DIM, ref.ROPE_DIM
INDEX = INDEX_HEAD_SIZE
RATIO = constant("csrc/sparse_mla/v4_step.h", "SMLA_V4_INDEXED_RATIO")
OTHER = next(ratio for ratio in V4.compress_ratios if ratio != RATIO)
MIN_HEADS = default_of(sparse_mla.Config, "min_heads_for_bf16_prefill")
LOGITS = default_of(sparse_mla.lightning_indexer, "max_logits_bytes")
BLOCK = WEIGHT_GROUPS["block"]
ROWS = {f.name: f.row_bytes for f in FORMATS.values()} | {"fp8_ds_mla": ref.FP8_ROW_BYTES}
KEY, FP4_KEY = FORMATS["fp8_index"], FORMATS["mxfp4_index"]

# --- the projections of a V4 layer ---------------------------------------------------------------


def widths(ratio: int) -> dict[str, int]:
    """What the projections of a small layer return per token."""
    return {name: x.shape[1] for name, x in World(sparse_mla, ratio, (40,)).matrices.items()}


WIDTHS, WORLD = widths(RATIO), World(sparse_mla, RATIO, (40,))
LETTERS = {"q_lora": Q_LORA, "H": WORLD.heads, "c": 2, "index_n_heads": INDEX_HEADS}
LETTERS |= {"G": WORLD.groups, "N": RANK}


def test_widths_of_the_projections():
    """The table of docs/v4.md, row by row."""
    rows = re.findall(
        r"^\| `(\w+)` \| (.*?) \| `\[T, (.*?)\]`", (ROOT / "docs/v4.md").read_text(), re.M
    )
    assert {name for name, *_ in rows} == set(WIDTHS) - {"wo_b"}
    for name, _, width in rows:
        product = re.sub(r"(?<=\w) (?=\w)", " * ", width)
        assert eval(product, {}, LETTERS) == WIDTHS[name], f"docs/v4.md, {name}: {width}"
    assert widths(16)["wkv_wgate"] == 2 * LATENT, "c is 1 for other ratios"


# --- sentences -----------------------------------------------------------------------------------

ATTENTION = ref.Attention(*(np.ones((1, 1)) for _ in range(7)))
UNITS = ATTENTION.lse_tolerance(units=1) - 1e-6
EPSILON = two_to(round(float(UNITS[0, 0]) * 2.0**60) / 2.0**60)
(MOST_K,) = (most for *_, name, _, most in sparse_mla.top_k_per_row.limits if name == "k")
DIGIT = round(np.log2(constant("csrc/cpu/topk/select.h", "SMLA_DIGIT_VALUES")))
GPU_DIGIT = 32 - int(matched("csrc/cuda/topk/resident_digits.cuh", r"\(key >> (\d+)\)")[0])
DIGITS, CLUSTERS = "csrc/cuda/topk/resident_digits.cuh", "csrc/cuda/topk/top_k_rows.cuh"
RESIDENT = 32 * constant(CLUSTERS, "SMLA_MAX_ROW_CTAS") * constant(CLUSTERS, "SMLA_RESIDENT_KEYS")
RESIDENT *= constant(DIGITS, "RESIDENT_PARTS") * constant(DIGITS, "MOST_WARPS")
ARCHS = matched("buildtools/graph.py", r'_ARCHS", ""\)\.split\(\) or \["(\w+)", "(\w+)"\]')


def rounded_tokens() -> int:
    """What a row of new scales for three tokens is rounded up to."""
    call = FACTS["fused_inv_rope_fp8_quant"].good()
    call.kwargs |= {"out": None, "out_scale": None, "scale_layout": "fp32"}
    scales = call.run(sparse_mla)[1]
    return scales.strides[-1] // scales.itemsize


def rounded_columns() -> int:
    """What fewer compressed columns than four are rounded up to."""
    call = FACTS["build_mixed_sparse_indices"].good()
    call.kwargs |= {"out": None, "lens": None}
    return call.run(sparse_mla)[0].shape[1] - call.get("window")


def positions_of_indexer() -> str:
    """The result of the lightning indexer that is below the tokens' contexts: no slots."""
    call = FACTS["lightning_indexer"].good()
    positions, slots, _ = call.run(sparse_mla)
    names = {id(call.get(name)): name for name in ("out", "slots")}
    context = call.get("context_lens")[:, None]
    assert (positions < context).all() and (slots >= context).any()
    return names[id(positions)]


STATED = {
    "docs/operators.md": (
        f"whole keys of {LATENT} values, or an indexer's of {INDEX} → their slots",
        f"up to {MAX_SPLITS} partial results",
        f"one scale per weight, per {BLOCK[0]} × {BLOCK[1]} block",
        f"{KEYS} ({LATENT} + {ROPE}), or {LATENT} without RoPE.",
        f"`mixed` (one call on the FP8 cache; below {MIN_HEADS} heads)",
    ),
    "docs/c.md": (f"7 needs `topk_indices`, the `{positions_of_indexer()}` of 6.",),
    "docs/gpu.md": (
        f"A device has {constant('csrc/cuda/host/launch.c', 'MAX_GRAPHS')} such graphs, and "
        f"{constant('csrc/cuda/host/launch.c', 'MAX_PAIR_GRAPHS')} of two kernels",
    ),
    "docs/v4.md": (
        f"| {RATIO} | these, and `topk_tokens` of the complete groups of four tokens",
        f"| another one, in V4 {OTHER} | these",
        f"c is 2 for r = {RATIO}, else 1 | r > 1",
        f"[T, {INDEX * 4}]` fp32 or bf16: the same of the indexer's compressor | r = {RATIO}",
        f"takes up to {['no', 'one', 'two', 'three', 'four'][lanes.MAX_SIDES]} streams beside",
        f"more than `Config.overlap_gemm_tokens` tokens ({V4.overlap_gemm_tokens})",
        f"At {V4.num_heads} heads the largest parts are about "
        f"{V4.num_heads * LATENT * (2 + 1) // 1024} KiB per token for attention's result and its",
        f"the indexer's workspace of up to {LOGITS >> 20} MiB",
    ),
    "docs/flash_mla.md": (
        f"V4 has heads of {LATENT} values, a cache of {ROWS['fp8_v4']} bytes a token",
        f"heads of {KEYS} or {LATENT} values (`d_qk`)",
        f"| `head_dim_v`, `d_v` | {LATENT} |",
        f"dense prefill, on every device: bf16 and fp16, D up to {KEYS} and Dv up to {LATENT};",
        f"{KEYS} or {LATENT} bf16 a token, and the FP8 rows",
        f"a cache of {KEYS} or {LATENT} e4m3 values a token",
        f"# [b, s_q, H, {KEYS}] e4m3 k_cache, # [pages, block_size, 1, {KEYS}] e4m3",
        f"beside a cache of {KEYS} bf16, or of {ROWS['fp8_ds_mla']} bytes",
        f"k_cache, # [pages, block_size, 1, {ROWS['fp8_ds_mla']}] FP8",
        f"q, # [b, s_q, H, {KEYS}] bf16 k_cache, # [pages, block_size, 1, {KEYS}] bf16",
        f"q, # [b, s_q, H, {LATENT}] bf16 window_cache, # [pages, {V4.swa_block_size}, 1, "
        f"{ROWS['fp8_v4']}] FP8",
        f"indices=window_slots, # [b, s_q, {V4.window}]",
        f"# [pages, {V4.block_size // OTHER}, 1, {ROWS['fp8_v4']}] FP8",
        f") # [b, s_q, H, {LATENT}], [b, H, s_q]",
    ),
    "docs/transformers.md": (
        f"sizes other than {LATENT} and {ROPE}.",
        f"a bf16 copy of kv_b_proj: {round(LATENT * 128 * (128 + 128) * 2 / 1e6)} MB at 128 heads",
        f"a key at {INDEX} values",
        f"{2 * INDEX} bytes (bf16) or {4 * INDEX} (fp32)",
        f'| `"fp8_index"` | this library\'s | {KEY.row_bytes} bytes |',
        f'| `"mxfp4_index"` | this library\'s | {FP4_KEY.row_bytes} bytes |',
        f"needs `index_head_dim` {INDEX}, and",
        f"values i and i + {ROPE // 2} of the first {ROPE} of a head",
        f"neighbours of the last {ROPE}.",
        f"num_pages=32, # of {default_of(sparse_mla.Config, 'block_size')} tokens",
    ),
    "docs/accuracy.md": (
        f"E = 16·{EPSILON}·A (32·{EPSILON}·A on a GPU)",
        "|lse error| ≤ E + 10⁻⁶",
        "|out error| ≤ 2·2⁻⁹·(Σⱼ pⱼ|vⱼ| + |out|) + 2E·Σⱼ pⱼ|vⱼ| + 10⁻⁶",
        "larger by 2⁻¹¹·maxⱼ",
        "are within 1.02·2⁻⁸·|y| + 2⁻²⁰·m of the formula y",
        f"subnormal numbers (below {two_to(float(ref.FLT_MIN))}) as zero",
    ),
    "docs/choosing_keys.md": (
        f"It has heads of its own, {V4.index_n_heads} of {INDEX} values, and a cache with one key "
        f"of {INDEX} values",
        f"D values wide: {LATENT} where attention reads it, {INDEX} where an indexer does.",
        f"With r = {RATIO} groups overlap",
        f"turns the queries `[T, Hi, {INDEX}]` to their positions",
        f"| FP8 | e4m3 `[T, Hi, {INDEX}]` |",
        f"e2m1 `[T, Hi, {FP4_KEY.data_bytes}]`, two per byte | UE8M0 `[T, Hi, "
        f"{INDEX // FP4_KEY.tile}]`, one per {FP4_KEY.tile} values |",
        f"The scales are {INDEX}^-0.5 and Hi^-0.5.",
        f"1 is the ratio of V3.2, {RATIO} that of V4's layers with an indexer",
        f"at most `max_logits_bytes` ({LOGITS >> 20} MiB) and 128",
        f"On a CPU a chunk takes {constant('csrc/cpu/cpu.h', 'SMLA_CPU_CHUNK_LOGITS_BYTES') >> 20} "
        f"MiB, or {constant('csrc/cpu/cpu.h', 'SMLA_CPU_CHUNK_TOKENS')} tokens",
        f"| precise | 2^{round(np.log2(WORLD.logit_unit))} * u |",
        f"found digit by digit ({DIGIT}, {DIGIT} and {32 - 2 * DIGIT} bits)",
        f"The digits are of {GPU_DIGIT}, {GPU_DIGIT} and {32 - 2 * GPU_DIGIT} bits there.",
        f"Of a row of more than {RESIDENT:,} columns it holds the beginning",
        "On Hopper a cluster of up to "
        f"{constant('csrc/cuda/topk/top_k_rows.cuh', 'SMLA_MAX_ROW_CTAS')} CTAs",
    ),
    "docs/install.md": (f'The default of `SPARSE_MLA_CUDA_ARCHS` is `"{" ".join(ARCHS)}"`',),
    "docs/coming_from.md": (
        f"the same cache: {ROWS['fp8_ds_mla']} bytes a token, `[{LATENT} e4m3][{LATENT // TILE} "
        f"fp32 scales][{ROPE} bf16]`, or {KEYS} bf16",
        f"is `Config(min_heads_for_bf16_prefill={MIN_HEADS})`",
        f"`window={default_of(sparse_mla.sparse_mla_dsv4, 'window')}` columns are the window's",
        f"`align={default_of(sparse_mla.combine_topk_swa_indices, 'align')}` rounds the width",
        f"`descale` is amax / {ref.E4M3_MAX:.0f}, where vLLM's is 1 / ({ref.E4M3_MAX:.0f} / amax)",
        f"[slots, 1, {ROWS['fp8_ds_mla']}] or [slots, 1, {KEYS}]",
    ),
    "docs/engines.md": (f"| head size, dtype, block size | {KEYS}, bf16, any |",),
    "README.md": (
        f"paged cache: {ROWS['fp8_ds_mla']} bytes a token in FP8, {2 * KEYS} in bf16",
        f"queries [T, H, {KEYS}]",
        f"out [T, H, {LATENT}], lse [T, H]",
    ),
    "sparse_mla/ops/__init__.py": (
        f'row is {KEYS} bf16 ("bfloat16"), {ROWS["fp8_ds_mla"]} bytes of uint8',
        f'or {LATENT} bf16 ("bfloat16" without RoPE)',
        f"keys have {LATENT} values where docstrings say {KEYS}",
        f"the formats of {LATENT} and {INDEX} values in docs/formats.md",
    ),
    "sparse_mla/ops/compressor.py": (f"D ({LATENT} or {INDEX}) is the width",),
    "sparse_mla/ops/planning.py": (
        f"in tokens of {2 * KEYS} bytes",
        f"at most {_C.get_context_workspace_size(2**20, 256, 64)} tokens",
    ),
    "sparse_mla/ops/cache.py": (
        f"row = {KEYS} or {LATENT} bf16, {ROWS['fp8_ds_mla']}, {KEYS}, {ROWS['fp8_nope']} or "
        f"{ROWS['fp8_e4m3']} bytes, written",
        f"rows of {ROWS['fp8_nope']} bytes need the name",
        f"row = {KEY.row_bytes} or {FP4_KEY.row_bytes} bytes, written",
    ),
    "sparse_mla/ops/topk.py": (f"N is below 2**{round(np.log2(MOST_K + 1))}",),
    "sparse_mla/backend/facts.py": (
        f"1 and {KEYS}: MLA has one head of keys.",
        f"{KEYS} values of a key: {LATENT} without RoPE and {ROPE} with it.",
        f"a row is {KEYS} bf16, or {ROWS['fp8_ds_mla']} uint8",
    ),
    "sparse_mla/dense/facts.py": (f"{KEYS}, or {LATENT} for models without RoPE",),
    "sparse_mla/v4/facts.py": (
        f"{LATENT} values of a key, all of which are its value",
        f"{LATENT}, or {INDEX} for the indexer's formats",
    ),
    "sparse_mla/ops/index.py": (f"compressed columns, rounded up to {rounded_columns()}",),
    "csrc/sparse_mla/rope.h": (f"up to the next multiple of {rounded_tokens()}, become 0",),
    "sparse_mla/ops/rope.py": (
        f"up to the next multiple of {rounded_tokens()}, become 0",
        f"row = {KEYS} bf16 or {ROWS['fp8_ds_mla']} bytes, written",
    ),
    "sparse_mla/ops/varlen.py": (f"is at most {KEYS}.", f"Dv is at most {LATENT}."),
    "sparse_mla/steps/v32.py": (
        f"{LATENT} and {ROPE}, the only sizes that there are kernels for",
        f'"bfloat16" ({KEYS} bf16 a token), or "fp8_ds_mla" ({ROWS["fp8_ds_mla"]} bytes)',
    ),
    "sparse_mla/steps/dense.py": (
        f"{LATENT}, and {ROPE} or 0: the only sizes that there are kernels for",
        f'"bfloat16" ({KEYS} bf16 a token), or "fp8_ds_mla" ({ROWS["fp8_ds_mla"]} bytes)',
        f"Without RoPE: {LATENT} bf16",
        f"one row of {KEYS} bf16 for each",
    ),
    "csrc/sparse_mla/varlen.h": (f"D is at most {KEYS}, Dv at most {LATENT}",),
    "csrc/sparse_mla/step.h": (
        f"[tokens, {KEYS}] bf16, outlives the builder",
        f"prefill_workspace_tokens; /* 0 = those of `workspace`, or "
        f"{_C.get_prefill_workspace_size(1)} * max_model_len */",
    ),
    "csrc/sparse_mla/v4_step.h": (f"[rows, {LATENT}] bf16, outlives the builder",),
}
CASES = [(page, text) for page, texts in STATED.items() for text in texts]


def nearest_line(path: str, text: str) -> int:
    """The line that is most like the beginning of a text."""
    lines = (ROOT / path).read_text().split("\n")

    def likeness(line: str) -> float:
        match = difflib.SequenceMatcher(None, line, text, autojunk=False)
        return sum(block.size for block in match.get_matching_blocks() if block.size > 3)

    return 1 + max(range(len(lines)), key=lambda i: likeness(lines[i]))


@pytest.mark.parametrize(("page", "text"), CASES)
def test_a_sentence_has_the_numbers_of_the_code(page, text):
    if text not in read(ROOT / page).words:
        pytest.fail(f"{page}:{nearest_line(page, text)} must have: {text}")


def test_sizes_of_configs():
    """`kv_lora_rank` and the head sizes are those that the pages name."""
    for config in (sparse_mla.Config, sparse_mla.dense.Config):
        assert default_of(config, "kv_lora_rank") == LATENT
        assert default_of(config, "qk_rope_head_dim") == ROPE


def test_a_wrong_number_is_found_in_its_line():
    line = nearest_line("docs/engines.md", "| head size, dtype, block size | 577, bf16, any |")
    assert "head size, dtype" in (ROOT / "docs/engines.md").read_text().split("\n")[line - 1]
