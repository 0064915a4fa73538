"""The backend layer: a step is planned once and run by every layer, in the vocabulary of vLLM.

    config = Config(num_heads, ...)                   what never changes
    metadata = MetadataBuilder(config).build(common)  once per step: path, chunks, request ids
    out, lse = SparseMLA(config).forward(...)         once per layer: indices, gather, attention

Paths, visible as `metadata.path` and forced by `Config(path=...)`:

    mixed      FP8 cache, all tokens in one attention call; few heads (below 32)
    separate   FP8 cache; decodes on the cache, prefills chunk by chunk on a gathered bf16 workspace
    direct     FP8 cache; prefills on the cache too, without a workspace. Where the path is left
               open, a step on "separate" takes it if its prefills do not pay for a gather (Hopper)
    bf16       bf16 cache, all tokens in one attention call

On CUDA a step's derived arrays are on the device, in the builder's buffers. Planning needs lengths
in host memory (`query_start_loc_cpu`, `seq_lens_cpu`) and reads nothing back; `slot_mapping` and
`block_table` are referenced where the engine keeps them, at fixed addresses if graphs shall replay.
`build` sends one asynchronous copy on the block table's current stream, and `forward` on another
stream waits for it there. For a graph, call `build` outside and capture `forward`; then, for every
step, refresh the engine's arrays, `build` a batch of the captured shape (padded with requests of
length 0, slots -1 and indices -1), and replay on the stream of that build.
"""

from sparse_mla.backend.batch import CommonAttentionMetadata
from sparse_mla.backend.builder import Chunk, Decode, Metadata, MetadataBuilder, Prefill
from sparse_mla.backend.config import Config
from sparse_mla.backend.facts import Backend
from sparse_mla.backend.layer import SparseMLA

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
