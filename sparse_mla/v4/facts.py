"""Facts that an engine asks for before it makes DeepSeek V4's backend."""

from __future__ import annotations

from typing import Any, ClassVar

from sparse_mla import _C
from sparse_mla._types import CompressedDtypeV4, IndexFormat
from sparse_mla.steps.common import CommonFacts, as_int, check_choice, check_int
from sparse_mla.steps.v4 import (
    COMPRESSED_DTYPES,
    HEAD_SIZE,
    INDEX_CACHE_DTYPES,
    KV_CACHE_DTYPES,
    SYNONYMS,
    MetadataBuilder,
)
from sparse_mla.v4.layer import SparseMLA

INDEX_HEAD_SIZE = 128


def _row_of(op: str, cache_dtype_str: str) -> tuple[int, int]:
    """The last dimension of a cache, and the bytes of a row."""
    name = SYNONYMS.get(cache_dtype_str, cache_dtype_str)
    allowed = (*SYNONYMS, *COMPRESSED_DTYPES, *INDEX_CACHE_DTYPES)
    if cache_dtype_str not in allowed:
        rule = ", ".join(map(repr, allowed))
        raise ValueError(f"{op}: `cache_dtype_str` must be one of {rule}, got {cache_dtype_str!r}")
    wanted = INDEX_HEAD_SIZE if name in INDEX_CACHE_DTYPES else HEAD_SIZE
    rows = _C.KV_FORMATS[name]
    row = next(row for row in rows if rows[row] == wanted)
    return row, row * (2 if name == "bfloat16" else 1)


def _rows_per_page(op: str, block_size: Any, compress_ratio: Any) -> int:
    ratio = max(as_int(op, "compress_ratio", compress_ratio), 1)
    size = as_int(op, "block_size", block_size)
    if size < 1 or size % ratio:
        raise ValueError(
            f"{op}: `block_size` must be a multiple of the compress ratio {ratio}, got {block_size}"
        )
    _, least, most = _C.CONFIG_FIELDS["v4"]["block_size"]
    return check_int(op, "block_size", size, least, most) // ratio


class Backend(CommonFacts):
    """The facts that an engine asks a backend for before it makes one.

    Attributes
    ----------
    name : str
        "SPARSE_MLA_V4".
    supported_dtypes, supported_kv_cache_dtypes : list of str
        The dtypes of results, and the values of `Config.kv_cache_dtype`.
    supported_kernel_block_sizes : str
        Tokens per page: "any".
    supported_head_sizes : list of int
        512 values of a key, all of which are its value.
    is_mla, is_sparse : bool
        True.
    accept_output_buffer : bool
        True: `SparseMLA.attend` takes `out`.
    cudagraph_support : str
        "UNIFORM_BATCH": decodes of one query length can be captured.

    Source: vLLM's AttentionBackend and its backend of DeepSeek V4.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.v4.Backend.name, sparse_mla.v4.Backend.supported_head_sizes
    ('SPARSE_MLA_V4', [512])
    """

    _classes: ClassVar[tuple[type[Any], type[Any]]] = (MetadataBuilder, SparseMLA)
    name: ClassVar[str] = "SPARSE_MLA_V4"
    supported_head_sizes: ClassVar[list[int]] = [HEAD_SIZE]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [*SYNONYMS, *KV_CACHE_DTYPES]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int = 1,
        head_size: int | None = None,
        cache_dtype_str: CompressedDtypeV4 | IndexFormat = "auto",
        compress_ratio: int = 1,
    ) -> tuple[int, int, int]:
        """Shape of a cache array for an engine to allocate.

        Parameters
        ----------
        num_blocks, block_size : int
            Pages, and tokens per page.
        num_kv_heads : int
            1: MLA has one head of keys.
        head_size : int, optional
            512, or 128 for the indexer's formats.
        cache_dtype_str : str
            The cache's format, as in `Config`.
        compress_ratio : int
            Tokens per row; 1 for the sliding window's cache, and where block_size counts rows.

        Returns
        -------
        (num_blocks, block_size // compress_ratio, row): a row is 584 uint8 for "fp8_v4".

        Raises
        ------
        TypeError, ValueError
            Sizes that are no ints, another number of heads, head size or cache dtype, or a block
            size that is no multiple of the ratio.

        Examples
        --------
        >>> import sparse_mla
        >>> sparse_mla.v4.Backend.get_kv_cache_shape(100, 256, compress_ratio=4)
        (100, 64, 584)
        """
        op = "Backend.get_kv_cache_shape"
        check_choice(op, "num_kv_heads", num_kv_heads, (1,))
        row, _ = _row_of(op, cache_dtype_str)
        wanted = INDEX_HEAD_SIZE if cache_dtype_str in INDEX_CACHE_DTYPES else HEAD_SIZE
        check_choice(op, "head_size", wanted if head_size is None else head_size, (wanted,))
        num_pages = check_int(op, "num_blocks", num_blocks, 0)
        return (num_pages, _rows_per_page(op, block_size, compress_ratio), row)

    @staticmethod
    def get_page_bytes(
        block_size: int,
        cache_dtype_str: CompressedDtypeV4 | IndexFormat,
        compress_ratio: int = 1,
        align: int = 576,
    ) -> int:
        """Bytes of a page, padded for engines whose caches share pages of one size.

        Parameters
        ----------
        block_size : int
            Tokens per page.
        cache_dtype_str : str
            The cache's format, as in `Config`.
        compress_ratio : int
            Tokens per row; 1 for the sliding window's cache, and where block_size counts rows.
        align : int
            The bytes are rounded up to a multiple of this.

        Returns
        -------
        int.

        Raises
        ------
        TypeError, ValueError
            Sizes that are no ints, another cache dtype, a block size that is no multiple of the
            ratio, an `align` below 1.

        Examples
        --------
        >>> import sparse_mla
        >>> sparse_mla.v4.Backend.get_page_bytes(256, "fp8_v4", 128)
        1728
        """
        op = "Backend.get_page_bytes"
        align = check_int(op, "align", align, 1)
        _, row_bytes = _row_of(op, cache_dtype_str)
        used = _rows_per_page(op, block_size, compress_ratio) * row_bytes
        return -(-used // align) * align
