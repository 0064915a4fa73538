"""Builders and their steps on a GPU, on the fake GPUs of fake_gpu.py."""

import gc
import sys

import cases
import engine
import numpy as np
import pytest
import reference as ref
from dlpack_producer import CUDA, Producer
from fake_gpu import (
    OUT_OF_MEMORY,
    Cupy,
    CupyArray,
    give_back,
    load,
    on_gpu,
)
from fake_gpu_calls import assert_each_failure_is_raised, read
from helpers import assert_keeps_nothing, assert_within_bounds

import sparse_mla

# --- the builder ---------------------------------------------------------------------------------

HEADS = 8


def place(package, batch, device_id=0):
    """A step's description with its arrays on the GPU."""
    names = ("query_start_loc", "seq_lens", "slot_mapping", "block_table")
    arrays = {name: CupyArray(getattr(batch, name), device_id) for name in names}
    return batch.common(package, **arrays)


def make_config(package, path, device_id=0, **changes):
    options = {"num_heads": HEADS, "fp8": path != "bf16", "path": path}
    return engine.config(package, **(options | changes), device=f"cuda:{device_id}")


def arrays_of(step, path, device_id=0):
    """The query, the cache and the lists of a layer's step on the GPU."""
    kv = step.bf16_cache(sparse_mla) if path == "bf16" else step.fp8_cache
    return [CupyArray(x, device_id) for x in (step.q, kv, step.topk_indices)]


def small_step(num_heads=HEADS, lens=(1, 2, 30)):
    return engine.make_step(cases.make_batch(lens, [n + 9 for n in lens]), num_heads)


@pytest.mark.parametrize("path", ["mixed", "separate", "direct", "bf16"])
def test_a_step_of_a_layer(package, gpu, cupy, path):
    """The step is within its bound, with mirrors and a workspace in the GPU's memory."""
    step = engine.make_step(engine.engine_batch(), HEADS)
    config = make_config(package, path, 1)
    stream, cupy.stream, cupy.current = gpu.new_stream(1), gpu.new_stream(1), 1
    metadata = package.MetadataBuilder(config).build(place(package, step.batch, 1))
    assert metadata.path == path
    assert metadata.req_id_per_token.device == "cuda:1"
    outputs = {
        "out": CupyArray(np.zeros((*step.q.shape[:2], 512), ref.BF16), 1),
        "lse": CupyArray(np.zeros(step.q.shape[:2], np.float32), 1),
    }
    inputs = arrays_of(step, path, 1)
    sink = CupyArray(step.attn_sink, 1)
    package.SparseMLA(config).forward(*inputs, metadata, attn_sink=sink, **outputs, stream=stream)
    assert gpu.launch == (stream, 1)
    want = step.reference(path, inputs[1].array)
    assert_within_bounds(want, {name: x.array for name, x in outputs.items()})
    assert gpu.followed(stream) == cupy.stream


@pytest.mark.parametrize("path", ["mixed", "direct"])
def test_rows_behind_the_step_are_zero(package, gpu, cupy, path):
    step = small_step()
    tokens = len(step.q)
    config = make_config(package, path)
    metadata = package.MetadataBuilder(config).build(place(package, step.batch))
    more = [np.concatenate([x, x[:5]]) for x in (step.q, step.topk_indices)]
    arrays = [CupyArray(x) for x in (more[0], step.fp8_cache, more[1])]
    stream = gpu.new_stream()
    for gives in (CupyArray, on_gpu):  # results by CuPy's allocator, or as Tensors
        q = gives(more[0])
        out, lse = package.SparseMLA(config).forward(q, *arrays[1:], metadata, stream=stream)
        values = [x.array if gives is CupyArray else read(x) for x in (out, lse)]
        assert [len(x) for x in values] == [tokens + 5] * 2
        got = {"out": values[0][:tokens], "lse": values[1][:tokens]}
        assert_within_bounds(step.reference(path, step.fp8_cache, sink=False), got)
        assert not any(x[tokens:].view(np.uint8).any() for x in values)
    gpu.fail("cudaMemsetAsync")
    with pytest.raises(RuntimeError, match=r"^forward: cudaMemsetAsync failed"):
        package.SparseMLA(config).forward(*arrays, metadata, stream=stream)


