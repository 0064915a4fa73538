"""Captured paged steps: batches of captured sizes, of which some requests are padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import device
import numpy as np
from paged_steps import ARRAYS, Batch, called, make_batch, paged, running_tokens

SIZES = (1, 3, 8)
FIXED_MODES = ("decode", "idle", "draft", "target_verify", "draft_extend")


class Engine:
    """A builder whose mode is captured for each size, and random batches for it."""

    def __init__(self, rng, mode: str, page_size: int, **changes: Any) -> None:
        self.rng, self.mode, self.page_size = rng, mode, page_size
        limits = {"max_bs": max(SIZES), "max_num_tokens": 512, **changes}
        longest = int(rng.choice([17, 60]))
        first = make_batch(rng, mode, page_size, longest, **limits)
        self.config = first.config
        sizes = ("page_size", "max_context_len")
        self.fixed = {k: x for k, x in self.config.items() if k not in sizes}
        self.has_mapping = first.mapping is not None
        self.has_loc = first.out_cache_loc is not None
        steps = first.speculative_num_steps
        self.spec_step = int(rng.integers(0, steps)) if mode == "draft" else None
        self.most_extended = int(rng.integers(1, 6))
        self.builder = self.make(paged.MetadataBuilder)

    def make(self, kind: type) -> Any:
        batch = self.draw(1)
        mapping = self.put(batch.mapping)
        config = paged.Config(**self.config, device=device.NAME)
        return kind(config, self.put(batch.req_to_token), full_to_swa_index_mapping=mapping)

    @staticmethod
    def put(x):
        return x if device.DEVICE == "cpu" else device.Journey().put(x)

    def tokens(self, bs: int) -> int:
        """Query tokens of a capture."""
        counts = {"draft": max(self.config["topk"], 1), "draft_extend": self.most_extended}
        counts["target_verify"] = self.config["num_draft_tokens"]
        return bs * counts.get(self.mode, 1)

    # --- batches ----------------------------------------------------------------------------------

    def draw(self, most: int, longest: int = 0) -> Batch:
        """A batch of at most so many requests."""
        limit = longest or self.config["max_context_len"]
        while True:
            batch = make_batch(self.rng, self.mode, self.page_size, limit, **self.fixed)
            has_arrays = batch.mapping is not None, batch.out_cache_loc is not None
            if len(batch.seq_lens) <= most and has_arrays == (self.has_mapping, self.has_loc):
                break
        batch.config, batch.prefix, batch.bound = self.config, 0, 0
        batch.spec_step = self.spec_step
        if self.mode == "draft_extend":
            batch.extend_seq_lens = np.minimum(batch.extend_seq_lens, self.most_extended)
            if batch.out_cache_loc is not None:
                batch.out_cache_loc = batch.out_cache_loc[: running_tokens(batch)]
        return batch

    def pad(self, batch: Batch, bs: int) -> tuple[Batch, Batch, int | None]:
        """-> the batch filled up to `bs` requests as the engine gives it, the same as it counts,
        and num_real_reqs, if padding is told by it and not by lengths."""
        rng, count = self.rng, len(batch.seq_lens)
        more = bs - count
        is_numbered = bool(rng.integers(0, 2))

        def junk(n: int) -> np.ndarray:
            return rng.choice(np.array([-(2**31), -1, 2**31 - 1, 5]), n)

        none = -rng.integers(0, 3, more)
        lens = np.concatenate([batch.seq_lens, junk(more) if is_numbered else none])
        given: dict[str, Any] = {"pool": junk(more)}
        for name in ("extend_seq_lens", "encoder_lens"):
            if getattr(batch, name) is not None:
                given[name] = junk(more)
        if batch.out_cache_loc is not None:
            entries = self.tokens(bs) - len(batch.out_cache_loc)
            if self.mode == "draft" and batch.is_tree:
                entries = more * batch.topk * batch.speculative_num_steps
            given["out_cache_loc"] = junk(entries)
        if batch.custom_mask is not None:
            given["custom_mask"] = rng.random(more * batch.num_draft_tokens**2) < 0.5
        joined = {
            name: np.concatenate([x := getattr(batch, name), values]).astype(x.dtype)
            for name, values in given.items()
        }
        masks = batch.masks + [None] * more
        given = replace(batch, seq_lens=lens.astype(np.int32), masks=masks, **joined)
        counted = replace(given, seq_lens=np.where(np.arange(bs) < count, lens, 0).astype(np.int32))
        counted.is_fixed = True
        return given, counted, count if is_numbered else None

    # --- calls ------------------------------------------------------------------------------------

    def place_pool(self, batch: Batch) -> None:
        """Gives the builder the arrays that outlive a step."""
        self.builder.req_to_token = self.put(batch.req_to_token)
        self.builder.full_to_swa_index_mapping = self.put(batch.mapping)

    def arrays(self, batch: Batch) -> dict[str, Any]:
        """The arrays of a call, where the session's device has them."""
        self.place_pool(batch)
        moved = {"seq_lens": self.put(batch.seq_lens), "req_pool_indices": self.put(batch.pool)}
        for name in ARRAYS:
            if getattr(batch, name) is not None:
                moved[name] = self.put(getattr(batch, name))
        return moved

    def capture(self, bs: int):
        batch, counted, _ = self.pad(self.draw(0, longest=1), bs)
        batch = replace(batch, seq_lens=counted.seq_lens)
        sizes = called(self.mode), bs, self.tokens(bs)
        return self.builder.capture(*sizes, spec_step=self.spec_step, **self.arrays(batch))

    def replay(self, bs: int):
        """-> the batch as it counts, and its metadata."""
        given, counted, num_real_reqs = self.pad(self.draw(bs), bs)
        arrays = self.arrays(given)
        options = {"spec_step": self.spec_step, "num_real_reqs": num_real_reqs}
        return counted, self.builder.replay(called(self.mode), bs, **arrays, **options)

    def build(self) -> tuple[Batch, Any]:
        """An eager build of some size."""
        batch = self.draw(max(SIZES))
        self.place_pool(batch)
        return batch, batch.build(self.builder)


