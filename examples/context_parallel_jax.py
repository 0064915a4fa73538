"""Context parallelism in JAX: the cache of requests split over devices, by `jax.shard_map`.

    python examples/context_parallel_jax.py                                four devices of one CPU
    python examples/context_parallel_jax.py --ranks 2 --interleave 1

A layer's attention runs over a prompt in chunks, then token by token, all requests at once, with a
part of the cache and of the heads on each device. One device does the same with the whole cache,
and every result is compared. The exit status is 1 if one differs by more than rounding explains.

`cp` has the rank, and is fixed when a program is traced, but the program of `shard_map` is traced
once for all devices. So `jax.lax.switch` chooses among the calls of all ranks. Whatever does not
depend on the rank stays outside the switch: the write, so that it is in place, and the exchange,
because a collective is one call that all devices make.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

# Before JAX is imported: devices of one CPU, where there are no others.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import sparse_mla.integrations.jax as smla

Array = jax.Array
REQUESTS, HEADS, LATENT, ROPE = 3, 8, 512, 64
PAGE_SIZE, PROMPT, CHUNK, DECODES = 4, 48, 20, 10
LONGEST = PROMPT + DECODES
SCALE = (LATENT + ROPE) ** -0.5


def by_rank(call: Callable[..., Any], cp: tuple[int, int], *arrays: Array) -> Any:
    """call(*arrays, cp=...) of this device's rank."""
    ranks, interleave = cp
    calls = [partial(call, cp=(rank, ranks, interleave)) for rank in range(ranks)]
    return jax.lax.switch(jax.lax.axis_index("ranks"), calls, *arrays)


def attend(q: Array, cache: Array, table: Array, lens: Array, *, cp: Any) -> Any:
    return smla.mla_attention(q, cache, table, lens, softmax_scale=SCALE, causal=True, cp=cp)


def write(local: Array, kv_c: Array, k_pe: Array, cache: Array, table: Array) -> Array:
    """Writes new tokens [B, n, ...] to the slots of their local positions; -1 is not written."""
    pages = jnp.take_along_axis(table, jnp.maximum(local, 0) // PAGE_SIZE, axis=1)
    slots = jnp.where(local < 0, -1, pages * PAGE_SIZE + local % PAGE_SIZE)
    flat = kv_c.reshape(-1, LATENT), k_pe.reshape(-1, ROPE)
    return smla.concat_and_cache_mla(*flat, cache, slots.reshape(-1))


def positions_of(lens: Array, count: int) -> Array:
    """[B, n]: those of the last n tokens of requests."""
    return lens[:, None] - count + jnp.arange(count)


def step(
    q: Array, kv_c: Array, k_pe: Array, cache: Array, table: Array, lens: Array, *, cp: Any
) -> tuple[Array, Array, Array]:
    """A step on a rank. q [B, n, H, 576] has all heads, and lens counts the new tokens; the result
    is (out, lse) of the rank's heads, from the keys of all ranks, and the rank's cache."""
    positions = positions_of(lens, q.shape[1])
    local = by_rank(smla.cp_local_positions, cp, positions)
    cache = write(local, kv_c, k_pe, cache, table)
    out, lse = by_rank(attend, cp, q, cache, table, lens)

    def exchange(x: Array) -> Array:
        """[B, n, H, ...] of the rank's keys -> [ranks, B * n, the rank's heads, ...]"""
        x = x.reshape(-1, cp[0], HEADS // cp[0], *x.shape[3:])
        return jax.lax.all_to_all(x, "ranks", split_axis=1, concat_axis=0)

    out, lse = smla.merge_attn_partials(exchange(out), exchange(lse))
    return out, lse, cache


def step_alone(
    q: Array, kv_c: Array, k_pe: Array, cache: Array, table: Array, lens: Array
) -> tuple[Array, Array, Array]:
    """The same on one device with the whole cache."""
    cache = write(positions_of(lens, q.shape[1]), kv_c, k_pe, cache, table)
    out, lse = attend(q, cache, table, lens, cp=None)
    return out.reshape(-1, HEADS, LATENT), lse.reshape(-1, HEADS), cache


def make_table(tokens: int, rng: np.random.Generator) -> Array:
    """The shuffled pages of requests that have up to so many tokens each."""
    width = -(-tokens // PAGE_SIZE)
    pages = rng.permutation(REQUESTS * width)
    return jnp.asarray(pages.reshape(REQUESTS, width), jnp.int32)


def make_cache(pages: int) -> Array:
    return jnp.zeros((pages, PAGE_SIZE, LATENT + ROPE), jnp.bfloat16)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, default=4, choices=[1, 2, 4, 8])
    parser.add_argument("--interleave", type=int, default=16, help="neighbouring tokens of a rank")
    options = parser.parse_args()
    ranks, rng = options.ranks, np.random.default_rng(0)
    devices = jax.devices() if len(jax.devices()) >= ranks else jax.devices("cpu")
    mesh = Mesh(np.array(devices[:ranks]), ("ranks",))
    cp = ranks, options.interleave

    # No rank has more tokens than the first, so that all ranks have caches of the same size.
    most = smla.cp_local_lengths(jnp.array([LONGEST], jnp.int32), cp=(0, *cp))
    table = make_table(int(most[0]), rng)
    cache = jax.device_put(make_cache(ranks * table.size), NamedSharding(mesh, P("ranks")))
    split = jax.jit(
        jax.shard_map(
            partial(step, cp=cp),
            mesh=mesh,
            in_specs=(P(), P(), P(), P("ranks"), P(), P()),
            out_specs=(P(None, "ranks"), P(None, "ranks"), P("ranks")),
        ),
        donate_argnames="cache",
    )
    table_alone = make_table(LONGEST, rng)
    cache_alone = make_cache(table_alone.size)
    alone = jax.jit(step_alone, donate_argnames="cache")

    ends = [*range(CHUNK, PROMPT, CHUNK), *range(PROMPT, LONGEST + 1)]
    done, largest, largest_value, largest_lse = 0, 0.0, 0.0, 0.0
    for end in ends:
        count = end - done
        shapes = (HEADS, LATENT + ROPE), (LATENT,), (ROPE,)
        q, kv_c, k_pe = (
            jnp.asarray(rng.normal(0, 1, (REQUESTS, count, *shape)), jnp.bfloat16)
            for shape in shapes
        )
        lens = jnp.full(REQUESTS, end, jnp.int32)
        out, lse, cache = split(q, kv_c, k_pe, cache, table, lens)
        want, want_lse, cache_alone = alone(q, kv_c, k_pe, cache_alone, table_alone, lens)
        got, want = np.asarray(out, np.float32), np.asarray(want, np.float32)
        largest = max(largest, float(np.abs(got - want).max()))
        largest_value = max(largest_value, float(jnp.abs(kv_c).max()))
        largest_lse = max(largest_lse, float(np.abs(np.asarray(lse) - want_lse).max()))
        done = end

    # Parts, their merge and the whole are rounded to bf16, each by 2^-9 of a mean of values.
    bound = 3 * 2**-9 * largest_value
    rows = [int(x) for x in (np.asarray(cache, np.float32) != 0).any(-1).reshape(ranks, -1).sum(1)]
    print(
        f"{ranks} ranks: {len(ends)} steps, largest difference {largest:.4f} of {bound:.4f}, of "
        f"lse {largest_lse:.1e}; cache rows {rows} of {REQUESTS * LONGEST}"
    )
    return 0 if largest <= bound and largest_lse < 1e-5 and sum(rows) == REQUESTS * LONGEST else 1


if __name__ == "__main__":
    sys.exit(main())
