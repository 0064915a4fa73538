"""The bench's CUDA tables, made on the CPU with given times: inputs are what their names say, the
judge tells right results from wrong ones, and tables, summary and plot follow from the results."""

import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from helpers import find_framework

import sparse_mla
from bench.common import peer
from bench.common.arrays import TorchArrays
from bench.common.rows import Bench
from bench.cuda import decode as cuda_decode
from bench.cuda import inputs as cuda_inputs
from bench.cuda import judge as cuda_judge
from bench.cuda import kinds as cuda_kinds
from bench.cuda import prefill as cuda_prefill
from bench.cuda import prefill_layer as cuda_prefill_layer
from bench.cuda import sent as cuda_sent
from bench.cuda import sides as cuda_sides
from bench.cuda import timing as cuda_timing
from bench.cuda.kinds import KINDS

pytestmark = pytest.mark.frameworks

NUM_REQS, QUERY_LEN, NUM_HEADS, TOPK = 5, 2, 3, 256
NUM_SPARE = 4096
DEVICE_BYTES = 1 << 24  # the cache gets a quarter of them
FORMATS = ["fp8_ds_mla", "bfloat16"]


@pytest.fixture
def on_cpu(monkeypatch):
    torch = find_framework("torch").module
    torch.manual_seed(0)
    for module in (cuda_inputs, cuda_sides, cuda_prefill):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(cuda_inputs, "memory_bytes", lambda: DEVICE_BYTES)
    monkeypatch.setattr(cuda_sides, "synchronize", lambda: None)


def bench_of(**given):
    """The bench of CUDA, whose arrays are on the CPU."""
    return Bench(TorchArrays("cpu"), cuda_timing.CudaEffort(), None, **given)


def make_requests(kv_format):
    return cuda_inputs.make_requests(NUM_REQS, kv_format, TOPK, NUM_SPARE)


@pytest.fixture
def flat(on_cpu, kv_format):
    return make_requests(kv_format).draw(NUM_REQS, QUERY_LEN, NUM_HEADS, TOPK)


each_format = pytest.mark.parametrize("kv_format", FORMATS)


def attend(inputs):
    return sparse_mla.sparse_attention(
        inputs.q, inputs.kv, inputs.indices, softmax_scale=inputs.scale, attn_sink=inputs.sink
    )


def logits_of(inputs):
    """Logits [T, H, K] in nats; -inf where there is no key."""
    keys = cuda_judge.exact_keys(inputs.rows[inputs.indices.clamp(min=0).flatten().long()])
    keys = keys.view(*inputs.indices.shape, 576)
    logits = inputs.scale * (inputs.q.double() @ keys.mT)
    return logits.masked_fill((inputs.indices < 0)[:, None], -float("inf"))


def changed_entries(flat, inputs):
    """Tokens and columns of the entries that select another slot than those of `flat`."""
    return (flat.indices != inputs.indices).nonzero(as_tuple=True)


# --- every kind ----------------------------------------------------------------------------------


@pytest.mark.torch
@each_format
@pytest.mark.parametrize("name", KINDS)
def test_our_results_are_within_the_bounds(name, flat):
    rows, indices = flat.rows[: flat.spare].clone(), flat.indices.clone()
    inputs = KINDS[name].make(flat)
    out, lse = attend(inputs)
    assert 0 < cuda_judge.judge(inputs, (out, lse)) <= 1
    assert cuda_sides.same_bits(rows, flat.rows[: flat.spare]), "other kinds read these"
    assert flat.indices.equal(indices)
    assert int(inputs.indices.max()) < len(inputs.rows)
    assert bool((inputs.indices >= 0).any(1).all()), "every token has a key"
    token = cuda_judge.pick_tokens(inputs)[-1]
    out[token] *= -1
    assert cuda_judge.judge(inputs, (out, lse)) > 1


