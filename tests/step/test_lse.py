"""The lse of layers: natural logarithms of the sums of attention, without a sink, and -inf where a
token attends to nothing. `return_lse=True` asks for it, and `lse=` gives memory for it."""

from __future__ import annotations

import cases
import device
import engine
import numpy as np
import pytest
import reference as ref
import v4_attend_cases
from dense_steps import ARRAYS, Case, count_merges, draw, travel
from device import host
from helpers import NO_NAN, Guarded, assert_same_bits, assert_within_bounds
from library import sparse_mla
from test_dense_absorbed import Layer
from v4_world import World

import sparse_mla as package

dense = package.dense


# --- dense MLA -----------------------------------------------------------------------------------


def run_with_lse(case: Case, columns_first=False, **changes) -> tuple[np.ndarray, np.ndarray]:
    """out and lse of the case's step, which writes no row behind it."""
    shape = (case.batch.num_actual_tokens + 2, case.heads)
    lse = Guarded(shape[::-1] if columns_first else shape, np.float32, poison=NO_NAN)
    out = case.run(lse=lse.array.T if columns_first else lse.array, **changes)
    got = lse.check(written=False)
    got = np.asarray(got.T if columns_first else got)
    assert (np.ascontiguousarray(got[-2:]).view(np.uint8) == NO_NAN).all(), "rows behind the step"
    return out, got[:-2]


def check(case: Case, lse: np.ndarray) -> None:
    tokens = sum(case.query_lens)
    case.exact(count_merges(case), case.metadata.path).check_lse(lse[:tokens])
    assert (lse[tokens:] == -np.inf).all(), "padding"


@pytest.mark.parametrize("seed", range(16))
def test_random_dense_steps(seed):
    """Both paths, and chunks from a page up: the lse of merged parts is that of the whole."""
    case = draw(seed)
    sharing = sum(c > 0 for n, c in zip(case.query_lens, case.contexts, strict=True) if n > 1)
    small = {"equal": max(sharing, 1) * case.page, "packed": case.page}
    steps = [{"path": "mixed"}, {"prefill_workspace_tokens": 8 * 384}]
    steps += [{"context_plan": p, "prefill_workspace_tokens": n + 7} for p, n in small.items()]
    for changes in steps:
        out, lse = run_with_lse(case, columns_first=seed % 2 == 1, **changes)
        check(case, lse)
        assert_same_bits(out, case.run(**changes), "out of a call without lse")


@pytest.mark.parametrize("path", ["mixed", "separate"])
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_nope"])
def test_models_without_rope(fmt, path):
    case = Case([1, 1, 7, 2, 30], [50, 0, 200, 0, 33], rope=0, padding=2, fmt=fmt)
    check(case, run_with_lse(case, path=path, prefill_workspace_tokens=64)[1])


def layer_of(case: Case, path: str, absorbed: bool, trip, **changes):
    """A layer, the metadata of the case's step, and what `forward` takes."""
    config = case.config(path=path, prefill_workspace_tokens=64, **changes)
    batch = case.batch
    case.metadata = dense.MetadataBuilder(config).build(
        package.CommonAttentionMetadata(
            *(trip.put(getattr(batch, name)) for name in ARRAYS),
            query_start_loc_cpu=batch.query_start_loc,
            seq_lens_cpu=batch.seq_lens,
            num_actual_tokens=batch.num_actual_tokens,
        )
    )
    if absorbed:
        layer = Layer(case)
        q, made = layer.q_c, layer.make(config, trip)
    else:
        q, table = case.q, trip.put(case.table)
        made = dense.DenseMLA(config, kv_b_proj=trip.put(case.weight), rope_table=table)
    return made, trip.put((q, case.kv_c, case.k_pe, case.cache.copy()))


