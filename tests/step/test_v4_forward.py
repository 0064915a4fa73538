"""sparse_mla.v4.SparseMLA.forward (sparse_mla/v4/forward.py): a whole layer against fp64, and the
same bits however an engine cuts its requests."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import reference as ref
import reference_v4 as plan
from helpers import assert_same_bits
from v4_world import HIDDEN, Q_SCALE, RANK, World

import sparse_mla
from sparse_mla.v4.checks import ALL_PROJECTIONS

RATIOS = (1, 4, 16)
FORMATS = [
    {"kv": "fp8_v4"},
    {"kv": "fp8_v4", "compressed": "fp4_v41"},
    {"kv": "bfloat16", "compressed": "fp8_v41", "index": "mxfp4_index"},
    {"kv": "fp8_e4m3", "compressed": "fp8_v4", "q_scale": Q_SCALE},
    {"kv": "bfloat16", "quantized": False},
]
PATHS = ("direct", "separate")


def keep_z(world: World) -> list:
    """Makes the layer keep what `wo_b` gets."""
    found = []
    wo_b = world.layer.projections["wo_b"]

    def keep(z, **options):
        found.append(np.array(world.back(z)))
        return wo_b(z, **options)

    world.layer.projections["wo_b"] = keep
    return found


def random_steps(rng, lengths) -> list[tuple[list, int]]:
    """Steps that bring every request to its end: decodes of up to four tokens first, then chunks,
    then padding. Some requests pause."""
    done = [0] * len(lengths)
    steps = []
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        parts = []
        for b, n in enumerate(lengths):
            if done[b] < n and rng.random() < 0.8:
                count = min(n - done[b], int(rng.choice([1, 1, 2, 3, 4, 7, 13, 24])))
                parts.append((b, done[b], count))
                done[b] += count
        parts.sort(key=lambda part: part[2] > 4)
        if parts:
            steps.append((parts, int(rng.integers(0, 3))))
    return steps


def tokens_of(parts) -> list[tuple[int, int]]:
    return [(b, p) for b, a, n in parts for p in range(a, a + n)]


# --- values --------------------------------------------------------------------------------------


def is_checked(t: int, p: int) -> bool:
    """Which tokens the slow reference looks at."""
    return (t * 7 + p) % 3 > 0


def check_results(world: World, parts, z: np.ndarray, bounds: dict) -> int:
    """Compares what `wo_b` got with the reference. -> the number of tokens whose choice of rows is
    too close to call."""
    world.sync()
    close = 0
    for t, (b, p) in enumerate(tokens_of(parts)):
        found = world.reference(b, p, **bounds) if is_checked(t, p) else None
        close += found is None and is_checked(t, p)
        if found is not None:
            assert ref.worst_ratio(z[t : t + 1], *found) <= 1
    return close


def check_caches(world: World, request: int, length: int) -> None:
    """Every byte that a query can see, and the states that the next group needs."""
    seen = world.visible(request, length)
    for name, rows in world.expected_rows(request, length).items():
        assert_same_bits(seen[name], rows[len(rows) - len(seen[name]) :])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("formats", FORMATS, ids=lambda f: "-".join(map(str, f.values())))
@pytest.mark.parametrize("ratio", RATIOS)
def test_the_layer(ratio, formats, path):
    """Every result within the chained bounds of the operators, every byte of the caches exact."""
    lengths = (61, 40, 9)
    world = World(sparse_mla, ratio, lengths, seed=ratio, options={"path": path}, **formats)
    kept = keep_z(world)
    close = 0
    for parts, padding in random_steps(np.random.default_rng(ratio), lengths):
        out = world.step(parts, padding)
        assert_same_bits(out, world.multiply("wo_b", kept[-1])[: len(out)])
        close += check_results(world, parts, kept[-1], {"gathered": path == "separate"})
    assert close <= sum(lengths) / 20
    for b, n in enumerate(lengths):
        check_caches(world, b, n)


# --- bits ----------------------------------------------------------------------------------------


def run(world: World, steps) -> dict:
    """-> the result of each token, and the visible bytes of each request."""
    found = {}
    for parts, padding in steps:
        for token, row in zip(tokens_of(parts), world.step(parts, padding), strict=True):
            found[token] = row
    return found | {b: world.visible(b, n) for b, n in enumerate(world.lengths)}


def token_by_token(lengths):
    return [([(b, p, 1)], 0) for b, n in enumerate(lengths) for p in range(n)]


def run_drafts(rng, world: World) -> dict:
    """Every step runs a token and up to three drafts, of which it accepts some."""
    found = {}
    done = [0] * len(world.lengths)
    while any(d < n for d, n in zip(done, world.lengths, strict=True)):
        parts, accepted = [], {}
        for b, n in enumerate(world.lengths):
            if done[b] < n:
                count = min(n - done[b], int(rng.integers(1, 5)))
                parts.append((b, done[b], count))
                accepted[b] = int(rng.integers(1, count + 1))
        wrong = {(b, p) for b, a, n in parts for p in range(a + accepted[b], a + n)}
        out = world.step(parts, int(rng.integers(0, 2)), wrong)
        for token, row in zip(tokens_of(parts), out, strict=True):
            if token not in wrong:
                found[token] = row
        for b, count in accepted.items():
            done[b] += count
    return found | {b: world.visible(b, n) for b, n in enumerate(world.lengths)}


def assert_equal(got: dict, want: dict) -> None:
    assert got.keys() == want.keys()
    for key, value in want.items():
        if isinstance(value, dict):
            for name in value:
                assert_same_bits(got[key][name], value[name])
        else:
            assert_same_bits(got[key], value)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("formats", FORMATS[:4], ids=lambda f: "-".join(map(str, f.values())))
@pytest.mark.parametrize("ratio", RATIOS)
def test_any_schedule_gives_the_same_bits(ratio, formats, seed):
    """Token by token, in chunks beside other requests, and in drafts that are rejected."""
    rng = np.random.default_rng(seed)
    lengths = tuple(int(n) for n in rng.integers(1, 40, 3))

    def new() -> World:
        return World(sparse_mla, ratio, lengths, seed=seed, **formats)

    want = run(new(), token_by_token(lengths))
    assert_equal(run(new(), random_steps(rng, lengths)), want)
    assert_equal(run_drafts(rng, new()), want)


def test_real_sizes():
    """Ratio 128, windows of 128 and pages of 256 tokens, as V4 has them."""
    sizes = plan.Sizes(
        window=128, swa_block_size=64, block_size=256, ratios=(4, 128),
        state_block_sizes={4: 4, 128: 8}, max_num_seqs=4, max_num_batched_tokens=300,
        max_model_len=600, decode_threshold=2,
    )  # fmt: skip
    lengths = (290, 257)
    steps = [([(0, 0, 255), (1, 0, 30)], 1), ([(0, 255, 2), (1, 30, 200)], 0)]
    steps += [([(0, 257, 1), (1, 230, 26)], 0), ([(1, 256, 1), (0, 258, 32)], 2)]
    for ratio in (1, 4, 128):
        world = World(sparse_mla, ratio, lengths, sizes=sizes, topk=16, seed=ratio)
        kept = keep_z(world)
        for parts, padding in steps:
            world.step(parts, padding)
            last = [(b, a + n - 1, 1) for b, a, n in parts]
            rows = np.cumsum([n for _, _, n in parts]) - 1
            check_results(world, last, kept[-1][rows], {})
        for b, n in enumerate(lengths):
            check_caches(world, b, n)


# --- calls ---------------------------------------------------------------------------------------


def one_step(ratio=4, **options) -> tuple[World, object, np.ndarray]:
    world = World(sparse_mla, ratio, (20,), **options)
    parts = [(0, 0, 20)]
    return world, world.build(parts), world.inputs(parts)


def test_projections_may_be_attributes():
    world, metadata, x = one_step()
    want = world.layer.forward(x, world.caches, metadata)
    holder = SimpleNamespace(**world.projections, unrelated=3)
    layer = sparse_mla.v4.SparseMLA(world.config, 4, world.layer.weights, holder)
    assert_same_bits(layer.forward(x, world.caches, metadata), want)


def test_a_result_is_not_memory_of_the_builder():
    """Also where `wo_b` returns what it got."""
    world, metadata, x = one_step()
    world.layer.projections["wo_b"] = lambda z: z
    first = world.layer.forward(x, world.caches, metadata)
    kept = first.copy()
    world.layer.forward(np.zeros_like(x), world.caches, metadata)
    assert_same_bits(first, kept)


def test_rows_behind_the_step():
    """Rows of x behind the step's tokens are not read, and `wo_b` gets zeros for them."""
    world, metadata, x = one_step()
    kept = keep_z(world)
    want = world.layer.forward(x, world.caches, metadata)
    more = np.concatenate([x, np.full((3, HIDDEN), np.nan, x.dtype)])
    got = world.layer.forward(more, world.caches, metadata)
    assert_same_bits(got[:20], want)
    assert kept[-1].shape == (23, world.groups * RANK)
    assert not ref.to_f32(kept[-1][20:]).any()


