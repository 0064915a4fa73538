"""Good calls of what the compiled module has beside its operators: its types and functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases
import numpy as np
import reference as ref

from sparse_mla import _C

Call = tuple[Callable[..., Any], tuple[Any, ...]]


def int32(*values) -> np.ndarray:
    return np.array(values, np.int32)


def table() -> np.ndarray:
    return int32([4, 0, 2, 1], [1, 3, 0, 2])


def k_up_proj(q_nope, W_UK, *, out=None, stream=None):
    """A declaration of the operator of this name."""


def make_calls() -> dict[str, Call]:
    """By the name in the stub, a function and the arguments of a good call. Its step is one decode
    and a prefill of three tokens."""
    rng = np.random.default_rng(3)
    q = cases.random_bf16(rng, 4, 2, 576)
    limits = (4, 8, 16, 1)  # requests, tokens, tokens of a request, tokens of a decode
    workspace = np.zeros((16, 576), ref.BF16)
    config = (2, 4, 6, *limits, 32, 16, "fp8_ds_mla", "separate", "cpu", workspace)
    builder = _C.Builder(*config)
    plan = ((0, 1, 4), int32(9, 12), table(), 2, 4)
    forward = (
        *(q, cases.make_rows(rng, 20, "fp8").reshape(5, 4, 656), np.zeros((4, 6), np.int32)),
        *(np.zeros(2, np.float32), np.zeros((4, 2, 512), ref.BF16), np.zeros((4, 2), np.float32)),
        *(0.1, builder.build(*plan)["generation"], 0),
    )
    v4_workspace = np.zeros((4 * (4 + 3 + 8), 512), ref.BF16)
    v4_config = (
        *(2, 3, 4, 32, 4, *limits, 4, (0.1, 1.0, 1.0), (4, 16), (4, 8)),
        *("fp8_v4", "fp8_v4", "separate", "cpu", v4_workspace),
    )
    v4_builder = _C.V4Builder(*v4_config)
    slots = np.arange(4)
    tables = (table(), table(), None), (table(), None, None)
    v4_plan = ((0, 1, 4), int32(9, 12), table(), slots, *tables, 2, 4, 12)
    attend = (
        *(q[..., :512].copy(), np.zeros((5, 4, 584), np.uint8), np.zeros((5, 8, 584), np.uint8)),
        *(np.zeros((4, 4), np.int32), np.zeros(2, np.float32)),
        *(np.zeros((4, 2, 512), ref.BF16), np.zeros((4, 2), np.float32)),
        *(4, v4_builder.build(*v4_plan)["generation"], 0),
    )
    warm_up = (*(attend[i] for i in (0, 5, 6)), 2, 0)
    return {
        "Builder": (_C.Builder, config),
        "Builder.forward": (builder.forward, forward),
        "Builder.build": (_C.Builder(*config).build, plan),
        "V4Builder": (_C.V4Builder, v4_config),
        "V4Builder.attend": (v4_builder.attend, attend),
        "V4Builder.build": (_C.V4Builder(*v4_config).build, v4_plan),
        "V4Builder.warm_up": (_C.V4Builder.warm_up, warm_up),
        "Operator": (_C.Operator, (k_up_proj, "k_up_proj")),
        "split_decodes_and_prefills": (_C.split_decodes_and_prefills, (int32(0, 1, 4), 4, 1, True)),
        "split_prefill_chunks": (_C.split_prefill_chunks, (int32(9, 12), 20)),
        "get_prefill_workspace_size": (_C.get_prefill_workspace_size, (16,)),
        "kernels": (_C.kernels, ()),
        "build_info": (_C.build_info, ()),
        "call_exactly": (_C.call_exactly, (lambda: 1,)),
        "xla_handlers": (_C.xla_handlers, ()),
    }
