"""The module in which FlashMLA defines its functions; some callers import from here."""

from typing import Any

from sparse_mla import flash_mla as _drop_in
from sparse_mla.flash_mla import *  # noqa: F403
from sparse_mla.flash_mla import __all__ as __all__

_SCHEDULE_WORDS = 8  # int32 of a row of FlashMLA's schedule


def get_mla_decoding_metadata(seqlens_k: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Zeros where FlashMLA has its schedule and its numbers of splits: [1, 8] and [b + 1].

    Nothing reads them. Engines slice and copy these tensors for CUDA graphs, and SGLang insists on
    them, so `(None, None)` of `sparse_mla.flash_mla` does not do here. `seqlens_k` is a PyTorch
    tensor [b] int32, and the zeros are on its device.
    """
    _drop_in.get_mla_decoding_metadata(seqlens_k, *args, **kwargs)  # raises what it refuses
    return seqlens_k.new_zeros(1, _SCHEDULE_WORDS), seqlens_k.new_zeros(len(seqlens_k) + 1)
