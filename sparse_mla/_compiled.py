"""What PyTorch's compiler says where it meets a function that runs on the host, outside of graphs.

The marks are those of `torch.compiler.disable`, without the function that it puts around each call.
integrations/_dynamo.py does the same for the operators of C.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
MODULE = "sparse_mla.integrations.torch"


def names_integration(operator: str = "") -> Callable[[Function], Function]:
    """Marks a function. `operator` is what compiled code calls in its place, if that is one."""

    def mark(function: Function) -> Function:
        vars(function).update(marks(operator))
        return function

    return mark


def marks(operator: str) -> dict[str, Any]:
    """The attributes that Dynamo, the compiler's tracer, looks for. The names are private ones."""
    call = f"{MODULE}.{operator}" if operator else MODULE
    reason = f"it runs outside of graphs: in compiled code call {call}"
    return {"_torchdynamo_disable": True, "_torchdynamo_disable_msg": reason}
