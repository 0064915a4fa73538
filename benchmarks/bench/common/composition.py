"""Sparse MLA attention composed of PyTorch operators: what a user writes without this library.

Gather the selected rows, dequantise them, and attend: matmul, softmax, matmul, with inputs of bf16,
or of fp32 where PyTorch multiplies those faster.
"""

from __future__ import annotations

import time
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from sparse_mla._rows import KEY_DIM, KV_LORA_RANK, ROPE_BYTES, V4_DATA_BYTES

torch: Any = import_module("torch") if find_spec("torch") is not None else None
TorchTensor = Any


class Composition:
    """Attention over NumPy arrays q [T, H, 576] bf16, kv [S, 656] uint8 or [S, 576] bf16, and
    indices [T, K]."""

    def __init__(
        self,
        q: np.ndarray,
        kv: np.ndarray,
        indices: np.ndarray,
        softmax_scale: float,
        dtype: Any,
    ) -> None:
        self.dtype = dtype  # the products' dtype, see find_fast_dtype
        self.q = from_numpy(q).to(dtype)
        self.kv = from_numpy(kv)
        self.indices = from_numpy(indices)
        self.softmax_scale = softmax_scale

    def batched(self) -> tuple[TorchTensor, TorchTensor]:
        """All tokens at once: out [T, H, 512] bf16, lse [T, H]."""
        with torch.inference_mode():
            return self._attend(self.q, self.indices)

    def by_token(self) -> tuple[TorchTensor, TorchTensor]:
        """The same token by token, so that gathered rows stay in the processor's cache."""
        with torch.inference_mode():
            parts = [
                self._attend(self.q[t : t + 1], self.indices[t : t + 1]) for t in range(len(self.q))
            ]
            out, lse = zip(*parts, strict=True)
            return torch.cat(out), torch.cat(lse)

    def _attend(self, q: TorchTensor, indices: TorchTensor) -> tuple[TorchTensor, TorchTensor]:
        keys = self._gather(indices)
        logits = torch.matmul(q, keys.transpose(1, 2)).float().mul_(self.softmax_scale)
        logits.masked_fill_((indices < 0)[:, None], -torch.inf)
        lse = torch.logsumexp(logits, dim=-1)
        p = logits.sub_(lse[..., None]).exp_().to(self.dtype)
        return torch.matmul(p, keys[..., :512]).to(torch.bfloat16), lse

    def _gather(self, indices: TorchTensor) -> TorchTensor:
        """The selected rows [T, K, 576]."""
        rows = self.kv.index_select(0, indices.clamp(min=0).reshape(-1))
        is_bf16 = rows.dtype == torch.bfloat16
        rows = rows.to(self.dtype) if is_bf16 else dequantise(rows, self.dtype)
        return rows.view(*indices.shape, KEY_DIM)

    def numpy(self) -> tuple[np.ndarray, np.ndarray]:
        """out and lse as fp64 arrays."""
        out, lse = self.batched()
        return out.double().numpy(), lse.double().numpy()


class V4Composition(Composition):
    """Attention over q [T, H, 512] bf16 and rows of several caches of fp8_v4 [P, B, 584]. Each has
    a part of the columns of `indices`."""

    def __init__(
        self,
        q: np.ndarray,
        caches: list[np.ndarray],
        indices: list[np.ndarray],
        softmax_scale: float,
        dtype: Any,
    ) -> None:
        super().__init__(q, caches[0], np.concatenate(indices, axis=1), softmax_scale, dtype)
        self.caches = [from_numpy(cache) for cache in caches]
        self.widths = [x.shape[1] for x in indices]

    def _gather(self, indices: TorchTensor) -> TorchTensor:
        parts = zip(self.caches, indices.split(self.widths, dim=1), strict=True)
        return torch.cat([gather_v4(cache, x, self.dtype) for cache, x in parts], dim=1)


