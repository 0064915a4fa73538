"""What operators return, for frameworks that must know it before the call: shapes and dtypes.

The rules are the rows of each operator's table in C (csrc/python/call/result_row.h), by which the
call itself makes its results. Here the rows are read with sizes that may be symbolic. What the rows
need of a call is checked with the error texts of the C core; the call itself checks everything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sparse_mla import _C

# Last dimension of a cache -> number of values in each of its keys.
HEAD_SIZES = {row: size for rows in _C.KV_FORMATS.values() for row, size in rows.items()}

# The names that an option takes, by its kind in the operator's table.
NAMES = {"floats": ("float32", "bfloat16"), "scales": ("fp32", "ue8m0x4")}

# What a new result has in rows of no request, by the bit that asks the core for it (attention.h).
PADDING = {1: 0.0, 2: -math.inf}

# Shape and dtype; and strides where a new result is not contiguous.
Result = tuple[tuple[Any, ...], str] | tuple[tuple[Any, ...], str, tuple[Any, ...]]


def dtype_name(dtype: Any) -> str:
    """The name of a dtype, which is a name already or a dtype object of any framework."""
    if isinstance(dtype, type) or hasattr(dtype, "dtype"):  # np.float32; JAX's are objects
        dtype = np.dtype(dtype)
    return str(dtype).removeprefix("torch.")


class Rules:
    """The rows of one operator. They are read here once, because PyTorch's compiler traces what
    follows, and cannot trace an attribute of C."""

    def __init__(self, operator: Any) -> None:
        self.op: str = operator.__name__
        self.kinds: dict[str, str] = dict(operator.table)
        self.limits = operator.limits
        self.rows = operator.results
        # Result -> what its rows of no request have where the call makes it.
        self.padding = {name: PADDING[fills] for name, *_, fills in self.rows if fills}

    def results(self, values: Mapping[str, Any]) -> dict[str, Result]:
        """Shape and dtype of each result that a call may have, in the table's order.

        `values` are the call's arguments by their names in the operator's table.
        """
        given = _Given(self, values)
        given.check_limits()
        found: dict[str, Result] = {}
        for name, when, dtype, dims, order, multiple, _ in self.rows:
            if name not in found and given.holds(*when):
                shape = given.shape(dims)
                result = shape, given.dtype(*dtype)
                found[name] = (*result, _strides(shape, order, multiple)) if multiple else result
        return found


def _round_up(value: Any, unit: Any) -> Any:
    return -(-value // unit) * unit


def _strides(shape: tuple[Any, ...], order: tuple[int, ...], multiple: int) -> tuple[Any, ...]:
    """Those of a result whose dimension k is dimension order[k] of its storage."""
    room = (_round_up(shape[0], multiple), *shape[1:])
    strides = list(shape)
    step: Any = 1
    for place in (2, 1, 0):
        k = order.index(place)
        strides[k] = step
        step = step * room[k]
    return tuple(strides)


class _Given:
    """The arguments of a call, as the rows name them."""

    def __init__(self, rules: Rules, values: Mapping[str, Any]) -> None:
        self.op, self.kinds, self.limits = rules.op, rules.kinds, rules.limits
        self.values = values

    def error(self, name: str, words: str) -> ValueError:
        return ValueError(f"{self.op}: `{name}` must {words}")

    # --- limits ----------------------------------------------------------------------------------

    def check_limits(self) -> None:
        """Other kinds of limits are left to the call."""
        for kind, name, least, most in self.limits:
            if kind == "ndim":
                self.check_ndim(name, least, most)
            elif kind == "value" and not least <= self.values[name] <= most:
                raise self.error(name, f"be {least} to {most}, got {self.values[name]}")

    def check_ndim(self, name: str, least: int, most: int) -> None:
        array = self.array(name)
        if array is None:
            return
        shape = getattr(array, "shape", None)
        if shape is None:
            got = type(array).__name__
            raise TypeError(f"{self.op}: `{name}` must be an array, got {got}")
        if not least <= len(shape) <= most:
            ranks = " or ".join(str(ndim) for ndim in range(least, most + 1))
            raise self.error(name, f"have {ranks} dimensions, got {len(shape)}")

    # --- conditions ------------------------------------------------------------------------------

    def array(self, name: str) -> Any:
        """An array, or None. A pair may be given in one, under the name of its first array."""
        value = self.values.get(name)
        if self.kinds[name] == "pair" and isinstance(value, (tuple, list)):
            return value[0]
        if self.kinds[name] == "second" and value is None:
            rows = list(self.kinds)
            whole = self.values[rows[rows.index(name) - 1]]
            return whole[1] if isinstance(whole, (tuple, list)) else None
        return value

    def holds(self, kind: str, name: str = "", value: Any = None) -> bool:
        if kind == "given":
            return self.array(name) is not None
        if kind == "asked":
            return self.is_asked()
        if kind == "ndim":
            return len(self.array(name).shape) == value
        if kind == "split pages":
            is_split = self.values[value] in _C.SPLIT_KV_FORMATS
            return is_split and len(self.array(name).shape) == 2
        if kind == "scales":
            return self.named(name) == value
        return True

    def is_asked(self) -> bool:
        """Whether an option asks for more results, or the caller gives one of them."""
        for name, kind in self.kinds.items():
            value = self.values.get(name)
            if value is not None and (kind == "asked output" or (kind == "ask" and value)):
                return True
        return False

    def named(self, name: str) -> str:
        """An option that takes one of a few names."""
        names, value = NAMES[self.kinds[name]], self.values[name]
        if value not in names:
            raise self.error(name, f'be "{names[0]}" or "{names[1]}", got {value!r}')
        return str(value)

    def dtype(self, source: str, name: str) -> str:
        if source == "array":
            return str(self.values[name].dtype).removeprefix("torch.")
        if source == "halves":
            return "float16" if dtype_name(self.array(name).dtype) == "float16" else "bfloat16"
        return self.named(name) if source == "option" else name

    # --- sizes -----------------------------------------------------------------------------------

    def shape(self, dims: tuple[tuple[tuple[Any, ...], ...], ...]) -> tuple[Any, ...]:
        if dims and dims[0][0][1] == "whole shape":
            return tuple(self.array(dims[0][0][2]).shape)
        return tuple(self.dim(terms) for terms in dims)

    def dim(self, terms: tuple[tuple[Any, ...], ...]) -> Any:
        value: Any = 0
        for kind, *number in terms:
            by = self.number(*number)
            if kind == "add":
                value = value + by
            elif kind == "multiply":
                value = value * by
            elif kind == "divide":
                if value % by != 0:
                    array, option = terms[0][2], number[1]
                    text = f"have a multiple of {by} heads (`{option}`), got {value}"
                    raise self.error(array, text)
                value = value // by
            elif kind == "round up":
                value = _round_up(value, by)
            else:
                value = max(value, by)
        return value

    def number(self, kind: str, *of: Any) -> Any:
        if kind == "constant":
            return of[0]
        if kind == "value":
            return self.values[of[0]]
        if kind == "page keys":
            return self.page_keys(*of)
        if kind == "key values":
            return self.key_values(*of)
        if kind == "groups":
            return self.count_groups(*of)
        array = self.array(of[0])
        if array is None and kind == "size":
            raise self.error(of[0], "be given, got none")
        return 0 if array is None else array.shape[of[1]]

    def page_keys(self, option: str, cache: str) -> Any:
        """The keys of each page [pages, bytes]."""
        if self.values[option] is None:
            kv_format = self.values["kv_format"]
            pages = f"pages of {kv_format}" if kv_format in _C.SPLIT_KV_FORMATS else "pages"
            shape = list(self.array(cache).shape)
            text = (
                f"come with block_size= for {pages} as [pages, bytes], got none for shape {shape}"
            )
            raise self.error(cache, text)
        return self.values[option]

    def count_groups(self, option: str, dim: int, array: str) -> Any:
        """How many groups an array has along a dimension."""
        size, axis = self.values[option][dim], self.array(array).shape[dim]
        if size == -1:
            return 1
        if size < 1:
            text = f"have sizes of at least 1, or -1 for a whole axis, got {size}"
            raise self.error(option, text)
        if axis % size != 0:
            unit = "columns" if dim else "rows"
            text = f"have a multiple of {size} {unit} (`{option}`), got {axis}"
            raise self.error(array, text)
        return axis // size

    def key_values(self, cache: str, option: str) -> int:
        """The values of a key, by the last dimension of its cache or by its format."""
        if self.holds("split pages", cache, option):
            (head_size,) = _C.KV_FORMATS[self.values[option]].values()
            return head_size
        row = self.array(cache).shape[-1]
        for known, head_size in HEAD_SIZES.items():
            if known == row:  # no lookup in the dict, because `row` may be symbolic
                return head_size
        wanted = " or ".join(map(str, HEAD_SIZES))
        raise self.error(cache, f"have a last dimension of {wanted}, got {row}")
