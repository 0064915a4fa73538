"""Both sides of every rule of the backend layer: its builder, its builds and its forwards
(engine.c, forward.c).
"""

from __future__ import annotations

import cases
import compiled
import engine
import numpy as np
import pytest
from bounds import (
    HALF_FACTOR,
    HALF_STEP,
    INT32,
    refuses,
    zeros,
)
from example import F32
from example_table import TABLE, Refused, outcome_of

import sparse_mla
from sparse_mla import _C

LIMITS = {
    "num_heads": 2,
    "block_size": 4,
    "topk_tokens": 6,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 8,
    "max_model_len": 16,
    "decode_threshold": 1,
    "min_heads_for_bf16_prefill": 32,
    "prefill_workspace_tokens": 0,
}


def builder(path=None, dtype="fp8_ds_mla", workspace=None, device="cpu", **changes):
    names = {"kv_cache_dtype": dtype, "path": path, "device": device, "cp": None}
    return _C.Step("v32", LIMITS | names | changes, workspace)


def test_a_builder_takes_all_fields_of_its_config():
    config = LIMITS | {"kv_cache_dtype": "fp8_ds_mla", "path": None, "device": "cpu"}
    config |= {"cp": (0, 2, 1)}
    _C.Step("v32", config | {"more": 1}, None)
    for name in config:
        rule = f"`config` must have a value of '{name}', got none"
        with refuses(f"MetadataBuilder: {rule}", TypeError):
            _C.Step("v32", {key: x for key, x in config.items() if key != name}, None)
    with refuses('MetadataBuilder: `plan` must be a plan of a step, got "v31"'):
        _C.Step("v31", config, None)


@pytest.mark.parametrize("name", LIMITS)
def test_sizes_of_a_builder(name):
    most = 128 if name == "num_heads" else INT32 - 1
    zero_is_default = name in (
        "decode_threshold",
        "min_heads_for_bf16_prefill",
        "prefill_workspace_tokens",
    )
    builder(**{name: 1})
    with refuses(f"MetadataBuilder: `{name}` must be an int, got str", TypeError):
        builder(**{name: "3"})
    for value in (-1, most + 1) if zero_is_default else (0, most + 1):
        with refuses(f"MetadataBuilder: `{name}` must be 1 to {most}, got {value}"):
            builder(**{name: value})
    if zero_is_default:
        builder(**{name: 0})
    if name in ("num_heads", "block_size", "max_model_len", "decode_threshold") or zero_is_default:
        builder("mixed", **{name: most})


@pytest.mark.parametrize("name", [n for n in LIMITS if n != "num_heads"])
def test_sizes_of_a_config(name):
    sizes = {n: x for n, x in LIMITS.items() if n != "prefill_workspace_tokens"}

    def config(**changes):
        return sparse_mla.Config(softmax_scale=1.0, **(sizes | changes))

    assert getattr(config(**{name: 1}), name) == 1
    with refuses(f"Config: `{name}` must be at least 1, got 0"):
        config(**{name: 0})
    for heads in (1, 128):
        config(num_heads=heads)
    for heads in (0, 129):
        with refuses(f"Config: `num_heads` must be 1 to 128, got {heads}"):
            config(num_heads=heads)


PATHS = {"fp8_ds_mla": ("mixed", "separate", "direct"), "bfloat16": ("bf16",)}


@pytest.mark.parametrize("dtype", PATHS)
def test_paths_serve_their_caches(dtype):
    for path in ("mixed", "separate", "direct", "bf16"):
        if path in PATHS[dtype]:
            builder(path, dtype)
            continue
        served = '"mixed", "separate" or "direct"' if dtype == "fp8_ds_mla" else '"bf16"'
        rule = f'must serve a {dtype} cache ({served}), got "{path}"'
        with refuses(f"MetadataBuilder: `path` {rule}"):
            builder(path, dtype)
    for bad in ("mixe", "mixedd", "auto", "", 1):
        names = '"mixed", "separate", "bf16" or "direct"'
        with refuses(f"MetadataBuilder: `path` must be None, {names}, got {bad!r}"):
            builder(bad, dtype)
    with refuses("MetadataBuilder: `kv_format` must be a known cache format, got 0"):
        builder(None, None)


@pytest.mark.parametrize(("heads", "path"), [(31, "mixed"), (32, "separate"), (33, "separate")])
def test_heads_that_choose_the_path(heads, path):
    for least, moved in ((0, 0), (32, 0), (heads, None), (heads + 1, None)):
        made = builder(num_heads=heads, min_heads_for_bf16_prefill=least)
        plan = compiled.build(made, [0, 1], [1], np.zeros((1, 1), np.int32), 1, 1)
        wanted = path if moved == 0 else ("separate" if least == heads else "mixed")
        assert plan["path"] == wanted


