"""Positions behind the last one: exactly the number that there are, one more, -2 and the largest
integers, at the first, a middle and the last entry of every array of slots, pages, requests and
positions, in every format. A call names the array, the value and its place and writes nothing, or
the position counts as none, as -1 does. Calls on the CPU always look; calls on a GPU do in checked
mode, and say the same."""

from __future__ import annotations

from typing import NamedTuple

import device
import numpy as np
import operators
import pytest
import reference as ref
import row_formats as rows
from fake_gpu import CupyArray
from helpers import assert_same_bits

import sparse_mla

pytestmark = pytest.mark.skipif(device.ON_CUDA, reason="the fake GPUs have the same checks")


class Refused(NamedTuple):
    """Values from `limit` on are refused. So are negative ones, or they count as none."""

    limit: int
    negative: str  # "none" or "refused"
    entries: tuple[int, ...]  # those that the good call reads, by their number in the array


ALL_OF_3, ALL_OF_4, ALL_OF_5 = (0, 1, 2), (0, 2, 3), (0, 2, 4)
SLOTS = Refused(12, "none", ALL_OF_5)
POSITIONS = Refused(8, "refused", ALL_OF_3)
REQUESTS = Refused(2, "refused", ALL_OF_3)
REFUSED = {
    ("concat_and_cache_mla", "slot_mapping"): SLOTS,
    ("quantize_and_insert_k_cache", "slot_mapping"): SLOTS,
    ("indexer_k_quant_and_cache", "slot_mapping"): SLOTS,
    ("reshape_and_cache", "slot_mapping"): SLOTS,
    ("transfer_kv_cache", "src_slots"): SLOTS,
    ("transfer_kv_cache", "dst_slots"): SLOTS,
    ("save_partial_states", "slot_mapping"): SLOTS,
    ("compress_norm_rope_store", "slot_mapping"): SLOTS,
    ("compress_norm_rope_store", "kv_slot_mapping"): SLOTS,
    ("fused_qnorm_rope_kv_insert", "slot_mapping"): Refused(12, "none", ALL_OF_4),
    ("rope_and_cache_mla", "slot_mapping"): Refused(12, "none", (0, 1)),
    ("apply_rope", "positions"): POSITIONS,
    ("rope_and_cache_mla", "positions"): POSITIONS,
    ("fused_inv_rope_fp8_quant", "positions"): POSITIONS,
    ("fused_indexer_q_rope_quant", "positions"): POSITIONS,
    ("fused_qnorm_rope_kv_insert", "positions"): Refused(8, "refused", ALL_OF_5),
    ("compress_norm_rope_store", "positions"): Refused(8, "refused", ALL_OF_5),
    ("convert_req_index_to_global_index", "req_id_per_token"): REQUESTS,
    ("convert_req_index_to_global_index", "prefill_request_ids"): Refused(2, "none", ALL_OF_3),
    ("compute_global_topk_indices_and_lens", "req_id_per_token"): Refused(2, "refused", (0, 1)),
    ("top_k_per_row", "req_id_per_token"): Refused(2, "refused", (0, 1)),
    ("indexer_logits", "req_id_per_token"): REQUESTS,
    ("lightning_indexer", "req_id_per_token"): REQUESTS,
    ("build_mixed_sparse_indices", "req_id_per_token"): Refused(3, "refused", (0, 2, 3)),
    ("compress_norm_rope_store", "req_id_per_token"): Refused(2, "refused", (1, 3)),
    ("gather_kv_cache", "block_table"): Refused(5, "refused", (0, 1, 4)),
    ("dequantize_and_gather_k_cache", "block_table"): Refused(5, "refused", (1, 3, 4)),
    ("compress_norm_rope_store", "block_table"): Refused(3, "none", (2,)),
}
# Positions that count as none from a limit on, and below 0: entries that the good call reads, with
# their limits.
NONE = {
    ("convert_req_index_to_global_index", "topk_indices"): {0: 12, 4: 12, 8: 12},
    ("compute_global_topk_indices_and_lens", "topk_indices"): {0: 8, 2: 8, 4: 4},
    ("build_mixed_sparse_indices", "prefill_topk_indices"): {0: 8, 3: 8},
    ("sparse_attention", "indices"): {0: 20, 4: 20, 8: 20},
    ("sparse_attention", "extra_indices"): {0: 8, 2: 8, 4: 8},
    ("sparse_mla_dsv4", "sparse_indices"): {0: 20, 3: 20, 4: 8, 8: 8},
    ("mla_attention", "block_table"): {0: 5, 1: 5, 3: 5},
    ("paged_attention", "block_table"): {0: 5, 2: 5, 5: 5},
    ("indexer_logits", "block_table"): {0: 5, 1: 5, 2: 5},
    ("lightning_indexer", "block_table"): {0: 5},
}
# Arrays of other kinds: lengths, starts and bounds, which tests of the operators have, and tables
# and lists whose values are written as they are.
OTHER = {
    *("seq_lens", "workspace_starts", "prefill_workspace_starts", "starts", "ends", "gather_lens"),
    *("query_start_loc", "decode_swa_indices", "decode_compressed_indices", "topk_length"),
    *("decode_compressed_lens", "extra_topk_length", "sparse_topk_lens", "cache_seqlens"),
    *("cu_seqlens_q", "cu_seqlens_k", "context_lens", "swa_block_table", "slots_block_table"),
    *("compressed_block_table", "cache_leftpad"),
}
OTHERS = {
    ("convert_req_index_to_global_index", "block_table"),
    ("compute_global_topk_indices_and_lens", "block_table"),
    ("combine_topk_swa_indices", "topk_indices"),
    ("save_partial_states", "positions"),
    ("cp_local_positions", "positions"),
    ("cp_local_topk", "topk_indices"),
    ("top_k_merge", "indices"),
}


