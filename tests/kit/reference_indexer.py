"""The lightning indexer in fp64 NumPy, from its formula. Shares nothing with csrc."""

from __future__ import annotations

import numpy as np
import reference as ref
import row_formats as rows

F64 = np.float64


def query_values(q, q_scale=None) -> np.ndarray:
    """q [T, H, 128] e4m3 codes, or [T, H, 64] with UE8M0 scales [T, H, 4] -> fp64."""
    q = np.asarray(q).view(np.uint8)
    if q_scale is None:
        return ref.e4m3_decode(q).astype(F64)
    T, H = q.shape[:2]
    values = rows.e2m1_decode(rows.split_nibbles(q.reshape(T * H, 64))).reshape(T, H, 4, 32)
    scales = rows.ue8m0_decode(np.asarray(q_scale)).astype(F64)
    return (values * scales[..., None]).reshape(T, H, 128)


def logits(q, weights, keys, exists, contexts, N: int) -> tuple[np.ndarray, np.ndarray]:
    """Queries [T, H, 128] in fp64; keys[t] [N, 128] in fp64 and exists[t] [N] of each token.

    -> (logits [T, N], u [T, N]): u = sum_h |w_h| * sum_d |q_d k_d|, of which errors are a part."""
    T = len(q)
    out, u = np.full((T, N), -np.inf), np.zeros((T, N))
    w = np.asarray(weights).astype(F64)
    for t in range(T):
        length = min(max(int(contexts[t]), 0), N)
        there = np.flatnonzero(np.asarray(exists[t])[:length])
        k = np.asarray(keys[t])[there]
        with np.errstate(invalid="ignore"):
            dots = q[t] @ k.T
            dots = np.where(dots < 0, 0, dots)  # keeps NaN
            out[t, there] = w[t] @ dots
            u[t, there] = np.abs(w[t]) @ (np.abs(q[t]) @ np.abs(k).T)
    return out, u
