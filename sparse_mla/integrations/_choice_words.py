"""The words of `_words.py` about the operators that choose keys: compressor, indexer, top-k."""

from __future__ import annotations

WORDS: dict[str, dict[str, str]] = {
    "save_partial_states": {
        "torch": """
    States of tokens for a compressor: `sparse_mla.save_partial_states`. Writes `state`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> kv, ape, state = torch.ones(1, 128), torch.ones(2, 128), torch.zeros(2, 4, 256)
    >>> arrays = kv, kv, ape, torch.tensor([3]), state, torch.tensor([5])
    >>> smla.save_partial_states(*arrays) is state, state[1, 1, ::128].tolist()
    (True, [1.0, 2.0])
        """,
        "jax": """
    The states after `sparse_mla.save_partial_states`, in place of a donated `state`.

    Returns
    -------
    A new array, the shape and dtype of state.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> kv, ape, state = jnp.ones((1, 128)), jnp.ones((2, 128)), jnp.zeros((2, 4, 256))
    >>> state = smla.save_partial_states(kv, kv, ape, jnp.array([3]), state, jnp.array([5]))
    >>> state[1, 1, ::128].tolist()
    [1.0, 2.0]
        """,
    },
    "compress_norm_rope_store": {
        "torch": """
    Groups of states to rows of a cache: `sparse_mla.compress_norm_rope_store`. Writes `cache`, and
    `state` where `kv` is given.

    >>> import torch, sparse_mla
    >>> import sparse_mla.integrations.torch as smla
    >>> state, token = torch.ones(1, 2, 256), torch.tensor([1])
    >>> cache, table = torch.zeros((1, 4, 132), dtype=torch.uint8), torch.zeros(1, 1).int()
    >>> arrays = state, table, torch.tensor([0]).int(), token, token, cache, torch.tensor([0])
    >>> weight, cos_sin = torch.ones(128), torch.from_numpy(sparse_mla.rope_table(8))
    >>> out = smla.compress_norm_rope_store(*arrays, weight, cos_sin, eps=0.0, ratio=2)
    >>> out is cache, cache[0, 0, 0].item()
    (True, 120)
        """,
        "jax": """
    The cache after `sparse_mla.compress_norm_rope_store`, in place of a donated `cache`. Where `kv`
    is given, the states come first, in place of a donated `state`.

    Returns
    -------
    cache, or with kv (state, cache): new arrays, the shapes and dtypes of the given ones.

    >>> import jax.numpy as jnp, sparse_mla
    >>> import sparse_mla.integrations.jax as smla
    >>> state, token = jnp.ones((1, 2, 256)), jnp.array([1])
    >>> cache, table = jnp.zeros((1, 4, 132), jnp.uint8), jnp.zeros((1, 1), jnp.int32)
    >>> arrays = state, table, jnp.zeros(1, jnp.int32), token, token, cache, jnp.array([0])
    >>> weight, cos_sin = jnp.ones(128), sparse_mla.rope_table(8)
    >>> cache = smla.compress_norm_rope_store(*arrays, weight, cos_sin, eps=0.0, ratio=2)
    >>> int(cache[0, 0, 0])
    120
        """,
    },
    "fused_indexer_q_rope_quant": {
        "torch": """
    The indexer's queries turned and quantised: `sparse_mla.fused_indexer_q_rope_quant`.

    >>> import torch, sparse_mla
    >>> import sparse_mla.integrations.torch as smla
    >>> q, w, zero = torch.full((1, 2, 128), 2.0).bfloat16(), torch.ones(1, 2), torch.tensor([0])
    >>> table = torch.from_numpy(sparse_mla.rope_table(8))
    >>> out, w = smla.fused_indexer_q_rope_quant(
    ...     q, w, zero, table, softmax_scale=0.5, head_scale=0.5)
    >>> out.dtype, w.tolist()
    (torch.float8_e4m3fn, [[0.001953125, 0.001953125]])
        """,
        "jax": """
    The indexer's queries turned and quantised: `sparse_mla.fused_indexer_q_rope_quant`.

    >>> import jax.numpy as jnp, sparse_mla
    >>> import sparse_mla.integrations.jax as smla
    >>> q, w, zero = jnp.full((1, 2, 128), 2, jnp.bfloat16), jnp.ones((1, 2)), jnp.array([0])
    >>> table = jnp.asarray(sparse_mla.rope_table(8))
    >>> out, w = smla.fused_indexer_q_rope_quant(
    ...     q, w, zero, table, softmax_scale=0.5, head_scale=0.5)
    >>> out.dtype.name, w.tolist()
    ('float8_e4m3fn', [[0.001953125, 0.001953125]])
        """,
    },
    "indexer_logits": {
        "torch": """
    The indexer's scores of the keys that tokens see: `sparse_mla.indexer_logits`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> one = torch.ones(1, 2, 128).to(torch.float8_e4m3fn)
    >>> keys, lens = (one[0], torch.tensor([1.0, 2.0])), torch.tensor([1]).int()
    >>> smla.indexer_logits(one, torch.ones(1, 2), keys, lens).tolist()
    [[256.0, -inf]]
        """,
        "jax": """
    The indexer's scores of the keys that tokens see: `sparse_mla.indexer_logits`.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> one = jnp.ones((1, 2, 128), jnp.float8_e4m3fn)
    >>> keys, lens = (one[0], jnp.array([1.0, 2.0])), jnp.array([1])
    >>> smla.indexer_logits(one, jnp.ones((1, 2)), keys, lens).tolist()
    [[256.0, -inf]]
        """,
    },
    "lightning_indexer": {
        "torch": """
    The k best keys of each token, by the indexer's scores: `sparse_mla.lightning_indexer`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> one = torch.ones(1, 2, 128).to(torch.float8_e4m3fn)
    >>> keys = one[0].repeat(2, 1), torch.tensor([1.0, 3.0, -1.0, 2.0])
    >>> lens = torch.tensor([4]).int()
    >>> smla.lightning_indexer(one, torch.ones(1, 2), keys, lens, k=2).tolist()
    [[1, 3]]
        """,
        "jax": """
    The k best keys of each token, by the indexer's scores: `sparse_mla.lightning_indexer`. There is
    no `values` here.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> one = jnp.ones((1, 2, 128), jnp.float8_e4m3fn)
    >>> keys = jnp.ones((4, 128), jnp.float8_e4m3fn), jnp.array([1.0, 3.0, -1.0, 2.0])
    >>> smla.lightning_indexer(one, jnp.ones((1, 2)), keys, jnp.array([4]), k=2).tolist()
    [[1, 3]]
        """,
    },
    "top_k_per_row": {
        "torch": """
    The keys with the largest logits: `sparse_mla.top_k_per_row`.

    >>> import torch
    >>> import sparse_mla.integrations.torch as smla
    >>> start, end, page, ids = (torch.tensor(x).int() for x in ([0], [4], [[3]], [0]))
    >>> logits = torch.tensor([[1.0, 3.0, float("nan"), 3.0]])
    >>> smla.top_k_per_row(logits, start, end, k=2).tolist()
    [[1, 3]]
    >>> _, slots, lens = smla.top_k_per_row(
    ...     logits, start, end, k=2, slots_block_table=page, slots_block_size=4,
    ...     req_id_per_token=ids)
    >>> slots.tolist(), lens.tolist()
    ([[13, 15]], [2])
        """,
        "jax": """
    The keys with the largest logits: `sparse_mla.top_k_per_row`. There is no `values` here.

    >>> import jax.numpy as jnp
    >>> import sparse_mla.integrations.jax as smla
    >>> start, end, page, ids = (jnp.array(x) for x in ([0], [4], [[3]], [0]))
    >>> logits = jnp.array([[1.0, 3.0, jnp.nan, 3.0]])
    >>> smla.top_k_per_row(logits, start, end, k=2).tolist()
    [[1, 3]]
    >>> _, slots, lens = smla.top_k_per_row(
    ...     logits, start, end, k=2, slots_block_table=page, slots_block_size=4,
    ...     req_id_per_token=ids)
    >>> slots.tolist(), lens.tolist()
    ([[13, 15]], [2])
        """,
    },
}
