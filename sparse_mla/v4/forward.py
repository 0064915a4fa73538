"""A layer of DeepSeek V4, from hidden states to its output: `SparseMLA.forward`.

    x -> fused_wqa_wkv -> norm -> wq_b -> norm, RoPE, insert into the window's cache ->+
    x -> wkv_wgate ------------------> compressor: states, compressed rows ----------->+
    x -> index_wkv_wgate ------------> the indexer's compressor: its keys ->+          |
    x -> index_weights_proj, qr -> index_wq_b -> RoPE, quantise ----------->+ choice ->+
    attention -> inverse RoPE, quantise -> wo_a -> wo_b

The lines may run on streams of their own until attention waits for them. What is computed does not
depend on that: every line calls the same operators on the same values.
"""

from __future__ import annotations

from math import prod
from typing import Any

from sparse_mla import _C, ops
from sparse_mla.steps.v4 import HEAD_SIZE, INDEXED_RATIO, Metadata
from sparse_mla.v4.checks import INDEX_SIZE, check_projected
from sparse_mla.v4.lanes import Lane, Lanes

Array = Any
OP = "SparseMLA.forward"


def run(
    layer: Any,
    x: Array,
    caches: Any,
    metadata: Metadata | None,
    lanes: Lanes,
    *,
    out: Array | None,
    return_lse: bool,
) -> Array:
    """One layer in the block of its main lane, which waits for the others, also after an error."""
    lse = None
    if return_lse:
        shape = (x.shape[0], layer.config.num_heads)
        lse = _C.new_array("lse", x, shape, "float32", lanes.main.handle, True)
    if metadata is None:
        result = warm_up(layer, x, lanes, out)
    else:
        result = run_step(Step(layer, x, caches, metadata, lanes, lse), out)
    return (result, lse) if return_lse else result


def run_step(step: Step, out: Array | None) -> Array:
    lanes, metadata = step.lanes, step.metadata
    step.check()
    try:
        if metadata.num_actual_tokens > 0:
            step.run()
        z = step.project_groups()
    finally:  # a later build may be on another stream, and write what any lane reads
        lanes.join()
        metadata._step.mark_use(lanes.main.handle)
    return call_wo_b(step.layer, lanes.main, z, out)


def warm_up(layer: Any, x: Array, lanes: Lanes, out: Array | None) -> Array:
    """Without a step the output is that of zeros."""
    groups, rank = layer.weights.wo_a.shape[:2]
    shape = (x.shape[0], groups * rank)
    z = _C.new_array("z", x, shape, "bfloat16", lanes.main.handle, True)
    return call_wo_b(layer, lanes.main, z, out)


def call_wo_b(layer: Any, lane: Lane, z: Array, out: Array | None) -> Array:
    keywords = {} if out is None else {"out": out}
    result = lane.call(layer.projections["wo_b"], z, **keywords)
    return copy(result) if result is z else result  # z is written again by the next layer


def copy(array: Array) -> Array:
    return array.clone() if hasattr(array, "clone") else array.copy()


