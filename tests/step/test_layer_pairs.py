"""Pairs of options of the layers of DeepSeek-V3.2 and V4, their Configs and builders, against
fp64."""

from __future__ import annotations

import cases
import device
import engine
import numpy as np
import pytest
import reference as ref
import reference_plan
import reference_v4 as plan
from helpers import assert_same_bits, assert_within_bounds
from library import package, sparse_mla
from pairs import OUTPUTS, Output, Spy, assert_complete, assert_fields_differ, cover
from test_v4_forward import check_caches, check_results, keep_z
from v4_world import Q_SCALE, World

from sparse_mla.steps.v4 import COMPRESSED_DTYPES, INDEX_CACHE_DTYPES, KV_CACHE_DTYPES, PATHS
from sparse_mla.steps.v32 import KV_CACHE_DTYPES as V32_DTYPES

BATCHES = {  # query and sequence lengths
    "decodes": ([1, 1, 1], [3, 65, 200]),
    "drafts": ([3, 3, 3], [70, 3, 128]),
    "prompts": ([30, 9], [30, 150]),
    "all": ([1, 1, 3, 40], [70, 1, 9, 128]),
}


def run_cases(options, rules, run) -> None:
    for case in cover(options, *rules):
        try:
            run(**case)
        except Exception as error:
            raise AssertionError(f"{error}\nin the case {case}") from error


# --- DeepSeek-V3.2 -------------------------------------------------------------------------------

V32 = {
    "dtype": V32_DTYPES,
    "path": [None, "mixed", "separate", "direct"],
    "batch": [*BATCHES],
    "heads": [2, 17, 33],
    "page": [1, 16, 64],
    "topk": [8, 48],
    "cp": [None, (0, 1, 5)],
    "threshold": [1, 3],
    "least_heads": [1, 32],
    "rows": [None, cases.ENGINE_WORKSPACE],
    "softmax_scale": [engine.SCALE, -0.03],
    "workspace": [False, True],
    "query": ["rows", "pair", "pair_views", "odd_stride"],
    "sink": [False, True],
    "padding": [0, 2],
    "bounds": ["none", "largest", "above"],
    "host": ["left out", "arrays", "lists"],
    "hints": [False, True],
    "out": OUTPUTS[:3],
    "lse": ["made", "packed", "gap"],
    "return_lse": [True, False],
    "weight": ["none", "bf16", "turned", "e4m3"],
}
V32_RULES = (
    # Rows in bf16 are attended to where they lie; other paths are of fp8_ds_mla.
    lambda dtype, path: path is None or dtype == "fp8_ds_mla",
    # A workspace of the caller has as many rows as the config asks for.
    lambda rows, workspace: not workspace or rows is not None,
)


