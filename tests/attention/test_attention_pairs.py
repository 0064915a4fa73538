"""Pairs of options of sparse_attention, sparse_mla_dsv4 and the merges, each against fp64."""

from __future__ import annotations

import itertools

import numpy as np
import pairs
import pytest
import reference as ref
from cases import INT32_MAX, INT32_MIN, lay_out_q, make_sink, random_bf16
from dense_cases import E4M3, KEY_FORMATS, LAYOUTS, MAIN_FORMATS, Cache, has_rope, takes_e4m3
from device import NAME
from helpers import assert_merged, assert_within_bounds
from library import package, sparse_mla
from pairs import OUTPUTS, Output, Spy, cover, run_table
from row_formats import ALL_FORMATS
from scale_cases import BEYOND, SCALES, Scales

TOKENS = 3
SLOTS = 24  # each cache has so many


def is_named(fmt: str) -> bool:
    """Whether a call must name the format, because other rows have this size, too."""
    return fmt in ALL_FORMATS and ALL_FORMATS[fmt].needs_name


# --- lists ---------------------------------------------------------------------------------------

LENGTHS = {"none": None, "odd": [2, INT32_MAX, INT32_MIN], "short": [7, 0, 1]}


def make_list(rng, width: int, kind: str, slots: int) -> np.ndarray:
    """Slots, with entries that are none of them, with one slot over and over, or none at all."""
    found = rng.integers(0, slots, (TOKENS, width))
    if kind == "holes":
        found[rng.random(found.shape) < 0.4] = rng.choice([-1, slots, INT32_MAX, INT32_MIN])
    elif kind == "one slot":
        found[:] = slots - 1
    elif kind == "nothing":
        found[:] = -1
    wide = np.full((TOKENS, width + 3), 5, np.int32)
    wide[:, :width] = found
    return wide[:, :width] if kind != "slots" else wide[:, :width].copy()


class KeyList:
    """A cache of one list's keys. They are of ordinary size but for the cache's scale."""

    def __init__(self, rng, fmt, layout, block_size, width, kind, length, scale: Scales, extra):
        self.prefix = "extra_" if extra else ""
        kv_scale = scale.extra if extra else scale.kv
        pages = SLOTS // block_size
        self.cache = Cache(fmt, pages, block_size, layout, kv_scale)
        lens = LENGTHS[length]
        self.length = None if lens is None else np.array(lens, np.int32)
        self.indices = make_list(rng, width, kind, SLOTS)
        self.chosen = [self.choose(t) for t in range(TOKENS)]
        used = np.unique(np.concatenate([*self.chosen, np.zeros(0, np.int64)]).astype(np.int64))
        self.cache.write(rng, used, self.cache.scale)

    def choose(self, t: int) -> np.ndarray:
        row = self.indices[t].astype(np.int64)
        keep = (row >= 0) & (row < SLOTS)
        if self.length is not None:
            keep &= np.arange(len(row)) < self.length[t]
        return row[keep]

    def keys(self, t: int) -> np.ndarray:
        return self.cache.keys(self.chosen[t])

    def options(self, scale: Scales, has_name: bool) -> dict:
        """The list's keywords, but for kv and indices."""
        found = {f"{self.prefix}{name}": x for name, x in self.cache.options.items()}
        name = f"{self.prefix}kv_scale"
        if name in found or (self.cache.split and self.cache.split.format.scales == "cache"):
            found[name] = scale.argument(self.cache.scale)
        if has_name:
            found[f"{self.prefix}kv_format"] = self.cache.format_name
        if self.length is not None:
            found[f"{self.prefix}topk_length"] = self.length
        return found


# --- sparse_attention ----------------------------------------------------------------------------