class Lasting:
    """Arrays that stay where they are, and change their contents."""

    def __init__(self, put) -> None:
        self.put, self.kept = put, {}

    def set(self, name: Any, x: np.ndarray) -> Any:
        if name not in self.kept:
            self.kept[name] = self.put(x.copy())
        else:
            self.kept[name][...] = self.put(x)
        return self.kept[name]


def widen(x: np.ndarray, shape: tuple[int, ...], fill: Any) -> np.ndarray:
    """The array as the first part of a larger one."""
    wide = np.full(shape, fill, x.dtype)
    wide[tuple(map(slice, x.shape))] = x
    return wide


class LastingEngine(Engine):
    """An engine as graphs need it: every array that a step reads is where it was."""

    def __init__(self, rng, mode: str, page_size: int, **changes: Any) -> None:
        super().__init__(rng, mode, page_size, **changes)
        c = self.config
        reach = c["max_context_len"] + max(c["num_draft_tokens"], c["speculative_num_steps"])
        self.width = reach + 2 * page_size
        self.pages = (c["max_bs"] + 4) * (-(-self.width // page_size)) + 3
        self.lasting = Lasting(self.put)

    def arrays(self, batch: Batch) -> dict[str, Any]:
        bs, last = len(batch.seq_lens), self.lasting.set
        table = widen(batch.req_to_token, (len(batch.req_to_token), self.width), -1)
        self.builder.req_to_token = last("req_to_token", table)
        if batch.mapping is not None:
            mapping = widen(batch.mapping, (self.pages * self.page_size,), -1)
            self.builder.full_to_swa_index_mapping = last("mapping", mapping)
        made = {
            "seq_lens": last((bs, "seq_lens"), batch.seq_lens),
            "req_pool_indices": last((bs, "pool"), batch.pool.astype(np.int64)),
        }
        for name in ARRAYS:
            x = getattr(batch, name)
            if name == "custom_mask" and x is not None:
                n = batch.num_draft_tokens
                x = widen(x, (bs * n * (batch.max_context_len + n),), True)
            if x is not None:
                x = x.astype(np.int64) if name == "out_cache_loc" else x
                made[name] = last((bs, name), x)
        return made

    def layer_arrays(self, key: Any, layer: Any) -> tuple[Any, ...]:
        """q and the caches of a layer, for as many tokens and pages as there may be."""
        tokens = self.tokens(len(layer.batch.seq_lens))
        q = widen(layer.q, (tokens, *layer.q.shape[1:]), 0)
        given = [self.lasting.set((key, "q"), q)]
        for i, cache in enumerate(layer.caches):
            wide = widen(cache, (self.pages, *cache.shape[1:]), np.nan)
            given.append(self.lasting.set((key, i), wide))
        return tuple(given)
