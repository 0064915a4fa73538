"""What never changes: the configuration of DeepSeek V4's backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from sparse_mla import _C
from sparse_mla._format_names import takes_both
from sparse_mla._types import CacheDtypeV4, CompressedDtypeV4, IndexFormat, PathV4
from sparse_mla.backend._words import as_device, check_float, check_int, wrong_type

HEAD_SIZE = 512
INDEXED_RATIO = 4  # its layers have an indexer
PATHS = ("direct", "separate")
SYNONYMS = dict.fromkeys(("auto", "fp8", "fp8_ds_mla"), "fp8_v4")
# What the compressed cache may hold, then what the sliding window's cache may, too.
COMPRESSED_DTYPES = tuple(
    name for name, rows in _C.KV_FORMATS.items() if HEAD_SIZE in rows.values()
)
KV_CACHE_DTYPES = tuple(name for name in COMPRESSED_DTYPES if not name.startswith("fp4"))
INDEX_CACHE_DTYPES = tuple(
    name for name, rows in _C.KV_FORMATS.items() if max(rows.values()) < HEAD_SIZE
)


def _check_name(name: str, value: object, allowed: Sequence[str]) -> str:
    found = SYNONYMS.get(value, value) if isinstance(value, str) else value
    if found not in allowed:
        rule = ", ".join(map(repr, allowed))
        raise ValueError(f"Config: `{name}` must be one of {rule}, got {value!r}")
    return str(found)


@takes_both
@dataclass(frozen=True)
class Config:
    """What a model and an engine fix once.

    Parameters
    ----------
    num_heads : int
        Query heads on this device, 1 to 128.
    softmax_scale : float
        Multiplies q . k.
    window : int
        Tokens that a query sees in the sliding window, itself included.
    compress_ratios : sequence of int
        The ratios of the model's layers, at most four different ones above 1. Repetitions are left
        out, and so are ratios up to 1, which mean layers without compressed rows.
    topk_tokens : int
        Compressed rows that an indexer chooses at most.
    index_n_heads, o_groups : int
        Heads of the indexer, and groups of the output projection.
    kv_cache_dtype : str
        Format of the sliding window's cache: "fp8_v4" ("auto", "fp8" and "fp8_ds_mla" mean it),
        "bfloat16", "fp8_e4m3", "fp8_v41", "fp8_v41_split" or "fp8_nope".
    compressed_kv_cache_dtype : str, optional
        Format of the compressed caches: one of those, "fp4_v41" or "fp4_v41_split". None: the same.
    index_cache_dtype : "fp8_index" or "mxfp4_index"
        `kv_format`, `compressed_kv_format` and `index_kv_format` are the same options, and the same
        attributes.
    q_scale, kv_scale : float
        The scale of e4m3 queries, and that of "fp8_e4m3" caches.
    block_size, swa_block_size : int
        Tokens per page of the compressed caches (a multiple of every ratio), and of the sliding
        window's.
    state_block_sizes : dict of int
        Tokens per page of the compressors' states, for every ratio.
    max_num_seqs, max_num_batched_tokens, max_model_len : int
        The largest batch; every persistent buffer is sized by them.
    decode_threshold : int
        Query tokens that a decode has at most: 1 + the number of speculative tokens.
    prefill_chunk_size : int
        Prefills that share the workspace of path "separate" at a time.
    path : "direct" or "separate", optional
        How prefills run, see help(sparse_mla.v4). None is "direct".
    device : str
        "cpu", "cuda" (the first GPU) or "cuda:1"; a torch.device too.

    Raises
    ------
    TypeError, ValueError
        A value of the wrong type, or out of range; the text names it.

    Source: vLLM's VllmConfig, and the settings of DeepSeek V4's attention in it.

    Examples
    --------
    >>> import sparse_mla
    >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=1024)
    >>> config = sparse_mla.v4.Config(64, compress_ratios=[1, 4, 128, 4], **limits)
    >>> config.compress_ratios, config.kv_cache_dtype, config.compressed_kv_cache_dtype
    ((4, 128), 'fp8_v4', 'fp8_v4')
    >>> config.kv_format, config.compressed_kv_format, config.index_kv_format
    ('fp8_v4', 'fp8_v4', 'fp8_index')
    """

    num_heads: int
    _: KW_ONLY
    softmax_scale: float = HEAD_SIZE**-0.5
    window: int = 128
    compress_ratios: Sequence[int] = (4, 128)
    topk_tokens: int = 512
    index_n_heads: int = 64
    o_groups: int = 8
    kv_cache_dtype: CacheDtypeV4 = "fp8_v4"
    compressed_kv_cache_dtype: CompressedDtypeV4 | None = None
    index_cache_dtype: IndexFormat = "fp8_index"
    q_scale: float = 1.0
    kv_scale: float = 1.0
    block_size: int = 256
    swa_block_size: int = 64
    state_block_sizes: Mapping[int, int] = field(default_factory=lambda: {4: 4, 128: 8}, hash=False)
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    decode_threshold: int = 1
    prefill_chunk_size: int = 4
    path: PathV4 | None = None
    device: str = "cpu"
    if TYPE_CHECKING:  # the same options
        kv_format: CacheDtypeV4 = "fp8_v4"
        compressed_kv_format: CompressedDtypeV4 | None = None
        index_kv_format: IndexFormat = "fp8_index"

    def __post_init__(self) -> None:
        for name in (
            *("num_heads", "window", "topk_tokens", "index_n_heads", "o_groups", "block_size"),
            *("swa_block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
            *("decode_threshold", "prefill_chunk_size"),
        ):
            most = 128 if name == "num_heads" else None
            self._set(name, check_int("Config", name, getattr(self, name), 1, most))
        self._check_ratios()
        self._check_formats()
        if self.path is not None and self.path not in PATHS:
            rule = " or ".join(map(repr, PATHS))
            raise ValueError(f"Config: `path` must be None, {rule}, got {self.path!r}")
        self._set("device", as_device("Config", self.device))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_ratios(self) -> None:
        if isinstance(self.compress_ratios, str) or not hasattr(self.compress_ratios, "__iter__"):
            raise wrong_type("Config", "compress_ratios", "a sequence", self.compress_ratios)
        found = {check_int("Config", "compress_ratios", r, 0) for r in self.compress_ratios}
        ratios = tuple(sorted(ratio for ratio in found if ratio > 1))
        if len(ratios) > 4:
            raise ValueError(
                f"Config: `compress_ratios` must be at most 4 above 1, got {len(ratios)}"
            )
        if not isinstance(self.state_block_sizes, Mapping):
            wanted = "a dict"
            raise wrong_type("Config", "state_block_sizes", wanted, self.state_block_sizes)
        for ratio in ratios:
            if self.block_size % ratio:
                raise ValueError(
                    f"Config: `block_size` must be a multiple of the compress ratio {ratio}, got "
                    f"{self.block_size}"
                )
            if ratio not in self.state_block_sizes:
                raise ValueError(
                    f"Config: `state_block_sizes` must have an entry for ratio {ratio}, got "
                    f"{dict(self.state_block_sizes)}"
                )
        sizes = {
            ratio: check_int("Config", "state_block_sizes", self.state_block_sizes[ratio], 1)
            for ratio in ratios
        }
        self._set("compress_ratios", ratios)
        self._set("state_block_sizes", sizes)

    def _check_formats(self) -> None:
        main = _check_name("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        extra: str | None = self.compressed_kv_cache_dtype
        if extra is None:
            extra = main
        extra = _check_name("compressed_kv_cache_dtype", extra, COMPRESSED_DTYPES)
        self._set("kv_cache_dtype", main)
        self._set("compressed_kv_cache_dtype", extra)
        _check_name("index_cache_dtype", self.index_cache_dtype, INDEX_CACHE_DTYPES)
        for name in ("softmax_scale", "q_scale", "kv_scale"):
            self._set(name, check_float("Config", name, getattr(self, name)))
            if name != "softmax_scale" and getattr(self, name) <= 0:
                raise ValueError(f"Config: `{name}` must be > 0, got {getattr(self, name)}")
        if self.kv_scale != 1 and "fp8_e4m3" not in (main, extra):
            raise ValueError(
                f"Config: `kv_scale` must be 1 without a cache of fp8_e4m3, got {self.kv_scale}"
            )
