"""The backend layer: a step is planned once and run by every layer, in the vocabulary of vLLM.

    config = Config(num_heads, ...)                   what never changes
    metadata = MetadataBuilder(config).build(common)  once per step: path, chunks, request ids
    out, lse = SparseMLA(config).forward(...)         once per layer: indices, gather, attention

Paths, visible as `metadata.path` and forced by `Config(path=...)`:

    mixed      FP8 cache, all tokens in one attention call; few heads (below 32)
    separate   FP8 cache; decodes on the cache, prefills chunk by chunk on a gathered bf16 workspace
    direct     FP8 cache; prefills on the cache too, without a workspace. Where the path is left
               open, a step on "separate" takes it if its prefills do not pay for a gather (Hopper)
    bf16       bf16 cache, all tokens in one attention call

On CUDA a step's derived arrays are on the device, in the builder's buffers. Planning needs lengths
in host memory (`query_start_loc_cpu`, `seq_lens_cpu`) and reads nothing back; `slot_mapping` and
`block_table` are referenced where the engine keeps them, at fixed addresses if graphs shall replay.
`build` sends one asynchronous copy on the block table's current stream, and `forward` on another
stream waits for it there. For a graph, call `build` outside and capture `forward`; then, for every
step, refresh the engine's arrays, `build` a batch of the captured shape (padded with requests of
length 0, slots -1 and indices -1), and replay on the stream of that build.
"""

from __future__ import annotations

import math
import operator
import re
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, ClassVar, cast

import numpy as np

from sparse_mla import _C, ops

Array = Any

KV_CACHE_DTYPES = ("auto", *_C.KV_FORMATS)  # "auto" is bfloat16
PATHS = ("mixed", "separate", "bf16", "direct")
HEAD_SIZE = _C.KV_FORMATS["bfloat16"]
HOST_DEVICES = (1, 3, 13)  # DLPack's CPU, pinned and managed memory