@pytest.mark.torch
@each_format
@pytest.mark.parametrize("nats", [1, 3, 6, 10])
def test_logits_have_the_spread(nats, flat):
    logits = logits_of(KINDS[f"spread-{nats}"].make(flat))
    assert float(logits.std()) == pytest.approx(nats, rel=0.1)


@pytest.mark.torch
@each_format
@pytest.mark.parametrize("share", [0.0, 0.2])
def test_late_keys_outweigh_all_others(share, flat):
    inputs = cuda_kinds.with_late_keys(flat, share)
    tokens, columns = changed_entries(flat, inputs)
    assert len(tokens) == max(1, round(share * NUM_REQS * QUERY_LEN * NUM_HEADS))
    assert set(tokens.tolist()) == set(inputs.notable)
    logits = logits_of(inputs)
    largest = logits.topk(2, dim=2).values
    ahead = (largest[..., 0] - largest[..., 1]) > 8.5  # not quite 9: keys are rounded to FP8
    late = ahead.nonzero()
    assert len(late) == len(tokens)
    peaks = logits.argmax(2)[ahead]
    assert sorted(zip(late[:, 0].tolist(), peaks.tolist(), strict=True)) == sorted(
        zip(tokens.tolist(), columns.tolist(), strict=True)
    )
    assert int(columns.min()) >= 128
    assert float((largest[..., 0] - largest[..., 1]).max()) < 21


@pytest.mark.torch
@each_format
def test_late_keys_of_all_heads_of_a_token_have_columns_of_their_own(flat):
    inputs = cuda_kinds.with_late_keys(flat, 1.0)
    assert len(changed_entries(flat, inputs)[0]) == flat.q.shape[0] * NUM_HEADS


@pytest.mark.torch
@each_format
@pytest.mark.parametrize(
    ("name", "factors"),
    [
        ("zero-rows", [0]),
        ("small-rows", [1e-5]),
        ("large-rows", [100]),
        ("mixed-rows", [1e-5, 100]),
    ],
)
def test_two_percent_of_the_rows_are_changed(name, factors, flat):
    inputs = KINDS[name].make(flat)
    tokens, columns = changed_entries(flat, inputs)
    share = len(tokens) / flat.indices.numel()
    assert share == pytest.approx(0.02 * len(factors), rel=0.4)
    before = cuda_kinds.read_keys(flat, flat.indices[tokens, columns])
    after = cuda_kinds.read_keys(inputs, inputs.indices[tokens, columns])
    ratio = (after.norm(dim=1) / before.norm(dim=1)).numpy()
    nearest = np.abs(ratio[:, None] - np.array(factors)) <= 0.05 * np.array(factors)
    assert nearest.any(1).all()
    assert nearest.any(0).all(), "each factor occurs"


@pytest.mark.torch
def test_zero_rows_are_what_the_cache_write_stores(on_cpu):
    torch = find_framework("torch").module
    flat = make_requests("fp8_ds_mla").draw(NUM_REQS, QUERY_LEN, NUM_HEADS, TOPK)
    inputs = KINDS["zero-rows"].make(flat)
    tokens, columns = changed_entries(flat, inputs)
    rows = inputs.rows[inputs.indices[tokens, columns].long()]
    written = torch.zeros(1, 1, 656, dtype=torch.uint8)
    zeros = torch.zeros(1, 512), torch.zeros(1, 64)
    sparse_mla.concat_and_cache_mla(*zeros, written, torch.zeros(1, dtype=torch.int64))
    assert bool((rows == written[0]).all())


@pytest.mark.torch
@each_format
def test_one_token_selects_a_nan(flat):
    inputs = KINDS["nan-row"].make(flat)
    out, lse = attend(inputs)
    token = inputs.nan_token
    others = [t for t in range(len(out)) if t != token]
    assert bool(out[token].isnan().all() and lse[token].isnan().all())
    assert cuda_sides.same_bits(out[others], attend(flat)[0][others])
    assert token not in cuda_judge.pick_tokens(inputs)
    out[token, 0, 0] = 0
    assert cuda_judge.judge(inputs, (out, lse)) == float("inf"), "no NaN where one is due"


