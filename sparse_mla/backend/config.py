"""Where pickles find the config; it is in sparse_mla.steps."""

from sparse_mla.steps.v32 import HEAD_SIZE, KV_CACHE_DTYPES, PATHS, Config

__all__ = ["HEAD_SIZE", "KV_CACHE_DTYPES", "PATHS", "Config"]
