"""Pairs of options of fused_inv_rope_fp8_quant, each byte for byte."""

from __future__ import annotations

import numpy as np
import reference as ref
import reference_norm as norm
from cases import angles
from helpers import assert_same_bits
from library import package, sparse_mla
from pairs import OUTPUTS, Output, Spy, cover, run_table
from test_inverse_rope import attended

F32 = np.float32

INVERSES = {
    "tokens": [1, 3, 9],
    "heads": [(4, 1), (4, 4), (6, 3)],
    "positions": [np.int32, np.int64],
    "more": [0, 2],  # positions behind the tokens
    "layout": ["packed", "heads apart"],
    "scale_layout": ["fp32", "ue8m0x4"],
    "quantize": [True, False],
    "out": OUTPUTS[:3],
    "out_scale": ["made", "packed"],
    "size": [1.0, 1e-8, 1e4],
}


def test_fused_inv_rope_fp8_quant():
    spy = Spy(sparse_mla.fused_inv_rope_fp8_quant, package.fused_inv_rope_fp8_quant)

    def run(tokens, heads, positions, more, layout, scale_layout, quantize, out, out_scale, size):
        H, G = heads
        o = attended(tokens, H, heads=3 if layout == "heads apart" else 0, std=size)
        at = np.random.default_rng(tokens).integers(0, 50, tokens + more).astype(positions)
        table = angles()
        dtype = np.uint8 if quantize else ref.BF16
        result = Output(out, (tokens, G, H // G * 512), dtype)
        given = {} if result.given is None else {"out": result.given}
        is_packed = scale_layout == "ue8m0x4"
        scale_shape = (tokens, G, H // G * (1 if is_packed else 4))
        if out_scale == "packed" and quantize:
            given["out_scale"] = np.zeros(scale_shape, np.int32 if is_packed else F32)
        got = spy(o, at, table, groups=G, scale_layout=scale_layout, quantize=quantize, **given)
        if not quantize:
            bf16 = got[0] if isinstance(got, tuple) else got
            want = norm.grouped(norm.turn_back(o, at, table), G)
            assert_same_bits(ref.bits16(result.check(bf16)), ref.bf16_encode(want))
            return
        codes, scales = norm.inverse(o, at, table, G)
        scales = norm.pack_scales(scales) if is_packed else scales
        if result.given is not None:
            assert got[0] is result.given
            result.guarded.check(written=False)
        assert_same_bits(np.ascontiguousarray(got[0]).view(np.uint8), codes)
        assert_same_bits(np.ascontiguousarray(got[1])[:tokens], scales)

    run_table(cover(INVERSES), run, spy)