@pytest.mark.torch
@pytest.mark.parametrize("kv_format", ["bfloat16"])
@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("front-none", [0] * 128 + [1] * 128),
        ("odd-none", [1, 0] * 128),
        ("blocks-none", ([1] * 64 + [0] * 64) * 2),
        ("valid-100", [1] * 100 + [0] * 156),
    ],
)
def test_lists_have_holes_where_they_should(name, want, flat):
    inputs = KINDS[name].make(flat)
    is_valid = inputs.indices >= 0
    assert is_valid.int().tolist() == [want] * len(flat.q)
    assert bool((inputs.indices == flat.indices)[is_valid].all())


@pytest.mark.torch
@pytest.mark.parametrize("kv_format", ["bfloat16"])
def test_lists_have_lengths_of_their_own(flat):
    ragged = (KINDS["ragged"].make(flat).indices >= 0).sum(1).tolist()
    assert ragged[::2] == ragged[1::2], "the two tokens of a request"
    assert len(set(ragged)) == NUM_REQS
    assert 1 <= min(ragged) <= TOPK // NUM_REQS < max(ragged) <= TOPK
    one_long = KINDS["one-long"].make(flat)
    assert (one_long.indices >= 0).sum(1).tolist() == [200] * 8 + [TOPK] * 2
    prompt = make_requests("bfloat16").draw(1, 7, NUM_HEADS, TOPK)
    assert len(set((KINDS["ragged"].make(prompt).indices >= 0).sum(1).tolist())) == 7


# --- tables --------------------------------------------------------------------------------------