def weights_of(kind: str, heads: int) -> dict:
    """The layer's weight [512, H * (16 + 24)] as the constructor takes it."""
    rng = np.random.default_rng(heads)
    weight = cases.random_bf16(rng, 512, heads * 40, std=0.05)
    if kind == "none":
        return {}
    if kind == "e4m3":
        blocks = 4, -(-heads * 40 // 128)
        codes = ref.e4m3_encode(ref.to_f32(weight) * np.float32(64))
        return {
            "kv_b_proj": codes.view(ref.E4M3),
            "weight_scale_inv": np.full(blocks, 1 / 64, "f4"),
        }
    return {"kv_b_proj": weight if kind == "bf16" else np.ascontiguousarray(weight.T)}


def test_v32_layers():
    make, builder = Spy(sparse_mla.SparseMLA), Spy(sparse_mla.MetadataBuilder)
    build = Spy(lambda b, *a, **k: b.build(*a, **k), package.MetadataBuilder.build)
    forward = Spy(lambda x, *a, **k: x.forward(*a, **k), package.SparseMLA.forward)
    configs = []

    def run(dtype, path, batch, heads, page, topk, cp, threshold, least_heads, rows, softmax_scale,
            workspace, query, sink, padding, bounds, host, hints, out, lse, return_lse,
            weight):  # fmt: skip
        lens, seq_lens = BATCHES[batch]
        if threshold == 1:
            order = sorted(range(len(lens)), key=lambda i: lens[i] > 1)
            lens, seq_lens = [lens[i] for i in order], [seq_lens[i] for i in order]
        given = cases.make_batch(lens, seq_lens, block_size=page, pad_tokens=padding)
        step = engine.make_step(given, heads, topk=topk)
        is_fp8 = dtype == "fp8_ds_mla"
        kv = step.fp8_cache if is_fp8 else step.bf16_cache(sparse_mla)
        config = engine.config(
            sparse_mla, num_heads=heads, fp8=is_fp8, path=path, block_size=page, topk_tokens=topk,
            decode_threshold=threshold, min_heads_for_bf16_prefill=least_heads,
            prefill_workspace_tokens=rows, kv_cache_dtype=dtype, softmax_scale=softmax_scale,
            max_num_seqs=8 + heads, max_num_batched_tokens=100 + heads, max_model_len=300 + topk,
            cp=cp, qk_nope_head_dim=16 if weight != "none" else 128,
            v_head_dim=24 if weight != "none" else 128,
        )  # fmt: skip
        configs.append(config)
        memory = {}
        if workspace:
            memory["workspace"] = np.zeros((rows, 576), ref.BF16)
        changes = {"max_query_len": None, "max_seq_len": None}
        if bounds != "none":
            more = 30 if bounds == "above" else 0
            changes = {"max_query_len": max(lens) + more, "max_seq_len": max(seq_lens) + more}
        if host == "lists":
            changes |= {"query_start_loc_cpu": given.query_start_loc.tolist(),
                        "seq_lens_cpu": given.seq_lens.tolist()}  # fmt: skip
        elif host == "left out" and not device.ON_CUDA:
            changes |= {"query_start_loc_cpu": None, "seq_lens_cpu": None, "num_reqs": None}
        extra = {"common_prefix_len": 2, "fast_build": True} if hints else {}
        metadata = build(builder(config, **memory), given.common(sparse_mla, **changes), **extra)
        made = make(config, **weights_of(weight, heads))
        tokens = given.num_actual_tokens
        results = {"out": Output(out, (tokens, heads, 512), ref.BF16)}
        results["lse"] = Output(lse, (tokens, heads), np.float32)
        options = {name: x.given for name, x in results.items() if x.given is not None}
        if sink:
            options["attn_sink"] = step.attn_sink
        if not return_lse:
            options["return_lse"] = False
        q = cases.lay_out_q(step.q, "compact" if query == "rows" else query)
        got = forward(made, q, kv, step.topk_indices, metadata, **options)
        if not return_lse and lse == "made":
            del results["lse"]
            got = (got,)
        found = {n: r.check(x) for (n, r), x in zip(results.items(), got, strict=True)}
        planned = reference_plan.build(
            given, path=metadata.path, decode_threshold=threshold,
            workspace_tokens=rows or config.prefill_workspace_tokens or 10**6,
        )  # fmt: skip
        want = reference_plan.forward(
            planned, step.q, kv, step.topk_indices, given, softmax_scale=softmax_scale,
            attn_sink=step.attn_sink if sink else None,
        )  # fmt: skip
        assert_within_bounds(want, {"lse": want.lse} | found)

    run_cases(V32, V32_RULES, run)
    assert_fields_differ(configs)
    assert_complete(make, builder, build, forward, but=("config", "self", "metadata"))


# --- DeepSeek V4 ---------------------------------------------------------------------------------

V4 = {
    "kv": KV_CACHE_DTYPES,
    "compressed": [None, *COMPRESSED_DTYPES],
    "index": INDEX_CACHE_DTYPES,
    "ratio": [1, 4, 16],
    "path": [None, *PATHS],
    "quantized": [False, True],
    "q_scale": [1.0, Q_SCALE],
    "softmax_scale": [512**-0.5, -0.03],
    "window": [1, 6],
    "cp": [None, (0, 1, 3)],
    "swa_page": [4, 16],
    "page": [16, 32],
    "state_pages": [{4: 4, 16: 8}, {4: 8, 16: 16}],
    "threshold": [1, 4],
    "chunk": [1, 3],
    "topk": [3, 64],
    "heads": [(2, 1), (4, 2)],
    "eps": [1e-6, 1e-3],
    "overlap": [1, 1024],
    "index_heads": [3],
    "padding": [0, 2],
}
STEPS = [  # (request, first position, tokens); decodes of up to 4 tokens first
    [(0, 0, 21), (1, 0, 5)],
    [(0, 21, 1), (1, 5, 13), (2, 0, 9)],
    [(0, 22, 1), (1, 18, 1), (2, 9, 7)],
]
LENGTHS = (23, 19, 16)
V4_RULES = (
    # Layers of ratio 1 have no compressed rows, and those of 4 alone have an indexer.
    lambda ratio, compressed: ratio > 1 or compressed is None,
    lambda ratio, index: ratio == 4 or index == INDEX_CACHE_DTYPES[0],
)


@pytest.mark.skipif(device.ON_CUDA, reason="test_gpu_v4_forward.py has worlds on a GPU")
def test_v4_layers():
    """Whole layers: every result within the chained bounds, every byte of the caches exact."""
    configs = []

    def run(kv, compressed, index, ratio, path, quantized, q_scale, softmax_scale, window, cp,
            swa_page, page, state_pages, threshold, chunk, topk, heads, eps, overlap, index_heads,
            padding):  # fmt: skip
        sizes = plan.Sizes(
            window=window, swa_block_size=swa_page, block_size=page, state_block_sizes=state_pages,
            ratios=(4, 16) if ratio != 16 else (16,), max_num_seqs=4 + chunk,
            max_num_batched_tokens=40 + topk, max_model_len=64 + page, decode_threshold=threshold,
            prefill_chunk_size=chunk,
        )  # fmt: skip
        if ratio == 16:
            sizes.state_block_sizes = {16: state_pages[16]}
        options = {"path": path, "cp": cp, "softmax_scale": softmax_scale, "eps": eps,
                   "overlap_gemm_tokens": overlap}  # fmt: skip
        world = World(
            package, ratio, LENGTHS, seed=ratio + topk, kv=kv, compressed=compressed, index=index,
            quantized=quantized, q_scale=q_scale, sizes=sizes, heads=heads[0], groups=heads[1],
            topk=topk, options=options,
        )  # fmt: skip
        configs.append(world.config)
        kept = keep_z(world)
        for parts in STEPS:
            if threshold == 1:
                parts = sorted(parts, key=lambda part: part[2] > 1)
            out = world.step(parts, padding)
            assert_same_bits(out, world.multiply("wo_b", kept[-1])[: len(out)])
            check_results(world, parts, kept[-1], {"gathered": path == "separate"})
        for b, n in enumerate(LENGTHS):
            check_caches(world, b, n)

    run_cases(V4, V4_RULES, run)
    assert_fields_differ(configs, but=("device", "index_n_heads"))
