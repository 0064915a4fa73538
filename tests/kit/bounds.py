"""What the tests of bounds share: exact refusals, the rows of cache formats, and small calls."""

from __future__ import annotations

import re

import numpy as np
import pytest
import reference as ref
from cases import int32
from example_table import Calls

import sparse_mla

INT32, INT64 = 2**31, 2**63  # the first integers that do not fit
HALF_STEP = 2.0**128 - 2.0**103  # the first number that rounds to infinity as a float32
# The first number that rounds to a float32 which is infinite times log2(e).
HALF_FACTOR = float.fromhex("0x1.62E42Fp+127")
BF16, F16, F32, U8 = ref.BF16, np.float16, np.float32, np.uint8


def zeros(*shape: int, dtype=BF16) -> np.ndarray:
    return np.zeros(shape, dtype)


def refuses(text: str, error: type = ValueError):
    """Expects an error with exactly this text."""
    return pytest.raises(error, match=f"^{re.escape(text)}$")


SCALES = (
    "q_scale",
    "o_scale",
    "kv_scale",
    "extra_kv_scale",
    "bmm1_scale",
    "bmm2_scale",
    "q_scale_inv",
)
BYTES = ("uint8", "int8", "float8_e4m3fn")
BYTE_FORMATS = {
    "fp8_ds_mla": 656,
    "fp8_v4": 584,
    "fp8_e4m3": "512 or 576",
    "fp8_index": 132,
    "mxfp4_index": 68,
    "fp8_v41": 528,
    "fp8_v41_split": 528,
    "fp4_v41": 288,
    "fp4_v41_split": 288,
    "fp8_nope": 528,
}
READERS = ("gather_kv_cache", "dequantize_kv_cache", "dequantize_and_gather_k_cache")
READERS += ("transfer_kv_cache",)


def known_formats(op: str, name: str = "") -> tuple[str, dict[str, int | str]]:
    """The bf16 rows that the argument `name` of an operator takes, and the formats of bytes."""
    if op in READERS:
        return "576 or 512", BYTE_FORMATS
    of_512 = BYTE_FORMATS | {"fp8_e4m3": 512}
    if op in (
        "quantize_and_insert_k_cache",
        "fused_qnorm_rope_kv_insert",
        "compress_norm_rope_store",
    ):
        others = ("fp8_ds_mla", "fp8_index", "mxfp4_index")
        return "512", {n: row for n, row in of_512.items() if n not in others}
    if op == "sparse_mla_dsv4":
        return "512", {name: of_512[name] for name in ("fp8_v4", "fp8_e4m3")}
    if "attention" in op:
        others = ("index",) if name == "extra_kv_cache" else ("index", "fp4")
        return "576 or 512", {
            n: row for n, row in BYTE_FORMATS.items() if not any(word in n for word in others)
        }
    if op == "concat_and_cache_mla":
        return "576 or 512", {n: BYTE_FORMATS[n] for n in ("fp8_ds_mla", "fp8_e4m3", "fp8_nope")}
    return "576" if op == "rope_and_cache_mla" else "576 or 512", {"fp8_ds_mla": 656}


def byte_rows(op: str, name: str = "") -> str:
    """The rows of bytes that an operator takes, in the words of an error."""
    rows = known_formats(op, name)[1]
    return " or ".join(f"{size} for format {fmt}" for fmt, size in rows.items())


def listed(names) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def others_are_untouched(calls: Calls, after: dict[str, str]) -> bool:
    before = calls.contents(calls.example.arrays)
    return all(after[name] == x for name, x in before.items() if name != calls.name)


# --- small calls ----------------------------------------------------------------------------------


def attend(T=1, H=1, K=1, kv=None, **options):
    q, kv = zeros(T, H, 576), zeros(1, 1, 576) if kv is None else kv
    return sparse_mla.sparse_attention(
        q, kv, np.zeros((T, K), np.int32), **{"softmax_scale": 1.0, **options}
    )


def convert(topk=(0,), table=((0,),), *, block_size=1, starts=None):
    topk, table = int32(topk), int32(*table)
    options = {}
    if starts is not None:
        options = {"prefill_request_ids": int32(0), "prefill_workspace_starts": int32(*starts)}
    got = sparse_mla.convert_req_index_to_global_index(
        int32(0), table, topk, block_size=block_size, **options
    )
    return got[0].tolist()


def workspace_size(**changes):
    sizes = {"num_tokens": 1, "num_heads": 1, "topk": 1} | changes
    return sparse_mla.attention_workspace_size(
        sizes.pop("num_tokens"), sizes.pop("num_heads"), sizes.pop("topk"), device="cpu", **sizes
    )


def split_weight(shape=(512, 3), **changes):
    sizes = {"num_heads": 1, "qk_nope_head_dim": 1, "v_head_dim": 2} | changes
    return sparse_mla.split_kv_b_proj(zeros(*shape), **sizes)


def split_batch(starts=(0, 1), tokens=None, **options):
    tokens = starts[-1] if tokens is None else tokens
    return sparse_mla.split_decodes_and_prefills(starts, tokens, **options)


def cut_local(attention_chunk=4, block_size=2):
    sizes = {"attention_chunk": attention_chunk, "block_size": block_size}
    return sparse_mla.local_attention_batches([0, 2], [5], [[7, 8, 9]], **sizes)


def attend_to_pages(T=1, H=1, lens=(1,), table=((0,),), page=1, **options):
    """One request of `page` * width keys at most, unless options say otherwise; -> keys seen by
    each token."""
    q, kv = zeros(T, H, 576), options.pop("kv_cache", zeros(9, page, 576))
    _, lse = sparse_mla.mla_attention(
        q, kv, None if table is None else int32(*table), int32(*lens),
        **{"softmax_scale": 1.0, **options},
    )  # fmt: skip
    return np.exp(lse[:, 0]).round().astype(int).tolist()
