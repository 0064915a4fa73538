"""torch.ops.sparse_mla: eager, compiled and exported calls give the bits of direct calls.

With SMLA_DEVICE=cuda the tensors are on the GPU; test_gpu_torch_ops.py tests streams and graphs.
"""

import io
import shutil

import cases
import device
import numpy as np
import operators
import pytest
import reference as ref
from helpers import (
    assert_error_text,
    assert_same_bits,
    find_framework,
    run_docstrings,
    run_examples,
    run_python,
)

import sparse_mla

# PyTorch's own warnings, about modules that it imports late and about how it loads a program.
torch_warns = pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning", "ignore:The given buffer is not writable:UserWarning"
)
pytestmark = [pytest.mark.torch, torch_warns]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
quiet = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",  # about modules that PyTorch imports late
    "ignore:TensorFloat32",  # inductor's advice on a GPU
)
BACKENDS = ["aot_eager", pytest.param("inductor", marks=[needs_compiler, quiet])]
RESULTS = operators.RESULTS


@pytest.fixture
def place():
    """torch, with tensors on the device of this test session."""
    return find_framework("torch", device.NAME)


@pytest.fixture
def smla(place):
    place.module._dynamo.reset()
    return device.import_quietly("sparse_mla.integrations.torch")


CALLS = operators.FRAMEWORK_CALLS
OVERLOADS = [(op, name) for op in CALLS for name in operators.FACTS[op].overloads]


def moved(op: str, place, *, keep_results: bool = False) -> operators.Call:
    """A good call with tensors; with `keep_results` the caller gives the result tensors."""
    call = CALLS[op]()
    if op == "dynamic_per_tensor_quant":
        call.kwargs["out"] = np.zeros((3, 40), np.uint8)
    for name in RESULTS:
        if not keep_results and op not in operators.WRITTEN:
            call.kwargs.pop(name, None)
    for name, x in {**call.args, **call.kwargs}.items():
        if isinstance(x, np.ndarray):
            call.set(name, place.put(x))
    return call


def assert_same(place, got, want, what: str = "") -> None:
    got, want = (x if isinstance(x, (tuple, list)) else (x,) for x in (got, want))
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        assert x.device == y.device
        assert x.stride() == y.stride(), f"{what} {i}"
        assert_same_bits(place.get(x), place.get(y), f"{what} result {i}")


# --- registration --------------------------------------------------------------------------------


def test_every_overload_is_tested(place, smla):
    """OVERLOADS has every overload of the operators that the package registers, and no other."""
    namespace = place.module.ops.sparse_mla
    registered = [(op, name) for op in CALLS for name in getattr(namespace, op).overloads()]
    assert sorted(registered) == sorted(OVERLOADS)


@pytest.mark.parametrize(("op", "overload"), OVERLOADS)
def test_opcheck(place, smla, op, overload):
    """PyTorch checks the schema, the fake kernel, and functionalisation with symbolic shapes, on
    real inputs."""
    torch = place.module
    operator = getattr(getattr(torch.ops.sparse_mla, op), overload)
    call = moved(op, place, keep_results=True)
    known = {argument.name for argument in operator._schema.arguments}
    kwargs = {name: x for name, x in call.kwargs.items() if name in known}
    for name in [name for name in kwargs if f"{name}_tensor" in known]:
        if isinstance(kwargs[name], torch.Tensor):  # a scale that is an array
            kwargs[f"{name}_tensor"] = kwargs.pop(name)
    args = tuple(x for name, x in call.args.items() if name in known)
    report = torch.library.opcheck(operator, args, kwargs)
    assert len(report) == 4
    assert set(report.values()) == {"SUCCESS"}


def test_opcheck_of_a_query_pair(place, smla):
    torch = place.module
    case = cases.ATTENTION["q_pair"].make()
    q, q_pe, kv, indices = (place.put(x) for x in (*case.q, case.kv, case.indices))
    report = torch.library.opcheck(
        torch.ops.sparse_mla.sparse_attention.default,
        (q, kv, indices),
        {"q_pe": q_pe, "softmax_scale": 0.04, "num_splits": 3},
    )
    assert set(report.values()) == {"SUCCESS"}


