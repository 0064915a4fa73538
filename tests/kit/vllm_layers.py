"""A layer of MLA as vLLM makes it."""

import engine


def impl_options(**changes) -> dict:
    """What vLLM's MLAAttention gives an impl of DeepSeek-V3's layers, by names."""
    return {
        "num_heads": 16,
        "head_size": 576,
        "scale": engine.SCALE,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "qk_head_dim": 192,
        "v_head_dim": 128,
        "kv_b_proj": None,
    } | changes
