"""What ModelRunner refuses: models, options, token ids, and rewinds."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import Any

import torch

from sparse_mla.integrations._pages import Pages
from sparse_mla.steps.common import as_share
from sparse_mla.v4.checks import INDEX_SIZE, ROPE_SIZE
from sparse_mla.v4.config import HEAD_SIZE, INDEXED_RATIO

INDEXED = "compressed_sparse_attention"  # Transformers' name of a layer with an indexer

# Options that must be left out for models that have none. `max_drafts` need not.
DEFAULTS: dict[str, Any] = {
    "absorb": False,
    "scheme": None,
    "requantize": True,
    "prefill_workspace_tokens": None,
    "compressed_kv_cache_dtype": None,
    "streams": (),
    "cp": None,
    "exchange": None,
}


def check_model(model: Any, known: Collection[type]) -> str:
    """Returns the device of a model that is served."""
    if not any(isinstance(model, kind) for kind in known):
        *most, last = (kind.__name__ for kind in known)
        raise TypeError(
            f"ModelRunner: `model` must be a {', a '.join(most)} or a {last}, got "
            f"{type(model).__name__}"
        )
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1:
        raise ValueError(
            f"ModelRunner: `model` must be on one device, got one on {', '.join(devices)}"
        )
    check_eval(model)
    return devices[0]


def check_eval(model: Any) -> None:
    if model.training:
        raise ValueError(
            "ModelRunner: `model` must be in eval mode, got one in training mode: there are no "
            "gradients through the cache; call model.eval()"
        )


def check_share(cp: Any, exchange: Any) -> tuple[tuple[int, int, int] | None, Any]:
    """The rank's share and what it exchanges with; None and None if one rank has all."""
    if cp is None:
        if exchange is not None:
            raise ValueError(f"ModelRunner: `exchange` must be None without `cp`, got {exchange!r}")
        return None, None
    share = as_share("ModelRunner", cp)
    if share[1] == 1:
        return None, None
    if not callable(exchange):
        raise TypeError(
            "ModelRunner: `exchange` must be a callable that gathers an array of all ranks, with "
            f"`cp` of several ranks, got {type(exchange).__name__}"
        )
    return share, exchange


def check_options(model: Any, given: dict[str, Any], takes: Collection[str]) -> dict[str, Any]:
    """The options that a model takes; the others must have been left out."""
    for name in ("scheme", "requantize"):
        if given[name] is not DEFAULTS[name] and not given["absorb"]:
            raise ValueError(
                f"ModelRunner: `{name}` must be {DEFAULTS[name]} without absorb=True, got "
                f"{given[name]!r}"
            )
    for name, default in DEFAULTS.items():
        value = given[name]
        is_default = value is default or (name == "streams" and len(value) == 0)
        if name not in takes and not is_default:
            kind = type(model).__name__
            raise ValueError(f"ModelRunner: `{name}` must be {default} for a {kind}, got {value!r}")
    return {name: value for name, value in given.items() if name in takes}


def check_counts(model: Any, num_pages: int, max_model_len: int, max_drafts: int) -> None:
    if num_pages < 1:
        raise ValueError(f"ModelRunner: `num_pages` must be at least 1, got {num_pages}")
    most = model.config.max_position_embeddings
    if max_model_len > most:
        raise ValueError(
            "ModelRunner: `max_model_len` must be at most the model's max_position_embeddings "
            f"= {most}, got {max_model_len}"
        )
    if type(max_drafts) is not int or max_drafts < 0:
        raise ValueError(f"ModelRunner: `max_drafts` must be an int from 0 on, got {max_drafts!r}")


def check_rope_type(rope_type: str) -> None:
    if rope_type == "longrope":
        raise ValueError(
            "ModelRunner: `model` must have a rope_type whose angles depend on a token's position "
            'alone, got "longrope", whose angles depend on the length of its request, too'
        )


