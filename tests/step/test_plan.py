"""Splits and chunks: host integers in, host integers out (csrc/step/batch.c, chunks.c)."""

import numpy as np
import pytest
import reference_plan as plan
from test_reference import SPLITS

import sparse_mla


def starts(lens) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)


def split(lens, tokens=None, **options):
    query_start_loc = starts(lens)
    tokens = int(query_start_loc[-1]) if tokens is None else tokens
    return tuple(sparse_mla.split_decodes_and_prefills(query_start_loc, tokens, **options))


@pytest.mark.parametrize(("lens", "threshold", "uniform", "tokens", "want"), SPLITS)
def test_split_vectors_of_the_contract(lens, threshold, uniform, tokens, want):
    assert split(lens, tokens, decode_threshold=threshold, require_uniform=uniform) == want


VECTORS = [
    # query lengths, threshold, uniform, tokens or None -> result
    ([], 1, False, None, (0, 0, 0, 0)),
    ([1], 1, False, None, (1, 0, 1, 0)),
    ([1, 1, 1], 1, True, None, (3, 0, 3, 0)),
    ([1, 1, 1], 1, True, 8, (3, 0, 8, 0)),  # padding tokens without requests
    ([2], 1, False, None, (0, 1, 0, 2)),
    ([5, 1, 1], 1, False, None, (0, 3, 0, 7)),  # only leading requests are decodes
    ([1, 1, 7], 1, True, None, (2, 1, 2, 7)),
    ([1, 1, 7], 1, True, 12, (2, 1, 2, 10)),
    ([2, 2, 2], 3, True, None, (3, 0, 6, 0)),
    ([3, 2, 2], 3, False, None, (3, 0, 7, 0)),
    ([3, 2, 2], 3, True, None, (1, 2, 3, 4)),
    ([4, 3], 3, True, None, (0, 2, 0, 7)),
    ([1, 1, 0, 0], 1, False, 2, (4, 0, 2, 0)),
    ([1, 1, 0, 0], 1, True, 4, (4, 0, 4, 0)),
    # Requests without tokens are decodes before the first prefill, and prefills behind it.
    ([0], 1, True, None, (1, 0, 0, 0)),
    ([0, 0], 1, True, 3, (2, 0, 3, 0)),
    ([1, 0, 1], 1, True, None, (3, 0, 2, 0)),
    ([0, 1], 1, True, None, (2, 0, 1, 0)),
    ([0, 5], 1, True, None, (1, 1, 0, 5)),
    ([5, 0], 1, True, None, (0, 2, 0, 5)),
    ([5, 0, 1], 1, False, None, (0, 3, 0, 6)),
    ([1, 0, 5, 0, 0, 6, 0], 1, True, 15, (2, 5, 1, 14)),
    ([0, 2, 0, 2, 1, 0, 2], 2, True, None, (4, 3, 4, 3)),  # as long as the first that has tokens
    ([0, 2, 0, 2, 1, 0, 2], 2, False, None, (7, 0, 7, 0)),
    ([2, 1, 0], 3, False, None, (3, 0, 3, 0)),
    ([2, 1, 0], 3, True, None, (1, 2, 2, 1)),
]


@pytest.mark.parametrize(("lens", "threshold", "uniform", "tokens", "want"), VECTORS)
def test_split_more_vectors(lens, threshold, uniform, tokens, want):
    assert split(lens, tokens, decode_threshold=threshold, require_uniform=uniform) == want


def test_split_defaults_are_threshold_1_and_not_uniform():
    assert split([1, 1, 2, 1]) == (2, 2, 2, 3)
    assert split([2, 1], decode_threshold=2) == (2, 0, 3, 0)


