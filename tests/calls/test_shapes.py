"""Every dimension of every array, one larger and one smaller, and ranks: accepted, or refused with
a text that names the array and its shape (csrc/ops, rule.c, kv_rule.c).
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from bounds import (
    BF16,
    SCALES,
    byte_rows,
    others_are_untouched,
    refuses,
    zeros,
)
from dlpack_producer import Producer
from documented import entries_of
from example import F32, U8, Example
from example_table import DEVICE_ARRAYS, Calls, Refused

import sparse_mla
from sparse_mla import _C, ops

# Sizes of the docstrings that no other array of a call has.
FREE = {"W", "max_pos", "rows", "prefills", "pages", "block_size", "bytes", "n"}
FREE |= {"lightning_indexer_workspace_size"}
# Dimensions that may be larger by one, beside those that docstrings say: some letters stand for a
# size of one array, or examples have rows to spare.
LARGER = {
    ("sparse_mla_dsv4", "seq_lens"): (0,),
    ("sparse_mla_dsv4", "cum_seq_lens_q"): (0,),
    ("sparse_mla_dsv4", "sparse_indices"): (1,),
    ("sparse_attention", "indices"): (1,),
    ("sparse_attention", "extra_indices"): (1,),
    ("dequantize_and_gather_k_cache", "out"): (1,),
    ("top_k_per_row", "logits"): (1,),
    ("build_mixed_sparse_indices", "decode_compressed_indices"): (1,),
    ("indexer_logits", "out"): (1,),
    ("save_partial_states", "ape"): (0,),
    ("fused_qnorm_rope_kv_insert", "q"): (0, 1),
    ("fused_qnorm_rope_kv_insert", "q_out"): (0, 1),
    ("lightning_indexer", "block_table"): (0, 1),
    ("lightning_indexer", "slots_block_table"): (0, 1),
    ("_absorb_q_proj", "W_UK"): (0, 2),
    ("_absorb_o_proj", "W_UV"): (0,),
    ("forward", "block_table"): (0, 1),
    **{("forward", name): (0,) for name in ("q", "topk_indices", "out", "lse", "workspace")},
}


# Dimensions whose sum with this number is the size of another array.
SUMMANDS = {
    ("build_mixed_sparse_indices", "prefill_topk_indices", 0): 2,
    ("mla_attention", "cache_seqlens", 0): 1,
    ("paged_attention", "cache_seqlens", 0): 1,
}


def resized(x: np.ndarray, d: int, by: int) -> np.ndarray:
    """x with one slice more in dimension d, a copy of the last one; or with one slice less."""
    if by < 0:
        return np.take(x, range(x.shape[d] - 1), axis=d)
    return np.concatenate([x, np.take(x, [-1], axis=d)], axis=d)


def documented_dims(example: Example) -> dict[str, list[str]]:
    """The sizes that the operator's docstring says of each array, as it writes them."""
    declared = getattr(ops, example.declared, None)
    if not isinstance(declared, _C.Operator) or example.declared.startswith("_"):
        return {}
    return {array: shapes[0] for array, shapes in entries_of(declared)}


def is_larger_accepted(example: Example, name: str, d: int, ndim: int) -> bool:
    op = example.declared
    if example.is_cache(name) and ndim == 2:  # a flat cache is one page
        return d == 0 and op != "forward"
    if example.is_cache(name):
        return d == 0 or (d == 1 and op not in ("forward", "dequantize_and_gather_k_cache"))
    if name == "slot_mapping" or d in LARGER.get((op, name), ()):
        return True
    shapes = documented_dims(example)
    dims = shapes.get(name, [])
    is_free = len(dims) == ndim and (dims[d].startswith(">= ") or dims[d] in FREE)
    # requests that no other array counts
    return is_free or (
        dims[:1] == ["R"]
        and d == 0
        and sum("R" in " ".join(x).split() for x in shapes.values()) == 1
    )


