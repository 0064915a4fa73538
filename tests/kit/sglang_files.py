"""SGLang's files, as its wheel has them, where what the wheel requires is not installed.

`import sglang` loads the whole package. The modules of the tests need nothing of that, so here
`sglang` is an empty module whose path is the wheel's folder. What is below it is SGLang's own.
"""

import contextlib
import importlib
import importlib.util
import sys
import types
import warnings
from importlib.machinery import PathFinder
from pathlib import Path

SHIM = Path(__file__).parents[2] / "shim"
GROUP = "sglang.srt.plugins"
MODULE = "sglang.kernels.ops.attention.flash_mla_interface"


def folder_of(package: str) -> Path:
    """The folder of `sglang` or of a package below it, found without importing anything."""
    (folder,) = PathFinder.find_spec("sglang").submodule_search_locations
    return Path(folder).joinpath(*package.split(".")[1:])


def expose() -> None:
    """Makes `import sglang.…` work, and that of `flash_mla`, which SGLang's module imports: by the
    shim where FlashMLA is not installed."""
    package = types.ModuleType("sglang")
    package.__path__ = [str(folder_of("sglang"))]
    sys.modules["sglang"] = package
    if importlib.util.find_spec("flash_mla") is None:
        sys.path.append(str(SHIM))
        importlib.import_module("sparse_mla_flash_mla").install()


@contextlib.contextmanager
def loaded(folders):
    """SGLang's module of FlashMLA in this process, after SGLang has loaded the plugins that
    `folders` and SGLANG_PLUGINS name. At the end nothing of it is imported any more."""
    importlib.import_module("torch")
    before, path, finders = {*sys.modules}, [*sys.path], [*sys.meta_path]
    sys.path[:0] = map(str, folders)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expose()
            importlib.import_module(GROUP).load_plugins()
            module = importlib.import_module(MODULE)
        yield module
        importlib.import_module(f"{GROUP}.hook_registry").HookRegistry.reset()
    finally:
        sys.path[:], sys.meta_path[:] = path, finders
        ours = ("sglang", "sparse_mla_sglang", "sparse_mla_flash_mla")
        if "sparse_mla_flash_mla" in sys.modules:  # FlashMLA itself stays, with its operators
            ours += ("flash_mla",)
        for name in {*sys.modules} - before:
            if name.startswith(ours):
                del sys.modules[name]
