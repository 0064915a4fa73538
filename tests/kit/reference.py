"""The fp64 NumPy reference: every operator of the contract, straight from its formula.

It shares nothing with csrc. bf16 and e4m3 are decoded and encoded here by bit arithmetic; ml_dtypes
only names the dtype of arrays that hold such bits. Planning (splits, chunks, metadata) is in
`reference_plan.py`, inputs are in `cases.py`.

Shapes use the contract's letters: T tokens, H heads, K indices per token, R requests, W pages per
request, D = 576 values of a key, of which the first V = 512 are its value.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)

V_DIM = 512
ROPE_DIM = 64
HEAD_DIM = V_DIM + ROPE_DIM
TILE = 128
FP8_ROW_BYTES = 656
FLT_MIN = np.float32(2.0**-126)
FLT_MAX = np.finfo(np.float32).max
E4M3_MAX = np.float32(448)


# --- numbers -------------------------------------------------------------------------------------


def bits16(x: np.ndarray) -> np.ndarray:
    """The uint16 patterns of a bf16 array, strides kept."""
    return x if x.dtype == np.uint16 else x.view(np.uint16)


def bf16_decode(bits: np.ndarray) -> np.ndarray:
    """uint16 patterns -> float32, exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_encode(x: np.ndarray) -> np.ndarray:
    """float32 -> uint16 patterns, nearest even, overflow to inf, NaN to a quiet NaN of its sign."""
    word = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    quiet = (word >> np.uint32(16)) | np.uint32(0x40)
    return np.where(nan, quiet, rounded).astype(np.uint16)


def _e4m3_table() -> np.ndarray:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    subnormal = np.ldexp(mantissa.astype(np.float64), -9)
    normal = np.ldexp(8.0 + mantissa, exponent - 10)
    value = np.where(exponent == 0, subnormal, normal)
    value[(code & 127) == 127] = np.nan
    return np.where(code & 128, -value, value).astype(np.float32)


E4M3_VALUES = _e4m3_table()
_E4M3_MIDPOINTS = (E4M3_VALUES[:126].astype(np.float64) + E4M3_VALUES[1:127]) / 2


def e4m3_decode(codes: np.ndarray) -> np.ndarray:
    """e4m3 bytes -> float32, exact."""
    return E4M3_VALUES[codes.view(np.uint8) if codes.dtype != np.uint8 else codes]


def nearest_e4m3(x: np.ndarray) -> np.ndarray:
    """satE4M3: float32 -> bytes, nearest even, saturated to +-448, NaN -> 0x7F with its sign."""
    magnitude = np.where(np.isnan(x), np.float32(0), np.abs(x)).astype(np.float64)
    code = np.searchsorted(_E4M3_MIDPOINTS, magnitude, side="left")
    tie = (code < 126) & (magnitude == _E4M3_MIDPOINTS[np.minimum(code, 125)])
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    code = np.where(np.isnan(x), 127, code)
    return (code | np.where(np.signbit(x), 128, 0)).astype(np.uint8)


_E4M3_OF_BF16 = nearest_e4m3(bf16_decode(np.arange(1 << 16)))


def e4m3_encode(x: np.ndarray) -> np.ndarray:
    """nearest_e4m3 by a table, because its search takes 30 times as long. A float32 becomes a bf16
    whose last bit is also set where bits were cut off. The numbers midway between two of e4m3 are
    bf16 whose last bit is 0, so the bf16 lies on the same side of each as the float32."""
    word = np.asarray(x, np.float32).view(np.uint32)
    cut = (word & np.uint32(0xFFFF)) != 0
    return _E4M3_OF_BF16[(word >> np.uint32(16)) | cut]


def to_f32(x: np.ndarray) -> np.ndarray:
    """bf16 (or its uint16 patterns), fp16, fp32 -> float32, exact."""
    if x.dtype == np.uint16 or x.dtype == BF16:
        return bf16_decode(bits16(x))
    return x.astype(np.float32)


