"""What the commands of `python -m sparse_mla` share, and rarely used parts of the package."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import reference as ref

import sparse_mla
from bench import run as bench
from sparse_mla import __main__ as command
from sparse_mla import _info
from sparse_mla._demo import run as demo

pytestmark = pytest.mark.frameworks

# --- the command ---------------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(monkeypatch):
    """A function that puts the package, as `bench` sees it, into a folder of the source tree."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(bench, "run", lambda options: 3)

    def put(folder: str) -> None:
        monkeypatch.setattr(command, "PACKAGE", ROOT / folder / "sparse_mla")
        monkeypatch.setattr(sys, "argv", ["sparse_mla", "bench", "--quick"])

    return put


@pytest.mark.parametrize("folder", [".", "build/debug/python"])
def test_benchmarks_are_found_in_the_tree_of_the_package(folder, place):
    place(folder)
    assert command.main() == 3


@pytest.mark.parametrize(
    "folder",
    [f"{name}/lib/python3.11/site-packages" for name in (".venv", "build/installed/alone")],
)
def test_an_installed_package_says_where_the_benchmarks_are(folder, place, capsys):
    """Also where the environment is in a source tree."""
    place(folder)
    with pytest.raises(SystemExit) as ended:
        command.main()
    said = capsys.readouterr()
    assert (ended.value.code, said.out, len(said.err.splitlines())) == (2, "", 1)
    assert "benchmarks/bench of the source tree" in said.err


@pytest.mark.parametrize("name", ["info", "demo", "bench"])
def test_the_command_runs_what_is_asked(name, monkeypatch):
    modules = {"info": _info, "demo": demo, "bench": bench}
    monkeypatch.setattr(modules[name], "run", lambda options: (options.command, 3)[1])
    monkeypatch.setattr(sys, "argv", ["sparse_mla", name])
    assert command.main() == 3


def test_the_command_ends_quietly_when_nobody_reads_on(monkeypatch):
    redirected = []

    def run(options):
        raise BrokenPipeError

    monkeypatch.setattr(_info, "run", run)
    monkeypatch.setattr(sys, "argv", ["sparse_mla", "info"])
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(fileno=lambda: 77))
    monkeypatch.setattr(os, "dup2", lambda source, target: redirected.append(target))
    status = command.main()
    monkeypatch.undo()
    assert (status, redirected) == (1, [77])


# --- rarely used parts ---------------------------------------------------------------------------


def test_a_layer_gives_its_weight_once():
    sizes = {"num_heads": 1, "qk_nope_head_dim": 4, "v_head_dim": 2}
    weight = np.arange(512 * 6, dtype=np.float32).reshape(512, 6) / 4096
    want = sparse_mla.split_kv_b_proj(weight, **sizes)
    for layer in (lambda x: x @ weight, lambda x: (x @ weight, None)):
        got = sparse_mla.split_kv_b_proj(layer, **sizes)
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(ValueError, match=r"`weight_scale_inv` must be None for a callable"):
        sparse_mla.split_kv_b_proj(lambda x: x, **sizes, weight_scale_inv=weight)

    class Biased:
        bias = np.zeros(6)

        def __call__(self, x):
            raise AssertionError("refused before it is called")

    with pytest.raises(ValueError, match=r"must be a layer without bias"):
        sparse_mla.split_kv_b_proj(Biased(), **sizes)


def test_a_layer_has_weights_or_says_so():
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1}
    config = sparse_mla.Config(1, softmax_scale=0.1, qk_nope_head_dim=4, v_head_dim=2, **limits)
    bare = sparse_mla.SparseMLA(config)
    assert bare.W_UK is bare.W_UV is None
    x = np.ones((1, 1, 512), ref.BF16)
    for op, array in (("k_up_proj", x[..., :4]), ("v_up_proj", x)):
        with pytest.raises(ValueError, match=rf"^{op}: `kv_b_proj` must be given to SparseMLA"):
            getattr(bare, op)(array)
    layer = sparse_mla.SparseMLA(config, kv_b_proj=np.ones((512, 6), np.float32))
    assert (layer.k_up_proj(x[..., :4]) == 4).all()
    assert (layer.v_up_proj(x) == 512).all()


@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
def test_a_config_s_scale_is_finite(scale):
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1}
    with pytest.raises(ValueError, match=r"^Config: `softmax_scale` must be finite, got"):
        sparse_mla.Config(1, softmax_scale=scale, **limits)
