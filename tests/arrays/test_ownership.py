"""How long arrays are held (csrc/python/: array.c, step_build.c, tensor.c).

A call holds its arguments until it ends, with a result or with an error. A builder holds its
workspace until it is gone, and the block table of a step until the next build. The memory of a
result lives as long as its last view.

Each kind of argument shows in its own way whether it is held: an ndarray by its reference count, a
memoryview by whether it can be released, a capsule by its deleter. No test waits for the garbage
collector.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cases
import compiled
import engine
import numpy as np
import operators
import pytest
from cases import int32
from dlpack_producer import DTYPES, Producer, api
from example_table import TABLE
from exchange_producer import POISON, Exchanged, LikeTorch, NoLoans

import sparse_mla
from sparse_mla import _C

pytestmark = pytest.mark.frameworks

# --- whether an argument is held -----------------------------------------------------------------


@dataclass
class Given:
    """An array as an argument of some kind."""

    x: Any
    is_locked: Callable[[], bool] = lambda: False
    references: int = 0

    def settle(self) -> Given:
        """Takes the references that exist now as those that may remain."""
        self.references = self.count()
        return self

    def count(self) -> int:
        """The reference count, less one for each capsule that the producer has recorded."""
        return sys.getrefcount(self.x) - len(getattr(self.x, "capsules", ()))

    def is_held(self) -> bool:
        return self.count() != self.references or self.is_locked()


def as_ndarray(x: np.ndarray) -> Given:
    return Given(x.view())


def as_buffer(x: np.ndarray) -> Given:
    """A memoryview of an ndarray's memory, which nobody can release while it is in use."""
    view = memoryview(x)

    def is_locked() -> bool:
        try:
            view.release()
        except BufferError:
            return True
        return False

    return Given(view, is_locked)


def as_capsule(x: np.ndarray, **options) -> Given:
    """A DLPack producer. The deleter of each of its tensors must run once, and nobody else may hold
    its capsules."""
    producer = Producer(x, **options)

    def is_locked() -> bool:
        references = {sys.getrefcount(c) for c in producer.capsules}
        return producer.outstanding != 0 or not references <= {3}  # list, loop, argument

    return Given(producer, is_locked)


def as_old_capsule(x: np.ndarray) -> Given:
    return as_capsule(x, versioned=False)


def as_exchanged(x: np.ndarray) -> Given:
    """An array that the exchange API lends for a call, or shares, with a deleter."""
    exchanged = Exchanged(x)
    return Given(exchanged, lambda: exchanged.outstanding != 0)


KINDS = {
    "ndarray": as_ndarray,
    "buffer": as_buffer,
    "capsule": as_capsule,
    "old capsule": as_old_capsule,
    "exchange API": as_exchanged,
}


def give(kind: str, x: np.ndarray) -> Given:
    """`x` as an argument of this kind, or as an ndarray where the kind cannot express its dtype."""
    has_format = x.dtype.isbuiltin == 1 if kind == "buffer" else x.dtype in DTYPES
    return (KINDS[kind] if has_format else as_ndarray)(x).settle()


def held(given: dict[str, Given]) -> list[str]:
    return [name for name, one in given.items() if one.is_held()]


def ends(run, arguments: dict) -> bool:
    """Whether the run ends without an exception. The exception is not kept."""
    try:
        run(arguments)
    except (TypeError, ValueError, BufferError):
        return False
    return True


# --- calls ---------------------------------------------------------------------------------------

# Wrong arguments: a call refuses the first while it acquires its arrays, the second when it checks
# them.
WRONG = (object(), np.zeros((1, 1, 1, 1, 1), np.complex64))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("title", TABLE)
def test_arguments_are_let_go(title, kind):
    """Nothing is held after a good call, nor after calls in which one argument is wrong, each
    argument in turn."""
    example = TABLE[title]
    given = {name: give(kind, x.copy()) for name, x in example.arrays.items()}
    arguments = {name: one.x for name, one in given.items()}
    for one in given.values():
        one.settle()
    assert ends(example.run, arguments)
    assert held(given) == []
    for name in arguments:
        for wrong in WRONG:
            references = sys.getrefcount(wrong)
            assert not ends(example.run, arguments | {name: wrong}), name
            assert held(given) == [], f"after an error of {name}"
            assert sys.getrefcount(wrong) == references, name


