"""sparse_mla.integrations.jax: calls from compiled programs give the bits of direct calls."""

import inspect
from concurrent.futures import ThreadPoolExecutor

import cases
import device
import numpy as np
import operators
import pytest
import reference as ref
from helpers import (
    BESIDE_TESTS,
    assert_same_bits,
    assert_within_bounds,
    printed_by_python,
    run_docstrings,
    run_examples,
    run_python,
)
from jax_calls import CALLS, jitted, moved, plain, split_options
from test_leaks import resident

import sparse_mla

pytestmark = pytest.mark.jax

RESULTS = ("out", "lse", "max_logits")


def assert_same(got, want, what: str = "") -> None:
    got, want = (x if isinstance(x, (tuple, list)) else (x,) for x in (got, want))
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(np.asarray(x), np.asarray(y), f"{what} result {i}")


# --- one result for all --------------------------------------------------------------------------


def run_through(place, smla, op: str, how: str):
    """The results of a plain call of this module's operator, eager or in a program."""
    call = moved(op, place)
    if how == "eager":
        return call.run(smla)
    arrays, run = jitted(place.module, getattr(smla, op), call)
    assert "custom-call" in run.lower(arrays).compile().as_text()
    return run(arrays)


@pytest.mark.parametrize("how", ["eager", "jit"])
@pytest.mark.parametrize("op", CALLS)
def test_the_direct_call_s_bits(place, smla, op, how):
    want = plain(op).run(sparse_mla)
    got = run_through(place, smla, op, how)
    assert all(place.owns(x) for x in (got if isinstance(got, tuple) else (got,)))
    assert_same(got, want, op)


@pytest.mark.parametrize("name", cases.ATTENTION)
def test_attention(place, smla, name):
    case = cases.ATTENTION[name].make()
    want = case.run(sparse_mla.sparse_attention, return_max_logits=True)
    got = case.run(smla.sparse_attention, place.put, return_max_logits=True)
    assert_same(got, want, name)


def test_attention_against_fp64(place, smla):
    case = cases.ATTENTION["extra_same"].make()
    run = place.module.jit(
        smla.sparse_attention, static_argnames=("softmax_scale", "num_splits", "return_max_logits")
    )
    results = case.run(run, place.put, return_max_logits=True)
    got = dict(zip(RESULTS, map(np.asarray, results), strict=True))
    assert_within_bounds(case.reference(), got, units=16)


def test_lists_of_parts(place, smla):
    """They are stacked, in a traced call and in an eager one."""
    outs, lses = moved("merge_attn_partials", place).args.values()
    want = sparse_mla.merge_attn_partials(*map(np.asarray, (outs, lses)))
    for run in (smla.merge_attn_partials, place.module.jit(smla.merge_attn_partials)):
        for given in ((list(outs), list(lses)), (outs, tuple(lses)), (outs, lses)):
            for got, same in zip(run(*given), want, strict=True):
                assert_same(np.asarray(got), same)
    with pytest.raises(ValueError, match="`lses` must have 1 to 64 parts, got 0"):
        smla.merge_attn_partials(outs, [])


def test_subnormal_numbers_survive(place, smla):
    """XLA's threads flush subnormal numbers to zero. Calls of sparse_mla on them do not, and after
    a call XLA computes as before."""
    jax = place.module
    tiny = np.full((64, 8, 512), 1e-40, np.float32)
    lse = np.zeros((64, 8), np.float32)

    @jax.jit
    def run(x, lse):
        out, _ = smla.merge_attn_states(x, lse, x, lse)
        return x * 0.5, out, out * 0.5

    flushed, out, after = map(np.asarray, run(*map(place.put, (tiny, lse))))
    assert_same(out, sparse_mla.merge_attn_states(tiny, lse, tiny, lse)[0])
    assert (out == tiny).all()
    assert np.array_equal(flushed, after)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, ref.E4M3])
