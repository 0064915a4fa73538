"""What never changes: the configuration of a backend."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from sparse_mla import _C
from sparse_mla._format_names import takes_both
from sparse_mla._types import ConcatFormat, Path
from sparse_mla.backend._words import as_device, check_float, check_int

PATHS = ("mixed", "separate", "bf16", "direct")
HEAD_SIZE = max(_C.KV_FORMATS["bfloat16"].values())  # values of a key, its RoPE part included
# "auto" is bfloat16.
KV_CACHE_DTYPES = (
    "auto", *(name for name, rows in _C.KV_FORMATS.items() if HEAD_SIZE in rows.values())
)  # fmt: skip


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
    kv_lora_rank, qk_rope_head_dim : int
        512 and 64, the only sizes that there are kernels for.
    qk_nope_head_dim, v_head_dim : int
        Pn and Pv of the absorbed projections.
    kv_cache_dtype : "auto" or "bfloat16" (576 bf16 a token), or "fp8_ds_mla" (656 bytes)
        `kv_format` is the same option, and the same attribute.
    block_size : int
        Tokens per page.
    topk_tokens : int
        K, the columns that topk_indices has at most.
    max_num_seqs, max_num_batched_tokens, max_model_len : int
        The largest batch; every persistent buffer is sized by them.
    decode_threshold : int
        Query tokens that a decode has at most: 1 + the number of speculative tokens.
    min_heads_for_bf16_prefill : int
        With an FP8 cache and fewer heads the path is "mixed". With more heads it is "separate", or
        "direct" in some steps, see help(sparse_mla.backend).
    prefill_workspace_tokens : int, optional
        Rows of the bf16 workspace of path "separate"; None = 5 * max_model_len.
    path : "mixed", "separate", "bf16" or "direct", optional
        Forces a path; a path that cannot serve the cache is a ValueError.
    device : str
        "cpu", "cuda" (the first GPU) or "cuda:1"; a torch.device too. The builder's buffers and all
        arrays of a step are on this device. `MetadataBuilder` finds out whether this build and this
        machine have it.

    Raises
    ------
    TypeError, ValueError
        A value of the wrong type, or out of range; the text names it.

    Source: vLLM's VllmConfig and AttentionSpec, what the sparse MLA backend reads of them.

    Examples
    --------
    >>> import sparse_mla
    >>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=1024)
    >>> config = sparse_mla.Config(16, softmax_scale=192**-0.5, kv_format="fp8_ds_mla", **limits)
    >>> config.topk_tokens, config.kv_cache_dtype, config.kv_format
    (2048, 'fp8_ds_mla', 'fp8_ds_mla')
    """

    num_heads: int
    _: KW_ONLY
    softmax_scale: float
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    kv_cache_dtype: ConcatFormat = "auto"
    block_size: int = 64
    topk_tokens: int = 2048
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    decode_threshold: int = 1
    min_heads_for_bf16_prefill: int = 32
    prefill_workspace_tokens: int | None = None
    path: Path | None = None
    device: str = "cpu"
    if TYPE_CHECKING:
        kv_format: ConcatFormat = "auto"  # the same option

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
            number = check_int("Config", name, getattr(self, name), least, most)
            object.__setattr__(self, name, number)
        scale = check_float("Config", "softmax_scale", self.softmax_scale)
        object.__setattr__(self, "softmax_scale", scale)
        self._check_names()

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
        object.__setattr__(self, "device", as_device("Config", self.device))
