"""What vLLM runs at the start of each of its processes, through the entry point of pyproject.toml.

It names a class and imports nothing of it. It is a module beside the package, because importing
`sparse_mla` takes 40 ms, and an engine that runs another backend pays for this file alone.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

BACKEND = "sparse_mla.integrations.vllm.SparseMLABackend"

# vLLM's CPU platform does not look CUSTOM up, so these two of its methods ask us about it.
# sparse_mla/integrations/vllm_cpu.py has what they do then.
ASKED = ("check_and_update_config", "get_attn_backend_cls")


def register() -> None:
    """Makes the backend vLLM's `CUSTOM` one, unless another plugin has taken that name.

    vLLM still chooses among its own backends until it is told `--attention-backend CUSTOM`.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    taken = custom.get_path() if custom.is_overridden() else None
    if taken is None:
        register_backend(custom, BACKEND)
    elif taken != BACKEND:
        logging.getLogger(__name__).warning(
            "vLLM's CUSTOM attention backend is %s already, and stays so; "
            "VLLM_PLUGINS=sparse_mla loads no other plugin than this one",
            taken,
        )
        return
    if current_platform.is_cpu():
        ask_us(type(current_platform), custom)
    else:
        watch_models(type(current_platform), custom)


def watch_models(platform: Any, custom: Any) -> None:
    """Wrap a method of another platform, once: for DeepSeek V4 vLLM would take a backend of its own
    there, whatever was chosen."""
    plain = platform.check_and_update_config.__func__
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def watched(cls: Any, vllm_config: Any) -> Any:
        if _chooses(vllm_config, custom):
            refuse_v4(vllm_config)
        return plain(cls, vllm_config)

    platform.check_and_update_config = classmethod(watched)


def refuse_v4(vllm_config: Any) -> None:
    """An error that names the model, if it is a DeepSeek V4."""
    text = getattr(vllm_config.model_config, "hf_text_config", None)
    model_type = getattr(text, "model_type", "")
    if model_type.startswith("deepseek_v4"):
        raise NotImplementedError(f"attention backend CUSTOM: {model_type} is not served")


def ask_us(platform: Any, custom: Any) -> None:
    """Wrap the methods of `ASKED` in `platform`, a class, once. Those that are not there are
    reported when `custom` is chosen, or in the log if no method is there to report it."""
    found = [name for name in ASKED if isinstance(vars(platform).get(name), classmethod)]
    for name in found:
        plain = vars(platform)[name].__func__
        if not hasattr(plain, "__wrapped__"):
            setattr(platform, name, classmethod(_divert(name, plain, custom)))
    if not found:
        logging.getLogger(__name__).error(
            "this vLLM's %s.%s has none of %s, so CUSTOM is not sparse_mla's backend",
            platform.__module__,
            platform.__qualname__,
            ", ".join(ASKED),
        )


def _divert(name: str, plain: Any, custom: Any) -> Any:
    """`plain`, or what sparse_mla does instead where the arguments choose `custom`."""

    @functools.wraps(plain)
    def asked(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(_chooses(given, custom) for given in (*args, *kwargs.values())):
            return plain(cls, *args, **kwargs)
        from sparse_mla.integrations import vllm_cpu

        return vllm_cpu.answer(name, plain)(cls, *args, **kwargs)

    return asked


def _chooses(given: Any, custom: Any) -> bool:
    """Whether an argument is the backend itself, or a config of vLLM that names it."""
    config = getattr(given, "attention_config", None)
    of_kinds = getattr(config, "backend_per_kind", None) or {}
    return custom in (given, getattr(config, "backend", None), *of_kinds.values())
