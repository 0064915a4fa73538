"""PyTorch's negative bit: memory of a view that has it holds the values with the opposite sign, so
every argument refuses such a tensor."""

import operators
import pytest
from helpers import assert_same_bits, find_framework, printed_by_python

import sparse_mla

pytestmark = pytest.mark.frameworks


@pytest.mark.torch
@pytest.mark.parametrize(
    "view", [lambda x: x, lambda x: x[:1, :1], lambda x: x[:, :0], lambda x: x[1]]
)
def test_torch_imaginary_parts_of_a_conjugate_are_refused(torch, view):
    """Memory holds the values of such a view with the opposite sign."""
    call = operators.GOOD_CALLS["merge_attn_states"]()
    call.args["lse_a"] = view(torch.zeros(3, 4, dtype=torch.complex64).conj().imag)
    assert call.args["lse_a"].is_neg()
    with pytest.raises(BufferError, match=r"merge_attn_states: `lse_a` .* the negative bit"):
        call.run(sparse_mla)


@pytest.mark.torch
@pytest.mark.parametrize("op", operators.GOOD_CALLS)
def test_the_negative_bit_is_refused_in_every_array(torch, op):
    """Whatever its dtype and strides: an input, an output, a part of a pair."""
    framework = find_framework("torch")
    for name in operators.GOOD_CALLS[op]().arrays():
        call = operators.GOOD_CALLS[op]()
        for other in call.arrays():
            call.set(other, framework.put(call.get(other)))
        plain = call.get(name)
        if plain.dtype == torch.bool or "float8" in str(plain.dtype):
            continue  # test_the_negative_bit_of_every_dtype has them
        call.set(name, torch._neg_view(plain))
        before = framework.get(plain).copy()
        with pytest.raises(BufferError) as info:
            call.run(sparse_mla)
        rule = "must hold its values as they are, got a tensor with the negative bit"
        assert f"{op}: `" in str(info.value)
        assert f"{rule}: pass its .resolve_neg()" in str(info.value)
        assert_same_bits(framework.get(plain), before, name)


@pytest.mark.torch
@pytest.mark.parametrize("rank", [0, 1, 2, 5, 6])
@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int8", "int32", "int64", "bfloat16", "float16", "float32",
              "float64", "float8_e4m3fn"],
)  # fmt: skip
def test_the_negative_bit_of_every_dtype(torch, dtype, rank):
    """Of every rank, of a parameter, of a subclass, of a tensor made in inference mode, of one
    without elements, of a part and of a detached tensor. The same without the bit passes: its shape
    is refused then."""
    call = operators.GOOD_CALLS["merge_attn_states"]()
    subclass = type("Subclass", (torch.Tensor,), {})
    with torch.inference_mode():
        inferred = torch.zeros((2,) * rank).to(getattr(torch, dtype))
    plain = torch.zeros((2,) * rank).to(getattr(torch, dtype))
    kinds = [plain, inferred, plain.as_subclass(subclass), plain[..., :0] if rank else plain]
    kinds += [plain[..., ::2], plain.movedim(0, -1)] if rank else []
    kinds += [torch.nn.Parameter(plain, requires_grad=False)]
    for tensor in kinds:
        negative = torch._neg_view(tensor)
        for given in (negative, negative.detach(), negative[...]):
            assert given.is_neg()
            call.args["lse_a"] = given
            with pytest.raises(BufferError, match=r"`lse_a` .* the negative bit"):
                call.run(sparse_mla)
        for given in (tensor, torch._neg_view(negative)):
            assert not given.is_neg()
            call.args["lse_a"] = given
            with pytest.raises((TypeError, ValueError), match="merge_attn_states: `lse_a` must"):
                call.run(sparse_mla)


# Memory that the next objects of up to 500 bytes will have holds all kinds of bytes.
FILL_FREE_MEMORY = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
held = [(libc.malloc(size), size) for size in range(16, 512, 16) for _ in range(7)]
for number, (memory, size) in enumerate(held):
    ctypes.memset(memory, number * 101 % 256, size)
for memory, _ in held:
    libc.free(memory)
"""
COUNT_QUESTIONS = """
asked, ask = [], torch.Tensor.is_neg
sparse_mla.dynamic_per_tensor_quant(torch.ones(2))
torch.Tensor.is_neg = lambda x: asked.append(x.ndim) or ask(x)
for rank in range(8):
    sparse_mla.dynamic_per_tensor_quant(torch.ones((2,) * rank))
