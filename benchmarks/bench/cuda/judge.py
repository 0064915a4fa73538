"""The fp64 reference and the error bounds for results in device memory, computed there.

The formulas are those of `_judge.py`, plus what the accuracy promise allows a GPU: 32 units of
2^-24 in the logits, and for FP8 rows the rounding of e4m3 * scale in fp16.
"""

from __future__ import annotations

from bench.cuda.inputs import FP8_ROW_BYTES, Inputs, split_rows
from bench.cuda.timing import Array, torch
from sparse_mla._judge import Fractions

NUM_JUDGED_TOKENS = 4
NUM_NOTABLE_TOKENS = 4


def judge(inputs: Inputs, results: tuple[Array, Array]) -> float:
    """The worst error of some of the tokens, as a fraction of its bound. It is infinite where any
    value of any token is not finite, or where the token that selects a NaN has a value that is no
    NaN."""
    out, lse = results
    if not has_nan_where_due(inputs, out) or not has_nan_where_due(inputs, lse):
        return float("inf")
    worst = Fractions()
    for token in pick_tokens(inputs):
        indices = inputs.indices[token]
        keys = exact_keys(inputs.rows[indices[indices >= 0].long()])
        given = (inputs.q[token], keys, out[token], lse[token], inputs.scale, inputs.sink)
        worst.add(judge_token(*given, is_fp8=inputs.kv.shape[-1] == FP8_ROW_BYTES))
    return max(worst.out, worst.lse)


def has_nan_where_due(inputs: Inputs, result: Array) -> bool:
    """Whether result [T, ...] is NaN for the token that selects a NaN, and finite for others."""
    if inputs.nan_token is None:
        return bool(result.isfinite().all())
    others = torch.arange(len(result), device=result.device) != inputs.nan_token
    return bool(result[inputs.nan_token].isnan().all() and result[others].isfinite().all())


def pick_tokens(inputs: Inputs) -> list[int]:
    """The first token, the last, some between them, and some of the notable ones."""
    tokens = spread_tokens(len(inputs.q)) | set(inputs.notable[:NUM_NOTABLE_TOKENS])
    return sorted(tokens - {inputs.nan_token})


def spread_tokens(num_tokens: int) -> set[int]:
    """The first token, the last, and some between them."""
    steps = NUM_JUDGED_TOKENS - 1
    return {(num_tokens - 1) * i // steps for i in range(NUM_JUDGED_TOKENS)}


def exact_keys(rows: Array) -> Array:
    """Cache rows -> the keys [n, 576] that they stand for, in fp64, no rounding."""
    if rows.shape[1] != FP8_ROW_BYTES:
        return rows.double()
    values, scales, rope = split_rows(rows)
    return torch.cat(
        [(values.float().double() * scales.double()).view(-1, 512), rope.double()], dim=1
    )


def judge_token(
    q: Array, keys: Array, out: Array, lse: Array, scale: float, sink: Array, is_fp8: bool
) -> Fractions:
    """q [H, 576] bf16, keys [n, 576] fp64, out [H, 512] bf16, lse [H] fp32, sink [H] or None."""
    q = q.double() * scale
    values = keys[:, :512]
    logits = q @ keys.T
    exact_lse = logits.logsumexp(dim=1)
    p = (logits - exact_lse[:, None]).exp()
    if sink is not None:
        p = p * torch.sigmoid(exact_lse - sink.double())[:, None]
    exact_out = p @ values

    magnitude = p @ values.abs()
    e = 32 * 2.0**-24 * (q.abs() @ keys.abs().T).amax(dim=1)
    if is_fp8:
        tiles = zip(q[:, :512].split(128, dim=1), values.split(128, dim=1), strict=True)
        by_tile = sum((a @ b.T).abs() for a, b in tiles)
        squares = (q[:, :512] ** 2 @ (values**2).T).sqrt()
        e = e + 2.0**-11 * (by_tile + 2 * squares).amax(dim=1)
    out_bound = 2 * 2.0**-9 * (magnitude + exact_out.abs()) + 2 * e[:, None] * magnitude + 1e-6
    return Fractions(
        out=float(((out.double() - exact_out).abs() / out_bound).max()),
        lse=float(((lse.double() - exact_lse).abs() / (e + 1e-6)).max()),
        rows=1,
    )