def check_v4(model: Any) -> None:
    """Refuses sizes that have no kernels, and a model of which a device has a part."""
    sizes = model.config
    kinds = set(sizes.layer_types)
    rules = [("head_dim", HEAD_SIZE), ("qk_rope_head_dim", ROPE_SIZE)]
    if INDEXED in kinds:
        rules.append(("index_head_dim", INDEX_SIZE))
    for name, wanted in rules:
        if getattr(sizes, name) != wanted:
            raise ValueError(
                f"ModelRunner: `model` must have {name} {wanted}, got {getattr(sizes, name)}"
            )
    for kind in sorted(kinds & sizes.compress_rates.keys()):
        rate = sizes.compress_rates[kind]
        if (rate == INDEXED_RATIO) != (kind == INDEXED) or rate < 2:
            rule = str(INDEXED_RATIO) if kind == INDEXED else f"above 1 and not {INDEXED_RATIO}"
            raise ValueError(
                f"ModelRunner: `model` must have a compress rate of {kind} {rule}, got {rate}"
            )
    if getattr(model, "_tp_size", None) not in (None, 1):
        raise ValueError(
            f"ModelRunner: `model` must be whole on its device, got one of {model._tp_size} "
            "tensor-parallel parts"
        )


def check_tokens(
    tokens: Any, pages: Pages, vocab_size: int, config: Any
) -> dict[Hashable, torch.Tensor]:
    """The new ids of every request, where they are."""
    if not isinstance(tokens, Mapping):
        raise TypeError(
            "ModelRunner.step: `tokens` must be a mapping of requests to their new token ids, "
            f"got {type(tokens).__name__}"
        )
    ids = {}
    for request, new in tokens.items():
        what = f"ModelRunner.step: `tokens` of request {request!r} must"
        ids[request] = check_ids(what, torch.as_tensor(new), vocab_size)
        num_tokens = len(ids[request]) + pages.find(request).num_tokens
        if num_tokens > config.max_model_len:
            raise ValueError(
                f"{what} leave it within max_model_len = {config.max_model_len}, got "
                f"{num_tokens} tokens in all"
            )
    limits = {
        "max_num_seqs": (len(ids), "requests"),
        "max_num_batched_tokens": (sum(map(len, ids.values())), "tokens"),
    }
    for name, (number, unit) in limits.items():
        most = getattr(config, name)
        if not 1 <= number <= most:
            raise ValueError(
                f"ModelRunner.step: `tokens` must be 1 to {name} = {most} {unit}, got {number}"
            )
    return ids


def check_ids(what: str, ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    if ids.ndim != 1 or len(ids) == 0:
        raise ValueError(
            f"{what} have shape [n], n >= 1, without padding, got {list(ids.shape)}: requests "
            "of several lengths are several entries"
        )
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{what} be integers, got {ids.dtype}")
    if ids.device.type == "cpu" and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(
            f"{what} be 0 to {vocab_size - 1}, got {int(ids.min())} to {int(ids.max())}"
        )
    return ids


def check_request(op: str, pages: Pages, request: Hashable) -> None:
    if request not in pages.requests:
        raise KeyError(f"{op}: there is no request {request!r}")


def check_rewind(pages: Pages, request: Hashable, num_tokens: Any, max_drafts: int | None) -> None:
    """`max_drafts` is None for models that may forget any number of tokens."""
    op = "ModelRunner.rewind"
    check_request(op, pages, request)
    if type(num_tokens) is not int:
        raise TypeError(f"{op}: `num_tokens` must be an int, got {type(num_tokens).__name__}")
    state = pages.requests[request]
    most, rule = state.num_tokens, f"the {state.num_tokens} tokens of request {request!r}"
    if max_drafts is not None and max_drafts - state.num_forgotten < most:
        most = max_drafts - state.num_forgotten
        rule = f"the {most} of max_drafts = {max_drafts} tokens that {request!r} can still forget"
    if not 0 <= num_tokens <= most:
        raise ValueError(f"{op}: `num_tokens` must be 0 to {rule}, got {num_tokens}")
