"""DeepSeek-V3 and V2 of Transformers on the paged cache: compared with their eager attention, and
used wrongly. test_transformers.py has what ModelRunner does for every model: pages, ids, limits."""

import re

import device
import pytest
from deepseek_models import load_example
from helpers import find_framework

import sparse_mla

pytestmark = [pytest.mark.transformers, pytest.mark.usefixtures("one_thread")]

LIMITS = {"num_pages": 12, "max_num_seqs": 3, "max_num_batched_tokens": 192, "max_model_len": 256}
SIZES = {"vocab_size": 500, "hidden_size": 256, "intermediate_size": 256}
SIZES |= {"moe_intermediate_size": 128}
# Options of the example's models: one difference each from DeepSeek-V3.
MODELS = {
    "a plain q_proj": ["--q-lora-rank=0"],
    "pairs of halves": ["--halves"],
    "YaRN": ["--yarn"],
    "40 heads": ["--heads=40"],
    "DeepSeek-V2": ["--model=deepseek_v2"],
}
# The chunks of each request's prompt. A request begins three steps after the one before it.
CHUNKS = ([1, 64, 37], [63, 2, 33, 25], [64, 17, 1])
NEW_TOKENS = 104


@pytest.fixture(scope="module")
def example():
    return load_example("deepseek_v3")


def make_model(example, *options, **sizes):
    options = example.parse(["--layers=2", "--heads=8", f"--device={device.NAME}", *options])
    return example.make_model(options, **SIZES | sizes)


@pytest.fixture
def model(example):
    return make_model(example)


@pytest.fixture(scope="module")
def tokens(example):
    torch = find_framework("torch").module
    drawn = torch.randint(0, 500, (3, 256), generator=torch.Generator().manual_seed(1))
    return drawn.to(device.NAME)


def compare(example, got, want, kv_cache_dtype="bfloat16"):
    bound = example.common.BOUNDS[kv_cache_dtype]
    return example.common.compare([x.float() for x in got], [x.float() for x in want], bound)


# --- against eager -------------------------------------------------------------------------------


def serve(example, runner, tokens):
    """Serves three requests at once, each with its prompt in CHUNKS, then NEW_TOKENS greedily.

    -> the requests as the example keeps them, and how many steps had chunks beside decodes
    """
    requests = [
        example.common.Request(row[: sum(lens)]) for row, lens in zip(tokens, CHUNKS, strict=True)
    ]
    num_mixed = num_steps = 0
    while any(len(request.generated) < NEW_TOKENS for request in requests):
        step = {}
        for name, request in enumerate(requests):
            its_step = num_steps - 3 * name
            if its_step >= 0 and len(request.generated) < NEW_TOKENS:
                budget = CHUNKS[name][its_step] if its_step < len(CHUNKS[name]) else 1
                step[name] = request.next_tokens(budget)
        logits = runner.step(step, all_logits=True)
        lens = [len(its) for its in step.values()]
        for name, rows in zip(step, logits.split(lens), strict=True):
            requests[name].advance(rows)
        num_mixed += min(lens) == 1 < max(lens)
        num_steps += 1
    return requests, num_mixed


