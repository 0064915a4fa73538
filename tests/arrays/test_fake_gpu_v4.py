"""DeepSeek V4's builder and its steps on a GPU, on the fake GPUs of fake_gpu.py."""

from dataclasses import replace

import numpy as np
import pytest
import reference as ref
import v4_attend_cases as attend
from fake_gpu import CupyArray
from fake_gpu_calls import assert_each_failure_is_raised
from helpers import assert_keeps_nothing, assert_same_bits, assert_within_bounds

import sparse_mla


def with_path(case, path):
    return replace(case.config, path=path)


class V4Step:
    """A layer of `package` and the arrays of a step, on a fake GPU."""

    def __init__(self, package, ratio, path, device_id=0, case=None, workspace=None) -> None:
        v4 = package.v4
        self.case = case or attend.make_case(ratio, path)
        fields = vars(self.case.config) | {"device": f"cuda:{device_id}"}
        self.config = v4.Config(fields.pop("num_heads"), **fields)

        def put(x):
            return None if x is None else CupyArray(x, device_id)

        self.builder = v4.MetadataBuilder(self.config, workspace=put(workspace))
        extra = self.case.compressed
        self.caches = v4.Caches(put(self.case.swa.cache), put(extra and extra.cache))
        weights = v4.Weights(None, None, put(self.case.sink), None, None)
        self.layer = v4.SparseMLA(self.config, ratio, weights)
        names = ("query_start_loc", "seq_lens", "slot_mapping", "block_table")
        arrays = {name: put(getattr(self.case.batch, name)) for name in names}
        self.common = self.case.batch.common(package, **arrays)
        self.tables = {r: put(x) for r, x in self.case.batch.compressed.items()}
        self.q, self.topk = put(self.case.q), put(self.case.topk)

    def build(self):
        return self.builder.build(self.common, compressed=self.tables)

    def attend(self, metadata, **options):
        return self.layer.attend(self.q, self.caches, metadata, self.topk, **options)

    def check(self, results) -> None:
        tokens = self.case.batch.num_tokens
        got = {name: x.array[:tokens] for name, x in zip(("out", "lse"), results, strict=True)}
        assert_within_bounds(self.case.reference(), got)


@pytest.mark.parametrize("path", ["direct", "separate"])
@pytest.mark.parametrize("ratio", attend.RATIOS)
def test_a_v4_step_sends_one_copy_and_waits_for_nothing(package, gpu, cupy, ratio, path):
    step = V4Step(package, ratio, path, 1)
    cupy.current = 1
    build_stream, stream = gpu.new_stream(1), gpu.new_stream(1)
    for _ in range(2):
        cupy.stream = build_stream
        gpu.calls()
        metadata = step.build()
        calls = [call.split("@")[0] for call in gpu.calls()]
        assert calls.count("copy") == 1
        assert not any("Synchronize" in call for call in calls)
        assert gpu.launch == (build_stream, 1)
        assert metadata.swa_indices.device == "cuda:1"
        step.check(step.attend(metadata, stream=stream))
        assert gpu.launch == (stream, 1)
        assert gpu.followed(stream) == build_stream
        calls = [call.split("@")[0] for call in gpu.calls()]
        assert "copy" not in calls
        assert not any("Synchronize" in call for call in calls)


@pytest.mark.parametrize("ratio", attend.RATIOS)
def test_large_v4_prefills_are_gathered_to_a_workspace(package, gpu, cupy, ratio):
    """A GPU's plan chooses for each step of a builder that was given a workspace. Both kinds of
    steps have the metadata and the results of a builder of that path."""
    cupy.stream = gpu.new_stream()
    large, small = attend.make_large_case(ratio), attend.make_case(ratio, None)
    for case, want in ((large, "separate"), (small, "direct")):
        step = V4Step(package, ratio, None, case=case, workspace=attend.make_workspace(case.config))
        metadata = step.build()
        assert metadata.path == want
        got = step.attend(metadata)
        step.check(got)
        fixed = V4Step(package, ratio, None, case=replace(case, config=with_path(case, want)))
        for x, y in zip(got, fixed.attend(fixed.build()), strict=True):
            assert_same_bits(x.array, y.array)


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": 64},
        {"heads": 32},
        {"formats": ("bfloat16", "fp8_v4")},
        {"formats": ("fp8_v4", "fp8_v41")},
        {"e4m3": True},
        {"prefill_chunk_size": 1},
    ],
    ids=str,
)
def test_v4_prefills_that_are_not_gathered(package, gpu, cupy, changes):
    case = attend.make_large_case(4, **changes)
    step = V4Step(package, 4, None, case=case, workspace=attend.make_workspace(case.config))
    assert step.build().path == "direct"


def test_v4_prefills_without_a_workspace(package, gpu, cupy):
    step = V4Step(package, 4, None, case=attend.make_large_case(4))
    assert step.builder.workspace_bytes == 0
    assert step.build().path == "direct"


@pytest.mark.parametrize("check", ["0", "1"])
@pytest.mark.parametrize("ratio", attend.RATIOS)
def test_v4_tokens_without_slots(package, gpu, cupy, monkeypatch, ratio, check):
    """Tokens that are not valid have no keys, with and without the checks of their request ids."""
    monkeypatch.setenv("SPARSE_MLA_CHECK", check)
    cupy.stream = gpu.new_stream()
    for tokens in ([0, 3], [4, 12], [1, *range(5, 33)]):
        case = attend.case_without_slots(ratio, "direct", tokens)
        step = V4Step(package, ratio, "direct", case=case)
        step.check(step.attend(step.build()))


