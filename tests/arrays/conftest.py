"""The fixtures of the tests on fake GPUs."""

from fake_gpu_fixtures import cupy, exchange, gpu, met_cupy, package

__all__ = ["cupy", "exchange", "gpu", "met_cupy", "package"]
