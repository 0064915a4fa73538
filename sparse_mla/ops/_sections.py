"""The sections of an operator's docstring that are about PyTorch and JAX.

They follow from the operator's table and from its example, which is written once, for NumPy, in
words that have a counterpart in the other two: arrays are made of a shape and a dtype, what a call
writes is taken from its results, and results are shown as numbers and lists.
"""

from __future__ import annotations

_DTYPES = ("float32", "int32", "uint8", "bfloat16", "float8_e4m3fn")
_WRITTEN = "input and output"  # a kind of row


def add_sections(name: str, doc: str, table: tuple[tuple[str, str], ...]) -> str:
    """The docstring of an operator with both sections behind it."""
    _, _, example = doc.partition("\n    Examples\n    --------\n")
    _, _, example = example.rstrip().partition("\n")  # without the line that imports
    example = example.replace("ml_dtypes.", "np.").replace("sparse_mla.", "smla.")
    example = example.replace("smla.rope_table", "sparse_mla.rope_table")
    ours = ", sparse_mla" if "sparse_mla." in example else ""
    written = " and ".join(f"`{row}`" for row, kind in table if kind == _WRITTEN)
    writes = f" Writes {written}." if written else ""
    donated = f" Returns {written} anew, in place if donated." if written else ""
    return f"""{doc.rstrip()}

    PyTorch
    -------
    `sparse_mla.integrations.torch.{name}`, also in `torch.compile`.{writes}

    >>> import torch{ours}
    >>> import sparse_mla.integrations.torch as smla
{_for_torch(example)}

    JAX
    ---
    `sparse_mla.integrations.jax.{name}`, also in `jax.jit`.{donated}

    >>> import jax.numpy as jnp{ours}
    >>> import sparse_mla.integrations.jax as smla
{_for_jax(example)}
    """


def _for_torch(example: str) -> str:
    for dtype in _DTYPES:  # the last argument of what makes an array
        example = example.replace(f", np.{dtype}", f", dtype=np.{dtype}")
    example = example.replace("np.array(", "np.tensor(").replace(".astype(", ".to(")
    return example.replace("np.", "torch.")


def _for_jax(example: str) -> str:
    return example.replace("workspace_buffer=None, ", "").replace("np.", "jnp.")
