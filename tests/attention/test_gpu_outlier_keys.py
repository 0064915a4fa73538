"""FP8 rows of which some are a hundred times the others, on the GPU.

Where references jump, Hopper's kernel takes the large keys of a list first (outlier_keys.cuh). So
keys must neither be lost nor taken twice, wherever the large ones stand, however many they are, and
results may not depend on times or on other tokens.
"""

import cases
import numpy as np
import pytest
import reference as ref
from cases import AttentionInputs
from gpu import torch
from test_gpu_growth import check, check_in_a_batch, run

T = 2
BLOCK_SIZE = 64
STEP = 128  # keys that the kernel takes at a time


def columns(share):
    """A set of columns: each with this probability."""
    return lambda rng, K: rng.random(K) < share


# Which columns of a list have large keys.
LARGE = {
    "none": columns(0.0),
    "a few": columns(0.02),
    "more than a look takes": columns(0.3),
    "most": columns(0.95),
    "late": lambda rng, K: (rng.random(K) < 0.05) & (np.arange(K) >= 5 * STEP),
    "two alone": lambda rng, K: np.isin(np.arange(K), [3 * STEP, K - 1]),
    "in one chunk": lambda rng, K: (np.arange(K) // STEP == 9) | (np.arange(K) == 200),
    "of one warp": lambda rng, K: (np.arange(K) % 16 < 4) & (rng.random(K) < 0.2),
}


def make(large, num_heads, K, num_splits, *, holes=0.0, layout="paged") -> AttentionInputs:
    """Column j of token t names key t * K + j, of which every second large one has a scale 2^7
    times the usual one, the others 2^6 times."""
    rng = np.random.default_rng([num_heads, K, num_splits])
    is_large = np.concatenate([LARGE[large](rng, K) for _ in range(T)])
    factor = np.where(is_large, 64.0 * (1 + np.arange(T * K) % 2), 1.0)[:, None]
    latent = ref.bf16_encode((rng.normal(0, 0.6, (T * K, 512)) * factor).astype(np.float32))
    rope = ref.bf16_encode((rng.normal(0, 0.6, (T * K, 64)) * factor).astype(np.float32))
    rows = ref.quantize_rows(latent, rope)
    rows = np.concatenate([rows, rows[: -len(rows) % BLOCK_SIZE]])
    indices = np.arange(T * K, dtype=np.int32).reshape(T, K)
    indices = np.where(rng.random((T, K)) < holes, -1, indices).astype(np.int32)
    q = ref.to_bf16(rng.normal(0, 0.2, (T, num_heads, 576)))
    kv = cases.lay_out(rows, BLOCK_SIZE, layout)
    return AttentionInputs(q, kv, indices, {"softmax_scale": 0.3}, num_splits)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("num_heads", [16, 64, 100])
@pytest.mark.parametrize("K", [1100, 2048, 5000])
@pytest.mark.parametrize("large", LARGE)
def test_outlier_keys(large, K, num_heads, num_splits):
    check(make(large, num_heads, K, num_splits))


@pytest.mark.parametrize("K", [2048, 9000])
@pytest.mark.parametrize("large", LARGE)
@pytest.mark.parametrize("holes", [0.02, 0.5, 0.9])
def test_outlier_keys_among_holes(holes, large, K):
    check(make(large, 64, K, 1, holes=holes))


@pytest.mark.parametrize("layout", ["padded", "interleaved", "token_stride", "negative", "flat"])
def test_outlier_keys_in_rows_of_other_layouts(layout):
    check(make("a few", 64, 2048, 1, layout=layout))


@pytest.mark.parametrize("large", ["a few", "late", "more than a look takes"])
def test_outlier_keys_have_the_same_bits_in_any_batch(large):
    rows = np.random.default_rng(3).integers(0, T, 700)
    check_in_a_batch(make(large, 64, 2048, 1), rows)


@pytest.mark.skipif(torch.cuda.get_device_capability()[0] != 9, reason="no kernel for Hopper")
def test_keys_are_taken_in_another_order():
    """Rows that are not evenly spaced keep the order of their list, so the sums of weights differ
    in their last bits, but only where there are large keys."""
    for large, is_same in (("none", True), ("a few", False)):
        even, padded = (run(make(large, 64, 2048, 1, layout=x)) for x in ("paged", "padded"))
        assert (even["lse"].tobytes() == padded["lse"].tobytes()) is is_same, large
