"""sparse_mla.v4.SparseMLA.attend (csrc/step/layers/layer_v4.c): both paths of every type of layer
against fp64, over the keys that the contract's rules give each token."""

from __future__ import annotations

import dataclasses

import device
import numpy as np
import pytest
import reference as ref
import reference_v4 as plan
from device import host
from helpers import assert_same_bits
from library import sparse_mla
from row_formats import Pages
from v4_attend_cases import (
    FORMAT_PAIRS,
    NUM_PAGES,
    RATIOS,
    SIZES,
    Case,
    case_without_slots,
    check,
    make_cache,
    make_case,
    make_large_case,
    make_workspace,
)

import sparse_mla as package

v4 = sparse_mla.v4
# --- both paths ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["direct", "separate"])
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("formats", FORMAT_PAIRS, ids=str)
def test_layers(formats, ratio, path):
    check(make_case(ratio, path, formats=formats))


BATCHES = {
    "one decode": ((1,), (77,), 0),
    "decodes": ((1, 2, 2, 1), (0, 9, 30, 200), 0),
    "padded decodes": ((2, 2), (5, 60), 4),
    "graph padding": ((2, 2, 0, 0), (5, 60, 0, 0), 4),
    "one prefill": ((40,), (0,), 0),
    "prefills": ((3, 3, 3, 3, 3, 3, 3), (0, 1, 3, 4, 5, 50, 150), 0),
    "decodes and a prefill": ((1, 1, 12), (3, 15, 16), 3),
}


@pytest.mark.parametrize("path", ["direct", "separate"])
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("name", BATCHES)
def test_batches(name, ratio, path):
    lens, contexts, padding = BATCHES[name]
    check(make_case(ratio, path, lens, contexts, padding=padding))


@pytest.mark.parametrize("path", ["direct", "separate"])
@pytest.mark.parametrize("heads", [1, 16, 40, 64, 128])
def test_heads(heads, path):
    check(make_case(16, path, (1, 5), (30, 30), heads=heads))


@pytest.mark.parametrize("path", ["direct", "separate"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_e4m3_queries(ratio, path):
    check(make_case(ratio, path, e4m3=True))


@pytest.mark.parametrize("path", ["direct", "separate"])
@pytest.mark.parametrize("layout", ["mqa", "padded", "bytes"])
def test_layouts(layout, path):
    check(make_case(4, path, layout=layout))


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4, 99])
def test_chunks(chunk_size):
    """The number of chunks changes no bit."""
    want = check(make_case(4, "separate"))
    got = check(make_case(4, "separate", prefill_chunk_size=chunk_size))
    for name in want:
        assert_same_bits(got[name], want[name], name)


def slots_of(case: Case, metadata) -> dict:
    """The choice of a layer with an indexer, as slots."""
    layer, tokens = metadata.layers[4], case.batch.num_tokens
    slots, lens = sparse_mla.compute_global_topk_indices_and_lens(
        case.topk, metadata.req_id_per_token, layer.block_table, layer.block_size,
        metadata.is_valid,
    )  # fmt: skip
    return {"slots": slots[:tokens], "lens": lens[:tokens]}


@pytest.mark.parametrize("path", ["direct", "separate"])
@pytest.mark.parametrize("name", BATCHES)
def test_slots_in_place_of_numbers(name, path):
    """The bits are those that the numbers give. Only prefills on path "separate" need both."""
    lens, contexts, padding = BATCHES[name]
    case = make_case(4, path, lens, contexts, padding=padding)
    want = check(case)
    metadata = case.build()
    slots = slots_of(case, metadata)
    topk = case.topk if path == "separate" and metadata.prefill else None
    rows = case.batch.num_tokens
    out, lse = case.layer.attend(case.q[:rows], case.caches, metadata, topk, **slots)
    assert_same_bits(host(out), host(want["out"]), "out")
    assert_same_bits(host(lse), host(want["lse"]), "lse")


@pytest.mark.parametrize("ratio", RATIOS)
def test_decodes_do_not_depend_on_the_path(ratio):
    """Decode tokens are attended to by the same call on both paths."""
    got = [check(make_case(ratio, path)) for path in ("direct", "separate")]
    tokens = plan.split(SIZES, make_case(ratio, None).batch)[2]
    assert tokens == 4
    for name in got[0]:
        assert_same_bits(got[0][name][:tokens], got[1][name][:tokens], name)


