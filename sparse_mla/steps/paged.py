"""The step of attention to pages: its config and its metadata. The builders are in
paged_builder.py and paged_draft.py."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NoReturn

from sparse_mla.steps import common as steps

Array = Any


@dataclass(frozen=True)
class Config:
    """What a model and an engine fix once.

    Parameters
    ----------
    max_bs : int
        The largest number of requests; every buffer is sized by it.
    max_num_tokens : int
        Query tokens of "extend", "mixed" and "draft_extend" at most.
    max_context_len : int
        Tokens of a request at most, those of an encoder among them. Draft tokens come on top.
    page_size : int
        Tokens per page.
    topk : int
        k: branches of a draft. Up to 1 the drafts of a request are a chain, above a tree.
    num_draft_tokens : int
        N: tokens of a request that "target_verify" checks; 0 = there is no such mode, and no
        "draft_extend".
    speculative_num_steps : int
        S: steps of a draft, at most 32; 0 = there are none.
    attention_chunk : int
        C: a local layer's queries see keys of their own C positions only; 0 = no layer is local. A
        multiple of page_size, with topk up to 1.
    sliding_window_size : int
        The keys that a query of a window layer sees before its own: the model's window less 1. -1 =
        no layer has a window.
    is_encoder_decoder : bool
        Whether requests begin with tokens of an encoder, to which cross attention goes. With topk
        up to 1, and without a window.
    device : str
        "cpu", "cuda" (the first GPU) or "cuda:1"; a torch.device too.

    Raises
    ------
    TypeError, ValueError
        A value of the wrong type, or out of range; the text names it.

    Source: SGLang's FlashAttentionBackend, what it reads of a ModelRunner.

    Examples
    --------
    >>> import sparse_mla
    >>> config = sparse_mla.paged.Config(max_bs=8, max_num_tokens=64, max_context_len=1024)
    >>> config.page_size, config.sliding_window_size
    (1, -1)
    """

    _: KW_ONLY
    max_bs: int
    max_num_tokens: int
    max_context_len: int
    page_size: int = 1
    topk: int = 1
    num_draft_tokens: int = 0
    speculative_num_steps: int = 0
    attention_chunk: int = 0
    sliding_window_size: int = -1
    is_encoder_decoder: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        steps.check_fields(self, "paged")
        steps.check_choice("Config", "is_encoder_decoder", self.is_encoder_decoder, (False, True))


@dataclass(frozen=True, eq=False, repr=False)
class Part(steps.ShortRepr):
    """Queries, and a part of the keys that they see. `MetadataBuilder.build` makes it.

    Attributes
    ----------
    cache_seqlens_int32 : [n] int32
        Keys of each row.
    cu_seqlens_q : [n + 1] int32
        Where the queries of each row start.
    cu_seqlens_k : [n + 1] int32
        The running sum of cache_seqlens_int32.
    max_seq_len_q, max_seq_len_k : int
        Upper bounds, in tokens.
    page_table : [n, W] int32 or None
        The pages of each row: those of a shared prefix.
    slot_table : [n, W] int32 or None
        The slots of each row: a draft token, or a branch of a tree.

    Source: SGLang's FlashAttentionMetadata.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.paged.Part([2], [0, 1], [0, 2], 1, 2, slot_table=[[7, 8]]).page_table is None
    True
    """

    cache_seqlens_int32: Array
    cu_seqlens_q: Array
    cu_seqlens_k: Array
    max_seq_len_q: int
    max_seq_len_k: int
    page_table: Array | None = None
    slot_table: Array | None = None


@dataclass(frozen=True, eq=False, repr=False)
class LocalPart(steps.ShortRepr):
    """Local attention as a batch of virtual requests, see `sparse_mla.local_attention_batches`, for
    engines that call kernels of their own. `MetadataBuilder.build` makes it.

    Attributes
    ----------
    local_query_start_loc : [n + 1] int32
        n may be more than there are virtual requests; the rest have no tokens.
    local_seqused_k : [n] int32
    local_block_table : [n, attention_chunk / page_size] int32
    local_max_query_len, local_max_seq_len : int
        Upper bounds, in tokens.

    Source: SGLang's LocalAttentionMetadata.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.paged.LocalPart([0, 1], [3], [[5]], 1, 3).local_max_seq_len
    3
    """

    local_query_start_loc: Array
    local_seqused_k: Array
    local_block_table: Array
    local_max_query_len: int
    local_max_seq_len: int


@dataclass(frozen=True, eq=False, repr=False)
class Metadata(steps.ShortRepr):
    """One step of an engine, which every layer reads. It lies in the builder's memory, and is valid
    until the builder's next build of its mode; that of a capture is valid again after a replay.
    What a batch lacks is None.

    Attributes
    ----------
    mode : str
        As it was given to `MetadataBuilder.build`.
    cache_seqlens_int32 : [B] int32
        Keys of each request: with a tree those of its prefix, else this step's tokens, too. 0 for
        padding.
    cu_seqlens_q : [B + 1] int32
        Where the query tokens of each request start.
    cu_seqlens_k : [B + 1] int32
        The running sum of cache_seqlens_int32.
    max_seq_len_q, max_seq_len_k : int
        Upper bounds, in tokens.
    window_size : (int, int)
        (sliding_window_size, 0), or (-1, -1).
    page_table : [B, W] int32
        The pages of each request. Columns behind its keys have any value.
    cache_leftpad : [B] int32 or None
        Positions in front of the first key: those of a shared prefix, or of an encoder's last page.
    swa_page_table : [B, W] int32 or None
        The same in the window pool, for window layers and local ones.
    swa_out_cache_loc : [as out_cache_loc] int32 or None
        out_cache_loc in the window pool. Negative slots stay, and those of padding are -1.
    encoder_lens_int32 : [B] int32 or None
        Like the next three, the encoder's tokens.
    encoder_cu_seqlens_k : [B + 1] int32 or None
    encoder_max_seq_len_k : int or None
    encoder_page_table : [B, W] int32 or None
    expand : Part or None
        A tree: a row per draft token, or per branch, with the slots of the drafts that it sees.
        SGLang calls it forward_metadata_spec_decode_expand.
    swa_spec_metadata : Part or None
        The same rows for window layers: first the end of the prefix.
    prefix : Part or None
        A shared prefix: all queries as one request.
    local_attn_metadata : LocalPart or None

    Source: SGLang's FlashAttentionMetadata.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> config = sparse_mla.paged.Config(max_bs=2, max_num_tokens=8, max_context_len=8, page_size=4)
    >>> slots = np.array([[8, 9, 10, 11, 0, 1, 2, 3], [4, 5, 6, 7, 12, 13, 14, 15]], np.int32)
    >>> builder = sparse_mla.paged.MetadataBuilder(config, slots)
    >>> metadata = builder.build("decode", np.array([5, 7], np.int32), np.array([1, 0]))
    >>> metadata.page_table.tolist(), metadata.cu_seqlens_k.tolist()
    ([[1, 3], [2, 0]], [0, 5, 12])
    """

    mode: str
    cache_seqlens_int32: Array
    cu_seqlens_q: Array
    cu_seqlens_k: Array
    max_seq_len_q: int
    max_seq_len_k: int
    window_size: tuple[int, int]
    page_table: Array
    cache_leftpad: Array | None = None
    swa_page_table: Array | None = None
    swa_out_cache_loc: Array | None = None
    encoder_lens_int32: Array | None = None
    encoder_cu_seqlens_k: Array | None = None
    encoder_max_seq_len_k: int | None = None
    encoder_page_table: Array | None = None
    expand: Part | None = None
    swa_spec_metadata: Part | None = None
    prefix: Part | None = None
    local_attn_metadata: LocalPart | None = None
    _builder: Any = field(default=None, repr=False)
    _build: tuple[int, int] = field(default=(0, 0), repr=False)  # its mode, and its number
    _is_captured: bool = field(default=False, repr=False)
    _token_ids: Array = field(default=None, repr=False)
    _prefix_pages: Array = field(default=None, repr=False)
    _rest_seqlens: Array = field(default=None, repr=False)
    _rest_table: Array = field(default=None, repr=False)

    def __reduce__(self) -> NoReturn:
        """`copy` and `pickle` ask for this."""
        raise TypeError(
            "copy: `metadata` must be built again, by a copy of its builder, because it lies in "
            "the memory of its builder, got a sparse_mla.paged.Metadata"
        )
