"""sparse_mla.dense: steps of dense MLA, layer by layer against fp64 over keys and values."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import reference as ref
from cases import random_bf16
from device import host
from helpers import NO_NAN, Guarded, assert_same_bits

import sparse_mla as package

dense = package.dense
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 96, "max_model_len": 512}
SCALE = 0.07


def make_config(**changes) -> dense.Config:
    options = {"softmax_scale": SCALE, "qk_nope_head_dim": 32, "v_head_dim": 48, "block_size": 16}
    options["path"] = "mixed"
    return dense.Config(4, **(options | LIMITS | changes))


@dataclasses.dataclass
class Engine:
    """Requests whose tokens come step by step."""

    config: dense.Config
    num_reqs: int
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        c = self.config
        row, dtype = (656, np.uint8) if c.kv_cache_dtype == "fp8_ds_mla" else (576, ref.BF16)
        pages_each = LIMITS["max_model_len"] // c.block_size
        self.table = self.rng.permutation(self.num_reqs * pages_each).astype(np.int32)
        self.table = self.table.reshape(self.num_reqs, -1)
        self.cache = np.zeros((self.num_reqs * pages_each, c.block_size, row), dtype)
        self.lens = np.zeros(self.num_reqs, np.int32)
        weight = random_bf16(self.rng, 512, 4 * (32 + 48), std=512**-0.5)
        self.rope_table = package.rope_table(LIMITS["max_model_len"])
        self.layer = dense.DenseMLA(c, kv_b_proj=weight, rope_table=self.rope_table)
        self.builder = dense.MetadataBuilder(c)

    def common(self, query_lens, padding=0, bound=0):
        self.lens = self.lens + np.array(query_lens, np.int32)
        starts = np.cumsum([0, *query_lens]).astype(np.int32)
        slots = [
            slots_of(self.table[b], length, self.config.block_size)[length - n :]
            for b, (length, n) in enumerate(zip(self.lens, query_lens, strict=True))
        ]
        return package.CommonAttentionMetadata(
            starts,
            self.lens,
            np.concatenate([*slots, np.full(padding, -1)]),
            self.table,
            seq_lens_cpu=self.lens + bound,
            num_actual_tokens=int(starts[-1]) + padding,
        )

    def step(self, query_lens, *, padding=0, bound=0, pair=False) -> tuple[np.ndarray, np.ndarray]:
        """Runs a step; returns out, and fp64 of the same rows."""
        common = self.common(query_lens, padding, bound)
        rows = common.num_actual_tokens
        q = random_bf16(self.rng, rows, 4, 32 + 64)
        kv_c, k_pe = random_bf16(self.rng, rows, 512), random_bf16(self.rng, rows, 64)
        out = Guarded((rows + 1, 4, 48), ref.BF16, poison=NO_NAN)
        metadata = self.builder.build(common)
        given = (
            (np.ascontiguousarray(q[..., :32]), np.ascontiguousarray(q[..., 32:])) if pair else q
        )
        before = [x.copy() for x in (q, kv_c, k_pe)]
        cache = self.cache.copy()
        self.write(cache, k_pe, kv_c, metadata)
        self.layer.forward(given, kv_c, k_pe, self.cache, metadata, out=out.array)
        for x, y in zip(before, (q, kv_c, k_pe), strict=True):
            assert_same_bits(x, y, "an input")
        assert_same_bits(self.cache, cache, "the cache")
        got = np.asarray(out.check(written=False))
        assert (got[rows:].view(np.uint8) == NO_NAN).all(), "a row past the step was written"
        want = reference(self.layer, query_lens, self.lens, q, self.cache, self.table)
        self.metadata, self.got = metadata, got[:rows]
        return got[: len(want)], want

    def write(self, cache, k_pe, kv_c, metadata) -> None:
        """What a step writes to the cache, by the operators that do it alone."""
        _, turned = package.apply_rope(
            metadata.input_positions,
            k_pe[:, None],
            k_pe,
            self.rope_table,
            interleaved=self.config.interleaved,
        )
        package.concat_and_cache_mla(kv_c, turned, cache, metadata.slot_mapping)


def slots_of(row: np.ndarray, length: int, block_size: int) -> np.ndarray:
    """The slots of a request's tokens; `row` is its row of the block table."""
    at = np.arange(length)
    return row[at // block_size].astype(np.int64) * block_size + at % block_size


def reference(layer: dense.DenseMLA, query_lens, lens, q, cache, table) -> np.ndarray:
    """Causal multi-head attention, in fp64, over the keys and values that the layer's weights make
    of the cache's latents. Arrays are NumPy's. -> [T, H, Pv]"""
    config, turns = layer.config, host(layer.rope_table)
    nope = config.qk_nope_head_dim
    uk, uv = (ref.to_f32(host(w)).astype(np.float64) for w in (layer.W_UK, layer.W_UV))
    found, start = [], 0
    for b, (n, length) in enumerate(zip(query_lens, lens, strict=True)):
        query = ref.to_f32(q[start : start + n]).astype(np.float64)
        turned = turn(query[..., nope:], turns[length - n : length], config.interleaved)
        query[..., nope:] = ref.to_f32(ref.to_bf16(turned.astype(np.float32)))
        start += n
        rows = ref.decode_rows(cache, slots_of(table[b], length, config.block_size))
        keys, values = (np.tensordot(rows[:, :512], w, 1) for w in (uk, uv))
        for i in range(n):
            seen = slice(0, length - n + i + 1)
            s = np.einsum("hp,jhp->hj", query[i, :, :nope], keys[seen], optimize=True)
            s = config.softmax_scale * (s + query[i, :, nope:] @ rows[seen, 512:].T)
            p = np.exp(s - s.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            found.append(np.einsum("hj,jhv->hv", p, values[seen], optimize=True))
    return np.array(found).reshape(-1, config.num_heads, config.v_head_dim)


def turn(x: np.ndarray, angles: np.ndarray, interleaved: bool) -> np.ndarray:
    """RoPE of [n, heads, 64] by n rows of a table."""
    cos, sin = angles[:, None, :32].astype(np.float64), angles[:, None, 32:].astype(np.float64)
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return np.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)
    a, b = x[..., :32], x[..., 32:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def assert_close(got, want) -> None:
    """Queries, results and weights are rounded to bf16 on the way, so bounds are of the whole."""
    got = ref.to_f32(got).astype(np.float64)
    assert np.abs(got - want).max() <= 0.03 * np.abs(want).max() + 1e-3
    assert np.sqrt(np.mean((got - want) ** 2)) <= 0.005 * np.sqrt(np.mean(want**2)) + 1e-4


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "fp8_ds_mla"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_layers(kv_cache_dtype, interleaved):
    """Prefills, decodes and both in one step, over page borders; pairs and padding."""
    engine = Engine(make_config(kv_cache_dtype=kv_cache_dtype, interleaved=interleaved), 3)
    assert_close(*engine.step([20, 5, 33]))
    assert_close(*engine.step([1, 1, 1], pair=True))
    assert_close(*engine.step([1, 3, 17], padding=4))
    assert_close(*engine.step([1, 1, 0], bound=7))
    for _ in range(20):
        assert_close(*engine.step([1, 1, 1]))


def test_metadata():
    engine = Engine(make_config(decode_threshold=2), 4)
    engine.step([5, 2, 1, 9])
    engine.step([1, 2, 4, 3], padding=2)
    m = engine.metadata
    assert (m.path, m.num_reqs, m.num_actual_tokens, m.num_input_tokens) == ("mixed", 4, 12, 12)
    assert (m.num_decodes, m.num_decode_tokens, m.num_prefills) == (2, 3, 2)
    assert m.req_id_per_token.tolist() == [0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 0, 0]
    assert m.input_positions.tolist() == [5, 2, 3, 1, 2, 3, 4, 9, 10, 11, 0, 0]
    assert m.input_positions.dtype == np.int64
    assert m.head_dim == 576
    assert m.decode.seq_lens.tolist() == [6, 4]
    assert m.prefill.query_start_loc.tolist() == [0, 4, 7]
    assert m.prefill.block_table.shape[0] == 2


def test_padding_gives_zeros():
    engine = Engine(make_config(), 2)
    engine.step([3, 2], padding=3)
    assert not ref.to_f32(engine.got[5:]).any()


def test_bounds_of_lengths_change_no_bit():
    """seq_lens_cpu may be too large: the device's lengths count."""
    results = []
    for bound in (0, 7):
        engine = Engine(make_config(), 3)
        engine.step([40, 20, 7], bound=bound)
        got, _ = engine.step([1, 1, 1], bound=bound)
        results.append(got)
    assert_same_bits(*results)


@pytest.mark.parametrize("path", ["mixed", "separate", None])
def test_a_table_has_a_page_for_every_token(path):
    """On the CPU that is known of decodes, too; bounds of their lengths may be beyond the table."""
    engine = Engine(make_config(path=path), 2)
    engine.step([30, 60])
    before = engine.cache.copy()
    common = engine.common([1, 5], bound=16)
    common.seq_lens_cpu[1] -= 16
    engine.builder.build(dataclasses.replace(common, block_table=engine.table[:, :5]))
    lens = {0: (65, 65), 1: (31, 81)}
    for req, seq_lens in lens.items():
        common.seq_lens[:], common.seq_lens_cpu[:] = seq_lens, np.maximum(seq_lens, 65)
        narrow = engine.table[:, : 4 + req]
        rule = (
            f"^MetadataBuilder.build: `block_table` must have at least {5 + req} columns for the "
            f"{seq_lens[req]} tokens of request {req}, got {4 + req}$"
        )
        with pytest.raises(ValueError, match=rule):
            engine.builder.build(dataclasses.replace(common, block_table=narrow))
    assert_same_bits(engine.cache, before)


def test_profiling_and_old_metadata():
    engine = Engine(make_config(), 1)
    engine.step([4])
    old = engine.metadata
    out = np.zeros((4, 4, 48), ref.BF16)
    arrays = random_bf16(engine.rng, 4, 4, 96), random_bf16(engine.rng, 4, 512)
    k_pe = random_bf16(engine.rng, 4, 64)
    assert engine.layer.forward(*arrays, k_pe, engine.cache, None, out=out) is out
    engine.step([1])
    words = "dense.forward: `metadata` must come from its builder's latest build"
    with pytest.raises(ValueError, match=f"^{words}"):
        engine.layer.forward(*arrays, k_pe, engine.cache, old, out=out)


ERRORS = [
    ({"q": (4, 4, 95)}, "q"),
    ({"kv_c": (3, 512)}, "kv_c"),
    ({"k_pe": (4, 63)}, "k_pe"),
    ({"out": (4, 4, 47)}, "out"),
    ({"kv_cache": (2, 8, 576)}, "kv_cache"),
]


@pytest.mark.parametrize(("changes", "name"), ERRORS)
def test_errors(changes, name):
    engine = Engine(make_config(), 1)
    metadata = engine.builder.build(engine.common([4]))
    shapes = {"q": (4, 4, 96), "kv_c": (4, 512), "k_pe": (4, 64), "out": (4, 4, 48)}
    arrays = {n: np.zeros(s, ref.BF16) for n, s in (shapes | changes).items()}
    arrays.setdefault("kv_cache", engine.cache)
    before = engine.cache.copy()
    with pytest.raises(ValueError, match=f"^dense.forward: `{name}` must"):
        engine.layer.forward(metadata=metadata, **arrays)
    assert_same_bits(engine.cache, before, "the cache")


@pytest.mark.parametrize(
    "changes",
    [{"path": "direct"}, {"kv_cache_dtype": "fp8_v4"}, {"num_heads": 129}, {"v_head_dim": 0}],
)
def test_bad_configs(changes):
    with pytest.raises(ValueError, match=f"Config: `{next(iter(changes))}` must"):
        dataclasses.replace(make_config(), **changes)


def test_facts():
    backend = dense.Backend
    assert (backend.name, backend.is_mla, backend.is_sparse) == ("DENSE_MLA", True, False)
    assert backend.get_builder_cls() is dense.MetadataBuilder
    assert backend.get_impl_cls() is dense.DenseMLA
    assert backend.get_metadata_cls() is dense.Metadata
    assert backend.get_kv_cache_shape(10, 64) == (10, 64, 576)
    assert not backend.use_cascade_attention()
