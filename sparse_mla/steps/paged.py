"""The step of attention to pages: its config, its metadata, and the builder that makes it.

The builder of all steps of a draft is in paged_draft.py.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NoReturn

from sparse_mla.steps import common as steps
from sparse_mla.steps.memory import Memory

Array = Any

# The numbers of smla_forward_mode. A step of a draft is a decode with a spec_step.
DRAFT = 2
MODES = {
    "decode": 1,
    "idle": 1,
    "target_verify": 3,
    "extend": 4,
    "mixed": 4,
    "draft_extend": 5,
}
# The groups of a step's views, see plan_paged.c.
STEP, EXPAND, SWA_SPEC, PREFIX, LOCAL, GROUPS = range(6)


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
    until the builder's next build of its mode. What a batch lacks is None.

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
        out_cache_loc in the window pool. Negative slots stay.
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


class Builder(steps.Builder):
    """What both builders share: arrays of the engine that outlive a step, and memory of layers."""

    def __init__(self, config: Config, req_to_token: Array, mapping: Array, drafts_only: bool):
        self.req_to_token = req_to_token
        self.full_to_swa_index_mapping = mapping
        self._memory = Memory()
        window = getattr(config, "sliding_window_size", -1)
        self._create(
            "paged",
            config,
            Config,
            "a paged.Config",
            None,
            has_window=window >= 0,
            has_window_pool=mapping is not None,
            drafts_only=drafts_only,
        )
        self._window_size = (window, 0) if window >= 0 else (-1, -1)
        self._most_tokens = max(
            config.max_num_tokens, config.max_bs * max(config.topk, config.num_draft_tokens, 1)
        )
        self._latest: dict[int, int] = {}  # mode -> the number of its latest build

    @property
    def workspace_bytes(self) -> int:
        """Everything that steps and their layers use of the device."""
        return self._step.workspace_bytes + self._memory.num_bytes

    def _show(self, mode: str, step: dict[Any, Any], build: int, number: int) -> Metadata:
        """The metadata of step `number` of a build in mode number `build`."""
        first = GROUPS * number
        self._latest[build] = step["generation"]
        shown = object.__new__(Metadata)  # as `steps.make_metadata` does
        shown.__dict__.update(
            step[first + STEP],
            mode=mode,
            window_size=self._window_size,
            _builder=self,
            _build=(build, step["generation"]),
        )
        for group, name, kind in PARTS:
            if first + group in step:
                part = object.__new__(kind)
                part.__dict__.update(step[first + group])
                shown.__dict__[name] = part
        return shown

    def _check(self, metadata: Metadata) -> None:
        """Checks that no later build of its mode has replaced the metadata."""
        build, number = metadata._build
        if self._latest[build] != number:
            raise ValueError(
                "attention: `metadata` must come from its builder's latest build of its mode "
                f"(number {self._latest[build]}), got that of build {number}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is a new builder of the same config and arrays, with memory of its own."""
        return _copy, (
            type(self),
            self.config,
            self.req_to_token,
            self.full_to_swa_index_mapping,
        )