@pytest.mark.parametrize("path", ["mixed", "separate"])
@pytest.mark.parametrize("absorbed", [False, True])
def test_asking(path, absorbed):
    """out alone, a new lse, and a given one, all with the same bits."""
    case = Case([1, 1, 7, 2, 30], [50, 0, 200, 0, 33], padding=2)
    trip = travel()
    layer, arrays = layer_of(case, path, absorbed, trip)
    alone = layer.forward(*arrays, case.metadata)
    out, lse = layer.forward(*arrays, case.metadata, return_lse=True)
    given = trip.put(np.full((43 + 4, 5), 7, np.float32))
    other, same = layer.forward(*arrays, case.metadata, lse=given)
    assert same is given
    assert type(lse) is type(alone)
    assert host(lse).dtype == np.float32
    case.exact(count_merges(case), path)
    check(case, host(lse))
    assert (host(given)[43:] == 7).all()
    assert_same_bits(host(given)[:43], host(lse), "lse")
    for x in (out, other):
        assert_same_bits(host(x), host(alone), "out")


def test_rows_behind_a_dense_step():
    """q may have more rows than the step: those of a new lse are zero, as those of out are."""
    case = Case([1, 7], [50, 20])
    trip = travel()
    layer, arrays = layer_of(case, "separate", False, trip)
    more = trip.put(np.concatenate([case.q, case.q[:3]]))
    out, lse = layer.forward(more, *arrays[1:], case.metadata, return_lse=True)
    assert host(lse).shape == (11, 5)
    assert not host(lse)[8:].any()
    assert not ref.to_f32(host(out))[8:].any()
    case.exact(1).check_lse(host(lse)[:8])


def test_dense_steps_without_tokens_or_metadata():
    case = Case([0, 0], [50, 0])
    layer, (q, kv_c, k_pe, cache) = layer_of(
        case, "separate", False, travel(), max_num_batched_tokens=4
    )
    out, lse = layer.forward(q, kv_c, k_pe, cache, case.metadata, return_lse=True)
    assert (host(out).shape, host(lse).shape) == ((0, 5, 48), (0, 5))
    assert layer.forward(q, kv_c, k_pe, cache, None, out=q) is q
    assert layer.forward(q, kv_c, k_pe, cache, None, out=q, return_lse=True) == (q, None)
    assert layer.forward(q, kv_c, k_pe, cache, None, out=q, lse=kv_c) == (q, kv_c)


@pytest.mark.parametrize("path", ["mixed", "separate"])
def test_lse_that_is_refused(path):
    case = Case([1, 7], [50, 20])
    trip = travel()
    layer, arrays = layer_of(case, path, False, trip)
    zeros = np.zeros((8, 5), np.float32)
    shared = np.zeros((8, 5, 48), ref.BF16)
    for lse, error, rule in (
        (zeros.astype(ref.BF16), TypeError, "`lse` must be float32, got bfloat16"),
        (zeros[:7], ValueError, r"`lse` must have shape \[>= 8, 5\], got \[7, 5\]"),
        (zeros[:, :4], ValueError, r"`lse` must have shape \[>= 8, 5\], got \[8, 4\]"),
        (zeros[0], ValueError, r"`lse` must have shape \[>= 8, 5\], got \[5\]"),
        (np.broadcast_to(zeros[0], (8, 5)), (ValueError, BufferError), "`lse` must"),
        (shared.view(np.float32)[:, :, 0], ValueError, "`(lse|out)` must not overlap `(out|lse)`"),
    ):
        with pytest.raises(error, match=rf"^dense\.forward: {rule}"):
            layer.forward(*arrays, case.metadata, lse=trip.put(lse), out=trip.put(shared))


# --- DeepSeek-V3.2 and V4 ------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["mixed", "separate", "direct", "bf16"])
def test_v32(path):
    step = engine.make_step(engine.engine_batch(pad_tokens=3), 32)
    kv = step.bf16_cache(sparse_mla) if path == "bf16" else step.fp8_cache
    config = engine.config(sparse_mla, fp8=path != "bf16", path=path)
    metadata = sparse_mla.MetadataBuilder(config).build(step.batch.common(sparse_mla))
    arrays = step.q, kv, step.topk_indices, metadata
    layer = sparse_mla.SparseMLA(config)
    options = {"attn_sink": step.attn_sink}
    plain = layer.forward(*arrays, **options)
    out, lse = layer.forward(*arrays, **options, return_lse=True)
    alone = layer.forward(*arrays, **options, return_lse=False)
    given = np.full(lse.shape[::-1], 7, np.float32).T
    other, same = layer.forward(*arrays, **options, return_lse=False, lse=given)
    assert same is given
    assert_within_bounds(step.reference(path, kv), {"out": out, "lse": lse})
    assert (lse[-3:] == -np.inf).all()
    for x in (plain[0], alone, other):
        assert_same_bits(x, out, "out")
    for x in (plain[1], given):
        assert_same_bits(x, lse, "lse")


