"""A bad call raises one clear error and writes nothing; the next one works (csrc/ops).

What each kind of argument refuses follows from the operators' tables. Dtypes, shapes and layouts
have their own tests (test_bounds.py, test_dtypes.py, test_views.py), and so do numbers and names
(test_options.py).
"""

import re
import sys

import numpy as np
import operators
import pytest
import reference as ref
from helpers import assert_same_bits
from library import sparse_mla

import sparse_mla as package

pytestmark = pytest.mark.frameworks

BF16 = ref.BF16


def zeros(*shape, dtype=BF16) -> np.ndarray:
    return np.zeros(shape, dtype)


# --- arrays --------------------------------------------------------------------------------------


def set_array(call: operators.Call, name: str, value) -> None:
    """Sets an argument, or one array of a pair."""
    name, _, item = name.partition("[")
    if item:
        pair = list(call.get(name))
        pair[int(item[:-1])] = value
        value = tuple(pair)
    call.set(name, value)


@pytest.mark.parametrize("op", operators.GOOD_CALLS)
def test_every_array_of_a_wrong_kind(op):
    """Nothing is written or kept, on any device, and the same call without the fault works."""
    call = operators.GOOD_CALLS[op]()
    arrays = call.arrays()
    before = {name: np.ascontiguousarray(x).tobytes() for name, x in arrays.items()}
    references = {name: sys.getrefcount(x) for name, x in arrays.items()}
    for name, good in arrays.items():
        any_rank = op == "dynamic_per_tensor_quant" or (good.size == 1 and name.endswith("scale"))
        deep = good.reshape(*good.shape, *[1] * (9 - good.ndim if any_rank else 3))
        for bad, error, text in (
            (good.astype(np.float64), TypeError, f"{op}: `{name}` must be "),
            (deep, ValueError, f"{op}: `"),
        ):
            set_array(call, name, bad)
            with pytest.raises(error) as info:
                call.run(sparse_mla)
            assert re.match(re.escape(text) + ".+, got .+", str(info.value)), info.value
        set_array(call, name, good)
    info = bad = deep = good = None
    for name, x in arrays.items():
        assert np.ascontiguousarray(x).tobytes() == before[name], f"{name} was written"
        assert sys.getrefcount(x) == references[name], f"{name} was leaked"
    call.run(sparse_mla)


# op, argument, its bad value from the good one, error, text from the argument on
REFUSALS = [
    ("indexer_logits", "k_cache", lambda _: zeros(5, 4, 656, dtype=np.uint8), ValueError,
     "`k_cache` must be of a format that this operator takes (fp8_index or mxfp4_index), "
     "got fp8_ds_mla"),
    ("indexer_logits", "block_size", lambda _: 5, ValueError,
     "`k_cache` must have pages of block_size = 5 tokens, got 4"),
    *[("fused_inv_rope_fp8_quant", "o", lambda _, n=n: zeros(3, n, 512), ValueError,
       f"`o` must have 1 to 128 heads, got {n}") for n in (0, 129)],
    *[(op, name, lambda _: "bfloat16", TypeError,
       "`kv_cache` must be bfloat16 for format bfloat16, got uint8")
      for op, name in (("concat_and_cache_mla", "kv_cache_dtype"),
                       ("sparse_attention", "kv_format"))],
    ("combine_topk_swa_indices", "topk", lambda _: 4, ValueError,
     "`topk_indices` must have at least `topk` (4) columns, got 3"),
    *[("build_mixed_sparse_indices", name, bend, ValueError,
       f"`prefill_topk_indices` must have at least `topk` ({topk}) columns, got {got}")
      for name, bend, topk, got in (
          ("prefill_topk_indices", lambda x: x[:, :1], 2, 1),
          ("prefill_topk_indices", lambda _: None, 2, 0),
          ("topk", lambda _: 4, 4, 3),
      )],
    ("build_mixed_sparse_indices", "compressed_block_table", lambda _: None, ValueError,
     "`compressed_block_table` must be given, got none"),
    ("sparse_mla_dsv4", "bmm2_scale", lambda _: 2.0, ValueError,
     "`bmm2_scale` must be 1 for format bfloat16, which has no scale of the whole cache, got 2"),
]  # fmt: skip


