"""Layers that are made of PyTorch's parameters: with gradients off they keep the weights without
them, so that a layer runs in every mode, whichever one it was made in. And layers are copied."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle

import pytest
from helpers import find_framework

import sparse_mla as package

pytestmark = pytest.mark.torch

dense, v4 = package.dense, package.v4
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
HEADS = 2
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")
MODES = ("no_grad", "inference_mode", "enable_grad")


@pytest.fixture(scope="module")
def torch():
    find_framework("torch")
    import torch

    return torch


def values(torch, *shape: int):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def parameter(torch, *shape: int, dtype="float32", requires_grad=True):
    weight = values(torch, *shape).mul(0.1).to(getattr(torch, dtype))
    return torch.nn.Parameter(weight, requires_grad=requires_grad)


def make_common(torch) -> package.CommonAttentionMetadata:
    """A decode of a request of 40 tokens, and a prompt of 3."""
    int32 = {"dtype": torch.int32}
    starts, lens = torch.tensor([0, 1, 4], **int32), torch.tensor([40, 3], **int32)
    table = torch.tensor([[0, 1, 2], [3, 4, 5]], **int32)
    slots = torch.tensor([39, 48, 49, 50])
    return package.CommonAttentionMetadata(starts, lens, slots, table)


# --- weights of every dtype, in every form -------------------------------------------------------

FORMS = [
    (form, dtype)
    for form, dtype in itertools.product(("plain", "transposed", "linear", "identity"), DTYPES)
    if form in ("plain", "transposed") or dtype != "float8_e4m3fn"
]
each_form = pytest.mark.parametrize(("form", "dtype"), FORMS)


def weight_of(torch, form: str, inputs: int, outputs: int, dtype: str, **options):
    """A weight [inputs, outputs], its transpose, or a layer that has it."""
    if form == "plain":
        return parameter(torch, inputs, outputs, dtype=dtype, **options)
    if form == "transposed":
        return parameter(torch, outputs, inputs, dtype=dtype, **options)
    if form == "linear":
        layer = torch.nn.Linear(inputs, outputs, bias=False)
        layer.weight = parameter(torch, outputs, inputs, dtype=dtype, **options)
        return layer

    class Identity(torch.nn.Module):
        """What it gives for the identity matrix is its parameter itself."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = parameter(torch, inputs, outputs, dtype=dtype, **options)
            self.in_features = inputs

        def forward(self, _):
            return self.weight

    return Identity()


def pair_of(torch, form: str, inputs: int, outputs: int, dtype: str, **options):
    """The weight, for e4m3 with its scale."""
    weight = weight_of(torch, form, inputs, outputs, dtype, **options)
    return (weight, parameter(torch, 1, **options)) if dtype == "float8_e4m3fn" else weight


def make_v32(torch, form, dtype, **options):
    config = package.Config(HEADS, softmax_scale=0.1, block_size=16, topk_tokens=8, **LIMITS)
    scale = parameter(torch, 4, 4, **options) if dtype == "float8_e4m3fn" else None
    weight = weight_of(torch, form, 512, HEADS * 256, dtype, **options)
    return package.SparseMLA(config, kv_b_proj=weight, weight_scale_inv=scale)


def run_v32(torch, layer):
    metadata = package.MetadataBuilder(layer.config).build(make_common(torch))
    indices = torch.arange(8, dtype=torch.int32).repeat(4, 1)
    latents = layer.k_up_proj(values(torch, 4, HEADS, 128))
    q = latents, values(torch, 4, HEADS, 64)
    return layer.v_up_proj(layer.forward(q, values(torch, 6, 16, 576), indices, metadata)[0])


def make_dense(torch, form, dtype, path="separate", **options):
    config = dense.Config(HEADS, softmax_scale=0.1, block_size=16, path=path, **LIMITS)
    return dense.DenseMLA(
        config,
        kv_b_proj=pair_of(torch, form, 512, HEADS * 256, dtype, **options),
        rope_table=parameter(torch, 64, 64, **options),
    )


def make_absorbed(torch, form, dtype, path="separate", requantize=True, **options):
    config = dense.Config(HEADS, softmax_scale=0.1, block_size=16, path=path, **LIMITS)
    if dtype == "float8_e4m3fn":
        form = "transposed"  # as all pairs of projections are
    return dense.DenseMLA(
        config,
        kv_b_proj=pair_of(torch, form, 512, HEADS * 256, dtype, **options),
        q_proj=pair_of(torch, form, 128, HEADS * 192, dtype, **options),
        o_proj=pair_of(torch, form, HEADS * 128, 256, dtype, **options),
        absorb=True,
        requantize=requantize,
        rope_table=parameter(torch, 64, 64, **options),
    )


