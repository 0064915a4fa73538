"""The functions of `sparse_mla.flash_mla` under the name that engines import."""

from flash_mla.flash_mla_interface import *  # noqa: F403
from flash_mla.flash_mla_interface import __all__ as __all__
