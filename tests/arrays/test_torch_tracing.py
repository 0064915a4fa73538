"""Direct calls while PyTorch traces or compiles a function: their errors name
sparse_mla.integrations.torch, and what dynamo leaves alone."""

import gc
import inspect

import operators
import pytest
from helpers import find_framework, printed_by_python
from test_exchange import moved

import sparse_mla

pytestmark = pytest.mark.frameworks


def attention_in_torch():
    call = moved(operators.GOOD_CALLS["sparse_attention"](), find_framework("torch"))
    q, kv, indices = (call.args[name] for name in ("q", "kv_cache", "indices"))
    return lambda *arrays: sparse_mla.sparse_attention(*arrays, softmax_scale=0.1), (q, kv, indices)


def run_on_fake_tensors(torch, attend, arrays):
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    attend(*map(mode.from_tensor, arrays))


def symbolically_trace(torch, attend, arrays):
    class Module(torch.nn.Module):
        def forward(self, q, kv, indices):
            return attend(q, kv, indices)

    torch.fx.symbolic_trace(Module())


def export(torch, attend, arrays):
    class Module(torch.nn.Module):
        def forward(self, *arrays):
            return attend(*arrays)

    torch.export.export(Module(), arrays, strict=False)


def run_on_meta(torch, attend, arrays):
    attend(*(x.to("meta") for x in arrays))


def run_in_vmap(torch, attend, arrays):
    torch.func.vmap(attend)(*(x[None] for x in arrays))


def functionalize(torch, attend, arrays):
    torch.func.functionalize(attend)(*arrays)


@pytest.mark.torch
@pytest.mark.parametrize(
    "trace",
    [run_on_fake_tensors, symbolically_trace, export, run_on_meta, run_in_vmap, functionalize],
)
def test_traced_calls_of_torch_name_the_integration(torch, trace):
    attend, arrays = attention_in_torch()
    with pytest.raises(BufferError) as info:
        trace(torch, attend, arrays)
    text = str(info.value)
    assert text.startswith("sparse_attention: `q` must ")
    assert text.endswith("torch.func call sparse_mla.integrations.torch")
    attend(*arrays)  # the next call works


def compile_as_one_graph(torch, attend, arrays):
    torch.compile(attend, fullgraph=True, backend="eager")(*arrays)


def export_by_dynamo(torch, attend, arrays):
    class Module(torch.nn.Module):
        def forward(self, *arrays):
            return attend(*arrays)

    torch.export.export(Module(), arrays, strict=True)


INTEGRATION = "sparse_mla.integrations.torch"
quiet_dynamo = pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning"  # about modules that PyTorch imports late
)


@pytest.mark.torch
@quiet_dynamo
@pytest.mark.parametrize("trace", [compile_as_one_graph, export_by_dynamo])
def test_dynamo_names_the_integration(torch, trace):
    torch._dynamo.reset()
    attend, arrays = attention_in_torch()
    with pytest.raises(torch._dynamo.exc.Unsupported) as info:
        trace(torch, attend, arrays)
    assert f"call {INTEGRATION}.sparse_attention)" in str(info.value)
    attend(*arrays)  # the next call works


@pytest.mark.torch
@quiet_dynamo
def test_dynamo_breaks_the_graph_at_an_operator(torch):
    torch._dynamo.reset()
    attend, arrays = attention_in_torch()
    compiled = torch.compile(lambda *x: attend(*x)[0] * 2, backend="eager")
    assert torch.equal(compiled(*arrays), attend(*arrays)[0] * 2)


@pytest.mark.torch
@quiet_dynamo
def test_operators_that_no_integration_has_name_the_module(torch):
    torch._dynamo.reset()
    ask = torch.compile(sparse_mla.attention_workspace_size, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"call {INTEGRATION}\)"):
        ask(1, 2, 3)


@pytest.mark.torch
@quiet_dynamo
@pytest.mark.parametrize(
    ("function", "named"),
    [
        (sparse_mla.SparseMLA.forward, INTEGRATION),
        (sparse_mla.MetadataBuilder.build, INTEGRATION),
        (sparse_mla.v4.SparseMLA.attend, INTEGRATION),
        (sparse_mla.v4.MetadataBuilder.build, INTEGRATION),
        (sparse_mla.flash_mla.flash_mla_with_kvcache, f"{INTEGRATION}.sparse_attention"),
        (sparse_mla.flash_mla.flash_mla_sparse_fwd, f"{INTEGRATION}.sparse_attention"),
        (sparse_mla.flash_attn.flash_attn_with_kvcache, f"{INTEGRATION}.paged_attention"),
        (sparse_mla.flash_attn.flash_attn_varlen_func, f"{INTEGRATION}.varlen_attention"),
    ],
    ids=lambda x: getattr(x, "__qualname__", ""),
)
def test_functions_on_the_host_name_the_integration(torch, function, named):
    torch._dynamo.reset()
    required = [x for x in inspect.signature(function).parameters.values() if x.default is x.empty]
    arguments = {x.name: None for x in required if x.kind is not x.VAR_KEYWORD}
    call = torch.compile(lambda: function(**arguments), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"in compiled code call {named}\)"):
        call()


@pytest.mark.torch
@quiet_dynamo
def test_marks_for_dynamo_go_with_the_operator(torch):
    from torch._dynamo import trace_rules

    op = sparse_mla._C.Operator(lambda q_nope, W_UK, *, out=None, stream=None: None, "k_up_proj")
    op.__name__ = "k_up_proj"
    assert hash(op) == hash(op)
    address = id(op)
    assert address in trace_rules._disallowed_callable_ids
    del op
    gc.collect()
    assert address not in trace_rules._disallowed_callable_ids


@pytest.mark.torch
@quiet_dynamo
def test_a_dynamo_without_marks_is_left_alone(torch, monkeypatch):
    from torch._dynamo import trace_rules

    monkeypatch.delattr(trace_rules, "_disallowed_callable_ids")
    op = sparse_mla._C.Operator(lambda q_nope, W_UK, *, out=None, stream=None: None, "k_up_proj")
    op.__name__ = "k_up_proj"
    assert {op: 1}[op] == 1


@pytest.mark.torch
@pytest.mark.usefixtures("torch")
def test_no_mark_before_dynamo():
    """Hashing an operator imports nothing where PyTorch has not loaded Dynamo."""
    code = (
        "import sys, torch, sparse_mla; {sparse_mla.sparse_attention: 1}; "
        "print([x for x in sys.modules if 'integrations' in x or x == 'torch._dynamo'])"
    )
    assert printed_by_python("-c", code) == "[]\n"
