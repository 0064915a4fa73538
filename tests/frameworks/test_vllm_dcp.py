"""vLLM's decode context parallelism (DCP): a rank's implementations, of vLLM's own classes, write
and read the rank's own keys, and what vLLM merges of them is the result of one rank."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import vllm_layers
import vllm_ranks
from helpers import BESIDE_TESTS, assert_same_bits, assert_within_bounds, free_port, run_python
from rank_steps import draw_len
from row_formats import E4M3_576
from vllm_layers import TOPK, engine_of
from vllm_ranks import DRAFTS, make_world, merge, run_rank

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def vllm():
    return vllm_layers.load()


# ---- Facts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dense", [False, True])
def test_what_vllm_asks_of_a_rank(vllm, dense):
    """Its layers and its check of context parallelism read these."""
    backend = vllm.dense.DenseMLABackend if dense else vllm.ours.SparseMLABackend
    assert (backend.supports_pcp(), backend.supports_dcp()) == (False, True)
    with engine_of(vllm, num_heads=4, dense=dense, cp=(1, 4, 16), speculative=DRAFTS) as (
        impl,
        builder,
    ):
        assert (impl.dcp_rank, impl.dcp_world_size) == (1, 4)
        assert impl.need_to_return_lse_for_decode
        assert impl.lse_base_on_e
        assert impl.supports_mtp_with_cp_non_trivial_interleave_size
        assert builder.reorder_batch_threshold == 3  # drafts stay decodes
    with engine_of(vllm, num_heads=4, dense=dense) as (impl, builder):
        assert not impl.need_to_return_lse_for_decode


def test_heads_are_those_of_all_ranks(vllm):
    """vLLM gathers them before attention. The weights that a prefill would need are of one rank."""
    with engine_of(vllm, num_heads=4, cp=(3, 4, 16)) as (impl, builder):
        assert (impl.num_heads, builder.builder.config.num_heads) == (4, 16)
        assert builder.builder.config.cp == (3, 4, 16)
    with engine_of(vllm, num_heads=4, dense=True, cp=(3, 4, 16)) as (impl, builder):
        assert (impl.config, builder.builder, builder.cp) == (None, None, (3, 4, 16))
        impl.process_weights_after_loading(vllm.torch.bfloat16)
        assert impl.layer is None


@pytest.mark.parametrize("dense", [False, True])
def test_a_layer_of_drafts_may_have_a_whole_cache(vllm, dense):
    """In a process of a DCP group, where vLLM's config of the drafts has no DCP."""
    with pytest.MonkeyPatch.context() as patch:
        group = SimpleNamespace(rank_in_group=1, world_size=2)
        patch.setattr(vllm.groups, "_DCP", group)
        with engine_of(vllm, num_heads=4, dense=dense) as (impl, builder):
            assert (impl.dcp_world_size, impl.config.num_heads) == (1, 4)
            assert builder.builder.config.cp is None


@pytest.mark.parametrize("dense", [False, True])
def test_prefill_context_parallelism_is_refused(vllm, dense, monkeypatch):
    group = SimpleNamespace(rank_in_group=0, world_size=2)
    monkeypatch.setattr(vllm.groups, "_PCP", group)
    text = "MLAImpl: prefill context parallelism of 2 ranks is not served; decode context"
    with (
        pytest.raises(NotImplementedError, match=text),
        engine_of(vllm, num_heads=4, dense=dense, cp=(0, 2, 1)),
    ):
        pass


def test_the_interleave_is_that_of_the_builder_s_time(vllm):
    """vLLM may set it after it has made the layers."""
    with engine_of(vllm, num_heads=4, cp=(1, 2, 1)) as (impl, builder):
        builder.vllm_config.parallel_config.cp_kv_cache_interleave_size = 64
        assert vllm.ours.find_rank(impl, builder.vllm_config) == (1, 2, 64)


# ---- Steps ---------------------------------------------------------------------------------------

