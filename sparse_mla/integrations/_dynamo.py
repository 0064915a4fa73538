"""What Dynamo, the tracer of `torch.compile`, says where it meets an operator of an eager call.

Dynamo cannot look into an operator. By itself it then reports a class that it does not know. With
marks it gives the reason, and what to call. The type of operators in C imports this module and
calls `mark` the first time that Dynamo hashes an operator, which it does before it looks for marks.
So calls pay nothing for it, and `import sparse_mla` does not load it.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch._dynamo import trace_rules

from sparse_mla._compiled import marks
from sparse_mla.ops import OPERATORS


def mark(operator: Any) -> None:
    name = getattr(operator, "__name__", "")
    vars(operator).update(marks(name if name in OPERATORS else ""))
    marked = trace_rules._disallowed_callable_ids
    marked.add(id(operator))
    weakref.finalize(operator, marked.remove, id(operator))