SPARSE = {
    "fmt": MAIN_FORMATS,
    "extra": [None, *KEY_FORMATS],
    "layout": LAYOUTS,
    "extra_layout": LAYOUTS,
    "block_size": [1, 8],
    "extra_block_size": [2, 24],
    "scales": SCALES,
    "query": ["bf16", "pair", "pair_views", "odd_stride", "e4m3", "bytes"],
    "heads": [1, 5, 17],
    "width": [0, 9, 70],
    "extra_width": [0, 1, 66],
    "kind": ["slots", "holes", "one slot", "nothing"],
    "extra_kind": ["slots", "holes", "nothing"],
    "length": [*LENGTHS],
    "extra_length": [*LENGTHS],
    "sink": [False, True],
    "num_splits": [0, 1, 2, 64],
    "named": [False, True],
    "out": OUTPUTS,
    "lse": ["made", "packed"],
    "max_logits": ["no", "made", "packed"],
    "workspace": [False, True],
}


def scales_of(scales: Scales, *formats: str | None, e4m3: bool) -> Scales:
    """The same for operands of which some have no scale. One softmax scale serves both caches, so
    their scales must be near each other."""
    q = scales.q if e4m3 else 1.0
    kv, extra = (
        given if fmt in ALL_FORMATS and ALL_FORMATS[fmt].scales == "cache" else 1.0
        for fmt, given in zip(formats, (scales.kv, scales.extra), strict=True)
    )
    softmax = scales.softmax * scales.q / q * scales.kv / kv
    return Scales(softmax, q, kv, extra, scales.as_arrays)


def has_normal_products(fmt, extra, scales, query) -> bool:
    """What the operator asks of its scales; and keys of two caches are of one size."""
    s = scales_of(scales, fmt, extra, e4m3=query in ("e4m3", "bytes"))
    sizes = [s.kv] if extra is None else [s.kv, s.extra]
    near = max(sizes) / min(sizes) < 64
    return near and all(2.0**-125 < abs(x) < 2.0**126 for x in (s.softmax, s.softmax * s.q))


SPARSE_RULES = (
    lambda fmt, extra: extra is None or has_rope(fmt) == has_rope(extra),
    lambda fmt, query: query not in ("pair", "pair_views") or has_rope(fmt),
    lambda fmt, query: query not in ("e4m3", "bytes") or takes_e4m3(fmt),
    has_normal_products,
)


def make_query(rng, heads: int, dim: int, query: str, q_scale: float):
    """The argument, and its values in fp64 with the scale."""
    q = random_bf16(rng, TOKENS, heads, dim)
    if query in ("e4m3", "bytes"):
        codes = ref.e4m3_encode(ref.to_f32(q))
        given = codes.view(E4M3) if query == "e4m3" else codes
        return given, ref.e4m3_decode(codes).astype(np.float64) * q_scale
    wide = ref.to_f32(q).astype(np.float64)
    return lay_out_q(q, "compact" if query == "bf16" else query), wide


