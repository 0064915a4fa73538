"""Values that the index lists of DeepSeek V4 refuse, and which tokens' request ids and validity
matter to a list."""

from __future__ import annotations

import numpy as np
import pytest
import reference_index as ref
from cases import int32
from helpers import Guarded, assert_same_bits
from index_lists import COMBINE, GLOBAL, MIXED, good_combine, good_global, good_mixed
from library import sparse_mla

# --- refusals ------------------------------------------------------------------------------------

ID = "`req_id_per_token` must name a row of `{}` (0 to 1), got {} at token {}"
DECREASES = "`query_start_loc` must not decrease, got 3 after 5 at request 1"
GATHERED = (
    "`gather_lens` must hold the windows of request {} (at least {}) and fit its sequence and its "
    "rows (at most {}), got {}"
)
BAD_VALUES = {
    "a request past the table": (
        good_global,
        {"req_id_per_token": int32(0, 2)},
        ID.format("block_table", 2, 1),
    ),
    "a negative request": (
        good_global,
        {"req_id_per_token": int32(-1, 0)},
        ID.format("block_table", -1, 0),
    ),
    "starts that decrease": (good_combine, {"query_start_loc": int32(4, 5, 3)}, DECREASES),
    "more queries than rows": (
        good_combine,
        {"query_start_loc": int32(4, 5, 8)},
        "`query_start_loc` must have at most the 3 tokens of `topk_indices`, got 4",
    ),
    "a window that is not gathered": (
        good_combine,
        {"gather_lens": int32(2, 4)},
        GATHERED.format(0, 3, 5, 2),
    ),
    "a negative gather": (
        good_combine,
        {"gather_lens": int32(4, -9)},
        GATHERED.format(1, 4, 5, -9),
    ),
    "more than the request's rows": (
        good_combine,
        {"gather_lens": int32(4, 6)},
        GATHERED.format(1, 4, 5, 6),
    ),
    "more than the sequence": (
        good_combine,
        {"M": 99, "gather_lens": int32(7, 4)},
        GATHERED.format(0, 3, 6, 7),
    ),
    "no rows for tokens": (good_combine, {"N": 8}, GATHERED.format(0, 3, 0, 4)),
    "starts of a batch that decrease": (good_mixed, {"query_start_loc": int32(0, 5, 3)}, DECREASES),
    "a prefill of no request": (
        good_mixed,
        {"req_id_per_token": int32(0, 1, 2)},
        ID.format("seq_lens", 2, 2),
    ),
    "a decode of no request": (
        good_mixed,
        {"req_id_per_token": int32(-1, 1, 1)},
        ID.format("seq_lens", -1, 0),
    ),
}
OPS = {good_global: GLOBAL, good_combine: COMBINE, good_mixed: MIXED}


def call(make, changes: dict, **results):
    arguments = make() | changes
    options = {n: arguments.pop(n) for n in ("decode_indices_are_local",) if n in arguments}
    return getattr(sparse_mla, OPS[make])(*arguments.values(), **options, **results)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values_write_nothing(name):
    make, changes, text = BAD_VALUES[name]
    shape = call(make, {})[0].shape
    out, lens = Guarded(shape, np.int32), Guarded((shape[0],), np.int32)
    before = out.storage.copy(), lens.storage.copy()
    with pytest.raises(ValueError) as info:
        call(make, changes, out=out.array, lens=lens.array)
    assert str(info.value) == f"{OPS[make]}: {text}"
    assert_same_bits(out.storage, before[0], "nothing may be written")
    assert_same_bits(lens.storage, before[1], "nothing may be written")


@pytest.mark.usefixtures("checked")
def test_requests_that_nobody_needs_may_be_anything():
    call(good_global, {"req_id_per_token": int32(9, 1), "is_valid": np.array([0, 7], np.uint8)})
    call(good_combine, {"query_start_loc": int32(4, 5, 6)})
    padding = {"query_start_loc": int32(0, 1, 2), "req_id_per_token": int32(0, 1, -9)}
    out, lens = call(good_mixed, padding)
    assert (out[2] == -1).all()
    assert lens[2] == 3
    slots = {"decode_indices_are_local": False, "req_id_per_token": int32(7, 1, 1)}
    call(good_mixed, slots)


# --- validity and request ids, token by token ----------------------------------------------------

