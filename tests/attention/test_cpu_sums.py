"""Sums that need precision: lists so long, or weights so different, that a plain sum would lose
light keys, and splits whose order shows in the bits (csrc/cpu/attention/).

All terms here are exact: logits are integers times ln 2, so weights are powers of two, and values
are bf16, or e4m3 with a scale of one. Results depend only on the order and precision of the sums.
"""

import cases
import numpy as np
import pytest
import reference as ref
from helpers import Guarded, assert_same_bits
from library import ISAS

import sparse_mla

LN_2 = float(np.log(2))  # as softmax_scale it makes q . k the exact logit in the log2 domain


def exact_keys(logits, values, fmt) -> np.ndarray:
    """One page of keys: `logits` in the first RoPE value, `values` [n, 512]. For FP8 the values are
    e4m3 numbers, and each tile gets one value of 448, which makes its scale 1."""
    keys = np.zeros((len(logits), ref.HEAD_DIM), np.float32)
    keys[:, :512] = values
    keys[:, 512] = logits
    if fmt == "fp8":
        keys[:, 127:512:128] = 448
    rows = cases.encode_keys(keys, fmt)
    assert np.array_equal(ref.decode_rows(rows, np.arange(len(rows))), keys), "not exact"
    return rows[None]


def query(num_tokens: int, factors) -> np.ndarray:
    """Queries whose heads multiply the logit of a key by these integers."""
    q = np.zeros((num_tokens, len(factors), ref.HEAD_DIM), np.float32)
    q[:, :, 512] = factors
    return ref.to_bf16(q)


def attend(q, kv, indices, num_splits) -> dict[str, np.ndarray]:
    shape = q.shape[:2]
    buffers = {"out": Guarded((*shape, 512), ref.BF16), "lse": Guarded(shape, np.float32)}
    buffers["max_logits"] = Guarded(shape, np.float32)
    outputs = {name: buffer.array for name, buffer in buffers.items()}
    options = {"softmax_scale": LN_2, "num_splits": num_splits}
    sparse_mla.sparse_attention(q, kv, indices, **options, **outputs)
    return {name: buffer.check() for name, buffer in buffers.items()}


# --- one heavy weight, many light ones -----------------------------------------------------------

FACTORS = (1, 0, 1, 2)  # 0: all weights are 1


def assert_heavy_and_light(K, light, fmt, num_splits, at) -> None:
    """One key of weight 1 in column `at` and K - 1 keys of weight 2^light.

    If the heavy key begins a block, nothing is lost. Behind light keys it rounds their sum once.
    """
    values = np.zeros((2, 512), np.float32)
    values[0, 0] = values[1, 1] = 448
    kv = exact_keys([0, light], values, fmt)
    indices = np.ones((1, K), np.int32)
    indices[0, at] = 0
    got = attend(query(1, FACTORS), kv, indices, num_splits)
    rest = (K - 1) * 2.0 ** (light * np.array(FACTORS))
    lse = np.log1p(rest)
    assert not got["max_logits"].any()
    rounded = 0 if at % 128 == 0 else 2.0**-24
    error = np.abs(got["lse"][0] - lse)
    blocks = K / 64 * 2.0**-53  # their sums are added in double
    assert (error <= 2.0**-23 * lse + rounded + blocks).all(), (got["lse"], lse)
    share = ref.to_f32(got["out"])[0, :, :2].astype(np.float64) / 448
    want = np.stack([1 / (1 + rest), rest / (1 + rest)], 1)
    # half a step of bf16; a sum of up to 2^20 equal powers of two in fp32 is exact
    assert (np.abs(share - want) <= (2.0**-8 + 2.0**-20) * want).all(), (share, want)


LONG = [
    # K, log2 of the light weights, num_splits, the heavy key's column
    (2**16, -25, 1, 0),  # the 127 of a block, added to 1 one by one, vanish
    (2**16, -25, 1, 2**15 + 27),
    (2**16, -25, 0, 2**16 - 128),
    (2**16, -33, 1, 2**15),  # their sum in a block vanishes, too
    (2**16, -33, 0, 2**16 - 1),
    (2**16, -40, 64, 1024),  # their sum in a split vanishes, too
    (2**20, -33, 1, 2**19),
    (2**20, -45, 0, 0),
]