POSITIONS = "`positions` must be rows of `rope_table`, which has 8, got {} for token {}"
ROTATING = ("apply_rope", "rope_and_cache_mla", "fused_inv_rope_fp8_quant")
ROTATING += ("fused_indexer_q_rope_quant", "fused_qnorm_rope_kv_insert", "compress_norm_rope_store")
FAR = 2**62
SLOTS = "`{}` must be below the 12 slots of `{}`, got 12 at token {}"
REQUESTS = "`req_id_per_token` must name a row of `{}` (0 to {}), got {} at token {}"
STARTS = "`query_start_loc` must not decrease, got {} after {} at request 0"

# The same with values of arrays, which a GPU reads in checked mode. The entry, and its value.
VALUES = [
    *[(op, "positions", i, x, POSITIONS.format(x, i))
      for op in ROTATING for i, x in ((1, 8), (2, -1), (0, FAR))],
    ("save_partial_states", "positions", 2, -1, "`positions` must be >= 0, got -1 for token 2"),
    *[(op, name, i, 12, SLOTS.format(name, cache, i)) for op, name, cache, i in (
        ("concat_and_cache_mla", "slot_mapping", "kv_cache", 3),
        ("rope_and_cache_mla", "slot_mapping", "kv_cache", 0),
        ("fused_qnorm_rope_kv_insert", "slot_mapping", "kv_cache", 1),
        ("save_partial_states", "slot_mapping", "state", 1),
        ("compress_norm_rope_store", "slot_mapping", "state", 1),
        ("compress_norm_rope_store", "kv_slot_mapping", "kv_cache", 1),
    )],
    *[(op, "req_id_per_token", i, x, REQUESTS.format(table, n, x, i)) for op, table, n, i, x in (
        ("compress_norm_rope_store", "block_table", 1, 1, 2),
        ("convert_req_index_to_global_index", "block_table", 1, 0, 2),
        ("compute_global_topk_indices_and_lens", "block_table", 1, 1, 2),
        ("top_k_per_row", "slots_block_table", 1, 1, 2),
        ("build_mixed_sparse_indices", "seq_lens", 2, 0, 3),
        ("build_mixed_sparse_indices", "seq_lens", 2, 3, -1),
    )],
    ("indexer_logits", "req_id_per_token", 1, 2,
     "`req_id_per_token` must be 0 to 1 (rows of `block_table`), got 2 at token 1"),
    ("convert_req_index_to_global_index", "prefill_request_ids", 2, 2,
     "`prefill_request_ids` must name an entry of `prefill_workspace_starts` (0 to 1) or be -1, "
     "got 2 at token 2"),
    ("compress_norm_rope_store", "block_table", 1, 3,
     "`block_table` must name pages of `state` (0 to 2) or be negative, got 3 for request 0, "
     "block 1"),
    ("gather_kv_cache", "workspace_starts", 1, 12,
     "`workspace_starts` must keep every row inside the 16 rows of `out`, got rows 12 to 17 for "
     "request 1"),
    ("gather_kv_cache", "block_table", 0, 5,
     "`block_table` must name pages of the cache (0 to 4), got 5 for request 0, block 0"),
    ("combine_topk_swa_indices", "query_start_loc", 0, 9, STARTS.format(5, 9)),
    ("combine_topk_swa_indices", "query_start_loc", 2, 8,
     "`query_start_loc` must have at most the 4 tokens of `topk_indices`, got 5"),
    ("build_mixed_sparse_indices", "query_start_loc", 0, 9, STARTS.format(2, 9)),
]  # fmt: skip


def with_entry(i: int, value: int):
    def bend(x: np.ndarray) -> np.ndarray:
        x = x.copy()
        x.reshape(-1)[i] = value
        return x

    return bend


BAD = [pytest.param(*row, False, id=f"{row[0]}: {row[4]}") for row in REFUSALS]
BAD += [
    pytest.param(op, name, with_entry(i, x), ValueError, text, True, id=f"{op}: {text}")
    for op, name, i, x, text in VALUES
]


@pytest.mark.parametrize(("op", "name", "bend", "error", "text", "is_value"), BAD)
def test_arguments_that_do_not_go_together(op, name, bend, error, text, is_value, request):
    if is_value:
        request.getfixturevalue("checked")
    call = operators.GOOD_CALLS[op]()
    call.set(name, bend((call.args | call.kwargs).get(name)))
    before = {name: np.ascontiguousarray(x).tobytes() for name, x in call.arrays().items()}
    with pytest.raises(error, match=f"^{re.escape(f'{op}: {text}')}$"):
        call.run(sparse_mla)
    for array, x in call.arrays().items():
        assert np.ascontiguousarray(x).tobytes() == before[array], f"{array} was written"


