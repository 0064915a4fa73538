"""Multi-head Latent Attention, dense and sparse, for any array framework, through DLPack.

Operators write tokens to a paged cache, gather them back, turn positions into slots, attend to all
tokens of a request or to the slots that an indexer chose, merge partial results, and absorb the up
projections. `Config`, `MetadataBuilder` and `SparseMLA` combine these operators for a continuously
batching engine that serves DeepSeek-V3.2; `sparse_mla.dense` has those of dense MLA (DeepSeek V2
and V3), `sparse_mla.v4` those of DeepSeek V4. `sparse_mla.paged` has a step's metadata and the
attention of a layer for models with key heads.

Calls take any arrays that support DLPack, and return arrays of the framework of their first array.
Nothing is copied, and no framework is imported.

>>> import sparse_mla
>>> sparse_mla.get_prefill_workspace_size(1024)
5120
"""

from sparse_mla import backend, flash_attn, flash_mla, ops
from sparse_mla._C import Tensor, __version__
from sparse_mla.backend import *
from sparse_mla.ops.attention import *
from sparse_mla.ops.attention_merge import *
from sparse_mla.ops.cache import *
from sparse_mla.ops.cache_read import *
from sparse_mla.ops.compressor import *
from sparse_mla.ops.facts import *
from sparse_mla.ops.index import *
from sparse_mla.ops.index_ranks import *
from sparse_mla.ops.indexer import *
from sparse_mla.ops.norm import *
from sparse_mla.ops.planning import *
from sparse_mla.ops.projection import *
from sparse_mla.ops.projection_fp8 import *
from sparse_mla.ops.projection_weights import *
from sparse_mla.ops.rope import *
from sparse_mla.ops.topk import *
from sparse_mla.ops.varlen import *

TYPE_CHECKING = False  # as in `typing`, whose import takes time
if TYPE_CHECKING:
    from sparse_mla import dense, paged, v4
del TYPE_CHECKING

__all__ = ["Tensor", "__version__", "dense", "flash_attn", "flash_mla", "paged", "v4"]
__all__ += backend.__all__
__all__ += ops.__all__


def __dir__() -> list[str]:
    """What tab completion offers."""
    return __all__


def __getattr__(name: str) -> object:
    """Imports these modules at their first use, because their classes take time to make."""
    if name in ("dense", "paged", "v4"):
        import importlib

        return importlib.import_module(f"sparse_mla.{name}")
    raise AttributeError(f"module 'sparse_mla' has no attribute {name!r}")