@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
@pytest.mark.parametrize(("K", "light", "num_splits", "at"), LONG)
def test_light_keys_are_not_lost(K, light, num_splits, at, fmt):
    assert_heavy_and_light(K, light, fmt, num_splits, at)


@pytest.mark.parametrize("isa", ISAS)
def test_light_keys_are_not_lost_on(isa, monkeypatch):
    """Every instruction set has its own lanes and blocks."""
    monkeypatch.setenv("SPARSE_MLA_CPU_ISA", isa)
    for light, num_splits, at in ((-25, 1, 0), (-33, 3, 128)):
        assert_heavy_and_light(2**13, light, "bf16", num_splits, at)


# --- splits are folded in their order ------------------------------------------------------------


def fold_in_order(logits, values) -> tuple[np.ndarray, np.float32]:
    """out (bf16 patterns) and lse of parts with one key each, added in fp32 from the first part on.
    Scaling parts by powers of two does not change how the additions round."""
    weights = np.exp2(np.float32(logits) - np.max(logits))
    total = np.zeros(512, np.float32)
    for weight, value in zip(weights, values, strict=True):
        total += weight * value
    sums = float(weights.astype(np.float64).sum())
    out = ref.bf16_encode(total * np.float32(1 / sums))
    return out, np.float32(np.max(logits) * LN_2 + np.log(sums))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_splits", [2, 3, 7, 33, 64])
@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
def test_splits_are_folded_in_their_order(fmt, num_splits, isa, monkeypatch):
    """A token alone has parallel parts; in a batch that depends on the number of splits."""
    monkeypatch.setenv("SPARSE_MLA_CPU_ISA", isa)
    rng = np.random.default_rng(num_splits)
    num_tokens, num_keys = 5, 201
    # Two heavy parts come first and cancel in places. In another order they swallow the others.
    values = rng.choice([-1.0, 1.0], (num_keys, 512)) * rng.integers(8, 10, (num_keys, 512)) / 8
    logits = np.array([0.0, 1.0, 26.0])[np.arange(num_keys) % 3]
    kv = exact_keys(logits, values, fmt)
    values = ref.decode_rows(kv[0], np.arange(num_keys))[:, :512].astype(np.float32)
    indices = np.full((num_tokens, 64 * num_splits), -1, np.int32)
    level = rng.integers(0, 2, (num_tokens, num_splits))
    level[:, :2] = 2
    chosen = level + 3 * rng.integers(0, num_keys // 3, level.shape).astype(np.int32)
    chosen[:, 2:][rng.random((num_tokens, num_splits - 2)) < 0.2] = -1  # empty splits
    columns = 64 * np.arange(num_splits) + rng.integers(0, 64, num_splits)
    indices[:, columns] = chosen
    q = query(num_tokens, [1] * 18)
    batch = attend(q, kv, indices, num_splits)
    sensitive = 0
    for t in range(num_tokens):
        slots = chosen[t][chosen[t] >= 0]
        out, lse = fold_in_order(logits[slots], values[slots])
        sensitive += (out != fold_in_order(logits[slots[::-1]], values[slots[::-1]])[0]).any()
        alone = attend(q[t : t + 1], kv, indices[t : t + 1], num_splits)
        for got in (alone, {name: x[t : t + 1] for name, x in batch.items()}):
            assert_same_bits(ref.bits16(got["out"])[0], np.tile(out, (18, 1)), "out")
            assert_same_bits(got["lse"][0], np.full(18, lse), "lse")
            most = np.float32(logits[slots].max() * LN_2)
            assert_same_bits(got["max_logits"][0], np.full(18, most), "max_logits")
    assert num_splits == 2 or sensitive, "no order shows"
