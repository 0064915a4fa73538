"""The builder of paged steps, and what it shares with the builder of all steps of a draft."""

from __future__ import annotations

import operator
from typing import Any, ClassVar, NamedTuple

from sparse_mla.steps import common as steps
from sparse_mla.steps.memory import Memory
from sparse_mla.steps.paged import Array, Config, LocalPart, Metadata, Part

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
PARTS = (
    (EXPAND, "expand", Part),
    (SWA_SPEC, "swa_spec_metadata", Part),
    (PREFIX, "prefix", Part),
    (LOCAL, "local_attn_metadata", LocalPart),
)


Key = tuple[int, int, int | None]  # a capture: mode, requests, step of a draft


class Captured(NamedTuple):
    """What a capture fixed."""

    num_tokens: int
    num_mapped: int | None  # the length of swa_out_cache_loc
    shown: list[Metadata]


class Builder(steps.Builder):
    """What both builders share: arrays of the engine that outlive a step, and memory of layers."""

    _drafts_only: ClassVar[bool] = False  # whether it has the arrays of draft decodes alone

    def __init__(
        self,
        config: Config,
        req_to_token: Array,
        *,
        full_to_swa_index_mapping: Array | None = None,
    ) -> None:
        self.req_to_token = req_to_token
        self.full_to_swa_index_mapping = full_to_swa_index_mapping
        self._memory = Memory()
        window = getattr(config, "sliding_window_size", -1)
        self._create(
            "paged",
            config,
            Config,
            "a paged.Config",
            None,
            has_window=window >= 0,
            has_window_pool=full_to_swa_index_mapping is not None,
            drafts_only=self._drafts_only,
        )
        self._window_size = (window, 0) if window >= 0 else (-1, -1)
        self._most_tokens = max(
            config.max_num_tokens, config.max_bs * max(config.topk, config.num_draft_tokens, 1)
        )
        self._latest: dict[int, int] = {}  # mode -> the number of its latest build
        self._captured: dict[Key, Captured] = {}

    @property
    def workspace_bytes(self) -> int:
        """Everything that steps and their layers use of the device."""
        return self._step.workspace_bytes + self._memory.num_bytes

    def _capture(
        self, mode: str, key: Key, num_tokens: int, num_steps: int, batch: dict[str, Any]
    ) -> list[Metadata]:
        """A build whose sizes are fixed; the same metadata each time."""
        build, bs, spec_step = key
        before = self._captured.get(key)
        if before is not None and before.num_tokens != num_tokens:
            raise ValueError(
                "MetadataBuilder.capture: `num_tokens` must be that of the capture before, "
                f"{before.num_tokens}, got {num_tokens}"
            )
        loc = batch["out_cache_loc"]
        if before is not None:
            self._find_captured(key, None, loc)
        step = self._step.build(
            ...,
            mode=build,
            num_reqs=bs,
            spec_step=spec_step or 0,
            num_steps=num_steps,
            is_fixed=1,
            num_tokens=num_tokens,
            req_to_token=self.req_to_token,
            full_to_swa_index_mapping=self.full_to_swa_index_mapping,
            **batch,
        )
        if before is not None:
            return self._mark(key, before.shown, step["generation"])
        shown = [self._show(mode, step, build, i) for i in range(num_steps)]
        for metadata in shown:
            metadata.__dict__["_is_captured"] = True
        self._captured[key] = Captured(num_tokens, self._count_mapped(loc), shown)
        return shown

    def _count_mapped(self, loc: Array) -> int | None:
        """The length of swa_out_cache_loc."""
        return None if loc is None or self.full_to_swa_index_mapping is None else len(loc)

    def _find_captured(self, key: Key, num_real_reqs: Any, loc: Array) -> tuple[int, int, Any]:
        """-> query tokens of a capture, requests that are padding, and its metadata."""
        op, (build, bs, spec_step) = "MetadataBuilder.replay", key
        found = self._captured.get(key)
        if found is None:
            known = sorted(n for b, n, s in self._captured if (b, s) == (build, spec_step))
            raise ValueError(f"{op}: `bs` must be captured in this mode, {known} are, got {bs!r}")
        if (count := self._count_mapped(loc)) != found.num_mapped:
            rule = f"as long as in the capture, {found.num_mapped}"
            raise ValueError(f"{op}: `out_cache_loc` must be {rule}, got {count}")
        if num_real_reqs is None:
            return found.num_tokens, 0, found.shown
        try:
            return found.num_tokens, bs - operator.index(num_real_reqs), found.shown
        except TypeError:
            raise steps.wrong_type(op, "num_real_reqs", "an int", num_real_reqs) from None

    def _mark(self, key: Key, shown: list[Metadata], number: int) -> list[Metadata]:
        """The metadata is that of the latest build of its mode."""
        self._latest[key[0]] = number
        for metadata in shown:
            metadata.__dict__["_build"] = (key[0], number)
        return shown

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
        build = find_build("build", mode, spec_step)
        step = self._step.build(
            ...,
            mode=build,
            num_reqs=count_requests(seq_lens),
            spec_step=spec_step or 0,
            num_steps=1,
            common_prefix_len=common_prefix_len,
            req_to_token=self.req_to_token,
            full_to_swa_index_mapping=self.full_to_swa_index_mapping,
            seq_lens=seq_lens,
            req_pool_indices=req_pool_indices,
            extend_seq_lens=extend_seq_lens,
            out_cache_loc=out_cache_loc,
            custom_mask=custom_mask,
            encoder_lens=encoder_lens,
            seq_lens_cpu=seq_lens_cpu,
            extend_seq_lens_cpu=extend_seq_lens_cpu,
            encoder_lens_cpu=encoder_lens_cpu,
            stream=stream,
        )
        return self._show(mode, step, build, 0)

    def capture(
        self,
        mode: str,
        bs: int,
        num_tokens: int,
        seq_lens: Array,
        req_pool_indices: Array,
        *,
        extend_seq_lens: Array | None = None,
        spec_step: int | None = None,
        out_cache_loc: Array | None = None,
        custom_mask: Array | None = None,
        encoder_lens: Array | None = None,
        stream: Any = None,
    ) -> Metadata:
        """Make metadata whose sizes fit any lengths, for layers that a graph is to hold.

        Its arrays never move, and `replay` writes them again. It may stand in front of a graph, or
        be captured in it, with the layers that read it.

        Parameters
        ----------
        mode : str
            Of `build`, but "extend" and "mixed", whose query tokens differ from batch to batch.
        bs : int
            Requests.
        num_tokens : int
            Query tokens together, the same number for each request; in "draft_extend" any number,
            and a request may have less.
        seq_lens, req_pool_indices, extend_seq_lens, spec_step, out_cache_loc, custom_mask
            As in `build`, for a first batch, like `encoder_lens` and `stream`.

        Returns
        -------
        Metadata, always the same for a mode, bs and spec_step. Its maxima are those of the config.

        Raises
        ------
        TypeError, ValueError, BufferError, RuntimeError
            As `build`; another num_tokens.

        Source: SGLang's FlashAttentionBackend.init_forward_metadata_capture_cuda_graph.

        Examples
        --------
        >>> import numpy as np, sparse_mla
        >>> config = sparse_mla.paged.Config(max_bs=2, max_num_tokens=8, max_context_len=8)
        >>> slots = np.arange(16, dtype=np.int32).reshape(2, 8)
        >>> builder = sparse_mla.paged.MetadataBuilder(config, slots)
        >>> lens, rows = np.array([1, 1], np.int32), np.array([0, 1])
        >>> metadata = builder.capture("decode", 2, 2, lens, rows)
        >>> lens[:] = 5, 7
        >>> builder.replay("decode", 2, lens, rows, num_real_reqs=1) is metadata
        True
        >>> metadata.cache_seqlens_int32.tolist(), metadata.max_seq_len_k
        ([5, 0], 8)
        """
        key = find_build("capture", mode, spec_step), bs, spec_step
        batch = {
            "seq_lens": seq_lens,
            "req_pool_indices": req_pool_indices,
            "extend_seq_lens": extend_seq_lens,
            "out_cache_loc": out_cache_loc,
            "custom_mask": custom_mask,
            "encoder_lens": encoder_lens,
            "stream": stream,
        }
        return self._capture(mode, key, num_tokens, 1, batch)[0]

    def replay(
        self,
        mode: str,
        bs: int,
        seq_lens: Array,
        req_pool_indices: Array,
        *,
        extend_seq_lens: Array | None = None,
        spec_step: int | None = None,
        out_cache_loc: Array | None = None,
        custom_mask: Array | None = None,
        encoder_lens: Array | None = None,
        num_real_reqs: int | None = None,
        stream: Any = None,
    ) -> Metadata:
        """Write the arrays of a capture again, for another batch of its size, by one kernel.

        Nothing is copied, allocated or synchronised. In a captured graph the arrays are read where
        they are now.

        Parameters
        ----------
        mode, bs, spec_step
            As they were captured.
        seq_lens, req_pool_indices, extend_seq_lens, out_cache_loc, custom_mask, encoder_lens
            As in `build`, like `stream`.
        num_real_reqs : int, optional
            The requests behind so many are padding. None = there are none.

        Returns
        -------
        What `capture` returned.

        Raises
        ------
        TypeError, ValueError, BufferError, RuntimeError
            As `build`; what was not captured; num_real_reqs beyond bs.

        Source: SGLang's FlashAttentionBackend.init_forward_metadata_replay_cuda_graph.

        Examples
        --------
        >>> import numpy as np, sparse_mla
        >>> config = sparse_mla.paged.Config(max_bs=2, max_num_tokens=8, max_context_len=8)
        >>> slots = np.arange(16, dtype=np.int32).reshape(2, 8)
        >>> builder = sparse_mla.paged.MetadataBuilder(config, slots)
        >>> lens, rows = np.array([5, 1], np.int32), np.array([1, 0])
        >>> metadata = builder.capture("decode", 2, 2, lens, rows)
        >>> metadata = builder.replay("decode", 2, lens + 1, rows, num_real_reqs=1)
        >>> metadata.cache_seqlens_int32.tolist()
        [6, 0]
        """
        key = find_build("replay", mode, spec_step), bs, spec_step
        num_tokens, padding, shown = self._find_captured(key, num_real_reqs, out_cache_loc)
        number = self._step.refresh(
            ...,
            mode=key[0],
            num_reqs=bs,
            spec_step=spec_step or 0,
            num_steps=1,
            is_fixed=1,
            num_tokens=num_tokens,
            num_padding_reqs=padding,
            req_to_token=self.req_to_token,
            full_to_swa_index_mapping=self.full_to_swa_index_mapping,
            seq_lens=seq_lens,
            req_pool_indices=req_pool_indices,
            extend_seq_lens=extend_seq_lens,
            out_cache_loc=out_cache_loc,
            custom_mask=custom_mask,
            encoder_lens=encoder_lens,
            stream=stream,
        )
        return self._mark(key, shown, number)[0]


def _copy(kind: type[Any], config: Config, req_to_token: Array, mapping: Array | None) -> Any:
    return kind(config, req_to_token, full_to_swa_index_mapping=mapping)


def count_requests(seq_lens: Array) -> int:
    try:
        return len(seq_lens)
    except TypeError:
        wanted = "an array of lengths"
        raise steps.wrong_type("MetadataBuilder.build", "seq_lens", wanted, seq_lens) from None


def find_build(call: str, mode: str, spec_step: int | None) -> int:
    """The number of a mode, or of a step of a draft."""
    number = MODES.get(mode)
    if number is None or (spec_step is not None and number != 1):
        wanted = " or ".join(map(repr, MODES))
        name, value = ("mode", mode) if number is None else ("spec_step", spec_step)
        rule = wanted if number is None else f"None in mode {mode!r}"
        raise ValueError(f"MetadataBuilder.{call}: `{name}` must be {rule}, got {value!r}")
    return number if spec_step is None else DRAFT
