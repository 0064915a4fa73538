"""Writes of keys to a cache of any format, compared with the reference."""

from __future__ import annotations

import re

import pytest
import reference as ref
import row_formats as rows
from helpers import assert_same_bits
from library import sparse_mla

FORMATS = list(rows.FORMATS)
SPLIT = [name for name in FORMATS if rows.FORMATS[name].split]
KV_SCALE = 0.37  # scale of caches that have one


def writer(name: str):
    is_index = rows.FORMATS[name].width == 128
    return (
        sparse_mla.indexer_k_quant_and_cache if is_index else sparse_mla.quantize_and_insert_k_cache
    )


def refuses(text: str, error=ValueError):
    return pytest.raises(error, match=re.escape(text))


def scale_of(name: str) -> dict:
    return {"kv_scale": KV_SCALE} if rows.FORMATS[name].scales == "cache" else {}


def write(pages: rows.Pages, k, slots, **options) -> None:
    got = writer(pages.format.name)(k, pages.cache, slots, **pages.options, **options)
    assert got is pages.cache


def check_write(pages: rows.Pages, k, slots, **options) -> None:
    """The library and the reference must leave the same bytes in the whole memory of the cache."""
    options = scale_of(pages.format.name) | options
    before = pages.memory.copy()
    write(pages, k, slots, **options)
    after = pages.memory.copy()
    pages.memory[...] = before
    bits = ref.to_bf16_bits(k[: len(slots)])
    pages.put(slots, *pages.format.encode(bits, options.get("kv_scale", 1.0)))
    assert_same_bits(after, pages.memory, f"{pages.format.name}, {pages.layout}")
