"""The two names that options have which say how a cache stores its rows.

`kv_format` is the name that every call takes. `kv_cache_dtype` is vLLM's name, and every call takes
it, too. Operators bind either name in C (csrc/python/call/operator.c), classes are decorated with
`takes_both`, and the functions for other frameworks use `rename`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection
from dataclasses import is_dataclass
from operator import attrgetter
from typing import Any, TypeVar

NAMES = {
    "kv_format": "kv_cache_dtype",
    "compressed_kv_format": "compressed_kv_cache_dtype",
    "index_kv_format": "index_cache_dtype",
}
OTHER_NAME = NAMES | {second: first for first, second in NAMES.items()}

Class = TypeVar("Class", bound=type)


def rename(options: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The options by the names in `known`. A format that is given by both names stays as it is,
    so that the call raises Python's TypeError about the unknown one."""
    for name in [name for name in options if name not in known and name in OTHER_NAME]:
        own = OTHER_NAME[name]
        if own in known and own not in options:
            options[own] = options.pop(name)
    return options


def takes_both(cls: Class) -> Class:
    """Lets the constructor take either name of its options, and a dataclass have both."""
    init = cls.__init__  # type: ignore[misc]
    own = inspect.signature(init).parameters

    @functools.wraps(init)
    def construct(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **(options if options.keys() <= own.keys() else rename(options, own)))

    type.__setattr__(cls, "__init__", construct)
    for first, second in NAMES.items():
        if is_dataclass(cls) and second in own:
            type.__setattr__(cls, first, property(attrgetter(second), doc=f"`{second}`."))
    return cls
