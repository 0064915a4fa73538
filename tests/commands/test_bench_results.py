"""The bench of CUDA tables before and after it measures: a missing peer, options that choose rows,
the summary and the plot of a run's results."""

import argparse
import importlib.util
import json
import sys

import pytest
from helpers import require, run_python
from test_bench_cuda import FlashMLA

from bench.common import peer, summary
from bench.cuda import sent as cuda_sent
from bench.cuda.kinds import KINDS

pytestmark = pytest.mark.frameworks


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (None, "none (ModuleNotFoundError: "),
        (FlashMLA(has_legacy=lambda: False), "none (ImportError: flash_mla was built without"),
        (FlashMLA(), "flash_mla of unknown version"),
    ],
)
def test_a_peer_that_is_not_there_is_none(module, words, monkeypatch):
    if peer_is_installed():
        pytest.skip("FlashMLA is installed")
    if module is not None:
        monkeypatch.setitem(sys.modules, "flash_mla", module)
    found, text = peer.find_peer()
    assert text.startswith(words)
    assert (found is None) == words.startswith("none")


def peer_is_installed() -> bool:
    return importlib.util.find_spec("flash_mla") is not None


# --- options -------------------------------------------------------------------------------------


def rows_of(**options):
    given = {"quick": False, "cache": None, "heads": None, "batches": None, "kinds": None}
    return cuda_sent.Rows.of(argparse.Namespace(**(given | options)))


def test_options_choose_rows():
    assert rows_of() == cuda_sent.Rows()
    assert set(rows_of().kinds) == set(KINDS)
    assert len(rows_of(quick=True).batches) < len(rows_of().batches)
    rows = rows_of(quick=True, cache="bfloat16", heads="8,24", batches="16x1,1x99", kinds="ragged")
    assert rows == cuda_sent.Rows(("bfloat16",), (8, 24), ((16, 1), (1, 99)), ("ragged",))
    assert rows.max_tokens == 99


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("cache", "fp8"),
        ("heads", "0"),
        ("heads", "129"),
        ("heads", "16;64"),
        ("batches", "8"),
        ("batches", "0x1"),
        ("kinds", "flat,peaky"),
    ],
)
def test_options_say_what_they_take(option, text):
    with pytest.raises(SystemExit, match=f"^bench: --{option} "):
        rows_of(**{option: text})


# --- summary and plot ----------------------------------------------------------------------------


def record(kind, us, peer_us=30.0, usual=True, **labels):
    shape = {"kv_format": "fp8_ds_mla", "H": 64, "requests": "8 × 1"} | labels
    ours = {"us": us, "flat_us": 10.0, "over_flat": us / 10.0}
    peer = {"peer_us": peer_us, "peer_over_ours": peer_us / us}
    return shape | {"input": kind, "usual": usual} | ours | peer


RESULTS = {
    "device": "a GPU, 132 SMs",
    "failures": {},
    "Inputs": [
        record("flat", 10.0),
        record("late-2", 15.0),
        record("blocks-none", 9.0, peer_us=12.0),
        record("nan-row", 99.0, usual=False),
        record("late-2", 12.0, H=128),
        record("flat", 11.0, H=128),
        record("flat", 5.0, kv_format="bfloat16"),
    ],
}


def test_the_summary_names_the_slowest_usual_input_of_a_shape():
    table = summary.summarise(RESULTS)
    lines = [
        "fp8_ds_mla|64|8 × 1|10.0|15.0|1.50×|late-2|3.00×|2.00×|1.33×|blocks-none",
        "fp8_ds_mla|128|8 × 1|11.0|12.0|1.20×|late-2|2.73×|2.50×|2.50×|late-2",
        "bfloat16|64|8 × 1|5.0|5.0|0.50×|flat|6.00×|6.00×|6.00×|flat",
    ]
    assert ["|".join(row) for row in table.rows] == lines
    assert len(table.columns) == len(table.rows[0])
    assert summary.summarise({"Inputs": [record("late-2", 15.0)]}) is None, "nothing flat beside"


def test_an_earlier_run_is_summed_up_and_plotted(tmp_path):
    require("matplotlib")
    (tmp_path / "results.json").write_text(json.dumps(RESULTS))
    command = ["-m", "sparse_mla", "bench", "--from", str(tmp_path / "results.json")]
    done = run_python(*command, "--plot", str(tmp_path / "plot.svg"))
    assert done.returncode == 0, done.stderr
    assert "### Flat and slowest input" in done.stdout
    text = (tmp_path / "plot.svg").read_text()
    for word in ("FP8 rows: FlashMLA", "bf16 rows: sparse_mla", "blocks-none"):
        assert word in text
    (tmp_path / "results.json").write_text('{"failures": {}}')
    done = run_python(*command)
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1, done.stderr
