"""DeepSeek V4 of Transformers on paged caches: compared with its eager attention, with drafts and
without, and used wrongly. test_pages.py has the pages alone."""

import re

import device
import pytest
from deepseek_models import load_example, make_v4, run_token_by_token

pytestmark = [pytest.mark.transformers, pytest.mark.usefixtures("one_thread")]

PROMPTS = (1, 60, 130, 200, 333, 420)
NEW_TOKENS = 55
LIMITS = {"num_pages": 8, "max_num_seqs": 6, "max_num_batched_tokens": 96, "max_model_len": 480}
FP8 = {"kv_cache_dtype": "fp8_v4", "index_cache_dtype": "mxfp4_index"}
BF16 = {"kv_cache_dtype": "bfloat16"}
# The caches' options, and the bound: of eager's standard deviation.
FORMATS = {
    "bf16": (BF16, 0.03),
    "FP8": (FP8, 0.18),
    "separate, rows of two formats": (
        {"path": "separate", **BF16, "compressed_kv_cache_dtype": "fp8_v41"},
        0.18,
    ),
    "one scale for all": ({"kv_cache_dtype": "fp8_e4m3"}, 0.18),
}


@pytest.fixture(scope="module")
def torch(one_thread):
    return one_thread


@pytest.fixture(scope="module")
def example(torch):
    return load_example("deepseek_v4")


@pytest.fixture(scope="module")
def model(torch):
    return make_v4()


@pytest.fixture
def runner(adapter, model):
    return adapter.ModelRunner(model, **LIMITS, **BF16)


@pytest.fixture(scope="module")
def tokens(torch):
    drawn = torch.randint(0, 64, (6, 480), generator=torch.Generator().manual_seed(1))
    return drawn.to(device.NAME)


@pytest.fixture(scope="module")
def prompts(tokens):
    return [row[:length] for row, length in zip(tokens, PROMPTS, strict=True)]


@pytest.fixture(scope="module")
def greedy(example, model, prompts):
    """What Transformers generates by itself."""
    return example.common.continue_greedily(model, prompts, NEW_TOKENS)


def make_engine(example, model, prompts, drafts=0, **options):
    """The example's engine, with a runner of other limits."""
    arguments = [f"--drafts={drafts}", f"--new-tokens={NEW_TOKENS}", "--tokens-per-step=96"]
    arguments += [f"--prompts={len(prompts)}", f"--longest={max(map(len, prompts))}"]
    engine = example.Engine(model, example.parse(arguments), "bfloat16")
    limits = {**LIMITS, "max_num_seqs": len(prompts), "max_drafts": drafts}
    engine.runner = type(engine.runner)(model, **limits, **options)
    return engine


def compare(example, got, want, bound):
    return example.common.compare([x.float() for x in got], [x.float() for x in want], bound)


# --- against eager -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def eager_of_greedy(torch, example, model, prompts, greedy):
    """Eager's logits of every prompt with what it generated."""
    texts = [torch.cat(pair)[:-1] for pair in zip(prompts, greedy, strict=True)]
    return [example.run_eager(model, text) for text in texts]


@pytest.mark.parametrize("name", FORMATS)
def test_served_logits_are_within_the_bounds(example, model, prompts, name):
    options, bound = FORMATS[name]
    engine = make_engine(example, model, prompts, **options)
    served = engine.serve(prompts)
    assert engine.num_mixed_steps > 10
    assert engine.runner.num_free_pages == LIMITS["num_pages"]
    got = [row for request in served for row in request.logits]
    want = [example.run_eager(model, request.tokens) for request in served]
    comparison = compare(example, got, want, bound)
    assert comparison.largest <= bound, comparison
    # The top token, wherever eager's first two are further apart than two logits can move.
    assert compare(example, got, want, 2 * comparison.largest).within
    assert sum(len(request.generated) for request in served) == 330


def test_the_tokens_are_those_of_generate(torch, adapter, model, prompts, greedy, eager_of_greedy):
    """Each token after those that Transformers generated."""
    runner = adapter.ModelRunner(model, **LIMITS, **BF16)
    same = 0
    for name, (prompt, text) in enumerate(zip(prompts, greedy, strict=True)):
        whole = torch.cat([prompt, text])[:-1]
        rows = [runner.step({name: part}, all_logits=True) for part in whole.split(96)]
        same += int((torch.cat(rows)[len(prompt) - 1 :].argmax(dim=-1) == text).sum())
        runner.free(name)
    assert same >= 327


