"""Parts of `python -m sparse_mla` that the runs of test_commands.py do not reach: GPUs, terminals,
wrong results, missing packages."""

import argparse
import builtins
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import cases
import numpy as np
import pytest
import reference as ref
from helpers import require

import sparse_mla
from sparse_mla import __main__ as command
from sparse_mla import _info, _judge
from sparse_mla._bench import run as bench
from sparse_mla._bench.common import compressor, index_lists, noise, plot, timing
from sparse_mla._bench.cpu import attention, memory, projection, top_k
from sparse_mla._demo import engine, model, scheduler
from sparse_mla._demo import memory as demo_memory
from sparse_mla._demo import run as demo
from sparse_mla.ops import index

pytestmark = pytest.mark.frameworks

# --- info ----------------------------------------------------------------------------------------

H100 = {"device": "cuda", "arch": "sm_90", "available": True}
A100 = {"device": "cuda", "arch": "sm_80", "available": True}
OLD = {"device": "cuda", "arch": "sm_100", "available": False}
CPU = {"device": "cpu", "arch": "avx2", "available": True}
BUILD = {
    "version": "9",
    "compiler": "cc 1",
    "flags": "fast",
    "openmp": 201511,
    "cpu_features": ["avx2", "base"],
}


def info_options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    _info.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("rows", "names", "archs", "text"),
    [
        ([CPU, H100, A100, A100, OLD], ["X", "Y"], ["sm_90", "sm_80"], "X, Y: sm_90, sm_80"),
        ([H100], [], ["sm_90"], "unnamed: sm_90"),
        ([CPU, OLD], ["X"], [], "none that this build can use: X"),
        ([CPU], [], [], "none that this build can use"),
    ],
)
def test_info_says_which_gpus_there_are(rows, names, archs, text, monkeypatch):
    monkeypatch.setattr(sparse_mla, "kernels", lambda: rows)
    monkeypatch.setattr(_info, "gpu_names", lambda: names)
    gpu = _info.find_facts()["gpu"]
    assert gpu == {"names": names, "archs": archs}
    assert _info.gpu_text(**gpu) == text


def test_info_reads_the_driver_s_names(tmp_path):
    for bus, text in [
        ("0000:02:00.0", "Model: \t NVIDIA B: one\nIRQ: 3\n"),
        ("0000:01:00.0", "IRQ: 3\nModel: A\n"),
        ("0000:03:00.0", "IRQ: 4\n"),
    ]:
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(text)
    (tmp_path / "0000:04:00.0" / "information").mkdir(parents=True)  # cannot be read
    assert _info.gpu_names(tmp_path) == ["A", "NVIDIA B: one"]
    assert _info.gpu_names(tmp_path / "none") == []


def test_info_line_by_line(monkeypatch, capsys):
    """Two kernels are the CPU's. The third is a GPU's, which can run or cannot."""
    row = CPU | {"kv_format": "x", "heads": "1", "name": "n", "selected": True}
    plain = row | {"arch": "base", "selected": False}
    monkeypatch.setattr(sparse_mla, "build_info", lambda: dict(BUILD))
    monkeypatch.setattr(_info, "cpu_name", lambda: "A CPU")
    monkeypatch.setattr(_info, "gpu_names", lambda: ["A GPU"])
    monkeypatch.setattr(_info, "find", lambda name: f"of {len(name)}" if name != "jax" else None)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    python = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    for gpu, has_gpu in ((H100, True), (OLD, False)):
        rows = [row, plain, row | gpu | {"selected": False}]
        monkeypatch.setattr(sparse_mla, "kernels", lambda rows=rows: rows)
        assert _info.run(info_options()) == 0
        assert capsys.readouterr().out.splitlines() == [
            f"sparse_mla {sparse_mla.__version__}",
            f"  python      {python}",
            "  backends    cpu, cuda",
            "  compiler    cc 1",
            "  flags       fast",
            "  cpu         A CPU: avx2, base",
            "  gpu         "
            + ("A GPU: sm_90" if has_gpu else "none that this build can use: A GPU"),
            "  openmp      201511, 3 threads",
            "  frameworks  numpy of 5, ml_dtypes of 9, torch of 5, jax –, cupy of 4, "
            "transformers of 12",
            "",
            "kernels of sparse_attention, first match first (* = taken on this machine)",
            "  device  arch" + " " * (3 if has_gpu else 4) + "kv_format  heads  name",
            "* cpu     avx2" + " " * (3 if has_gpu else 4) + "x          1      n",
            "  cpu     base" + " " * (3 if has_gpu else 4) + "x          1      n",
            ("  cuda    sm_90  " if has_gpu else "- cuda    sm_100  ") + "x          1      n",
            *([] if has_gpu else ["- = this machine cannot run it"]),
        ]
    monkeypatch.setattr(sparse_mla, "kernels", lambda: [row])
    _info.run(info_options())
    assert "gpu" not in capsys.readouterr().out


