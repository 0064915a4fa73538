"""examples/speculative.py: the tokens of an engine with drafts are those without them, whatever is
drafted; graphs change nothing. Without arguments the example generates over 2000 tokens; here it is
short."""

from collections import Counter

import device
import pytest
from deepseek_models import load_example

pytestmark = [pytest.mark.transformers, pytest.mark.usefixtures("one_thread")]
SHORT = ["--requests=5", "--new-tokens=24", "--longest-prompt=40", f"--device={device.NAME}"]


@pytest.fixture(scope="module")
def example():
    return load_example("speculative")


def serve(example, *options: str):
    """-> the engine, the tokens of its requests, and how many of them another one nearly equals."""
    options = example.parse([*SHORT, *options])
    shared, prompts = example.make_prompts(options)
    engine = example.Engine(options, shared, len(shared) + options.longest_prompt)
    requests = engine.serve(prompts)
    num_near, num_wrong = example.judge(engine, requests)
    assert num_wrong == 0 and num_near <= 4
    assert all(len(r.tokens) >= options.new_tokens for r in requests)
    assert engine.pages.requests.keys() == {"shared"} and len(engine.free_rows) == 8
    return engine, [r.tokens[: options.new_tokens] for r in requests], num_near


CASES = [
    ("llama", 1, "bfloat16"),
    ("llama", 4, "fp8"),
    ("mistral", 1, "bfloat16"),
    ("mistral", 2, "bfloat16"),
    ("llama4", 1, "bfloat16"),
    ("deepseek_v3", 1, "fp8"),
    ("deepseek_v3", 3, "bfloat16"),
]


@pytest.mark.parametrize("model, topk, cache", CASES)
def test_tokens_are_those_without_drafts(example, model, topk, cache):
    """Of each kind of layer and cache, as eager builds and as captures."""
    options = [f"--model={model}", f"--topk={topk}", f"--kv-cache-dtype={cache}"]
    engine, tokens, num_near = serve(example, *options)
    assert len(+engine.accepted) > 1  # some drafts were right, and some wrong
    captured, others, more = serve(example, *options, "--graph")
    # The sizes of products differ, and captures have no shared prefix: the last bits may, too.
    assert sum(x != y for x, y in zip(tokens, others, strict=True)) <= num_near + more
    assert all(phase.captured for name, phase in captured.phases.items() if name != "decode")


@pytest.mark.parametrize("topk", [1, 2])
def test_drafts_of_the_model_itself_are_accepted(example, topk):
    """All of them, unless two tokens are nearly equally good."""
    engine, _, _ = serve(example, "--drafts=all", f"--topk={topk}")
    assert engine.accepted[3] >= 0.95 * sum(engine.accepted.values())


@pytest.mark.parametrize("topk", [1, 2])
def test_wrong_drafts_are_not_accepted(example, topk):
    engine, _, _ = serve(example, "--drafts=none", f"--topk={topk}")
    assert +engine.accepted == Counter({0: engine.accepted[0]})


def test_no_drafts(example):
    """Decodes, padded to the captured sizes."""
    _, tokens, num_near = serve(example, "--drafts=off")
    _, others, more = serve(example, "--drafts=off", "--graph")
    assert sum(x != y for x, y in zip(tokens, others, strict=True)) <= num_near + more


def test_its_command(example, capsys):
    assert example.main([*SHORT, "--requests=2"]) == 0
    printed = capsys.readouterr().out
    assert "wrong 0" in printed and "drafts accepted" in printed


def test_trees_are_not_of_local_layers(example, capsys):
    with pytest.raises(SystemExit):
        example.parse(["--model=llama4", "--topk=2"])
    assert "local layers have no trees" in capsys.readouterr().err
