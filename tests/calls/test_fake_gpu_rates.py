"""The path that a dense step of the fake GPUs takes where the plan chooses it: a device's kernels
decide how many new tokens over a long context are quicker without expanding the context."""

from __future__ import annotations

import cases
import pytest
import test_fake_gpu_builder as builders
from test_fake_gpu_failures import make_dense_config

HOPPER, AMPERE = 1, 2  # device ids


def choose(package, gpu, cupy, place: int, num_new: int) -> str:
    cupy.stream, cupy.current = gpu.new_stream(place), place
    config = make_dense_config(
        package, None, device=f"cuda:{place}", max_num_batched_tokens=512, max_model_len=8192,
        prefill_workspace_tokens=8192,
    )  # fmt: skip
    batch = cases.make_batch([num_new], [num_new + 4096], block_size=16)
    return package.dense.MetadataBuilder(config).build(builders.place(package, batch, place)).path


@pytest.mark.parametrize(
    ("place", "num_new", "path"),
    [
        (HOPPER, 128, "mixed"), (HOPPER, 256, "separate"),
        (AMPERE, 32, "mixed"), (AMPERE, 128, "separate"),
    ],
)  # fmt: skip
def test_paths(package, gpu, cupy, place, num_new, path):
    assert choose(package, gpu, cupy, place, num_new) == path
