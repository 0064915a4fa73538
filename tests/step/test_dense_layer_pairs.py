"""Pairs of options of dense MLA's Config, builder and layer, plain and absorbed, against fp64."""

from __future__ import annotations

import dataclasses

import device
import numpy as np
import pytest
import reference as ref
from dense_steps import ARRAYS, Case, count_merges, travel, wide
from helpers import NO_NAN, assert_same_bits
from pairs import Output, Spy, assert_complete, assert_fields_differ, cover
from test_dense_absorbed import IN_BF16, IN_FP8, SCHEMES, Layer, distance

import sparse_mla as package
from sparse_mla.steps.dense import CACHE_ROWS, CONTEXT_PLANS, LATENT, PATHS

dense = package.dense

BATCHES = {  # query lengths and contexts; decodes come first for every threshold
    "decodes": ([1, 1], [33, 0]),
    "drafts": ([1, 3, 2, 3], [40, 0, 7, 65]),
    "prompts": ([9, 20], [0, 70]),
    "all": ([1, 2, 1, 17, 4], [50, 31, 0, 40, 0]),
}
OPTIONS = {
    # Every name of a cache, with and without RoPE.
    "cache": [(name, size - LATENT) for size, rows in CACHE_ROWS.items() for name in rows],
    "path": [None, *PATHS],
    "plan": CONTEXT_PLANS,
    "weights": ["plain", "turned", "pair", "scale", "absorbed", *SCHEMES, "to bf16"],
    "batch": [*BATCHES],
    "heads": [1, 4],
    "page": [1, 16],
    "sizes": [(32, 48), (128, 128)],
    "threshold": [1, 3],
    "interleaved": [True, False],
    "softmax_scale": [0.07, -0.02],
    "kv_scale": ["left out", "one", "number", "array", "array of one"],
    "rows": [None, 64],  # prefill_workspace_tokens
    "workspaces": ["none", "first", "both"],
    "cp": [None, (0, 1, 5)],
    "query": ["rows", "pair", "wide"],
    "padding": [0, 2],
    "bounds": ["none", "largest", "above"],
    "host": ["left out", "arrays", "lists"],
    "hints": [False, True],
    "out": ["made", "packed", "gap"],
    "lse": ["left out", "made", "packed", "gap"],
    "return_lse": [False, True],
}
IS_ABSORBED = ("absorbed", *SCHEMES, "to bf16")
RULES = (
    lambda weights, query: query != "pair" or weights not in IS_ABSORBED,
    lambda cache, query: query != "pair" or cache[1] > 0,
    # A cache that has no scale is written with 1.
    lambda cache, kv_scale: cache[0] == "fp8_e4m3" or kv_scale in ("left out", "one"),
    # lse is made for a call that asks for it.
    lambda lse, return_lse: lse != "made" or return_lse,
    lambda lse, return_lse: lse != "left out" or not return_lse,
)


def make_case(cache, batch, heads, page, sizes, threshold, interleaved, softmax_scale, kv_scale,
              padding) -> Case:  # fmt: skip
    lens, contexts = BATCHES[batch]
    if threshold == 1:  # decodes are requests of one token
        order = sorted(range(len(lens)), key=lambda i: lens[i] > 1)
        lens, contexts = [lens[i] for i in order], [contexts[i] for i in order]
    name, rope = cache
    return Case(
        lens, contexts, heads, page, "bfloat16" if name == "auto" else name, padding,
        nope=sizes[0], values=sizes[1], rope=rope, threshold=threshold, interleaved=interleaved,
        softmax_scale=softmax_scale,
        scale=1.0 if kv_scale in ("left out", "one") else 0.03,
    )  # fmt: skip


def weights_of(case: Case, weights: str) -> tuple[Layer | None, dict, float]:
    """The layer's own numbers, the keywords of DenseMLA, and the bound of |y - y0| / |y0|."""
    if weights == "plain":
        return None, {"kv_b_proj": case.weight}, 0
    if weights == "turned":
        return None, {"kv_b_proj": np.ascontiguousarray(case.weight.T)}, 0
    scheme = {"pair": "block", "scale": "block", "absorbed": None, "to bf16": "token_channel"}
    layer = Layer(case, scheme=scheme.get(weights, weights))
    if weights == "pair":
        return layer, {"kv_b_proj": layer.weights["kv_b_proj"]}, 0
    if weights == "scale":
        weight, scale = layer.weights["kv_b_proj"]
        return layer, {"kv_b_proj": weight, "weight_scale_inv": scale}, 0
    options = {**layer.weights, "absorb": True}
    if weights == "token_tensor":
        options["scheme"] = weights
    if weights == "to bf16":
        options["requantize"] = False
    return layer, options, IN_FP8 if weights in SCHEMES else IN_BF16