def test_dtypes_of_cache_bytes(place, smla, dtype):
    jnp = place.module.numpy
    call = plain("concat_and_cache_mla")
    call.args["kv_cache"] = call.args["kv_cache"].view(dtype)
    arrays = {name: jnp.array(x, device=place.place) for name, x in call.args.items()}
    got = smla.concat_and_cache_mla(**arrays)
    assert_same(got, call.run(sparse_mla))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_dtypes_of_latents(place, smla, name):
    call = plain("concat_and_cache_mla")
    dtype = ref.BF16 if name == "bfloat16" else np.dtype(name)
    for part in ("kv_c", "k_pe"):
        call.args[part] = call.args[part].astype(np.float32).astype(dtype)
    got = smla.concat_and_cache_mla(*map(place.put, call.args.values()))
    assert_same(got, call.run(sparse_mla))


def test_index_counts(place, smla):
    call = plain("convert_req_index_to_global_index")
    call.kwargs["valid_counts"] = True
    arrays, options = split_options(call)
    put = {name: place.put(x) for name, x in arrays.items()}
    got = smla.convert_req_index_to_global_index(**put, **options)
    assert_same(got, call.run(sparse_mla))


def test_arrays_that_the_program_lays_out_itself(place, smla):
    """The program transposes and cuts its arrays, and XLA passes dense arrays to the call."""
    jax = place.module
    case = cases.ATTENTION["h17_k63"].make()
    want = case.run(sparse_mla.sparse_attention)

    @jax.jit
    def run(q, kv, indices):
        q = q.transpose(1, 2, 0).transpose(2, 0, 1)
        wide = jax.numpy.concatenate([kv, kv], 2)[:, :, 656:]
        return smla.sparse_attention(q, wide, indices.T.T, **case.options)

    assert_same(run(*map(place.put, (case.q, case.kv, case.indices))), want)


# --- what is written -----------------------------------------------------------------------------


@pytest.mark.parametrize("op", operators.WRITTEN)
def test_a_written_array_is_new_unless_it_is_donated(place, smla, op):
    jax, names = place.module, operators.WRITTEN[op]
    call = moved(op, place)
    before = {name: np.array(call.get(name)) for name in names}
    want = plain(op).run(sparse_mla)
    arrays, run = jitted(jax, getattr(smla, op), call)
    assert_same(run(arrays), want)
    for name in names:
        assert_same(arrays[name], before[name], "an array that is not donated")
    rest = {key: x for key, x in arrays.items() if key not in names}
    options = {key: x for key, x in {**call.args, **call.kwargs}.items() if key not in arrays}
    donating = jax.jit(
        lambda written, rest: getattr(smla, op)(**options, **rest, **written),
        donate_argnums=0,
    )
    # Copied, because JAX cannot donate memory that it shares with NumPy.
    donated = {name: jax.numpy.array(arrays.pop(name), copy=True) for name in names}
    addresses = [x.unsafe_buffer_pointer() for x in donated.values()]
    got = donating(donated, rest)
    last = (got if isinstance(got, tuple) else (got,))[-len(names) :]
    assert all(x.is_deleted() for x in donated.values())
    assert [x.unsafe_buffer_pointer() for x in last] == addresses
    again = dict(zip(names, last, strict=True))
    assert "copy" not in donating.lower(again, rest).compile().as_text()
    assert_same(got, want)


@pytest.mark.parametrize("scale", [2.0, np.float32(0.7), "array"])
def test_queries_as_codes(place, smla, scale):
    """With a scale the queries become e4m3, and the scale may be a number or an array."""
    jax, call = place.module, moved("fused_qnorm_rope_kv_insert", place)
    scale = place.put(np.full(1, 2.0, np.float32)) if isinstance(scale, str) else scale
    call.kwargs["q_scale_inv"] = scale
    arrays, run = jitted(jax, smla.fused_qnorm_rope_kv_insert, call)
    want = plain("fused_qnorm_rope_kv_insert")
    want.kwargs["q_scale_inv"] = np.asarray(scale, np.float32)
    got = run(arrays)
    assert got[0].dtype == jax.numpy.float8_e4m3fn
    assert_same(got, want.run(sparse_mla))