class PagedComposition(Composition):
    """Attention of q [B, H, D] bf16 over k_cache and v_cache [P, ps, Hk, D] bf16 or e4m3, a token
    of each request over all pages of its row of `table` [B, W]."""

    def __init__(
        self,
        q: np.ndarray,
        k_cache: np.ndarray,
        v_cache: np.ndarray,
        table: np.ndarray,
        softmax_scale: float,
        dtype: Any,
    ) -> None:
        super().__init__(q, k_cache, table, softmax_scale, dtype)
        self.values = from_numpy(v_cache)

    def _attend(self, q: TorchTensor, indices: TorchTensor) -> tuple[TorchTensor, TorchTensor]:
        keys, values = (self._gather_pages(cache, indices) for cache in (self.kv, self.values))
        by_group = q.view(len(q), keys.shape[1], -1, q.shape[-1])
        logits = torch.matmul(by_group, keys.transpose(2, 3)).float().mul_(self.softmax_scale)
        lse = torch.logsumexp(logits, dim=-1)
        p = logits.sub_(lse[..., None]).exp_().to(self.dtype)
        return torch.matmul(p, values).to(torch.bfloat16).flatten(1, 2), lse.flatten(1)

    def _gather_pages(self, cache: TorchTensor, table: TorchTensor) -> TorchTensor:
        """The rows of requests, [B, Hk, n, D]."""
        rows = cache.index_select(0, table.reshape(-1)).to(self.dtype)
        return rows.view(len(table), -1, *cache.shape[2:]).transpose(1, 2)


def prepare(num_threads: int) -> Any:
    """Sets PyTorch's threads, and returns the dtype for products. None without PyTorch."""
    if torch is None:
        return None
    torch.set_num_threads(num_threads)
    return find_fast_dtype()


def find_fast_dtype() -> Any:
    """bf16 or fp32: the one whose matrix product takes less time with PyTorch's threads. On
    processors without bf16 instructions, bf16 is thirty times slower."""

    def seconds(dtype: Any) -> float:
        a, b = torch.ones(64, KEY_DIM, dtype=dtype), torch.ones(KEY_DIM, 2048, dtype=dtype)
        torch.matmul(a, b)
        start = time.perf_counter()
        torch.matmul(a, b)
        return time.perf_counter() - start

    return min(torch.bfloat16, torch.float32, key=seconds)


def dequantise(rows: TorchTensor, dtype: Any) -> TorchTensor:
    """[n, 656] bytes of fp8_ds_mla -> [n, 576], the product in fp32."""
    keys = torch.empty(len(rows), KEY_DIM, dtype=dtype)
    values = rows[:, :KV_LORA_RANK].view(torch.float8_e4m3fn).float().view(-1, 4, 128)
    values *= rows[:, KV_LORA_RANK:-ROPE_BYTES].view(torch.float32)[..., None]
    keys[:, :KV_LORA_RANK] = values.view(-1, KV_LORA_RANK)
    keys[:, KV_LORA_RANK:] = rows[:, -ROPE_BYTES:].view(torch.bfloat16)
    return keys


def gather_v4(cache: TorchTensor, indices: TorchTensor, dtype: Any) -> TorchTensor:
    """Rows of split pages of fp8_v4, [T, K] -> [T, K, 512]. In a page, data of 576 bytes per token
    come before 8 bytes of scales per token."""
    num_pages, block_size, _ = cache.shape
    data = cache.as_strided(
        (num_pages, block_size, V4_DATA_BYTES), (cache.stride(0), V4_DATA_BYTES, 1)
    )
    at = block_size * V4_DATA_BYTES
    scales = cache.as_strided((num_pages, block_size, 8), (cache.stride(0), 8, 1), at)
    slots = indices.clamp(min=0).reshape(-1)
    place = slots // block_size, slots % block_size
    rows = data[place]
    keys = torch.empty(len(rows), 512, dtype=dtype)
    values = rows[:, :448].view(torch.float8_e4m3fn).float().view(-1, 7, 64)
    values *= scales[place][:, :7].view(torch.float8_e8m0fnu).float()[..., None]
    keys[:, :448] = values.view(-1, 448)
    keys[:, 448:] = rows[:, 448:].view(torch.bfloat16)
    return keys.view(*indices.shape, 512)


def from_numpy(array: np.ndarray) -> TorchTensor:
    """torch.from_numpy, for ml_dtypes' bfloat16 and float8_e4m3fn, too."""
    name = array.dtype.name
    if name in ("bfloat16", "float8_e4m3fn"):
        carrier = np.int16 if name == "bfloat16" else np.uint8
        return torch.from_numpy(array.view(carrier)).view(getattr(torch, name))
    return torch.from_numpy(array)