def run_dense(torch, layer):
    metadata = dense.MetadataBuilder(layer.config).build(make_common(torch))
    q = values(torch, 4, HEADS, 192) if layer.absorbed is None else values(torch, 4, 128)
    cache = values(torch, 6, 16, 576)
    return layer.forward(q, values(torch, 4, 512), values(torch, 4, 64), cache, metadata)


def with_options(make, **fixed):
    return lambda torch, form, dtype, **options: make(torch, form, dtype, **fixed, **options)


LAYERS = {
    "v32": (make_v32, run_v32),
    "dense": (make_dense, run_dense),
    "dense mixed": (with_options(make_dense, path="mixed"), run_dense),
    "absorbed": (make_absorbed, run_dense),
    "absorbed mixed": (with_options(make_absorbed, path="mixed"), run_dense),
    "absorbed bf16": (with_options(make_absorbed, requantize=False), run_dense),
}
each_layer = pytest.mark.parametrize(("make", "run"), LAYERS.values(), ids=LAYERS)


def tensors_of(torch, x) -> list:
    """All tensors that an object of the package keeps."""
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, tuple):
        return [tensor for item in x for tensor in tensors_of(torch, item)]
    fields = vars(x).values() if type(x).__module__.startswith("sparse_mla") else ()
    return [tensor for item in fields for tensor in tensors_of(torch, item)]


@each_form
@each_layer
def test_a_layer_of_parameters_runs_in_every_mode(torch, make, run, form, dtype):
    want = run(torch, make(torch, form, dtype, requires_grad=False))
    for made_in in ("no_grad", "inference_mode"):
        with getattr(torch, made_in)():
            layer = make(torch, form, dtype)
        assert tensors_of(torch, layer)
        assert not any(x.requires_grad for x in tensors_of(torch, layer))
        for run_in in MODES:
            with getattr(torch, run_in)():
                assert torch.equal(run(torch, layer), want), (made_in, run_in)


@each_form
@each_layer
def test_gradients_that_are_on_are_not_cut_off(torch, make, run, form, dtype):
    """There, parameters are refused; those of a layer are read without gradients, as documented."""
    if form in ("plain", "transposed"):
        with pytest.raises(BufferError, match=r"must not require gradients, .* torch.no_grad\(\)"):
            make(torch, form, dtype)
        return
    layer = make(torch, form, dtype)
    if make is not make_v32:
        with pytest.raises(BufferError, match="`rope_table` must not require gradients"):
            run(torch, layer)
        layer.rope_table = layer.rope_table.detach()
    assert not any(x.requires_grad for x in tensors_of(torch, layer))
    run(torch, layer)


# --- DeepSeek V4 ---------------------------------------------------------------------------------


def make_v4(torch, **options):
    config = v4.Config(
        HEADS, kv_cache_dtype="bfloat16", compress_ratios=(), swa_block_size=16, **LIMITS
    )
    norm, table = parameter(torch, 512, **options), parameter(torch, 64, 64, **options)
    sink, wo_a = parameter(torch, HEADS, **options), parameter(torch, 1, 4, 1024, **options)
    weights = v4.Weights(norm, norm, sink, table, wo_a)
    return v4.SparseMLA(config, 1, weights), weights


def run_v4(torch, layer):
    metadata = v4.MetadataBuilder(layer.config).build(make_common(torch))
    caches = v4.Caches(values(torch, 6, 16, 512))
    return layer.attend(values(torch, 4, HEADS, 512), caches, metadata)[0]


def test_a_layer_of_v4_runs_in_every_mode(torch):
    layer, weights = make_v4(torch, requires_grad=False)
    assert layer.weights is weights
    want = run_v4(torch, layer)
    for made_in, run_in in itertools.product(MODES, MODES):
        with getattr(torch, made_in)():
            layer, weights = make_v4(torch)
        refuses = pytest.raises(BufferError, match="`attn_sink` must not require gradients")
        is_refused = (made_in, run_in) == ("enable_grad", "enable_grad")
        with getattr(torch, run_in)(), refuses if is_refused else contextlib.nullcontext():
            assert torch.equal(run_v4(torch, layer), want)
        assert all(x.requires_grad for x in tensors_of(torch, weights)), "the caller's own"
        kept = tensors_of(torch, layer)
        assert all(x.requires_grad == (made_in == "enable_grad") for x in kept)
        for x, y in zip(kept, tensors_of(torch, weights), strict=True):
            assert x.data_ptr() == y.data_ptr(), "the memory is the caller's"


# --- copies --------------------------------------------------------------------------------------

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("made_in", ["no_grad", "inference_mode"])
@each_layer
def test_a_layer_is_copied(torch, make, run, made_in, duplicate):
    for form, dtype in (("plain", "bfloat16"), ("linear", "float32")):
        with getattr(torch, made_in)():
            layer = make(torch, form, dtype)
        assert torch.equal(run(torch, duplicate(layer)), run(torch, layer))
