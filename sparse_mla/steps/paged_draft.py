"""The metadata of all steps of a draft, by one launch."""

from __future__ import annotations

from typing import Any

from sparse_mla.steps.paged import Array, Metadata
from sparse_mla.steps.paged_builder import DRAFT, Builder, count_requests


class MultiStepDraft(Builder):
    """Makes the metadata of all steps of a draft at once, by one launch. It has memory of its own.

    Parameters
    ----------
    config : Config
        Its topk and speculative_num_steps say what is drafted.
    req_to_token, full_to_swa_index_mapping : arrays, the second optional
        As in `MetadataBuilder`.

    Raises
    ------
    TypeError, ValueError, RuntimeError, MemoryError
        As `MetadataBuilder`.

    Source: SGLang's FlashAttentionMultiStepBackend.

    Examples
    --------
    >>> import numpy as np, sparse_mla
    >>> config = sparse_mla.paged.Config(
    ...     max_bs=2, max_num_tokens=8, max_context_len=8, speculative_num_steps=3)
    >>> slots = np.arange(32, dtype=np.int32).reshape(2, 16)
    >>> draft = sparse_mla.paged.MultiStepDraft(config, slots)
    >>> steps = draft.build(np.array([5, 7], np.int32), np.array([1, 0]))
    >>> [metadata.cache_seqlens_int32.tolist() for metadata in steps]
    [[6, 8], [7, 9]]
    """

    _drafts_only = True

    def build(
        self,
        seq_lens: Array,
        req_pool_indices: Array,
        *,
        seq_lens_cpu: Array | None = None,
        out_cache_loc: Array | None = None,
        stream: Any = None,
    ) -> list[Metadata]:
        """Make the metadata of steps 0 to speculative_num_steps - 2: the last token needs none.

        Parameters
        ----------
        seq_lens, req_pool_indices, seq_lens_cpu, out_cache_loc, stream
            As in `MetadataBuilder.build`.

        Returns
        -------
        A list of Metadata, one per step, valid until the next build. They share the page table,
        and the slots of which step i of a tree has the first i + 1.

        Raises
        ------
        TypeError, ValueError, BufferError, RuntimeError
            As `MetadataBuilder.build`.

        Source: SGLang's FlashAttentionMultiStepBackend.init_forward_metadata.

        Examples
        --------
        >>> import numpy as np, sparse_mla
        >>> config = sparse_mla.paged.Config(
        ...     max_bs=1, max_num_tokens=8, max_context_len=8, topk=2, speculative_num_steps=3)
        >>> slots = np.arange(8, dtype=np.int32).reshape(1, 8)
        >>> draft = sparse_mla.paged.MultiStepDraft(config, slots)
        >>> loc = np.array([20, 21, 22, 30, 31, 32])  # two branches
        >>> steps = draft.build(np.array([5], np.int32), np.array([0]), out_cache_loc=loc)
        >>> [metadata.expand.slot_table.tolist() for metadata in steps]
        [[[20], [30]], [[20, 21], [30, 31]]]
        """
        num_steps = self.config.speculative_num_steps - 1
        if num_steps <= 0:
            return []
        step = self._step.build(
            ...,
            mode=DRAFT,
            num_reqs=count_requests(seq_lens),
            num_steps=num_steps,
            req_to_token=self.req_to_token,
            full_to_swa_index_mapping=self.full_to_swa_index_mapping,
            seq_lens=seq_lens,
            req_pool_indices=req_pool_indices,
            out_cache_loc=out_cache_loc,
            seq_lens_cpu=seq_lens_cpu,
            stream=stream,
        )
        return [self._show("decode", step, DRAFT, i) for i in range(num_steps)]

    def capture(
        self,
        bs: int,
        num_tokens: int,
        seq_lens: Array,
        req_pool_indices: Array,
        *,
        out_cache_loc: Array | None = None,
        stream: Any = None,
    ) -> list[Metadata]:
        """Make metadata of all steps whose sizes fit any lengths, for layers that a graph is to
        hold: all steps of a draft may be in one.

        Parameters
        ----------
        bs : int
            Requests.
        num_tokens : int
            Query tokens of a step: bs, or bs * topk with a tree.
        seq_lens, req_pool_indices, out_cache_loc, stream
            As in `MetadataBuilder.build`, for a first batch.

        Returns
        -------
        A list of Metadata, always the same for a bs.

        Raises
        ------
        TypeError, ValueError, BufferError, RuntimeError
            As `MetadataBuilder.capture`.

        Source: SGLang's FlashAttentionMultiStepBackend.init_forward_metadata_capture_cuda_graph.

        Examples
        --------
        >>> import numpy as np, sparse_mla
        >>> config = sparse_mla.paged.Config(
        ...     max_bs=1, max_num_tokens=8, max_context_len=8, speculative_num_steps=3)
        >>> slots = np.arange(16, dtype=np.int32).reshape(1, 16)
        >>> draft = sparse_mla.paged.MultiStepDraft(config, slots)
        >>> lens, rows = np.array([1], np.int32), np.array([0])
        >>> steps = draft.capture(1, 1, lens, rows)
        >>> lens[:] = 7
        >>> [metadata.cache_seqlens_int32.tolist() for metadata in draft.replay(1, lens, rows)]
        [[8], [9]]
        """
        num_steps = self.config.speculative_num_steps - 1
        if num_steps <= 0:
            return []
        batch = {
            "seq_lens": seq_lens,
            "req_pool_indices": req_pool_indices,
            "out_cache_loc": out_cache_loc,
            "stream": stream,
        }
        return self._capture("decode", (DRAFT, bs, None), num_tokens, num_steps, batch)

    def replay(
        self,
        bs: int,
        seq_lens: Array,
        req_pool_indices: Array,
        *,
        out_cache_loc: Array | None = None,
        num_real_reqs: int | None = None,
        stream: Any = None,
    ) -> list[Metadata]:
        """Write the arrays of a capture again, for another batch of its size, by one kernel.

        Parameters
        ----------
        bs : int
            As it was captured.
        seq_lens, req_pool_indices, out_cache_loc, num_real_reqs, stream
            As in `MetadataBuilder.replay`.

        Returns
        -------
        What `capture` returned.

        Raises
        ------
        TypeError, ValueError, BufferError, RuntimeError
            As `MetadataBuilder.replay`.

        Source: SGLang's FlashAttentionMultiStepBackend.init_forward_metadata_replay_cuda_graph.

        Examples
        --------
        >>> import numpy as np, sparse_mla
        >>> config = sparse_mla.paged.Config(
        ...     max_bs=2, max_num_tokens=8, max_context_len=8, speculative_num_steps=2)
        >>> slots = np.arange(32, dtype=np.int32).reshape(2, 16)
        >>> draft = sparse_mla.paged.MultiStepDraft(config, slots)
        >>> lens, rows = np.array([5, 1], np.int32), np.array([1, 0])
        >>> steps = draft.capture(2, 2, lens, rows)
        >>> draft.replay(2, lens, rows, num_real_reqs=1)[0].cache_seqlens_int32.tolist()
        [6, 0]
        """
        num_steps = self.config.speculative_num_steps - 1
        if num_steps <= 0:
            return []
        key = DRAFT, bs, None
        num_tokens, padding, shown = self._find_captured(key, num_real_reqs, out_cache_loc)
        number = self._step.refresh(
            ...,
            mode=DRAFT,
            num_reqs=bs,
            num_steps=num_steps,
            is_fixed=1,
            num_tokens=num_tokens,
            num_padding_reqs=padding,
            req_to_token=self.req_to_token,
            full_to_swa_index_mapping=self.full_to_swa_index_mapping,
            seq_lens=seq_lens,
            req_pool_indices=req_pool_indices,
            out_cache_loc=out_cache_loc,
            stream=stream,
        )
        return self._mark(key, shown, number)