@pytest.mark.parametrize("uniform", [False, True])
def test_split_random_batches(uniform):
    rng = np.random.default_rng(0)
    for _ in range(300):
        lens = np.sort(rng.integers(int(rng.integers(0, 2)), 8, rng.integers(0, 12)))
        if rng.random() < 0.5:
            rng.shuffle(lens)
        threshold, extra = int(rng.integers(1, 6)), int(rng.integers(0, 3))
        tokens = int(lens.sum()) + extra
        options = {"decode_threshold": threshold, "require_uniform": uniform}
        want = plan.split_decodes_and_prefills(starts(lens), tokens, **options)
        assert split(lens, tokens, **options) == want, (lens, options)


@pytest.mark.parametrize("kind", [list, tuple, np.int64, np.int32, np.uint16, "strided"])
def test_split_takes_any_host_integers(kind):
    loc = starts([1, 1, 5])
    if kind in (list, tuple):
        loc = kind(loc.tolist())
    elif kind == "strided":
        loc = np.repeat(loc, 2)[::2]
    else:
        loc = loc.astype(kind)
    assert tuple(sparse_mla.split_decodes_and_prefills(loc, 7)) == (2, 1, 2, 5)


BAD_SPLITS = {
    # name: (query_start_loc, tokens, options, argument)
    "decreasing": ([0, 3, 2], 3, {}, "query_start_loc"),
    "negative": ([0, -1, 2], 2, {}, "query_start_loc"),
    "does not start at 0": ([1, 2, 3], 3, {}, "query_start_loc"),
    "empty": ([], 0, {}, "query_start_loc"),
    "tokens too few": ([0, 1, 5], 4, {}, "num_actual_tokens"),
    "negative tokens": ([0], -1, {}, "num_actual_tokens"),
    "threshold 0": ([0, 1], 1, {"decode_threshold": 0}, "decode_threshold"),
}


@pytest.mark.parametrize("name", BAD_SPLITS)
def test_bad_splits(name):
    loc, tokens, options, argument = BAD_SPLITS[name]
    with pytest.raises(ValueError, match=f"split_decodes_and_prefills: `{argument}` must .* got"):
        sparse_mla.split_decodes_and_prefills(np.array(loc, np.int32), tokens, **options)


ORDERS = [
    # tokens of each request, swaps, the requests after them
    ([100, 1, 200, 1], [(0, 3)], [3, 1, 2, 0]),
    ([100, 200, 1, 1], [(0, 3), (1, 2)], [3, 2, 1, 0]),
    ([1, 1, 374, 300, 1, 256, 1, 27, 1], [(2, 8), (3, 6)], [0, 1, 8, 6, 4, 5, 3, 7, 2]),
    ([1, 1, 5, 6], [], [0, 1, 2, 3]),
    ([1, 1], [], [0, 1]),
    ([7, 8], [], [0, 1]),
    ([9, 1], [(0, 1)], [1, 0]),
    ([], [], []),
]


@pytest.mark.parametrize(("lens", "swaps", "order"), ORDERS)
def test_orders(lens, swaps, order):
    decodes = [n for n in lens if n <= 1]
    got = sparse_mla.reorder_batch(lens)
    assert got == (
        swaps, len(decodes), len(lens) - len(decodes), sum(decodes), sum(lens) - sum(decodes)
    )  # fmt: skip
    requests = list(range(len(lens)))
    for i, j in got[0]:
        requests[i], requests[j] = requests[j], requests[i]
    assert requests == order


def test_orders_of_random_batches():
    """Decodes come first, whatever the order was, and no request moves twice."""
    rng = np.random.default_rng(3)
    for _ in range(400):
        lens = rng.integers(0, 6, rng.integers(0, 30)).astype(rng.choice([np.int32, np.int64]))
        threshold = int(rng.integers(1, 5))
        got = sparse_mla.reorder_batch(lens, decode_threshold=threshold)
        assert got == plan.reorder_batch(lens, decode_threshold=threshold)
        moved = [i for swap in got[0] for i in swap]
        assert len(set(moved)) == len(moved)
        for i, j in got[0]:
            lens[[i, j]] = lens[[j, i]]
        is_decode = lens <= threshold
        assert is_decode[: got[1]].all()
        assert not is_decode[got[1] :].any()
        assert sparse_mla.reorder_batch(lens, decode_threshold=threshold)[0] == []


