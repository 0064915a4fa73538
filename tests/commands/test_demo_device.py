"""The demo with a framework's arrays: which framework it takes, what it says where there is none,
and how it is judged on a GPU. test_gpu_demo.py runs it on one."""

import argparse
import types
from dataclasses import replace

import cases
import numpy as np
import pytest
import reference as ref
from helpers import assert_same_bits, find_framework, run_python

import sparse_mla
from sparse_mla import _judge, v4
from sparse_mla._demo import memory
from sparse_mla._demo import run as demo
from sparse_mla._demo.layers import LAYERS

pytestmark = pytest.mark.frameworks


def demo_options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize("name", ["--kv-format", "--kv-cache-dtype"])
def test_the_demo_s_format_has_an_alias(name):
    assert demo_options(name, "bfloat16").kv_cache_dtype == "bfloat16"


def test_the_demo_says_in_one_line_why_there_is_no_gpu():
    done = run_python("-m", "sparse_mla", "demo", "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (1, "")
    build = sparse_mla.build_info()["cuda"]
    reason = f"no CUDA in this build: {build}" if build.startswith("none") else "there is no GPU"
    assert done.stderr.startswith(f"demo: {reason}")
    assert len(done.stderr.splitlines()) == 1, done.stderr


NOTHING = {"torch": None, "cupy": None}


@pytest.mark.parametrize(
    ("gpu", "sees", "found"),
    [
        (None, NOTHING, "no CUDA in this build: none here"),
        ("unusable", {"torch": True, "cupy": True}, "there is no GPU here"),
        ("usable", NOTHING, "GPU: PyTorch is not installed and CuPy is not installed; JAX's can"),
        ("usable", {"torch": False, "cupy": None}, "PyTorch sees no GPU and CuPy is not installed"),
        ("usable", {"torch": None, "cupy": False}, "PyTorch is not installed and CuPy sees no GPU"),
        ("usable", {"torch": False, "cupy": True}, memory.Cupy),
        ("usable", {"torch": True, "cupy": True}, memory.Torch),
    ],
)
def test_the_demo_takes_the_first_framework_that_has_a_gpu(gpu, sees, found, monkeypatch):
    """`gpu` None stands for a build without CUDA, and None in `sees` for no such package."""
    rows = [] if gpu is None else [{"device": "cuda", "available": gpu == "usable"}]
    modules = {
        name: types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda has=has: has))
        for name, has in sees.items()
    }
    monkeypatch.setattr(sparse_mla, "kernels", lambda: rows)
    monkeypatch.setattr(sparse_mla, "build_info", lambda: {"cuda": "none here"})
    monkeypatch.setattr(memory, "import_module", modules.get)
    monkeypatch.setattr(memory, "find_spec", lambda name: None if sees[name] is None else name)
    assert type(memory.find_memory("cpu")) is memory.Memory
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            memory.find_memory("cuda")
        with pytest.raises(SystemExit, match=f"^demo: .*{found}"):
            demo.run(demo_options("--device", "cuda"))
    else:
        got = memory.find_memory("cuda")
        assert (type(got), got.device) == (found, "cuda")
        assert got.module is modules["torch" if found is memory.Torch else "cupy"]


@pytest.mark.torch
@pytest.mark.parametrize("kv_format", ["fp8_ds_mla", "bfloat16"])
@pytest.mark.parametrize("layer", ["sparse", "v4"])
def test_the_demo_with_pytorch_s_arrays_prints_what_it_prints_with_numpy_s(
    layer, kv_format, monkeypatch, capsys
):
    """PyTorch's arrays are in host memory here."""

    class OnTheCpu(memory.Torch):
        device = "cpu"

        def wait(self):
            """All work is done when a call returns."""

    torch = find_framework("torch").module
    options = demo_options("--requests", "2", "--context", "120", "--topk", "8", "--heads", "32")
    options.kv_cache_dtype, options.v4 = kv_format, layer == "v4"
    printed, states = [], []
    for places in (memory.Memory(), OnTheCpu(torch)):
        monkeypatch.setattr(demo, "find_memory", lambda device, places=places: places)
        engines = []
        change_layer(monkeypatch, layer, checker=keep_the_engine(LAYERS[layer].checker, engines))
        assert demo.run(options) == 0
        monkeypatch.undo()
        title, _, *lines = capsys.readouterr().out.splitlines()
        assert f"· {places.name} arrays, cpu" in title
        printed.append([line for line in lines if "tokens/s" not in line])
        caches = (
            [x for x in vars(engines[0].caches).values() if x is not None]
            if layer == "v4"
            else [engines[0].kv_cache, engines[0].index_cache]
        )
        states.append([places.get(x) for x in caches])
        assert isinstance(engines[0].kv_cache, torch.Tensor) == (places.name == "PyTorch")
    assert judged(printed[0]) == judged(printed[1]) != []
    for a, b in zip(*states, strict=True):
        assert_same_bits(a, b)
        assert a.any()


