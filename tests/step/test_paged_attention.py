"""sparse_mla.paged.attention: a layer of every kind in every mode, against fp64 with the mask of
each query written out."""

from __future__ import annotations

import os

import device
import numpy as np
import pytest
import reference as ref
from helpers import Guarded, assert_same_bits, assert_within_bounds
from paged_layers import Layer, kinds_of
from paged_steps import MODES, Batch, fill_pool, make_batch, make_verification, paged

import sparse_mla

CASES = int(os.environ.get("SMLA_RANDOM_CASES", 500))
put = device.Journey().put if device.DEVICE != "cpu" else lambda x: x


def random_layer(rng, batch: Batch, kind: str, left: int) -> Layer:
    is_latent = batch.encoder_lens is None and rng.random() < 0.25
    kv_heads = int(rng.choice([1, 2]))
    return Layer(
        batch,
        kind,
        left,
        is_latent=is_latent,
        heads=(kv_heads * int(rng.choice([1, 2, 4])), kv_heads),
        dims=[(64, 64), (128, 128), (40, 24), (96, 64)][int(rng.integers(4))],
        dtype=str(rng.choice(["bf16", "fp16"])),
        softcap=float(rng.choice([0, 0, 5])),
        has_sink=bool(rng.integers(0, 2)),
        seed=int(rng.integers(1000)),
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_layers(mode, page_size):
    for seed in range(-(-CASES // 3)):
        rng = np.random.default_rng([seed, page_size, len(mode), 9])
        batch = make_batch(rng, mode, page_size, longest=int(rng.choice([17, 40])))
        metadata = batch.build()
        for kind, left in kinds_of(rng, batch):
            try:
                random_layer(rng, batch, kind, left).check(metadata)
            except BaseException as error:
                error.add_note(f"seed {seed}, {kind}, {left}: {batch}")
                raise


@pytest.mark.parametrize("mode", MODES)
def test_virtual_requests_are_chunks(mode):
    """local_attn_metadata gives kernels of an engine what attention_chunk gives."""
    for seed in range(20):
        rng = np.random.default_rng([seed, 77])
        size = int(rng.choice([1, 4]))
        changes = {"topk": 1, "sliding_window_size": -1, "is_encoder_decoder": False}
        changes["attention_chunk"] = size * int(rng.integers(1, 6))
        batch = make_batch(rng, mode, size, longest=30, **changes)
        batch.encoder_lens, batch.prefix, batch.bound = None, 0, 0
        metadata = batch.build()
        local = metadata.local_attn_metadata
        layer = Layer(batch, "local")
        got = sparse_mla.paged_attention(
            put(layer.q),
            *(put(x) for x in layer.caches),
            local.local_block_table,
            local.local_seqused_k,
            cu_seqlens_q=local.local_query_start_loc,
            softmax_scale=layer.scale,
            causal=True,
        )
        want = layer.check(metadata)
        assert_within_bounds(layer.reference(), {"out": device.host(got[0]), "lse": want["lse"]})


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("is_latent", [False, True])
def test_results_are_the_caller_s(topk, is_latent):
    """The same bits in arrays of the caller, and when a builder has scratch memory already."""
    batch = make_verification(topk)
    metadata = batch.build()
    layer = Layer(batch, is_latent=is_latent, has_sink=True)
    first = layer.check(metadata)
    out, lse = (
        Guarded(first["out"].shape, first["out"].dtype),
        Guarded(first["lse"].shape, np.float32),
    )
    bytes_before = metadata._builder.workspace_bytes
    journey = device.Journey()
    given = {"out": out.array, "lse": lse.array}
    if device.DEVICE != "cpu":
        given = {name: journey.put(x) for name, x in given.items()}
    layer.run(metadata, **given)
    if device.DEVICE != "cpu":
        journey.fetch()
    assert_same_bits(out.check(), first["out"])
    assert_same_bits(lse.check(), first["lse"])
    assert metadata._builder.workspace_bytes == bytes_before


def test_scratch_counts_as_memory():
    batch = make_verification(2)
    metadata = batch.build()
    builder = metadata._builder
    before = builder.workspace_bytes
    Layer(batch).run(metadata)
    tokens = batch.max_bs * batch.num_draft_tokens
    rows = max(batch.max_num_tokens, tokens) * 4
    assert builder.workspace_bytes - before == 2 * rows * (64 + 1) * 4


def test_a_prefix_is_a_cascade():
    """Whatever the prefix, the result is that of the whole, and no part of it is counted twice."""
    rng = np.random.default_rng(3)
    config = {"max_bs": 3, "max_num_tokens": 16, "max_context_len": 20, "page_size": 4}
    shared = np.arange(12, dtype=np.int32)
    table, num_slots = fill_pool(rng, 3, 20, 4, np.full(3, 20))
    table += 12
    table[:, :12] = shared
    for prefix in range(11):
        for is_latent in (False, True):
            extend = np.array([2, 1, 4], np.int32)
            batch = Batch(
                "extend",
                config,
                np.array([14, 12, 20], np.int32),
                np.arange(3),
                table,
                extend_seq_lens=extend,
                prefix=prefix,
                num_slots=num_slots + 12,
            )
            layer = Layer(batch, is_latent=is_latent, has_sink=True, softcap=3.0)
            layer.check(batch.build())


def test_arrays_of_new_keys():
    """`k` and `v` as arrays: the new tokens, causal, then a chunk of context, all of it."""
    rng = np.random.default_rng(5)
    config = {"max_bs": 2, "max_num_tokens": 8, "max_context_len": 9}
    table, _ = fill_pool(rng, 2, 9, 1, np.full(2, 9))
    lens, news = np.array([4, 9], np.int32), np.array([3, 5], np.int32)
    batch = Batch("extend", config, lens, np.arange(2), table, extend_seq_lens=news)
    metadata = batch.build()
    q, k, v = (put(rng.normal(0, 1, (8, 2, 64)).astype(np.float16)) for _ in range(3))
    starts = put(np.array([0, 3, 8], np.int32))
    for options, mask in (({}, {}), ({"sliding_window_size": 1}, {"window_size": (1, 0)})):
        got = paged.attention(metadata, q, k=k, v=v, softmax_scale=0.1, **options)
        want = sparse_mla.varlen_attention(
            q, k, v, starts, starts, softmax_scale=0.1, causal=True, **mask
        )
        for x, y in zip(got, want, strict=True):
            assert_same_bits(device.host(x), device.host(y))
    chunk = put(np.array([0, 1, 5], np.int32))
    cached = [put(rng.normal(0, 1, (5, 2, 64)).astype(np.float16)) for _ in range(2)]
    got = paged.attention(
        metadata, q, k=cached[0], v=cached[1], prefix_chunk=(chunk, 4), softmax_scale=0.1
    )
    want = sparse_mla.varlen_attention(q, *cached, starts, chunk, softmax_scale=0.1)
    assert_same_bits(device.host(got[0]), device.host(want[0]))


def cast(x) -> np.ndarray:
    """To e4m3, saturating."""
    return np.clip(ref.to_f32(x), -448, 448).astype(ref.E4M3)


@pytest.mark.parametrize("mode", ["decode", "target_verify", "extend"])
def test_queries_are_cast_on_request(mode):
    """A saturating cast; without it q stays as it is."""
    rng = np.random.default_rng(11)
    batch = make_verification(1)
    batch = Batch(**{**vars(batch), "mode": mode})
    batch.config["max_num_tokens"] = 16
    metadata = batch.build()
    layer = Layer(batch)
    layer.q[0] *= 300  # beyond 448
    layer.caches = tuple(cast(np.nan_to_num(ref.to_f32(x))) for x in layer.caches)
    scales = {"k_descale": 0.5, "v_descale": rng.random((1, 2)).astype(np.float32) + 0.5}
    moved = {k: put(x) if isinstance(x, np.ndarray) else x for k, x in scales.items()}
    given = dict(softmax_scale=layer.scale, **moved)
    caches = [put(x) for x in layer.caches]
    got = paged.attention(metadata, put(layer.q), *caches, quantize_q=True, **given)
    want = paged.attention(metadata, put(cast(layer.q)), *caches, **given)
    plain = paged.attention(metadata, put(layer.q), *caches, **given)
    assert_same_bits(device.host(got[0]), device.host(want[0]))
    assert_same_bits(device.host(got[1]), device.host(want[1]))
    assert not np.array_equal(device.host(plain[1]), device.host(got[1]))


def test_both_parts_of_queries_are_cast():
    """The absorbed form, with rows of q that no request has."""
    rng = np.random.default_rng(13)
    batch = make_verification(1)
    metadata = batch.build()
    q, qv = (rng.normal(0, 1, (8, 2, n)).astype(ref.BF16) for n in (64, 512))
    k, v = (
        cast(rng.normal(0, 1, (-(-batch.num_slots // 4), 4, 1, n)).astype(np.float32))
        for n in (64, 512)
    )
    caches = put(k), put(v)
    got = paged.attention(
        metadata, put(q), *caches, qv=put(qv), softmax_scale=0.05, quantize_q=True
    )
    want = paged.attention(metadata, put(cast(q)), *caches, qv=put(cast(qv)), softmax_scale=0.05)
    for x, y in zip(got, want, strict=True):
        assert_same_bits(device.host(x)[:6], device.host(y)[:6])


def test_rows_of_a_tree_take_the_descales_of_their_request():
    batch = make_verification(2)
    metadata = batch.build()
    layer = Layer(batch)
    caches = tuple(np.nan_to_num(ref.to_f32(x)) for x in layer.caches)
    scales = np.array([[0.5, 2.0], [1.0, 0.25]], np.float32)
    given = {"k_descale": put(scales), "v_descale": put(scales[::-1].copy())}
    layer.caches = tuple(cast(x) for x in caches)
    got = layer.run(metadata, **given)
    # The same values without scales, request by request.
    for b in range(2):
        rows = slice(3 * b, 3 * b + 3)
        one = Layer(batch)
        one.caches = tuple(
            (ref.to_f32(x).reshape(*x.shape) * s[b][:, None]).astype(ref.BF16)
            for x, s in zip(layer.caches, (scales, scales[::-1]), strict=True)
        )
        want = one.reference().rows(rows)
        assert_within_bounds(want, {name: x[rows] for name, x in got.items()})


# --- refusals ------------------------------------------------------------------------------------


def decode(**changes) -> tuple[Batch, object]:
    batch = make_verification(1)
    config = {"max_bs": 2, "max_num_tokens": 8, "max_context_len": 9, "page_size": 4} | changes
    batch = Batch(**{**vars(batch), "mode": "decode", "config": config})
    if changes.get("is_encoder_decoder"):
        batch.encoder_lens = np.zeros(2, np.int32)
    return batch, batch.build()


HEADS = {"dtype": "fp16"}


@pytest.mark.parametrize(
    "name, options",
    [
        ("is_local", {"is_local": True}),
        ("is_cross", {"is_cross": True}),
        ("sliding_window_size", {"sliding_window_size": -2}),
        ("k_cache", {"k_cache": None, "v_cache": None}),
        ("k", {"k_cache": None, "v_cache": None, "k": np.ones(1), "v": np.ones(1)}),
        ("v", {"k_cache": None, "v_cache": None, "k": np.ones(1)}),
        ("k", {"k_cache": None, "v_cache": None, "v": np.ones(1)}),
        ("metadata", {"metadata": None}),
    ],
)
def test_bad_layers(name, options):
    batch, metadata = decode()
    layer = Layer(batch, **HEADS)
    given = {"metadata": metadata, "k_cache": put(layer.caches[0]), "v_cache": put(layer.caches[1])}
    given |= options
    kwargs = {k: put(x) for k, x in given.items() if k != "metadata"}
    with pytest.raises((TypeError, ValueError), match=f"^attention: `{name}` must .*, got "):
        paged.attention(given["metadata"], put(layer.q), softmax_scale=1.0, **kwargs)


def test_bad_layers_of_a_config():
    both = {"is_local": True, "is_cross": True}
    batch, metadata = decode(is_encoder_decoder=True)
    layer = Layer(batch, **HEADS)
    q, caches = put(layer.q), [put(x) for x in layer.caches]
    with pytest.raises(ValueError, match=r"^attention: `is_local` must be False for a cross layer"):
        paged.attention(metadata, q, *caches, softmax_scale=1.0, **both)
    with pytest.raises(ValueError, match=r"^attention: `v_cache` must be given with an encoder"):
        paged.attention(metadata, q, caches[0], softmax_scale=1.0)
    tree = make_verification(2)
    layer = Layer(tree, **HEADS)
    q, caches = put(layer.q), [put(x) for x in layer.caches]
    with pytest.raises(ValueError, match=r"^attention: `sliding_window_size` must be at most the"):
        paged.attention(tree.build(), q, *caches, softmax_scale=1.0, sliding_window_size=2)
    shared = Batch(**{**vars(decode()[0]), "prefix": 2})
    layer = Layer(shared, **HEADS)
    q, caches = put(layer.q), [put(x) for x in layer.caches]
    with pytest.raises(ValueError, match=r"^attention: `sliding_window_size` must be -1 with a"):
        paged.attention(shared.build(), q, *caches, softmax_scale=1.0, sliding_window_size=2)


def test_metadata_of_an_earlier_build():
    batch, metadata = decode()
    batch.build(metadata._builder)
    with pytest.raises(ValueError, match=r"^attention: `metadata` must come from .*latest build"):
        Layer(batch).run(metadata)


def test_a_pair_of_queries_is_not_cast():
    batch, metadata = decode()
    layer = Layer(batch, **HEADS)
    q, caches = put(layer.q), [put(x) for x in layer.caches]
    bytes_ = [put(x.view(np.uint8)) for x in layer.caches]
    with pytest.raises(TypeError, match=r"^attention: `q` must be one array with quantize_q"):
        paged.attention(metadata, (q, q), *bytes_, softmax_scale=1.0, quantize_q=True)
    with pytest.raises(
        ValueError, match=r"^attention: `quantize_q` must be False unless the cache"
    ):
        paged.attention(metadata, q, *caches, softmax_scale=1.0, quantize_q=True)