def test_states_and_rows_in_one_call(place, smla):
    """With kv, score and ape the new states come first, also in place of donated ones."""
    jax, call = place.module, moved("compress_norm_rope_store", place)
    want = plain("compress_norm_rope_store")
    rng = np.random.default_rng(3)
    for name, shape in (("kv", (5, 512)), ("score", (5, 512)), ("ape", (2, 512))):
        want.kwargs[name] = rng.normal(0, 1, shape).astype(np.float32)
        call.kwargs[name] = place.put(want.kwargs[name])
    arrays, run = jitted(jax, smla.compress_norm_rope_store, call)
    state, cache = run(arrays)
    before = want.args["state"].copy()
    want_cache = want.run(sparse_mla)
    assert not np.array_equal(before, want.args["state"])
    assert_same(cache, want_cache)
    assert_same(state, want.args["state"])
    donating = jax.jit(
        lambda state, cache, rest: smla.compress_norm_rope_store(
            **{**rest, "state": state, "kv_cache": cache}, eps=1e-6, ratio=2
        ),
        donate_argnums=(0, 1),
    )
    rest = {n: x for n, x in arrays.items() if n not in ("state", "kv_cache")}
    copies = [jax.numpy.array(arrays[n], copy=True) for n in ("state", "kv_cache")]
    places = [x.unsafe_buffer_pointer() for x in copies]
    got = donating(*copies, rest)
    assert [x.unsafe_buffer_pointer() for x in got] == places
    assert_same(got[0], want.args["state"])
    assert_same(got[1], want_cache)


def decode(jax, smla, cache, inputs):
    """Decode steps in one program, each of which passes the cache to the next."""

    def step(cache, x):
        cache = smla.concat_and_cache_mla(x["latent"], x["rope"], cache, x["slot"])
        out, lse = smla.sparse_attention(x["q"], cache, x["chosen"], softmax_scale=0.04)
        return cache, (out, lse)

    return jax.lax.scan(step, cache, inputs)


def test_a_decode_loop_in_one_program(place, smla):
    """Every step attends to the tokens that it and the steps before it have written."""
    jax, rng, steps = place.module, np.random.default_rng(2), 6
    inputs = {
        "latent": cases.random_bf16(rng, steps, 1, 512),
        "rope": cases.random_bf16(rng, steps, 1, 64),
        "slot": rng.permutation(20)[:steps, None].astype(np.int32),
        "q": cases.random_bf16(rng, steps, 1, 4, 576),
    }
    inputs["chosen"] = np.where(
        np.tri(steps, dtype=bool), inputs["slot"][:, 0], np.int32(-1)
    ).astype(np.int32)[:, None]
    cache = np.zeros((5, 4, 656), np.uint8)
    program = jax.jit(lambda *args: decode(jax, smla, *args), donate_argnums=0)
    placed = {name: place.put(x) for name, x in inputs.items()}
    last, (out, lse) = program(place.put(cache), placed)
    for i in range(steps):
        x = {name: value[i] for name, value in inputs.items()}
        sparse_mla.concat_and_cache_mla(x["latent"], x["rope"], cache, x["slot"])
        want = sparse_mla.sparse_attention(x["q"], cache, x["chosen"], softmax_scale=0.04)
        assert_same((out[i], lse[i]), want, f"step {i}")
        assert np.isfinite(want[1]).all()
    assert_same(last, cache)


# --- transformations -----------------------------------------------------------------------------


