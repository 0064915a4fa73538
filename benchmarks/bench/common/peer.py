"""FlashMLA, where it can be imported: the wheel `sgl-flash-mla`. `use_legacy=True` asks for its
SM90 kernels. Its inputs are made once, before the calls: heads padded to 64 or 128, 4-D shapes."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

from bench.common.timing import describe_error
from bench.cuda.timing import Array
from sparse_mla._rows import KEY_DIM


class Peer:
    def __init__(self) -> None:
        self.module: Any = import_module("flash_mla")
        if not self.module.has_legacy():
            raise ImportError("flash_mla was built without its kernels for SM90")

    def describe(self) -> str:
        try:
            return f"sgl-flash-mla {metadata.version('sgl-flash-mla')}"
        except metadata.PackageNotFoundError:
            return f"flash_mla {getattr(self.module, '__version__', 'of unknown version')}"

    def decode(
        self, q: Array, kv_cache: Array, indices: Array, scale: float, num_reqs: int, plan: Any
    ) -> Callable[[], tuple]:
        """A call of its decode kernel on q [T, H, 576], kv_cache [pages, 64, 656], indices [T, K].
        Calls of the same shape share one `plan` of get_plan(); the first of them fills it."""
        num_tokens = len(q)
        return self._with_kvcache(
            plan,
            scale,
            q=pad_heads(q).view(num_reqs, num_tokens // num_reqs, -1, KEY_DIM),
            k_cache=kv_cache.unsqueeze(2),
            indices=indices.view(num_reqs, num_tokens // num_reqs, -1),
            block_table=None,
            cache_seqlens=None,
            is_fp8_kvcache=True,
        )

    def decode_v4(
        self,
        q: Array,
        caches: list[Array],
        indices: list[Array],
        scale: float,
        sink: Array,
        num_reqs: int,
    ) -> Callable[[], tuple]:
        """The same on q [T, H, 512] and two caches [pages, 64, 584], with a plan of its own."""
        num_tokens = len(q)
        padded = pad_heads(q)
        return self._with_kvcache(
            self.get_plan(),
            scale,
            q=padded.view(num_reqs, num_tokens // num_reqs, -1, 512),
            k_cache=caches[0].unsqueeze(2),
            indices=indices[0].view(num_reqs, num_tokens // num_reqs, -1),
            extra_k_cache=caches[1].unsqueeze(2),
            extra_indices_in_kvcache=indices[1].view(num_reqs, num_tokens // num_reqs, -1),
            attn_sink=pad(sink, padded.shape[1], dim=0),
            block_table=None,
            cache_seqlens=None,
            is_fp8_kvcache=True,
        )

    def decode_dense(
        self, q: Array, kv_cache: Array, block_table: Array, lens: Array, scale: float
    ) -> Callable[[], tuple]:
        """A call of its dense decode kernel on q [B, n, H, 576] and kv_cache [pages, 64, 576] bf16.
        Its first call makes its plan."""
        keys = {"k_cache": kv_cache.unsqueeze(2), "block_table": block_table, "cache_seqlens": lens}
        return self._with_kvcache(self.get_plan(), scale, q=q, **keys, causal=True)

    def _with_kvcache(self, plan: Any, scale: float, **arguments: Any) -> Callable[[], tuple]:
        arguments |= {"tile_scheduler_metadata": plan, "softmax_scale": scale}
        arguments |= {"head_dim_v": 512, "use_legacy": True}
        return lambda: self.module.flash_mla_with_kvcache(**arguments)

    def get_plan(self) -> Any:
        return self.module.get_mla_metadata()[0]

    def attend(
        self, q: Array, kv: Array, indices: Array, scale: float, sink: Array
    ) -> Callable[[], tuple]:
        """A call of its prefill kernel, which also serves decode on a bf16 cache. kv [..., 576]
        bf16 is taken as flat rows, or [..., 512] where q has 512 values; sink [H] fp32 or None."""
        padded = pad_heads(q)
        if sink is not None:
            sink = pad(sink, padded.shape[1], dim=0)
        arguments = {
            "q": padded,
            "kv": kv.view(-1, 1, q.shape[-1]),
            "indices": indices[:, None],
            "sm_scale": scale,
            "d_v": 512,
            "attn_sink": sink,
            "use_legacy": True,
        }
        return lambda: self.module.flash_mla_sparse_fwd(**arguments)


def read_decode(results: tuple, num_heads: int) -> tuple[Array, Array]:
    """out [b, s, H, 512], lse [b, H, s] -> out [T, H, 512], lse [T, H], without padding."""
    out, lse = results
    out, lse = out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
    return out[:, :num_heads], lse[:, :num_heads]


def read_attend(results: tuple, num_heads: int) -> tuple[Array, Array]:
    """(out [T, H, 512], max_logits, lse [T, H]) -> out, lse, without padding."""
    return results[0][:, :num_heads], results[2][:, :num_heads]


def pad_heads(q: Array) -> Array:
    """q [T, H, 576] with its heads padded to a number that the peer has kernels for."""
    return pad(q, 64 if q.shape[1] <= 64 else 128, dim=1)


def pad(array: Array, size: int, dim: int) -> Array:
    if array.shape[dim] == size:
        return array
    shape = list(array.shape)
    shape[dim] = size
    padded = array.new_zeros(shape)
    padded.narrow(dim, 0, array.shape[dim]).copy_(array)
    return padded


def find_peer() -> tuple[Peer | None, str]:
    """The peer and its version, or None and why it is not there."""
    try:
        peer = Peer()
    except Exception as error:  # a foreign library that does not load, for any reason
        return None, f"none ({describe_error(error)})"
    return peer, peer.describe()
