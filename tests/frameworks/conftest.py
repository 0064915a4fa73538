"""The fixtures that several files of this folder share."""

import device
import pytest
from deepseek_models import load_example
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


@pytest.fixture(scope="module")
def adapter():
    """The adapter of Transformers' models."""
    load_example()
    from sparse_mla.integrations import transformers

    return transformers


@pytest.fixture(scope="module")
def one_thread():
    """PyTorch with one thread: on a busy machine, two that share a small operator spend most of
    their time waiting for each other."""
    torch = find_framework("torch").module
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch
    torch.set_num_threads(num_threads)


@pytest.fixture(params=ALL_FRAMEWORKS)
def arrays(request) -> Arrays:
    return Arrays(request.param)


@pytest.fixture(params=with_marks("numpy", "torch"))
def writable_arrays(request) -> Arrays:
    return Arrays(request.param)


@pytest.fixture
def torch_arrays() -> Arrays:
    return Arrays("torch")