@pytest.mark.parametrize(("type_", "is_always_writable"), [(Exchanged, False), (LikeTorch, True)])
def test_a_loan_is_no_share(type_, is_always_writable):
    """The exchange API lends arrays for a call. It shares those that the call writes and that might
    be read-only, and those that a builder keeps. Where a framework's table has no function for
    loans, all arrays are shared."""
    call = operators.GOOD_CALLS["merge_attn_states"]()
    arguments = {name: type_(x) for name, x in call.arrays().items()}
    workspace, block_table = (type_(x) for x in (np.zeros((16, 576), cases.ref.BF16), table()))

    def count(run) -> tuple[int, int]:
        lent, shared = Exchanged.lent, Exchanged.shared
        run()
        assert Exchanged.total_outstanding() == 0
        return Exchanged.lent - lent, Exchanged.shared - shared

    def keep() -> None:
        builder = make_builder(workspace)
        build(builder, block_table)
        assert (workspace.outstanding, block_table.outstanding) == (1, 1)

    merge = functools.partial(sparse_mla.merge_attn_states, **arguments)
    assert count(merge) == count(merge) == ((7, 0) if is_always_writable else (5, 2))
    assert count(keep) == (0, 2)
    with NoLoans():
        assert count(merge) == (0, 7)
        assert count(keep) == (0, 2)


# --- results -------------------------------------------------------------------------------------


# The operators that make results of a framework, with the number of their results.
RESULTS = {
    op: operators.FACTS[op].num_results
    for op in operators.GOOD_CALLS
    if operators.FACTS[op].num_results > 0
}


def without_outputs(op: str) -> operators.Call:
    call = operators.GOOD_CALLS[op]()
    for name in operators.RESULTS:
        call.kwargs.pop(name, None)
    for name, x in call.arrays().items():
        call.set(name, Exchanged(x))
    return call


@pytest.mark.parametrize("op", RESULTS)
def test_a_framework_s_memory_for_results(op):
    """The framework allocates each result once, the call writes every byte of it, and returns it as
    the framework's own object."""
    want = operators.GOOD_CALLS[op]()
    for name in operators.RESULTS:
        want.kwargs.pop(name, None)
    want = want.run(sparse_mla)
    allocated = Exchanged.allocated
    got = without_outputs(op).run(sparse_mla)
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    assert Exchanged.allocated - allocated == len(got) == RESULTS[op]
    assert Exchanged.total_outstanding() == 0
    for x, y in zip(got, want, strict=True):
        assert type(x) is Exchanged
        assert x.array.tobytes() == y.tobytes()
    alive = [weakref.ref(x) for x in got]
    del got, x
    assert [one() for one in alive] == [None] * RESULTS[op]


def test_results_are_of_the_framework_of_the_first_array_that_is_given():
    """The first argument may be None."""
    call = operators.GOOD_CALLS["build_mixed_sparse_indices"]()
    for name in ("decode_swa_indices", "decode_compressed_indices", "decode_compressed_lens"):
        call.args[name] = None
    for name in ("out", "lens"):
        del call.kwargs[name]
    want = call.run(sparse_mla)
    for name, x in call.arrays().items():
        call.set(name, Exchanged(x))
    for x, y in zip(call.run(sparse_mla), want, strict=True):
        assert type(x) is Exchanged
        assert x.array.tobytes() == y.tobytes()


@pytest.mark.parametrize("op", RESULTS)
def test_results_of_a_call_that_fails_go_back(op):
    """The call allocates its results before the core refuses the call, and must give them back."""
    call = without_outputs(op)
    name, x = operators.FACTS[op].refused
    if name == "out":
        call.kwargs.setdefault(name, None)
    call.set(name, Exchanged(x) if isinstance(x, np.ndarray) else x)
    allocated, outstanding = Exchanged.allocated, Exchanged.total_outstanding()
    with pytest.raises(ValueError, match=f"{op}: "):
        call.run(sparse_mla)
    assert Exchanged.allocated > allocated
    assert Exchanged.total_outstanding() == outstanding == 0