def test_every_array_of_positions_has_a_row():
    found = {
        (op, name)
        for op, make in operators.GOOD_CALLS.items()
        for name, x in make().arrays().items()
        if x.dtype in (np.int32, np.int64) and name not in (*operators.RESULTS, *OTHER)
    }
    assert found == REFUSED.keys() | NONE.keys() | OTHERS


def values_of(dtype, limit: int, negative: str = "none") -> list[int]:
    """Bad values. Cut to 32 bits, the last ones of 64 would be good."""
    found = [limit, limit + 1, 2**31 - 1]
    if negative == "refused":
        found += [-1, -2, -(2**31)]
    if dtype == np.int64:
        found += [2**32, 2**32 + 1, 2**63 - 1]
    return found


def with_value(op: str, name: str, entry: int, value: int, put=lambda x: x) -> operators.Call:
    """The good call with one other entry, and its arrays where `put` puts them."""
    call = operators.GOOD_CALLS[op]()
    array = call.get(name).copy()
    array.flat[entry] = value
    call.set(name, array)
    for each in call.arrays():
        call.set(each, put(call.get(each)))
    return call


def bytes_of(call: operators.Call) -> dict[str, bytes]:
    """All arrays of a call, whose outputs may be written."""
    return {name: np.asarray(x).tobytes() for name, x in call.arrays().items()}


def refusal(call: operators.Call, module) -> str:
    with pytest.raises(ValueError) as info:
        call.run(module)
    return str(info.value)


@pytest.mark.parametrize(("op", "name"), REFUSED)
def test_refused(package, gpu, cupy, monkeypatch, op, name):
    monkeypatch.setenv("SPARSE_MLA_CHECK", "1")
    fact = REFUSED[op, name]
    array = operators.GOOD_CALLS[op]().get(name)
    width = array.shape[-1]
    for entry in fact.entries:
        place = f" {entry}" if array.ndim == 1 else f" {entry // width}, block {entry % width}"
        for value in values_of(array.dtype, fact.limit, fact.negative):
            call = with_value(op, name, entry, value)
            before = bytes_of(call)
            text = refusal(call, sparse_mla)
            assert text.startswith(f"{op}: `{name}` must "), text
            assert f"got {value} " in text, text
            assert text.endswith(place), text
            assert bytes_of(call) == before, "nothing may be written"
            gpu.calls()
            assert refusal(with_value(op, name, entry, value, CupyArray), package) == text
            assert not any(called.startswith("launch") for called in gpu.calls())
        for value in {"none": [-2, -(2**31)], "refused": []}[fact.negative]:
            call, same = (with_value(op, name, entry, x) for x in (value, -1))
            call.run(sparse_mla)
            same.run(sparse_mla)
            assert {**bytes_of(call), name: b""} == {**bytes_of(same), name: b""}


def results_of(call: operators.Call) -> list[bytes]:
    results = call.run(sparse_mla)
    return [x.tobytes() for x in (results if isinstance(results, tuple) else (results,))]


