"""Groups of tokens that a compressor closes: each place in a group, and where pages and tables of
states end in one."""

from __future__ import annotations

import numpy as np
import pytest
import reference_compressor as compressor
from compressor_steps import Case, check_both
from helpers import assert_same_bits


def places(case: Case, request: int, last: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Values and scores [D] of each place of the group that position `last` closes, as views."""
    ratio, dim = case.options["ratio"], len(case.arrays["norm_weight"])
    c = compressor.overlap(ratio)
    pages = case.memory[:, :, : 2 * c * dim]
    found = []
    for j in range(c * ratio):
        start = 0 if j < (c - 1) * ratio else (c - 1) * dim
        position = last + 1 - c * ratio + j
        page, offset = divmod(position, case.state.shape[1])
        row = pages[case.table[request, page], offset]
        found.append((row[start : start + dim], row[c * dim + start : c * dim + start + dim]))
    return found


UNWEIGHTED = {
    "one place": lambda j, k: k == j,
    "all but one place": lambda j, k: k != j,
    "a place and its partner in a pair": lambda j, k: k in (j, j + 4, j - 4),
    "from a place on": lambda j, k: k >= j,
    "up to a place": lambda j, k: k <= j,
}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("pattern", UNWEIGHTED)
@pytest.mark.parametrize(("ratio", "sbs"), [(4, 1), (4, 3), (5, 2), (8, 7), (20, 3)])
def test_values_of_weight_zero_in_each_place(ratio, sbs, pattern, value):
    """A state whose score is -inf has no part in its group, whatever its value is: the key is that
    of a value of 0, in whole groups and in single channels. One request for each place."""
    count = compressor.overlap(ratio) * ratio
    last = 3 * ratio - 1
    fmt = "bfloat16" if ratio < 20 else "fp8_index"
    for channels in (slice(None), slice(1, None, 3)):
        keys = []
        for filler in (value, 0):
            case = Case([(last, 1)] * count, ratio=ratio, sbs=sbs, fmt=fmt, padding=0)
            case.save()
            for j in range(count):
                for k, (values, scores) in enumerate(places(case, j, last)):
                    if UNWEIGHTED[pattern](j, k):
                        values[channels], scores[channels] = filler, -np.inf
            want = case.want_pages(case.memory)
            case.close()
            assert_same_bits(case.pages.memory, want, "cache")
            keys.append(case.pages.values(case.arrays["kv_slot_mapping"]).copy())
        assert np.isfinite(keys[0]).all()
        assert_same_bits(*keys)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("score", [-1e30, -150.0, 0.0])
@pytest.mark.parametrize(("ratio", "sbs"), [(4, 3), (5, 1), (20, 7)])
def test_non_finite_values_of_any_weight_in_each_place(ratio, sbs, score, value):
    """A score that is a number gives a weight, though it may be 0 in fp32: the key is NaN."""
    count = compressor.overlap(ratio) * ratio
    last = 3 * ratio - 1
    case = Case([(last, 1)] * count, ratio=ratio, sbs=sbs, fmt="bfloat16", padding=0)
    case.save()
    for j in range(count):
        values, scores = places(case, j, last)[j]
        values[7], scores[7] = value, score
    want = case.want_pages(case.memory)
    case.close()
    assert_same_bits(case.pages.memory, want, "cache")
    keys = case.pages.values(case.arrays["kv_slot_mapping"])
    assert np.isnan(keys[:, 7]).all()


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("sbs", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("ratio", [2, 4, 5])
def test_bad_pages_in_each_place_of_a_table(ratio, sbs):
    """Pages that a group reads are checked, from the first to the last, and no others."""
    c = compressor.overlap(ratio)
    num_refused = 0
    for groups in (1, c, c + 1, 5, 7):
        last = groups * ratio - 1
        blocks = range(max(last + 1 - c * ratio, 0) // sbs, last // sbs + 1)
        case = Case([(last, 1), (last + 3 * ratio, 1)], ratio=ratio, sbs=sbs, padding=0)
        table = case.table.copy()
        table[table < 0] = 0
        request = 0 if case.arrays["positions"][0] == last else 1
        case.arrays["slot_mapping"][1 - request] = -1  # the other request closes nothing
        case.arrays["block_table"] = table
        own = case.arrays["req_id_per_token"][request]
        want = None
        for block in range(table.shape[1]):
            former = table[own, block]
            for bad in (len(case.state), 2**31 - 1):
                table[own, block] = bad
                before = case.pages.memory.copy()
                if block in blocks:
                    text = rf"got {bad} for request {own}, block {block}$"
                    with pytest.raises(ValueError, match=text):
                        case.close()
                    assert_same_bits(case.pages.memory, before, "nothing may be written")
                    num_refused += 1
                else:
                    case.close()
                    want = case.pages.memory.copy() if want is None else want
                    assert_same_bits(case.pages.memory, want, "cache")
            table[own, block] = former
    assert num_refused >= 10


@pytest.mark.parametrize("sbs", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("ratio", [1, 3, 4])
def test_tables_that_end_in_a_group(ratio, sbs):
    """Positions behind the table's last column have no state, as those of a negative page."""
    requests = [(4 * ratio - 1, 1), (5 * ratio - 1, 1)]
    width = Case(requests, ratio=ratio, sbs=sbs).table.shape[1]
    for columns in range(width + 1):
        for negative in range(0, columns, 1 + columns // 5):
            case = Case(requests, ratio=ratio, sbs=sbs, fmt="fp8_index")
            table = case.table.copy()[:, :columns]  # rows that are a whole table's apart
            table[:, negative] = [-1, -(2**31)]
            case.arrays["block_table"] = table
            case.check(fused=negative % 2 == 0)


@pytest.mark.parametrize("sbs", [1, 3, 4, 7])
@pytest.mark.parametrize("ratio", [2, 4, 5])
def test_groups_at_every_border_of_pages(ratio, sbs):
    """Every group from the first on, each closed by a token alone, by a prefill that ends there,
    and by one that begins in front of it and ends behind it."""
    for groups in range(1, 9):
        last = groups * ratio - 1
        check_both([(last, 1)], ratio=ratio, sbs=sbs, fmt="fp8_index")
        check_both([(max(last - 1, 0), min(last, 1) + 1)], ratio=ratio, sbs=sbs, fmt="fp8_index")
        check_both([(max(last - 2, 0), 5)], ratio=ratio, sbs=sbs, fmt="fp8_index")