def make_step(package, path):
    """A builder and a layer, and the arrays of a step for both."""
    step, config = small_step(), make_config(package, path)
    builder, layer = package.MetadataBuilder(config), package.SparseMLA(config)
    return builder, layer, arrays_of(step, path), place(package, step.batch)


@pytest.mark.parametrize("path", ["mixed", "separate", "bf16"])
def test_builds_and_forwards_on_streams_in_turn(package, gpu, cupy, path):
    """A forward waits for the build's copy, and the next build for the forward."""
    builder, layer, arrays, common = make_step(package, path)
    streams = [gpu.new_stream() for _ in range(4)]
    former = None
    for build_stream, forward_stream in (streams[:2], streams[2:]):
        cupy.stream = build_stream
        metadata = builder.build(common)
        assert gpu.followed(build_stream) == former
        cupy.stream = forward_stream
        layer.forward(*arrays, metadata)
        assert gpu.launch == (forward_stream, 0)
        assert gpu.followed(forward_stream) == build_stream
        former = forward_stream


def test_bounds_of_lengths_may_be_beyond_the_table(package, gpu, cupy):
    """Of a dense step on a GPU the host knows the lengths of prefills only, and not on "mixed"."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 256}
    starts, bounds = np.array([0, 1, 6], np.int32), np.array([17, 33], np.int32)
    arrays = [CupyArray(x) for x in (starts, bounds, np.arange(6), np.zeros((2, 2), np.int32))]
    common = package.CommonAttentionMetadata(
        *arrays, query_start_loc_cpu=starts, seq_lens_cpu=bounds
    )
    for path in ("mixed", "separate", None):
        config = package.dense.Config(
            2, softmax_scale=0.1, block_size=16, path=path, device="cuda:0", **limits
        )
        builder = package.dense.MetadataBuilder(config)
        bounds[:] = 33, 32
        assert builder.build(common).num_prefills == 1
        bounds[:] = 17, 33
        if path == "mixed":
            assert builder.build(common).num_prefills == 1
            continue
        rule = "`block_table` must have at least 3 columns for the 33 tokens of request 1, got 2$"
        with pytest.raises(ValueError, match=rule):
            builder.build(common)


def test_small_prefills_go_to_the_fp8_cache(package, gpu, cupy):
    """A GPU's plan does not gather small prefills, because that would not pay. A CPU's does."""
    paths = {}
    for name, lens in {"small": (1, 3), "large": (1, 250)}.items():
        step = engine.make_step(cases.make_batch(lens, lens), 32)
        config = make_config(package, None, num_heads=32, topk_tokens=2048)
        metadata = package.MetadataBuilder(config).build(place(package, step.batch))
        paths[name] = metadata.path, metadata.prefill is None
    assert paths["small"] == ("direct", True)
    config = engine.config(sparse_mla, num_heads=32)
    metadata = sparse_mla.MetadataBuilder(config).build(small_step().batch.common(sparse_mla))
    assert metadata.path == "separate"


def test_arrays_on_another_gpu_than_the_builder_s(package, gpu, cupy):
    step = small_step()
    config = make_config(package, "mixed")
    builder, layer = package.MetadataBuilder(config), package.SparseMLA(config)
    here, there = (
        [CupyArray(x, i) for x in (step.q, step.fp8_cache, step.topk_indices)] for i in range(2)
    )
    metadata = builder.build(place(package, step.batch, 1))
    with pytest.raises(ValueError, match=r"`block_table` must be on cuda:0 like `q`, got cuda:1"):
        layer.forward(*here, metadata)
    cupy.current = 1
    with pytest.raises(ValueError, match=r"`q` must be on the device of the config, got another"):
        layer.forward(*there, metadata)
    cupy.current = 0
    layer.forward(*here, builder.build(place(package, step.batch)))
    config = make_config(package, "separate")
    workspace = np.zeros((cases.ENGINE_WORKSPACE, 576), ref.BF16)
    package.MetadataBuilder(config, workspace=CupyArray(workspace))
    for other in (CupyArray(workspace, 1), workspace):
        with pytest.raises(
            ValueError, match=r"`workspace` must be on the device of the config, got another one"
        ):
            package.MetadataBuilder(config, workspace=other)


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_block_table_lives_until_the_next_one_s_work_is_over(package, gpu, cupy, is_busy):
    """The table of an unknown producer is kept for the forwards of its step, and after that until
    the copy of the next build is over."""
    step = small_step()
    builder = package.MetadataBuilder(make_config(package, "mixed"))

    class Table(Producer):
        def __init__(self, array):
            super().__init__(array, device=(CUDA, 0))
            self.shape = array.shape

    common = [place(package, step.batch) for _ in "ab"]
    tables = [Table(step.batch.block_table) for _ in "ab"]
    for description, table in zip(common, tables, strict=True):
        object.__setattr__(description, "block_table", table)
    gpu.set_busy(is_busy)
    builder.build(common[0])
    assert tables[0].outstanding == 1
    builder.build(common[1])
    assert [x.outstanding for x in tables] == [1, 1]
    gpu.finish()
    give_back(package)
    assert [x.outstanding for x in tables] == [0, 1]
    builder = None
    gc.collect()
    give_back(package)
    assert [x.outstanding for x in tables] == [0, 0]


def test_a_block_table_that_cannot_be_had(package, gpu, cupy):
    """The object is released, and the former step stays valid."""

    class Table(Producer):
        shape = (3, 4)

        def __dlpack__(self, **request):
            raise ValueError("gone")

    step = small_step()
    builder = package.MetadataBuilder(make_config(package, "mixed"))
    metadata = builder.build(place(package, step.batch))
    common, table = place(package, step.batch), Table(step.batch.block_table, device=(CUDA, 0))
    object.__setattr__(common, "block_table", table)
    held = sys.getrefcount(table)
    with pytest.raises(BufferError, match=r"`block_table` must be exportable by DLPack.*: gone$"):
        builder.build(common)
    assert sys.getrefcount(table) == held
    arrays = [CupyArray(x) for x in (step.q, step.fp8_cache, step.topk_indices)]
    package.SparseMLA(make_config(package, "mixed")).forward(*arrays, metadata)


@pytest.mark.parametrize(
    "call",
    ["cudaMalloc", "cudaHostAlloc", "cudaEventRecord", "copy to device", "cudaStreamWaitEvent"],
)
def test_builds_that_fail(gpu, cupy, monkeypatch, call):
    """A build that fails gives back all that it took, and the next build is right again."""
    package = load()
    monkeypatch.setitem(sys.modules, "cupy", Cupy())
    step = small_step()
    config = make_config(package, "separate")
    memory = gpu.num_memory
    num_failed, fails = 0, True
    while fails:
        gpu.fail(call, num_failed, OUT_OF_MEMORY)
        try:
            builder = package.MetadataBuilder(config)
            metadata = builder.build(place(package, step.batch))
            builder.build(place(package, step.batch))
            fails = False
        except MemoryError as error:
            assert str(error).startswith("MetadataBuilder")
            num_failed += 1
        metadata = builder = None
        assert gpu.num_memory == memory
    gpu.fail(None, -1)
    assert num_failed > 0 or call == "cudaStreamWaitEvent"
    builder = package.MetadataBuilder(config)
    metadata = builder.build(place(package, step.batch))
    assert metadata.num_actual_tokens == len(step.q)


def test_the_builder_of_c_takes_what_python_gives(package):
    core = package.ops.facts._C
    with pytest.raises(TypeError, match=r"^MetadataBuilder: takes positional arguments only"):
        core.Step("v32", {}, workspace=None)
    with pytest.raises(TypeError):
        core.Step("v32", {})


def test_cpu_features_name_no_gpu(package):
    rows = package.kernels()
    assert any(row["device"] == "cuda" and row["available"] for row in rows)
    assert package.build_info()["cpu_features"] == sparse_mla.build_info()["cpu_features"]
    assert {row["arch"] for row in rows if row["device"] == "cuda"}.isdisjoint(
        package.build_info()["cpu_features"]
    )


def test_plans_of_a_gpu_name_its_kernels(package):
    names = {row["name"] for row in package.kernels() if row["device"] == "cuda"}
    plans = package.ops._attention_plans(300, 64, 2048, device="cuda")
    assert [plan["head_dim"] for plan in plans] == [576, 512, 576, 512, 512, 576, *[512] * 3]
    for plan in plans:
        assert sum(tokens for tokens, _, _ in plan["runs"]) == 300
        assert {name for _, _, name in plan["runs"]} <= names
        assert plan["workspace_bytes"] <= package.attention_workspace_size(
            300, 64, 2048, device="cuda"
        )


@pytest.mark.parametrize("fmt", ["fp8", "fp8_v4"])
def test_rows_are_widened_where_there_is_room(package, fmt):
    """The fake GPU fills the rows' part of a workspace, which lies behind all that others need and
    ends with the workspace, but for what alignment takes."""
    T, H, K, pages = 132, 128, 1000, 3
    rng = np.random.default_rng(0)
    row, dim, options = (656, 576, {}) if fmt == "fp8" else (584, 512, {"kv_format": fmt})
    kv = np.zeros((pages, 16, row), np.uint8)
    q = cases.random_bf16(rng, T, H, dim)
    indices = rng.integers(0, pages * 16, (T, K)).astype(np.int32)

    def run(size, residue=0):
        memory = np.zeros(size + 128, np.uint8)
        first = -memory.ctypes.data % 64 + residue
        workspace = on_gpu(memory[first : first + size])
        package.sparse_attention(
            on_gpu(q),
            on_gpu(kv),
            on_gpu(indices),
            softmax_scale=1.0,
            workspace=workspace,
            **options,
        )
        return memory[:first], memory[first : first + size], memory[first + size :]

    size_of = lambda n: package.attention_workspace_size(T, H, K, num_keys=n, device="cuda")  # noqa: E731
    least, rows = size_of(0), pages * 16
    assert size_of(rows) == least + 128 + (rows + 1) * 1152
    assert size_of(10**9) == least
    for residue in (0, 1, 16):
        before, workspace, behind = run(size_of(rows), residue)
        filled = np.flatnonzero(workspace)
        assert filled.size == (rows + 1) * 1152
        assert filled[0] >= least
        assert not before.any()
        assert not behind.any()
    for size in (size_of(rows) - 1, least):
        assert not run(size)[1].any()


@pytest.mark.parametrize("path", ["mixed", "separate", "direct", "bf16"])
def test_a_step_raises_whatever_fails(package, gpu, cupy, path):
    """Also where a call ends its use of the metadata: the next build would not wait for it."""
    builder, layer, arrays, common = make_step(package, path)
    streams = [gpu.new_stream() for _ in range(2)]

    def run() -> None:
        cupy.stream = streams[0]
        metadata = builder.build(common)
        cupy.stream = streams[1]
        layer.forward(*arrays, metadata)

    assert_each_failure_is_raised(gpu, run)


def test_steps_keep_nothing(package, gpu, cupy):
    """Neither builds nor forwards with new results keep anything."""
    builder, layer, _, common = make_step(package, "separate")
    step, config = small_step(), layer.config
    arrays = [on_gpu(x) for x in (step.q, step.fp8_cache)] + [CupyArray(step.topk_indices)]

    def run():
        layer.forward(*arrays, builder.build(common))
        for x in arrays[:2]:
            x.forget()
        cupy.reset()

    assert_keeps_nothing(run, calls=30)
    assert_keeps_nothing(lambda: package.MetadataBuilder(config), calls=30)