def to_bf16_bits(x: np.ndarray) -> np.ndarray:
    """Any input dtype rounded to bf16 patterns; bf16 itself is copied."""
    return bits16(x).copy() if x.dtype in (np.uint16, BF16) else bf16_encode(to_f32(x))


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Numbers of any dtype, by way of float32, rounded to an array of bfloat16."""
    return bf16_encode(x).view(BF16)


# --- caches --------------------------------------------------------------------------------------


def is_fp8(kv: np.ndarray) -> bool:
    return kv.shape[-1] == FP8_ROW_BYTES


def num_slots(kv: np.ndarray) -> int:
    return kv.shape[0] if kv.ndim == 2 else kv.shape[0] * kv.shape[1]


def raw_rows(kv: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """The stored rows of `slots`, [n, 656] bytes or [n, 576] bf16 patterns, of any layout."""
    if kv.ndim == 4:
        kv = kv[:, :, 0]
    slots = np.asarray(slots, np.int64)
    rows = kv[slots] if kv.ndim == 2 else kv[slots // kv.shape[1], slots % kv.shape[1]]
    return rows.view(np.uint8) if is_fp8(kv) else bits16(rows)


def split_fp8_row(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[n, 656] bytes -> e4m3 bytes [n, 512], fp32 scales [n, 4], bf16 RoPE patterns [n, 64]."""
    rows = np.ascontiguousarray(rows)
    return rows[:, :512], rows[:, 512:528].view(np.float32), rows[:, 528:].view(np.uint16)