def test_a_workspace_of_the_caller():
    """The workspace needs prefill_workspace_tokens rows, one at least; for 0 it is used in full."""
    for rows, asked, tokens in ((5, 5, 5), (6, 5, 5), (5, 0, 5), (1, 0, 1)):
        made = builder("separate", workspace=zeros(rows, 576), prefill_workspace_tokens=asked)
        assert made.workspace_bytes == tokens * 1152
    for rows, asked, least in ((4, 5, 5), (0, 0, 1)):
        rule = f"must have shape [>= {least}, 576], got [{rows}, 576]"
        with refuses(f"MetadataBuilder: `workspace` {rule}"):
            builder("separate", workspace=zeros(rows, 576), prefill_workspace_tokens=asked)


def build(lens=(1, 1), seq_lens=None, *, tokens=None, table=(3, 4), num_reqs=None, **options):
    starts = [0, *np.cumsum(lens).tolist()]
    seq_lens = list(lens) if seq_lens is None else seq_lens
    made = builder(**({"path": "separate"} | options))
    num_reqs = len(lens) if num_reqs is None else num_reqs
    tokens = starts[-1] if tokens is None else tokens
    return compiled.build(made, starts, seq_lens, np.zeros(table, np.int32), num_reqs, tokens)


BUILDS = {
    # what: (good, bad, text)
    "requests": (
        {"lens": (1, 1, 1)},
        {"lens": (1, 1, 1, 1), "table": (4, 4)},
        "`num_reqs` must be 0 to max_num_seqs = 3, got 4",
    ),
    "tokens": (
        {"tokens": 8},
        {"tokens": 9},
        "`num_actual_tokens` must be 0 to max_num_batched_tokens = 8, got 9",
    ),
    "tokens below 0": (
        {"lens": (), "tokens": 0},
        {"lens": (), "tokens": -1},
        "`num_actual_tokens` must be 0 to max_num_batched_tokens = 8, got -1",
    ),
    "tokens without requests": (
        {"lens": (), "tokens": 0},
        {"lens": (), "tokens": 1},
        "`num_actual_tokens` must be 0 without requests, got 1",
    ),
    "tokens of the queries": (
        {"tokens": 2},
        {"tokens": 1},
        "`num_actual_tokens` must be at least query_start_loc[-1] = 2, got 1",
    ),
    "rows of the table": (
        {"table": (2, 4)},
        {"table": (1, 4)},
        "`block_table` must have shape [>= 2, any], got [1, 4]: a row of page numbers per request",
    ),
    "columns of the table": (
        {"seq_lens": (8, 1), "table": (2, 2)},
        {"seq_lens": (9, 1), "table": (2, 2)},
        "`block_table` must have at least 3 columns for the 9 tokens of request 0, got 2",
    ),
    "a sequence as short as its query": (
        {"lens": (1, 3), "seq_lens": (1, 3)},
        {"lens": (1, 3), "seq_lens": (1, 2)},
        "`seq_lens` must be query length to max_model_len (3 to 16) at request 1, got 2: context "
        "and query together",
    ),
    "the longest sequence": (
        {"seq_lens": (1, 16)},
        {"seq_lens": (1, 17), "table": (2, 9)},
        "`seq_lens` must be query length to max_model_len (1 to 16) at request 1, got 17: context "
        "and query together",
    ),
    "decodes first": (
        {"lens": (1, 2, 2), "seq_lens": (4, 4, 4)},
        {"lens": (2, 1), "seq_lens": (4, 4)},
        "`query_start_loc` must have decodes (at most 1 tokens) before prefills, got 1 tokens at "
        "request 1 behind a prefill: sort the batch by query length",
    ),
    "entries of the lengths": (
        {},
        {"seq_lens": (1,)},
        "`seq_lens_cpu` must be of the 2 requests of `num_reqs`, got those of 1",
    ),
    "entries of the starts": (
        {},
        {"num_reqs": 1},
        "`query_start_loc_cpu` must be of the 1 requests of `num_reqs`, got those of 2",
    ),
}


@pytest.mark.parametrize("what", BUILDS)
def test_steps(what):
    good, bad, text = BUILDS[what]
    build(**good)
    with refuses(f"MetadataBuilder.build: {text}"):
        build(**bad)