V4_FORMATS = ("fp8_v4", "fp8_e4m3", "fp8_v41", "fp8_v41_split", "fp8_nope")


def workspace_of_plan() -> int:
    """attention_workspace_size without what dense attention alone needs: three int32 per token."""
    ranges = (8 * 12 + 2 * 64 - 1) // 64 * 64
    return sparse_mla.attention_workspace_size(8, 64, 2048, device="cpu") - ranges


def test_info_prints_the_plan_of_a_call(capsys):
    assert _info.run(info_options("--plan", "8", "64", "2048")) == 0
    title, heading, *lines = capsys.readouterr().out.splitlines()
    assert title == "sparse_attention of 8 tokens, 64 heads, 2048 indices each"
    assert heading.split() == ["device", "kv_format", "tokens", "splits", "kernel", "workspace"]
    chosen = {row["name"] for row in sparse_mla.kernels() if row["selected"]}
    size = workspace_of_plan()
    on_cpu = [re.split(r"  +", line) for line in lines if line.startswith("cpu ")]
    assert [row[1] for row in on_cpu] == [
        "bfloat16 of 576 values",
        "bfloat16 of 512 values",
        "fp8_ds_mla of 576 values",
        *(f"{name} of 512 values" for name in V4_FORMATS),
    ]
    for row in on_cpu:
        assert row[2] == "8" and row[3] == "8", "64 parts are shared out among 8 tokens"
        assert row[4] in chosen and row[5] == f"{size} bytes"


def test_info_gives_programs_the_same_facts(capsys):
    """The keys are promised, and each is documented in --help."""
    assert _info.run(info_options("--json")) == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts) == list(_info.KEYS)
    assert list(facts) == [
        *("version", "python", "backends", "build", "cpu", "gpu", "openmp", "frameworks"),
        "kernels",
    ]
    build = sparse_mla.build_info()
    assert facts["version"] == sparse_mla.__version__
    assert facts["python"]["machine"] == platform.machine()
    assert facts["build"].items() <= build.items()
    assert {"compiler", "flags", "cuda", "cuda_archs"} <= set(facts["build"])
    assert facts["cpu"]["instruction_sets"] == build["cpu_features"]
    assert facts["openmp"]["version"] == build["openmp"]
    assert facts["frameworks"]["numpy"] == np.__version__
    assert facts["kernels"] == sparse_mla.kernels()
    help_text = re.sub(r"\s+", " ", help_of(_info.add_arguments))
    for key, meaning in (_info.KEYS | _info.PLAN_KEYS).items():
        assert f" {key} {meaning}" in help_text


def help_of(add_arguments) -> str:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.format_help()


def test_info_gives_programs_a_call_s_plan(capsys):
    assert _info.run(info_options("--json", "--plan", "8", "64", "2048")) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["num_tokens", "num_heads", "topk", "plans"]
    assert list(found) == ", ".join(_info.PLAN_KEYS).split(", ")
    plan = next(p for p in found["plans"] if (p["device"], p["kv_format"]) == ("cpu", "fp8_ds_mla"))
    chosen = {row["name"] for row in sparse_mla.kernels() if row["selected"]}
    assert plan.pop("runs")[0].pop("kernel") in chosen
    assert plan == {
        "device": "cpu",
        "kv_format": "fp8_ds_mla",
        "head_dim": 576,
        "workspace_bytes": workspace_of_plan(),
    }


def test_info_says_what_is_wrong_with_a_plan_s_numbers(capsys):
    assert _info.run(info_options("--plan", "8", "129", "2048")) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "`num_heads` must be 1 to 128, got 129" in printed.err


def test_info_names_the_architecture_of_a_processor_without_a_name(monkeypatch):
    def refuse(*_, **__):
        raise OSError

    assert _info.cpu_name()
    monkeypatch.setattr(builtins, "open", refuse)
    name = _info.cpu_name()
    monkeypatch.undo()
    assert name == os.uname().machine


