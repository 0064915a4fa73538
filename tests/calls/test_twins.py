"""Which of two: calls that have two caches, two lists or two tables name the bad one in their
errors, and the options that belong to it."""

from __future__ import annotations

import re

import compiled
import numpy as np
import operators
import pytest
import reference as ref
import row_formats as rows

import sparse_mla
from sparse_mla import _C

# --- arrays --------------------------------------------------------------------------------------


def bent(x: np.ndarray) -> list[np.ndarray]:
    """Arrays that no argument takes in this one's place."""
    deeper = np.zeros((1,) * 5 + x.shape, x.dtype)
    return [np.zeros(x.shape, np.complex64), deeper, np.zeros((), x.dtype)]


@pytest.mark.parametrize("op", operators.GOOD_CALLS)
def test_every_array_is_named(op):
    """One array is bad, and all others are good."""
    for name in operators.GOOD_CALLS[op]().arrays():
        call = operators.GOOD_CALLS[op]()
        bends = bent(call.get(name))
        if op == "dynamic_per_tensor_quant" and name == "x":  # any shape
            bends = bends[:1]
        for array in bends:
            call.set(name, array)
            with pytest.raises((TypeError, ValueError)) as info:
                call.run(sparse_mla)
            assert str(info.value).startswith(f"{op}: `{name}` must "), str(info.value)


def table_rows(example: compiled.Example):
    """-> name in errors, and the batch with that table replaced, for each table of a build."""
    for name, value in example.batch.items():
        for i, part in enumerate(value) if isinstance(value, tuple) else [(None, value)]:
            if name in ("query_start_loc_cpu", "seq_lens_cpu") or not (
                isinstance(part, np.ndarray) and part.ndim == 2
            ):
                continue
            if i is None:
                yield name, lambda x, name=name: {name: x}
            else:
                ratio = example.step[1]["compress_ratios"][i]
                yield (
                    f"{name}[{ratio}]",
                    lambda x, name=name, value=value, i=i: {name: (*value[:i], x, *value[i + 1 :])},
                )


@pytest.mark.parametrize("make", [compiled.make_v32, compiled.make_v4])
def test_every_table_of_a_build_is_named(make):
    example = make()
    if example.step[0] == "v4":
        table = compiled.table()
        example.batch.update(index=table, index_states=table, states=(table, table))
    builder = _C.Step(*example.step)
    builder.build(None, **example.batch)
    seen = []
    for name, change in table_rows(example):
        seen.append(name)
        for bad in (np.zeros((2, 4)), np.zeros((1, 4), np.int32), np.zeros(4, np.int32)):
            with pytest.raises((TypeError, ValueError)) as info:
                builder.build(None, **example.batch | change(bad))
            start = f"MetadataBuilder.build: `{name}` must "
            assert str(info.value).startswith(start), str(info.value)
    if example.step[0] == "v4":
        tables = {"compressed[4]", "compressed[16]", "states[4]", "states[16]"}
        assert {*seen} == {"block_table", "index", "index_states"} | tables


# --- caches --------------------------------------------------------------------------------------

NUM_KEYS = 3
NAMES = {
    "kv_cache": "extra_kv_cache",
    "indices": "extra_indices",
    "topk_length": "extra_topk_length",
    "kv_format": "extra_kv_format",
    "block_size": "extra_block_size",
    "kv_scale": "extra_kv_scale",
}


def attend(list_options: dict, *, is_extra: bool) -> str:
    """What a call with one bad list is refused with. The other list is good."""
    good = {"kv_cache": np.zeros((4, 512), ref.BF16), "indices": np.zeros((1, NUM_KEYS), np.int32)}
    lists = [good, list_options] if is_extra else [list_options, good]
    options = lists[0] | {NAMES[name]: x for name, x in lists[1].items()}
    with pytest.raises((TypeError, ValueError)) as info:
        sparse_mla.sparse_attention(np.zeros((1, 2, 512), ref.BF16), softmax_scale=0.1, **options)
    return str(info.value)


def cache_of(name: str, **changes) -> dict:
    pages = rows.Pages(name, pages=3, block_size=5)
    return (
        {"kv_cache": pages.cache, "indices": np.zeros((1, NUM_KEYS), np.int32)}
        | pages.options
        | changes
    )


def whole_pages(name: str) -> np.ndarray:
    """[pages, bytes]"""
    return rows.Pages(name, pages=3, block_size=5).cache.reshape(3, -1)