def _show(value: Any) -> str:
    """Arrays by dtype and shape, everything else by its repr."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    return repr(value)


def _wrong_type(op: str, name: str, wanted: str, value: Any) -> TypeError:
    return TypeError(f"{op}: `{name}` must be {wanted}, got {type(value).__name__}")


def _as_int(op: str, name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise _wrong_type(op, name, "an int", value) from None


class _ShortRepr:
    """A dataclass repr that shows arrays by dtype and shape."""

    def __repr__(self) -> str:
        shown = (f for f in fields(self) if f.repr)  # type: ignore[arg-type]
        text = ", ".join(f"{f.name}={_show(getattr(self, f.name))}" for f in shown)
        return f"{type(self).__name__}({text})"


# --- configuration -------------------------------------------------------------------------------


def _check_int(name: str, value: Any, least: int, most: int | None = None) -> int:
    number = _as_int("Config", name, value)
    if number < least or (most is not None and number > most):
        rule = {None: f"at least {least}", least: f"{least}"}.get(most, f"{least} to {most}")
        raise ValueError(f"Config: `{name}` must be {rule}, got {number}")
    return number


@dataclass(frozen=True)
class Config:
    """What a model and an engine fix once.

    Parameters
    ----------
    num_heads : int
        Query heads on this device, 1 to 128.
    softmax_scale : float
        Multiplies q . k.
    kv_lora_rank, qk_rope_head_dim : int
        512 and 64, the only sizes that there are kernels for.
    qk_nope_head_dim, v_head_dim : int
        Pn and Pv of the absorbed projections.
    kv_cache_dtype : "auto" or "bfloat16" (576 bf16 a token), or "fp8_ds_mla" (656 bytes)
    block_size : int
        Tokens per page.
    topk_tokens : int
        K: columns of topk_indices at most.
    max_num_seqs, max_num_batched_tokens, max_model_len : int
        The largest batch; every persistent buffer is sized by them.
    decode_threshold : int
        Query tokens of a decode at most: 1 + the number of speculative tokens.
    min_heads_for_bf16_prefill : int
        With an FP8 cache and fewer heads the path is "mixed", else "separate" (or step by step, see
        above, "direct").
    prefill_workspace_tokens : int, optional
        Rows of the bf16 workspace of path "separate"; None = 5 * max_model_len.
    path : "mixed", "separate", "bf16" or "direct", optional
        Forces a path; one that cannot serve the cache is a ValueError.
    device : str
        "cpu", "cuda" (the first GPU) or "cuda:1"; a torch.device too. Where the builder's buffers
        and all arrays of a step are. Whether this build and machine have it is found out by
        `MetadataBuilder`.

    Raises
    ------
    TypeError, ValueError
        A value of the wrong type, or out of range; the text names it.

    Source: vLLM's VllmConfig and AttentionSpec, what the sparse MLA backend reads of them.

    Examples
    --------
    >>> import sparse_mla
    >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=1024)
    >>> sparse_mla.Config(16, softmax_scale=192**-0.5, **limits).topk_tokens
    2048
    """

    num_heads: int
    _: KW_ONLY
    softmax_scale: float
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    kv_cache_dtype: str = "auto"
    block_size: int = 64
    topk_tokens: int = 2048
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    decode_threshold: int = 1
    min_heads_for_bf16_prefill: int = 32
    prefill_workspace_tokens: int | None = None
    path: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        bounds: dict[str, tuple[int, int | None]] = {
            "num_heads": (1, 128),
            "kv_lora_rank": (512, 512),
            "qk_nope_head_dim": (1, None),
            "qk_rope_head_dim": (64, 64),
            "v_head_dim": (1, None),
            "block_size": (1, None),
            "topk_tokens": (1, None),
            "max_num_seqs": (1, None),
            "max_num_batched_tokens": (1, None),
            "max_model_len": (1, None),
            "decode_threshold": (1, None),
            "min_heads_for_bf16_prefill": (1, None),
        }
        if self.prefill_workspace_tokens is not None:
            bounds["prefill_workspace_tokens"] = (1, None)
        for name, (least, most) in bounds.items():
            object.__setattr__(self, name, _check_int(name, getattr(self, name), least, most))
        self._check_scale()
        self._check_names()

    def _check_scale(self) -> None:
        scale = self.softmax_scale
        if isinstance(scale, str) or not hasattr(scale, "__float__"):
            got = type(scale).__name__
            raise TypeError(f"Config: `softmax_scale` must be a float, got {got}")
        object.__setattr__(self, "softmax_scale", float(scale))
        if not math.isfinite(self.softmax_scale):
            raise ValueError(f"Config: `softmax_scale` must be finite, got {self.softmax_scale}")

    def _check_names(self) -> None:
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            rule = " or ".join(map(repr, KV_CACHE_DTYPES))
            raise ValueError(
                f"Config: `kv_cache_dtype` must be {rule}, got {self.kv_cache_dtype!r}"
            )
        served = ("bf16",) if self.kv_cache_dtype != "fp8_ds_mla" else tuple(set(PATHS) - {"bf16"})
        if self.path is not None and self.path not in PATHS:
            rule = ", ".join(map(repr, PATHS))
            raise ValueError(f"Config: `path` must be None or one of {rule}, got {self.path!r}")
        if self.path is not None and self.path not in served:
            rule = " or ".join(repr(path) for path in PATHS if path in served)
            raise ValueError(
                f"Config: `path` must be {rule} for a {self.kv_cache_dtype} cache, "
                f"got {self.path!r}"
            )
        if not isinstance(self.device, str):
            object.__setattr__(self, "device", str(self.device))  # torch.device prints itself so
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ValueError(
                f"Config: `device` must be 'cpu', 'cuda' or 'cuda:N', got {self.device!r}"
            )


class Backend:
    """What an engine asks a backend about itself before it makes one: a class of facts.

    Attributes
    ----------
    name : str
        "SPARSE_MLA".
    supported_dtypes, supported_kv_cache_dtypes : list of str
        Of queries and results, and what `Config.kv_cache_dtype` may be.
    supported_kernel_block_sizes : str
        "any": tokens per page.
    supported_head_sizes : list of int
        576 values of a key, 512 without RoPE and 64 with it.
    is_mla, is_sparse : bool
        True.
    accept_output_buffer : bool
        True: `SparseMLA.forward` takes `out`.
    cudagraph_support : str
        "UNIFORM_BATCH": decodes of one query length can be captured.

    Source: vLLM's AttentionBackend and its FlashMLASparseBackend.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.Backend.name, sparse_mla.Backend.supported_kv_cache_dtypes
    ('SPARSE_MLA', ['auto', 'bfloat16', 'fp8_ds_mla'])
    """

    name: ClassVar[str] = "SPARSE_MLA"
    supported_dtypes: ClassVar[list[str]] = ["bfloat16"]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(KV_CACHE_DTYPES)
    supported_kernel_block_sizes: ClassVar[str] = "any"
    supported_head_sizes: ClassVar[list[int]] = [HEAD_SIZE]
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
        bool: 8.0 and newer by a build with CUDA (`build_info()["cuda"]` names the toolkit), none by
        a CPU-only one ("none: ...").

        Raises
        ------
        TypeError
            What does not compare with a number.

        Examples
        --------
        >>> import sparse_mla
        >>> sparse_mla.Backend.supports_compute_capability(7, 5)
        False
        """
        has_cuda = not _C.build_info()["cuda"].startswith("none")
        return has_cuda and (major, minor) >= (8, 0)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int = 1,
        head_size: int = HEAD_SIZE,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, int, int]:
        """Shape of the cache array for an engine to allocate.

        Parameters
        ----------
        num_blocks, block_size : int
            Pages, and tokens per page.
        num_kv_heads, head_size : int
            1 and 576: MLA has one head of keys.
        cache_dtype_str : str
            As `Config.kv_cache_dtype`.

        Returns
        -------
        (num_blocks, block_size, row): a row is 576 bf16, or 656 uint8 for "fp8_ds_mla".

        Raises
        ------
        ValueError
            Another number of heads, head size or cache dtype.

        Examples
        --------
        >>> import sparse_mla
        >>> sparse_mla.Backend.get_kv_cache_shape(100, 64, cache_dtype_str="fp8_ds_mla")
        (100, 64, 656)
        """
        rules = {
            "num_kv_heads": (num_kv_heads, (1,)),
            "head_size": (head_size, (HEAD_SIZE,)),
            "cache_dtype_str": (cache_dtype_str, KV_CACHE_DTYPES),
        }
        for name, (value, allowed) in rules.items():
            if value not in allowed:
                rule = " or ".join(map(repr, allowed))
                raise ValueError(
                    f"Backend.get_kv_cache_shape: `{name}` must be {rule}, got {value!r}"
                )
        return (num_blocks, block_size, _C.KV_FORMATS.get(cache_dtype_str, head_size))

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        """The class that an engine makes its metadata builder of.

        Returns
        -------
        MetadataBuilder.

        Examples
        --------
        >>> import sparse_mla
        >>> sparse_mla.Backend.get_builder_cls().__name__
        'MetadataBuilder'
        """
        return MetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[SparseMLA]:
        """The class that an engine makes its layers of.

        Returns
        -------
        SparseMLA.

        Examples
        --------
        >>> import sparse_mla
        >>> sparse_mla.Backend.get_impl_cls().__name__
        'SparseMLA'
        """
        return SparseMLA


