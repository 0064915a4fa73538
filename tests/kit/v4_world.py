"""A small DeepSeek V4 layer in an engine's hands: requests, pages, caches, weights, projections,
and a reference of the whole layer. Its steps may cut the requests any way; what they give must not
depend on it.

The projections multiply row by row, so that their bits do not depend on the batch either. Arrays
are NumPy's; `to` and `back` move them to a framework and back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import reference as ref
import reference_compressor as pooling
import reference_indexer
import reference_norm as norms
import reference_v4 as plan
from row_formats import Pages

HIDDEN, Q_LORA, RANK, INDEX_HEADS = 24, 40, 6, 3
KV_SCALE, Q_SCALE = 0.25, 0.0625  # powers of two: rows in bf16 are the same keys


def same(x: Any) -> Any:
    return x


@dataclass
class World:
    """One layer. `lengths`: the tokens of each request, all of which have pages."""

    package: Any
    ratio: int
    lengths: tuple[int, ...]
    seed: int = 0
    kv: str = "fp8_v4"
    compressed: str | None = None
    index: str = "fp8_index"
    quantized: bool = True
    q_scale: float = 1.0
    sizes: plan.Sizes = field(
        default_factory=lambda: plan.Sizes(
            max_num_seqs=8, max_num_batched_tokens=80, max_model_len=160, decode_threshold=4
        )
    )
    heads: int = 4
    groups: int = 2
    topk: int = 5
    logit_unit: float = 2.0**-18  # the error of the indexer's logits
    options: dict = field(default_factory=dict)
    to: Callable[[Any], Any] = same
    back: Callable[[Any], Any] = same

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.hidden = [ref.to_bf16(self.normal(n, HIDDEN)) for n in self.lengths]
        self.make_pages()
        self.make_weights()
        v4, s = self.package.v4, self.sizes
        self.config = v4.Config(
            self.heads, o_groups=self.groups, topk_tokens=self.topk, index_n_heads=INDEX_HEADS,
            kv_cache_dtype=self.kv, compressed_kv_cache_dtype=self.compressed,
            index_cache_dtype=self.index, q_scale=self.q_scale,
            kv_scale=KV_SCALE if "fp8_e4m3" in (self.kv, self.compressed) else 1.0,
            **s.options(), **self.options,
        )  # fmt: skip
        self.builder = v4.MetadataBuilder(self.config)
        weights = {name: self.to(x) for name, x in self.weights.items()}
        self.layer = v4.SparseMLA(self.config, self.ratio, v4.Weights(**weights), self.projections)
        self.memory = {name: self.to(pages.cache) for name, pages in self.pages.items()}
        self.memory |= {name: self.to(rows) for name, rows in self.states.items()}
        self.caches = v4.Caches(**self.memory)

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.normal(0, 1, shape).astype(np.float32)

    # --- pages -----------------------------------------------------------------------------------

    def table(self, block_size: int) -> tuple[np.ndarray, int]:
        """A page of its own for every part of every request, and the number of pages."""
        need = -(-max(self.lengths) // block_size)
        count = need * len(self.lengths)
        pages = self.rng.permutation(count).reshape(len(self.lengths), need)
        return pages.astype(np.int32), count

    def make_pages(self) -> None:
        s, r = self.sizes, self.ratio
        self.tables, self.pages, self.states = {}, {}, {}

        def add(name: str, kv_format: str, block_size: int, rows: int) -> None:
            self.tables[name], count = self.table(block_size)
            self.pages[name] = Pages(kv_format, pages=count, block_size=rows, seed=self.seed)

        def add_state(name: str, width: int) -> None:
            size = s.state_block_sizes[r]
            self.tables[name], count = self.table(size)
            self.states[name] = np.full((count, size, width), np.nan, np.float32)

        add("swa", self.kv, s.swa_block_size, s.swa_block_size)
        if r > 1:
            add("compressed", self.compressed or self.kv, s.block_size, s.block_size // r)
            add_state("state", 2 * pooling.overlap(r) * 512)
        if r == 4:
            add("index", self.index, s.block_size, s.block_size // r)
            add_state("index_state", 2 * pooling.overlap(r) * 128)

    # --- weights ---------------------------------------------------------------------------------

    def make_weights(self) -> None:
        r, c, width = self.ratio, pooling.overlap(self.ratio), self.heads // self.groups * 512
        longest = max(self.lengths)
        wo_a = self.normal(self.groups, RANK, width) / np.float32(width**0.5)
        scale = None
        if self.quantized:
            scale = np.exp2(self.rng.integers(-3, 3, (self.groups, 1, width // 128)))
            wo_a, scale = ref.e4m3_encode(wo_a * np.float32(8)), scale.astype(np.float32)
        self.weights = {
            "q_norm": ref.to_bf16(1 + self.normal(Q_LORA) / 8),
            "kv_norm": 1 + self.normal(512) / 8,
            "attn_sink": self.normal(self.heads),
            "rope_table": self.package.rope_table(longest, fp32_angles=True),
            "wo_a": wo_a if self.quantized else ref.to_bf16(wo_a),
            "wo_a_scale": scale,
        }
        widths = {"fused_wqa_wkv": Q_LORA + 512, "wo_b": HIDDEN}
        sources = {"wq_b": (Q_LORA, self.heads * 512), "wo_b": (self.groups * RANK, HIDDEN)}
        if r > 1:
            self.weights |= {
                "ape": self.normal(r, c * 512) / 4,
                "compressor_norm": 1 + self.normal(512) / 8,
            }
            widths["wkv_wgate"] = 2 * c * 512
        if r == 4:
            self.weights |= {
                "index_ape": self.normal(r, c * 128) / 4,
                "index_norm": ref.to_bf16(1 + self.normal(128) / 8),
                "index_rope_table": self.package.rope_table(longest, base=500.0),
            }
            widths |= {"index_wkv_wgate": 2 * c * 128, "index_weights_proj": INDEX_HEADS}
            sources["index_wq_b"] = (Q_LORA, INDEX_HEADS * 128)
        sources |= {name: (HIDDEN, n) for name, n in widths.items() if name != "wo_b"}
        self.matrices = {
            name: self.normal(*shape) / np.float32(shape[0] ** 0.5)
            for name, shape in sources.items()
        }

    @property
    def projections(self) -> dict:
        return {
            name: lambda x, name=name: self.to(self.multiply(name, self.back(x)))
            for name in self.matrices
        }

    def multiply(self, name: str, x: np.ndarray) -> np.ndarray:
        """Row by row. Scores of compressors are fp32, everything else bf16."""
        rows = ref.to_f32(np.ascontiguousarray(x))
        y = np.stack([row @ self.matrices[name] for row in rows]) if len(rows) else None
        y = np.zeros((0, self.matrices[name].shape[1]), np.float32) if y is None else y
        return y if name.endswith("wkv_wgate") else ref.to_bf16(y)

    # --- steps -----------------------------------------------------------------------------------

    def batch(self, parts, padding=0) -> plan.V4Batch:
        """A step of these parts: (request, first position, tokens), decodes first."""
        requests = [b for b, _, _ in parts]
        table = self.tables["swa"]
        size = self.sizes.swa_block_size
        slots = [plan.slot(table[b], p, size) for b, a, n in parts for p in range(a, a + n)]
        s = self.sizes
        return plan.V4Batch(
            [n for _, _, n in parts],
            np.array([a + n for _, a, n in parts], np.int32),
            np.array(slots + [-1] * padding, np.int64),
            table[requests],
            compressed={self.ratio: self.tables["compressed"][requests]} if self.ratio > 1 else {},
            states={self.ratio: self.tables["state"][requests]} if self.ratio > 1 else {},
            max_seq_len=s.max_model_len,
        )

    def place(self, name: str, x: np.ndarray) -> Any:
        """An array of the engine, for the step to come."""
        return self.to(x)

    def build(self, parts, padding=0) -> Any:
        batch = self.batch(parts, padding)
        requests = [b for b, _, _ in parts]
        place = self.place
        tables = {
            "compressed": {r: place("compressed", x) for r, x in batch.compressed.items()},
            "states": {r: place("states", x) for r, x in batch.states.items()},
        }
        if self.ratio == 4:
            tables["index"] = place("index", self.tables["index"][requests])
            tables["index_states"] = place("index_states", self.tables["index_state"][requests])
        arrays = {
            name: place(name, getattr(batch, name))
            for name in ("query_start_loc", "seq_lens", "slot_mapping", "block_table")
        }
        return self.builder.build(batch.common(self.package, **arrays), **tables)

    def inputs(self, parts, padding=0, wrong=()) -> np.ndarray:
        rows = [self.hidden[b][a : a + n] for b, a, n in parts]
        x = np.concatenate([*rows, np.full((padding, HIDDEN), 3, ref.BF16)])
        for t, token in enumerate((b, p) for b, a, n in parts for p in range(a, a + n)):
            if token in wrong:
                x[t] = ref.to_bf16(9 * self.normal(HIDDEN))
        return x

    def step(self, parts, padding=0, wrong=(), **options) -> np.ndarray:
        """The layer's results for the tokens of the parts, after the step's build. The tokens in
        `wrong`, (request, position), are drafts that are not what the request goes on with."""
        metadata = self.build(parts, padding)
        x = self.to(self.inputs(parts, padding, wrong))
        out = self.back(self.layer.forward(x, self.caches, metadata, **options))
        assert len(out) == len(x)
        assert not ref.to_f32(out[len(out) - padding :]).any()
        return out[: len(out) - padding]

    # --- what queries can see --------------------------------------------------------------------

    def bytes_of(self, name: str) -> np.ndarray:
        """The cache or state, as the layer wrote it."""
        return np.asarray(self.back(self.memory[name]))

    def sync(self) -> None:
        """Brings the caches back to the world's own pages."""
        for name, pages in self.pages.items():
            pages.cache[...] = self.bytes_of(name)

    def visible(self, request: int, length: int) -> dict[str, np.ndarray]:
        """The bytes that a query behind the first `length` tokens can meet, by cache."""
        self.sync()
        s, r = self.sizes, self.ratio
        first = max(length - s.window + 1, 0)
        found = {"swa": self.rows_of("swa", request, range(first, length))}
        for name in self.pages:
            if name != "swa":
                found[name] = self.rows_of(name, request, range(length // r))
        for name in self.states:
            keep = max(0, r * (length // r - pooling.overlap(r) + 1))
            size = s.state_block_sizes[r]
            slots = [plan.slot(self.tables[name][request], p, size) for p in range(keep, length)]
            found[name] = self.bytes_of(name).reshape(-1, self.states[name].shape[-1])[slots]
        return found

    def slots_of(self, name: str, request: int, rows) -> list[int]:
        size = self.pages[name].block_size
        return [plan.slot(self.tables[name][request], i, size) for i in rows]

    def rows_of(self, name: str, request: int, rows) -> np.ndarray:
        return np.concatenate(self.pages[name].get(self.slots_of(name, request, rows)), 1)

    # --- reference -------------------------------------------------------------------------------

    def latents(self, request: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """The latent queries and the keys after their norms, of the first tokens."""
        qr_kv = self.multiply("fused_wqa_wkv", self.hidden[request][:length])
        w, eps = self.weights, self.config.eps
        qr = norms.rms_norm_bits(qr_kv[:, :Q_LORA], w["q_norm"], eps)
        kv = norms.rms_norm_bits(qr_kv[:, Q_LORA:], w["kv_norm"], eps)
        return ref.to_bf16(ref.bf16_decode(qr)), ref.to_bf16(ref.bf16_decode(kv))

    def expected_rows(self, request: int, length: int) -> dict[str, np.ndarray]:
        """The bytes of each cache that the first tokens of a request leave, by its rows."""
        positions = np.arange(length)
        _, kv = self.latents(request, length)
        bits = norms.key_bits(kv, positions, self.weights["rope_table"])
        found = {"swa": encode(self.pages["swa"], bits)}
        if self.ratio > 1:
            found |= self.pooled(request, length, "compressed", "state", "wkv_wgate", "")
        if self.ratio == 4:
            found |= self.pooled(
                request, length, "index", "index_state", "index_wkv_wgate", "index_"
            )
        return found

    def pooled(self, request, length, cache, state, projection, prefix) -> dict[str, np.ndarray]:
        r, w = self.ratio, self.weights
        kv_score = self.multiply(projection, self.hidden[request][:length])
        width = kv_score.shape[1] // 2
        kv, score = kv_score[:, :width], kv_score[:, width:]
        rows = pooling.state_rows(kv, score, w[prefix + "ape"], range(length))
        weight = w["index_norm" if prefix else "compressor_norm"]
        one_page, dim = np.zeros(1, np.int32), width // pooling.overlap(r)
        bits = [
            pooling.key_bits(
                pooling.find_group(rows, one_page, length, p, r, dim),
                weight, w[prefix + "rope_table"], self.config.eps,
            )
            for p in range(r - 1, length, r)
        ]  # fmt: skip
        encoded = encode(self.pages[cache], np.array(bits, np.uint16).reshape(-1, dim))
        return {cache: encoded, state: rows}

    def index_values(self, qr: np.ndarray, request: int, p: int) -> tuple[np.ndarray, np.ndarray]:
        """The indexer's queries in fp64, by the operator's own bytes, and their weights."""
        q = self.multiply("index_wq_b", qr).reshape(1, INDEX_HEADS, 128)
        weights = self.multiply("index_weights_proj", self.hidden[request][p : p + 1])
        made = self.package.fused_indexer_q_rope_quant(
            q, weights, np.array([p]), self.weights["index_rope_table"], softmax_scale=128**-0.5,
            head_scale=INDEX_HEADS**-0.5, use_fp4=self.index == "mxfp4_index",
        )  # fmt: skip
        return reference_indexer.query_values(made[0], *made[2:]), made[1]

    def chosen(self, qr: np.ndarray, request: int, p: int) -> list[int] | None:
        """The rows that a token chooses; None where the choice is too close to call."""
        count = (p + 1) // self.ratio
        if self.ratio != 4 or count <= self.topk:
            return list(range(count))
        q, weights = self.index_values(qr, request, p)
        keys = self.pages["index"].values(self.slots_of("index", request, range(count)))
        there = np.ones((1, count), bool)
        keys = keys.astype(np.float64)[None]
        logits, u = reference_indexer.logits(q, weights, keys, there, [count], count)
        order = np.argsort(-logits[0], kind="stable")
        margin = logits[0, order[self.topk - 1]] - logits[0, order[self.topk]]
        if margin <= 2 * self.logit_unit * u.max():
            return None
        return sorted(int(i) for i in order[: self.topk])

    def reference(self, request: int, p: int, **bounds) -> tuple[np.ndarray, np.ndarray] | None:
        """What `wo_b` gets for a token in fp64, and the bound of each value's error; None where
        the indexer's choice is too close to call. The caches are those of the layer."""
        s, w = self.sizes, self.weights
        qr, _ = self.latents(request, p + 1)
        rows = self.chosen(qr[p:], request, p)
        if rows is None:
            return None
        window = range(max(p - s.window + 1, 0), p + 1)
        keys = [self.pages["swa"].values(self.slots_of("swa", request, window), KV_SCALE)]
        if self.ratio > 1:
            slots = self.slots_of("compressed", request, rows)
            keys.append(self.pages["compressed"].values(slots, KV_SCALE))
        q = self.multiply("wq_b", qr[p:]).reshape(1, self.heads, 512)
        turned = norms.queries(q, [p], w["rope_table"], self.config.eps)
        if self.q_scale != 1:
            codes = ref.e4m3_encode(turned * np.float32(1 / self.q_scale))
            turned = ref.e4m3_decode(codes) * np.float32(self.q_scale)
        else:
            turned = ref.to_f32(ref.to_bf16(turned))
        query = turned.astype(np.float64) * self.config.softmax_scale
        keys = np.concatenate(keys).astype(np.float64)
        exact = ref.attend_keys(query, [keys], w["attn_sink"], has_scales=True)
        return self.project(exact.out, exact.out_tolerance(**bounds), p)

    def project(self, out: np.ndarray, error: np.ndarray, p: int) -> tuple[np.ndarray, np.ndarray]:
        """out [1, H, 512] and the bound of its error, turned back, quantised and multiplied."""
        cos_sin = self.weights["rope_table"].astype(np.float64)
        turned = out.copy()
        cos, sin = cos_sin[p, :32], cos_sin[p, 32:]
        a, b = out[..., -64::2], out[..., -63::2]
        turned[..., -64::2], turned[..., -63::2] = a * cos + b * sin, b * cos - a * sin
        error = error.copy()
        both = error[..., -64::2] + error[..., -63::2]
        error[..., -64::2] = error[..., -63::2] = both
        # Rounding to bf16 is up to 2^-8 of a value, to e4m3 2^-4 and half a step of its subnormals,
        # 2^-10 scales, where 224 scales are at most the largest value of the tile.
        size = np.abs(turned) + error
        if self.quantized:
            tiles = size.reshape(1, self.heads, 4, 128).max(-1).repeat(128, -1).reshape(size.shape)
            error = error + size * 2.0**-4 + tiles / 224 * 2.0**-10 + 1e-12
        else:
            error = error + size * 2.0**-8
        shape = (1, self.groups, -1)
        turned, error = turned.reshape(shape), error.reshape(shape)
        weight = self.weights["wo_a"]
        if self.quantized:
            scale = self.weights["wo_a_scale"].astype(np.float64).repeat(128, 2)
            weight = ref.e4m3_decode(weight) * scale
        weight = ref.to_f32(weight).astype(np.float64) if not self.quantized else weight
        z = np.einsum("tgr,gnr->tgn", turned, weight)
        size = np.einsum("tgr,gnr->tgn", np.abs(turned) + error, np.abs(weight))
        bound = np.einsum("tgr,gnr->tgn", error, np.abs(weight))
        bound = bound + 2.0**-8 * (np.abs(z) + bound) + 2.0**-8 * size + 1e-6
        return z.reshape(1, -1), bound.reshape(1, -1)


def encode(pages: Pages, bits: np.ndarray) -> np.ndarray:
    return np.concatenate(pages.format.encode(bits, KV_SCALE), 1)
