"""sparse_mla_dsv4: attention over a window's and a compressed cache with one table of slots. It has
the bits of sparse_attention, whose tests compare it with fp64; here fp64 judges its scales."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
from cases import int32, make_indices, make_sink, random_bf16
from helpers import Guarded, assert_same_bits, assert_within_bounds
from library import DEVICE, sparse_mla
from row_formats import Pages

E4M3 = np.dtype(ref.E4M3)
SCALE = 512**-0.5
CACHES = ["bfloat16", "fp8_v4", "fp8_e4m3"]


class Layer:
    """A call, with lengths that end in the window, between the parts and in the compressed part."""

    def __init__(self, swa="fp8_v4", compressed="fp8_v4", *, T=5, H=4, W=7, K=40, e4m3=False,
                 bmm1=SCALE, bmm2=1.0, seed=0) -> None:  # fmt: skip
        rng = np.random.default_rng([seed, T, H, W, K])
        self.swa = Pages(swa, seed=seed, pages=4, block_size=16)
        self.compressed = Pages(compressed, "mqa", seed=seed + 1, pages=33, block_size=2)
        for pages in (self.swa, self.compressed):
            slots = np.arange(pages.pages * pages.block_size)
            bits = ref.bf16_encode(rng.normal(0, 1, (len(slots), 512)).astype(np.float32))
            pages.put(slots, *pages.format.encode(bits, bmm2))
        self.q = random_bf16(rng, T, H, 512)
        if e4m3:
            self.q = ref.e4m3_encode(ref.to_f32(self.q)).view(E4M3)
        self.W, self.K = W, K
        self.indices = np.concatenate(
            [make_indices(rng, T, W, 64, "random"), make_indices(rng, T, K, 66, "random")], axis=1
        )
        lengths = [W + K, W - 1, W, 0, W + 1, -3, W + K + 9]
        self.lengths = np.array((lengths * T)[:T], np.int32)
        self.sinks = make_sink(rng, H)
        self.bmm1, self.bmm2 = bmm1, bmm2

    def run(self, **changes) -> np.ndarray:
        """The result in a buffer between red zones."""
        out = Guarded(self.q.shape, ref.BF16)
        options = {"bmm1_scale": self.bmm1, "bmm2_scale": self.bmm2, "sinks": self.sinks}
        options |= {"window": self.W, "out": out.array} | changes
        workspace = options.pop("workspace_buffer", None)
        arrays = [options.pop(name, x) for name, x in {
            "query": self.q, "swa_kv_cache": self.swa.cache, "workspace_buffer": workspace,
            "sparse_indices": self.indices, "compressed_kv_cache": self.compressed.cache,
            "sparse_topk_lens": self.lengths, "seq_lens": None}.items()]  # fmt: skip
        got = sparse_mla.sparse_mla_dsv4(*arrays, **options)
        assert got is options["out"]
        return out.check() if got is out.array else got

    def attend(self, **changes) -> np.ndarray:
        """The same by sparse_attention."""
        options = {
            "topk_length": np.clip(self.lengths, 0, self.W),
            "extra_kv_cache": self.compressed.cache,
            "extra_indices": self.indices[:, self.W :].copy(),
            "extra_topk_length": np.maximum(self.lengths - self.W, 0),
            "softmax_scale": float(np.float32(self.bmm1) / np.float32(self.bmm2)),
            "attn_sink": self.sinks,
        }
        for pages, name in ((self.swa, "kv_scale"), (self.compressed, "extra_kv_scale")):
            if pages.format.scales == "cache":
                options[name] = self.bmm2
        window = self.indices[:, : self.W].copy()
        return sparse_mla.sparse_attention(self.q, self.swa.cache, window, **(options | changes))[0]

    def reference(self) -> ref.Attention:
        """fp64: logits with bmm1_scale, values with bmm2_scale."""
        query = ref.e4m3_decode(self.q) if self.q.dtype == E4M3 else ref.to_f32(self.q)
        divisor = float(np.float32(self.bmm2))
        keys = []
        for t, length in enumerate(self.lengths):
            columns = np.arange(self.indices.shape[1])
            used = self.indices[t].astype(np.int64)
            is_used = (columns < length) & (used >= 0)
            parts = []
            for pages, is_part in (
                (self.swa, columns < self.W),
                (self.compressed, columns >= self.W),
            ):
                slots = used[is_used & is_part]
                slots = slots[slots < pages.pages * pages.block_size]
                parts.append(pages.values(slots).astype(np.float64) * divisor)
            keys.append(np.concatenate(parts))
        query = query.astype(np.float64) * (self.bmm1 / divisor)
        return ref.attend_keys(query, keys, self.sinks, has_scales=divisor != 1)


def assert_right(layer: Layer, got) -> None:
    want = layer.reference()
    assert_within_bounds(want, {"out": got, "lse": want.lse.astype(np.float32)})


@pytest.mark.parametrize("compressed", CACHES)
@pytest.mark.parametrize("swa", CACHES)
def test_is_attention_over_both_parts(swa, compressed):
    layer = Layer(swa, compressed)
    got = layer.run()
    assert_same_bits(got, layer.attend())
    assert_right(layer, got)


@pytest.mark.parametrize("num_heads", [1, 17, 64, 128])
@pytest.mark.parametrize(("window", "others"), [(1, 1), (1, 130), (128, 0), (128, 512)])
def test_sizes(num_heads, window, others):
    layer = Layer(T=7, H=num_heads, W=window, K=others)
    got = layer.run()
    assert_same_bits(got, layer.attend())
    assert_right(layer, got)


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("bmm2", [1.0, 0.5, 0.7])
def test_scales_of_the_seed(e4m3, bmm2):
    """bmm1_scale has the kv_scale already: it must not be applied twice."""
    layer = Layer("fp8_e4m3", "fp8_e4m3", e4m3=e4m3, bmm1=SCALE * 1.25 * bmm2, bmm2=bmm2)
    got = layer.run()
    assert_same_bits(got, layer.attend())
    assert_right(layer, got)


SCALES_IN_ARRAYS = [
    *((fmt, 1.0, ("bmm1_scale",)) for fmt in CACHES),
    *(("fp8_e4m3", 0.7, names) for names in (("bmm1_scale",), ("bmm2_scale",),
                                             ("bmm1_scale", "bmm2_scale"))),
]  # fmt: skip


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize(("fmt", "bmm2", "names"), SCALES_IN_ARRAYS)
@pytest.mark.parametrize("e4m3", [False, True])
def test_scales_in_arrays(e4m3, fmt, bmm2, names, shape):
    """They are the same as numbers, for an e4m3 query and a bf16 one."""
    layer = Layer(fmt, fmt, e4m3=e4m3, bmm1=0.031, bmm2=bmm2)
    scales = {"bmm1_scale": layer.bmm1, "bmm2_scale": layer.bmm2}
    got = layer.run(**{name: np.full(shape, scales[name], np.float32) for name in names})
    assert_right(layer, got)
    if e4m3 or DEVICE == "cpu":  # for a bf16 query of a GPU, numbers may have another kernel
        assert_same_bits(got, layer.run())


BAD_QUOTIENTS = [(1e-30, 1e30), (1e30, 1e-30), (2.0**-126, 2.0), (2.0**-126, 1.5), (2e38, 0.5)]


def as_one_fp32(x):
    return np.full(1, x, np.float32)


@pytest.mark.parametrize(
    "forms",
    [(float, float)]
    if DEVICE != "cpu"
    else [(a, b) for a in (float, as_one_fp32) for b in (float, as_one_fp32)],
)
@pytest.mark.parametrize(("bmm1", "bmm2"), BAD_QUOTIENTS)
def test_a_quotient_beyond_a_float_is_refused(bmm1, bmm2, forms):
    """Both scales are in range, and what logits are multiplied with is not."""
    layer = Layer("fp8_e4m3", "fp8_e4m3")
    scales = {"bmm1_scale": forms[0](bmm1), "bmm2_scale": forms[1](bmm2)}
    with pytest.raises(ValueError, match="bmm1_scale") as info:
        layer.run(**scales)
    rule = "`bmm1_scale` must make 1.17549e-38 to 2.35866e+38 of bmm1_scale / bmm2_scale"
    got = f"got {np.float32(bmm1):g} / {np.float32(bmm2):g}"
    assert str(info.value) == f"sparse_mla_dsv4: {rule}, {got}"


@pytest.mark.parametrize(
    ("bmm1", "bmm2"), [(2.0**-126, 1.0), (2.0**-120, 2.0**6), (2.0**-66, 2.0**-60)]
)
def test_the_least_quotients_are_taken(bmm1, bmm2):
    layer = Layer("fp8_e4m3", "fp8_e4m3", bmm1=bmm1, bmm2=bmm2)
    got = layer.run()
    assert np.isfinite(ref.to_f32(got)).all()
    assert_same_bits(got, layer.attend())


FINITE = "make at most 2.35866e+38 of all scales of logits"
NORMAL = "make 0 or 1.17549e-38 to 2.35866e+38 of softmax_scale * q_scale"
BAD_PRODUCTS = [
    *((1e30, name, 1e10, FINITE) for name in ("kv_scale", "extra_kv_scale")),
    *((scale, "q_scale", 1e10, NORMAL) for scale in (1e30, -1e30)),
    (1e-30, "q_scale", 1e-30, NORMAL),
    (2.0**-126, "q_scale", 0.5, NORMAL),
]


@pytest.mark.parametrize("form", [float, as_one_fp32] if DEVICE == "cpu" else [float])
@pytest.mark.parametrize(("softmax_scale", "name", "scale", "rule"), BAD_PRODUCTS)
def test_a_product_beyond_a_float_is_refused(softmax_scale, name, scale, rule, form):
    """Each scale is in range; their product is infinite, and 0 times it NaN, or it is 0."""
    layer = Layer("fp8_e4m3", "fp8_e4m3", e4m3=True)
    with pytest.raises(ValueError, match=name) as info:
        layer.attend(**{"softmax_scale": softmax_scale, name: form(scale)})
    got = f"got {np.float32(softmax_scale):g} * {scale:g}"
    assert str(info.value) == f"sparse_attention: `{name}` must {rule}, {got}"


def test_one_cache_twice():
    """A layer without compressed tokens: the table is as wide as the window."""
    layer = Layer(K=0)
    got = layer.run(compressed_kv_cache=layer.swa.cache)
    alone = layer.attend(extra_kv_cache=None, extra_indices=None, extra_topk_length=None)
    assert_same_bits(got, alone)
    assert_right(layer, got)


def test_slots_of_a_mixed_batch():
    """What build_mixed_sparse_indices makes is what this operator takes."""
    layer = Layer(T=3, W=3, K=4)
    layer.indices, layer.lengths = sparse_mla.build_mixed_sparse_indices(
        int32([8, 9, -1]), int32([2, -1]), None, int32([0, 1], [1, 0]), int32(0, 1, 3), int32(3, 9),
        int32(0, 1, 1), int32([4, 0, 0], [2, 5, 6]), 4, int32([7], [3]), 4, 3, 4, 2,
        decode_indices_are_local=True,
    )  # fmt: skip
    assert layer.lengths.tolist() == [4, 5, 5]
    assert layer.indices[0].tolist() == [8, 9, -1, 30, -1, -1, -1]
    assert_right(layer, layer.run())


def test_parts_of_a_batch():
    """As the seed calls it: once for decode tokens, then for prefill tokens."""
    layer = Layer(T=6)
    whole = layer.run()
    for part in (slice(0, 2), slice(2, 6)):
        got = layer.run(
            query=layer.q[part], sparse_indices=layer.indices[part],
            sparse_topk_lens=layer.lengths[part], out=np.zeros_like(layer.q[part]),
        )  # fmt: skip
        assert_same_bits(got, whole[part])


def test_more_heads_in_out_and_sinks():
    layer = Layer()
    want = layer.run()
    out = Guarded((5, 8, 512), ref.BF16)
    before = out.array.copy()
    sinks = np.concatenate([layer.sinks, np.full(4, np.nan, np.float32)])
    layer.run(out=out.array, sinks=sinks)
    out.check(written=False)
    assert_same_bits(out.array[:, :4], want)
    assert_same_bits(out.array[:, 4:], before[:, 4:])


def test_without_sinks_and_out():
    layer = Layer()
    layer.sinks = None
    assert_right(layer, layer.run())
    got = sparse_mla.sparse_mla_dsv4(
        layer.q, layer.swa.cache, None, layer.indices, layer.compressed.cache, layer.lengths, None,
        bmm1_scale=SCALE, window=layer.W,
    )  # fmt: skip
    assert_same_bits(np.asarray(got), layer.run())


def test_tokens_without_keys_are_zeros():
    layer = Layer()
    layer.indices[1] = -1
    got = layer.run()
    assert not ref.bits16(got)[[1, 3]].any()
    assert ref.bits16(got)[0].any()


def test_strided_tables_and_lengths():
    layer = Layer()
    want = layer.run()
    wide = np.full((5, layer.indices.shape[1] + 9), 3, np.int32)
    wide[:, 4:-5] = layer.indices
    apart = np.repeat(layer.lengths, 3)[::3]
    got = layer.run(sparse_indices=wide[:, 4:-5], sparse_topk_lens=apart)
    assert_same_bits(got, want)


def test_what_is_not_needed_is_not_read():
    """Arguments of other implementations, and the contents of a workspace."""
    layer = Layer()
    want = layer.run()
    size = sparse_mla.attention_workspace_size(5, 4, layer.W, extra_topk=layer.K, device="cpu")
    got = layer.run(
        workspace_buffer=np.full(max(size, 1 << 20), 0xA5, np.uint8),
        seq_lens=np.array([3, -7], np.int32),
        cum_seq_lens_q=np.array([0, 99], np.int32),
        max_q_len=1,
    )
    assert_same_bits(got, want)


REFUSED = {
    "V4.1's rows": ({"swa_kv_cache": Pages("fp8_v41").cache}, "swa_kv_cache"),
    "V3.2's rows": (
        {"compressed_kv_cache": np.zeros((2, 4, 656), np.uint8)},
        "compressed_kv_cache",
    ),
    "a query of 576": ({"query": np.zeros((5, 4, 576), ref.BF16)}, "query"),
    "a query of rank 2": ({"query": np.zeros((5, 512), ref.BF16)}, "query"),
    "129 heads": ({"query": np.zeros((5, 129, 512), ref.BF16)}, "query"),
    "no compressed cache": ({"compressed_kv_cache": None}, "compressed_kv_cache"),
    "other tokens": ({"sparse_indices": np.zeros((4, 47), np.int32)}, "sparse_indices"),
    "a narrow table": ({"window": 48}, "sparse_indices"),
    "no window": ({"window": 0}, "window"),
    "lengths of other tokens": ({"sparse_topk_lens": np.zeros(4, np.int32)}, "sparse_topk_lens"),
    "few sinks": ({"sinks": np.zeros(3, np.float32)}, "sinks"),
    "bmm1 of 0": ({"bmm1_scale": 0.0}, "bmm1_scale"),
    "bmm1 is NaN": ({"bmm1_scale": np.nan}, "bmm1_scale"),
    "bmm1 below 0": ({"bmm1_scale": -1.0}, "bmm1_scale"),
    "two numbers": ({"bmm1_scale": np.ones(2, np.float32)}, "bmm1_scale"),
    "bmm2 where none belongs": ({"bmm2_scale": 0.5}, "bmm2_scale"),
    "bmm2 in an array there": ({"bmm2_scale": np.ones(1, np.float32)}, "bmm2_scale"),
    "a small workspace": ({"workspace_buffer": np.zeros(8, np.uint8)}, "workspace_buffer"),
    "out of other tokens": ({"out": np.zeros((4, 4, 512), ref.BF16)}, "out"),
    "out in a cache": ({"out": "query"}, "out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    changes, argument = REFUSED[name]
    layer = Layer(T=5)
    if changes.get("out") is not None and isinstance(changes["out"], str):
        changes = {"out": layer.q}
    if name == "a small workspace":
        layer = Layer(T=1, H=128, W=128, K=2000)  # is split on a GPU, and so needs one there
    with pytest.raises((ValueError, TypeError), match=rf"sparse_mla_dsv4: `{argument}") as caught:
        layer.run(**changes)
    assert " must " in str(caught.value)
    assert ", got" in str(caught.value)
