"""The pages that ModelRunner gives to requests, without a model: those of DeepSeek V4, most of
which live a step."""

import numpy as np
import pytest

from sparse_mla.integrations._pages import Recent, StepPages, Table

STEPS = 10_000
SEQS, BATCH, LONGEST, BLOCK = 16, 48, 400, 32
SEEN = {"window": (16, 40), "states of 4": (8, 8), "states of 128": (8, 56)}  # page size, tokens


def make_pages(max_drafts, num_pages=SEQS * LONGEST // BLOCK, early=0):
    """`early` is a fault: tokens that are not kept though a later step sees them."""
    recent = {
        name: Recent(size, SEQS, LONGEST, seen + max_drafts - early, BATCH)
        for name, (size, seen) in SEEN.items()
    }
    return StepPages(num_pages, Table(BLOCK, SEQS, LONGEST), recent)


class Caches:
    """What lies in the caches: a slot holds the last (request, position, version) written to it."""

    def __init__(self, pages):
        self.pages = pages
        sizes = {name: its.num_pages * its.page_size for name, its in pages.recent.items()}
        self.held = {name: np.full((size, 2), -1) for name, size in sizes.items()}
        self.whole = np.full((pages.num_free * BLOCK, 2), -1)

    def write(self, request, first, last):
        positions = np.arange(first, last)
        rows = np.full(len(positions), self.pages.requests[request].row)
        for name, recent in self.pages.recent.items():
            self.held[name][recent.slots(rows, positions)] = np.stack(
                [np.full_like(positions, request), positions], 1
            )
        where = self.pages.slots(request, positions)
        assert (where == self.pages.whole.slots(rows, positions)).all()
        self.whole[where] = np.stack([np.full_like(positions, request), positions], 1)

    def sees(self, request, first, last):
        """Whether tokens `first` to before `last` find their own tokens where they look."""
        row, found = self.pages.requests[request].row, True
        for name, recent in self.pages.recent.items():
            positions = np.arange(max(first - SEEN[name][1] + 1, 0), last)
            held = self.held[name][recent.slots(np.full(len(positions), row), positions)]
            found &= bool(((held[:, 0] == request) & (held[:, 1] == positions)).all())
        positions = np.arange(last)
        held = self.whole[self.pages.slots(request, positions)]
        return found & bool(((held[:, 0] == request) & (held[:, 1] == positions)).all())


def check(pages):
    """No page is lost or lent twice, and between steps a request has what it keeps at most."""
    states = pages.requests.values()
    rows = [state.row for state in states]
    assert len(set(rows)) == len(rows)
    lent = [page for state in states for page in state.pages]
    assert sorted(lent + pages._free) == list(range(len(lent) + len(pages._free)))
    for recent in pages.recent.values():
        lent = []
        for state in states:
            its = recent.entries[state.row, recent.begins[state.row] : recent.ends[state.row]]
            assert len(its) <= (recent.kept + 2 * recent.page_size - 2) // recent.page_size
            needed = min(recent.kept - state.num_forgotten, state.num_tokens)
            assert len(its) * recent.page_size >= needed
            lent += its.tolist()
        assert sorted(lent + recent.free) == list(range(recent.num_pages))
        idle = np.setdiff1d(np.arange(SEQS), rows)
        assert (recent.begins[idle] == 0).all()
        assert (recent.ends[idle] == 0).all()


def play(pages, max_drafts, steps):
    """Random steps of requests that begin, come in chunks, decode with drafts, forget and end; some
    steps fail. -> how often a request's tokens found all that they see, and how often not"""
    rng, caches = np.random.default_rng(0), Caches(pages)
    copy = {name: np.zeros(its.entries.size, np.int32) for name, its in pages.recent.items()}
    next_name, good, bad = 0, 0, 0
    for number in range(steps):
        new, budget = {}, int(rng.integers(1, BATCH + 1))
        names = list(pages.requests)
        while len(names) < SEQS and rng.random() < 0.3:
            names.append(next_name)
            next_name += 1
        for name in rng.permutation(names).tolist():
            room = LONGEST - pages.find(name).num_tokens
            count = int(rng.choice([1, 1 + max_drafts, rng.integers(1, BATCH + 1)]))
            if 0 < min(count, room) <= budget:
                new[name] = min(count, room)
                budget -= new[name]
        if not new:
            continue
        pages.reserve("step", new)
        for name, table in pages.recent.items():  # what a device's copy is sent
            where, entries = table.take_changes()
            copy[name][where] = entries
            assert (copy[name] == table.entries.reshape(-1)).all()
        before = {name: pages.requests[name].num_tokens for name in new}
        for name, count in new.items():  # a step writes all rows before it reads any
            caches.write(name, before[name], before[name] + count)
        for name, count in new.items():
            is_good = caches.sees(name, before[name], before[name] + count)
            good, bad = good + is_good, bad + (not is_good)
        if rng.random() < 0.95:  # else it failed
            for name, count in new.items():
                pages.advance(name, count)
        pages.settle(new)
        for name in new:
            state = pages.requests[name]
            most = min(max_drafts - state.num_forgotten, state.num_tokens)
            for _ in range(int(rng.integers(3))):  # in one call, or in several
                count = int(rng.integers(most + 1))
                pages.rewind(name, count)
                most -= count
            if rng.random() < 0.02 or state.num_tokens == LONGEST:
                pages.release(name)
        if number % 10 == 0 or number > steps - 100:
            check(pages)
    return good, bad


@pytest.mark.parametrize(("max_drafts", "steps"), [(0, STEPS // 4), (1, STEPS // 4), (5, STEPS)])
def test_no_page_is_lost_lent_twice_or_missing(max_drafts, steps):
    pages = make_pages(max_drafts)
    good, bad = play(pages, max_drafts, steps)
    assert good > 2 * steps
    assert bad == 0
    for name in list(pages.requests):
        pages.release(name)
    check(pages)
    assert pages.num_free == SEQS * LONGEST // BLOCK


def test_pages_that_go_back_too_early_are_seen():
    """One token less than is kept is enough: the formula counts the next token, too. Of two less,
    some step misses one."""
    assert play(make_pages(5, early=1), 5, 1000)[1] == 0
    assert play(make_pages(5, early=2), 5, 3000)[1] > 0


def test_the_worst_step_takes_every_page():
    """All requests keep as many pages as they can, and one of them has the whole step."""
    size, seen = SEEN["window"]
    pages = StepPages(
        SEQS * LONGEST // BLOCK,
        Table(BLOCK, SEQS, LONGEST),
        {"window": Recent(size, SEQS, LONGEST, seen + 3, BATCH)},
    )
    recent = pages.recent["window"]
    for name in range(SEQS):
        for count in (BATCH, BATCH, 2 + seen % size):  # the last kept token is alone in its page
            pages.reserve("step", {name: count})
            pages.advance(name, count)
            pages.settle([name])
    fewest = len(recent.free)
    pages.reserve("step", {0: BATCH})
    assert 0 <= len(recent.free) <= SEQS
    assert len(recent.free) <= fewest - BATCH // size


def test_windows_and_states_of_v4_flash():
    """64 requests, chunks of 8192 tokens: 43 layers, two of them with a window alone."""
    bytes_per_token = {
        (16, 128): 43 * 584,
        (8, 8): 21 * (2 * 2 * 512 + 512) * 4,
        (8, 128): 20 * 2 * 512 * 4,
    }
    total = exact = 0
    for (size, seen), its in bytes_per_token.items():
        recent = Recent(size, 64, 65536, seen, 8192)
        total += recent.num_pages * size * its
        exact += (64 * seen + 8192) * its
    assert exact <= 3.6 * 2**30
    assert exact < total <= 4.3 * 2**30


def test_requests_beyond_the_limit_are_refused():
    pages = make_pages(0)
    pages.reserve("Runner.step", dict.fromkeys(range(SEQS - 1), 1))
    text = "Runner.step: `tokens` must leave max_num_seqs = 16 requests at most, got 17"
    with pytest.raises(ValueError, match=text):
        pages.reserve("Runner.step", {"a": 1, "b": 1})
    pages.reserve("Runner.step", {"a": 1})
    assert len(pages.requests) == SEQS
    check(pages)


def test_missing_pages_change_nothing():
    pages = make_pages(0, num_pages=2)
    pages.reserve("step", {"a": BLOCK + 1})
    free = {name: list(its.free) for name, its in pages.recent.items()}
    with pytest.raises(MemoryError, match="step: 1 more pages needed, 0 free"):
        pages.reserve("step", {"b": 1})
    assert list(pages.requests) == ["a"]
    assert free == {name: its.free for name, its in pages.recent.items()}
