"""Both sides of every rule of numbers and names: the last value that is accepted, the first that is
refused, and the error text, which names the argument and its value (csrc/ops, chunks.c, csrc/cpu).

Dtypes, shapes, views and overlaps are drawn from examples (test_dtypes.py, test_shapes.py,
test_views.py); other rules are listed here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import operators
import pytest
from bounds import (
    BF16,
    BYTE_FORMATS,
    BYTES,
    HALF_FACTOR,
    HALF_STEP,
    INT32,
    INT64,
    attend,
    attend_to_pages,
    convert,
    cut_local,
    listed,
    refuses,
    split_batch,
    split_weight,
    workspace_size,
    zeros,
)
from cases import int32
from dlpack_producer import Producer
from example import F32, U8

import sparse_mla

COUNT = f"must be 0 to {INT32 - 1}, got "
WINDOW = "`window_size` must have -1 (open) or a number of keys on its {}, got {}"
SHARE = "`cp` must be (rank, ranks, interleave) with 0 <= rank < ranks and interleave >= 1, got {}"
SPLITS = "must be 0 (the plan chooses) or 1 to 64, got "
# The numbers of the operators that build index lists, with their least values.
LIST_NUMBERS = {
    "compute_global_topk_indices_and_lens": {"block_size": 1},
    "top_k_per_row": {"k": 1},
    "combine_topk_swa_indices": dict.fromkeys(("window", "ratio", "align"), 1)
    | dict.fromkeys(("M", "N"), 0),
    "build_mixed_sparse_indices": dict.fromkeys(
        ("swa_block_size", "compressed_block_size", "window", "ratio"), 1
    )
    | {"topk": 0},
}


def index_lists(op: str, **numbers) -> None:
    """A call without tokens, whose lists may have any width."""
    good = operators.GOOD_CALLS[op]()
    empty = np.zeros((0, 3), np.int32)
    for name in ("topk_indices", "decode_swa_indices", "prefill_topk_indices"):
        if name in good.args:
            good.args[name] = empty
    if op == "top_k_per_row":
        good.args["logits"] = empty.astype(np.float32)
    if op == "build_mixed_sparse_indices":
        good.args["decode_compressed_indices"] = good.args["decode_compressed_lens"] = None
    if op == "combine_topk_swa_indices":
        good.args["query_start_loc"] = np.zeros(3, np.int32)
    for name in ("out", "slots", "lens"):
        good.kwargs.pop(name, None)
    for name, value in numbers.items():
        good.set(name, value)
    out, *_, lens = good.run(sparse_mla)
    assert out.shape[0] == len(lens) == 0


def heads(argument: str, op: str, call: Callable) -> tuple:
    """A row of NUMBERS."""
    bad = {n: f"`{argument}` must have 1 to 128 heads, got {n}" for n in (0, 129)}
    return op, call, (1, 128), bad


NUMBERS: dict[str, tuple[str, Callable, tuple, dict[Any, str]]] = {
    # what: (operator, call, accepted values, {refused value: text from the argument's name on})
    "heads of q": heads("q", "sparse_attention", lambda n: attend(H=n)),
    "heads of a pair": heads(
        "q[0]",
        "sparse_attention",
        lambda n: sparse_mla.sparse_attention(
            (zeros(1, n, 512), zeros(1, n, 64)), zeros(1, 1, 576), int32([0]), softmax_scale=1.0
        ),
    ),
    "heads of k_up_proj": heads(
        "q_nope", "k_up_proj", lambda n: sparse_mla.k_up_proj(zeros(1, n, 1), zeros(512, n, 1))
    ),
    "heads of v_up_proj": heads(
        "x", "v_up_proj", lambda n: sparse_mla.v_up_proj(zeros(1, n, 512), zeros(512, n, 1))
    ),
    "groups of o": (
        "grouped_output_projection",
        lambda n: sparse_mla.grouped_output_projection(zeros(1, n, 1), None, zeros(n, 1, 1), None),
        (1, 128),
        {n: f"`o` must have 1 to 128 groups, got {n}" for n in (0, 129)},
    ),
    "heads of a weight": (
        "split_kv_b_proj",
        lambda n: split_weight((512, 3 * n), num_heads=n),
        (1, 128),
        {n: f"`num_heads` must be 1 to 128, got {n}" for n in (0, 129)},
    ),
    "NoPE values of a weight": (
        "split_kv_b_proj",
        lambda n: split_weight((512, 2 + n), qk_nope_head_dim=n),
        (1,),
        {0: f"`qk_nope_head_dim` must be 1 to {INT32 - 1}, got 0"},
    ),
    "most NoPE values": (
        "split_kv_b_proj",
        lambda n: split_weight(qk_nope_head_dim=n),
        (1,),
        {
            INT32 - 1: f"`weight` must have shape [512, {INT32 + 1}] or [{INT32 + 1}, 512] "
            f"(1 heads x ({INT32 - 1} + 2)), got [512, 3]",
            INT32: f"`qk_nope_head_dim` must be 1 to {INT32 - 1}, got {INT32}",
            INT64: f"`qk_nope_head_dim` must fit int64, got {INT64}",
        },
    ),
    "values of a weight": (
        "split_kv_b_proj",
        lambda n: split_weight((512, 1 + min(n, 2)), v_head_dim=n),
        (1, 2),
        {
            0: f"`v_head_dim` must be 1 to {INT32 - 1}, got 0",
            INT32 - 1: f"`weight` must have shape [512, {INT32}] or [{INT32}, 512] "
            f"(1 heads x (1 + {INT32 - 1})), got [512, 3]",
            INT32: f"`v_head_dim` must be 1 to {INT32 - 1}, got {INT32}",
        },
    ),
    "splits": (
        "sparse_attention",
        lambda n: attend(K=70, num_splits=n),
        (0, 1, 2, 63, 64),
        {n: f"`num_splits` {SPLITS}{n}" for n in (-1, 65, INT32 - 1, -INT32)}
        | {n: f"`num_splits` must fit int32, got {n}" for n in (INT32, -INT32 - 1)}
        | {n: f"`num_splits` must fit int64, got {n}" for n in (INT64, -INT64 - 1)},
    ),
    "scale": (
        "sparse_attention",
        lambda x: attend(softmax_scale=x),
        (np.nextafter(HALF_FACTOR, 0), np.nextafter(-HALF_FACTOR, 0), 0.0, 5e-324),
        {
            HALF_FACTOR: "`softmax_scale` must be at most 2.35866e+38 in size, got 2.35866e+38",
            -HALF_FACTOR: "`softmax_scale` must be at most 2.35866e+38 in size, got -2.35866e+38",
            3e38: "`softmax_scale` must be at most 2.35866e+38 in size, got 3e+38",
            HALF_STEP: "`softmax_scale` must be finite, got 3.40282e+38",
            -HALF_STEP: "`softmax_scale` must be finite, got -3.40282e+38",
            np.inf: "`softmax_scale` must be finite, got inf",
            np.nan: "`softmax_scale` must be finite, got nan",
        },
    ),
    "heads of pages": heads("q", "mla_attention", lambda n: attend_to_pages(H=n)),
    "splits of pages": (
        "mla_attention",
        lambda n: attend_to_pages(num_splits=n),
        (0, 1, 64),
        {n: f"`num_splits` {SPLITS}{n}" for n in (-1, 65)}
        | {n: f"`num_splits` must fit int32, got {n}" for n in (INT32, -INT32 - 1)},
    ),
    "scale of pages": (
        "mla_attention",
        lambda x: attend_to_pages(softmax_scale=x),
        (np.nextafter(HALF_FACTOR, 0), 0.0),
        {
            HALF_FACTOR: "`softmax_scale` must be at most 2.35866e+38 in size, got 2.35866e+38",
            HALF_STEP: "`softmax_scale` must be finite, got 3.40282e+38",
            np.nan: "`softmax_scale` must be finite, got nan",
        },
    ),
    **{
        f"window to the {side}": (
            "mla_attention",
            lambda n, i=i: attend_to_pages(window_size=[(n, 0), (0, n)][i]),
            (-1, 0, 1, INT32 - 1),
            {n: WINDOW.format(side, n) for n in (-2, INT32, INT64 - 1, -INT64)}
            | {n: f"`window_size` must fit int64, got {n}" for n in (INT64, -INT64 - 1)},
        )
        for i, side in enumerate(("left", "right"))
    },
    "ints of a window": (
        "mla_attention",
        lambda x: attend_to_pages(window_size=x),
        ((-1, -1), [0, 5]),
        {
            x: f"`window_size` must be a tuple of 2 ints, got {x}"
            for x in ((), (1,), (1, 2, 3), ("a", None, 2))
        },
    ),
    "chunks": (
        "mla_attention",
        lambda n: attend_to_pages(attention_chunk=n),
        (0, 1, INT32 - 1),
        {n: f"`attention_chunk` {COUNT}{n}" for n in (-1, INT32, INT64 - 1)},
    ),
    "softcap": (
        "mla_attention",
        lambda x: attend_to_pages(softcap=x),
        (0.0, -0.0, 2.0**-126, 30, np.nextafter(HALF_FACTOR, 0)),
        {
            HALF_FACTOR: "`softcap` must be at most 2.35866e+38 in size, got 2.35866e+38",
            -1.0: "`softcap` must be 0 (none) or a positive normal float32, got -1",
            -1e-60: "`softcap` must be 0 (none) or a positive normal float32, got -1e-60",
            1e-60: "`softcap` must be 0 (none) or a positive normal float32, got 1e-60",
            2.0**-127: "`softcap` must be 0 (none) or a positive normal float32, got 5.87747e-39",
            HALF_STEP: "`softcap` must be finite, got 3.40282e+38",
            np.inf: "`softcap` must be finite, got inf",
            np.nan: "`softcap` must be finite, got nan",
        },
    ),
    "share of a rank": (
        "mla_attention",
        lambda cp: attend_to_pages(cp=cp),
        (None, (0, 1, 1), (1, 2, 1), (7, 8, 64), (INT32 - 2, INT32 - 1, INT32 - 1), [0, 2, 4]),
        {
            cp: SHARE.format(cp)
            for cp in (
                *((-1, 2, 1), (2, 2, 1), (0, -1, 1), (0, 0, 1), (1, 0, 0), (0, 1, 0), (0, 1, -1)),
                *((0, INT32, 1), (0, 1, INT32)),
            )
        }
        | {(0, 1): "`cp` must be a tuple of 3 ints, got (0, 1)"},
    ),
    **{
        f"{name} of pages": (
            "mla_attention",
            lambda n, name=name: attend_to_pages(**{name: n}),
            (None, 0, 1, INT32 - 1),
            {-1: f"`{name}` must be at least 0, got -1"}
            | {n: f"`{name}` {COUNT}{n}" for n in (INT32, INT64 - 1)},
        )
        for name in ("max_seqlen_q", "max_seqlen_k")
    },
    "page size": (
        "convert_req_index_to_global_index",
        lambda n: convert(block_size=n),
        (1, INT32 - 1),
        {n: f"`block_size` must be 1 to {INT32 - 1}, got {n}" for n in (0, -1, INT32, INT64 - 1)}
        | {n: f"`block_size` must fit int64, got {n}" for n in (INT64, -INT64 - 1)},
    ),
    **{
        f"{name} of index lists": (
            op,
            lambda n, op=op, name=name: index_lists(op, **{name: n}),
            (least, INT32 - 1),
            {
                n: f"`{name}` must be {least} to {INT32 - 1}, got {n}"
                for n in (least - 1, INT32, INT64 - 1)
            }
            | {n: f"`{name}` must fit int64, got {n}" for n in (INT64, -INT64 - 1)},
        )
        for op, names in LIST_NUMBERS.items()
        for name, least in names.items()
    },
    "heads of a workspace": (
        "attention_workspace_size",
        lambda n: workspace_size(num_heads=n),
        (1, 128),
        {n: f"`num_heads` must be 1 to 128, got {n}" for n in (0, 129)},
    ),
    "values of a workspace": (
        "attention_workspace_size",
        lambda n: workspace_size(head_dim_v=n),
        (1, 512),
        {n: f"`head_dim_v` must be 1 to 512, got {n}" for n in (-1, 0, 513, INT32)},
    ),
    "splits of a workspace": (
        "attention_workspace_size",
        lambda n: workspace_size(num_splits=n),
        (0, 64),
        {n: f"`num_splits` {SPLITS}{n}" for n in (-1, 65)}
        | {INT32: f"`num_splits` must fit int32, got {INT32}"},
    ),
    **{
        f"{name} of a workspace": (
            "attention_workspace_size",
            lambda n, name=name: workspace_size(**{name: n}),
            (0, INT32 - 1),
            {n: f"`{name}` {COUNT}{n}" for n in (-1, INT32, INT64 - 1)},
        )
        for name in ("num_tokens", "topk", "extra_topk", "num_keys")
    },
    "decode threshold": (
        "split_decodes_and_prefills",
        lambda n: split_batch(decode_threshold=n),
        (1, INT64 - 1),
        {0: "`decode_threshold` must be at least 1, got 0"},
    ),
    "decode threshold of an order": (
        "reorder_batch",
        lambda n: sparse_mla.reorder_batch([3, 1], decode_threshold=n),
        (1, INT64 - 1),
        {0: "`decode_threshold` must be at least 1, got 0"},
    ),
    "chunk of local attention": (
        "local_attention_batches",
        lambda n: cut_local(attention_chunk=n),
        (2, 8),
        {
            n: f"`attention_chunk` must be a multiple of block_size = 2, 1 to 2147483647, got {n}"
            for n in (-2, 0, 3, INT32 + 1, INT64 - 1)
        },
    ),
    "page of local attention": (
        "local_attention_batches",
        lambda n: cut_local(block_size=n),
        (2, 4),
        {n: f"`block_size` must be at least 1, got {n}" for n in (-1, 0)},
    ),
    "tokens of a batch": (
        "split_decodes_and_prefills",
        lambda n: split_batch((0, 2, 5), n),
        (5, 6, INT64 - 1),
        {4: "`num_actual_tokens` must be at least query_start_loc[-1] = 5, got 4"},
    ),
    "model length": (
        "get_prefill_workspace_size",
        sparse_mla.get_prefill_workspace_size,
        (0, INT32 - 1),
        {n: f"`max_model_len` must be 0 to {INT32 - 1}, got {n}" for n in (-1, INT32)},
    ),
    "stream": (
        "merge_attn_states",
        lambda n: sparse_mla.merge_attn_states(
            *(zeros(1, 1, 1), zeros(1, 1, dtype=F32)) * 2, stream=n
        ),
        (0, 2**64 - 1, -INT64),
        {n: f"`stream` must be a handle of at most 64 bits, got {n}" for n in (2**64, -INT64 - 1)},
    ),
}


@pytest.mark.parametrize("what", NUMBERS)
def test_numbers(what):
    op, call, good, bad = NUMBERS[what]
    for value in good:
        call(value)
    for value, text in bad.items():
        with refuses(f"{op}: {text}"):
            call(value)


def test_workspace_of_the_largest_shapes_does_not_overflow():
    most = INT32 - 1
    sizes = [
        workspace_size(num_tokens=t, num_heads=128, topk=k, extra_topk=e, num_splits=n)
        for t in (1, most)
        for k in (1, most)
        for e in (0, most)
        for n in (0, 64)
    ]
    assert all(0 < size < 2**40 for size in sizes)


def test_sizes_of_results():
    assert sparse_mla.get_prefill_workspace_size(INT32 - 1) == 5 * (INT32 - 1)
    assert split_batch((0, 2, 5), INT64 - 1, decode_threshold=9) == (2, 0, INT64 - 1, 0)


@pytest.mark.parametrize(
    ("starts", "text"),
    [
        ((1,), "must start with 0, got 1"),
        ((-1, 0), "must start with 0, got -1"),
        ((0, 3, 2), "must not decrease, got 2 after 3 at request 1"),
        ((0, -1), "must not decrease, got -1 after 0 at request 0"),
        ((), "must have one entry more than requests, got 0"),
    ],
)
def test_starts_of_queries(starts, text):
    with refuses(f"split_decodes_and_prefills: `query_start_loc` {text}"):
        sparse_mla.split_decodes_and_prefills(starts, 9, decode_threshold=2)


@pytest.mark.parametrize(
    ("starts", "want"),
    [
        ((0,), (0, 0, 9, 0)),
        ((0, 0), (1, 0, 9, 0)),
        ((0, 2, 2), (2, 0, 9, 0)),
        ((0, 3, 3), (0, 2, 0, 9)),
        ((0, 0, 1), (2, 0, 9, 0)),
        ((0, 0, 3), (1, 1, 0, 9)),
        ((0, 2, 3, 3), (3, 0, 9, 0)),
        ((0, 3, 6, 6), (0, 3, 0, 9)),
        ((0, 1, 1, 4, 4, 6), (2, 3, 1, 8)),
        ((0, 2, 4, 4, 4), (4, 0, 9, 0)),
        ((0, 2, 5), (1, 1, 2, 7)),
    ],
)
def test_starts_of_queries_that_are_good(starts, want):
    assert sparse_mla.split_decodes_and_prefills(starts, 9, decode_threshold=2) == want


@pytest.mark.parametrize("most", [0, 1, 7, INT32 - 1])
def test_requests_as_long_as_the_workspace(most):
    split = sparse_mla.split_prefill_chunks
    assert split([most, 0, most], most) == [(0, 2), (2, 3)][: 2 if most else 0] or most == 0
    if most < INT32 - 1:
        with refuses(
            f"split_prefill_chunks: `seq_lens` must fit the workspace of {most} tokens one by one, "
            f"got {most + 1} at request 1 (raise prefill_workspace_tokens)"
        ):
            split([most, most + 1], most)
    with refuses("split_prefill_chunks: `seq_lens` must be >= 0, got -1 at request 1"):
        split([0, -1], most)


def test_a_chunk_is_full_at_the_workspace_not_before():
    split = sparse_mla.split_prefill_chunks
    assert split([3, 4], 7) == [(0, 2)]
    assert split([3, 5], 7) == [(0, 1), (1, 2)]
    assert split([0, 0], 0) == [(0, 2)]


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [576, 656])
def test_names_of_formats(row):
    """All three names are known; names with a letter more or less or in capitals are not."""
    kv = zeros(1, row, dtype=BF16 if row == 576 else U8)
    good = ("auto", "bfloat16") if row == 576 else ("fp8_ds_mla", "fp8_token")
    for name in (*good, None):
        assert sparse_mla.dequantize_kv_cache(kv, kv_format=name).shape == (1, 576)
    names = ("auto", "bfloat16", *BYTE_FORMATS, "fp8_token")
    known = ", ".join(f'"{name}"' for name in names[:-1]) + f' or "{names[-1]}"'
    for name in names:
        for bad in {name[:-1], name + "x", name.upper(), ""} - {*names}:
            rule = f"must be {known}, got {bad!r}"
            with refuses(f"dequantize_kv_cache: `kv_format` {rule}"):
                sparse_mla.dequantize_kv_cache(kv, kv_format=bad)
    for name in {"bfloat16", "fp8_ds_mla"} - set(good):
        dtypes = "bfloat16" if name == "bfloat16" else listed(BYTES)
        got = "uint8" if row == 656 else "bfloat16"
        text = f"dequantize_kv_cache: `kv_cache` must be {dtypes} for format {name}, got {got}"
        with refuses(text, TypeError):
            sparse_mla.dequantize_kv_cache(kv, kv_format=name)


def test_names_of_result_dtypes():
    for name in ("float32", "bfloat16"):
        assert str(sparse_mla.dequantize_kv_cache(zeros(1, 576), dtype=name).dtype) == name
    for name in ("float16", "float3", "float322", "", np.float16, None):
        rule = f'must be "float32" or "bfloat16", got {name!r}'
        with refuses(f"dequantize_kv_cache: `dtype` {rule}"):
            sparse_mla.dequantize_kv_cache(zeros(1, 576), dtype=name)


@pytest.mark.parametrize("name", ["cuda:", "cuda:-1", "cuda:10000", "cuda:1x", "cuda1", "CPU", ""])
def test_names_of_devices(name):
    assert workspace_size() > 0, "on cpu"
    rule = f'must be "cpu", "cuda" or "cuda:N", got {name!r}'
    with refuses(f"attention_workspace_size: `device` {rule}"):
        sparse_mla.attention_workspace_size(1, 1, 1, device=name)
    with pytest.raises(RuntimeError, match=r"^attention_workspace_size: "):
        sparse_mla.attention_workspace_size(1, 1, 1, device="cuda:9999")


@pytest.mark.parametrize("device", [(1, 0), (1, 5), (3, 0), (13, 1)])
def test_memory_that_the_host_can_read_is_the_cpu_s(device):
    out, _ = sparse_mla.sparse_attention(
        zeros(1, 1, 576), zeros(1, 1, 576), Producer(int32([0]), device=device), softmax_scale=1.0
    )
    assert out.shape == (1, 1, 512)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ((2, 0), "cuda:0"),
        ((4, 0), "DLPack device type 4:0"),
        ((12, 1), "DLPack device type 12:1"),
    ],
)
def test_memory_that_it_cannot(device, name):
    with refuses(f"sparse_attention: `indices` must be on cpu like `q`, got {name}"):
        sparse_mla.sparse_attention(
            zeros(1, 1, 576),
            zeros(1, 1, 576),
            Producer(int32([0]), device=device),
            softmax_scale=1.0,
            stream=0,
        )


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_pair_is_two(count):
    q, kv = (zeros(1, 1, 512), zeros(1, 1, 64), zeros(1, 1, 64)), zeros(1, 1, 576)
    for pair in (q[:2], list(q[:2])):
        sparse_mla.sparse_attention(pair, kv, int32([0]), softmax_scale=1.0)
    rule = f"must be an array or the pair (NoPE part, RoPE part), got {count} items"
    with refuses(f"sparse_attention: `q` {rule}", TypeError):
        sparse_mla.sparse_attention(q[:count], kv, int32([0]), softmax_scale=1.0)


def test_formats_of_buffers():
    """A buffer holds numbers in native byte order and has at most 8 dimensions."""
    quantize = sparse_mla.dynamic_per_tensor_quant
    quantize(memoryview(np.ones((1,) * 8, F32)))
    for prefix, buffer in {
        "": np.ones(2, F32),
        "@": memoryview(np.ones(2, F32)).cast("B").cast("@f"),
        "<": (ctypes.c_float.__ctype_le__ * 2)(1, 1),
    }.items():
        assert memoryview(buffer).format == f"{prefix}f"
        codes, scale = quantize(memoryview(buffer))
        assert codes.shape == (2,)
        assert np.asarray(scale) == F32(1) / F32(448)
    with refuses("dynamic_per_tensor_quant: `x` must have at most 8 dimensions, got 9"):
        quantize(memoryview(np.ones((1,) * 9, F32)))
    for bad in (np.ones(2, ">f4"), np.ones(2, "f4,f4"), memoryview(b"ab").cast("c")):
        text = memoryview(bad).format
        rule = f'must have a plain numeric format, got "{text}"'
        with refuses(f"dynamic_per_tensor_quant: `x` {rule}", TypeError):
            quantize(memoryview(bad))
