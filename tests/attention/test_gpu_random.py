"""Random inputs as engines send them (random_cases.py), on the GPU, compared with the reference.

SMLA_RANDOM_CASES=10000 runs the cases of seeds 0 to 9999; the default is 300 cases.
SMLA_RANDOM_SEED=4711 runs the case of that seed alone.
"""

import os

import pytest
from random_cases import failure_of

SEED = os.environ.get("SMLA_RANDOM_SEED")
COUNT = int(os.environ.get("SMLA_RANDOM_CASES", "300"))
FOUND = [485, 7171]  # seeds that failed: keys lighter than a late heavy one had too few bits
SEEDS = [int(SEED)] if SEED else [*range(COUNT), *(seed for seed in FOUND if seed >= COUNT)]
SHARDS = min(40, len(SEEDS))  # tests that the workers of pytest-xdist share


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_inputs(shard):
    failures = [text for seed in SEEDS[shard::SHARDS] if (text := failure_of(seed))]
    assert not failures, f"{len(failures)} cases failed\n" + "\n".join(failures[:9])