def test_the_default_path_is_direct():
    assert make_case(16, None).build().path == "direct"


def test_padding_tokens_have_no_keys():
    for path in ("direct", "separate"):
        for lens, contexts in (((1, 2), (4, 5)), ((1, 7), (4, 5))):
            got = check(make_case(16, path, lens, contexts, padding=3))
            assert (host(got["lse"])[-3:] == -np.inf).all()
            assert (ref.to_f32(got["out"])[-3:] == 0).all()


def test_tokens_without_slots_are_padding():
    """On path "direct", and among decodes on both."""
    case = make_case(16, "direct")
    case.batch.slot_mapping[[0, 7]] = -1
    got = check(case)
    assert (host(got["lse"])[[0, 7]] == -np.inf).all()
    case = make_case(16, "separate")
    case.batch.slot_mapping[2] = -1
    assert (host(check(case)["lse"])[2] == -np.inf).all()


# Tokens without a slot, of a batch with decodes 0 to 3, prefills 4 to 12 and 13 to 32, and padding.
WITHOUT_SLOTS = {
    "the first decode": [0],
    "the last decode": [3],
    "all decodes": [0, 1, 2, 3],
    "the first prefill token": [4],
    "prefill tokens": [5, 6, 12, 20],
    "the last prefill token": [32],
    "a decode and a prefill token": [1, 9],
    "decodes and a whole prefill": [0, 2, *range(4, 13)],
    "all but a decode": [0, 1, *range(3, 33)],
    "all but a prefill token": [*range(22), *range(23, 33)],
}


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("name", WITHOUT_SLOTS)
def test_tokens_without_slots_among_others(name, ratio):
    """They have no keys, wherever they are, and their neighbours keep theirs."""
    tokens = WITHOUT_SLOTS[name]
    got = check(case_without_slots(ratio, "direct", tokens))
    is_empty = (host(got["lse"]) == -np.inf).all(1)
    assert np.flatnonzero(is_empty).tolist() == [*tokens, 33, 34]
    want = check(case_without_slots(ratio, "direct", []))
    for name, x in want.items():
        assert_same_bits(host(got[name])[~is_empty], host(x)[~is_empty], name)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("name", WITHOUT_SLOTS)
def test_tokens_without_slots_on_the_separate_path(name, ratio):
    """Decodes have no keys. Prefills see what their positions see, but no groups in a layer without
    an indexer, whose prefill_indices have none for such a token. Neighbours stay as they are."""
    tokens = WITHOUT_SLOTS[name]
    got = case_without_slots(ratio, "separate", tokens).run()
    want = case_without_slots(ratio, "separate", []).run()
    is_empty = (host(got["lse"])[:35] == -np.inf).all(1)
    assert np.flatnonzero(is_empty).tolist() == [*(t for t in tokens if t < 4), 33, 34]
    is_same = ~is_empty
    if ratio == 16:
        is_same[tokens] = False
    for name, x in want.items():
        assert_same_bits(host(got[name])[:35][is_same], host(x)[:35][is_same], name)
    assert not ref.to_f32(host(got["out"])[:35][is_empty]).any()


@pytest.mark.parametrize("path", ["direct", "separate"])
@pytest.mark.parametrize("ratio", [4, 16])
def test_pages_of_incomplete_groups_are_not_read(ratio, path):
    """Contexts of 34 tokens have a page of complete groups and two tokens of the next one, whose
    page may be anything."""
    case = make_case(ratio, path, (1, 1, 3, 6), (33, 33, 31, 28))
    for table in case.batch.compressed.values():
        table[:, 1:] = NUM_PAGES
    check(case)


def test_prefills_without_slots_on_the_separate_path():
    """They see what their positions see: a token's slot does not change its row."""
    case = make_case(4, "separate")
    want = check(case)
    case.batch.slot_mapping[7] = -1
    got = case.run()
    for name, x in want.items():
        assert_same_bits(got[name][: len(x)], x, name)


