"""Attention to pages of keys and values in every forward mode of a serving engine.

    config = Config(max_bs=..., ...)                        what never changes
    builder = MetadataBuilder(config, req_to_token)         holds every array
    metadata = builder.build(mode, seq_lens, req_pool_indices)   once per step
    out, lse = attention(metadata, q, k_cache, v_cache, ...)     once per layer

docs/paged.md draws pages, tables and modes.

>>> import sparse_mla
>>> sparse_mla.paged.MetadataBuilder.seq_len_fill_value
0
"""

from sparse_mla.paged.layer import attention
from sparse_mla.steps.paged import Config, LocalPart, Metadata, Part
from sparse_mla.steps.paged_builder import MetadataBuilder
from sparse_mla.steps.paged_draft import MultiStepDraft

__all__ = [
    "Config",
    "LocalPart",
    "Metadata",
    "MetadataBuilder",
    "MultiStepDraft",
    "Part",
    "attention",
]


def __dir__() -> list[str]:
    """What tab completion offers."""
    return __all__
