"""sparse_attention over keys of 512 values: the caches of DeepSeek V4 and V4.1, one or two in a
call, against fp64. Rows that no index selects are random bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import reference as ref
from cases import AttentionInputs, make_indices, make_sink, make_topk_length, random_bf16
from device import BOUNDS
from helpers import NO_NAN, Guarded, assert_same_bits, assert_within_bounds, guarded_attention
from library import sparse_mla
from row_formats import KEY_FORMATS, Pages, layouts_of

attend = sparse_mla.sparse_attention
E4M3 = np.dtype(ref.E4M3)
MAIN_FORMATS = [name for name in KEY_FORMATS if not name.startswith("fp4")]
KV_SCALES = {"": 0.75, "extra_": 1.875}


@dataclass
class Keys:
    """A cache, its index list, and the list's options; `prefix` is "" or "extra_"."""

    pages: Pages
    indices: np.ndarray
    topk_length: np.ndarray | None
    prefix: str

    @property
    def num_slots(self) -> int:
        return self.pages.pages * self.pages.block_size

    def rows(self, part) -> Keys:
        """The lists of some tokens."""
        length = None if self.topk_length is None else self.topk_length[part]
        return replace(self, indices=self.indices[part], topk_length=length)

    @property
    def kv_scale(self) -> float:
        return KV_SCALES[self.prefix] if self.pages.format.scales == "cache" else 1.0

    @property
    def options(self) -> dict:
        found = {f"{self.prefix}{name}": value for name, value in self.pages.options.items()}
        if self.pages.format.scales == "cache":
            found[f"{self.prefix}kv_scale"] = self.kv_scale
        if self.topk_length is not None:
            found[f"{self.prefix}topk_length"] = self.topk_length
        return found

    def chosen(self, t: int) -> np.ndarray:
        """float64 keys of token t."""
        row = self.indices[t].astype(np.int64)
        keep = (row >= 0) & (row < self.num_slots)
        if self.topk_length is not None:
            keep &= np.arange(len(row)) < self.topk_length[t]
        return self.pages.values(row[keep]).astype(np.float64) * float(np.float32(self.kv_scale))


@dataclass
class V4Inputs(AttentionInputs):
    lists: list[Keys] = field(default_factory=list)

    def rows(self, part) -> V4Inputs:
        return replace(super().rows(part), lists=[keys.rows(part) for keys in self.lists])

    def reference(self) -> ref.Attention:
        decode = ref.e4m3_decode if self.q.dtype == E4M3 else ref.to_f32
        query = decode(self.q).astype(np.float64)
        scale = self.options["softmax_scale"] * self.options.get("q_scale", 1.0)
        keys = [np.concatenate([keys.chosen(t) for keys in self.lists]) for t in range(len(query))]
        has_scales = any(k.pages.format.scales not in ("none", "ue8m0", "e4m3") for k in self.lists)
        return ref.attend_keys(
            query * scale, keys, self.options.get("attn_sink"), has_scales=has_scales
        )


def make_keys(rng, num_tokens, width, fmt, *, prefix="", data="normal", lengths=False, **pages):
    cache = Pages(fmt, seed=int(rng.integers(1 << 30)), **pages)
    slots = np.arange(cache.pages * cache.block_size)
    keys = rng.normal(0, 1, (len(slots), 512))
    if data == "mixed":
        keys *= 10.0 ** rng.uniform(-3, 1, (len(slots), 1))
    elif data == "zeros":
        keys[rng.random(len(slots)) < 0.2] = 0
    elif data == "spread":  # logits with a deviation of about six
        keys *= 6
    elif data == "rope":  # the last 64 values of a row are far larger or smaller than the others
        keys[:, 448:] *= 10.0 ** rng.uniform(-6, 3.5, (len(slots), 1))
    indices = make_indices(rng, num_tokens, width, len(slots), "random")
    selected = slots[np.isin(slots, indices)]
    kv_scale = KV_SCALES[prefix] if cache.format.scales == "cache" else 1.0
    bits = ref.bf16_encode(keys[selected].astype(np.float32))
    cache.put(selected, *cache.format.encode(bits, kv_scale))
    topk_length = make_topk_length(rng, num_tokens, width) if lengths else None
    return Keys(cache, indices, topk_length, prefix)


