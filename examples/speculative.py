"""Speculative decoding on paged caches: drafts, their verification, and what was accepted.

    python examples/speculative.py                              on the CPU, drafts in a chain
    python examples/speculative.py --model mistral --topk 2     trees, and layers with a window
    python examples/speculative.py --model deepseek_v3 --kv-cache-dtype fp8
    python examples/speculative.py --device cuda --graph

A small model of Transformers with random weights continues prompts greedily. A draft model, the
first layer of it, proposes tokens; the model checks them all at once and keeps those that it would
have chosen itself. So the tokens are those of greedy decoding without drafts, which is what is
compared at the end: with Transformers' own attention, or on FP8 caches with this engine's.

One iteration of an engine, whose requests have L tokens in the cache and a next one, the root:

    draft             S - 1 decodes of the draft model, from the first token of each branch
    target_verify     the root and the drafts through the model, as a chain or as a tree
    draft_extend      what was accepted, and a next root, through the draft model

`sparse_mla.paged` makes the metadata of each. With --graph it is captured for batches of 1, 2, 4
and 8 requests and replayed, on CUDA together with the whole model in a graph.

The exit status is 1 if a token differs from the best one by more than rounding explains.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from typing import Any

import numpy as np
import torch
from speculative_models import CHUNK, MODELS, SIZES, WINDOW, Served, make_models

from sparse_mla import paged
from sparse_mla.integrations._pages import Pages

PAGE_SIZE = 16
BATCH_SIZES = (1, 2, 4, 8)  # requests of a graph
BOUND = 0.03  # standard deviations of the logits

Arrays = dict[str, np.ndarray]


class Phase:
    """One forward pass of an iteration, by metadata of its own: built for each batch, or with
    --graph captured for each of BATCH_SIZES and replayed, with padding behind the batch."""

    def __init__(self, engine: Engine, calls: Any, per_request: int, run: Any) -> None:
        self.engine, self.run, self.per_request = engine, run, per_request
        self.build, self.capture, self.refresh = calls
        self.captured: dict[int, tuple[dict[str, torch.Tensor], Any, Any]] = {}

    def __call__(self, arrays: Arrays, **prefix: int) -> torch.Tensor:
        """-> what `run` makes of a batch, with a row or more for each request."""
        count = len(arrays["seq_lens"])
        if self.engine.options.graph:
            bs = next(size for size in BATCH_SIZES if size >= count)
            if bs not in self.captured:
                self.captured[bs] = self.make(bs, arrays)
            lasting, again, out = self.captured[bs]
            for name, x in arrays.items():
                lasting[name].fill_(PADDING.get(name, 0))
                lasting[name][: len(x)] = self.engine.put(x)
            again()
            return out[: len(out) // bs * count]
        moved = {name: self.engine.put(x) for name, x in arrays.items()}
        bounds = {
            f"{name}_cpu": arrays[name]
            for name in ("seq_lens", "extend_seq_lens")
            if name in arrays
        }
        metadata = self.build(**self.given(moved), **bounds, **prefix)
        return self.run(moved, metadata)

    def given(self, moved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: x for name, x in moved.items() if name in OF_METADATA}

    def make(self, bs: int, arrays: Arrays) -> tuple[dict[str, torch.Tensor], Any, Any]:
        """Arrays that stay where they are, what runs the pass on them, and its result."""
        count, tokens = len(arrays["seq_lens"]), bs * self.per_request
        lasting = {}
        for name, x in arrays.items():
            rows = len(x) // count * bs
            if name in ("ids", "positions", "slots") and "extend_seq_lens" in arrays:
                rows = tokens
            if name == "custom_mask":
                rows = tokens * (self.engine.config.max_context_len + self.per_request)
            padding = np.full(rows, PADDING.get(name, 0), x.dtype)
            lasting[name] = self.engine.put(padding)
        given = self.given(lasting)
        metadata = self.capture(bs, tokens, **given)

        def run() -> torch.Tensor:
            self.refresh(bs, **given)
            return self.run(lasting, metadata)

        if self.engine.options.device == "cpu":
            out = run()
            return lasting, lambda: out.copy_(run()), out
        run()  # keeps first uses out of the graph, and makes the scratch memory of cascades
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        return lasting, graph.replay, out


OF_METADATA = ("seq_lens", "req_pool_indices", "extend_seq_lens", "custom_mask", "out_cache_loc")
PADDING = {"slots": -1, "out_cache_loc": -1}  # nothing is written


@dataclass
class Request:
    prompt: list[int]  # what follows the shared prompt
    row: int = -1  # its row of req_to_token
    tokens: list[int] = field(default_factory=list)  # generated; the last one is the root
    first: list[int] = field(default_factory=list)  # the draft's first tokens, one per branch


class Engine:
    """Continuous batching of requests that begin with the same prompt."""

    def __init__(self, options: argparse.Namespace, shared: list[int], longest: int) -> None:
        self.options, self.shared = options, shared
        self.k, self.num_steps = options.topk, options.steps
        self.num_drafts = 1 + self.k * self.num_steps  # the root, and k branches
        reach = longest + options.new_tokens + self.num_drafts
        self.config = paged.Config(
            max_bs=BATCH_SIZES[-1],
            max_num_tokens=BATCH_SIZES[-1] * reach,
            max_context_len=reach,
            page_size=PAGE_SIZE,
            topk=self.k,
            num_draft_tokens=self.num_drafts,
            speculative_num_steps=self.num_steps,
            sliding_window_size=WINDOW - 1 if options.model == "mistral" else -1,
            attention_chunk=CHUNK if options.model == "llama4" else 0,
            device=options.device,
        )
        width = -(-(reach + self.num_drafts) // PAGE_SIZE) * PAGE_SIZE
        rows = BATCH_SIZES[-1] + 1  # the last one is the shared prompt's
        self.pages = Pages(rows * width // PAGE_SIZE, PAGE_SIZE)
        # Slots of branches, which have no position in their request.
        self.first_branch = self.pages.num_free * PAGE_SIZE
        num_branch_slots = BATCH_SIZES[-1] * self.k * self.num_steps
        self.num_pages = self.pages.num_free + -(-num_branch_slots // PAGE_SIZE)
        self.req_to_token = torch.zeros(rows, width, dtype=torch.int32, device=options.device)
        self.free_rows = list(range(BATCH_SIZES[-1]))
        self.target, self.draft = (
            Served(
                model,
                self.config,
                self.req_to_token,
                self.num_pages,
                options.kv_cache_dtype == "fp8",
            )
            for model in make_models(options)
        )
        self.phases = self.make_phases()
        self.accepted: Counter[int] = Counter()
        self.seconds = 0.0

    def make_phases(self) -> dict[str, Phase]:
        steps = paged.MultiStepDraft(self.config, self.req_to_token)
        target, draft = self.target.builder, self.draft.builder

        def calls(builder: Any, mode: str) -> Any:
            return [
                partial(call, mode) for call in (builder.build, builder.capture, builder.replay)
            ]

        def next_tokens(a: Any, metadata: Any) -> torch.Tensor:
            return self.target.forward(a["ids"], a["positions"], a["slots"], metadata).argmax(-1)

        def next_branches(a: Any, metadata: Any) -> torch.Tensor:
            logits = self.draft.forward(a["ids"], a["positions"], a["slots"], metadata)
            return logits[a["last"]].topk(self.k, dim=-1).indices

        def draft_branches(a: Any, metadata: Any) -> torch.Tensor:
            """All steps: each branch goes on with its best token."""
            chosen = [a["ids"]]
            slots = a["out_cache_loc"].view(-1, self.num_steps)
            for i, step in enumerate(metadata):
                where = slots[:, i].contiguous()
                logits = self.draft.forward(chosen[-1], a["positions"] + i, where, step)
                chosen.append(logits.argmax(-1))
            return torch.stack(chosen, 1)

        verify, extend = calls(target, "target_verify"), calls(draft, "draft_extend")
        whole = (steps.build, steps.capture, steps.replay)
        most = self.num_steps + 1
        return {
            "decode": Phase(self, calls(target, "decode"), 1, next_tokens),
            "draft": Phase(self, whole, self.k, draft_branches),
            "target_verify": Phase(self, verify, self.num_drafts, next_tokens),
            "draft_extend": Phase(self, extend, most, next_branches),
        }

    def put(self, x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x).to(self.options.device)

    # --- requests ---------------------------------------------------------------------------------

    def place(self, request: Hashable, row: int, count: int) -> np.ndarray:
        """Gives a request the slots of `count` tokens behind those that it has."""
        begin = self.pages.find(request).num_tokens
        self.pages.reserve("Engine", {request: count})
        slots = self.pages.slots(request, np.arange(begin, begin + count))
        self.req_to_token[row, begin : begin + count] = self.put(slots.astype(np.int32))
        return slots

    def extend(
        self, served: Served, rows: list[int], new: list[list[int]], contexts: list[int]
    ) -> list[torch.Tensor]:
        """Tokens of prompts, whose slots have been placed -> logits [n, vocab] of each request."""
        lens = np.array([len(x) for x in new], np.int32)
        seq_lens = np.array(contexts, np.int32) + lens
        positions = [np.arange(c, c + len(x)) for c, x in zip(contexts, new, strict=True)]
        slots = [
            self.req_to_token[r, c : c + len(x)]
            for r, c, x in zip(rows, contexts, new, strict=True)
        ]
        metadata = served.builder.build(
            "extend",
            self.put(seq_lens),
            self.put(np.array(rows)),
            seq_lens_cpu=seq_lens,
            extend_seq_lens=self.put(lens),
            extend_seq_lens_cpu=lens,
            **self.prefix(min(contexts)),
        )
        ids = self.put(np.concatenate([np.array(x) for x in new]))
        where = self.put(np.concatenate(positions))
        logits = served.forward(ids, where, torch.cat(slots).long(), metadata)
        return list(logits.split(lens.tolist()))

    def prefix(self, most: int) -> dict[str, int]:
        """The shared prompt as a request of its own, where layers see all of it."""
        config = self.config
        has_masks = config.attention_chunk or config.sliding_window_size >= 0
        return {} if has_masks else {"common_prefix_len": min(len(self.shared), most)}

    def begin(self, requests: list[Request]) -> None:
        """Runs prompts through both models."""
        if "shared" not in self.pages.requests:
            row = BATCH_SIZES[-1]
            self.place("shared", row, len(self.shared))
            for served in (self.target, self.draft):
                self.extend(served, [row], [self.shared], [0])
            self.pages.advance("shared", len(self.shared))
        context = len(self.shared)
        for request in requests:
            request.row = self.free_rows.pop()
            self.pages.share(id(request), "shared")
            self.req_to_token[request.row, :context] = self.req_to_token[-1, :context]
            self.place(id(request), request.row, len(request.prompt) + 1)
        rows, contexts = [r.row for r in requests], [context] * len(requests)
        logits = self.extend(self.target, rows, [r.prompt for r in requests], contexts)
        for request, its in zip(requests, logits, strict=True):
            request.tokens = [int(its[-1].argmax())]
            self.pages.advance(id(request), len(request.prompt))
        if self.options.drafts != "off":
            new = [r.prompt + r.tokens for r in requests]
            firsts = self.extend(self.draft, rows, new, contexts)
            for request, its in zip(requests, firsts, strict=True):
                request.first = its[-1].topk(self.k).indices.tolist()

    def serve(self, prompts: list[list[int]]) -> list[Request]:
        requests = [Request(prompt) for prompt in prompts]
        waiting = requests[::-1]
        running: list[Request] = []
        iterate = self.decode if self.options.drafts == "off" else self.iterate
        while waiting or running:
            new = [waiting.pop() for _ in self.free_rows[: len(waiting)]]
            if new:
                self.begin(new)
                running += new
            start = time.perf_counter()
            iterate(running)
            self.seconds += time.perf_counter() - start
            for request in [r for r in running if len(r.tokens) >= self.options.new_tokens]:
                running.remove(request)
                self.free_rows.append(request.row)
                self.pages.release(id(request))
        return requests

    # --- an iteration -----------------------------------------------------------------------------

    def batch(self, running: list[Request]) -> tuple[np.ndarray, Arrays]:
        """Cached tokens of each request, and the arrays that every phase has."""
        lens = np.array([self.pages.find(id(r)).num_tokens for r in running])
        return lens, {"req_pool_indices": np.array([r.row for r in running])}

    def decode(self, running: list[Request]) -> None:
        """Without drafts."""
        lens, arrays = self.batch(running)
        slots = np.concatenate([self.place(id(r), r.row, 1) for r in running])
        arrays |= {"ids": np.array([r.tokens[-1] for r in running]), "positions": lens}
        arrays |= {"slots": slots, "seq_lens": (lens + 1).astype(np.int32)}
        for request, token in zip(running, self.phases["decode"](arrays).tolist(), strict=True):
            request.tokens.append(token)
            self.pages.advance(id(request), 1)
        self.accepted[0] += len(running)

    def iterate(self, running: list[Request]) -> None:
        lens, arrays = self.batch(running)
        slots = [self.place(id(r), r.row, self.num_drafts) for r in running]
        drafts = self.propose(running, lens, arrays, slots)
        best = self.verify(running, drafts, lens, arrays, slots)
        news = []
        for i, request in enumerate(running):
            path = self.find_path(drafts[i], best[i])
            self.accepted[len(path)] += 1
            if self.k > 1:  # the accepted drafts lie where the tree had them
                self.target.move(list(slots[i][path]), list(slots[i][1 : 1 + len(path)]))
            news.append([drafts[i][j] for j in path] + [best[i][path[-1] if path else 0]])
            request.tokens += news[-1]
            self.pages.advance(id(request), len(news[-1]))
        self.extend_drafts(running, news, lens, arrays)

    def propose(
        self, running: list[Request], lens: np.ndarray, arrays: Arrays, slots: list[np.ndarray]
    ) -> list[list[int]]:
        """-> each request's tokens to verify: its root, and the drafts, branch by branch."""
        if self.k > 1:
            size = self.k * self.num_steps
            starts = self.first_branch + size * arrays["req_pool_indices"]
            where = starts[:, None] + np.arange(size)
        else:
            where = np.stack([x[1 : 1 + self.num_steps] for x in slots])
        drafts = self.phases["draft"](
            {
                **arrays,
                "seq_lens": (lens + 1).astype(np.int32),
                "ids": np.concatenate([r.first for r in running]),
                "positions": np.repeat(lens + 1, self.k),
                "out_cache_loc": where.ravel(),
            }
        ).tolist()
        made = []
        for i, request in enumerate(running):
            branches = drafts[i * self.k : (i + 1) * self.k]
            if self.options.drafts == "none":  # the best token alone would be accepted
                wrong = [(request.first[0] + 1 + b) % SIZES["vocab_size"] for b in range(self.k)]
                branches = [[first, *rest[1:]] for first, rest in zip(wrong, branches, strict=True)]
            made.append([request.tokens[-1], *(token for branch in branches for token in branch)])
        return made

    def verify(
        self,
        running: list[Request],
        drafts: list[list[int]],
        lens: np.ndarray,
        arrays: Arrays,
        slots: list[np.ndarray],
    ) -> list[list[int]]:
        """-> what the model says behind the root and behind each draft."""
        n, s = self.num_drafts, self.num_steps
        depth = np.array([0, *(1 + i % s for i in range(n - 1))])
        given = {
            **arrays,
            "ids": np.concatenate(drafts),
            "positions": (lens[:, None] + depth).ravel(),
            "slots": np.concatenate(slots),
            "seq_lens": lens.astype(np.int32),
        }
        if self.k > 1:  # a draft sees the prefix, the root, and its branch up to itself
            branch = np.array([-1, *(i // s for i in range(n - 1))])
            sees = (branch[:, None] == branch) & (depth[:, None] >= depth)
            sees[:, 0] = True
            parts = [np.concatenate([np.ones((n, m), bool), sees], 1).ravel() for m in lens]
            given["custom_mask"] = np.concatenate(parts)
        prefix = self.prefix(int(lens.min())) if self.k == 1 and not self.options.graph else {}
        return self.phases["target_verify"](given, **prefix).view(len(running), n).tolist()

    def find_path(self, drafts: list[int], best: list[int]) -> list[int]:
        """The drafts that the model would have chosen itself: the longest branch of them."""
        longest: list[int] = []
        for first in range(1, self.num_drafts, self.num_steps):
            path: list[int] = []
            for j in range(first, first + self.num_steps):
                if drafts[j] != best[path[-1] if path else 0]:
                    break
                path.append(j)
            longest = max(longest, path, key=len)
        return longest

    def extend_drafts(
        self,
        running: list[Request],
        news: list[list[int]],
        lens: np.ndarray,
        arrays: Arrays,
    ) -> None:
        """Runs what was accepted through the draft model, for the first tokens of branches."""
        counts = np.array([len(x) for x in news], np.int32)
        for request in running:
            self.place(id(request), request.row, 1)  # the next root, maybe behind the last slot
        where = [
            self.pages.slots(id(r), np.arange(m + 1, m + 1 + c))
            for r, m, c in zip(running, lens, counts, strict=True)
        ]
        positions = [np.arange(m + 1, m + 1 + c) for m, c in zip(lens, counts, strict=True)]
        found = self.phases["draft_extend"](
            {
                **arrays,
                "ids": np.concatenate(news),
                "positions": np.concatenate(positions),
                "slots": np.concatenate(where),
                "seq_lens": (lens + 1 + counts).astype(np.int32),
                "extend_seq_lens": counts,
                "last": np.cumsum(counts) - 1,
            }
        )
        for request, first in zip(running, found.tolist(), strict=True):
            request.first = first


# --- comparison ----------------------------------------------------------------------------------


@torch.no_grad()
def run_without_drafts(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """-> logits [n, vocab]: of Transformers' attention, or on an FP8 cache of this engine's."""
    if engine.options.kv_cache_dtype == "bfloat16":
        return make_models(engine.options)[0](engine.put(np.array(tokens))[None]).logits[0]
    row = engine.free_rows[-1]
    engine.place("judge", row, len(tokens))
    logits = engine.extend(engine.target, [row], [tokens], [0])[0]
    engine.pages.release("judge")
    return logits


def judge(engine: Engine, requests: list[Request]) -> tuple[int, int]:
    """-> tokens that another one nearly equals, and tokens that are wrong."""
    num_near = num_wrong = 0
    for request in requests:
        before = engine.shared + request.prompt
        logits = run_without_drafts(engine, before + request.tokens[:-1])[len(before) - 1 :].float()
        chosen = torch.tensor(request.tokens, device=logits.device)
        behind = logits.max(-1).values - logits.gather(1, chosen[:, None])[:, 0]
        bound = BOUND * float(logits.std())
        num_near += int(((behind > 0) & (behind <= bound)).sum())
        num_wrong += int((behind > bound).sum())
    return num_near, num_wrong


def make_prompts(options: argparse.Namespace) -> tuple[list[int], list[list[int]]]:
    """The beginning of a text, which all requests share, and what follows it in each."""
    text = resources.files("sparse_mla").joinpath("data", "attention.txt").read_bytes()
    rng = np.random.default_rng(options.seed)
    lens = rng.integers(1, options.longest_prompt + 1, options.requests)
    starts = rng.integers(0, len(text) - options.longest_prompt, options.requests)
    shared = list(text[: 4 * PAGE_SIZE])
    return shared, [list(text[a : a + n]) for a, n in zip(starts, lens, strict=True)]


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    shared, prompts = make_prompts(options)
    engine = Engine(options, shared, len(shared) + options.longest_prompt)
    requests = engine.serve(prompts)
    num_tokens = sum(len(r.tokens) - 1 for r in requests)
    num_near, num_wrong = judge(engine, requests)
    counts = [engine.accepted[i] for i in range(options.steps + 1)]
    num_iterations = sum(engine.accepted.values())
    print(f"{options.model}, {options.kv_cache_dtype} cache, drafts {options.drafts}, ", end="")
    print(f"topk {options.topk}, {options.steps} steps{', graphs' if options.graph else ''}")
    print(f"tokens               {num_tokens}, {num_tokens / num_iterations:.2f} an iteration")
    print(f"drafts accepted      {dict(enumerate(counts))}")
    print(f"time                 {engine.seconds / num_iterations * 1e6:.0f} us an iteration")
    print(f"as without drafts    {num_tokens - num_near - num_wrong}, nearly {num_near}, ", end="")
    print(f"wrong {num_wrong}")
    return int(num_wrong > 0)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=[*MODELS], default="llama")
    add("--drafts", choices=["some", "all", "none", "off"], default="some", help="accepted drafts")
    add("--topk", type=int, default=1, help="branches of a tree; 1: a chain (%(default)s)")
    add("--steps", type=int, default=3, help="drafts in a branch (%(default)s)")
    add("--kv-cache-dtype", choices=["bfloat16", "fp8"], default="bfloat16")
    add("--graph", action="store_true", help="capture every phase, and replay it")
    add("--device", default="cpu")
    add("--layers", type=int, default=2)
    add("--requests", type=int, default=11)
    add("--longest-prompt", type=int, default=100)
    add("--new-tokens", type=int, default=200, help="of each request, at least (%(default)s)")
    add("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.topk > 1 and options.model == "llama4":
        parser.error("--topk must be 1 for llama4: local layers have no trees")
    return options


if __name__ == "__main__":
    sys.exit(main())