@pytest.mark.parametrize(("example", "name"), DEVICE_ARRAYS)
def test_every_dimension_one_larger_and_one_smaller(example, name):
    """The size is accepted, or refused with a text that names it; then no other array is written.

    Dimensions that may be larger also have a least size. Tests below check that rule.
    """
    calls = Calls(example, name)
    shape = calls.plain.shape
    for d, by in ((d, by) for d in range(len(shape)) for by in (1, -1)):
        x = resized(calls.plain, d, by)
        got, after = calls.run(x, x)
        if is_larger_accepted(example, name, d, len(shape)):
            assert by < 0 or not isinstance(got, Refused), d
            continue
        if by < 0 and (example.op, name, d) == ("forward", "topk_indices", 1):
            assert not isinstance(got, Refused), "fewer columns than topk_tokens"
            continue
        if by < 0 and (example.op, name, d) == ("sparse_mla_dsv4", "query", 1):
            assert not isinstance(got, Refused), "fewer heads than in out and sinks"
            continue
        if by < 0 and name.endswith("_descale") and d == 0 and shape[0] == 2:
            assert not isinstance(got, Refused), "one row, which both requests share"
            continue
        if by < 0 and example.op == "reshape_and_cache" and name.endswith("_scale"):
            assert not isinstance(got, Refused), "one scale, which both heads share"
            continue
        if by < 0 and (example.op, name) == ("_absorb_q_proj", "W_UK"):
            assert not isinstance(got, Refused), "what q_proj has more is for RoPE"
            continue
        assert isinstance(got, Refused), f"{x.shape} for {shape}"
        assert got.error is ValueError, got
        assert re.match(r"[\w.]+: `[\w\[\]]+` must have .+, got ", got.text), got
        size = x.shape[d] + SUMMANDS.get((example.declared, name, d), 0)
        assert {str(x.shape[d]), str(size)} & {*re.findall(r"\d+", got.text)}, got
        assert others_are_untouched(calls, after)


@pytest.mark.parametrize(("example", "name"), DEVICE_ARRAYS)
def test_sizes_that_are_minima(example, name):
    """A dimension that may be larger than the docstring's size must not be one smaller."""
    calls = Calls(example, name)
    shapes = documented_dims(example)
    known = {
        dim: example.arrays[other].shape[d]
        for other, dims in shapes.items()
        if other in example.arrays and example.arrays[other].ndim == len(dims)
        for d, dim in enumerate(dims)
    }
    for d, dim in enumerate(shapes.get(name, [])):
        if dim.startswith(">= ") and d < calls.plain.ndim:
            x = np.take(calls.plain, range(known.get(dim.removeprefix(">= "), 1) - 1), axis=d)
            got, after = calls.run(x, x)
            assert isinstance(got, Refused), f"{x.shape} for {dim}"
            assert got.error is ValueError, got
            assert others_are_untouched(calls, after)


@pytest.mark.parametrize(("example", "name"), DEVICE_ARRAYS)
def test_ranks_one_larger_and_one_smaller(example, name):
    if name in SCALES or (example.op == "_split_weight" and name == "weight_scale_inv"):
        return  # one value of any rank
    calls = Calls(example, name)
    plain = calls.plain.copy()
    for x in (plain[..., None], plain[None], plain[0, ...]):
        got, _ = calls.run(x, x)
        is_scale = (example.op, name) == ("fp8_linear", "descale") and plain.ndim == 1
        if is_scale and x.shape in ((*plain.shape, 1), ()):
            continue  # a scale per output has either rank, and one value is a scale, too
        if example.op == "reshape_and_cache" and name.endswith("_scale") and x.shape == ():
            continue
        is_paged = x.ndim in (2, 3) or (x.ndim == 4 and x.shape[2] == 1)
        if example.is_cache(name) and is_paged and x.shape[-1] == calls.plain.shape[-1]:
            continue  # a cache of another layout
        assert isinstance(got, Refused), x.shape
        if (example.op, name) == ("cp_local_positions", "positions") and x.ndim in (1, 2):
            assert "`out` must have " in got.text  # either rank is good
            continue
        who = example.blames(name)
        shown = ", ".join(map(str, x.shape))
        if example.op == "dynamic_per_tensor_quant":
            of_x, of_out = (x.ndim if n == name else calls.plain.ndim for n in ("x", "out"))
            text = f"{who}: `out` must have the {of_x} dimensions of `x`, got {of_out}"
            assert got == Refused(ValueError, text)
        elif example.declared == "mla_attention" and name in ("q", "q[0]") and x.ndim == 4:
            other, rule = "out" if name == "q" else "q[1]", "beside a query of that shape"
            text = f"{who}: `{other}` must have 4 dimensions {rule}, got 3"
            assert got == Refused(ValueError, text)
        else:
            assert got.error is ValueError
            assert got.text.startswith(f"{who}: `{name}` must have "), got
            assert f"got [{shown}]" in got.text or f"got shape [{shown}]" in got.text, got


