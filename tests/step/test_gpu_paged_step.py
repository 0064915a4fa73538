"""Paged builds of a GPU's arrays, whose numbers the host cannot see."""

import gpu
import numpy as np
import pytest
from device import host
from paged_steps import paged

LIMITS = {"max_bs": 4, "max_num_tokens": 32, "max_context_len": 12, "page_size": 4}
ROWS = np.array([np.arange(8, 20), [4, 5, 6, 7, 12, 13, 14, 15, 0, 0, 0, 0]], np.int32)


def ints(*values):
    return gpu.put(np.array(values, np.int32))


def make(**changes):
    config = paged.Config(**(LIMITS | changes), device="cuda")
    return paged.MetadataBuilder(config, gpu.put(ROWS))


def test_lengths_beyond_the_config_and_the_pool_are_cut():
    lens = ints(2**31 - 1, 5, 5, 5)
    metadata = make().build("decode", lens, ints(0, 2, -1, 1), seq_lens_cpu=[12, 5, 5, 5])
    assert host(metadata.cache_seqlens_int32).tolist() == [12, 0, 0, 5]
    assert host(metadata.page_table[0]).tolist() == [2, 3, 4]


@pytest.mark.parametrize("name", ["seq_lens", "extend_seq_lens", "encoder_lens"])
def test_lengths_of_the_host_must_be_given(name):
    given = {"seq_lens_cpu": [5], "extend_seq_lens_cpu": [1], "encoder_lens_cpu": [2]}
    del given[f"{name}_cpu"]
    with pytest.raises(ValueError, match=f"build: `{name}_cpu` must be given"):
        make(is_encoder_decoder=True).build(
            "extend",
            ints(5),
            ints(0),
            extend_seq_lens=ints(1),
            encoder_lens=ints(2),
            **given,
        )