@pytest.mark.parametrize(("op", "name"), NONE)
def test_counted_as_none(op, name):
    dtype = operators.GOOD_CALLS[op]().get(name).dtype
    for entry, limit in NONE[op, name].items():
        want = results_of(with_value(op, name, entry, -1))
        assert results_of(with_value(op, name, entry, limit - 1)) != want, "it is read"
        for value in (*values_of(dtype, limit), -2, -(2**31)):
            assert results_of(with_value(op, name, entry, value)) == want, (entry, value)


# --- formats -------------------------------------------------------------------------------------

PAGES, PAGE = 3, 5
CACHES = sorted(rows.FORMATS)


def bad_slots(num_slots: int):
    """Slot lists with one bad slot, and what a refusal says of it."""
    for entry in (0, 3, 6):
        for slot in (num_slots, num_slots + 1, 2**31 - 1, 2**40):
            slots = np.array([1, 4, 0, -1, 9, -2, 14], np.int64)
            slots[entry] = slot
            yield slots, f"below the {num_slots} slots of ", f"got {slot} at token {entry}"


@pytest.mark.parametrize("name", CACHES)
def test_slots_of_every_format(name):
    """Each writer that takes the format."""
    rng = np.random.default_rng(3)
    pages = rows.Pages(name, pages=PAGES, block_size=PAGE)
    width = pages.format.width
    k = rng.normal(0, 1, (7, width)).astype(np.float32)
    before = pages.memory.copy()
    options = dict(pages.options)
    if pages.format.width == 128:
        writers = [sparse_mla.indexer_k_quant_and_cache]
    else:
        writers = [sparse_mla.quantize_and_insert_k_cache, insert_with_queries]
    for slots, rule, got in bad_slots(PAGES * PAGE):
        for write in writers:
            with pytest.raises(ValueError) as info:
                write(k, pages.cache, slots, **options)
            text = str(info.value)
            assert "`slot_mapping` must be " + rule in text, text
            assert text.endswith(got), text
            assert_same_bits(pages.memory, before)


def insert_with_queries(k, cache, slots, **options) -> None:
    sparse_mla.fused_qnorm_rope_kv_insert(
        ref.to_bf16(np.ones((len(k), 1, 512), np.float32)),
        ref.to_bf16(k),
        np.zeros(len(k), np.int64),
        np.ones((1, 64), np.float32),
        cache,
        slots,
        eps=1e-6,
        **options,
    )


ONLY_EXTRA = ("fp4_v41", "fp4_v41_split")


@pytest.mark.parametrize(
    ("is_extra", "name"),
    [(x, name) for name in rows.KEY_FORMATS for x in (False, True) if x or name not in ONLY_EXTRA],
)
def test_indices_of_every_format(is_extra, name):
    """An index behind the last slot sees no key, whatever lies there."""
    rng = np.random.default_rng(4)
    pages = rows.Pages(name, pages=PAGES, block_size=PAGE)
    pages.memory[...] = 0xFF  # NaN in every format that has one
    slots = np.arange(PAGES * PAGE)
    bits = ref.bf16_encode(rng.normal(0, 1, (len(slots), 512)).astype(np.float32))
    pages.put(slots, *pages.format.encode(bits))
    q = ref.to_bf16(rng.normal(0, 1, (1, 2, 512)).astype(np.float32))
    other = ref.to_bf16(rng.normal(0, 1, (4, 512)).astype(np.float32))

    def attend(indices):
        lists = [(pages.cache, pages.options), (other, {})]
        indices = [np.array([indices], np.int32), np.array([[0, 2, 3]], np.int32)]
        if is_extra:
            lists.reverse()
            indices.reverse()
        extra = {f"extra_{key}": x for key, x in lists[1][1].items()}
        out, lse = sparse_mla.sparse_attention(
            q, lists[0][0], indices[0], extra_kv_cache=lists[1][0], extra_indices=indices[1],
            softmax_scale=0.1, **lists[0][1], **extra,
        )  # fmt: skip
        return out.tobytes() + lse.tobytes()

    good = [1, 14, 0, 7, 3]
    for entry in (0, 2, 4):
        want = attend([*good[:entry], -1, *good[entry + 1 :]])
        assert want != attend(good)
        for value in (15, 16, -2, 2**31 - 1, -(2**31)):
            assert attend([*good[:entry], value, *good[entry + 1 :]]) == want, (entry, value)
