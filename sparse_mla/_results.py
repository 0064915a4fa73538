"""What operators return, for frameworks that must know it before the call: shapes and dtypes.

Each function here is the rule of an operator of sparse_mla.ops. Sizes may be symbolic. A rule
checks only what a result's shape depends on, with the error texts of the C core; the call itself
checks everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sparse_mla import _C

# Last dimension of a cache -> number of values in each of its keys.
HEAD_SIZES = {row: size for rows in _C.KV_FORMATS.values() for row, size in rows.items()}

KV_LORA_RANK = 512  # values that attention gives each head

# Shape and dtype; and strides where a new result is not contiguous.
Result = tuple[tuple[Any, ...], str] | tuple[tuple[Any, ...], str, tuple[Any, ...]]


class Given:
    """The arguments of a call, by their names in the operator's table."""

    def __init__(self, op: str, values: Mapping[str, Any]) -> None:
        self.op = op
        self.values = values

    def sizes(self, name: str, *ranks: int) -> tuple[Any, ...]:
        """The shape of an array, which must have one of these ranks if any are named."""
        shape: Sequence[Any] = self.values[name].shape
        if ranks and len(shape) not in ranks:
            wanted = " or ".join(str(rank) for rank in ranks)
            text = f"{self.op}: `{name}` must have {wanted} dimensions, got {len(shape)}"
            raise ValueError(text)
        return tuple(shape)

    def dtype(self, name: str) -> str:
        return str(self.values[name].dtype).removeprefix("torch.")


def dtype_name(dtype: Any) -> str:
    """The name of a dtype, which is a name already or a dtype object of any framework."""
    if isinstance(dtype, type) or hasattr(dtype, "dtype"):  # np.float32; JAX's are objects
        dtype = np.dtype(dtype)
    return str(dtype).removeprefix("torch.")


Rule = Callable[[Given], tuple[Result, ...]]


def none(given: Given) -> tuple[Result, ...]:
    """The rule of operators that return an array of the caller only."""
    return ()


def _head_size(given: Given, name: str, row: Any) -> int:
    for known, head_size in HEAD_SIZES.items():
        if known == row:  # no lookup in the dict, because `row` may be symbolic
            return head_size
    wanted = " or ".join(map(str, HEAD_SIZES))
    text = f"{given.op}: `{name}` must have a last dimension of {wanted}, got {row}"
    raise ValueError(text)


def dequantized(given: Given) -> tuple[Result, ...]:
    dtype = given.values["dtype"]
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f'{given.op}: `dtype` must be "float32" or "bfloat16", got {dtype!r}')
    sizes = given.sizes("kv_cache", 2, 3, 4)
    kv_format, block_size = given.values["kv_format"], given.values["block_size"]
    if len(sizes) == 2 and kv_format in _C.SPLIT_KV_FORMATS:
        if block_size is None:
            text = f"{given.op}: `kv_cache` must come with block_size= for pages of {kv_format}"
            raise ValueError(f"{text} as [pages, bytes], got none for shape {list(sizes)}")
        (head_size,) = _C.KV_FORMATS[kv_format].values()
        return (((sizes[0], block_size, head_size), dtype),)
    head_size = _head_size(given, "kv_cache", sizes[-1])
    return (((*(sizes[:1] if len(sizes) == 2 else sizes[:2]), head_size), dtype),)


def slots(given: Given) -> tuple[Result, ...]:
    """(out, counts)."""
    sizes = given.sizes("topk_indices", 2)
    return (sizes, "int32"), (sizes[:1], "int32")


def global_topk(given: Given) -> tuple[Result, ...]:
    """(out, lens)."""
    sizes = given.sizes("topk_indices", 2)
    return (sizes, "int32"), (sizes[:1], "int32")


def _chosen(given: Given, num_tokens: Any) -> tuple[Result, ...]:
    """(out, slots, lens)."""
    k = given.values["k"]
    if k < 1:
        raise ValueError(f"{given.op}: `k` must be 1 to {2**31 - 1}, got {k}")
    return ((num_tokens, k), "int32"), ((num_tokens, k), "int32"), ((num_tokens,), "int32")


def top_k(given: Given) -> tuple[Result, ...]:
    """(out, slots, lens)."""
    return _chosen(given, given.sizes("logits", 2)[0])


def lightning(given: Given) -> tuple[Result, ...]:
    """(out, slots, lens)."""
    return _chosen(given, given.sizes("q", 3)[0])