@pytest.mark.parametrize(
    ("value", "threads"), [("3", 3), ("5,2", 5), ("many", None), ("", None), (None, None)]
)
def test_info_counts_openmp_s_threads(value, threads, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if value is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    cores = len(os.sched_getaffinity(0))
    assert _info.num_threads() == (threads or cores)
    assert _info.openmp_text(201511, 3) == "201511, 3 threads"
    monkeypatch.setattr(sparse_mla, "build_info", lambda: BUILD | {"openmp": 0})
    openmp = _info.find_facts()["openmp"]
    assert openmp == {"version": 0, "threads": 1}
    assert _info.openmp_text(**openmp) == "not in this build: one thread"


def test_info_finds_wheels_by_any_of_their_names():
    assert _info.find("numpy") == np.__version__
    assert _info.find("no-such-package") is None


# --- the judge -----------------------------------------------------------------------------------


def judged(num_keys, **change):
    rng = np.random.default_rng(1)
    q = cases.random_bf16(rng, 2, 576)
    rows = cases.make_rows(rng, num_keys, "fp8")
    keys = _judge.exact_rows(rows)
    out, lse = np.zeros((2, 512), ref.BF16), np.full(2, -np.inf, np.float32)
    if num_keys:
        result = sparse_mla.sparse_attention(
            q[None], rows[None], np.arange(num_keys, dtype=np.int32)[None], softmax_scale=0.1
        )
        out, lse = result[0][0].copy(), result[1][0].copy()
    for name, value in change.items():
        {"out": out, "lse": lse}[name][1] = value
    return _judge.judge_row(q, keys, out, lse, softmax_scale=0.1)


def test_the_judge_keeps_the_worst_of_each():
    total = _judge.Fractions()
    for out, lse in [(0.25, 0.5), (0.75, 0.125), (0.5, 0.25)]:
        total.add(_judge.Fractions(out, lse, rows=2))
    assert total == _judge.Fractions(0.75, 0.5, rows=6)
    assert total.within
    assert _judge.Fractions(1, 1).within
    assert not _judge.Fractions(1.001, 0).within
    assert not _judge.Fractions(0, 1.001).within
    for a, b in [(np.nan, 0.5), (0.5, np.nan), (np.nan, np.nan), (np.inf, 0.5)]:
        assert _judge.worse(a, b) == np.inf


@pytest.mark.parametrize("num_keys", [0, 1, 40])
def test_the_judge_tells_right_from_wrong(num_keys):
    right = judged(num_keys)
    assert right.within
    assert right.rows == 1
    assert (right.out == 0) == (num_keys == 0)
    for name, value in [("out", 7.0), ("out", np.nan), ("lse", 1e4), ("lse", np.nan)]:
        wrong = judged(num_keys, **{name: value})
        assert not wrong.within, (name, value)
        total = _judge.Fractions()
        for part in (right, wrong, right):
            total.add(part)
        assert not total.within, "NaN is worse than any number"
        assert total.rows == 3
        assert (total.out, total.lse) >= (right.out, right.lse)


def test_the_judge_s_rows_are_the_bytes_meaning():
    rng = np.random.default_rng(2)
    rows = cases.make_rows(rng, 5, "fp8")
    assert np.array_equal(_judge.exact_rows(rows), ref.decode_rows(rows, np.arange(5)))
    bf16 = cases.make_rows(rng, 5, "bf16")
    assert np.array_equal(_judge.exact_rows(bf16), bf16.astype(np.float64))
    gathered = np.zeros((5, 576), ref.BF16)
    table, lens, starts = (np.array(x, np.int32) for x in ([[0]], [5], [0]))
    sparse_mla.gather_kv_cache(rows[None], table, lens, starts, out=gathered)
    assert np.array_equal(ref.bits16(_judge.upconvert_rows(rows)), ref.bits16(gathered))


def test_the_judge_reads_rows_of_any_dtype_and_stride():
    rows = cases.make_rows(np.random.default_rng(3), 6, "fp8")
    want = _judge.exact_rows(rows)
    wide = np.zeros((12, 700), np.uint8)
    wide[::2, :656] = rows
    for same in (rows.view(np.int8), rows.view(ref.E4M3), wide[::2, :656]):
        assert np.array_equal(_judge.exact_rows(same), want)


def test_the_judge_allows_for_rounded_keys():
    """Gathered rows have a larger bound, because they are rounded to bf16: a step of out here."""
    rng = np.random.default_rng(4)
    q, keys = cases.random_bf16(rng, 2, 576), rng.normal(0, 1, (9, 576))
    logits = 0.1 * q.astype(np.float64) @ keys.T
    weights = np.exp(logits - logits.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    out = weights @ keys[:, :512] + 2.0**-8 * weights @ np.abs(keys[:, :512])
    lse = np.log(np.exp(logits).sum(1)).astype(np.float32)
    judge = [
        _judge.judge_row(q, keys, out, lse, softmax_scale=0.1, gathered=gathered)
        for gathered in (False, True)
    ]
    assert judge[1].out < judge[0].out < 3
    assert judge[1].lse < judge[0].lse / 10
    assert judge[1].within


# --- bench ---------------------------------------------------------------------------------------


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize("name", ["--kv-format", "--cache"])
def test_bench_s_format_has_an_alias(name):
    assert options(name, "bfloat16").cache == "bfloat16"


def test_bench_starts_over_with_its_threads(monkeypatch):
    started = []
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr(sys, "argv", ["sparse_mla", "bench", "--threads", "3"])
    monkeypatch.setattr(os, "execv", lambda *command: started.append(command))
    bench.restart(3)
    words = [sys.executable, "-m", "sparse_mla", "bench", "--threads", "3"]
    assert started == [(sys.executable, words)]
    assert os.environ["OMP_NUM_THREADS"] == "3"


@pytest.fixture
def cuda_tables(monkeypatch):
    """CUDA tables that need no GPU. Returns the list to which a measured table adds its name."""
    from sparse_mla._bench.common import peer
    from sparse_mla._bench.cuda import attention as cuda_attention
    from sparse_mla._bench.cuda import calls as cuda_calls
    from sparse_mla._bench.cuda import dense as cuda_dense
    from sparse_mla._bench.cuda import dense_prefill as cuda_dense_prefill
    from sparse_mla._bench.cuda import helpers as cuda_helpers
    from sparse_mla._bench.cuda import layer as cuda_layer
    from sparse_mla._bench.cuda import lightning as cuda_lightning
    from sparse_mla._bench.cuda import linear as cuda_linear
    from sparse_mla._bench.cuda import logits as cuda_logits
    from sparse_mla._bench.cuda import memory as cuda_memory
    from sparse_mla._bench.cuda import prefill_layer as cuda_prefill_layer
    from sparse_mla._bench.cuda import projection as cuda_projection
    from sparse_mla._bench.cuda import sent as cuda_sent
    from sparse_mla._bench.cuda import timing as cuda_timing
    from sparse_mla._bench.cuda import top_k as cuda_top_k
    from sparse_mla._bench.cuda import v4 as cuda_v4
    from sparse_mla._bench.cuda import varlen as cuda_varlen

    measured = []

    def maker(name, record=None, failures=()):
        def measure(*arguments):
            measured.append(name)
            if record is None:
                raise RuntimeError("the device\nis lost")
            return timing.Table(name, ["us"], [["5"]], [record], [*failures])

        return measure

    facts = SimpleNamespace(name="A GPU", multi_processor_count=132, L2_cache_size=50 << 20)
    torch = SimpleNamespace(
        manual_seed=lambda seed: None,
        __version__="9",
        cuda=SimpleNamespace(get_device_properties=lambda place: facts),
    )
    record = {"us": 5.0, "floor_us": 4.0}
    monkeypatch.setattr(cuda_timing, "torch", torch)
    monkeypatch.setattr(peer, "find_peer", lambda: (None, "none here"))
    monkeypatch.setattr(cuda_attention, "measure_decode", maker("decode", record))
    monkeypatch.setattr(cuda_attention, "measure_prefill", maker("prefill", record, ["far off"]))
    monkeypatch.setattr(cuda_sent, "measure_inputs", maker("inputs"))
    monkeypatch.setattr(cuda_v4, "measure_v4", maker("v4", {"us": 3.0}))
    monkeypatch.setattr(cuda_dense, "measure_dense", maker("dense", {"us": 3.0}))
    monkeypatch.setattr(cuda_varlen, "measure_varlen", maker("varlen", {"us": 3.0}))
    long_prefills = maker("dense_prefill", {"us": 3.0})
    monkeypatch.setattr(cuda_dense_prefill, "measure_dense_prefill", long_prefills)
    prefills = maker("prefill_layer", {"us": 3.0})
    monkeypatch.setattr(cuda_prefill_layer, "measure_prefill_layer", prefills)
    monkeypatch.setattr(cuda_layer, "measure_layer", maker("layer", {"us": 3.0}))
    monkeypatch.setattr(cuda_memory, "measure_bytes", maker("bytes", {"gb": 1.0}))
    products = maker("projection", {"us": 2.0})
    monkeypatch.setattr(cuda_top_k, "measure_top_k", maker("top_k", {"us": 2.0}))
    monkeypatch.setattr(cuda_projection, "measure_projections", products)
    monkeypatch.setattr(cuda_linear, "measure_linear", maker("linear", {"us": 2.0}))
    monkeypatch.setattr(cuda_logits, "measure_logits", maker("logits", {"us": 2.0}))
    choices = maker("lightning", {"us": 2.0})
    monkeypatch.setattr(cuda_lightning, "measure_lightning", choices)
    monkeypatch.setattr(cuda_helpers, "measure_helpers", maker("helpers", {"us_1": 2.0}))
    monkeypatch.setattr(cuda_calls, "measure_calls", maker("calls", {"us": 2.0}))
    monkeypatch.setattr(bench, "what_cuda_lacks", lambda: "")
    return measured


def test_bench_measures_every_table_of_a_gpu(cuda_tables, tmp_path, capsys):
    """A table that fails does not stop the others."""
    require("matplotlib")
    paths = [str(tmp_path / name) for name in ("results.json", "plot.svg")]
    assert bench.run(options("--json", paths[0], "--plot", paths[1])) == 1
    wanted = ["decode", "prefill", "inputs", "v4", "dense", "varlen", "dense_prefill"]
    wanted += [
        "prefill_layer",
        "layer",
        "bytes",
        "projection",
        "linear",
        "logits",
        "top_k",
        "lightning",
        "helpers",
        "calls",
    ]
    assert cuda_tables == wanted
    printed = capsys.readouterr()
    assert printed.err.endswith("\n2 FAILED\n")
    assert "- device: A GPU, 132 SMs, 50 MiB L2 cache" in printed.out
    for line in ("- FAIL far off", "- FAIL RuntimeError: the device is lost", "### calls"):
        assert line in printed.out
    results = json.loads(Path(paths[0]).read_text())
    assert results["decode"] == [{"us": 5.0, "floor_us": 4.0}]
    assert results["failures"] == {
        "prefill": ["far off"],
        "inputs": ["RuntimeError: the device is lost"],
    }
    assert "decode" in Path(paths[1]).read_text()


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("attention", ["decode", "prefill", "inputs"]),
        ("decode", ["decode"]),
        ("projection", ["projection", "linear"]),
        ("calls", ["calls"]),
    ],
)
def test_bench_measures_some_tables_of_a_gpu(only, names, cuda_tables, capsys):
    assert bench.run(options("--only", only, "--json")) == int(only == "attention")
    assert cuda_tables == names
    results = json.loads(capsys.readouterr().out)
    assert results["command"] == f"python -m sparse_mla bench --json --only {only} --device cuda"


