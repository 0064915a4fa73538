"""Projections, absorption, splits and fp8_linear at the borders of their plans, on any number of
threads, and weights whose shapes fit more than one reading (csrc/cpu/projection)."""

from __future__ import annotations

import dataclasses

import device
import numpy as np
import pytest
import reference as ref
import test_absorb as absorption
import test_fp8_linear as linear
import test_grouped_projection as grouped
import test_projection as projection
from borders import THREADS, constants, every_address, on_threads, sizes_around
from helpers import Guarded, assert_same_bits

import sparse_mla

pytestmark = pytest.mark.skipif(device.ON_CUDA, reason="the borders are those of the CPU's plans")

PLAN = constants("cpu/projection/projection.h")
TOKENS, OUTER = PLAN["SMLA_PROJECTION_TOKENS"], PLAN["SMLA_PROJECTION_OUTER"]
ROWS = constants("cpu/projection/projection_kernel.c")["ROWS"]
ALIGN = constants("ops/check_projection_fp8.c")["QUANTIZED_ALIGN"]
ABSORB_ROWS = constants("cpu/projection/absorb.c")["ABSORB_ROWS"]
INNER = [
    constants(f"cpu/projection/projection_{unit}.h")["INNER_BLOCK"] for unit in ("fp32", "bf16")
]


# --- products ------------------------------------------------------------------------------------


def multiply(sizes: list[tuple[int, int, int, int]]) -> None:
    """Products of bf16 and of e4m3 against fp64, and each token's bits are those that it has
    alone."""
    rng = np.random.default_rng(1)
    for T, G, N, R in sizes:
        o, weight = (
            ref.to_bf16(rng.normal(0, 1, (T, G, R))),
            ref.to_bf16(rng.normal(0, 1, (G, N, R))),
        )
        value, magnitude = ref.grouped_output_projection(o, None, weight, None)
        out = Guarded(value.shape, ref.BF16, row_gap=8)
        sparse_mla.grouped_output_projection(o, None, weight, None, out=out.array)
        grouped.assert_close(out.check(), value, magnitude, T, is_e4m3=False)
        for t in (0, T - 1):
            alone = sparse_mla.grouped_output_projection(o[t : t + 1], None, weight, None)
            assert_same_bits(np.asarray(alone)[0], out.array[t], f"{T, G, N, R}, token {t}")


def multiply_e4m3(sizes: list[tuple[int, int, int, int]]) -> None:
    for size in sizes:
        grouped.Call(*size).check()


@pytest.mark.parametrize("num_threads", THREADS)
def test_blocks(num_threads):
    """Blocks of tokens, of outputs and of what is summed, one less and one more; as many tasks as
    threads."""
    sizes = [(T, 2, 5, 40) for T in sizes_around(1, ROWS, TOKENS, 2 * TOKENS)]
    sizes += [(3, 2, N, 40) for N in sizes_around(16, OUTER, 2 * OUTER)]
    sizes += [(3, 2, 5, R) for inner in INNER for R in sizes_around(inner, 2 * inner)]
    sizes += [(2, G, 9, 33) for G in sizes_around(num_threads)]
    sizes += [(TOKENS + 1, num_threads, OUTER + 1, 33)]
    on_threads(num_threads, multiply, sizes)
    sizes = [(T, 2, 5, 128) for T in sizes_around(ROWS, TOKENS)]
    sizes += [(3, 2, N, R) for N in sizes_around(OUTER) for R in (128, 256)]
    on_threads(num_threads, multiply_e4m3, sizes)


def split_and_project(size: tuple[int, int, int], T: int) -> None:
    projection.test_projections(T, size)
    projection.test_split_both_storages(size)


@pytest.mark.parametrize("num_threads", THREADS)
def test_up_projections(num_threads):
    for T in sizes_around(TOKENS):
        on_threads(num_threads, split_and_project, (2, 128, 120), T)
    for heads in sizes_around(num_threads):
        on_threads(num_threads, split_and_project, (heads, 64, 129), 3)


# --- fp8_linear ----------------------------------------------------------------------------------


def check_linear(scheme: str, sizes: list[tuple[int, int, int]]) -> None:
    for size in sizes:
        linear.make_layer(scheme, *size).check()


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("scheme", linear.SCHEMES)
def test_linear(scheme, num_threads):
    sizes = [(T, 9, 256) for T in sizes_around(TOKENS)] + [(3, N, 128) for N in sizes_around(OUTER)]
    on_threads(num_threads, check_linear, scheme, sizes)