class StubPeer:
    """FlashMLA's interface on our CPU kernels; its bf16 kernel does not run."""

    def get_plan(self):
        return None

    def decode(self, q, kv, indices, scale, num_reqs, plan):
        def call():
            out, lse = sparse_mla.sparse_attention(q, kv, indices, softmax_scale=scale)
            shape = (num_reqs, len(q) // num_reqs, q.shape[1])
            return out.view(*shape, 512), lse.view(shape).transpose(1, 2)

        return call

    def attend(self, q, kv, indices, scale, sink):
        def call():
            raise RuntimeError("no bf16 here")

        return call


US = {"ours": 20.0, "flat": 10.0, "peer": 30.0}
US |= dict.fromkeys(("bfloat16", "fp8_ds_mla", "fp8_ds_mla, wide"), 20.0)


@pytest.fixture
def given_times(on_cpu, monkeypatch):
    """Sides take the times of US: that much if flushed, half as much if rotating."""

    def time_sides(sides, effort, rotating):
        for name, side in sides.items():
            side.flushed_seconds = 1e-6 * US[name]
            side.seconds = side.flushed_seconds / 2 if rotating else float("nan")

    monkeypatch.setattr(cuda_sides, "time_sides", time_sides)


@pytest.fixture
def table(given_times, monkeypatch):
    """The table of inputs, with few rows."""
    monkeypatch.setattr(cuda_sent, "TOPK", TOPK)
    rows = cuda_sent.Rows(
        kv_formats=("fp8_ds_mla",),
        head_counts=(2,),
        batches=((1, 1), (2, 2)),
        kinds=("flat", "late-2", "nan-row", "ragged"),
    )
    return cuda_sent.measure(bench_of(peer=StubPeer(), rows=rows))


@pytest.mark.torch
def test_the_table_has_a_row_for_every_kind_of_every_shape(table):
    assert table.failures == []
    shapes = [(row["requests"], row["input"]) for row in table.records]
    one = [("1 × 1", name) for name in ("flat", "late-2", "nan-row")]  # a single list is not ragged
    two = [("2 × 2", name) for name in ("flat", "late-2", "nan-row", "ragged")]
    assert shapes == one + two
    assert all(row["error_over_bound"] <= 1 for row in table.records)
    for row in table.records:
        assert (row["over_flat"], row["peer_over_ours"]) == pytest.approx((2, 1.5))
    assert [len(row) for row in table.rows] == [len(table.columns)] * len(table.rows)
    assert len(table.notes) == 4, "what the names mean"


@pytest.mark.torch
def test_a_side_that_fails_leaves_the_other_its_row(table):
    nan = float("nan")
    pair = cuda_sides.Pair(
        SimpleNamespace(flushed_seconds=nan, error=nan, failure="lost"),
        SimpleNamespace(flushed_seconds=3e-5, error=0.5, failure=""),
        SimpleNamespace(flushed_seconds=1e-5),
    )
    labels = {"kv_format": "fp8_ds_mla", "H": 2, "requests": "1 × 1", "input": "flat"}
    cuda_sides.add_row(table, labels, pair, cuda_sent.COLUMNS, cuda_sent.PEER_COLUMNS)
    assert "lost" in table.failures[-1]
    assert table.rows[-1][4:6] == ["FAIL", ""]
    json.dumps(table.records, allow_nan=False)


@pytest.mark.torch
def test_decode_has_both_methods_side_by_side(given_times, monkeypatch):
    batches = [(1, 1), (2, 2)]
    decodes = [(name, TOPK, (2,), batches) for name in FORMATS]
    monkeypatch.setattr(cuda_decode, "FULL_DECODES", decodes)
    monkeypatch.setattr(cuda_decode, "l2_bytes", lambda: 1 << 20)
    table = cuda_decode.measure(bench_of(peer=StubPeer()))
    assert table.failures == []
    assert [(row["kv_format"], row["requests"]) for row in table.records] == [
        (name, f"{num_reqs} × {query_len}") for name in FORMATS for num_reqs, query_len in batches
    ]
    for row in table.records:
        assert (row["us"], row["flushed_us"]) == pytest.approx((10, 20))
    ours, peers = table.rows[0][4:10], table.rows[0][10:]
    assert (ours[0], ours[5]) == ("10.0", "20.0")
    assert (*peers[:2], *peers[3:]) == ("15.0", "1.50×", "30.0", "1.50×")
    assert table.rows[2][10:] == ["failed", "", "", "", ""]
    assert [len(row) for row in table.rows] == [len(table.columns)] * len(table.rows)


@pytest.mark.torch
def test_prefill_judges_all_of_our_ways(given_times, monkeypatch):
    for name, value in {"TOKENS": 5, "TOPK": TOPK, "HEADS": (2,), "KEYS": (512,)}.items():
        monkeypatch.setattr(cuda_prefill, name, value)
    table = cuda_prefill.measure(bench_of())
    assert table.failures == []
    names = ["bfloat16", "fp8_ds_mla", "fp8_ds_mla, wide"]
    assert [row["kv_format"] for row in table.records] == names
    assert all(0 < row["error_over_bound"] <= 1 for row in table.records)
    assert [len(row) for row in table.rows] == [len(table.columns)] * 3


def test_a_flush_comes_before_every_replay_and_is_not_timed(monkeypatch):
    events = []

    class Replay:
        def __init__(self, calls):
            self.name, self.num_calls = calls[0], len(calls)

        def time(self):
            events.append(self.name)
            return lambda: 1e-6

    monkeypatch.setattr(cuda_timing, "Replay", Replay)
    monkeypatch.setattr(cuda_timing, "synchronize", lambda: None)
    monkeypatch.setattr(cuda_timing, "make_flush", lambda: lambda: events.append("flush"))
    effort = cuda_timing.CudaEffort(rounds=50)
    sides = {"ours": "a", "peer": "b"}
    assert cuda_timing.interleave_flushed(sides, effort) == {"ours": 1e-6, "peer": 1e-6}
    assert events == ["flush", "a", "flush", "b"] * (50 + cuda_timing.WARM_UP_ROUNDS)


@pytest.mark.torch
def test_a_flush_leaves_nothing_in_the_cache(on_cpu, monkeypatch):
    monkeypatch.setattr(cuda_timing, "DEVICE", "cpu")
    for name, value in {"l2_bytes": lambda: 1 << 10, "FLUSH_BYTES": 9, "FLUSH_ORDER": 4}.items():
        monkeypatch.setattr(cuda_timing, name, value)
    torch = cuda_timing.torch
    made = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **o: made.append(empty(*a, **o)) or made[-1])
    flush = cuda_timing.make_flush()
    assert [(len(x), x.dtype) for x in made] == [(2 << 10, torch.uint8)]
    made[0].fill_(7)
    flush()
    assert not made[0].any()


