"""What vLLM runs at the start of each of its processes, through the entry point of pyproject.toml.

It names a class and imports nothing of it, so that an engine that runs other backends pays nothing.
"""

from __future__ import annotations

import logging

BACKEND = "sparse_mla.integrations.vllm.SparseMLABackend"


def register() -> None:
    """Makes the backend vLLM's `CUSTOM` one, unless another plugin has taken that name.

    vLLM still chooses among its own backends until it is told `--attention-backend CUSTOM`.
    """
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
