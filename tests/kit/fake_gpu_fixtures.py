"""What the tests on fake GPUs share: a package of their own, their driver, and a CuPy."""

from __future__ import annotations

import gc
import sys

import pytest
from exchange_producer import Exchanged
from fake_gpu import Cupy, Driver, give_back, load


@pytest.fixture(scope="module")
def package():
    gc.collect()  # frees packages of other tests, and what they have kept
    return load()


@pytest.fixture
def gpu(package):
    """The driver of the fake GPUs, with no work under way."""
    driver = Driver()
    driver.reset()
    give_back(package)
    driver.reset()
    num_failures = driver.num_failures
    yield driver
    assert driver.num_failures == num_failures, "see the captured output"
    driver.reset()
    give_back(package)


@pytest.fixture(scope="module")
def met_cupy(package):
    """The CuPy module that the package meets first, and keeps."""
    return Cupy()


@pytest.fixture
def cupy(met_cupy, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", met_cupy)
    met_cupy.reset()
    return met_cupy


@pytest.fixture
def exchange(monkeypatch):
    monkeypatch.setattr(Exchanged, "streams", [])
    monkeypatch.setattr(Exchanged, "stream", 0)
    return Exchanged
