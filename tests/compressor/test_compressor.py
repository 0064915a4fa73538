"""save_partial_states and compress_norm_rope_store (csrc/cpu/norm, csrc/cuda/norm): every byte of
states and rows."""

from __future__ import annotations

from typing import Any

import device
import numpy as np
import pytest
import reference as ref
import reference_compressor as compressor
import row_formats as rows
from helpers import assert_same_bits
from library import sparse_mla

F32 = np.float32
EPS = 1e-6
KV_SCALE = 0.37  # scale of caches that have one
MAX_POS = 800
RATIOS = [1, 2, 3, 4, 5, 16, 128]
STEP = ("kv", "score", "ape")


def angles(seed=3) -> np.ndarray:
    turn = np.random.default_rng(seed).uniform(-7, 7, (MAX_POS, 32))
    return np.concatenate([np.cos(turn), np.sin(turn)], 1).astype(F32)


class Case:
    """A step of some requests: (tokens before it, tokens of it) each, in any order, with padding at
    its end. The states before the step are random, those of freed pages NaN, and unused parts of
    the state's memory, too."""

    def __init__(
        self,
        requests=((0, 9), (3, 1), (7, 5)),
        *,
        ratio=4,
        fmt="fp8_v4",
        layout="paged",
        sbs=4,
        dtype: Any = F32,
        integers: Any = np.int64,
        weight_dtype: Any = F32,
        padding=3,
        gap=0,
        ring=0,
        seed=0,
    ) -> None:
        rng = np.random.default_rng([seed, ratio, len(requests)])
        self.pages = rows.Pages(fmt, layout, pages=self.cache_pages(requests, ratio))
        dim, c = self.pages.format.width, compressor.overlap(ratio)
        width = c * dim
        blocks = max(-(-(before + n) // sbs) for before, n in requests)
        if ring:
            blocks = max(blocks, ring)
        used = len(requests) * (ring or blocks)
        self.memory = np.full((used + 2, sbs, 2 * width + gap), np.nan, F32)
        self.state = self.memory[:, :, : 2 * width]
        self.state[:] = rng.normal(0, 2, self.state.shape)
        numbers = rng.permutation(used + 2)[:used].reshape(len(requests), -1)
        self.table = np.full((len(requests), blocks), -1, np.int32)
        tokens, kv_slots, next_row = [], [], 0
        cache_rows = rng.permutation(self.pages.pages * self.pages.block_size)
        for r, (before, n) in enumerate(requests):
            for block in range(-(-(before + n) // sbs)):
                self.table[r, block] = numbers[r, block % ring if ring else block]
            keep = max(0, ratio * (before // ratio - c + 1))
            for block in range(keep // sbs if not ring else 0):  # freed
                self.state[self.table[r, block]] = np.nan
                self.table[r, block] = -1
            for p in range(before, before + n):
                closes = (p + 1) % ratio == 0
                tokens.append((r, p))
                kv_slots.append(int(cache_rows[next_row]) if closes else -1)
                next_row += closes
        order = rng.permutation(len(requests))
        at = [t for r in order for t, token in enumerate(tokens) if token[0] == r]
        requests_of, positions = np.array(tokens, np.int64).reshape(-1, 2)[at].T
        slots = [
            compressor.slot_of(self.table[r], p, sbs)
            for r, p in zip(requests_of, positions, strict=True)
        ]
        pad = np.full(padding, -1)
        self.arrays: dict[str, Any] = {
            "state": self.state,
            "block_table": self.table,
            "req_id_per_token": np.append(requests_of, 0 * pad).astype(np.int32),
            "positions": np.append(positions, 0 * pad).astype(integers),
            "slot_mapping": np.append(slots, pad).astype(integers),
            "cache": self.pages.cache,
            "kv_slot_mapping": np.append(np.array(kv_slots)[at], pad).astype(integers),
            "norm_weight": rng.normal(1, 0.3, dim).astype(weight_dtype),
            "cos_sin": angles(),
        }
        count = len(at) + padding
        both = rng.normal(0, 2, (count, 2 * width)).astype(dtype)  # one projection's result
        self.step: dict[str, Any] = {
            "kv": both[:, :width],
            "score": both[:, width:],
            "ape": rng.normal(0, 1, (ratio, width)).astype(F32),
        }
        self.options: dict[str, Any] = {"eps": EPS, "ratio": ratio} | self.pages.options
        if self.pages.format.scales == "cache":
            self.options["kv_scale"] = KV_SCALE

    @staticmethod
    def cache_pages(requests, ratio: int) -> int:
        return sum((before + n) // ratio for before, n in requests) // 5 + 2

    @property
    def call(self) -> dict[str, Any]:
        return self.arrays | {"ratio": self.options["ratio"]}

    def save(self, **options):
        kv, score, ape = (self.step[name] for name in STEP)
        a = self.arrays
        return sparse_mla.save_partial_states(
            kv, score, ape, a["positions"], a["state"], a["slot_mapping"], **options
        )

    def close(self, **options):
        return sparse_mla.compress_norm_rope_store(
            *self.arrays.values(), **(self.options | options)
        )

    def want_memory(self) -> np.ndarray:
        """The state's memory after the step."""
        memory = self.memory.copy()
        slots = self.arrays["slot_mapping"]
        keep = np.flatnonzero(slots >= 0)
        kv, score, ape = (self.step[name] for name in STEP)
        width = kv.shape[1]
        new = compressor.state_rows(kv, score, ape, self.arrays["positions"][: len(kv)])
        pages, offsets = np.divmod(slots[keep].astype(np.int64), self.state.shape[1])
        memory[pages, offsets, : 2 * width] = new[keep]
        return memory

    def groups(self, memory: np.ndarray) -> dict[int, compressor.Group]:
        flat = memory.reshape(-1, memory.shape[2])[:, : self.state.shape[2]]
        return compressor.compress(self.call, flat)

    def want_pages(self, memory: np.ndarray) -> np.ndarray:
        """The cache's memory after the step."""
        before = self.pages.memory.copy()
        groups = self.groups(memory)
        if groups:
            weight, table = self.arrays["norm_weight"], self.arrays["cos_sin"]
            bits = [
                compressor.key_bits(g, weight, table, self.options["eps"]) for g in groups.values()
            ]
            encoded = self.pages.format.encode(np.array(bits), KV_SCALE)
            self.pages.put(np.array(list(groups)), *encoded)
        after = self.pages.memory.copy()
        self.pages.memory[:] = before
        return after

    def check(self, fused: bool) -> None:
        """The whole memory of state and cache is as the reference leaves it."""
        state, inputs = self.want_memory(), {n: x.copy() for n, x in self.step.items()}
        pages = self.want_pages(state)
        if fused:
            assert self.close(**self.step) is self.pages.cache
        else:
            assert self.save() is self.arrays["state"]
            assert_same_bits(self.memory, state, "state")
            assert self.close() is self.pages.cache
        assert_same_bits(self.memory, state, "state")
        assert_same_bits(self.pages.memory, pages, "cache")
        for name, x in inputs.items():
            assert_same_bits(np.ascontiguousarray(self.step[name]), np.ascontiguousarray(x), name)


def check_both(*args, **options) -> None:
    for fused in (False, True):
        Case(*args, **options).check(fused)


# --- every byte ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("fmt", ["fp8_v4", "fp8_index"])
def test_ratios(ratio, fmt):
    """Requests that begin, that complete a group, and that complete many."""
    around = ((0, ratio), (ratio - 1, 1), (2 * ratio - 1, 2 * ratio + 2), (5 * ratio, ratio - 1))
    check_both(tuple(x for x in around if x[1]), ratio=ratio, fmt=fmt, sbs=8 if ratio > 8 else 4)


@pytest.mark.parametrize(
    ("fmt", "layout"), [(name, x) for name in rows.FORMATS for x in rows.layouts_of(name)]
)
def test_formats(fmt, layout):
    check_both(fmt=fmt, layout=layout)
    check_both(fmt=fmt, layout=layout, ratio=2, dtype=ref.BF16)


@pytest.mark.parametrize("sbs", [1, 2, 3, 4, 5, 7, 64])
@pytest.mark.parametrize("ratio", [1, 4, 6])
def test_state_pages(sbs, ratio):
    check_both(((0, 13), (17, 4), (5, 1), (30, 9)), sbs=sbs, ratio=ratio, fmt="mxfp4_index")


@pytest.mark.parametrize("gap", [1, 4])
@pytest.mark.parametrize("dtype", [F32, ref.BF16])
@pytest.mark.parametrize("integers", [np.int32, np.int64])
def test_types_and_gaps(gap, dtype, integers):
    """Rows of the state that are and are not multiples of 16 bytes apart."""
    check_both(gap=gap, dtype=dtype, integers=integers, weight_dtype=dtype)


@pytest.mark.parametrize("count", [0, 1, 2, 33, 70, 300])
@pytest.mark.parametrize("ratio", [4, 128])
def test_many_requests(count, ratio):
    """Decode steps of 1 or 2 tokens: some complete a group, most do not. Many threads at once."""
    rng = np.random.default_rng(count)
    requests = [(int(x), int(n)) for x, n in rng.integers([0, 1], [300, 3], (count, 2))]
    check_both(requests or [(0, 0)], ratio=ratio, fmt="fp8_index")


def test_a_long_prefill():
    """More tokens than a thread block takes, and groups over several passes."""
    check_both(((3, 640), (0, 13)), ratio=128, sbs=8, fmt="fp8_v4")
    check_both(((2, 640), (1, 13)), ratio=300, sbs=8, fmt="fp8_index")
    check_both(((1, 650),), ratio=4, fmt="bfloat16")


@pytest.mark.parametrize("ratio", [2, 4, 128])
@pytest.mark.parametrize("seed", range(3))
def test_fused_is_the_two_calls(ratio, seed):
    """Random steps, bit for bit, over rings of the least size, too."""
    rng = np.random.default_rng([seed, ratio])
    n = int(rng.integers(1, 3 * ratio))
    requests = [(int(x), int(rng.integers(1, n + 1))) for x in rng.integers(0, 300, 6)]
    sbs = int(rng.integers(1, 9))
    ring = -(-(compressor.overlap(ratio) * ratio + n - 1) // sbs)
    for size in (0, ring):
        cases = [
            Case(requests, ratio=ratio, fmt="fp8_index", sbs=sbs, ring=size, seed=seed)
            for _ in range(2)
        ]
        cases[0].save()
        cases[0].close()
        cases[1].close(**cases[1].step)
        assert_same_bits(cases[0].memory, cases[1].memory, "state")
        assert_same_bits(cases[0].pages.memory, cases[1].pages.memory, "cache")


def test_tokens_without_slots():
    """A token without a state slot closes nothing, nor does one without a kv slot. With kv its row
    of the state stays, and a group of a later token reads what was there."""
    for name in ("slot_mapping", "kv_slot_mapping"):
        for fused in (False, True):
            case = Case(((0, 8), (4, 4)))
            case.arrays[name][[3, 5]] = -1
            case.check(fused)


def test_more_rows_than_slots():
    case = Case()
    for name in ("slot_mapping",):
        case.arrays[name] = case.arrays[name][:7]
    case.check(fused=True)
    case = Case()
    case.arrays["slot_mapping"] = case.arrays["slot_mapping"][:7]
    case.check(fused=False)


def test_strides():
    """Tables, ids and slots any stride apart; pages of the state backwards where it is read."""
    case = Case(padding=0)
    want = case.want_pages(case.memory)
    for name in ("req_id_per_token", "positions", "slot_mapping", "kv_slot_mapping"):
        case.arrays[name] = case.arrays[name].repeat(3)[::3]
    case.arrays["block_table"] = np.asfortranarray(case.table)
    wide = np.zeros((MAX_POS, 70), F32)
    wide[:, 3:67] = case.arrays["cos_sin"]
    case.arrays["cos_sin"] = wide[:, 3:67]
    before = case.pages.memory.copy()
    case.close()
    assert_same_bits(case.pages.memory, want)
    case.pages.memory[:] = before
    last = len(case.state) - 1
    case.arrays["state"] = case.state[::-1]
    case.arrays["block_table"] = np.where(case.table < 0, -1, last - case.table)
    case.close()
    assert_same_bits(case.pages.memory, want)


# --- values --------------------------------------------------------------------------------------


def test_special_values():
    """NaN, infinities, channels and groups without any score, scores far apart, zeros of both
    signs: the promised steps, in both ways of reading a state."""
    for fused in (False, True):
        for fmt in ("bfloat16", "fp8_index"):
            case = Case(((0, 24), (6, 10)), fmt=fmt)
            kv, score = case.step["kv"], case.step["score"]
            score[:4] = -np.inf
            score[8:16, 5] = -np.inf
            kv[9, 5], kv[13, 5] = np.nan, np.inf
            score[16, 7], kv[20, 9], score[24, 11] = np.nan, np.inf, np.inf
            score[26, 13], score[27, 15] = -np.nan, 3e38
            score[28:32, 16:30] *= F32(40)
            kv[28:32, 30:40] = -0.0
            kv[30, 40:50] = 1e30
            case.check(fused)


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.3, 3e38])
def test_eps(eps):
    case = Case()
    case.step["kv"][:5] = 0
    case.options["eps"] = eps
    case.check(fused=True)


def scale_of_values(pages: rows.Pages, slots) -> np.ndarray:
    """The scale of each value, 0 where values are bf16."""
    f = pages.format
    _, scales = pages.get(slots)
    if f.codes == "bf16" or f.scales == "cache":
        return np.full((len(slots), f.width), KV_SCALE if f.scales == "cache" else 0.0)
    tiles = f.width // f.tile if f.rope == 0 else (f.width - f.rope) // f.tile
    if f.scales in ("fp32", "any fp32"):
        found = np.ascontiguousarray(scales).view(F32)
    elif f.scales == "ue8m0":
        found = rows.ue8m0_decode(scales[:, :tiles])
    else:
        found = ref.e4m3_decode(np.ascontiguousarray(scales))
    found = np.repeat(found.astype(np.float64), f.tile, axis=1)
    return np.concatenate([found, np.zeros((len(slots), f.rope))], 1)


@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize("fmt", rows.FORMATS)
def test_accuracy(fmt, ratio):
    """The bounds, from fp64. One rounding to bf16 is up to 2^-8 of a value: half a unit in the last
    of 8 bits. (The contract says 2^-9, a slip: no single rounding keeps that.)"""
    case = Case(((0, 6 * ratio),), ratio=ratio, fmt=fmt, sbs=8)
    case.step["score"] *= F32(3)
    case.close(**case.step)
    groups = case.groups(case.want_memory())
    slots = np.array(list(groups))
    weight, table = case.arrays["norm_weight"], case.arrays["cos_sin"]
    exact = [compressor.exact_key(g, weight, table, EPS) for g in groups.values()]
    y, size = np.array([y for y, _ in exact]), np.array([[a] for _, a in exact])
    got = case.pages.values(slots, KV_SCALE).astype(np.float64)
    s = scale_of_values(case.pages, slots)
    f = case.pages.format
    bound = 1.02 * 2.0**-8 * np.abs(y) + 2.0**-18 * size
    coded = np.zeros(y.shape, bool)
    coded[:, : f.width - f.rope] = f.codes != "bf16"
    if f.codes == "e4m3":
        wide = (2.0**-4 + 1.02 * 2.0**-8) * np.abs(y) + 2.0**-10 * s + 2.0**-18 * size
    else:
        wide = (2.0**-2 + 2.0**-7) * np.abs(y) + 2.0**-2 * s + 2.0**-18 * size
        wide += 6 * 2.0**-10 if f.scales == "e4m3" else 0
    if f.scales == "cache":
        y = np.clip(y, -448 * KV_SCALE, 448 * KV_SCALE)
    assert ref.worst_ratio(got, y, np.where(coded, wide, bound)) <= 1


def test_large_scores_do_not_overflow():
    """Scores of 10^30 and their negatives: the softmax is that of their differences."""
    case = Case(((0, 8),), ratio=8, fmt="bfloat16", padding=0)
    case.step["ape"][:] = 0
    case.step["score"][:] = np.linspace(-1, 1, 8, dtype=F32)[:, None] * F32(1e30)
    case.close(**case.step)
    (slot,) = case.groups(case.want_memory())
    x = case.step["kv"][7].astype(np.float64)
    y = x / np.sqrt((x * x).mean() + EPS) * case.arrays["norm_weight"]
    got = case.pages.values([slot])[0]
    assert ref.worst_ratio(got[:448], y[:448], 1.02 * 2.0**-8 * np.abs(y[:448])) <= 1


# --- places of a group ---------------------------------------------------------------------------


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


# --- vectors by hand -----------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_index"])
def test_a_vector_by_hand(fmt, fused):
    """The contract's: r 4, equal scores, kv of positions 0 to 3 is 1 on the first D channels and 9
    on the others, of 4 to 7 it is 9 and 3. At p 3 the pool is 9, at p 7 (4 * 1 + 4 * 3) / 8 = 2. An
    eps of 5 shows them: x / sqrt(x**2 + 5)."""
    case = Case(((0, 8),), fmt=fmt, padding=0)
    dim = len(case.arrays["norm_weight"])
    case.step["score"][:] = 3
    case.step["ape"][:] = -1
    case.step["kv"][:4, :dim], case.step["kv"][:4, dim:] = 1, 9
    case.step["kv"][4:, :dim], case.step["kv"][4:, dim:] = 9, 3
    case.arrays["norm_weight"][:] = 64
    case.arrays["cos_sin"][:] = np.repeat([1, 0], 32)
    case.options["eps"] = 5.0
    if fused:
        case.close(**case.step)
    else:
        case.save()
        case.close()
    slots = case.arrays["kv_slot_mapping"]
    got = case.pages.values(slots[[3, 7]])
    want = 64 * np.array([9 / np.sqrt(86), 2 / 3])
    assert (got == got[:, :1]).all()
    exact = ref.to_f32(ref.to_bf16(want.astype(F32))) if fmt == "bfloat16" else [64, 44]
    assert got[:, 0].tolist() == list(exact)


def test_positions_of_rope():
    """A row is turned to the position that begins its group, whatever its last position is."""
    case = Case(((8, 4),), fmt="bfloat16", padding=0)
    case.arrays["cos_sin"][:] = np.nan
    case.arrays["cos_sin"][8] = np.repeat([0, 1], 32)
    case.arrays["norm_weight"][:] = 1
    case.step["kv"][:] = 2
    case.state[:] = 2
    case.close(**case.step)
    got = case.pages.values(case.arrays["kv_slot_mapping"][[3]])[0]
    assert got[446:452].tolist() == [1, 1, -1, 1, -1, 1]


# --- bad calls -----------------------------------------------------------------------------------


def refused(case: Case, text: str, error=ValueError, *, save=False, fused=False, **options) -> None:
    """The call raises this text, and writes nothing."""
    before = case.memory.tobytes(), case.pages.memory.tobytes()
    op = "save_partial_states" if save else "compress_norm_rope_store"
    with pytest.raises(error) as info:
        if save:
            case.save(**options)
        else:
            case.close(**(case.step if fused else {}), **options)
    assert str(info.value).startswith(f"{op}: {text}"), info.value
    assert (case.memory.tobytes(), case.pages.memory.tobytes()) == before


def changed(case: Case, **arrays) -> Case:
    for name, x in arrays.items():
        (case.step if name in case.step else case.arrays)[name] = x
    return case


def test_bad_widths():
    """c is 2 where r is 4, and only there."""
    wide = np.zeros((20, 1024), F32)
    state = np.zeros((4, 4, 2048), F32)
    case = changed(Case(ratio=2), kv=wide, score=wide, ape=np.zeros((2, 1024), F32))
    refused(
        case, "`ape` must have 128 or 512 columns for a ratio of 2 (its rows), got 1024", save=True
    )
    case = changed(Case(), kv=wide[:, :512], score=wide[:, :512], ape=np.zeros((4, 512), F32))
    refused(
        case, "`ape` must have 256 or 1024 columns for a ratio of 4 (its rows), got 512", save=True
    )
    refused(Case(ratio=2), "`state` must have shape [any, any, 2048], got [", ratio=4)
    case = changed(Case(), state=state[:, :, :1024])
    refused(case, "`state` must have shape [any, any, 2048], got [4, 4, 1024]")
    refused(case, "`state` must have shape [any, any, 2048], got [4, 4, 1024]", save=True)
    case = changed(Case(), state=state[:, :0])
    refused(case, "`state` must have pages of at least 1 row, got 0")
    refused(case, "`state` must have pages of at least 1 row, got 0", save=True)
    weight = np.zeros(128, F32)
    refused(changed(Case(), norm_weight=weight), "`state` must have shape [any, any, 512], got [")
    case = changed(Case(fmt="fp8_index"), norm_weight=np.zeros(127, F32))
    refused(case, "`norm_weight` must have 512 weights, or 128 for rows of an indexer, got 127")
    case = changed(Case(fmt="fp8_index"), cache=Case().pages.cache)
    refused(case, "`cache` must be of a format that this operator takes (")
    ape = np.zeros((3, 1024), F32)
    refused(changed(Case(), ape=ape), "`ape` must have shape [4, 1024], got [3, 1024]", fused=True)
    case = changed(Case(), ape=np.zeros((0, 1024), F32))
    refused(case, "`ape` must have 1 to 2147483647 rows", save=True)


def test_bad_arguments():
    refused(Case(), "`ape` must be given, got none", kv=np.zeros((18, 1024), F32))  # fmt: skip
    refused(Case(), "`kv` must be given, got none", ape=np.zeros((4, 1024), F32))  # fmt: skip
    case = Case()
    case.step["score"] = case.step["score"].astype(ref.BF16)
    refused(case, "`score` must be float32, got bfloat16", TypeError, fused=True)
    refused(case, "`score` must be float32, got bfloat16", TypeError, save=True)
    case.step["kv"] = case.step["kv"].astype(np.float16)
    refused(case, "`kv` must be bfloat16 or float32, got float16", TypeError, save=True)
    refused(Case(), "`ratio` must be 1 to 2147483647, got 0", ratio=0)
    refused(Case(), "`eps` must be finite and at least 0, got -1", eps=-1.0)
    refused(Case(), "`kv_scale` must be 1 for format fp8_v4", kv_scale=2.0)
    refused(Case(fmt="fp8_e4m3"), "`kv_scale` must be a positive normal float32", kv_scale=0.0)
    refused(Case(), "`kv_format` must be", kv_format="fp5")
    cases = (Case(fmt="fp8_v41"), Case(fmt="fp4_v41_split"))
    for case in cases:
        refused(case, "`cache` must come with kv_format=", kv_format=None)
    wide = np.zeros((2, 4, 656), np.uint8)
    refused(changed(Case(), cache=wide), "`cache` must be of a format that this operator takes (")
    short = Case().arrays["positions"][:3]
    refused(changed(Case(), positions=short), "`positions` must have shape [>= 18], got [3]")
    refused(changed(Case(), positions=short), "`positions` must have shape [>= 18]", save=True)
    refused(changed(Case(), kv_slot_mapping=short), "`kv_slot_mapping` must have shape [>= 18]")
    ids = Case().arrays["req_id_per_token"]
    refused(changed(Case(), req_id_per_token=ids[:3]), "`req_id_per_token` must have shape [>= 18]")
    refused(
        changed(Case(), slot_mapping=ids.astype(F32)),
        "`slot_mapping` must be int32 or int64",
        TypeError,
    )
    refused(changed(Case(), cos_sin=angles()[:, :32]), "`cos_sin` must have shape [any, 64]")
    refused(
        changed(Case(), cos_sin=angles().astype(np.float64)), "`cos_sin` must be float32", TypeError
    )
    kv = Case().step["kv"][:3]
    refused(changed(Case(), kv=kv), "`kv` must have shape [>= 18, 1024], got [3, 1024]", fused=True)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("fused", [False, True])
def test_bad_values_write_nothing(fused):
    for position in (MAX_POS, -1, 2**62):
        case = Case()
        case.arrays["positions"][17] = position
        rule = f"`positions` must be rows of `cos_sin`, which has 800, got {position} for token 17"
        refused(case, rule, fused=fused)
    for name, array in (("slot_mapping", "state"), ("kv_slot_mapping", "cache")):
        for slot in (10**4, 2**40):
            case = Case()
            case.arrays[name][2] = slot
            refused(case, f"`{name}` must be below the ", fused=fused)
            with pytest.raises(ValueError, match=rf"slots of `{array}`, got {slot} at token 2"):
                case.close()
    for req in (-1, 3, 2**31 - 1):
        case = Case(((0, 8),), padding=0)
        case.arrays["req_id_per_token"][7] = req
        req_text = f"(0 to 0), got {req} at token 7"
        refused(
            case, f"`req_id_per_token` must name a row of `block_table` {req_text}", fused=fused
        )
    case = Case(((0, 8),), padding=0)
    case.table[0, 1] = 99
    refused(
        case,
        "`block_table` must name pages of `state` (0 to 3) or be negative, "
        "got 99 for request 0, block 1",
        fused=fused,
    )


@pytest.mark.usefixtures("checked")
def test_bad_values_of_states_write_nothing():
    for position in (-1, -(2**62)):
        case = Case()
        case.arrays["positions"][17] = position
        refused(case, f"`positions` must be >= 0, got {position} for token 17", save=True)
    case = Case()
    case.arrays["slot_mapping"][2] = 10**4
    refused(case, "`slot_mapping` must be below the ", save=True)


def test_values_that_nothing_reads():
    """Request ids and pages of tokens that close no group, and of positions that no group has."""
    case = Case(((0, 6), (9, 2)), padding=0)
    closing = case.arrays["kv_slot_mapping"] >= 0
    want = case.want_memory(), case.want_pages(case.want_memory())
    case.arrays["req_id_per_token"][~closing] = 77
    if not device.ON_CUDA:  # a GPU needs to know the neighbours of a request
        case.close(**case.step)
        assert_same_bits(case.memory, want[0])
        assert_same_bits(case.pages.memory, want[1])
    else:
        case.save()
        case.close()
        assert_same_bits(case.pages.memory, want[1])


def test_overlaps():
    case = Case()
    refused(
        changed(case, kv=case.memory.reshape(-1, 2048)[:18, :1024]),
        "`state` must not overlap `kv`",
        fused=True,
    )
    refused(case, "`state` must not overlap `kv`", save=True)
    flat = Case(fmt="bfloat16", layout="flat")
    weight = flat.pages.cache[0]
    refused(changed(flat, norm_weight=weight), "`cache` must not overlap `norm_weight`")


@pytest.mark.skipif(device.DEVICE != "cpu", reason="copies are never read-only")
def test_a_read_only_state():
    """The state is written where kv is given, else it is not."""
    case = Case()
    case.state.flags.writeable = False
    with pytest.raises(BufferError, match=r"`state` must be writable, got a read-only"):
        case.close(**case.step)
    want = case.want_pages(case.memory)
    case.close()
    assert_same_bits(case.pages.memory, want)
