"""One step's batch, as an engine knows it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from sparse_mla.backend._words import ShortRepr, as_int

Array = Any

HOST_DEVICES = (1, 3, 13)  # DLPack's CPU, pinned and managed memory


def _host_array(name: str, value: Any, default: Any) -> np.ndarray[Any, Any]:
    """The host array, or the device array in its place where the host can read it."""
    if type(value) is np.ndarray:
        return value
    if value is None:
        value = default
        device = getattr(default, "__dlpack_device__", None)
        if device is not None and device()[0] not in HOST_DEVICES:
            raise ValueError(
                f"CommonAttentionMetadata: `{name}` must be given for device arrays, got None"
            )
    if isinstance(value, list | tuple) and not value:
        return np.zeros(0, np.int32)  # NumPy would make floats of it
    return np.asarray(value)


def _largest(values: np.ndarray[Any, Any]) -> int:
    """The largest value, at least 0. It takes a third of the time of values.max(initial=0)."""
    return max(int(values.item(values.argmax())), 0) if values.size else 0


@dataclass(eq=False, repr=False)
class CommonAttentionMetadata(ShortRepr):
    """One step's batch, as the engine knows it. Decodes come first.

    Parameters
    ----------
    query_start_loc : [R + 1] int32
        Where each request's query tokens start.
    seq_lens : [R] int32
        Context and query of each request.
    slot_mapping : [>= T] int64 or int32
        Where each token's key is cached; -1 for padding tokens.
    block_table : [>= R, W] int32
        Pages of each request. This and slot_mapping are referenced, never copied.
    query_start_loc_cpu, seq_lens_cpu : [R + 1] and [R] integers in host memory
        The values of query_start_loc and seq_lens, as arrays or lists. They may be left out if
        those two are in host memory themselves; on CUDA they must be given. `build` reads them
        before it returns. For `sparse_mla.MetadataBuilder`, seq_lens_cpu may be an upper bound, see
        its `build`; `sparse_mla.v4.MetadataBuilder` derives positions from it and needs the values.
    num_reqs, num_actual_tokens : int
        R, and T with padding tokens included. When left out, query_start_loc decides.
    max_query_len, max_seq_len : int
        Upper bounds. When left out, the largest values of the batch.

    Raises
    ------
    ValueError
        Numbers that the arrays contradict. `MetadataBuilder.build` checks the rest.

    Source: vLLM's class of this name.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> starts, lens = np.array([0, 1, 5], np.int32), np.array([7, 4], np.int32)
    >>> slots = np.array([6, 64, 65, 66, 67])
    >>> table = np.array([[0], [1]], np.int32)
    >>> sparse_mla.CommonAttentionMetadata(starts, lens, slots, table).max_query_len
    4
    """

    query_start_loc: Array
    seq_lens: Array
    slot_mapping: Array
    block_table: Array
    _: KW_ONLY
    query_start_loc_cpu: Array = None
    seq_lens_cpu: Array = None
    num_reqs: int | None = None
    num_actual_tokens: int | None = None
    max_query_len: int | None = None
    max_seq_len: int | None = None

    def __post_init__(self) -> None:
        starts = _host_array("query_start_loc_cpu", self.query_start_loc_cpu, self.query_start_loc)
        lens = _host_array("seq_lens_cpu", self.seq_lens_cpu, self.seq_lens)
        if starts.ndim != 1 or starts.size == 0:
            got = f"shape {list(starts.shape)}"
            raise ValueError(
                f"CommonAttentionMetadata: `query_start_loc` must have shape [R + 1], got {got}"
            )
        self.query_start_loc_cpu = starts
        self.seq_lens_cpu = lens
        if self.num_reqs is None:
            self.num_reqs = len(starts) - 1
        elif self._given("num_reqs") != len(starts) - 1:
            raise ValueError(
                f"CommonAttentionMetadata: `num_reqs` must be {len(starts) - 1}, the entries of "
                f"query_start_loc less one, got {self.num_reqs}"
            )
        if self.num_actual_tokens is None:
            self.num_actual_tokens = int(starts[-1])
        else:
            self._given("num_actual_tokens")
        is_int = starts.dtype.kind in "iu"  # else `build` raises an error
        query_lens = starts[1:] - starts[:-1] if is_int else np.diff(starts)  # diff is 3x slower
        for name, values in (("max_query_len", query_lens), ("max_seq_len", lens)):
            largest = _largest(values)
            if getattr(self, name) is None:
                setattr(self, name, largest)
            elif self._given(name) < largest:
                raise ValueError(
                    f"CommonAttentionMetadata: `{name}` must be at least the batch's largest, "
                    f"{largest}, got {getattr(self, name)}"
                )

    def _given(self, name: str) -> int:
        """A size that the caller gave; stores it as an int."""
        size = as_int("CommonAttentionMetadata", name, getattr(self, name))
        setattr(self, name, size)
        return size