@pytest.mark.parametrize("cast_all", [False, True])
def test_a_bf16_model(torch, example, adapter, prompts, cast_all):
    """Roundings of the model's own are as large as ours. Norms, sinks and offsets may be fp32, and
    are then not copied."""
    model, text = make_v4(), prompts[3]
    want = example.run_eager(model, text)
    example.common.cast(model, torch.bfloat16)
    for weight in model.parameters() if cast_all else ():
        weight.data = weight.data.bfloat16()
    try:
        its_own = example.run_eager(model, text)
    except RuntimeError as error:  # 5.12.0 gives what its fp32 norms return to projections in bf16
        assert not cast_all
        pytest.skip(f"Transformers' own attention does not run: {error}")
    runner = adapter.ModelRunner(model, **LIMITS, **BF16)
    attention = runner._layers.attentions[1]
    given, weights = attention.model, attention.mla.weights
    assert weights.wo_a.data_ptr() == given.o_a_proj.weight.data_ptr()
    is_same = weights.ape.data_ptr() == given.compressor.position_bias.data_ptr()
    assert is_same is not cast_all
    got = [runner.step({"a": part}, all_logits=True) for part in text.split(70)]
    ours, theirs = compare(example, got, [want], 1), compare(example, [its_own], [want], 1)
    assert ours.rms < 1.5 * theirs.rms


def test_an_output_projection_in_e4m3(torch, example, adapter, tokens):
    """As Transformers loads it from a checkpoint: e4m3 with a scale per 128 by 128 weights."""
    model = make_v4(o_lora_rank=128)
    layers = [layer.self_attn for layer in model.model.layers]
    for layer in layers:
        weight = layer.o_a_proj.weight
        blocks = weight.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        scale = 2.0 ** torch.log2(blocks.abs().amax((1, 3)) / 448).ceil()
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        weight.copy_((codes.float() * scale[:, None, :, None]).flatten(0, 1).flatten(1))
        layer.codes, layer.scale = codes.flatten(0, 1).flatten(1), scale
    want = example.run_eager(model, tokens[0, :96])
    for layer in layers:
        layer.o_a_proj.weight = torch.nn.Parameter(layer.codes, requires_grad=False)
        layer.o_a_proj.weight_scale_inv = layer.scale
    runner = adapter.ModelRunner(model, **LIMITS, **BF16)
    assert runner._layers.attentions[0].mla.weights.wo_a.data_ptr() == layers[0].codes.data_ptr()
    got = runner.step({"a": tokens[0, :96]}, all_logits=True)
    assert compare(example, [got], [want], 0.18).largest <= 0.18  # attention's result is e4m3, too


