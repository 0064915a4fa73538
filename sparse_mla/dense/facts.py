"""Facts that an engine asks for before it makes a backend of dense MLA."""

from __future__ import annotations

from itertools import chain
from typing import Any, ClassVar

from sparse_mla._types import ConcatFormat
from sparse_mla.backend.facts import Backend as SparseBackend
from sparse_mla.dense.layer import DenseMLA
from sparse_mla.steps.common import find_cache_shape
from sparse_mla.steps.dense import CACHE_ROWS, Metadata, MetadataBuilder
from sparse_mla.steps.v32 import HEAD_SIZE


class Backend(SparseBackend):
    """The facts that an engine asks a backend for before it makes one; those not listed are those
    of `sparse_mla.Backend`.

    Attributes
    ----------
    name : str
        "DENSE_MLA".
    supported_kv_cache_dtypes : list of str
        The values of `Config.kv_cache_dtype`, those of models without RoPE included.
    supported_head_sizes : list of int
        576 values of a key, 512 without RoPE and 64 with it; 512 for models without RoPE.
    is_sparse : bool
        False.

    Source: vLLM's MLACommonBackend.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.dense.Backend.name, sparse_mla.dense.Backend.is_sparse
    ('DENSE_MLA', False)
    """

    _classes: ClassVar[tuple[type[Any], type[Any]]] = (MetadataBuilder, DenseMLA)
    name: ClassVar[str] = "DENSE_MLA"
    is_sparse: ClassVar[bool] = False
    supported_head_sizes: ClassVar[list[int]] = [*CACHE_ROWS]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [*dict.fromkeys(chain(*CACHE_ROWS.values()))]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int = 1,
        head_size: int = HEAD_SIZE,
        cache_dtype_str: ConcatFormat = "auto",
    ) -> tuple[int, int, int]:
        """Shape of the cache array for an engine to allocate.

        Parameters
        ----------
        num_blocks, block_size : int
            Pages, and tokens per page.
        num_kv_heads : int
            1: MLA has one head of keys.
        head_size : int
            576, or 512 for models without RoPE: `kv_lora_rank + qk_rope_head_dim` of `Config`.
        cache_dtype_str : str
            The cache's format, as in `Config.kv_cache_dtype`.

        Returns
        -------
        (num_blocks, block_size, row): a row is `head_size` bf16; for the formats of bytes it is 656
        uint8 for "fp8_ds_mla" and "fp8_token", 576 or 512 for "fp8_e4m3" and 528 for "fp8_nope".

        Raises
        ------
        TypeError, ValueError
            Sizes that are no ints, a page without tokens, another number of heads, another head
            size, a cache dtype that has no keys of this size.

        Examples
        --------
        >>> import sparse_mla
        >>> sparse_mla.dense.Backend.get_kv_cache_shape(100, 64, 1, 512, "fp8_nope")
        (100, 64, 528)
        """
        return find_cache_shape(
            "dense",
            CACHE_ROWS,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            cache_dtype_str=cache_dtype_str,
        )

    @staticmethod
    def get_metadata_cls() -> type[Metadata]:
        """The class of the metadata that the builder makes.

        Returns
        -------
        type

        Examples
        --------
        >>> import sparse_mla
        >>> sparse_mla.dense.Backend.get_metadata_cls().__name__
        'Metadata'
        """
        return Metadata

    @staticmethod
    def use_cascade_attention(*args: Any, **kwargs: Any) -> bool:
        """Whether a step with a common prefix runs in two parts.

        Parameters
        ----------
        args, kwargs : object
            Not read.

        Returns
        -------
        bool: False.

        Examples
        --------
        >>> import sparse_mla
        >>> sparse_mla.dense.Backend.use_cascade_attention()
        False
        """
        return False
