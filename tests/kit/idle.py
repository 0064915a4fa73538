"""Requests without query tokens (idle, cancelled, padding) among those of a batch: the arrays of an
engine with some at random places, whose lengths and pages must not be looked at."""

from __future__ import annotations

import numpy as np

JUNK_PAGES = (-1, -(2**31), 2**31 - 1, 0)


def draw_places(rng, num_reqs: int, most: int) -> np.ndarray:
    """Which rows of a batch are requests of the old one; `most` idle ones at most, at least one."""
    count = int(rng.integers(1, most + 1))
    keep = np.ones(num_reqs + count, bool)
    keep[rng.permutation(len(keep))[:count]] = False
    return keep


def spread(keep: np.ndarray, values, others) -> np.ndarray:
    """`values` in the rows of old requests, `others` (a row of each idle one) in the rest."""
    values = np.asarray(values)
    found = np.empty((len(keep), *values.shape[1:]), values.dtype)
    found[keep], found[~keep] = values[: int(keep.sum())], others
    return found


def spread_lens(rng, keep: np.ndarray, lens, most: int) -> np.ndarray:
    """Cached tokens of idle requests: none, one, or as many as the model allows."""
    return spread(keep, lens, rng.choice([0, 1, most // 2, most], (~keep).sum()))


def spread_pages(rng, keep: np.ndarray, table) -> np.ndarray:
    """Idle requests have given their pages back: the table has junk."""
    return spread(keep, table, rng.choice(JUNK_PAGES, ((~keep).sum(), np.shape(table)[1])))


def starts_of(query_lens) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)


def count_decodes(query_lens, old_decodes: int, keep: np.ndarray) -> int:
    """Decodes of the batch with idle requests: everything in front of the first prefill."""
    requests = np.flatnonzero(keep)
    return int(requests[old_decodes]) if old_decodes < len(requests) else len(keep)
