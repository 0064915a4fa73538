"""FlashMLA's fused attention of DeepSeek V4, which sparse_mla does not have.

SGLang imports this module for every model, and calls it for DeepSeek V4 with its "mega" backend.
"""


def __getattr__(name: str) -> object:
    raise AttributeError(
        f"flash_mla.fused_norm_rope_attn_rope_cast.{name}: sparse_mla has no fused norm, RoPE and "
        "attention of DeepSeek V4: choose another attention backend, or install FlashMLA"
    )
