"""fused_qnorm_rope_kv_insert (csrc/cpu/norm, csrc/cuda/norm): every byte of queries and rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import device
import numpy as np
import operators
import pytest
import reference as ref
import reference_norm as norm
import row_formats as rows
from cases import angles
from helpers import Guarded, assert_same_bits
from library import sparse_mla

F32 = np.float32
EPS = 1e-6
KV_SCALE = 0.37  # scale of caches that have one
MAX_POS = 50


def heavy(rng, *shape: int) -> np.ndarray:
    """Heavy-tailed heads of all sizes."""
    size = np.exp2(rng.integers(-20, 20, (*shape[:-1], 1)))
    return ref.to_bf16((rng.standard_t(2, shape) * size).astype(F32))


@dataclass
class Case:
    """The arguments of a call."""

    T: int
    H: int
    Ts: int | None = None  # all tokens
    fmt: str = "fp8_v4"
    layout: str = "paged"
    seed: int = 0
    position_dtype: Any = np.int64
    slot_dtype: Any = np.int64
    pages: rows.Pages = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.seed, self.T, self.H])
        count = self.T if self.Ts is None else self.Ts
        num_pages = count // 5 + 2
        self.q = heavy(rng, self.T, self.H, 512)
        self.kv = rows.random_keys(rng, self.T, 512).view(ref.BF16)
        self.positions = rng.integers(0, MAX_POS, self.T).astype(self.position_dtype)
        self.table = angles()
        self.pages = rows.Pages(self.fmt, self.layout, pages=num_pages)
        self.slots = rng.permutation(num_pages * 5)[:count].astype(self.slot_dtype)
        self.slots[1::4] = -1

    @property
    def scale(self) -> dict:
        return {"kv_scale": KV_SCALE} if self.pages.format.scales == "cache" else {}

    def run(self, op=None, **options):
        op = op or sparse_mla.fused_qnorm_rope_kv_insert
        options = {"eps": EPS} | self.pages.options | self.scale | options
        arrays = (self.q, self.kv, self.positions, self.table, self.pages.cache, self.slots)
        return op(*arrays, **options)

    def want(self, eps=EPS) -> np.ndarray:
        """The queries in fp32, before their one rounding."""
        return norm.queries(self.q, self.positions, self.table, eps)

    def check(self, **options):
        """Runs the call; the whole memory of the cache must be as the reference leaves it."""
        before, kv = self.pages.memory.copy(), self.kv.tobytes()
        got, cache = self.run(**options)
        assert cache is self.pages.cache
        assert self.kv.tobytes() == kv
        after = self.pages.memory.copy()
        self.pages.memory[:] = before
        num_slots = len(self.slots)
        bits = norm.key_bits(self.kv[:num_slots], self.positions, self.table)
        encoded = self.pages.format.encode(bits, options.get("kv_scale", KV_SCALE))
        self.pages.put(self.slots, *encoded)
        assert_same_bits(after, self.pages.memory, f"{self.fmt}, {self.layout}")
        return got


def check_all(case: Case, extra_heads: int = 0) -> None:
    """q in place, into an array with more heads, and as e4m3, new and given."""
    want, q = case.want(), case.q.copy()
    bits = ref.bf16_encode(want)
    shape = (case.T, case.H + extra_heads, 512)
    out = Guarded(shape, ref.BF16, row_gap=8)
    got = case.check(q_out=out.array)
    assert got is out.array
    assert_same_bits(case.q, q, "q stays")
    padded = np.zeros(shape, np.uint16)
    padded[:, : case.H] = bits
    assert_same_bits(ref.bits16(out.check()), padded, "q_out")
    codes = np.zeros(shape, np.uint8)
    with np.errstate(over="ignore"):
        codes[:, : case.H] = ref.e4m3_encode(want * F32(3.7))
    bytes_out = Guarded(shape, np.uint8, row_gap=3)
    got = case.check(q_out=bytes_out.array, q_scale_inv=3.7)
    assert got is bytes_out.array
    assert_same_bits(bytes_out.check(written=False), codes, "codes")
    new = case.check(q_scale_inv=np.full((1,), 3.7, F32))
    assert (type(new), new.shape, new.dtype.itemsize) == (np.ndarray, q.shape, 1)
    assert_same_bits(np.asarray(new).view(np.uint8), codes[:, : case.H], "new codes")
    assert_same_bits(case.q, q, "q stays")
    got = case.check()
    assert got is case.q
    assert_same_bits(ref.bits16(case.q), bits, "in place")


@pytest.mark.parametrize(("T", "H"), [(1, 1), (1, 64), (2, 3), (17, 8), (5, 127), (3, 128)])
@pytest.mark.parametrize("extra_heads", [0, 1, 4])
def test_shapes(T, H, extra_heads):
    check_all(Case(T, H), extra_heads)


@pytest.mark.parametrize(
    ("fmt", "layout"), [(name, x) for name in rows.KEY_FORMATS for x in rows.layouts_of(name)]
)
def test_formats(fmt, layout):
    check_all(Case(9, 2, fmt=fmt, layout=layout))


@pytest.mark.parametrize("fmt", rows.KEY_FORMATS)
def test_rows_are_those_of_the_two_calls(fmt):
    """The bytes of quantize_and_insert_k_cache of the turned key."""
    case, other = (Case(70, 2, fmt=fmt) for _ in range(2))
    case.run()
    k = norm.key_bits(other.kv, other.positions, other.table).view(ref.BF16)
    sparse_mla.quantize_and_insert_k_cache(
        k, other.pages.cache, other.slots, **other.pages.options, **other.scale
    )
    assert_same_bits(case.pages.memory, other.pages.memory)


@pytest.mark.parametrize("position_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("slot_dtype", [np.int32, np.int64])
def test_integers(position_dtype, slot_dtype):
    check_all(Case(9, 2, position_dtype=position_dtype, slot_dtype=slot_dtype))


@pytest.mark.parametrize(("T", "Ts"), [(0, 0), (9, 0), (9, 5), (100, 70), (3, 3)])
def test_fewer_slots_than_tokens(T, Ts):
    """The other tokens have queries only."""
    check_all(Case(T, 2, Ts))


def test_q_out_decides_the_number_of_tokens():
    """q, kv and positions may have more."""
    case = Case(9, 2, 4)
    want = ref.bf16_encode(case.want())
    for count in (4, 7):
        out = Guarded((count, 2, 512), ref.BF16)
        case.check(q_out=out.array)
        assert_same_bits(ref.bits16(out.check()), want[:count])
    q_out = np.zeros((3, 2, 512), ref.BF16)
    with pytest.raises(ValueError, match=r"must have at most an entry per token \(3\), got 4"):
        case.run(q_out=q_out)
    case.q = case.q[:8]
    with pytest.raises(ValueError, match=r"`q_out` must have at most as many tokens as `q` \(8\)"):
        case.run(q_out=np.zeros((9, 2, 512), ref.BF16))
    case.kv = case.kv[:7]
    with pytest.raises(ValueError, match=r"`kv` must have shape \[>= 8, 512\], got \[7, 512\]"):
        case.run()


def test_q_out_may_be_q():
    case, other = Case(9, 3), Case(9, 3)
    got = case.check(q_out=case.q)
    assert got is case.q
    other.run()
    assert_same_bits(case.q, other.q)


@pytest.mark.parametrize("shift", [0, 1, 4, 8])
def test_columns_of_one_buffer(shift):
    """q and kv are columns of a projection's result, off a multiple of 16 bytes or not. In place,
    all other columns stay."""
    case = Case(9, 3)
    buffer = Guarded((9, 4 * 512 + 24), ref.BF16)
    wide = buffer.array
    wide[:] = ref.to_bf16(np.full(wide.shape, 7, F32))
    q = wide[:, shift : shift + 3 * 512].reshape(9, 3, 512)
    assert np.shares_memory(q, wide)
    kv = wide[:, shift + 3 * 512 + 5 :][:, :512]
    q[:], kv[:] = case.q, case.kv
    case.q, case.kv = q, kv
    want = wide.copy()
    want[:, shift : shift + 3 * 512] = (
        ref.bf16_encode(case.want()).view(ref.BF16).reshape(9, 3 * 512)
    )
    case.check()
    assert_same_bits(buffer.check(written=False), want)


def test_strides():
    """Heads before tokens, tokens backwards, one token for all, columns of a wider table."""
    case = Case(9, 4)
    head_major = np.ascontiguousarray(case.q.swapaxes(0, 1)).swapaxes(0, 1)
    wide = np.zeros((MAX_POS, 70), F32)
    wide[:, 3:67] = case.table
    positions, slots = case.positions.repeat(2)[::2], case.slots[::-1].copy()[::-1]
    for q in (head_major, case.q[::-1], case.q[:, ::-1], np.broadcast_to(case.q[:1], (9, 4, 512))):
        for kv in (case.kv[::-1], np.broadcast_to(case.kv[:1], (9, 512))):
            one = Case(9, 4)
            one.q, one.kv, one.positions = q, kv, positions
            one.slots, one.table = slots, wide[:, 3:67]
            out = np.zeros((4, 9, 512), ref.BF16).swapaxes(0, 1)
            one.check(q_out=out)
            assert_same_bits(ref.bits16(np.ascontiguousarray(out)), ref.bf16_encode(one.want()))
    case.q = head_major
    want = ref.bf16_encode(case.want())
    assert case.check() is head_major
    assert_same_bits(ref.bits16(np.ascontiguousarray(head_major)), want)


def test_accuracy():
    """The bound: one rounding to bf16 (up to 2^-8 of the value), and the steps in fp32. An e4m3
    code is that of a value within the bound of these steps."""
    rng = np.random.default_rng(8)
    for eps in (0.0, 1e-6, 0.3):
        case = Case(64, 8)
        case.q = ref.to_bf16(rng.standard_t(3, case.q.shape).astype(F32))
        want, m = norm.exact_queries(case.q, case.positions, case.table, eps)
        codes = case.run(eps=eps, q_scale_inv=2.0)[0]
        got = ref.to_f32(case.run(eps=eps)[0]).astype(np.float64)
        steps = 0.02 * 2.0**-8 * np.abs(want) + 2.0**-20 * m
        assert ref.worst_ratio(got, want, 2.0**-8 * np.abs(want) + steps) <= 1
        values = ref.e4m3_decode(np.asarray(codes).view(np.uint8))
        low, high = (
            ref.e4m3_decode(ref.e4m3_encode((2 * (want + sign * steps)).astype(F32)))
            for sign in (-1, 1)
        )
        assert ((low <= values) & (values <= high)).all()
        assert (np.abs(values - 2 * want) <= 2.0**-4 * np.abs(2 * want) + 2.0**-9).all()


@pytest.mark.parametrize("eps", [0.0, 1e-6, 3e38])
def test_extremes(eps):
    """Zeros, NaN of both signs, infinities, squares that vanish or overflow: the fp32 steps."""
    case = Case(12, 2)
    q = np.zeros((12, 2, 512), F32)
    q[1, 0, 5], q[2, 0, 500], q[3, 1, 0], q[3, 1, 9] = np.nan, np.inf, -np.inf, 1
    q[4], q[5], q[6, 0, 450], q[7] = 1e-30, 1e30, 3e38, 1e-19
    q[8, :, ::2], q[8, :, 1::2] = -0.0, 1e-40
    q[9, 0, 448:450], q[10, 1, 511] = (np.inf, 1), -np.nan
    case.q = ref.to_bf16(q)
    case.table[case.positions[9], [0, 32]] = 0, 1
    want = case.want(eps)
    with np.errstate(over="ignore"):
        codes = ref.e4m3_encode(want * F32(2.0**-126))
    got = case.check(eps=eps, q_scale_inv=2.0**-126)
    assert_same_bits(np.asarray(got).view(np.uint8), codes)
    case.check(eps=eps)
    assert_same_bits(ref.bits16(case.q), ref.bf16_encode(want))
    assert np.isnan(ref.to_f32(case.q)[1, 0]).all(), "a NaN reaches its head"
    assert not np.isnan(ref.to_f32(case.q)[1, 1]).any() or eps == 0, "and no other"


def test_codes_saturate():
    case = Case(3, 2)
    case.q = ref.to_bf16(np.ones((3, 2, 512), F32))
    case.table[:] = np.repeat([1, 0], 32)
    for scale, code in ((1.0, 0x38), (448.0, 0x7E), (3e38, 0x7E), (2.0**-9, 0x01), (2.0**-126, 0)):
        got = case.run(q_scale_inv=scale, eps=0.0)[0]
        assert set(np.asarray(got).view(np.uint8).flat) == {code}


def test_a_vector_by_hand():
    """The key of the contract's fp8_v4 vector, turned by a quarter of a turn in its first pair:
    (1.5, 2) becomes (-2, 1.5). A head of threes becomes ones."""
    case = Case(1, 1)
    kv = np.zeros((1, 512), F32)
    kv[0, [0, 1, 64, 65, 128, 448, 449]] = 448, -1, 450, 3, 1e-6, 1.5, 2
    case.kv, case.q = ref.to_bf16(kv), ref.to_bf16(np.full((1, 1, 512), 3, F32))
    case.table[:] = np.repeat([1, 0], 32)
    case.table[:, [0, 32]] = 0, 1
    case.slots = np.array([3])
    case.run(eps=0.0)
    data, scales = case.pages.get([3])
    want = np.zeros(576, np.uint8)
    want[[0, 1, 64, 65, 128]] = 0x7E, 0xB8, 0x76, 0x3C, 0x48
    want[448:452] = 0x00, 0xC0, 0xC0, 0x3F
    assert_same_bits(data[0], want)
    assert scales[0].tolist() == [127, 128, 105, 105, 105, 105, 105, 0]
    head = ref.to_f32(case.q)[0, 0]
    assert head[448:450].tolist() == [-1, 1]
    assert (np.delete(head, 448) == 1).all()


def test_many_tokens():
    """Many threads or warps at once."""
    case = Case(2100, 5)
    want = ref.bf16_encode(case.want())
    case.check()
    assert_same_bits(ref.bits16(case.q), want)


def test_the_last_token_of_a_slot_wins():
    case = Case(70, 1)
    case.slots = np.array([4, 4] + [-1] * 66 + [3, 4])
    case.run()
    bits = norm.key_bits(case.kv, case.positions, case.table)
    data, scales = case.pages.format.encode(bits[[69, 68]])
    got = case.pages.get([4, 3])
    assert_same_bits(got[1][1], scales[1])
    assert_same_bits(got[0][1], data[1])
    if not device.ON_CUDA:  # a GPU sees the next 31 tokens only
        assert_same_bits(got[0][0], data[0])


# --- bad calls -----------------------------------------------------------------------------------


def refused(case: Case, text: str, error=ValueError, **options) -> None:
    """The call raises this text, and writes nothing."""
    arrays = (case.q, case.pages.memory)
    before = [np.ascontiguousarray(x).tobytes() for x in arrays]
    with pytest.raises(error) as info:
        case.run(**options)
    assert str(info.value).startswith(f"fused_qnorm_rope_kv_insert: {text}"), info.value
    assert [np.ascontiguousarray(x).tobytes() for x in arrays] == before


def changed(case: Case, **arrays) -> Case:
    for name, x in arrays.items():
        setattr(case, name, x)
    return case


def test_bad_arguments():
    wrong = np.zeros((3, 2, 512), F32)
    codes = np.zeros((3, 2, 512), np.uint8)
    bf16 = np.zeros((3, 2, 512), ref.BF16)
    case = Case(3, 2)
    refused(case, "`q_out` must be bfloat16, got uint8", TypeError, q_out=codes)
    refused(
        case,
        "`q_out` must be uint8 or float8_e4m3fn, got bfloat16",
        TypeError,
        q_out=bf16,
        q_scale_inv=1.0,
    )
    refused(case, "`q_out` must have shape [any, >= 2, 512], got [3, 1, 512]", q_out=bf16[:, :1])
    refused(case, "`eps` must be finite and at least 0, got -1", eps=-1)
    refused(case, "`kv_scale` must be 1 for format fp8_v4", kv_scale=2.0)
    for value in (-1.0, np.nan, np.inf, 1e-39):
        refused(case, "`q_scale_inv` must be a positive normal float32", q_scale_inv=value)
    refused(case, "`q_scale_inv` must be a positive normal float32, got 0", q_scale_inv=0.0)
    refused(case, "`q_scale_inv` must have one value", q_scale_inv=np.ones(2, F32))
    refused(case, "`kv_format` must be", kv_format="fp5")
    refused(changed(Case(3, 2), q=wrong), "`q` must be bfloat16, got float32", TypeError)
    refused(changed(Case(3, 2), q=bf16[:, :, :448]), "`q` must have shape [any, any, 512]")
    refused(changed(Case(3, 2), q=bf16[:, :0]), "`q` must have")
    refused(changed(Case(3, 2), kv=wrong[:, 0]), "`kv` must be bfloat16, got float32", TypeError)
    refused(changed(Case(3, 2), kv=bf16[:, 0, :500]), "`kv` must have shape [>= 3, 512]")
    refused(
        changed(Case(3, 2), positions=np.zeros(2, np.int64)),
        "`positions` must have shape [>= 3], got [2]",
    )
    refused(
        changed(Case(3, 2), table=angles().astype(np.float64)),
        "`rope_table` must be float32",
        TypeError,
    )
    refused(changed(Case(3, 2), table=angles()[:, :32]), "`rope_table` must have shape [any, 64]")
    refused(
        changed(Case(3, 2), slots=np.zeros(4, np.int64)),
        "`slot_mapping` must have at most an entry per token (3), got 4",
    )
    refused(
        changed(Case(3, 2), slots=np.zeros(3, F32)),
        "`slot_mapping` must be int32 or int64",
        TypeError,
    )
    index = Case(3, 2, fmt="fp8_index")
    refused(index, "`kv_cache` must be of a format that this operator takes (")


@pytest.mark.parametrize("fmt", ["fp8_v41", "fp4_v41"])
def test_formats_of_one_size_need_a_name(fmt):
    refused(Case(3, 2, fmt=fmt), "`kv_cache` must come with kv_format=", kv_format=None)


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.usefixtures("checked")
def test_bad_values_write_nothing(out):
    """Positions outside the table, also of tokens without a slot, and slots past the end."""
    options = {"q_out": np.zeros((9, 2, 512), ref.BF16)} if out else {}
    for position in (MAX_POS, -1, 2**62):
        case = Case(9, 2, 4)
        case.positions[8] = position
        rule = f"`positions` must be rows of `rope_table`, which has 50, got {position} for token 8"
        refused(case, rule, **options)
    for slot in (10, 2**40):
        case = Case(9, 2, 4)
        case.slots[2] = slot
        refused(
            case, f"`slot_mapping` must be below the 10 slots of `kv_cache`, got {slot}", **options
        )
    assert not out or not options["q_out"].view(np.uint16).any()


def test_overlaps():
    """q_out is q itself, or shares nothing with an input; the cache shares nothing."""
    buffer = ref.to_bf16(np.ones((3, 4, 512), F32))
    case = changed(Case(3, 2), q=buffer[:, :2])
    refused(case, "`q_out` must be the whole of or not overlap `q`", q_out=buffer[:, 1:3])
    refused(case, "`q_out` must be the whole of or not overlap `q`", q_out=buffer[:, :3])
    refused(changed(case, kv=buffer[:, 1]), "`q` must not overlap `kv`")
    refused(changed(case, kv=buffer[:, 2]), "`q_out` must not overlap `kv`", q_out=buffer[:, 2:])
    backwards = changed(Case(3, 2), q=buffer[::-1, :2])
    refused(backwards, "`q` must have positive strides (it is written)")
    refused(backwards, "`q_out` must be the whole of or not overlap `q`", q_out=buffer[:, :2])
    case = Case(3, 2, fmt="bfloat16", layout="flat")
    refused(changed(case, kv=case.pages.cache[:3]), "`kv_cache` must not overlap `kv`")


@pytest.mark.skipif(device.ON_CUDA, reason="memory of a GPU is never read-only")
def test_read_only_queries():
    """q is written where neither q_out nor q_scale_inv is given, else it is not."""
    case = Case(3, 2)
    case.q.flags.writeable = False
    with pytest.raises(BufferError, match=r"`q` must be writable, got a read-only"):
        case.run()
    case.check(q_out=np.zeros((3, 2, 512), ref.BF16))
    case.check(q_scale_inv=1.0)


def test_a_good_call_gives_the_reference():
    """The good call of operators.py, which the tests of frameworks and GPUs run."""
    call = operators.GOOD_CALLS["fused_qnorm_rope_kv_insert"]()
    want = norm.queries(call.args["q"], call.args["positions"], call.args["rope_table"], 1e-6)
    q_out, cache = call.run(sparse_mla)
    assert_same_bits(ref.bits16(q_out[:, :4]), ref.bf16_encode(want))
    assert not ref.bits16(q_out[:, 4:]).any()
    assert cache is call.args["kv_cache"]
    assert cache.any()
