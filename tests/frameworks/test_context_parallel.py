"""examples/context_parallel.py: ranks as processes on the CPU, whose exchange is gloo's. Their
tokens are those of one process, and a rank that is lost makes the others fail in time."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deepseek_models import load_example
from helpers import environment_of_python, find_framework, free_port, run_python

pytestmark = pytest.mark.torch
SCRIPT = Path(__file__).parents[2] / "examples" / "context_parallel.py"
SHORT = ["--requests=3", "--new-tokens=12", "--longest-prompt=70", "--chunk=32"]
REPORT = (
    r"rank (\d) of (\d): (\d+) tokens, (\d+) nearly [^,]*, (\d+) wrong; cache rows (\[[^\]]*\])"
)


@pytest.fixture(autouse=True)
def _torch():
    find_framework("torch")


def check(text: str, ranks: int) -> list[list[int]]:
    """Returns the cache rows of each rank."""
    found = sorted(re.findall(REPORT, text))
    assert [(int(x[0]), int(x[1])) for x in found] == [(rank, ranks) for rank in range(ranks)], text
    assert all(int(wrong) == 0 and int(near) <= 2 for *_, near, wrong, _ in found), text
    return [[int(n) for n in re.findall(r"\d+", rows)] for *_, rows in found]


def start(rank: int, ranks: int, port: int, *options: str) -> subprocess.Popen[str]:
    """A process as torchrun starts it."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    environment = {name: str(x) for name, x in variables.items()}
    environment |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONSAFEPATH"] = ""  # the script imports others beside it
    return subprocess.Popen(
        [sys.executable, SCRIPT, *SHORT, *options],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment_of_python(environment),
    )


@pytest.mark.parametrize(
    ("ranks", "interleave", "exchange"),
    [
        (2, 1, "all_to_all"),
        (2, 16, "all_to_all"),
        (4, 64, "all_to_all"),
        (2, 16, "all_gather"),
    ],
)
def test_tokens_are_those_of_one_process(ranks, interleave, exchange):
    """With runs of 64 some ranks have no key of short requests."""
    port = free_port()
    options = f"--interleave={interleave}", f"--exchange={exchange}"
    started = [start(rank, ranks, port, *options) for rank in range(ranks)]
    printed = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0] * ranks, printed
    rows = check("".join(printed), ranks)
    assert interleave < 64 or any(0 in own for own in rows)


@pytest.mark.transformers
@pytest.mark.parametrize(
    ("interleave", "options"),
    [
        (1, ["--model=deepseek_v3"]),
        (16, ["--model=deepseek_v3", "--kv-cache-dtype=fp8_ds_mla"]),
        (16, ["--model=deepseek_v32"]),
        (
            1,
            [
                "--model=deepseek_v32",
                "--kv-cache-dtype=fp8_ds_mla",
                "--index-cache-dtype=fp8_index",
            ],
        ),
    ],
)
def test_tokens_of_transformers_models(interleave, options):
    """test_transformers_ranks.py has more of them, with ranks as threads."""
    find_framework("transformers")
    port = free_port()
    options = [*options, f"--interleave={interleave}"]
    started = [start(rank, 2, port, *options) for rank in range(2)]
    printed = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], printed
    first, second = check("".join(printed), 2)
    assert all(abs(a - b) <= interleave for a, b in zip(first, second, strict=True))


def test_torchrun_runs_it():
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    done = run_python(*launch, str(SCRIPT), *SHORT, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    check(done.stdout, 2)


def test_one_process_runs_it():
    done = run_python(str(SCRIPT), *SHORT, MASTER_PORT=str(free_port()), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    check(done.stdout, 1)


@pytest.mark.parametrize(
    ("how", "model"),
    [
        ("KILL", "small"),
        ("STOP", "small"),
        pytest.param("KILL", "deepseek_v32", marks=pytest.mark.transformers),
    ],
)
def test_a_lost_rank_ends_the_others(how, model):
    """At once if it is dead; within the timeout of an exchange if it only stands still."""
    find_framework("torch" if model == "small" else "transformers")
    port = free_port()
    options = ["--lose-rank-at=4", f"--lose-by={how}", "--timeout=5", f"--model={model}"]
    ranks = [start(rank, 2, port, *options) for rank in range(2)]
    begun = time.monotonic()
    try:
        printed, _ = ranks[0].communicate(timeout=120)
    finally:
        ranks[1].kill()
        ranks[1].communicate()
    assert ranks[0].returncode not in (0, None), printed
    assert time.monotonic() - begun < 60
    words = "closed by peer|reset by peer|Broken pipe" if how == "KILL" else "[Tt]imed out|timeout"
    assert "Error" in printed and re.search(words, printed), printed
    assert "rank 0 of 2" not in printed


def test_wrong_tokens_are_found():
    """By the comparison with one process, which this test makes without ranks."""
    torch = find_framework("torch").module
    example = load_example("context_parallel")
    options = example.parse(SHORT)
    weights = example.Weights(options.layers, options.heads, "cpu")
    prompts, longest = [[3, 1, 4, 1, 5], [9]], 40

    def model():
        return example.Model(weights, example.Ranks(None, options.heads), len(prompts), longest)

    tokens = example.generate(model(), prompts, options)
    assert example.judge(model(), prompts, tokens, options.chunk) == (0, 0)
    tokens[1, 5] = (tokens[1, 5] + 1) % example.VOCABULARY
    _, num_wrong = example.judge(model(), prompts, tokens, options.chunk)
    assert num_wrong > 0
    assert torch.is_tensor(tokens)
