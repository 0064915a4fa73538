"""Steps of vLLM's decode context parallelism (DCP): a step, what a rank has of it, and what one
rank's implementation gives."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import cases
import device
import engine
import numpy as np
import reference as ref
import vllm_layers
from dense_cases import Cache
from helpers import assert_same_bits
from rank_steps import take_share
from row_formats import E4M3_576
from vllm_layers import TOPK, common_of, engine_of, exact_projection

DTYPES = {"bf16": "auto", "fp8": "fp8_ds_mla", E4M3_576: "fp8"}
DRAFTS = SimpleNamespace(num_speculative_tokens=2, parallel_drafting=False)


@dataclass
class World:
    """A step of all ranks. The cache has the step's own tokens, too."""

    batch: cases.Batch
    cache: Cache
    q: np.ndarray  # [T, heads of all ranks, 576]
    kv_c: np.ndarray  # [T, 512] bf16, the step's new keys
    k_pe: np.ndarray  # [T, 64] bf16
    topk_indices: np.ndarray | None  # None: each token sees all keys up to its own

    def slots_of(self, token: int, request: int) -> np.ndarray:
        """The slots of the keys that a token sees."""
        batch = self.batch
        seen = np.arange(batch.seq_lens[request] - batch.query_start_loc[request + 1] + token + 1)
        if self.topk_indices is not None:
            seen = self.topk_indices[token][self.topk_indices[token] >= 0]
        pages = batch.block_table[request, seen // batch.block_size].astype(np.int64)
        return pages * batch.block_size + seen % batch.block_size

    def reference(self) -> ref.Attention:
        starts = self.batch.query_start_loc
        found = [
            self.cache.keys(self.slots_of(token, request))
            for request in range(self.batch.num_reqs)
            for token in range(starts[request], starts[request + 1])
        ]
        found += [np.empty((0, 576))] * (len(self.q) - len(found))
        query = ref.to_f32(self.q).astype(np.float64) * engine.SCALE
        return ref.attend_keys(query, found, has_scales=self.cache.has_scales)


def make_world(query_lens, seq_lens, fmt: str, heads: int, *, dense: bool, padding=0) -> World:
    rng = np.random.default_rng(len(query_lens))
    batch = cases.make_batch(query_lens, seq_lens, pad_tokens=padding)
    cache = Cache(fmt, batch.num_pages, batch.block_size)
    cache.write(rng, np.arange(cache.num_slots))
    keys = cases.random_bf16(rng, batch.num_actual_tokens, 576)
    written = np.flatnonzero(batch.slot_mapping >= 0)
    cache.put(batch.slot_mapping[written], ref.to_f32(keys[written]))
    q = cases.random_bf16(rng, batch.num_actual_tokens, heads, 576)
    indices = None if dense else cases.causal_topk(rng, batch, TOPK)
    return World(batch, cache, q, keys[:, :512].copy(), keys[:, 512:].copy(), indices)


def run_rank(vllm, world: World, cp):
    """A rank writes its new keys, and nothing else, and attends; -> its metadata and its part."""
    batch, array = world.batch, world.cache.array.view(np.uint8)
    if cp is not None:
        batch, array = take_share(batch, array, cp)
    want, array = array, array.copy()
    rows = array.reshape(-1, array.shape[-1])
    rows[batch.slot_mapping[batch.slot_mapping >= 0]] = 0xFF

    dense, torch = world.topk_indices is None, vllm.torch
    buffer = {} if dense else {"topk_indices_buffer": vllm.put(world.topk_indices)}
    options = {"kv_cache_dtype": DTYPES[world.cache.fmt], "dense": dense, "cp": cp}
    heads = world.q.shape[1] // (cp[1] if cp else 1)
    with engine_of(vllm, num_heads=heads, speculative=DRAFTS, **options, **buffer) as made:
        impl, builder = made
        metadata = builder.build(0, common_of(vllm, batch))
    scale = torch.tensor([world.cache.scale])
    cache, slots = torch.from_numpy(array), torch.from_numpy(batch.slot_mapping)
    new = vllm.put(world.kv_c), vllm.put(world.k_pe)[:, None]
    if world.cache.fmt == "bf16":
        cache = cache.view(torch.bfloat16)
    impl.do_kv_cache_update(*new, cache, slots, impl.kv_cache_dtype, scale)
    assert_same_bits(array, want, f"the cache of {cp}")
    if world.cache.fmt == E4M3_576:
        cache = cache.view(torch.float8_e4m3fn)  # as the layer does
    out, lse = impl.forward_mqa(vllm.put(world.q), cache, metadata, SimpleNamespace(_k_scale=scale))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    empty = lse.isneginf()
    assert not out[empty].any(), "rows without a key"
    assert lse[~empty].isfinite().all()
    return metadata, (out, lse)


def merge(vllm, runs):
    """What vLLM's layers make of ranks' parts, by vLLM's functions for the CPU."""
    parts = []
    for metadata, (out, lse) in runs:
        seq_lens = getattr(metadata, "decode", metadata).seq_lens  # as vLLM's layer finds them
        masked = lse.clone()
        vllm.dcp.mask_dcp_empty_shards_(masked, seq_lens, metadata.query_start_loc)
        assert vllm.torch.equal(masked, lse), "rows that vLLM would not count"
        parts.append((out, masked))
    outs, lses = map(vllm.torch.stack, zip(*parts, strict=True))
    out, lse = vllm.dcp._lse_weighted_combine(outs, lses, return_lse=True)
    return vllm.get(out.bfloat16()), vllm.get(lse)


# ---- Layers of vLLM's own ------------------------------------------------------------------------

LAYERS = {
    "sparse": ("fp8", [3, 3, 0, 3, 5, 33], [65, 3, 9, 128, 5, 130]),
    "sparse decodes": ("bf16", [1, 1, 1], [64, 1, 129]),
    "dense": ("bf16", [3, 3, 0, 3, 5, 33], [65, 3, 9, 128, 5, 130]),
    "dense decodes": ("fp8", [1, 1, 1], [64, 1, 129]),
}
HEADS = 8


def make_layer_world(name: str) -> tuple[World, np.ndarray, np.ndarray]:
    """One of LAYERS, with its layer's queries [T, H, 192] and kv_b_proj.weight. Both projections
    are exact, so the world's queries are the absorbed ones."""
    fmt, query_lens, seq_lens = LAYERS[name]
    world = make_world(query_lens, seq_lens, fmt, HEADS, dense=name.startswith("dense"))
    rng = np.random.default_rng(len(name))
    q = cases.random_bf16(rng, len(world.q), HEADS, 192)
    weight = exact_projection(rng, HEADS)
    w_uk = ref.to_f32(weight).reshape(HEADS, 256, 512)[:, :128]
    absorbed = np.einsum("thp,hpl->thl", ref.to_f32(q[..., :128]), w_uk)
    world.q = np.concatenate([absorbed.astype(ref.BF16), q[..., 128:]], -1)
    return world, q, weight


def check_layer(name: str, got: np.ndarray, *, merges: int) -> None:
    """The output [T, H * 128] of all ranks' heads, within its bounds."""
    world, _, weight = make_layer_world(name)
    want = world.reference()
    w_uv = ref.to_f32(weight).astype(np.float64).reshape(HEADS, 256, 512)[:, 128:]

    def apply(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        return np.einsum("thl,hvl->thv", x, w).reshape(len(got), -1)

    bound = apply(want.out_tolerance(merges=merges, **device.BOUNDS), np.abs(w_uv))
    errors = np.abs(ref.to_f32(got) - apply(want.out, w_uv))
    assert (errors <= bound).all(), f"{name}: {(errors / bound).max()} of the bound"
    assert errors.any(), "parts that were rounded are not exact"


def choose_keys(vllm, cp=None) -> np.ndarray:
    """The keys [T, TOPK] that the indexer for CPUs chooses for three prompts."""
    torch, rng = vllm.torch, np.random.default_rng(0)
    batch = cases.make_batch([130, 1, 65], [130, 1, 65])
    if cp is not None:
        batch, _ = take_share(batch, np.zeros((batch.num_pages, batch.block_size, 1), np.uint8), cp)
    configs = vllm_layers.engine_config(vllm, cp=cp)
    spec = SimpleNamespace(block_size=batch.block_size)
    builder = vllm.indexer.IndexerMetadataBuilder(spec, ["keys"], configs, torch.device("cpu"))
    cache = torch.zeros(batch.num_pages, batch.block_size, 132, dtype=torch.uint8)
    step, layer = builder.build(0, common_of(vllm, batch)), SimpleNamespace(kv_cache=cache)
    count = batch.num_actual_tokens
    arrays = [cases.random_bf16(rng, count, *shape) for shape in ((8, 128), (128,), (8,))]
    chosen = torch.full((count, TOPK), -7, dtype=torch.int32)
    context = vllm.forward_context.ForwardContext({"keys": layer}, {"keys": step}, {})
    with vllm.forward_context.override_forward_context(context):
        vllm.indexer.index(*map(vllm.put, arrays), chosen, 0.1, "keys")
    return chosen.numpy()


def run_layers(rank: int, ranks: int, interleaves, port: int, folder: str) -> None:
    """A rank's layers, in a process of its own. The exchange is that of vLLM's layer by gloo. Its
    merge is first vLLM's, with a function for the CPU in the place of a Triton kernel, and then the
    plugin's for CPUs."""
    vllm = vllm_layers.load()
    vllm.groups.init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
    every = [list(range(ranks))]
    vllm.groups._DCP = vllm.groups.init_model_parallel_group(every, rank, "gloo")

    def correct(out, lses, rank, ctx, is_lse_base_on_e=True):
        parts = vllm.torch.zeros(len(lses), *out.shape)
        parts[rank] = out
        weighed, lse = vllm.dcp._lse_weighted_combine(parts, lses, True, is_lse_base_on_e)
        return out.copy_(weighed), lse

    vllm.dcp.correct_attn_out = correct
    for interleave in interleaves:
        chosen = choose_keys(vllm, (rank, ranks, interleave))
        np.save(Path(folder, f"keys {interleave} {rank}.npy"), chosen)
    for merge, name, interleave in itertools.product(("vLLM", "plugin"), LAYERS, interleaves):
        if merge == "plugin":
            vllm.cpu.wrap_all([vllm.cpu.EXCHANGE])
        cp = rank, ranks, interleave
        world, q, weight = make_layer_world(name)
        batch, array = take_share(world.batch, world.cache.array.view(np.uint8), cp)
        cache = vllm.torch.from_numpy(array)
        if world.cache.fmt == "bf16":
            cache = cache.view(vllm.torch.bfloat16)
        q, weight = (np.split(x, ranks, axis)[rank] for x, axis in ((q, 1), (weight, 0)))
        *_, out = vllm_layers.run_layer(
            *(vllm, batch, cache, q, world.kv_c, world.k_pe, weight),
            cache_dtype=DTYPES[world.cache.fmt],
            indices=world.topk_indices,
            cp=cp,
        )
        np.save(Path(folder, f"{name} {interleave} {merge} {rank}.npy"), vllm.get(out.float()))
