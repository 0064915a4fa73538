"""How kernels are started (csrc/cuda/host/launch.c): through graphs that belong to the stream,
where that has the effect of a launch."""

import functools
from concurrent.futures import ThreadPoolExecutor

import gpu
import pytest
from gpu import (
    CALLS,
    assert_same_values,
    come_late,
    is_busy,
    moved,
    outcome,
    split_attention,
    torch,
    turned,
)
from helpers import BESIDE_TESTS, printed_by_python

import sparse_mla

GRAPH = "cudaGraphLaunch"
LAUNCH = "cudaLaunchKernelExC"
OPS = ["convert_req_index_to_global_index", "merge_attn_states", "sparse_attention in 5 splits"]


def make_calls(count: int, **kwargs) -> list:
    """`count` calls of the operators OPS in turn, each with other values."""
    calls = [moved(turned(CALLS[OPS[i % len(OPS)]](), i)) for i in range(count)]
    for call in calls:
        call.kwargs.update(kwargs)
    return calls


def run_all(calls) -> list:
    return [gpu.as_tuple(call.run(sparse_mla)) for call in calls]


def assert_all_same(results, want) -> None:
    """Asserts the values of every call's results, once the device is done."""
    torch.cuda.synchronize()
    for got, expected in zip(results, want, strict=True):
        assert_same_values(gpu.values(got), expected)


def list_starts(run) -> list[str]:
    """The calls of CUDA by which `run` starts kernels, in its second run."""
    run()
    return [event.name for event in gpu.profile(run) if event.name in (GRAPH, LAUNCH)]


def find_starts(run) -> set:
    return set(list_starts(run))


def test_streams_with_a_priority_have_none():
    """A graph does not take over the stream's priority, so such streams get launches."""
    want = outcome(moved(CALLS[OPS[0]]()))
    call = moved(CALLS[OPS[0]]())
    call.kwargs["stream"] = torch.cuda.Stream(priority=-1)
    assert find_starts(lambda: call.run(sparse_mla)) == {LAUNCH}
    results = call.run(sparse_mla)
    torch.cuda.synchronize()
    assert_same_values(gpu.values(results), want)


def run_in_a_capture() -> None:
    """gpu.capture runs the call once on a stream of its own, which has a graph, and once in the
    capture, which holds the kernel itself."""
    (call,) = make_calls(1)
    assert find_starts(lambda: gpu.capture(lambda: call.run(sparse_mla))) == {GRAPH, LAUNCH}


def test_captures_hold_the_kernels():
    """Runs in a new process, because other tests may have used up the device's graphs."""
    run_alone("tests.run_in_a_capture()")


def run_clusters() -> None:
    q = torch.randn(1, 64, 576, device="cuda").bfloat16()
    cache = torch.zeros(32, 64, 656, dtype=torch.uint8, device="cuda")
    indices = torch.arange(2048, dtype=torch.int32, device="cuda")[None]

    def attend():
        sparse_mla.sparse_attention(q, cache, indices, softmax_scale=1.0)

    run_all(make_calls(1))  # so that the stream has a graph
    assert find_starts(attend) == {GRAPH}, "attention, and the kernel that combines splits"
    calls = make_calls(30)
    want = [outcome(call) for call in calls]
    results = []
    for call in calls:
        attend()
        results += run_all([call])
    assert_all_same(results, want)


@pytest.mark.skipif(torch.cuda.get_device_capability()[0] != 9, reason="no kernel for Hopper")
def test_clusters_have_graphs_of_their_own():
    """A graph that has once held a kernel with clusters would start later kernels in clusters too,
    and lose the last of an odd number of blocks. Runs in a new process, because other tests may
    have used up the device's graphs."""
    run_alone("tests.run_clusters()")


def test_every_call_of_a_long_queue_has_its_own_arguments():
    calls = make_calls(240)
    want = [outcome(call) for call in calls]
    for _ in range(2):
        gpu.delay(times=6)  # because a busy host once took 50 ms to make the calls
        results = run_all(calls)
        assert is_busy(torch.cuda.current_stream())
        assert_all_same(results, want)


def test_threads_that_share_a_stream():
    stream = torch.cuda.Stream()
    batches = [make_calls(60, stream=stream) for _ in range(4)]
    want = [outcome(call) for call in batches[0]]
    with ThreadPoolExecutor(len(batches)) as pool:
        for results in pool.map(run_all, batches):
            assert_all_same(results, want)


def test_streams_do_not_wait_for_each_other():
    busy, idle = torch.cuda.Stream(), torch.cuda.Stream()
    calls = [make_calls(3, stream=stream) for stream in (busy, idle)]
    for _ in range(2):
        for batch in calls:
            run_all(batch)
        torch.cuda.synchronize()
        gpu.delay(busy)
        for batch in calls:
            run_all(batch)
        idle.synchronize()
        assert is_busy(busy)
        torch.cuda.synchronize()


