"""Bad values in arrays on the GPU: the host does not read them, kernels mask them, and
SPARSE_MLA_CHECK=1 reports them."""

import cases
import gpu
import numpy as np
import pytest
import reference as ref
from compressor_steps import Case as Compressor
from gpu import torch
from helpers import Guarded, assert_same_bits
from index_lists import good_combine, good_global, good_mixed
from library import package, sparse_mla
from test_cache import BAD_GATHERS, filled, gather_inputs, storage
from test_index import inputs as index_inputs
from test_qnorm_insert import Case

ZEROS = np.zeros(ref.HEAD_DIM, np.uint16)
POISON = np.full(ref.HEAD_DIM, 0xFFFF, np.uint16)


@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
@pytest.mark.parametrize("slot", [20, 2**31 - 1, 2**40, 2**63 - 1, -(2**63)])
def test_a_slot_outside_is_skipped(fmt, slot):
    """The other tokens are written, and every other byte of the storage stays as it was."""
    rng = np.random.default_rng(8)
    cache = filled("interleaved", fmt)
    want = filled("interleaved", fmt)
    kv_c, k_pe = cases.random_bf16(rng, 4, 512), cases.random_bf16(rng, 4, 64)
    sparse_mla.concat_and_cache_mla(kv_c, k_pe, cache, np.array([1, 2, slot, 3], np.int64))
    ref.concat_and_cache_mla(kv_c, k_pe, want, np.array([1, 2, -1, 3], np.int64))
    assert_same_bits(storage(cache), storage(want), "cache storage")


@pytest.mark.parametrize("position", [50, -1, 2**31 - 1, 2**62, -(2**63)])
def test_queries_and_keys_of_a_bad_position_are_not_turned(position):
    """They are what an angle of 0 makes of them, and all others are as they are without them. A
    slot outside is skipped."""
    case, want = Case(9, 3), Case(9, 3)
    case.positions[[2, 5]] = position
    case.slots[3] = 2**40
    still = np.repeat([1, 0], 32).astype(np.float32)
    want.table = np.concatenate([want.table, still[None]])
    want.positions[[2, 5]] = len(want.table) - 1
    want.slots[3] = -1
    for one in (case, want):
        one.run()
    assert_same_bits(case.q, want.q, "queries")
    assert_same_bits(case.pages.memory, want.pages.memory, "cache")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("name", "bad", "harmless"),
    [
        ("slot_mapping", 2**40, {"slot_mapping": -1}),
        ("slot_mapping", -(2**63), {"slot_mapping": -1}),
        ("kv_slot_mapping", 2**40, {"kv_slot_mapping": -1}),
        ("req_id_per_token", 2**31 - 1, {"kv_slot_mapping": -1}),
        ("req_id_per_token", -5, {"kv_slot_mapping": -1}),
    ],
)
def test_bad_tokens_of_the_compressor_are_skipped(name, bad, harmless, fused):
    """Everything else is as without them."""
    case, want = (Compressor(((0, 17), (6, 9)), padding=0) for _ in range(2))
    closing = np.flatnonzero(case.arrays["kv_slot_mapping"] >= 0)[1]
    case.arrays[name][closing] = bad
    for key, value in harmless.items():
        want.arrays[key][closing] = value
    for one in (case, want):
        if not fused:
            one.save()
        one.close(**(one.step if fused else {}))
    assert_same_bits(case.memory, want.memory, "state")
    assert_same_bits(case.pages.memory, want.pages.memory, "cache")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("page", ["past the end", 2**31 - 1, -(2**31)])
def test_a_bad_page_has_no_states(page, fused):
    case, want = (Compressor(((0, 17),), padding=0) for _ in range(2))
    case.table[0, 1] = len(case.state) if isinstance(page, str) else page
    want.table[0, 1] = -1
    for one in (case, want):
        if not fused:
            one.save()
        one.close(**(one.step if fused else {}))
    assert_same_bits(case.memory, want.memory, "state")
    assert_same_bits(case.pages.memory, want.pages.memory, "cache")


@pytest.mark.parametrize("position", [800, -1, 2**31 - 1, 2**62, 2**63 - 1, -(2**63)])
def test_bad_positions_of_the_compressor_stay_inside(position):
    """The rows of that token are undefined; those of other requests are as without it."""
    case, want = (Compressor(((0, 8), (0, 8)), padding=0) for _ in range(2))
    token = int(np.flatnonzero(case.arrays["req_id_per_token"] == 0)[7])
    case.arrays["positions"][token] = position
    want.arrays["slot_mapping"][token] = -1
    for one in (case, want):
        one.close(**one.step)
    others = want.arrays["kv_slot_mapping"][want.arrays["req_id_per_token"] == 1]
    others = others[others >= 0]
    for got, expected in zip(case.pages.get(others), want.pages.get(others), strict=True):
        assert_same_bits(got, expected)