def change_layer(monkeypatch, name, **fields):
    monkeypatch.setitem(LAYERS, name, LAYERS[name]._replace(**fields))


def keep_the_engine(checker, engines):
    def make(engine, **options):
        engines.append(engine)
        return checker(engine, **options)

    return make


def judged(lines: list[str]) -> list[str]:
    """The lines of the verdict."""
    return lines[next(i for i, line in enumerate(lines) if line.startswith("worst error")) :]


@pytest.mark.parametrize("fault", [None, "angles", "values"])
def test_the_demo_s_verdict_on_a_dense_layer(fault, monkeypatch, capsys):
    """The layer is given other angles, or another W_UV, than the checker."""

    class Faulty(LAYERS["dense"].engine):
        def run_layer(self, metadata, *inputs):
            right = self.layer.rope_table, self.layer.W_UV
            if fault == "angles":
                self.layer.rope_table = sparse_mla.rope_table(self.config.max_model_len, base=9e3)
            elif fault == "values":
                self.layer.W_UV = right[1] * right[1].dtype.type(1.02)
            done = super().run_layer(metadata, *inputs)
            self.layer.rope_table, self.layer.W_UV = right
            return done

    change_layer(monkeypatch, "dense", engine=Faulty)
    options = demo_options("--dense", "--requests", "2", "--context", "150", "--heads", "4")
    assert demo.run(options) == (0 if fault is None else 1)
    verdict = "within the bounds" if fault is None else "OUTSIDE THE BOUNDS"
    assert capsys.readouterr().out.endswith(f"{verdict}\n")


V4_FAULTS = ("window", "sink", "angles", "row", "choice", "page", "query", "values")


@pytest.mark.parametrize("kv_format", ["fp8_v4", "bfloat16"])
@pytest.mark.parametrize("fault", [None, *V4_FAULTS])
def test_the_demo_s_verdict_on_a_v4_layer(fault, kv_format, monkeypatch, capsys):
    """The layer is given something else than the checker knows of."""

    class Faulty(LAYERS["v4"].engine):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            config, weights = self.config, self.layer.weights
            if fault == "window":  # the oldest token is missing
                self.builder = v4.MetadataBuilder(replace(config, window=config.window - 1))
            elif fault == "sink":
                self.layer.weights = replace(weights, attn_sink=None)
            elif fault == "angles":
                table = sparse_mla.rope_table(config.max_model_len, base=9e3, fp32_angles=True)
                self.layer.weights = replace(weights, rope_table=table)
            elif fault == "choice":  # the last of the chosen rows is missing
                self.layer.config = replace(config, topk_tokens=config.topk_tokens - 1)

        def run_layer(self, metadata, *inputs):
            values, (q,), arrays = super().run_layer(metadata, *inputs)
            rows = self.caches.compressed
            if fault == "row":  # what attention read is a row away from where it should be
                rows[:] = np.roll(rows, 1, axis=1)
            elif fault == "page":
                rows[:] = np.roll(rows, 1, axis=0)
            elif fault == "query":  # one head's value is off by a step of bf16
                q.reshape(-1, 512).view(np.int16)[:, 500] += 1
            elif fault == "values":
                values[:, 1] *= values.dtype.type(1.02)
            return values, (q,), arrays

    change_layer(monkeypatch, "v4", engine=Faulty)
    options = demo_options("--v4", "--requests", "2", "--context", "300", "--topk", "16")
    options.heads, options.kv_cache_dtype = 4, kv_format
    assert demo.run(options) == (0 if fault is None else 1)
    verdict = "within the bounds" if fault is None else "OUTSIDE THE BOUNDS"
    assert capsys.readouterr().out.endswith(f"{verdict}\n")


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_judge_s_bounds_are_the_promised_ones(fp8, on_gpu):
    """The reference's tolerance of every value is the judge's bound."""
    rng = np.random.default_rng(8)
    q, rows = cases.random_bf16(rng, 3, 576), cases.make_rows(rng, 40, "fp8" if fp8 else "bf16")
    indices = np.arange(40, dtype=np.int32)[None]
    want = ref.attention(q[None], rows, indices, softmax_scale=0.1)
    allowed = {"units": 32, "f16_scales": fp8} if on_gpu else {}
    shift = 3 * want.lse_tolerance(**allowed)[0]
    judge = _judge.judge_row(
        q, _judge.exact_rows(rows), want.out[0], want.lse[0] + shift, softmax_scale=0.1, **allowed
    )
    assert judge.lse == pytest.approx(3)
    assert judge.out < 1e-3
    moved = want.out[0] + 3 * want.out_tolerance(**allowed)[0]
    judge = _judge.judge_row(
        q, _judge.exact_rows(rows), moved, want.lse[0], softmax_scale=0.1, **allowed
    )
    assert judge.out == pytest.approx(3)