class Step:
    """One call of `forward`."""

    def __init__(
        self,
        layer: Any,
        x: Array,
        caches: Any,
        metadata: Metadata,
        lanes: Lanes,
        lse: Array | None,
    ) -> None:
        self.layer, self.caches, self.metadata, self.lanes = layer, caches, metadata, lanes
        self.config, self.weights, self.ratio = layer.config, layer.weights, layer.compress_ratio
        self.num_rows, self.num_tokens = x.shape[0], metadata.num_actual_tokens
        self.x, self.lse = x[: self.num_tokens], lse
        self.is_indexed = self.ratio == INDEXED_RATIO
        # The lanes of the indexer, of the compressor, and of the indexer's compressor.
        main = lanes.main
        self.choosing = lanes.side(0, main) if self.is_indexed else main
        self.pooling = lanes.side(1 if self.is_indexed else 0, main) if self.ratio > 1 else main
        self.index_pooling = lanes.side(2, self.choosing) if self.is_indexed else main

    # --- checks ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Checks what the operators cannot: that the step has what this layer needs."""
        m, most = self.metadata, self.config.max_num_batched_tokens
        m._step.check(m._generation)
        if self.num_rows < self.num_tokens or self.num_rows > most:
            raise ValueError(
                f"{OP}: `x` must have {self.num_tokens} to {most} rows, got {self.num_rows}"
            )
        if self.ratio > 1:
            self.check_group(m.layers.get(self.ratio), "compressed", "states")
            self.check_caches("compressed", "state")
        if self.is_indexed:
            self.check_group(m.index, "index", "index_states")
            self.check_caches("index", "index_state")

    def check_group(self, group: Any, pages: str, states: str) -> None:
        if group is None or group.state_slot_mapping is None:
            name = pages if group is None else states
            raise ValueError(
                f"{OP}: `metadata` must have a block table of ratio {self.ratio} for `{name}`, got "
                f"none: give it to MetadataBuilder.build"
            )

    def check_caches(self, *names: str) -> None:
        for name in names:
            if getattr(self.caches, name) is None:
                raise ValueError(
                    f"{OP}: `caches.{name}` must be given for compress ratio {self.ratio}, got none"
                )

    # --- memory ----------------------------------------------------------------------------------

    def array(self, name: str, shape: tuple[int, ...], dtype: str, size: int) -> Array:
        """An array of the builder. `size` is what the largest batch needs."""
        like, stream = self.x, self.lanes.main.handle
        return self.metadata._memory.view(like, stream, name, shape, dtype, size)

    def rows(self, name: str, row: tuple[int, ...], dtype: str) -> Array:
        """An array with a row per token."""
        most = self.config.max_num_batched_tokens
        return self.array(name, (self.num_tokens, *row), dtype, most * prod(row))

    def scale_of(self, kv_format: str) -> float:
        """The scale of a cache, if its format has one."""
        return self.config.kv_scale if kv_format == "fp8_e4m3" else 1.0

    # --- the lines -------------------------------------------------------------------------------

    def project(self, lane: Lane, name: str, x: Array) -> Array:
        result = lane.call(self.layer.projections[name], x)
        check_projected(name, result, self.num_tokens, self.layer._widths[name])
        return result

    def run(self) -> None:
        """Everything up to attention."""
        lanes, main = self.lanes, self.lanes.main
        places = {"fused_wqa_wkv": main}  # projections of x -> the lanes of their lines
        if self.ratio > 1:
            places["wkv_wgate"] = self.pooling
        if self.is_indexed:
            places |= {
                "index_wkv_wgate": self.index_pooling,
                "index_weights_proj": self.choosing,
            }
        # Large products fill the device by themselves: side by side they only disturb each other.
        is_early = self.num_tokens <= self.config.overlap_gemm_tokens
        if is_early:
            lanes.fork(places.values())
        made = {
            name: self.project(lane if is_early else main, name, self.x)
            for name, lane in places.items()
        }
        if not is_early:
            lanes.fork(places.values())
        qr, kv = self.normalise(made["fused_wqa_wkv"])
        if self.is_indexed:
            lanes.order(main, self.choosing)  # for qr
        if self.ratio > 1:
            self.pool(made["wkv_wgate"])
        choice = {}
        if self.is_indexed:
            choice = self.choose(qr, made["index_weights_proj"], made["index_wkv_wgate"])
        q = self.insert(self.project(main, "wq_b", qr), kv)
        lanes.join()
        self.attend(q, choice)

    def normalise(self, qr_kv: Array) -> tuple[Array, Array]:
        width = qr_kv.shape[-1] - HEAD_SIZE
        qr, kv = self.rows("qr", (width,), "bfloat16"), self.rows("kv", (HEAD_SIZE,), "bfloat16")
        ops.fused_q_kv_rmsnorm(
            qr_kv[:, :width],
            qr_kv[:, width:],
            self.weights.q_norm,
            self.weights.kv_norm,
            eps=self.config.eps,
            q_out=qr,
            kv_out=kv,
            stream=self.lanes.main.handle,
        )
        return qr, kv

    def insert(self, q: Array, kv: Array) -> Array:
        """The queries as attention takes them; the keys go into the window's cache."""
        config, m = self.config, self.metadata
        heads = (config.num_heads, HEAD_SIZE)
        q = q.reshape(self.num_tokens, *heads)
        is_e4m3 = config.q_scale != 1
        q_out = self.rows("q", heads, "uint8") if is_e4m3 else q
        ops.fused_qnorm_rope_kv_insert(
            q,
            kv,
            m.positions,
            self.weights.rope_table,
            self.caches.swa,
            m.slot_mapping[: self.num_tokens],
            eps=config.eps,
            q_out=q_out,
            q_scale_inv=1 / config.q_scale if is_e4m3 else None,
            kv_scale=self.scale_of(config.kv_cache_dtype),
            kv_format=config.kv_cache_dtype,
            block_size=config.swa_block_size,
            stream=self.lanes.main.handle,
        )
        return q_out

    def pool(self, kv_score: Array) -> None:
        config, weights = self.config, self.weights
        kv_format = config.compressed_kv_cache_dtype
        with self.pooling as lane:
            compress(
                self.metadata.layers[self.ratio],
                self.metadata,
                kv_score,
                state=self.caches.state,
                kv_cache=self.caches.compressed,
                ape=weights.ape,
                norm_weight=weights.compressor_norm,
                rope_table=weights.rope_table,
                eps=config.eps,
                ratio=self.ratio,
                kv_scale=self.scale_of(kv_format),
                kv_format=kv_format,
                stream=lane.handle,
            )

    def index_rope_table(self) -> Array:
        table = self.weights.index_rope_table
        return self.weights.rope_table if table is None else table

    def choose(self, qr: Array, weights: Array, kv_score: Array) -> dict[str, Array]:
        """The rows that each token attends to, as numbers and as slots."""
        config, m = self.config, self.metadata
        group: Any = m.index  # `check` has seen it
        with self.index_pooling as lane:
            compress(
                group,
                m,
                kv_score,
                state=self.caches.index_state,
                kv_cache=self.caches.index,
                ape=self.weights.index_ape,
                norm_weight=self.weights.index_norm,
                rope_table=self.index_rope_table(),
                eps=config.eps,
                ratio=self.ratio,
                kv_format=config.index_cache_dtype,
                stream=lane.handle,
            )
        query = self.quantise_query(self.project(self.choosing, "index_wq_b", qr), weights)
        self.lanes.order(self.index_pooling, self.choosing)
        topk = config.topk_tokens
        choice = {
            "topk_indices": self.rows("topk_indices", (topk,), "int32"),
            "slots": self.rows("slots", (topk,), "int32"),
            "lens": self.rows("lens", (), "int32"),
        }
        pages = m.layers[self.ratio]
        workspace = self.indexer_workspace(group.block_table, group.block_size)
        with self.choosing as lane:
            ops.lightning_indexer(
                k_cache=self.caches.index,
                context_lens=group.context_lens,
                k=topk,
                block_table=group.block_table,
                req_id_per_token=m.req_id_per_token,
                kv_format=config.index_cache_dtype,
                block_size=group.block_size,
                slots_block_table=pages.block_table,
                slots_block_size=pages.block_size,
                is_valid=m.is_valid,
                out=choice["topk_indices"],
                slots=choice["slots"],
                lens=choice["lens"],
                workspace=workspace,
                stream=lane.handle,
                **query,
            )
        return choice

    def quantise_query(self, q: Array, weights: Array) -> dict[str, Array]:
        """The indexer's queries, as lightning_indexer takes them."""
        config = self.config
        heads, is_fp4 = config.index_n_heads, config.index_cache_dtype == "mxfp4_index"
        found = {
            "q": self.rows("index_q", (heads, INDEX_SIZE // 2 if is_fp4 else INDEX_SIZE), "uint8"),
            "weights": self.rows("index_weights", (heads,), "float32"),
            "q_scale": self.rows("index_q_scale", (heads, 4), "uint8") if is_fp4 else None,
        }
        with self.choosing as lane:
            ops.fused_indexer_q_rope_quant(
                q.reshape(self.num_tokens, heads, INDEX_SIZE),
                weights,
                self.metadata.positions,
                self.index_rope_table(),
                softmax_scale=INDEX_SIZE**-0.5,
                head_scale=heads**-0.5,
                use_fp4=is_fp4,
                out=found["q"],
                out_weights=found["weights"],
                out_scale=found["q_scale"],
                stream=lane.handle,
            )
        return found

    def indexer_workspace(self, block_table: Array, block_size: int) -> Array:
        """Its size follows from the table's width, which an engine does not change."""
        config = self.config
        size = ops.lightning_indexer_workspace_size(
            config.max_num_batched_tokens,
            block_table.shape[1] * block_size,
            k=config.topk_tokens,
            device=config.device,
        )
        return self.array("indexer_workspace", (size,), "uint8", size)

    def attend(self, q: Array, choice: dict[str, Array]) -> None:
        num_heads = self.config.num_heads
        self.layer.attend(
            q,
            self.caches,
            self.metadata,
            **choice,
            out=self.rows("out", (num_heads, HEAD_SIZE), "bfloat16"),
            lse=self.rows("lse", (num_heads,), "float32") if self.lse is None else self.lse,
            stream=self.lanes.main.handle,
        )

    # --- after attention -------------------------------------------------------------------------

    def project_groups(self) -> Array:
        """What `wo_b` gets: [rows of x, G * N], zeros behind the step's tokens."""
        groups, rank = self.weights.wo_a.shape[:2]
        most = self.config.max_num_batched_tokens
        shape = (self.num_rows, groups, rank)
        z = self.array("z", shape, "bfloat16", most * groups * rank)
        if self.num_tokens > 0:
            self.project_tokens(z[: self.num_tokens])
        if self.num_tokens < self.num_rows:
            z[self.num_tokens :] = 0
        return z.reshape(self.num_rows, groups * rank)

    def project_tokens(self, z: Array) -> None:
        stream = self.lanes.main.handle
        o, o_scale = self.turned()
        ops.fused_inv_rope_fp8_quant(
            self.rows("out", (self.config.num_heads, HEAD_SIZE), "bfloat16"),
            self.metadata.positions,
            self.weights.rope_table,
            groups=self.config.o_groups,
            quantize=o_scale is not None,
            out=o,
            out_scale=o_scale,
            stream=stream,
        )
        ops.grouped_output_projection(
            o, o_scale, self.weights.wo_a, self.weights.wo_a_scale, out=z, stream=stream
        )

    def turned(self) -> tuple[Array, Array | None]:
        """Memory for attention's output, turned back: [T, G, values], and its scales [Tp, G, n],
        whose storage is [G, n, Tp]. Tp is T rounded up to 4."""
        config, num_tokens = self.config, self.num_tokens
        most = config.max_num_batched_tokens + 3
        groups, values = config.o_groups, config.num_heads * HEAD_SIZE
        shape, size = (groups, num_tokens, values // groups), most * values
        if self.weights.wo_a_scale is None:
            return self.array("o", shape, "bfloat16", size).swapaxes(0, 1), None
        columns = values // groups // 128
        room = (groups, columns, -(-num_tokens // 4) * 4)
        scales = self.array("o_scale", room, "float32", most * groups * columns)
        return self.array("o", shape, "uint8", size).swapaxes(0, 1), scales.swapaxes(0, 2).swapaxes(
            1, 2
        )


def compress(group: Any, m: Metadata, kv_score: Array, **arguments: Any) -> None:
    """One compressor: the step's states, then the rows of the groups that it closes."""
    width = kv_score.shape[-1] // 2
    ops.compress_norm_rope_store(
        block_table=group.state_block_table,
        req_id_per_token=m.req_id_per_token,
        positions=m.positions,
        slot_mapping=group.state_slot_mapping,
        kv_slot_mapping=group.slot_mapping,
        kv=kv_score[:, :width],
        score=kv_score[:, width:],
        block_size=group.block_size,
        **arguments,
    )
