"""examples/context_parallel.py on GPUs, a rank on each of up to four; with one GPU one rank."""

from __future__ import annotations

import pytest
import test_context_parallel as on_cpus
from helpers import find_framework, run_python

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("interleave", [1, 64])
def test_tokens_are_those_of_one_gpu(interleave):
    torch = find_framework("torch").module
    ranks = {1: 1, 2: 2, 3: 2}.get(torch.cuda.device_count(), 4)
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    launch += [f"--master-port={on_cpus.free_port()}", str(on_cpus.SCRIPT), *on_cpus.SHORT]
    done = run_python(*launch, "--device=cuda", f"--interleave={interleave}")
    assert done.returncode == 0, done.stderr
    on_cpus.check(done.stdout, ranks)
