"""Heads split over ranks, as docs/parallel.md has it: processes on the CPU, whose exchange is
gloo's. Attention writes what all_to_all sends, and the merge takes what it receives; the bits are
those of one process that merges the same parts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import reference as ref
from helpers import assert_same_bits, environment_of_python, find_framework
from test_context_parallel import free_port

import sparse_mla

pytestmark = pytest.mark.torch
PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"
HEADS, INTERLEAVE, ROWS = 8, 4, 40
SCRIPT = """
import re, sys
import numpy as np, torch, torch.distributed as dist
page, folder, rank, ranks, port = *sys.argv[1:3], *map(int, sys.argv[3:])
block = next(x for x in re.findall(r"^```python\\n(.*?)^```", open(page).read(), re.M | re.S)
             if "all_to_all_single" in x)
exec(block)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
given = {name: torch.from_numpy(x) for name, x in np.load(f"{folder}/all.npz").items()}
q, table = given["q"].view(torch.bfloat16), given[f"table_{rank}"]
cache = given[f"cache_{rank}"].view(torch.bfloat16)
call = {"cu_seqlens_q": given["starts"], "softmax_scale": 0.04, "causal": True}
cp = rank, ranks, int(given["interleave"])
out, lse = attend(q, cache, table, given["lens"], cp=cp, sinks=given["sinks"], **call)
assert out.dtype == torch.bfloat16 and out.is_contiguous()
whole = sparse_mla.mla_attention(q, cache, table, given["lens"], cp=cp, **call)
sent = [x.unflatten(1, (ranks, -1)).movedim(1, 0).contiguous() for x in whole]
received = [torch.empty_like(x) for x in sent]
for to, x in zip(received, sent):
    dist.all_to_all_single(to, x)
copied = sparse_mla.merge_attn_partials(*received, attn_sink=given["sinks"].chunk(ranks)[rank])
assert torch.equal(copied[0], out) and torch.equal(copied[1], lse)
np.savez(f"{folder}/{rank}.npz", out=out.view(torch.int16).numpy(), lse=lse.numpy())
dist.destroy_process_group()
"""


def make_world(ranks: int) -> dict[str, np.ndarray]:
    """Three requests, of which one is so short that most ranks have no key of it."""
    rng = np.random.default_rng(ranks)
    lens, counts = np.array([37, 3, 20], np.int32), [2, 1, 3]
    world = {"lens": lens, "starts": np.cumsum([0, *counts], dtype=np.int32)}
    world["q"] = ref.to_bf16(rng.normal(0, 1, (sum(counts), HEADS, 576)).astype(np.float32))
    world["sinks"] = rng.normal(0, 1, HEADS).astype(np.float32)
    for rank in range(ranks):
        rows = rng.normal(0, 1, (len(lens) * ROWS, 1, 576)).astype(np.float32)
        world[f"cache_{rank}"] = ref.to_bf16(rows)
        world[f"table_{rank}"] = np.arange(len(rows), dtype=np.int32).reshape(len(lens), ROWS)
    return world


def run_ranks(folder: Path, world: dict[str, np.ndarray], ranks: int) -> list[dict]:
    bits = {name: x.view(np.int16) if x.dtype == ref.BF16 else x for name, x in world.items()}
    np.savez(folder / "all.npz", interleave=np.array(INTERLEAVE), **bits)
    given = [sys.executable, "-c", SCRIPT, str(PAGE), str(folder)]
    environment = environment_of_python({"OMP_NUM_THREADS": "1"})
    port = str(free_port())
    started = [
        subprocess.Popen(
            [*given, str(rank), str(ranks), port],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        for rank in range(ranks)
    ]
    printed = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0] * ranks, printed
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_the_bits_of_one_process(tmp_path, ranks):
    find_framework("torch")
    world = make_world(ranks)
    got = run_ranks(tmp_path, world, ranks)
    parts = [
        sparse_mla.mla_attention(
            world["q"],
            world[f"cache_{rank}"],
            world[f"table_{rank}"],
            world["lens"],
            cu_seqlens_q=world["starts"],
            softmax_scale=0.04,
            causal=True,
            cp=(rank, ranks, INTERLEAVE),
        )
        for rank in range(ranks)
    ]
    assert any(np.isneginf(lse).any() for _, lse in parts), "some rank has no key"
    outs, lses = zip(*parts, strict=True)
    out, lse = sparse_mla.merge_attn_partials(list(outs), list(lses), attn_sink=world["sinks"])
    assert_same_bits(np.concatenate([x["out"] for x in got], 1), out.view(np.int16))
    assert_same_bits(np.concatenate([x["lse"] for x in got], 1), lse)
    plain, _ = sparse_mla.merge_attn_partials(list(outs), list(lses))
    assert (plain.view(np.int16) != out.view(np.int16)).any(), "sinks count"
