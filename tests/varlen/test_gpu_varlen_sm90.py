"""varlen_attention by Hopper's kernel for rows of 192/128 and 128/128, beyond test_varlen.py: ends
of tiles and blocks, hard logits, neighbours that are NaN, equal bits however work is divided, and
which calls are another kernel's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import reference as ref
from dense_cases import Mask
from device import import_quietly
from helpers import assert_kernels, assert_same_bits, assert_within_bounds
from library import sparse_mla
from varlen_cases import Varlen

attend = sparse_mla.varlen_attention
torch = import_quietly("torch")
CAUSAL = Mask(causal=True)
FLOAT32 = np.dtype(np.float32)
EDGES = (1, 63, 64, 65, 127, 128, 129, 4095)

if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the kernel is Hopper's", allow_module_level=True)


def check(case: Varlen, **more) -> dict:
    """Asserts that results are within the bounds, and are the same again."""
    got = case.run(attend, **more)
    assert_within_bounds(case.reference(), got)
    again = case.run(attend, **more)
    for name, x in got.items():
        assert_same_bits(again[name], x, f"{name} of the second run")
    return got


# --- lengths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_q", EDGES)
@pytest.mark.parametrize("n_k", EDGES)
def test_ends_of_tiles_and_blocks(n_q, n_k):
    """Among others, rows in front of the first key, and tiles of which no row sees a key."""
    check(Varlen([n_q], [n_k], 1, 1, mask=CAUSAL, padding=2))


@pytest.mark.parametrize("n_q", EDGES[:-1])
@pytest.mark.parametrize("n_k", EDGES[:-1])
@pytest.mark.parametrize("dims", [(192, 128), (128, 128)])
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_types_and_ends(n_q, n_k, dims, kind):
    """Every end with a neighbour on both sides, with and without a mask."""
    for mask in (CAUSAL, Mask()):
        lens = [3, n_q, 70], [5, n_k, 40]
        check(Varlen(*lens, 2, 1, dims, kind, kind, mask=mask, sink=n_q % 2 == 0))


@pytest.mark.parametrize(("n_q", "n_k"), [(1832, 5532), (3928, 7563), (12, 377), (17, 977)])
@pytest.mark.parametrize("heads", [4, 32, 128])
def test_shapes_of_flashinfer(n_q, n_k, heads):
    """Its own test's shapes, against fp64 for some heads, all of which are alike."""
    torch.manual_seed(n_q)
    few = 2 if n_q < 100 else 1
    q, k, v = (
        torch.randn(n, heads, d, device="cuda").bfloat16()
        for n, d in ((n_q, 192), (n_k, 192), (n_k, 128))
    )
    starts, key_starts = (
        torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (n_q, n_k)
    )
    options = {"softmax_scale": 192**-0.5, "causal": True}
    out, lse = sparse_mla_on_gpu().varlen_attention(q, k, v, starts, key_starts, **options)
    for head in [0, heads - 1][:few]:
        rows = [x[:, head].double() for x in (q, k, v)]
        assert_head(rows, out[:, head], lse[:, head], n_k - n_q)


def sparse_mla_on_gpu():
    import sparse_mla.integrations.torch as package

    return package


def assert_head(rows, out, lse, offset: int) -> None:
    """Checks one head, causal, with the contract's bounds (docs: 2 units of bf16)."""
    q, k, v = rows
    logits = q @ k.T * 192**-0.5
    hidden = torch.ones_like(logits, dtype=torch.bool).triu(offset + 1)
    logits = logits.masked_fill(hidden, -torch.inf)
    want_lse = logits.logsumexp(-1)
    p = torch.exp(logits - want_lse[:, None])
    want, magnitude = p @ v, p @ v.abs()
    bound = 2 * 2.0**-9 * (magnitude + want.abs()) + 1e-4 * magnitude
    assert ((out.double() - want).abs() <= bound).all()
    assert (lse.double() - want_lse).abs().max() < 1e-5


@pytest.mark.parametrize("workspace", [None, np.zeros(4, np.uint8)])
def test_many_requests(workspace):
    """More than 32 requests, with empty ones, and more tiles than CTAs: claimed and counted."""
    rng = np.random.default_rng(0)
    queries = [int(x) for x in rng.integers(0, 5, 1024)]
    keys = [int(x) for x in rng.integers(0, 9, 1024)]
    more = {} if workspace is None else {"workspace": workspace}
    check(Varlen(queries, keys, 2, 1, mask=CAUSAL, padding=1), **more)
    check(Varlen([130, 0, 40] * 20, [150, 7, 0] * 20, 4, 2, padding=1), **more)


# --- values --------------------------------------------------------------------------------------


