"""Scales for the pairwise tables of attention: (softmax_scale times the root of the number of
values, q_scale, kv_scale), so that logits of ordinary keys stay of ordinary size.

A scale that an operand's format does not have is 1, and softmax_scale takes its power of two over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Scales:
    softmax: float
    q: float = 1.0
    kv: float = 1.0
    extra: float = 1.0  # the scale of the second cache
    as_arrays: tuple[int, ...] | None = None  # the shape in which an array has a scale

    def __repr__(self) -> str:
        return f"{self.softmax:g} x {self.q:g} x {self.kv:g}, {self.extra:g} in {self.as_arrays}"

    def argument(self, value: float):
        shape = self.as_arrays
        return value if shape is None else np.full(shape, value, np.float32)


SCALES = (
    Scales(1.0),
    Scales(0.5, 1.25, 0.75, 1.875),
    Scales(0.5, 1.25, 0.75, 1.875, as_arrays=()),
    Scales(1.0, 0.5, 1.5, 0.375, as_arrays=(1,)),
    # Scales so far from 1 that products of two of them leave fp32, or are subnormal.
    Scales(2.0**-125, 2.0**70, 2.0**55, 2.0**55),
    Scales(2.0**10, 2.0**60, 2.0**-70, 2.0**-70),
    Scales(2.0**110, 2.0**-50, 2.0**-61, 2.0**-62),
    Scales(2.0**-20, 2.0**-80, 2.0**100, 2.0**99),
)

# Three scales whose product only is beyond fp32: each is, and so are the products of two.
BEYOND = (Scales(2.0**60, 2.0**60, 2.0**20), Scales(2.0**20, 2.0**50, 2.0**60))