def test_sparse_attention():
    spy = Spy(sparse_mla.sparse_attention, package.sparse_attention)

    def run(fmt, extra, layout, extra_layout, block_size, extra_block_size, scales, query, heads,
            width, extra_width, kind, extra_kind, length, extra_length, sink, num_splits, named,
            out, lse, max_logits, workspace):  # fmt: skip
        rng = np.random.default_rng([heads, width, num_splits])
        e4m3 = query in ("e4m3", "bytes")
        s = scales_of(scales, fmt, extra, e4m3=e4m3)
        lists = [KeyList(rng, fmt, layout, block_size, width, kind, length, s, False)]
        if extra is not None:
            lists.append(KeyList(rng, extra, extra_layout, extra_block_size, extra_width,
                                 extra_kind, extra_length, s, True))  # fmt: skip
        dim = lists[0].cache.width
        softmax_scale = float(np.float32(s.softmax * dim**-0.5))
        q, wide = make_query(rng, heads, dim, query, s.q)
        options = {"softmax_scale": softmax_scale, "num_splits": num_splits}
        if e4m3:
            options["q_scale"] = s.argument(s.q)
        for each in lists:
            options |= each.options(s, named)
        if extra is not None:
            options |= {"extra_kv_cache": lists[1].cache.array, "extra_indices": lists[1].indices}
        if sink:
            options["attn_sink"] = make_sink(rng, heads)
        shape = (TOKENS, heads)
        results = {"out": Output(out, (*shape, 512), ref.BF16)}
        results["lse"] = Output(lse, shape, np.float32)
        if max_logits != "no":
            options["return_max_logits"] = True
            results["max_logits"] = Output(max_logits, shape, np.float32)
        options |= {name: x.given for name, x in results.items() if x.given is not None}
        if workspace:
            size = package.attention_workspace_size(
                TOKENS, heads, width, extra_topk=extra_width if extra else 0,
                num_splits=num_splits, device=NAME,
            )  # fmt: skip
            options["workspace"] = np.zeros(size + 64, np.uint8)
        got = spy(q, lists[0].cache.array, lists[0].indices, **options)
        keys = [np.concatenate([each.keys(t) for each in lists]) for t in range(TOKENS)]
        want = ref.attend_keys(
            wide * softmax_scale, keys, options.get("attn_sink"),
            has_scales=any(each.cache.has_scales for each in lists),
        )  # fmt: skip
        found = {n: r.check(x) for (n, r), x in zip(results.items(), got, strict=True)}
        assert_within_bounds(want, found)

    run_table(cover(SPARSE, *SPARSE_RULES), run, spy)


@pytest.mark.parametrize("scales", BEYOND, ids=str)
@pytest.mark.parametrize("names", [("kv_scale",), ("extra_kv_scale",)], ids=str)
@pytest.mark.parametrize("shape", [None, (), (1,)])
def test_scales_that_overflow_in_their_product_alone(scales, names, shape):
    """Each is a float32, and so are the products of two. An array is read where the host has it."""
    (name,) = names
    q, kv = np.zeros((1, 1, 512), E4M3), np.zeros((1, 1, 512), np.uint8)
    some = np.zeros((1, 1), np.int32)
    both = {"extra_kv_cache": kv, "extra_indices": some}
    s = Scales(scales.softmax, scales.q, scales.kv, as_arrays=shape)
    options = {"softmax_scale": s.softmax, "q_scale": s.argument(s.q), name: s.argument(s.kv)}
    for a, b in itertools.combinations((s.softmax, s.q, s.kv), 2):
        assert np.isfinite(np.float32(a * b))
    if shape is not None and NAME == "cuda":
        pytest.skip("arrays on a device are not read by the host")
    with pytest.raises(ValueError, match=rf"^sparse_attention: `{name}` must .*, got"):
        sparse_mla.sparse_attention(q, kv, some, **both, **options)
    if name == "kv_scale":
        table, lens = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
        with pytest.raises(ValueError, match=r"^mla_attention: `kv_scale` must .*, got"):
            sparse_mla.mla_attention(q, kv, table, lens, **options)


# --- sparse_mla_dsv4 -----------------------------------------------------------------------------

DSV4_FORMATS = ("bfloat16", "fp8_v4", "fp8_e4m3")
DSV4 = {
    "swa": DSV4_FORMATS,
    "compressed": DSV4_FORMATS,
    "layout": ["paged", "mqa", "padded"],
    "query": ["bf16", "odd_stride", "e4m3", "bytes"],
    "heads": [1, 6],
    "window": [1, 5, 128],
    "width": [0, 3, 70],
    "kind": ["slots", "holes", "one slot", "nothing"],
    "length": [[0, 1, 75], [4, 5, 6], [INT32_MIN, INT32_MAX, 2]],
    "scales": [
        *(Scales(1.0), Scales(0.5, kv=0.75), Scales(0.5, kv=0.75, as_arrays=())),
        Scales(2.0, kv=1.5, as_arrays=(1,)),
        *(Scales(2.0**70, kv=2.0**-70), Scales(2.0**-90, kv=2.0**90)),
    ],
    "sinks": [False, True],
    "hints": [False, True],
    "workspace": [False, True],
    "out": OUTPUTS,
}