@pytest.mark.parametrize("kind", projection.KINDS)
def test_bench_judges_projections(kind, monkeypatch):
    """Right results are within their bound, and a result beside it is noticed."""
    for name, size in {"GROUPS": 2, "INNER": 512, "OUTER": 256}.items():
        monkeypatch.setattr(projection, name, size)
    inputs = projection.Inputs(kind, 5, lambda x: x)
    inputs.call()
    assert inputs.judge(inputs.out, projection.FINE) <= 1
    assert inputs.flop() == 2 * 5 * 2 * 512 * 256
    values = 2 * 5 * 512 + 2 * 256 * 512
    scales = 4 * (5 * 2 * 4 + 2 * 2 * 4)
    assert inputs.num_bytes() == 2 * 5 * 2 * 256 + (
        values + scales if kind == "e4m3" else 2 * values
    )
    inputs.out[4, 1, 255] = float(inputs.out[4, 1, 255]) * 1.02 + 1e-3
    assert inputs.judge(inputs.out, projection.FINE) > 1


@pytest.mark.parametrize("kind", top_k.KINDS)
def test_bench_judges_top_k(kind):
    """Right columns are accepted, and another column is noticed."""
    inputs = top_k.Inputs(kind, (3, 500, 20), lambda x: x, lambda x, n: np.tile(x, (n, 1)))
    inputs.call()
    assert inputs.is_right(inputs.out)
    assert inputs.num_bytes == 4 * 3 * 520
    columns = set(range(500)) - set(inputs.out[2].tolist())
    inputs.out[2, 19] = max(columns)
    assert not inputs.is_right(inputs.out)


