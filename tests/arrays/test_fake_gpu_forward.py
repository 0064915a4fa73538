"""The streams of a DeepSeek V4 layer (sparse_mla/v4/lanes.py) on the fake GPUs of fake_gpu.py: what
runs where, what waits for what, and what is allocated. tests/step/test_gpu_v4_forward.py runs on
real ones."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
from exchange_producer import Exchanged
from fake_gpu import CupyArray
from helpers import assert_same_bits
from v4_world import HIDDEN, World

import sparse_mla

PARTS = [(0, 0, 20), (1, 0, 9)]


def to_cupy(x):
    return None if x is None else CupyArray(np.asarray(x))


def from_cupy(x) -> np.ndarray:
    return x.array if isinstance(x, CupyArray) else np.asarray(x)


def slices(name: str):
    """A method of NumPy's for Exchanged arrays."""

    def method(self, *arguments):
        return Exchanged(getattr(self.array, name)(*arguments), place=self.place)

    return method


@pytest.fixture
def exchange(monkeypatch):
    for name in ("__getitem__", "reshape", "swapaxes", "copy"):
        monkeypatch.setattr(Exchanged, name, slices(name), raising=False)
    monkeypatch.setattr(Exchanged, "__len__", lambda x: len(x.array), raising=False)
    monkeypatch.setattr(Exchanged, "stream", 0)
    return Exchanged


def to_exchanged(x):
    return None if x is None else Exchanged(np.asarray(x), place=(2, 0))


def from_exchanged(x) -> np.ndarray:
    return x.array if isinstance(x, Exchanged) else np.asarray(x)


def make_world(package, ratio, to=to_cupy, back=from_cupy, **options) -> World:
    given = {"device": "cuda:0", **options}
    return World(package, ratio, (20, 9), options=given, to=to, back=back)


def expected(ratio) -> np.ndarray:
    return World(sparse_mla, ratio, (20, 9)).step(PARTS, 1)


def watch(world: World, look) -> dict:
    """Replaces each projection by one that first keeps what `look` says. -> name: what it said"""
    seen = {}

    def watched(name, function):
        def call(*arguments, **keywords):
            seen[name] = look(keywords)
            keywords.pop("stream", None)
            return function(*arguments, **keywords)

        return call

    for name, function in world.projections.items():
        world.layer.projections[name] = watched(name, function)
    return seen


def lanes_of(ratio: int, streams: list[int], main: int, *, is_early=True) -> dict[str, int]:
    """The stream that each projection belongs on."""
    choosing = pooling = index_pooling = main
    if ratio == 4:
        choosing = streams[0] if streams else main
        pooling = streams[1] if len(streams) > 1 else main
        index_pooling = streams[2] if len(streams) > 2 else choosing
    elif ratio > 1:
        pooling = streams[0] if streams else main
    found = dict.fromkeys(("fused_wqa_wkv", "wq_b", "wo_b"), main)
    if ratio > 1:
        found["wkv_wgate"] = pooling if is_early else main
    if ratio == 4:
        found["index_wq_b"] = choosing
        found["index_weights_proj"] = choosing if is_early else main
        found["index_wkv_wgate"] = index_pooling if is_early else main
    return found


# --- what runs where -----------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 1024])
@pytest.mark.parametrize("count", range(4))
@pytest.mark.parametrize("ratio", [1, 4, 16])
def test_projections_run_on_their_streams(package, gpu, cupy, ratio, count, most):
    """CuPy's current stream is that of the part, and the caller's again after the call."""
    world = make_world(package, ratio, overlap_gemm_tokens=most)
    streams, main = [gpu.new_stream() for _ in range(count)], gpu.new_stream()
    cupy.stream = main
    seen = watch(world, lambda _: cupy.stream)
    out = world.step(PARTS, 1, streams=streams)
    assert_same_bits(out, expected(ratio))
    assert seen == lanes_of(ratio, streams, main, is_early=most > 1)
    assert cupy.stream == main


def test_stream_objects_and_a_given_main_stream(package, gpu, cupy):
    world = make_world(package, 4)
    streams = [cupy.cuda.Stream(gpu.new_stream()) for _ in range(3)]
    main = cupy.cuda.Stream(gpu.new_stream())
    seen = watch(world, lambda _: cupy.stream)
    out = world.step(PARTS, 1, streams=streams, stream=main)
    assert_same_bits(out, expected(4))
    assert seen == lanes_of(4, [s.ptr for s in streams], main.ptr)
    assert cupy.stream == 0


@pytest.mark.parametrize("count", range(4))
@pytest.mark.parametrize("ratio", [1, 4, 16])
def test_callables_of_other_frameworks_get_the_stream(package, gpu, exchange, ratio, count):
    world = make_world(package, ratio, to_exchanged, from_exchanged)
    streams, main = [gpu.new_stream() for _ in range(count)], gpu.new_stream()
    seen = watch(world, lambda keywords: keywords["stream"])
    out = world.step(PARTS, streams=streams, stream=main)
    assert_same_bits(out, expected(ratio))
    assert seen == lanes_of(ratio, streams, main)


