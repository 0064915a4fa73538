"""Parts of `python -m sparse_mla info` that test_commands.py does not reach: GPUs, plans, facts for
programs, machines without a name."""

import argparse
import builtins
import json
import os
import platform
import re

import numpy as np
import pytest

import sparse_mla
from sparse_mla import _info

pytestmark = pytest.mark.frameworks

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


E4M3_FORMATS = ("fp8_e4m3 of 512 values", "fp8_e4m3 of 576 values")
V41_FORMATS = ("fp8_v41", "fp8_v41_split", "fp8_nope")


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
        "fp8_v4 of 512 values",
        *E4M3_FORMATS,
        *(f"{name} of 512 values" for name in V41_FORMATS),
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
        "lack": None,
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
