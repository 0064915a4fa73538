"""Runs lmdeploy_serve.py on the models of served_models.py."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import served_models as models
import tokenizers
import transformers

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("lmdeploy_serve.py")
FP8 = 16  # lmdeploy's QuantPolicy: rows of 656 bytes, for models with an indexer


def write_model(folder: Path, kind: str, **changes) -> Path:
    """A checkpoint with a tokenizer, which lmdeploy insists on."""
    models.write_model(folder, kind, **changes)
    words = {f"w{token}": token for token in range(models.VOCABULARY)}
    model = tokenizers.models.WordLevel(words, unk_token="w0")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), eos_token="w1"
    ).save_pretrained(folder)
    return folder


@dataclass
class Served:
    rounds: list
    calls: dict
    flash_mla: str
    seconds: float
    log: str
    keys: list = field(default_factory=list)


def serve(folder: Path, model: Path, rounds, *, kv_cache_dtype, is_ours=True, **options) -> Served:
    """Serve in a process whose `flash_mla` is the shim's, or else the one that is installed."""
    job = {"model": str(model), "rounds": rounds, "max_tokens": models.MAX_TOKENS}
    own = {"alone", "keys", "max_tokens", "logprobs"} & options.keys()
    job |= {name: options.pop(name) for name in own}
    engine = {
        "dtype": "bfloat16",
        "session_len": 320,
        "max_batch_size": 8,
        "num_gpu_blocks": 64,
        "max_prefill_token_num": 64,
        "enable_prefix_caching": True,
        "quant_policy": FP8 if kv_cache_dtype == "fp8" else 0,
        "logprobs_mode": "raw_logprobs",
    }
    job |= {"engine": engine | options, "legacy": not is_ours}
    shim = [ROOT / "shim" / "sparse_mla_flash_mla"] if is_ours else []
    path = [*map(str, [ROOT, *shim]), os.environ.get("PYTHONPATH", "")]
    served = Served(**models.run_job(SCRIPT, folder, job, {"PYTHONPATH": os.pathsep.join(path)}))
    assert ("shim" in served.flash_mla) == is_ours
    return served