def test_bench_judges_rows_that_repeat(monkeypatch):
    monkeypatch.setattr(top_k, "SPREAD", 1000)
    inputs = top_k.Inputs("random", (5, 500, 20), lambda x: x, lambda x, n: np.tile(x, (n, 1)))
    assert inputs.logits.shape == (5, 500)
    inputs.call()
    assert inputs.is_right(inputs.out)
    np.testing.assert_array_equal(inputs.out[0], inputs.out[4])


def test_bench_names_its_commit(monkeypatch):
    head = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(head, capture_output=True, text=True)
    version = f"version {sparse_mla.__version__}"
    is_source_tree = (Path(bench.__file__).parents[2] / "csrc").is_dir()
    want = done.stdout.strip() if is_source_tree and done.returncode == 0 else version
    assert bench.find_commit() == want
    monkeypatch.setenv("PATH", "")
    assert bench.find_commit() == version


def test_bench_does_not_plot_without_matplotlib(monkeypatch):
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"needs matplotlib: pip install"):
        plot.check("x.svg")
    with pytest.raises(SystemExit, match=r"neither floors nor rates to plot"):
        plot.write("x.svg", {"Calls": [{"us": 1.0}]})


def test_bench_s_plot_leaves_out_what_has_no_flat_time():
    row = {"kv_format": "bfloat16", "input": "flat", "us": 3.0, "peer_us": 8.0}
    rows = [row | {"flat_us": flat} for flat in (2.0, None)] + [
        row | {"flat_us": 2.0, "us": 1.0, "peer_us": None}
    ]
    assert plot.worst_by_kind({"Inputs as": rows}) in ({}, {"bfloat16": {"flat": (1.5, 4.0)}})
    assert plot.worst_by_kind({"Inputs": rows}) in ({}, {"bfloat16": {"flat": (1.5, 4.0)}})