# --- gather --------------------------------------------------------------------------------------


def allowed_rows(cache, arrays, rows: int) -> list[list[np.ndarray]]:
    """What each row of out may hold after a gather with bad values.

    A good position gives its key, and a position on a bad page gives zeros. A position that is
    outside the block table gives zeros or is not written. Rows of no request are not written.
    """
    allowed = [[] for _ in range(rows)]
    pages, block_size = cache.shape[:2]
    table = arrays["block_table"]
    for r, length in enumerate(arrays["seq_lens"]):
        for p in range(length):
            row = int(arrays["workspace_starts"][r]) + p
            position = int(arrays["seq_starts"][r]) + p
            if not 0 <= row < rows:
                continue
            if not 0 <= position < table.shape[1] * block_size:
                allowed[row] += [ZEROS, POISON]
                continue
            page = int(table[r, position // block_size])
            if not 0 <= page < pages:
                allowed[row].append(ZEROS)
                continue
            bits = ref.raw_rows(cache, [page * block_size + position % block_size])
            allowed[row].append(ref.upconvert_rows(bits)[0] if ref.is_fp8(cache) else bits[0])
    return [found or [POISON] for found in allowed]


@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
@pytest.mark.parametrize("name", BAD_GATHERS)
def test_a_bad_gather_is_harmless(name, fmt):
    _, bend = BAD_GATHERS[name]
    cache, table = gather_inputs("paged", fmt)
    arrays = {
        "block_table": table.copy(),
        "seq_lens": np.array([17, 5, 20], np.int32),
        "workspace_starts": np.array([0, 17, 22], np.int32),
        "seq_starts": np.zeros(3, np.int32),
    }
    bend(arrays)
    buffer = Guarded((42, 576), ref.BF16, row_gap=8)
    sparse_mla.gather_kv_cache(
        cache,
        arrays["block_table"],
        arrays["seq_lens"],
        arrays["workspace_starts"],
        seq_starts=arrays["seq_starts"],
        out=buffer.array,
    )
    got = ref.bits16(np.ascontiguousarray(buffer.check(written=False)))
    for row, found in enumerate(allowed_rows(cache, arrays, 42)):
        # A row that two requests write may hold parts of both.
        assert (np.stack(found) == got[row]).any(axis=0).all(), f"{name}: row {row}"


@pytest.mark.parametrize("length", [2**31 - 1, -(2**31)])
def test_absurd_lengths_stay_inside(length):
    """A gather of the largest length ends with the table's last column and out's last row; one of
    a negative length writes nothing."""
    cache, table = gather_inputs("paged", "fp8")
    buffer = Guarded((30, 576), ref.BF16)
    lens, starts = np.array([length], np.int32), np.array([7], np.int32)
    sparse_mla.gather_kv_cache(cache, table[2:], lens, starts, out=buffer.array)
    got = ref.bits16(buffer.check(written=False))
    assert (got[:7] == 0xFFFF).all()
    want = np.full((25, 576), 0xFFFF, np.uint16)
    if length > 0:
        ref.gather_kv_cache(cache, table[2:], [23], [0], want)
    assert_same_bits(got[7:30], want[:23])


# --- indices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_id", [4, -1, 2**31 - 1, -(2**31)])
def test_a_bad_request_id_gives_minus_one(request_id):
    requests, table, topk = index_inputs()
    want, counts = ref.convert_req_index_to_global_index(requests, table, topk, block_size=16)
    requests[5] = request_id
    want[5], counts[5] = -1, 0
    out = Guarded(topk.shape, np.int32, row_gap=3)
    got = sparse_mla.convert_req_index_to_global_index(
        requests, table, topk, block_size=16, valid_counts=True, out=out.array
    )
    assert_same_bits(out.check(), want)
    assert_same_bits(got[1], counts)


@pytest.mark.parametrize("prefill", [3, 2**31 - 1])
def test_a_bad_prefill_id_gives_minus_one(prefill):
    requests, table, topk = index_inputs()
    options = {
        "prefill_request_ids": np.array([-1, -1, -1, 0, 0, 1, 1, 1, 2], np.int32),
        "prefill_workspace_starts": np.array([0, 500, 40], np.int32),
    }
    want, _ = ref.convert_req_index_to_global_index(requests, table, topk, block_size=16, **options)
    options["prefill_request_ids"][8] = prefill
    want[8] = -1
    out = Guarded(topk.shape, np.int32)
    sparse_mla.convert_req_index_to_global_index(
        requests, table, topk, block_size=16, out=out.array, **options
    )
    assert_same_bits(out.check(), want)


@pytest.mark.parametrize("request_id", [2, -1, 2**31 - 1, -(2**31)])
def test_lists_of_a_bad_request_have_no_slots(request_id):
    arguments = good_global() | {"req_id_per_token": np.array([0, request_id], np.int32)}
    out, lens = sparse_mla.compute_global_topk_indices_and_lens(*arguments.values())
    assert out[1].tolist() == [-1, -1]
    assert lens[1] == 0
    arguments = good_mixed() | {"req_id_per_token": np.array([request_id, 1, request_id], np.int32)}
    local = arguments.pop("decode_indices_are_local")
    out, lens = sparse_mla.build_mixed_sparse_indices(
        *arguments.values(), decode_indices_are_local=local
    )
    assert out.tolist() == [
        [8, 9, -1, -1, -1, -1, -1],
        [21, 22, 23, 12, 13, -1, -1],
        [-1] * 7,
    ]
    assert lens.tolist() == [3, 5, 3]


def test_starts_that_decrease_do_no_harm():
    """What the rows hold is not told, but nothing is written around them."""
    arguments = good_combine()
    for starts in ([7, 5, 4], [4, 2**31 - 1, -(2**31)], [-(2**31), 2**31 - 1, 0]):
        arguments["query_start_loc"] = np.array(starts, np.int32)
        out, lens = Guarded((3, 128), np.int32, row_gap=3), Guarded((3,), np.int32)
        sparse_mla.combine_topk_swa_indices(*arguments.values(), out=out.array, lens=lens.array)
        out.check()
        assert ((lens.check() >= 0) & (lens.array <= 5)).all()


# --- checked calls -------------------------------------------------------------------------------


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("op", gpu.CALLS)
def test_checked_calls_give_the_same_bits(op, monkeypatch):
    got = gpu.outcome(gpu.moved(gpu.CALLS[op]()))
    monkeypatch.delenv("SPARSE_MLA_CHECK")
    gpu.assert_same_values(got, gpu.outcome(gpu.moved(gpu.CALLS[op]())), op)


def test_the_check_is_read_at_every_call(monkeypatch):
    call = gpu.moved(gpu.CALLS["concat_and_cache_mla"]())
    call.args["slot_mapping"][0] = 12
    call.run(package)
    monkeypatch.setenv("SPARSE_MLA_CHECK", "1")
    with pytest.raises(ValueError, match=r"concat_and_cache_mla: `slot_mapping` must .*, got .*12"):
        call.run(package)
    monkeypatch.setenv("SPARSE_MLA_CHECK", "0")
    call.run(package)


@pytest.mark.usefixtures("checked")
def test_a_checked_call_cannot_be_captured():
    """Nothing runs during a capture, so there are no values to check. The call is refused, and the
    capture goes on without it."""
    call = gpu.moved(gpu.CALLS["concat_and_cache_mla"]())
    other = torch.zeros(3, device="cuda")
    refusals = []

    def run():
        if torch.cuda.is_current_stream_capturing():
            with pytest.raises(RuntimeError, match=r"SPARSE_MLA_CHECK"):
                call.run(package)
            refusals.append(True)
        other.add_(1)

    graph, _ = gpu.capture(run)
    graph.replay()
    assert refusals == [True]
    assert other.tolist() == [2, 2, 2], "once before the capture, once replayed"


@pytest.mark.usefixtures("checked")
def test_a_checked_call_waits_for_its_stream():
    """The bad value is written on the stream after the call was made, and the check finds it."""
    stream = torch.cuda.Stream()
    call = gpu.moved(gpu.CALLS["concat_and_cache_mla"]())
    bad = call.args["slot_mapping"].clone()
    bad[3] = 99
    torch.cuda.synchronize()
    gpu.delay(stream)
    with torch.cuda.stream(stream):
        call.args["slot_mapping"].copy_(bad)
    call.kwargs["stream"] = stream
    with pytest.raises(ValueError, match=r"concat_and_cache_mla: `slot_mapping` must .*, got .*99"):
        call.run(package)
