"""What the steps of all plans share: checks of a config, a batch as an engine knows it, the builder
around C's `Step`, and the facts of a backend. A plan is a file beside this one.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np

from sparse_mla import _C

Array = Any
AnyMetadata = TypeVar("AnyMetadata")


# --- words ---------------------------------------------------------------------------------------


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


# --- config --------------------------------------------------------------------------------------

# Limits from here on are those of C's numbers, not of a model: a builder reports them.
LIMITS_OF_NUMBERS = 2**30 - 1


def check_fields(config: Any, plan: str) -> None:
    """Checks a config's numbers and device, and stores them as plain ints, floats and text.

    C's table of the plan has the limits of the fields that C knows. Others are at least 1, or have
    the one size that their metadata names.
    """
    known = _C.CONFIG_FIELDS[plan]
    texts: dict[str, Any] = {"int": (int,), "int | None": (int, type(None))}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.type not in texts or (value is None and type(None) in texts[field.type]):
            continue
        _, least, most = known.get(field.name, ("count", 1, LIMITS_OF_NUMBERS))
        if "only" in field.metadata:
            least = most = field.metadata["only"]
        limit = most if most < LIMITS_OF_NUMBERS else None
        set_fields(config, **{field.name: check_int("Config", field.name, value, least, limit)})
    for field in fields(config):
        if field.type == "float":
            number = check_float("Config", field.name, getattr(config, field.name))
            set_fields(config, **{field.name: number})
            if known.get(field.name, ("number",))[0] == "scale" and number <= 0:
                raise ValueError(f"Config: `{field.name}` must be > 0, got {number}")
    if known.get("cp", ("",))[0] == "share" and config.cp is not None:
        set_fields(config, cp=as_share("Config", config.cp, known["cp"][2]))
    set_fields(config, device=as_device("Config", config.device))


def as_share(op: str, cp: Any, most: int = LIMITS_OF_NUMBERS) -> tuple[int, int, int]:
    """Checks a rank's share of a cache."""
    if not isinstance(cp, tuple | list):
        raise wrong_type(op, "cp", "a tuple of 3 ints", cp)
    rank, ranks, interleave = [as_int(op, "cp", x) for x in cp] if len(cp) == 3 else [-1, 0, 0]
    if not (0 <= rank < ranks <= most and 1 <= interleave <= most):
        raise ValueError(
            f"{op}: `cp` must be (rank, ranks, interleave) with 0 <= rank < ranks and interleave "
            f">= 1, got {cp!r}"
        )
    return rank, ranks, interleave


def set_fields(config: Any, **values: object) -> None:
    """Stores values in a frozen config."""
    for name, value in values.items():
        object.__setattr__(config, name, value)


# --- cache ---------------------------------------------------------------------------------------


def rows_of(head_size: int, formats: Iterable[str] = _C.KV_FORMATS) -> dict[str, int]:
    """The formats of keys of this size -> the last dimension of a cache. "auto" is bfloat16."""
    found = {
        name: row
        for name in formats
        for row, size in _C.KV_FORMATS[name].items()
        if size == head_size
    }
    return {"auto": found["bfloat16"]} | found


def check_choice(op: str, name: str, value: object, allowed: Iterable[object]) -> None:
    if value not in (choices := tuple(allowed)):
        rule = " or ".join(map(repr, choices))
        raise ValueError(f"{op}: `{name}` must be {rule}, got {value!r}")


# --- batch ---------------------------------------------------------------------------------------

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


def _longest(lens: np.ndarray[Any, Any], query_lens: np.ndarray[Any, Any]) -> int:
    """The largest length of a request with query tokens: nothing attends to the keys of others."""
    if lens.size and lens.shape == query_lens.shape and not query_lens.item(lens.argmax()):
        lens = lens[query_lens != 0]
    return _largest(lens)


