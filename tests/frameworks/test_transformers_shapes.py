"""DeepSeek-V3, V2 and V3.2 of Transformers with other sizes than the example's, on pages of 1, 16
and 64 tokens: compared with eager attention."""

from __future__ import annotations

import device
import pytest
from deepseek_models import load_example, make_v32
from helpers import find_framework

pytestmark = [pytest.mark.transformers, pytest.mark.usefixtures("one_thread")]

SIZES = {
    "hidden size 320": {"hidden_size": 320},
    "3 heads": {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 192},
    "13 heads": {"num_attention_heads": 13, "num_key_value_heads": 13, "hidden_size": 208},
    "tied embeddings": {"tie_word_embeddings": True},
}
OPTIONS = {
    "deepseek_v3": [[], ["--q-lora-rank=0"], ["--halves", "--yarn"]],
    "deepseek_v2": [[], ["--q-lora-rank=0", "--yarn"]],
}
PAGES = (1, 16, 64)
LENGTH, CHUNK = 130, 50
DENSE = {"vocab_size": 500, "hidden_size": 256, "intermediate_size": 256}
DENSE |= {"moe_intermediate_size": 128}


def cases():
    """Each model with each of its options and sizes; the pages take turns. The weights that V3.2's
    example draws need at least four heads."""
    for name, lists in {**OPTIONS, "deepseek_v32": [[]]}.items():
        for options in lists:
            for number, size in enumerate(SIZES):
                if name == "deepseek_v32" and size == "3 heads":
                    continue
                pages = PAGES if not options else PAGES[number % 3 :][:1]
                yield from ((name, options, size, page) for page in pages)


def label(case) -> str:
    name, options, size, page = case
    return "-".join([name, *options, size, str(page)])


def make_model(name: str, options: list[str], size: str):
    """-> the model, and its example"""
    if name == "deepseek_v32":
        # Roundings decide what the indexer chooses where embeddings are tied, so it chooses all.
        sizes = {"index_topk": 256} if size == "tied embeddings" else {}
        return make_v32(**SIZES[size] | sizes), load_example()
    example = load_example("deepseek_v3")
    arguments = [f"--model={name}", "--layers=2", "--heads=8", f"--device={device.NAME}"]
    return example.make_model(example.parse([*arguments, *options]), **DENSE | SIZES[size]), example


def run_eager(example, model, tokens):
    """The logits of each request; V3.2's example has the keys that were chosen beside them."""
    found = (example.run_eager(model, row) for row in tokens)
    return [x[0] if isinstance(x, tuple) else x for x in found]


def serve(runner, tokens):
    """Two requests, the second of which begins with chunks beside decodes of the first.

    -> logits of all tokens, request by request
    """
    rows = [[], []]
    at = [0, 0]
    while min(at) < LENGTH:
        lens = [1 if at[0] > 2 * CHUNK else CHUNK, CHUNK if at[0] > CHUNK else 0]
        step = {
            name: tokens[name, at[name] : at[name] + length]
            for name, length in enumerate(lens)
            if length and at[name] < LENGTH
        }
        logits = runner.step(step, all_logits=True)
        for name, part in zip(step, logits.split([len(x) for x in step.values()]), strict=True):
            rows[name].append(part.float())
            at[name] += len(part)
    torch = find_framework("torch").module
    return [torch.cat(parts) for parts in rows]


@pytest.mark.parametrize("case", list(cases()), ids=label)
def test_served_logits_are_within_the_bounds(case):
    """Tied embeddings make logits of another kind: there eager's own bf16 is the measure."""
    name, options, size, page = case
    from sparse_mla.integrations.transformers import ModelRunner

    torch = find_framework("torch").module
    model, example = make_model(name, options, size)
    vocabulary = model.config.vocab_size
    drawn = torch.randint(0, vocabulary, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    tokens = drawn.to(device.NAME)
    want = run_eager(example, model, tokens)
    bounds = example.common.BOUNDS
    if size == "tied embeddings":
        example.common.cast(model, torch.bfloat16, keeps_fp32=False)
        its_own = run_eager(example, model, tokens)
        example.common.cast(model, torch.float32)
        largest = example.common.compare(its_own, want, 1.0).largest
        bounds = {kind: (0.5, 4)[kind != "bfloat16"] * largest for kind in bounds}
    limits = {"num_pages": 2 * -(-LENGTH // page), "block_size": page, "max_num_seqs": 2}
    limits |= {"max_num_batched_tokens": 2 * CHUNK, "max_model_len": LENGTH}
    for kind, bound in bounds.items():
        runner = ModelRunner(model, **limits, kv_cache_dtype=kind)
        comparison = example.common.compare(serve(runner, tokens), want, bound)
        assert comparison.within, comparison
