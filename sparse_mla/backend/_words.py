"""Words that errors and reprs of this package share."""

from __future__ import annotations

import operator
from dataclasses import fields
from typing import Any


def show(value: Any) -> str:
    """Arrays by dtype and shape, everything else by its repr."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    return repr(value)


def wrong_type(op: str, name: str, wanted: str, value: Any) -> TypeError:
    return TypeError(f"{op}: `{name}` must be {wanted}, got {type(value).__name__}")


def as_int(op: str, name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise wrong_type(op, name, "an int", value) from None


class ShortRepr:
    """A dataclass repr that shows arrays by dtype and shape."""

    def __repr__(self) -> str:
        shown = (f for f in fields(self) if f.repr)  # type: ignore[arg-type]
        text = ", ".join(f"{f.name}={show(getattr(self, f.name))}" for f in shown)
        return f"{type(self).__name__}({text})"
