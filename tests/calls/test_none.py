"""Nothing is None but None: what is false is not taken for an option that was left out.

The options are those whose default is None, of every function, class and method in the `__all__` of
a public module. test_operator.py has those of the operators that are not tried here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import cases
import numpy as np
import operators
import pytest
import reference as ref
from cases import int32

import sparse_mla
from sparse_mla import _C, dense, flash_attn, flash_mla, v4

MODULES = (sparse_mla, flash_attn, flash_mla, dense, v4)
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
FALSE = (0, 0.0, False, "", (), [], {}, b"", np.int64(0), np.zeros(0, np.int32), np.zeros((0, 0)))
HEADS = 2


def bf16(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 1, shape).astype(ref.BF16)


# --- the options ---------------------------------------------------------------------------------


def public_callables() -> Iterator[tuple[str, Any]]:
    """Functions, classes and their methods, by the name in CALLS."""
    for module in MODULES:
        prefix = f"{module.__name__}.".removeprefix("sparse_mla.")
        for name in module.__all__:
            found = getattr(module, name)
            if module is not sparse_mla and found is getattr(sparse_mla, name, None):
                continue
            if inspect.isclass(found):
                for member, x in vars(found).items():
                    if not member.startswith("_") and inspect.isroutine(x):
                        yield f"{prefix}{name}.{member}", getattr(found, member)
            if callable(found) and not isinstance(found, _C.Operator):
                yield f"{prefix}{name}", found


def options() -> list[tuple[str, str]]:
    found = []
    for name, call in public_callables():
        try:
            parameters = inspect.signature(call).parameters.items()
        except ValueError:  # sparse_mla.Tensor, which is not made by hand
            continue
        found += [(name, option) for option, p in parameters if p.default is None]
    return found


# --- a good call of each, in which options may be replaced ---------------------------------------


def make_common(**changes: Any) -> sparse_mla.CommonAttentionMetadata:
    """A decode of a request of 40 tokens, and a prompt of 3."""
    given = {"query_start_loc": int32(0, 1, 4), "seq_lens": int32(40, 3)}
    given |= {"slot_mapping": np.array([39, 48, 49, 50])}
    given |= {"block_table": int32(0, 1, 2, 3, 4, 5).reshape(2, 3)}
    return sparse_mla.CommonAttentionMetadata(**(given | changes))


def v32_config(**changes: Any) -> sparse_mla.Config:
    good = {"softmax_scale": 0.1, "block_size": 16, "topk_tokens": 8, **LIMITS}
    good |= {"kv_cache_dtype": "fp8_ds_mla", "path": "separate"}
    return sparse_mla.Config(HEADS, **(good | changes))


def dense_config(**changes: Any) -> dense.Config:
    good = {"softmax_scale": 0.1, "block_size": 16, "path": "separate", **LIMITS}
    return dense.Config(HEADS, **(good | changes))


def v4_config(**changes: Any) -> v4.Config:
    good = {"kv_cache_dtype": "bfloat16", "compress_ratios": (4,), "swa_block_size": 16, **LIMITS}
    return v4.Config(HEADS, **(good | changes))


def build(**changes: Any) -> Any:
    """CommonAttentionMetadata checks some of its values, and a builder's `build` the others."""
    return sparse_mla.MetadataBuilder(v32_config()).build(make_common(**changes))


def v32_layer(**changes: Any) -> sparse_mla.SparseMLA:
    good = {"kv_b_proj": bf16(512, HEADS * 256)}
    return sparse_mla.SparseMLA(v32_config(), **(good | changes))


def v32_forward(**changes: Any) -> Any:
    metadata = sparse_mla.MetadataBuilder(v32_config()).build(make_common())
    cache, indices = np.zeros((6, 16, 656), np.uint8), np.zeros((4, 8), np.int32)
    return v32_layer().forward(bf16(4, HEADS, 576), cache, indices, metadata, **changes)


