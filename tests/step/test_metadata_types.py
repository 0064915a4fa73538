"""Every field of every metadata has the dtype, the shape and the framework that is documented, from
whatever host integers and arrays an engine gives."""

from __future__ import annotations

import cases
import ml_dtypes
import numpy as np
import pytest
from documented import Checker, attributes_of
from helpers import find_framework

import sparse_mla
from sparse_mla import dense, v4

LENS, SEQ_LENS, PADDING = [1, 1, 0, 5, 3, 0, 9], [9, 40, 7, 65, 3, 100, 90], 2
W = 8  # columns of tables, of pages of 16 tokens


def read_only(x):
    x = np.array(x, np.int32)
    x.flags.writeable = False
    return x


def torch_kind(dtype: str):
    def make(x):
        torch = find_framework("torch").module
        return torch.tensor(np.asarray(x).tolist(), dtype=getattr(torch, dtype))

    return make


def jax_kind(x):
    return find_framework("jax").put(np.asarray(x, np.int32))


# What query_start_loc_cpu and seq_lens_cpu may be.
HOST = {
    "list": lambda x: np.asarray(x).tolist(),
    "tuple": lambda x: tuple(np.asarray(x).tolist()),
    "strided": lambda x: np.repeat(np.asarray(x, np.int64), 3)[::3],
    "reversed": lambda x: np.asarray(x, np.int32)[::-1].copy()[::-1],
    "read-only": read_only,
    "torch int32": torch_kind("int32"),
    "torch int64": torch_kind("int64"),
    "jax": jax_kind,
} | {
    kind: lambda x, kind=kind: np.asarray(x).astype(kind)
    for kind in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
}
# What the arrays of the engine may be: block tables and slots, which are referenced.
ENGINES = {
    "numpy": lambda x: x,
    "read-only": lambda x: np.lib.stride_tricks.as_strided(x, writeable=False),
    "strided": lambda x: np.repeat(x, 2, 0)[::2],
    "torch": lambda x: find_framework("torch").module.from_numpy(x),
    "jax": lambda x: find_framework("jax").put(x),
}


def with_marks(kinds) -> list:
    """The kinds as parameters; those of a framework's arrays have its mark."""
    return [
        pytest.param(kind, marks=getattr(pytest.mark, name)) if name in ("torch", "jax") else kind
        for kind in kinds
        for name in [kind.split()[0]]
    ]


def make_common(starts_kind: str, lens_kind: str, engine: str, slots=np.int64):
    batch = cases.make_batch(LENS, SEQ_LENS, block_size=16, pad_tokens=PADDING)
    table = np.pad(batch.block_table, ((0, 1), (0, 1)), constant_values=-1)[:, :W]
    put = ENGINES[engine]
    arrays = [
        put(x)
        for x in (
            batch.query_start_loc, batch.seq_lens, batch.slot_mapping.astype(slots),
            np.ascontiguousarray(table),
        )
    ]  # fmt: skip
    common = sparse_mla.CommonAttentionMetadata(
        *arrays,
        query_start_loc_cpu=HOST[starts_kind](batch.query_start_loc),
        seq_lens_cpu=HOST[lens_kind](batch.seq_lens),
        num_actual_tokens=np.int64(sum(LENS) + PADDING),
    )
    return common


SIZES = {"T": sum(LENS) + PADDING, "R": 7, "B": 7, "W": W, "prefills": 4, "num_prefills": 4}
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128}
PATHS = {
    **{("v32", path): {"path": path} for path in ("mixed", "separate", "direct", "bf16")},
    **{("v4", path): {"path": path} for path in ("direct", "separate")},
    **{
        ("dense", f"{path} {plan}"): {"path": path, "context_plan": plan}
        for path in ("mixed", "separate")
        for plan in ("equal", "packed")
    },
}


ENGINE = {"Metadata.query_start_loc", "Metadata.slot_mapping", "Metadata.block_table"}


def check_v32(common, options: dict) -> set[str]:
    kv = "bfloat16" if options["path"] == "bf16" else "fp8_ds_mla"
    config = sparse_mla.Config(
        4, softmax_scale=1, kv_cache_dtype=kv, block_size=16, prefill_workspace_tokens=100,
        **LIMITS, **options,
    )  # fmt: skip
    metadata = sparse_mla.MetadataBuilder(config).build(common)
    kinds = (sparse_mla.Decode, sparse_mla.Prefill, sparse_mla.Chunk)
    checker = Checker(SIZES, type(common.block_table), ENGINE | {"Chunk.block_table"}, *kinds)
    checker.check(metadata)
    if metadata.prefill is not None:
        assert sum(len(chunk.seq_lens) for chunk in metadata.prefill.chunks) == 4
    return checker.seen


