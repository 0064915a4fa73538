"""Random shapes, strides and indices compared with the reference; random arguments, which must give
a result or the error of a rule."""

import os

import cases
import device
import numpy as np
import operators
import pytest
import reference as ref
import reference_plan as plan
from helpers import (
    Guarded,
    assert_merged,
    assert_same_bf16,
    assert_same_bits,
    assert_within_bounds,
    guarded_attention,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from library import sparse_mla

EXAMPLES = int(os.environ.get("SMLA_EXAMPLES", "25" if device.ON_CUDA else "60"))
settings.register_profile(
    "sparse_mla",
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="SMLA_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("sparse_mla")

seeds = st.integers(0, 2**32 - 1)
block_sizes = st.sampled_from([1, 2, 3, 5, 16, 64, 100])
formats = st.sampled_from(["fp8", "bf16"])


# --- against the reference -----------------------------------------------------------------------


@st.composite
def attention_cases(draw):
    fmt = draw(formats)
    layouts = ["paged", "mqa", "flat", "padded", "interleaved", "token_stride", "negative", "zero"]
    data = ["normal", "outlier", "heavy", "monotone", "huge"]
    if fmt == "fp8":
        data += ["pow2", "subnormal"]
    else:
        layouts += ["odd_stride"]
    return cases.AttentionCase(
        T=draw(st.integers(0, 5)),
        H=draw(st.integers(1, 128) if draw(st.booleans()) else st.integers(1, 9)),
        K=draw(st.integers(0, 200)),
        fmt=fmt,
        data=draw(st.sampled_from(data)),
        pages=draw(st.integers(1, 6)),
        block_size=draw(block_sizes),
        layout=draw(st.sampled_from(layouts)),
        q_layout=draw(
            st.sampled_from(
                ["compact", "pair", "pair_views", "head_major", "negative", "odd_stride"]
            )
        ),
        indices=draw(st.sampled_from(["random", "random", "ordered", "all_masked"])),
        topk_length=draw(st.booleans()),
        sink=draw(st.booleans()),
        extra=draw(st.sampled_from([None, None, "fp8", "bf16"])),
        num_splits=draw(st.sampled_from([0, 0, 1, 2, 3, 64])),
        softmax_scale=draw(st.sampled_from([576**-0.5, 1.0, -0.1, 1e-8])),
        seed=draw(seeds),
    )


@given(attention_cases(), st.sampled_from([0, 0, 1, 8]))
def test_attention(case, row_gap):
    made = case.make()
    got = guarded_attention(sparse_mla.sparse_attention, made, row_gap=row_gap)
    assert_within_bounds(made.reference(), got)


@given(
    fmt=formats,
    layout=st.sampled_from(["paged", "mqa", "flat", "padded", "interleaved", "token_stride"]),
    block_size=block_sizes,
    pages=st.integers(1, 5),
    tokens=st.integers(0, 12),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    seed=seeds,
)
def test_cache_write(fmt, layout, block_size, pages, tokens, dtype, seed):
    rng = np.random.default_rng(seed)
    cache = cases.lay_out(cases.make_rows(rng, pages * block_size, fmt), block_size, layout).copy()
    value = (rng.standard_t(1.3, (tokens + 2, 576)) * 10.0 ** rng.integers(-3, 3)).astype("f4")
    joint = ref.to_bf16(value)
    if dtype != "bfloat16":
        joint = np.clip(value, -6e4, 6e4).astype(dtype)
    slots = rng.permutation(pages * block_size)[:tokens].astype(np.int64)
    slots[rng.random(len(slots)) < 0.2] = -1
    want = cache.copy()
    ref.concat_and_cache_mla(joint[:, :512], joint[:, 512:], want, slots)
    sparse_mla.concat_and_cache_mla(joint[:, :512], joint[:, 512:], cache, slots)
    assert_same_bits(cache.view(np.uint8), want.view(np.uint8))


@given(
    fmt=formats,
    block_size=block_sizes,
    lens=st.lists(st.integers(0, 40), max_size=6),
    with_starts=st.booleans(),
    gap=st.integers(0, 9),
    seed=seeds,
)
def test_gather(fmt, block_size, lens, with_starts, gap, seed):
    rng = np.random.default_rng(seed)
    first = rng.integers(0, 2 * block_size + 1, len(lens)).astype(np.int32)
    first = first if with_starts else first * 0
    width = max([0, *(-(-(n + s) // block_size) for n, s in zip(lens, first, strict=True))])
    pages = 7
    cache = cases.lay_out(cases.make_rows(rng, pages * block_size, fmt), block_size, "padded")
    table = rng.integers(0, pages, (len(lens), width)).astype(np.int32)
    order = rng.permutation(len(lens))
    starts = np.zeros(len(lens), np.int32)
    used = 0
    for r in order:
        starts[r] = used
        used += lens[r] + gap
    buffer = Guarded((used, 576), ref.BF16, row_gap=gap)
    want = np.ascontiguousarray(buffer.array).view(np.uint16).copy()
    options = {"seq_starts": first} if with_starts else {}
    lens = np.array(lens, np.int32)
    sparse_mla.gather_kv_cache(cache, table, lens, starts, out=buffer.array, **options)
    ref.gather_kv_cache(cache, table, lens, starts, want, first)
    assert_same_bf16(buffer.check(written=False), want)


@given(
    T=st.integers(0, 8),
    R=st.integers(1, 4),
    W=st.integers(0, 5),
    K=st.integers(0, 70),
    block_size=block_sizes,
    prefill=st.booleans(),
    seed=seeds,
)
def test_index_conversion(T, R, W, K, block_size, prefill, seed):
    rng = np.random.default_rng(seed)
    requests = rng.integers(0, R, T).astype(np.int32)
    table = rng.integers(0 if prefill else -2, 1000, (R, W)).astype(np.int32)
    limit = W * block_size
    topk = rng.integers(-2, limit + 3, (T, K)).astype(np.int32)
    topk[rng.random(topk.shape) < 0.05] = cases.INT32_MAX
    topk[rng.random(topk.shape) < 0.05] = cases.INT32_MIN
    options = {}
    if prefill:
        options["prefill_request_ids"] = rng.integers(-1, 3, T).astype(np.int32)
        options["prefill_workspace_starts"] = rng.integers(0, 10**6, 3).astype(np.int32)
    want = ref.convert_req_index_to_global_index(
        requests, table, topk, block_size=block_size, **options
    )
    got = sparse_mla.convert_req_index_to_global_index(
        requests, table, topk, block_size=block_size, valid_counts=True, **options
    )
    for x, y in zip(got, want, strict=True):
        assert_same_bits(x, y)


@given(
    lens=st.lists(st.integers(0, 6), max_size=10),
    extra=st.integers(0, 3),
    threshold=st.integers(1, 5),
    uniform=st.booleans(),
)
def test_split(lens, extra, threshold, uniform):
    start = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    options = {"decode_threshold": threshold, "require_uniform": uniform}
    tokens = int(start[-1]) + extra
    want = plan.split_decodes_and_prefills(start, tokens, **options)
    assert tuple(sparse_mla.split_decodes_and_prefills(start, tokens, **options)) == want


@given(
    shape=st.tuples(st.integers(0, 5), st.integers(1, 40)),
    spread=st.sampled_from([0.1, 5.0, 500.0]),
    dtype=st.sampled_from([ref.BF16, np.float16, np.float32]),
    seed=seeds,
)
def test_merge(shape, spread, dtype, seed):
    rng = np.random.default_rng(seed)
    state = []
    for _ in range(2):
        value = rng.standard_t(2, (*shape, 512)).astype(np.float32)
        lse = rng.normal(0, spread, shape).astype(np.float32)
        lse[rng.random(shape) < 0.2] = rng.choice([np.inf, -np.inf])
        state += [ref.to_bf16(value) if dtype == ref.BF16 else value.astype(dtype), lse]
    got = sparse_mla.merge_attn_states(*state)
    assert got[0].dtype == dtype
    assert_merged(got, ref.merge_attn_states(*state))


# --- anything at all -----------------------------------------------------------------------------

ALLOWED = (TypeError, ValueError, BufferError, RuntimeError, MemoryError)
DTYPES = [ref.BF16, ref.E4M3, *map(np.dtype, ("u1", "i1", "u2", "i4", "i8", "f2", "f4", "f8", "?"))]


@st.composite
def any_array(draw):
    """Small arrays of any rank, dtype and stride, filled with random bytes."""
    widths = [0, 1, 2, 3, 4, 9, 64, 512, 576, 656]
    shape = draw(st.lists(st.sampled_from(widths[:6]), max_size=4))
    if shape:
        shape[-1] = draw(st.sampled_from(widths))
    dtype = draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(seeds))
    array = np.zeros(shape, dtype)
    if array.size and array.dtype != np.bool_:
        raw = rng.integers(0, 256, array.nbytes, dtype=np.uint8)
        array = np.frombuffer(raw.data, dtype).reshape(shape)
    how = draw(st.sampled_from(["plain", "plain", "reversed", "broadcast", "step", "transposed"]))
    if array.ndim and how == "reversed":
        array = array[::-1]
    elif array.ndim and how == "broadcast" and array.shape[0]:
        array = np.broadcast_to(array[:1], array.shape)
    elif array.ndim and how == "step":
        array = array[..., ::2]
    elif how == "transposed":
        array = array.T
    if draw(st.integers(0, 9)) == 0:
        array = array.view()
        array.flags.writeable = False
    return array


any_scalar = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 130),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.sampled_from(["fp8_ds_mla", "bfloat16", "auto", "cpu", "cuda", "cuda:1", "float32"]),
    st.just(object()),
    st.just([]),
    st.just(()),
    st.lists(st.integers(-5, 5), max_size=4),
)
anything = st.one_of(any_array(), any_array(), any_scalar, st.tuples(any_array(), any_array()))


def try_call(run) -> None:
    try:
        run()
    except ALLOWED as error:
        assert str(error), "an exception without text"


@pytest.mark.parametrize("op", operators.GOOD_CALLS)
@given(data=st.data())
def test_one_or_two_arguments_are_anything(op, data):
    """A good call with one or two arguments replaced by anything gives a result or the exception of
    a rule."""
    call = operators.GOOD_CALLS[op]()
    names = [*call.args, *call.kwargs, "workspace" if op == "sparse_attention" else "out"]
    if not device.ON_CUDA:  # on CUDA an integer would be used as the address of a stream
        names.append("stream")
    for _ in range(data.draw(st.integers(1, 2))):
        call.set(data.draw(st.sampled_from(names)), data.draw(anything))
    try_call(lambda: call.run(sparse_mla))


@pytest.mark.parametrize("op", [*operators.GOOD_CALLS, "dequantize_kv_cache", "split_kv_b_proj"])
@given(
    args=st.lists(anything, max_size=5),
    kwargs=st.dictionaries(
        st.sampled_from(
            ["softmax_scale", "out", "lse", "block_size", "num_heads", "kv_format", "topk_length"]
        ),
        anything,
        max_size=3,
    ),
)
def test_all_arguments_are_anything(op, args, kwargs):
    try_call(lambda: getattr(sparse_mla, op)(*args, **kwargs))


@given(
    op=st.sampled_from(
        [
            "split_decodes_and_prefills",
            "split_prefill_chunks",
            "get_prefill_workspace_size",
            "attention_workspace_size",
        ]
    ),
    args=st.lists(st.one_of(any_scalar, any_array()), max_size=4),
    kwargs=st.dictionaries(
        st.sampled_from(["decode_threshold", "require_uniform", "device", "num_splits"]),
        any_scalar,
        max_size=3,
    ),
)
def test_host_functions_take_anything(op, args, kwargs):
    try_call(lambda: getattr(sparse_mla, op)(*args, **kwargs))


@given(data=st.data())
def test_builder_takes_anything(data):
    batch = cases.make_batch([1, 1, 5], [3, 9, 20])
    config = sparse_mla.Config(
        32,
        softmax_scale=0.1,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=64,
        kv_cache_dtype="fp8_ds_mla",
        topk_tokens=4,
        device=device.NAME,
    )
    builder = sparse_mla.MetadataBuilder(config)
    names = [
        "query_start_loc",
        "seq_lens",
        "slot_mapping",
        "block_table",
        "query_start_loc_cpu",
        "seq_lens_cpu",
        "num_reqs",
        "num_actual_tokens",
        "max_query_len",
        "max_seq_len",
    ]
    changes = {data.draw(st.sampled_from(names)): data.draw(anything)}
    try_call(lambda: builder.build(batch.common(sparse_mla, **changes)))
    builder.build(batch.common(sparse_mla))


@given(
    options=st.dictionaries(
        st.sampled_from(
            [
                "softmax_scale",
                "kv_lora_rank",
                "kv_cache_dtype",
                "block_size",
                "topk_tokens",
                "max_num_seqs",
                "max_model_len",
                "decode_threshold",
                "path",
                "device",
            ]
        ),
        any_scalar.filter(lambda x: not isinstance(x, int) or x < 2**16),
        min_size=1,
        max_size=2,
    )
)
def test_config_takes_anything(options):
    good = {
        "softmax_scale": 0.1,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "device": device.NAME,
    }
    try_call(lambda: sparse_mla.MetadataBuilder(sparse_mla.Config(32, **(good | options))))
