"""ModelRunner's prefill workspace: one that is too small for some step is refused when the runner
is made, and the smallest that is taken serves the worst step. And runners are copied."""

import copy
import pickle

import pytest
from deepseek_models import load_example, make_v32

pytestmark = [pytest.mark.transformers, pytest.mark.usefixtures("one_thread")]

LIMITS = {"num_pages": 9, "max_num_seqs": 3, "max_num_batched_tokens": 64, "max_model_len": 48}
LIMITS |= {"block_size": 16}


@pytest.fixture(scope="module")
def dense_model():
    example = load_example("deepseek_v3")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
    options = example.parse(["--layers=1", "--heads=8", "--device=cpu"])
    return example.make_model(options, **sizes, moe_intermediate_size=64)


@pytest.fixture(scope="module")
def sparse_model():
    return make_v32()


def run_worst_step(runner, num_requests: int, query_len: int, context: int):
    """Requests with this context, one after another, and then a step of all of them."""
    for name in range(num_requests):
        runner.step({name: list(range(context))})
    return runner.step({name: [1] * query_len for name in range(num_requests)})


@pytest.mark.parametrize("path", [None, "separate"])
@pytest.mark.parametrize(
    ("changes", "prefills"),
    [
        ({}, 3),
        ({"max_num_batched_tokens": 5}, 2),  # a prefill with context has two new tokens or more
        ({"max_num_seqs": 1}, 1),
        ({"block_size": 8, "num_pages": 18}, 3),
    ],
)
def test_dense_layers_need_a_page_per_prefill(adapter, dense_model, path, changes, prefills):
    limits = {**LIMITS, **changes, "path": path}
    least = prefills * limits["block_size"]
    text = (
        rf"^ModelRunner: `prefill_workspace_tokens` must be None or at least {least}, a page of .*"
    )
    for bad in (limits["block_size"] - 1, least - 1):
        with pytest.raises(ValueError, match=f"{text} for each of {prefills} prefills, got {bad}$"):
            adapter.ModelRunner(dense_model, **limits, prefill_workspace_tokens=bad)
    for good in (least, least + 1, None):
        runner = adapter.ModelRunner(dense_model, **limits, prefill_workspace_tokens=good)
        context = min(40, limits["max_num_batched_tokens"])
        logits = run_worst_step(runner, prefills, 2, context)
        assert logits.isfinite().all()


def test_a_workspace_that_no_step_reads_is_taken(adapter, dense_model, sparse_model):
    runner = adapter.ModelRunner(dense_model, **LIMITS, path="mixed", prefill_workspace_tokens=1)
    assert run_worst_step(runner, 3, 2, 40).isfinite().all()
    runner = adapter.ModelRunner(sparse_model, **LIMITS, prefill_workspace_tokens=1)
    assert run_worst_step(runner, 3, 2, 40).isfinite().all()


def test_sparse_layers_gather_whole_requests(adapter, sparse_model):
    limits = {**LIMITS, "path": "separate", "kv_cache_dtype": "fp8_ds_mla"}
    for bad in (1, 47):
        with pytest.raises(ValueError, match=rf"at least max_model_len = 48 .* got {bad}$"):
            adapter.ModelRunner(sparse_model, **limits, prefill_workspace_tokens=bad)
    for good in (48, None):
        runner = adapter.ModelRunner(sparse_model, **limits, prefill_workspace_tokens=good)
        assert run_worst_step(runner, 3, 8, 40).isfinite().all()


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))],
    ids=["deepcopy", "pickle"],
)
def test_a_runner_is_copied_with_its_requests(adapter, dense_model, sparse_model, kind, duplicate):
    """The copy has a model, a cache and a builder of its own, so that both go on as one would."""
    runner = adapter.ModelRunner(dense_model if kind == "dense" else sparse_model, **LIMITS)
    runner.step({"a": [1, 2, 3], "b": [4]})
    other = duplicate(runner)
    assert other.config == runner.config
    assert other.num_free_pages == runner.num_free_pages
    others = other.step({"a": [5, 6], "b": [7]})
    assert (runner.step({"a": [5, 6], "b": [7]}) == others).all()
    other.free("a")
    assert other.num_free_pages == runner.num_free_pages + 1