@pytest.mark.parametrize("path", ["separate", "mixed"])
@pytest.mark.parametrize("name", MODELS)
def test_served_logits_are_within_the_bounds(example, adapter, tokens, name, path):
    model = make_model(example, *MODELS[name])
    options = {"path": path, "prefill_workspace_tokens": 256}
    for kv_cache_dtype in example.common.BOUNDS:
        runner = adapter.ModelRunner(model, **LIMITS, **options, kv_cache_dtype=kv_cache_dtype)
        requests, num_mixed = serve(example, runner, tokens)
        assert num_mixed >= 2
        borders = [len(r.tokens) // 64 - len(r.prompt) // 64 for r in requests]
        assert sum(len(request.generated) for request in requests) > 300
        assert sum(borders) >= 5
        got = [row for request in requests for row in request.logits]
        want = [example.run_eager(model, request.tokens) for request in requests]
        comparison = compare(example, got, want, kv_cache_dtype)
        assert comparison.within, comparison
        assert comparison.num_clear > 300


@pytest.fixture
def plans(monkeypatch):
    """The metadata of all steps, as they are planned."""
    seen = []
    builder = sparse_mla.dense.MetadataBuilder
    build = builder.build

    def keep(self, common):
        metadata = build(self, common)
        chunks = metadata.context_chunk_seq_tot or []
        seen.append((metadata.path, metadata.num_prefills, len(chunks), sum(chunks)))
        return metadata

    monkeypatch.setattr(builder, "build", keep)
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_both_paths_agree(example, adapter, tokens, plans, name):
    """Within the sum of their bounds, over a context of several chunks of 256 rows. On an FP8 cache
    they read other values of new tokens, each within its bound of eager attention's."""
    torch = find_framework("torch").module
    model = make_model(example, *MODELS[name])
    eager = [example.run_eager(model, row) for row in tokens]
    for kv_cache_dtype, bound in example.common.BOUNDS.items():
        results = {}
        for path in ("separate", "mixed"):
            options = {"path": path, "prefill_workspace_tokens": 256}
            runner = adapter.ModelRunner(model, **LIMITS, **options, kv_cache_dtype=kv_cache_dtype)
            rows, plans[:] = [[], [], []], []
            for start, end in ((0, 60), (60, 61), (61, 121), (121, 180), (180, 240), (240, 256)):
                step = {i: row[start:end] for i, row in enumerate(tokens)}
                got = runner.step(step, all_logits=True).split(end - start)
                for its, logits in zip(rows, got, strict=True):
                    its.append(logits.float())
            assert {plan[0] for plan in plans} == {path}
            if path == "separate":
                assert max(num_chunks for _, _, num_chunks, _ in plans) >= 3
                assert sum(total for *_, total in plans) == 3 * (61 + 121 + 180 + 240)
            results[path] = torch.cat([torch.cat(its) for its in rows])
            against = compare(example, [results[path]], eager, kv_cache_dtype)
            assert against.within, against
        std = torch.cat(eager).float().std()
        apart = ((results["separate"] - results["mixed"]).abs().max() / std).item()
        assert 0 < apart <= 2 * bound


@pytest.mark.parametrize(
    ("model_type", "fault"),
    [
        *(("deepseek_v3", fault) for fault in ("values", "keys", "angles", "pairs", "scale")),
        *(("deepseek_v2", fault) for fault in ("values", "keys", "angles", "scale")),
    ],
)
def test_the_comparison_sees_faults(example, adapter, tokens, model_type, fault):
    """Eager attention runs on a model that was changed a little after the runner took it."""
    model = make_model(example, f"--model={model_type}")
    runner = adapter.ModelRunner(model, **LIMITS)
    got = runner.step({"a": tokens[0, :150]}, all_logits=True)
    want = example.run_eager(model, tokens[0, :150])
    assert compare(example, [got], [want]).within
    attention = model.model.layers[0].self_attn
    heads = attention.kv_b_proj.weight.view(8, 256, 512)
    if fault == "values":
        heads[:, 128:] *= 1.1
    elif fault == "keys":
        heads[:, :128] *= 1.1
    elif fault == "angles":
        model.model.rotary_emb.inv_freq *= 1.02
    elif fault == "pairs":
        model.config.rope_interleave = False
    else:
        attention.scaling *= 1.1
    want = example.run_eager(model, tokens[0, :150])
    assert not compare(example, [got], [want]).within


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v2"])
def test_yarn_s_factors_are_the_model_s(example, adapter, tokens, model_type):
    """With unequal mscales YaRN multiplies cosines and sines, too."""
    rope = {**example.YARN, "mscale": 1.0, "mscale_all_dim": 0.5}
    model = make_model(example, f"--model={model_type}", rope_parameters=rope)
    runner = adapter.ModelRunner(model, **LIMITS)
    assert model.model.rotary_emb.attention_scaling == pytest.approx(1.1557, rel=1e-4)
    assert runner.config.softmax_scale == pytest.approx(192**-0.5 * 1.18444**2, rel=1e-4)
    got = runner.step({"a": tokens[0, :150]}, all_logits=True)
    comparison = compare(example, [got], [example.run_eager(model, tokens[0, :150])])
    assert comparison.within, comparison


def test_bf16_models_too(example, adapter, tokens):
    """The roundings of sparse_mla and of Transformers have the same size, so that results differ by
    √2 of that size."""
    torch = find_framework("torch").module
    model = make_model(example)
    exact = example.run_eager(model, tokens[0])
    example.common.cast(model, torch.bfloat16)
    eager = compare(example, [example.run_eager(model, tokens[0])], [exact])
    runner = adapter.ModelRunner(model, **LIMITS)
    got = [runner.step({"a": part}, all_logits=True) for part in tokens[0].split([100, 1, 155])]
    assert got[0].dtype == torch.bfloat16
    ours = compare(example, got, [exact])
    assert ours.rms < 1.5 * eager.rms, (ours, eager)


def test_any_attention_of_transformers_is_replaced(example, adapter, tokens):
    """Transformers makes other masks for its sdpa attention."""
    torch = find_framework("torch").module
    got = [
        adapter.ModelRunner(make_model(example, attn_implementation=name), **LIMITS).step(
            {"a": tokens[0, :100], "b": tokens[1, :1]}, all_logits=True
        )
        for name in ("eager", "sdpa")
    ]
    assert torch.equal(*got)


def test_between_steps_the_model_is_as_it_was(example, adapter, model, tokens):
    torch = find_framework("torch").module
    attentions = [layer.self_attn for layer in model.model.layers]
    eager = example.run_eager(model, tokens[0, :150])
    runner = adapter.ModelRunner(model, **LIMITS)
    runner.step({"a": tokens[0, :150]})
    assert [layer.self_attn for layer in model.model.layers] == attentions
    assert torch.equal(example.run_eager(model, tokens[0, :150]), eager)
    assert runner.num_free_pages == LIMITS["num_pages"] - 3
    runner.free("a")
    assert runner.num_free_pages == LIMITS["num_pages"]


def test_the_script_prints_its_table_and_verdict(example, capsys, monkeypatch):
    options = ["--layers=1", "--heads=8", "--longest=60", "--prompts=2", "--new-tokens=2"]
    options += ["--tokens-per-step=32", f"--device={device.NAME}"]
    assert example.main(options) == 0
    text = capsys.readouterr().out
    assert len(re.findall(r"^ours, (?:bfloat16|fp8_ds_mla) .* within", text, re.MULTILINE)) == 2
    assert "4 chunks of prompts in 4 steps, 1 of them with decodes" in text
    assert text.endswith("within the bounds\n")
    monkeypatch.setitem(example.common.BOUNDS, "fp8_ds_mla", 1e-4)
    assert example.main(options) == 1
    text = capsys.readouterr().out
    assert len(re.findall("MISSED", text)) == 1
    assert text.endswith("OUTSIDE THE BOUNDS\n")


def test_the_script_refuses_halves_of_deepseek_v2(example, capsys):
    with pytest.raises(SystemExit):
        example.parse(["--halves", "--model=deepseek_v2"])
    assert "--halves is for deepseek_v3" in capsys.readouterr().err


# --- absorbed weights ----------------------------------------------------------------------------

ABSORBED_BOUNDS = {None: 0.03, "block": 0.10, "token_channel": 0.10}


def compare_absorbed(example, got, want, scheme):
    return example.common.compare(
        [x.float() for x in got], [x.float() for x in want], ABSORBED_BOUNDS[scheme]
    )


@pytest.mark.parametrize("scheme", [None, "block"])
@pytest.mark.parametrize("name", ["DeepSeek-V3", *MODELS])
def test_absorbed_weights_serve_within_the_bounds(example, adapter, tokens, name, scheme):
    """On path "separate" with a small workspace: prefills attend unabsorbed, decodes absorbed."""
    model = make_model(example, *MODELS.get(name, []))
    options = {"path": "separate", "prefill_workspace_tokens": 256, "absorb": True}
    runner = adapter.ModelRunner(model, **LIMITS, **options, scheme=scheme)
    requests, num_mixed = serve(example, runner, tokens)
    assert num_mixed >= 2
    got = [row for request in requests for row in request.logits]
    want = [example.run_eager(model, request.tokens) for request in requests]
    comparison = compare_absorbed(example, got, want, scheme)
    assert comparison.within, comparison
    assert comparison.num_clear > (300 if scheme is None else 100)


@pytest.mark.parametrize("scheme", [None, "token_channel"])
@pytest.mark.parametrize("path", ["separate", "mixed", None])
def test_absorbed_weights_on_every_path(example, adapter, tokens, path, scheme):
    model = make_model(example)
    runner = adapter.ModelRunner(
        model, **LIMITS, path=path, absorb=True, scheme=scheme, kv_cache_dtype="fp8_ds_mla"
    )
    parts = tokens[0].split([100, 1, 150, 1, 4])
    got = [runner.step({"a": part}, all_logits=True) for part in parts]
    bound = example.common.BOUNDS["fp8_ds_mla"]
    want = example.run_eager(model, tokens[0])
    comparison = example.common.compare(got, [want], bound)
    assert comparison.within, comparison


def test_a_layer_with_a_bias_keeps_it(example, adapter, tokens):
    torch = find_framework("torch").module
    model = make_model(example, attention_bias=True)
    for layer in model.model.layers:
        layer.self_attn.o_proj.bias.normal_(generator=torch.Generator(device.NAME).manual_seed(3))
    runner = adapter.ModelRunner(model, **LIMITS, absorb=True)
    got = runner.step({"a": tokens[0, :150]}, all_logits=True)
    want = example.run_eager(model, tokens[0, :150])
    assert compare_absorbed(example, [got], [want], None).within
    for layer in model.model.layers:
        layer.self_attn.o_proj.bias.zero_()
    want = example.run_eager(model, tokens[0, :150])
    assert not compare_absorbed(example, [got], [want], None).within


def quantize_layers(torch, model, block_size):
    """q_b_proj, kv_b_proj and o_proj as Transformers loads e4m3; the model keeps what they mean."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    loaded = []
    for layer in model.model.layers:
        for name in ("q_b_proj", "kv_b_proj", "o_proj"):
            plain = getattr(layer.self_attn, name)
            rows, columns = plain.weight.shape
            m, n = block_size or (rows, columns)
            blocks = plain.weight.float().reshape(rows // m, m, columns // n, n)
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            values = (blocks / scale).to(torch.float8_e4m3fn)
            fp8 = FP8Linear(columns, rows, block_size=block_size, has_bias=False)
            fp8.weight = torch.nn.Parameter(values.reshape(rows, columns), requires_grad=False)
            given = scale[:, 0, :, 0] if block_size else scale.reshape(())
            fp8.weight_scale_inv = torch.nn.Parameter(given, requires_grad=False)
            plain.weight.copy_((values.float() * scale).reshape(rows, columns))
            loaded.append((layer.self_attn, name, plain, fp8.to(plain.weight.device)))
    return loaded


@pytest.mark.parametrize("block_size", [(128, 128), None])
def test_weights_that_are_loaded_as_e4m3(example, adapter, tokens, block_size):
    """They keep their scheme: one scale per block, or one per tensor."""
    torch = find_framework("torch").module
    model = make_model(example)
    loaded = quantize_layers(torch, model, block_size)
    want = example.run_eager(model, tokens[0])
    for attention, name, _, fp8 in loaded:
        setattr(attention, name, fp8)
    runner = adapter.ModelRunner(model, **LIMITS, absorb=True)
    schemes = {attention.mla.absorbed.scheme for attention in runner._layers.attentions}
    assert schemes == {"block" if block_size else "tensor"}
    got = [runner.step({"a": part}, all_logits=True) for part in tokens[0].split([100, 1, 155])]
    comparison = compare_absorbed(example, got, [want], "block")
    assert comparison.within, comparison


def test_a_mix_of_weights_is_absorbed_in_bf16(example, adapter, tokens):
    """An e4m3 model whose kv_b_proj is plain needs `requantize=False`, as the error says."""
    torch = find_framework("torch").module
    model = make_model(example)
    loaded = quantize_layers(torch, model, (128, 128))
    want = example.run_eager(model, tokens[0])
    for attention, name, _, fp8 in loaded:
        if name != "kv_b_proj":
            setattr(attention, name, fp8)
    with pytest.raises(ValueError, match="requantize=False"):
        adapter.ModelRunner(model, **LIMITS, absorb=True)
    runner = adapter.ModelRunner(model, **LIMITS, absorb=True, requantize=False)
    got = [runner.step({"a": part}, all_logits=True) for part in tokens[0].split([150, 1, 105])]
    comparison = compare_absorbed(example, got, [want], None)
    assert comparison.within, comparison


# --- wrong use -----------------------------------------------------------------------------------


def test_the_config_is_the_model_s(example, adapter):
    config = adapter.ModelRunner(make_model(example, "--halves"), **LIMITS).config
    assert isinstance(config, sparse_mla.dense.Config)
    assert (config.num_heads, config.interleaved, config.path) == (8, False, None)
    sizes = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
    assert (*sizes, config.v_head_dim) == (512, 128, 64, 128)


def test_models_that_cannot_be_served(example, adapter, model):
    torch = find_framework("torch").module
    *most, last = (f"a Deepseek{name}ForCausalLM" for name in ("V32", "V3", "V2", "V4"))
    kinds = f"{', '.join(most)} or {last}"
    for other in (torch.nn.Linear(2, 2), model.model):
        with pytest.raises(TypeError, match=f"`model` must be {kinds}, got {type(other).__name__}"):
            adapter.ModelRunner(other, **LIMITS)
    for size, given in (("kv_lora_rank", 256), ("qk_rope_head_dim", 32)):
        narrow = make_model(example, **{size: given})
        with pytest.raises(ValueError, match=f"`{size}` must be .*, got {given}"):
            adapter.ModelRunner(narrow, **LIMITS)
    model.model.rotary_emb.rope_type = "longrope"
    with pytest.raises(ValueError, match=r'a rope_type whose angles .* got "longrope"'):
        adapter.ModelRunner(model, **LIMITS)


@pytest.mark.parametrize(
    ("limit", "value", "text"),
    [
        ("index_cache_dtype", "fp8_index", '"auto" for a DeepseekV3ForCausalLM, which has no inde'),
        ("path", "direct", "`path` must be None or 'separate' or 'mixed', got 'direct'"),
        ("kv_cache_dtype", "fp8", "`kv_cache_dtype` must be"),
        ("scheme", "block", "`scheme` must be None without absorb=True, got 'block'"),
        ("requantize", False, "`requantize` must be True without absorb=True, got False"),
        ("max_model_len", 2561, "must be at most the model's max_position_embeddings = 2560"),
    ],
)
def test_limits_that_make_no_sense(adapter, model, limit, value, text):
    with pytest.raises(ValueError, match=text):
        adapter.ModelRunner(model, **{**LIMITS, limit: value})
