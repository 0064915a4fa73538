"""lightning_indexer (csrc/ops/check_indexer_lightning.c, csrc/cpu/indexer): the bits of the two
calls that it is made of, whatever the chunks, inside a workspace of bounded size."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import device
import numpy as np
import pytest
import reference as ref
import row_formats as rows
from helpers import Guarded, assert_same_bits
from library import ISAS, package, sparse_mla
from test_indexer_logits import Flat, Paged, bound_of

F32, I32 = np.float32, np.int32
DTYPES = {"float32": F32, "bfloat16": ref.BF16}
KINDS = [("fp8", "fp8"), ("fp4", "fp4"), ("fp4", "fp8"), ("fp8", "fp4")]
Case = Paged | Flat


def inputs(case: Case) -> tuple[list, dict[str, Any]]:
    """The arrays of a call of indexer_logits, and its options."""
    options: dict[str, Any] = {"q_scale": case.q_scale}
    if isinstance(case, Flat):
        options["starts"] = case.starts
        return [case.q, case.weights, (case.k, case.scale), case.lengths], options
    options |= {"block_table": case.table, "req_id_per_token": case.req, **case.pages.options}
    return [case.q, case.weights, case.pages.cache, case.lengths], options


def row_bytes(case: Case, dtype: str = "float32") -> int:
    columns = case.S if isinstance(case, Flat) else case.N
    return -(-columns * np.dtype(DTYPES[dtype]).itemsize // 128) * 128


def two_calls(case: Case, k: int, dtype: str, **slots) -> tuple[tuple, np.ndarray]:
    """What indexer_logits and top_k_per_row give, and the chosen logits."""
    args, options = inputs(case)
    logits = np.asarray(sparse_mla.indexer_logits(*args, **options, dtype=dtype))
    values = np.zeros((len(case.q), k), logits.dtype)
    zeros = np.zeros(len(case.q), I32)
    got = sparse_mla.top_k_per_row(logits, zeros, case.lengths, k=k, values=values, **slots)
    return got if isinstance(got, tuple) else (got,), values


def check(case: Case, k: int, dtype: str = "float32", *, with_values=True, **options) -> None:
    """A call with outputs between red zones, and one without, have the bits of the two calls."""
    args, given = inputs(case)
    slots = {n: options.pop(n) for n in list(options) if n.startswith("slots") or n == "is_valid"}
    ids = {"req_id_per_token": options.pop("ids")} if "ids" in options else {}
    want, want_values = two_calls(case, k, dtype, **slots, **ids)
    given |= ids
    outputs = {"out": Guarded(want[0].shape, I32, row_gap=3)}
    if slots:
        outputs["slots"] = Guarded(want[0].shape, I32, row_gap=1)
        outputs["lens"] = Guarded(want[2].shape, I32)
    if with_values:
        outputs["values"] = Guarded(want_values.shape, want_values.dtype, row_gap=5)
    arrays = {name: x.array for name, x in outputs.items()}
    sparse_mla.lightning_indexer(*args, k=k, dtype=dtype, **given, **slots, **options, **arrays)
    for name, x in zip(("out", "slots", "lens"), want, strict=False):
        assert_same_bits(outputs[name].check(), x, name)
    if with_values:
        assert_same_bits(outputs["values"].check(), want_values, "values")
    new = sparse_mla.lightning_indexer(*args, k=k, dtype=dtype, **given, **slots, **options)
    for x, y in zip(new if slots else (new,), want, strict=True):
        assert_same_bits(np.asarray(x), y, "a result of its own")


# --- the bits of the two calls -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_kind", "kind"), KINDS)
@pytest.mark.parametrize("H", [1, 7, 32, 64])
def test_pages(H, q_kind, kind, dtype):
    case = Paged((1, 3, 30, 4), (384, 300, 250, 7), H, q_kind, kind)
    for with_values in (False, True):
        check(case, 40, dtype, with_values=with_values)
        check(case, 40, dtype, with_values=with_values, max_logits_bytes=row_bytes(case, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_kind", "kind"), KINDS)
@pytest.mark.parametrize("H", [7, 64])
def test_flat_keys(H, q_kind, kind, dtype):
    case = Flat(19, 300, H, q_kind, kind)
    check(case, 17, dtype)
    check(case, 17, dtype, with_values=False, max_logits_bytes=3 * row_bytes(case, dtype))
    case.starts = None
    check(case, 17, dtype, with_values=False, max_logits_bytes=8 * row_bytes(case, dtype))


@pytest.mark.parametrize("layout", ["paged", "padded", "mqa", "bytes"])
@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_layouts(block_size, layout):
    case = Paged((2, 9), (250, 299), 64, block_size=block_size, width=-(-300 // block_size),
                 layout=layout)  # fmt: skip
    check(case, 30, max_logits_bytes=4 * row_bytes(case))


@pytest.mark.parametrize("with_values", [False, True])
@pytest.mark.parametrize("k", [1, 2, 31, 249, 250, 251, 383, 384, 385, 512, 2048, 4096])
def test_every_k(k, with_values):
    """Around the contexts of tokens, around N, and above it."""
    case = Paged((1, 3, 30, 4), (384, 300, 250, 7), 5)
    for rows_of_chunk in (1, 9, 100):
        limit = rows_of_chunk * row_bytes(case)
        check(case, k, with_values=with_values, max_logits_bytes=limit)


@pytest.mark.parametrize("H", [7, 64])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 9, 16, 31, 63, 64, 65, 69, 70, 71, 1000])
def test_every_chunk(num_rows, H):
    """Chunks of one token, of parts of a block, of whole blocks; also by a small workspace."""
    case = Paged((1, 3, 62, 4), (384, 300, 350, 77), H)
    check(case, 60, max_logits_bytes=num_rows * row_bytes(case) + 127)
    workspace = Guarded((num_rows * row_bytes(case) + 128,), np.uint8)
    check(case, 60, workspace=workspace.array, with_values=False)
    workspace.check(written=False)


@pytest.mark.parametrize("is_valid", [None, np.bool_, np.uint8])
@pytest.mark.parametrize("kind", ["pages", "flat"])
@pytest.mark.parametrize("k", [20, 500])
def test_slots(k, kind, is_valid):
    """Those of the separate call, for keys of both kinds, and where nothing is scored."""
    rng = np.random.default_rng(k)
    case: Case = Paged((2, 5, 3), (384, 300, 9), 7) if kind == "pages" else Flat(10, 300, 7)
    options: dict[str, Any] = {
        "slots_block_table": rng.integers(-1, 50, (3, 30)).astype(I32),
        "slots_block_size": 16,
        "is_valid": None if is_valid is None else (rng.random(10) < 0.6).astype(is_valid),
        "ids": case.req if isinstance(case, Paged) else rng.integers(0, 3, 10).astype(I32),
    }
    for limit in (row_bytes(case), 4 * row_bytes(case), 2**29):
        check(case, k, max_logits_bytes=limit, **options)


def test_keys_that_do_not_exist():
    """Their logits are -inf, and are chosen last."""
    case = Paged((2, 3), (384, 300), 7)
    case.table[0, 2], case.table[1, 0], case.table[1, 3] = -1, 2**31 - 1, case.pages.pages
    for k in (10, 200, 350, 500):
        check(case, k, max_logits_bytes=2 * row_bytes(case))
    flat = Flat(6, 200, 7)
    flat.starts[:] = [-3, -3, 190, 199, 2**31 - 1, -(2**31)]
    flat.lengths[:] = 200
    for k in (10, 150, 300):
        check(flat, k, max_logits_bytes=2 * row_bytes(flat))


@pytest.mark.parametrize("with_values", [False, True])
@pytest.mark.parametrize("k", [50, 400])
def test_lengths_of_any_size(k, with_values):
    case = Paged((4, 4), (300, 384), 7)
    case.lengths[:] = [-5, -(2**31), 0, 1, 2**31 - 1, 50, 51, 385]
    for limit in (row_bytes(case), 2**29):
        check(case, k, with_values=with_values, max_logits_bytes=limit)


def test_nan():
    case = Flat(9, 200, 7)
    case.starts, case.lengths[:] = None, 200
    case.k = case.k.copy()
    case.k[17, 5], case.scale[40], case.weights[3, 0] = 0x7F, np.nan, np.nan
    for k in (60, 198, 199):
        check(case, k, with_values=False, max_logits_bytes=2 * row_bytes(case))


def test_nothing_to_do():
    case = Paged((), ())
    args, options = inputs(case)
    assert sparse_mla.lightning_indexer(*args, k=9, **options).shape == (0, 9)
    assert sparse_mla.lightning_indexer(*args, k=999, **options).shape == (0, 999)
    case = Paged((2, 1), (0, 0), 7)
    check(case, 5)
    case.lengths[:] = 9
    case.table = case.table[:, :0]
    check(case, 5)
    case.req[:] = -1  # a table without columns has no keys to look for
    for with_values in (False, True):
        check(case, 5, with_values=with_values)
    empty = Flat(3, 2, 7)
    empty.k, empty.scale, empty.S = empty.k[:0], empty.scale[:0], 0
    empty.lengths[:] = 9
    check(empty, 5)
    pages = Paged((2, 1), (300, 3), 7)
    pages.pages.cache = pages.pages.cache[:0]
    check(pages, 5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_views(dtype):
    """Gaps everywhere; a chunk begins in the middle of each array."""
    case = Flat(13, 200, 7)
    q = np.zeros((13, 2, 7, 133), np.uint8)
    q[:, 1, :, 3:131] = case.q
    case.q = q[:, 1, :, 3:131]
    case.weights = np.concatenate([case.weights, case.weights], 1)[:, :7]
    case.lengths, case.starts = (np.repeat(x, 2)[::2] for x in (case.lengths, case.starts))
    check(case, 20, dtype, max_logits_bytes=2 * row_bytes(case, dtype))
    backwards = Paged((13,), (384,), 7)
    for name in ("q", "weights", "req", "lengths"):
        setattr(backwards, name, np.ascontiguousarray(getattr(backwards, name)[::-1])[::-1])
    check(backwards, 20, dtype, max_logits_bytes=2 * row_bytes(backwards, dtype))


def test_rows_do_not_depend_on_the_batch():
    case = Paged((1, 2, 30, 4), (384, 300, 250, 77), 7)
    args, options = inputs(case)
    whole = np.asarray(sparse_mla.lightning_indexer(*args, k=33, **options))
    rng = np.random.default_rng(3)
    for tokens in ([0], [5, 6], rng.permutation(37), np.repeat(np.arange(37), 2)):
        case.q, case.weights, case.lengths, case.req = (
            np.ascontiguousarray(x[tokens])
            for x in (args[0], args[1], args[3], options["req_id_per_token"])
        )
        part, others = inputs(case)
        got = sparse_mla.lightning_indexer(
            *part, k=33, max_logits_bytes=5 * row_bytes(case), **others
        )
        assert_same_bits(np.asarray(got), whole[tokens])


@pytest.mark.parametrize("H", [7, 64])
def test_no_rejected_key_is_better(H):
    """In fp64, by more than the errors of the two logits."""
    case = Paged((3, 20), (384, 380), H)
    want, u = case.want()
    args, options = inputs(case)
    got = np.asarray(sparse_mla.lightning_indexer(*args, k=50, **options))
    for t, chosen in enumerate(got):
        bound = bound_of(H) * u[t]
        rest = np.setdiff1d(np.arange(case.lengths[t]), chosen)
        assert len(set(chosen)) == 50
        assert chosen.min() >= 0
        assert (want[t, rest] - bound[rest]).max() <= (want[t, chosen] + bound[chosen]).min()


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa, monkeypatch):
    monkeypatch.setenv("SPARSE_MLA_CPU_ISA", isa)
    check(Paged((3, 20), (384, 380), 9), 50, max_logits_bytes=2**14)


# --- the workspace -------------------------------------------------------------------------------


def size(*args, **options) -> int:
    return package.lightning_indexer_workspace_size(*args, device=device.NAME, **options)


@pytest.mark.parametrize("shift", [0, 1, 64, 127])
def test_a_workspace_at_any_address(shift):
    """The bytes that are told suffice. Those of one token's logits are needed, and no more."""
    case = Paged((3, 20), (384, 380), 7)
    told = size(23, case.N, k=50)
    room = np.zeros(told + 512, np.uint8)
    start = -room.ctypes.data % 256 + shift
    check(case, 50, workspace=room[start : start + told])
    least = -shift % 128 + row_bytes(case)
    check(case, 50, workspace=room[start : start + least])
    args, options = inputs(case)
    text = (
        f"^lightning_indexer: `workspace` must have at least {least} bytes, for the logits of a "
        f"token, got {least - 1}$"
    )
    with pytest.raises(ValueError, match=text):
        sparse_mla.lightning_indexer(
            *args, k=50, workspace=room[start : start + least - 1], **options
        )


