"""Inputs as engines send them: every kind is one flat input with a single thing changed.

The flat input has N(0, 1) queries and keys and only valid entries. A kind that needs other rows
writes them into the cache's spare slots, and its indices point there: the rows of the requests stay
as they are, so one cache serves every kind, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from bench.cuda.inputs import FP8_ROW_BYTES, Inputs, decode_rows, encode_keys
from bench.cuda.timing import Array, torch

ROW_SHARE = 0.02  # share of a kind's entries that select a changed row
SPARE_SHARE = 0.05  # spare slots per entry, enough for every kind: two changes, and some more
FIRST_LATE = 128
LATE_NATS = (9.0, 20.0)
CHUNK_PAIRS = 64  # pairs whose keys are in memory together, 4.7 MB each in fp32
NAN_BYTE = 0x7F  # a NaN in e4m3
SHORT_LENGTH = 200


@dataclass(frozen=True)
class Kind:
    text: str
    make: Callable[[Inputs], Inputs]
    is_usual: bool = True  # trained models and engines send it every day
    needs_lists: bool = False  # differs from the flat input only with several index lists


# --- logits --------------------------------------------------------------------------------------


def with_spread(flat: Inputs, nats: float) -> Inputs:
    """The standard deviation of softmax_scale·q·k is `nats`."""
    return replace(flat, scale=nats / flat.q.shape[-1] ** 0.5)  # because q and k are N(0, 1)


def with_late_keys(flat: Inputs, share: float) -> Inputs:
    """For this share of the (token, head) pairs, at least one pair, a key past the 128th weighs e^9
    to e^20 times as much as the heaviest other key. It is the key of the flat input plus a multiple
    of the query, so it changes little for the token's other heads."""
    num_tokens, num_heads, _ = flat.q.shape
    num_pairs = max(1, round(share * num_tokens * num_heads))
    pairs = torch.randperm(num_tokens * num_heads, device=flat.q.device)[:num_pairs]
    tokens, heads = pairs // num_heads, pairs % num_heads
    columns = draw_late_columns(heads, num_heads, flat.indices.shape[1])
    least, most = LATE_NATS
    nats = least + (most - least) * torch.rand(num_pairs, device=flat.q.device)
    wanted = (find_heaviest(flat, tokens, heads) + nats) / flat.scale
    queries = flat.q[tokens, heads].float()
    keys = read_keys(flat, flat.indices[tokens, columns])
    missing = (wanted - (queries * keys).sum(1)) / (queries**2).sum(1)
    put = put_keys(flat, flat.spare, tokens, columns, keys + missing[:, None] * queries)
    return replace(put, notable=tuple(tokens.unique().tolist()))


def draw_late_columns(heads: Array, num_heads: int, topk: int) -> Array:
    """Columns [n] for heads [n]. No two heads share a column, so a token's late keys never meet."""
    width = (topk - FIRST_LATE) // num_heads
    offsets = torch.rand(heads.shape, device=heads.device) * width
    return FIRST_LATE + heads * width + offsets.long().clamp(max=width - 1)


def find_heaviest(flat: Inputs, tokens: Array, heads: Array) -> Array:
    """The largest logit [n], in nats, of every (token, head) pair."""
    parts = []
    for t, h in zip(tokens.split(CHUNK_PAIRS), heads.split(CHUNK_PAIRS), strict=True):
        keys = read_keys(flat, flat.indices[t].flatten()).view(len(t), -1, flat.q.shape[-1])
        logits = torch.bmm(keys, flat.q[t, h].float()[..., None])
        parts.append(flat.scale * logits.squeeze(-1).amax(1))
    return torch.cat(parts)


# --- rows ----------------------------------------------------------------------------------------


def with_changed_rows(flat: Inputs, *changes: Callable[[Array], Array]) -> Inputs:
    """Applies each change of keys [n, 576] to 2 % of the selected rows."""
    draw = torch.rand(flat.indices.shape, device=flat.q.device) / ROW_SHARE
    inputs, spare = flat, flat.spare
    for number, change in enumerate(changes):
        tokens, columns = (draw.floor() == number).nonzero(as_tuple=True)
        keys = change(read_keys(flat, flat.indices[tokens, columns]))
        inputs = put_keys(inputs, spare, tokens, columns, keys)
        spare += len(keys)
    return inputs


def scale_keys(factor: float) -> Callable[[Array], Array]:
    return lambda keys: factor * keys


def clear_keys(keys: Array) -> Array:
    """Zero keys. The cache write stores them as zero bytes and scales FLT_MIN."""
    return keys.new_zeros(keys.shape)


def with_nan_row(flat: Inputs) -> Inputs:
    """One token's middle entry selects a row with one NaN."""
    token, column = len(flat.q) // 2, flat.indices.shape[1] // 2
    row = flat.rows[flat.indices[token, column].long()].clone()
    row[0] = NAN_BYTE if is_fp8(flat) else float("nan")
    flat.rows[flat.spare] = row
    indices = flat.indices.clone()
    indices[token, column] = flat.spare
    return replace(flat, indices=indices, nan_token=token)


