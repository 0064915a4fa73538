"""RoPE in place on queries and a key that are parts of one projection: they share no byte, however
their strides lie in each other, so no call says that they overlap."""

import device
import numpy as np
import pytest
import reference as ref
from helpers import assert_same_bits, find_framework
from library import sparse_mla

T, D = 5, 64
POSITIONS = np.array([3, 0, 7, 2, 5])
HEADS = (1, 2, 3, 16)


def parts_of_rows(x, heads):
    """[T, H * 192 + 512 + 64]: queries, latents, the key's rotated values."""
    q = x[:, : heads * 192].reshape(len(x), heads, 192)[..., 128:]
    return q, x[:, heads * 192 + 512 :]


def parts_behind_the_key(x, heads):
    return x[:, 576:].reshape(len(x), heads, 192)[..., 128:], x[:, 512:576]


def heads_of_one_array(x, heads):
    """[T, H + 1, 192]: the key is one head more."""
    x = x.reshape(len(x), heads + 1, 192)
    return x[:, :heads, 128:], x[:, heads, 128:]


def heads_around_the_key(x, heads):
    """[T, 2 H + 1, 192]: every second head is a query's, and one between them is the key."""
    x = x.reshape(len(x), 2 * heads + 1, 192)
    return x[:, ::2][:, :heads, 128:], x[:, 1, 128:]


def halves_of_heads(x, heads):
    """The key lies in the other half of the head that every second query is."""
    x = x.reshape(len(x), 2 * heads, 128)
    return x[:, ::2, :64], x[:, 1, 64:]


def heads_first(x, heads):
    """[H + 1, T, 192], transposed."""
    x = x.reshape(heads + 1, -1, 192).transpose(1, 0, 2)
    return x[:, :heads, 128:], x[:, heads, :64]


def every_second_row(x, heads):
    """Queries in even rows, the key in odd ones, with rows of their own lengths."""
    x = x.reshape(len(x), 2, -1)
    return x[:, 0, : heads * 192].reshape(len(x), heads, 192)[..., 64:128], x[:, 1, :64]


LAYOUTS = {
    parts_of_rows: lambda heads: heads * 192 + 576,
    parts_behind_the_key: lambda heads: heads * 192 + 576,
    heads_of_one_array: lambda heads: (heads + 1) * 192,
    heads_around_the_key: lambda heads: (2 * heads + 1) * 192,
    halves_of_heads: lambda heads: 2 * heads * 128,
    heads_first: lambda heads: (heads + 1) * 192,
    every_second_row: lambda heads: 2 * heads * 192,
}


def projection(layout, heads, dtype=ref.BF16):
    x = np.random.default_rng(heads).standard_normal((T, LAYOUTS[layout](heads)))
    return x.astype(np.float32).astype(dtype)


def untouched(x, layout, heads):
    """A copy of x in which the rotated values are 0."""
    copy = x.copy()
    for part in layout(copy, heads):
        part[...] = 0
    return copy


@pytest.mark.parametrize("dtype", [ref.BF16, np.float32])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_apply_rope(layout, heads, dtype):
    table = sparse_mla.rope_table(D // 2)
    x = projection(layout, heads, dtype)
    before = untouched(x, layout, heads)
    q, k = layout(x, heads)
    assert not np.shares_memory(q, k)
    want = sparse_mla.apply_rope(POSITIONS, q.copy(), k.copy(), table)
    sparse_mla.apply_rope(POSITIONS, q, k, table, q_out=q, k_out=k)
    assert_same_bits(q, want[0])
    assert_same_bits(k, want[1])
    assert_same_bits(untouched(x, layout, heads), before)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_and_cache(layout, heads):
    """The latents are columns of the same projection where it has them."""
    table = sparse_mla.rope_table(D // 2)
    x = projection(layout, heads)
    q, k = layout(x, heads)
    latents = ref.to_bf16(np.random.default_rng(1).standard_normal((T, 512)).astype(np.float32))
    if layout is parts_of_rows:
        latents = x[:, heads * 192 : heads * 192 + 512]
    want = sparse_mla.apply_rope(POSITIONS, q.copy(), k.copy(), table)
    cache = np.zeros((1, 8, 576), ref.BF16)
    slots = np.arange(T)
    sparse_mla.rope_and_cache_mla(POSITIONS, q, k, table, latents, cache, slots, q_out=q)
    assert_same_bits(q, want[0])
    assert_same_bits(cache[0, :T], np.concatenate((latents, want[1]), -1))


@pytest.mark.parametrize("heads", HEADS)
def test_one_value_too_many_is_refused(heads):
    """The neighbours of the parts above: the key begins in the last query, or ends in the next."""
    table = sparse_mla.rope_table(D // 2)
    x = projection(heads_of_one_array, heads).reshape(T, heads + 1, 192)
    flat = x.reshape(T, -1)
    q = x[:, :heads, 128:]
    for at in (128, (heads - 1) * 192 + 191, (heads - 1) * 192 + 65):
        k = flat[:, at : at + D]
        assert np.shares_memory(q, k)
        for outs in ({"q_out": q}, {"k_out": k}, {"q_out": q, "k_out": k}):
            with pytest.raises(ValueError, match=r"not overlap .* got arrays that share memory$"):
                sparse_mla.apply_rope(POSITIONS, q, k, table, **outs)
    for at in (heads * 192, (heads - 1) * 192 + 64):  # up to its neighbours
        k = flat[:, at : at + D]
        sparse_mla.apply_rope(POSITIONS, q, k, table, q_out=q, k_out=k)


@pytest.mark.torch
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("layout", [parts_of_rows, heads_of_one_array, heads_around_the_key])
def test_torch(layout, backend):
    """PyTorch's operator, in eager and in compiled calls."""
    torch = find_framework("torch", device.NAME)
    smla = device.import_quietly("sparse_mla.integrations.torch")
    x, table = projection(layout, 3), sparse_mla.rope_table(D // 2)
    want = x.copy()
    for part, turned in zip(
        layout(want, 3), sparse_mla.apply_rope(POSITIONS, *layout(x, 3), table), strict=True
    ):
        part[...] = turned
    positions, angles, tensor = (torch.put(a) for a in (POSITIONS, table, x))

    def turn(x):
        q, k = layout(x, 3)
        smla.apply_rope(positions, q, k, angles, q_out=q, k_out=k)

    if backend is not None:
        turn = torch.module.compile(turn, backend=backend, fullgraph=True)
    turn(tensor)
    assert_same_bits(torch.get(tensor), want)