class MetadataBuilder(Builder):
    """Makes the metadata of an engine's steps. The builder holds every array of it, sized once for
    the largest batch, in every mode.

    Only one thread may use it at a time; a second one gets a RuntimeError. A copy, or what a pickle
    gives, is a new builder of the same config and arrays.

    Parameters
    ----------
    config : Config
    req_to_token : [rows, width] int32
        The slot of each position of a request, whose tokens fill pages: slot = page * page_size +
        offset. Rows may be any stride apart. The builder refers to it, and `build` reads it.
    full_to_swa_index_mapping : [slots] int32, optional
        The slot in a smaller pool, where window layers and local ones have their keys, of each slot
        of the full one. 0 or -1 where a token has left the window.

    Attributes
    ----------
    config : Config
    req_to_token, full_to_swa_index_mapping : arrays, the second or None
        They may be replaced by others of the same kind.
    seq_len_fill_value : int
        0: the length of a request that only fills a batch up.
    workspace_bytes : int
        Everything that steps use of the device. `attention` adds its scratch memory at first use.

    Raises
    ------
    TypeError, ValueError, RuntimeError, MemoryError
        No Config; a chunk that is no multiple of a page, or beside a tree; an encoder beside a tree
        or a window; a device that this build lacks, no memory.

    Source: SGLang's FlashAttentionBackend.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> config = sparse_mla.paged.Config(max_bs=2, max_num_tokens=8, max_context_len=8)
    >>> slots = np.arange(16, dtype=np.int32).reshape(2, 8)
    >>> sparse_mla.paged.MetadataBuilder(config, slots).seq_len_fill_value
    0
    """

    seq_len_fill_value = 0

    def __init__(
        self,
        config: Config,
        req_to_token: Array,
        *,
        full_to_swa_index_mapping: Array | None = None,
    ) -> None:
        super().__init__(config, req_to_token, full_to_swa_index_mapping, False)

    def build(
        self,
        mode: str,
        seq_lens: Array,
        req_pool_indices: Array,
        *,
        seq_lens_cpu: Array | None = None,
        extend_seq_lens: Array | None = None,
        extend_seq_lens_cpu: Array | None = None,
        spec_step: int | None = None,
        out_cache_loc: Array | None = None,
        custom_mask: Array | None = None,
        encoder_lens: Array | None = None,
        encoder_lens_cpu: Array | None = None,
        common_prefix_len: int = 0,
        stream: Any = None,
    ) -> Metadata:
        """Make the metadata of one step.

        A kernel writes it from the arrays, so nothing is copied to a device or back, and nothing is
        synchronised. The host knows maxima alone, which size what is returned. A request whose
        seq_len is not positive is padding: it has no keys, and in the modes that extend no tokens.

        Parameters
        ----------
        mode : str
            "decode" or "idle": one query token per request. "extend" or "mixed": extend_seq_lens
            tokens. "target_verify": num_draft_tokens tokens, which seq_lens leaves out.
            "draft_extend": extend_seq_lens tokens of a draft model.
        seq_lens : [B] int32
            Tokens of each request, those of its extension among them. Drafts are left out.
        req_pool_indices : [B] int64 or int32
            The row of req_to_token of each request.
        seq_lens_cpu, extend_seq_lens_cpu, encoder_lens_cpu : [B] integers on the host, optional
            Upper bounds of the arrays of these names. On CUDA they must be given where the arrays
            are.
        extend_seq_lens : [B] int32, optional
            New tokens of each request; in "draft_extend" those that were accepted, and 1. None in
            "extend" and "mixed": all tokens are new.
        spec_step : int, optional
            Step 0 to speculative_num_steps - 1 of a draft, which makes "decode" a draft's: one
            query token per request, or topk branches of a tree.
        out_cache_loc : int64 or int32, optional
            The slots of this step's tokens. They are mapped to the window pool where there is one.
            In a step of a tree's draft [B * topk * speculative_num_steps]: it has the slots of all
            steps, branch by branch.
        custom_mask : bool, optional
            "target_verify" with topk > 1: of each request num_draft_tokens rows of seq_len +
            num_draft_tokens entries, whether a draft sees a token. It sees all of the prefix.
        encoder_lens : [B] int32, optional
            Tokens of an encoder, with which the request's row of req_to_token begins.
        common_prefix_len : int
            So many first tokens are the same in all requests, for attention that reads them once.
            Without drafts, trees, windows, chunks and encoders.
        stream : int handle or stream object, optional

        Returns
        -------
        Metadata, valid until the next build of this mode; "idle" is "decode", and "mixed" is
        "extend". After an error the previous one stays valid.

        Raises
        ------
        TypeError, ValueError, BufferError, RuntimeError
            A mode that the config has no arrays for; arrays that the mode needs and does not get,
            or of another size; a batch beyond the config. Where the host can read the arrays:
            lengths beyond req_to_token or the config, rows that it lacks, a mask that is too short.
            On CUDA the kernel cuts such lengths, and such requests are padding.

        Source: SGLang's FlashAttentionBackend.init_forward_metadata.

        Examples
        --------
        >>> import numpy as np, sparse_mla
        >>> config = sparse_mla.paged.Config(
        ...     max_bs=2, max_num_tokens=16, max_context_len=16, num_draft_tokens=3)
        >>> slots = np.arange(64, dtype=np.int32).reshape(2, 32)
        >>> builder = sparse_mla.paged.MetadataBuilder(config, slots)
        >>> lens, rows = np.array([5, 9], np.int32), np.array([1, 0])
        >>> metadata = builder.build("target_verify", lens, rows)
        >>> metadata.cache_seqlens_int32.tolist(), metadata.cu_seqlens_q.tolist()
        ([8, 12], [0, 3, 6])
        """
        number = MODES.get(mode)
        if number is None or (spec_step is not None and number != 1):
            op, wanted = "MetadataBuilder.build", " or ".join(map(repr, MODES))
            name, value = ("mode", mode) if number is None else ("spec_step", spec_step)
            rule = wanted if number is None else f"None in mode {mode!r}"
            raise ValueError(f"{op}: `{name}` must be {rule}, got {value!r}")
        build = number if spec_step is None else DRAFT
        step = self._step.build(
            None,
            seq_lens=seq_lens,
            req_pool_indices=req_pool_indices,
            req_to_token=self.req_to_token,
            full_to_swa_index_mapping=self.full_to_swa_index_mapping,
            extend_seq_lens=extend_seq_lens,
            out_cache_loc=out_cache_loc,
            custom_mask=custom_mask,
            encoder_lens=encoder_lens,
            num_reqs=count_requests(seq_lens),
            mode=build,
            spec_step=0 if spec_step is None else spec_step,
            num_steps=1,
            common_prefix_len=common_prefix_len,
            seq_lens_cpu=seq_lens_cpu,
            extend_seq_lens_cpu=extend_seq_lens_cpu,
            encoder_lens_cpu=encoder_lens_cpu,
            stream=stream,
        )
        return self._show(mode, step, build, 0)


PARTS = (
    (EXPAND, "expand", Part),
    (SWA_SPEC, "swa_spec_metadata", Part),
    (PREFIX, "prefix", Part),
    (LOCAL, "local_attn_metadata", LocalPart),
)


def _copy(kind: type[Any], config: Config, req_to_token: Array, mapping: Array | None) -> Any:
    return kind(config, req_to_token, full_to_swa_index_mapping=mapping)


def count_requests(seq_lens: Array) -> int:
    try:
        return len(seq_lens)
    except TypeError:
        wanted = "an array of lengths"
        raise steps.wrong_type("MetadataBuilder.build", "seq_lens", wanted, seq_lens) from None
