"""The toy of `model.py` for a layer of DeepSeek V4 with compress ratio 4.

The key of a token is also its value. It has a code of the bytes before the token, a code of the
byte itself, and a constant, which RoPE turns. A compressed row stands for a group of four tokens,
and is a sum of their keys with weights for each channel. Here the token at place i of its group has
most of the weight in quarter i of both codes. Each head looks at one quarter, in rows of both
kinds, so it compares with the context of a token and reads the byte of the same token.
"""

from __future__ import annotations

import numpy as np

from sparse_mla._demo.model import CONTEXT_CODE_DIM, INDEX_DIM, RECENCY, ROPE_DIM, ToyModel
from sparse_mla._judge import BF16

HEAD_SIZE, RATIO = 512, 4
BYTE_DIM = HEAD_SIZE - CONTEXT_CODE_DIM - ROPE_DIM
SINKS = 7.0, 11.0  # the logits of the first and of the last head: what finds less counts less
OWN, BEFORE = 5.0, -3.0  # added to a token's scores in its quarters, and for the next group
GATE = 0.25  # times a token's values: its scores
QUERY_NOISE, VALUE_NOISE = 0.02, 0.08  # random weights, by which each value of a row counts


def quarters(*sizes: int) -> np.ndarray:
    """[4, sum of sizes]: 1 where a channel is in quarter i of its code, else 0."""
    return np.concatenate([np.repeat(np.eye(RATIO), n // RATIO, axis=1) for n in sizes], axis=1)


class V4Model(ToyModel):
    """A hidden state is a latent query [512] and a key [512]. Each has the code of a context [384],
    that of the byte [64], and a constant for RoPE [64].

    The last methods are the layer's projections, by its names for them. They take and return
    arrays in host memory; arguments are fp32.
    """

    def __init__(self, num_heads: int, seed: int) -> None:
        super().__init__(num_heads, seed)
        rng = np.random.default_rng(seed)
        self.byte_codes = self.byte_codes[:, :BYTE_DIM]
        place = np.arange(num_heads) % RATIO
        recency = np.linspace(0, 1, num_heads)[:, None]

        gates = quarters(CONTEXT_CODE_DIM)[place]
        rest = np.zeros((num_heads, BYTE_DIM)), np.repeat(recency, ROPE_DIM, axis=1)
        self.gates = np.concatenate([gates, *rest], axis=1).astype(np.float32)
        self.gates += QUERY_NOISE * rng.standard_normal(self.gates.shape, np.float32)
        self.index_gates = quarters(INDEX_DIM - ROPE_DIM).astype(np.float32)

        # A head's output n is byte value n, if that is in its quarter, and a little of every 64th
        # value of the row.
        is_read = np.arange(HEAD_SIZE) % BYTE_DIM == np.arange(BYTE_DIM)[:, None]
        noise = VALUE_NOISE * rng.standard_normal((num_heads, BYTE_DIM, HEAD_SIZE), np.float32)
        wo_a = np.where(is_read, noise, 0)
        own_byte = quarters(BYTE_DIM)[place][:, None] * np.eye(BYTE_DIM)
        wo_a[:, :, CONTEXT_CODE_DIM:-ROPE_DIM] += own_byte.astype(np.float32)

        self.weights = {
            "q_norm": np.ones(HEAD_SIZE, np.float32),
            "kv_norm": np.ones(HEAD_SIZE, np.float32),
            "attn_sink": np.linspace(*SINKS, num_heads, dtype=np.float32),
            "wo_a": wo_a.astype(BF16),
            "ape": self._offsets(CONTEXT_CODE_DIM, BYTE_DIM),
            "compressor_norm": np.ones(HEAD_SIZE, np.float32),
            "index_ape": self._offsets(INDEX_DIM - ROPE_DIM),
            "index_norm": np.ones(INDEX_DIM, np.float32),
        }

    @staticmethod
    def _offsets(*sizes: int) -> np.ndarray:
        """What is added to the scores of a token at place i: for the next group, then for its own.
        RoPE's values are those of all four."""
        own = np.pad(OWN * quarters(*sizes), ((0, 0), (0, ROPE_DIM)))
        return np.concatenate([np.full_like(own, BEFORE), own], axis=1).astype(np.float32)

    def hidden(self, text: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """[T, 1024] bf16 of the tokens at `positions` of `text`."""
        rest = self.byte_codes[text[positions]], np.full((len(positions), ROPE_DIM), RECENCY)
        now, before = (self._context_code(text, last) for last in (positions, positions - 1))
        return np.concatenate([now, *rest, before, *rest], axis=1).astype(BF16)

    def fused_wqa_wkv(self, x: np.ndarray) -> np.ndarray:
        return x.astype(BF16)

    def wq_b(self, qr: np.ndarray) -> np.ndarray:
        return (qr[:, None] * self.gates).astype(BF16)

    def wkv_wgate(self, x: np.ndarray) -> np.ndarray:
        key = x[:, HEAD_SIZE:]
        return np.concatenate([key, key, GATE * key, GATE * key], axis=1)

    def index_wkv_wgate(self, x: np.ndarray) -> np.ndarray:
        key = np.concatenate([self._index_code(x[:, HEAD_SIZE:]), x[:, -ROPE_DIM:]], axis=1)
        return np.concatenate([key, key, GATE * key, GATE * key], axis=1)

    def index_wq_b(self, qr: np.ndarray) -> np.ndarray:
        code = self._index_code(qr)[:, None] * self.index_gates
        recency = np.repeat(qr[:, None, -ROPE_DIM:], RATIO, axis=1)
        return np.concatenate([code, recency], axis=2).astype(BF16)

    def index_weights_proj(self, x: np.ndarray) -> np.ndarray:
        return np.ones((len(x), RATIO), np.float32)

    def wo_b(self, z: np.ndarray) -> np.ndarray:
        return z.astype(BF16)

    def _index_code(self, code: np.ndarray) -> np.ndarray:
        return code[:, :CONTEXT_CODE_DIM] @ self.w_index