@dataclass(eq=False, repr=False)
class CommonAttentionMetadata(ShortRepr):
    """One step's batch, as the engine knows it. Decodes come first.

    Requests without query tokens (idle, cancelled, or padding) may stand anywhere. Before the first
    prefill they count as decodes, behind it as prefills. A step reads nothing of them, and all
    other results are those of the batch without them, bit for bit.

    Parameters
    ----------
    query_start_loc : [R + 1] int32
        Where each request's query tokens start.
    seq_lens : [R] int32
        Context and query of each request.
    slot_mapping : [>= T] int64 or int32
        Where each token's key is cached; -1 for padding tokens, and with `Config.cp` for tokens of
        other ranks: a step takes it as it is.
    block_table : [>= R, W] int32
        Pages of each request; with `Config.cp` those of the rank's own tokens. This and
        slot_mapping are referenced, never copied.
    query_start_loc_cpu, seq_lens_cpu : [R + 1] and [R] integers in host memory
        The values of query_start_loc and seq_lens, as arrays or lists. They may be left out if
        those two are in host memory themselves; on CUDA they must be given. `build` reads them
        before it returns. For `sparse_mla.MetadataBuilder`, seq_lens_cpu may be an upper bound, see
        its `build`; `sparse_mla.v4.MetadataBuilder` derives positions from it and needs the values.
    num_reqs, num_actual_tokens : int
        R, and T with padding tokens included. When left out, query_start_loc decides.
    max_query_len, max_seq_len : int
        Upper bounds. When left out, the largest values of the batch; max_seq_len is that of the
        requests with query tokens.

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
        longest = _longest(lens, query_lens)
        for name, largest in (("max_query_len", _largest(query_lens)), ("max_seq_len", longest)):
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


# --- builder -------------------------------------------------------------------------------------

# Fields that every plan's step hands over as they are.
_STEP_FIELDS = (
    *("path", "num_decodes", "num_prefills", "num_decode_tokens", "num_prefill_tokens"),
    "req_id_per_token",
)


def check_common(common: CommonAttentionMetadata) -> None:
    """Checks what `build` was given."""
    if not isinstance(common, CommonAttentionMetadata):
        wanted = "a CommonAttentionMetadata"
        raise wrong_type("MetadataBuilder.build", "common", wanted, common)


@dataclass(frozen=True, eq=False, repr=False)
class BatchMetadata(ShortRepr):
    """The fields that the metadata of all plans begin with."""

    path: str
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int

    def __reduce__(self) -> NoReturn:
        """`copy` and `pickle` ask for this."""
        kind = type(self)
        raise TypeError(
            "copy: `metadata` must be built again, by copies of its builder and of "
            "CommonAttentionMetadata, because it lies in the memory of its builder, got a "
            f"{kind.__module__}.{kind.__qualname__}"
        )


@dataclass(frozen=True, eq=False, repr=False)
class StepMetadata(BatchMetadata):
    """Those of plans whose layers attend to chosen tokens."""

    block_size: int
    topk_tokens: int
    query_start_loc: Array
    slot_mapping: Array
    block_table: Array
    req_id_per_token: Array


def make_metadata(
    kind: type[AnyMetadata],
    common: CommonAttentionMetadata,
    builder: Builder,
    step: dict[str, Any],
    **fields: object,
) -> AnyMetadata:
    """Metadata of a step, with what every builder knows of it and these fields."""
    # A frozen dataclass would set its fields one by one, which takes three times as long.
    metadata = object.__new__(kind)
    metadata.__dict__.update(
        {name: step[name] for name in _STEP_FIELDS},
        num_reqs=common.num_reqs,
        num_actual_tokens=common.num_actual_tokens,
        max_query_len=common.max_query_len,
        max_seq_len=common.max_seq_len,
        query_start_loc=common.query_start_loc,
        slot_mapping=common.slot_mapping,
        block_table=common.block_table,
        _step=builder._step,
        _generation=step["generation"],
        **fields,
    )
    return metadata


class Builder:
    """What the builders of all plans are: a config, and the step that C made of it."""

    config: Any
    _step: _C.Step

    def _create(
        self,
        plan: str,
        config: Any,
        kind: type,
        wanted: str,
        *workspaces: Array | None,
        **changes: Any,
    ) -> None:
        """`changes` are fields that C knows by other values than the config has."""
        if not isinstance(config, kind):
            raise wrong_type("MetadataBuilder", "config", wanted, config)
        self.config = config
        self._step = _C.Step(plan, vars(config) | changes, *workspaces)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the prefill workspace, 0 where the path needs none."""
        return self._step.workspace_bytes

    def __reduce__(self) -> tuple[type, tuple[Any]]:
        """A copy is a new builder of this config, with memory of its own and without a step."""
        return type(self), (self.config,)

    def __repr__(self) -> str:
        return f"MetadataBuilder({self.config!r}, workspace_bytes={self.workspace_bytes})"


