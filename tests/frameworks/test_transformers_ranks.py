"""ModelRunner with `cp`: ranks as threads, each with a model and caches of its own, and an exchange
between them. They give one process's logits within rounding, and exactly its choice of keys."""

from __future__ import annotations

import copy
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deepseek_models import load_example, make_v4, make_v32
from helpers import find_framework

pytestmark = pytest.mark.transformers

LIMITS = {"max_num_seqs": 3, "max_num_batched_tokens": 96, "max_model_len": 150, "block_size": 16}
BOUNDS = {"auto": 0.02, "fp8_ds_mla": 0.10}  # standard deviations of the logits
LENGTH = 150
# name: tokens of a step, or how many are forgotten, or None where the request ends
SCRIPT = [
    {"long": 70, "short": 3},  # 3 tokens are less than a run of 16
    {"long": 1, "short": 1},
    {"long": 20, "short": 1, "late": 9},  # a chunk beside a decode and a prompt
    {"late": -4},
    {"long": 4, "late": 1},
    {"long": -90},
    {"short": None},
    {"long": 30, "other": 17},
    {"long": 1, "late": 1, "other": 1},
]


class Exchange:
    """all_gather between threads."""

    def __init__(self, ranks):
        self.arrays, self.barrier = [None] * ranks, threading.Barrier(ranks, timeout=60)

    def gather(self, rank, x):
        assert x.is_contiguous()
        self.arrays[rank] = x
        self.barrier.wait()
        found = [array.clone() for array in self.arrays]
        self.barrier.wait()
        return found


def run_ranks(work, ranks):
    """work(rank, exchange) of every rank at once; an error of one ends the others."""
    exchange = Exchange(ranks)

    def run(rank):
        try:
            return work(rank, lambda x: exchange.gather(rank, x))
        except BaseException:
            exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return [x.result() for x in [pool.submit(run, rank) for rank in range(ranks)]]


def make(name):
    if name == "V3.2":
        return make_v32(num_hidden_layers=2)
    example = load_example("deepseek_v3")
    options = example.parse(["--layers=2", "--heads=8", f"--model=deepseek_{name.lower()}"])
    sizes = {"hidden_size": 96, "intermediate_size": 64, "moe_intermediate_size": 64}
    return example.make_model(options, vocab_size=64, **sizes)


def make_runner(model, num_pages, **options):
    from sparse_mla.integrations.transformers import ModelRunner

    return ModelRunner(model, num_pages=num_pages, **LIMITS, **options)


def play(runner):
    """Runs the script with tokens that are no choice of the model; -> logits, free pages."""
    torch = find_framework("torch").module
    names = sorted({name for step in SCRIPT for name in step})
    generator = torch.Generator().manual_seed(3)
    texts = {name: torch.randint(0, 64, (LENGTH,), generator=generator) for name in names}
    at, logits, free = dict.fromkeys(names, 0), [], []
    for step in SCRIPT:
        new = {}
        for name, count in step.items():
            if count is None:
                runner.free(name)
            elif count < 0:
                runner.rewind(name, -count)
                at[name] += count
                texts[name] = texts[name].roll(1)  # others than those that were forgotten
            else:
                new[name] = texts[name][at[name] : at[name] + count]
                at[name] += count
        if new:
            logits.append(runner.step(new, all_logits=True))
        free.append(runner.num_free_pages)
    return torch.cat(logits).float(), free


def play_ranks(model, ranks, interleave, num_pages, look=lambda runner: None, **options):
    """Every rank's logits, free pages, and what `look` finds of its runner before it begins."""

    def work(rank, exchange):
        share = {"cp": (rank, ranks, interleave), "exchange": exchange}
        runner = make_runner(copy.deepcopy(model), num_pages, **share, **options)
        return look(runner), *play(runner)

    return run_ranks(work, ranks)


def assert_close(results, want, bound):
    """All ranks have the same bits and pages, and logits within the bound."""
    torch = find_framework("torch").module
    _, got, free = results[0]
    for _, other, its_free in results[1:]:
        assert torch.equal(other, got)
        assert its_free == free
    largest = (got - want).abs().max() / want.std()
    assert 0 < largest <= bound, "0 would be a run that has exchanged nothing"


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("kv_cache_dtype", [*BOUNDS])
@pytest.mark.parametrize(
    ("name", "options"),
    [("V3", {}), ("V3", {"path": "mixed"}), ("V2", {"path": "separate"}), ("V3.2", {})],
)
def test_ranks_have_the_logits_of_one_process(name, options, kv_cache_dtype, interleave):
    model, options = make(name), options | {"kv_cache_dtype": kv_cache_dtype}
    want, _ = play(make_runner(model, 20, **options))
    assert_close(play_ranks(model, 4, interleave, 8, **options), want, BOUNDS[kv_cache_dtype])


