"""CUDA graph capture of a layer's decode: captured once, replayed for batches that change.

The graph contains `SparseMLA.forward`. `MetadataBuilder.build` stays outside the graph: it writes,
in one copy, the buffers that the captured kernels read, and these buffers never move. For each step
the engine puts the new lengths, slots and indices into its arrays, builds, and replays. Batches
smaller than the captured one are padded with requests of length 0, slots -1 and indices -1.

The example needs a GPU and PyTorch for it. Without them it says so and ends.
"""

import sys

try:
    import torch
except ImportError:
    sys.exit("cuda_graph: nothing to capture: PyTorch is not installed")
if not torch.cuda.is_available():
    sys.exit("cuda_graph: nothing to capture: PyTorch sees no GPU")

import sparse_mla

BATCH, HEADS, TOPK, PAGE, PAGES = 8, 64, 256, 64, 200
torch.set_default_device("cuda")

config = sparse_mla.Config(
    HEADS,
    softmax_scale=192**-0.5,
    kv_cache_dtype="fp8_ds_mla",
    topk_tokens=TOPK,
    max_num_seqs=BATCH,
    max_num_batched_tokens=BATCH,
    max_model_len=1024,
    device="cuda",
)
builder = sparse_mla.MetadataBuilder(config)
layer = sparse_mla.SparseMLA(config)

torch.manual_seed(0)
cache = torch.zeros(PAGES, PAGE, 656, dtype=torch.uint8)
tokens = torch.randn(PAGES * PAGE, 576)
sparse_mla.concat_and_cache_mla(tokens[:, :512], tokens[:, 512:], cache, torch.arange(PAGES * PAGE))

# The engine keeps these arrays at fixed addresses, because a graph remembers addresses, not arrays.
q = torch.zeros(BATCH, HEADS, 576, dtype=torch.bfloat16)
topk_indices = torch.full((BATCH, TOPK), -1, dtype=torch.int32)
slot_mapping = torch.full((BATCH,), -1, dtype=torch.int64)
block_table = torch.randperm(PAGES, dtype=torch.int32)[: BATCH * 16].reshape(BATCH, 16)
out = torch.zeros(BATCH, HEADS, 512, dtype=torch.bfloat16)
lse = torch.zeros(BATCH, HEADS)


def prepare(lengths: list[int]) -> sparse_mla.Metadata:
    """Fills the arrays with one query token per request, padded to BATCH.

    -> the metadata of the step
    """
    real = len(lengths)
    q.normal_()
    topk_indices.fill_(-1)
    for row, length in enumerate(lengths):
        chosen = torch.randperm(length)[:TOPK]
        topk_indices[row, : len(chosen)] = chosen
    starts = torch.clamp(torch.arange(BATCH + 1, dtype=torch.int32, device="cpu"), max=real)
    padded = lengths + [0] * (BATCH - real)
    seq_lens = torch.tensor(padded, dtype=torch.int32, device="cpu")
    common = sparse_mla.CommonAttentionMetadata(
        starts.cuda(),
        seq_lens.cuda(),
        slot_mapping,
        block_table,
        query_start_loc_cpu=starts,
        seq_lens_cpu=seq_lens,
        num_actual_tokens=BATCH,
    )
    return builder.build(common)


def forward(metadata: sparse_mla.Metadata) -> None:
    layer.forward(q, cache, topk_indices, metadata, out=out, lse=lse)


metadata = prepare([1000] * BATCH)
forward(metadata)  # loads the kernels, which must not happen during the capture
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    forward(metadata)

for lengths in ([1000] * BATCH, [7, 300, 1000], [512]):
    metadata = prepare(lengths)
    graph.replay()
    replayed = out[: len(lengths)].clone(), lse[: len(lengths)].clone()
    out.fill_(0)
    forward(metadata)  # the same step without the graph
    assert torch.equal(replayed[0], out[: len(lengths)])
    assert torch.equal(replayed[1], lse[: len(lengths)])
    print(f"{len(lengths)} of {BATCH} requests, lengths {lengths}: the bits of an eager call")


def microseconds(call, repeats: int = 200) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / repeats


eager, replay = microseconds(lambda: forward(metadata)), microseconds(graph.replay)
print(f"eager {eager:.1f} µs, replayed {replay:.1f} µs a layer")
