"""sparse_mla.v4: Config, Backend, MetadataBuilder and the contents of Metadata
(csrc/step/plans/plan_v4.c, step_lists.c and step_lists.cu), against a reference in plain
Python."""

from __future__ import annotations

import dataclasses

import device
import numpy as np
import pytest
import reference as ref
import reference_v4 as plan
from device import address, host
from library import sparse_mla

import sparse_mla as package

v4 = sparse_mla.v4
VECTORS = ("req_id_per_token", "positions", "is_valid", "swa_indices", "swa_lens")


def make_config(sizes: plan.Sizes, **changes):
    options = sizes.options() | {"device": device.NAME, "topk_tokens": 16} | changes
    return v4.Config(options.pop("num_heads", 2), **options)


def build(sizes: plan.Sizes, batch: plan.V4Batch, builder=None, **changes):
    builder = builder or v4.MetadataBuilder(make_config(sizes, **changes))
    tables = {"compressed": batch.compressed, "states": batch.states}
    return builder.build(batch.common(sparse_mla), **tables)


def assert_array(got, want, what, dtype=np.int32) -> None:
    got = host(got)
    assert got.dtype == dtype, what
    assert got.tolist() == np.asarray(want).tolist(), what


def assert_layer(got, want: dict, ratio: int, columns: int) -> None:
    for name in ("slot_mapping", "state_slot_mapping", "context_lens"):
        assert_array(getattr(got, name), want[name], f"{name} of ratio {ratio}")
    for name in ("decode_indices", "decode_lens", "prefill_indices"):
        x = getattr(got, name)
        if ratio == 4:
            assert x is None
        elif name == "decode_lens" or want[name]:
            assert_array(x, want[name], f"{name} of ratio {ratio}")
        else:
            assert host(x).shape == (0, columns)


def assert_step(got, sizes: plan.Sizes, batch: plan.V4Batch) -> None:
    """Checks every value that the contract fixes."""
    want = plan.step(sizes, batch)
    counts = plan.split(sizes, batch)
    names = ("num_decodes", "num_prefills", "num_decode_tokens", "num_prefill_tokens")
    assert tuple(getattr(got, name) for name in names) == counts
    longest = max(batch.query_lens[: counts[0]], default=0)
    assert (got.decode.decode_query_len if got.decode else 0) == longest
    assert (got.num_reqs, got.num_actual_tokens) == (len(batch.query_lens), batch.num_tokens)
    assert (got.max_seq_len, got.block_size) == (batch.max_seq_len, sizes.swa_block_size)
    for name in VECTORS:
        if want[name]:
            assert_array(
                getattr(got, name), want[name], name, bool if name == "is_valid" else np.int32
            )
    assert sorted(got.layers) == list(sizes.ratios)
    for ratio in sizes.ratios:
        columns = plan.used_width(sizes, ratio, batch.max_seq_len)
        assert got.layers[ratio].block_size == sizes.block_size // ratio
        assert_layer(got.layers[ratio], plan.layer(sizes, batch, ratio), ratio, columns)
    if 4 in sizes.ratios:
        assert_layer(got.index, plan.layer(sizes, batch, 4), 4, 0)
    else:
        assert got.index is None
    assert_prefill(got, sizes, batch, want)


def assert_prefill(got, sizes, batch, want) -> None:
    num_decodes, num_prefills = plan.split(sizes, batch)[:2]
    if num_prefills == 0:
        assert got.prefill is None
        return
    assert_array(got.prefill.seq_lens, batch.seq_lens[num_decodes:], "prefill.seq_lens")
    assert_array(got.prefill.gather_lens, want["gather_lens"][num_decodes:], "gather_lens")
    chunks = plan.chunks(sizes, batch)
    assert len(got.prefill.chunks) == len(chunks)
    for chunk, (a, b, tokens) in zip(got.prefill.chunks, chunks, strict=True):
        assert (chunk.req_start_idx, chunk.tokens_slice) == (a, tokens)
        assert_array(chunk.seq_lens, batch.seq_lens[num_decodes + a : num_decodes + b], "seq_lens")
        assert_array(
            chunk.gather_lens, want["gather_lens"][num_decodes + a : num_decodes + b], "gather_lens"
        )
        table = batch.block_table[num_decodes + a : num_decodes + b]
        assert_array(chunk.block_table, table, "chunk.block_table")


def simple_batch(query_lens, seq_lens, table, **fields) -> plan.V4Batch:
    lens = np.array(seq_lens, np.int32)
    slots = np.zeros(sum(query_lens), np.int64)
    table = np.array(table, np.int32)
    fields = {"compressed": {}, "states": {}, "max_seq_len": int(lens.max(initial=0))} | fields
    return plan.V4Batch(list(query_lens), lens, slots, table, **fields)


def int32(*rows) -> np.ndarray:
    return np.array(rows, np.int32)


# --- the contract's vectors ----------------------------------------------------------------------