print(asked)
"""


@pytest.mark.torch
@pytest.mark.parametrize("fill", ["", FILL_FREE_MEMORY], ids=["as-it-is", "filled"])
def test_the_negative_bit_is_seen_without_asking(torch, fill):
    """Of tensors, only those are asked whose sizes are outside of their object, and the process's
    first. A process of its own, because the types of earlier tests fill the table of types. What
    free memory holds stays in the padding of PyTorch's objects."""
    script = f"import torch, sparse_mla\n{fill}{COUNT_QUESTIONS}"
    assert printed_by_python("-c", script) == "[6, 7]\n"


# What a PyTorch could be like whose negative views differ from their tensors in other ways.
OTHER_VIEWS = {
    "no bit": "torch._neg_view = lambda x: x",
    "two bits": "torch._neg_view = lambda x: shifted(x, 3)",
    "a bit in two words": "torch._neg_view = lambda x: neg_view(shifted(x, 1))",
    "a bit that plain ones have": "torch.zeros = lambda *a, **k: shifted(zeros(*a, **k), 1)\n"
    "torch._neg_view = lambda x: neg_view(zeros(x.shape, dtype=x.dtype))",
}
SHIFTED = """
neg_view, zeros = torch._neg_view, torch.zeros
def shifted(x, offset):
    return zeros(x.numel() + offset, dtype=x.dtype)[offset:].view(x.shape)
"""


@pytest.mark.torch
@pytest.mark.parametrize("views", OTHER_VIEWS)
def test_the_negative_bit_is_asked_for_where_it_cannot_be_told(torch, views):
    script = f"import torch, sparse_mla\n{SHIFTED}{OTHER_VIEWS[views]}\n{COUNT_QUESTIONS}"
    assert printed_by_python("-c", script) == f"{[*range(8)]}\n"


@pytest.mark.torch
def test_the_negative_bit_without_the_exchange_api(torch):
    """A tensor that comes through __dlpack__, as those of older versions do."""
    old = type("Old", (torch.Tensor,), {"__dlpack_c_exchange_api__": None, "__module__": "torch"})
    call = operators.GOOD_CALLS["merge_attn_states"]()
    plain = torch.zeros(3, 4).as_subclass(old)
    call.args["lse_a"] = plain
    call.run(sparse_mla)
    call.args["lse_a"] = torch._neg_view(plain)
    with pytest.raises(BufferError, match=r"`lse_a` .* the negative bit"):
        call.run(sparse_mla)


@pytest.mark.torch
@pytest.mark.parametrize("negative", range(4))
def test_the_negative_bit_is_refused_by_builders(torch, negative):
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 64}
    builder = sparse_mla.v4.MetadataBuilder(
        sparse_mla.v4.Config(8, compress_ratios=(), state_block_sizes={}, **limits)
    )
    arrays = [
        torch.tensor([0, 2], dtype=torch.int32), torch.tensor([5], dtype=torch.int32),
        torch.tensor([3, 4]), torch.zeros((1, 1), dtype=torch.int32),
    ]  # fmt: skip
    builder.build(sparse_mla.CommonAttentionMetadata(*arrays))
    arrays[negative] = torch._neg_view(arrays[negative])
    with pytest.raises((BufferError, RuntimeError), match="negative bit"):  # ours, or PyTorch's
        builder.build(sparse_mla.CommonAttentionMetadata(*arrays))


@pytest.mark.torch
@pytest.mark.parametrize("negative", range(3))
def test_the_negative_bit_is_refused_by_the_drop_in(torch, negative):
    arrays = [
        torch.zeros((1, 8, 576), dtype=torch.bfloat16),
        torch.zeros((64, 1, 576), dtype=torch.bfloat16),
        torch.zeros((1, 1, 64), dtype=torch.int32),
    ]
    sparse_mla.flash_mla.flash_mla_sparse_fwd(*arrays, 1.0)
    arrays[negative] = torch._neg_view(arrays[negative])
    with pytest.raises(BufferError, match="the negative bit"):
        sparse_mla.flash_mla.flash_mla_sparse_fwd(*arrays, 1.0)
