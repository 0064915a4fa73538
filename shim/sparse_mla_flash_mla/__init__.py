"""Lets `import flash_mla` find `sparse_mla.flash_mla` where FlashMLA itself is not installed.

The finder is the last of `sys.meta_path`, so an installed `flash_mla` is always found first.
Python calls `install` when it starts, by a .pth file; nothing of sparse_mla is imported then.
"""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

FOLDER = Path(__file__).parent / "flash_mla"


class Finder:
    """Finds the package `flash_mla`; its modules follow from the package's `__path__`."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        del path, target
        if name != "flash_mla":
            return None
        places = [str(FOLDER)]
        return spec_from_file_location(
            name, FOLDER / "__init__.py", submodule_search_locations=places
        )


def install() -> None:
    """Add the finder behind all others, once."""
    if Finder not in sys.meta_path:
        sys.meta_path.append(Finder)