def batch_of(case: Case, trip, bounds: str, host: str):
    batch = case.batch
    values = {"query_start_loc_cpu": batch.query_start_loc, "seq_lens_cpu": batch.seq_lens}
    if host == "lists":
        values = {name: x.tolist() for name, x in values.items()}
    if host == "left out" and not device.ON_CUDA:
        values = {}
    above = {"none": None, "largest": 0, "above": 40}[bounds]
    if above is not None:
        values["max_query_len"] = max(case.query_lens) + above
        values["max_seq_len"] = max(case.lens) + above
        values["num_reqs"] = len(case.lens)
    return package.CommonAttentionMetadata(
        *(trip.put(getattr(batch, name)) for name in ARRAYS),
        num_actual_tokens=batch.num_actual_tokens, **values,
    )  # fmt: skip


@dataclasses.dataclass
class Run:
    """What the cases of a table have in common: spies of all functions, and configs."""

    make: Spy = dataclasses.field(default_factory=lambda: Spy(dense.DenseMLA))
    builder: Spy = dataclasses.field(default_factory=lambda: Spy(dense.MetadataBuilder))
    build: Spy = dataclasses.field(
        default_factory=lambda: Spy(
            lambda builder, *a, **k: builder.build(*a, **k), dense.MetadataBuilder.build
        )
    )
    forward: Spy = dataclasses.field(
        default_factory=lambda: Spy(
            lambda layer, *a, **k: layer.forward(*a, **k), dense.DenseMLA.forward
        )
    )
    common: Spy = dataclasses.field(default_factory=lambda: Spy(package.CommonAttentionMetadata))
    configs: list = dataclasses.field(default_factory=list)

    def case(self, cache, path, plan, weights, batch, heads, page, sizes, threshold, interleaved,
             softmax_scale, kv_scale, rows, workspaces, cp, query, padding, bounds, host, hints,
             out, lse, return_lse) -> None:  # fmt: skip
        case = make_case(cache, batch, heads, page, sizes, threshold, interleaved, softmax_scale,
                         kv_scale, padding)  # fmt: skip
        layer, options, distance_bound = weights_of(case, weights)
        config = case.config(path=path, context_plan=plan, prefill_workspace_tokens=rows,
                             kv_cache_dtype=cache[0], cp=cp)  # fmt: skip
        self.configs.append(config)
        trip = travel()
        memory = {}
        num_rows = max(rows or 0, 128)
        if workspaces != "none" and rows is not None:
            memory["workspace"] = trip.put(np.zeros((num_rows, 512 + case.rope), ref.BF16))
        if workspaces == "both" and rows is not None:
            columns = heads * sum(sizes)
            memory["up_workspace"] = trip.put(np.zeros((num_rows, columns), ref.BF16))
        builder = self.builder(config, **memory)
        hints = {"common_prefix_len": 3, "fast_build": True} if hints else {}
        case.metadata = self.build(builder, batch_of(case, trip, bounds, host), **hints)
        table = None if case.table is None else trip.put(case.table)
        given = {"rope_table": table} if table is not None else {}
        made = self.make(config, **{name: trip.put(x) for name, x in options.items()}, **given)
        got, got_lse = self.run(
            case, layer, made, query, kv_scale, out, (lse, return_lse), trip, distance_bound > 0
        )
        want = case.exact(count_merges(case), case.metadata.path)
        if distance_bound:
            assert distance(got, layer.project(want.out)) < distance_bound
        else:
            want.check(got)
            if got_lse is not None:
                want.check_lse(got_lse)

    def run(self, case, layer, made, query, kv_scale, out, lse, trip, is_absorbed):
        tokens = case.batch.num_actual_tokens
        if is_absorbed:
            q, shape = layer.q_c, (tokens, layer.hidden)
            q[tokens - case.padding :] = 1
        else:
            q, shape = case.q, (tokens, case.heads, case.values)
        if query == "pair":
            q = tuple(np.ascontiguousarray(x) for x in np.split(q, [case.nope], -1))
        elif query == "wide":  # columns of a wider projection, and rows behind the step's
            wider = np.full((tokens + (out != "made"), *q.shape[1:-1], q.shape[-1] + 8), 1, q.dtype)
            wider[:tokens, ..., 8:] = q
            q = wider[..., 8:]
        result = Output(out, shape, ref.BF16)
        options = {} if result.given is None else {"out": trip.put(result.given)}
        lse, return_lse = lse
        is_made = lse in ("left out", "made")
        rows = len(q[0] if isinstance(q, tuple) else q) if is_made else tokens
        lses = Output("made" if is_made else lse, (rows, case.heads), np.float32)
        if lses.given is not None:
            options["lse"] = trip.put(lses.given)
        if return_lse:
            options["return_lse"] = True
        scale = np.float32(case.kv_scale)
        if kv_scale != "left out":
            values = {"array": np.full((), scale), "array of one": np.full(1, scale)}
            options["kv_scale"] = trip.put(values.get(kv_scale, float(scale)))
        before = [x.copy() for x in (case.kv_c, case.k_pe)]
        k_pe = case.k_pe if case.rope else None
        arrays = trip.put((q, case.kv_c, k_pe, case.cache.copy()))
        got = self.forward(made, *arrays, case.metadata, **options)
        trip.fetch()
        # A layer with `cp` always returns lse.
        got, got_lse = got if lse != "left out" or made.config.cp else (got, None)
        if result.given is None:
            got = device.host(got)
        got = result.check(result.given if result.given is not None else np.asarray(got))
        if got_lse is not None:
            rows = lses.given if lses.given is not None else device.host(got_lse)
            got_lse = lses.check(rows)[: tokens - case.padding]
            assert (rows[tokens - case.padding : tokens] == -np.inf).all()
        for x, y in zip(before, (case.kv_c, case.k_pe), strict=True):
            assert_same_bits(x, y, "an input")
        assert not wide(got[tokens - case.padding :]).any()
        return got[: tokens - case.padding], got_lse