def test_lists_of_parts(place, smla):
    """Eager, through the schema and traced, each list has the bits of one tensor."""
    torch = place.module
    call = moved("merge_attn_partials", place)
    outs, lses = call.args.values()
    want = sparse_mla.merge_attn_partials(outs, lses)
    lists = list(outs.unbind()), tuple(lses.unbind())
    for given in (lists, (outs, lists[1]), (lists[0], lses)):
        assert_same(place, smla.merge_attn_partials(*given), want)
        traced = torch.compile(smla.merge_attn_partials, backend="aot_eager", fullgraph=True)
        assert_same(place, traced(*given), want)
    out, lse = torch.empty_like(want[0]), torch.empty_like(want[1])
    assert smla.merge_attn_partials(*lists, out=out, lse=lse)[0] is out
    assert_same(place, (out, lse), want)
    operator = torch.ops.sparse_mla.merge_attn_partials.default
    first, later = zip(*((x[0], list(x[1:])) for x in lists), strict=True)
    report = torch.library.opcheck(
        operator, first, dict(zip(("outs_later", "lses_later"), later, strict=True))
    )
    assert set(report.values()) == {"SUCCESS"}
    for bad in ([], ()):
        with pytest.raises(ValueError, match="`outs` must have 1 to 64 parts, got 0"):
            smla.merge_attn_partials(bad, lses)
    watched = torch.nn.Parameter(outs[1].float())
    with pytest.raises(BufferError, match="`outs_later` must not require gradients"):
        smla.merge_attn_partials([outs[0].float(), watched], lses[:2])
    with torch.no_grad():
        smla.merge_attn_partials([outs[0].float(), watched], lses[:2])


def test_docstring_examples_run(smla):
    run_docstrings(smla, CALLS)


@needs_compiler
@quiet
def test_the_page_s_example_runs(smla):
    run_examples("frameworks.md", "import torch")


def test_import_without_pytorch():
    code = "import sys; sys.modules['torch'] = None; import sparse_mla.integrations.torch"
    done = run_python("-c", code)
    assert "ImportError: sparse_mla.integrations.torch needs PyTorch" in done.stderr


# --- eager ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_results", [False, True], ids=["new", "out="])
@pytest.mark.parametrize("op", CALLS)
def test_eager_has_the_direct_call_s_bits(place, smla, op, keep_results):
    want = moved(op, place, keep_results=keep_results).run(sparse_mla)
    call = moved(op, place, keep_results=keep_results)
    got = call.run(smla)
    assert_same(place, got, want, op)
    if keep_results:
        given = [call.kwargs[name] for name in RESULTS if name in call.kwargs]
        results = got if isinstance(got, tuple) else (got,)
        assert all(any(x is y for y in results) for x in given)


@pytest.mark.parametrize("keep_results", [False, True], ids=["new", "out="])
def test_eager_with_counts(place, smla, keep_results):
    op = "convert_req_index_to_global_index"
    calls = [moved(op, place, keep_results=keep_results) for _ in range(2)]
    for call in calls:
        call.kwargs["valid_counts"] = True
    assert_same(place, calls[0].run(smla), calls[1].run(sparse_mla))


@pytest.mark.parametrize("name", cases.ATTENTION)
def test_eager_attention(place, smla, name):
    """The strides of torch's tensors reach the kernels, for every case of cases.ATTENTION."""
    case, journey = cases.ATTENTION[name].make(), device.Journey()

    def put(x):  # torch has no negative strides
        return place.put(x) if min(x.strides) < 0 else journey.put(x)

    want = case.run(sparse_mla.sparse_attention, put, return_max_logits=True)
    got = case.run(smla.sparse_attention, put, return_max_logits=True)
    assert_same(place, got, want, name)


@pytest.mark.parametrize("given", [("out",), ("lse",), ("max_logits",), ("workspace",)])
def test_results_that_are_not_given_are_new(place, smla, given):
    want = moved("sparse_attention", place).run(sparse_mla)
    call = moved("sparse_attention", place, keep_results=True)
    call.kwargs["workspace"] = place.put(np.zeros(1 << 20, np.uint8))
    for name in (*RESULTS, "workspace"):
        if name not in given:
            call.kwargs.pop(name, None)
    got = call.run(smla)
    assert_same(place, got, want)
    assert all(call.kwargs[name] is got[RESULTS.index(name)] for name in given if name in RESULTS)


# --- compiled ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keep_results", [False, True], ids=["new", "out="])
@pytest.mark.parametrize("op", CALLS)
def test_compiled_without_a_break(place, smla, op, keep_results, backend):
    want = moved(op, place, keep_results=keep_results).run(sparse_mla)
    call = moved(op, place, keep_results=keep_results)
    run = place.module.compile(getattr(smla, op), fullgraph=True, backend=backend)
    assert_same(place, run(*call.args.values(), **call.kwargs), want, op)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("scale", [None, 2.0, "tensor"])