# --- sides that fail -----------------------------------------------------------------------------


def make_sides(flat, **times):
    """One side of our kernels on this input per name."""
    return {name: cuda_sides.make_ours([flat]) for name in times}


@pytest.fixture
def timed(on_cpu, monkeypatch):
    """Sets the seconds of sides, which are not timed: a number, or a function that may fail."""

    def set_times(**times):
        def time_sides(sides, effort, rotating):
            for name, side in sides.items():
                seconds = times[name]
                side.seconds = side.flushed_seconds = (
                    seconds(side) if callable(seconds) else seconds
                )

        monkeypatch.setattr(cuda_sides, "time_sides", time_sides)

    return set_times


def fail(_):
    raise RuntimeError("cannot be\ncaptured")


@pytest.mark.torch
@pytest.mark.parametrize("kv_format", ["bfloat16"])
def test_sides_fail_alone(flat, timed):
    """A side fails in its first run, in its capture, or because replays change its results."""

    def spoil(side):
        side.owned[0][0] = 3
        return 4.0

    timed(good=1.0, late=fail, spoilt=spoil, early=2.0)
    sides = make_sides(flat, good=0, late=0, spoilt=0, early=0)
    sides["early"].calls = [lambda: fail(None)]
    cuda_sides.measure_sides(sides, cuda_timing.CudaEffort())
    failures = {name: side.failure for name, side in sides.items()}
    assert failures == {
        "good": "",
        "late": "RuntimeError: cannot be captured",
        "spoilt": "replays changed the result's bits",
        "early": "RuntimeError: cannot be captured",
    }
    seconds = [side.seconds for side in sides.values()]
    assert seconds == pytest.approx([1.0, np.nan, 4.0, np.nan], nan_ok=True)


@pytest.mark.torch
@pytest.mark.parametrize("kv_format", ["bfloat16"])
def test_a_side_beyond_its_bound_has_failed(flat):
    side = cuda_sides.make_ours([flat])
    call = side.calls[0]

    def wrong():
        call()
        side.owned[0].mul_(1.5)
        return side.owned

    side.calls = [wrong]
    side.check()
    assert side.error > 1
    assert side.failure == f"error is {side.error:.3g} of its bound"


@pytest.mark.torch
@pytest.mark.parametrize("rotating", [True, False])
def test_sides_are_timed_by_both_methods(rotating, monkeypatch):
    monkeypatch.setattr(cuda_sides, "interleave", lambda calls, _: dict.fromkeys(calls, 1.0))
    flushed = {"a": 2.0, "b": 3.0}
    monkeypatch.setattr(cuda_sides, "interleave_flushed", lambda calls, _: flushed)
    sides = {name: cuda_sides.Side([int], lambda x: x, None) for name in "ab"}
    cuda_sides.time_sides(sides, cuda_timing.CudaEffort(), rotating)
    assert [side.flushed_seconds for side in sides.values()] == [2.0, 3.0]
    assert all((side.seconds == 1.0) == rotating for side in sides.values())


