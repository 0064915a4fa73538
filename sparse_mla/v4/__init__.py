"""DeepSeek V4's backend layer: a step is planned once, and every layer reads the plan.

    config = Config(num_heads, ...)                              what never changes
    metadata = MetadataBuilder(config).build(common, ...)        once per step: lists and slots
    out, lse = SparseMLA(config, ratio, weights).attend(...)     once per layer: attention

A query sees the last `window` tokens of its request, in the sliding window's cache (SWA), and
compressed rows, each of which stands for `compress_ratio` tokens:

    ratio 4     an indexer chooses `topk_tokens` of the complete groups (`topk_indices`)
    other > 1   all complete groups
    1 or less   none

Decode tokens attend to the two caches in one call. Prefill tokens follow `Config(path=...)`:

    direct      the same call. It is the default, because it needs no workspace and gathers nothing
    separate    chunk by chunk: the rows of `prefill_chunk_size` requests are dequantised to a bf16
                workspace, which attention reads as one page

A config without a path and a `MetadataBuilder(config, workspace=...)` leave the choice to each
step. On Hopper prefills over "fp8_v4" with enough query tokens for their rows are "separate", since
each row is dequantised once, not for every query token that reads it. Such rows lose nothing as
bf16. All other steps are "direct", and so are all on other devices.

On CUDA `build` sends one asynchronous copy and starts one kernel, on the current stream of the
block table's framework. It reads nothing back and waits for nothing. A layer on another stream
waits for both on its own stream.

To use a graph, call `build` outside the capture and capture `attend`. Then, for every step, refresh
the engine's arrays in place, `build` a batch of the captured shape (padding has slots -1), and
replay on the stream of that build, which takes the path of the captured step. Give
`CommonAttentionMetadata` the same `max_seq_len` each time, usually max_model_len: the lists of
layers without an indexer are as wide as it needs.

>>> import sparse_mla
>>> limits = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=1024)
>>> sparse_mla.v4.Config(64, **limits).compress_ratios
(4, 128)
"""

from sparse_mla.steps.common import CommonAttentionMetadata
from sparse_mla.steps.v4 import Config, Metadata, MetadataBuilder
from sparse_mla.steps.v4_parts import Chunk, Decode, LayerMetadata, Prefill
from sparse_mla.v4.facts import Backend
from sparse_mla.v4.layer import Caches, SparseMLA, Weights

__all__ = [
    "Backend",
    "Caches",
    "Chunk",
    "CommonAttentionMetadata",
    "Config",
    "Decode",
    "LayerMetadata",
    "Metadata",
    "MetadataBuilder",
    "Prefill",
    "SparseMLA",
    "Weights",
]


def __dir__() -> list[str]:
    """What tab completion offers."""
    return __all__
