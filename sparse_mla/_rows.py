"""Sizes of cache rows, for the demo and the benchmarks. They follow from the table of formats.

A row of fp8_ds_mla ends in its RoPE values; the bytes between them and the e4m3 values are scales.
"""

from __future__ import annotations

from sparse_mla import _C


def row_of(kv_format: str) -> int:
    """The last dimension of a cache, by the format's first rows: of bfloat16 those with RoPE, of
    fp8_e4m3 those without."""
    return next(iter(_C.KV_FORMATS[kv_format]))


KV_LORA_RANK = 512
KEY_DIM = row_of("bfloat16")  # latent and RoPE values
ROPE_BYTES = 2 * (KEY_DIM - KV_LORA_RANK)
BF16_ROW_BYTES = 2 * KEY_DIM
FP8_ROW_BYTES = row_of("fp8_ds_mla")
V4_ROW_BYTES = row_of("fp8_v4")
V4_SCALE_BYTES = 8  # seven scales and a 0, behind the rows of a page
V4_DATA_BYTES = V4_ROW_BYTES - V4_SCALE_BYTES
