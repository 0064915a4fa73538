"""DeepSeek-V3.2 of Transformers on the paged cache: compared with its eager attention, and used
wrongly."""

import math
import re
import subprocess
import sys
from pathlib import Path

import device
import pytest
from deepseek_models import load_example, make_v32
from helpers import find_framework

pytestmark = pytest.mark.transformers

ROOT = Path(__file__).parents[2]
SMALL = ["--layers=2", "--heads=8", "--topk=48", "--prompts=4", "--longest=203", "--new-tokens=5"]
SMALL += ["--tokens-per-step=64", f"--device={device.NAME}"]
LIMITS = {"num_pages": 12, "max_num_seqs": 3, "max_num_batched_tokens": 100, "max_model_len": 150}


@pytest.fixture(scope="module")
def example():
    return load_example()


@pytest.fixture
def model():
    return make_v32()


@pytest.fixture
def runner(adapter, model):
    return adapter.ModelRunner(model, **LIMITS)


@pytest.fixture(scope="module")
def tokens(example):
    torch = find_framework("torch").module
    drawn = torch.randint(0, 64, (3, 150), generator=torch.Generator().manual_seed(1))
    return drawn.to(device.NAME)


def assert_close(example, got, want):
    comparison = example.common.compare(
        [got.float()], [want.float()], example.common.BOUNDS["bfloat16"]
    )
    assert comparison.within, comparison


# --- against eager -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_cache_dtype", "num_heads"), [("bfloat16", 8), ("fp8_ds_mla", 8), ("fp8_ds_mla", 32)]
)
def test_served_logits_are_within_the_bounds(example, kv_cache_dtype, num_heads):
    """On an FP8 cache 8 heads take path "mixed", and 32 heads "separate" (or "direct")."""
    options = example.parse([*SMALL, f"--heads={num_heads}"])
    model, prompts = example.make_model(options), example.common.make_prompts(options)
    greedy = example.common.continue_greedily(model, prompts, options.new_tokens)
    engine = example.Engine(model, options, kv_cache_dtype)
    num_pages = engine.runner.num_free_pages
    report = example.judge(model, engine, prompts, greedy)
    assert report.within, report
    assert report.against_eager.num_clear > 100
    # The bound is relative to the logits' standard deviation, about 1. A log likelihood is a logit
    # less their log-sum-exp, so it moves by two bounds at most.
    shift = math.log(report.perplexity / report.eager_perplexity)
    assert abs(shift) < 2 * example.common.BOUNDS[kv_cache_dtype]
    assert engine.num_chunks > 2 * len(prompts)
    assert 0 < engine.num_mixed_steps < engine.num_steps
    assert engine.runner.num_free_pages == num_pages
    assert report.num_greedy_same > report.num_greedy / 2  # texts may differ from a near-tie on


def test_bf16_models_too(example):
    """The roundings of sparse_mla and of Transformers have the same size, so that results differ by
    √2 of that size."""
    options = example.parse([*SMALL, "--dtype=bfloat16", "--prompts=2"])
    model, prompts = example.make_model(options), example.common.make_prompts(options)
    greedy = example.common.continue_greedily(model, prompts, options.new_tokens)
    example.common.cast(model, find_framework("torch").module.bfloat16)
    engine = example.Engine(model, options, "bfloat16")
    report = example.judge(model, engine, prompts, greedy)
    assert report.within, report
    assert report.against_eager.rms < 1.5 * report.eager_in_bf16.rms


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_our_indexer_in_place_of_the_model_s(example, adapter, model, tokens, dtype):
    """The bound is that of an FP8 cache, because the keys that quantisation exchanges have as
    little weight as those at the edge of the top-k. test_transformers_indexer.py judges the
    choice itself."""
    example.common.cast(model, getattr(find_framework("torch").module, dtype))
    runner = adapter.ModelRunner(model, **LIMITS, index_cache_dtype="fp8_index")
    got = [
        runner.step({"a": tokens[0, start:end]}, all_logits=True).float()
        for start, end in ((0, 70), (70, 71), (71, 72), (72, 150))
    ]
    want = example.run_eager(model, tokens[0])[0]
    comparison = example.common.compare(got, [want.float()], example.common.BOUNDS["fp8_ds_mla"])
    assert comparison.within, comparison