def check_v4(common, options: dict) -> set[str]:
    config = v4.Config(4, block_size=128, swa_block_size=16, **LIMITS, **options)
    tables = dict.fromkeys((4, 128), common.block_table)
    metadata = v4.MetadataBuilder(config).build(common, compressed=tables, states=tables)
    sizes = SIZES | {"Td": 2, "Tp": SIZES["T"] - 2, "Wc": 128, "window": 128}
    engine = {"Chunk.block_table", "LayerMetadata.block_table", "LayerMetadata.state_block_table"}
    kinds = (v4.Decode, v4.Prefill, v4.Chunk, v4.LayerMetadata)
    checker = Checker(sizes, type(common.block_table), ENGINE | engine, *kinds)
    checker.check(metadata)
    assert sorted(metadata.layers) == [4, 128]
    assert sum(len(chunk.seq_lens) for chunk in metadata.prefill.chunks) == 4
    return checker.seen


def check_dense(common, options: dict) -> set[str]:
    config = dense.Config(
        4, softmax_scale=1, block_size=16, prefill_workspace_tokens=96, **LIMITS, **options
    )
    metadata = dense.MetadataBuilder(config).build(common)
    parts = {f"{part}.{name}" for part in PARTS for name in ("block_table", "seq_lens")}
    sizes = SIZES | {"head_dim": 576, "rows": 96, "num_chunks": 2}
    kinds = (dense.Part, dense.PrefillPart, sparse_mla.ContextChunks)
    array = type(common.block_table)
    checker = Checker(sizes, array, ENGINE | parts | {"Metadata.seq_lens"}, *kinds)
    checker.check(metadata)
    assert metadata.prefill.context_lens.tolist() == [60, 0, 0, 81]
    return checker.seen


PARTS = ("Part", "PrefillPart")
CHECKS = {"v32": check_v32, "v4": check_v4, "dense": check_dense}


def test_all_fields_are_seen():
    """By the paths of a plan together, so that no field is left out because it is None."""
    classes = {
        "v32": (sparse_mla.Metadata, sparse_mla.Decode, sparse_mla.Prefill, sparse_mla.Chunk),
        "v4": (v4.Metadata, v4.Decode, v4.Prefill, v4.Chunk, v4.LayerMetadata),
        "dense": (dense.Metadata, dense.Part, dense.PrefillPart, sparse_mla.ContextChunks),
    }
    for plan, check in CHECKS.items():
        paths = [options for (of, _), options in PATHS.items() if of == plan]
        seen = set().union(*(check(make_common("list", "list", "numpy"), path) for path in paths))
        wanted = {f"{x.__name__}.{name}" for x in classes[plan] for name in attributes_of(x)}
        assert seen == wanted


@pytest.mark.parametrize("lens", with_marks(HOST))
@pytest.mark.parametrize(("plan", "name"), PATHS)
def test_host_integers(plan, name, lens):
    CHECKS[plan](make_common(lens, lens, "numpy"), PATHS[plan, name])


@pytest.mark.parametrize("starts", ["list", "int64", "uint64", "int32"])
@pytest.mark.parametrize("lens", ["list", "int64", "uint64", "uint8"])
def test_two_kinds_of_host_integers(starts, lens):
    for name in ("separate equal", "separate packed", "mixed equal"):
        check_dense(make_common(starts, lens, "numpy"), PATHS["dense", name])


@pytest.mark.parametrize("slots", [np.int32, np.int64])
@pytest.mark.parametrize("engine", with_marks(ENGINES))
@pytest.mark.parametrize(("plan", "name"), PATHS)
def test_arrays_of_an_engine(plan, name, engine, slots):
    CHECKS[plan](make_common("list", "list", engine, slots), PATHS[plan, name])


@pytest.mark.parametrize("kind", ["list", "tuple", "int64", "uint64", "read-only"])
def test_query_starts_are_shown_as_given(kind):
    """The engine's object in metadata; in the parts of a dense step, the builder's int32."""
    batch = cases.make_batch(LENS, SEQ_LENS, block_size=16)
    starts = HOST[kind](batch.query_start_loc)
    common = sparse_mla.CommonAttentionMetadata(
        starts, batch.seq_lens, batch.slot_mapping, batch.block_table
    )
    config = dense.Config(4, softmax_scale=1, block_size=16, path="separate", **LIMITS)
    metadata = dense.MetadataBuilder(config).build(common)
    assert metadata.query_start_loc is starts
    for part, wanted in ((metadata.decode, [0, 1, 2, 2]), (metadata.prefill, [0, 5, 8, 8, 17])):
        assert part.query_start_loc.dtype == np.int32
        assert part.query_start_loc.tolist() == wanted


def test_context_without_rope_is_bf16_of_512():
    config = dense.Config(
        4,
        softmax_scale=1,
        block_size=16,
        qk_rope_head_dim=0,
        path="separate",
        prefill_workspace_tokens=96,
        **LIMITS,
    )
    common = make_common("list", "list", "numpy")
    workspace = dense.MetadataBuilder(config).build(common).chunked_prefill_workspace
    assert (workspace.dtype, workspace.shape) == (np.dtype(ml_dtypes.bfloat16), (96, 512))