CHECKED_TABLES = {
    "compact": lambda x: x.copy(),
    "padded": lambda x: np.pad(x, ((0, 0), (1, 2)))[:, 1:-2],
    "transposed": lambda x: np.asfortranarray(x),
    "gaps in both": lambda x: np.pad(x.repeat(2, 0).repeat(3, 1), ((0, 1), (0, 1)))[:-1:2, :-1:3],
    "backwards": lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
}


@pytest.mark.parametrize("layout", CHECKED_TABLES)
@pytest.mark.parametrize("shape", [(3, 5), (5, 3)])
def test_checked_tables(package, gpu, cupy, monkeypatch, shape, layout):
    """In checked mode each entry of a block table is looked at where its strides say, and the bad
    one is named; before and after it the gather works."""
    monkeypatch.setenv("SPARSE_MLA_CHECK", "1")
    reqs, blocks = shape
    cache = np.random.default_rng(1).integers(0, 99, (16, 2, 656)).astype(np.uint8)
    good = np.random.default_rng(2).permutation(16)[: reqs * blocks].reshape(shape)
    seq_lens = np.full(reqs, 2 * blocks, np.int32)
    starts = (np.arange(reqs) * 2 * blocks).astype(np.int32)

    def gather(table):
        out = np.zeros((2 * reqs * blocks, 576), ref.BF16)
        arrays = [CupyArray(x) for x in (cache, CHECKED_TABLES[layout](table), seq_lens, starts)]
        package.gather_kv_cache(*arrays, out=CupyArray(out))
        return out

    want = sparse_mla.gather_kv_cache(
        cache, good.astype(np.int32), seq_lens, starts, out=np.zeros((30, 576), ref.BF16)
    )
    assert_same_bits(gather(good.astype(np.int32)), want)
    for req, block in np.ndindex(shape):
        table = good.astype(np.int32)
        table[req, block] = 16
        gpu.calls()
        with pytest.raises(ValueError, match=rf"`block_table` must .* got 16 .*{req}.*{block}"):
            gather(table)
        assert not any(call.startswith("launch") for call in gpu.calls())


def test_a_v4_build_waits_for_the_layers_before_it(package, gpu, cupy):
    step = V4Step(package, 16, "direct")
    streams = [gpu.new_stream() for _ in range(3)]
    cupy.stream = streams[0]
    metadata = step.build()
    step.attend(metadata, stream=streams[1])
    cupy.stream = streams[2]
    step.build()
    assert gpu.followed(streams[2]) == streams[1]


def test_v4_captures(package, gpu, cupy):
    """A layer may be captured, a build may not."""
    step = V4Step(package, 4, "direct")
    cupy.stream = gpu.new_stream()
    metadata = step.build()
    want = [x.array.copy() for x in step.attend(metadata)]
    stream = cupy.stream = gpu.new_stream()
    gpu.capture(stream)
    with pytest.raises(ValueError, match=r"build: `stream` must not be capturing a CUDA graph"):
        step.build()
    results = step.attend(metadata)
    zeros = step.layer.attend(step.q, step.caches, None)
    gpu.capture(stream, False)
    for x, y in zip(results, want, strict=True):
        assert x.array.tobytes() == y.tobytes()
    assert not any(x.array.view(np.uint8).any() for x in zeros)


@pytest.mark.parametrize("call", ["copy to device", "launch", "cudaEventRecord"])
def test_a_v4_build_that_fails_leaves_no_step(package, gpu, cupy, call):
    step = V4Step(package, 16, "direct")
    cupy.stream = gpu.new_stream()
    metadata = step.build()
    gpu.fail(call)
    with pytest.raises(RuntimeError, match=r"^MetadataBuilder\.build: .* failed"):
        step.build()
    with pytest.raises(ValueError, match=r"^attend: `builder` must have built a step, got none"):
        step.attend(metadata)
    step.check(step.attend(step.build()))


def test_v4_arrays_on_another_gpu(package, gpu, cupy):
    step, other = (V4Step(package, 16, "direct", i) for i in range(2))
    stream = gpu.new_stream()
    cupy.current = 1
    with pytest.raises(ValueError, match=r"`block_table` must be on the device of the config"):
        step.builder.build(other.common)
    cupy.current = 0
    metadata = step.build()
    with pytest.raises(ValueError, match=r"must be on cuda:0 like"):
        step.builder.build(step.common, compressed=other.tables)
    step.check(step.attend(metadata, stream=stream))


def test_v4_steps_keep_nothing(package, gpu, cupy):
    step = V4Step(package, 4, "separate")
    stream = gpu.new_stream()

    def run():
        step.attend(step.build(), stream=stream)
        gpu.calls()
        cupy.reset()

    assert_keeps_nothing(run, calls=30)
    assert_keeps_nothing(lambda: package.v4.MetadataBuilder(step.config), calls=30)


@pytest.mark.parametrize("path", ["direct", "separate"])
@pytest.mark.parametrize("ratio", attend.RATIOS)
def test_a_v4_step_raises_whatever_fails(package, gpu, cupy, ratio, path):
    step = V4Step(package, ratio, path)
    streams = [gpu.new_stream() for _ in range(2)]

    def run() -> None:
        cupy.stream = streams[0]
        metadata = step.build()
        cupy.stream = streams[1]
        step.attend(metadata)

    assert_each_failure_is_raised(gpu, run)