def record_choices(runner):
    """The lists of the first layer's indexer, step by step."""
    indexer, lists = runner._layers.attentions[0].indexer, []
    choose = indexer.choose

    def run(step, *given):
        choose(step, *given)
        lists.append(step.topk_indices.clone())

    indexer.choose = run
    return lists


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("index_cache_dtype", ["auto", "fp8_index", "mxfp4_index"])
def test_indexers_choose_the_keys_of_one_process(index_cache_dtype, interleave):
    """Exactly: in the first layer their queries and keys have the same bits."""
    torch, model = find_framework("torch").module, make_v32()
    options = {"index_cache_dtype": index_cache_dtype}
    alone = make_runner(model, 20, **options)
    want = record_choices(alone)
    logits, _ = play(alone)
    assert (torch.cat([x.flatten() for x in want]) < 0).any(), "some tokens see fewer keys than k"
    results = play_ranks(model, 3, interleave, 9, record_choices, **options)
    for lists, *_ in results:
        assert len(lists) == len(want)
        assert all(map(torch.equal, lists, want))
    assert_close(results, logits, BOUNDS["auto"])


def rows_of(runner, request):
    """What the first layer's caches have of a request, in the order of this rank's positions; and
    how many rows there are that are not 0."""
    attention, pages = runner._layers.attentions[0], runner._pages.find(request).pages
    caches = [attention.kv_cache]
    if hasattr(attention, "indexer"):
        caches.append(attention.indexer.keys)
    return [(x[pages].flatten(0, 1), int(x.flatten(0, 1).any(1).sum())) for x in caches]


@pytest.mark.parametrize("name", ["V3", "V3.2"])
def test_a_rank_has_its_own_rows(name):
    """One layer's rows have the bits of one process's, and other rows are not there; but for index
    keys of Transformers' own indexer, which every rank has."""
    torch, model = find_framework("torch").module, make_v32() if name == "V3.2" else make("V3")
    text, ranks, interleave = torch.arange(60), 3, 5

    def work(rank=0, exchange=None):
        cp = None if exchange is None else (rank, ranks, interleave)
        runner = make_runner(copy.deepcopy(model), 12, cp=cp, exchange=exchange)
        for first, end in ((0, 33), (33, 34), (34, 52)):
            runner.step({"a": text[first:end]})
        return rows_of(runner, "a")

    whole = work()
    for rank, caches in enumerate(run_ranks(work, ranks)):
        own = [x for x in range(52) if x // interleave % ranks == rank]
        kept = [own, range(52)]
        for positions, (rows, number), (all_rows, _) in zip(kept, caches, whole, strict=False):
            assert number == len(positions)
            assert torch.equal(rows[: len(positions)], all_rows[list(positions)])


def test_ranks_run_out_of_pages_together():
    """Also those with fewer tokens of a request; then they go on."""
    torch, model = find_framework("torch").module, make_v32()
    text = torch.arange(64)

    def work(rank, exchange):
        runner = make_runner(copy.deepcopy(model), 4, cp=(rank, 4, 20), exchange=exchange)
        runner.step({"a": text[:20], "b": text[:3]})  # 20 tokens of a run: two pages of 16
        assert runner.num_free_pages == 1
        runner.step({"a": text[20:60]})  # those of other ranks
        assert runner.num_free_pages == 1
        with pytest.raises(MemoryError, match=r"ModelRunner.step: 2 more pages needed, 1 free"):
            runner.step({"c": text[:17]})
        runner.step({"c": text[:16]})
        with pytest.raises(MemoryError, match=r"ModelRunner.step: 1 more pages needed, 0 free"):
            runner.step({"b": text[:14]})
        runner.rewind("a", 44)
        assert runner.num_free_pages == 1
        last = runner.step({"b": text[:14]})
        for name in "abc":
            runner.free(name)
        assert runner.num_free_pages == 4
        return last

    first, *others = run_ranks(work, 4)
    assert all(torch.equal(x, first) for x in others)


@pytest.mark.parametrize(("name", "options"), [("V3", {"absorb": True}), ("V3.2", {}), ("V4", {})])
def test_one_rank_has_the_bits_of_none(name, options):
    torch = find_framework("torch").module
    model = make_v4() if name == "V4" else make(name)
    text = torch.arange(40)
    limits = {**LIMITS, "num_pages": 10, **options}
    if name == "V4":
        limits |= {"block_size": 256}
    from sparse_mla.integrations.transformers import ModelRunner

    def run(cp):
        runner = ModelRunner(model, **limits, cp=cp)
        return torch.cat([runner.step({"a": x}, all_logits=True) for x in text.split([25, 1, 14])])

    want = run(None)
    for cp in ((0, 1, 1), (0, 1, 16)):
        assert torch.equal(run(cp), want)


def test_the_documented_exchange_is_taken(tmp_path):
    """In one process, where it gathers what it is given. test_context_parallel.py has two."""
    torch, model = find_framework("torch").module, make_v32()
    scope: dict = {}
    text = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(next(block for block in blocks if "ModelRunner" in block), scope)
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        limits = {**LIMITS, "num_pages": 4}
        runner, x = scope["make_runner"](model, **limits), torch.randn(2, 3).bfloat16()
        assert torch.equal(*scope["exchange"](x), x)
    finally:
        dist.destroy_process_group()
    assert torch.equal(runner.step({"a": [3, 1]}), make_runner(model, 4).step({"a": [3, 1]}))


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "text", "options"),
    [
        (ValueError, "`exchange` must be None without `cp`, got", {"exchange": list}),
        (TypeError, "`exchange` must be a callable .*, got NoneType", {"cp": (0, 2, 1)}),
        (TypeError, "`exchange` must be a callable .*, got int", {"cp": (0, 2, 1), "exchange": 1}),
        (ValueError, r"`cp` must be \(rank, .*, got \(2, 2, 1\)", {"cp": (2, 2, 1)}),
        (ValueError, r"`cp` must be \(rank, .*, got \(-1, 2, 1\)", {"cp": (-1, 2, 1)}),
        (ValueError, r"`cp` must be \(rank, .*, got \(0, 1, 0\)", {"cp": (0, 1, 0)}),
        (ValueError, r"`cp` must be \(rank, .*, got \(0, 1\)", {"cp": (0, 1)}),
        (TypeError, "`cp` must be an int, got float", {"cp": (0, 2.5, 1)}),
        (TypeError, "`cp` must be a tuple of 3 ints, got int", {"cp": 2}),
    ],
)
def test_bad_ranks_are_refused(error, text, options):
    model = make_v32()
    with pytest.raises(error, match=f"^ModelRunner: {text}"):
        make_runner(model, 4, **options)