def dense_layer(**changes: Any) -> dense.DenseMLA:
    good = {"kv_b_proj": bf16(512, HEADS * 256)}
    if changes.keys() & {"q_proj", "o_proj", "scheme"}:
        good |= {"q_proj": bf16(128, HEADS * 192), "o_proj": bf16(128, HEADS * 128)}
        good |= {"absorb": True}
    return dense.DenseMLA(dense_config(), **(good | changes))


def dense_forward(layer: dense.DenseMLA | None = None, **changes: Any) -> Any:
    layer = dense_layer() if layer is None else layer
    metadata = dense.MetadataBuilder(dense_config()).build(make_common())
    q = bf16(4, HEADS, 192) if layer.absorbed is None else bf16(4, 128)
    return layer.forward(q, bf16(4, 512), bf16(4, 64), bf16(6, 16, 576), metadata, **changes)


def v4_build(**changes: Any) -> v4.Metadata:
    """With block tables for the layer of ratio 4 and its indexer."""
    table = int32(0, 1).reshape(2, 1)
    good: dict[str, Any] = {
        "compressed": {4: table},
        "states": {4: int32(*range(32)).reshape(2, 16)},
    }
    return v4.MetadataBuilder(v4_config()).build(make_common(), **(good | changes))


def v4_layer(ratio: int = 4, **weights: Any) -> v4.SparseMLA:
    return v4.SparseMLA(v4_config(), ratio, v4.Weights(*5 * [None], **weights))


def v4_caches(**changes: Any) -> v4.Caches:
    return v4.Caches(**({"swa": bf16(6, 16, 512), "compressed": bf16(2, 64, 512)} | changes))


def v4_attend(caches: v4.Caches | None = None, **changes: Any) -> Any:
    caches = v4_caches() if caches is None else caches
    good = {"topk_indices": np.zeros((4, 8), np.int32)}
    if changes.keys() & {"slots", "lens"}:
        good = {"slots": np.zeros((4, 8), np.int32), "lens": int32(8, 0, 0, 0)}
    return v4_layer().attend(bf16(4, HEADS, 512), caches, v4_build(), **(good | changes))


PROJECTIONS = {
    "fused_wqa_wkv": 64 + 512,
    "wq_b": HEADS * 512,
    "wo_b": 8,
    "wkv_wgate": 2 * 2 * 512,
    "index_wkv_wgate": 2 * 2 * 128,
    "index_weights_proj": 64,
    "index_wq_b": 64 * 128,
}


def project(name: str, width: int) -> Callable[..., np.ndarray]:
    def call(x: np.ndarray, out: Any = None) -> np.ndarray:
        if out is not None and not isinstance(out, np.ndarray):
            raise TypeError(f"{name}: `out` must be an array")
        if out is not None and out.shape != (len(x), width):
            raise ValueError(f"{name}: `out` must have another shape")
        return np.zeros((len(x), width), ref.BF16)

    return call


def v4_forward(
    weights: dict[str, Any] | None = None,
    caches: dict[str, Any] | None = None,
    projections: Any = None,
    **changes: Any,
) -> Any:
    """The whole layer of ratio 4, so that it reads every weight and every cache."""
    ones, table = np.ones(512, ref.BF16), sparse_mla.rope_table(64, fp32_angles=True)
    made = v4.Weights(
        **{
            "q_norm": ones[:64],
            "kv_norm": ones,
            "attn_sink": None,
            "rope_table": table,
            "wo_a": np.zeros((1, 4, HEADS * 512), ref.BF16),
            "ape": np.zeros((4, 1024), np.float32),
            "compressor_norm": ones,
            "index_ape": np.zeros((4, 256), np.float32),
            "index_norm": ones[:128],
            **(weights or {}),
        }
    )
    good = {name: project(name, width) for name, width in PROJECTIONS.items()}
    config = v4_config(o_groups=1)
    layer = v4.SparseMLA(config, 4, made, good if projections is None else projections)
    tables = {4: int32(0, 1).reshape(2, 1)}, {4: int32(*range(32)).reshape(2, 16)}
    builder = v4.MetadataBuilder(config)
    metadata = builder.build(make_common(), compressed=tables[0], states=tables[1])
    arrays = {
        "state": np.zeros((32, 4, 2048), np.float32),
        "index": np.zeros((2, 64, 132), np.uint8),
        "index_state": np.zeros((32, 4, 512), np.float32),
    }
    made_caches = v4_caches(**(arrays | (caches or {})))
    return layer.forward(bf16(4, 32), made_caches, metadata, **changes)