# --- facts ---------------------------------------------------------------------------------------


def find_cache_shape(
    plan: str,
    cache_rows: Mapping[int, Mapping[str, int]],
    *,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    cache_dtype_str: str,
) -> tuple[int, int, int]:
    """`get_kv_cache_shape` of a plan whose caches are those of `cache_rows`, by head size."""
    op = "Backend.get_kv_cache_shape"
    check_choice(op, "num_kv_heads", num_kv_heads, (1,))
    check_choice(op, "head_size", head_size, cache_rows)
    check_choice(op, "cache_dtype_str", cache_dtype_str, cache_rows[head_size])
    _, least, most = _C.CONFIG_FIELDS[plan]["block_size"]
    return (
        check_int(op, "num_blocks", num_blocks, 0),
        check_int(op, "block_size", block_size, least, most),
        cache_rows[head_size][cache_dtype_str],
    )


class CommonFacts:
    """The facts that hold for the backend of any model."""

    _classes: ClassVar[tuple[type[Any], type[Any]]]  # its builder and its layer

    supported_dtypes: ClassVar[list[str]] = ["bfloat16"]
    supported_kernel_block_sizes: ClassVar[str] = "any"
    is_mla: ClassVar[bool] = True
    is_sparse: ClassVar[bool] = True
    accept_output_buffer: ClassVar[bool] = True
    cudagraph_support: ClassVar[str] = "UNIFORM_BATCH"

    @staticmethod
    def supports_compute_capability(major: int, minor: int) -> bool:
        """Whether GPUs of this compute capability are served.

        Parameters
        ----------
        major, minor : int
            9 and 0 for Hopper.

        Returns
        -------
        bool: True for 8.0 and newer in a build with CUDA (`build_info()["cuda"]` names the
        toolkit). False for all in a CPU-only build ("none: ...").

        Raises
        ------
        TypeError
            An argument that does not compare with a number.

        Examples
        --------
        >>> import sparse_mla
        >>> sparse_mla.Backend.supports_compute_capability(7, 5)
        False
        """
        has_cuda = not _C.build_info()["cuda"].startswith("none")
        return has_cuda and (major, minor) >= (8, 0)

    @classmethod
    def get_builder_cls(cls) -> type[Any]:
        """The class that an engine makes its metadata builder of.

        Returns
        -------
        type: `MetadataBuilder` of the same module.

        Examples
        --------
        >>> import sparse_mla
        >>> sparse_mla.Backend.get_builder_cls().__name__
        'MetadataBuilder'
        """
        return cls._classes[0]

    @classmethod
    def get_impl_cls(cls) -> type[Any]:
        """The class that an engine makes its layers of.

        Returns
        -------
        type: `SparseMLA` or `DenseMLA` of the same module.

        Examples
        --------
        >>> import sparse_mla
        >>> sparse_mla.Backend.get_impl_cls().__name__
        'SparseMLA'
        """
        return cls._classes[1]
