"""sparse_mla.flash_mla on a GPU: in CUDA graphs, and compared with the package that it replaces.

Where that package (the wheel sgl-flash-mla) is not installed, the comparisons are skipped.
"""

import helpers
import pytest
import reference as ref
from flash_mla_cases import Arrays, Decode, Prefill, assert_results
from test_flash_mla import DECODES, PREFILLS, check_layer_of_a_model, check_signatures

from sparse_mla import flash_mla

torch = helpers.find_framework("torch").module


@pytest.fixture
def torch_arrays() -> Arrays:
    return Arrays("torch")


@pytest.fixture
def package():
    return helpers.require("flash_mla")


@pytest.mark.parametrize("name", DECODES)
def test_decode_beside_the_package(name, package, torch_arrays):
    case = Decode(**DECODES[name])
    results = case.run(torch_arrays, package)
    assert_results(results, case.reference())
    assert_results(case.run(torch_arrays), [ref.to_f32(x) for x in results])


@pytest.mark.parametrize("name", PREFILLS)
def test_prefill_beside_the_package(name, package, torch_arrays):
    case = Prefill(**PREFILLS[name])
    results = case.run(torch_arrays, package)
    assert_results(results, case.reference())
    assert_results(case.run(torch_arrays), [ref.to_f32(x) for x in results])


def test_one_changed_import(package, torch_arrays):
    check_layer_of_a_model(package, torch_arrays)


def test_the_package_has_these_signatures(package):
    check_signatures(package)


@pytest.mark.parametrize("s_q", [1, 2])
def test_graph_replay_reads_new_contents(s_q, torch_arrays):
    first, second = Decode(s_q=s_q, sink=True, topk_length=True), Decode(s_q=s_q, sink=True)
    second.indices = first.indices[::-1].copy()
    second.options["topk_length"] = first.options["topk_length"][::-1].copy()
    put = torch_arrays.put
    q, cache, indices = put(first.q), put(first.k_cache), put(first.indices)
    options = {name: put(x) for name, x in first.options.items()}
    meta, _ = flash_mla.get_mla_metadata()

    def step():
        return flash_mla.flash_mla_with_kvcache(
            q, cache, None, None, 512, meta, indices=indices, **options
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for case in (first, second):
        indices.copy_(put(case.indices))
        options["topk_length"].copy_(put(case.options["topk_length"]))
        graph.replay()
        torch.cuda.synchronize()
        assert_results([torch_arrays.get(x) for x in results], case.reference())
