"""The backend layer: a step is planned once and run by every layer, in the vocabulary of vLLM.

    config = Config(num_heads, ...)                   what never changes
    metadata = MetadataBuilder(config).build(common)  once per step: path, chunks, request ids
    out, lse = SparseMLA(config).forward(...)         once per layer: indices, gather, attention

Paths, visible as `metadata.path` and forced by `Config(path=...)`:

    mixed      FP8 cache, all tokens in one attention call; few heads (below 32)
    separate   FP8 cache; decodes on the cache, prefills chunk by chunk on a gathered bf16 workspace
    direct     FP8 cache; prefills on the cache too, without a workspace. Where the config leaves
               the path open, a "separate" step becomes "direct" if a gather would cost more than
               it saves its prefills (Hopper). Keys are those of the cache; a gather rounds them
               to bf16
    bf16       bf16 cache, all tokens in one attention call

On CUDA the arrays that a plan derives are on the device, in the builder's buffers. Planning needs
lengths in host memory (`query_start_loc_cpu`, `seq_lens_cpu`), of which `seq_lens_cpu` may be upper
bounds, and reads nothing back from the device. `slot_mapping` and `block_table` stay where the
engine keeps them; if graphs are replayed, their addresses must not change. `build` sends one
asynchronous copy on the current stream of the block table's framework, and a `forward` on another
stream waits for that copy on its own stream.

To use a graph, call `build` outside the capture and capture `forward`. Then, for every step,
refresh the engine's arrays, `build` a batch of the captured shape (padded with requests of length
0, slots -1 and indices -1), and replay on the stream of that build.
"""

from sparse_mla.backend.facts import Backend
from sparse_mla.backend.layer import SparseMLA
from sparse_mla.steps.common import CommonAttentionMetadata
from sparse_mla.steps.v32 import (
    Chunk,
    Config,
    Decode,
    Metadata,
    MetadataBuilder,
    Prefill,
)

__all__ = [
    "Backend",
    "Chunk",
    "CommonAttentionMetadata",
    "Config",
    "Decode",
    "Metadata",
    "MetadataBuilder",
    "Prefill",
    "SparseMLA",
]