@pytest.mark.parametrize("k", [384, 300])
def test_tokens_that_take_all_keys_are_not_scored(k):
    """Nothing is written to the workspace: with k = N none is needed, with k below it all contexts
    are short."""
    case = Paged((3, 20), (300, 299), 7)
    workspace = Guarded((2**16,), np.uint8)
    check(case, k, workspace=workspace.array, with_values=False)
    assert (workspace.check(written=False) == 0xA5).all()
    check(case, 200, workspace=workspace.array, with_values=False)
    assert not (workspace.array == 0xA5).all()


def test_short_tokens_among_others_are_not_scored():
    """Rows of the matrix that belong to them are left alone."""
    case = Paged((1, 1, 1, 1), (300, 20, 21, 384), 7)
    workspace = Guarded((4 * row_bytes(case),), np.uint8, align=128)
    check(case, 20, workspace=workspace.array, with_values=False)
    is_written = (workspace.check(written=False).reshape(4, -1) != 0xA5).any(1)
    assert is_written.tolist() == [True, False, True, True]


def test_sizes():
    row = 2**20 * 4
    on_gpu = device.NAME == "cuda"
    assert size(1, 2**20, k=2048) == row + 128
    assert size(8, 2**20, k=2048) == 8 * row + 128
    assert size(4096, 2**20, k=2048) == (2**29 if on_gpu else 8 * row) + 128
    assert size(4096, 2**20, k=2048, dtype="bfloat16") == (2**29 if on_gpu else 4 * row) + 128
    assert size(10**6, 2**20, k=2048, max_logits_bytes=row) == row + 128
    assert size(2**31 - 1, 2**27, k=1) == 2**29 + 128
    assert size(2**31 - 1, 2**31 - 1, k=1, max_logits_bytes=2**62) > 0
    assert size(5, 7, k=6) == 5 * 128 + 128
    for nothing in ((5, 7, 7), (5, 0, 1), (0, 999, 1)):
        assert size(*nothing[:2], k=nothing[2]) == 0


