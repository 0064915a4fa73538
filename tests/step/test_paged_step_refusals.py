"""sparse_mla.paged refuses bad input by a text that names the argument, and writes nothing."""

from __future__ import annotations

import copy
import pickle

import device
import numpy as np
import pytest
from helpers import assert_error_text
from paged_steps import paged

I32 = np.int32
ROWS = np.arange(64, dtype=I32).reshape(4, 16)
LIMITS = {"max_bs": 2, "max_num_tokens": 8, "max_context_len": 12, "page_size": 4}
DRAFTS = {"num_draft_tokens": 3, "speculative_num_steps": 2}
TREE = DRAFTS | {"topk": 2}
MASK = np.ones(3 * 8, bool)  # a request of 5 tokens
LOCS = np.arange(4)

put = device.Journey().put if device.DEVICE != "cpu" else lambda x: x


def ints(*values) -> np.ndarray:
    return np.array(values, I32)


def make(mapping=None, rows=ROWS, **changes):
    config = paged.Config(**(LIMITS | changes), device=device.NAME)
    return paged.MetadataBuilder(config, put(rows), full_to_swa_index_mapping=put(mapping))


def build(builder, mode="decode", lens=(5,), pool=(0,), **given):
    lens, pool = ints(*lens), ints(*pool)
    twins = {"seq_lens_cpu": lens}
    for name in ("extend_seq_lens", "encoder_lens"):
        if name in given:
            twins[f"{name}_cpu"] = given[name][: len(lens)]
    moved = {name: put(x) for name, x in given.items()}
    return builder.build(mode, put(lens), put(pool), **(twins | moved))


# name of the argument, what the builder has, and the call
CASES = [
    ("mode", {}, {"mode": "prefill"}),
    ("mode", {}, {"mode": "target_verify"}),
    ("mode", {}, {"mode": "draft_extend"}),
    ("spec_step", {}, {"spec_step": 0}),
    ("spec_step", DRAFTS, {"spec_step": 2}),
    ("spec_step", DRAFTS, {"spec_step": -1}),
    ("spec_step", DRAFTS, {"spec_step": 0, "mode": "extend"}),
    ("seq_lens", {}, {"lens": (1, 1, 1), "pool": (0, 1, 2)}),
    ("seq_lens", {}, {"lens": (13,)}),
    ("req_pool_indices", {}, {"pool": (0, 1)}),
    ("extend_seq_lens", {}, {"extend_seq_lens": ints(1)}),
    ("extend_seq_lens", {}, {"mode": "extend", "extend_seq_lens": ints(1, 1)}),
    ("extend_seq_lens", DRAFTS, {"mode": "draft_extend"}),
    ("custom_mask", TREE, {"mode": "target_verify"}),
    ("custom_mask", TREE, {"mode": "target_verify", "custom_mask": np.ones(24, I32)}),
    ("out_cache_loc", TREE, {"spec_step": 0}),
    ("out_cache_loc", TREE, {"spec_step": 0, "out_cache_loc": np.arange(3)}),
    ("out_cache_loc", TREE, {"spec_step": 0, "out_cache_loc": np.arange(5)}),
    ("out_cache_loc", DRAFTS, {"mode": "target_verify", "out_cache_loc": np.arange(2)}),
    ("out_cache_loc", {}, {"out_cache_loc": np.arange(9)}),
    ("out_cache_loc", {}, {"out_cache_loc": np.arange(0)}),
    ("out_cache_loc", {}, {"out_cache_loc": np.ones(2, np.float32)}),
    ("encoder_lens", {}, {"encoder_lens": ints(1)}),
    ("encoder_lens", {"is_encoder_decoder": True}, {}),
    ("common_prefix_len", {}, {"common_prefix_len": 5}),
    ("common_prefix_len", {}, {"common_prefix_len": -1}),
    ("common_prefix_len", {"sliding_window_size": 3}, {"common_prefix_len": 1}),
    ("common_prefix_len", {"attention_chunk": 4}, {"common_prefix_len": 1}),
    ("common_prefix_len", DRAFTS, {"common_prefix_len": 1, "spec_step": 0}),
    (
        "common_prefix_len",
        TREE,
        {"common_prefix_len": 1, "mode": "target_verify", "custom_mask": MASK},
    ),
    (
        "common_prefix_len",
        {"is_encoder_decoder": True},
        {"common_prefix_len": 1, "encoder_lens": ints(2)},
    ),
    ("stream", {}, {"stream": "main"}),
]
# Where the host can read lengths and rows.
ON_THE_HOST = [
    ("seq_lens", {"is_encoder_decoder": True}, {"encoder_lens": ints(8)}),
    ("seq_lens", {"max_num_tokens": 4}, {"mode": "extend"}),
    ("req_pool_indices", {}, {"pool": (4,)}),
    ("req_pool_indices", {}, {"pool": (-1,)}),
    ("extend_seq_lens", {}, {"mode": "extend", "extend_seq_lens": ints(6)}),
    ("extend_seq_lens", {}, {"mode": "extend", "extend_seq_lens": ints(-1)}),
    ("extend_seq_lens", {"max_num_tokens": 4}, {"mode": "extend", "extend_seq_lens": ints(5)}),
    ("encoder_lens", {"is_encoder_decoder": True}, {"encoder_lens": ints(-1)}),
    ("custom_mask", TREE, {"mode": "target_verify", "custom_mask": MASK[:-1]}),
    ("out_cache_loc", {}, {"mode": "extend", "out_cache_loc": np.arange(4)}),
]


