"""What copy and pickle make of public objects: builders and layers are made anew, and what lies in
memory of the library says what to copy in its place."""

from __future__ import annotations

import copy
import dataclasses
import multiprocessing
import operator
import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest
import reference as ref
from helpers import assert_same_bits

import sparse_mla as package

dense, v4 = package.dense, package.v4
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
HEADS = 2
RATIO = 128

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{
        f"pickle {protocol}": lambda x, protocol=protocol: pickle.loads(pickle.dumps(x, protocol))
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    },
}
each_copy = pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)


def bf16(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 1, shape).astype(ref.BF16)


def make_common() -> package.CommonAttentionMetadata:
    """A decode of a request of 40 tokens, and a prompt of 3."""
    starts, lens = np.array([0, 1, 4], np.int32), np.array([40, 3], np.int32)
    table = np.array([[0, 1, 2], [3, 4, 5]], np.int32)
    return package.CommonAttentionMetadata(starts, lens, np.array([39, 48, 49, 50]), table)


# --- of each module: a config, a layer, and what a step of both gives ----------------------------


def make_v32(**changes):
    options = {"softmax_scale": 0.1, "block_size": 16, "topk_tokens": 8}
    options |= {"kv_cache_dtype": "fp8_ds_mla", "path": "separate"}
    config = package.Config(HEADS, **(options | LIMITS | changes))
    return config, package.SparseMLA(config, kv_b_proj=bf16(512, HEADS * 256))


def run_v32(builder, layer) -> np.ndarray:
    metadata = builder.build(make_common())
    cache = np.zeros((6, 16, 656), np.uint8)
    package.concat_and_cache_mla(bf16(96, 512), bf16(96, 64), cache, np.arange(96))
    indices = np.tile(np.arange(8, dtype=np.int32), (4, 1))
    out, _ = layer.forward(bf16(4, HEADS, 576), cache, indices, metadata)
    return layer.v_up_proj(out)


def make_dense(**changes):
    options = {"softmax_scale": 0.1, "block_size": 16, "path": "separate"}
    config = dense.Config(HEADS, **(options | LIMITS | changes))
    table = package.rope_table(64)
    return config, dense.DenseMLA(config, kv_b_proj=bf16(512, HEADS * 256), rope_table=table)


def make_absorbed(scheme=None):
    config, _ = make_dense()
    layer = dense.DenseMLA(
        config,
        kv_b_proj=bf16(512, HEADS * 256),
        q_proj=bf16(128, HEADS * 192),
        o_proj=bf16(128, HEADS * 128),
        absorb=True,
        scheme=scheme,
    )
    return config, layer


def run_dense(builder, layer) -> np.ndarray:
    metadata = builder.build(make_common())
    q = bf16(4, HEADS, 192) if layer.absorbed is None else bf16(4, 128)
    return layer.forward(q, bf16(4, 512), bf16(4, 64), bf16(6, 16, 576), metadata)


def make_v4(**changes):
    options = {"kv_cache_dtype": "bfloat16", "compress_ratios": (RATIO,), "swa_block_size": 16}
    config = v4.Config(HEADS, **(options | LIMITS | changes))
    sink = np.array([0.5, -1], np.float32)
    return config, v4.SparseMLA(config, RATIO, v4.Weights(None, None, sink, None, None))


def run_v4(builder, layer) -> np.ndarray:
    tables = {RATIO: np.array([[0], [1]], np.int32)}
    metadata = builder.build(make_common(), compressed=tables)
    caches = v4.Caches(bf16(6, 16, 512), bf16(2, 2, 512))
    return layer.attend(bf16(4, HEADS, 512), caches, metadata)[0]


MODULES = {
    "v32": (package.MetadataBuilder, make_v32, run_v32),
    "dense": (dense.MetadataBuilder, make_dense, run_dense),
    "absorbed": (dense.MetadataBuilder, make_absorbed, run_dense),
    "block": (dense.MetadataBuilder, lambda: make_absorbed("block"), run_dense),
    "v4": (v4.MetadataBuilder, make_v4, run_v4),
    "v4 separate": (v4.MetadataBuilder, lambda: make_v4(path="separate"), run_v4),
}
each_module = pytest.mark.parametrize(
    ("make_builder", "make", "run"), MODULES.values(), ids=MODULES
)
each_builder = pytest.mark.parametrize(
    ("make_builder", "make", "run"),
    [MODULES[name] for name in ("v32", "dense", "v4", "v4 separate")],
    ids=["v32", "dense", "v4", "v4 separate"],
)


# --- builders ------------------------------------------------------------------------------------


@each_copy
@each_builder
def test_a_builder_is_copied_as_its_config(make_builder, make, run, duplicate):
    config, layer = make()
    builder = make_builder(config)
    want = run(builder, layer).copy()
    metadata = builder.build(make_common())
    other = duplicate(builder)
    assert type(other) is type(builder)
    assert other is not builder
    assert other.config == config
    assert other.workspace_bytes == builder.workspace_bytes
    assert other._step is not builder._step
    theirs = other.build(make_common())
    assert not np.shares_memory(theirs.req_id_per_token, metadata.req_id_per_token)
    builder._step.check(metadata._generation)  # it is valid as before
    for made in (other, builder):
        assert_same_bits(run(made, layer), want, "a step of the copy")