def test_queries_in_place_or_as_new_codes(place, smla, scale, backend):
    """Without q_out, q is written, unless a scale asks for e4m3."""
    torch = place.module
    wanted, call = (moved("fused_qnorm_rope_kv_insert", place) for _ in range(2))
    for one in (wanted, call):
        one.kwargs.pop("q_out")
        is_tensor = scale == "tensor"
        q_scale_inv = torch.full_like(one.kwargs["kv_scale"], 2.0) if is_tensor else scale
        one.kwargs["q_scale_inv"] = q_scale_inv
    before = call.args["q"].clone()
    want = wanted.run(sparse_mla)
    run = smla.fused_qnorm_rope_kv_insert
    if backend is not None:
        run = torch.compile(run, fullgraph=True, backend=backend)
    got = run(*call.args.values(), **call.kwargs)
    assert_same(place, got, want)
    assert got[0].dtype == (torch.bfloat16 if scale is None else torch.float8_e4m3fn)
    assert (got[0] is call.args["q"]) == (scale is None)
    assert got[1] is call.args["kv_cache"]
    for name, x in wanted.args.items():
        assert_same(place, call.args[name], x, name)
    assert torch.equal(call.args["q"], before) == (scale is not None)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_states_and_rows_in_one_call(place, smla, backend):
    """With kv, score and ape the states are written, too."""
    torch = place.module
    wanted, call = (moved("compress_norm_rope_store", place) for _ in range(2))
    state = call.args["state"]
    for one in (wanted, call):
        generator = torch.Generator().manual_seed(3)
        kv, score = (torch.randn(5, 512, generator=generator).to(state.device) for _ in range(2))
        one.kwargs |= {"kv": kv, "score": score, "ape": torch.ones(2, 512, device=state.device)}
    before = state.clone()
    want = wanted.run(sparse_mla)
    run = smla.compress_norm_rope_store
    if backend is not None:
        run = torch.compile(run, fullgraph=True, backend=backend)
    assert run(*call.args.values(), **call.kwargs) is call.args["kv_cache"]
    assert_same(place, call.args["kv_cache"], want)
    assert_same(place, state, wanted.args["state"])
    assert not torch.equal(state, before)


def step(smla, q, latent, rope, cache, table, slots, topk, requests):
    """Attends to the cache, writes to it, attends to it again, and overwrites the rows. Any other
    order gives other results."""
    chosen = smla.convert_req_index_to_global_index(requests, table, topk, block_size=4)
    before = smla.sparse_attention(q, cache, chosen, softmax_scale=0.04)
    smla.concat_and_cache_mla(latent, rope, cache, slots)
    after = smla.sparse_attention(q * 2, cache, chosen, softmax_scale=0.04)
    merged = smla.merge_attn_states(*before, *after)
    smla.concat_and_cache_mla(-latent, rope + 1, cache, slots)
    return (*before, *after, *merged, cache[:, 0].clone())