# --- one step's batch ----------------------------------------------------------------------------


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
        return np.zeros(0, np.int32)  # NumPy takes it for floats
    return np.asarray(value)


def _largest(values: np.ndarray[Any, Any]) -> int:
    """The largest value, at least 0. A third of the time of values.max(initial=0)."""
    return max(int(values.item(values.argmax())), 0) if values.size else 0


@dataclass(eq=False, repr=False)
class CommonAttentionMetadata(_ShortRepr):
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
        The first two again, as arrays or lists. Left out, the first two themselves, if they are
        there: on CUDA they must be given. `build` reads them before it returns.
    num_reqs, num_actual_tokens : int
        R, and T, padding tokens included. Left out: as query_start_loc says.
    max_query_len, max_seq_len : int
        Upper bounds. Left out: the largest of the batch.

    Raises
    ------
    ValueError
        Numbers that the arrays contradict. The rest is checked by `MetadataBuilder.build`.

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
        is_int = starts.dtype.kind in "iu"  # else build says what is wrong
        query_lens = starts[1:] - starts[:-1] if is_int else np.diff(starts)  # np.diff: 3x slower
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
        """A size that is given, from now on an int."""
        size = _as_int("CommonAttentionMetadata", name, getattr(self, name))
        setattr(self, name, size)
        return size


