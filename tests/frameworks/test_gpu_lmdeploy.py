"""lmdeploy's PyTorch engine serves on the shim: small models, judged by eager attention in fp32.

    SMLA_DEVICE=cuda pytest tests/frameworks/test_gpu_lmdeploy.py

Collected where lmdeploy is installed. With sgl-flash-mla beside it, FlashMLA's own kernels serve
the same models, and the steps of both are timed.
"""

from importlib.util import find_spec

import pytest
import served_models as models
from lmdeploy_models import serve, write_model

pytestmark = pytest.mark.torch

PROMPTS = models.make_prompts()
# Of logprobs, in the logits' deviation. FlashMLA's own kernels have the same largest errors, which
# are those of lmdeploy's other layers.
BOUNDS = {"v32": 0.08, "v3": 0.04, "v2": 0.04}
CACHES = [("v32", "fp8"), ("v32", "bfloat16"), ("v3", "bfloat16"), ("v2", "bfloat16")]
BOTH = pytest.mark.parametrize(
    "is_ours",
    [
        pytest.param(True, id="ours"),
        pytest.param(
            False,
            id="theirs",
            marks=pytest.mark.skipif(
                find_spec("flash_mla") is None, reason="sgl-flash-mla is not installed"
            ),
        ),
    ],
)


@BOTH
@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize(("kind", "kv_cache_dtype"), CACHES)
def test_a_model_is_served(tmp_path, kind, kv_cache_dtype, is_eager, is_ours):
    """Chunks of 64 tokens beside decodes, twice: the second time from the prefix cache."""
    model = write_model(tmp_path / "model", kind)
    options = {"kv_cache_dtype": kv_cache_dtype, "eager_mode": is_eager, "is_ours": is_ours}
    served = serve(tmp_path, model, [PROMPTS, PROMPTS], **options)
    models.check(models.load_eager(model), PROMPTS, served, BOUNDS[kind])
    is_listed = (kind, kv_cache_dtype) == ("v32", "bfloat16")
    assert served.calls["flash_mla_sparse_fwd" if is_listed else "flash_mla_with_kvcache"] > 0
    print(f"{kind} on {kv_cache_dtype}: {served.seconds:.0f} s, {served.calls}")


@BOTH
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "bfloat16"])
def test_fewer_keys_than_tokens(tmp_path, kv_cache_dtype, is_ours):
    """The 128 best keys of up to 248, prefills by lists too. Eager attends to the keys that
    lmdeploy's indexer chose."""
    model = write_model(tmp_path / "model", "v32", index_topk=128)
    options = {"kv_cache_dtype": kv_cache_dtype, "is_ours": is_ours}
    served = serve(tmp_path, model, [PROMPTS], eager_mode=True, alone=True, keys=128, **options)
    models.check(models.load_eager(model), PROMPTS, served, 0.12, served.keys)
    assert served.calls["flash_mla_sparse_fwd"] > 0


@pytest.mark.skipif(find_spec("flash_mla") is None, reason="sgl-flash-mla is not installed")
def test_steps_beside_flash_mla(tmp_path):
    """V3.2 on FP8 rows, 4 layers of 64 heads, 32 requests of 600 tokens, lists of 512, graphs:
    milliseconds a step while all of them decode. An engine takes 75 to 115 s to start, most of it
    Triton's compiler."""
    sizes = {"num_hidden_layers": 4, "first_k_dense_replace": 4, "max_position_embeddings": 2048}
    sizes |= {"num_attention_heads": 64, "num_key_value_heads": 64}
    model = write_model(tmp_path / "model", "v32", most_bytes=1 << 30, **sizes)
    prompts = [[(7 * row + at) % models.VOCABULARY for at in range(600)] for row in range(32)]
    room = {"session_len": 1280, "max_batch_size": 32, "num_gpu_blocks": 800}
    room |= {"cudagraph_capture_batch_sizes": [32]}
    times = {}
    for is_ours in (True, False):
        options = {"kv_cache_dtype": "fp8", "is_ours": is_ours, "max_tokens": 500, "logprobs": None}
        served = serve(tmp_path, model, [prompts], **room, **options)
        seconds = [answer["seconds"] for answer in served.rounds[0]]
        began, ended = max(own[0] for own in seconds), min(own[-1] for own in seconds)
        steps = sum(began < second <= ended for second in seconds[0])
        assert steps >= 100
        times[is_ours] = 1e3 * (ended - began) / steps
        print(f"ours {is_ours}: {served.seconds:.0f} s in all, {times[is_ours]:.3f} ms a step")
    assert times[True] <= 1.05 * times[False]
