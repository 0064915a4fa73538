"""Paged steps on a GPU: numbers that the host cannot see are cut, and a replay is one kernel."""

import copy
import os
import warnings

import gpu
import numpy as np
import pytest
from device import host
from gpu import torch
from paged_replays import FIXED_MODES, SIZES, Engine
from paged_steps import called, paged

LIMITS = {"max_bs": 4, "max_num_tokens": 32, "max_context_len": 12, "page_size": 4}
ROWS = np.array([np.arange(8, 20), [4, 5, 6, 7, 12, 13, 14, 15, 0, 0, 0, 0]], np.int32)
REPLAYS = int(os.environ.get("SMLA_RANDOM_CASES", 10_000))


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


# --- replays -------------------------------------------------------------------------------------


def captured(mode: str, page_size: int, seed: int, bs: int):
    """-> an engine, and a replay of its capture with arrays that stay where they are."""
    engine = Engine(np.random.default_rng([seed, page_size, len(mode), 31]), mode, page_size)
    engine.capture(bs)
    given, _, num_real_reqs = engine.pad(engine.draw(bs), bs)
    arrays = engine.arrays(given)
    options = {"spec_step": engine.spec_step, "num_real_reqs": num_real_reqs}

    def replay():
        return engine.builder.replay(called(mode), bs, **arrays, **options)

    return engine, arrays, replay


@pytest.mark.parametrize("mode", FIXED_MODES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_random_bits(mode, page_size):
    """Whatever the arrays hold, nothing else is read or written, and lengths fit the tables."""
    for seed in range(5):
        engine, arrays, replay = captured(mode, page_size, seed, bs := SIZES[-1])
        arrays = {**arrays, "req_to_token": engine.builder.req_to_token}
        if engine.builder.full_to_swa_index_mapping is not None:
            arrays["mapping"] = engine.builder.full_to_swa_index_mapping
        for _ in range(REPLAYS // 50):
            for x in arrays.values():
                x.view(torch.uint8).random_(0, 2 if x.dtype is torch.bool else 256)
                if torch.rand(()) < 0.5 and x.dtype is torch.int32:
                    x.copy_(torch.randint(-2, 20, x.shape, device="cuda"))
            metadata = replay()
            keys = metadata.cache_seqlens_int32
            longest = metadata.page_table.shape[1] * page_size
            lens = host(keys)
            assert ((lens >= 0) & (lens <= longest)).all()
            assert host(metadata.cu_seqlens_q)[-1] <= engine.tokens(bs)


@pytest.mark.parametrize("mode", FIXED_MODES)
def test_a_replay_is_one_kernel(mode):
    """Nothing is copied, and the host waits for nothing."""
    _, _, replay = captured(mode, 16, 1, 3)
    replay()

    def replays():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch warns that this is a prototype
                torch.cuda.set_sync_debug_mode("error")
            for _ in range(100):
                replay()
        finally:
            torch.cuda.set_sync_debug_mode(0)

    names = gpu.device_work(replays)
    assert len(names) == 100 and all("paged_lists_kernel" in name for name in names), set(names)


@pytest.mark.parametrize("mode", FIXED_MODES)
def test_replays_allocate_nothing(mode):
    engine, _, replay = captured(mode, 16, 2, 8)
    replay()

    def replays():
        for _ in range(1000):
            replay()

    assert gpu.allocations(replays) == []
    assert "cudaMalloc" in gpu.allocations(lambda: copy.copy(engine.builder))
