"""What the tables of varlen_attention share on all devices: shapes, and the fp64 reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparse_mla._judge import Fractions

JUDGED_TOKENS = 3
JUDGED_HEADS = 2


@dataclass
class Shape:
    """Causal prefills of equal requests, without cached tokens."""

    num_reqs: int
    length: int
    heads: int
    kv_heads: int
    dims: tuple[int, int]  # D, Dv

    @property
    def num_tokens(self) -> int:
        return self.num_reqs * self.length

    @property
    def flop(self) -> int:
        pairs = self.num_reqs * self.length * (self.length + 1) // 2
        return 2 * self.heads * sum(self.dims) * pairs

    @property
    def scale(self) -> float:
        return self.dims[0] ** -0.5

    def labels(self) -> dict[str, object]:
        return {
            "B × n": f"{self.num_reqs} × {self.length}",
            "H": self.heads,
            "Hk": self.kv_heads,
            "D/Dv": f"{self.dims[0]}/{self.dims[1]}",
        }


def judged_tokens(shape: Shape) -> list[int]:
    """The first token, the last, and some between them."""
    last = shape.num_tokens - 1
    return [last * i // (JUDGED_TOKENS - 1) for i in range(JUDGED_TOKENS)]


def judge_head(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: float,
    scale: float,
    units: int,
) -> Fractions:
    """Judges one head of a token: q [D], k [n, D], v [n, Dv], out [Dv]; all float64. `units` of
    2^-24 are allowed in a logit."""
    logits = scale * (k @ q)
    error = units * 2.0**-24 * float((scale * (np.abs(k) @ np.abs(q))).max())
    top = logits.max()
    weights = np.exp(logits - top)
    p = weights / weights.sum()
    want, magnitude = p @ v, p @ np.abs(v)
    bound = 2 * 2.0**-9 * (magnitude + np.abs(want)) + 2 * error * magnitude + 1e-6
    want_lse = float(top + np.log(weights.sum()))
    return Fractions(
        out=float((np.abs(out - want) / bound).max()),
        lse=abs(lse - want_lse) / (error + 1e-6),
        rows=1,
    )
