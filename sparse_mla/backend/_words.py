"""Words that errors and reprs of this package share."""

from __future__ import annotations

import math
import operator
import re
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


def check_int(op: str, name: str, value: Any, least: int, most: int | None = None) -> int:
    number = as_int(op, name, value)
    if number < least or (most is not None and number > most):
        rule = {None: f"at least {least}", least: f"{least}"}.get(most, f"{least} to {most}")
        raise ValueError(f"{op}: `{name}` must be {rule}, got {number}")
    return number


def check_float(op: str, name: str, value: Any) -> float:
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise wrong_type(op, name, "a float", value)
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{op}: `{name}` must be finite, got {number}")
    return number


def as_device(op: str, device: Any) -> str:
    name = device if isinstance(device, str) else str(device)  # str() of a torch.device
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"{op}: `device` must be 'cpu', 'cuda' or 'cuda:N', got {name!r}")
    return name


class ShortRepr:
    """A dataclass repr that shows arrays by dtype and shape."""

    def __repr__(self) -> str:
        shown = (f for f in fields(self) if f.repr)  # type: ignore[arg-type]
        text = ", ".join(f"{f.name}={show(getattr(self, f.name))}" for f in shown)
        return f"{type(self).__name__}({text})"
