"""Small DeepSeek models that engines serve, and what Transformers' eager attention says in fp32."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

VOCABULARY = 512
MAX_TOKENS = 48
LENGTHS = (1, 7, 33, 64, 65, 100, 150, 200)  # 8 prompts, 384 tokens to generate

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 2,  # no experts: which of them eager takes is a matter of one bit
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
}
KINDS = {
    "v32": ("DeepseekV32", {"index_n_heads": 8, "index_head_dim": 128, "index_topk": 512}),
    "v3": ("DeepseekV3", {}),
    "v2": ("DeepseekV2", {"q_lora_rank": None}),  # as V2-Lite
}


def write_model(folder: Path, kind: str, most_bytes: int = 8 << 20, **changes) -> Path:
    """A checkpoint of random weights in bf16, whose logits differ clearly."""
    name, sizes = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**SIZES | sizes | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.normal_(0, 1.0 if "embed" in name else weight.shape[-1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight *= 0.5  # what a layer adds is less than what is there, as in trained models
    model.to(torch.bfloat16).save_pretrained(folder)
    assert sum(file.stat().st_size for file in folder.iterdir()) <= most_bytes
    return folder


def make_prompts(seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, n).tolist() for n in LENGTHS]


@dataclass
class Agreement:
    """How far served tokens are from eager's: errors of logprobs in deviations of the logits, and
    the numbers of tokens that are eager's first choice, that clearly should be, and of all."""

    worst: float
    equal: int
    clear_and_wrong: int
    count: int


def compare(model, prompts, answers, bound: float, keys=None) -> Agreement:
    """Ask eager about each served token, given those before it. A token is clear where eager's two
    best logits are further apart than two errors of `bound`."""
    worst, equal, wrong, count = 0.0, 0, 0, 0
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens = prompt + answer["tokens"]
        with torch.no_grad(), chosen_keys(model, keys and keys[row]):
            logits = model(torch.tensor([tokens[:-1]])).logits[0, len(prompt) - 1 :].float()
        logprobs = logits.log_softmax(-1)
        deviations = logits.std(-1)
        for at, token in enumerate(answer["tokens"]):
            best = answer["logprobs"][at]
            errors = [abs(logprobs[at, int(t)].item() - value) for t, value in best.items()]
            worst = max(worst, max(errors) / deviations[at].item())
            two = logits[at].topk(2).values
            is_equal = logits[at].argmax().item() == token
            equal += is_equal
            wrong += not is_equal and (two[0] - two[1]).item() > 2 * bound * deviations[at].item()
            count += 1
    return Agreement(worst, equal, wrong, count)


def check(model, prompts, served, bound: float, keys=None) -> None:
    """The first round is eager's where that is clear, and so are later rounds the first."""
    first = served.rounds[0]
    found = compare(model, prompts, first, bound, keys)
    print(found)
    assert found.count == 8 * MAX_TOKENS
    assert found.worst <= bound
    assert found.clear_and_wrong == 0
    assert found.equal >= 370
    for later in served.rounds[1:]:
        check_same(model, prompts, first, later, bound)


def check_same(model, prompts, first, later, bound: float) -> None:
    """Two answers have the same tokens, or begin to differ where the two tokens are a near-tie of
    eager's: an engine's products round by the number of rows, and so by when requests come."""
    equal = 0
    for prompt, one, other in zip(prompts, first, later, strict=True):
        pairs = enumerate(zip(one["tokens"], other["tokens"], strict=True))
        split = next((at for at, (a, b) in pairs if a != b), None)
        equal += split is None
        if split is not None:
            with torch.no_grad():
                given = torch.tensor([prompt + one["tokens"][:split]])
                logits = model(given).logits[0, -1].float()
            a, b = logits[one["tokens"][split]], logits[other["tokens"][split]]
            assert (a - b).abs() <= 2 * bound * logits.std(), (len(prompt), split)
    print(f"{equal} of {len(prompts)} answers are the same, the others up to a near-tie")
    assert equal >= len(prompts) // 2


@contextmanager
def chosen_keys(model, keys):
    """Eager attends to these positions: per layer [tokens, K], -1 = none."""
    with pytest.MonkeyPatch.context() as patch:
        for layer, given in zip(model.model.layers, keys or (), strict=False):
            rows = torch.tensor(given).long()
            rows = torch.where(rows < 0, rows[:, :1], rows)[None]  # one that is there anyway
            patch.setattr(layer.self_attn.indexer, "forward", lambda *_, rows=rows, **__: rows)
        yield


def load_eager(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def run_job(script: Path, folder: Path, job: dict, environment: dict) -> dict:
    """What a script that serves answers to a job, and `log`, what it printed."""
    wanted, answer = folder / "job.json", folder / "answer.json"
    wanted.write_text(json.dumps(job))
    answer.unlink(missing_ok=True)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", script, wanted, answer],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        cwd=folder,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
    )
    if run.returncode or not answer.exists():
        raise RuntimeError(run.stdout)
    return json.loads(answer.read_text()) | {"log": run.stdout}