def test_a_prefill_as_long_as_the_workspace():
    options = {"lens": (1, 4), "prefill_workspace_tokens": 9}
    assert build(seq_lens=(16, 9), **options)["chunks"] == [(0, 1, 1, 5, 9)]
    with refuses(
        "MetadataBuilder.build: `seq_lens` must fit the workspace of 9 tokens one by one, got 10 "
        "at request 1 (raise prefill_workspace_tokens)"
    ):
        build(seq_lens=(16, 10), **options)


FORWARDS = {
    # what: (accepted arrays, refused arrays, error text)
    "columns of topk": (
        lambda a: {"topk_indices": np.repeat(a["topk_indices"], 2, 1)[:, :6]},
        lambda a: {"topk_indices": np.repeat(a["topk_indices"], 2, 1)[:, :7]},
        "`topk_indices` must have at most topk_tokens = 6 columns, got 7",
    ),
    "tokens of q": (
        lambda a: {"q": a["q"][[*range(7), 0]]},
        lambda a: {"q": a["q"][:6], "out": None, "lse": None},
        "`q` must have shape [>= 7, 2, 576], got [6, 2, 576]: tokens, heads, 512 latent and 64 "
        "RoPE values",
    ),
    "tokens of topk": (
        lambda a: {"topk_indices": a["topk_indices"][[*range(7), 0]]},
        lambda a: {"topk_indices": a["topk_indices"][:6]},
        "`topk_indices` must have shape [>= 7, any], got [6, 6]",
    ),
    "rows of out": (
        lambda a: {"out": zeros(8, 2, 512)},
        lambda a: {"out": zeros(6, 2, 512)},
        "`out` must have shape [>= 7, 2, 512], got [6, 2, 512]",
    ),
    "rows of lse": (
        lambda a: {"lse": zeros(8, 2, dtype=F32)},
        lambda a: {"lse": zeros(6, 2, dtype=F32)},
        "`lse` must have shape [>= 7, 2], got [6, 2]",
    ),
    "heads of lse": (
        lambda a: {"lse": zeros(7, 2, dtype=F32)},
        lambda a: {"lse": zeros(7, 3, dtype=F32)},
        "`lse` must have shape [>= 7, 2], got [7, 3]",
    ),
    "sinks": (
        lambda a: {"attn_sink": None},
        lambda a: {"attn_sink": zeros(3, dtype=F32)},
        "`attn_sink` must have shape [2], got [3]",
    ),
    "tokens per page": (
        lambda a: {"kv_cache": a["kv_cache"][:, :4]},
        lambda a: {"kv_cache": a["kv_cache"][:, :3]},
        "`kv_cache` must have pages of block_size = 4 tokens, got 3",
    ),
}


@pytest.mark.parametrize("title", ["step, separate", "step, direct", "step, bf16"])
@pytest.mark.parametrize("what", FORWARDS)
def test_forwards(what, title):
    good, bad, text = FORWARDS[what]
    example = TABLE[title]

    def fresh():
        return {n: x.copy() for n, x in example.arrays.items()}

    got = outcome_of(example, fresh() | good(example.arrays))
    assert not isinstance(got, Refused), got
    got = outcome_of(example, fresh() | bad(example.arrays))
    assert got == Refused(ValueError, f"forward: {text}")


def test_a_step_is_the_latest_one():
    example = engine.make_step(cases.make_batch([1], [4], block_size=4), 2, topk=6)
    made = builder("mixed")
    batch = example.batch
    plans = [
        compiled.build(made, batch.query_start_loc, batch.seq_lens, batch.block_table, 1, 1)
        for _ in range(2)
    ]
    arguments = (example.q, example.fp8_cache, example.topk_indices, None, None, None)
    assert [plan["generation"] for plan in plans] == [1, 2]
    for bad in (1, 3):
        rule = "must come from its builder's latest build (number 2), got that of build"
        with refuses(f"forward: `metadata` {rule} {bad}"):
            compiled.forward(made, *arguments, 0.1, bad, None)
    for scale in (np.inf, HALF_STEP):
        with refuses(f"forward: `softmax_scale` must be finite, got {scale:g}"):
            compiled.forward(made, *arguments, scale, 2, None)
    with refuses("forward: `softmax_scale` must be at most 2.35866e+38 in size, got 2.35866e+38"):
        compiled.forward(made, *arguments, HALF_FACTOR, 2, None)
    compiled.forward(made, *arguments, np.nextafter(HALF_FACTOR, 0), 2, None)
    compiled.forward(made, *arguments, 0.1, 2, None)
