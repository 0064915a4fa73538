"""Calls as of the package flash_mla: their inputs, their results in fp64, and its tolerances."""

import os
from dataclasses import dataclass

import cases
import numpy as np
import reference as ref
from dense_cases import Dense
from helpers import assert_within_bounds, find_framework

from sparse_mla import flash_mla

ON_GPU = os.environ.get("SMLA_DEVICE") == "cuda"
DECODE, PREFILL = "flash_mla_with_kvcache", "flash_mla_sparse_fwd"


def zeros(*shape, dtype=ref.BF16) -> np.ndarray:
    return np.zeros(shape, dtype)


# --- arrays --------------------------------------------------------------------------------------


class Arrays:
    """Moves NumPy arrays to a framework, on the device under test, and back."""

    def __init__(self, name: str) -> None:
        self.framework = find_framework(name)
        self.is_torch = name == "torch"

    def put(self, x):
        if not isinstance(x, np.ndarray) or self.framework.name == "numpy":
            return x  # already there, with its strides
        x = self.framework.put(np.ascontiguousarray(x))
        return x.to("cuda") if self.is_torch and ON_GPU else x

    def get(self, x) -> np.ndarray:
        return self.framework.get(x.cpu() if self.is_torch else x)

    def call(self, function, *args, **kwargs) -> list[np.ndarray]:
        args = [self.put(x) for x in args]
        kwargs = {name: self.put(x) for name, x in kwargs.items()}
        return [self.get(x) for x in function(*args, **kwargs)]


# --- inputs --------------------------------------------------------------------------------------


def peer_rows(rng, count: int, fmt: str) -> np.ndarray:
    """Cache rows as flash_mla's tests make them: N(0, 1) / 10, scales that are powers of two."""
    bits = ref.bf16_encode((rng.normal(0, 1, (count, 576)) / 10).astype(np.float32))
    if fmt == "bf16":
        return bits.view(ref.BF16)
    rows = ref.quantize_rows(bits[:, :512], bits[:, 512:])
    scales = rows[:, 512:528].view(np.float32)
    exact = np.exp2(np.ceil(np.log2(scales)))
    value = ref.bf16_decode(bits[:, :512]).reshape(count, 4, 128) / exact[..., None]
    rows[:, :512] = ref.e4m3_encode(value).reshape(count, 512)
    scales[:] = exact
    return rows


def peer_indices(rng, shape, num_slots: int) -> np.ndarray:
    indices = rng.integers(0, num_slots, shape).astype(np.int32)
    indices[rng.random(shape) < 0.1] = -1
    return indices


@dataclass
class Decode:
    """A decode call; `reference` returns out [b, s_q, H, 512] and lse [b, H, s_q]."""

    b: int = 3
    s_q: int = 2
    H: int = 64
    K: int = 128
    pages: int = 7
    block_size: int = 64
    sink: bool = False
    topk_length: bool = False
    extra: bool = False
    fmt: str = "fp8"
    softmax_scale: float | None = None

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.b, self.s_q, self.H, self.K])
        self.q = cases.random_bf16(rng, self.b, self.s_q, self.H, 576, std=0.1)
        rows = peer_rows(rng, self.pages * self.block_size, self.fmt)
        self.k_cache = rows.reshape(self.pages, self.block_size, 1, -1)
        shape = (self.b, self.s_q, self.K)
        self.indices = peer_indices(rng, shape, len(rows))
        self.options: dict = {}
        if self.sink:
            sink = rng.normal(0, 3, self.H).astype(np.float32)
            sink[: min(self.H, 2)] = [np.inf, -np.inf][: self.H]
            self.options["attn_sink"] = sink
        if self.topk_length:
            length = rng.integers(0, self.K + 1, self.b).astype(np.int32)
            length[0] = 0
            self.options["topk_length"] = length
        if self.extra:
            extra = peer_rows(rng, 45, "fp8")
            self.options["extra_k_cache"] = extra.reshape(5, 9, 1, 656)
            self.options["extra_indices_in_kvcache"] = peer_indices(rng, (*shape[:2], 64), 45)
            length = rng.integers(0, 65, self.b).astype(np.int32)
            self.options["extra_topk_length"] = length
        if self.softmax_scale is not None:
            self.options["softmax_scale"] = self.softmax_scale

    def run(self, arrays: Arrays, module=flash_mla, **changes) -> list[np.ndarray]:
        meta, num_splits = module.get_mla_metadata()
        options = {"is_fp8_kvcache": self.fmt == "fp8", "indices": self.indices} | self.options
        q, k_cache = (changes.pop(name, getattr(self, name)) for name in ("q", "k_cache"))
        return arrays.call(
            getattr(module, DECODE),
            *(q, k_cache, None, None, 512, meta, num_splits),
            **(options | {"use_legacy": True} | changes),
        )

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        per_query = lambda x: None if x is None else np.repeat(x, self.s_q)  # noqa: E731
        rows = self.b * self.s_q
        flat = lambda x: None if x is None else x.reshape(rows, x.shape[-1])  # noqa: E731
        want = ref.attention(
            self.q.reshape(-1, self.H, 576),
            self.k_cache,
            flat(self.indices),
            softmax_scale=576**-0.5 if self.softmax_scale is None else self.softmax_scale,
            topk_length=per_query(self.options.get("topk_length")),
            attn_sink=self.options.get("attn_sink"),
            extra_kv_cache=self.options.get("extra_k_cache"),
            extra_indices=flat(self.options.get("extra_indices_in_kvcache")),
            extra_topk_length=per_query(self.options.get("extra_topk_length")),
        )
        lse = np.where(np.isneginf(want.lse), np.inf, want.lse)
        shape = (self.b, self.s_q, self.H)
        return want.out.reshape(*shape, 512), lse.reshape(shape).swapaxes(1, 2)