@pytest.mark.parametrize("path", ["direct", "separate"])
def test_given_results(path):
    """Further rows and heads of the caller's arrays stay as they are."""
    case = make_case(4, path)
    want = check(case)
    tokens = case.batch.num_tokens
    out = np.full((tokens + 3, 5, 512), 7, ref.BF16)
    lse = np.full((tokens + 3, 3), 7, np.float32)
    got = case.run(out=out, lse=lse)
    assert got["out"] is out
    assert got["lse"] is lse
    assert_same_bits(out[:tokens, :3], want["out"], "out")
    assert_same_bits(lse[:tokens], want["lse"], "lse")
    for rest in (out[tokens:], out[:, 3:], lse[tokens:]):
        assert (ref.to_f32(rest) == 7).all()


def test_one_builder_serves_all_layers_and_steps():
    """Layers of all types read one plan; a new step has the bits of a new builder."""
    for path in ("direct", "separate"):
        builders = {}
        for seed in range(4):
            lens = [(1, 2, 9), (2,), (1, 1, 1, 30, 4, 5), (5,)][seed]
            for ratio in RATIOS:
                case = make_case(ratio, path, lens, [20 * i for i in range(len(lens))], seed=seed)
                builder = builders.setdefault(path, v4.MetadataBuilder(case.config))
                got, want = case.run(builder), case.run()
                for name in got:
                    assert_same_bits(got[name], want[name], f"{name} of step {seed}")