@pytest.mark.torch
@pytest.mark.parametrize("broken", ["make_requests", "make_ours"])
def test_rows_that_fail_leave_the_others_their_place(broken, given_times, monkeypatch):
    """Each format's requests or calls fail in the tables of decodes, prefills and inputs."""
    for name, value in {"TOKENS": 5, "TOPK": TOPK, "HEADS": (2,), "KEYS": (512,)}.items():
        monkeypatch.setattr(cuda_prefill, name, value)
    decodes = [(name, TOPK, (2,), [(1, 1)]) for name in FORMATS]
    monkeypatch.setattr(cuda_decode, "FULL_DECODES", decodes)
    monkeypatch.setattr(cuda_decode, "l2_bytes", lambda: 1 << 20)
    monkeypatch.setattr(cuda_sent, "TOPK", TOPK)
    for module in (cuda_decode, cuda_sent, *([cuda_prefill] * (broken == "make_ours"))):
        monkeypatch.setattr(module, broken, lambda *_: fail(None))
    rows = cuda_sent.Rows(
        kv_formats=("fp8_ds_mla",), head_counts=(2,), batches=((1, 1),), kinds=("flat",)
    )
    words = "RuntimeError: cannot be captured"
    decode, inputs = cuda_decode.measure(bench_of()), cuda_sent.measure(bench_of(rows=rows))
    assert decode.rows == inputs.rows == []
    if broken == "make_requests":
        assert decode.failures == [f"{name} K {TOPK}: {words}" for name in FORMATS]
        assert inputs.failures == [f"fp8_ds_mla: {words}"]
        return
    labels = "H 2, requests 1 × 1"
    assert decode.failures == [f"kv_format {x}, {labels}, K {TOPK}: {words}" for x in FORMATS]
    assert inputs.failures == [f"kv_format fp8_ds_mla, {labels}, input flat: {words}"]
    prefill = cuda_prefill.measure(bench_of())
    assert prefill.failures == [f"H 2, keys 512: {words}"]


@pytest.mark.torch
def test_a_shape_that_cannot_be_drawn_is_a_failure(given_times, monkeypatch):
    monkeypatch.setattr(cuda_sent, "TOPK", TOPK)
    monkeypatch.setattr(cuda_sent, "add_shape", lambda *_: fail(None))
    rows = cuda_sent.Rows(
        kv_formats=("bfloat16",), head_counts=(2, 3), batches=((1, 1),), kinds=("flat",)
    )
    table = cuda_sent.measure(bench_of(rows=rows))
    assert [text.partition(":")[0] for text in table.failures] == [
        f"kv_format bfloat16, H {num_heads}, requests 1 × 1" for num_heads in (2, 3)
    ]


@pytest.mark.torch
@pytest.mark.parametrize("kv_format", ["bfloat16"])
def test_kinds_stay_within_the_spare_slots(flat):
    keys = cuda_timing.torch.zeros(len(flat.rows) - flat.spare + 1, 576)
    with pytest.raises(ValueError, match=rf"^{len(keys)} rows do not fit"):
        cuda_kinds.put_keys(flat, flat.spare, None, None, keys)


# --- the peer ------------------------------------------------------------------------------------