def test_vmap_runs_one_call_after_the_other(place, smla):
    jax, rng = place.module, np.random.default_rng(3)
    q = cases.random_bf16(rng, 4, 2, 8, 576)
    kv = cases.make_rows(rng, 30, "fp8")
    indices = rng.integers(-1, 30, (4, 2, 11)).astype(np.int32)
    run = jax.jit(
        jax.vmap(lambda q, i, kv: smla.sparse_attention(q, kv, i, softmax_scale=0.04), (0, 0, None))
    )
    out, lse = run(*map(place.put, (q, indices, kv)))
    for b in range(4):
        want = sparse_mla.sparse_attention(q[b], kv, indices[b], softmax_scale=0.04)
        assert_same((out[b], lse[b]), want)


def test_vmap_over_slots_makes_a_cache_each(place, smla):
    call = plain("concat_and_cache_mla")
    slots = np.stack([call.args["slot_mapping"], call.args["slot_mapping"][::-1]])
    args = [place.put(x) for x in call.args.values()]
    caches = place.module.vmap(smla.concat_and_cache_mla, (None, None, None, 0))(
        *args[:3], place.put(slots)
    )
    for cache, slot_mapping in zip(caches, slots, strict=True):
        call.args |= {"kv_cache": np.zeros((3, 4, 656), np.uint8), "slot_mapping": slot_mapping}
        assert_same(cache, call.run(sparse_mla))


def test_derivatives_are_refused(place, smla):
    call = moved("merge_attn_states", place)

    def loss(out_a):
        return smla.merge_attn_states(out_a, *list(call.args.values())[1:])[0].sum()

    with pytest.raises(ValueError, match=r"sparse_mla.*cannot be differentiated"):
        place.module.grad(loss)(call.args["out_a"])


def test_an_exported_program_serves_any_number_of_tokens(place, smla):
    jax, case = place.module, cases.ATTENTION["t33_h8"].make()
    export = device.import_quietly("jax.export")
    options = {name: x for name, x in case.options.items() if name == "softmax_scale"}
    run = jax.jit(lambda *arrays: smla.sparse_attention(*arrays, **options))
    arrays = [place.put(x) for x in (case.q, case.kv, case.indices)]
    tokens = export.symbolic_shape("tokens")[0]
    shapes = [
        jax.ShapeDtypeStruct((tokens if i != 1 else x.shape[0], *x.shape[1:]), x.dtype)
        for i, x in enumerate(arrays)
    ]
    checks = [export.DisabledSafetyCheck.custom_call("sparse_mla")]
    exported = export.export(run, platforms=["cpu"], disabled_checks=checks)(*shapes)
    for n in (33, 7, 1):
        got = exported.call(arrays[0][:n], arrays[1], arrays[2][:n])
        want = sparse_mla.sparse_attention(case.q[:n], case.kv, case.indices[:n], **options)
        assert_same(got, want, f"{n} tokens")


SHARDED = """
import cases, jax, numpy as np, sparse_mla
import sparse_mla.integrations.jax as smla
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

case = cases.ATTENTION["h16_k64"].make()
scale = case.options["softmax_scale"]
attend = lambda q, kv, indices: smla.sparse_attention(q, kv, indices, softmax_scale=scale)
mesh = Mesh(np.array(jax.devices()), ("heads",))
assert mesh.size == 2
by_heads = P(None, "heads")
sharded = jax.shard_map(
    attend, mesh=mesh, in_specs=(by_heads, P(), P()), out_specs=(by_heads, by_heads)
)
q = jax.device_put(case.q, NamedSharding(mesh, by_heads))
for run, shards in ((sharded, 2), (attend, 1)):
    got = jax.jit(run)(q, case.kv, case.indices)
    parts = [  # bits depend on the number of heads in a call
        sparse_mla.sparse_attention(part, case.kv, case.indices, softmax_scale=scale)
        for part in np.split(case.q, shards, axis=1)
    ]
    for x, y in zip(got, zip(*parts, strict=True), strict=True):
        assert np.asarray(x).tobytes() == np.concatenate(y, axis=1).tobytes()
        assert x.sharding.shard_shape(x.shape)[1] * shards == 16
"""