def test_windows_by_hand():
    sizes = plan.Sizes(window=5)
    got = build(sizes, simple_batch([1, 3], [10, 6], [[7, 3, 9], [5, 2, 4]]))
    assert host(got.positions).tolist() == [9, 3, 4, 5]
    assert host(got.swa_indices).tolist() == [
        [13, 14, 15, 36, 37], [20, 21, 22, 23, -1], [20, 21, 22, 23, 8], [21, 22, 23, 8, 9],
    ]  # fmt: skip
    assert host(got.swa_lens).tolist() == [5, 4, 5, 5]


def test_compressed_slots_by_hand():
    sizes = plan.Sizes(block_size=8, ratios=(4,))
    batch = simple_batch([8], [8], [[0, 1]], compressed={4: int32([6, 1])})
    got = build(sizes, batch)
    assert host(got.layers[4].slot_mapping).tolist() == [-1, -1, -1, 12, -1, -1, -1, 13]
    assert got.layers[4].state_slot_mapping is None


def test_gather_lens_by_hand():
    sizes = plan.Sizes(window=128)
    got = build(sizes, simple_batch([2, 3], [5, 300], np.zeros((2, 80))))
    assert host(got.prefill.gather_lens).tolist() == [5, 130]


@pytest.mark.parametrize(
    ("position", "pages", "want"),
    [(255, [4, 9], [8, 9, -1, -1]), (383, [5, 6], [10, 11, 12, -1])],
)
def test_all_groups_of_a_decode_by_hand(position, pages, want):
    sizes = plan.Sizes(block_size=256, ratios=(128,), state_block_sizes={128: 8})
    batch = simple_batch([1], [position + 1], np.zeros((1, 200)), compressed={128: int32(pages)})
    layer = build(sizes, batch).layers[128]
    assert host(layer.decode_indices)[:, :4].tolist() == [want]
    assert (host(layer.decode_indices)[:, 4:] == -1).all()
    assert host(layer.decode_lens).tolist() == [sum(x >= 0 for x in want)]


def test_all_groups_of_a_prefill_by_hand():
    sizes = plan.Sizes(block_size=256, ratios=(128,), state_block_sizes={128: 8})
    batch = simple_batch([2], [128], np.zeros((1, 64)), compressed={128: int32([3])})
    layer = build(sizes, batch).layers[128]
    assert host(layer.prefill_indices)[:, :4].tolist() == [[-1] * 4, [0, -1, -1, -1]]


# --- random batches ------------------------------------------------------------------------------

SIZES = {
    "small": plan.Sizes(),
    "window 1, pages of 1": plan.Sizes(window=1, swa_block_size=1),
    "a window wider than a page": plan.Sizes(window=130, swa_block_size=64),
    "drafts": plan.Sizes(decode_threshold=3),
    "a ratio without an indexer": plan.Sizes(ratios=(16,)),
    "three ratios, odd pages": plan.Sizes(
        ratios=(2, 4, 5), block_size=60, swa_block_size=7, state_block_sizes={2: 1, 4: 3, 5: 64}
    ),
    "no ratio": plan.Sizes(ratios=()),
    "one chunk each": plan.Sizes(prefill_chunk_size=1),
    "a short model": plan.Sizes(max_model_len=430),
}


@pytest.mark.parametrize("path", ["direct", "separate"])
@pytest.mark.parametrize("name", SIZES)
def test_random_batches(name, path):
    """One builder plans all of them, so nothing of a step is left for the next."""
    sizes = SIZES[name]
    rng = np.random.default_rng(list(name.encode()))
    builder = v4.MetadataBuilder(make_config(sizes, path=path))
    for _ in range(25):
        batch = plan.random_batch(rng, sizes)
        got = build(sizes, batch, builder)
        assert got.path == path
        assert_step(got, sizes, batch)


def test_wide_lists():
    """The width grows by powers of two up to what max_model_len needs."""
    sizes = plan.Sizes(ratios=(2,), state_block_sizes={2: 4}, max_model_len=900)
    for max_seq_len, columns in ((1, 128), (257, 128), (258, 256), (514, 512), (900, 512)):
        batch = simple_batch([1], [1], [[0]], compressed={2: int32([0])}, max_seq_len=max_seq_len)
        layer = build(sizes, batch).layers[2]
        assert host(layer.decode_indices).shape == (1, min(columns, 512)), max_seq_len
    sizes.max_model_len = 700
    batch.max_seq_len = 700
    assert host(build(sizes, batch).layers[2].decode_indices).shape == (1, 384)


def test_the_index_has_tables_of_its_own():
    sizes = plan.Sizes()
    rng = np.random.default_rng(4)
    for _ in range(20):
        batch, other = plan.random_batch(rng, sizes), plan.random_batch(rng, sizes)
        rows = len(batch.query_lens)
        tables = {
            "index": plan.random_table(rng, rows, 5, 50),
            "index_states": plan.random_table(rng, rows, 60, 50),
        }
        builder = v4.MetadataBuilder(make_config(sizes))
        for names in ([], ["index"], ["index_states"], ["index", "index_states"]):
            given = {name: tables[name] for name in names}
            got = builder.build(
                batch.common(sparse_mla), compressed=batch.compressed, states=batch.states, **given
            )
            want = plan.layer(sizes, batch, 4, given.get("index"), given.get("index_states"))
            assert_layer(got.index, want, 4, 0)
            assert_layer(got.layers[4], plan.layer(sizes, batch, 4), 4, 0)
        assert other is not batch


