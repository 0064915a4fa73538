"""A toy MLA layer that needs no training: it predicts the next byte of a text by looking up where
the last few bytes have been seen before ("induction").

The latent of a token, its cached key and value, has two parts: a code of the bytes *before* it
(what queries look for) and a code of the byte itself (what they want to know). A query is the code
of the bytes up to its own token, so it finds the tokens that followed the same bytes. All codes are
random vectors, nearly orthogonal; each head sees them through its own projection. RoPE adds a mild
preference for recent tokens. So the keys differ, and which of them are selected matters. The
indexer, which selects them, sees the same codes through fewer values.
"""

from __future__ import annotations

import numpy as np

from sparse_mla._judge import BF16
from sparse_mla._rows import KV_LORA_RANK

ROPE_DIM = 64
HEAD_DIM = 128  # qk_nope_head_dim and v_head_dim
BYTE_CODE_DIM = HEAD_DIM
CONTEXT_CODE_DIM = KV_LORA_RANK - BYTE_CODE_DIM
# Share of the latest byte, of the one before it, …, in the code of a context.
CONTEXT_WEIGHTS = np.sqrt(np.array([0.36, 0.25, 0.16, 0.11, 0.07, 0.05], np.float32))
RECENCY = 0.5
INDEX_DIM = 128
INDEX_SHARPNESS = 2.0  # against RECENCY
SOFTMAX_SCALE = (HEAD_DIM + ROPE_DIM) ** -0.5


class ToyModel:
    """Weights and projections of the layer. All of it is a function of (num_heads, seed)."""

    def __init__(self, num_heads: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        codes = (len(CONTEXT_WEIGHTS), 256, CONTEXT_CODE_DIM)
        self.num_heads = num_heads
        self.context_codes = rng.standard_normal(codes, np.float32)
        self.context_codes *= CONTEXT_WEIGHTS[:, None, None]
        self.byte_codes = rng.standard_normal((256, BYTE_CODE_DIM), np.float32)

        # W_UK reads the context code through random projections, W_UV returns the byte code.
        shape = (CONTEXT_CODE_DIM, num_heads, HEAD_DIM)
        w_uk = rng.standard_normal(shape, np.float32) * CONTEXT_CODE_DIM**-0.5
        kv_b_proj = np.zeros((KV_LORA_RANK, num_heads, 2 * HEAD_DIM), np.float32)
        kv_b_proj[:CONTEXT_CODE_DIM, :, :HEAD_DIM] = w_uk
        kv_b_proj[CONTEXT_CODE_DIM:, :, HEAD_DIM:] = np.eye(BYTE_CODE_DIM)[:, None]
        self.kv_b_proj = kv_b_proj.reshape(KV_LORA_RANK, -1).astype(BF16)

        # Queries use the same projections; heads range from undecided to sharp.
        sharpness = np.linspace(1.5, 3.0, num_heads, dtype=np.float32)
        self.w_q = (w_uk * sharpness[:, None]).reshape(CONTEXT_CODE_DIM, -1)

        w_index = rng.standard_normal((CONTEXT_CODE_DIM, INDEX_DIM - ROPE_DIM), np.float32)
        self.w_index = w_index * (INDEX_SHARPNESS * CONTEXT_CODE_DIM**-0.5)

    def keys(
        self, text: np.ndarray, positions: np.ndarray, *, has_rope: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """kv_c [T, 512] and k_pe [T, 64] bf16 of the tokens at `positions` of `text`. Without RoPE,
        k_pe is as it is at position 0."""
        context = self._context_code(text, positions - 1)
        kv_c = np.concatenate([context, self.byte_codes[text[positions]]], axis=1)
        return kv_c.astype(BF16), self._rope(positions * has_rope).astype(BF16)

    def queries(
        self, text: np.ndarray, positions: np.ndarray, *, has_rope: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """q_nope [T, H, 128] and q_pe [T, H, 64] bf16."""
        q_nope = self._context_code(text, positions) @ self.w_q
        q_pe = np.repeat(self._rope(positions * has_rope)[:, None], self.num_heads, axis=1)
        return q_nope.reshape(-1, self.num_heads, HEAD_DIM).astype(BF16), q_pe.astype(BF16)

    def index_keys(self, text: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """[T, 128], what the indexer compares with: like keys, with fewer values of the context."""
        context = self._context_code(text, positions - 1) @ self.w_index
        return np.concatenate([context, self._rope(positions)], axis=1).astype(BF16)

    def index_queries(
        self, text: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """q [T, 2, 128] bf16 before RoPE, and weights [T, 2] fp32, of two heads.

        Their scores add up to the plain product, because relu(x) - relu(-x) = x.
        """
        context = self._context_code(text, positions) @ self.w_index
        recency = np.full((len(positions), ROPE_DIM), RECENCY, np.float32)
        q = np.concatenate([context, recency], axis=1)
        weights = np.tile(np.array([1, -1], np.float32), (len(positions), 1))
        return np.stack([q, -q], axis=1).astype(BF16), weights

    def predict(self, values: np.ndarray) -> np.ndarray:
        """[T, H, 128] up-projected attention output -> the byte [T] that it resembles most."""
        return (values.astype(np.float32).mean(axis=1) @ self.byte_codes.T).argmax(axis=1)

    def _context_code(self, text: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Code [T, 384] of the bytes up to position `last`; zero bytes stand before the text."""
        padded = np.concatenate([np.zeros(len(CONTEXT_WEIGHTS), text.dtype), text])
        code = np.zeros((len(last), CONTEXT_CODE_DIM), np.float32)
        for distance, codes in enumerate(self.context_codes):
            code += codes[padded[last - distance + len(CONTEXT_WEIGHTS)]]
        return code

    @staticmethod
    def _rope(positions: np.ndarray) -> np.ndarray:
        """A constant vector, rotated by its position so that products depend on distance alone."""
        frequencies = 10000.0 ** (-np.arange(0, ROPE_DIM, 2) / ROPE_DIM)
        angles = positions[:, None] * frequencies
        turned = np.stack([np.cos(angles) - np.sin(angles), np.sin(angles) + np.cos(angles)], -1)
        return RECENCY * turned.reshape(len(positions), ROPE_DIM)