def test_out_is_passed_on():
    world, metadata, x = one_step()
    given = np.zeros((20, 5), np.float32)
    seen = {}

    def wo_b(z, out=None):
        seen["out"] = out
        return out

    world.layer.projections["wo_b"] = wo_b
    assert world.layer.forward(x, world.caches, metadata, out=given) is given
    assert seen["out"] is given


@pytest.mark.parametrize("ratio", RATIOS)
def test_warm_up_runs_wo_b_on_zeros(ratio):
    world, _, x = one_step(ratio)
    kept = keep_z(world)
    before = {name: world.bytes_of(name).copy() for name in world.memory}
    out = world.layer.forward(x, world.caches, None)
    assert out.shape == (20, HIDDEN)
    assert kept[-1].shape == (20, world.groups * RANK)
    assert kept[-1].dtype == ref.BF16
    assert not kept[-1].view(np.uint16).any()
    for name, bits in before.items():
        assert_same_bits(world.bytes_of(name), bits)


def test_a_step_without_tokens():
    world, _, _ = one_step()
    metadata = world.build([])
    out = world.layer.forward(np.zeros((0, HIDDEN), ref.BF16), world.caches, metadata)
    assert out.shape == (0, HIDDEN)


def test_the_builder_owns_what_lies_between():
    """All layers and steps share it, sized for the largest batch by the first step."""
    world, metadata, x = one_step()
    assert world.builder.forward_bytes == 0
    world.layer.forward(x, world.caches, metadata)
    size = world.builder.forward_bytes
    tokens, heads = world.sizes.max_num_batched_tokens, world.heads
    assert size > tokens * heads * 512 * 3  # attention's result, and its e4m3 copy
    other = sparse_mla.v4.SparseMLA(world.config, 4, world.layer.weights, world.projections)
    other.forward(x, world.caches, metadata)
    world.step([(0, 7, 1)])
    assert world.builder.forward_bytes == size