BAD_IDS = [-1, 3, 2**31 - 1, -(2**31)]
VALIDITY = [np.array(bits) for bits in np.ndindex(2, 2, 2)]  # three decodes have 8
STRIDED = {
    "compact": lambda x: x,
    "apart": lambda x: np.repeat(x, 3)[::3],
    "backwards": lambda x: x[::-1].copy()[::-1],
}


def tokens_of_all_kinds() -> dict:
    """Decodes 0 to 2, prefills 3 to 5 and a padding token; each token has groups and a window."""
    rng = np.random.default_rng(21)
    return {
        "decode_swa_indices": rng.integers(0, 99, (3, 4)).astype(np.int32),
        "decode_compressed_indices": int32([0, 1, 2], [2, -1, 0], [1, 1, 5]),
        "decode_compressed_lens": None,
        "prefill_topk_indices": int32([1, 0], [0, 2], [2, 1], [1, 1]),
        "query_start_loc": int32(0, 1, 3, 6),
        "seq_lens": int32(9, 12, 14),
        "req_id_per_token": int32(0, 1, 1, 2, 2, 2, -7),
        "swa_block_table": rng.permutation(12).reshape(3, 4).astype(np.int32),
        "swa_block_size": 4,
        "compressed_block_table": rng.permutation(6).reshape(3, 2).astype(np.int32),
        "compressed_block_size": 3,
        "window": 4,
        "ratio": 4,
        "topk": 2,
    }


def outcome(function, *args, **options):
    """The lists, or the error's text."""
    try:
        return [x.tolist() for x in function(*args, **options)]
    except ValueError as error:
        return str(error)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("layout", STRIDED)
@pytest.mark.parametrize("local", [True, False], ids=["positions", "slots"])
def test_mixed_request_ids_of_any_token(local, layout):
    """A decode's id matters where its positions become slots and it is valid, a prefill's always,
    whatever is behind the validity of the decodes. No other id changes a list."""
    arguments = tokens_of_all_kinds()
    for valid in VALIDITY:
        for rest in ([], [0, 0, 0, 0], [1, 0, 1, 0]):  # entries that belong to no decode
            is_valid = STRIDED[layout](np.array([*valid, *rest], np.uint8) * 7)
            options = {"decode_indices_are_local": local, "is_valid": is_valid}
            want = outcome(sparse_mla.build_mixed_sparse_indices, *arguments.values(), **options)
            expected = ref.build_mixed_sparse_indices(*arguments.values(), **options)
            assert want == [x.tolist() for x in expected]
            for t in range(7):
                is_needed = 3 <= t < 6 or (t < 3 and local and valid[t])
                for bad in BAD_IDS:
                    ids = arguments["req_id_per_token"].copy()
                    ids[t] = bad
                    call = arguments | {"req_id_per_token": STRIDED[layout](ids)}
                    got = outcome(sparse_mla.build_mixed_sparse_indices, *call.values(), **options)
                    text = f"(0 to 2), got {bad} at token {t}"
                    assert (got == want) != is_needed, (valid, t, bad)
                    assert not is_needed or got.endswith(text), (valid, t, bad)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("layout", STRIDED)
def test_global_request_ids_of_any_token(layout):
    rng = np.random.default_rng(22)
    table = rng.permutation(6).reshape(3, 2).astype(np.int32)
    topk = int32([5, 0, 1], [2, -1, 4], [3, 3, 0])
    for valid in VALIDITY:
        is_valid = STRIDED[layout](np.array(valid, np.uint8) * 255)
        ids = int32(2, 0, 1)
        want = outcome(
            sparse_mla.compute_global_topk_indices_and_lens, topk, ids, table, 3, is_valid
        )
        expected = ref.compute_global_topk_indices_and_lens(topk, ids, table, 3, is_valid)
        assert want == [x.tolist() for x in expected]
        assert [n > 0 for n in want[1]] == valid.astype(bool).tolist()
        for t in range(3):
            for bad in BAD_IDS:
                ids = int32(2, 0, 1)
                ids[t] = bad
                got = outcome(
                    sparse_mla.compute_global_topk_indices_and_lens,
                    topk, STRIDED[layout](ids), table, 3, is_valid,
                )  # fmt: skip
                assert (got == want) != bool(valid[t]), (valid, t, bad)
                assert not valid[t] or got.endswith(f"(0 to 2), got {bad} at token {t}")