def test_bench_s_plot_takes_every_rate_of_a_cpu():
    attention_row = {"kv_format": "bfloat16", "H": 8, "T": 2, "ours": {"gflops": 30.0}}
    results = {
        "device": "a CPU, 2 cores",
        "Attention, K": [attention_row, attention_row | {"torch": {"gflops": 10.0}, "ratio": 3.0}],
        "Projection": [{"values": "e4m3", "T": 2, "gflops": 5.0, "torch_gflops": 4.0}],
        "Bytes": [{"operator": "write", "right": True, "gb_s": 2.0, "copy_gb_s": 3.0}],
        "Calls": [{"operator": "write", "seconds": {"NumPy": 1.0}}],
    }
    assert plot.rates(results) == [
        (
            "GFLOP/s",
            "PyTorch",
            [
                ("Attention, K", "bfloat16 H 8 T 2", 30.0, None),
                ("Attention, K", "bfloat16 H 8 T 2", 30.0, 10.0),
                ("Projection", "e4m3 T 2", 5.0, 4.0),
            ],
        ),
        ("GB/s, read + written", "np.copyto", [("Bytes", "write", 2.0, 3.0)]),
    ]


def test_a_spread_is_the_middle_half_of_the_repeats():
    assert noise.spread_of([1.0, 9.0, 4.0, 5.0, 3.0]) == pytest.approx((5 - 3) / 4)
    assert noise.spread_of([2.0, 2.0, 2.0]) == 0
    table = timing.Table("T", [], [], [])
    spreads = [0.01, 0.5, 0.03]
    table.take_spreads(spreads)
    assert (table.spread, spreads) == ({"median": 0.03, "worst": 0.5}, [])
    assert table.notes == [
        "spread: the middle half of a time's repeats covers 3.0% of the time, at most 50.0%"
    ]
    table.take_spreads([])
    assert len(table.notes) == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
def test_bench_visits_every_core():
    before = os.sched_getaffinity(0)
    rounds = 2 * len(before) + 1
    visited = []
    with noise.visiting_cores(rounds) as go:
        for index in range(rounds):
            go(index)
            visited += os.sched_getaffinity(0)
    assert visited == sorted(visited) and len(visited) == rounds  # one core in each round
    assert set(visited) == before == os.sched_getaffinity(0)


@pytest.mark.parametrize("best", [False, True])
def test_bench_times_the_host(best, monkeypatch):
    """Each side's rounds; the fastest one is looked for on every core."""
    from sparse_mla._bench.cuda import calls as cuda_calls
    from sparse_mla._bench.cuda import timing as cuda_timing

    moves, calls = [], []
    if hasattr(os, "sched_setaffinity"):
        monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: moves.append(cores))
    monkeypatch.setattr(cuda_calls, "synchronize", lambda: None)
    effort = cuda_timing.CudaEffort.of(quick=True, best=best)
    seconds = cuda_calls.host_seconds({"side": lambda: calls.append(1)}, 4, effort)
    assert seconds["side"] > 0
    assert len(calls) == cuda_calls.WARM_UP_CALLS + 4 * 4 * effort.rounds
    visits = 4 * effort.rounds + 1 if best and hasattr(os, "sched_setaffinity") else 0
    assert len(moves) == visits  # the last one goes back


def test_repeats_have_their_spread_noted():
    effort = timing.Effort(repeats=3, call_seconds=0.0)
    timing.interleave({"a": lambda: None, "b": lambda: None}, effort)
    assert len(effort.spreads) == 2


@pytest.mark.parametrize(("busy", "warns"), [(0.1, False), (0.9, True)])
def test_bench_warns_on_a_busy_host(busy, warns, monkeypatch, tmp_path):
    stat = tmp_path / "stat"
    ticks = iter([[0] * 8, [round(100 * busy), 0, 0, round(100 - 100 * busy), 0, 0, 0, 0]])

    def write_next(seconds=0.0):
        stat.write_text("cpu  " + " ".join(map(str, next(ticks))) + " 7 7\ncpu0 1 2\n")

    write_next()
    monkeypatch.setattr(noise, "HOST_TIMES", stat)
    monkeypatch.setattr(noise.time, "sleep", write_next)
    monkeypatch.setattr(noise.os, "cpu_count", lambda: 2)
    assert noise.count_busy_cores() == pytest.approx(2 * busy)
    text = noise.describe_host(2 * busy)
    assert text.startswith(f"other programs keep {2 * busy:.1f} of 2 cores busy")
    assert text.endswith("WARNING, times will be too long") == warns


