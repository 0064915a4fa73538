"""DenseMLA(absorb=True): from the queries' latents to the layer's output, on both paths, in bf16
and in every scheme of e4m3. Compared with fp64, and with a layer that absorbs nothing."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import reference as ref
from cases import random_bf16
from dense_steps import Case, Exact, count_merges, draw, travel, wide
from helpers import NO_NAN, Guarded, assert_same_bits

import sparse_mla as package

dense = package.dense
SCHEMES = ("tensor", "block", "token_tensor", "token_channel")
GROUPS = {"block": (128, 128), "token_channel": (1, -1)}  # weights are [out, in]; else (-1, -1)
IN_BF16, IN_FP8 = 0.012, 0.05  # bounds of |y - y0| / |y0|


def host(x) -> np.ndarray:
    """An array in fp64, from whatever device."""
    return wide(x) if isinstance(x, np.ndarray) else x.float().cpu().numpy().astype(np.float64)


def distance(got, want) -> float:
    return float(np.linalg.norm(host(got) - want) / np.linalg.norm(want))


def quantize(weight: np.ndarray, scheme: str) -> tuple[np.ndarray, np.ndarray]:
    """A weight [out, in] in e4m3, by the formula, with scales that are no powers of two."""
    rows, columns = weight.shape
    group = GROUPS.get(scheme, (-1, -1))
    m, n = (size if g < 0 else g for g, size in zip(group, weight.shape, strict=True))
    blocks = -(-rows // m), -(-columns // n)
    padded = np.zeros((blocks[0] * m, blocks[1] * n), np.float32)
    padded[:rows, :columns] = np.abs(weight)
    scale = np.float32(1) * padded.reshape(blocks[0], m, blocks[1], n).max((1, 3)) / 448
    each = scale.repeat(m, 0)[:rows].repeat(n, 1)[:, :columns]
    return ref.e4m3_encode(weight / each).view(ref.E4M3), scale


def dequantize(pair, scheme: str) -> np.ndarray:
    weight, scale = pair
    rows, columns = weight.shape
    group = GROUPS.get(scheme, (-1, -1))
    m, n = (size if g < 0 else g for g, size in zip(group, weight.shape, strict=True))
    return wide(weight) * wide(scale).repeat(m, 0)[:rows].repeat(n, 1)[:, :columns]


class Layer:
    """The weights of one layer around a case's batch: q_proj [Lq, H (Pn + R)], kv_b_proj [512, H
    (Pn + Pv)] and o_proj [hidden, H Pv] in bf16, or, with a scheme, pairs of e4m3."""

    def __init__(self, case: Case, queries=256, hidden=384, scheme: str | None = None) -> None:
        rng = np.random.default_rng([case.seed, 77])
        self.case, self.scheme, self.hidden = case, scheme, hidden
        heads, tokens = case.heads, case.batch.num_actual_tokens
        columns, inner = heads * (case.nope + case.rope), heads * case.values
        self.q_c = random_bf16(rng, tokens, queries)
        q_proj = random_bf16(rng, queries, columns, std=queries**-0.5)
        o_proj = random_bf16(rng, hidden, inner, std=inner**-0.5)
        exact = [wide(x) for x in (q_proj, case.weight, o_proj)]
        self.weights = {"q_proj": q_proj, "kv_b_proj": case.weight, "o_proj": o_proj}
        if scheme:
            stored = [np.ascontiguousarray(x) for x in (exact[0].T, exact[1].T, exact[2])]
            pairs = [quantize(x.astype(np.float32), scheme) for x in stored]
            self.weights = dict(zip(self.weights, pairs, strict=True))
            exact = [dequantize(pair, scheme) for pair in pairs]
            exact[0], exact[1] = exact[0].T, exact[1].T
        self.q_proj, self.kv_b_proj, self.o_proj = exact
        # What the case's own layer and reference begin with.
        q = np.nan_to_num(wide(self.q_c)) @ self.q_proj
        self.case.q = ref.to_bf16(q.reshape(tokens, heads, -1).astype(np.float32))
        self.case.weight = ref.to_bf16(self.kv_b_proj.astype(np.float32))

    def make(self, config, trip, **options):
        if self.scheme == "token_tensor" and options.get("requantize", True):
            options.setdefault("scheme", self.scheme)
        weights = {name: trip.put(x) for name, x in (self.weights | options).items()}
        return dense.DenseMLA(config, absorb=True, rope_table=trip.put(self.case.table), **weights)

    def run(self, options=(), **changes) -> np.ndarray:
        """A step of the layer, whose results are checked for what they must leave alone.
        -> [T, hidden]"""
        case, trip, batch = self.case, travel(), self.case.batch
        config = case.config(**changes)
        # In e4m3, padding is finite, because a scale of all rows counts it, too.
        self.q_c[len(self.q_c) - case.padding :] = np.nan if self.scheme is None else 1
        builder = dense.MetadataBuilder(config)
        names = ("query_start_loc", "seq_lens", "slot_mapping", "block_table")
        common = package.CommonAttentionMetadata(
            *(trip.put(getattr(batch, name)) for name in names),
            query_start_loc_cpu=batch.query_start_loc,
            seq_lens_cpu=batch.seq_lens,
            num_actual_tokens=batch.num_actual_tokens,
        )
        case.metadata = builder.build(common)
        layer = self.make(config, trip, **dict(options))
        out = Guarded((batch.num_actual_tokens + 2, self.hidden), ref.BF16, poison=NO_NAN)
        arrays = (self.q_c, case.kv_c, case.k_pe if case.rope else None)
        before = [x.copy() for x in arrays if x is not None]
        given = trip.put((*arrays, case.cache.copy()))
        layer.forward(*given, case.metadata, out=trip.put(out.array), kv_scale=case.kv_scale)
        trip.fetch()
        for x, y in zip(before, (x for x in arrays if x is not None), strict=True):
            assert_same_bits(x, y, "an input")
        got = np.asarray(out.check(written=False))
        assert (got[-2:].view(np.uint8) == NO_NAN).all(), "a row past the step was written"
        got = got[:-2]
        assert not wide(got[len(got) - case.padding :]).any()
        return got[: len(got) - case.padding]

    def project(self, values: np.ndarray) -> np.ndarray:
        """[T, H, Pv] -> [T, hidden] in fp64."""
        return values.reshape(len(values), -1) @ self.o_proj.T

    def exact(self, path: str) -> np.ndarray:
        want: Exact = self.case.exact(count_merges(self.case), path)
        return self.project(want.out)


# --- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["separate", "mixed"])
@pytest.mark.parametrize("first", range(0, 24, 8))
def test_random_batches(first, path):
    """Both plans with small workspaces, against fp64."""
    for seed in range(first, first + 8):
        layer = Layer(draw(seed))
        page = layer.case.page
        for plan in ("equal", "packed"):
            rows = 6 * page if plan == "equal" else 2 * page
            options = {"context_plan": plan, "prefill_workspace_tokens": rows, "path": path}
            got = layer.run(**options)
            assert distance(got, layer.exact(path)) < IN_BF16, seed


@pytest.mark.parametrize("path", ["separate", "mixed"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_ds_mla", "fp8_token"])
def test_schemes(scheme, path, fmt):
    """e4m3 weights are e4m3 again, or bf16 with requantize=False."""
    case = Case([1, 1, 1, 7, 2, 30], [50, 0, 77, 200, 0, 33], fmt=fmt, padding=2, seed=4)
    layer = Layer(case, scheme=scheme)
    options = {"path": path, "prefill_workspace_tokens": 96}
    got = layer.run(**options)
    want = layer.exact(path)
    assert distance(got, want) < IN_FP8
    plain = layer.run({"requantize": False}, **options)
    assert distance(plain, want) < IN_BF16
    assert not np.array_equal(got, plain)


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_a_layer_that_absorbs_nothing_gives_the_same(scheme):
    """On the same weights, whose q and o projections run in fp64 there."""
    case = Case([1, 1, 9, 20], [40, 300, 100, 0], heads=16, seed=5)
    layer = Layer(case, scheme=scheme)
    for path in ("separate", "mixed"):
        want = layer.project(wide(case.run(path=path, prefill_workspace_tokens=64)))
        got = layer.run(path=path, prefill_workspace_tokens=64)
        assert distance(got, want) < (IN_FP8 if scheme else IN_BF16)


@pytest.mark.parametrize("path", ["separate", "mixed"])
def test_without_rope(path):
    layer = Layer(Case([1, 1, 12], [30, 5, 40], rope=0))
    got = layer.run(path=path, prefill_workspace_tokens=32)
    assert distance(got, layer.exact(path)) < IN_BF16


@pytest.mark.parametrize(("queries", "hidden", "heads"), [(384, 384, 2), (3, 5, 1), (1000, 77, 3)])
def test_sizes(queries, hidden, heads):
    """A q_proj of hidden states, and sizes that are no multiples of anything."""
    layer = Layer(Case([1, 5, 9], [30, 5, 40], heads=heads), queries, hidden)
    for path in ("separate", "mixed"):
        got = layer.run(path=path, prefill_workspace_tokens=96)
        assert distance(got, layer.exact(path)) < IN_BF16


@pytest.mark.parametrize("scheme", ["tensor", "block"])
def test_a_long_latent_of_one_head(scheme):
    """Its e4m3 values do not fit where results of one head would lie."""
    layer = Layer(Case([1, 1], [30, 5], heads=1), queries=8192, hidden=128, scheme=scheme)
    assert distance(layer.run(), layer.exact("mixed")) < IN_FP8


def test_a_latent_that_is_too_long():
    """Refused by its length, however few tokens a step has."""
    layer = Layer(Case([1, 1], [30, 5], heads=1), queries=8320, hidden=128, scheme="tensor")
    for tokens in (2, 20):
        text = r"^dense\.forward: `q_c` must have at most 8192 values per token .*, got 8320"
        with pytest.raises(ValueError, match=text):
            layer.run(max_num_batched_tokens=tokens)
    assert distance(layer.run({"requantize": False}), layer.exact("mixed")) < IN_BF16


def test_a_square_pair_is_stored_as_layers_store_it():
    """[outputs, 512] with 512 outputs; an array of this shape is [512, outputs]."""
    case = Case([1, 6], [20, 30], heads=4, nope=64, values=64)
    for scheme in ("tensor", "block", "token_channel"):
        layer = Layer(case, scheme=scheme)
        weight, scale = layer.weights["kv_b_proj"]
        assert weight.shape == (512, 512)
        want = layer.run()
        assert distance(want, layer.exact("separate")) < IN_FP8
        turned = {"kv_b_proj": weight.T, "weight_scale_inv": scale.T}
        assert_same_bits(layer.run(turned), want)


def test_a_scale_of_a_bf16_weight_counts_everywhere():
    """In what decodes absorb, and in what makes keys and values for prefills."""
    layer = Layer(Case([1, 6], [20, 30]))
    weight = layer.weights["kv_b_proj"]
    half = {"kv_b_proj": ref.to_bf16(2 * ref.to_f32(weight)), "weight_scale_inv": np.full(1, 0.5)}
    half["weight_scale_inv"] = half["weight_scale_inv"].astype(np.float32)
    want = layer.run({"requantize": False})
    assert_same_bits(layer.run(half | {"requantize": False}), want)
    plain = dense.DenseMLA(layer.case.config(device="cpu"), **half)
    assert_same_bits(np.asarray(plain.kv_b_proj), weight)


def test_storages_give_the_same_bits():
    """Transposed weights, and pairs of scales, or a scale of their own."""
    layer = Layer(Case([1, 6], [20, 30]))
    want = layer.run()
    names = "q_proj", "kv_b_proj", "o_proj"
    turned = {name: np.ascontiguousarray(layer.weights[name].T) for name in names}
    assert_same_bits(layer.run(turned), want)
    widened = {name: ref.to_f32(layer.weights[name]) for name in names}
    assert_same_bits(layer.run(widened), want)
    layer = Layer(layer.case, scheme="block")
    want = layer.run()
    weight, scale = layer.weights["kv_b_proj"]
    assert_same_bits(layer.run({"kv_b_proj": weight, "weight_scale_inv": scale}), want)
    turned = np.ascontiguousarray(weight.T), np.ascontiguousarray(scale.T)
    assert_same_bits(layer.run({"kv_b_proj": turned}), want)


def test_kv_b_proj_is_dequantised_in_fp32():
    """What absorbs it is within one rounding of fp64; W_UK in bf16 would add a second one."""
    layer = Layer(Case([1], [0], heads=2), scheme="token_channel")
    made = layer.make(layer.case.config(), travel(), requantize=False).absorbed
    heads, nope = 2, layer.case.nope
    q = layer.q_proj.reshape(256, heads, -1)[..., :nope]
    w_uk = layer.kv_b_proj.reshape(512, heads, -1)[..., :nope]
    want = np.einsum("qhn,lhn->qhl", q, w_uk).reshape(256, -1)
    size = np.einsum("qhn,lhn->qhl", np.abs(q), np.abs(w_uk)).reshape(256, -1)
    error = np.abs(host(made.W_Q_UK) - want)
    assert (error <= 2.0**-8 * np.abs(want) + nope * 2.0**-23 * size).all()


def test_a_step_without_tokens():
    layer = Layer(Case([1, 4], [3, 0]))
    trip = travel()
    config = layer.case.config()
    nothing = np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int64)
    table = np.zeros((0, 1), np.int32)
    common = package.CommonAttentionMetadata(
        *trip.put((*nothing, table)),
        query_start_loc_cpu=nothing[0],
        seq_lens_cpu=nothing[1],
        num_actual_tokens=0,
    )
    metadata = dense.MetadataBuilder(config).build(common)
    made = layer.make(config, trip)
    arrays = trip.put((layer.q_c, layer.case.kv_c, layer.case.k_pe, layer.case.cache))
    out = made.forward(*arrays, metadata)
    assert tuple(out.shape) == (5, 384)
    assert not host(out).any()
    assert made.forward(*arrays, None, out=arrays[0]) is arrays[0]


def test_results_that_are_left_out():
    layer = Layer(Case([1, 4], [3, 0]), scheme="block")
    trip = travel()
    config = layer.case.config()
    batch = layer.case.batch
    names = ("query_start_loc", "seq_lens", "slot_mapping", "block_table")
    common = batch.common(package, **{name: trip.put(getattr(batch, name)) for name in names})
    metadata = dense.MetadataBuilder(config).build(common)
    arrays = trip.put((layer.q_c, layer.case.kv_c, layer.case.k_pe, layer.case.cache.copy()))
    out = layer.make(config, trip).forward(*arrays, metadata)
    assert tuple(out.shape) == (5, 384)
    assert np.array_equal(host(out), wide(layer.run()))


# --- which scheme --------------------------------------------------------------------------------


class NumpyLayer:
    """A linear layer of whatever form, which runs on the CPU alone."""

    def __init__(self, matrix: np.ndarray) -> None:
        self.matrix, self.in_features = matrix.astype(np.float32), len(matrix)

    def __call__(self, x):
        return x @ self.matrix


def layers_of(layer: Layer) -> dict:
    matrices = layer.q_proj, layer.kv_b_proj, layer.o_proj.T
    return {
        name: NumpyLayer(x)
        for name, x in zip(("q_proj", "kv_b_proj", "o_proj"), matrices, strict=True)
    }


def make_cpu(layer: Layer, **options):
    config = dataclasses.replace(layer.case.config(), device="cpu")
    return dense.DenseMLA(config, absorb=True, **(layer.weights | options))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_are_requantised_by_name_alone(scheme):
    layer = Layer(Case([1], [0]), scheme=scheme)
    layers = layers_of(layer)
    made = make_cpu(layer, **layers).absorbed
    assert made.scheme is None
    made = make_cpu(layer, **layers, scheme=scheme).absorbed
    assert made.scheme == scheme
    assert made.W_Q_UK[0].dtype == ref.E4M3
    want = make_cpu(layer, scheme=scheme).absorbed
    for got, pair in ((made.W_Q_UK, want.W_Q_UK), (made.W_UV_O, want.W_UV_O)):
        assert np.allclose(wide(got[1]), wide(pair[1]), rtol=1e-5)
    assert make_cpu(layer, **layers, scheme=scheme, requantize=False).absorbed.scheme is None


@pytest.mark.parametrize("scheme", SCHEMES)
def test_plain_weights_are_quantised_on_request(scheme):
    layer = Layer(Case([1, 8], [20, 30]))
    assert make_cpu(layer).absorbed.scheme is None
    got = layer.run({"scheme": scheme})
    assert distance(got, layer.exact("separate")) < IN_FP8


@pytest.mark.parametrize("scheme", SCHEMES)
def test_pairs_tell_their_scheme(scheme):
    layer = Layer(Case([1], [0]), scheme=scheme)
    told = "tensor" if scheme == "token_tensor" else scheme
    assert make_cpu(layer).absorbed.scheme == told
    assert make_cpu(layer, scheme=scheme).absorbed.scheme == scheme
    vectors = {n: (w, s.ravel()) for n, (w, s) in layer.weights.items() if scheme != "block"}
    assert make_cpu(layer, **vectors).absorbed.scheme == told


def test_unequal_and_mixed_schemes_are_refused():
    """The text names all three. With requantize=False any mix gives bf16."""
    case = Case([1], [0])
    kinds = {scheme: Layer(case, scheme=scheme).weights for scheme in (None, *SCHEMES)}
    every = {name: kinds[None][name] for name in ("q_proj", "kv_b_proj", "o_proj")}
    layer = Layer(case)
    start = (
        "^DenseMLA: `q_proj`, `kv_b_proj` and `o_proj` must have one scheme to be requantised, got "
    )
    mixes = [
        ("block", "block", "tensor", {}),
        ("token_channel", "block", "tensor", {}),
        ("block", None, "block", {}),
        (None, None, "tensor", {}),
        ("tensor", "tensor", "tensor", {"scheme": "block"}),
        ("block", "block", "block", {"scheme": "token_channel"}),
    ]
    for *names, options in mixes:
        weights = {n: kinds[s][n] for n, s in zip(every, names, strict=True)}
        q, kv_b, o = (s or "plain" for s in names)
        text = f"{start}q_proj {q}, kv_b_proj {kv_b}, o_proj {o}"
        with pytest.raises(ValueError, match=text):
            make_cpu(layer, **weights, **options)
        made = make_cpu(layer, **weights, **options, requantize=False)
        assert made.absorbed.scheme is None
        assert made.absorbed.W_Q_UK.dtype == ref.BF16
    mixed = kinds["block"] | {"q_proj": layers_of(layer)["q_proj"]}
    with pytest.raises(ValueError, match=f"{start}q_proj plain, kv_b_proj block, o_proj block"):
        make_cpu(layer, **mixed)
    assert make_cpu(layer, **mixed, scheme="block").absorbed.scheme == "block"


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"q_proj": None}, "^DenseMLA: `q_proj` must be given to absorb, got none"),
        ({"o_proj": None}, "^DenseMLA: `o_proj` must be given to absorb, got none"),
        ({"scheme": "row"}, "^DenseMLA: `scheme` must be None or one of 'tensor', .*, got 'row'"),
        ({"q_proj": np.zeros((256, 480), np.uint8)}, "^DenseMLA: `q_proj` must be a pair .* e4m3"),
        ({"kv_b_proj": np.zeros((512, 400), ref.E4M3)}, "^DenseMLA: `kv_b_proj` must be a pair"),
        ({"q_proj": np.zeros((256, 481), np.float32)}, r"5 heads x \(32 \+ 64\), got \[256, 481\]"),
        ({"o_proj": np.zeros((9, 239), np.float32)}, "`o_proj` must have shape .*5 heads x 48"),
        (
            {
                "kv_b_proj": (np.zeros((512, 400), np.uint8), np.ones(3, np.float32)),
                "requantize": False,
            },
            r"`weight_scale_inv` must have shape \[4, 4\], got \[3\]",
        ),
        ({"kv_b_proj": (np.zeros((512, 400), np.float32),)}, "pair .* got 1 items"),
        (
            {"q_proj": np.zeros((200, 480), np.float32), "scheme": "tensor"},
            "^DenseMLA: `q_proj` must have a multiple of 128 inputs to be quantised, got 200",
        ),
        (
            {"o_proj": np.zeros((200, 240), np.float32), "scheme": "block"},
            "^absorb: `scheme` must not be 'block' unless .*, got 256 and 200",
        ),
    ],
    ids=str,
)
def test_bad_weights(options, text):
    with pytest.raises(ValueError, match=text):
        make_cpu(Layer(Case([1], [0])), **options)


@pytest.mark.parametrize("name", ["q_proj", "kv_b_proj", "o_proj"])
def test_pairs_of_no_arrays(name):
    layer = Layer(Case([1], [0]), scheme="tensor")
    weight, _ = layer.weights[name]
    text = rf"^DenseMLA: `{name}` must be a pair \(weight, scale\) of arrays, got .*'float'\]"
    with pytest.raises(TypeError, match=text):
        make_cpu(layer, **{name: (weight, 0.5)})
    with pytest.raises(ValueError, match=rf"^DenseMLA: `{name}` must have shape .*, got \[9\]"):
        make_cpu(layer, **{name: (weight.reshape(-1)[:9], np.ones(1, np.float32))})


@pytest.mark.parametrize("name", ["q_proj", "kv_b_proj", "o_proj"])
def test_scales_of_no_scheme(name):
    """Refused as what they are, and not because the three schemes differ."""
    layer = Layer(Case([1], [0]), scheme="token_channel")
    weight, scale = layer.weights[name]
    outputs, blocks = len(weight), [-(-n // 128) for n in weight.shape]
    shapes = rf"\[{outputs}\], \[{outputs}, 1\] or {re.escape(str(blocks))}"
    text = rf"^DenseMLA: `{name}` must have a scale of one value, or of shape {shapes}, got "
    for wrong in (scale.T, scale[1:], scale[None]):
        with pytest.raises(ValueError, match=text + re.escape(str(list(wrong.shape)))):
            make_cpu(layer, **{name: (weight, wrong)})


def test_a_pair_and_a_scale():
    layer = Layer(Case([1], [0]), scheme="tensor")
    with pytest.raises(ValueError, match="without `weight_scale_inv`, got 2 items and an array"):
        make_cpu(layer, weight_scale_inv=np.ones(1, np.float32))


def test_a_scheme_without_absorption():
    with pytest.raises(ValueError, match=r"^DenseMLA: `scheme` must be None without absorb=True"):
        dense.DenseMLA(Case([1], [0]).config(), kv_b_proj=np.zeros((512, 400)), scheme="block")


def test_bad_arrays():
    layer = Layer(Case([1, 4], [9, 9]), hidden=256)
    case, trip = layer.case, travel()
    config = case.config(prefill_workspace_tokens=64)
    names = ("query_start_loc", "seq_lens", "slot_mapping", "block_table")
    batch = {name: trip.put(getattr(case.batch, name)) for name in names}
    memory = trip.put(np.zeros((64, 400), ref.BF16))
    builder = dense.MetadataBuilder(config, up_workspace=memory)
    metadata = builder.build(case.batch.common(package, **batch))
    q_c, *rest = trip.put((layer.q_c, case.kv_c, case.k_pe, case.cache.copy()))
    made = layer.make(config, trip)
    bad = {
        r"`q_c` must have shape \[>= 5, any\], got \[4, 256\]": q_c[:4],
        r"`W_Q_UK` must have shape \[255, 2560\], got \[256, 2560\]": q_c[:, :255],
        "`q_c` must be bfloat16, got float32": trip.put(np.zeros((5, 256), np.float32)),
    }
    for text, given in bad.items():
        with pytest.raises((TypeError, ValueError), match=rf"^dense\.forward: {text}"):
            made.forward(given, *rest, metadata)
    with pytest.raises(ValueError, match=r"`out` must not overlap `up_workspace`"):
        made.forward(q_c, *rest, metadata, out=memory.reshape(-1)[:1280].reshape(5, 256))
    with pytest.raises(ValueError, match=r"`out` must not overlap `q_c`"):
        made.forward(q_c, *rest, metadata, out=q_c)
    mixed = layer.make(case.config(path="mixed"), trip)
    with pytest.raises(ValueError, match=r"^dense\.forward: `W_Q` must"):
        mixed.forward(q_c, *rest, metadata)


def test_what_a_layer_shows():
    layer = Layer(Case([1], [0]))
    made = make_cpu(layer)
    assert repr(made).endswith("absorb=True, scheme=None)")
    assert (made.W_UK, made.W_UV) == (None, None)
    assert made.absorbed.W_Q.shape == (256, 5 * 32)
    assert made.absorbed.o_proj.shape == (5 * 48, 384)
    assert np.shares_memory(made.absorbed.o_proj, layer.weights["o_proj"])
    config = dataclasses.replace(layer.case.config(path="mixed"), device="cpu")
    mixed = dense.DenseMLA(config, absorb=True, **layer.weights)
    assert (mixed.absorbed.W_Q, mixed.absorbed.o_proj, mixed.kv_b_proj) == (None, None, None)
    plain = dense.DenseMLA(config, kv_b_proj=layer.weights["kv_b_proj"])
    assert plain.absorbed is None