def test_ranks_of_an_array_of_any_rank():
    quantize = sparse_mla.dynamic_per_tensor_quant
    for ndim in range(9):
        out, _ = quantize(np.ones((1,) * ndim, F32))
        assert out.ndim == ndim
    with refuses("dynamic_per_tensor_quant: `x` must have at most 8 dimensions, got 9"):
        quantize(np.ones((1,) * 9, F32))
    with refuses("dynamic_per_tensor_quant: `out` must have at most 8 dimensions, got 9"):
        quantize(np.ones((1,) * 8, F32), out=zeros(*(1,) * 9, dtype=U8))
    for ndim in (9, -1):
        with refuses(f"dynamic_per_tensor_quant: `x` must have at most 8 dimensions, got {ndim}"):
            quantize(Producer(np.ones((1,) * 8, F32), fields={"ndim": ndim}))


@pytest.mark.parametrize("width", [511, 513, 575, 577, 655, 657])
def test_rows_of_a_cache_are_as_wide_as_its_format(width):
    is_bf16 = width < 600
    dtype, rows = (BF16, {576: 576, 512: 512}) if is_bf16 else (U8, {656: 576})
    for row, head_size in rows.items():
        assert sparse_mla.dequantize_kv_cache(zeros(2, row, dtype=dtype)).shape == (2, head_size)
    known = "576 or 512 for format bfloat16" if is_bf16 else byte_rows("dequantize_kv_cache")
    rule = f"must have a last dimension of {known}, got shape [2, {width}]"
    with refuses(f"dequantize_kv_cache: `kv_cache` {rule}"):
        sparse_mla.dequantize_kv_cache(zeros(2, width, dtype=dtype))