def test_bench_says_so_where_nothing_tells_how_busy_a_host_is(monkeypatch, tmp_path):
    monkeypatch.setattr(noise, "HOST_TIMES", tmp_path / "nothing")
    assert noise.count_busy_cores(0.0) is None
    assert noise.describe_host(None) == "nothing here tells how busy it is"


def test_bench_s_efforts():
    full, quick = timing.Effort.of(False, False), timing.Effort.of(True, False)
    assert quick.quick and not full.quick
    assert quick.repeats < full.repeats
    best = timing.Effort.of(True, True)
    assert (best.quick, best.repeats, best.pick) == (True, 2 * quick.repeats, min)
    assert best.call_seconds < quick.call_seconds


def test_bench_prints_failures_and_notes(capsys):
    table = timing.Table("T", ["a", "long"], [["1", "2"]], [{}], ["wrong"], ["by the way"])
    table.print()
    want = "\n### T\n\n| a | long |\n| - | ---- |\n| 1 |    2 |\n\n- FAIL wrong\n- by the way\n"
    assert capsys.readouterr().out == want


def test_bench_tells_wrong_results(monkeypatch):
    """Results are wrong if attention is beyond its bound, or if bytes are not the expected ones."""
    table = timing.Table("T", [], [], [])
    errors = {"ours": _judge.Fractions(out=1.5, lse=0.5), "torch": _judge.Fractions(out=9.0)}
    labels = {"kv_format": "bfloat16", "H": 8, "T": 2}
    attention.add_row(table, labels, 10**9, errors, {"ours": 2.0, "torch": 3.0})
    assert table.failures == ["bfloat16 H 8 T 2: 1.5 × bound"]
    assert table.rows[0][-1] == "1.50×"
    assert table.rows[0][3] == "1.5"
    monkeypatch.setattr(memory, "interleave", lambda sides, _: dict.fromkeys(sides, 1.0))
    monkeypatch.setattr(memory, "make_copy", lambda _: (lambda: None, 1))
    right = memory.make_conversion
    monkeypatch.setattr(
        memory, "make_conversion", lambda *_: memory.Move("c", lambda: 0, 1, lambda: False)
    )
    judged = memory.make_norm, memory.make_merge, memory.make_partials, memory.make_index_queries
    others = memory.make_inverse, memory.make_queries, memory.make_turned_keys
    turn = memory.make_turn
    insert = memory.make_index_insert
    makers = "write", "gather", "insert", "last_gather", "index_insert"
    makers += "merge", "partials", "norm", "inverse", "queries", "index_queries", "turn"
    makers += ("turned_keys",)
    for name in (f"make_{maker}" for maker in makers):
        monkeypatch.setattr(memory, name, lambda *_: memory.Move("m", lambda: 0, 2, lambda: True))
    monkeypatch.setattr(memory, "make_moves", lambda *_: [])
    formats = memory.make_format_moves
    monkeypatch.setattr(memory, "make_format_moves", lambda *_: [])
    monkeypatch.setattr(memory.compressor, "make_moves", lambda *_: [])
    table = memory.measure(timing.Effort.of(True, False), 1)
    assert table.failures == ["c: wrong values"] * 2
    assert [row["right"] for row in table.records] == [True] * 11 + [False] * 2 + [True] * 9
    monkeypatch.setattr(memory, "NUM_NORMS", 600)
    monkeypatch.setattr(memory, "NUM_OUTPUTS", 3)
    rng = np.random.default_rng(0)
    moves = [make(rng) for make in judged] + [make() for make in others]
    moves += [insert(rng, order) for order in memory.SLOT_ORDERS]
    moves += [turn(interleaved) for interleaved in (True, False)]
    moves += [right(rng, is_prefill) for is_prefill in (False, True)]
    moves += [formats(rng, name)[0] for name in memory.OTHER_FORMATS]
    for move in moves:
        assert not move.is_right(), "nothing is computed before the call"
        move.call()
        assert move.is_right()


def test_moves_of_index_lists_are_judged():
    """Lists are right only once the call has written them."""
    moves = list(index_lists.make_moves(64, lambda x: x, lambda x: x))
    assert {move.name for move in moves} == set(index.__all__) - {
        "convert_req_index_to_global_index"
    }
    for move in moves:
        assert not move.is_right()
        move.call()
        assert move.is_right()