def test_the_caller_s_workspace():
    case = make_case(4, "separate")
    want = check(case)
    rows = 3 * (125 + SIZES.window + SIZES.max_num_batched_tokens)
    wide = np.full((rows + 2, 520), 3, ref.BF16)
    builder = v4.MetadataBuilder(case.config, workspace=wide[:, :512])
    got = case.run(builder)
    for name in want:
        assert_same_bits(got[name][: case.batch.num_tokens], want[name], name)
    assert (ref.to_f32(wide[:, 512:]) == 3).all()
    assert (ref.to_f32(wide[rows:]) == 3).all()
    if not device.ON_CUDA:
        assert (ref.to_f32(wide[:, :512]) != 3).any()
    by_request = np.full((3, rows // 3, 512), 3, ref.BF16)
    got = case.run(v4.MetadataBuilder(case.config, workspace=by_request))
    for name in want:
        assert_same_bits(got[name][: case.batch.num_tokens], want[name], name)


def test_a_workspace_without_a_path():
    """With it a step may gather, but a small one does not, and a CPU's never does."""
    for ratio in RATIOS:
        case = make_case(ratio, None)
        want = check(case)
        builder = v4.MetadataBuilder(case.config, workspace=make_workspace(case.config))
        assert case.build(builder).path == "direct"
        got = case.run(builder)
        for name in want:
            assert_same_bits(got[name][: case.batch.num_tokens], want[name], name)
    if not device.ON_CUDA:
        case = make_large_case(4)
        builder = v4.MetadataBuilder(case.config, workspace=make_workspace(case.config))
        assert case.build(builder).path == "direct"


def test_gathered_rows_are_the_keys():
    """Rows of fp8_v4 lose nothing as bf16: a scale is a power of two, and a code has four bits."""
    rows = Pages("fp8_v4", pages=8, block_size=64, seed=3)
    slots = np.arange(512)
    data, scales = rows.get(slots)
    scales = scales % 200 + 20  # no value is NaN, too large or subnormal
    data[:, :448] = np.where(data[:, :448] & 0x7F == 0x7F, 0x38, data[:, :448])
    data[:, 449::2] &= 0xBF
    rows.put(slots, data, scales)
    out = np.zeros((1, 512, 512), ref.BF16)
    lens, table = np.array([512], np.int32), np.arange(8, dtype=np.int32)[None]
    got = sparse_mla.dequantize_and_gather_k_cache(out, rows.cache, lens, None, table, 64, 0)
    assert np.array_equal(ref.to_f32(got)[0], rows.values(slots))


def test_a_step_without_requests():
    case = make_case(16, "separate", (), (), padding=0)
    got = case.run()
    assert host(got["out"]).shape == (1, 3, 512)
    assert not ref.to_f32(got["out"]).any()


# --- warm-up -------------------------------------------------------------------------------------


def test_warm_up_gives_zeros():
    case = make_case(4, None)
    for given in (False, True):
        out = np.full((len(case.q) + 1, 5, 512), 7, ref.BF16)
        lse = np.full((3, len(case.q) + 1), 7, np.float32).T
        options = {"out": out, "lse": lse} if given else {}
        got = case.layer.attend(case.q, case.caches, None, case.topk, **options)
        for x in got:
            x = ref.to_f32(x) if x.dtype == ref.BF16 else x
            assert not x[: len(case.q), :3].any()
        if given:
            assert (ref.to_f32(out[:, 3:]) == 7).all()
            assert (ref.to_f32(out[len(case.q) :]) == 7).all()
            assert (lse[len(case.q) :] == 7).all()
        else:
            assert got[0].shape == (len(case.q), 3, 512)
            assert (got[1].shape, got[1].dtype) == ((len(case.q), 3), np.float32)


Q_TYPES = "`q` must be bfloat16, uint8 or float8_e4m3fn"


def test_bad_warm_ups():
    case = make_case(4, None)
    for q, error, rule in (
        (case.q[:, :2], ValueError, r"`q` must have shape \[any, 3, 512\], got \[44, 2, 512\]"),
        (case.q.astype(np.float32), TypeError, f"{Q_TYPES}, got float32"),
    ):
        with pytest.raises(error, match=f"^attend: {rule}"):
            case.layer.attend(q, case.caches, None)
    lse = np.zeros((len(case.q), 2), np.float32)
    with pytest.raises(ValueError, match=r"^attend: `lse` must have shape"):
        case.layer.attend(case.q, case.caches, None, lse=lse)


# --- errors --------------------------------------------------------------------------------------


def bad_calls(case: Case) -> dict:
    """name -> changed arguments of attend, and the error's text."""
    tokens = case.batch.num_tokens
    wrong_pages = make_cache(np.random.default_rng(0), "fp8_v4", 5).cache
    bf16 = make_cache(np.random.default_rng(0), "bfloat16", SIZES.swa_block_size).cache
    swa, extra = case.swa.cache, case.compressed.cache
    wide = np.zeros((tokens, 17), np.int32)
    return {
        "short q": ({"q": case.q[: tokens - 1]}, r"`q` must have shape \[>= 43, 3, 512\]"),
        "heads": ({"q": case.q[:, :2]}, "`q` must have shape"),
        "q dtype": ({"q": case.q.astype(np.float32)}, Q_TYPES),
        "pages": (
            {"caches": v4.Caches(wrong_pages, extra)},
            r"`caches.swa` must have pages of",
        ),
        "format": ({"caches": v4.Caches(bf16, extra)}, r"`caches.swa` must be uint8, int8"),
        "no cache": ({"caches": v4.Caches(swa)}, r"`caches.compressed` must be given, got none"),
        "compressed pages": ({"caches": v4.Caches(swa, swa)}, r"`caches.compressed` must have pag"),
        "no topk": ({"topk_indices": None}, "`topk_indices` must be given, got none"),
        "wide topk": ({"topk_indices": wide}, r"`topk_indices` must have at most .* = 16 columns"),
        "short topk": ({"topk_indices": wide[1:]}, "`topk_indices` must have shape"),
        "topk dtype": ({"topk_indices": wide.astype(np.int64)}, "`topk_indices` must be int32"),
        "no lens": ({"slots": wide[:, :11]}, "`lens` must be given, got none"),
        "no slots": ({"lens": wide[:, 0].copy()}, "`slots` must be given, got none"),
        "wide slots": (
            {"slots": wide, "lens": wide[:, 0].copy()},
            r"`slots` must have at most topk_tokens = 16 columns, got 17",
        ),
        "short lens": (
            {"slots": wide[:, :11], "lens": wide[1:, 0].copy()},
            r"`lens` must have shape \[>= 43\]",
        ),
        "out": ({"out": np.zeros((tokens, 2, 512), ref.BF16)}, "`out` must have shape"),
        "lse": ({"lse": np.zeros((tokens, 4), np.float32)}, "`lse` must have shape"),
        "overlap": ({"out": case.q}, "`out` must not overlap `q`, got arrays that share memory"),
    }


@pytest.mark.parametrize("path", ["direct", "separate"])
@pytest.mark.parametrize("name", list(bad_calls(make_case(4, None))))
def test_bad_calls(name, path):
    """Nothing is written, and the step can be attended to afterwards."""
    case = make_case(4, path)
    metadata = case.build()
    changes, rule = bad_calls(case)[name]
    out = np.full((len(case.q), 3, 512), 7, ref.BF16)
    arguments = {
        "q": case.q, "caches": case.caches, "topk_indices": case.topk, "out": out,
    } | changes  # fmt: skip
    with pytest.raises((TypeError, ValueError), match=f"^attend: ({rule})"):
        case.layer.attend(arguments.pop("q"), arguments.pop("caches"), metadata, **arguments)
    assert (ref.to_f32(out) == 7).all()
    case.layer.attend(case.q, case.caches, metadata, case.topk)


def test_bad_arguments_of_other_layers():
    case = make_case(16, "direct")
    metadata = case.build()
    with pytest.raises(ValueError, match=r"^attend: `topk_indices` must be None for a layer with"):
        case.layer.attend(case.q, case.caches, metadata, np.zeros((43, 3), np.int32))
    for name in ("slots", "lens"):
        with pytest.raises(
            ValueError, match=rf"^attend: `{name}` must be None for a layer without"
        ):
            case.layer.attend(case.q, case.caches, metadata, **{name: np.zeros(43, np.int32)})
    prefills = make_case(4, "separate")
    metadata = prefills.build()
    with pytest.raises(ValueError, match="`topk_indices` must be given beside slots for the prefi"):
        prefills.layer.attend(prefills.q, prefills.caches, metadata, **slots_of(prefills, metadata))
    metadata = case.build()
    with pytest.raises(TypeError, match=r"`caches` must be a sparse_mla\.v4\.Caches, got tuple"):
        package.v4.SparseMLA(case.config, 16, v4.Weights(*5 * [None])).attend(case.q, (), metadata)
    with pytest.raises(TypeError, match=r"`metadata` must be what MetadataBuilder.build returned"):
        package.v4.SparseMLA(case.config, 16, v4.Weights(*5 * [None])).attend(
            case.q, case.caches, 3
        )
    e4m3 = make_case(16, "direct", e4m3=True)
    bf16 = dataclasses.replace(e4m3, q=make_case(16, "direct").q)
    with pytest.raises(ValueError, match="`q` must be float8_e4m3fn for a config with q_scale"):
        bf16.run()


def test_a_layer_needs_its_block_table():
    case = make_case(16, "direct")
    metadata = case.build(compressed={4: case.batch.compressed[4]})
    with pytest.raises(ValueError, match="`metadata` must have a compressed block table of ratio"):
        case.layer.attend(case.q, case.caches, metadata)


def test_a_replaced_step_is_refused():
    case = make_case(16, "direct")
    builder = v4.MetadataBuilder(case.config)
    old, new = case.build(builder), case.build(builder)
    with pytest.raises(ValueError, match=r"`metadata` must come from .* latest build \(number 2\)"):
        case.layer.attend(case.q, case.caches, old)
    case.layer.attend(case.q, case.caches, new)


@pytest.mark.skipif(device.ON_CUDA, reason="a GPU writes zeros for bad pages")
@pytest.mark.parametrize("which", ["swa", "compressed"])
def test_bad_pages_on_the_separate_path(which):
    """The gather of the last chunk fails before the first token is written."""
    case = make_case(16, "separate")
    table = case.batch.block_table if which == "swa" else case.batch.compressed[16]
    table[6] = NUM_PAGES
    out = np.full((len(case.q), 3, 512), 7, ref.BF16)
    with pytest.raises(ValueError, match=r"^dequantize_and_gather_k_cache: `block_table` must"):
        case.run(out=out)
    assert (ref.to_f32(out) == 7).all()


def test_layers_take_configs_weights_and_known_ratios():
    config, weights = make_case(16, None).config, v4.Weights(*5 * [None])
    with pytest.raises(TypeError, match=r"`config` must be a sparse_mla\.v4\.Config, got int"):
        package.v4.SparseMLA(3, 16, weights)
    with pytest.raises(TypeError, match=r"`weights` must be a sparse_mla\.v4\.Weights, got None"):
        package.v4.SparseMLA(config, 16, None)
    with pytest.raises(ValueError, match=r"`compress_ratio` must be at most 1 or .*, got 128"):
        package.v4.SparseMLA(config, 128, weights)
    with pytest.raises(ValueError, match=r"`compress_ratio` must be at least 0, got -1"):
        package.v4.SparseMLA(config, -1, weights)
    assert package.v4.SparseMLA(config, 0, weights).compress_ratio == 0