@pytest.mark.parametrize("more", [0, 1, 40])
def test_tables_wider_than_the_model(more):
    """Pages behind max_model_len, as engines round their tables up, change no bit."""
    want = one_step()[0].step([(0, 0, 20)])
    world, _, _ = one_step()
    for name, table in world.tables.items():
        world.tables[name] = np.pad(table, ((0, 0), (0, more)), constant_values=-1)
    assert_same_bits(world.step([(0, 0, 20)]), want)


def test_the_cpu_ignores_streams():
    world, metadata, x = one_step()
    want = world.layer.forward(x, world.caches, metadata)
    assert_same_bits(world.layer.forward(x, world.caches, metadata, streams=[3, 5, 7]), want)


# --- bad input -----------------------------------------------------------------------------------


def replaced(world: World, **changes):
    weights = dataclasses.replace(world.layer.weights, **changes)
    return sparse_mla.v4.SparseMLA(world.config, world.ratio, weights, world.projections)


@pytest.mark.parametrize(
    ("ratio", "left_out"),
    [(1, "wq_b"), (16, "wkv_wgate"), (4, "index_wq_b"), (4, "index_weights_proj")],
)
def test_a_projection_is_missing(ratio, left_out):
    world = World(sparse_mla, ratio, (8,))
    some = {name: f for name, f in world.projections.items() if name != left_out}
    text = f"`projections` must have .*{left_out}.* ratio {ratio}, got none for {left_out}$"
    for given in (some, SimpleNamespace(**some), some | {left_out: None}):
        with pytest.raises(ValueError, match=text):
            sparse_mla.v4.SparseMLA(world.config, ratio, world.layer.weights, given)


