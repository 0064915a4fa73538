"""What SGLang runs at the start of each of its processes: the entry point of pyproject.toml.

Three functions of SGLang's module of FlashMLA become ours, by SGLang's registry of hooks, when it
imports the module. Until then a process pays for this file alone, not for FlashMLA's kernels.
"""

import functools
import logging
import sys
from importlib.machinery import PathFinder
from typing import Any

MODULE = "sglang.kernels.ops.attention.flash_mla_interface"


def register() -> None:
    """Replaces the functions where they are imported already, else when SGLang imports them."""
    if MODULE in sys.modules:
        replace(sys.modules[MODULE])
    elif Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)


class Finder:
    """Finds the one module as Python does, and has `replace` follow its execution."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        spec = PathFinder.find_spec(name, path) if name == MODULE else None
        if spec is not None and spec.loader is not None:
            plain = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (plain(module), replace(module))
        return spec


def replace(module: Any) -> None:
    """Hooks all functions, or none: then an error in the log says which one does not fit."""
    from inspect import signature

    from sglang.srt.plugins import hook_registry as registry
    from sglang.version import __version__

    from sparse_mla import flash_mla

    hooks, source = {}, registry.HookSource("sparse_mla", "sparse_mla")
    for ours in (get_mla_metadata, flash_mla_with_kvcache, flash_mla_sparse_fwd):
        target = f"{MODULE}.{ours.__name__}"
        try:
            names = [*signature(vars(module).get(ours.__name__)).parameters]
            signature(getattr(flash_mla, ours.__name__)).bind_partial(**dict.fromkeys(names))
        except TypeError as error:
            text = "SGLang %s: no hook for %s, so SGLang's own functions run: %s"
            return logging.getLogger(__name__).error(text, __version__, target, error)
        hooks[target] = functools.partial(_call, functools.partial(ours, flash_mla), names)
    for target, hook in hooks.items():
        registry.HookRegistry.register(target, hook, registry.HookType.REPLACE, source=source)
    loading = getattr(registry, "_current_plugin_source", None)
    if loading is None or loading.get() is None:  # else SGLang applies all plugins' hooks
        registry.HookRegistry.apply_hooks()


def _call(ours: Any, names: list[str], *args: Any, **kwargs: Any) -> Any:
    return ours(**dict(zip(names[: len(args)], args, strict=True)), **kwargs)


def get_mla_metadata(ours: Any, cache_seqlens: Any = None, **_: Any) -> Any:
    if cache_seqlens is None:
        return ours.get_mla_metadata()
    return cache_seqlens.new_zeros(1, 8), cache_seqlens.new_zeros(len(cache_seqlens) + 1)


def flash_mla_with_kvcache(ours: Any, *, use_legacy: bool = True, **given: Any) -> Any:
    if given.get("num_splits") is not None and given["k_cache"].shape[-1] == 528:
        given["kv_format"] = given.get("kv_format") or "V32_NO_ROPE"  # V4.1 has no such schedule
    return ours.flash_mla_with_kvcache(use_legacy=use_legacy, **given)


def flash_mla_sparse_fwd(ours: Any, *, use_legacy: bool = True, **given: Any) -> Any:
    log2 = True if use_legacy else None  # as FlashMLA's older kernels have it
    return ours.flash_mla_sparse_fwd(use_legacy=use_legacy, return_log2_lse=log2, **given)