def is_fp8(inputs: Inputs) -> bool:
    return inputs.kv.shape[-1] == FP8_ROW_BYTES


def read_keys(inputs: Inputs, slots: Array) -> Array:
    """The keys [n, 576] fp32 of slots [n]."""
    return decode_rows(inputs.rows[slots.long()])


def put_keys(inputs: Inputs, spare: int, tokens: Array, columns: Array, keys: Array) -> Inputs:
    """Writes keys [n, 576] into the slots from `spare` on, which entries [n] then select."""
    slots = spare + torch.arange(len(keys), device=keys.device)
    if spare + len(keys) > len(inputs.rows):
        raise ValueError(f"{len(keys)} rows do not fit into the cache's spare slots")
    inputs.rows[slots] = encode_keys(keys, is_fp8(inputs))
    indices = inputs.indices.clone()
    indices[tokens, columns] = slots.int()
    return replace(inputs, indices=indices)


# --- lists ---------------------------------------------------------------------------------------


def keep_columns(is_kept: Callable[[Array], Array]) -> Callable[[Inputs], Inputs]:
    """Entries outside the kept columns become -1."""

    def make(flat: Inputs) -> Inputs:
        columns = torch.arange(flat.indices.shape[1], device=flat.q.device)
        return replace(flat, indices=flat.indices.where(is_kept(columns), -1))

    return make


def num_lists(inputs: Inputs) -> int:
    """The number of lists that may differ in length: one per request, or one per token where there
    is only one request, because each token of a prompt sees one key more than the one before."""
    return inputs.num_reqs if inputs.num_reqs > 1 else len(inputs.q)


def with_lengths(flat: Inputs, lengths: Array) -> Inputs:
    """Entries of a list from its length on become -1; lengths [lists]."""
    lengths = lengths.repeat_interleave(len(flat.q) // len(lengths))
    columns = torch.arange(flat.indices.shape[1], device=flat.q.device)
    return replace(flat, indices=flat.indices.where(columns < lengths[:, None], -1))


def with_ragged_lengths(flat: Inputs) -> Inputs:
    """Lengths from 1 to K, in random order, drawn evenly so that every run has as much work."""
    count, topk = num_lists(flat), flat.indices.shape[1]
    places = torch.randperm(count, device=flat.q.device)
    places = (places + torch.rand(count, device=flat.q.device)) / count
    return with_lengths(flat, 1 + (places * topk).long().clamp(max=topk - 1))


def with_one_long(flat: Inputs) -> Inputs:
    """The last list has all its entries, the others have 200."""
    lengths = torch.full((num_lists(flat),), SHORT_LENGTH, device=flat.q.device)
    lengths[-1] = flat.indices.shape[1]
    return with_lengths(flat, lengths)


# --- all of them ---------------------------------------------------------------------------------

KINDS = {
    "flat": Kind("N(0, 1) queries and keys, logits of spread 1.7, every entry valid", lambda x: x),
    "spread-1": Kind("logits of standard deviation 1", lambda x: with_spread(x, 1)),
    "spread-3": Kind("logits of standard deviation 3", lambda x: with_spread(x, 3)),
    "spread-6": Kind("logits of standard deviation 6", lambda x: with_spread(x, 6)),
    "spread-10": Kind("logits of standard deviation 10", lambda x: with_spread(x, 10)),
    "late-0.1": Kind(
        "0.1 % of the (token, head) pairs, one at least, have a key past the 128th that is e^9 to "
        "e^20 times as heavy as any other",
        lambda x: with_late_keys(x, 0.001),
    ),
    "late-2": Kind("as late-0.1, for 2 % of the pairs", lambda x: with_late_keys(x, 0.02)),
    "zero-rows": Kind("2 % of the rows are zero", lambda x: with_changed_rows(x, clear_keys)),
    "small-rows": Kind(
        "2 % of the rows are 1e-5 of the others", lambda x: with_changed_rows(x, scale_keys(1e-5))
    ),
    "large-rows": Kind(
        "2 % of the rows are 100 times the others", lambda x: with_changed_rows(x, scale_keys(100))
    ),
    "mixed-rows": Kind(
        "2 % of the rows are 1e-5 of the others, 2 % are 100 times those",
        lambda x: with_changed_rows(x, scale_keys(1e-5), scale_keys(100)),
    ),
    "nan-row": Kind("one token selects a row with a NaN", with_nan_row, is_usual=False),
    "front-none": Kind("the first 128 entries are -1", keep_columns(lambda column: column >= 128)),
    "odd-none": Kind("every second entry is -1", keep_columns(lambda column: column % 2 == 0)),
    "blocks-none": Kind(
        "every second block of 64 entries is -1",
        keep_columns(lambda column: column // 64 % 2 == 0),
    ),
    "valid-100": Kind("100 entries, -1 behind", keep_columns(lambda column: column < 100)),
    "valid-1024": Kind("1024 entries, -1 behind", keep_columns(lambda column: column < 1024)),
    "ragged": Kind("lists of 1 to K entries, -1 behind", with_ragged_lengths, needs_lists=True),
    "one-long": Kind(
        "lists of 200 entries and one of K, -1 behind", with_one_long, needs_lists=True
    ),
}
