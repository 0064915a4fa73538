"""paged_attention by Hopper's kernel for rows of 64, 128 and 256, beyond test_paged.py: ends of
tiles and blocks, many requests, hard logits, cuts of keys between CTAs, equal bits however work is
divided, and which calls are another kernel's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import reference as ref
from cases import picker
from dense_cases import Mask
from device import import_quietly
from helpers import assert_kernels, assert_same_bits, assert_within_bounds, check_seeds
from library import sparse_mla
from paged_cases import Paged

attend = sparse_mla.paged_attention
torch = import_quietly("torch")
CAUSAL = Mask(causal=True)
FLOAT32 = np.dtype(np.float32)
DIMS = [64, 128, 256]

if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the kernel is Hopper's", allow_module_level=True)


def check(case: Paged, **more) -> dict:
    """Asserts that results are within the bounds, and are the same again."""
    got = case.run(attend, **more)
    assert_within_bounds(case.reference(), got)
    again = case.run(attend, **more)
    for name, x in got.items():
        assert_same_bits(again[name], x, f"{name} of the second run")
    return got


def make(queries: list[int], keys: list[int], heads: int, kv_heads: int, dim: int, **more) -> Paged:
    return Paged(queries, keys, heads, kv_heads, (dim, dim), **more)


# --- lengths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_q", [1, 15, 16, 17, 32, 33, 63, 65])
@pytest.mark.parametrize("n_k", [1, 63, 64, 65, 127, 128, 129, 700])
@pytest.mark.parametrize("dim", DIMS)
def test_ends_of_tiles_and_blocks(n_q, n_k, dim):
    """Tiles of one group and of both, whole and with a part behind, with neighbours."""
    for mask in (CAUSAL, Mask()):
        check(make([3, n_q, 1], [5, n_k, 40], 4, 2, dim, mask=mask, padding=2, seed=n_k))
        check(make([n_q], [n_k], 4, 1, dim, mask=mask, num_splits=1, kv_type="fp16", q_type="fp16"))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 16])
def test_groups(dim, group):
    lens = [1, 0, 700, 64, 65, 3, 1290]
    check(make([1] * 7, lens, 2 * group, 2, dim, is_decode=True, sink=True, page_size=3))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("mask", [CAUSAL, Mask(), Mask(window=(300, 0)), Mask(chunk=1000)])
def test_few_tiles_over_many_keys(dim, mask):
    """Tiles of one group, which are cut where those of both would leave SMs idle, and with
    num_splits=1 tiles of both."""
    for num_splits in (0, 1):
        options = {"mask": mask, "num_splits": num_splits, "sink": True, "padding": 1}
        check(make([70, 1, 33], [2500, 700, 33], 4, 2, dim, **options))


@pytest.mark.parametrize("num_splits", [0, 1])
def test_many_requests(num_splits):
    """More than 32 requests, with empty ones, and more tiles than CTAs."""
    rng = np.random.default_rng(0)
    queries = [int(x) for x in rng.integers(0, 5, 300)]
    keys = [int(x) for x in rng.integers(0, 9, 300)]
    check(make(queries, keys, 2, 1, 64, mask=CAUSAL, padding=1, num_splits=num_splits))
    lens = [130, 0, 40] * 20, [150, 7, 0] * 20
    check(make(*lens, 4, 2, 128, padding=1, num_splits=num_splits))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("keys", [[131_072], [20_000, 1, 0, 300], [9000] * 3])
def test_long_requests(dim, keys):
    """Cut between many CTAs, against PyTorch in fp64."""
    torch.manual_seed(0)
    heads, kv_heads, page = 8, 2, 16
    pages = [-(-n // page) for n in keys]
    caches = torch.randn(2, sum(pages), page, kv_heads, dim, device="cuda").bfloat16()
    order = torch.randperm(sum(pages), device="cuda", dtype=torch.int32).split(pages)
    table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True, padding_value=-1)
    q = torch.randn(len(keys), heads, dim, device="cuda").bfloat16()
    lens = torch.tensor(keys, dtype=torch.int32, device="cuda")
    options = {"softmax_scale": dim**-0.5}
    op = sparse_mla_on_gpu().paged_attention
    for num_splits in (0, 1):
        out, lse = op(q, *caches, table, lens, **options, num_splits=num_splits)
        for b, n in enumerate(keys):
            k, v = (x[order[b].long()].flatten(0, 1)[:n].double() for x in caches)
            for head in (0, heads - 1):
                kv_head = head // (heads // kv_heads)
                logits = k[:, kv_head] @ q[b, head].double() * options["softmax_scale"]
                want_lse = logits.logsumexp(0)
                p = torch.exp(logits - want_lse)
                want, size = p @ v[:, kv_head], p @ v[:, kv_head].abs()
                assert abs(lse[b, head].double() - want_lse) < 1e-5 or n == 0
                bound = 2.0**-8 * (size + want.abs()) + 1e-4 * size
                assert ((out[b, head].double() - want).abs() <= bound).all()


def sparse_mla_on_gpu():
    import sparse_mla.integrations.torch as package

    return package


# --- random batches ------------------------------------------------------------------------------


def draw(seed: int) -> Paged:
    """Like test_paged.draw, but what this kernel serves, with more keys."""
    rng = np.random.default_rng([seed, 79])
    pick = picker(rng)
    happens = lambda share: bool(rng.random() < share)  # noqa: E731
    count = int(rng.integers(0, 6))
    is_decode = happens(0.4)
    queries, most = pick(2, 4, 60), pick(3, 160, 700)
    kind = pick("bf16", "fp16")
    window = pick((-1, -1), (-1, -1), (int(rng.integers(0, 300)), -1), (3, 5), (0, 0), (-1, 2))
    cp = (int(rng.integers(3)), 3, pick(1, 4, 16)) if happens(0.1) else None
    pads = [int(rng.integers(0, pick(2, 70, 300))) for _ in range(count)]
    kv_heads = pick(1, 2, 3, 8)
    return make(
        [1 if is_decode else int(rng.integers(0, queries)) for _ in range(count)],
        [int(rng.integers(0, most + 1)) for _ in range(count)],
        kv_heads * pick(1, 2, 3, 4, 8, 16),
        kv_heads,
        pick(*DIMS),
        q_type=kind,
        kv_type=kind,
        mask=Mask(happens(0.6), window, pick(0, 0, 0, 1, 7, 64, 200), cp),
        sink=happens(0.3),
        softcap=pick(0.0, 0.0, 0.0, 0.3, 5.0, 50.0),
        padding=0 if is_decode else pick(0, 0, 2),
        out_type=pick(None, None, FLOAT32),
        std=pick(1.0, 1.0, 4.0),
        num_splits=pick(0, 0, 1),
        seed=seed,
        page_size=pick(1, 3, 16, 64, 256),
        layout=pick("apart", "row", "page", "heads"),
        has_slots=happens(0.25),
        is_decode=is_decode,
        leftpad=pads if cp is None and happens(0.35) else None,
        holes=pick(0.0, 0.0, 0.1, 0.5),
        missing=pick(0, 0, 1, 3),
    )


@pytest.mark.parametrize("block", range(20))
def test_random_batches(block):
    check_seeds(range(20 * block, 20 * block + 20), lambda seed: check(draw(seed)))


# --- values --------------------------------------------------------------------------------------


def shape_logits(case: Paged, kind: str) -> None:
    """Makes logits of one kind; keys later in a request are taken later."""
    rng = np.random.default_rng(1)
    tokens = len(case.k)
    k, q = (ref.to_f32(x).astype(np.float64) for x in (case.k, case.q))
    line = rng.normal(0, 1, (1, 1, case.dims[0]))
    if kind == "peaky":
        q *= 5
        k[rng.random(tokens) < 0.03] *= 4
    elif kind == "rising":  # each block is far above the one before
        k, q = 0.1 * k + line * np.linspace(0, 3, tokens)[:, None, None], 0 * q + line * 4
    elif kind == "falling":
        k, q = 0.1 * k + line * np.linspace(3, 0, tokens)[:, None, None], 0 * q + line * 4
    elif kind == "flat":
        k = 0 * k + line
    elif kind == "one heavy key":
        k[700] = line * 3
        q = q * 0.1 + line
    for name, x in (("k", k), ("q", q)):
        setattr(case, name, x.astype(np.float32).astype(getattr(case, name).dtype))
    case.put_keys()


@pytest.mark.parametrize("kind", ["peaky", "rising", "falling", "flat", "one heavy key"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("queries", [[1, 1], [60, 9], [100, 40]])
def test_logits(kind, dtype, dim, queries):
    case = make(queries, [1000, 90], 2, 1, dim, q_type=dtype, kv_type=dtype, mask=CAUSAL)
    shape_logits(case, kind)
    check(case)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("lens", [(1, 300), (90, 90), (3, 40)])
def test_bad_neighbours(bad, lens):
    """The requests on both sides are bad in all of their rows."""
    case = make([140, lens[0], 140], [140, lens[1], 140], 2, 1, 64, mask=CAUSAL, num_splits=1)
    want = case.run(attend)
    rows = slice(140, 140 + lens[0])
    for name, count in (("q", lens[0]), ("k", lens[1]), ("v", lens[1])):
        x = getattr(case, name)
        x[:140] = bad
        x[140 + count :] = bad
    case.put_keys()
    got = case.run(attend)
    for name in ("out", "lse"):
        assert_same_bits(got[name][rows], want[name][rows], name)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("num_splits", [0, 1])
def test_one_key_is_its_value(dim, kind, num_splits):
    """To the bit, where it is all that a request has, and where the others are hidden."""
    types = {"q_type": kind, "kv_type": kind, "num_splits": num_splits}
    case = make([1, 1, 4], [1, 1, 4], 4, 4, dim, mask=Mask(True, (0, 0)), **types)
    assert_same_bits(check(case)["out"], case.v)
    case = make([1], [3000], 4, 4, dim, mask=Mask(True, (0, 0)), **types)
    assert_same_bits(check(case)["out"], case.v[-1:])


# --- equal bits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", DIMS)
def test_a_row_does_not_depend_on_others(dim):
    """Without splits: alone, in a batch, and without the query rows in front of it."""
    rng = np.random.default_rng(3)
    queries = [1, *(int(x) for x in rng.integers(1, 150, 4))]
    lens = [n + int(x) for n, x in zip(queries, rng.integers(0, 300, 5), strict=True)]
    case = make(queries, lens, 4, 2, dim, mask=CAUSAL, sink=True, num_splits=1)
    got = case.run(attend)
    q, k, v, table, seq_lens = case.arguments()
    starts = np.cumsum([0, *queries])
    for b in range(5):
        for tokens in (slice(None), slice(-1, None), slice(-20, None)):
            rows = np.arange(starts[b], starts[b + 1])[tokens]
            options = case.options | {"cu_seqlens_q": np.array([0, len(rows)], np.int32)}
            more = table[b : b + 1], seq_lens[b : b + 1]
            out, lse = attend(q[rows], k, v, *more, **options)
            assert_same_bits(out, got["out"][rows], "out")
            assert_same_bits(lse, got["lse"][rows], "lse")


@pytest.mark.parametrize("dim", DIMS)
def test_no_bit_depends_on_pages(dim):
    case = make([20, 1, 70, 1], [70, 33, 300, 2000], 8, 2, dim, mask=CAUSAL, page_size=16)
    want = check(case)
    for page_size in (1, 3, 64, 1000):
        for has_slots in (False, True):
            again = dataclasses.replace(case, page_size=page_size, has_slots=has_slots)
            got = again.run(attend)
            for name, x in want.items():
                assert_same_bits(got[name], x, name)


def make_tensors(lens: list[int], kv_heads: int, group: int, dim: int):
    torch.manual_seed(0)
    pages = [-(-n // 16) for n in lens]
    q = torch.randn(len(lens), kv_heads * group, dim, device="cuda").bfloat16()
    k, v = (torch.randn(sum(pages), 16, kv_heads, dim, device="cuda").bfloat16() for _ in "kv")
    order = torch.randperm(sum(pages), device="cuda", dtype=torch.int32).split(pages)
    table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True, padding_value=-1)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    return (q, k, v, table, seq_lens), {"softmax_scale": dim**-0.5}


@pytest.mark.parametrize("lens", [[3000], [1, 200, 1290, 640, 77] * 4, [129] * 70])
def test_a_thousand_launches(lens):
    """The same bits in each, whatever is in the workspace before."""
    op = sparse_mla_on_gpu().paged_attention
    arguments, options = make_tensors(lens, 8, 4, 128)
    want, want_lse = op(*arguments, **options)
    workspace = torch.randint(0, 256, (40 << 20,), dtype=torch.uint8, device="cuda")
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        out, lse = op(*arguments, **options, workspace=workspace)
        differing += (out.view(torch.int16) != want.view(torch.int16)).any() | (
            lse != want_lse
        ).any()
    assert int(differing) == 0


def test_graphs_and_streams():
    """A captured call, replayed with other lengths; two calls on two streams at the same time."""
    op = sparse_mla_on_gpu().paged_attention
    arguments, options = make_tensors([700] * 6, 4, 4, 64)
    lens = arguments[-1]
    out, lse = torch.empty_like(arguments[0]), torch.empty(6, 16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(*arguments, **options, out=out, lse=lse)
    for n in range(1, 700, 60):
        lens.fill_(n)
        lens[0] = 700 - n
        want, want_lse = op(*arguments, **options)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)
        assert torch.equal(lse, want_lse)
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    torch.cuda.synchronize()
    for i in range(60):
        with torch.cuda.stream(streams[i % 2]):
            results.append(op(*arguments, **options))
    torch.cuda.synchronize()
    assert all(torch.equal(x, want) and torch.equal(y, want_lse) for x, y in results)


# --- which kernel --------------------------------------------------------------------------------

CALLS = """
import torch
import sparse_mla.integrations.torch as op
def call(dims=(128, 128), kind=torch.bfloat16, gap=0, **options):
    q = torch.ones(2, 4, dims[0], device="cuda").to(kind)
    k = torch.ones(3, 8, 2, dims[0] + gap, device="cuda").to(kind)[..., : dims[0]]
    v = torch.ones(3, 8, 2, dims[1], device="cuda").to(kind)
    table = torch.zeros(2, 2, dtype=torch.int32, device="cuda")
    lens = torch.tensor([9, 3], dtype=torch.int32, device="cuda")
    op.paged_attention(q, k, v, table, lens, **{"softmax_scale": 0.1} | options)
"""

KERNELS = [
    ("", "paged_attention_sm90.cu"),
    ("dims=(64, 64), kind=torch.float16, causal=True", "paged_attention_sm90.cu"),
    ("dims=(256, 256), window_size=(3, 0), softcap=5.0", "paged_attention_sm90.cu"),
    ("attention_chunk=4, softmax_scale=-1.0, num_splits=1", "paged_attention_sm90.cu"),
    ("gap=8", "paged_attention_sm90.cu"),
    ("kind=torch.float8_e4m3fn", "paged_attention.cu (types)"),
    ("dims=(192, 128)", "paged_attention.cu (sizes of rows)"),
    ("dims=(80, 80)", "paged_attention.cu (sizes of rows)"),
    ("num_splits=2", "paged_attention.cu (num_splits)"),
    ("gap=1", "paged_attention.cu (rows that are not aligned to 16 bytes)"),
]


def test_which_kernel_is_in_the_log():
    assert_kernels("paged_attention", CALLS, KERNELS)
