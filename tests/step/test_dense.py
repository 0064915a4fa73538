"""sparse_mla.dense: steps of dense MLA, layer by layer against fp64 over keys and values."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import reference as ref
from cases import random_bf16
from helpers import NO_NAN, Guarded, assert_same_bits

import sparse_mla as package

dense = package.dense
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 96, "max_model_len": 512}
SCALE = 0.07


def make_config(**changes) -> dense.Config:
    options = {"softmax_scale": SCALE, "qk_nope_head_dim": 32, "v_head_dim": 48, "block_size": 16}
    return dense.Config(4, **(options | LIMITS | changes))


@dataclasses.dataclass
class Engine:
    """Requests whose tokens come step by step, and all that was ever given for them."""

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
        self.latents = [np.zeros((0, 512), ref.BF16) for _ in range(self.num_reqs)]
        self.ropes = [np.zeros((0, 64), ref.BF16) for _ in range(self.num_reqs)]
        weight = random_bf16(self.rng, 512, 4 * (32 + 48), std=512**-0.5)
        self.rope_table = package.rope_table(LIMITS["max_model_len"])
        self.layer = dense.DenseMLA(c, kv_b_proj=weight, rope_table=self.rope_table)
        self.builder = dense.MetadataBuilder(c)

    def common(self, query_lens, padding=0, bound=0):
        lens = [len(x) + n for x, n in zip(self.latents, query_lens, strict=True)]
        starts = np.cumsum([0, *query_lens]).astype(np.int32)
        slots = []
        for b, (length, n) in enumerate(zip(lens, query_lens, strict=True)):
            at = np.arange(length - n, length)
            size = self.config.block_size
            slots += list(self.table[b, at // size].astype(np.int64) * size + at % size)
        slots += [-1] * padding
        seq_lens = np.array(lens, np.int32)
        return package.CommonAttentionMetadata(
            starts,
            seq_lens,
            np.array(slots, np.int64),
            self.table,
            seq_lens_cpu=seq_lens + bound,
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
        self.layer.forward(given, kv_c, k_pe, self.cache, metadata, out=out.array)
        for x, y in zip(before, (q, kv_c, k_pe), strict=True):
            assert_same_bits(x, y, "an input")
        got = np.asarray(out.check(written=False))
        assert (got[rows:].view(np.uint8) == NO_NAN).all(), "a row past the step was written"
        want = self.reference(query_lens, q, kv_c, k_pe)
        self.metadata, self.got = metadata, got[:rows]
        return got[: len(want)], want

    def reference(self, query_lens, q, kv_c, k_pe) -> np.ndarray:
        """Multi-head attention over the keys and values of the cache's latents, causal."""
        uk = ref.to_f32(np.asarray(self.layer.W_UK)).astype(np.float64)
        uv = ref.to_f32(np.asarray(self.layer.W_UV)).astype(np.float64)
        found, start = [], 0
        for b, n in enumerate(query_lens):
            new = slice(start, start + n)
            context = len(self.latents[b])
            self.latents[b] = np.concatenate([self.latents[b], kv_c[new]])
            turned = self.turn(k_pe[new][:, None], context)[:, 0]
            self.ropes[b] = np.concatenate([self.ropes[b], ref.to_bf16(turned)])
            length = context + n
            at = np.arange(length)
            size = self.config.block_size
            slots = self.table[b, at // size].astype(np.int64) * size + at % size
            rows = ref.decode_rows(self.cache, slots)
            keys = np.einsum("jl,lhp->jhp", rows[:, :512], uk)
            values = np.einsum("jl,lhv->jhv", rows[:, :512], uv)
            query = ref.to_f32(q[new]).astype(np.float64)
            turned_q = ref.to_f32(ref.to_bf16(self.turn(q[new][..., 32:], context)))
            for i in range(n):
                seen = slice(0, context + i + 1)
                s = np.einsum("hp,jhp->hj", query[i, :, :32], keys[seen])
                s = SCALE * (s + turned_q[i].astype(np.float64) @ rows[seen, 512:].T)
                p = np.exp(s - s.max(1, keepdims=True))
                p /= p.sum(1, keepdims=True)
                found.append(np.einsum("hj,jhv->hv", p, values[seen]))
            start += n
        return np.array(found).reshape(-1, 4, 48)

    def turn(self, x: np.ndarray, first: int) -> np.ndarray:
        """RoPE of [n, heads, 64] from position `first` on."""
        angles = self.rope_table[first : first + len(x)].astype(np.float64)
        cos, sin = angles[:, None, :32], angles[:, None, 32:]
        v = ref.to_f32(x).astype(np.float64)
        if self.config.interleaved:
            a, b = v[..., 0::2], v[..., 1::2]
            pairs = np.stack([a * cos - b * sin, b * cos + a * sin], -1)
            return pairs.reshape(v.shape).astype(np.float32)
        a, b = v[..., :32], v[..., 32:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(np.float32)


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
    assert m.prefill.query_start_loc.tolist() == [3, 7, 10]
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


def test_profiling_and_old_metadata():
    engine = Engine(make_config(), 1)
    engine.step([4])
    old = engine.metadata
    out = np.zeros((4, 4, 48), ref.BF16)
    arrays = random_bf16(engine.rng, 4, 4, 96), random_bf16(engine.rng, 4, 512)
    k_pe = random_bf16(engine.rng, 4, 64)
    assert engine.layer.forward(*arrays, k_pe, engine.cache, None, out=out) is out
    engine.step([1])
    with pytest.raises(ValueError, match="must come from its builder's latest build"):
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
    with pytest.raises(ValueError, match=f"dense.forward: `{name}` must"):
        engine.layer.forward(metadata=metadata, **arrays)
    assert_same_bits(engine.cache, before, "the cache")


@pytest.mark.parametrize(
    "changes",
    [{"path": "separate"}, {"kv_cache_dtype": "fp8_v4"}, {"num_heads": 129}, {"v_head_dim": 0}],
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
