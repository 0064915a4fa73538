"""What a newcomer runs: the README's example, and `python -m sparse_mla`."""

import json
import os
import re
import resource
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import reference
from helpers import find_framework, printed_by_python, require, run_python

import sparse_mla
from bench import run as bench
from bench.common import timing

pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).parents[2]


def run_command(*arguments, **options):
    return run_python("-m", "sparse_mla", *arguments, **options)


def test_the_readme_s_example_runs():
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    assert example == (ROOT / "examples/quickstart.py").read_text()
    printed = printed_by_python(str(ROOT / "examples/quickstart.py"))
    assert printed == "(3, 16, 512) bfloat16 (3, 16)\n"


SHORT = ["--short"]
DENSE = ["--short", "--dense"]


@pytest.mark.parametrize(
    ("options", "path"),
    [
        (["--heads", "32"], "separate"),
        (["--heads", "8"], "mixed"),
        (["--heads", "3", "--path", "direct", "--block-size", "17"], "direct"),
        (["--heads", "8", "--kv-cache-dtype", "bfloat16"], "bf16"),
    ],
)
def test_demo_takes_the_path_and_is_within_the_bounds(options, path):
    done = run_command("demo", *SHORT, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f" {path} " in done.stdout
    assert "within the bounds" in done.stdout
    assert "0 pages in use at the end" in done.stdout


@pytest.mark.parametrize(
    ("options", "cache"),
    [
        (["--heads", "32"], "FP8"),
        (["--heads", "3", "--kv-format", "bfloat16", "--block-size", "17"], "bf16"),
    ],
)
def test_demo_of_a_dense_layer_is_within_the_bounds(options, cache):
    done = run_command("demo", *DENSE, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "· all keys ·" in done.stdout
    for part in ("decode", "prefill"):
        assert re.search(rf"^  {part} on the {cache} cache +\d+ +0\.\d+$", done.stdout, re.M)
    assert "0 pages in use at the end" in done.stdout


@pytest.mark.parametrize(
    ("options", "cache", "path"),
    [
        ([], "FP8", "direct"),
        (["--path", "separate", "--kv-format", "fp8_ds_mla", "--topk", "999"], "FP8", "separate"),
        (["--heads", "3", "--kv-format", "bfloat16", "--block-size", "20"], "bf16", "direct"),
        # Rings of pages come round.
        (["--heads", "2", "--context", "700", "--tokens-per-step", "40"], "FP8", "direct"),
    ],
)
def test_demo_of_a_v4_layer_is_within_the_bounds(options, cache, path):
    done = run_command("demo", "--short", "--v4", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    topk = "999" if "--topk" in options else "16"
    assert f" · top-{topk} rows of 4 tokens · " in done.stdout
    assert f" {path} " in done.stdout
    for part in ("decode", "prefill"):
        line = rf"^  {part} on the {cache} cache +\d+ +0\.\d+ +0\.\d+$"
        assert re.search(line, done.stdout, re.M)
    predicted, commonest = re.search(r"predicted: (\d+)% .*one: (\d+)%", done.stdout).groups()
    assert int(predicted) > int(commonest) + 3
    assert "0 pages in use at the end" in done.stdout


def test_demo_reads_the_user_s_text(tmp_path):
    text = tmp_path / "text"
    text.write_text("the cat sat on the mat, the dog sat on the log. " * 20)
    done = run_command("demo", *SHORT, "--heads", "2", "--text", str(text))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--heads", "200"], "Config: `num_heads` must be"),
        (["--path", "bf16"], "Config: `path` must be"),
        (["--text", "/none"], "/none"),
        (
            ["--kv-format", "fp8_v4"],
            "--kv-format must be fp8_ds_mla or bfloat16 for a sparse layer",
        ),
        (
            ["--dense", "--topk", "9"],
            "--topk is not for --dense, where a query attends to all keys",
        ),
        (["--dense", "--path", "separate"], "--path must be mixed for a dense layer, got separate"),
        (["--dense", "--v4"], "--dense and --v4 exclude each other"),
        (["--v4", "--path", "bf16"], "--path must be direct or separate for a v4 layer, got bf16"),
        (["--v4", "--block-size", "18"], "--block-size must be a multiple of 4 for --v4, got 18"),
    ],
)
def test_demo_refuses_in_one_line(options, text):
    done = run_command("demo", *SHORT, *options)
    assert done.returncode != 0
    assert done.stderr.startswith("demo: ")
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_info_names_what_there_is():
    done = run_command("info")
    assert done.returncode == 0, done.stderr
    for word in ("sparse_mla", "compiler", "openmp", "numpy", "mqa_base.c", "fp8_ds_mla"):
        assert word in done.stdout, word
    assert sum(line.startswith("* cpu ") for line in done.stdout.splitlines()) == 1


def test_quick_bench_judges_every_table_and_takes_less_than_a_minute(tmp_path):
    """The bench takes 25 s on two cores, with PyTorch and JAX installed. A minute of two cores is
    counted in CPU seconds, which a test that runs beside this one does not change. The same run
    plots its rates."""
    plot = tmp_path / "plot.svg"
    options = ["--plot", str(plot)] if find_spec("matplotlib") else []
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_command("bench", "--device", "cpu", "--quick", "--json", *options)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "progress is for terminals"
    results = json.loads(done.stdout)
    tables = [rows for rows in results.values() if isinstance(rows, list)]
    attention, v4, dense, ragged, paged, paged_layers, paged_steps, layers, *tables = tables
    moves, projections, chosen, calls = tables
    rows = [*attention, *v4, *dense, *ragged, *paged]
    assert all(0 < row["ours"]["error_over_bound"] <= 1 for row in rows)
    assert all(row["right"] for row in [*moves, *chosen, *paged_steps])
    assert all(0 < row["error_over_bound"] <= 1 for row in [*projections, *paged_layers])
    assert all(row["seconds"]["NumPy"] > 0 for row in calls)
    assert all(0 < row["seconds"] < 2 * row["operators_seconds"] for row in layers)
    titles = {title for title, rows in results.items() if isinstance(rows, list)}
    assert set(results["spread"]) == titles
    assert all(0 < s["median"] <= s["worst"] for s in results["spread"].values())
    assert re.match(r"other programs keep \d+\.\d of \d+ cores busy", results["host"])
    if sparse_mla.build_info()["flags"] == "release":
        assert cpu_seconds < 2 * 60
    require("matplotlib")
    text = plot.read_text()
    assert "Grouped output projection: sparse_mla" in text
    assert ">GFLOP/s<" in text


def test_bench_shows_its_progress_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    table = timing.Table("Calls", ["a"], [], [])
    table.add(["1"], {})
    table.add(["2"], {})
    assert capsys.readouterr().err.endswith("\r\033[KCalls: 2 rows")
    table.print()
    assert capsys.readouterr().err == "\r\033[K"


def test_a_reader_that_has_seen_enough_gets_no_traceback():
    reading, writing = os.pipe()
    os.close(reading)
    done = run_command("demo", *SHORT, stdout=writing)
    os.close(writing)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_bench_writes_numbers_beside_the_tables(tmp_path):
    path = tmp_path / "results.json"
    options = ["--device", "cpu", "--quick", "--only", "calls", "--json", str(path)]
    done = run_command("bench", *options)
    assert done.returncode == 0, done.stderr
    assert "### Host time per call" in done.stdout
    assert "\n- host: other programs keep " in done.stdout
    assert "\n- spread: the middle half of a time's repeats covers " in done.stdout
    assert json.loads(path.read_text())["failures"] == {}


@pytest.mark.parametrize(
    "options",
    [
        ["--device", "cpu", "--only", "decode"],
        ["--device", "cpu", "--only", "calls", "--plot", "plot.svg"],
        ["--plot", "plot.png"],
        ["--heads", "64"],
        ["--device", "cpu", "--only", "inputs", "--kinds", "flat"],
        ["--from", "results.json"],
        ["--from", "/none", "--plot", "plot.svg"],
    ],
)
def test_bench_refuses_in_one_line(options):
    done = run_command("bench", *options)
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_bench_says_why_there_is_no_gpu_to_measure():
    done = run_command("bench", "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode != 0
    build = sparse_mla.build_info()["cuda"]
    assert (build if build.startswith("none") else "no GPU") in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("pytorch", [None, "without CUDA", "with CUDA"])
@pytest.mark.parametrize("gpu", [None, "unusable", "usable"])
def test_bench_names_first_what_no_installation_cures(gpu, pytorch, monkeypatch):
    """`gpu` None stands for a build without CUDA."""
    rows = [] if gpu is None else [{"device": "cuda", "available": gpu == "usable"}]
    cuda = types.SimpleNamespace(is_available=lambda: pytorch == "with CUDA")
    monkeypatch.setattr(sparse_mla, "kernels", lambda: rows)
    monkeypatch.setattr(bench, "find_spec", lambda name: pytorch)
    monkeypatch.setattr(bench, "import_module", lambda name: types.SimpleNamespace(cuda=cuda))
    after_the_gpu = {None: "needs PyTorch", "without CUDA": "PyTorch sees no GPU", "with CUDA": ""}
    reasons = {None: "no CUDA in this build", "unusable": "there is no GPU here"}
    reason = reasons.get(gpu, after_the_gpu[pytorch])
    assert bench.find_device() == ("cpu" if reason else "cuda")
    if reason:
        with pytest.raises(SystemExit, match=rf"bench: .*{reason}"):
            bench.check_cuda()
    else:
        bench.check_cuda()


def test_bench_plots_an_earlier_run(tmp_path):
    require("matplotlib")
    rows = [{"us": 20.0, "floor_us": 10.0, "peer_us": 30.0}, {"us": 5.0, "floor_us": 2.0}]
    results = {"device": "a GPU, 132 SMs", "failures": {}, "Decode, K": rows, "Calls": [{"x": 1}]}
    (tmp_path / "results.json").write_text(json.dumps(results))
    plots = [tmp_path / "first.svg", tmp_path / "second.svg"]
    for plot in plots:
        done = run_command("bench", "--from", str(tmp_path / "results.json"), "--plot", str(plot))
        assert done.returncode == 0, done.stderr
    text = plots[0].read_text()
    assert "Decode: FlashMLA" in text
    assert text == plots[1].read_text()
    assert len(text) < 100_000


@pytest.mark.torch
@pytest.mark.parametrize("kv_format", ["fp8_ds_mla", "bfloat16"])
def test_the_device_s_judge_agrees_with_the_reference(kv_format, monkeypatch):
    framework = find_framework("torch")
    torch = framework.module
    from bench.cuda import inputs as cuda_inputs
    from bench.cuda import judge as cuda_judge

    monkeypatch.setattr(cuda_inputs, "DEVICE", "cpu")
    torch.manual_seed(0)
    kv = cuda_inputs.make_cache(256, kv_format)
    q, sink = torch.randn(2, 3, 576).bfloat16(), torch.randn(3)
    lengths = torch.full((2,), 250)
    indices = cuda_inputs.draw_slots(torch.zeros_like(lengths), lengths, 40)
    assert 0 <= int(indices.min()) <= int(indices.max()) < 250
    out, lse = sparse_mla.sparse_attention(q, kv, indices, softmax_scale=0.1, attn_sink=sink)
    is_fp8 = kv_format == "fp8_ds_mla"
    want = reference.attention(
        *map(framework.get, (q, kv, indices)),
        softmax_scale=0.1,
        attn_sink=sink.numpy(),
    )
    allowed = {"units": 32, "f16_scales": is_fp8}
    fractions = (
        np.abs(out.double().numpy() - want.out) / want.out_tolerance(**allowed),
        np.abs(lse.double().numpy() - want.lse) / want.lse_tolerance(**allowed),
    )
    inputs = cuda_inputs.Inputs(q, kv, indices, 0.1, sink)
    judged = cuda_judge.judge(inputs, (out, lse))
    assert judged == pytest.approx(max(fraction.max() for fraction in fractions))
    out[1, 2, 511] = float("nan")
    assert cuda_judge.judge(inputs, (out, lse)) == float("inf")