# --- what a step's plan is -----------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Chunk(_ShortRepr):
    """Prefill requests whose rows fit the workspace together. `MetadataBuilder.build` makes it.

    Attributes
    ----------
    seq_lens : [n] int32
        Tokens of each request, context and query.
    tokens_slice : slice
        The chunk's query tokens, in the batch.
    block_table : [n, W] int32
        The chunk's rows of the caller's.
    req_start_idx : int
        Its first request; 0 is the batch's first prefill.
    workspace_starts : [n] int32
        First workspace row of each request.
    chunk_tot_seqlen : int
        Workspace rows in use, in tokens.

    Source: vLLM's FlashMLASparseMetadata.FP8SeparatePrefillDecode.Prefill.Chunk.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.Chunk([4], slice(1, 5), [[1]], 0, [0], 4).chunk_tot_seqlen
    4
    """

    seq_lens: Array
    tokens_slice: slice
    block_table: Array
    req_start_idx: int
    workspace_starts: Array
    chunk_tot_seqlen: int


@dataclass(frozen=True, eq=False, repr=False)
class Decode(_ShortRepr):
    """The decode part of paths "separate" and "direct". `MetadataBuilder.build` makes it.

    Attributes
    ----------
    decode_query_len : int
        Query tokens of each decode, 1 + speculative tokens.
    num_splits : int
        Ranges that the K columns of a row are cut into, to be attended to in parallel.

    Source: vLLM's FlashMLASparseMetadata.FP8SeparatePrefillDecode.Decode.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.Decode(decode_query_len=1, num_splits=1)
    Decode(decode_query_len=1, num_splits=1)
    """

    decode_query_len: int
    num_splits: int


@dataclass(frozen=True, eq=False, repr=False)
class Prefill(_ShortRepr):
    """The prefill part of path "separate". `MetadataBuilder.build` makes it.

    Attributes
    ----------
    seq_lens : [prefills] int32
        Tokens of each request, context and query.
    request_ids : [T] int32
        Number of each token's prefill request; -1 for decode tokens.
    workspace_starts : [prefills] int32
        First workspace row of each request, counted from 0 in each chunk.
    chunks : list of Chunk
        One attention call each.

    Source: vLLM's FlashMLASparseMetadata.FP8SeparatePrefillDecode.Prefill.

    Examples
    --------
    >>> import sparse_mla
    >>> len(sparse_mla.Prefill([4], [-1, 0, 0, 0, 0], [0], []).chunks)
    0
    """

    seq_lens: Array
    request_ids: Array
    workspace_starts: Array
    chunks: list[Chunk]