@pytest.mark.parametrize("scheme", linear.SCHEMES)
@pytest.mark.parametrize(("T", "size"), [(1, 128), (128, 128), (3, 256), (1, 512), (512, 512)])
def test_square_weights_of_linear(T, size, scheme):
    """Scales are those of outputs, never of inputs or tokens, where all have one size."""
    layer = linear.make_layer(scheme, T, size, size)
    want = layer.check()
    if scheme == "token_channel":
        vector = dataclasses.replace(layer, descale=layer.descale[:, 0])
        assert_same_bits(vector.check(), want)


def check_workspaces(T: int, k: int) -> None:
    """What the quantised input needs, wherever it begins, and not a byte less."""
    for scheme in linear.SCHEMES:
        layer = linear.make_layer(scheme, T, 9, k)
        want = np.asarray(layer.run())
        scales = ref.scaled_quantize(layer.x, layer.input_group)[1].size
        for offset, memory in enumerate(every_address(T * k + 4 * scales + ALIGN, ALIGN)):
            least = T * k + 4 * scales + -offset % ALIGN
            memory[least:] = 0x3D
            assert_same_bits(layer.run(workspace=memory[:least]), want, scheme)
            assert (memory[least:] == 0x3D).all()
            rule = f"`workspace` must have at least {least} bytes, got {least - 1}$"
            with pytest.raises(ValueError, match=rule):
                layer.run(workspace=memory[: least - 1])


@pytest.mark.parametrize("num_threads", THREADS)
def test_exact_workspaces(num_threads):
    for T, k in ((1, 128), (3, 256), (17, 1024)):
        on_threads(num_threads, check_workspaces, T, k)


# --- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1,), (4, 4), (512,), (1, 512)])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_square_kv_b_proj(shape, heads):
    """[512, 512] is taken as [in, out]: a vector of scales is that of columns, the outputs."""
    rng = np.random.default_rng(heads)
    size = (heads, 512 // heads - 96, 96)
    codes = ref.e4m3_encode(rng.normal(0, 8, (512, 512)).astype(np.float32))
    scale = rng.uniform(0.5, 1.5, shape).astype(np.float32)
    factors = scale.repeat(128, 0).repeat(128, 1) if shape == (4, 4) else scale.reshape(1, -1)
    want = ref.bf16_encode(ref.e4m3_decode(codes) * factors)
    dims = projection.dims(*size)
    got = sparse_mla.split_kv_b_proj(codes, weight_scale_inv=scale, **dims)
    projection.check_split(got, want, size)


def test_scales_of_inputs_are_refused():
    codes, dims = np.zeros((512, 512), np.uint8), projection.dims(2, 160, 96)
    with pytest.raises(ValueError, match="`weight_scale_inv` must have shape"):
        sparse_mla.split_kv_b_proj(codes, weight_scale_inv=np.ones((512, 1), np.float32), **dims)


@pytest.mark.parametrize("kind", ["tensor", "block", "outputs", "token_channel"])
def test_square_weights_of_absorption(kind):
    """q_proj [512, 512] and o_proj [512, 512]: a vector of scales is that of outputs."""
    sizes = absorption.Sizes(queries=512, heads=4, nope=64, rope=64, values=128, hidden=512)
    rng = np.random.default_rng(2)
    q, uk, uv, o = sizes.draw()
    assert q.shape == o.shape == (512, 512)
    pairs, exact = [], []
    for x in (np.ascontiguousarray(q.T), o):
        weight = ref.e4m3_encode(x * 100).view(ref.E4M3)
        scale = absorption.make_scale(rng, x.shape, kind)
        exact.append(absorption.dequantize(weight, scale))
        pairs.append((weight, scale))
    got = absorption.absorb(pairs[0], uk, uv, pairs[1])
    absorption.check(sizes, got, (exact[0].T, uk, uv, exact[1]))


def absorb(changes: list[dict[str, int]]) -> None:
    for change in changes:
        sizes = absorption.Sizes(**change)
        arrays = sizes.draw(ref.BF16)
        absorption.check(sizes, absorption.absorb(*arrays), arrays)


@pytest.mark.parametrize("num_threads", THREADS)
def test_absorption(num_threads):
    """Blocks of rows of both products, and of what is summed."""
    changes = [{"queries": n, "heads": 1, "rope": 8} for n in sizes_around(ABSORB_ROWS)]
    changes += [{"hidden": n, "heads": 1} for n in sizes_around(ABSORB_ROWS, OUTER)]
    changes += [{"nope": n, "values": n, "queries": 5} for n in sizes_around(*set(INNER))]
    changes += [{"heads": n, "queries": 5, "hidden": 6} for n in sizes_around(num_threads)]
    on_threads(num_threads, absorb, changes)