class FlashMLA(ModuleType):
    """FlashMLA's interface on our kernels, for the head counts that FlashMLA has."""

    def __init__(self, **facts) -> None:
        super().__init__("flash_mla")
        vars(self).update({"has_legacy": lambda: True, **facts})

    @staticmethod
    def get_mla_metadata():
        return "plan", None

    @staticmethod
    def flash_mla_sparse_fwd(*, q, kv, indices, sm_scale, d_v, attn_sink, use_legacy):
        assert (q.shape[1] in (64, 128), kv.ndim, indices.ndim) == (True, 3, 3)
        assert (d_v, use_legacy) == (512, True)
        options = {"softmax_scale": sm_scale, "attn_sink": attn_sink, "return_max_logits": True}
        out, lse, max_logits = sparse_mla.sparse_attention(q, kv, indices[:, 0], **options)
        return out, max_logits, lse

    @staticmethod
    def flash_mla_with_kvcache(*, q, k_cache, indices, softmax_scale, **others):
        assert (q.shape[2] in (64, 128), k_cache.ndim, q.ndim, indices.ndim) == (True, 4, 4, 3)
        assert others == {
            "block_table": None,
            "cache_seqlens": None,
            "head_dim_v": 512,
            "tile_scheduler_metadata": "plan",
            "is_fp8_kvcache": True,
            "use_legacy": True,
        }
        shape = q.shape[:3]
        out, lse = sparse_mla.sparse_attention(
            q.flatten(0, 1), k_cache, indices.flatten(0, 1), softmax_scale=softmax_scale
        )
        return out.view(*shape, 512), lse.view(shape).transpose(1, 2)


@pytest.mark.torch
@each_format
@pytest.mark.parametrize("num_heads", [3, 64, 65])
def test_the_peer_s_shapes(kv_format, num_heads, on_cpu, monkeypatch):
    """Heads are padded in the peer's inputs and cut from its results, which match ours."""
    monkeypatch.setitem(sys.modules, "flash_mla", FlashMLA(__version__="7"))
    found, version = peer.find_peer()
    assert version in ("flash_mla 7", found.describe())
    flat = make_requests(kv_format).draw(NUM_REQS, QUERY_LEN, num_heads, TOPK)
    if kv_format == "fp8_ds_mla":
        flat.sink = None  # the peer's decode takes none
    for sink in (flat.sink, None):
        flat.sink = sink
        ours, theirs = cuda_sides.make_ours([flat]), cuda_sides.make_peer(found, [flat])
        for side in (ours, theirs):
            side.check()
            assert (side.failure, side.error <= 1) == ("", True)
        assert [tuple(x.shape) for x in theirs.read(theirs.calls[0]())] == [
            (len(flat.q), num_heads, 512),
            (len(flat.q), num_heads),
        ]


# --- a layer's prefill ---------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize(("factor", "failures"), [(1, 0), (1.5, 2)])
def test_a_layer_s_prefill_beside_its_operators(factor, failures, on_cpu, monkeypatch):
    """With context in two chunks, and without. A kernel that is wrong is told."""

    def peer(q, k, v, *starts, softmax_scale, causal, return_attn_probs):
        assert return_attn_probs
        options = {"softmax_scale": softmax_scale, "causal": causal}
        out, lse = sparse_mla.varlen_attention(q, k, v, *starts[:2], **options)
        assert starts[2] == 70
        longest.add(starts[3])
        return out * factor, lse.T

    longest = set()
    spent = {"merge_kernel": 1.0, "mha": 9.0}
    times = {"forward": 1e-3, "operators": 2e-3, "portable": 3e-3, "FA3": 4e-3}
    requests = {"new": [(70, 0), (5, 0)], "cached": [(70, 700), (5, 0)]}
    given = {
        "DEVICE": "cpu",
        "WORKSPACE_ROWS": 512,
        "find_peer": lambda: peer,
        "spend_by_kernel": lambda call: spent,
        "SHAPES": [cuda_prefill_layer.Shape(*x, heads=3) for x in requests.items()],
    }
    for name, value in given.items():
        monkeypatch.setattr(cuda_prefill_layer, name, value)
    bench = bench_of()
    bench.timer = lambda sides, effort: times
    table = cuda_prefill_layer.measure(bench)
    assert longest == {70, 512, 188}
    assert len(table.failures) == failures
    assert table.rows[1] == ["cached", "3", "1000", "2000", "3000", "4000", "4.00", "10.0%"]
    assert table.records[0]["portable_us"] == 3000