def test_a_cache_sizes_what_goes_with_it():
    """The width of cache rows decides that of keys, queries, results and a second cache: 512 values
    without a RoPE part, else 576."""
    rows, indices = zeros(3, 512), np.zeros((2, 1), np.int32)
    with_rope, no_rope = zeros(3, 576), zeros(2, 0)
    hint = ": tokens, and the RoPE values of their keys"
    sparse_mla.concat_and_cache_mla(zeros(2, 512), no_rope, rows, np.arange(2))
    with refuses(f"concat_and_cache_mla: `k_pe` must have shape [any, 0], got [2, 64]{hint}"):
        sparse_mla.concat_and_cache_mla(zeros(2, 512), zeros(2, 64), rows, np.arange(2))
    with refuses(f"concat_and_cache_mla: `k_pe` must have shape [any, 64], got [2, 0]{hint}"):
        sparse_mla.concat_and_cache_mla(zeros(2, 512), no_rope, with_rope, np.arange(2))
    options = {"softmax_scale": 1.0}
    attend = sparse_mla.sparse_attention
    out, _ = attend(zeros(2, 3, 512), rows, indices, **options)
    assert out.shape == (2, 3, 512)
    rule = "got [2, 3, 576]: tokens, heads, and as many values as a cache row"
    with refuses(f"sparse_attention: `q` must have shape [any, any, 512], {rule}"):
        attend(zeros(2, 3, 576), rows, indices, **options)
    rule = "must be one array [tokens, heads, 512] for keys of 512 values, got a pair"
    for q_pe in (zeros(2, 3, 0), zeros(2, 3, 64)):
        with refuses(f"sparse_attention: `q` {rule}"):
            attend((zeros(2, 3, 512), q_pe), rows, indices, **options)
    for wide, other, got in (
        (576, rows, 512),
        (512, with_rope, 576),
        (512, zeros(3, 656, dtype=U8), 576),
    ):
        kv = zeros(3, wide)
        rule = f"must have keys of {wide} values, as `kv_cache` has, got {got}"
        with refuses(f"sparse_attention: `extra_kv_cache` {rule}"):
            attend(
                zeros(2, 3, wide),
                kv,
                indices,
                extra_kv_cache=other,
                extra_indices=indices,
                **options,
            )
        attend(zeros(2, 3, wide), kv, indices, extra_kv_cache=kv, extra_indices=indices, **options)
    out = zeros(4, 512)
    starts, lens, table = np.zeros(1, np.int32), np.full(1, 3, np.int32), np.zeros((1, 1), np.int32)
    sparse_mla.gather_kv_cache(zeros(1, 3, 512), table, lens, starts, out=out)
    with refuses("gather_kv_cache: `out` must have shape [any, 576], got [4, 512]"):
        sparse_mla.gather_kv_cache(zeros(1, 3, 576), table, lens, starts, out=out)


def test_a_scale_of_minus_one():
    """-1 is a scale like any other, although C uses -1 for numbers that are not given."""
    q = np.linspace(-1, 1, 2 * 3 * 576).reshape(2, 3, 576).astype(BF16)
    kv = np.linspace(1, -2, 5 * 576).reshape(5, 576).astype(BF16)
    indices = np.array([[0, 4, 2], [1, 3, 0]], np.int32)
    got = sparse_mla.sparse_attention(q, kv, indices, softmax_scale=-1.0)
    want = sparse_mla.sparse_attention(-q, kv, indices, softmax_scale=1.0)
    for x, y in zip(got, want, strict=True):
        assert x.tobytes() == y.tobytes()


def test_pages_have_a_token_and_one_head():
    sizes = "[pages, block_size, 576], [pages, block_size, 1, 576] or [tokens, 576]"
    who = "dequantize_kv_cache: `kv_cache` must have"
    assert sparse_mla.dequantize_kv_cache(zeros(2, 1, 1, 576)).shape == (2, 1, 576)
    assert sparse_mla.dequantize_kv_cache(zeros(0, 1, 576)).shape == (0, 1, 576)
    assert sparse_mla.dequantize_kv_cache(zeros(0, 576)).shape == (0, 576)
    for shape in ((2, 1, 2, 576), (2, 1, 0, 576), (576,), (2, 1, 1, 1, 576)):
        with refuses(f"{who} shape {sizes}, got {list(shape)}"):
            sparse_mla.dequantize_kv_cache(zeros(*shape))
    with refuses(f"{who} at least one token per page, got shape [2, 0, 576]"):
        sparse_mla.dequantize_kv_cache(zeros(2, 0, 576))


def test_tokens_have_rows():
    """kv_c and k_pe need one row per entry of slot_mapping; one row less is refused."""
    cache, slots = zeros(9, 576), np.arange(4)
    write = sparse_mla.concat_and_cache_mla
    write(zeros(4, 512), zeros(4, 64), cache, slots)
    rule = "must have at least one row per entry of `slot_mapping` (4), got 3"
    with refuses(f"concat_and_cache_mla: `kv_c` {rule}"):
        write(zeros(3, 512), zeros(4, 64), cache, slots)
    with refuses(f"concat_and_cache_mla: `k_pe` {rule}"):
        write(zeros(4, 512), zeros(3, 64), cache, slots)
