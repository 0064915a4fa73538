"""Captures of paged steps: a replay writes what a build of the same batch writes, where the capture
has its arrays."""

from __future__ import annotations

import copy
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import device
import numpy as np
import pytest
from helpers import assert_error_text
from paged_layers import Layer, kinds_of
from paged_replays import FIXED_MODES, SIZES, Engine
from paged_steps import check, paged

CASES = int(os.environ.get("SMLA_RANDOM_CASES", 300))
put = Engine.put


def ints(*values):
    return put(np.array(values, np.int32))


@pytest.mark.parametrize("mode", FIXED_MODES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_replays(mode, page_size):
    """Of any captured size in any order, with builds of other sizes between them."""
    for seed in range(-(-CASES // 60)):
        rng = np.random.default_rng([seed, page_size, len(mode), 11])
        engine = Engine(rng, mode, page_size)
        captured = {bs: engine.capture(bs) for bs in SIZES}
        for _ in range(20):
            if rng.integers(0, 4) == 0:
                check(*engine.build())
            bs = int(rng.choice(SIZES))
            batch, metadata = engine.replay(bs)
            assert metadata is captured[bs]
            try:
                check(batch, metadata)
            except BaseException as error:
                error.add_note(f"seed {seed}, {bs}: {batch}")
                raise


@pytest.mark.parametrize("mode", FIXED_MODES)
def test_layers_of_replays(mode):
    """Attention by captured metadata: fp64's results, zeros for padding."""
    for seed in range(-(-CASES // 20)):
        rng = np.random.default_rng([seed, len(mode), 12])
        engine = Engine(rng, mode, int(rng.choice([1, 4])))
        engine.capture(bs := int(rng.choice(SIZES)))
        batch, metadata = engine.replay(bs)
        for kind, left in kinds_of(rng, batch):
            Layer(batch, kind, left, is_latent=seed % 4 == 1 and batch.encoder_lens is None).check(
                metadata
            )


def test_sizes_follow_from_the_config():
    """Whatever the lengths of the capture."""
    limits = {"max_bs": 4, "max_num_tokens": 32, "max_context_len": 14, "page_size": 4}
    limits |= {"num_draft_tokens": 3, "speculative_num_steps": 2, "attention_chunk": 8}
    rows = put(np.arange(80, dtype=np.int32).reshape(4, 20))
    builder = paged.MetadataBuilder(paged.Config(**limits, device=device.NAME), rows)
    one, row = ints(1, 1), ints(0, 1)
    decode = builder.capture("decode", 2, 2, one, row)
    assert decode.max_seq_len_k == 20 and decode.page_table.shape == (2, 5)  # 14 + 3, in pages
    assert decode.max_seq_len_q == 1 and len(decode.local_attn_metadata.local_seqused_k) == 2
    step = builder.capture("decode", 2, 2, one, row, spec_step=1)
    assert step.max_seq_len_k == 20 and device.host(step.cache_seqlens_int32)[0] == 3
    verify = builder.capture("target_verify", 2, 6, one, row)
    local = verify.local_attn_metadata
    assert (local.local_max_query_len, local.local_max_seq_len) == (3, 8)
    extend = builder.capture("draft_extend", 2, 10, one, row, extend_seq_lens=one)
    assert extend.max_seq_len_q == 5 and extend.cu_seqlens_q.shape == (3,)
    assert builder.capture("idle", 2, 2, one, row) is decode
    assert builder.capture("draft_extend", 2, 10, one, row, extend_seq_lens=one) is extend


@pytest.mark.parametrize("topk", [1, 3])
def test_steps_of_a_draft(topk):
    """All steps by one launch, each as a build of its own."""
    for seed in range(-(-CASES // 10)):
        rng = np.random.default_rng([seed, topk, 13])
        changes = {"topk": topk, "is_encoder_decoder": False, "attention_chunk": 0}
        engine = Engine(rng, "draft", int(rng.choice([1, 4])), **changes)
        engine.builder = draft = engine.make(paged.MultiStepDraft)
        captured = {}
        for bs in SIZES:
            batch, counted, _ = engine.pad(engine.draw(0, longest=1), bs)
            batch = replace(batch, seq_lens=counted.seq_lens)
            captured[bs] = draft.capture(bs, engine.tokens(bs), **engine.arrays(batch))
        for _ in range(6):
            bs = int(rng.choice(SIZES))
            given, counted, num_real_reqs = engine.pad(engine.draw(bs), bs)
            got = draft.replay(bs, **engine.arrays(given), num_real_reqs=num_real_reqs)
            assert len(got) == engine.config["speculative_num_steps"] - 1
            assert all(x is y for x, y in zip(got, captured[bs], strict=True))
            for step, metadata in enumerate(got):
                counted.spec_step = step
                check(counted, metadata)


def test_metadata_is_of_the_latest_batch_of_its_mode():
    """Another replay or build of a mode takes its arrays, and the next replay gives them back."""
    rng = np.random.default_rng(14)
    changes = {"is_encoder_decoder": False, "sliding_window_size": -1, "attention_chunk": 0}
    engine = Engine(rng, "decode", 4, topk=1, **changes)
    for bs in (1, 3):
        engine.capture(bs)
    batch, small = engine.replay(1)
    layer = Layer(batch)
    layer.check(small)
    for other in (lambda: engine.replay(3), engine.build):
        other()
        with pytest.raises(ValueError, match="attention: `metadata` must come from"):
            layer.run(small)
        batch, again = engine.replay(1)
        assert again is small
        layer = Layer(batch)
        layer.check(small)


# --- padding -------------------------------------------------------------------------------------


def test_builders_of_16_threads():
    """Each has a builder of its own; they share the engine's arrays."""
    rows = put(np.arange(64, dtype=np.int32).reshape(4, 16))
    config = paged.Config(max_bs=4, max_num_tokens=8, max_context_len=12, device=device.NAME)
    pool = ints(0, 1, 2, 3)

    def run(thread: int) -> None:
        builder = paged.MetadataBuilder(config, rows)
        builder.capture("decode", 4, 4, ints(1, 1, 1, 1), pool)
        for i in range(40):
            lens = np.random.default_rng([thread, i]).integers(0, 13, 4).astype(np.int32)
            got = builder.replay("decode", 4, put(lens), pool, num_real_reqs=i % 5)
            want = np.where(np.arange(4) < i % 5, lens, 0)
            assert (device.host(got.cache_seqlens_int32) == want).all()

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(run, range(16)))


def test_rows_behind_the_tokens_of_a_draft_extend_stay():
    rng = np.random.default_rng(15)
    changes = {"is_encoder_decoder": False, "sliding_window_size": -1, "attention_chunk": 0}
    engine = Engine(rng, "draft_extend", 4, topk=1, **changes)
    engine.most_extended = 4
    engine.capture(3)
    for _ in range(10):
        batch, metadata = engine.replay(3)
        layer = Layer(batch)
        used = len(layer.q)
        q = np.zeros((12, *layer.q.shape[1:]), layer.q.dtype)
        q[:used] = layer.q
        layer.q = q
        out, lse = np.full((12, 4, 64), 7, layer.q.dtype), np.full((12, 4), 7, np.float32)
        got = layer.run(metadata, out=put(out), lse=put(lse))
        assert (got["out"][used:].astype(np.float32) == 7).all() and (got["lse"][used:] == 7).all()


def test_a_fill_value_of_one_is_safe():
    """Engines that fill lengths with 1 and rows of the pool with 0."""
    rows = put(np.arange(64, dtype=np.int32).reshape(4, 16))
    config = paged.Config(max_bs=4, max_num_tokens=8, max_context_len=12, device=device.NAME)
    builder = paged.MetadataBuilder(config, rows)
    builder.capture("decode", 4, 4, ints(1, 1, 1, 1), ints(0, 0, 0, 0))
    lens, pool = ints(5, 9, 1, 1), ints(2, 1, 0, 0)
    got = builder.replay("decode", 4, lens, pool)
    assert device.host(got.cache_seqlens_int32).tolist() == [5, 9, 1, 1]
    got = builder.replay("decode", 4, lens, pool, num_real_reqs=2)
    assert device.host(got.cache_seqlens_int32).tolist() == [5, 9, 0, 0]
    assert device.host(got.page_table)[:, 0].tolist() == [32, 16, 0, 0]
    assert builder.seq_len_fill_value == 0


# --- refusals ------------------------------------------------------------------------------------

LIMITS = {"max_bs": 4, "max_num_tokens": 16, "max_context_len": 12, "page_size": 4}
DRAFTS = {"num_draft_tokens": 3, "speculative_num_steps": 2}
NEWS = {"extend_seq_lens": ints(1, 1)}


def make(**changes):
    rows = put(np.arange(64, dtype=np.int32).reshape(4, 16))
    return paged.MetadataBuilder(paged.Config(**(LIMITS | changes), device=device.NAME), rows)


BAD_CAPTURES = [
    ("mode", {}, ("extend", 2, 2), {}),
    ("mode", {}, ("mixed", 2, 2), {}),
    ("mode", {}, ("prefill", 2, 2), {}),
    ("mode", {}, ("target_verify", 2, 6), {}),
    ("mode", {}, ("draft_extend", 2, 4), NEWS),
    ("spec_step", {}, ("decode", 2, 2), {"spec_step": 0}),
    ("num_tokens", {}, ("decode", 2, 3), {}),
    ("num_tokens", {}, ("decode", 2, 0), {}),
    ("num_tokens", DRAFTS, ("target_verify", 2, 2), {}),
    ("num_tokens", DRAFTS, ("draft_extend", 2, 3), NEWS),
    ("num_tokens", DRAFTS, ("draft_extend", 2, 0), NEWS),
    ("num_tokens", DRAFTS, ("draft_extend", 2, 18), NEWS),
    ("num_tokens", {}, ("decode", 2, "2"), {}),
    ("seq_lens", {}, ("decode", 5, 5), {}),
    ("seq_lens", {}, ("decode", 3, 3), {}),
    ("seq_lens", {}, ("decode", -1, -1), {}),
    ("num_reqs", {}, ("decode", 1.5, 2), {}),
    ("extend_seq_lens", DRAFTS, ("draft_extend", 2, 4), {}),
    ("out_cache_loc", {}, ("decode", 2, 2), {"out_cache_loc": ints(1)}),
]


@pytest.mark.parametrize("name, changes, sizes, given", BAD_CAPTURES)
def test_bad_captures(name, changes, sizes, given):
    builder = make(**changes)
    with pytest.raises((TypeError, ValueError)) as error:
        builder.capture(*sizes, ints(1, 1), ints(0, 1), **given)
    assert_error_text(
        error.value, f"MetadataBuilder.{error.value.args[0][16:].split(':')[0]}", {name}
    )
    assert builder._captured == {}


def test_bad_replays():
    builder = make(**DRAFTS)
    lens, pool = ints(5, 7), ints(0, 1)
    kept = builder.capture("decode", 2, 2, lens, pool)
    before = device.host(kept.cache_seqlens_int32).copy()
    bad = [
        ("bs", ("decode", 3), {}),
        ("bs", ("target_verify", 2), {}),
        ("bs", ("decode", 2), {"spec_step": 0}),
        ("mode", ("verify", 2), {}),
        ("spec_step", ("target_verify", 2), {"spec_step": 0}),
        ("num_real_reqs", ("decode", 2), {"num_real_reqs": 3}),
        ("num_real_reqs", ("decode", 2), {"num_real_reqs": -1}),
        ("num_real_reqs", ("decode", 2), {"num_real_reqs": "one"}),
    ]
    for name, sizes, given in bad:
        with pytest.raises((TypeError, ValueError), match=f"`{name}` must be"):
            builder.replay(*sizes, ints(2, 2), pool, **given)
    with pytest.raises(ValueError, match="`seq_lens` must"):
        builder.replay("decode", 2, ints(2, 2, 2), pool)
    with pytest.raises(ValueError, match=r"capture: `num_tokens` must be that of the capture"):
        builder.capture("decode", 2, 4, ints(2, 2), pool)
    assert (device.host(kept.cache_seqlens_int32) == before).all()


def test_slots_are_given_as_in_the_capture():
    rows = put(np.arange(64, dtype=np.int32).reshape(4, 16))
    mapping = put(np.arange(64, dtype=np.int32)[::-1].copy())
    config = paged.Config(**LIMITS, device=device.NAME)
    builder = paged.MetadataBuilder(config, rows, full_to_swa_index_mapping=mapping)
    given = ints(5, 7), ints(0, 1)
    builder.capture("decode", 2, 2, *given, out_cache_loc=ints(4, 5))
    got = builder.replay("decode", 2, *given, out_cache_loc=ints(60, 5), num_real_reqs=1)
    assert device.host(got.swa_out_cache_loc).tolist() == [3, -1]
    for loc, found in ((None, "None"), (ints(1, 2, 3), "3")):
        with pytest.raises(ValueError, match=f"`out_cache_loc` must be as .* 2, got {found}"):
            builder.replay("decode", 2, *given, out_cache_loc=loc)


@pytest.mark.parametrize(
    "name, lens, pool, news",
    [
        ("seq_lens", (13, 2), (0, 1), (1, 1)),
        ("req_pool_indices", (5, 2), (4, 1), (1, 1)),
        ("extend_seq_lens", (5, 2), (0, 1), (3, 1)),
        ("extend_seq_lens", (5, 2), (0, 1), (1, 3)),
    ],
)
@pytest.mark.parametrize("is_replay", [False, True])
def test_values_that_the_host_can_read(name, lens, pool, news, is_replay):
    """On the CPU they are refused. A GPU cuts them, see test_gpu_paged_step.py."""
    builder = make(**DRAFTS)
    given = ints(*lens), ints(*pool)
    good = builder.capture("draft_extend", 2, 4, ints(5, 2), ints(0, 1), **NEWS)
    call = builder.replay if is_replay else builder.build
    sizes = ("draft_extend", 2) if is_replay else ("draft_extend",)
    refused = not device.ON_CUDA and (is_replay or news != (3, 1))
    if not refused:
        more = {} if is_replay else {"seq_lens_cpu": [12, 12], "extend_seq_lens_cpu": [4, 4]}
        call(*sizes, *given, extend_seq_lens=ints(*news), **more)
        return
    with pytest.raises(ValueError, match=f"`{name}` must "):
        call(*sizes, *given, extend_seq_lens=ints(*news))
    assert device.host(good.cache_seqlens_int32).tolist() == [5, 2]


def test_a_shared_prefix_is_of_eager_builds():
    with pytest.raises(TypeError, match="common_prefix_len"):
        make().capture("decode", 1, 1, ints(5), ints(0), common_prefix_len=1)


def test_copies_have_no_captures():
    builder = make()
    builder.capture("decode", 1, 1, ints(5), ints(0))
    with pytest.raises(ValueError, match=r"`bs` must be captured in this mode, \[\] are, got 1"):
        copy.copy(builder).replay("decode", 1, ints(5), ints(0))


# --- memory --------------------------------------------------------------------------------------


def count_state(c, has_pool: bool) -> int:
    """The bytes of all modes' arrays: of requests, of the rows of trees, of chunks, of encoders."""
    reach = max(c.num_draft_tokens, c.speculative_num_steps)
    width = -(-(c.max_context_len + reach) // c.page_size)
    slots = max(c.max_num_tokens, c.max_bs * max(c.topk * c.speculative_num_steps, reach))
    table = c.max_bs * width

    def mode(steps: int, tokens: int, rows: int = 0, columns: int = 0) -> int:
        count = steps * (2 * c.max_bs + 1) + c.max_bs + 1 + table
        count += table + slots if has_pool else 0
        count += 3 * c.max_bs + 1 + table if c.is_encoder_decoder else 0
        if c.attention_chunk:
            made = 2 * c.max_bs + tokens // c.attention_chunk if tokens > c.max_bs else c.max_bs
            count += made + 1 + steps * made * (1 + c.attention_chunk // c.page_size)
        left = [c.sliding_window_size + 1] if c.sliding_window_size >= 0 else []
        for more in [0, *left] if rows else []:
            count += steps * (2 * rows + 1) + rows * (more + columns)
        return count

    n, k, s = c.num_draft_tokens, c.topk, c.speculative_num_steps
    extends = mode(1, c.max_num_tokens)
    total = mode(1, c.max_bs) + extends
    if s:
        rows = c.max_bs * k if k > 1 else 0
        total += mode(s, c.max_bs, rows, s)
    if n:
        rows = c.max_bs * n if k > 1 else 0
        total += extends + mode(1, c.max_bs * n, rows, n)
    return 4 * total


SIZED = [
    {"max_context_len": 32768, "page_size": 64},
    {"max_context_len": 32768, "num_draft_tokens": 4, "speculative_num_steps": 3},
    {"max_context_len": 8192, "page_size": 16, "is_encoder_decoder": True},
    {"max_context_len": 32768, "page_size": 16, "attention_chunk": 8192, "num_draft_tokens": 4},
    {"max_context_len": 100, "topk": 2, "num_draft_tokens": 3, "speculative_num_steps": 2},
    {
        "max_context_len": 131072,
        "page_size": 64,
        "topk": 4,
        "num_draft_tokens": 8,
        "speculative_num_steps": 5,
        "sliding_window_size": 1024,
    },
]


def test_new_arrays_are_zeros():
    """What no step has written yet is no memory of others."""
    for _ in range(20):
        junk = [np.full(1 << 12, 77, np.int32) for _ in range(50)]
        del junk
        builder = make(max_context_len=500, page_size=1)
        metadata = builder.capture("decode", 1, 1, ints(1), ints(0))
        assert not device.host(metadata.page_table)[0, 1:].any()


@pytest.mark.parametrize("sizes", SIZED)
@pytest.mark.parametrize("has_pool", [False, True])
def test_bytes_of_the_state(sizes, has_pool):
    """Beside it there are a number for each query token, and what makes arrays begin at lines."""
    config = paged.Config(**({"max_bs": 64, "max_num_tokens": 512} | sizes), device=device.NAME)
    pool = np.zeros((2, 16), np.int32)
    mapping = put(np.zeros(16, np.int32)) if has_pool else None
    builder = paged.MetadataBuilder(config, put(pool), full_to_swa_index_mapping=mapping)
    more = builder.workspace_bytes - count_state(config, has_pool)
    tokens = max(512, 64 * max(config.topk, config.num_draft_tokens))
    arrays_of_all_modes, of_shared_prefixes = 100, 3 * (64 + 64 + 8)
    assert 0 <= more <= 4 * (tokens + 1 + of_shared_prefixes) + 64 * arrays_of_all_modes


def test_window_rows_do_not_grow_with_the_context():
    """64 requests of 131,072 tokens with a window of 1024, and trees of 8 drafts."""
    sizes = SIZED[-1] | {"max_bs": 64, "max_num_tokens": 512}
    size = {}
    for left in (-1, 1024):
        config = paged.Config(**(sizes | {"sliding_window_size": left}), device=device.NAME)
        builder = paged.MetadataBuilder(config, put(np.zeros((2, 16), np.int32)))
        size[left] = builder.workspace_bytes
    rows_of_drafts = 64 * 4 * 4 * (1025 + 5)
    assert size[1024] - size[-1] - rows_of_drafts <= 3 << 20
