"""Good calls of what the compiled module has beside its operators: its types and functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import cases
import numpy as np
import reference as ref
from cases import int32

import sparse_mla
from sparse_mla import _C

Call = tuple[Callable[..., Any], tuple[Any, ...]]


def table() -> np.ndarray:
    return int32([4, 0, 2, 1], [1, 3, 0, 2])


def k_up_proj(q_nope, W_UK, *, out=None, stream=None):
    """A declaration of the operator of this name."""


# --- steps ---------------------------------------------------------------------------------------


class Example(NamedTuple):
    """Arguments of good calls of a step: one decode, and a prefill of three tokens."""

    step: tuple[str, dict[str, Any], np.ndarray]
    batch: dict[str, Any]
    layer: dict[str, Any]  # without the generation


LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 16}


def make_batch() -> dict[str, Any]:
    return {
        "query_start_loc_cpu": (0, 1, 4),
        "seq_lens_cpu": int32(9, 12),
        "block_table": table(),
        "num_reqs": 2,
        "num_actual_tokens": 4,
    }


def make_results() -> dict[str, Any]:
    return {
        "attn_sink": np.zeros(2, np.float32),
        "out": np.zeros((4, 2, 512), ref.BF16),
        "lse": np.zeros((4, 2), np.float32),
        "stream": 0,
    }


def make_v32() -> Example:
    rng = np.random.default_rng(3)
    config = sparse_mla.Config(
        2,
        softmax_scale=0.1,
        block_size=4,
        topk_tokens=6,
        prefill_workspace_tokens=16,
        kv_cache_dtype="fp8_ds_mla",
        path="separate",
        **LIMITS,
    )
    layer = {
        "q": cases.random_bf16(rng, 4, 2, 576),
        "kv_cache": cases.make_rows(rng, 20, "fp8").reshape(5, 4, 656),
        "topk_indices": np.zeros((4, 6), np.int32),
        "softmax_scale": 0.1,
    }
    step = ("v32", vars(config), np.zeros((16, 576), ref.BF16))
    return Example(step, make_batch(), layer | make_results())


def make_v4() -> Example:
    config = sparse_mla.v4.Config(
        2,
        softmax_scale=0.1,
        window=3,
        topk_tokens=4,
        block_size=32,
        swa_block_size=4,
        compress_ratios=(4, 16),
        state_block_sizes={4: 4, 16: 8},
        path="separate",
        **LIMITS,
    )
    batch = make_batch() | {
        "slot_mapping": np.arange(4),
        "max_seq_len": 12,
        "compressed": (table(), table()),
        "index": None,
        "states": (table(), None),
        "index_states": None,
    }
    layer = {
        "q": cases.random_bf16(np.random.default_rng(3), 4, 2, 512),
        "swa": np.zeros((5, 4, 584), np.uint8),
        "compressed": np.zeros((5, 8, 584), np.uint8),
        "topk_indices": np.zeros((4, 4), np.int32),
        "slots": None,
        "lens": None,
        "compress_ratio": 4,
    }
    step = ("v4", vars(config), np.zeros((4 * (4 + 3 + 8), 512), ref.BF16))
    return Example(step, batch, layer | make_results())


BATCH = tuple(make_batch())
FORWARD = (
    *("q", "kv_cache", "topk_indices", "attn_sink", "out", "lse"),
    *("softmax_scale", "generation", "stream"),
)


def build(step: Any, *values: Any, **more: Any) -> dict[str, Any]:
    """Builds a step; `values` are the batch's, in the order of BATCH."""
    return step.build(None, **dict(zip(BATCH, values, strict=True)), **more)


def forward(step: Any, *values: Any) -> Any:
    """Runs a layer of DeepSeek-V3.2; `values` are in the order of FORWARD."""
    return step.layer(**dict(zip(FORWARD, values, strict=True)))


# --- calls ---------------------------------------------------------------------------------------


def named(call: Callable[..., Any], arguments: dict[str, Any]) -> Call:
    """The call with its keywords as positional arguments, for tests that replace one of them."""
    names = [*arguments, "more"]

    def run(*values: Any, **others: Any) -> Any:
        return call(**dict(zip(names, values, strict=False)), **others)

    return run, tuple(arguments.values())


def make_named_calls() -> dict[str, Call]:
    """Calls of steps that take their arguments by name."""
    calls: dict[str, Call] = {}
    for plan, example in (("v32", make_v32()), ("v4", make_v4())):
        _, config, workspace = example.step
        builder = _C.Step(*example.step)
        generation = builder.build(None, **example.batch)["generation"]

        def create(plan=plan, workspace=workspace, **config: Any) -> Any:
            return _C.Step(plan, config, workspace)

        fields = {name: config[name] for name in _C.CONFIG_FIELDS[plan]}
        other = _C.Step(*example.step)  # its builds leave the layer's step as it is
        calls |= {
            f"{plan}, config": named(create, fields),
            f"{plan}, build": named(partial(other.build, None), example.batch),
            f"{plan}, layer": named(builder.layer, example.layer | {"generation": generation}),
        }
    return calls


def make_calls() -> dict[str, Call]:
    """By the name in the stub, a function and the arguments of a good call."""
    example = make_v32()
    builder = _C.Step(*example.step)
    layer = example.layer | {"generation": builder.build(None, **example.batch)["generation"]}
    warm_up = (*(make_v4().layer[name] for name in ("q", "out", "lse")), 2, 0)
    return {
        "Step": (_C.Step, (*example.step, None)),
        "Step.build": (partial(_C.Step(*example.step).build, **example.batch), (None,)),
        "Step.refresh": (partial(_C.Step(*example.step).refresh, **example.batch), (None,)),
        "Step.layer": (partial(builder.layer, **layer), ()),
        "Step.warm_up": (_C.Step.warm_up, warm_up),
        "Step.check": (builder.check, (layer["generation"],)),
        "Step.mark_use": (builder.mark_use, (0,)),
        "new_array": (_C.new_array, ("x", int32(1), (2, 3), "float32", 0, False)),
        "find_stream": (_C.find_stream, (int32(1), 0)),
        "read_stream": (_C.read_stream, (7,)),
        "order_streams": (_C.order_streams, (0, 7, 7)),  # a stream waits for itself anyway
        "Operator": (_C.Operator, (k_up_proj, "k_up_proj")),
        "split_decodes_and_prefills": (_C.split_decodes_and_prefills, (int32(0, 1, 4), 4, 1, True)),
        "reorder_batch": (_C.reorder_batch, (int32(9, 1, 12, 1), 1)),
        "split_prefill_chunks": (_C.split_prefill_chunks, (int32(9, 12), 20)),
        "split_context_chunks": (_C.split_context_chunks, (int32(9, 12), 20, 4, False)),
        "local_attention_batches": (
            _C.local_attention_batches,
            (int32(0, 4), int32(6), int32(0, 1, 2)[None], 4, 2),
        ),
        "get_context_workspace_size": (_C.get_context_workspace_size, (16, 4, 4)),
        "get_prefill_workspace_size": (_C.get_prefill_workspace_size, (16,)),
        "kernels": (_C.kernels, ()),
        "build_info": (_C.build_info, ()),
        "call_exactly": (_C.call_exactly, (lambda: 1,)),
        "xla_handlers": (_C.xla_handlers, ()),
    }
