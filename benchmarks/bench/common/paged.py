"""What the tables of paged_attention share on all devices: shapes, and the fp64 reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.common.varlen import JUDGED_HEADS, judge_head
from sparse_mla._judge import Fractions


@dataclass
class Shape:
    """A token of each of some equal requests, over the whole of its cache."""

    num_reqs: int
    length: int
    page_size: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    kv_type: str = "bfloat16"  # or "float8_e4m3fn"

    @property
    def num_pages(self) -> int:
        """Pages of a request."""
        return -(-self.length // self.page_size)

    @property
    def flop(self) -> int:
        return 4 * self.num_reqs * self.length * self.heads * self.dim

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    def labels(self) -> dict[str, object]:
        return {
            "kv_format": self.kv_type,
            "H": f"{self.heads}/{self.kv_heads}",
            "T": f"{self.num_reqs} × {self.length}",
            "page": self.page_size,
        }


def judge_request(
    shape: Shape,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    units: int,
) -> Fractions:
    """Judges some heads of a request's token: q and out [H, D], k and v [n, Hk, D], lse [H]; all
    float64."""
    worst = Fractions()
    for i in range(JUDGED_HEADS):
        head = i * (shape.heads - 1)
        at = head * shape.kv_heads // shape.heads
        keys = k[: shape.length, at], v[: shape.length, at]
        worst.add(judge_head(q[head], *keys, out[head], float(lse[head]), shape.scale, units))
    return worst
