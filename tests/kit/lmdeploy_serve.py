"""Serves a model by lmdeploy's PyTorch engine, as a program of its own.

    python lmdeploy_serve.py JOB ANSWER     both are files of JSON

A job has `model`, `engine`, the arguments of PytorchEngineConfig, and `rounds`, lists of prompts
that are served one after the other: all prompts of a round together, or one by one with `alone`.
Each token comes with 20 logprobs, or with `logprobs` of them; null = none. `legacy` adds
`use_legacy=True` to calls of FlashMLA: the wheel sgl-flash-mla has the kernels of Hopper behind it.
`keys` = K asks which K keys each layer attends to, of prompts served alone. The answer has each
round's tokens, their best logprobs and the seconds at which they came, where `flash_mla` was found,
and how often each of its functions was called from Python.
"""

import asyncio
import collections
import functools
import json
import sys
import time
from pathlib import Path

import numpy as np

FUNCTIONS = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")


def count_calls(is_legacy):
    """Wraps FlashMLA's functions before lmdeploy takes them."""
    import flash_mla

    calls = collections.Counter()
    options = {"use_legacy": True} if is_legacy else {}

    def wrap(name, function):
        @functools.wraps(function)
        def counted(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs, **options)

        return counted

    for name in FUNCTIONS:
        setattr(flash_mla, name, wrap(name, getattr(flash_mla, name)))
    return calls, flash_mla.__file__


def record_keys():
    """Wraps sparse attention: lists of (layer, first position, chosen positions or None)."""
    from lmdeploy.pytorch.backends.cuda.attention import sparse_mla

    plain, kept = sparse_mla.FlashMLASparseImpl.forward, []

    def forward(self, query, *args, **kwargs):
        metadata = kwargs.get("attn_metadata") or args[4]
        length = int(metadata.kv_seqlens.sum())  # one request
        chosen = kwargs.get("nsa_indices")
        first = length - query.shape[0]
        kept.append((id(self), first, query.shape[0], chosen if chosen is None else chosen.cpu()))
        return plain(self, query, *args, **kwargs)

    sparse_mla.FlashMLASparseImpl.forward = forward
    return kept


def keys_of(kept, num_tokens, top_k):
    """Per layer the positions that each token attends to, [num_tokens, top_k] with -1 = none."""
    layers = list(dict.fromkeys(layer for layer, *_ in kept))
    room = max(first + count for _, first, count, _ in kept)  # the engine may be a step ahead
    keys = np.full((len(layers), room, top_k), -1)
    for layer, first, count, chosen in kept:
        for row in range(count):
            at = keys[layers.index(layer), first + row]
            if chosen is None:  # all of them
                at[: first + row + 1] = np.arange(first + row + 1)
            else:
                at[:] = chosen[row]
    kept.clear()
    return keys[:, :num_tokens].tolist()


async def serve_one(engine, session, prompt, max_tokens, logprobs):
    from lmdeploy import GenerationConfig

    greedy = {"top_k": 1, "ignore_eos": True}
    wanted = GenerationConfig(max_new_tokens=max_tokens, logprobs=logprobs, **greedy)
    answer = {"tokens": [], "logprobs": [], "seconds": []}
    instance = engine.create_instance()
    async for output in instance.async_stream_infer(session, prompt, gen_config=wanted):
        answer["tokens"] += output.token_ids
        answer["logprobs"] += output.logprobs or []
        answer["seconds"] += [time.monotonic()] * len(output.token_ids)
        if output.status.name not in ("SUCCESS", "FINISH"):
            raise RuntimeError(f"session {session}: {output.status}")
    return answer


async def serve(job):
    from lmdeploy import PytorchEngineConfig
    from lmdeploy.pytorch.engine import Engine

    calls, where = count_calls(job.get("legacy"))
    kept = record_keys() if job.get("keys") else []
    began = time.monotonic()
    engine = Engine.from_pretrained(job["model"], PytorchEngineConfig(**job["engine"]))
    engine.start_loop()
    rounds, keys, sessions = [], [], iter(range(1, 1 << 20))
    for prompts in job["rounds"]:
        kept.clear()  # what the engine asked of itself
        wanted = job["max_tokens"], job.get("logprobs", 20)
        tasks = [serve_one(engine, next(sessions), prompt, *wanted) for prompt in prompts]
        if job.get("alone"):
            answers = []
            for prompt, task in zip(prompts, tasks, strict=True):
                answers.append(await task)
                if kept:
                    num_tokens = len(prompt) + job["max_tokens"] - 1
                    keys.append(keys_of(kept, num_tokens, job["keys"]))
        else:
            answers = await asyncio.gather(*tasks)
        rounds.append(answers)
    seconds = time.monotonic() - began
    engine.close()
    said = {"rounds": rounds, "calls": calls, "flash_mla": where, "seconds": seconds}
    return said | ({"keys": keys} if keys else {})


if __name__ == "__main__":
    answer = asyncio.run(serve(json.loads(Path(sys.argv[1]).read_text())))
    Path(sys.argv[2]).write_text(json.dumps(answer))
