"""Dense MLA: every token attends to all tokens of its request, in a paged cache.

    config = Config(num_heads, ...)                    what never changes
    metadata = MetadataBuilder(config).build(common)   once per step: positions, ranges, chunks
    out = DenseMLA(config, kv_b_proj=...).forward(...) once per layer: RoPE, cache write, attention

docs/mla.md derives what a layer computes. To use a graph, call `build` outside the capture and
capture `forward`; then, for every step, refresh the engine's arrays, `build` a batch of the
captured shape, and replay on the stream of that build.

>>> import sparse_mla
>>> sparse_mla.dense.Backend.name
'DENSE_MLA'
"""

from sparse_mla.dense.facts import Backend
from sparse_mla.dense.layer import DenseMLA
from sparse_mla.steps.common import CommonAttentionMetadata
from sparse_mla.steps.dense import Config, Metadata, MetadataBuilder, Part, PrefillPart

__all__ = [
    "Backend",
    "CommonAttentionMetadata",
    "Config",
    "DenseMLA",
    "Metadata",
    "MetadataBuilder",
    "Part",
    "PrefillPart",
]


def __dir__() -> list[str]:
    """What tab completion offers."""
    return __all__