@dataclass
class Prefill:
    """A prefill call; `reference` returns out [T, H, 512], max_logits [T, H] and lse [T, H]."""

    T: int = 5
    H: int = 64
    S: int = 200
    K: int = 128
    sink: bool = False
    topk_length: bool = False
    sm_scale: float = 576**-0.5
    d_qk: int = 576

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.T, self.H, self.S, self.K])
        self.q = cases.random_bf16(rng, self.T, self.H, self.d_qk, std=0.1)
        self.kv = peer_rows(rng, self.S, "bf16")[:, None, : self.d_qk]
        self.indices = peer_indices(rng, (self.T, 1, self.K), self.S)
        self.indices[self.indices == 0] = self.S + 3  # "numbers >= s_kv" are no keys, either
        self.options: dict = {}
        if self.sink:
            self.options["attn_sink"] = rng.normal(0, 3, self.H).astype(np.float32)
        if self.topk_length:
            length = rng.integers(0, self.K + 1, self.T).astype(np.int32)
            length[:1] = 0
            self.options["topk_length"] = length

    def run(self, arrays: Arrays, module=flash_mla, **changes) -> list[np.ndarray]:
        q, kv = (changes.pop(name, getattr(self, name)) for name in ("q", "kv"))
        indices = changes.pop("indices", self.indices)
        options = self.options | {"use_legacy": True} | changes
        return arrays.call(getattr(module, PREFILL), q, kv, indices, self.sm_scale, **options)

    def reference(self) -> tuple[np.ndarray, ...]:
        options = {"softmax_scale": self.sm_scale} | self.options
        want = ref.attention(self.q, self.kv[:, 0], self.indices[:, 0], **options)
        lse = np.where(np.isneginf(want.lse), np.inf, want.lse)
        return want.out, want.max_logits, lse


def assert_close(name: str, got, want, absolute: float, relative: float) -> None:
    """The rule of flash_mla's tests: the same infinities, and errors and cosine within bounds."""
    got, want = (ref.to_f32(x).astype(np.float64) for x in (got, np.asarray(want)))
    assert got.shape == want.shape, name
    infinite = np.isinf(want)
    assert np.array_equal(got[infinite], want[infinite]), f"{name}: infinities"
    got, want = got[~infinite], want[~infinite]
    assert np.isfinite(got).all(), f"{name}: not finite"
    excess = np.abs(got - want) - (absolute + relative * np.abs(want))
    assert excess.max(initial=0) <= 0, f"{name}: {excess.max()} beyond the tolerance"
    size = (got * got + want * want).sum()
    cosine = 2 * (got * want).sum() / size if size else 1
    assert abs(1 - cosine) <= 5e-6, f"{name}: cosine difference {1 - cosine}"


def assert_results(got, want) -> None:
    """Checks (out, *statistics), the results of either function."""
    assert len(got) == len(want)
    assert got[0].dtype == ref.BF16
    assert_close("out", got[0], want[0], 1e-3, 2.01 / 128)
    for i, (a, b) in enumerate(zip(got[1:], want[1:], strict=True)):
        assert a.dtype == np.float32
        assert_close(f"statistic {i}", a, b, 1e-6, 8.01 / 65536)


def check_decode(case: Dense, out: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """Checks a dense decode's results, [b, s_q, H, 512] and [b, H, s_q]. -> where rows have no
    key; their lse is +inf."""
    batch, s_q, heads = case.q.shape[:3]
    assert out.shape == (batch, s_q, heads, 512)
    assert lse.shape == (batch, heads, s_q)
    want = case.reference()
    lse = np.ascontiguousarray(np.swapaxes(lse, 1, 2)).reshape(-1, heads)
    empty = np.isneginf(want.lse)
    assert np.isposinf(lse[empty]).all()
    out = np.asarray(out).reshape(-1, heads, 512)
    assert_within_bounds(want, {"out": out, "lse": np.where(empty, -np.inf, lse)})
    return empty