def test_sizes_never_fall():
    """For one k and dtype: a workspace for the largest batch serves every batch."""
    tokens, contexts = (0, 1, 2, 8, 9, 63, 1000, 4096), (0, 4, 5, 33, 1000, 32768, 10**6)
    for limit in (2**22, 2**29, 10**9 + 7):
        sizes = [[size(t, n, k=4, max_logits_bytes=limit) for n in contexts] for t in tokens]
        assert (np.diff(sizes, axis=0) >= 0).all()
        assert (np.diff(sizes, axis=1) >= 0).all()
        assert np.max(sizes) <= limit + 128


def test_a_long_prefill_stays_inside_the_workspace():
    """Against 2^20 keys, in a workspace between red zones: the last tokens of a prefill of 1M."""
    keys, tokens, k = 2**20, 12, 2048
    rng = np.random.default_rng(0)
    pages = rows.Pages("fp8_index", pages=keys // 64, block_size=64)
    pages.cache[...] = rng.integers(0, 0x70, pages.cache.shape, dtype=np.uint8)
    pages.cache.reshape(keys // 64, -1)[:, 64 * 128 :].view(F32)[...] = 0.25
    q = rng.integers(0, 0x70, (tokens, 1, 128), dtype=np.uint8)
    lengths = np.arange(keys - tokens + 1, keys + 1).astype(I32)
    weights = rng.standard_normal((tokens, 1)).astype(F32)
    table = rng.permutation(keys // 64).astype(I32)[None]
    options = {"block_table": table, "req_id_per_token": np.zeros(tokens, I32)}
    limit = 5 * keys * 4
    workspace = Guarded((size(tokens, keys, k=k, max_logits_bytes=limit),), np.uint8)
    assert workspace.array.size == limit + 128
    got = sparse_mla.lightning_indexer(
        q, weights, pages.cache, lengths, k=k, max_logits_bytes=limit, workspace=workspace.array,
        **options,
    )  # fmt: skip
    workspace.check(written=False)
    logits = sparse_mla.indexer_logits(q, weights, pages.cache, lengths, **options)
    want = sparse_mla.top_k_per_row(logits, np.zeros(tokens, I32), lengths, k=k)
    assert_same_bits(np.asarray(got), np.asarray(want))


@pytest.mark.skipif(device.DEVICE != "cpu", reason="limits the process's address space")
@pytest.mark.skipif(sys.platform != "linux", reason="reads the address space in /proc")
def test_the_matrix_of_all_tokens_never_exists():
    """In a process that has no room for it: 256 MiB of logits through 36 MiB more memory."""
    script = """
        import resource, numpy as np, sparse_mla
        keys, tokens = 2**20, 64
        k = np.zeros((keys, 64), np.uint8), np.full((keys, 4), 127, np.uint8)
        k[0][:: 1000] = 0x22
        q = np.full((tokens, 1, 64), 0x22, np.uint8), np.full((tokens, 1, 4), 127, np.uint8)
        weights, lens = np.ones((tokens, 1), np.float32), np.full(tokens, keys, np.int32)
        def run(n):
            return sparse_mla.lightning_indexer(
                q[0][:n], weights[:n], k, lens[:n], k=1049, q_scale=q[1][:n])
        run(1)  # libraries and threads
        used = next(int(x.split()[1]) for x in open("/proc/self/status") if "VmSize" in x) << 10
        resource.setrlimit(resource.RLIMIT_AS, (used + (36 << 20),) * 2)
        out = run(tokens)
        assert (out == np.arange(0, keys, 1000)).all()
        try:
            sparse_mla.indexer_logits(q[0], weights, k, lens, q_scale=q[1])
        except MemoryError:
            print("no room for the matrix")
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "no room for the matrix\n", done.stderr


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.skipif(device.DEVICE == "cuda", reason="CUDA reads no ids on the host")
@pytest.mark.parametrize("name", ["keys", "slots"])
@pytest.mark.parametrize("k", [20, 999])
def test_bad_requests_are_found_before_anything_is_written(name, k):
    """In the last chunk, also of a token whose keys are not scored."""
    case = Paged((2, 9), (384, 300), 7)
    args, options = inputs(case)
    ids = case.req.copy()
    ids[10] = 7
    arrays = {n: np.full((11, k), 77, I32) for n in ("out", "slots")}
    arrays["lens"] = np.full(11, 77, I32)
    options |= {"req_id_per_token": ids, "max_logits_bytes": row_bytes(case)}
    table = np.zeros((9 if name == "keys" else 7, 4), I32)
    if name == "slots":
        options["block_table"] = np.concatenate([case.table] * 4)
    with pytest.raises(ValueError, match=r"^lightning_indexer: `req_id_per_token` must ") as info:
        sparse_mla.lightning_indexer(
            *args, k=k, slots_block_table=table, slots_block_size=4, **options, **arrays
        )
    assert f"`{'block_table' if name == 'keys' else 'slots_block_table'}`" in str(info.value)
    assert all((x == 77).all() for x in arrays.values())


def text_of(case: Case, **changes) -> str:
    args, options = inputs(case)
    with pytest.raises(ValueError) as info:
        sparse_mla.lightning_indexer(*args, **({"k": 9} | options | changes))
    return str(info.value).removeprefix("lightning_indexer: ")


def test_texts():
    paged, flat = Paged((2, 3), (384, 300), 7), Flat(5, 300, 7)
    least = row_bytes(flat)
    assert text_of(flat, max_logits_bytes=least - 1) == (
        f"`max_logits_bytes` must be at least {least}, for the logits of a token, got {least - 1}"
    )
    assert text_of(flat, k=0) == "`k` must be 1 to 2147483647, got 0"
    assert text_of(flat, req_id_per_token=np.zeros(5, I32)) == (
        "`req_id_per_token` must be left out without `slots_block_table`, got one"
    )
    assert text_of(flat, slots_block_table=np.zeros((1, 1), I32), slots_block_size=1) == (
        "`req_id_per_token` must come with `slots_block_table`, got none"
    )
    assert text_of(paged, slots=np.zeros((5, 9), I32)) == (
        "`slots` must be left out without `slots_block_table`, got one"
    )
    assert text_of(paged, starts=np.zeros(5, I32)) == (
        "`starts` must be None for keys in pages, got another value"
    )
    wide = np.broadcast_to(paged.table[:, :1], (2, 2**25))
    assert text_of(paged, block_table=wide) == (
        "`block_table` must have at most 2147483647 keys per request, got 33554432 times 64"
    )
    assert text_of(paged, dtype="float16").startswith("`dtype` must be ")
    args, options = inputs(paged)
    with pytest.raises(TypeError, match=r"^lightning_indexer: `values` must be "):
        sparse_mla.lightning_indexer(
            *args, k=9, values=np.zeros((5, 9), F32), dtype="bfloat16", **options
        )
    name = "lightning_indexer_workspace_size"
    for bad, word in (((-1, 9, 1), "num_tokens"), ((1, -9, 1), "max_context"), ((1, 9, 0), "k")):
        with pytest.raises(ValueError, match=f"^{name}: `{word}` must be "):
            size(*bad[:2], k=bad[2])
    with pytest.raises(ValueError, match=f"^{name}: `max_logits_bytes` must be at least 128, "):
        size(1, 9, k=1, max_logits_bytes=127)