# --- what waits for what -------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("ratio", [1, 4, 16])
def test_what_waits_for_what(package, gpu, cupy, monkeypatch, ratio, count):
    """A part's stream waits for the main one before the part begins; the main one waits for all
    parts before attention, and for streams without a part never."""
    world = make_world(package, ratio)
    streams, main = [gpu.new_stream() for _ in range(count)], gpu.new_stream()
    cupy.stream = main
    world.step(PARTS)  # its memory is there now
    log = []
    core = package.v4.SparseMLA.forward.__globals__["_C"]
    order = core.order_streams

    def ordered(device_id, first, then):
        log.append((first, then))
        order(device_id, first, then)
        assert gpu.followed(then) == first

    monkeypatch.setattr(core, "order_streams", ordered)
    watch(world, lambda _: log.append(cupy.stream))
    world.step([(0, 19, 1)], streams=streams)
    lanes = lanes_of(ratio, streams, main)
    used = set(lanes.values()) - {main}
    places = {lane: [i for i, entry in enumerate(log) if entry == lane] for lane in used}
    for lane, calls in places.items():
        assert log.index((main, lane)) < calls[0]
        assert calls[-1] < log.index((lane, main)) < len(log) - 1, "wo_b comes last"
    assert {lane for entry in log if isinstance(entry, tuple) for lane in entry} <= {*used, main}
    if ratio == 4:
        latent = max(i for i, entry in enumerate(log) if entry == (main, streams[0]))
        assert latent == places[streams[0]][-1] - 1, "the latent query, in front of index_wq_b"
    if ratio == 4 and count == 3:
        assert places[streams[0]][-1] < log.index((streams[2], streams[0])), "its keys"


def test_a_failing_part_is_still_joined(package, gpu, cupy):
    """After an error in a part, the main stream waits for what the part has started."""
    world = make_world(package, 4)
    side, main = gpu.new_stream(), gpu.new_stream()
    cupy.stream = main
    world.step(PARTS)

    def fail(_):
        raise ZeroDivisionError

    world.layer.projections["index_wq_b"] = fail
    with pytest.raises(ZeroDivisionError):
        world.step([(0, 19, 1)], streams=[side])
    assert gpu.followed(main) == side
    assert cupy.stream == main


def test_the_next_build_waits_for_all_of_the_layer(package, gpu, cupy):
    """What reads the step behind attention, too: its event is recorded behind the last launch."""
    world = make_world(package, 4)
    build_streams, stream = [gpu.new_stream() for _ in range(2)], gpu.new_stream()
    cupy.stream = build_streams[0]
    world.step(PARTS)
    metadata = world.build([(0, 19, 1)])
    x = world.to(world.inputs([(0, 19, 1)]))
    cupy.stream = stream
    watch(world, lambda _: log.append([call.split("@")[0] for call in gpu.calls()]))
    log = []
    world.layer.forward(x, world.caches, metadata)
    behind_launches = log[-1][max(i for i, call in enumerate(log[-1]) if call == "launch") :]
    assert behind_launches.count("cudaEventRecord") >= 1
    cupy.stream = build_streams[1]
    world.build([(0, 19, 1)])
    assert gpu.followed(build_streams[1]) == stream


def test_nothing_waits_on_the_host(package, gpu, cupy):
    world = make_world(package, 4)
    streams = [gpu.new_stream() for _ in range(3)]
    world.step(PARTS)
    gpu.calls()
    memory = gpu.num_memory
    world.step([(0, 19, 1)], streams=streams)
    calls = [call.split("@")[0] for call in gpu.calls()]
    assert calls.count("copy") == 1, "the step's build"
    assert not any("Synchronize" in call for call in calls)
    assert gpu.num_memory == memory


# --- captures ------------------------------------------------------------------------------------


def test_a_capture_needs_the_memory_before(package, gpu, cupy):
    world = make_world(package, 4)
    cupy.stream = gpu.new_stream()
    metadata = world.build(PARTS)
    x = world.to(world.inputs(PARTS))
    stream = cupy.stream = gpu.new_stream()
    gpu.capture(stream)
    text = "forward: `qr` must exist before a capture: call forward once for this builder before"
    with pytest.raises(RuntimeError, match=text):
        world.layer.forward(x, world.caches, metadata)
    out = world.layer.forward(x, world.caches, None)  # a warm-up may be captured
    assert not ref.to_f32(from_cupy(out)).any()
    gpu.capture(stream, False)
    world.layer.forward(x, world.caches, metadata)
    gpu.capture(stream)
    got = world.layer.forward(x, world.caches, metadata)
    gpu.capture(stream, False)
    assert from_cupy(got).shape == (29, HIDDEN)