@pytest.mark.cupy
def test_new_streams_wait_for_nothing(cupy):
    """Making a graph takes device memory, which may wait for an idle device. So all graphs are
    made by the first call on the device."""
    (call,) = make_calls(1)
    run_all([call])
    torch.cuda.synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(60)]
    busy = torch.cuda.Stream()
    gpu.delay(busy)
    for stream in streams:
        call.kwargs["stream"] = stream
        run_all([call])
    assert is_busy(busy)
    torch.cuda.synchronize()


@pytest.mark.cupy
def test_the_legacy_stream_waits_for_blocking_streams(cupy):
    """The legacy stream and blocking streams wait for each other, as with plain launches."""
    mine = cupy.cuda.Stream()
    blocking = torch.cuda.ExternalStream(mine.ptr)
    for first, second in ((blocking, 0), (torch.cuda.default_stream(), blocking)):
        want = outcome(moved(CALLS[OPS[0]]()))
        call = come_late(moved(CALLS[OPS[0]]()), first)
        call.kwargs["stream"] = second
        results = call.run(sparse_mla)
        assert is_busy(first)
        torch.cuda.synchronize()
        assert_same_values(gpu.values(results), want)


@pytest.mark.cupy
def test_more_streams_than_there_are_graphs(cupy):
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(100)]
    calls = make_calls(len(streams))
    want = [outcome(call) for call in calls]
    for _ in range(2):
        for call, stream in zip(calls, streams, strict=True):
            call.kwargs["stream"] = stream
        results = run_all(calls)
        assert_all_same(results, want)


def run_beside_a_capture(in_thread: bool) -> None:
    """Makes the first and later calls on a stream during another stream's capture, in the capture
    mode that forbids most."""
    # sparse_attention is left out because it allocates its workspace.
    calls = [call for call in make_calls(6) if call.op != "sparse_attention"]
    want = [outcome(call) for call in calls]
    outs = [tuple(map(torch.empty_like, results)) for results in run_all(calls)]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for call, out in zip(calls, outs, strict=True):
        call.kwargs.update(zip(gpu.RESULTS, out, strict=False))

    def run():
        with torch.cuda.stream(stream):
            run_all(calls)

    captured = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"), ThreadPoolExecutor(1) as pool:
        captured += 1
        if in_thread:
            pool.submit(run).result()
        else:
            run()
    graph.replay()
    assert_all_same(outs, want)
    assert captured.tolist() == [1.0] * 4


def run_alone(body: str, **environment) -> str:
    """What `body` prints in a new process, in which `tests` is this module."""
    start = BESIDE_TESTS + "import test_gpu_launch as tests\n"
    return printed_by_python("-c", start + body, **environment)


def run_on_ordinary_streams() -> None:
    """One start for a kernel, and one for the two kernels of a split call."""
    call, _, split = make_calls(3)
    want = outcome(split)
    for stream in (None, torch.cuda.Stream()):
        for each in (call, split):
            each.kwargs["stream"] = stream
            assert list_starts(functools.partial(each.run, sparse_mla)) == [GRAPH]
        assert_all_same(run_all([split]), [want])


def test_ordinary_streams_have_graphs():
    """Runs in a new process, because other tests may have used up the device's graphs."""
    run_alone("tests.run_on_ordinary_streams()")


def run_many_pairs() -> None:
    """More pairs of kernels than there are graphs for them: the third stream has none."""
    calls = []
    for heads in (8, 24):  # other kernels for each, like the numbers of splits
        for num_splits in (2, 9, 17, 33):
            for wish in (False, True):
                call = split_attention()
                call.set("q", call.args["q"][:, :heads])
                call.kwargs.update(num_splits=num_splits, return_max_logits=wish)
                calls.append(moved(turned(call, len(calls))))
    want = [outcome(call) for call in calls]
    for _ in range(2):
        for stream in (None, torch.cuda.Stream(), torch.cuda.Stream()):
            for call in calls:
                call.kwargs["stream"] = stream
            assert_all_same(run_all(calls), want)


def test_more_pairs_than_there_are_graphs():
    """Runs in a new process, where the pairs meet graphs that nobody has taken yet."""
    run_alone("tests.run_many_pairs()")


@pytest.mark.parametrize("in_thread", [False, True])
def test_calls_beside_a_capture(in_thread):
    """Runs in a new process, where nothing but these calls can end the capture."""
    run_alone(f"tests.run_beside_a_capture(in_thread={in_thread})")


DIGEST = """
import hashlib
digest = hashlib.sha256()
for call in tests.make_calls(9):
    for x in tests.outcome(call):
        digest.update(x.tobytes())
print(digest.hexdigest(), *sorted(tests.find_starts(lambda: tests.run_all(tests.make_calls(3)))))
"""


@functools.cache
def find_digest(**environment) -> list[str]:
    return run_alone(DIGEST, **environment).split()


@pytest.mark.parametrize(
    "environment", [{"SPARSE_MLA_LAUNCH": "plain"}, {"CUDA_LAUNCH_BLOCKING": "1"}], ids=str
)
def test_launches_alone_by_environment(environment):
    """Environment variables turn graphs off. Plain launches give the same bits."""
    digest, *starts = find_digest()
    plain_digest, *plain_starts = find_digest(**environment)
    assert (starts, plain_starts) == ([GRAPH], [LAUNCH])
    assert digest == plain_digest