@dataclass(frozen=True, eq=False, repr=False)
class Metadata(_ShortRepr):
    """One step's plan, read by every layer: made by `MetadataBuilder.build`, valid until the next.

    Arrays that the engine gave are the engine's own objects. The others view the builder's
    persistent buffers, read-only, at the same addresses in every step (as `sparse_mla.Tensor` on
    CUDA, where every framework's from_dlpack takes them).

    Attributes
    ----------
    path : "mixed", "separate", "bf16" or "direct"
        How the step runs, see help(sparse_mla.backend).
    num_reqs, num_actual_tokens : int
        R, and T, padding tokens included.
    max_query_len, max_seq_len : int
        Upper bounds, in tokens.
    num_decodes, num_prefills : int
        Requests of either kind; decodes come first.
    num_decode_tokens, num_prefill_tokens : int
        Query tokens of either kind.
    block_size, topk_tokens : int
        Tokens per page, and K, of the config.
    query_start_loc : [R + 1] int32
        The engine's, as are the next two.
    slot_mapping : [>= T] int64 or int32
    block_table : [>= R, W] int32
    req_id_per_token : [T] int32
        The request of each token; 0 for padding tokens.
    decode : Decode or None
        There on "separate" and "direct" with decodes.
    prefill : Prefill or None
        There on "separate" with prefills.

    Source: vLLM's FlashMLASparseMetadata.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
    >>> config = sparse_mla.Config(16, softmax_scale=0.1, kv_cache_dtype="fp8_ds_mla", **limits)
    >>> starts, lens = np.array([0, 1, 5], np.int32), np.array([7, 4], np.int32)
    >>> slots = np.array([6, 64, 65, 66, 67])
    >>> table = np.array([[0], [1]], np.int32)
    >>> common = sparse_mla.CommonAttentionMetadata(starts, lens, slots, table)
    >>> metadata = sparse_mla.MetadataBuilder(config).build(common)
    >>> metadata.path, metadata.num_decodes, metadata.req_id_per_token.tolist()
    ('mixed', 1, [0, 1, 1, 1, 1])
    """

    path: str
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    block_size: int
    topk_tokens: int
    query_start_loc: Array
    slot_mapping: Array
    block_table: Array
    req_id_per_token: Array
    decode: Decode | None
    prefill: Prefill | None
    _builder: _C.Builder = field(repr=False)
    _generation: int = field(repr=False)


def _make_prefill(step: dict[str, Any], block_table: Array) -> Prefill:
    lens, starts = step["prefill_seq_lens"], step["prefill_workspace_starts"]
    first = step["num_decodes"]
    chunks = [
        Chunk(
            seq_lens=lens[req_start:req_end],
            tokens_slice=slice(token_start, token_end),
            block_table=block_table[first + req_start : first + req_end],
            req_start_idx=req_start,
            workspace_starts=starts[req_start:req_end],
            chunk_tot_seqlen=tot_seqlen,
        )
        for req_start, req_end, token_start, token_end, tot_seqlen in step["chunks"]
    ]
    return Prefill(lens, step["prefill_request_ids"], starts, chunks)