def test_moves_of_the_compressor_are_judged():
    """States and rows are right only once the call has written them."""
    for move in compressor.make_moves(512, lambda x: x, lambda x: x):
        assert not move.is_right()
        move.call()
        assert move.is_right()


# --- demo ----------------------------------------------------------------------------------------


def demo_options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    "option", ["requests", "context", "decode", "topk", "block-size", "tokens-per-step"]
)
def test_the_demo_needs_one_of_everything(option):
    with pytest.raises(ValueError, match=rf"^--{option} must be at least 1$"):
        demo.make_requests(demo_options(f"--{option}", "0"))
    demo.make_requests(demo_options(f"--{option}", "1"))


@pytest.mark.parametrize("pages", ["0", "1"])
def test_the_demo_takes_the_pages_it_was_given(pages):
    options = demo_options("--requests", "2", "--context", "300", "--block-size", "16")
    requests = demo.make_requests(options)
    least = max(-(-len(request.text) // 16) for request in requests)
    options.pages = int(pages)
    with pytest.raises(ValueError, match=rf"^--pages must be at least {least}, .*got {pages}$"):
        demo.make_engine(options, requests)
    options.pages = least
    _, scheduler = demo.make_engine(options, requests)
    assert scheduler.pool.num_pages == least


def test_the_demo_needs_a_text(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match=r"empty is empty$"):
        demo.read_text(tmp_path / "empty")
    assert demo.read_text(None).size > 1000


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_demo_shows_its_progress(is_terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    progress = demo.Progress(8)
    for _ in range(4):
        progress.advance(2)
        progress.clear()
    progress.finish()
    shown = capsys.readouterr().err
    if is_terminal:
        assert f"[{'#' * 10:<40}]  25%" in shown
        assert f"[{'#' * 40}] 100%" in shown
        assert shown.endswith("\r\033[K")
    else:
        assert [line.split()[1] for line in shown.splitlines()] == ["25%", "50%", "75%", "100%"]


def test_the_demo_waits_for_the_first_request():
    request = scheduler.Request(0, arrival_step=2, text=np.zeros(5, np.uint8), prompt_len=4)
    plan = scheduler.Scheduler(
        [request], num_pages=2, block_size=4, max_num_seqs=2, max_num_batched_tokens=8
    )
    assert [plan.next_batch(step) is None for step in range(3)] == [True, True, False]


def test_the_demo_s_indexer_takes_the_best_keys_up_to_the_token():
    """Two requests in three steps. Quantisation may exchange a few keys at the edge."""
    texts = [demo.read_text(None)[start : start + 90] for start in (0, 500)]
    requests = [scheduler.Request(n, 0, text, prompt_len=88) for n, text in enumerate(texts)]
    plan = scheduler.Scheduler(
        requests, num_pages=20, block_size=16, max_num_seqs=2, max_num_batched_tokens=100
    )
    config = sparse_mla.Config(
        2,
        softmax_scale=0.1,
        kv_cache_dtype="fp8_ds_mla",
        block_size=16,
        topk_tokens=20,
        max_num_seqs=2,
        max_num_batched_tokens=100,
        max_model_len=90,
    )
    toy = model.ToyModel(2, 0)
    made = engine.SparseEngine(toy, config, 20, demo_memory.Memory())
    same = total = 0
    for step in range(3):
        batch = plan.next_batch(step)
        chosen = made.run_step(batch).topk_indices
        for request, rows, positions in batch.parts():
            everything = np.arange(len(request.text))
            keys = toy.index_keys(request.text, everything).astype(np.float32)
            context = toy._context_code(request.text, positions) @ toy.w_index
            q = np.concatenate([context, toy._rope(positions)], axis=1)
            scores = np.where(everything > positions[:, None], -np.inf, q @ keys.T)
            best = np.argsort(-scores, axis=1)[:, :20]
            for its, want, p in zip(chosen[rows], best, positions, strict=True):
                its = its[its >= 0]
                assert (np.diff(its) > 0).all()
                assert len(its) == min(p + 1, 20)
                assert (its <= p).all()
                same, total = same + len(np.intersect1d(its, want)), total + len(its)
        plan.finish(batch)
    assert total > 2500
    assert same > 0.97 * total


def test_the_demo_s_workspace_is_as_large_as_the_plan_wants():
    config = sparse_mla.Config(
        2,
        softmax_scale=0.1,
        kv_cache_dtype="fp8_ds_mla",
        topk_tokens=8,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=64,
    )
    made = engine.SparseEngine(model.ToyModel(2, 0), config, 2, demo_memory.Memory())
    assert made.workspace.shape == (sparse_mla.get_prefill_workspace_size(64), 576)


# --- the command ---------------------------------------------------------------------------------


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
