"""Pairs of options of the projections, of quantisation and of absorbed weights, each against
fp64."""

from __future__ import annotations

import device
import numpy as np
import reference as ref
from cases import random_bf16
from helpers import NO_NAN, Guarded, assert_same_bits
from library import package, sparse_mla
from pairs import OUTPUTS, Output, Spy, cover, run_table
from test_absorb import SCHEMES as ABSORBED
from test_absorb import Sizes, check, dequantize, host, make_scale, put
from test_fp8_linear import SCHEMES, make_layer
from test_grouped_projection import MOST_EXACT_TOKENS, Call, assert_close

F32 = np.float32
DTYPES = {
    "bf16": ref.to_bf16,
    "fp16": lambda x: x.astype(np.float16),
    "fp32": lambda x: x.astype(F32),
}


def lay_out(x: np.ndarray, how: str) -> np.ndarray:
    """The same values packed, as a part of wider rows, or with their first axes exchanged."""
    if how == "packed" or x.ndim == 1:
        return x
    if how == "turned":
        return np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1)
    wide = np.zeros((*x.shape[:-1], x.shape[-1] + 16), x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


# --- the layer's projections ---------------------------------------------------------------------

UPS = {
    "tokens": [0, 1, 5, 70],
    "heads": [1, 3],
    "width": [8, 40, 128],
    "x": ["packed", "part", "turned"],
    "weight": ["packed", "part", "turned"],
    "out": OUTPUTS[:3],
}


def project(name: str, shapes, want, out_shape) -> None:
    spy = Spy(getattr(sparse_mla, name), getattr(package, name))

    def run(tokens, heads, width, x, weight, out):
        rng = np.random.default_rng([tokens, heads, width])
        first, second = (random_bf16(rng, *s) for s in shapes(tokens, heads, width))
        result = Output(out, out_shape(tokens, heads, width), ref.BF16)
        given = {} if result.given is None else {"out": result.given}
        got = spy(lay_out(first, x), lay_out(second, weight), **given)
        value, tolerance = want(first, second)
        assert ref.worst_ratio(result.check(got), value, tolerance) <= 1

    # Columns of a matrix of all heads are not apart.
    rules = (lambda x, weight: name != "kv_up_proj" or "turned" not in (x, weight),)
    run_table(cover(UPS, *rules), run, spy)


def test_k_up_proj():
    shapes = lambda t, h, n: ((t, h, n), (512, h, n))  # noqa: E731
    project("k_up_proj", shapes, ref.k_up_proj, lambda t, h, n: (t, h, 512))


def test_v_up_proj():
    shapes = lambda t, h, n: ((t, h, 512), (512, h, n))  # noqa: E731
    project("v_up_proj", shapes, ref.v_up_proj, lambda t, h, n: (t, h, n))


def test_kv_up_proj():
    shapes = lambda t, h, n: ((t, 512), (512, h * n))  # noqa: E731
    project("kv_up_proj", shapes, ref.kv_up_proj, lambda t, h, n: (t, h * n))


SPLITS = {
    "heads": [1, 3, 4],
    "nope": [32, 64],
    "value": [48, 64],
    "storage": ["rows", "outputs"],
    "scale": ["none", "one", "outputs", "column", "blocks"],
    "dtype": ["bf16", "fp16", "fp32", "e4m3"],
}


def test_split_kv_b_proj():
    """[512, outputs] or its transpose, with every form of a scale: bf16 of the fp32 products."""
    spy = Spy(sparse_mla.split_kv_b_proj, package.split_kv_b_proj)

    def run(heads, nope, value, storage, scale, dtype):
        rng = np.random.default_rng([heads, nope, value])
        outputs = heads * (nope + value)
        kind = {"one": "tensor", "outputs": "outputs", "column": "token_channel"}.get(scale)
        weight = rng.normal(0, 1, (outputs, 512)).astype(F32)
        weight = (
            ref.e4m3_encode(weight * F32(64)).view(ref.E4M3)
            if dtype == "e4m3"
            else DTYPES[dtype](weight)
        )
        codes = ref.e4m3_decode(weight) if dtype == "e4m3" else weight
        wide, options = ref.to_f32(codes), {}
        if scale != "none":
            factors = make_scale(rng, (outputs, 512), kind or "block")
            wide = dequantize(codes, factors).astype(F32)
            turned = storage == "rows" and factors.ndim == 2
            options["weight_scale_inv"] = np.ascontiguousarray(factors.T) if turned else factors
        given = np.ascontiguousarray(weight.T) if storage == "rows" else weight
        got = spy(given, num_heads=heads, qk_nope_head_dim=nope, v_head_dim=value, **options)
        bits = ref.bf16_encode(np.ascontiguousarray(wide.T)).reshape(512, heads, nope + value)
        for x, want in zip(got, (bits[..., :nope], bits[..., nope:]), strict=True):
            assert_same_bits(ref.bits16(np.ascontiguousarray(x)), np.ascontiguousarray(want))

    rules = (
        lambda dtype, scale: dtype != "e4m3" or scale != "none",
        # A square weight is [512, outputs], whatever was meant.
        lambda heads, nope, value, storage: storage == "rows" or heads * (nope + value) != 512,
    )
    run_table(cover(SPLITS, *rules), run, spy)


# --- grouped_output_projection -------------------------------------------------------------------

GROUPED = {
    "tokens": [1, 5, 65],
    "groups": [1, 3],
    "size": [(1, 512), (130, 512), (64, 1024)],
    "kind": ["flat", "peaky", "alike"],
    "scales": ["fp32", "packed", "bf16"],
    "codes": ["uint8", "e4m3"],
    "o": ["packed", "part", "turned"],
    "weight": ["packed", "part"],
    "scale_layout": ["packed", "part", "turned"],
    "out": OUTPUTS[:3],
}


def pack(scale: np.ndarray) -> np.ndarray:
    exponents = (np.log2(scale.astype(np.float64)) + 127).astype(np.uint8)
    return np.ascontiguousarray(exponents).view(np.int32)


def test_grouped_output_projection():
    spy = Spy(sparse_mla.grouped_output_projection, package.grouped_output_projection)

    def run(tokens, groups, size, kind, scales, codes, o, weight, scale_layout, out):
        call = Call(tokens, groups, *size, kind)
        result = Output(out, (tokens, groups, size[0]), ref.BF16)
        given = {} if result.given is None else {"out": result.given}
        if scales == "bf16":
            rng = np.random.default_rng(tokens)
            x, w = random_bf16(rng, *call.o.shape), random_bf16(rng, *call.weight.shape)
            got = spy(lay_out(x, o), None, lay_out(w, weight), None, **given)
            value, size = ref.grouped_output_projection(x, None, w, None)
            assert_close(result.check(got), value, size, tokens, is_e4m3=False)
            return
        x, w = (y.view(ref.E4M3) if codes == "e4m3" else y for y in (call.o, call.weight))
        o_scale = pack(call.o_scale) if scales == "packed" else call.o_scale
        got = spy(lay_out(x, o), lay_out(o_scale, scale_layout), lay_out(w, weight),
                  lay_out(call.weight_scale, scale_layout), **given)  # fmt: skip
        want = ref.grouped_output_projection(call.o, call.o_scale, call.weight, call.weight_scale)
        assert_close(result.check(got), *want, tokens)

    run_table(cover(GROUPED), run, spy)


# --- quantisation --------------------------------------------------------------------------------


def values(rng, shape, dtype: str, size: float) -> np.ndarray:
    """Values of this size, with a NaN and infinities among them, and zeros."""
    x = np.clip(rng.standard_t(2, shape) * size, -ref.FLT_MAX, ref.FLT_MAX).astype(F32)
    x[rng.random(shape) < 0.1] = 0
    flat = x.reshape(-1)
    for at, value in zip(rng.integers(0, max(flat.size, 1), 2), (np.nan, np.inf), strict=True):
        if flat.size > 20:
            flat[at] = value
    with np.errstate(over="ignore"):
        return DTYPES[dtype](x)


def test_dynamic_per_tensor_quant():
    spy = Spy(sparse_mla.dynamic_per_tensor_quant, package.dynamic_per_tensor_quant)

    def run(shape, dtype, size, layout, out):
        x = values(np.random.default_rng(len(shape)), shape, dtype, size)
        x[~np.isfinite(x)] = 0
        result = Output(out, shape, np.uint8)
        given = {} if result.given is None else {"out": result.given}
        how = layout if len(shape) > 1 else "packed"
        codes, scale = spy(lay_out(x, how), **given)
        want, want_scale = ref.dynamic_per_tensor_quant(x)
        assert_same_bits(result.check(codes).view(np.uint8), want)
        assert np.asarray(scale).reshape(()) == want_scale

    table = {
        "shape": [(1,), (3, 40), (4, 5, 24)],
        "dtype": [*DTYPES],
        "size": [1e-30, 1.0, 1e4, 1e37],
        "layout": ["packed", "part", "turned"],
        "out": ["made", "packed"],
    }
    rules = (lambda dtype, size: dtype != "fp16" or size < 1e30,)
    run_table(cover(table, *rules), run, spy)


def test_scaled_quantize():
    spy = Spy(sparse_mla.scaled_quantize, package.scaled_quantize)

    def run(shape, group, dtype, size, layout, out, descale):
        group = (min(group[0], shape[0]), min(group[1], shape[1]))
        x = values(np.random.default_rng(shape), shape, dtype, size)
        want, want_scale = ref.scaled_quantize(x, group)
        buffer = Guarded(shape, np.uint8, row_gap=16 if out == "gap" else 0, poison=NO_NAN)
        given = {} if out == "made" else {"out": buffer.array}
        if descale != "made":
            scales = np.zeros(want_scale.shape[:: -1 if descale == "turned" else 1], F32)
            given["descale"] = scales.T if descale == "turned" else scales
        codes, found = spy(lay_out(x, layout), group=group, **given)
        if out != "made":
            assert codes is buffer.array
            buffer.check(written=False)
        assert_same_bits(np.ascontiguousarray(codes).view(np.uint8), want)
        assert_same_bits(np.ascontiguousarray(found), want_scale)

    table = {
        "shape": [(4, 256), (128, 128), (256, 384)],
        "group": [(1, 128), (128, 128), (1, -1), (-1, -1), (-1, 1), (2, 16), (1, 1)],
        "dtype": [*DTYPES],
        "size": [1e-38, 1e-10, 1.0, 1e37],
        "layout": ["packed", "part"],
        "out": ["made", "packed", "gap"],
        "descale": ["made", "packed", "turned"],
    }
    rules = (
        lambda dtype, size: dtype != "fp16" or 1e-20 < size < 1e30,
        lambda shape, group: group[0] in (-1, 1, 2) or shape[0] % 128 == 0,
    )
    run_table(cover(table, *rules), run, spy)


# --- fp8_linear ----------------------------------------------------------------------------------

LINEAR = {
    "scheme": [*SCHEMES],
    "tokens": [1, 7, 65],
    "size": [(1, 128), (129, 384), (140, 1024)],
    "kind": ["flat", "alike"],
    "power": [0, -60, 60],  # the weight's scales are multiplied by 2 to it
    "codes": ["uint8", "e4m3"],
    "x": ["packed", "part"],
    "weight": ["packed", "part"],
    "scale_layout": ["packed", "part", "turned"],
    "column": [False, True],  # one scale per output as [out, 1]
    "workspace": ["none", "least", "more"],
    "out": OUTPUTS[:3],
}


def test_fp8_linear():
    spy = Spy(sparse_mla.fp8_linear, package.fp8_linear)

    def run(scheme, tokens, size, kind, power, codes, x, weight, scale_layout, column, workspace,
            out):  # fmt: skip
        layer = make_layer(scheme, tokens, *size, kind=kind)
        layer.descale = (layer.descale * F32(2.0**power)).astype(F32)
        result = Output(out, (tokens, size[0]), ref.BF16)
        given = {} if result.given is None else {"out": result.given}
        if workspace != "none":
            groups = ref.scaled_quantize(layer.x, layer.input_group)[1].size
            least = tokens * size[1] + 4 * groups + 15
            given["workspace"] = np.zeros(least + (64 if workspace == "more" else 0), np.uint8)
        w = layer.weight.view(ref.E4M3) if codes == "e4m3" else layer.weight
        scale = layer.descale
        if scheme == "token_channel":
            scale = scale.reshape(-1, 1) if column else scale.reshape(-1)
        elif scheme != "block":
            scale = scale.reshape(1)
        got = spy(lay_out(layer.x, x), lay_out(w, weight), lay_out(scale, scale_layout),
                  input_group=layer.input_group, **given)  # fmt: skip
        value, magnitude = layer.want()
        exact = not device.ON_CUDA or tokens <= MOST_EXACT_TOKENS
        unit = 2.0**-16 if exact else 2.0**-8
        tolerance = 2.0**-8 * np.abs(value) + unit * magnitude + 2.0**-134
        assert ref.worst_ratio(result.check(got), value, tolerance) <= 1

    run_table(cover(LINEAR), run, spy)


# --- absorb --------------------------------------------------------------------------------------


def test_absorb():
    """Plain weights of every dtype and storage give bf16; pairs give bf16, or e4m3 by a scheme."""
    spy = Spy(package.absorb)

    def run(dtype, q_form, o_form, uk, sizes, scheme, scale):
        arrays = [DTYPES[dtype](x) for x in sizes.draw(seed=sizes.heads)]
        given = [
            np.ascontiguousarray(arrays[0].T) if q_form == "outputs" else arrays[0],
            lay_out(arrays[1], uk),
            lay_out(arrays[2], uk),
            np.ascontiguousarray(arrays[3].T) if o_form == "inputs" else arrays[3],
        ]
        if scale != "none":  # layers store [out, in]
            rng = np.random.default_rng(sizes.heads)
            for at, stored in ((0, arrays[0].T), (3, arrays[3])):
                codes = ref.e4m3_encode(ref.to_f32(stored)).view(ref.E4M3)
                factors = make_scale(rng, stored.shape, scale)
                given[at] = (np.ascontiguousarray(codes), factors)
                wide = dequantize(ref.e4m3_decode(codes), factors)
                arrays[at] = wide.T if at == 0 else wide
        wide = [np.asarray(x) if x.dtype == np.float64 else ref.to_f32(x) for x in arrays]
        if scheme is None:
            check(sizes, spy(*put(tuple(given))), wide)
            return
        got = spy(*put(tuple(given)), scheme=scheme)
        want_q, _, want_o, _ = sizes.exact(*wide)
        for (codes, factors), want in zip((got[0], got[2]), (want_q, want_o), strict=True):
            value = dequantize_pair(codes, factors)
            want = want.T if value.shape != want.shape else want
            assert np.linalg.norm(value - want) <= 0.05 * np.linalg.norm(want)

    table = {
        "dtype": [*DTYPES],
        "q_form": ["inputs", "outputs"],
        "o_form": ["outputs", "inputs"],
        "uk": ["packed", "part", "turned"],
        "sizes": [Sizes(), Sizes(128, 2, 32, 0, 16, 128), Sizes(256, 4, 128, 64, 128, 384)],
        "scheme": [None, *ABSORBED],
        "scale": ["none", "tensor", "block", "token_channel"],
    }
    rules = (
        # The schemes want sizes that are multiples of 128.
        lambda sizes, scheme: scheme is None or sizes.queries % 128 == 0,
    )
    run_table(cover(table, *rules), run, spy)


def dequantize_pair(codes, factors) -> np.ndarray:
    """A weight in e4m3 with scales of any form, fp64."""
    codes = ref.e4m3_decode(np.asarray(device.host(codes)).view(np.uint8)).astype(np.float64)
    factors = np.asarray(host(factors))
    if factors.size == 1:
        return codes * factors.reshape(1, 1)
    if factors.size == codes.shape[0]:
        return codes * factors.reshape(-1, 1)
    rows, columns = codes.shape
    return codes * factors.repeat(128, 0)[:rows].repeat(128, 1)[:, :columns]