KINDS = [
    ("sparse", "fp8", 16, "mixed"),
    ("sparse", "fp8", 36, "separate"),
    ("sparse", "bf16", 16, "bf16"),
    ("dense", "bf16", 16, None),
    ("dense", "fp8", 16, None),
    ("dense", E4M3_576, 16, None),
]
# With one rank other dense steps are not absorbed: they are those of DenseMLA.
WORLDS = [
    (*kind, ranks)
    for kind in KINDS
    for ranks in (1, 2, 4)
    if ranks > 1 or kind[0] == "sparse" or kind[1] == E4M3_576
]
BATCHES = {
    "decodes": [3, 3, 0, 3],
    "one token each": [1, 1, 1, 1, 1],
    "prefills": [4, 17, 40],
    "mixed": [3, 3, 0, 3, 5, 33],
}


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize(("kind", "fmt", "heads", "path", "ranks"), WORLDS)
def test_merged_parts_are_the_whole(vllm, kind, fmt, heads, path, ranks, interleave):
    """Lengths next to borders between ranks; some ranks have no key of a request."""
    rng = np.random.default_rng([ranks, interleave])
    num_empty = 0
    for name, query_lens in BATCHES.items():
        lens = [draw_len(rng, ranks, interleave, max(n, 1)) for n in query_lens]
        lens[0] = query_lens[0]
        padding = 2 if name == "decodes" else 0
        world = make_world(query_lens, lens, fmt, heads, dense=kind == "dense", padding=padding)
        runs = [run_rank(vllm, world, (rank, ranks, interleave)) for rank in range(ranks)]
        for metadata, part in runs:
            assert path is None or name == "one token each" or metadata.step.path == path
            num_empty += part[1][: sum(query_lens)].isneginf().any().item()
        out, lse = merge(vllm, runs)
        gathered = path == "separate"
        got = {"out": out, "lse": lse}
        assert_within_bounds(world.reference(), got, gathered=gathered, merges=1)
    assert (num_empty > 0) == (ranks > 1)


@pytest.mark.parametrize(("kind", "fmt", "heads"), [x[:3] for x in KINDS if x[0] == "sparse"])
def test_one_rank_has_the_bits_of_no_dcp(vllm, kind, fmt, heads):
    world = make_world(BATCHES["mixed"], [70, 5, 1, 64, 5, 130], fmt, heads, dense=False)
    _, want = run_rank(vllm, world, None)
    _, got = run_rank(vllm, world, (0, 1, 16))
    for x, y in zip(got, want, strict=True):
        assert_same_bits(vllm.get(x), vllm.get(y))


# ---- Layers of vLLM's own ------------------------------------------------------------------------


RANKS, INTERLEAVES = 2, (1, 16)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What two processes have done, whose exchange is gloo's: vllm_ranks.run_layers."""
    folder, port = tmp_path_factory.mktemp("ranks"), free_port()

    def run(rank: int):
        call = f"run_layers({rank}, {RANKS}, {INTERLEAVES}, {port}, {str(folder)!r})"
        script = f"{BESIDE_TESTS}import vllm_ranks; vllm_ranks.{call}"
        return run_python("-W", "ignore", "-c", script, OMP_NUM_THREADS="1")

    with ThreadPoolExecutor(RANKS) as pool:
        done = [*pool.map(run, range(RANKS))]
    assert not any(process.returncode for process in done), done[0].stderr[-3000:]
    return lambda name: [np.load(folder / f"{name} {rank}.npy") for rank in range(RANKS)]


@pytest.mark.parametrize("merge", ["vLLM", "plugin"])
@pytest.mark.parametrize("interleave", INTERLEAVES)
@pytest.mark.parametrize("name", vllm_ranks.LAYERS)
def test_layers_of_vllm_s_own_merge_ranks(vllm, results, name, interleave, merge):
    """vLLM's MLAAttention gathers queries, calls our implementation, exchanges and merges the
    parts, and gives each rank the outputs of its heads."""
    outputs = np.concatenate(results(f"{name} {interleave} {merge}"), -1)
    vllm_ranks.check_layer(name, outputs, merges=RANKS)


@pytest.mark.parametrize("interleave", INTERLEAVES)
def test_an_indexer_of_ranks_chooses_the_keys_of_one(vllm, results, interleave):
    want = vllm_ranks.choose_keys(vllm)
    assert (want >= 0).sum(1).max() == TOPK < 130
    for chosen in results(f"keys {interleave}"):
        assert_same_bits(chosen, want)