def shape_logits(case: Varlen, kind: str) -> None:
    """Makes logits of one kind; keys later in a request are taken first."""
    rng = np.random.default_rng(1)
    tokens = len(case.k)
    k, q = (ref.to_f32(x).astype(np.float64) for x in (case.k, case.q))
    line = rng.normal(0, 1, (1, 1, case.dims[0]))
    if kind == "peaky":
        q *= 5
        k[rng.random(tokens) < 0.03] *= 4
    elif kind == "rising":  # each block is far above the one before
        k, q = 0.1 * k + line * np.linspace(3, 0, tokens)[:, None, None], 0 * q + line * 4
    elif kind == "falling":
        k, q = 0.1 * k + line * np.linspace(0, 3, tokens)[:, None, None], 0 * q + line * 4
    elif kind == "flat":
        k = 0 * k + line
    elif kind == "one heavy key":
        k[2] = line * 3
        q = q * 0.1 + line
    for name, x in (("k", k), ("q", q)):
        setattr(case, name, x.astype(np.float32).astype(getattr(case, name).dtype))


@pytest.mark.parametrize("kind", ["peaky", "rising", "falling", "flat", "one heavy key"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("mask", [CAUSAL, Mask()])
def test_logits(kind, dtype, mask):
    case = Varlen([700, 90], [1000, 90], 2, 2, q_type=dtype, kv_type=dtype, mask=mask)
    shape_logits(case, kind)
    check(case)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("lens", [(200, 300), (90, 90), (129, 129), (3, 40)])
@pytest.mark.parametrize("causal", [False, True])
def test_bad_neighbours(bad, lens, causal):
    """The requests on both sides are bad in all of their rows."""
    case = Varlen([140, lens[0], 140], [140, lens[1], 140], 2, 1, mask=Mask(causal=causal))
    want = case.run(attend)
    rows = slice(140, 140 + lens[0])
    for name, count in (("q", lens[0]), ("k", lens[1]), ("v", lens[1])):
        x = getattr(case, name)
        x[:140] = bad
        x[140 + count :] = bad
    got = case.run(attend)
    for name in ("out", "lse"):
        assert_same_bits(got[name][rows], want[name][rows], name)


@pytest.mark.parametrize("n", [40, 300])
def test_bad_rows_of_the_request(n):
    """A NaN query is alone, an infinite key gives what the portable kernel gives."""
    case = Varlen([n], [n + 200], 2, 1, mask=CAUSAL)
    want = case.run(attend)
    case.q[7] = np.nan
    got = case.run(attend)
    assert np.isnan(ref.to_f32(got["out"][7])).all()
    assert np.isnan(got["lse"][7]).all()
    for name in ("out", "lse"):
        assert_same_bits(np.delete(got[name], 7, 0), np.delete(want[name], 7, 0))


@pytest.mark.parametrize("first", [0, 60, 190])
def test_rows_whose_first_logits_are_minus_infinity(first):
    """All keys but those from `first` on to some later one have logits of -inf."""
    case = Varlen([5], [330], 1, 1, mask=Mask())
    case.q[...] = 1
    case.k[...] = 0
    case.k[:, :, 0] = -np.inf
    case.k[first : first + 20, :, 0] = ref.to_bf16(np.full((20, 1), -40.0))
    got = case.run(attend)
    v = ref.to_f32(case.v[first : first + 20]).astype(np.float64)
    assert np.abs(ref.to_f32(got["out"]) - v.mean(0)[None]).max() < 0.01
    assert np.abs(got["lse"] - (-40 * 192**-0.5 + np.log(20))).max() < 1e-5
    case.k[:, :, 0] = -np.inf
    got = case.run(attend)
    assert not ref.to_f32(got["out"]).any()
    assert np.isneginf(got["lse"]).all()


# --- arrays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("out_type", [None, FLOAT32])
@pytest.mark.parametrize("heads", [(6, 2), (8, 1), (3, 3)])
@pytest.mark.parametrize("pairs", ["", "q", "k", "qk"])
def test_arrays(out_type, heads, pairs):
    case = Varlen(
        [300, 5], [400, 5], *heads, pairs=pairs, rope_dim=64, out_type=out_type, mask=CAUSAL
    )
    got = check(dataclasses.replace(case, sink=True))
    again = dataclasses.replace(case, sink=True, is_spread=True).run(attend)
    for name, x in got.items():
        assert_same_bits(again[name], x, name)


def test_pairs_of_128():
    check(Varlen([200, 70], [300, 70], 2, 2, (128, 128), pairs="qk", rope_dim=64, mask=CAUSAL))


# --- equal bits ----------------------------------------------------------------------------------


def test_a_row_does_not_depend_on_others():
    """Alone, in a batch, and without the query rows in front of it."""
    rng = np.random.default_rng(3)
    queries = [int(x) for x in rng.integers(1, 400, 8)]
    lens = [n + int(x) for n, x in zip(queries, rng.integers(0, 300, 8), strict=True)]
    case = Varlen(queries, lens, 4, 2, mask=CAUSAL, sink=True)
    got = case.run(attend)
    starts, keys = np.cumsum([0, *queries]), np.cumsum([0, *lens])
    for b in (0, 3, 7):
        for tokens in (slice(None), slice(-1, None), slice(-200, None)):
            rows = np.arange(starts[b], starts[b + 1])[tokens]
            alone = dataclasses.replace(case, query_lens=[len(rows)], key_lens=[lens[b]])
            alone.q = case.q[rows]
            alone.k, alone.v = (x[keys[b] : keys[b + 1]] for x in (case.k, case.v))
            alone.attn_sink = case.attn_sink
            again = alone.run(attend)
            assert_same_bits(again["out"], got["out"][rows], "out")
            assert_same_bits(again["lse"], got["lse"][rows], "lse")


def make_tensors(lens: list[int], heads: int):
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(lens), heads, d, device="cuda").bfloat16() for d in (192, 192, 128))
    starts = torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32, device="cuda")
    return (q, k, v, starts, starts), {"softmax_scale": 192**-0.5, "causal": True}