def test_dense_layers():
    run = Run()
    for case in cover(OPTIONS, *RULES):
        try:
            run.case(**case)
        except Exception as error:
            raise AssertionError(f"{error}\nin the case {case}") from error
    assert_fields_differ(run.configs)
    # Projections are given with absorb; metadata is None for profiling alone.
    assert_complete(run.make, run.builder, run.build, run.forward, but=("config", "self"))


@pytest.mark.parametrize("above", [1, 7, 4000])
@pytest.mark.parametrize("path", PATHS)
def test_bounds_above_the_batch_s_largest_change_no_bit(path, above):
    """max_query_len and max_seq_len of a captured graph are those of its largest batch."""
    case = Case([1, 1, 9, 20], [33, 0, 0, 70], padding=1)
    results = []
    for more in (0, above):
        trip = travel()
        config = case.config(path=path, max_model_len=8192)
        bounds = {"max_query_len": 20 + more, "max_seq_len": 90 + more}
        common = package.CommonAttentionMetadata(
            *(trip.put(getattr(case.batch, name)) for name in ARRAYS),
            query_start_loc_cpu=case.batch.query_start_loc, seq_lens_cpu=case.batch.seq_lens,
            num_actual_tokens=case.batch.num_actual_tokens, **bounds,
        )  # fmt: skip
        metadata = dense.MetadataBuilder(config).build(common)
        assert metadata.max_query_len == bounds["max_query_len"]
        if metadata.prefill is not None:
            assert metadata.prefill.max_query_len == 20
        layer = dense.DenseMLA(
            config, kv_b_proj=trip.put(case.weight), rope_table=trip.put(case.table)
        )
        out = Output("packed", (len(case.q), case.heads, case.values), ref.BF16)
        arrays = trip.put((case.q, case.kv_c, case.k_pe, case.cache.copy()))
        layer.forward(*arrays, metadata, out=trip.put(out.given))
        trip.fetch()
        results.append(out.check(out.given))
    assert (results[0].view(np.uint8) != NO_NAN).any()
    assert_same_bits(*results)