def test_orders_of_long_batches():
    """Sums beyond 32 bits; 4096 requests in the worst order."""
    lens = np.array([2**31 - 1] * 2048 + [1] * 2048, np.int32)
    swaps, *counts = sparse_mla.reorder_batch(lens)
    assert counts == [2048, 2048, 2048, 2048 * (2**31 - 1)]
    assert swaps == [(i, 4095 - i) for i in range(2048)]


@pytest.mark.parametrize(
    ("lens", "threshold", "error", "text"),
    [
        ([1, -1], 1, ValueError, "`num_scheduled_tokens` must be >= 0, got -1 at request 1"),
        ([1], 0, ValueError, "`decode_threshold` must be at least 1, got 0"),
        ([1], "1", TypeError, "`decode_threshold` must be an int, got str"),
        ([1.5], 1, TypeError, "`num_scheduled_tokens` must be an int, got float"),
    ],
)
def test_bad_orders(lens, threshold, error, text):
    with pytest.raises(error) as info:
        sparse_mla.reorder_batch(lens, decode_threshold=threshold)
    assert str(info.value).startswith(f"reorder_batch: {text}")


CHUNKS = [
    # seq_lens, workspace -> chunks
    ([10, 15, 20, 5], 25, [(0, 2), (2, 4)]),
    ([], 10, []),
    ([10], 10, [(0, 1)]),
    ([10, 1], 10, [(0, 1), (1, 2)]),
    ([5, 5, 5, 5], 10, [(0, 2), (2, 4)]),
    ([1, 9, 1, 9, 10], 10, [(0, 2), (2, 4), (4, 5)]),
    ([1] * 7, 3, [(0, 3), (3, 6), (6, 7)]),
    ([2**31 - 1] * 3, 2**32, [(0, 2), (2, 3)]),  # sums beyond 32 bits
]


@pytest.mark.parametrize(("seq_lens", "workspace", "want"), CHUNKS)
def test_chunks(seq_lens, workspace, want):
    got = sparse_mla.split_prefill_chunks(np.array(seq_lens, np.int32), workspace)
    assert isinstance(got, list)
    assert [tuple(pair) for pair in got] == want
    assert [tuple(p) for p in sparse_mla.split_prefill_chunks(seq_lens, workspace)] == want


def test_chunks_random():
    rng = np.random.default_rng(1)
    for _ in range(300):
        seq_lens = rng.integers(1, 50, rng.integers(0, 20))
        workspace = int(rng.integers(50, 120))
        got = [tuple(pair) for pair in sparse_mla.split_prefill_chunks(seq_lens, workspace)]
        assert got == plan.split_prefill_chunks(seq_lens, workspace)


def test_a_request_longer_than_the_workspace_names_both_numbers():
    with pytest.raises(ValueError, match=r"split_prefill_chunks") as info:
        sparse_mla.split_prefill_chunks([10, 4321, 5], 1234)
    assert "4321" in str(info.value)
    assert "1234" in str(info.value)


@pytest.mark.parametrize(
    ("seq_lens", "workspace", "rule"),
    [
        ([3, -1], 10, "`seq_lens` must be .*, got -1 at request 1"),
        ([3], -1, "`workspace_tokens` must be at least 0, got -1"),
    ],
)
def test_bad_chunks(seq_lens, workspace, rule):
    with pytest.raises(ValueError, match=f"split_prefill_chunks: {rule}"):
        sparse_mla.split_prefill_chunks(seq_lens, workspace)


def test_workspace_size():
    assert sparse_mla.get_prefill_workspace_size(163840) == 5 * 163840
    assert sparse_mla.get_prefill_workspace_size(1) == 5