@pytest.mark.parametrize("fault", ["values", "keys", "rope"])
def test_the_comparison_sees_faults(example, runner, model, tokens, fault):
    """Eager attention runs with weights that were changed a little after the runner took them."""
    got = runner.step({"a": tokens[0, :100]}, all_logits=True)
    want = example.run_eager(model, tokens[0, :100])[0]
    assert_close(example, got, want)
    attention = model.model.layers[0].self_attn
    heads = attention.kv_b_proj.weight.view(8, 256, 512)
    if fault == "values":
        heads[:, 128:] *= 1.1
    elif fault == "keys":
        heads[:, :128] *= 1.1
    else:
        model.model.rotary_emb.inv_freq *= 1.02
    want = example.run_eager(model, tokens[0, :100])[0]
    assert not example.common.compare([got], [want], example.common.BOUNDS["bfloat16"]).within


def test_the_scale_of_yarn(example, adapter, tokens):
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    model = make_v32(rope_parameters=rope)
    runner = adapter.ModelRunner(model, **LIMITS)
    assert runner.config.softmax_scale == pytest.approx(192**-0.5 * 1.1386**2, rel=1e-3)
    got = runner.step({"a": tokens[0, :100]}, all_logits=True)
    assert_close(example, got, example.run_eager(model, tokens[0, :100])[0])


