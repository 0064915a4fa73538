"""Where pickles find the config; it is in sparse_mla.steps."""

from sparse_mla.steps.v4 import (
    COMPRESSED_DTYPES,
    HEAD_SIZE,
    INDEX_CACHE_DTYPES,
    INDEXED_RATIO,
    KV_CACHE_DTYPES,
    PATHS,
    SYNONYMS,
    Config,
)

__all__ = [
    "COMPRESSED_DTYPES",
    "HEAD_SIZE",
    "INDEXED_RATIO",
    "INDEX_CACHE_DTYPES",
    "KV_CACHE_DTYPES",
    "PATHS",
    "SYNONYMS",
    "Config",
]