@each_copy
def test_a_copy_has_a_workspace_of_its_own(duplicate):
    config, layer = make_v32(prefill_workspace_tokens=64)
    workspace = np.zeros((64, 576), ref.BF16)
    builder = package.MetadataBuilder(config, workspace=workspace)
    other = duplicate(builder)
    assert other.workspace_bytes == builder.workspace_bytes == workspace.nbytes
    run_v32(other, layer)
    assert not workspace.any()
    run_v32(builder, layer)
    assert workspace.any()


def test_a_copy_has_no_memory_of_forward():
    builder = v4.MetadataBuilder(make_v4()[0])
    builder._memory.view(np.zeros(0), None, "x", (4,), "int32", 4)
    assert (builder.forward_bytes, copy.deepcopy(builder).forward_bytes) == (16, 0)


@each_builder
def test_a_builder_goes_to_a_spawned_process(make_builder, make, run):
    builder = make_builder(make()[0])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(operator.attrgetter("config", "workspace_bytes"), (builder,))
        assert found == (builder.config, builder.workspace_bytes)
        with pytest.raises(Exception, match="`metadata` must be built again") as error:
            pool.apply(operator.methodcaller("build", make_common()), (builder,))
    assert "Metadata" in str(error.value)


# --- layers, and what else is made of values -----------------------------------------------------


@each_copy
@each_module
def test_a_layer_is_copied_with_its_weights(make_builder, make, run, duplicate):
    config, layer = make()
    want = run(make_builder(config), layer)
    other = duplicate(layer)
    assert other is not layer
    assert other.config == config
    assert_same_bits(run(make_builder(other.config), other), want, "the copy's step")
    if duplicate is not copy.copy:
        for name, x in vars(layer).items():
            if isinstance(x, np.ndarray):
                assert not np.shares_memory(x, getattr(other, name))


@each_copy
def test_values_are_copied(duplicate):
    common = make_common()
    for other in (duplicate(common), dataclasses.replace(duplicate(common))):
        for field in dataclasses.fields(common):
            assert np.array_equal(getattr(other, field.name), getattr(common, field.name))
    for make in (make_v32, make_dense, make_v4):
        config, _ = make()
        assert duplicate(config) == config
    metadata = v4.MetadataBuilder(make_v4()[0]).build(make_common())
    for part in (metadata.decode, metadata.prefill):
        assert repr(duplicate(part)) == repr(part)
    chunks = package.split_context_chunks(
        np.array([40, 3]), plan="equal", workspace_tokens=32, block_size=16
    )
    assert repr(duplicate(chunks)) == repr(chunks)
    schedule = package.flash_mla.FlashMLASchedMeta(num_splits=3)
    assert duplicate(schedule) == schedule
    weights = v4.Weights(None, None, np.ones(2, np.float32), None, None)
    assert np.array_equal(duplicate(weights).attn_sink, weights.attn_sink)
    caches = v4.Caches(bf16(1, 2, 512))
    assert np.array_equal(duplicate(caches).swa, caches.swa)


# --- what lies in the library's memory -----------------------------------------------------------

TEXT = (
    "copy: `metadata` must be built again, by copies of its builder and of "
    "CommonAttentionMetadata, because it lies in the memory of its builder, got a "
)


@each_copy
@each_builder
def test_metadata_say_what_to_copy(make_builder, make, run, duplicate):
    metadata = make_builder(make()[0]).build(make_common())
    kind = type(metadata)
    text = f"^{re.escape(TEXT + kind.__module__)}.Metadata$"
    with pytest.raises(TypeError, match=text):
        duplicate(metadata)
    with pytest.raises(TypeError, match=text):
        duplicate(SimpleNamespace(x=metadata)) if duplicate is not copy.copy else copy.copy(
            metadata
        )
    with pytest.raises(TypeError, match=r"^copy: `step` must be made again, by a copy of its "):
        dataclasses.asdict(metadata)
    with pytest.raises(TypeError, match=r"^copy: `step` must be .*, got <class 'sparse_mla._C.St"):
        duplicate(metadata._step)
    # What its text says gives the same step.
    again = copy.deepcopy(make_builder(make()[0])).build(copy.deepcopy(make_common()))
    assert_same_bits(again.req_id_per_token, metadata.req_id_per_token, "the step")


@each_copy
def test_a_tensor_says_what_to_copy(duplicate):
    x = np.ones((2, 3), np.float32)
    unknown = SimpleNamespace(__dlpack__=x.__dlpack__, __dlpack_device__=x.__dlpack_device__)
    tensor, _ = package.dynamic_per_tensor_quant(unknown)
    for given in (tensor, tensor[:1]):
        with pytest.raises(TypeError, match=r"^copy: `tensor` must be .*, got .*sparse_mla.Tensor"):
            duplicate(given)
    assert duplicate(np.asarray(tensor)).tolist() == np.asarray(tensor).tolist()