def step_inputs(place, num_tokens: int, fmt: str):
    rng = np.random.default_rng([num_tokens, 1])
    cache = cases.make_rows(rng, 20, fmt).reshape(5, 4, -1)
    return [
        place.put(x)
        for x in (
            cases.random_bf16(rng, num_tokens, 8, 576),
            cases.random_bf16(rng, num_tokens, 512),
            cases.random_bf16(rng, num_tokens, 64),
            cache,
            np.array([[4, 0, 2], [1, 3, 0]], np.int32),
            rng.permutation(20)[:num_tokens].astype(np.int64),
            rng.integers(-1, 12, (num_tokens, 9)).astype(np.int32),
            rng.integers(0, 2, num_tokens).astype(np.int32),
        )
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
def test_writes_and_reads_of_a_cache_keep_their_order(place, smla, fmt, backend):
    """The caller's cache is written in place, and another number of tokens does not compile the
    program again."""
    torch = place.module
    run = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for num_tokens in (6, 5, 13):  # not 4, 8 or 9: torch would take equal sizes for one
        wanted, given = (step_inputs(place, num_tokens, fmt) for _ in range(2))
        want = step(sparse_mla, *wanted)
        with torch._dynamo.config.patch(error_on_recompile=num_tokens != 6):
            got = run(smla, *given)
        assert_same(place, got, want, f"{num_tokens} tokens")
        assert_same(place, given[3], wanted[3], "cache")
    assert not np.array_equal(place.get(got[0]), place.get(got[2]))


def test_a_page_size_that_comes_from_a_shape(place, smla):
    """A page size taken from a shape is symbolic, as the number of tokens is."""
    torch = place.module

    def run(requests, table, topk, cache):
        return smla.convert_req_index_to_global_index(
            requests, table, topk, block_size=cache.shape[1], valid_counts=True
        )

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    arrays = moved("convert_req_index_to_global_index", place).args.values()
    for block_size in (8, 5, 64):  # the first is no other size of these arrays
        cache = place.put(np.zeros((5, block_size, 656), np.uint8))
        with torch._dynamo.config.patch(error_on_recompile=block_size != 8):
            got = compiled(*arrays, cache)
        want = sparse_mla.convert_req_index_to_global_index(
            *arrays, block_size=block_size, valid_counts=True
        )
        assert_same(place, got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_with_strided_inputs_and_no_tokens(place, smla, backend):
    """The function makes views, which a compiler might lay out in its own way."""

    def run(heads, wide, rows, indices):
        q = (heads + 1).transpose(0, 1), wide[:, :, 3:67]
        return smla.sparse_attention(q, rows[:, ::2], indices[:, 3:14], softmax_scale=0.04)

    compiled = place.module.compile(run, fullgraph=True, dynamic=True, backend=backend)
    rng = np.random.default_rng(5)
    for num_tokens in (4, 7, 0, 1):
        arrays = [
            place.put(x)
            for x in (
                cases.random_bf16(rng, 6, num_tokens, 512),
                cases.random_bf16(rng, num_tokens, 6, 80),
                cases.make_rows(rng, 40, "fp8").reshape(5, 8, 656),
                rng.integers(-1, 20, (num_tokens, 30)).astype(np.int32),
            )
        ]
        assert_same(place, compiled(*arrays), run(*arrays), f"{num_tokens} tokens")


# --- exported ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
def test_exported_saved_and_loaded(place, smla, fmt):
    """A decode step whose cache is a buffer of the module is exported once and serves any number of
    tokens."""
    torch = place.module

    class Step(torch.nn.Module):
        def __init__(self, cache) -> None:
            super().__init__()
            self.register_buffer("cache", cache)

        def forward(self, q, latent, rope, table, slots, topk, requests):
            return step(smla, q, latent, rope, self.cache, table, slots, topk, requests)

    def module_and_inputs(num_tokens):
        inputs = step_inputs(place, num_tokens, fmt)
        return Step(inputs.pop(3)), tuple(inputs)

    module, inputs = module_and_inputs(3)
    tokens = torch.export.Dim("tokens", max=20)
    per_token = {0: tokens}
    shapes = [per_token, per_token, per_token, None, per_token, per_token, per_token]
    with torch.no_grad():
        program = torch.export.export(module, inputs, dynamic_shapes=shapes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for num_tokens in (5, 20):
        loaded = torch.export.load(file).module()
        file.seek(0)
        module, inputs = module_and_inputs(num_tokens)
        loaded.load_state_dict(module.state_dict())
        assert_same(place, loaded(*inputs), module(*inputs), f"{num_tokens} tokens")
        assert_same(place, loaded.cache, module.cache)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("op", CALLS)
def test_errors_are_the_direct_call_s(place, smla, op):
    """The last array has a wrong dtype. Both calls raise the same exception with the same text."""
    texts = []
    for module in (sparse_mla, smla):
        call = moved(op, place)
        name = [name for name, x in {**call.args, **call.kwargs}.items() if hasattr(x, "dim")][-1]
        call.set(name, call.get(name).to(place.module.int16))
        with pytest.raises(TypeError) as caught:
            call.run(module)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_bad_values_reach_the_kernels(place, smla, how):
    """A slot past the end is an error on the CPU, before anything is written, and is skipped on a
    GPU."""
    write = smla.concat_and_cache_mla
    if how == "compiled":
        write = place.module.compile(write, fullgraph=True, backend="aot_eager")
    call = moved("concat_and_cache_mla", place)
    call.args["slot_mapping"][1] = 12
    if device.ON_CUDA:
        write(*call.args.values())
    else:
        with pytest.raises(ValueError, match=r"concat_and_cache_mla: `slot_mapping` must .* 12"):
            write(*call.args.values())
    assert call.args["kv_cache"].any().item() == device.ON_CUDA


RANKS = {op: facts.shape_of for op, facts in operators.FACTS.items() if facts.shape_of}


@pytest.mark.parametrize("op", RANKS)
def test_a_rank_without_a_result_is_refused_while_tracing(place, smla, op):
    torch = place.module
    for module, error in (
        (sparse_mla, (TypeError, ValueError)),
        (smla, (TypeError, ValueError)),
        (None, torch._dynamo.exc.TorchRuntimeError),
    ):
        call = moved(op, place)
        call.set(
            RANKS[op],
            call.get(RANKS[op])[0, 0]
            if op != "dequantize_kv_cache"
            else call.get(RANKS[op])[0, 0, 0],
        )
        with pytest.raises(error, match=rf"{op}: `{RANKS[op]}` must") as caught:
            if module is None:
                compiled = torch.compile(getattr(smla, op), fullgraph=True, backend="aot_eager")
                compiled(*call.args.values(), **call.kwargs)
            else:
                call.run(module)
        if module is not None:
            assert_error_text(caught.value, op, [RANKS[op]])


@pytest.mark.parametrize("how", ["eager", "compiled", "exported"])
@pytest.mark.parametrize("name", ["q", "attn_sink"])
def test_gradients_are_refused_not_dropped(place, smla, how, name):
    torch = place.module
    call = moved("sparse_attention", place)
    call.get(name).requires_grad_(True)

    def run(*args, **kwargs):
        return smla.sparse_attention(*args, **kwargs)[0]

    class Module(torch.nn.Module):
        def forward(self, *args, **kwargs):
            return run(*args, **kwargs)

    def attempt():
        if how == "exported":
            args = tuple(call.args.values())
            return torch.export.export(Module(), args, call.kwargs).module()(*args, **call.kwargs)
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        return (run if how == "eager" else compiled)(*call.args.values(), **call.kwargs)

    with pytest.raises(Exception, match=rf"sparse_attention: `{name}` must not require grad") as e:
        attempt()
    assert how != "eager" or type(e.value) is BufferError
    torch._dynamo.reset()
    want = moved("sparse_attention", place).run(sparse_mla)[0]
    for mode in (torch.no_grad, torch.inference_mode) if how != "exported" else (torch.no_grad,):
        with mode():
            out = attempt()
        assert not out.requires_grad
        assert_same(place, out, want)


@quiet
@pytest.mark.parametrize("op", ["k_up_proj", "merge_attn_states"])
def test_derivatives_of_torch_func_are_refused(place, smla, op):
    """torch.func keeps gradients in wrappers around the tensors, which the kernels never see."""
    torch, call = place.module, moved(op, place)
    x, *rest = call.args.values()

    def run(x):
        results = getattr(smla, op)(x, *rest)
        return results if op == "k_up_proj" else results[0]

    with pytest.raises(BufferError, match=rf"{op}: `\w+` must not require gradients"):
        torch.func.grad(lambda x: run(x).float().sum())(x)
    with pytest.raises(BufferError, match=rf"{op}: `\w+` must not require gradients"):
        torch.func.jvp(run, (x,), (x,))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # calls run one by one
def test_vmap_runs_one_call_after_the_other(place, smla):
    torch, (q, weight) = place.module, moved("k_up_proj", place).args.values()
    got = torch.vmap(lambda x: smla.k_up_proj(x, weight))(torch.stack([q, q * 2]))
    assert_same(place, got, torch.stack([sparse_mla.k_up_proj(x, weight) for x in (q, q * 2)]))


@pytest.mark.parametrize("name", ["kv_cache", "attn_sink", "out"])
def test_a_tensor_without_memory_is_refused(place, smla, name):
    """A tensor of device "meta" would send the call to the fake kernel, whose results have no
    values."""
    call = moved("sparse_attention", place, keep_results=True)
    call.set(name, call.get(name).to("meta"))
    with pytest.raises(ValueError, match=rf"sparse_attention: `{name}` must be on .*, got meta"):
        call.run(smla)


def test_reference_of_a_compiled_step(place, smla):
    """The results are compared with fp64, not with direct calls."""
    case = cases.ATTENTION["extra_same"].make()
    run = place.module.compile(smla.sparse_attention, fullgraph=True, backend="aot_eager")
    out, lse, max_logits = case.run(run, place.put, return_max_logits=True)
    got = {"out": place.get(out), "lse": place.get(lse), "max_logits": place.get(max_logits)}
    assert max(ref.attention_ratios(case.reference(), **got, **device.BOUNDS).values()) <= 1