def choose_ours(torch, monkeypatch, runner):
    """Lets the model's indexers choose what ours chose in a run of one request. Returns the
    numbers of rows that were exchanged, after eager's run."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4

    from sparse_mla.v4 import forward

    chosen, other = {}, []
    attentions = {id(its.mla): its.model for its in runner._layers.attentions}
    choose = forward.Step.choose
    choose_theirs = modeling_deepseek_v4.DeepseekV4Indexer.forward

    def keep(step, *arguments):
        choice = choose(step, *arguments)
        indexer = attentions[id(step.layer)].compressor.indexer
        chosen.setdefault(indexer, []).append(torch.as_tensor(choice["topk_indices"]).clone())
        return choice

    def take(indexer, *arguments):
        theirs = choose_theirs(indexer, *arguments)
        ours = torch.cat(chosen[indexer])[None, :, : theirs.shape[-1]].long()
        is_other = (ours[..., None] != theirs[..., None, :]).all(-1) & (ours >= 0)
        assert torch.equal((ours >= 0).sum(-1), (theirs >= 0).sum(-1))
        other.append(is_other.float().mean().item())
        return ours

    monkeypatch.setattr(forward.Step, "choose", keep)
    return other, lambda: monkeypatch.setattr(
        modeling_deepseek_v4.DeepseekV4Indexer, "forward", take
    )


@pytest.mark.parametrize("name", ["bf16", "FP8"])
def test_fewer_rows_than_there_are(torch, example, adapter, tokens, monkeypatch, name):
    """Rounding exchanges rows at the edge of a top-k, so eager attends to the rows that ours chose.
    test_transformers_indexer.py judges the choice itself."""
    options, bound = FORMATS[name]
    model = make_v4(index_topk=24)
    runner = adapter.ModelRunner(model, **LIMITS, **options)
    other, take_ours = choose_ours(torch, monkeypatch, runner)
    text = tokens[5, :420]
    got = [runner.step({"a": part}, all_logits=True) for part in text.split(96)]
    take_ours()
    comparison = compare(example, got, [example.run_eager(model, text)], bound)
    assert comparison.largest <= bound, comparison
    assert all(0 < share < 0.1 for share in other), other


@pytest.mark.parametrize(("name", "bound"), [("bf16", 0.04), ("FP8", 0.08)])
def test_routers_that_choose_by_score(example, adapter, tokens, name, bound):
    """A token whose scores are nearly equal may get other experts, so the bound is for the rms."""
    options, _ = FORMATS[name]
    model = make_v4(mlp_layer_types=["hash_moe", "moe", "moe", "moe"])
    runner = adapter.ModelRunner(model, **LIMITS, **options)
    text = tokens[5, :420]
    got = [runner.step({"a": part}, all_logits=True) for part in text.split(96)]
    assert compare(example, got, [example.run_eager(model, text)], bound).rms <= bound


# --- drafts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [1, 2, 3, 4])
def test_drafts_are_within_the_bounds(example, model, prompts, greedy, drafts):
    engine = make_engine(example, model, prompts, drafts, **BF16)
    engine.guesses = greedy
    served = engine.serve(prompts)
    assert engine.num_rejected > 30
    got = [row for request in served for row in request.logits]
    want = [example.run_eager(model, request.tokens) for request in served]
    assert compare(example, got, want, 0.03).within


@pytest.mark.parametrize("options", [BF16, FP8])
def test_drafts_give_the_bits_of_a_run_without_them(
    torch, adapter, model, tokens, monkeypatch, options
):
    run_token_by_token(monkeypatch, model)
    limits = {**LIMITS, "max_num_seqs": 2}
    plain, drafting = (
        adapter.ModelRunner(model, **limits, **options, max_drafts=most) for most in (0, 4)
    )
    generator = torch.Generator().manual_seed(2)
    first, last = 120, 170
    for runner in (plain, drafting):
        for part in (slice(0, 90), slice(90, first)):
            for name in (0, 1):
                runner.step({name: tokens[name, part]})
    want = [
        plain.step({name: tokens[name, i : i + 1] for name in (0, 1)}) for i in range(first, last)
    ]
    at = {0: first, 1: first}
    while at:
        step, num_right = {}, {}
        for name, begin in at.items():
            count, right = torch.randint(1, 6, (2,), generator=generator).tolist()
            step[name] = tokens[name, begin : begin + count].clone()
            step[name][right:] = (step[name][right:] + 1) % 64
            num_right[name] = min(right, count, last - begin)
        rows = drafting.step(step, all_logits=True).split([len(text) for text in step.values()])
        for name, its in zip(step, rows, strict=True):
            drafting.rewind(name, len(its) - num_right[name])
            for i in range(num_right[name]):
                assert torch.equal(its[i], want[at[name] - first + i][name])
            at[name] += num_right[name]
        at = {name: begin for name, begin in at.items() if begin < last}


def test_what_can_be_forgotten(torch, adapter, model, tokens):
    runner = adapter.ModelRunner(model, **LIMITS, **BF16, max_drafts=3)
    runner.step({"a": tokens[0, :2], "b": tokens[1, :20]})
    runner.rewind("a", 0)
    for name, value, text in (
        ("a", 3, "0 to the 2 tokens of request 'a', got 3"),
        ("b", 4, "0 to the 3 of max_drafts = 3 tokens that 'b' can still forget, got 4"),
        ("b", -1, "0 to the 3 of max_drafts = 3 tokens that 'b' can still forget, got -1"),
    ):
        with pytest.raises(ValueError, match=rf"^ModelRunner\.rewind: `num_tokens` must be {text}"):
            runner.rewind(name, value)
    with pytest.raises(TypeError, match="`num_tokens` must be an int, got float"):
        runner.rewind("a", 1.0)
    with pytest.raises(KeyError, match="there is no request 'c'"):
        runner.rewind("c", 1)
    runner.rewind("a", 2)  # all
    runner.rewind("b", 2)
    with pytest.raises(ValueError, match="0 to the 1 of max_drafts = 3 tokens"):
        runner.rewind("b", 2)
    runner.step({"b": tokens[1, 18:19], "a": tokens[0, :2]})
    with pytest.raises(ValueError, match="0 to the 2 of max_drafts = 3 tokens"):
        runner.rewind("b", 3)


def test_the_script_prints_its_table_and_verdict(example, capsys, monkeypatch):
    options = ["--heads=8", "--longest=60", "--prompts=2", "--new-tokens=8", "--drafts=2"]
    options += ["--tokens-per-step=40", f"--device={device.NAME}"]
    assert example.main(options) == 0
    text = capsys.readouterr().out
    assert len(re.findall(r"^ours, (?:bfloat16|fp8_v4) .* within", text, re.MULTILINE)) == 2
    found = re.search(r"with decodes; (\d+) of (\d+) drafts rejected\nwithin the bounds\n$", text)
    assert 0 < int(found[1]) < int(found[2])
    monkeypatch.setitem(example.Engine.bounds, "fp8_v4", 1e-4)
    assert example.main(options) == 1
    text = capsys.readouterr().out
    assert len(re.findall("MISSED", text)) == 1
    with pytest.raises(SystemExit):
        example.parse(["--prompts=8", "--tokens-per-step=16", "--drafts=2"])


# --- faults --------------------------------------------------------------------------------------


def shift_ape(attention):
    if attention.mla.weights.ape is not None:
        attention.mla.weights.ape = attention.mla.weights.ape.roll(1, 0)


def drop_sink(attention):
    attention.mla.weights.attn_sink = None


def take_other_table(attention):
    attention.mla.weights.rope_table = attention.other_table


@pytest.mark.parametrize("fault", ["none", "ape", "sink", "table", "window", "inverse", "page"])
def test_the_comparison_sees_faults(
    torch, example, adapter, model, tokens, eager_of_greedy, monkeypatch, fault
):
    from sparse_mla.integrations import _pages, _v4_layers
    from sparse_mla.v4 import forward

    if fault == "window":
        config = _v4_layers.v4.Config
        monkeypatch.setattr(
            _v4_layers.v4, "Config", lambda *a, window, **b: config(*a, window=window - 1, **b)
        )
    if fault == "page":
        init = _pages.Recent.__init__
        monkeypatch.setattr(
            _pages.Recent,
            "__init__",
            lambda self, size, rows, longest, kept, new: init(
                self, size, rows, longest, kept - size - 1, new
            ),
        )
    if fault == "inverse":
        turn = forward.ops.fused_inv_rope_fp8_quant

        def leave_out(o, positions, rope_table, **options):
            flat = torch.zeros_like(rope_table)
            flat[:, :32] = 1  # cosines
            return turn(o, positions, flat, **options)

        monkeypatch.setattr(forward.ops, "fused_inv_rope_fp8_quant", leave_out)
    runner = adapter.ModelRunner(model, **LIMITS, **BF16)
    attentions = runner._layers.attentions
    for i, attention in enumerate(attentions):
        attention.other_table = attentions[1 if i == 0 else 0].mla.weights.rope_table
        if fault in ("ape", "sink", "table"):
            {"ape": shift_ape, "sink": drop_sink, "table": take_other_table}[fault](attention)
    # Another request takes the pages that come back.
    got = []
    for i, part in enumerate(tokens[4, :333].split(48)):
        got.append(runner.step({"a": part}, all_logits=True))
        runner.step({"b": tokens[3, 48 * i : 48 * i + 48]})
    want = example.run_eager(model, tokens[4, :333])
    largest = compare(example, got, [want], 0.03).largest
    assert largest <= 0.03 if fault == "none" else largest > 3 * 0.03


# --- wrong use -----------------------------------------------------------------------------------


def with_config(**changes):
    def change(model):
        for name, value in changes.items():
            setattr(model.config, name, value)

    return change


def with_rates(**rates):
    return lambda model: model.config.compress_rates.update(rates)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (with_config(head_dim=256), "`model` must have head_dim 512, got 256"),
        (with_config(qk_rope_head_dim=32), "`model` must have qk_rope_head_dim 64, got 32"),
        (with_config(index_head_dim=64), "`model` must have index_head_dim 128, got 64"),
        (
            with_rates(compressed_sparse_attention=8),
            "`model` must have a compress rate of compressed_sparse_attention 4, got 8",
        ),
        (
            with_rates(heavily_compressed_attention=4),
            "`model` must have a compress rate of heavily_compressed_attention above 1 and not 4, "
            "got 4",
        ),
        (
            lambda model: setattr(model, "_tp_size", 2),
            "`model` must be whole on its device, got one of 2 tensor-parallel parts",
        ),
        (lambda model: model.lm_head.to("meta"), "`model` must be on one device, got one on"),
        (lambda model: model.train(), "`model` must be in eval mode"),
        (
            lambda model: model.model.rotary_emb.rope_type.update(compress="longrope"),
            "`model` must have a rope_type whose angles depend on a token's position alone",
        ),
    ],
)
def test_models_that_cannot_be_served(adapter, change, text):
    model = make_v4()
    change(model)
    with pytest.raises(ValueError, match=f"^ModelRunner: {text}"):
        adapter.ModelRunner(model, **LIMITS)


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        (
            "absorb",
            True,
            "ModelRunner: `absorb` must be False for a DeepseekV4ForCausalLM, got True",
        ),
        ("scheme", "block", "ModelRunner: `scheme` must be None without absorb=True, got 'block'"),
        (
            "prefill_workspace_tokens",
            64,
            "`prefill_workspace_tokens` must be None for a DeepseekV4ForCausalLM, got 64",
        ),
        ("max_drafts", -1, "ModelRunner: `max_drafts` must be an int from 0 on, got -1"),
        ("max_drafts", True, "ModelRunner: `max_drafts` must be an int from 0 on, got True"),
        ("max_model_len", 2561, "`max_model_len` must be at most .*max_position_embeddings = 2560"),
        ("num_pages", 0, "ModelRunner: `num_pages` must be at least 1, got 0"),
        ("block_size", 64, "`block_size` must be a multiple of the compress ratio 128, got 64"),
        ("kv_cache_dtype", "fp4_v41", "`kv_cache_dtype` must be one of .*, got 'fp4_v41'"),
        ("compressed_kv_cache_dtype", "fp8_index", "`compressed_kv_cache_dtype` must be one of"),
        ("index_cache_dtype", "bfloat16", "`index_cache_dtype` must be one of .*, got 'bfloat16'"),
        ("path", "mixed", "`path` must be None, 'direct' or 'separate', got 'mixed'"),
    ],
)
def test_options_that_are_refused(adapter, model, option, value, text):
    with pytest.raises(ValueError, match=text):
        adapter.ModelRunner(model, **{**LIMITS, option: value})


def test_what_other_models_do_not_take(adapter):
    from deepseek_models import make_v32

    model, limits = make_v32(), {**LIMITS, "max_model_len": 150}
    for name, value in (("compressed_kv_cache_dtype", "bfloat16"), ("streams", [0])):
        text = rf"ModelRunner: `{name}` must be .* for a DeepseekV32ForCausalLM, got "
        with pytest.raises(ValueError, match=text):
            adapter.ModelRunner(model, **limits, **{name: value})
    runner = adapter.ModelRunner(model, **limits, max_drafts=1, streams=[])
    runner.step({"a": [1, 2, 3, 4]})
    runner.rewind("a", 3)  # any number of tokens


@pytest.mark.parametrize(
    ("limits", "error", "text"),
    [
        ({"num_pages": 2}, MemoryError, r"1 more pages needed, 0 free: free\(\) requests"),
        (
            {"max_num_seqs": 2},
            ValueError,
            "`tokens` must leave max_num_seqs = 2 requests at most, ",
        ),
        ({"max_model_len": 100}, ValueError, "within max_model_len = 100, got 120 tokens in all"),
    ],
)
def test_steps_that_are_refused_change_nothing(
    example, adapter, model, tokens, limits, error, text
):
    runner = adapter.ModelRunner(model, **{**LIMITS, **limits}, **BF16)
    got = [runner.step({"a": tokens[0, :90]}, all_logits=True)]
    runner.step({"b": tokens[1, :20]})
    free = {name: its.free.copy() for name, its in runner._pages.recent.items()}
    new = {"c": tokens[2, :5], "a": tokens[0, 90:120]}
    if "max_num_seqs" in limits:
        new = {"c": tokens[2, :5]}
    with pytest.raises(error, match=f"ModelRunner.step: .*{text}"):
        runner.step(new)
    assert list(runner._pages.requests) == ["a", "b"]
    assert free == {name: its.free for name, its in runner._pages.recent.items()}
    got.append(runner.step({"a": tokens[0, 90:100]}, all_logits=True))
    want = example.run_eager(model, tokens[0, :100])
    assert compare(example, got, [want], 0.03).within


def test_a_failed_step_changes_nothing(torch, example, adapter, model, tokens):
    """Its tokens come again, beside a request that takes the pages that it had borrowed."""
    runner = adapter.ModelRunner(model, **{**LIMITS, "max_num_seqs": 2}, **BF16)
    got = [runner.step({"a": tokens[0, :90]}, all_logits=True)]
    free = {name: len(its.free) for name, its in runner._pages.recent.items()}

    def fail(*unused):
        raise InterruptedError

    hook = model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(InterruptedError):
        runner.step({"a": tokens[0, 90:100], "b": tokens[1, :80]})
    hook.remove()
    assert free == {name: len(its.free) for name, its in runner._pages.recent.items()}
    runner.step({"b": tokens[2, :80]})
    got.append(runner.step({"a": tokens[0, 90:170]}, all_logits=True))
    want = example.run_eager(model, tokens[0, :170])
    assert compare(example, got, [want], 0.03).within
