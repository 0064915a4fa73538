"""Serves a model by vLLM, as a program of its own, so that vLLM starts its usual processes.

    python vllm_serve.py JOB ANSWER     both are files of JSON

A job has `llm`, the arguments of vLLM's LLM, and `rounds`, lists of prompts that are served one
after the other: all prompts of a round together, or one by one with `alone`. The answer has each
round's tokens, their best logprobs and the number of cached tokens, how many draft tokens were
accepted, the modules of this package in vLLM's processes, and seconds.
"""

import json
import sys
import time
from pathlib import Path


def own_modules(worker=None):
    """Names of this package's modules, in the process that runs this."""
    import sys

    return sorted(name for name in sys.modules if name.startswith("sparse_mla"))


def serve(llm, prompts, max_tokens, logprobs):
    from vllm import SamplingParams

    wanted = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs, detokenize=False
    )
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [
        {
            "tokens": list(answer.outputs[0].token_ids),
            "logprobs": [
                {token: best.logprob for token, best in step.items()}
                for step in answer.outputs[0].logprobs
            ],
            "cached": answer.num_cached_tokens,
        }
        for answer in llm.generate(given, wanted, use_tqdm=False)
    ]


def main(job, answer):
    from vllm import LLM

    began = time.monotonic()
    options = {"skip_tokenizer_init": True, "seed": 0, "disable_log_stats": False}
    llm = LLM(**options | job["llm"])
    rounds = []
    for prompts in job["rounds"]:
        groups = [[prompt] for prompt in prompts] if job.get("alone") else [prompts]
        rounds.append([row for group in groups for row in serve(llm, group, job["max_tokens"], 20)])
    modules = [own_modules(), *llm.collective_rpc(own_modules)]
    accepted = sum(
        metric.value
        for metric in llm.get_metrics()
        if metric.name == "vllm:spec_decode_num_accepted_tokens"
    )
    seconds = time.monotonic() - began
    said = {"rounds": rounds, "modules": modules, "accepted": accepted, "seconds": seconds}
    answer.write_text(json.dumps(said))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