def test_sparse_mla_dsv4():
    """bmm1_scale has both scales."""
    spy = Spy(sparse_mla.sparse_mla_dsv4, package.sparse_mla_dsv4)

    def run(swa, compressed, layout, query, heads, window, width, kind, length, scales, sinks,
            hints, workspace, out):  # fmt: skip
        rng = np.random.default_rng([heads, window, width])
        lists = []
        for fmt, columns, extra in ((swa, window, False), (compressed, width, True)):
            own = Scales(1.0, 1.0, scales.kv, scales.kv)
            lists.append(KeyList(rng, fmt, layout, 8, columns, kind, "none", own, extra))
        lens = np.array(length, np.int32)
        q, wide = make_query(rng, heads, 512, query, 1.0)
        bmm1 = float(np.float32(scales.softmax * 512**-0.5 * scales.kv))
        result = Output(out, (TOKENS, heads, 512), ref.BF16)
        options = {"bmm1_scale": scales.argument(bmm1), "window": window}
        if scales.kv != 1:
            options["bmm2_scale"] = scales.argument(scales.kv)
        if sinks:
            options["sinks"] = make_sink(rng, heads)
        if result.given is not None:
            options["out"] = result.given
        if hints:
            options |= {"max_q_len": 7, "cum_seq_lens_q": np.arange(TOKENS + 1, dtype=np.int32)}
        memory = None
        if workspace:
            size = package.attention_workspace_size(
                TOKENS, heads, window, extra_topk=width, device=NAME
            )
            memory = np.zeros(size + 64, np.uint8)
        both = np.ascontiguousarray(np.concatenate([each.indices for each in lists], 1))
        got = spy(
            q, lists[0].cache.array, memory, both, lists[1].cache.array, lens,
            np.full(TOKENS, 9, np.int32) if hints else None, **options,
        )  # fmt: skip
        keys = []
        for t in range(TOKENS):
            at = np.arange(window + width) < lens[t]
            parts = []
            for each, there in zip(lists, (at[:window], at[window:]), strict=True):
                row = each.indices[t].astype(np.int64)
                parts.append(each.cache.keys(row[there & (row >= 0) & (row < SLOTS)]))
            keys.append(np.concatenate(parts))
        has_scales = any(each.cache.has_scales for each in lists)
        want = ref.attend_keys(
            wide * (bmm1 / float(np.float32(scales.kv))), keys, options.get("sinks"),
            has_scales=has_scales,
        )  # fmt: skip
        assert_within_bounds(want, {"out": result.check(got), "lse": want.lse})

    # One scale serves both caches, so both have a format with a scale.
    rules = (lambda swa, scales: scales.kv == 1 or swa == "fp8_e4m3",
             lambda compressed, scales: scales.kv == 1 or compressed == "fp8_e4m3")  # fmt: skip
    run_table(cover(DSV4, *rules), run, spy)


# --- merges --------------------------------------------------------------------------------------

STATES = {
    "dtype": [ref.BF16, np.dtype(np.float16), np.dtype(np.float32)],
    "heads": [1, 5],
    "width": [8, 512],
    "layout": ["packed", "apart"],
    "lse_layout": ["packed", "turned"],
    "empty": ["none", "-inf", "+inf", "all"],
    "sink": [False, True],
    "out": ["made", "packed", "gap"],
    "lse": ["made", "packed", "gap"],
}


