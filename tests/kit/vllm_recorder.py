"""A plugin of vLLM for tests: it writes the keys that the indexer chose to the file SMLA_RECORD."""

import os

import numpy as np


def register():
    import sparse_mla

    plain = sparse_mla.lightning_indexer

    def recorded(q, weights, k_cache, context_lens, **options):
        out = plain(q, weights, k_cache, context_lens, **options)
        with open(os.environ["SMLA_RECORD"], "ab") as file:
            np.save(file, context_lens.numpy())
            np.save(file, out.numpy())
        return out

    sparse_mla.lightning_indexer = recorded


def read(path, num_layers: int) -> list[list[np.ndarray]]:
    """For each request, which was served alone, each layer's choice [tokens, K]."""
    calls = []
    with open(path, "rb") as file:
        while file.peek(1):
            calls.append((np.load(file), np.load(file)))
    steps = [calls[at : at + num_layers] for at in range(0, len(calls), num_layers)]
    starts = [at for at, step in enumerate(steps) if step[0][0][0] == 1]
    requests = [steps[a:b] for a, b in zip(starts, [*starts[1:], len(steps)], strict=True)]
    return [
        [np.concatenate([step[layer][1] for step in request]) for layer in range(num_layers)]
        for request in requests
    ]
