"""Tests of optional packages: skipped where a package is absent, failed where it is broken."""

import sys
from pathlib import Path

import device
import pytest
from helpers import FRAMEWORKS, find_framework, require

pytestmark = pytest.mark.frameworks

PACKAGES = {
    "a module is missing": "import nothing_of_this_name",
    "a part of itself is missing": "import optional_package.nothing",
    "its import fails": "raise ImportError('no libfast.so.3')",
    "it is for another Python": "from json import nothing",
}


@pytest.fixture
def broken(request, tmp_path, monkeypatch):
    """An installed package that does not import, as `optional_package` and as CuPy."""
    for name in ("optional_package", "cupy"):
        (tmp_path / name).mkdir()
        code = PACKAGES[request.param].replace("optional_package", name)
        (tmp_path / name / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    device.import_quietly.cache_clear()


def outcome(action, *arguments) -> BaseException:
    with pytest.raises(BaseException) as caught:
        action(*arguments)
    return caught.value


@pytest.mark.parametrize("broken", list(PACKAGES), indirect=True)
def test_a_package_that_does_not_import_is_no_skip(broken):
    for error in (outcome(require, "optional_package"), outcome(find_framework, "cupy")):
        assert isinstance(error, ImportError), error


@pytest.mark.parametrize("name", ["no_such_package", "no_such_package.module", "json.no_such"])
def test_a_package_that_is_not_installed_is_a_skip(name):
    error = outcome(require, name)
    assert isinstance(error, pytest.skip.Exception)
    assert str(error) in ("no_such_package is not installed", "json.no_such is not installed")


@pytest.mark.parametrize("name", sorted(set(FRAMEWORKS) - {"numpy"}))
def test_every_framework_has_the_same_rule(name, tmp_path, monkeypatch):
    """Each framework's package is replaced by one that lacks a package which it imports."""
    if name in ("transformers", "vllm"):
        require("torch")
    for module in [module for module in sys.modules if f"{module}.".startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, module)
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("import nothing_of_this_name")
    monkeypatch.syspath_prepend(str(tmp_path))
    device.import_quietly.cache_clear()
    error = outcome(find_framework, name)
    assert isinstance(error, ModuleNotFoundError), error
    assert error.name == "nothing_of_this_name"


def test_no_test_asks_in_another_way():
    asks = "import" + "orskip"
    users = [
        file.name for file in Path(__file__).parents[1].rglob("*.py") if asks in file.read_text()
    ]
    assert users == []
