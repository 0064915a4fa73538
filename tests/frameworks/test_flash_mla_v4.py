"""sparse_mla.flash_mla on the caches of DeepSeek V4 and V4.1: which bytes are which format, and
attention over one cache or two against fp64. test_flash_mla.py has what all caches share.
"""

import numpy as np
import pytest
import reference as ref
from cases import make_topk_length
from flash_mla_cases import DECODE, PREFILL, Arrays, zeros
from helpers import ALL_FRAMEWORKS, assert_error_text, assert_same_bits, assert_within_bounds
from row_formats import FORMATS, Pages
from test_v4_attention import V4Case

from sparse_mla import flash_mla

# our formats -> FlashMLA's names
NAMES = {
    "fp8_v4": "V4",
    "fp8_v41": "V41",
    "fp8_v41_split": "V41",
    "fp4_v41": "V41_FP4",
    "fp4_v41_split": "V41_FP4",
    "fp8_nope": "V32_NO_ROPE",
    "bfloat16": None,
}
# pairs of a call: rows of 528 and 288 bytes are records or, with use_legacy, in split pages
PAIRS = [
    *((main, None) for main in NAMES if not main.startswith("fp4")),
    ("fp8_v4", "fp8_v4"),
    ("fp8_v4", "fp8_v41"),
    ("fp8_v4", "fp4_v41"),
    ("fp8_v4", "fp4_v41_split"),
    ("fp8_v4", "bfloat16"),
    ("fp8_v41", "fp8_v41"),
    ("fp8_v41", "fp4_v41"),
    ("fp8_v41_split", "fp8_v41_split"),
    ("fp8_v41_split", "fp4_v41_split"),
    ("fp8_nope", "fp8_nope"),
    ("fp8_nope", "fp8_v4"),
    ("bfloat16", "fp4_v41"),
]


@pytest.fixture(params=ALL_FRAMEWORKS)
def arrays(request) -> Arrays:
    return Arrays(request.param)


class Decode:
    """A decode call over caches [pages, block_size, 1, row]; `want` is its fp64 reference."""

    def __init__(self, fmt, extra=None, *, b=3, s_q=2, lengths=True, sink=True, **case) -> None:
        self.b, self.s_q = b, s_q
        v4 = V4Case(T=b * s_q, fmt=fmt, extra=extra, sink=sink, layout="mqa", extra_layout="mqa",
                    **case)  # fmt: skip
        self.inputs = inputs = v4.make()
        self.q = inputs.q.reshape(b, s_q, v4.H, 512)
        main, *extras = inputs.lists
        self.k_cache = main.pages.cache
        self.arguments = {"indices": main.indices.reshape(b, s_q, -1)}
        if sink:
            self.arguments["attn_sink"] = inputs.options["attn_sink"]
        for keys in extras:
            self.arguments["extra_k_cache"] = keys.pages.cache
            self.arguments["extra_indices_in_kvcache"] = keys.indices.reshape(b, s_q, -1)
        if lengths:
            rng = np.random.default_rng(b)
            for keys, name in zip(inputs.lists, ("topk_length", "extra_topk_length"), strict=False):
                per_request = make_topk_length(rng, b, keys.indices.shape[1])
                self.arguments[name] = per_request
                keys.topk_length = np.repeat(per_request, s_q)
        formats = [keys.pages.format.name for keys in inputs.lists]
        if any(name.endswith("_split") for name in formats):
            self.arguments["use_legacy"] = True
        if formats[0] == "fp8_nope":
            self.arguments["kv_format"] = "V32_NO_ROPE"

    def run(self, arrays: Arrays, **changes) -> dict[str, np.ndarray]:
        """{"out", "lse"}: one row per query, lse -inf where FlashMLA has +inf."""
        meta, _ = flash_mla.get_mla_metadata()
        q, k_cache = (changes.pop(name, getattr(self, name)) for name in ("q", "k_cache"))
        out, lse = arrays.call(
            flash_mla.flash_mla_with_kvcache,
            *(q, k_cache, None, None, 512, meta),
            **(self.arguments | changes),
        )
        assert out.shape == self.q.shape
        assert lse.shape == (self.b, self.q.shape[2], self.s_q)
        assert not np.isneginf(lse).any()
        lse = lse.swapaxes(1, 2).reshape(-1, lse.shape[1])
        lse = np.where(np.isposinf(lse), np.float32(-np.inf), lse)
        return {"out": out.reshape(-1, *out.shape[2:]), "lse": lse}