def combined(given: Given) -> tuple[Result, ...]:
    """(out, lens)."""
    num_tokens = given.sizes("topk_indices", 2)[0]
    align = given.values["align"]
    if align < 1:
        raise ValueError(f"{given.op}: `align` must be 1 to {2**31 - 1}, got {align}")
    width = -(-(given.values["topk"] + given.values["window"]) // align) * align
    return ((num_tokens, width), "int32"), ((num_tokens,), "int32")


def mixed(given: Given) -> tuple[Result, ...]:
    """(out, lens)."""
    values = given.values
    decode, compressed, prefill = (
        (0, 0) if values[name] is None else given.sizes(name, 2)
        for name in (
            "decode_swa_indices",
            "decode_compressed_indices",
            "prefill_topk_indices",
        )
    )
    num_tokens = decode[0] + prefill[0]
    if values["prefill_topk_indices"] is None:
        (num_tokens,) = given.sizes("req_id_per_token", 1)
    width = values["window"] + -(-max(values["topk"], compressed[1]) // 4) * 4
    return ((num_tokens, width), "int32"), ((num_tokens,), "int32")


def attended(given: Given) -> tuple[Result, ...]:
    """(out, lse, max_logits)."""
    heads = given.sizes("q", 3)[:2]
    return ((*heads, KV_LORA_RANK), "bfloat16"), (heads, "float32"), (heads, "float32")


def attended_dsv4(given: Given) -> tuple[Result, ...]:
    return (((*given.sizes("query", 3)[:2], KV_LORA_RANK), "bfloat16"),)


def merged(given: Given) -> tuple[Result, ...]:
    """(out, lse)."""
    sizes = given.sizes("out_a", 3)
    return (sizes, given.dtype("out_a")), (sizes[:2], "float32")


def latents(given: Given) -> tuple[Result, ...]:
    return (((*given.sizes("q_nope", 3)[:2], KV_LORA_RANK), "bfloat16"),)


def projected_values(given: Given) -> tuple[Result, ...]:
    columns = given.sizes("W_UV", 3)[2]
    return (((*given.sizes("x", 3)[:2], columns), "bfloat16"),)


def grouped(given: Given) -> tuple[Result, ...]:
    outputs = given.sizes("weight", 3)[1]
    return (((*given.sizes("o", 3)[:2], outputs), "bfloat16"),)


def quantized(given: Given) -> tuple[Result, ...]:
    """(out, scale)."""
    return (given.sizes("x"), "float8_e4m3fn"), ((), "float32")


def normalized(given: Given) -> tuple[Result, ...]:
    """(q_out, kv_out)."""
    return (given.sizes("q", 2), "bfloat16"), (given.sizes("kv", 2), "bfloat16")


def inserted(given: Given) -> tuple[Result, ...]:
    """q_out, where it is new."""
    is_bf16 = given.values["q_scale_inv"] is None
    return ((given.sizes("q", 3), "bfloat16" if is_bf16 else "float8_e4m3fn"),)


def turned_back(given: Given) -> tuple[Result, ...]:
    """(out, out_scale)."""
    tokens, heads = given.sizes("o", 3)[:2]
    groups, layout = given.values["groups"], given.values["scale_layout"]
    if not 1 <= groups <= 128:
        raise ValueError(f"{given.op}: `groups` must be 1 to 128, got {groups}")
    if heads % groups != 0:
        rule = f"have a multiple of {groups} heads (`groups`)"
        raise ValueError(f"{given.op}: `o` must {rule}, got {heads}")
    if layout not in ("fp32", "ue8m0x4"):
        raise ValueError(f'{given.op}: `scale_layout` must be "fp32" or "ue8m0x4", got {layout!r}')
    quantizes = given.values["quantize"] or given.values.get("out_scale") is not None
    values = heads // groups * KV_LORA_RANK
    columns = heads // groups * (4 if layout == "fp32" else 1)
    rows = (tokens + 3) // 4 * 4
    return (
        (
            (tokens, groups, values),
            "float8_e4m3fn" if quantizes else "bfloat16",
            (values, tokens * values, 1),
        ),
        (
            (tokens, groups, columns),
            "float32" if layout == "fp32" else "int32",
            (1, columns * rows, rows),
        ),
    )


def index_query(given: Given) -> tuple[Result, ...]:
    """(out, out_weights, out_scale)."""
    heads = given.sizes("q", 3)[:2]
    is_fp4 = given.values["use_fp4"] or given.values.get("out_scale") is not None
    out = ((*heads, 64), "uint8") if is_fp4 else ((*heads, 128), "float8_e4m3fn")
    return out, (heads, "float32"), ((*heads, 4), "uint8")


def logits(given: Given) -> tuple[Result, ...]:
    dtype = given.values["dtype"]
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f'{given.op}: `dtype` must be "float32" or "bfloat16", got {dtype!r}')
    tokens = given.sizes("q", 3)[0]
    keys, scales = given.values["k_cache"], given.values.get("k_scale")
    if isinstance(keys, (tuple, list)):
        keys, scales = keys
    if scales is not None:
        return (((tokens, keys.shape[0]), dtype),)
    if given.values["block_table"] is None:
        raise ValueError(f"{given.op}: `block_table` must be given, got none")
    pages = given.sizes("block_table", 2)[1]
    block_size = given.values["block_size"] if len(keys.shape) == 2 else keys.shape[1]
    if block_size is None:
        text = f"{given.op}: `k_cache` must come with block_size= for pages as [pages, bytes]"
        raise ValueError(f"{text}, got none for shape {list(keys.shape)}")
    return (((tokens, pages * block_size), dtype),)
