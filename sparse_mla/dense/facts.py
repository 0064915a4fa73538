"""Facts that an engine asks for before it makes a backend of dense MLA."""

from __future__ import annotations

from typing import Any, ClassVar

from sparse_mla.backend.facts import Backend as SparseBackend
from sparse_mla.dense.layer import DenseMLA
from sparse_mla.steps.dense import Metadata, MetadataBuilder


class Backend(SparseBackend):
    """The facts that an engine asks a backend for before it makes one; those not listed are those
    of `sparse_mla.Backend`.

    Attributes
    ----------
    name : str
        "DENSE_MLA".
    is_sparse : bool
        False.

    Source: vLLM's MLACommonBackend.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.dense.Backend.name, sparse_mla.dense.Backend.is_sparse
    ('DENSE_MLA', False)
    """

    _classes: ClassVar[tuple[type[Any], type[Any]]] = (MetadataBuilder, DenseMLA)
    name: ClassVar[str] = "DENSE_MLA"
    is_sparse: ClassVar[bool] = False

    @staticmethod
    def get_metadata_cls() -> type[Metadata]:
        """The class of the metadata that the builder makes.

        Returns
        -------
        type

        Examples
        --------
        >>> import sparse_mla
        >>> sparse_mla.dense.Backend.get_metadata_cls().__name__
        'Metadata'
        """
        return Metadata

    @staticmethod
    def use_cascade_attention(*args: Any, **kwargs: Any) -> bool:
        """Whether a step with a common prefix runs in two parts.

        Parameters
        ----------
        args, kwargs : object
            Not read.

        Returns
        -------
        bool: False.

        Examples
        --------
        >>> import sparse_mla
        >>> sparse_mla.dense.Backend.use_cascade_attention()
        False
        """
        return False
