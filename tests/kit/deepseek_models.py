"""Small models of Transformers with random weights: DeepSeek-V3.2 and V4, and parts of V4."""

import functools
import importlib
import itertools
import sys
from pathlib import Path

import device
from helpers import find_framework, require

V4_HIDDEN = 96


@functools.cache
def load_example(name: str = "deepseek_v32"):
    """A script of examples/ as a module. `common` of it is deepseek_common.py."""
    find_framework("transformers")
    folder = str(Path(__file__).parents[2] / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def make_v32(**sizes):
    """A DeepSeek-V3.2 of one layer and 8 heads, which attends to the top 20 of up to 150 tokens.

    examples/deepseek_v32.py draws its weights.
    """
    torch, example = find_framework("torch").module, load_example()
    config = example.DeepseekV32Config(
        **{
            "vocab_size": 64,
            "hidden_size": 96,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "q_lora_rank": 48,
            "index_topk": 20,
            "index_n_heads": 8,
            "max_position_embeddings": 256,
            "attn_implementation": "eager",
            **sizes,
        }
    )
    model = example.DeepseekV32ForCausalLM(config).eval().requires_grad_(False)
    example.draw_weights(model, torch.Generator().manual_seed(0))
    return model.to(device.NAME)


def make_v4(*options, **sizes):
    """A DeepSeek V4 of four layers: a window alone, chosen rows, all rows, chosen rows."""
    example = load_example("deepseek_v4")
    options = example.parse(["--heads=8", f"--device={device.NAME}", *options])
    small = {"vocab_size": 64, "hidden_size": V4_HIDDEN, "moe_intermediate_size": 64}
    small |= {"q_lora_rank": 64, "o_lora_rank": 32, "index_n_heads": 8}
    return example.make_model(options, **small | sizes)


def make_v4_part(name: str, dim: int):
    """torch, and a compressor or an indexer: r 4 with groups that overlap, or r 128."""
    torch = find_framework("torch").module
    find_framework("transformers")
    v4 = require("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = v4.DeepseekV4Config(
        hidden_size=V4_HIDDEN,
        head_dim=dim,
        q_lora_rank=32,
        index_n_heads=8,
        index_topk=8,
        partial_rotary_factor=64 / dim,
        num_hidden_layers=2,
        vocab_size=64,
    )
    torch.manual_seed(0)
    made = getattr(v4, name)(config).eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.normal_(0, 0.2)
    made.kv_norm.weight.normal_(1, 0.2)
    return torch, made


def steps_of(count: int) -> list[tuple[int, int]]:
    """A prefill, chunks, and single tokens."""
    ends = [0, 111, 112, 113, 128, 129, 200, *range(250, 260), count]
    return list(itertools.pairwise(ends))


def run_token_by_token(monkeypatch, model) -> None:
    """Lets a model's own modules run token by token: their sums, and their functions of few
    elements, otherwise have other bits beside other tokens."""
    torch = find_framework("torch").module
    linear, matmul = torch.nn.functional.linear, torch.matmul

    def project(x, weight, bias=None):
        rows = x.reshape(-1, 1, x.shape[-1])
        return torch.cat([linear(row, weight, bias) for row in rows]).view(*x.shape[:-1], -1)

    def multiply(a, b):
        if a.ndim != 4 or a.shape[0] != 1:
            return matmul(a, b)
        return torch.cat([matmul(a[:, i : i + 1], b[:, i : i + 1]) for i in range(a.shape[1])], 1)

    def split(module):
        forward = module.forward

        def run(x, **options):
            each = [
                forward(x[:, i : i + 1], **{name: y[:, i : i + 1] for name, y in options.items()})
                for i in range(x.shape[1])
            ]
            if isinstance(each[0], tuple):
                return tuple(torch.cat(parts, 1) for parts in zip(*each, strict=True))
            return torch.cat(each, 1)

        monkeypatch.setattr(module, "forward", run)

    monkeypatch.setattr(torch.nn.functional, "linear", project)
    monkeypatch.setattr(torch, "matmul", multiply)
    split(model.model.norm)
    if hasattr(model.model, "hc_head"):
        split(model.model.hc_head)
    for layer in model.model.layers:
        for name in ("attn_hc", "ffn_hc", "mlp", "input_layernorm", "post_attention_layernorm"):
            if hasattr(layer, name):
                split(getattr(layer, name))