def assert_same(got: dict, want: dict) -> None:
    for name in want:
        assert_same_bits(got[name], want[name], name)


@pytest.mark.parametrize(("fmt", "extra"), PAIRS)
def test_formats(fmt, extra, arrays):
    case = Decode(fmt, extra)
    got = case.run(arrays)
    assert_within_bounds(case.inputs.reference(), got)
    if NAMES[fmt] is not None:
        assert_same(case.run(arrays, kv_format=NAMES[fmt], is_fp8_kvcache=True), got)
    if extra is not None and NAMES[extra] not in (None, NAMES[fmt]) and fmt != "fp8_nope":
        assert_same(case.run(arrays, kv_format=NAMES[extra]), got)


@pytest.mark.parametrize("fmt", [name for name in NAMES if not name.startswith("fp4")])
def test_names_of_this_library(fmt):
    """Such a name is the format itself, with use_legacy or without."""
    case = Decode(fmt)
    want = case.run(Arrays("numpy"))
    for use_legacy in (False, True):
        got = case.run(Arrays("numpy"), kv_format=fmt, use_legacy=use_legacy)
        assert_same(got, want)


@pytest.mark.parametrize("block_size", [1, 2, 64, 256])
@pytest.mark.parametrize("num_heads", [64, 128])
def test_sliding_window_beside_compressed_rows(num_heads, block_size, arrays):
    """The sizes of DeepSeek V4: 128 rows and 512, in pages of different sizes."""
    case = Decode(
        "fp8_v4", "fp8_v4", b=2, s_q=1, H=num_heads, K=128, extra_K=512,
        block_size=256 // block_size, extra_block_size=block_size,
    )  # fmt: skip
    assert_within_bounds(case.inputs.reference(), case.run(arrays))


def apart(arrays: Arrays, pages: Pages, unit: int):
    """A framework's view of pages that begin at multiples of `unit` bytes, as FlashMLA's tests make
    them: the end of a page is cut off, and the rest is viewed as rows."""
    count, used = pages.pages, pages.page_bytes
    stride = -(-used // unit) * unit
    memory = np.full((count, stride), 0xA5, np.uint8)
    memory[:, :used] = pages.memory[: count * pages.stride].reshape(count, -1)[:, :used]
    row = pages.format.row_bytes
    shape = (count, pages.block_size, 1, row)
    if arrays.is_torch:
        return arrays.put(memory)[:, :used].view(*shape)
    return np.lib.stride_tricks.as_strided(memory, shape, (stride, row, row, 1))


@pytest.mark.parametrize("name", ["numpy", pytest.param("torch", marks=pytest.mark.torch)])
@pytest.mark.parametrize(
    ("fmt", "unit"),
    [("fp8_v4", 576), ("fp8_v4", 8), ("fp8_v41_split", 512), ("fp4_v41_split", 256)],
)
def test_padded_pages(fmt, unit, name):
    arrays = Arrays(name)
    extra = fmt if fmt.startswith("fp4") else None
    case = Decode("fp8_v4" if extra else fmt, extra, block_size=64, extra_block_size=2)
    keys = case.inputs.lists[-1]
    padded = apart(arrays, keys.pages, unit)
    got = case.run(arrays, **{"extra_k_cache" if extra else "k_cache": padded})
    assert_same(got, case.run(arrays))
    assert_within_bounds(case.inputs.reference(), got)


def test_use_legacy_says_where_scales_lie():
    """The same bytes are other keys as records, and the same keys in the other order of bytes."""
    case = Decode("fp8_v41", block_size=8, lengths=False)
    arrays = Arrays("numpy")
    want = case.run(arrays)
    other = case.run(arrays, use_legacy=True)
    assert (other["lse"] != want["lse"]).any()
    records = np.ascontiguousarray(case.k_cache[:, :, 0])
    data, scales = (part.reshape(len(records), -1) for part in np.split(records, [512], axis=2))
    pages = np.concatenate([data, scales], axis=1).reshape(case.k_cache.shape)
    assert_same(case.run(arrays, k_cache=pages, use_legacy=True), want)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, ref.E4M3])