# --- objects -------------------------------------------------------------------------------------

ARRAY = "be an array that speaks DLPack (or a NumPy array), got"
INT = [("4", TypeError, "be an int, got str"), (4.5, TypeError, "be an int, got float")]
INT += [(2**70, ValueError, f"fit int64, got {2**70}")]
HANDLE = "be None, an int handle or an object with __cuda_stream__, .cuda_stream or .ptr, got"
NO_ARRAY = [
    ("kv", TypeError, f"{ARRAY} str"),
    (3.0, TypeError, f"{ARRAY} float: make an array of it"),
]
NEEDED = [*NO_ARRAY, (None, TypeError, f"{ARRAY} None")]

# Kind of a row in an operator's table -> values that it refuses, each with its error.
WRONG = {
    **dict.fromkeys(("input", "pair", "parts", "input and output"), NEEDED),
    **dict.fromkeys(("optional input", "input or none", "asking input"), NO_ARRAY),
    **dict.fromkeys(("output", "output or none", "output or first", "asked output"), NO_ARRAY),
    "input, maybe output": NEEDED,
    "workspace": NO_ARRAY,
    "scale": [NEEDED[0], NEEDED[2]],
    "scale or none": [NEEDED[0]],
    **dict.fromkeys(("int", "int32", "size", "count or none", "hint"), INT),
    "two ints": [
        *[(x, TypeError, f"be a tuple of 2 ints, got {x!r}") for x in (3, None)],
        ((1.0, 2), TypeError, "be an int, got float"),
    ],
    "three ints or none": [("abc", TypeError, "be a tuple of 3 ints, got 'abc'")],
    "float": [("big", TypeError, "be a float, got str"), (None, TypeError, "be a float, got None")],
    "kv_format": [(8, TypeError, "be None or the name of a cache format, got int")],
    "floats": [("float16", ValueError, 'be "float32" or "bfloat16", got \'float16\'')],
    "scales": [(1, ValueError, 'be "fp32" or "ue8m0x4", got 1')],
    "device": [(3, TypeError, 'be "cpu", "cuda" or "cuda:N", got 3')],
    "stream": [
        ("main", TypeError, f"{HANDLE} str"),
        (1.5, TypeError, f"{HANDLE} float"),
        (2**70, ValueError, f"be a handle of at most 64 bits, got {2**70}"),
        (-(2**63) - 1, ValueError, f"be a handle of at most 64 bits, got {-(2**63) - 1}"),
    ],
}
ANY_OBJECT = {"flag", "ask"}  # what is true or false
NO_ARGUMENT = {"second", "result", "asked result", "stream of the arrays"}


@pytest.mark.parametrize("op", operators.FACTS)
def test_every_argument_of_a_wrong_type(op):
    facts, run = operators.FACTS[op], getattr(package, op)
    if facts.good is None:
        required = [n for n in f"{facts.positional} {facts.keywords}".split() if "=" not in n]
        good = dict.fromkeys(required, 1) | {"device": "cpu"}
    else:
        call = facts.good()
        good = call.args | call.kwargs
    for name, kind in run.table:
        if kind in NO_ARGUMENT | ANY_OBJECT:
            continue
        for value, error, rule in WRONG[kind]:
            with pytest.raises(error) as info:
                run(**good | {name: value})
            assert str(info.value) == f"{op}: `{name}` must {rule}"


class Protocol:
    def __init__(self, answer):
        self.answer = answer

    def __cuda_stream__(self):
        return self.answer


@pytest.mark.parametrize("answer", [5, (0,), (0, "x"), (0, 5, 0), [0, 5]], ids=str)
def test_answers_of_the_stream_protocol_that_are_none(answer):
    call = operators.GOOD_CALLS["merge_attn_states"]()
    call.kwargs["stream"] = Protocol(answer)
    with pytest.raises(TypeError, match=r"`stream` must be None, an int .*, got Protocol"):
        call.run(sparse_mla)


def test_the_stream_protocol_answers_version_and_handle():
    call = operators.GOOD_CALLS["merge_attn_states"]()
    call.kwargs["stream"] = Protocol((2**70, 0))
    call.run(sparse_mla)
    call.kwargs["stream"] = Protocol((0, 2**70))
    with pytest.raises(ValueError, match=r"`stream` must be a handle of at most 64 bits, got"):
        call.run(sparse_mla)


