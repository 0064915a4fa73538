"""examples/context_parallel.py on GPUs, a rank on each of up to four; with one GPU one rank."""

from __future__ import annotations

import pytest
import test_context_parallel as on_cpus
from helpers import find_framework, run_python

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("interleave", "model"),
    [
        (1, "small"),
        (64, "small"),
        pytest.param(16, "deepseek_v3", marks=pytest.mark.transformers),
        pytest.param(16, "deepseek_v32", marks=pytest.mark.transformers),
    ],
)
def test_tokens_are_those_of_one_gpu(interleave, model):
    torch = find_framework("torch").module
    if model != "small":
        find_framework("transformers")
    ranks = {1: 1, 2: 2, 3: 2}.get(torch.cuda.device_count(), 4)
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    launch += [f"--master-port={on_cpus.free_port()}", str(on_cpus.SCRIPT), *on_cpus.SHORT]
    options = "--device=cuda", f"--interleave={interleave}", f"--model={model}"
    done = run_python(*launch, *options, PYTHONSAFEPATH="")
    assert done.returncode == 0, done.stderr
    on_cpus.check(done.stdout, ranks)
