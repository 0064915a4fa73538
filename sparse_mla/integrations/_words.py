"""The part of the docstrings of integrations/torch.py and jax.py that is their own: a few words and
an example for each function. _docs.py adds what sparse_mla.ops says about the operator.
"""

from __future__ import annotations

from sparse_mla.integrations._choice_words import WORDS as CHOICE_WORDS

WORDS: dict[str, dict[str, str]] = {
    "concat_and_cache_mla": {
        "torch": """
    New tokens to their slots: `sparse_mla.concat_and_cache_mla`. Writes `kv_cache`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> cache = torch.zeros((2, 64, 656), dtype=torch.uint8)
    >>> write = torch.compile(smla.concat_and_cache_mla, backend="aot_eager")
    >>> write(torch.ones(1, 512), torch.ones(1, 64), cache, torch.tensor([65])) is cache
    True
    >>> cache[0].sum().item(), cache[1, 1, 0].item()
    (0, 126)
        """,
        "jax": """
    The cache after `sparse_mla.concat_and_cache_mla`, in place of a donated `kv_cache`.

    Returns
    -------
    A new array, the shape and dtype of kv_cache.

    >>> import jax, jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> write = jax.jit(smla.concat_and_cache_mla, donate_argnums=2)
    >>> cache = jnp.zeros((2, 64, 656), jnp.uint8)
    >>> cache = write(jnp.ones((1, 512)), jnp.ones((1, 64)), cache, jnp.array([65]))
    >>> int(cache[0].sum()), int(cache[1, 1, 0])
    (0, 126)
        """,
    },
    "gather_kv_cache": {
        "torch": """
    Rows of some requests to a flat workspace: `sparse_mla.gather_kv_cache`. Writes `out`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> cache = torch.ones((4, 64, 576), dtype=torch.bfloat16)
    >>> out, page, seven, one = cache.new_zeros(9, 576), *torch.tensor([3, 7, 1]).int()[:, None]
    >>> smla.gather_kv_cache(cache, page[None], seven, one, out=out)[:, 0].int().tolist()
    [0, 1, 1, 1, 1, 1, 1, 1, 0]
        """,
        "jax": """
    `out` after `sparse_mla.gather_kv_cache`, in place of a donated `out`.

    Returns
    -------
    A new array, the shape and dtype of out.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> cache, out = jnp.ones((4, 64, 576), jnp.bfloat16), jnp.zeros((9, 576), jnp.bfloat16)
    >>> out = smla.gather_kv_cache(cache, jnp.array([[3]]), jnp.array([7]), jnp.array([1]), out=out)
    >>> out[:, 0].astype(int).tolist()
    [0, 1, 1, 1, 1, 1, 1, 1, 0]
        """,
    },
    "dequantize_kv_cache": {
        "torch": """
    Every value of a cache as floats, for inspection: `sparse_mla.dequantize_kv_cache`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> smla.dequantize_kv_cache(torch.zeros((2, 64, 656), dtype=torch.uint8)).shape
    torch.Size([2, 64, 576])
        """,
        "jax": """
    Every value of a cache as floats, for inspection: `sparse_mla.dequantize_kv_cache`.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> smla.dequantize_kv_cache(jnp.zeros((2, 64, 656), jnp.uint8)).shape
    (2, 64, 576)
        """,
    },
    "quantize_and_insert_k_cache": {
        "torch": """
    Whole keys to their slots: `sparse_mla.quantize_and_insert_k_cache`. Writes `k_cache`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> cache = torch.zeros((2, 64, 584), dtype=torch.uint8)
    >>> smla.quantize_and_insert_k_cache(torch.ones(1, 512), cache, torch.tensor([64])) is cache
    True
    >>> cache[0].sum().item(), cache[1, 0, 0].item()
    (0, 120)
        """,
        "jax": """
    The cache after `sparse_mla.quantize_and_insert_k_cache`, in place of a donated `k_cache`.

    Returns
    -------
    A new array, the shape and dtype of k_cache.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> cache = jnp.zeros((2, 64, 584), jnp.uint8)
    >>> cache = smla.quantize_and_insert_k_cache(jnp.ones((1, 512)), cache, jnp.array([64]))
    >>> int(cache[0].sum()), int(cache[1, 0, 0])
    (0, 120)
        """,
    },
    "indexer_k_quant_and_cache": {
        "torch": """
    The indexer's keys to their slots: `sparse_mla.indexer_k_quant_and_cache`. Writes `k_cache`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> cache = torch.zeros((2, 64, 132), dtype=torch.uint8)
    >>> smla.indexer_k_quant_and_cache(torch.ones(1, 128), cache, torch.tensor([64])) is cache
    True
    >>> cache[0].sum().item(), cache[1, 0, 0].item()
    (0, 120)
        """,
        "jax": """
    The cache after `sparse_mla.indexer_k_quant_and_cache`, in place of a donated `k_cache`.

    Returns
    -------
    A new array, the shape and dtype of k_cache.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> cache = jnp.zeros((2, 64, 132), jnp.uint8)
    >>> cache = smla.indexer_k_quant_and_cache(jnp.ones((1, 128)), cache, jnp.array([64]))
    >>> int(cache[0].sum()), int(cache[1, 0, 0])
    (0, 120)
        """,
    },
    "dequantize_and_gather_k_cache": {
        "torch": """
    The last rows of requests to a part of `out`: `sparse_mla.dequantize_and_gather_k_cache`. Writes
    `out`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> cache = torch.ones((4, 64, 512), dtype=torch.bfloat16)
    >>> out, table, seven = cache.new_zeros(1, 9, 512), *torch.tensor([[3], [7]]).int()
    >>> _ = smla.dequantize_and_gather_k_cache(out, cache, seven, None, table[None], 64, 1)
    >>> out[0, :, 0].int().tolist()
    [0, 1, 1, 1, 1, 1, 1, 1, 0]
        """,
        "jax": """
    `out` after `sparse_mla.dequantize_and_gather_k_cache`, in place of a donated `out`.

    Returns
    -------
    A new array, the shape and dtype of out.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> cache, out = jnp.ones((4, 64, 512), jnp.bfloat16), jnp.zeros((1, 9, 512), jnp.bfloat16)
    >>> table, seven = jnp.array([[3]]), jnp.array([7])
    >>> out = smla.dequantize_and_gather_k_cache(out, cache, seven, None, table, 64, 1)
    >>> out[0, :, 0].astype(int).tolist()
    [0, 1, 1, 1, 1, 1, 1, 1, 0]
        """,
    },
    "convert_req_index_to_global_index": {
        "torch": """
    Positions to slots: `sparse_mla.convert_req_index_to_global_index`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> ids, table, topk = (torch.tensor(x).int() for x in ([0], [[5, 7]], [[0, 64, -1, 500]]))
    >>> smla.convert_req_index_to_global_index(ids, table, topk, block_size=64).tolist()
    [[320, 448, -1, -1]]
        """,
        "jax": """
    Positions to slots: `sparse_mla.convert_req_index_to_global_index`.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> ids, table, topk = jnp.array([0]), jnp.array([[5, 7]]), jnp.array([[0, 64, -1, 500]])
    >>> smla.convert_req_index_to_global_index(ids, table, topk, block_size=64).tolist()
    [[320, 448, -1, -1]]
        """,
    },
    "compute_global_topk_indices_and_lens": {
        "torch": """
    An indexer's choice as slots: `sparse_mla.compute_global_topk_indices_and_lens`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> topk, ids, table = (torch.tensor(x).int() for x in ([[3, 0, -1, 9]], [0], [[6, 1]]))
    >>> out, lens = smla.compute_global_topk_indices_and_lens(topk, ids, table, 4, None)
    >>> out.tolist(), lens.tolist()
    ([[27, 24, -1, -1]], [2])
        """,
        "jax": """
    An indexer's choice as slots: `sparse_mla.compute_global_topk_indices_and_lens`.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> topk, ids, table = jnp.array([[3, 0, -1, 9]]), jnp.array([0]), jnp.array([[6, 1]])
    >>> out, lens = smla.compute_global_topk_indices_and_lens(topk, ids, table, 4, None)
    >>> out.tolist(), lens.tolist()
    ([[27, 24, -1, -1]], [2])
        """,
    },
    "combine_topk_swa_indices": {
        "torch": """
    Rows of a prefill chunk's workspace: `sparse_mla.combine_topk_swa_indices`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> topk, starts, lens = (torch.tensor(x).int() for x in ([[0, -1], [1, 0]], [7, 9], [9]))
    >>> out, _ = smla.combine_topk_swa_indices(topk, starts, lens, lens, 3, 4, 2, 20, 10, align=1)
    >>> out.tolist()
    [[0, -1, 15, 16, 17], [1, 0, 16, 17, 18]]
        """,
        "jax": """
    Rows of a prefill chunk's workspace: `sparse_mla.combine_topk_swa_indices`.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> topk, starts, lens = jnp.array([[0, -1], [1, 0]]), jnp.array([7, 9]), jnp.array([9])
    >>> out, _ = smla.combine_topk_swa_indices(topk, starts, lens, lens, 3, 4, 2, 20, 10, align=1)
    >>> out.tolist()
    [[0, -1, 15, 16, 17], [1, 0, 16, 17, 18]]
        """,
    },
    "build_mixed_sparse_indices": {
        "torch": """
    The slots that a batch attends to: `sparse_mla.build_mixed_sparse_indices`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> swa, slots, starts, lens, ids, pages = (
    ...     torch.tensor(x).int()
    ...     for x in ([[8, 9, -1]], [[30, 7]], [0, 1, 2], [2, 6], [0, 1], [[4, 0], [2, 5]]))
    >>> out, lens = smla.build_mixed_sparse_indices(
    ...     swa, slots, None, None, starts, lens, ids, pages, 4, None, 4, 3, 4, 0)
    >>> out.tolist(), lens.tolist()
    ([[8, 9, -1, 30, 7, -1, -1], [11, 20, 21, -1, -1, -1, -1]], [5, 3])
        """,
        "jax": """
    The slots that a batch attends to: `sparse_mla.build_mixed_sparse_indices`.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> swa, slots, starts, lens, ids, pages = map(
    ...     jnp.array, ([[8, 9, -1]], [[30, 7]], [0, 1, 2], [2, 6], [0, 1], [[4, 0], [2, 5]]))
    >>> out, lens = smla.build_mixed_sparse_indices(
    ...     swa, slots, None, None, starts, lens, ids, pages, 4, None, 4, 3, 4, 0)
    >>> out.tolist(), lens.tolist()
    ([[8, 9, -1, 30, 7, -1, -1], [11, 20, 21, -1, -1, -1, -1]], [5, 3])
        """,
    },
    "sparse_attention": {
        "torch": """
    Attention over the tokens that `indices` names: `sparse_mla.sparse_attention`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> q, kv = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((1, 16, 576), (9, 576)))
    >>> slots = torch.tensor([[0, 3, -1]], dtype=torch.int32)
    >>> out, lse = smla.sparse_attention(q, kv, slots, softmax_scale=1 / 576)
    >>> out.shape, round(lse[0, 0].item(), 4)
    (torch.Size([1, 16, 512]), 1.6931)
        """,
        "jax": """
    Attention over the tokens that `indices` names: `sparse_mla.sparse_attention`.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> q, kv = (jnp.ones(shape, jnp.bfloat16) for shape in ((1, 16, 576), (9, 576)))
    >>> out, lse = smla.sparse_attention(q, kv, jnp.array([[0, 3, -1]]), softmax_scale=1 / 576)
    >>> out.shape, round(float(lse[0, 0]), 4)
    ((1, 16, 512), 1.6931)
        """,
    },
    "sparse_mla_dsv4": {
        "torch": """
    Attention over the two caches of a DeepSeek V4 layer: `sparse_mla.sparse_mla_dsv4`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> q, cache = torch.zeros(1, 16, 512).bfloat16(), torch.ones(9, 512).bfloat16()
    >>> slots, lens = torch.tensor([[0, -1, 3, 4]]).int(), torch.tensor([4]).int()
    >>> smla.sparse_mla_dsv4(
    ...     q, cache, None, slots, 4 * cache, lens, None, bmm1_scale=0.04, window=2)[0, 0, 0].item()
    3.0
        """,
        "jax": """
    Attention over the two caches of a DeepSeek V4 layer: `sparse_mla.sparse_mla_dsv4`.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> q, cache = jnp.zeros((1, 16, 512), jnp.bfloat16), jnp.ones((9, 512), jnp.bfloat16)
    >>> slots, lens = jnp.array([[0, -1, 3, 4]]), jnp.array([4])
    >>> out = smla.sparse_mla_dsv4(
    ...     q, cache, slots, 4 * cache, lens, None, bmm1_scale=0.04, window=2)
    >>> float(out[0, 0, 0])
    3.0
        """,
    },
    "merge_attn_states": {
        "torch": """
    Two partial results over disjoint keys as one: `sparse_mla.merge_attn_states`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> ones, zero = torch.ones(1, 1, 4), torch.zeros(1, 1)
    >>> out, lse = smla.merge_attn_states(ones, zero, 3 * ones, zero)
    >>> out[0, 0, 0].item(), round(lse.item(), 4)
    (2.0, 0.6931)
        """,
        "jax": """
    Two partial results over disjoint keys as one: `sparse_mla.merge_attn_states`.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> ones, zero = jnp.ones((1, 1, 4)), jnp.zeros((1, 1))
    >>> out, lse = smla.merge_attn_states(ones, zero, 3 * ones, zero)
    >>> out[0, 0, 0].item(), round(lse.item(), 4)
    (2.0, 0.6931)
        """,
    },
    "k_up_proj": {
        "torch": """
    W_UK absorbed into the query: `sparse_mla.k_up_proj`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> q, w = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((1, 2, 4), (512, 2, 4)))
    >>> smla.k_up_proj(q, w)[0, 0, 0].item()
    4.0
        """,
        "jax": """
    W_UK absorbed into the query: `sparse_mla.k_up_proj`.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> q, w = jnp.ones((1, 2, 4), jnp.bfloat16), jnp.ones((512, 2, 4), jnp.bfloat16)
    >>> smla.k_up_proj(q, w)[0, 0, 0].item()
    4.0
        """,
    },
    "v_up_proj": {
        "torch": """
    The latent output projected up: `sparse_mla.v_up_proj`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> x, w = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((1, 2, 512), (512, 2, 4)))
    >>> smla.v_up_proj(x, w).shape
    torch.Size([1, 2, 4])
        """,
        "jax": """
    The latent output projected up: `sparse_mla.v_up_proj`.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> x, w = jnp.ones((1, 2, 512), jnp.bfloat16), jnp.ones((512, 2, 4), jnp.bfloat16)
    >>> smla.v_up_proj(x, w).shape
    (1, 2, 4)
        """,
    },
    "grouped_output_projection": {
        "torch": """
    Groups of heads, each through its own matrix: `sparse_mla.grouped_output_projection`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> o, weight = (torch.ones(shape).bfloat16() for shape in ((3, 2, 8), (2, 4, 8)))
    >>> z = smla.grouped_output_projection(o, None, weight, None)
    >>> z.shape, z[0, 0, 0].item()
    (torch.Size([3, 2, 4]), 8.0)
        """,
        "jax": """
    Groups of heads, each through its own matrix: `sparse_mla.grouped_output_projection`.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> o, weight = jnp.ones((3, 2, 8), jnp.bfloat16), jnp.ones((2, 4, 8), jnp.bfloat16)
    >>> z = smla.grouped_output_projection(o, None, weight, None)
    >>> z.shape, z[0, 0, 0].item()
    ((3, 2, 4), 8.0)
        """,
    },
    "dynamic_per_tensor_quant": {
        "torch": """
    A tensor as e4m3 and one scale: `sparse_mla.dynamic_per_tensor_quant`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> out, scale = smla.dynamic_per_tensor_quant(torch.tensor([0.5, -2.0]))
    >>> out.tolist(), round(scale.item() * 448, 4)
    ([112.0, -448.0], 2.0)
        """,
        "jax": """
    An array as e4m3 and one scale: `sparse_mla.dynamic_per_tensor_quant`.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> out, scale = smla.dynamic_per_tensor_quant(jnp.array([0.5, -2.0]))
    >>> out.tolist(), round(scale.item() * 448, 4)
    ([112.0, -448.0], 2.0)
        """,
    },
    "fused_q_kv_rmsnorm": {
        "torch": """
    RMSNorm of the rows of q and of kv: `sparse_mla.fused_q_kv_rmsnorm`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> q, kv = torch.full((1, 1536), 3.0, dtype=torch.bfloat16).split([1024, 512], 1)
    >>> out = smla.fused_q_kv_rmsnorm(q, kv, torch.ones(1024), torch.ones(512), eps=1e-6)
    >>> [x[0, 0].item() for x in out]
    [1.0, 1.0]
        """,
        "jax": """
    RMSNorm of the rows of q and of kv: `sparse_mla.fused_q_kv_rmsnorm`.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> q, kv = jnp.full((1, 1024), 3, jnp.bfloat16), jnp.full((1, 512), 3, jnp.bfloat16)
    >>> out = smla.fused_q_kv_rmsnorm(q, kv, jnp.ones(1024), jnp.ones(512), eps=1e-6)
    >>> [x[0, 0].item() for x in out]
    [1.0, 1.0]
        """,
    },
    "fused_qnorm_rope_kv_insert": {
        "torch": """
    Queries normalised and turned, keys turned and written: `sparse_mla.fused_qnorm_rope_kv_insert`.
    Writes `cache`, and `q` where neither `q_out` nor `q_scale_inv` is given.

    >>> import torch, sparse_mla
    >>> import sparse_mla.integrations.torch as smla
    >>> q, kv = (torch.full(n, 3.0, dtype=torch.bfloat16) for n in ((1, 2, 512), (1, 512)))
    >>> cache, table = torch.zeros((2, 64, 584), dtype=torch.uint8), sparse_mla.rope_table(8)
    >>> position, slot, table = torch.tensor([0]), torch.tensor([64]), torch.from_numpy(table)
    >>> out = smla.fused_qnorm_rope_kv_insert(q, kv, position, table, cache, slot, eps=1e-6)
    >>> out[0] is q, q[0, 1, 511].item(), out[1] is cache, cache[1, 0, 0].item()
    (True, 1.0, True, 124)
        """,
        "jax": """
    Queries normalised and turned, and the cache after the keys were turned and written:
    `sparse_mla.fused_qnorm_rope_kv_insert`, in place of a donated `cache`.

    Returns
    -------
    (q_out, cache): new arrays, the shape of q and the shape and dtype of cache.

    >>> import jax.numpy as jnp, sparse_mla
    >>> import sparse_mla.integrations.jax as smla
    >>> q, kv = jnp.full((1, 2, 512), 3, jnp.bfloat16), jnp.full((1, 512), 3, jnp.bfloat16)
    >>> cache, table = jnp.zeros((2, 64, 584), jnp.uint8), sparse_mla.rope_table(8)
    >>> arrays = (q, kv, jnp.array([0]), table, cache, jnp.array([64]))
    >>> q, cache = smla.fused_qnorm_rope_kv_insert(*arrays, eps=1e-6)
    >>> q[0, 1, 511].item(), int(cache[1, 0, 0])
    (1.0, 124)
        """,
    },
    "fused_inv_rope_fp8_quant": {
        "torch": """
    Attention's output turned back and quantised: `sparse_mla.fused_inv_rope_fp8_quant`.

    >>> import torch, sparse_mla
    >>> import sparse_mla.integrations.torch as smla
    >>> o, table = torch.ones(3, 4, 512).bfloat16(), torch.from_numpy(sparse_mla.rope_table(8))
    >>> out, scale = smla.fused_inv_rope_fp8_quant(o, torch.tensor([0, 5, 7]), table, groups=2)
    >>> out.shape, scale.stride(), scale[0, 0, 0].item()
    (torch.Size([3, 2, 1024]), (1, 32, 4), 0.00390625)
        """,
        "jax": """
    Attention's output turned back and quantised: `sparse_mla.fused_inv_rope_fp8_quant`.

    >>> import jax.numpy as jnp, sparse_mla
    >>> import sparse_mla.integrations.jax as smla
    >>> o, table = jnp.ones((3, 4, 512), jnp.bfloat16), jnp.asarray(sparse_mla.rope_table(8))
    >>> out, scale = smla.fused_inv_rope_fp8_quant(o, jnp.array([0, 5, 7]), table, groups=2)
    >>> out.shape, scale.shape, scale[0, 0, 0].item()
    ((3, 2, 1024), (3, 2, 8), 0.00390625)
        """,
    },
    **CHOICE_WORDS,
}