class MetadataBuilder:
    """Plans steps. Holds every buffer that a plan needs, sized once for the largest batch.

    One thread at a time; a second one gets a RuntimeError.

    Parameters
    ----------
    config : Config
    workspace : [tokens, 576] bf16, optional
        The prefill workspace of path "separate", shared by all layers; left out, the builder's own.
        It is kept until the builder goes.

    Attributes
    ----------
    config : Config
    workspace_bytes : int
        Bytes of the prefill workspace, 0 where the path needs none.

    Raises
    ------
    TypeError, ValueError, RuntimeError, MemoryError
        No Config, a workspace that does not fit it, a device that this build lacks, no memory.

    Source: vLLM's FlashMLASparseMetadataBuilder.

    Examples
    --------
    >>> import sparse_mla
    >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
    >>> config = sparse_mla.Config(64, softmax_scale=0.1, kv_cache_dtype="fp8_ds_mla", **limits)
    >>> sparse_mla.MetadataBuilder(config).workspace_bytes == 5 * 128 * 576 * 2
    True
    """

    def __init__(self, config: Config, *, workspace: Array | None = None) -> None:
        if not isinstance(config, Config):
            raise _wrong_type("MetadataBuilder", "config", "a Config", config)
        self.config = config
        self._builder = _C.Builder(
            config.num_heads,
            config.block_size,
            config.topk_tokens,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.max_model_len,
            config.decode_threshold,
            config.min_heads_for_bf16_prefill,
            config.prefill_workspace_tokens or 0,
            config.kv_cache_dtype,
            config.path,
            config.device,
            workspace,
        )

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the prefill workspace, 0 where the path needs none."""
        return self._builder.workspace_bytes

    def __repr__(self) -> str:
        return f"MetadataBuilder({self.config!r}, workspace_bytes={self.workspace_bytes})"

    def build(
        self,
        common: CommonAttentionMetadata,
        *,
        common_prefix_len: int = 0,
        fast_build: bool = False,
    ) -> Metadata:
        """Plan one step.

        Host arrays are read now, the block table is referenced until the next build. On CUDA the
        plan travels in one copy from pinned memory, on the current stream of the block table's
        framework (the legacy default stream where it cannot be known). Nothing is synchronised, and
        the next build may follow at once: the staging memory in flight is left alone. Not to be
        captured in a graph, see above.

        Parameters
        ----------
        common : CommonAttentionMetadata
        common_prefix_len, fast_build : int and bool
            Accepted as engines pass them. A plan is the same whatever they are.

        Returns
        -------
        Metadata, valid until the next build of this builder. After an error the former is.

        Raises
        ------
        TypeError
            What is no CommonAttentionMetadata, a slot_mapping that is no array.
        ValueError
            Lengths that are negative, decrease or contradict each other, a batch beyond the config,
            a block table too narrow, prefills before decodes (where the path has both parts), a
            request longer than the workspace.

        Source: vLLM's FlashMLASparseMetadataBuilder.build.

        Examples
        --------
        >>> import numpy as np, sparse_mla
        >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
        >>> config = sparse_mla.Config(64, softmax_scale=0.1, kv_cache_dtype="fp8_ds_mla", **limits)
        >>> builder = sparse_mla.MetadataBuilder(config)
        >>> starts, lens = np.array([0, 1, 5], np.int32), np.array([7, 4], np.int32)
        >>> slots, table = np.array([6, 64, 65, 66, 67]), np.array([[0], [1]], np.int32)
        >>> common = sparse_mla.CommonAttentionMetadata(starts, lens, slots, table)
        >>> metadata = builder.build(common)
        >>> metadata.path, metadata.num_decodes, metadata.prefill.chunks[0].tokens_slice
        ('separate', 1, slice(1, 5, None))
        """
        if not isinstance(common, CommonAttentionMetadata):
            wanted = "a CommonAttentionMetadata"
            raise _wrong_type("MetadataBuilder.build", "common", wanted, common)
        # None only says "left out" in the signature: making `common` has filled these in.
        sizes = (common.num_reqs, common.num_actual_tokens)
        num_reqs, num_actual_tokens = cast(tuple[int, int], sizes)
        shape = getattr(common.slot_mapping, "shape", None)
        if shape is None:
            got = type(common.slot_mapping).__name__
            raise TypeError(f"MetadataBuilder.build: `slot_mapping` must be an array, got {got}")
        if len(shape) != 1 or shape[0] < num_actual_tokens:
            raise ValueError(
                f"MetadataBuilder.build: `slot_mapping` must have at least num_actual_tokens = "
                f"{num_actual_tokens} entries, got shape {list(shape)}"
            )
        step = self._builder.build(
            common.query_start_loc_cpu,
            common.seq_lens_cpu,
            common.block_table,
            num_reqs,
            num_actual_tokens,
            None,
        )
        decode = prefill = None
        if step["decode_query_len"]:
            decode = Decode(step["decode_query_len"], step["decode_num_splits"])
        if step["chunks"]:
            prefill = _make_prefill(step, common.block_table)
        # A frozen dataclass sets its fields one by one, three times as slow as this.
        metadata = object.__new__(Metadata)
        metadata.__dict__.update(
            path=step["path"],
            num_reqs=num_reqs,
            num_actual_tokens=num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            num_decodes=step["num_decodes"],
            num_prefills=step["num_prefills"],
            num_decode_tokens=step["num_decode_tokens"],
            num_prefill_tokens=step["num_prefill_tokens"],
            block_size=self.config.block_size,
            topk_tokens=self.config.topk_tokens,
            query_start_loc=common.query_start_loc,
            slot_mapping=common.slot_mapping,
            block_table=common.block_table,
            req_id_per_token=step["req_id_per_token"],
            decode=decode,
            prefill=prefill,
            _builder=self._builder,
            _generation=step["generation"],
        )
        return metadata


# --- one layer -----------------------------------------------------------------------------------


class SparseMLA:
    """One layer's attention, and its absorbed projections.

    Parameters
    ----------
    config : Config
    kv_b_proj : [512, H * (Pn + Pv)] bf16, fp16, fp32 or e4m3, its transpose, or a layer, optional
        What `split_kv_b_proj` takes; makes `W_UK` and `W_UV`, which are None without it.
    weight_scale_inv : [ceil(rows / 128), ceil(columns / 128)] fp32, optional
        Block scales of an e4m3 weight.

    Attributes
    ----------
    config : Config
    W_UK, W_UV : [512, H, Pn] and [512, H, Pv] bf16, or None

    Raises
    ------
    TypeError, ValueError
        No Config; else what `split_kv_b_proj` raises.

    Source: vLLM's FlashMLASparseImpl.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
    >>> config = sparse_mla.Config(2, softmax_scale=0.1, **limits)
    >>> sparse_mla.SparseMLA(config, kv_b_proj=np.ones((512, 512), np.float32)).W_UK.shape
    (512, 2, 128)
    """

    W_UK: Array
    W_UV: Array

    def __init__(
        self,
        config: Config,
        *,
        kv_b_proj: Array | None = None,
        weight_scale_inv: Array | None = None,
    ) -> None:
        if not isinstance(config, Config):
            raise _wrong_type("SparseMLA", "config", "a Config", config)
        self.config = config
        self.W_UK = self.W_UV = None
        if kv_b_proj is not None:
            self.W_UK, self.W_UV = ops.split_kv_b_proj(
                kv_b_proj,
                num_heads=config.num_heads,
                qk_nope_head_dim=config.qk_nope_head_dim,
                v_head_dim=config.v_head_dim,
                weight_scale_inv=weight_scale_inv,
            )

    def __repr__(self) -> str:
        return f"SparseMLA({self.config!r}, W_UK={_show(self.W_UK)}, W_UV={_show(self.W_UV)})"

    def forward(
        self,
        q: Array | tuple[Array, Array],
        kv_cache: Array,
        topk_indices: Array,
        metadata: Metadata,
        *,
        attn_sink: Array | None = None,
        out: Array | None = None,
        lse: Array | None = None,
        stream: Any = None,
    ) -> tuple[Array, Array]:
        """Attend, by the metadata's path, for all tokens of the step.

        Parameters
        ----------
        q : [>= T, H, 576] bf16, or a pair ([>= T, H, 512], [>= T, H, 64])
        kv_cache : [pages, block_size, row], row = 576 bf16 or 656 bytes as the config says
        topk_indices : [>= T, K] int32
            Positions inside each request, -1 = none, as the indexer gives them.
        metadata : Metadata
            Of its builder's latest build.
        attn_sink : [H] fp32, optional
            Multiplies out by 1 / (1 + exp(sink - lse)); lse is unchanged.
        out : [>= T, H, 512] bf16, optional
        lse : [>= T, H] fp32, optional
            Natural logarithms.
        stream : int handle or stream object, optional

        Returns
        -------
        (out, lse) with q's number of rows when they were left out. Only the first
        num_actual_tokens are written; of arrays that this call made the others are zero.

        Raises
        ------
        TypeError, ValueError, BufferError, RuntimeError, MemoryError
            Metadata that a later build replaced; what `sparse_attention` and `gather_kv_cache`
            raise, before anything is written.

        Source: vLLM's FlashMLASparseImpl.forward_mqa.

        Examples
        --------
        >>> import numpy as np, ml_dtypes, sparse_mla
        >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
        >>> config = sparse_mla.Config(2, softmax_scale=192**-0.5, topk_tokens=3, **limits)
        >>> cache = np.ones((4, 64, 576), ml_dtypes.bfloat16)
        >>> starts, lens = np.array([0, 1], np.int32), np.array([7], np.int32)
        >>> slots, table = np.array([70]), np.array([[1]], np.int32)  # one decode, in page 1
        >>> common = sparse_mla.CommonAttentionMetadata(starts, lens, slots, table)
        >>> metadata = sparse_mla.MetadataBuilder(config).build(common)
        >>> q, topk = np.zeros((1, 2, 576), ml_dtypes.bfloat16), np.array([[0, 6, -1]], np.int32)
        >>> out, lse = sparse_mla.SparseMLA(config).forward(q, cache, topk, metadata)
        >>> out.shape, np.exp(lse).round(3).tolist()
        ((1, 2, 512), [[2.0, 2.0]])
        """
        if not isinstance(metadata, Metadata):
            wanted = "what MetadataBuilder.build returned for this step"
            raise _wrong_type("SparseMLA.forward", "metadata", wanted, metadata)
        return metadata._builder.forward(
            q,
            kv_cache,
            topk_indices,
            attn_sink,
            out,
            lse,
            self.config.softmax_scale,
            metadata._generation,
            stream,
        )

    def k_up_proj(self, q_nope: Array, *, out: Array | None = None, stream: Any = None) -> Array:
        """`sparse_mla.k_up_proj` with this layer's W_UK.

        Parameters
        ----------
        q_nope : [T, H, Pn] bf16
        out : [T, H, 512] bf16, optional
        stream : int handle or stream object, optional

        Returns
        -------
        out.

        Raises
        ------
        TypeError, ValueError, BufferError, RuntimeError, MemoryError
            A layer without kv_b_proj; else what `sparse_mla.k_up_proj` raises.

        Source: see `sparse_mla.k_up_proj`.

        Examples
        --------
        >>> import numpy as np, ml_dtypes, sparse_mla
        >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
        >>> config = sparse_mla.Config(2, softmax_scale=0.1, **limits)
        >>> layer = sparse_mla.SparseMLA(config, kv_b_proj=np.ones((512, 512), np.float32))
        >>> layer.k_up_proj(np.ones((1, 2, 128), ml_dtypes.bfloat16))[0, 0, 0].item()
        128.0
        """
        return ops.k_up_proj(q_nope, self._weight(self.W_UK, "k_up_proj"), out=out, stream=stream)

    def v_up_proj(self, x: Array, *, out: Array | None = None, stream: Any = None) -> Array:
        """`sparse_mla.v_up_proj` with this layer's W_UV.

        Parameters
        ----------
        x : [T, H, 512] bf16
        out : [T, H, Pv] bf16, optional
        stream : int handle or stream object, optional

        Returns
        -------
        out.

        Raises
        ------
        TypeError, ValueError, BufferError, RuntimeError, MemoryError
            A layer without kv_b_proj; else what `sparse_mla.v_up_proj` raises.

        Source: see `sparse_mla.v_up_proj`.

        Examples
        --------
        >>> import numpy as np, ml_dtypes, sparse_mla
        >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
        >>> config = sparse_mla.Config(2, softmax_scale=0.1, **limits)
        >>> layer = sparse_mla.SparseMLA(config, kv_b_proj=np.ones((512, 512), np.float32))
        >>> layer.v_up_proj(np.ones((1, 2, 512), ml_dtypes.bfloat16))[0, 0, 0].item()
        512.0
        """
        return ops.v_up_proj(x, self._weight(self.W_UV, "v_up_proj"), out=out, stream=stream)

    @staticmethod
    def _weight(weight: Array, op: str) -> Array:
        if weight is None:
            raise ValueError(f"{op}: `kv_b_proj` must be given to SparseMLA, got None")
        return weight