def decode_rows(kv: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """float64 [n, 576]: e4m3 times fp32 scale exactly, no rounding of the dequantised key."""
    rows = raw_rows(kv, slots)
    if not is_fp8(kv):
        return bf16_decode(rows).astype(np.float64)
    nope, scales, rope = split_fp8_row(rows)
    value = e4m3_decode(nope).astype(np.float64) * np.repeat(scales.astype(np.float64), TILE, 1)
    return np.concatenate([value, bf16_decode(rope).astype(np.float64)], 1)


def dequantize_rows(rows: np.ndarray) -> np.ndarray:
    """[n, 656] bytes -> float32 [n, 576]; the product in fp32."""
    nope, scales, rope = split_fp8_row(rows)
    with np.errstate(over="ignore", invalid="ignore"):
        value = e4m3_decode(nope) * np.repeat(scales, TILE, 1)
    return np.concatenate([value, bf16_decode(rope)], 1)


def upconvert_rows(rows: np.ndarray) -> np.ndarray:
    """[n, 656] bytes -> bf16 patterns [n, 576]: bf16(e4m3 * scale), RoPE copied."""
    _, _, rope = split_fp8_row(rows)
    return np.concatenate([bf16_encode(dequantize_rows(rows)[:, :V_DIM]), rope], 1)


def quantize_rows(kv_c: np.ndarray, k_pe: np.ndarray, has_one_scale=False) -> np.ndarray:
    """bf16 patterns [n, 512] and [n, 64] -> fp8_ds_mla rows [n, 656], byte for byte; fp8_token rows
    have one scale."""
    value = bf16_decode(kv_c).reshape(-1, V_DIM // TILE, TILE)
    magnitude = np.where(np.isnan(value), np.float32(0), np.minimum(np.abs(value), FLT_MAX))
    amax = magnitude.max(2, initial=np.float32(0))
    if has_one_scale:
        amax = np.broadcast_to(amax.max(1, keepdims=True), amax.shape)
    scale = np.maximum(amax / E4M3_MAX, FLT_MIN).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        codes = e4m3_encode(value / scale[:, :, None]).reshape(-1, V_DIM)
    parts = (codes, scale.view(np.uint8), np.ascontiguousarray(k_pe).view(np.uint8))
    return np.concatenate(parts, 1)


def concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, has_one_scale=False) -> None:
    """Writes one token per entry of slot_mapping into kv_cache (any layout); skips slots < 0. FP8
    rows are those of fp8_ds_mla, or of fp8_token."""
    n = len(slot_mapping)
    latent, rope = to_bf16_bits(kv_c[:n]), to_bf16_bits(k_pe[:n])
    if is_fp8(kv_cache):
        rows = quantize_rows(latent, rope, has_one_scale)
        target = kv_cache.view(np.uint8)
    else:
        rows, target = np.concatenate([latent, rope], 1), bits16(kv_cache)
    if target.ndim == 4:
        target = target[:, :, 0]
    for row, slot in zip(rows, slot_mapping, strict=True):
        if slot < 0:
            continue
        if target.ndim == 2:
            target[slot] = row
        else:
            target[slot // target.shape[1], slot % target.shape[1]] = row


def write_heads(rows, cache, slot_mapping, scale=1.0) -> None:
    """Writes keys, or values, [>= T, Hk, D] to pages [P, ps, Hk, D]; skips slots < 0. A cache of
    bytes gets e4m3(x / scale), with one scale or one per head. Of a slot's tokens the last wins."""
    slots = np.asarray(slot_mapping, np.int64)
    rows = rows[: len(slots)][slots >= 0]
    slots = slots[slots >= 0]
    if cache.dtype.itemsize == 1:
        with np.errstate(over="ignore", invalid="ignore"):
            rows = e4m3_encode(to_f32(rows) / np.asarray(scale, np.float32).reshape(-1, 1))
        cache = cache.view(np.uint8)
    cache[slots // cache.shape[1], slots % cache.shape[1]] = rows


def gather_kv_cache(
    kv_cache, block_table, seq_lens, workspace_starts, out_bits, seq_starts=None
) -> None:
    """Fills out_bits [>= sum of lengths, 576] (uint16 patterns) from the pages of each request."""
    block_size = kv_cache.shape[1]
    for r, length in enumerate(seq_lens):
        position = np.arange(length, dtype=np.int64) + (0 if seq_starts is None else seq_starts[r])
        page = np.asarray(block_table, np.int64)[r, position // block_size]
        rows = raw_rows(kv_cache, page * block_size + position % block_size)
        if is_fp8(kv_cache):
            rows = upconvert_rows(rows)
        out_bits[workspace_starts[r] : workspace_starts[r] + length] = rows


def convert_req_index_to_global_index(
    req_id_per_token,
    block_table,
    topk_indices,
    *,
    block_size,
    prefill_request_ids=None,
    prefill_workspace_starts=None,
) -> tuple[np.ndarray, np.ndarray]:
    """Positions inside a request -> slots (or workspace rows): [T, K] int32, and counts [T]."""
    tok = np.asarray(topk_indices, np.int64)
    table = np.asarray(block_table, np.int64)[np.asarray(req_id_per_token)]
    page_idx = tok // block_size
    inside = (tok >= 0) & (page_idx < table.shape[1])
    if table.shape[1] == 0:
        page = np.full_like(tok, -1)
    else:
        page = np.take_along_axis(table, np.where(inside, page_idx, 0), 1)
    slot = page * block_size + tok % block_size
    out = np.where(inside & (page >= 0), slot, -1)
    if prefill_request_ids is not None:
        request = np.asarray(prefill_request_ids, np.int64)[:, None]
        if len(prefill_workspace_starts):
            start = np.asarray(prefill_workspace_starts, np.int64)[np.maximum(request, 0)]
            out = np.where((request >= 0) & (out >= 0), start + tok, out)
    out = np.where(out > 2**31 - 1, -1, out).astype(np.int32)  # such a slot does not fit int32
    return out, (out >= 0).sum(1, dtype=np.int32)


# --- attention -----------------------------------------------------------------------------------


@dataclass
class Attention:
    """fp64 results and the sums of which the accuracy bounds consist; arrays are [T, H(, 512)]."""

    out: np.ndarray
    lse: np.ndarray
    max_logits: np.ndarray
    p_abs_v: np.ndarray  # sum_j p_j |v_j|, p with the sink factor        [T, H, 512]
    logit_abs: np.ndarray  # A = max_j sum_d scale |q_d k_jd|             [T, H]
    nope_abs: np.ndarray  # max_j sum_{d < 512} scale |q_d k_jd|          [T, H]
    f16_scale: np.ndarray  # factor of 2^-11 in the logit error           [T, H]

    def lse_tolerance(self, *, units=16, f16_scales=False, gathered=False) -> np.ndarray:
        """E of the contract plus 1e-6. units: 16 on the CPU, 32 on CUDA tensor cores."""
        return self._logit_error(units, f16_scales) + 1e-6 + (self._gather() if gathered else 0)

    def out_tolerance(self, *, units=16, f16_scales=False, gathered=False, merges=0) -> np.ndarray:
        """merges: how many parts in bf16 were merged into the first one, one after another."""
        error = self._logit_error(units, f16_scales)[..., None]
        bound = 2 * (1 + merges) * 2.0**-9 * (self.p_abs_v + np.abs(self.out))
        bound = bound + 2 * error * self.p_abs_v + 1e-6
        if gathered:
            bound = bound + (2 * self._gather()[..., None] + 2.0**-9) * self.p_abs_v
        return bound

    def _logit_error(self, units, f16_scales) -> np.ndarray:
        return units * 2.0**-24 * self.logit_abs + (2.0**-11 * self.f16_scale if f16_scales else 0)

    def _gather(self) -> np.ndarray:
        return 2.0**-9 * self.nope_abs

    def rows(self, part) -> Attention:
        return Attention(**{name: value[part] for name, value in vars(self).items()})

    @staticmethod
    def join(parts: list[Attention]) -> Attention:
        names = vars(parts[0])
        return Attention(**{n: np.concatenate([getattr(p, n) for p in parts]) for n in names})


def join_q(q) -> np.ndarray:
    """[T, H, 576] or the pair ([T, H, 512], [T, H, 64]) -> float64 [T, H, 576]."""
    parts = q if isinstance(q, tuple) else (q,)
    return np.concatenate([to_f32(np.asarray(p)).astype(np.float64) for p in parts], -1)


def chosen_slots(indices, topk_length, kv, t) -> np.ndarray:
    """The list J of token t: its indices inside the cache and before topk_length, in order."""
    row = np.asarray(indices[t], np.int64)
    keep = (row >= 0) & (row < num_slots(kv))
    if topk_length is not None:
        keep &= np.arange(len(row)) < topk_length[t]
    return row[keep]


def attention(
    q,
    kv_cache,
    indices,
    *,
    softmax_scale,
    topk_length=None,
    attn_sink=None,
    extra_kv_cache=None,
    extra_indices=None,
    extra_topk_length=None,
) -> Attention:
    """out = sum_J exp(s_j - lse) v_j with s_j = scale q.k_j, lse = ln sum_J exp(s_j)."""
    query = join_q(q)
    keys = []
    for t in range(len(query)):
        keys.append(decode_rows(kv_cache, chosen_slots(indices, topk_length, kv_cache, t)))
        if extra_kv_cache is not None:
            slots = chosen_slots(extra_indices, extra_topk_length, extra_kv_cache, t)
            keys[t] = np.concatenate([keys[t], decode_rows(extra_kv_cache, slots)])
    has_scales = is_fp8(kv_cache) or (extra_kv_cache is not None and is_fp8(extra_kv_cache))
    return attend_keys(query * float(softmax_scale), keys, attn_sink, has_scales=has_scales)


def attend_keys(query, keys, attn_sink=None, *, has_scales=False, softcap=0.0) -> Attention:
    """Attention of scaled queries [T, H, D] over a list of keys [n, D] per token, all float64."""
    num_tokens, num_heads, _ = query.shape
    shape = (num_tokens, num_heads)
    ref = Attention(
        out=np.zeros((*shape, V_DIM)),
        lse=np.full(shape, -np.inf),
        max_logits=np.full(shape, -np.inf),
        p_abs_v=np.zeros((*shape, V_DIM)),
        logit_abs=np.zeros(shape),
        nope_abs=np.zeros(shape),
        f16_scale=np.zeros(shape),
    )
    for t in range(num_tokens):
        if len(keys[t]):
            _attend(ref, t, query[t], keys[t], has_scales, softcap)
            if attn_sink is not None:
                _apply_sink(ref, t, np.asarray(attn_sink, np.float64))
    return ref


def _attend(ref: Attention, t: int, query, key, has_scales: bool, softcap: float) -> None:
    value = key[:, :V_DIM]
    logit = query @ key.T
    if softcap:
        logit = softcap * np.tanh(logit / softcap)
    top = logit.max(1)
    weight = np.exp(logit - top[:, None])
    total = weight.sum(1)
    p = weight / total[:, None]
    ref.max_logits[t] = top
    ref.lse[t] = top + np.log(total)
    ref.out[t] = p @ value
    ref.p_abs_v[t] = p @ np.abs(value)
    nope_abs = np.abs(query[:, :V_DIM]) @ np.abs(value).T
    rope_abs = np.abs(query[:, V_DIM:]) @ np.abs(key[:, V_DIM:]).T
    ref.nope_abs[t] = nope_abs.max(1)
    ref.logit_abs[t] = (nope_abs + rope_abs).max(1)
    if has_scales:
        tiles = [slice(d, d + TILE) for d in range(0, V_DIM, TILE)]
        tile_abs = sum(np.abs(query[:, d] @ value[:, d].T) for d in tiles)
        square = np.sqrt((query[:, :V_DIM] ** 2) @ (value**2).T)
        ref.f16_scale[t] = (tile_abs + 2 * square).max(1)


def _apply_sink(ref: Attention, t: int, sink: np.ndarray) -> None:
    with np.errstate(over="ignore"):
        factor = 1 / (1 + np.exp(sink - ref.lse[t]))
    ref.out[t] *= factor[:, None]
    ref.p_abs_v[t] *= factor[:, None]


def worst_ratio(got: np.ndarray, want: np.ndarray, tolerance: np.ndarray) -> float:
    """max |got - want| / tolerance; infinities must be equal, NaN anywhere gives inf."""
    got = to_f32(np.asarray(got)).astype(np.float64)
    if got.shape != want.shape:
        raise AssertionError(f"shape {got.shape}, expected {want.shape}")
    if got.size == 0:
        return 0.0
    same = got == want
    with np.errstate(invalid="ignore"):
        ratio = np.where(same, 0.0, np.abs(got - want) / tolerance)
    return float(np.where(np.isnan(ratio), np.inf, ratio).max())


def attention_ratios(
    ref: Attention, out, lse, max_logits=None, *, merges=0, **tolerance
) -> dict[str, float]:
    """Worst |err| / bound of each result; at most 1 is inside the contract.

    Tokens without any key must give exactly 0 and -inf, so the tolerance of their out is 0.
    """
    empty = np.isneginf(ref.lse)
    out_tolerance = np.where(empty[..., None], 0, ref.out_tolerance(merges=merges, **tolerance))
    lse_tolerance = ref.lse_tolerance(**tolerance)
    with np.errstate(divide="ignore"):
        ratios = {
            "out": worst_ratio(out, ref.out, out_tolerance),
            "lse": worst_ratio(lse, ref.lse, lse_tolerance),
        }
        if max_logits is not None:
            ratios["max_logits"] = worst_ratio(max_logits, ref.max_logits, lse_tolerance)
    return ratios


# --- merge, absorption, quantiser ----------------------------------------------------------------


def merge_attn_partials(outs, lses, attn_sink=None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """-> (out, lse, sum of weight |part| without the sink), fp64; +inf counts as -inf."""
    outs = np.stack([to_f32(np.asarray(x)).astype(np.float64) for x in outs])
    lses = np.stack([np.asarray(x, np.float64) for x in lses])
    lses = np.where(np.isposinf(lses), -np.inf, lses)
    top = lses.max(0)
    is_empty = np.isneginf(top)
    weights = np.exp(lses - np.where(is_empty, 0, top))
    weights[0] = np.where(is_empty, 1, weights[0])
    lse = np.where(is_empty, -np.inf, np.where(is_empty, 0, top) + np.log(weights.sum(0)))
    weights /= weights.sum(0)
    used = np.where(weights[..., None] > 0, outs, 0)  # an empty part may hold NaN
    magnitude = (weights[..., None] * np.abs(used)).sum(0)
    factor = np.ones_like(lse)
    if attn_sink is not None:
        sink = np.asarray(attn_sink, np.float64)[: lse.shape[1]]
        with np.errstate(over="ignore"):
            factor = np.where(is_empty, 1, 1 / (1 + np.exp(sink - np.where(is_empty, 0, lse))))
    return factor[..., None] * (weights[..., None] * used).sum(0), lse, magnitude


def merge_attn_states(
    out_a, lse_a, out_b, lse_b, attn_sink=None, prefill_tokens_with_context=None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """-> (out, lse, sum of weight |state| without the sink), fp64; +inf counts as -inf."""
    if prefill_tokens_with_context is not None:
        n = prefill_tokens_with_context
        out_a, lse_a = (
            np.concatenate([out_a[:n], out_b[n:]]),
            np.concatenate([lse_a[:n], lse_b[n:]]),
        )
        lse_b = np.concatenate([lse_b[:n], np.full_like(lse_b[n:], -np.inf)])
    a, b = (to_f32(np.asarray(x)).astype(np.float64) for x in (out_a, out_b))
    la, lb = (np.where(np.isposinf(x), -np.inf, np.asarray(x, np.float64)) for x in (lse_a, lse_b))
    top = np.maximum(la, lb)
    both_empty = np.isneginf(top)
    safe = np.where(both_empty, 0, top)
    wa = np.where(both_empty, 1, np.exp(la - safe))
    wb = np.where(both_empty, 0, np.exp(lb - safe))
    lse = np.where(both_empty, -np.inf, safe + np.log(wa + wb))
    wa, wb = ((w / (wa + wb))[..., None] for w in (wa, wb))
    factor = np.ones_like(lse)
    if attn_sink is not None:
        sink = np.asarray(attn_sink, np.float64)[: lse.shape[1]]
        with np.errstate(over="ignore"):
            factor = np.where(both_empty, 1, 1 / (1 + np.exp(sink - np.where(both_empty, 0, lse))))
    return factor[..., None] * (wa * a + wb * b), lse, wa * np.abs(a) + wb * np.abs(b)


def merge_tolerance(out, magnitude, dtype) -> np.ndarray:
    """One rounding of the result to the states' dtype and eight fp32 steps: two exp of a rounded
    difference, a sum, a division, two products, an addition. A sink's factor adds two, and its
    exponent d at most |d| / (2 + e^d + e^-d) < 0.23 steps."""
    relative, least = {2: (2.0**-8, 1e-37), 4: (2.0**-24, 1e-37)}[np.dtype(dtype).itemsize]
    if np.dtype(dtype) == np.float16:
        relative, least = 2.0**-11, 2.0**-25  # half of the smallest subnormal number
    return relative * np.abs(out) + 16 * 2.0**-24 * magnitude + least


def merge_lse_tolerance(lse) -> np.ndarray:
    """exp, log and one addition in fp32 at the size of lse."""
    return 8 * 2.0**-24 * np.maximum(np.abs(np.where(np.isinf(lse), 0, lse)), 1)


def split_kv_b_proj(weight, *, num_heads, qk_nope_head_dim, v_head_dim):
    """weight [512, H (Pn + Pv)] -> W_UK [512, H, Pn], W_UV [512, H, Pv]."""
    view = weight.reshape(V_DIM, num_heads, qk_nope_head_dim + v_head_dim)
    return view[..., :qk_nope_head_dim], view[..., qk_nope_head_dim:]


def dequantize_blocks(weight_bytes, scale_inv) -> np.ndarray:
    """e4m3 [N, M] with one fp32 scale per 128 x 128 block -> bf16 patterns."""
    rows, cols = weight_bytes.shape
    scale = np.repeat(np.repeat(scale_inv, 128, 0)[:rows], 128, 1)[:, :cols]
    return bf16_encode(e4m3_decode(weight_bytes) * scale.astype(np.float32))


def project(x, weight, subscripts) -> tuple[np.ndarray, np.ndarray]:
    """einsum in fp64 -> (value, tolerance): fp32 accumulation of n terms, one rounding to bf16."""
    a, w = (to_f32(np.asarray(v)).astype(np.float64) for v in (x, weight))
    value = np.einsum(subscripts, a, w, optimize=True)
    accumulation = a.shape[-1] * 2.0**-24 * np.einsum(subscripts, np.abs(a), np.abs(w))
    return value, 2.0**-8 * (np.abs(value) + accumulation) + accumulation + 1e-37


def k_up_proj(q_nope, w_uk):
    return project(q_nope, w_uk, "thp,lhp->thl")


def v_up_proj(x, w_uv):
    return project(x, w_uv, "thl,lhv->thv")


def kv_up_proj(kv_c, kv_b_proj):
    return project(kv_c, kv_b_proj, "tl,ln->tn")


def grouped_output_projection(o, o_scale, weight, weight_scale):
    """fp64 -> (value, sum of magnitudes) [T, G, N]. Scales of o are fp32; None with bf16."""

    def values(x, scale, repeats) -> np.ndarray:
        if scale is None:
            return to_f32(x).astype(np.float64)
        wide = np.asarray(scale, np.float64)
        for axis, times in repeats:
            wide = wide.repeat(times, axis)
        return e4m3_decode(np.asarray(x).view(np.uint8)) * wide[:, : x.shape[1]]

    a = values(o, o_scale, [(2, 128)])
    w = values(weight, weight_scale, [(2, 128), (1, 128)])
    a, w = a.swapaxes(0, 1), w.swapaxes(1, 2)
    with np.errstate(invalid="ignore"):
        return (a @ w).swapaxes(0, 1), (np.abs(a) @ np.abs(w)).swapaxes(0, 1)


def dynamic_per_tensor_quant(x) -> tuple[np.ndarray, np.float32]:
    value = to_f32(x)
    amax = np.maximum(np.abs(value).max(initial=np.float32(0)), np.float32(1e-10))
    scale = np.float32(amax / E4M3_MAX)
    return e4m3_encode(value / scale), scale


def scaled_quantize(x, group) -> tuple[np.ndarray, np.ndarray]:
    """-> (codes [M, N], descale [M / m, N / n]), each step rounded to fp32."""
    value = to_f32(np.asarray(x))
    m, n = (axis if size == -1 else size for size, axis in zip(group, value.shape, strict=True))
    top = np.float32(np.finfo(np.float32).max)
    magnitude = np.minimum(np.where(np.isnan(value), np.float32(0), np.abs(value)), top)
    tiles = magnitude.reshape(value.shape[0] // m, m, value.shape[1] // n, n)
    amax = np.maximum(tiles.max((1, 3)), np.float32(1e-12))
    factor = np.float32(E4M3_MAX) / amax
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = value * factor.repeat(m, 0).repeat(n, 1)
    return e4m3_encode(scaled), amax / np.float32(E4M3_MAX)


def fp8_linear(codes, descale, weight, weight_scale):
    """fp64 -> (value, sum of magnitudes) [T, out] of quantised operands. Each scale has as many
    rows and columns as its operand, or 1 in place of one, or blocks of 128."""

    def values(x, scale) -> np.ndarray:
        wide = np.asarray(scale, np.float64)
        for axis, size in enumerate(x.shape):
            if wide.shape[axis] not in (1, size):
                wide = wide.repeat(128, axis)[(slice(None),) * axis + (slice(size),)]
        return e4m3_decode(np.asarray(x).view(np.uint8)).astype(np.float64) * wide

    a, w = values(codes, descale), values(weight, weight_scale).T
    with np.errstate(invalid="ignore"):
        return a @ w, np.abs(a) @ np.abs(w)
