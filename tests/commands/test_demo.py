"""Parts of `python -m sparse_mla demo` that test_commands.py does not reach: sizes, pages, the bar
that shows progress, the scheduler and the indexer."""

import re
import sys

import numpy as np
import pytest
from test_demo_device import demo_options
from test_info import help_of

import sparse_mla
from sparse_mla._demo import engine, memory, model, scheduler
from sparse_mla._demo import run as demo

pytestmark = pytest.mark.frameworks


USUAL = {"requests": 6, "context": 3072, "decode": 16, "topk": 2048}
SHORT = {"requests": 3, "context": 300, "decode": 3, "topk": 64}


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ("", USUAL),
        ("--short", SHORT),
        ("--decode 2", USUAL | {"decode": 2}),
        ("--short --requests 6", SHORT | {"requests": 6}),  # also where it is the usual size
        ("--context 9 --topk 1 --short", SHORT | {"context": 9, "topk": 1}),
        ("--v4", USUAL | {"topk": 512}),
        ("--v4 --short", SHORT | {"topk": 16}),
        ("--short --v4 --topk 64", SHORT),
    ],
)
def test_the_demo_s_sizes(arguments, sizes, capsys):
    """A size that is given wins, before or behind --short."""
    options = demo_options(*arguments.split())
    assert demo.find_sizes(options)._asdict() == sizes
    requests = demo.make_requests(options)
    lengths = [len(request.text) for request in requests]
    assert len(lengths) == sizes["requests"]
    assert sizes["context"] / 2 <= min(lengths) <= max(lengths) <= sizes["context"]
    assert {n - r.prompt_len for n, r in zip(lengths, requests, strict=True)} == {sizes["decode"]}
    demo.make_engine(options, requests)
    rows = " rows of 4 tokens" if options.v4 else ""
    assert f" · top-{sizes['topk']}{rows} · " in capsys.readouterr().out


def test_the_demo_s_help_names_its_sizes():
    help_text = " ".join(help_of(demo.add_arguments).split())
    short = ", ".join(f"--{name} {size}" for name, size in SHORT.items())
    assert f"--short a run of a second: {short}, unless they are given" in help_text
    for name, size in USUAL.items():
        assert re.search(rf"--{name} {name.upper()} [\w ]+ \({size}\)", help_text), name


@pytest.mark.parametrize(
    "option", ["requests", "context", "decode", "topk", "block-size", "tokens-per-step"]
)
def test_the_demo_needs_one_of_everything(option):
    with pytest.raises(ValueError, match=rf"^--{option} must be at least 1$"):
        demo.make_requests(demo_options(f"--{option}", "0"))
    demo.make_requests(demo_options(f"--{option}", "1"))