@pytest.mark.parametrize("path", ["direct", "separate"])
@pytest.mark.parametrize("ratio", [1, 4, 16])
def test_v4_attention(ratio, path):
    case = v4_attend_cases.make_case(ratio, path)
    want = v4_attend_cases.check(case, return_lse=True)
    metadata = case.build()
    arrays = case.q, case.caches, metadata, case.topk
    tokens = case.batch.num_tokens
    assert (host(want["lse"])[-2:] == -np.inf).all()
    alone = case.layer.attend(*arrays, return_lse=False)
    assert_same_bits(host(alone)[:tokens], host(want["out"]), "out")
    given = np.full((len(case.q), 3), 7, np.float32)
    _, same = case.layer.attend(*arrays, return_lse=False, lse=given)
    assert same is given
    assert_same_bits(given[:tokens], host(want["lse"]), "lse")
    cold = case.layer.attend(case.q, case.caches, None, return_lse=False)
    assert not ref.to_f32(host(cold)).any()


@pytest.mark.skipif(device.ON_CUDA, reason="the projections of the world are NumPy's")
@pytest.mark.parametrize("ratio", [1, 4, 16])
def test_v4_layer(ratio, monkeypatch):
    """A whole layer gives the lse of its attention, and the same output as without."""
    world = World(package, ratio, (21, 5), seed=ratio)
    kept = []
    attend = package.v4.SparseMLA.attend

    def keep(self, q, caches, metadata, **options):
        inputs = {name: x for name, x in options.items() if name not in ("out", "lse")}
        kept.append(attend(self, q.copy(), caches, metadata, **inputs))
        return attend(self, q, caches, metadata, **options)

    monkeypatch.setattr(package.v4.SparseMLA, "attend", keep)
    parts = [(0, 0, 21), (1, 0, 5)]
    metadata, x = world.build(parts, 2), world.inputs(parts, 2)
    alone = world.layer.forward(x, world.caches, metadata)
    more = np.concatenate([x, x[:3]])
    out, lse = world.layer.forward(more, world.caches, metadata, return_lse=True)
    assert_same_bits(out[:28], alone, "out")
    assert (lse.shape, lse.dtype) == ((31, 4), np.float32)
    assert_same_bits(lse[:28], kept[1][1], "lse")
    assert np.isfinite(lse[:26]).all()
    assert (lse[26:28] == -np.inf).all()
    assert not lse[28:].any()
    out, lse = world.layer.forward(x, world.caches, None, return_lse=True)
    assert_same_bits(out, world.layer.forward(x, world.caches, None), "a warm-up")
    assert not lse.any()


def test_v32_padding_that_the_indexer_leaves_out():
    """Tokens of no request have no choice: out 0, lse -inf."""
    batch = cases.make_batch([1, 9], [70, 9], pad_tokens=4)
    step = engine.make_step(batch, 4)
    assert (step.topk_indices[-4:] == -1).all()
    config = engine.config(sparse_mla, num_heads=4)
    metadata = sparse_mla.MetadataBuilder(config).build(batch.common(sparse_mla))
    layer = sparse_mla.SparseMLA(config)
    out, lse = layer.forward(step.q, step.fp8_cache, step.topk_indices, metadata, return_lse=True)
    assert (lse[-4:] == -np.inf).all()
    assert not ref.to_f32(out[-4:]).any()
    assert np.isfinite(lse[:-4]).all()