@pytest.mark.parametrize(("lens", "heads"), [([300] * 16, 16), ([1, 200, 129, 640, 77] * 4, 16)])
def test_a_thousand_launches(lens, heads):
    """The same bits in each, whatever is in the workspace before."""
    op = sparse_mla_on_gpu().varlen_attention
    arguments, options = make_tensors(lens, heads)
    want, want_lse = op(*arguments, **options)
    workspace = torch.randint(0, 256, (16,), dtype=torch.uint8, device="cuda")
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        out, lse = op(*arguments, **options, workspace=workspace)
        differing += (out.view(torch.int16) != want.view(torch.int16)).any() | (
            lse != want_lse
        ).any()
    assert int(differing) == 0


def test_graphs_and_streams():
    """A captured call, replayed; and two calls on two streams at the same time."""
    op = sparse_mla_on_gpu().varlen_attention
    arguments, options = make_tensors([700] * 6, 16)
    want, want_lse = op(*arguments, **options)
    out, lse = torch.empty_like(want), torch.empty_like(want_lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(*arguments, **options, out=out, lse=lse)
    for _ in range(50):
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
import numpy as np, torch
import sparse_mla.integrations.torch as op
def call(dims=(192, 128), kind=torch.bfloat16, cut=0, gap=0, **options):
    q, k = (torch.ones(9, 2, dims[0] + gap, device="cuda").to(kind)[..., : dims[0]] for _ in "qk")
    v = torch.ones(9, 2, dims[1], device="cuda").to(kind)
    if cut:
        q, k = (q[..., :cut], q[..., cut:]), (k[..., :cut], k[:, 0, cut:])
    starts = torch.tensor([0, 9], dtype=torch.int32, device="cuda")
    op.varlen_attention(q, k, v, starts, starts, **{"softmax_scale": 0.1} | options)
"""

KERNELS = [
    ("", "mha_attention_sm90.cu"),
    ("causal=True", "mha_attention_sm90.cu"),
    ("window_size=(-1, 0)", "mha_attention_sm90.cu"),
    ("dims=(128, 128), kind=torch.float16", "mha_attention_sm90.cu"),
    ("cut=128", "mha_attention_sm90.cu"),
    ("gap=8", "mha_attention_sm90.cu"),
    ("kind=torch.float8_e4m3fn", "varlen_attention.cu (types)"),
    ("dims=(256, 128)", "varlen_attention.cu (sizes of rows)"),
    ("dims=(192, 64)", "varlen_attention.cu (sizes of rows)"),
    ("cut=184", "varlen_attention.cu (sizes of rows)"),
    ("window_size=(3, 0)", "varlen_attention.cu (mask)"),
    ("attention_chunk=4", "varlen_attention.cu (mask)"),
    ("softcap=5.0", "varlen_attention.cu (softcap or scale)"),
    ("softmax_scale=-1.0", "varlen_attention.cu (softcap or scale)"),
    ("gap=1", "varlen_attention.cu (rows that are not aligned to 16 bytes)"),
    (
        "out=torch.empty(9, 2, 129, device='cuda')[..., :128]",
        "varlen_attention.cu (rows that are not aligned to 16 bytes)",
    ),
]


def test_which_kernel_is_in_the_log():
    assert_kernels("varlen_attention", CALLS, KERNELS)
