"""The layers that the demo can serve, in a table: what is particular to each is named here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sparse_mla._demo import dense, engine, v4
from sparse_mla._demo.check import Checker
from sparse_mla._demo.model import ToyModel
from sparse_mla._demo.v4_model import RATIO, V4Model


class Layer(NamedTuple):
    """A row of the table."""

    name: str  # also the option that chooses it
    engine: type[engine.Engine]
    checker: type[Checker]
    config: Callable[[dict[str, Any], int], Any]  # takes what all configs have, and top-k
    model: type[ToyModel]
    paths: tuple[str, ...]
    formats: tuple[str, ...]  # the cache may have these, by default the first
    ratio: int  # tokens per row that top-k counts; 0: a query attends to all keys

    @property
    def keys(self) -> str:
        """What a query attends to, with a place for top-k."""
        if self.ratio == 0:
            return "all keys"
        return "top-{}" + f" rows of {self.ratio} tokens" * (self.ratio > 1)


LAYERS = {
    layer.name: layer
    for layer in (
        Layer(
            name="sparse",
            engine=engine.SparseEngine,
            checker=Checker,
            config=engine.make_config,
            model=ToyModel,
            paths=("mixed", "separate", "bf16", "direct"),
            formats=("fp8_ds_mla", "bfloat16"),
            ratio=1,
        ),
        Layer(
            name="dense",
            engine=dense.DenseEngine,
            checker=dense.DenseChecker,
            config=dense.make_config,
            model=ToyModel,
            paths=("mixed",),  # the judge knows absorbed attention
            formats=("fp8_ds_mla", "bfloat16"),
            ratio=0,
        ),
        Layer(
            name="v4",
            engine=v4.V4Engine,
            checker=v4.V4Checker,
            config=v4.make_config,
            model=V4Model,
            paths=("direct", "separate"),
            formats=("fp8_v4", "bfloat16", "fp8_ds_mla"),  # the last name means the first
            ratio=RATIO,
        ),
    )
}
