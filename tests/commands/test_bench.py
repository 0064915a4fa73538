"""Parts of `python -m sparse_mla bench` that test_commands.py does not reach: the tables of a GPU,
wrong results, busy hosts, missing packages."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import require

import sparse_mla
from bench import run as bench
from bench.common import noise, plot, rows, timing
from bench.common.arrays import NumPyArrays
from bench.tables import memory, projection, top_k

pytestmark = pytest.mark.frameworks


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
    from bench.common import peer
    from bench.cuda import timing as cuda_timing

    measured = []
    records = {"decode": {"us": 5.0, "floor_us": 4.0}, "prefill": {"us": 5.0, "floor_us": 4.0}}
    failures = {"prefill": ["far off"]}

    def find(module):
        name = next(x for x, y in bench.CUDA_TABLES.items() if f"bench.{y}" == module)

        def measure(given):
            assert given.is_cuda
            measured.append(name)
            if name == "inputs":
                raise RuntimeError("the device\nis lost")
            record = records.get(name, {"us": 3.0})
            return timing.Table(name, ["us"], [["5"]], [record], failures.get(name, []))

        return SimpleNamespace(measure=measure)

    facts = SimpleNamespace(name="A GPU", multi_processor_count=132, L2_cache_size=50 << 20)
    torch = SimpleNamespace(
        manual_seed=lambda seed: None,
        __version__="9",
        cuda=SimpleNamespace(get_device_properties=lambda place: facts),
    )
    monkeypatch.setattr(cuda_timing, "torch", torch)
    monkeypatch.setattr(peer, "find_peer", lambda: (None, "none here"))
    monkeypatch.setattr(bench, "import_module", find)
    monkeypatch.setattr(bench, "what_cuda_lacks", lambda: "")
    return measured


def test_bench_measures_every_table_of_a_gpu(cuda_tables, tmp_path, capsys):
    """A table that fails does not stop the others."""
    require("matplotlib")
    paths = [str(tmp_path / name) for name in ("results.json", "plot.svg")]
    assert bench.run(options("--json", paths[0], "--plot", paths[1])) == 1
    assert cuda_tables == list(bench.CUDA_TABLES)
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
    inputs = projection.Inputs(kind, 5, np.asarray)
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
    inputs = top_k.Inputs(NumPyArrays(), kind, (3, 500, 20))
    inputs.call()
    assert inputs.judge() == 0
    assert inputs.num_bytes == 4 * 3 * 520
    columns = set(range(500)) - set(inputs.out[2].tolist())
    inputs.out[2, 19] = max(columns)
    assert inputs.judge() == np.inf


def test_bench_judges_rows_that_repeat(monkeypatch):
    monkeypatch.setattr(top_k, "SPREAD", 1000)
    inputs = top_k.Inputs(NumPyArrays(), "random", (5, 500, 20))
    assert inputs.logits.shape == (5, 500)
    inputs.call()
    assert inputs.judge() == 0
    np.testing.assert_array_equal(inputs.out[0], inputs.out[4])


def test_bench_names_its_commit(monkeypatch):
    head = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(head, capture_output=True, text=True)
    version = f"version {sparse_mla.__version__}"
    want = done.stdout.strip() if done.returncode == 0 else version
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
    from bench.cuda import timing as cuda_timing
    from bench.tables import calls as cuda_calls

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


@pytest.mark.parametrize(("sides", "waits"), [("a", 0), ("ab", 6)])
def test_a_side_waits_for_the_other_one_s_threads(sides, waits, monkeypatch):
    slept = []
    monkeypatch.setattr(timing.time, "sleep", slept.append)
    effort = timing.Effort(repeats=3, call_seconds=0.0)
    timing.interleave(dict.fromkeys(sides, lambda: None), effort)
    assert slept == [timing.SETTLE_SECONDS] * waits


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


def bench_of(seconds=None):
    """A quick bench of the CPU; without `seconds` each side takes one."""
    effort = timing.Effort.of(True, False)
    timer = (lambda sides, _: seconds) if seconds else (lambda sides, _: dict.fromkeys(sides, 1.0))
    return rows.Bench(NumPyArrays(), effort, timer)


def test_bench_tells_results_beyond_their_bound():
    labels, columns = {"H": 8, "T": 2}, rows.rates(True)
    work = rows.Work(lambda: 1.5, lambda result: result, flop=10**9)
    work.peers = {"batched": lambda: lambda: None, "lost": lambda: 1 / 0}
    bench = bench_of({"ours": 2.0, "batched": 3.0})
    table = rows.measure_rows(bench, "T", labels, columns, [(labels, lambda: work)])
    assert table.failures == [
        "8, 2: 1.5 × bound",
        "8, 2: lost: ZeroDivisionError: division by zero",
    ]
    assert table.rows == [["8", "2", "1.5", "0", "nan", "0", "1.50×"]]
    ours = {"error_over_bound": 1.5, "gflops": 0.5}
    torch = {"gflops": pytest.approx(1 / 3)}
    assert table.records == [{"H": 8, "T": 2, "ours": ours, "torch": torch, "ratio": 1.5}]


def test_bench_tells_wrong_bytes(monkeypatch):
    moves = [memory.Move("a", lambda: 0, 1, lambda: True), memory.Move("b", int, 1, lambda: False)]
    monkeypatch.setattr(memory, "cpu_moves", lambda arrays: moves)
    table = memory.measure(bench_of())
    assert table.failures == ["b: wrong values"]
    assert [row["right"] for row in table.records] == [True, False]