# --- cached context ------------------------------------------------------------------------------

EQUAL = [
    # context lengths, workspace, page -> the rows of each chunk
    ([0, 10, 300], 256, 64, [[0, 10, 128], [0, 0, 128], [0, 0, 44]]),
    ([16, 32, 48, 64], 64, 1, [[16] * 4, [0, 16, 16, 16], [0, 0, 16, 16], [0, 0, 0, 16]]),
    ([1, 64], 31, 1, [[1, 15], [0, 15], [0, 15], [0, 15], [0, 4]]),
]
PACKED = [
    ([0, 10, 300], 256, 64, [(1, 3, [0, 0], [10, 192]), (2, 3, [192], [108])]),
    (
        [300, 10, 0, 40],
        256,
        64,
        [(0, 1, [0], [256]), (0, 2, [256, 0], [44, 10]), (3, 4, [0], [40])],
    ),
]


@pytest.mark.parametrize(("lens", "tokens", "page", "want"), EQUAL)
def test_equal_chunks_of_context(lens, tokens, page, want):
    chunks = sparse_mla.split_context_chunks(lens, tokens, block_size=page)
    assert chunks.context_chunk_seq_lens.tolist() == want
    assert chunks.context_chunk_seq_tot == [sum(row) for row in want]
    assert chunks.context_chunk_max_seq_lens == [max(row) for row in want]
    rows = [[0, *np.cumsum(row)] for row in want]
    assert chunks.context_chunk_cu_seq_lens.tolist() == rows
    size = tokens // sum(n > 0 for n in lens) // page * page
    starts_of = [[c * size] * len(lens) for c in range(len(want))]
    assert chunks.context_chunk_starts.tolist() == starts_of


@pytest.mark.parametrize(("lens", "tokens", "page", "want"), PACKED)
def test_packed_chunks_of_context(lens, tokens, page, want):
    given = sparse_mla.split_context_chunks(lens, tokens, block_size=page, plan="packed")
    assert given == want


@pytest.mark.parametrize("lens", [[], [0], [0, 0]])
def test_no_context_has_no_chunks(lens):
    assert sparse_mla.split_context_chunks(lens, 0, block_size=64) is None
    assert sparse_mla.split_context_chunks(lens, 64, block_size=64, plan="packed") == []


def random_contexts(rng):
    """Lengths with zeros among them, a page, and a workspace that is large enough."""
    lens = [int(n) * int(rng.random() < 0.7) for n in rng.integers(1, 400, rng.integers(1, 9))]
    page = int(rng.choice([1, 3, 16, 64]))
    most = max(sum(n > 0 for n in lens), 1) * page
    return lens, int(rng.integers(most, most + 500)), page


def test_random_contexts_in_equal_chunks():
    rng = np.random.default_rng(2)
    for _ in range(300):
        lens, tokens, page = random_contexts(rng)
        chunks = sparse_mla.split_context_chunks(lens, tokens, block_size=page)
        if not any(lens):
            assert chunks is None
            continue
        assert chunks.context_chunk_seq_lens.tolist() == plan.split_context(lens, tokens, page)
        assert max(chunks.context_chunk_seq_tot) <= tokens


def test_random_contexts_in_packed_chunks():
    """Every token is in one chunk, a chunk fits and begins at pages, and only its first prefill
    goes on from another. A prefill is cut only where no further page of it would fit."""
    rng = np.random.default_rng(3)
    for _ in range(300):
        lens, tokens, page = random_contexts(rng)
        chunks = sparse_mla.split_context_chunks(lens, tokens, block_size=page, plan="packed")
        done = [0] * len(lens)
        for first, past, begins, counts in chunks:
            assert len(begins) == len(counts) == past - first > 0
            assert sum(counts) <= tokens
            assert not any(begins[1:])
            for req, start, count in zip(range(first, past), begins, counts, strict=True):
                assert start == done[req]
                assert start % page == 0
                assert count > 0
                done[req] += count
            rest = lens[past - 1] - done[past - 1]
            assert rest == 0 or tokens - sum(counts) < page or rest <= page
        assert done == lens