def test_bytes_come_in_three_dtypes(dtype, arrays):
    case = Decode("fp8_v4", "fp8_v4")
    extra = case.arguments["extra_k_cache"].view(dtype)
    got = case.run(arrays, k_cache=case.k_cache.view(dtype), extra_k_cache=extra)
    assert_same(got, case.run(arrays))


def test_scale_defaults_to_the_head_size(arrays):
    case = Decode("fp8_v4")
    assert_same(case.run(arrays, softmax_scale=512**-0.5), case.run(arrays))


def test_queries_without_keys(arrays):
    """Both lists empty: out 0 and lse +inf; one of them empty: the other's keys alone."""
    case = Decode("fp8_v4", "fp8_v4", b=4)
    lengths = {"topk_length": [0, 0, 7, 40], "extra_topk_length": [0, 70, 0, 3]}
    for (name, length), keys in zip(lengths.items(), case.inputs.lists, strict=True):
        case.arguments[name] = np.array(length, np.int32)
        keys.topk_length = np.repeat(case.arguments[name], case.s_q)
    got = case.run(arrays)
    assert_within_bounds(case.inputs.reference(), got)
    assert np.isneginf(got["lse"][:2]).all()
    assert np.isfinite(got["lse"][2:]).all()
    assert not got["out"].view(np.uint16)[:2].any()


def test_prefill_over_records(arrays):
    """Rows of 528 bytes stand alone, so a prefill can read them without pages."""
    inputs = V4Case(T=4, fmt="fp8_v41", layout="flat", sink=True, lengths=True).make()
    keys = inputs.lists[0]
    out, max_logits, lse = arrays.call(
        flash_mla.flash_mla_sparse_fwd,
        inputs.q, keys.pages.cache[:, None], keys.indices[:, None], 512**-0.5,
        attn_sink=inputs.options["attn_sink"], topk_length=keys.topk_length,
    )  # fmt: skip
    lse = np.where(np.isposinf(lse), np.float32(-np.inf), lse)
    got = {"out": out, "lse": lse, "max_logits": max_logits}
    assert_within_bounds(inputs.reference(), got)


# --- refusals ------------------------------------------------------------------------------------


def cache(name: str) -> np.ndarray:
    return np.zeros((2, 64, 1, FORMATS[name].row_bytes), np.uint8)


REFUSED = {
    "V3.2's queries": ({"q": zeros(3, 2, 4, 576)}, "q"),
    "V3.2's extra cache": ({"extra_k_cache": np.zeros((2, 64, 1, 656), np.uint8)}, "q"),
    "FP4 as the main cache": ({"k_cache": cache("fp4_v41")}, "k_cache"),
    "FP4 by name": ({"k_cache": cache("fp4_v41"), "kv_format": "V41_FP4"}, "k_cache"),
    "keys of the indexer": ({"k_cache": cache("fp8_index")}, "k_cache"),
    "an extra cache of no format": ({"extra_k_cache": zeros(2, 64, 1, 640)}, "extra_k_cache"),
    "the name of another cache": ({"kv_format": "V41"}, "kv_format"),
    "the extra cache's name alone": ({"kv_format": "V41_FP4"}, "kv_format"),
    "an unknown name": ({"kv_format": "V5"}, "kv_format"),
    "the indexer's name": ({"kv_format": "fp8_index"}, "kv_format"),
    "bf16": ({"is_fp8_kvcache": False}, "is_fp8_kvcache"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_decode(name):
    changes, argument = REFUSED[name]
    case = Decode("fp8_v4")
    with pytest.raises(ValueError, match="must") as caught:
        case.run(Arrays("numpy"), **changes)
    assert_error_text(caught.value, DECODE, [argument])


@pytest.mark.parametrize("fmt", ["fp8_v4", "fp4_v41"])
def test_refused_prefill(fmt):
    """Split pages are no flat rows, and FP4 is for an extra cache."""
    kv = np.zeros((9, 1, FORMATS[fmt].row_bytes), np.uint8)
    indices = np.zeros((5, 1, 8), np.int32)
    with pytest.raises(ValueError, match="must") as caught:
        flash_mla.flash_mla_sparse_fwd(zeros(5, 4, 512), kv, indices, 0.04)
    assert_error_text(caught.value, PREFILL, ["kv"])
