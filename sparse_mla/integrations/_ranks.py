"""What the ranks of a split cache exchange in a step of transformers.py, and the positions of keys
that vllm_indexer.py exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import sparse_mla
from sparse_mla.steps.common import show


def find_positions(local: torch.Tensor, cp: tuple[int, int, int]) -> torch.Tensor:
    """The positions in whole requests of a rank's own, the inverse of `cp_local_positions`; -1
    stays."""
    rank, ranks, interleave = cp
    positions = (local // interleave * ranks + rank) * interleave + local % interleave
    return torch.where(local < 0, -1, positions)


class Ranks:
    """This rank's share, and the caller's way to the arrays of all ranks."""

    def __init__(
        self,
        cp: tuple[int, int, int],
        exchange: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    ) -> None:
        self.cp, self.exchange = cp, exchange

    @classmethod
    def of(cls, cp: tuple[int, int, int] | None, exchange: Any) -> Ranks | None:
        return None if cp is None else cls(cp, exchange)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The arrays of all ranks in the place of x, in the order of ranks."""
        parts: Any = self.exchange(x)
        if not isinstance(parts, Sequence | torch.Tensor):
            raise TypeError(
                "ModelRunner: `exchange` must return a sequence of arrays, got "
                f"{type(parts).__name__}"
            )
        if len(parts) != self.cp[1]:
            raise ValueError(
                f"ModelRunner: `exchange` must return {self.cp[1]} arrays, one of each rank, got "
                f"{len(parts)}"
            )
        for part in parts:
            if show(part) != show(x):
                raise ValueError(
                    "ModelRunner: `exchange` must return arrays like its argument, "
                    f"{show(x)}, got {show(part)}"
                )
        return list(parts)

    def merge(self, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """The result of all keys [T, H, V], from that of this rank's keys and its lse [T, H]."""
        merged, _ = sparse_mla.merge_attn_partials(self.gather(out), self.gather(lse))
        return merged

    def choose(self, topk_indices: torch.Tensor, values: torch.Tensor) -> None:
        """Replaces the choice from this rank's keys, local positions [T, K] with their scores, by
        the choice from all keys."""
        sparse_mla.top_k_merge(
            torch.stack(self.gather(find_positions(topk_indices, self.cp))),
            torch.stack(self.gather(values)),
            k=topk_indices.shape[1],
            out=topk_indices,
        )