def test_bad_contexts():
    split = sparse_mla.split_context_chunks
    text = "`workspace_tokens` must have a page of 64 tokens for each of 2 prefills with context, "
    with pytest.raises(ValueError, match=f"^split_context_chunks: {text}got 127$"):
        split([0, 1, 2], 127, block_size=64)
    with pytest.raises(ValueError, match=r"must be at least a page of 64 tokens, got 63$"):
        split([1], 63, block_size=64, plan="packed")
    with pytest.raises(ValueError, match=r"`context_lens` must be >= 0, got -3 at request 1$"):
        split([1, -3], 64, block_size=1)
    with pytest.raises(ValueError, match=r"`block_size` must be at least 1, got 0$"):
        split([1], 64, block_size=0)
    with pytest.raises(ValueError, match=r"`workspace_tokens` must be 0 to 2147483647, got -1$"):
        split([1], -1, block_size=1)
    with pytest.raises(ValueError, match=r"`plan` must be 'equal' or 'packed', got 'half'$"):
        split([1], 64, block_size=1, plan="half")
    with pytest.raises(TypeError, match="`context_lens` must be an int, got float"):
        split([1.5], 64, block_size=1)


def test_the_default_workspace_of_context():
    size = sparse_mla.get_context_workspace_size
    assert [size(4096, 256, 64), size(1024, 16, 64), size(100, 3, 7)] == [65536, 8192, 805]
    assert size(1, 5000, 64) == 320000  # a page of each request
    assert size(1, 2**31 - 1, 2**31 - 1) == (2**31 - 1) ** 2  # four pages of each overflow
    for bad in ((0, 1, 1), (1, 0, 1), (1, 1, 0), (2**31, 1, 1)):
        with pytest.raises(ValueError, match=r"get_context_workspace_size: `\w+` must be 1 to"):
            size(*bad)


# --- local attention -----------------------------------------------------------------------------

LOCAL = [
    # queries, lengths, chunk, page, columns -> queries, keys and pages of the virtual requests
    (
        ([4, 10, 5], [6, 17, 9], 4, 2, 10),
        ([2, 2, 1, 4, 4, 1, 4, 1], [4, 2, 4, 4, 4, 1, 4, 1]),
        [[0, 1], [2, 3], [12, 13], [14, 15], [16, 17], [18, 19], [22, 23], [24, 25]],
    ),
    (
        ([4, 10, 5], [6, 17, 9], 4, 2, 9),
        ([2, 2, 1, 4, 4, 1, 4, 1], [4, 2, 4, 4, 4, 1, 4, 1]),
        [[0, 1], [2, 3], [11, 12], [13, 14], [15, 16], [17, 17], [20, 21], [22, 23]],
    ),
    (([8], [12], 4, 2, 6), ([4, 4], [4, 4]), [[2, 3], [4, 5]]),
    (([7], [10], 4, 2, 5), ([1, 4, 2], [4, 4, 2]), [[0, 1], [2, 3], [4, 4]]),
    (([4], [6], 10, 2, 3), ([4], [6]), [[0, 1, 2, 2, 2]]),
    (([1], [5], 4, 2, 3), ([1], [1]), [[2, 2]]),
    (([0, 3], [6, 2], 4, 2, 3), ([3], [0]), [[3, 4]]),  # no queries; padding
    (([2], [0], 4, 2, 0), ([2], [0]), [[0, 0]]),
    (([], [], 4, 2, 0), ([], []), []),
]


def cut_local(queries, lens, chunk, page, columns):
    """The plan over a table that is numbered row by row."""
    table = np.arange(len(lens) * columns, dtype=np.int32).reshape(len(lens), columns)
    starts = [0, *np.cumsum(queries, dtype=int).tolist()]
    return sparse_mla.local_attention_batches(
        starts, lens, table, attention_chunk=chunk, block_size=page
    )


