"""What pyright knows of results. mypy takes them for Any."""

from typing import Any, assert_type

import numpy as np
import torch

import sparse_mla

t, x = torch.zeros(1), np.zeros((1, 2), np.float32)
assert_type(sparse_mla.k_up_proj(x, t), np.ndarray[tuple[Any, ...], np.dtype[Any]])
assert_type(sparse_mla.k_up_proj(t, t), torch.Tensor)
assert_type(sparse_mla.k_up_proj(torch.nn.Parameter(t), t), torch.Tensor)
assert_type(sparse_mla.merge_attn_states(t, t, t, t), tuple[torch.Tensor, torch.Tensor])
assert_type(sparse_mla.merge_attn_partials(t, t), tuple[torch.Tensor, torch.Tensor])
assert_type(sparse_mla.merge_attn_partials([t, t], [t, t]), tuple[torch.Tensor, torch.Tensor])
assert_type(sparse_mla.gather_kv_cache(x, x, x, x, out=t), torch.Tensor)