def test_models_that_cannot_be_split_are_refused():
    share = {"cp": (1, 2, 4), "exchange": list}
    with pytest.raises(ValueError, match=r"`cp` must be None for a DeepseekV4.*, got \(1, 2, 4\)"):
        make_runner(make_v4(), 4, **share)
    with pytest.raises(ValueError, match="`absorb` must be False with `cp` of several ranks"):
        make_runner(make("V3"), 4, absorb=True, **share)


@pytest.mark.parametrize(
    ("error", "text", "exchange"),
    [
        (ValueError, "must return 2 arrays, one of each rank, got 1", lambda x: [x]),
        (ValueError, "must return 2 arrays, one of each rank, got 3", lambda x: [x] * 3),
        (TypeError, "must return a sequence of arrays, got NoneType", lambda x: None),
        (
            ValueError,
            r"must return arrays like its argument, torch.*\[2, 8, 128\], got .*\[2, 8, 64\]",
            lambda x: [x, x[..., :64]],
        ),
        (ValueError, "argument, torch.bfloat16.*, got torch.float32", lambda x: [x, x.float()]),
    ],
)
def test_bad_exchanges_are_refused(error, text, exchange):
    """And the requests keep the tokens that they had."""
    torch, model = find_framework("torch").module, make_v32()
    exchanges = [lambda x: [x, x]]
    share = {"cp": (0, 2, 1), "exchange": lambda x: exchanges[-1](x)}
    runner, same = (make_runner(model, 4, **share) for _ in range(2))
    for one in (runner, same):
        one.step({"a": [3, 1, 4]})
    exchanges.append(exchange)
    with pytest.raises(error, match=f"^ModelRunner: `exchange` .*{text}"):
        runner.step({"a": [1, 5]})
    exchanges.pop()
    assert torch.equal(runner.step({"a": [9, 2]}), same.step({"a": [9, 2]}))


def test_an_error_of_an_exchange_ends_the_step():
    def fail(x):
        raise OSError("the other rank is gone")

    runner = make_runner(make_v32(), 4, cp=(0, 2, 1), exchange=fail)
    with pytest.raises(OSError, match="the other rank is gone"):
        runner.step({"a": [3, 1, 4]})
    assert runner.model.model.layers[0].self_attn is not runner._layers.attentions[0]