def test_ratios_without_tables_are_absent():
    sizes = plan.Sizes()
    batch = plan.random_batch(np.random.default_rng(1), sizes)
    builder = v4.MetadataBuilder(make_config(sizes))
    got = builder.build(batch.common(sparse_mla), compressed={16: batch.compressed[16]})
    assert list(got.layers) == [16]
    assert got.index is None
    assert got.layers[16].state_slot_mapping is None
    assert builder.build(batch.common(sparse_mla)).layers == {}


def test_an_index_alone():
    """The indexer's cache may be all that a step has."""
    sizes = plan.Sizes()
    batch = plan.random_batch(np.random.default_rng(1), sizes)
    builder = v4.MetadataBuilder(make_config(sizes))
    table, states = batch.compressed[4], batch.states[4]
    got = builder.build(batch.common(sparse_mla), index=table, index_states=states)
    assert got.layers == {}
    assert_layer(got.index, plan.layer(sizes, batch, 4), 4, 0)


# --- persistence ---------------------------------------------------------------------------------


def arrays_of(metadata) -> list:
    layer = metadata.layers[16]
    names = ("slot_mapping", "state_slot_mapping", "context_lens", "decode_indices", "decode_lens")
    return [
        *(getattr(metadata, name) for name in VECTORS),
        *(getattr(layer, name) for name in names),
        metadata.index.slot_mapping,
    ]


def test_buffers_keep_their_addresses():
    sizes = plan.Sizes()
    rng = np.random.default_rng(2)
    builder = v4.MetadataBuilder(make_config(sizes))
    seen = set()
    for _ in range(5):
        batch = plan.random_batch(rng, sizes)
        while plan.split(sizes, batch)[2] == 0:
            batch = plan.random_batch(rng, sizes)
        got = build(sizes, batch, builder)
        seen.add(tuple(address(x) for x in arrays_of(got)))
    assert len(seen) == 1


def test_a_shorter_batch_leaves_nothing_of_the_longer_one():
    """Vectors are padded up to max_num_batched_tokens."""
    sizes = plan.Sizes(decode_threshold=200)
    builder = v4.MetadataBuilder(make_config(sizes))
    tables = {"compressed": {4: int32([1] * 8), 16: int32([2] * 8)}, "states": {4: int32([3] * 99)}}
    long = simple_batch([160], [160], np.ones((1, 60)), **tables)
    build(sizes, long, builder)
    got = build(sizes, simple_batch([4], [4], np.ones((1, 60)), **tables), builder)
    size = sizes.max_num_batched_tokens

    def whole(x, dtype=np.int32):
        return device.peek(address(x), size, dtype).tolist()

    layer = got.layers[4]
    assert whole(layer.slot_mapping) == [-1] * 3 + [8] + [-1] * (size - 4)
    assert whole(layer.state_slot_mapping) == [12, 13, 14, 15] + [-1] * (size - 4)
    assert whole(layer.context_lens) == [0] * 3 + [1] + [0] * (size - 4)
    assert whole(got.swa_lens) == [1, 2, 3, 4] + [0] * (size - 4)
    assert whole(got.is_valid, np.uint8) == [1] * 4 + [0] * (size - 4)
    assert whole(got.positions) == [0, 1, 2, 3] + [0] * (size - 4)
    assert whole(got.layers[16].decode_lens) == [0] * size


@pytest.mark.skipif(device.ON_CUDA, reason="a GPU's arrays have no such flag")
def test_arrays_of_metadata_are_read_only():
    got = build(plan.Sizes(), simple_batch([2], [9], [[1, 2, 3]]))
    for x in (got.swa_indices, got.is_valid, got.positions):
        assert not x.flags.writeable


def test_metadata_outlives_its_builder():
    sizes = plan.Sizes()
    batch = plan.random_batch(np.random.default_rng(3), sizes)
    got = build(sizes, batch)
    for seed in range(20):
        build(sizes, plan.random_batch(np.random.default_rng(seed), sizes))
    assert_step(got, sizes, batch)


# --- Config and Backend --------------------------------------------------------------------------

LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64}


def test_defaults_are_the_model_s():
    config = v4.Config(64, **LIMITS)
    assert config.compress_ratios == (4, 128)
    assert config.state_block_sizes == {4: 4, 128: 8}
    assert (config.window, config.topk_tokens, config.block_size) == (128, 512, 256)
    assert config.softmax_scale == 512**-0.5
    assert config.kv_cache_dtype == config.compressed_kv_cache_dtype == "fp8_v4"
    assert hash(config) == hash(v4.Config(64, **LIMITS))


@pytest.mark.parametrize("name", ["auto", "fp8", "fp8_ds_mla", "fp8_v4"])
def test_names_of_the_v4_format(name):
    config = v4.Config(8, kv_cache_dtype=name, **LIMITS)
    assert config.kv_cache_dtype == config.compressed_kv_cache_dtype == "fp8_v4"
    assert v4.Backend.get_kv_cache_shape(3, 64, cache_dtype_str=name) == (3, 64, 584)


