"""Random inputs as engines send them (random_cases.py) over keys of 512 values, in one cache or
two of any formats, compared with the reference.

SMLA_RANDOM_CASES=10000 runs the cases of seeds 0 to 9999, and SMLA_RANDOM_SEED=4711 runs that of
one seed.
"""

import os

import device
import pytest
from random_cases import draw_v4, failure_of

SEED = os.environ.get("SMLA_RANDOM_SEED")
COUNT = int(os.environ.get("SMLA_RANDOM_CASES", "400" if device.ON_CUDA else "80"))
SEEDS = [int(SEED)] if SEED else [*range(COUNT)]
SHARDS = min(40, len(SEEDS))  # tests that the workers of pytest-xdist share


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_inputs(shard):
    failures = [text for seed in SEEDS[shard::SHARDS] if (text := failure_of(seed, draw_v4))]
    assert not failures, f"{len(failures)} cases failed\n" + "\n".join(failures[:9])
