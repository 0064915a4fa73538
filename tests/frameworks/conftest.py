"""The fixtures that several files of this folder share."""

import device
import pytest
from flash_mla_cases import Arrays
from helpers import ALL_FRAMEWORKS, find_framework, with_marks


@pytest.fixture
def place():
    """JAX's arrays on the CPU, on machines with a GPU too."""
    return find_framework("jax", "cpu")


@pytest.fixture
def smla(place):
    """JAX's operators, on the CPU."""
    with place.module.default_device(place.place):
        yield device.import_quietly("sparse_mla.integrations.jax")


@pytest.fixture(params=ALL_FRAMEWORKS)
def arrays(request) -> Arrays:
    return Arrays(request.param)


@pytest.fixture(params=with_marks("numpy", "torch"))
def writable_arrays(request) -> Arrays:
    return Arrays(request.param)


@pytest.fixture
def torch_arrays() -> Arrays:
    return Arrays("torch")
