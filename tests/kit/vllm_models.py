"""Runs vllm_serve.py on the models of served_models.py."""

import os
from dataclasses import dataclass
from pathlib import Path

from served_models import LENGTHS, MAX_TOKENS, run_job

SCRIPT = Path(__file__).with_name("vllm_serve.py")


def bind_two() -> dict[str, str]:
    """What two of vLLM's processes on one node need: the CPUs of each."""
    cpus = sorted(os.sched_getaffinity(0))
    return {"VLLM_CPU_OMP_THREADS_BIND": f"{cpus[0]}|{cpus[-1]}"}


def check_cached(served: "Served", ranks: int = 1) -> None:
    """The second round found the whole pages of its prompts, but for the page of the last token. A
    page of 64 tokens of each rank is one."""
    first, second = ([row["cached"] for row in rows] for rows in served.rounds)
    assert first == [0] * len(LENGTHS)
    page = 64 * ranks
    assert second == [(n - 1) // page * page for n in LENGTHS]


def check_log(log: str, kind: str, kv_cache_dtype: str, ranks: int = 1) -> None:
    """Our classes have run, and no other attention."""
    is_e4m3 = kv_cache_dtype == "fp8" and kind != "v32"
    dense = "paged_attention" if is_e4m3 else "DenseMLA" if ranks == 1 else "mla_attention"
    who = "SparseMLA" if kind == "v32" else dense
    assert f"sparse_mla: {who} attends, with a cache of " in log
    assert ("sparse_mla: lightning_indexer chooses" in log) == (kind == "v32")
    assert log.count("sparse_mla: rotary_embedding runs in PyTorch") == 1
    assert "CPU_MLA backend" not in log


@dataclass
class Served:
    rounds: list
    modules: list
    accepted: int
    seconds: float
    log: str


def serve(folder: Path, model: Path, rounds, *, path=(), alone=False, env=None, **llm) -> Served:
    """Run vllm_serve.py. `path` is what PYTHONPATH has: our package with its entry point, or
    nothing. What vLLM finds out about a model's class is kept beside `folder`."""
    options = {
        "model": str(model),
        "max_model_len": 320,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 64 << 20,
        "max_num_batched_tokens": 64,
    }
    job = {"llm": options | llm, "rounds": rounds, "max_tokens": MAX_TOKENS, "alone": alone}
    environment = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the question for modules is a function
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "VLLM_CACHE_ROOT": str(folder.parent / "vllm"),
    }
    return Served(**run_job(SCRIPT, folder, job, environment | (env or {})))