def decode(**changes: Any) -> Any:
    """A sparse decode; with options of the dense one, that."""
    good: dict[str, Any] = {"indices": np.zeros((2, 1, 8), np.int32)}
    if "extra_indices_in_kvcache" in changes or "extra_topk_length" in changes:
        good["extra_k_cache"] = np.zeros((4, 64, 1, 656), np.uint8)
        good["extra_indices_in_kvcache"] = np.zeros((2, 1, 8), np.int32)
    return flash_mla.flash_mla_with_kvcache(
        bf16(2, 1, HEADS, 576),
        cases.make_rows(np.random.default_rng(1), 256, "fp8").reshape(4, 64, 1, 656),
        None,
        None,
        512,
        None,
        **(good | changes),
    )


def sparse_fwd(**changes: Any) -> Any:
    q, kv, rows = bf16(1, HEADS, 576), bf16(9, 1, 576), np.zeros((1, 1, 4), np.int32)
    return flash_mla.flash_mla_sparse_fwd(q, kv, rows, 0.1, **changes)


def varlen(name: str) -> Callable[..., Any]:
    starts = int32(0, 1, 3)
    q, v = bf16(3, HEADS, 16), bf16(3, HEADS, 8)
    given = {
        "flash_attn_varlen_func": (q, q, v, starts, starts, 2, 2),
        "flash_attn_varlen_qkvpacked_func": (bf16(3, HEADS, 40), starts, 2, 16),
        "flash_attn_varlen_kvpacked_func": (q, bf16(3, HEADS, 24), starts, starts, 2, 2, 16),
    }
    return lambda **changes: getattr(flash_mla, name)(*given[name], **changes)


def with_kvcache(**changes: Any) -> Any:
    """e4m3 keys, whose descales are read. Without a table where an option stands for it."""
    q, cache = (bf16(n, 4, HEADS, 16).astype(ref.E4M3) for n in (2, 3))
    good = {"cache_seqlens": int32(3, 4), "return_softmax_lse": True}
    if not {"page_table", "block_table", "cache_batch_idx"} & changes.keys():
        good["page_table"] = int32(0, 1, 2, 1).reshape(2, 2)
    return flash_attn.flash_attn_with_kvcache(q, cache, cache, **(good | changes))


def attn_varlen(**changes: Any) -> Any:
    starts, q, v = int32(0, 1, 3), bf16(3, HEADS, 16), bf16(3, HEADS, 8)
    q, v = (x.astype(ref.E4M3) for x in (q, v))
    return flash_attn.flash_attn_varlen_func(
        **({"q": q, "k": q, "v": v, "cu_seqlens_q": starts, "cu_seqlens_k": starts} | changes)
    )


def planned(*args: Any) -> Callable[..., Any]:
    return lambda **changes: flash_mla.get_mla_decoding_metadata(*args, **changes)


