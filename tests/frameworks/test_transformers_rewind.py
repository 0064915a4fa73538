"""Drafts that were rejected, of DeepSeek-V3.2, V3 and V2 of Transformers: the bits of a run that
never had them. test_transformers_v4.py has those of V4."""

import pytest
from deepseek_models import load_example, make_v32, run_token_by_token
from helpers import find_framework

pytestmark = pytest.mark.transformers

LIMITS = {"num_pages": 12, "max_num_seqs": 2, "max_num_batched_tokens": 96, "max_model_len": 150}
FIRST, LAST = 90, 130
# With our indexer: the scores of the model's own have other bits beside other tokens.
V32 = {
    "V3.2": {"index_cache_dtype": "fp8_index"},
    "V3.2, FP8": {"kv_cache_dtype": "fp8_ds_mla", "index_cache_dtype": "mxfp4_index"},
}
DENSE = {
    "V3": ([], {}),
    "V3, FP8": ([], {"kv_cache_dtype": "fp8_ds_mla"}),
    "V3, pages of one token": (["--q-lora-rank=0"], {"block_size": 1, "num_pages": 150}),
    "V2, pages of 16": (["--model=deepseek_v2"], {"block_size": 16, "num_pages": 30}),
}


def make(name):
    """A model, and the options of its caches."""
    if name in V32:
        return make_v32(), V32[name]
    arguments, options = DENSE[name]
    example = load_example("deepseek_v3")
    sizes = {"vocab_size": 64, "hidden_size": 96, "intermediate_size": 64}
    sizes |= {"moe_intermediate_size": 64}
    parsed = example.parse(["--layers=2", "--heads=8", *arguments])
    return example.make_model(parsed, **sizes), options


@pytest.mark.parametrize("max_drafts", [0, 3])
@pytest.mark.parametrize("name", [*V32, *DENSE])
def test_drafts_give_the_bits_of_a_run_without_them(monkeypatch, name, max_drafts):
    """With `max_drafts` a step of so many drafts is a decode, without it a prefill."""
    load_example()
    from sparse_mla.integrations.transformers import ModelRunner

    torch = find_framework("torch").module
    model, options = make(name)
    run_token_by_token(monkeypatch, model)
    plain, drafting = (
        ModelRunner(model, **{**LIMITS, **options}, max_drafts=max_drafts) for _ in range(2)
    )
    text = torch.randint(0, 64, (150,), generator=torch.Generator().manual_seed(0))
    for runner in (plain, drafting):
        runner.step({"a": text[:FIRST]})
    want = [plain.step({"a": text[i : i + 1]})[0] for i in range(FIRST, LAST)]
    at, num_right = FIRST, 0
    while at < LAST:
        num_right = min(num_right % 4 + 1, LAST - at)  # 1, 2, 3, 4, 1, ...
        step = text[at : at + 4].clone()
        step[num_right:] = (step[num_right:] + 1) % 64
        rows = drafting.step({"a": step}, all_logits=True)
        drafting.rewind("a", 4 - num_right)
        for i in range(num_right):
            assert torch.equal(rows[i], want[at - FIRST + i])
        at += num_right
    assert drafting.num_free_pages == plain.num_free_pages