@pytest.mark.parametrize("op", operators.GOOD_CALLS)
def test_stream_none_is_the_default(op):
    call = operators.GOOD_CALLS[op]()
    call.kwargs["stream"] = None
    call.run(sparse_mla)


# --- overlap -------------------------------------------------------------------------------------


def test_gather_into_its_own_cache():
    storage = zeros(40, 576)
    cache = storage[:20].reshape(5, 4, 576)
    table = np.array([[4, 0, 2]], np.int32)
    one = np.array([9], np.int32)
    with pytest.raises(ValueError, match=r"gather_kv_cache: `out` must .*, got"):
        sparse_mla.gather_kv_cache(cache, table, one, one * 0, out=storage[10:30])
    sparse_mla.gather_kv_cache(cache, table, one, one * 0, out=storage[20:30])


def test_write_over_its_own_input():
    cache = zeros(3, 4, 576)
    before = cache.copy()
    with pytest.raises(ValueError, match=r"concat_and_cache_mla: `kv_cache` must .*`kv_c`"):
        sparse_mla.concat_and_cache_mla(
            cache[0, :, :512], zeros(4, 64) + 1, cache, np.arange(4, dtype=np.int64)
        )
    assert_same_bits(cache, before)


def test_pages_that_overlap_cannot_be_written():
    """With a page stride below the page's size, two slots would share bytes."""
    raw = np.zeros(3 * 2624, np.uint8)
    cache = np.lib.stride_tricks.as_strided(raw, (3, 4, 656), (1312, 656, 1))
    call = operators.GOOD_CALLS["concat_and_cache_mla"]()
    call.args["kv_cache"] = cache
    with pytest.raises(ValueError, match=r"concat_and_cache_mla: `kv_cache` must .*, got"):
        call.run(sparse_mla)
    assert not raw.any()


HINTS = [
    ("int64 indices", "indices", lambda x: x.astype(np.int64), "make it int32"),
    ("float32 q", "q", lambda x: x.astype(np.float32), "nothing is cast here"),
    ("bits of q", "q", lambda x: x.view(np.uint16), "view the bits as bfloat16"),
    ("heads before tokens", "q", lambda x: x.swapaxes(0, 1), "a row per token of the query"),
    ("q without RoPE", "q", lambda x: x[..., :512], "512 latent and 64 RoPE values"),
    ("pair reversed", "q", lambda x: (x[..., 512:], x[..., :512]), "then 64 of RoPE"),
    ("one length", "topk_length", lambda x: x[:1], "a length per token"),
    ("length as an int", "topk_length", lambda x: 3, "make an array of it"),
    ("list of lengths", "topk_length", lambda x: x.tolist(), "make an array of it"),
    ("one sink", "attn_sink", lambda x: x[:1], "a value per head"),
    ("bytes of a bf16 cache", "kv_cache", lambda x: zeros(5, 4, 1152, dtype=np.uint8), "656"),
]


@pytest.mark.parametrize(
    ("argument", "bend", "hint"), [row[1:] for row in HINTS], ids=[row[0] for row in HINTS]
)
def test_plausible_mistakes_are_told_what_to_do(argument, bend, hint):
    call = operators.GOOD_CALLS["sparse_attention"]()
    call.set(argument, bend(call.args.get(argument, call.kwargs.get(argument))))
    with pytest.raises((TypeError, ValueError)) as info:
        call.run(sparse_mla)
    assert hint in str(info.value).partition(" must ")[2]


def test_objects_of_the_backend_layer_are_not_mixed_up():
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1}
    config = package.Config(1, softmax_scale=1.0, **limits)
    builder, layer = package.MetadataBuilder(config), package.SparseMLA(config)
    for call, text in (
        (lambda: package.MetadataBuilder(16), "`config` must be a Config, got int"),
        (lambda: package.SparseMLA(builder), "`config` must be a Config, got MetadataBuilder"),
        (lambda: builder.build(config), "`common` must be a CommonAttentionMetadata, got Config"),
        (lambda: layer.forward(None, None, None, builder), "`metadata` must be what Meta"),
    ):
        with pytest.raises(TypeError, match=re.escape(text)):
            call()
    with pytest.raises(ValueError, match="`kv_lora_rank` must be 512, got 256"):
        package.Config(1, softmax_scale=1.0, kv_lora_rank=256, **limits)