def strided(name: str, gap: int) -> np.ndarray:
    """A cache whose tokens have a gap behind them."""
    cache = rows.Pages(name, pages=3, block_size=5).cache
    wide = np.zeros((*cache.shape[:2], cache.shape[2] + gap), cache.dtype)
    return wide[:, :, : cache.shape[2]]


BAD_LISTS = {
    "dtype": lambda: cache_of("bfloat16", kv_cache=np.zeros((3, 5, 512), np.float64)),
    "width": lambda: cache_of("bfloat16", kv_cache=np.zeros((3, 5, 513), ref.BF16)),
    "dtype of a name": lambda: cache_of("bfloat16", kv_format="fp8_v4"),
    "one of two formats": lambda: cache_of("fp8_v41", kv_format=None),
    "a format of the indexer": lambda: cache_of("fp8_index"),
    "no name": lambda: cache_of(
        "fp8_v41_split", kv_cache=whole_pages("fp8_v41_split"), kv_format=None
    ),
    "no name, a size": lambda: cache_of(
        "fp8_v41_split", kv_cache=whole_pages("fp8_v41_split"), kv_format=None, block_size=5
    ),
    "no size": lambda: cache_of(
        "fp8_v41_split", kv_cache=whole_pages("fp8_v41_split"), block_size=None
    ),
    "small pages": lambda: cache_of(
        "fp8_v41_split", kv_cache=whole_pages("fp8_v41_split"), block_size=6
    ),
    "another size": lambda: cache_of("bfloat16", block_size=4),
    "a size of 2^31": lambda: cache_of("bfloat16", block_size=2**31),
    "five dimensions": lambda: cache_of("bfloat16", kv_cache=np.zeros((3, 5, 1, 1, 512), ref.BF16)),
    "five, split": lambda: cache_of("fp8_v41_split", kv_cache=np.zeros((3, 5, 2, 528), np.uint8)),
    "no token": lambda: cache_of("bfloat16", kv_cache=np.zeros((3, 0, 512), ref.BF16)),
    "strides": lambda: cache_of("fp8_v41", kv_cache=strided("fp8_v41", 8)),
    "split strides": lambda: cache_of("fp8_v41_split", kv_cache=strided("fp8_v41_split", 16)),
    "last stride": lambda: cache_of(
        "bfloat16", kv_cache=np.zeros((3, 5, 1024), ref.BF16)[:, :, ::2]
    ),
    "address": lambda: cache_of("fp8_v41", kv_cache=np.zeros(536, np.uint8)[8:].reshape(1, 1, 528)),
    "a scale": lambda: cache_of("bfloat16", kv_scale=0.5),
    "a bad scale": lambda: cache_of("fp8_e4m3", kv_scale=-1.0),
    "scales": lambda: cache_of("fp8_e4m3", kv_scale=np.ones(2, np.float32)),
    "indices": lambda: cache_of("bfloat16", indices=np.zeros((1, 3), np.int64)),
    "tokens of indices": lambda: cache_of("bfloat16", indices=np.zeros((2, 3), np.int32)),
    "lengths": lambda: cache_of("bfloat16", topk_length=np.zeros(1, np.float32)),
    "tokens of lengths": lambda: cache_of("bfloat16", topk_length=np.zeros(2, np.int32)),
}


@pytest.mark.parametrize("what", BAD_LISTS)
def test_the_extra_cache_is_refused_like_the_first(what):
    """In the same words, with the names of its own arguments."""
    options = {name: x for name, x in BAD_LISTS[what]().items() if x is not None}
    first, extra = attend(options, is_extra=False), attend(options, is_extra=True)
    words = re.compile(r"\b(" + "|".join(sorted(NAMES, key=len, reverse=True)) + r")\b(?=[`= ])")
    assert words.search(first.partition(": ")[2]), first
    # The extra cache may have two formats more.
    extra = re.sub(r" or (288 for format )?fp4_v41(_split)?(, 288)?", "", extra)
    op, _, named = first.partition(": ")
    assert extra == f"{op}: " + words.sub(lambda m: NAMES[m[1]], named)


def test_two_good_caches():
    """The lists that are bent above are good as they are."""
    for name in ("bfloat16", "fp8_v41_split", "fp8_e4m3"):
        options = cache_of(name)
        good = {"kv_cache": np.zeros((4, 512), ref.BF16), "indices": options["indices"]}
        for first, second in ((options, good), (good, options)):
            extra = {NAMES[key]: x for key, x in second.items()}
            q = np.zeros((1, 2, 512), ref.BF16)
            out, _ = sparse_mla.sparse_attention(q, softmax_scale=0.1, **first, **extra)
            assert out.shape == q.shape