@pytest.mark.parametrize("pages", ["0", "1"])
def test_the_demo_takes_the_pages_it_was_given(pages):
    options = demo_options("--requests", "2", "--context", "300", "--block-size", "16")
    requests = demo.make_requests(options)
    least = max(-(-len(request.text) // 16) for request in requests)
    options.pages = int(pages)
    with pytest.raises(ValueError, match=rf"^--pages must be at least {least}, .*got {pages}$"):
        demo.make_engine(options, requests)
    options.pages = least
    _, scheduler = demo.make_engine(options, requests)
    assert scheduler.pool.num_pages == least


def test_the_demo_needs_a_text(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match=r"empty is empty$"):
        demo.read_text(tmp_path / "empty")
    assert demo.read_text(None).size > 1000


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_demo_shows_its_progress(is_terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    progress = demo.Progress(8)
    for _ in range(4):
        progress.advance(2)
        progress.clear()
    progress.finish()
    shown = capsys.readouterr().err
    if is_terminal:
        assert f"[{'#' * 10:<40}]  25%" in shown
        assert f"[{'#' * 40}] 100%" in shown
        assert shown.endswith("\r\033[K")
    else:
        assert [line.split()[1] for line in shown.splitlines()] == ["25%", "50%", "75%", "100%"]


def test_the_demo_waits_for_the_first_request():
    request = scheduler.Request(0, arrival_step=2, text=np.zeros(5, np.uint8), prompt_len=4)
    plan = scheduler.Scheduler(
        [request], num_pages=2, block_size=4, max_num_seqs=2, max_num_batched_tokens=8
    )
    assert [plan.next_batch(step) is None for step in range(3)] == [True, True, False]


def test_the_demo_s_indexer_takes_the_best_keys_up_to_the_token():
    """Two requests in three steps. Quantisation may exchange a few keys at the edge."""
    texts = [demo.read_text(None)[start : start + 90] for start in (0, 500)]
    requests = [scheduler.Request(n, 0, text, prompt_len=88) for n, text in enumerate(texts)]
    plan = scheduler.Scheduler(
        requests, num_pages=20, block_size=16, max_num_seqs=2, max_num_batched_tokens=100
    )
    config = sparse_mla.Config(
        2,
        softmax_scale=0.1,
        kv_cache_dtype="fp8_ds_mla",
        block_size=16,
        topk_tokens=20,
        max_num_seqs=2,
        max_num_batched_tokens=100,
        max_model_len=90,
    )
    toy = model.ToyModel(2, 0)
    made = engine.SparseEngine(toy, config, 20, memory.Memory())
    same = total = 0
    for step in range(3):
        batch = plan.next_batch(step)
        chosen = made.run_step(batch).topk_indices
        for request, rows, positions in batch.parts():
            everything = np.arange(len(request.text))
            keys = toy.index_keys(request.text, everything).astype(np.float32)
            context = toy._context_code(request.text, positions) @ toy.w_index
            q = np.concatenate([context, toy._rope(positions)], axis=1)
            scores = np.where(everything > positions[:, None], -np.inf, q @ keys.T)
            best = np.argsort(-scores, axis=1)[:, :20]
            for its, want, p in zip(chosen[rows], best, positions, strict=True):
                its = its[its >= 0]
                assert (np.diff(its) > 0).all()
                assert len(its) == min(p + 1, 20)
                assert (its <= p).all()
                same, total = same + len(np.intersect1d(its, want)), total + len(its)
        plan.finish(batch)
    assert total > 2500
    assert same > 0.97 * total


def test_the_demo_s_v4_layer_keeps_few_window_rows():
    """A request's window rows and states lie in a ring of pages, however long the request is."""
    short, long = (
        demo.make_engine(options, demo.make_requests(options))[0]
        for options in (demo_options("--v4", "--context", str(n)) for n in (1000, 3000))
    )
    for name in ("swa", "state", "index_state"):
        arrays = [getattr(x.caches, name) for x in (short, long)]
        # Of 6 requests: 127 tokens before a step, and 512 tokens of it, in pages of 64.
        assert [x.shape[:2] for x in arrays] == [(6 * 10, 64)] * 2
    for name in ("compressed", "index"):
        pages, rows, _ = getattr(long.caches, name).shape
        assert (pages > 2 * len(short.kv_cache), rows) == (True, 16)


def test_the_demo_s_v4_layer_takes_all_rows_at_most():
    options = demo_options("--v4", "--short", "--context", "9", "--topk", "10000000000")
    config = demo.make_engine(options, demo.make_requests(options))[0].config
    assert config.topk_tokens == -(-config.max_model_len // 4)


def test_the_demo_s_workspace_is_as_large_as_the_plan_wants():
    config = sparse_mla.Config(
        2,
        softmax_scale=0.1,
        kv_cache_dtype="fp8_ds_mla",
        topk_tokens=8,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=64,
    )
    made = engine.SparseEngine(model.ToyModel(2, 0), config, 2, memory.Memory())
    assert made.workspace.shape == (sparse_mla.get_prefill_workspace_size(64), 576)