@pytest.mark.parametrize(("case", "lens", "pages"), LOCAL)
def test_batches_of_local_attention(case, lens, pages):
    queries, starts, keys, table = cut_local(*case)
    assert (queries.tolist(), keys.tolist()) == lens
    assert starts.tolist() == [0, *np.cumsum(lens[0], dtype=int).tolist()]
    assert table.tolist() == pages
    assert table.shape == (len(pages), case[2] // case[3])
    assert {x.dtype for x in (queries, starts, keys, table)} == {np.dtype(np.int32)}


def test_counts_of_local_batches():
    assert len(cut_local([1000], [1255], 256, 1, 1255)[0]) == 5
    assert len(cut_local([300, 700, 90], [300, 1400, 90], 128, 1, 1400)[0]) == 10


def test_random_batches_of_local_attention():
    """Every query sees the keys of its own block up to itself, and no others."""
    rng = np.random.default_rng(5)
    for _ in range(200):
        page = int(rng.choice([1, 2, 3, 16]))
        chunk = page * int(rng.integers(1, 9))
        queries = [int(n) for n in rng.integers(0, 40, rng.integers(1, 6))]
        lens = [n + int(rng.integers(0, 60)) for n in queries]
        columns = -(-max(lens) // page) + int(rng.integers(0, 3))
        got_queries, _, keys, table = cut_local(queries, lens, chunk, page, columns)
        pages = np.arange(len(lens) * columns).reshape(len(lens), columns)
        seen = []  # the slots of each token's keys
        for n_q, n_k, row in zip(got_queries, keys, table, strict=True):
            slots = [row[j // page] * page + j % page for j in range(n_k)]
            seen += [slots[: n_k - n_q + i + 1] for i in range(n_q)]
        want = []
        for n_q, n_k, row in zip(queries, lens, pages, strict=True):
            for p in range(n_k - n_q, n_k):
                block = range(p // chunk * chunk, p + 1)
                want.append([row[j // page] * page + j % page for j in block])
        assert seen == want
        assert len(got_queries) <= min(sum(queries), 2 * len(lens) + sum(queries) // chunk)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"query_start_loc": [0, 4, 3]}, "`query_start_loc` must not decrease"),
        ({"query_start_loc": [1, 4, 5]}, "`query_start_loc` must start with 0, got 1"),
        (
            {"query_start_loc": [0, 4]},
            "`query_start_loc` must have 3 entries, one more than `seq_lens`, got 2",
        ),
        ({"seq_lens": [6, -1]}, "`seq_lens` must be >= 0, got -1 at request 1"),
        (
            {"seq_lens": [6, 9]},
            "`block_table` must have 5 columns for the 9 tokens of request 1, got 4",
        ),
        ({"block_table": np.zeros(8, int)}, "`block_table` must have 2 dimensions, got 1"),
        (
            {"block_table": [[0, 1, 2, 3]]},
            "`block_table` must have a row for each of 2 requests, got 1",
        ),
        (
            {"block_table": [[0, 1, 2, 3], (4, 5, 6)]},
            "`block_table` must have rows of one length, got 3 after 4",
        ),
        ({"attention_chunk": 5}, "`attention_chunk` must be a multiple of block_size = 2"),
    ],
)
def test_local_attention_that_makes_no_sense(changes, text):
    good = {
        "query_start_loc": [0, 4, 5],
        "seq_lens": [6, 8],
        "block_table": np.zeros((2, 4), np.int32),
        "attention_chunk": 4,
        "block_size": 2,
    }
    sparse_mla.local_attention_batches(**good)
    with pytest.raises(ValueError) as info:
        sparse_mla.local_attention_batches(**{**good, **changes})
    assert str(info.value).startswith(f"local_attention_batches: {text}")