def test_the_documented_example_runs(adapter):
    text = (ROOT / "docs/transformers.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    scope = {}
    exec(code, scope)
    assert scope["runner"].num_free_pages == 32 - 2


def test_the_script_prints_its_table_and_verdict(example, capsys, monkeypatch):
    options = [*SMALL, "--layers=1", "--longest=60", "--prompts=2", "--new-tokens=2"]
    assert example.main(options) == 0
    text = capsys.readouterr().out
    assert len(re.findall(r"^ours, (?:bfloat16|fp8_ds_mla) .* within", text, re.MULTILINE)) == 4
    assert text.endswith("within the bounds\n")
    monkeypatch.setitem(example.common.BOUNDS, "fp8_ds_mla", 1e-4)
    assert example.main(options) == 1
    text = capsys.readouterr().out
    assert len(re.findall("MISSED", text)) == 2
    assert text.endswith("OUTSIDE THE BOUNDS\n")


# --- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("index_cache_dtype", ["auto", "fp8_index", "mxfp4_index"])
def test_chunks_and_company_do_not_matter(example, adapter, model, tokens, index_cache_dtype):
    alone, runner = (
        adapter.ModelRunner(model, **LIMITS, index_cache_dtype=index_cache_dtype) for _ in range(2)
    )
    want = alone.step({"a": tokens[0, :90]}, all_logits=True)
    got = [
        runner.step({"b": tokens[1, :40], "a": tokens[0, :33]}, all_logits=True)[40:],
        runner.step({"a": tokens[0, 33:34], "b": tokens[1, 40:41]}, all_logits=True)[:1],
        runner.step({"a": tokens[0, 34:80], "c": tokens[2, :46]}, all_logits=True)[:46],
        runner.step({"a": tokens[0, 80:90], "b": tokens[1, 41:42]}, all_logits=True)[:10],
    ]
    assert_close(example, find_framework("torch").module.cat(got), want)


def test_rows_come_in_the_order_of_the_mapping(runner, tokens):
    """Rows of logits have the mapping's order, also where a decode follows a prefill and must go
    first in the batch."""
    torch = find_framework("torch").module
    runner.step({"b": tokens[1, :20]})
    step = {"a": tokens[0, :30], "b": tokens[1, 20:21], "c": tokens[2, :10]}
    every = runner.step(step, all_logits=True)
    for name in "abc":
        runner.free(name)
    runner.step({"b": tokens[1, :20]})
    last = runner.step(step)
    assert every.shape == (41, 64)
    torch.testing.assert_close(last, every[[29, 30, 40]])  # the matrix product has another shape
    assert not last.requires_grad


def test_ids_may_be_lists_and_modes_of_autograd_do_not_matter(runner, tokens):
    torch = find_framework("torch").module
    want = runner.step({"a": tokens[0, :20]})
    ids = tokens[0, :20].tolist()
    assert torch.equal(runner.step({"b": ids}), want)
    with torch.inference_mode():
        assert torch.equal(runner.step({"c": ids}), want)
    runner.model.requires_grad_(True)
    runner.free("a")
    assert torch.equal(runner.step({"a": ids}), want)


def test_what_a_page_held_before_does_not_matter(runner, model, tokens):
    torch = find_framework("torch").module
    want = runner.step({"a": tokens[0, :90]}, all_logits=True)
    runner.free("a")
    embedding = model.model.embed_tokens.weight
    good = embedding.clone()
    embedding.fill_(float("nan"))
    for name in "abc":  # together 9 of the 12 pages
        runner.step({name: tokens[0, :100]})
        runner.step({name: tokens[0, 100:150]})
    assert runner.num_free_pages == LIMITS["num_pages"] - 9
    for name in "abc":
        runner.free(name)
    embedding.copy_(good)
    assert torch.equal(runner.step({"a": tokens[0, :90]}, all_logits=True), want)


def test_between_steps_the_model_is_as_it_was(example, runner, model, tokens):
    torch = find_framework("torch").module
    attention = model.model.layers[0].self_attn
    eager = example.run_eager(model, tokens[0])[0]
    want = runner.step({"a": tokens[0, :50]})
    runner.free("a")

    def fail(*unused):
        raise InterruptedError

    runner.step({"a": tokens[0, :20]})
    hook = model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(InterruptedError):
        runner.step({"a": tokens[0, 20:100], "b": tokens[1, :20]})
    hook.remove()
    assert model.model.layers[0].self_attn is attention
    assert torch.equal(example.run_eager(model, tokens[0])[0], eager)
    # What the failed step has cached does not count.
    runner.step({"a": tokens[0, 20:21]})
    assert_close(example, runner.step({"a": tokens[0, 21:50], "b": tokens[1, :20]})[:1], want)
    assert runner.num_free_pages == LIMITS["num_pages"] - 2 - 1


def test_pages_run_out_and_come_back(runner, tokens):
    runner.step({"a": tokens[0, :100]})
    for name in "abc":
        runner.step({name: tokens[1, :50]})
    assert runner.num_free_pages == 12 - 3 - 1 - 1
    names = iter("defghij")
    with pytest.raises(MemoryError, match=r"2 more pages needed, 1 free: free\(\) requests"):
        while True:
            runner.step({next(names): tokens[2, :80]})
    assert runner.num_free_pages == 1
    runner.step({"b": tokens[1, 50:60]})
    runner.free("b")
    assert runner.num_free_pages == 2
    runner.step({"late": tokens[2, :80]})
    assert runner.num_free_pages == 0


# --- wrong use -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_rewound_drafts_were_never_there(example, runner, tokens, count):
    """Request b is a without the drafts, which begin a page of their own. Where nothing of their
    step is left, the bits are the same."""
    torch = find_framework("torch").module
    for name in "ab":
        runner.step({name: tokens[0, :62]})
    runner.step({"a": tokens[1, :5]})
    kept = tokens[1, : 5 - count]
    if len(kept):
        runner.step({"b": kept})
    runner.rewind("a", count)
    assert runner.num_free_pages == LIMITS["num_pages"] - 2 * (1 if count > 2 else 2)
    for i in range(62, 70):
        got, want = (runner.step({name: tokens[0, i : i + 1]}) for name in "ab")
        assert_close(example, got, want)
        assert len(kept) or torch.equal(got, want)


def test_rewinds_that_are_refused(runner, tokens):
    runner.step({"a": tokens[0, :5]})
    for value, error in ((-1, ValueError), (6, ValueError), (1.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"ModelRunner\.rewind: `num_tokens` must be"):
            runner.rewind("a", value)
    with pytest.raises(KeyError, match="there is no request 'b'"):
        runner.rewind("b", 0)
    runner.rewind("a", 5)
    assert runner.num_free_pages == LIMITS["num_pages"]
    runner.step({"a": tokens[0, :5]})


def test_models_that_cannot_be_served(example, adapter, model):
    torch = find_framework("torch").module
    refused = "ModelRunner: `model` must be"
    with pytest.raises(TypeError, match=f"{refused} a DeepseekV32ForCausalLM, .*, got Linear"):
        adapter.ModelRunner(torch.nn.Linear(2, 2), **LIMITS)
    with pytest.raises(ValueError, match=f"{refused} in eval mode, .* call model.eval"):
        adapter.ModelRunner(make_v32().train(), **LIMITS)
    half = make_v32()
    half.lm_head.to("meta")
    with pytest.raises(ValueError, match=f"{refused} on one device, got one on .*, meta"):
        adapter.ModelRunner(half, **LIMITS)
    narrow = make_v32()
    narrow.config.kv_lora_rank = 256
    with pytest.raises(ValueError, match=r"`kv_lora_rank` must be .*512, got 256"):
        adapter.ModelRunner(narrow, **LIMITS)
    other = make_v32()
    other.config.index_head_dim = 64
    with pytest.raises(ValueError, match=r'must be "auto" unless index_head_dim is 128, got .* 64'):
        adapter.ModelRunner(other, **LIMITS, index_cache_dtype="fp8_index")


@pytest.mark.parametrize(
    ("limit", "value", "text"),
    [
        ("num_pages", 0, "`num_pages` must be at least 1, got 0"),
        ("max_model_len", 257, "`max_model_len` must be at most .*max_position_embeddings = 256"),
        ("kv_cache_dtype", "fp8", "`kv_cache_dtype` must be"),
        ("absorb", True, "`absorb` must be False for a DeepseekV32ForCausalLM, got True"),
        ("index_cache_dtype", "fp8", '"auto" or one of fp8_index, mxfp4_index, got .fp8.$'),
        ("path", "bf16x", "`path` must be"),
        ("block_size", 0, "`block_size` must be at least 1"),
    ],
)
def test_limits_that_make_no_sense(adapter, model, limit, value, text):
    with pytest.raises(ValueError, match=text):
        adapter.ModelRunner(model, **{**LIMITS, limit: value})


@pytest.mark.parametrize(
    ("tokens", "error", "text"),
    [
        ([[1, 2, 3]], TypeError, "must be a mapping of requests to their new token ids, got list"),
        ({}, ValueError, "must be 1 to max_num_seqs = 3 requests, got 0"),
        ({"a": []}, ValueError, r"'a' must have shape \[n\], n >= 1, without padding, got \[0\]"),
        (
            {"a": [[0, 1], [2, 3]]},
            ValueError,
            r"padding, got \[2, 2\]: requests of several",
        ),
        ({"a": [0.5]}, TypeError, "must be integers, got torch.float32"),
        ({"a": [True]}, TypeError, "must be integers, got torch.bool"),
        ({"a": [3, 64]}, ValueError, "must be 0 to 63, got 3 to 64"),
        ({"a": [-1]}, ValueError, "must be 0 to 63, got -1 to -1"),
        ({"a": [1] * 101}, ValueError, "max_num_batched_tokens = 100 tokens, got 101"),
        ({"a": [1] * 60, "b": [1] * 60}, ValueError, "= 100 tokens, got 120"),
        ({"a": [1] * 151}, ValueError, "within max_model_len = 150, got 151 tokens in all"),
        ({name: [1] for name in "abcd"}, ValueError, "max_num_seqs = 3 requests, got 4"),
    ],
)
def test_steps_that_are_refused(runner, tokens, error, text):
    with pytest.raises(error, match=f"ModelRunner.step: .*{text}"):
        runner.step(tokens)
    assert runner.num_free_pages == LIMITS["num_pages"]


def test_a_request_stays_within_max_model_len(runner, tokens):
    runner.step({"a": tokens[0, :100]})
    runner.step({"a": tokens[0, 100:150]})
    with pytest.raises(ValueError, match="'a' must leave it within max_model_len = 150, got 151"):
        runner.step({"a": [1]})


def test_training_and_unknown_requests(runner, model):
    with pytest.raises(KeyError, match="there is no request 'x'"):
        runner.free("x")
    model.train()
    with pytest.raises(ValueError, match="eval mode"):
        runner.step({"a": [1]})


def test_what_an_old_transformers_is_told():
    code = (
        "import sys; sys.modules['transformers.models.deepseek_v32.modeling_deepseek_v32'] = None; "
        "import sparse_mla.integrations.transformers"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: sparse_mla.integrations.transformers needs PyTorch, and" in done.stderr
    assert "transformers 5.12 or later" in done.stderr