def test_ratios_may_be_those_of_all_layers():
    config = v4.Config(8, compress_ratios=[0, 1, 128, 4, 128, 4], **LIMITS)
    assert config.compress_ratios == (4, 128)
    assert v4.Config(8, compress_ratios=[], **LIMITS).compress_ratios == ()


CONFIG_ERRORS = {
    "heads": ({"num_heads": 129}, "`num_heads` must be 1 to 128, got 129"),
    "window": ({"window": 0}, "`window` must be at least 1, got 0"),
    "ratio": ({"compress_ratios": [-1]}, "`compress_ratios` must be at least 0, got -1"),
    "five ratios": ({"compress_ratios": [2, 4, 8, 16, 32]}, "`compress_ratios` must be at most 4"),
    "block size": ({"block_size": 64}, "`block_size` must be a multiple of .* 128, got 64"),
    "state": ({"compress_ratios": [8]}, "`state_block_sizes` must have an entry for ratio 8"),
    "state size": (
        {"state_block_sizes": {4: 0, 128: 8}}, "`state_block_sizes` must be at least 1, got 0",
    ),
    "576 values": ({"kv_cache_dtype": "bf16"}, "`kv_cache_dtype` must be one of .*, got 'bf16'"),
    "fp4": ({"kv_cache_dtype": "fp4_v41"}, "`kv_cache_dtype` must be one of .*, got 'fp4_v41'"),
    "index keys": (
        {"compressed_kv_cache_dtype": "fp8_index"}, "`compressed_kv_cache_dtype` must be one of",
    ),
    "index format": ({"index_cache_dtype": "fp8_v4"}, "`index_cache_dtype` must be one of"),
    "path": ({"path": "mixed"}, "`path` must be None, 'direct' or 'separate', got 'mixed'"),
    "kv_scale": ({"kv_scale": 0.5}, "`kv_scale` must be 1 without a cache of fp8_e4m3, got 0.5"),
    "q_scale": ({"q_scale": 0.0}, "`q_scale` must be > 0, got 0.0"),
    "NaN": ({"q_scale": float("nan")}, "`q_scale` must be finite, got nan"),
    "device": ({"device": "tpu"}, "`device` must be 'cpu', 'cuda' or 'cuda:N', got 'tpu'"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIG_ERRORS)
def test_bad_configs(name):
    changes, rule = CONFIG_ERRORS[name]
    with pytest.raises(ValueError, match=f"^Config: {rule}"):
        v4.Config(**({"num_heads": 8} | LIMITS | changes))


@pytest.mark.parametrize("scale", [1e-46, 1e-40, 1e39])
@pytest.mark.parametrize("name", ["q_scale", "kv_scale"])
def test_scales_are_checked_as_the_floats_that_are_used(name, scale):
    config = v4.Config(8, **LIMITS, kv_cache_dtype="fp8_e4m3", **{name: scale})
    with pytest.raises(ValueError, match=name) as info:
        v4.MetadataBuilder(config)
    rule = f"`{name}` must be a positive normal float32, got {scale:g}"
    assert str(info.value).endswith(rule)


COUNTS = ["window", "topk_tokens", "index_n_heads", "o_groups", "swa_block_size", "max_num_seqs"]
COUNTS += ["max_num_batched_tokens", "max_model_len", "decode_threshold", "prefill_chunk_size"]


@pytest.mark.parametrize("name", ["num_heads", "block_size", *COUNTS])
def test_each_limit_of_a_config_from_both_sides(name):
    usual = {"num_heads": 8, "compress_ratios": ()} | LIMITS
    most = 128 if name == "num_heads" else None
    for good in (1, np.int64(1), most or 1 << 40):
        value = getattr(v4.Config(**usual | {name: good}), name)
        assert (value, type(value)) == (good, int)
    rule = "1 to 128" if most else "at least 1"
    for bad in (0, -1, *([129] if most else [])):
        with pytest.raises(ValueError, match=f"^Config: `{name}` must be {rule}, got {bad}$"):
            v4.Config(**usual | {name: bad})
    for bad in (1.0, None, "1"):
        with pytest.raises(TypeError, match=f"^Config: `{name}` must be an int, got "):
            v4.Config(**usual | {name: bad})


def test_other_options_of_a_config_from_both_sides():
    def make(**changes):
        return v4.Config(**{"num_heads": 8} | LIMITS | changes)

    for name in ("softmax_scale", "q_scale", "kv_scale"):
        value = getattr(make(**{name: 1}), name)
        assert (value, type(value)) == (1, float)
        for bad in (float("nan"), float("inf")):
            with pytest.raises(ValueError, match=f"^Config: `{name}` must be finite, got {bad}$"):
                make(**{name: bad})
    assert make(softmax_scale=0).softmax_scale == 0
    assert make(softmax_scale=-1).softmax_scale == -1
    for name in ("q_scale", "kv_scale"):
        for bad in (0, 0.0, -0.5):
            with pytest.raises(ValueError, match=f"^Config: `{name}` must be > 0, got "):
                make(**{name: bad, "kv_cache_dtype": "fp8_e4m3"})
    for formats in (("fp8_e4m3", "fp8_v4"), ("fp8_v4", "fp8_e4m3"), ("fp8_e4m3", None)):
        names = dict(zip(("kv_cache_dtype", "compressed_kv_cache_dtype"), formats, strict=True))
        assert make(kv_scale=0.5, **names).kv_scale == 0.5
    assert make(q_scale=0.5).q_scale == 0.5
    ratios = (2, 4, 8, 16)
    states = dict.fromkeys(ratios, 1)
    four = make(compress_ratios=iter((16, 1, 2, 0, 4, 8, 2)), state_block_sizes=states | {3: 7})
    assert four.compress_ratios == ratios
    assert four.state_block_sizes == states
    assert four.block_size == 256
    for bad in (0, None, 5, "44"):
        with pytest.raises(TypeError, match=r"^Config: `compress_ratios` must be a sequence, got "):
            make(compress_ratios=bad)
    for bad in (-1, -4):
        with pytest.raises(ValueError, match="`compress_ratios` must be at least 0"):
            make(compress_ratios=[4, bad])
    for bad in (None, [4, 4], 0, ()):
        with pytest.raises(TypeError, match=r"^Config: `state_block_sizes` must be a dict, got "):
            make(state_block_sizes=bad)
    for bad in ({}, {4: 4}, {128: 8}):
        with pytest.raises(ValueError, match="`state_block_sizes` must have an entry for ratio"):
            make(state_block_sizes=bad)
    for name in ("kv_cache_dtype", "compressed_kv_cache_dtype", "index_cache_dtype", "path"):
        for bad in ("", 0, False, "BF16"):
            with pytest.raises(ValueError, match=f"^Config: `{name}` must be .* got {bad!r}$"):
                make(**{name: bad})
    for name in ("kv_cache_dtype", "index_cache_dtype"):
        with pytest.raises(ValueError, match=f"^Config: `{name}` must be one of .* got None$"):
            make(**{name: None})
    split = make(kv_cache_dtype="bfloat16", compressed_kv_cache_dtype="auto")
    assert (split.kv_cache_dtype, split.compressed_kv_cache_dtype) == ("bfloat16", "fp8_v4")
    assert make(kv_cache_dtype="bfloat16").compressed_kv_cache_dtype == "bfloat16"
    for path in ("direct", "separate", None):
        assert make(path=path).path == path


def test_facts_from_both_sides():
    shape, get_bytes = v4.Backend.get_kv_cache_shape, v4.Backend.get_page_bytes
    rows = {"fp8_v4": 584, "bfloat16": 1024, "fp8_e4m3": 512, "fp8_index": 132, "mxfp4_index": 68}
    for name, row in rows.items():
        values = 128 if name.endswith("index") else 512
        elements = row // 2 if name == "bfloat16" else row
        assert shape(3, 8, 1, values, name) == shape(3, 8, 1, None, name) == (3, 8, elements)
        for ratio in (-1, 0, 1):
            assert shape(3, 8, 1, None, name, ratio) == (3, 8, elements)
            assert get_bytes(8, name, ratio, 1) == 8 * row
        for ratio in (2, 8):
            assert shape(3, 8, cache_dtype_str=name, compress_ratio=ratio) == (
                3, 8 // ratio, elements,
            )  # fmt: skip
            assert get_bytes(8, name, ratio, align=1) == 8 // ratio * row
        assert get_bytes(8, name) == get_bytes(8, name, 1, 576) == -(-8 * row // 576) * 576
        for bad in (0, 1, values - 1, 576, 640 - values, False):
            with pytest.raises(ValueError, match=f"`head_size` must be {values}, got {bad!r}"):
                shape(3, 8, head_size=bad, cache_dtype_str=name)
    assert get_bytes(1, "bfloat16", 1, 1024) == 1024
    assert get_bytes(1, "bfloat16", 1, 1023) == 2046
    for bad in (0, 2, -1, None):
        with pytest.raises(ValueError, match=f"`num_kv_heads` must be 1, got {bad!r}"):
            shape(3, 8, bad)
    for bad, ratio in ((0, 1), (-4, 4), (2, 4), (9, 4), (0, 0)):
        for call in (
            lambda: shape(3, bad, compress_ratio=ratio),  # noqa: B023
            lambda: get_bytes(bad, "fp8_v4", ratio),  # noqa: B023
        ):
            with pytest.raises(
                ValueError, match=rf"`block_size` must be a multiple of .* got {bad}"
            ):
                call()
    for bad in ("", "int8", None, 0):
        with pytest.raises(ValueError, match=f"`cache_dtype_str` must be one of .* got {bad!r}"):
            get_bytes(8, bad)
    for bad in (0, -1):
        with pytest.raises(ValueError, match=f"`align` must be at least 1, got {bad}"):
            get_bytes(8, "fp8_v4", 1, bad)


@pytest.mark.parametrize(
    "changes",
    [{"window": 2.5}, {"compress_ratios": 4}, {"softmax_scale": "1"}, {"state_block_sizes": [4]}],
)
def test_config_types(changes):
    with pytest.raises(TypeError, match=rf"^Config: `{next(iter(changes))}` must be"):
        v4.Config(8, **LIMITS, **changes)


def test_page_bytes_are_the_contract_s():
    get = v4.Backend.get_page_bytes
    assert get(256, "fp8_v4", 4) == 37440
    assert get(256, "fp8_v4", 128) == 1728
    assert get(256, "fp8_index", 4) == 8640
    assert get(256, "mxfp4_index", 4) == 4608
    assert get(256, "mxfp4_index", 4, 64) == 4352
    assert get(64, "fp8_v41_split", align=512) == 33792
    assert get(64, "fp4_v41_split", align=256) == 18432
    assert get(64, "bfloat16", align=1) == 64 * 1024


def test_backend_facts():
    backend = v4.Backend
    assert backend.name == "SPARSE_MLA_V4"
    assert backend.is_mla
    assert backend.is_sparse
    assert backend.supported_head_sizes == [512]
    assert not backend.supports_compute_capability(7, 5)
    assert backend.get_kv_cache_shape(5, 256, compress_ratio=128) == (5, 2, 584)
    shape = backend.get_kv_cache_shape(5, 256, 1, 128, "fp8_index", compress_ratio=4)
    assert shape == (5, 64, 132)
    assert backend.get_kv_cache_shape(5, 64, cache_dtype_str="bfloat16") == (5, 64, 512)
    assert backend.get_builder_cls() is package.v4.MetadataBuilder
    assert backend.get_impl_cls() is package.v4.SparseMLA
    for name in backend.supported_kv_cache_dtypes:
        v4.Config(8, kv_cache_dtype=name, **LIMITS)
    for bad in ({"num_kv_heads": 2}, {"head_size": 576}, {"cache_dtype_str": "int8"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            backend.get_kv_cache_shape(5, 64, **bad)
    with pytest.raises(ValueError, match=r"`block_size` must be a multiple of .* 128, got 64"):
        backend.get_page_bytes(64, "fp8_v4", 128)
    with pytest.raises(ValueError, match="`align` must be at least 1, got 0"):
        backend.get_page_bytes(64, "fp8_v4", align=0)


# --- limits --------------------------------------------------------------------------------------

# Two decodes and two prefills; which of them a limit is broken by.
WHO = {"first decode": 0, "last decode": 1, "first prefill": 2, "last prefill": 3}
SMALL = plan.Sizes(
    window=6, max_num_seqs=4, max_num_batched_tokens=17, max_model_len=70, decode_threshold=2
)


class Limits:
    """Batches in which one request alone is at a limit or past it, for one builder."""

    def __init__(self) -> None:
        self.builder = v4.MetadataBuilder(make_config(SMALL))

    def batch(self, lens, seq_lens, **fields) -> plan.V4Batch:
        rows = len(lens)
        table = np.arange(rows * 20).reshape(rows, 20) % 97
        fields = {
            "compressed": {r: int32(*([r, r + 1, r + 2] for _ in lens)) for r in SMALL.ratios},
            "states": {r: (table + r).astype(np.int32) for r in SMALL.ratios},
        } | fields  # fmt: skip
        return simple_batch(lens, seq_lens, table, **fields)

    def accept(self, lens, seq_lens, **fields) -> None:
        batch = self.batch(lens, seq_lens, **fields)
        assert_step(build(SMALL, batch, self.builder), SMALL, batch)

    def refuse(self, rule, lens, seq_lens, max_seq_len=None, **fields) -> None:
        """The step before stays whole."""
        before = self.batch([1, 2, 3], [9, 9, 9])
        got = build(SMALL, before, self.builder)
        batch = self.batch(lens, seq_lens, **fields)
        common = batch.common(sparse_mla)
        if max_seq_len is not None:
            common.max_seq_len = max_seq_len  # too late for the check of the constructor
        tables = {"compressed": batch.compressed, "states": batch.states}
        with pytest.raises(ValueError, match=rf"^MetadataBuilder\.build: {rule}"):
            self.builder.build(common, **tables)
        assert_step(got, SMALL, before)


LENS = [1, 2, 3, 4]


@pytest.mark.parametrize("who", WHO)
def test_contexts_at_their_limits(who):
    """max_model_len, max_seq_len and the query's own length, each by one request."""
    limits, r = Limits(), WHO[who]

    def seq_lens(length, others=8):
        return [length if i == r else others for i in range(4)]

    limits.accept(LENS, seq_lens(70))
    limits.refuse(
        rf"`seq_lens` must be query length to max_model_len \({LENS[r]} to 70\) at request {r}, "
        "got 71", LENS, seq_lens(71),
    )  # fmt: skip
    if not device.ON_CUDA:  # where the tests make the metadata anew, whose own check comes first
        limits.refuse("`seq_lens` must be", LENS, seq_lens(71), max_seq_len=70)
    limits.refuse("`seq_lens` must be", LENS, seq_lens(-1))
    limits.accept(LENS, seq_lens(LENS[r]))
    limits.refuse(f"`seq_lens` must be .* at request {r}, got", LENS, seq_lens(LENS[r] - 1))
    limits.accept(LENS, seq_lens(33), max_seq_len=33)
    limits.accept(LENS, seq_lens(5, others=33), max_seq_len=33)
    if not device.ON_CUDA:  # as above
        limits.refuse(
            r"`max_seq_len` must be at least the longest request \(33\), got 32",
            LENS, seq_lens(33), max_seq_len=32,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("lens", "more"),
    [
        ([17], [18]),
        ([1, 2, 14], [1, 2, 15]),
        ([1, 2, 3, 11], [1, 2, 3, 12]),
        ([1, 2, 11, 3], [1, 2, 12, 3]),
        ([2, 15], [3, 15]),
    ],
)
def test_tokens_at_their_limit(lens, more):
    """max_num_batched_tokens = 17, by a prefill of any place, and by the first request."""
    limits = Limits()
    limits.accept(lens, [20] * len(lens))
    limits.refuse(
        "`num_actual_tokens` must be 0 to max_num_batched_tokens = 17, got 18",
        more, [20] * len(more),
    )  # fmt: skip


def test_decode_tokens_at_their_limit():
    sizes = dataclasses.replace(SMALL, max_num_batched_tokens=8, ratios=())
    for lens in ([2, 2, 2, 2], [1, 2, 2, 3], [2, 6]):
        batch = simple_batch(lens, [9] * len(lens), np.zeros((len(lens), 4)))
        assert_step(build(sizes, batch), sizes, batch)
    for lens in ([2, 2, 2, 3], [1, 2, 2, 4], [2, 7]):
        batch = simple_batch(lens, [9] * len(lens), np.zeros((len(lens), 4)))
        with pytest.raises(ValueError, match=r"max_num_batched_tokens = 8, got 9$"):
            build(sizes, batch)
    batch = simple_batch([2, 2, 2], [9] * 3, np.zeros((3, 4)))  # padding counts, too
    for padding, is_good in ((2, True), (3, False)):
        padded = dataclasses.replace(batch, slot_mapping=np.array([0] * 6 + [-1] * padding))
        if is_good:
            assert_step(build(sizes, padded), sizes, padded)
        else:
            with pytest.raises(ValueError, match=r"max_num_batched_tokens = 8, got 9$"):
                build(sizes, padded)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("num_prefills", [0, 1, 4])
def test_requests_at_their_limit(num_prefills, length):
    """max_num_seqs = 4, by decodes, by one prefill and by prefills alone."""
    limits = Limits()
    decodes = [min(length, 2)] * (4 - num_prefills)
    prefills = [3 if length < 3 else length] * num_prefills
    limits.accept(decodes + prefills, [30] * 4)
    last = prefills[-1] if prefills else decodes[-1]
    limits.refuse(
        "`num_reqs` must be 0 to max_num_seqs = 4, got 5", [*decodes, *prefills, last], [30] * 5
    )


def test_thresholds_of_decodes():
    """decode_threshold = 2: one more token makes a prefill, which no decode may follow."""
    limits = Limits()
    for lens, num_decodes in (([2, 2], 2), ([2, 3], 1), ([3, 3], 0), ([1, 2, 3], 2)):
        limits.accept(lens, [30] * len(lens))
        batch = limits.batch(lens, [30] * len(lens))
        assert build(SMALL, batch, limits.builder).num_decodes == num_decodes
    for lens, at in (([3, 2], 1), ([2, 3, 2], 2), ([3, 3, 3, 1], 3), ([1, 4, 1, 4], 2)):
        limits.refuse(
            rf"`query_start_loc` must have decodes \(at most 2 tokens\) before prefills, got "
            rf"{lens[at]} tokens at request {at} behind a prefill", lens, [30] * len(lens),
        )  # fmt: skip


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("ratio", [4, 16])
def test_tables_at_their_limits(ratio, who):
    """A request whose context ends in the last page of its table, and one or two tokens behind it:
    what has no page is -1. A table of fewer rows than requests is refused."""
    limits, r = Limits(), WHO[who]
    whole = limits.batch(LENS, [8] * 4)
    for length in (63, 64, 65, 66):  # two pages of 32 tokens, and behind them
        lens = [length if i == r else 8 for i in range(4)]
        limits.accept(LENS, lens, compressed=whole.compressed | {ratio: int32(*[[5, 2]] * 4)})
        pages = np.full((4, 64 // SMALL.state_block_sizes[ratio]), 3, np.int32)
        limits.accept(LENS, lens, states=whole.states | {ratio: pages})
    for name in ("compressed", "states"):
        tables = getattr(whole, name)
        limits.refuse(
            rf"`{name}\[{ratio}\]` must have shape \[>= 4, any\], got \[3, ",
            LENS, [8] * 4, **{name: tables | {ratio: tables[ratio][:3]}},
        )  # fmt: skip


@pytest.mark.parametrize("who", WHO)
def test_windows_at_their_limits(who):
    """Contexts of one token less than the window, as many, and one more, of one request."""
    limits, r = Limits(), WHO[who]
    for length in range(4, 16):
        limits.accept(LENS, [length if i == r else 9 for i in range(4)])


# --- errors of a build ---------------------------------------------------------------------------


def test_bad_builds():
    """The errors name their arguments, and the step before them stays valid."""
    sizes = plan.Sizes()
    batch = simple_batch(
        [1, 4], [9, 20], np.zeros((2, 9)), compressed={4: int32([1], [2]), 16: int32([1], [2])},
        states={4: int32([1], [2]), 16: int32([1], [2])},
    )  # fmt: skip
    builder = v4.MetadataBuilder(make_config(sizes))
    got = build(sizes, batch, builder)

    def changed(**fields):
        return dataclasses.replace(batch, **fields)

    errors = [
        (changed(query_lens=[4, 1]), "`query_start_loc` must have decodes"),
        (changed(query_lens=[1, 9]), "`num_actual_tokens` must be at least"),
        (changed(seq_lens=int32(9, 3)), "`seq_lens` must be query length to max_model_len"),
        (changed(seq_lens=int32(9, 2501), max_seq_len=2501), "`seq_lens` must be query length"),
        (changed(block_table=int32([1])), "`block_table` must have shape"),
        (changed(compressed={16: int32([1])}), r"`compressed\[16\]` must have shape .* numbers"),
        (changed(states=batch.states | {4: int32([1])}), r"`states\[4\]` must have shape"),
        (changed(compressed={}), "`compressed` must have a table of each ratio in `states`"),
        (changed(compressed={8: int32([1], [2])}), "`compressed` must have keys among .* got 8"),
        (changed(states={8: int32([1], [2])}), "`states` must have keys among .* got 8"),
    ]
    for bad, rule in errors:
        with pytest.raises(ValueError, match=rf"^\w+(\.build)?: ({rule})"):
            build(sizes, bad, builder)
        assert_step(got, sizes, batch)
    types = [
        (changed(block_table=np.zeros((2, 9))), "`block_table` must be int32"),
        (changed(slot_mapping=np.zeros(5, np.int16)), "`slot_mapping` must be int"),
        (changed(compressed=[int32([1], [2])]), "`compressed` must be a dict of block tables"),
    ]
    for bad, rule in types:
        with pytest.raises(TypeError, match=rf"^\w+(\.build)?: {rule}"):
            build(sizes, bad, builder)
    short = changed(slot_mapping=batch.slot_mapping[:4])
    common = short.common(sparse_mla)
    common.num_actual_tokens = 5
    with pytest.raises(ValueError, match=r"`slot_mapping` must have shape .* a slot per token"):
        builder.build(common)
    assert_step(build(sizes, batch, builder), sizes, batch)


def test_tables_of_an_index_need_its_ratio():
    sizes = plan.Sizes(ratios=(16,))
    batch = simple_batch([1], [9], np.zeros((1, 9)))
    builder = v4.MetadataBuilder(make_config(sizes))
    with pytest.raises(ValueError, match="`index` must be None for a config without compress rat"):
        builder.build(batch.common(sparse_mla), index=int32([1]))


def test_a_builder_takes_its_own_config():
    with pytest.raises(TypeError, match=r"`config` must be a sparse_mla\.v4\.Config, got int"):
        v4.MetadataBuilder(3)
    with pytest.raises(TypeError, match="`common` must be a CommonAttentionMetadata, got int"):
        package.v4.MetadataBuilder(make_config(plan.Sizes())).build(3)


def test_workspaces():
    sizes = plan.Sizes()
    rows = 3 * (2500 // 4 + 6 + 160)
    builder = v4.MetadataBuilder(make_config(sizes, path="separate"))
    assert getattr(builder, "builder", builder).workspace_bytes == rows * 1024
    assert package.v4.MetadataBuilder(make_config(sizes)).workspace_bytes == 0
    config = make_config(sizes, path="separate")
    for shape, rule in (((rows - 1, 512), rf"shape \[>= {rows}, 512\]"), ((rows, 576), "shape")):
        with pytest.raises(ValueError, match=f"^MetadataBuilder: `workspace` must have {rule}"):
            v4.MetadataBuilder(config, workspace=np.zeros(shape, ref.BF16))
    apart = np.zeros((3, rows // 3 + 1, 512), ref.BF16)[:, :-1]
    with pytest.raises(ValueError, match=rf"`workspace` must have shape \[>= {rows}, 512\], got"):
        v4.MetadataBuilder(config, workspace=apart)
    with pytest.raises(TypeError, match="`workspace` must be bfloat16, got float32"):
        v4.MetadataBuilder(config, workspace=np.zeros((rows, 512), np.float32))
    huge = make_config(sizes, path="separate", max_model_len=2**29, prefill_chunk_size=2**10)
    with pytest.raises(ValueError, match=r"`prefill_chunk_size` must make .* 2\^31 rows"):
        v4.MetadataBuilder(huge)