def test_bad_projections():
    world = World(sparse_mla, 1, (8,))
    weights = world.layer.weights
    with pytest.raises(ValueError, match=r"`projections` must have names among .*, got wqb, w_o$"):
        given = world.projections | {"wqb": abs, "w_o": abs}
        sparse_mla.v4.SparseMLA(world.config, 1, weights, given)
    with pytest.raises(TypeError, match=r"`projections.wo_b` must be a callable, got int$"):
        sparse_mla.v4.SparseMLA(world.config, 1, weights, world.projections | {"wo_b": 3})
    # Those of other layers are no mistake: an engine may give all layers the same mapping.
    others = world.projections | {"wkv_wgate": abs, "index_wq_b": abs}
    sparse_mla.v4.SparseMLA(world.config, 1, weights, others)
    attends_only = sparse_mla.v4.SparseMLA(world.config, 1, weights)
    with pytest.raises(ValueError, match="`projections` must be given to SparseMLA, got none"):
        attends_only.forward(world.inputs([(0, 0, 8)]), world.caches, None)


WRONG_RESULTS = [
    (lambda _: None, ValueError, r"\[20, {width}\], got NoneType"),
    (lambda y: y[:, 1:], ValueError, r"\[20, {width}\], got \[20, {less}\]"),
    (lambda y: y[1:], ValueError, r"\[20, {width}\], got \[19, {width}\]"),
    (lambda y: y.reshape(-1), ValueError, r"\[20, {width}\], got \[{size}\]"),
    (lambda y: y.astype(np.float64), TypeError, "(bfloat16|bfloat16 or float32), got float64"),
]


@pytest.mark.parametrize("name", [name for name in ALL_PROJECTIONS if name != "wo_b"])
@pytest.mark.parametrize(("wrong", "error", "text"), WRONG_RESULTS)
def test_a_projection_returns_something_else(name, wrong, error, text):
    """The text names the projection; the next call works."""
    world, metadata, x = one_step()
    right = world.layer.projections[name]
    want = world.layer.forward(x, world.caches, metadata)
    width = world.matrices[name].shape[1]
    rule = f"^SparseMLA.forward: `projections.{name}` must return {text}$"
    world.layer.projections[name] = lambda x: wrong(right(x))
    with pytest.raises(error, match=rule.format(width=width, less=width - 1, size=20 * width)):
        world.layer.forward(x, world.caches, metadata)
    world.layer.projections[name] = right
    assert_same_bits(world.layer.forward(x, world.caches, metadata), want)


def test_queries_may_have_an_axis_of_heads():
    world, metadata, x = one_step()
    want = world.layer.forward(x, world.caches, metadata)
    for name, size in (("wq_b", 512), ("index_wq_b", 128)):
        right = world.projections[name]
        world.layer.projections[name] = lambda x, f=right, n=size: f(x).reshape(len(x), -1, n)
    assert_same_bits(world.layer.forward(x, world.caches, metadata), want)


WRONG_WEIGHTS = [
    ("q_norm", None, r"\[any\], got none"),
    ("q_norm", (4, 4), r"\[any\], got \[4, 4\]"),
    ("kv_norm", (511,), r"\[512\], got \[511\]"),
    ("rope_table", (9, 32), r"\[any, 64\], got \[9, 32\]"),
    ("wo_a", (4, 6, 1024), r"\[2, any, 1024\], got \[4, 6, 1024\]"),
    ("wo_a", None, r"\[2, any, 1024\], got none"),
    ("wo_a_scale", (2, 2, 8), r"\[2, 1, 8\], got \[2, 2, 8\]"),
    ("ape", (4, 512), r"\[4, 1024\], got \[4, 512\]"),
    ("compressor_norm", None, r"\[512\], got none"),
    ("index_ape", (4, 1024), r"\[4, 256\], got \[4, 1024\]"),
    ("index_norm", (512,), r"\[128\], got \[512\]"),
    ("index_rope_table", (9,), r"\[any, 64\], got \[9\]"),
]