YARN = {"factor": 4, "orig_max_pos": 16}
CALLS: dict[str, Callable[..., Any]] = {
    "split_kv_b_proj": lambda **x: sparse_mla.split_kv_b_proj(
        bf16(512, HEADS * 256), num_heads=HEADS, qk_nope_head_dim=128, v_head_dim=128, **x
    ),
    "absorb": lambda **x: sparse_mla.absorb(
        bf16(128, HEADS * 192), bf16(512, HEADS, 128), bf16(512, HEADS, 128),
        bf16(128, HEADS * 128), **x,
    ),
    "rope_table": lambda **x: sparse_mla.rope_table(**({"yarn": YARN} | x)),
    "mla_softmax_scale": lambda **x: sparse_mla.mla_softmax_scale(**({"yarn": YARN} | x)),
    "CommonAttentionMetadata": build,
    "Config": lambda **x: sparse_mla.MetadataBuilder(v32_config(**x)),
    "MetadataBuilder": lambda **x: sparse_mla.MetadataBuilder(v32_config(), **x),
    "SparseMLA": v32_layer,
    "SparseMLA.forward": v32_forward,
    "SparseMLA.k_up_proj": lambda **x: v32_layer().k_up_proj(bf16(4, HEADS, 128), **x),
    "SparseMLA.v_up_proj": lambda **x: v32_layer().v_up_proj(bf16(4, HEADS, 512), **x),
    "flash_mla.FlashMLASchedMeta": flash_mla.FlashMLASchedMeta,
    "flash_mla.get_mla_decoding_metadata": planned(None, 128, 1),
    "flash_mla.flash_mla_with_kvcache": decode,
    "flash_mla.flash_mla_sparse_fwd": sparse_fwd,
    **{f"flash_mla.{name}": varlen(name) for name in flash_mla.__all__ if "varlen" in name},
    "flash_attn.flash_attn_with_kvcache": with_kvcache,
    "flash_attn.flash_attn_varlen_func": attn_varlen,
    "dense.Config": lambda **x: dense.MetadataBuilder(dense_config(**x)),
    "dense.MetadataBuilder": lambda **x: dense.MetadataBuilder(dense_config(), **x),
    "dense.DenseMLA": lambda **x: dense_forward(dense_layer(**x)),
    "dense.DenseMLA.forward": dense_forward,
    "v4.Config": lambda **x: v4.MetadataBuilder(v4_config(**x)),
    "v4.MetadataBuilder": lambda **x: v4.MetadataBuilder(v4_config(path="separate"), **x),
    "v4.MetadataBuilder.build": v4_build,
    "v4.Backend.get_kv_cache_shape": lambda **x: v4.Backend.get_kv_cache_shape(3, 64, **x),
    "v4.Caches": lambda **x: v4_forward(caches=x),
    "v4.Weights": lambda **x: v4_forward(weights=x),
    "v4.SparseMLA": v4_forward,
    "v4.SparseMLA.attend": v4_attend,
    "v4.SparseMLA.forward": v4_forward,
}  # fmt: skip

# What an option may have that is false, and the result then.
DEFAULT_STREAM = "the default stream: the result is the same"
NO_TABLES = "no table, as None says"
A_VALUE = "a value like others: the result is another one than with None"
NOT_READ = "the option is not read, as documented"
NUMBERS = (0, 0.0, False, np.int64(0))
EVERYTHING = FALSE
MEANT: dict[tuple[str, str], tuple[tuple[Any, ...], str]] = {
    ("flash_mla.FlashMLASchedMeta", "config"): (EVERYTHING, NOT_READ),
    ("flash_mla.FlashMLASchedMeta", "tile_scheduler_metadata"): (EVERYTHING, NOT_READ),
    ("flash_mla.FlashMLASchedMeta", "num_splits"): (EVERYTHING, NOT_READ),
    ("flash_mla.get_mla_decoding_metadata", "h_q"): (EVERYTHING, NOT_READ),
    ("flash_mla.get_mla_decoding_metadata", "topk"): (EVERYTHING, NOT_READ),
    ("flash_mla.flash_mla_sparse_fwd", "return_log2_lse"): (FALSE[:-2], A_VALUE),
    ("rope_table", "max_pos"): ((0, np.int64(0)), A_VALUE),
    ("flash_mla.flash_mla_with_kvcache", "softmax_scale"): (NUMBERS, A_VALUE),
    ("v4.MetadataBuilder.build", "states"): (({},), NO_TABLES),
    **{
        (f"flash_mla.{name}", "softmax_scale"): (NUMBERS, A_VALUE)
        for name in flash_mla.__all__
        if "varlen" in name
    },
    **{
        (f"flash_attn.{name}", option): (EVERYTHING, NOT_READ)
        for name in flash_attn.__all__
        for option in ("pack_gqa", "scheduler_metadata")
    },
    **{
        ("flash_attn.flash_attn_with_kvcache", option): (EVERYTHING, NOT_READ)
        for option in ("cu_seqlens_k_new", "rotary_seqlens")
    },
    ("flash_attn.flash_attn_with_kvcache", "cache_seqlens"): ((0, False, np.int64(0)), A_VALUE),
    **{
        key: ((0, False, np.int64(0)), "a hint: the result is the same")
        for key in options()
        if key[0].startswith("flash_attn.") and key[1].startswith("max_seqlen")
    },
    **{(f"flash_attn.{name}", "softmax_scale"): (NUMBERS, A_VALUE) for name in flash_attn.__all__},
    **{(name, option): ((0,), DEFAULT_STREAM) for name, option in options() if option == "stream"},
}