@pytest.mark.parametrize("name, changes, call", CASES + ([] if device.ON_CUDA else ON_THE_HOST))
def test_bad_input(name, changes, call):
    """Nothing is written: the arrays of the last build stay as they are."""
    builder = make(**changes)
    given = {}
    if changes.get("is_encoder_decoder"):
        given["encoder_lens"] = ints(2)
    kept = build(builder, lens=(7,), pool=(3,), **given)
    before = [device.host(x).copy() for x in (kept.cache_seqlens_int32, kept.page_table)]
    with pytest.raises((TypeError, ValueError)) as error:
        build(builder, **call)
    assert_error_text(error.value, "MetadataBuilder.build", {name})
    after = [device.host(x) for x in (kept.cache_seqlens_int32, kept.page_table)]
    assert all((x == y).all() for x, y in zip(before, after, strict=True))


def test_the_pool_must_be_wide_enough():
    builder = make(rows=ROWS[:, :4])
    with pytest.raises(ValueError, match=r"build: `req_to_token` must have a column .*, got 4"):
        build(builder)
    drafts = make(rows=ROWS[:, :7], **DRAFTS)
    build(drafts, lens=(4,), mode="target_verify")
    with pytest.raises(ValueError, match=r"build: `req_to_token` must have a column .*, got 7"):
        build(drafts, mode="target_verify")
    tree = make(rows=ROWS[:, :7], **TREE)
    with pytest.raises(ValueError, match=r"build: `req_to_token` must have a column .*, got 7"):
        build(tree, mode="target_verify", custom_mask=MASK)
    build(tree, lens=(7,), spec_step=1, out_cache_loc=LOCS)  # drafts have slots of their own


def test_a_mapping_stays_one():
    builder = make()
    builder.full_to_swa_index_mapping = put(ints(1, 2))
    with pytest.raises(ValueError, match=r"build: `full_to_swa_index_mapping` must be None"):
        build(builder)
    builder = make(mapping=ints(1, 2))
    builder.full_to_swa_index_mapping = None
    with pytest.raises(ValueError, match=r"build: `full_to_swa_index_mapping` must be given"):
        build(builder)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("attention_chunk", {"attention_chunk": 6}),
        ("attention_chunk", {"attention_chunk": 8, "topk": 2}),
        ("is_encoder_decoder", {"is_encoder_decoder": True, "topk": 2}),
        ("is_encoder_decoder", {"is_encoder_decoder": True, "sliding_window_size": 0}),
    ],
)
def test_bad_configs_of_a_builder(name, changes):
    with pytest.raises(ValueError) as error:
        make(**changes)
    assert_error_text(error.value, "MetadataBuilder", {name})


@pytest.mark.parametrize(
    "name, value",
    [
        *(("max_bs", 0), ("max_num_tokens", 0), ("max_context_len", 0), ("page_size", 0)),
        *(("topk", -1), ("num_draft_tokens", -1), ("speculative_num_steps", 33)),
        *(("attention_chunk", -1), ("sliding_window_size", -2), ("is_encoder_decoder", 2)),
        *(("max_bs", 1.5), ("device", "tpu")),
    ],
)
def test_bad_configs(name, value):
    with pytest.raises((TypeError, ValueError)) as error:
        paged.Config(**(LIMITS | {name: value}))
    assert_error_text(error.value, "Config", {name})


def test_a_draft_in_steps_refuses_what_a_build_refuses():
    config = paged.Config(**(LIMITS | TREE | {"speculative_num_steps": 3}), device=device.NAME)
    draft = paged.MultiStepDraft(config, put(ROWS))
    with pytest.raises(ValueError, match=r"build: `out_cache_loc` must be given"):
        draft.build(put(ints(5)), put(ints(0)), seq_lens_cpu=[5])


def test_no_config():
    with pytest.raises(TypeError, match=r"MetadataBuilder: `config` must be a paged\.Config"):
        paged.MetadataBuilder(None, ROWS)
    with pytest.raises(TypeError, match=r"build: `seq_lens` must be an array of lengths"):
        make().build("decode", 5, put(ints(0)))


def test_copies():
    builder = make(mapping=ints(1, 2, 3))
    kept = build(builder)
    again = copy.copy(builder)
    assert again.config is builder.config and again.req_to_token is builder.req_to_token
    assert device.host(build(again).page_table).tolist() == device.host(kept.page_table).tolist()
    assert type(copy.copy(paged.MultiStepDraft(builder.config, put(ROWS)))) is paged.MultiStepDraft
    if not device.ON_CUDA:
        pickle.loads(pickle.dumps(builder)).build("decode", ints(5), ints(0))
    with pytest.raises(TypeError, match="copy: `metadata` must be built again"):
        copy.copy(kept)
    assert "page_table=int32[1, 2]" in repr(kept) or device.ON_CUDA
    assert builder.workspace_bytes > 0 and "workspace_bytes" in repr(builder)


@pytest.mark.skipif(device.ON_CUDA, reason="about the CPU")
def test_views_cannot_be_written():
    metadata = build(make())
    with pytest.raises(ValueError, match="read-only"):
        metadata.page_table[0, 0] = 1
