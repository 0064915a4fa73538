import ml_dtypes
import numpy as np

import sparse_mla

rng = np.random.default_rng(0)
latents = rng.standard_normal((100, 512), np.float32)  # kv_c and k_pe of 100 tokens
rope = rng.standard_normal((100, 64), np.float32)
cache = np.zeros((8, 64, 656), np.uint8)  # FP8: 8 pages of 64 tokens
slots = np.arange(128, 228)  # the tokens go to pages 2 and 3
sparse_mla.concat_and_cache_mla(latents, rope, cache, slots)

q = rng.standard_normal((3, 16, 576), np.float32).astype(ml_dtypes.bfloat16)
chosen = rng.choice(slots, (3, 32)).astype(np.int32)  # 32 of them for each of 3 queries, 16 heads
out, lse = sparse_mla.sparse_attention(q, cache, chosen, softmax_scale=192**-0.5)
print(out.shape, out.dtype, lse.shape)  # (3, 16, 512) bfloat16 (3, 16)
