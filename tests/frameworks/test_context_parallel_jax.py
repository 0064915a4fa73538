"""examples/context_parallel_jax.py: ranks as devices of one CPU, by `jax.shard_map`. Their results
are those of one device. tests/commands/test_examples.py runs it as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers import find_framework, run_python

pytestmark = pytest.mark.jax
PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"
# Runs the page's step on two devices, and on one with a whole cache.
CHECK = """
import re, sys
page = open(sys.argv[1]).read()
exec(next(x for x in re.findall(r"^```python\\n(.*?)^```", page, re.M | re.S) if "import jax" in x))
rng = np.random.default_rng(0)
draw = lambda *shape: jax.numpy.asarray(rng.normal(0, 1, shape), jax.numpy.bfloat16)
q, rows, lens = draw(2, 4, 576), draw(40, 1, 576), np.array([40, 13], np.int32)
table = np.array([rng.permutation(40), rng.permutation(40)], np.int32)
own = [[x for x in range(40) if x // INTERLEAVE % RANKS == rank] for rank in range(RANKS)]
caches, local = [], np.arange(20, dtype=np.int32)
for its in own:  # pages of one token: those of both requests, one after the other
    caches += [rows[row[its]] for row in table]
tables = np.array([local, 20 + local])
out, lse = split(q, jax.numpy.concatenate(caches), tables, lens)
want, want_lse = attend(q, rows, table, lens, cp=None)
assert out.shape == want.shape and lse.shape == want_lse.shape
assert np.abs(np.asarray(lse) - want_lse).max() < 1e-5
assert np.abs(np.asarray(out, np.float32) - np.asarray(want, np.float32)).max() < 0.02
"""
SCRIPT = Path(__file__).parents[2] / "examples" / "context_parallel_jax.py"


@pytest.mark.parametrize(
    ("ranks", "interleave", "rows"),
    [
        (2, 1, [87, 87]),
        (4, 3, [45, 45, 45, 39]),
        (8, 64, [174, 0, 0, 0, 0, 0, 0, 0]),  # most ranks never have a key
    ],
)
def test_results_are_those_of_one_device(ranks, interleave, rows):
    find_framework("jax")
    options = f"--ranks={ranks}", f"--interleave={interleave}"
    done = run_python(str(SCRIPT), *options, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d) ranks: .* cache rows \[(.*)\] of 174\n", done.stdout)
    assert found, done.stdout
    assert int(found[1]) == ranks
    assert [int(n) for n in found[2].split(", ")] == rows


def test_the_documented_step_is_that_of_one_device():
    find_framework("jax")
    devices = "--xla_force_host_platform_device_count=2"
    done = run_python("-c", CHECK, str(PAGE), JAX_PLATFORMS="cpu", XLA_FLAGS=devices)
    assert done.returncode == 0, done.stderr
