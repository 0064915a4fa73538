"""The rows of the bench's tables by their names. A change of the tables' code keeps the list, and a
new row is added to it: `python tests/commands/test_bench_names.py` with the tree on PYTHONPATH."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import find_framework

from bench import run
from bench.common import rows
from bench.common.arrays import NumPyArrays, TorchArrays
from bench.common.timing import Table
from bench.cpu import sizes, subnormal
from bench.cuda import decode, helpers, kinds, linear, logits, prefill, prefill_layer
from bench.tables import calls, layer, memory, paged_layer, paged_steps

pytestmark = pytest.mark.frameworks

NAMES = Path(__file__).parents[1] / "fixtures" / "bench_rows.json"
ROWS = ("attention", "v4", "dense", "varlen", "paged", "projection", "top_k", "dense_prefill")
ROWS += ("lightning",)  # their rows know their names before they make arrays
MOVES = ("bytes", "helpers")  # their names are those of calls, which are made


def measured(device: str, name: str) -> Iterator[str]:
    """The first cells of the rows of a table that measures nothing."""
    table = getattr(run, f"{device.upper()}_TABLES")[name]
    arrays = SimpleNamespace(device="cpu", is_cuda=device == "cuda")
    bench = rows.Bench(arrays, SimpleNamespace(quick=False), lambda *_: {})

    def measure_row(bench: Any, table: Table, columns: Any, row: Any, show=rows.show, **_: Any):
        table.rows.append(show(row[0]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "measure_row", measure_row)
        made = import_module(f"bench.{table}").measure(bench)
    return (" | ".join(row) for row in made.rows)


def product(*parts: Iterable[Any]) -> list[str]:
    lines = [""]
    for part in parts:
        lines = [f"{line} {x}".strip() for line in lines for x in part]
    return lines


def names_of(device: str, name: str) -> Iterable[str]:
    if name in ROWS:
        return measured(device, name)
    batches = (product([x], [k], h, b) for x, k, h, b in decode.FULL_DECODES)
    shapes = paged_layer.SHAPES[device, False]
    steps = [x.name for x in paged_steps.KINDS], [paged_steps.DECODES, paged_steps.OTHERS]
    found: dict[str, Iterable[Any]] = {
        "decode": [line for lines in batches for line in lines],
        "prefill": product(prefill.KEYS, prefill.HEADS),
        "inputs": kinds.KINDS,
        "paged_layer": shapes,
        "paged_steps": product(*steps),
        "prefill_layer": (f"{x.name}, {x.requests}" for x in prefill_layer.SHAPES),
        "layer": product(layer.RATIOS.values(), layer.SHAPES if device == "cuda" else (1, 16)),
        "linear": [*product(linear.SCHEMES, linear.TOKENS), *linear.GROUPS],
        "logits": (f"{x.func.__name__} {x.args}" for x in logits.make_work_items(False)),
        "calls": [*calls.OPERATORS, *(x[0] for x in calls.ENGINE_CALLS)],
        "subnormal": (f"{x.title}: {kind}" for x in subnormal.make_cases() for kind in x.kinds),
        "sizes": (f"{x.title}: {[*x.sizes]}" for x in sizes.make_sweeps()),
    }
    return map(str, found[name])


def names_of_device(device: str) -> dict[str, list[str]]:
    tables = run.CPU_TABLES if device == "cpu" else run.CUDA_TABLES
    return {name: [*names_of(device, name)] for name in tables if name not in MOVES}


def wanted_names(device: str) -> dict[str, list[str]]:
    wanted: dict[str, list[str]] = json.loads(NAMES.read_text(encoding="utf-8"))[device]
    return wanted


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.torch)])
def test_rows_have_their_names(device):
    if device == "cuda":
        find_framework("torch")
    found, wanted = names_of_device(device), wanted_names(device)
    assert list(found) == [name for name in wanted if name not in MOVES]
    for name, lines in found.items():
        assert lines == wanted[name], name


SIZES = {"slots": 2048, "requests": 4, "queries": 64, "norms": 600, "turned": 1024, "outputs": 16}
SIZES |= {"merged": 8, "lists": 64, "heads": (128, 2), "rows": 256, "states": 512}
WITHOUT_OUT = ("dequantize_kv_cache", "dynamic_per_tensor_quant")  # nothing can be looked at before


def moves_of(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Small moves of a table; CUDA's are in PyTorch on the CPU."""
    monkeypatch.setattr(memory, "TOPK", 64)
    small = memory.Sizes(**SIZES)
    if device == "cpu":
        return memory.cpu_moves(NumPyArrays(), small)
    find_framework("torch").module.manual_seed(0)
    for name, value in {"PARTIALS": (8, 128), "QUANT_ELEMENTS": 4096}.items():
        monkeypatch.setattr(memory, name, value)
    families = [x for name, x in memory.CUDA_MOVES.items() if "host" not in name]
    return chain.from_iterable(make(TorchArrays("cpu"), small) for make in families)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.torch)])
def test_moves_are_judged(device, monkeypatch):
    """They are right only once the call has written what is looked at."""
    names = []
    for move in moves_of(device, monkeypatch):
        if not move.name.startswith(WITHOUT_OUT):
            assert not move.is_right(), move.name
        move.call()
        assert move.is_right(), move.name
        names.append(re.sub(r"T \d{3,}", "T n", move.name))  # the sizes are this test's
    assert names == wanted_names(device)["bytes"]


@pytest.mark.torch
def test_helpers_have_their_names(monkeypatch):
    find_framework("torch")
    monkeypatch.setattr(helpers, "CONTEXT", 512)
    monkeypatch.setattr(helpers, "PAGES", 8)
    made = (make(TorchArrays("cpu"), 1) for make in (helpers.launches, *helpers.HELPERS))
    names = []
    for name, call in chain.from_iterable(made):
        call()
        names.append(name)
    assert names == wanted_names("cuda")["helpers"]


if __name__ == "__main__":
    kept = json.loads(NAMES.read_text(encoding="utf-8"))
    found = {device: kept[device] | names_of_device(device) for device in ("cpu", "cuda")}
    text = json.dumps(found, indent=0, ensure_ascii=False)
    NAMES.write_text(text + "\n", encoding="utf-8")