def test_heads_over_two_devices(place):
    """With shard_map each device makes a call on its heads. Without it XLA gathers the sharded
    query, and one call computes all heads."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    printed_by_python("-c", BESIDE_TESTS + SHARDED, **flags)


# --- threads -------------------------------------------------------------------------------------


def test_programs_in_many_threads(place, smla):
    """The handler runs on several of XLA's threads, each of which uses its own OpenMP threads."""
    case = cases.ATTENTION["h64_k300"].make()
    want = case.run(sparse_mla.sparse_attention)
    arrays = [place.put(x) for x in (case.q, case.kv, case.indices)]
    sink = place.put(case.options["attn_sink"])
    scale = case.options["softmax_scale"]
    run = place.module.jit(
        lambda *arrays, sink: smla.sparse_attention(*arrays, attn_sink=sink, softmax_scale=scale)
    )

    def work(_):
        return [run(*arrays, sink=sink) for _ in range(10)]

    with ThreadPoolExecutor(8) as pool:
        for results in pool.map(work, range(8)):
            for got in results:
                assert_same(got, want)


def test_many_calls_of_one_program(place, smla):
    """The calls do not depend on each other, so XLA may run them at the same time."""
    jax, case = place.module, cases.ATTENTION["h16_k64"].make()
    scale = case.options["softmax_scale"]

    @jax.jit
    def run(q, kv, indices):
        return [
            smla.sparse_attention(q * 2.0**i, kv, indices, softmax_scale=scale * 2.0**-i)
            for i in range(16)
        ]

    want = case.run(sparse_mla.sparse_attention)
    for got in run(*map(place.put, (case.q, case.kv, case.indices))):
        assert_same(got, want)


def test_workspace_taken_inside_a_call_is_freed(place, smla):
    """Calls that fail free the workspace, too."""
    case = cases.AttentionCase(16, 64, 300, num_splits=5).make()
    size = sparse_mla.attention_workspace_size(16, 64, 300, num_splits=5, device="cpu")
    assert size > 1 << 20
    scale = case.options["softmax_scale"]
    run = place.module.jit(
        lambda *arrays: smla.sparse_attention(*arrays, softmax_scale=scale, num_splits=5)
    )
    good = [place.put(x) for x in (case.q, case.kv, case.indices)]
    bad = [good[0], good[1].astype(np.int16), good[2]]

    def both():
        place.module.block_until_ready(run(*good))
        with pytest.raises(RuntimeError, match="`kv_cache` must be"):
            place.module.block_until_ready(run(*bad))

    for _ in range(3):
        both()
    before = resident()
    for _ in range(60):
        both()
    assert resident() - before < max(16 << 20, 20 * size)


# --- the module ----------------------------------------------------------------------------------


def test_signatures_are_the_operators_less_what_jax_arrays_cannot_be(smla):
    immutable = {"stream", "workspace", "workspace_buffer", "values", *operators.RESULTS}
    # A result of scaled_quantize, and what top_k_per_row writes.
    inputs = {"fp8_linear": ["descale"], "top_k_merge": ["values"]}
    for op in CALLS:
        theirs = inspect.signature(getattr(sparse_mla, op)).parameters
        given = {*operators.WRITTEN.get(op, ()), *inputs.get(op, ())}
        want = [p for p in theirs if p not in immutable or p in given]
        assert list(inspect.signature(getattr(smla, op)).parameters) == want


def test_docstring_examples_run(smla):
    run_docstrings(smla, CALLS)


def test_the_page_s_example_runs(smla):
    run_examples("frameworks.md", "import jax")


def test_import_without_jax():
    code = "import sys; sys.modules['jax'] = None; import sparse_mla.integrations.jax"
    done = run_python("-c", code)
    assert "ImportError: sparse_mla.integrations.jax needs JAX" in done.stderr
