"""Facts that an engine asks for before it makes a backend."""

from __future__ import annotations

from typing import Any, ClassVar

from sparse_mla._types import RopeFormat
from sparse_mla.backend.layer import SparseMLA
from sparse_mla.steps.common import CommonFacts, find_cache_shape
from sparse_mla.steps.v32 import CACHE_ROWS, HEAD_SIZE, KV_CACHE_DTYPES, MetadataBuilder


class Backend(CommonFacts):
    """The facts that an engine asks a backend for before it makes one.

    Attributes
    ----------
    name : str
        "SPARSE_MLA".
    supported_dtypes, supported_kv_cache_dtypes : list of str
        The dtypes of queries and results, and the values of `Config.kv_cache_dtype`.
    supported_kernel_block_sizes : str
        Tokens per page: "any".
    supported_head_sizes : list of int
        576 values of a key: 512 without RoPE and 64 with it.
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

    _classes: ClassVar[tuple[type[Any], type[Any]]] = (MetadataBuilder, SparseMLA)
    name: ClassVar[str] = "SPARSE_MLA"
    supported_head_sizes: ClassVar[list[int]] = [*CACHE_ROWS]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(KV_CACHE_DTYPES)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int = 1,
        head_size: int = HEAD_SIZE,
        cache_dtype_str: RopeFormat = "auto",
    ) -> tuple[int, int, int]:
        """Shape of the cache array for an engine to allocate.

        Parameters
        ----------
        num_blocks, block_size : int
            Pages, and tokens per page.
        num_kv_heads, head_size : int
            1 and 576: MLA has one head of keys.
        cache_dtype_str : str
            The cache's format, as in `Config.kv_cache_dtype`.

        Returns
        -------
        (num_blocks, block_size, row): a row is 576 bf16, or 656 uint8 for "fp8_ds_mla".

        Raises
        ------
        TypeError, ValueError
            Sizes that are no ints, a page without tokens, another number of heads, head size or
            cache dtype.

        Examples
        --------
        >>> import sparse_mla
        >>> sparse_mla.Backend.get_kv_cache_shape(100, 64, cache_dtype_str="fp8_ds_mla")
        (100, 64, 656)
        """
        return find_cache_shape(
            "v32",
            CACHE_ROWS,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            cache_dtype_str=cache_dtype_str,
        )