@pytest.mark.parametrize(("name", "shape", "text"), WRONG_WEIGHTS)
def test_weights_of_another_shape(name, shape, text):
    world = World(sparse_mla, 4, (8,))
    array = None if shape is None else np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=rf"SparseMLA: `weights.{name}` must have shape {text}"):
        replaced(world, **{name: array})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kv_norm": np.ones(512)}, "kv_norm` must be bfloat16 or float32, got float64"),
        ({"rope_table": np.zeros((8, 64), ref.BF16)}, "rope_table` must be float32, got bfloat16"),
        (
            {"wo_a": np.zeros((2, RANK, 1024), ref.BF16)},
            "wo_a` must be float8_e4m3fn or uint8, got",
        ),
        ({"wo_a_scale": None}, "wo_a` must be bfloat16, got uint8"),
        ({"index_ape": np.zeros((4, 256), ref.BF16)}, "index_ape` must be float32, got bfloat16"),
    ],
)
def test_weights_of_another_dtype(changes, text):
    world = World(sparse_mla, 4, (8,))
    with pytest.raises(TypeError, match=f"^SparseMLA: `weights.{text}"):
        replaced(world, **changes)


def test_other_bad_weights():
    world = World(sparse_mla, 4, (8,))
    with pytest.raises(ValueError, match=r"`weights.attn_sink` must have at least 4 values"):
        replaced(world, attn_sink=np.zeros(3, np.float32))
    replaced(world, attn_sink=None, index_rope_table=None)
    with pytest.raises(ValueError, match="a multiple of o_groups, got num_heads 4 and o_groups 3"):
        World(sparse_mla, 4, (8,), groups=3)


@pytest.mark.parametrize("eps", [-1e-6, 1e-40, float("nan"), float("inf")])
def test_bad_eps(eps):
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 8, "max_model_len": 8}
    with pytest.raises(ValueError, match="`eps` must be"):
        sparse_mla.v4.Config(4, eps=eps, **limits)
    assert sparse_mla.v4.Config(4, eps=0, **limits).eps == 0


def test_bad_streams():
    world, metadata, x = one_step()
    call = world.layer.forward
    with pytest.raises(ValueError, match="`streams` must be at most 3 streams, got 4"):
        call(x, world.caches, metadata, streams=[1, 2, 3, 4])
    with pytest.raises(TypeError, match="`streams` must be a sequence of streams, got int"):
        call(x, world.caches, metadata, streams=7)
    with pytest.raises(TypeError, match=r"`streams\[1\]` must be a handle or a stream object"):
        call(x, world.caches, metadata, streams=[7, None])


def test_bad_calls_write_nothing():
    world, metadata, x = one_step()
    caches, call = world.caches, world.layer.forward
    before = {name: world.bytes_of(name).copy() for name in world.memory}
    with pytest.raises(ValueError, match="`x` must have 20 to 80 rows, got 19"):
        call(x[:19], caches, metadata)
    with pytest.raises(ValueError, match="`x` must have 20 to 80 rows, got 81"):
        call(np.zeros((81, HIDDEN), ref.BF16), caches, metadata)
    with pytest.raises(TypeError, match=r"`caches` must be a sparse_mla.v4.Caches, got dict"):
        call(x, {}, metadata)
    with pytest.raises(TypeError, match=r"`metadata` must be what MetadataBuilder.build returned"):
        call(x, caches, 3)
    for name in ("compressed", "state", "index", "index_state"):
        with pytest.raises(
            ValueError, match=rf"`caches.{name}` must be given for compress ratio 4"
        ):
            call(x, dataclasses.replace(caches, **{name: None}), metadata)
    world.build([(0, 0, 20)])
    with pytest.raises(ValueError, match="forward: `metadata` must come from its builder's latest"):
        call(x, caches, metadata)
    for name, bits in before.items():
        assert_same_bits(world.bytes_of(name), bits)


@pytest.mark.parametrize(
    ("left_out", "name"),
    [("compressed", "compressed"), ("states", "states"), ("index_states", "states")],
)
def test_metadata_without_a_table(left_out, name):
    world = World(sparse_mla, 4, (8,))
    batch = world.batch([(0, 0, 8)])
    tables = {"compressed": batch.compressed, "states": batch.states}
    if left_out == "index_states":
        tables |= {"index": world.tables["index"], "states": {}}
    else:
        del tables[left_out]
        tables.pop("states", None)
    metadata = world.builder.build(batch.common(sparse_mla), **tables)
    text = f"forward: `metadata` must have a block table of ratio 4 for `{name}`, got none"
    with pytest.raises(ValueError, match=text):
        world.layer.forward(world.inputs([(0, 0, 8)]), world.caches, metadata)