# What the errors of an operator call an option that was passed on to it.
CALLED = {
    ("CommonAttentionMetadata", "query_start_loc_cpu"): "query_start_loc",
    ("SparseMLA", "kv_b_proj"): "weight",
    ("flash_mla.flash_mla_with_kvcache", "extra_k_cache"): "extra_kv_cache",
    ("v4.Caches", "compressed"): "kv_cache",
    ("v4.Caches", "index"): "kv_cache",
    ("v4.Caches", "index_state"): "state",
    ("v4.Weights", "wo_a_scale"): "wo_a",
}


def values_of(x: Any) -> Any:
    """Results as something that compares."""
    if isinstance(x, (tuple, list)):
        return [values_of(item) for item in x]
    if isinstance(x, np.ndarray):
        return (x.shape, x.dtype, x.tobytes())
    return x if isinstance(x, (int, float, str, type(None))) else repr(x)


def is_among(value: Any, values: tuple[Any, ...]) -> bool:
    return any(type(value) is type(x) and np.array_equal(value, x) for x in values)


def test_every_option_has_a_call():
    found = options()
    assert {name for name, _ in found} == set(CALLS)
    assert len(found) > 60
    assert MEANT.keys() <= set(found)
    assert {module.__name__ for module in MODULES} == {
        "sparse_mla", "sparse_mla.flash_attn", "sparse_mla.flash_mla", "sparse_mla.dense",
        "sparse_mla.v4",
    }  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_calls_are_good(name):
    CALLS[name]()


@pytest.mark.parametrize(("name", "option"), options())
def test_what_is_false_is_not_taken_for_none(name, option):
    call = CALLS[name]
    meant, meaning = MEANT.get((name, option), ((), ""))
    for value in FALSE:
        if not is_among(value, meant):
            with pytest.raises((TypeError, ValueError, BufferError)) as error:
                call(**{option: value})
            rule = rf"`(weights\.)?{CALLED.get((name, option), option)}`"
            if is_among(value, NUMBERS):
                assert re.search(rule, str(error.value)), str(error.value)
        elif meaning is A_VALUE:
            assert values_of(call(**{option: value})) != values_of(call()), value
        else:
            call(**{option: value})


# --- operators -----------------------------------------------------------------------------------


def count_options() -> list[tuple[str, str]]:
    return [
        (op, name)
        for op in operators.FRAMEWORK_CALLS
        for name, kind in getattr(sparse_mla, op).table
        if kind == "count or none"
    ]


@pytest.mark.parametrize(("op", "name"), count_options())
def test_a_count_of_0_is_not_none(op, name):
    results = []
    for value in (None, 0):
        call = operators.FRAMEWORK_CALLS[op]()
        call.set(name, value)
        results.append(values_of(call.run(sparse_mla)))
    assert results[0] != results[1]