def make_states(rng, parts: int, case: dict) -> tuple[np.ndarray, np.ndarray]:
    """outs [P, T, H, V] and lses [P, T, H], of which some are empty: their out may be NaN."""
    shape = (parts, 4, case["heads"])
    gap = 3 if case["layout"] == "apart" else 0
    memory = np.full((*shape, case["width"] + 8 * gap), np.nan, case["dtype"])
    outs = memory[..., : case["width"]]
    outs[...] = rng.normal(0, 2, outs.shape)
    lses = rng.normal(0, 3, shape).astype(np.float32)
    if case["empty"] == "all":
        lses[:] = -np.inf
        outs[...] = 0
    elif case["empty"] != "none":
        lses[-1, 1:3] = float(case["empty"])
        outs[-1, 1:3] = np.nan if parts > 2 else 0
    if case["lse_layout"] == "turned":
        lses = np.ascontiguousarray(lses.swapaxes(1, 2)).swapaxes(1, 2)
    return outs, lses


def check_merged(got, want, dtype, results) -> None:
    out, lse = (result.check(x) for result, x in zip(results, got, strict=True))
    assert out.dtype == dtype
    assert_merged((out, lse), want)


def options_of(rng, case: dict, dtype) -> tuple[dict, list[Output]]:
    shape = (4, case["heads"])
    results = [Output(case["out"], (*shape, case["width"]), dtype)]
    results.append(Output(case["lse"], shape, np.float32))
    names = zip(("out", "lse"), results, strict=True)
    options = {name: x.given for name, x in names if x.given is not None}
    if case["sink"]:
        options["attn_sink"] = make_sink(rng, case["heads"])
    return options, results


def test_merge_attn_states():
    spy = Spy(sparse_mla.merge_attn_states, package.merge_attn_states)

    def run(with_context, **case):
        rng = np.random.default_rng([case["heads"], case["width"]])
        outs, lses = make_states(rng, 2, case)
        options, results = options_of(rng, case, case["dtype"])
        sink = options.get("attn_sink")
        if with_context is not None:
            options["prefill_tokens_with_context"] = with_context
        got = spy(outs[0], lses[0], outs[1], lses[1], **options)
        want = ref.merge_attn_states(outs[0], lses[0], outs[1], lses[1], sink, with_context)
        check_merged(got, want, case["dtype"], results)

    run_table(cover(STATES | {"with_context": [None, 0, 2, 4]}), run, spy)


def test_merge_attn_partials():
    spy = Spy(sparse_mla.merge_attn_partials, package.merge_attn_partials)

    def run(parts, result, **case):
        rng = np.random.default_rng([case["heads"], parts])
        outs, lses = make_states(rng, parts, case)
        dtype = ref.BF16 if result == "bf16" else case["dtype"]
        options, results = options_of(rng, case, dtype)
        got = spy(outs, lses, **options)
        want = ref.merge_attn_partials(outs, lses, options.get("attn_sink"))
        check_merged(got, want, dtype, results)

    # bf16 is made of fp32 only where it is given.
    rules = (
        lambda dtype, result, out: result == "same" or (dtype == np.float32 and out != "made"),
    )
    table = STATES | {"parts": [1, 2, 7], "result": ["same", "bf16"]}
    run_table(cover(table, *rules), run, spy)


# --- sizes of workspaces -------------------------------------------------------------------------


def test_attention_workspace_size():
    """A workspace of this size, and no other option, serves every call of the size: the calls above
    have given it. Here, that no option makes a size fall."""
    spy = Spy(package.attention_workspace_size)
    sizes = {}

    def run(**case):
        sizes[tuple(case.values())] = spy(**case, device=NAME)

    table = {"num_tokens": [1, 40], "num_heads": [1, 128], "topk": [1, 4096]}
    table |= {"extra_topk": [0, 4096], "num_splits": [0, 3, 64], "head_dim_v": [8, 128, 512]}
    table |= {"num_keys": [0, 100]}
    run_table([dict(zip(table, x, strict=True)) for x in itertools.product(*table.values())], run)
    for a, b in itertools.permutations(sizes, 2):
        if a[4] == b[4] and all(x <= y for x, y in zip(a, b, strict=True)):
            assert sizes[a] <= sizes[b], (a, b)
    pairs.assert_complete(spy, but=("device",))
