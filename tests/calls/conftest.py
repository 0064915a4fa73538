"""The fixtures of the tests on fake GPUs."""

from fake_gpu_fixtures import cupy, gpu, met_cupy, package

__all__ = ["cupy", "gpu", "met_cupy", "package"]