@dataclass(frozen=True)
class V4Case:
    T: int = 3
    H: int = 4
    K: int = 40
    fmt: str = "fp8_v4"
    extra: str | None = None
    extra_K: int = 70
    data: str = "normal"
    e4m3: bool = False
    sink: bool = False
    lengths: bool = False
    num_splits: int = 0
    block_size: int = 64
    layout: str = "paged"
    extra_block_size: int = 5
    extra_layout: str = "paged"
    seed: int = 0

    def make(self) -> V4Inputs:
        rng = np.random.default_rng([self.seed, self.T, self.H, self.K])
        both = {"data": self.data, "lengths": self.lengths}
        size = self.block_size
        pages = {"pages": max(2, 128 // size), "block_size": size, "layout": self.layout}
        lists = [make_keys(rng, self.T, self.K, self.fmt, **both, **pages)]
        if self.extra:
            size = self.extra_block_size
            pages = {"pages": max(2, 100 // size), "block_size": size, "layout": self.extra_layout}
            both["prefix"] = "extra_"
            lists.append(make_keys(rng, self.T, self.extra_K, self.extra, **both, **pages))
        q = random_bf16(rng, self.T, self.H, 512)
        options = {"softmax_scale": 512**-0.5}
        if self.e4m3:
            q = ref.e4m3_encode(ref.to_f32(q)).view(E4M3)
            options["q_scale"] = 1.25
        if self.sink:
            options["attn_sink"] = make_sink(rng, self.H)
        for keys in lists:
            options |= keys.options
        if self.extra:
            options |= {"extra_kv_cache": lists[1].pages.cache, "extra_indices": lists[1].indices}
        return V4Inputs(
            q=q, kv=lists[0].pages.cache, indices=lists[0].indices, options=options,
            num_splits=self.num_splits, lists=lists,
        )  # fmt: skip


def check(case: V4Case) -> dict:
    inputs = case.make()
    got = guarded_attention(attend, inputs)
    assert_within_bounds(inputs.reference(), got)
    return got


@pytest.mark.parametrize("extra", [None, *KEY_FORMATS])
@pytest.mark.parametrize("fmt", MAIN_FORMATS)
def test_any_pair_of_formats(fmt, extra):
    check(V4Case(fmt=fmt, extra=extra, sink=True, lengths=extra is not None))


@pytest.mark.parametrize("num_heads", [1, 2, 16, 17, 40, 64, 128])
@pytest.mark.parametrize("fmt", MAIN_FORMATS)
def test_heads(fmt, num_heads):
    check(V4Case(T=2, H=num_heads, fmt=fmt, extra="fp8_v4", sink=True))


@pytest.mark.parametrize("block_size", [1, 2, 64, 256])
@pytest.mark.parametrize("fmt", KEY_FORMATS)
def test_pages(fmt, block_size):
    """Both lists have caches of every page size, and every layout is that of some cache."""
    layouts = layouts_of(fmt)
    layout = layouts[[1, 2, 64, 256].index(block_size)]
    if fmt in MAIN_FORMATS:
        check(V4Case(fmt=fmt, block_size=block_size, layout=layout))
    check(V4Case(extra=fmt, extra_block_size=block_size, extra_layout=layout))


@pytest.mark.parametrize("data", ["mixed", "zeros", "spread", "rope"])
@pytest.mark.parametrize("fmt", KEY_FORMATS)
def test_data(fmt, data):
    if fmt in MAIN_FORMATS:
        check(V4Case(K=300, fmt=fmt, data=data))
    check(V4Case(K=130, extra=fmt, extra_K=513, data=data, H=40))


@pytest.mark.parametrize("num_splits", [0, 1, 4])
@pytest.mark.parametrize("data", ["normal", "mixed", "zeros", "spread", "rope"])
@pytest.mark.parametrize("num_heads", [1, 17, 40, 128])
def test_aligned_rows(num_heads, data, num_splits):
    """Pages that are aligned to 16 bytes, as Hopper's kernels for V4's rows want them."""
    rows = {"K": 130, "extra": "fp8_v4", "extra_K": 513, "extra_block_size": 2}
    check(V4Case(H=num_heads, **rows, data=data, num_splits=num_splits, lengths=True))


@pytest.mark.parametrize("fmt", MAIN_FORMATS)
def test_e4m3_query(fmt):
    check(V4Case(fmt=fmt, e4m3=True, H=17))
    check(V4Case(fmt=fmt, e4m3=True, extra="fp8_e4m3", sink=True))


@pytest.mark.parametrize("extra", [None, "fp8_e4m3"])
def test_e4m3_query_as_bytes(extra):
    """A framework without float8_e4m3fn passes uint8, and gets the same bits."""
    inputs = V4Case(e4m3=True, H=17, extra=extra).make()
    want = guarded_attention(attend, inputs)
    inputs.q = inputs.q.view(np.uint8)
    got = guarded_attention(attend, inputs)
    for name in want:
        assert_same_bits(got[name], want[name], name)


def test_scales_in_arrays():
    """A scale in an array of one fp32 is the same as a number."""
    inputs = V4Case(fmt="fp8_e4m3", extra="fp8_e4m3", e4m3=True).make()
    want = guarded_attention(attend, inputs)
    for name in ("q_scale", "kv_scale", "extra_kv_scale"):
        inputs.options[name] = np.array([inputs.options[name]], np.float32)
    for shape in ((), (1,)):
        for name in ("q_scale", "kv_scale", "extra_kv_scale"):
            inputs.options[name] = inputs.options[name].reshape(shape)
        got = guarded_attention(attend, inputs)
        for name in want:
            assert_same_bits(got[name], want[name], name)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("fmt", ["fp8_v4", "fp8_nope", "bfloat16"])
def test_splits_make_tokens_independent(fmt, num_splits):
    case = V4Case(T=5, K=300, fmt=fmt, extra="fp4_v41", extra_K=200, num_splits=num_splits)
    inputs = case.make()
    whole = guarded_attention(attend, inputs)
    assert_within_bounds(inputs.reference(), whole)
    for part in (slice(0, 1), slice(3, 5)):
        got = guarded_attention(attend, inputs.rows(part))
        for name in whole:
            assert_same_bits(got[name], whole[name][part], name)


@pytest.mark.parametrize("num_shards", range(2, 9))
@pytest.mark.parametrize("pair", [("fp8_v4", "fp8_v4"), ("bfloat16", "fp4_v41")], ids=str)
def test_shards_merged_with_a_sink(pair, num_shards):
    """Every shard has some of the keys, and no sink. The first have none of the second list, the
    last none of the first. Their states in fp32, merged with the sink, are attention over all."""
    case = V4Case(H=40, K=130, fmt=pair[0], extra=pair[1], extra_K=200, sink=True, lengths=True)
    inputs = case.make()
    want = inputs.reference()
    sink = inputs.options.pop("attn_sink")
    states = []
    for columns in np.array_split(np.arange(330), num_shards):
        options = dict(inputs.options)
        part = []
        for keys, some in zip(
            inputs.lists, (columns[columns < 130], columns[columns >= 130] - 130), strict=True
        ):
            part.append(np.ascontiguousarray(keys.indices[:, some]))
            first = some[0] if len(some) else 0
            length = np.clip(keys.topk_length.astype(np.int64) - first, 0, len(some))
            options[f"{keys.prefix}topk_length"] = length.astype(np.int32)
        options["extra_indices"] = part[1]
        out, lse = attend(inputs.q, inputs.kv, part[0], **options)
        states.append((ref.to_f32(np.asarray(out)), np.asarray(lse)))
    merged = states[0]
    for i, state in enumerate(states[1:], 2):
        last = {"attn_sink": sink} if i == num_shards else {}
        merged = sparse_mla.merge_attn_states(*merged, *state, **last)
    # The weights of the shards are off by their errors of lse, and each shard's out by its bound,
    # whose |out| may add up to the sum of p |v|.
    tolerance = 2 * want.out_tolerance(**BOUNDS) + 1e-6
    assert ref.worst_ratio(merged[0], want.out, tolerance) <= 1
    tolerance = want.lse_tolerance(**BOUNDS) + num_shards * ref.merge_lse_tolerance(want.lse)
    assert ref.worst_ratio(merged[1], want.lse, tolerance) <= 1


@pytest.mark.parametrize("fmt", KEY_FORMATS)
def test_one_key_gives_its_value(fmt):
    """The value of the only key, rounded once."""
    is_extra = fmt not in MAIN_FORMATS
    inputs = (
        V4Case(T=2, K=0, extra=fmt, extra_K=3) if is_extra else V4Case(T=2, K=3, fmt=fmt)
    ).make()
    keys = inputs.lists[-1]
    keys.indices[:, 0] = -1
    keys.indices[:, 1] = np.arange(2) + 3
    keys.indices[:, 2] = 10**6
    bits = ref.bf16_encode(np.random.default_rng(0).normal(0, 1, (2, 512)).astype(np.float32))
    keys.pages.put(keys.indices[:, 1], *keys.pages.format.encode(bits, keys.kv_scale))
    got = guarded_attention(attend, inputs)
    assert_within_bounds(inputs.reference(), got)
    values = keys.pages.values(keys.indices[:, 1], keys.kv_scale)
    for h in range(4):
        assert_same_bits(got["out"][:, h], ref.to_bf16(values), fmt)


@pytest.mark.parametrize("which", ["main", "extra", "both"])
def test_empty_lists(which):
    """Lists without columns and lists of length 0: the other list alone, or no keys at all."""
    for no_columns in (False, True):
        case = V4Case(
            K=0 if no_columns and which != "extra" else 40,
            extra="fp8_v41", extra_K=0 if no_columns and which != "main" else 70,
        )  # fmt: skip
        inputs = case.make()
        for keys, name in zip(inputs.lists, ("main", "extra"), strict=True):
            if which in (name, "both"):
                keys.topk_length = np.zeros(3, np.int32)
                inputs.options |= keys.options
        got = guarded_attention(attend, inputs)
        assert_within_bounds(inputs.reference(), got)
        if which == "both":
            assert not got["out"].view(np.uint16).any()
            assert np.isneginf(got["lse"]).all()
            assert np.isneginf(got["max_logits"]).all()


def test_more_heads_in_sink_and_out():
    """A sink for more heads is read for the first H; more heads of out stay as they are."""
    inputs = V4Case(sink=True, extra="fp8_v41").make()
    want = guarded_attention(attend, inputs)
    sink = np.concatenate([inputs.options["attn_sink"], np.full(4, np.nan, np.float32)])
    out = Guarded((3, 8, 512), ref.BF16)
    before = out.array.copy()
    inputs.options["attn_sink"] = sink
    _, lse = inputs.run(attend, out=out.array)
    out.check(written=False)
    assert_same_bits(out.array[:, :4], want["out"], "out")
    assert_same_bits(out.array[:, 4:], before[:, 4:], "further heads")
    assert_same_bits(np.asarray(lse), want["lse"], "lse")


@pytest.mark.parametrize("byte", [0, 1, 5, 9, 10, 60, 200, 245])
@pytest.mark.parametrize("fmt", ["fp8_v4", "fp8_v41", "fp8_v41_split"])
def test_any_scale_byte(fmt, byte):
    """Scales that no writer chooses: values that are subnormal in bf16, and huge ones."""
    inputs = V4Case(T=2, K=8, fmt=fmt).make()
    keys = inputs.lists[0]
    slots = np.arange(8)
    data, scales = keys.pages.get(slots)
    data[:, : 448 if fmt == "fp8_v4" else 512] = 0x38  # 1.0
    if byte >= 200:
        data[:, 64:] = 0  # one tile is large, and its logits are far apart
        data[:, 1:64] = 0
    scales[:, : 7 if fmt == "fp8_v4" else 16] = byte
    data[:, 448:] = 0
    keys.pages.put(slots, data, scales)
    keys.indices[:] = slots
    inputs.q[:] = inputs.q * np.float32(2.0**-60 if byte >= 200 else 1).astype(ref.BF16)
    got = guarded_attention(attend, inputs)
    want = inputs.reference()
    if np.isfinite(want.out).all() and np.abs(want.out).max() < 3e38:
        assert_within_bounds(want, got)


@pytest.mark.parametrize("fmt", ["fp8_v4", "fp8_v41", "fp4_v41", "fp8_nope"])
def test_nan_scale_reaches_its_token_only(fmt):
    is_extra = fmt not in MAIN_FORMATS
    inputs = (V4Case(K=9, extra=fmt) if is_extra else V4Case(fmt=fmt)).make()
    keys = inputs.lists[-1]
    want = guarded_attention(attend, inputs, poison=NO_NAN)
    token = max(range(3), key=lambda t: (keys.indices[t] >= 0).sum())
    slot = next(int(i) for i in keys.indices[token] if 0 <= i < 64)
    others = [t for t in range(3) if slot not in keys.indices[t]]
    data, scales = keys.pages.get([slot])
    scales[:] = 0xFF
    keys.pages.put([slot], data, scales)
    got = guarded_attention(attend, inputs, poison=NO_NAN)
    assert np.isnan(ref.to_f32(got["out"][token])).any()
    for t in others:
        assert_same_bits(got["out"][t], want["out"][t], f"token {t}")


def test_sliding_window_and_compressed_rows():
    """What a V4 layer asks for: a window of 128 rows, 512 compressed ones of another page size,
    short and padded lists, invalid tokens."""
    inputs = V4Case(
        T=5, H=64, K=128, extra="fp8_v4", extra_K=512, sink=True, block_size=64, extra_block_size=2
    ).make()
    inputs.lists[0].topk_length = np.array([128, 7, 0, 128, 1], np.int32)
    inputs.lists[1].topk_length = np.array([512, 1, 0, 0, 99], np.int32)
    for keys in inputs.lists:
        inputs.options |= keys.options
    got = guarded_attention(attend, inputs)
    assert_within_bounds(inputs.reference(), got)
    assert not got["out"][2].view(np.uint16).any()


ERRORS = {
    "FP4 as the main cache": (
        lambda i: {"kv_cache": Pages("fp4_v41").cache, "kv_format": "fp4_v41"},
        ValueError,
        r"`kv_cache` must be of a format that this operator takes \(.*\), got fp4_v41",
    ),
    "528 bytes without a name": (
        lambda i: {"kv_cache": Pages("fp8_v41").cache},
        ValueError,
        r"kv_format=.*fp8_v41.*fp8_v41_split.*fp8_nope",
    ),
    "288 bytes without a name": (
        lambda i: {"extra_kv_cache": Pages("fp4_v41").cache, "extra_indices": i.indices},
        ValueError,
        r"`extra_kv_cache` must come with extra_kv_format=.*fp4_v41.*fp4_v41_split",
    ),
    "keys of the indexer": (
        lambda i: {"kv_cache": Pages("fp8_index").cache},
        ValueError,
        r"`kv_cache` must be of a format that this operator takes \(.*\), got fp8_index",
    ),
    "a query of 576 values": (
        lambda i: {"q": np.zeros((3, 4, 576), ref.BF16)},
        ValueError,
        r"`q` must have shape \[any, any, 512\], got \[3, 4, 576\]",
    ),
    "a pair": (
        lambda i: {"q": (i.q, np.zeros((3, 4, 64), ref.BF16))},
        ValueError,
        r"`q` must be one array \[tokens, heads, 512\] for keys of 512 values, got a pair",
    ),
    "lists of different head size": (
        lambda i: {"extra_kv_cache": np.zeros((2, 64, 656), np.uint8), "extra_indices": i.indices},
        ValueError,
        r"`extra_kv_cache` must have keys of 512 values, as `kv_cache` has, got 576",
    ),
    "an e4m3 query for 576 values": (
        lambda i: {"q": np.zeros((3, 4, 576), E4M3), "kv_cache": np.zeros((2, 64, 656), np.uint8)},
        TypeError,
        r"`q` must be bfloat16, got float8_e4m3fn",
    ),
    "a scale of a bf16 query": (
        lambda i: {"q_scale": 2.0},
        ValueError,
        r"`q_scale` must be 1 for a bfloat16 query, got 2",
    ),
    "an array as the scale of a bf16 query": (
        lambda i: {"q_scale": np.ones(1, np.float32)},
        ValueError,
        r"`q_scale` must be left out for a bfloat16 query, got an array",
    ),
    "a scale of a cache without one": (
        lambda i: {"kv_scale": 0.5},
        ValueError,
        r"`kv_scale` must be 1 for format fp8_v4, .*, got 0.5",
    ),
    "a scale of an extra cache without one": (
        lambda i: {
            "extra_kv_cache": i.kv, "extra_indices": i.indices,
            "extra_kv_scale": np.ones(1, np.float32),
        },
        ValueError,
        r"`extra_kv_scale` must be left out for format fp8_v4, .*, got an array",
    ),
    "a scale of an extra cache that is absent": (
        lambda i: {"extra_kv_scale": 2.0}, ValueError, r"`extra_kv_cache` must ",
    ),
    "a format of an extra cache that is absent": (
        lambda i: {"extra_kv_format": "fp8_v41"}, ValueError, r"`extra_kv_cache` must ",
    ),
    "pages of an extra cache that is absent": (
        lambda i: {"extra_block_size": 64}, ValueError, r"`extra_kv_cache` must ",
    ),
    "a query of 576 values as bytes": (
        lambda i: {
            "q": np.zeros((3, 4, 576), np.uint8), "kv_cache": np.zeros((2, 64, 656), np.uint8),
        },
        TypeError,
        r"`q` must be bfloat16, got uint8",
    ),
    "a scale of zero": (
        lambda i: {"q": np.zeros((3, 4, 512), E4M3), "q_scale": 0.0},
        ValueError,
        r"`q_scale` must be a positive normal float32, got 0",
    ),
    "a scale that is NaN": (
        lambda i: {"q": np.zeros((3, 4, 512), E4M3), "q_scale": float("nan")},
        ValueError,
        r"`q_scale` must be",
    ),
    "pages of bytes without a size": (
        lambda i: {"kv_cache": Pages("fp8_v4", "bytes").cache, "kv_format": "fp8_v4"},
        ValueError,
        r"block_size",
    ),
    "a sink of too few heads": (
        lambda i: {"attn_sink": np.zeros(3, np.float32)},
        ValueError,
        r"`attn_sink` must have shape \[>= 4\], got \[3\]",
    ),
    "out of too few heads": (
        lambda i: {"out": np.zeros((3, 3, 512), ref.BF16)},
        ValueError,
        r"`out` must have shape \[3, >= 4, 512\], got \[3, 3, 512\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ERRORS)
def test_errors(what):
    change, kind, text = ERRORS[what]
    inputs = V4Case().make()
    given = {"q": inputs.q, "kv_cache": inputs.kv, "indices": inputs.indices, **inputs.options}
    given |= change(inputs)
    with pytest.raises(kind, match=text) as caught:
        attend(given.pop("q"), given.pop("kv_cache"), given.pop("indices"), **given)
    assert re.match("sparse_attention: ", str(caught.value))