# --- Tensors and their views ---------------------------------------------------------------------

MIB = 1 << 20
MEMORY = pytest.mark.skipif(
    sparse_mla.build_info()["flags"] != "release" or not hasattr(ctypes.CDLL(None), "malloc_trim"),
    reason="what is freed stays resident",
)


def resident() -> int:
    """Resident memory in bytes, after malloc has returned its free memory to the system."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def large_tensor():
    """A Tensor [272, 128, 512] bf16, 34 MiB, in which every value is 3."""
    zeros = np.zeros(576, np.uint16).view(cases.ref.BF16)
    q = Producer(np.broadcast_to(zeros, (272, 128, 576)))
    kv = np.full((1, 576), 3, np.float32).astype(cases.ref.BF16)
    out, _ = sparse_mla.sparse_attention(q, kv, np.zeros((272, 1), np.int32), softmax_scale=1.0)
    assert type(out) is sparse_mla.Tensor
    return out


def used_capsule(tensor) -> Producer:
    """A view of the tensor, after a call has consumed and freed a capsule of the tensor."""
    capsule = tensor.__dlpack__(max_version=(1, 0))

    class Once:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **_):
            return capsule

    sparse_mla.dynamic_per_tensor_quant(Once())
    assert api.PyCapsule_GetName(capsule) == b"used_dltensor_versioned"
    return tensor[5:6]


KEEPERS: dict[str, Callable[[Any], Any]] = {
    "Tensor": lambda tensor: tensor,
    "row": lambda tensor: tensor[127],
    "slice": lambda tensor: tensor[200:2:-7],
    "slice of a row of a slice": lambda tensor: tensor[::2][3][::-1],
    "ndarray": np.asarray,
    "ndarray of a slice": lambda tensor: np.asarray(tensor[::-3]),
    "capsule": lambda tensor: tensor[3:].__dlpack__(max_version=(1, 0)),
    "old capsule": lambda tensor: tensor.__dlpack__(),
    "view behind a consumer": used_capsule,
    "row in a result's place": lambda tensor: sparse_mla.merge_attn_states(
        tensor[:1], np.zeros((1, 128), np.float32), tensor[1:2], np.zeros((1, 128), np.float32),
        out=tensor[2:3],
    )[0],
}  # fmt: skip


@MEMORY
@pytest.mark.parametrize("keeper", KEEPERS)
def test_a_tensor_s_memory_goes_with_its_last_view(keeper):
    # Garbage of earlier tests goes now. None is collected later: a cycle that keeps memory shows.
    gc.collect()
    before = resident()
    kept = KEEPERS[keeper](large_tensor())
    used = resident() - before
    assert used > 30 * MIB, "nobody frees what is in use"
    if not keeper.endswith("capsule"):
        values = np.asarray(kept)
        assert values.flat[0] == values.flat[-1] == 3
        del values
    del kept
    assert resident() - before < 4 * MIB, "freed with the last view"


def test_views_hold_the_tensor_itself():
    """A view holds the Tensor or the view that it was made of, and lets it go when it is gone. Uses
    of a Tensor that fail hold nothing."""
    out, lse = sparse_mla.sparse_attention(
        Producer(np.zeros((4, 2, 576), np.uint16).view(cases.ref.BF16)),
        np.zeros((1, 576), cases.ref.BF16),
        np.zeros((4, 1), np.int32),
        softmax_scale=1.0,
    )
    before = sys.getrefcount(lse)
    views = [lse[1], lse[::2], np.asarray(lse), memoryview(lse), lse.__dlpack__()]
    assert sys.getrefcount(lse) == before + len(views)
    chain = [views.pop(1)]
    chain.append(chain[0][::-1])
    chain.append(chain[1][0])
    views.clear()
    assert sys.getrefcount(lse) == before + 1
    first, last = chain[0], chain[2]
    chain.clear()
    held_first = sys.getrefcount(first)
    del last
    assert sys.getrefcount(first) == held_first - 1
    del first
    assert sys.getrefcount(lse) == before
    failing: list[Callable[[], Any]] = [
        lambda: lse[4],
        lambda: lse[-5],
        lambda: lse["0"],
        lambda: lse[::0],
        lambda: lse.__dlpack__(dl_device=(2, 0)),
        lambda: lse.__dlpack__(max_version="1"),
        lambda: memoryview(out),
    ]
    before = sys.getrefcount(lse), sys.getrefcount(out)
    for use in failing:
        with pytest.raises((IndexError, TypeError, ValueError, BufferError)):
            use()
    assert (sys.getrefcount(lse), sys.getrefcount(out)) == before


# --- builders ------------------------------------------------------------------------------------


def make_builder(workspace=None, path="separate"):
    config = compiled.make_v32().step[1] | {"prefill_workspace_tokens": 0, "path": path}
    return _C.Step("v32", config, workspace)


def table() -> np.ndarray:
    return int32([4, 0, 2, 1], [1, 3, 0, 2])


def build(builder, block_table, starts=(0, 1, 4), lens=(9, 12)):
    return compiled.build(builder, starts, lens, block_table, 2, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_builder_holds_its_workspace(kind):
    """A builder holds its workspace until it is gone, and the arrays of its plans keep the builder
    alive. A workspace that is refused is let go at once."""
    memory = np.zeros((16, 576), cases.ref.BF16)
    workspace = give(kind, memory)
    builder = make_builder(workspace.x)
    plan = build(builder, table())
    assert workspace.is_held()
    ids = plan["req_id_per_token"]
    del builder, plan
    assert workspace.is_held()
    assert ids.tolist() == [0, 1, 1, 1]
    del ids
    assert not workspace.is_held()
    for bad in (memory[:0], memory[:, :575], memory.view(np.float16)):
        refused = give(kind, bad)
        assert not ends(make_builder, refused.x)
        assert not refused.is_held()


@pytest.mark.parametrize("kind", KINDS)
def test_a_builder_holds_the_block_table_of_its_step(kind):
    """A builder holds the block table of a step until the next good build. It does not hold those
    of failing builds."""
    builder = make_builder()
    tables = [give(kind, table()) for _ in range(4)]
    lens = [give(kind, int32(9, 12)) for _ in range(2)]
    starts = give(kind, int32(0, 1, 4))
    build(builder, tables[0].x, starts.x, lens[0].x)
    assert [one.is_held() for one in (tables[0], starts, lens[0])] == [True, False, False]
    narrow = give(kind, table()[:, :2].copy())
    failing = [
        (tables[1], (0, 4, 1), (9, 12)),
        (tables[1], (0, 1, 4), (9, -1)),
        (tables[1], (0, 1, 4), object()),
        (narrow, (0, 1, 4), (9, 12)),
    ]
    for bad, *arguments in failing:
        with pytest.raises((TypeError, ValueError), match=r"MetadataBuilder\.build: "):
            build(builder, bad.x, *arguments)
    assert [one.is_held() for one in (tables[0], tables[1], narrow)] == [True, False, False]
    for former, latest in ((0, 2), (2, 3)):
        build(builder, tables[latest].x)
        assert [tables[former].is_held(), tables[latest].is_held()] == [False, True]
    plan = build(builder, tables[3].x)  # the same table again
    assert tables[3].is_held()
    ids = plan["prefill_request_ids"]
    del builder, plan
    assert tables[3].is_held()
    del ids
    assert not any(one.is_held() for one in tables)


def test_a_builder_is_let_go_by_any_thread():
    """One thread makes the builder, a second uses it, and a third drops it with its last array."""
    workspace = give("capsule", np.zeros((16, 576), cases.ref.BF16))
    block_table = give("capsule", table())
    kept: list[Any] = []

    def make() -> None:
        kept.append(make_builder(workspace.x))

    def use() -> None:
        kept.append(build(kept[0], block_table.x)["req_id_per_token"])
        del kept[0]

    for step, is_held in ((make, True), (use, True), (kept.clear, False)):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        assert workspace.is_held() == is_held
    assert not block_table.is_held()


def make_v4_builder(workspace=None):
    return _C.Step(*compiled.make_v4().step[:2], workspace)


def build_v4(builder, arrays, lens=(9, 12)):
    table, slots, *tables = arrays
    more = {"slot_mapping": slots, "max_seq_len": 12, "compressed": tuple(tables[:2])}
    more |= {"index": tables[2], "states": (tables[3], None), "index_states": None}
    return compiled.build(builder, (0, 1, 4), lens, table, 2, 4, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_a_v4_builder_holds_the_arrays_of_its_step(kind):
    """It holds them until the next good build, and the workspace until it is gone. It does not hold
    arrays of failing builds."""
    workspace = give(kind, np.zeros((4 * (4 + 3 + 8), 512), cases.ref.BF16))
    builder = make_v4_builder(workspace.x)

    def step():
        memory = [table(), np.arange(4), *(table() for _ in range(4))]
        return [give(kind, x) for x in memory]

    first, second, bad = step(), step(), step()
    plan = build_v4(builder, [one.x for one in first])
    assert all(one.is_held() for one in first)
    with pytest.raises(ValueError, match=r"^MetadataBuilder\.build: `seq_lens` must"):
        build_v4(builder, [one.x for one in bad], lens=(9, -1))
    assert not any(one.is_held() for one in bad)
    refused = step()
    with pytest.raises((TypeError, ValueError), match=r"^MetadataBuilder\.build: "):
        build_v4(builder, [*(one.x for one in refused[:-1]), object()])
    assert not any(one.is_held() for one in refused)
    elsewhere = as_capsule(table(), device=(10, 0)).settle()  # DLPack's number for ROCm
    for i in (0, 1, 3, 5):
        refused = step()
        arrays = [one.x for one in (*refused[:i], elsewhere, *refused[i + 1 :])]
        with pytest.raises(ValueError, match=r"^MetadataBuilder\.build: "):
            build_v4(builder, arrays)
        del arrays
        assert not any(one.is_held() for one in (*refused, elsewhere))
    assert all(one.is_held() for one in first)
    plan = build_v4(builder, [one.x for one in second])
    assert not any(one.is_held() for one in first)
    assert all(one.is_held() for one in second)
    lens = plan[0]["context_lens"]
    del builder, plan
    assert workspace.is_held()
    assert lens.tolist() == [2, 2, 2, 3]
    del lens
    assert not any(one.is_held() for one in (*second, workspace))


def test_metadata_holds_what_it_shows():
    """Metadata holds the arrays of the step that it shows, and the builder holds the block table.
    Nothing else is held."""
    batch = cases.make_batch([1, 1, 3, 2], [9, 4, 12, 10])
    names = ("query_start_loc", "seq_lens", "slot_mapping", "block_table")
    given = {name: Given(getattr(batch, name)).settle() for name in names}
    builder = sparse_mla.MetadataBuilder(engine.config(sparse_mla))
    metadata = builder.build(batch.common(sparse_mla))
    assert set(held(given)) == {"query_start_loc", "slot_mapping", "block_table"}
    del metadata
    assert held(given) == ["block_table"]
    del builder
    assert held(given) == []


def test_results_past_a_step_s_tokens_are_zeros_in_dirty_memory():
    """The framework allocates memory that still has its former contents, so the forward must write
    the zeros itself."""
    example = TABLE["step, separate"]
    arrays = {name: Exchanged(x.copy()) for name, x in example.arrays.items()}
    for name in ("query_start_loc_cpu", "seq_lens_cpu"):
        arrays[name] = example.arrays[name]
    more = np.full((11, 2, 576), np.nan, np.float32).astype(cases.ref.BF16)
    more[:7] = example.arrays["q"]
    arrays["q"] = Exchanged(more)
    plain = {name: x.copy() for name, x in example.arrays.items()}
    want = example.run(plain | {"out": None, "lse": None})[1]
    allocated = Exchanged.allocated
    got = example.run(arrays | {"out": None, "lse": None})[1]
    assert Exchanged.allocated - allocated == 2
    for x, y in zip(got, want, strict=True):
        assert x.array.shape == (11, *y.shape[1:])
        assert x.array[:7].tobytes() == y.tobytes()
        assert not any(x.array[7:].tobytes()), f"bytes of {POISON}"
    assert Exchanged.total_outstanding() == 0
