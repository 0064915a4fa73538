"""The lightning indexer beside those of Transformers' deepseek_v32 and deepseek_v4, in three steps.

1. Without quantisation the reference's scores are the module's. Both differ by fp32's rounding.
2. Our choice is the exact top-k of the reference's scores of quantised queries and keys.
3. Our choice and the module's are the same where quantisation cannot matter. If no score of a token
   moves by more than e, two keys whose scores are more than 2 e apart keep their order.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import device
import numpy as np
import pytest
import reference as ref
import reference_compressor as compressor
import reference_indexer as indexer
import row_formats as rows
from deepseek_models import V4_HIDDEN, make_v4_part, make_v32, steps_of
from helpers import find_framework

import sparse_mla

pytestmark = pytest.mark.transformers

F32, F64 = np.float32, np.float64
FORMATS = rows.INDEX_FORMATS
ROUNDING = 2.0**-18  # error of u: sums of a few hundred products in fp32
CLEAR = {"fp8_index": 0.5, "mxfp4_index": 0.15}  # least share of chosen keys that step 3 judges


def turn(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """x [T, H, 128] turned by the angles table [T, 64], in their precision."""
    return compressor.turned(x.T, table.T[:, None]).T


def quantise(x: np.ndarray, fmt: str) -> np.ndarray:
    """fp32 values [..., 128], by way of bf16 and a format's codes."""
    coded = rows.FORMATS[fmt].encode(ref.bf16_encode(x.astype(F32)).reshape(-1, 128))
    return rows.FORMATS[fmt].decode(*coded).astype(F64).reshape(x.shape)


def score(q, k, weights, contexts) -> tuple[np.ndarray, np.ndarray]:
    """Scores [T, N] and u of turned q [T, H, 128] and k [N, 128]."""
    everything = np.ones((len(q), len(k)), bool)
    return indexer.logits(q, weights, [k] * len(q), everything, contexts, len(k))


def difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a - b of scores [T, N], 0 for keys that a token does not see."""
    is_seen = np.isfinite(b)
    return np.where(is_seen, a, 0) - np.where(is_seen, b, 0)


def largest(error: np.ndarray) -> np.ndarray:
    """e [T] of differences [T, N]."""
    return np.abs(error).max(1)


def as_sets(chosen: np.ndarray) -> list[set[int]]:
    return [set(row.tolist()) - {-1} for row in chosen]


def check_choice(chosen: list[set[int]], scores: np.ndarray, error: np.ndarray, k: int) -> float:
    """Each token's choice has all keys, or k; those that are better than the k-th by more than
    2 errors, and none that is as much worse. -> the share of clear keys among the chosen ones."""
    num_clear = total = 0
    for t, its in enumerate(chosen):
        visible = np.flatnonzero(np.isfinite(scores[t]))
        if len(visible) <= k:
            assert its == set(visible.tolist())
            continue
        assert len(its) == k
        ranked = np.sort(scores[t, visible])[::-1]
        better = set(np.flatnonzero(scores[t] > ranked[k] + 2 * error[t]).tolist())
        worse = set(np.flatnonzero(scores[t] < ranked[k - 1] - 2 * error[t]).tolist())
        assert better <= its, (t, better - its)
        assert not (its & worse), (t, its & worse)
        num_clear, total = num_clear + len(better), total + k
    return num_clear / total


def watch_top_k(torch):
    """A context that keeps what `topk` is called on: the scores of Transformers' indexers."""

    class Watch(torch.overrides.TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.scores = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.Tensor.topk:
                self.scores.append(args[0][0].cpu().numpy())
            return func(*args, **(kwargs or {}))

    return Watch()


# --- DeepSeek-V3.2: a model served with both indexers --------------------------------------------

STEPS = (  # new tokens of each request, decodes first
    {"b": 40},
    {"b": 1, "a": 70},
    {"b": 1, "a": 33},
    *[{"a": 1, "b": 1}] * 6,
    {"a": 1, "b": 1, "c": 60},
    {"a": 1, "b": 1, "c": 1},
)
TOPK = 20


@dataclass
class Seen:
    """One request in one layer, token by token."""

    hidden: np.ndarray  # [L, hidden_size]
    q_resid: np.ndarray
    q: np.ndarray  # [L, Hi * 128], not turned
    k: np.ndarray  # [L, 128], not turned
    weights: np.ndarray  # [L, Hi]
    chosen: np.ndarray  # [L, 150], -1 after the last


def serve(model, index_cache_dtype: str, monkeypatch) -> dict[tuple[int, str], Seen]:
    """Runs STEPS; watches the projections of every indexer, and the keys that attention gets."""
    torch = find_framework("torch").module
    from sparse_mla.integrations import transformers as adapter

    runner = adapter.ModelRunner(
        model,
        num_pages=40,
        max_num_seqs=3,
        max_num_batched_tokens=100,
        max_model_len=150,
        block_size=16,
        index_cache_dtype=index_cache_dtype,
    )
    parts = defaultdict(list)  # parts of a step, by layer and name
    hooks = []

    def keep(layer: int, name: str, x) -> None:
        parts[layer, name].append(x.detach().flatten(0, -2).cpu().numpy())

    for number, layer in enumerate(model.model.layers):
        its = layer.self_attn.indexer
        for module, names in (
            (its.wq_b, ("q_resid", "q")),
            (its.weights_proj, ("hidden", "weights")),
            (its.k_norm, (None, "k")),
        ):

            def hook(module, args, out, number=number, names=names):
                for name, x in zip(names, (args[0], out), strict=True):
                    keep(number, name, x)

            hooks.append(module.register_forward_hook(hook))

    forward = sparse_mla.SparseMLA.forward
    num_calls = 0

    def attend(self, q, kv, topk_indices, metadata, **options):
        nonlocal num_calls
        wide = torch.nn.functional.pad(topk_indices, (0, 150 - topk_indices.shape[1]), value=-1)
        keep(num_calls % len(model.model.layers), "chosen", wide)
        num_calls += 1
        return forward(self, q, kv, topk_indices, metadata, **options)

    ids = torch.randint(0, 64, (3, 150), generator=torch.Generator().manual_seed(1))
    texts, seen = dict(zip("abc", ids.tolist(), strict=True)), defaultdict(list)
    lengths = dict.fromkeys("abc", 0)
    with monkeypatch.context() as patch:
        patch.setattr(sparse_mla.SparseMLA, "forward", attend)
        for step in STEPS:
            runner.step({r: texts[r][lengths[r] : lengths[r] + n] for r, n in step.items()})
            for (layer, name), its in parts.items():
                ends = np.cumsum(list(step.values()))
                pieces = np.split(np.concatenate(its), ends[:-1])
                for request, piece in zip(step, pieces, strict=True):
                    seen[layer, request, name].append(piece)
            parts.clear()
            for request, n in step.items():
                lengths[request] += n
    for hook in hooks:
        hook.remove()
    names = Seen.__dataclass_fields__
    return {
        (layer, request): Seen(
            **{name: np.concatenate(seen[layer, request, name]) for name in names}
        )
        for layer in range(len(model.model.layers))
        for request in "abc"
    }


def angles_of(model, length: int):
    """The model's cosines and sines [1, L, 64], and both as our table [L, 64]."""
    torch = find_framework("torch").module
    hidden = torch.zeros(1, length, 1, device=device.NAME)
    cos, sin = model.model.rotary_emb(hidden, torch.arange(length, device=device.NAME)[None])
    table = torch.cat([cos[0, :, :32], sin[0, :, :32]], 1)
    return (cos, sin), table.cpu().numpy()


def module_scores(model, layer: int, seen: Seen) -> np.ndarray:
    """[L, L] fp32: the module itself, the whole request in one call."""
    torch = find_framework("torch").module
    hidden, q_resid = (
        torch.from_numpy(x).to(device.NAME)[None] for x in (seen.hidden, seen.q_resid)
    )
    length = hidden.shape[1]
    mask = torch.full((1, length, length), -torch.inf, device=device.NAME).triu(1)
    with watch_top_k(torch) as watch:
        model.model.layers[layer].self_attn.indexer(
            hidden, q_resid, angles_of(model, length)[0], mask, None
        )
    (scores,) = watch.scores
    return scores.astype(F64)


def our_scores(model, seen: Seen, fmt: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Scores and u [L, L] from the formulas, exact (fmt None) or of quantised queries and keys.

    The module turns values i and i + 32 of the first 64, our operators neighbours of the last 64.
    """
    order = [*range(64, 128), *np.stack([np.arange(32), np.arange(32, 64)], 1).ravel()]
    length, heads = seen.weights.shape
    q, k = seen.q.reshape(length, heads, 128)[..., order], seen.k[:, None, order]
    table = angles_of(model, length)[1]
    if fmt is None:
        q, k = (turn(x.astype(F64), table.astype(F64)) for x in (q, k))
    else:
        q = ref.bf16_decode(ref.bf16_encode(q))
        q, k = (quantise(turn(x, table), fmt) for x in (q, k))
    weights = seen.weights.astype(F64) * (128**-0.5 * heads**-0.5)
    return score(q, k[:, 0], weights, 1 + np.arange(length))


@pytest.fixture(scope="module")
def model():
    find_framework("transformers")
    return make_v32(num_hidden_layers=2, index_topk=TOPK)


@pytest.fixture(scope="module")
def with_its_own(model):
    """The model served with its own indexer."""
    with pytest.MonkeyPatch.context() as patch:
        return serve(model, "auto", patch)


def test_unquantised_scores_are_those_of_v32(model, with_its_own):
    for (layer, _), seen in with_its_own.items():
        scores, u = our_scores(model, seen, None)
        theirs = module_scores(model, layer, seen)
        assert (np.isfinite(theirs) == np.isfinite(scores)).all()
        assert (np.abs(difference(theirs, scores)) <= ROUNDING * u).all()


def check_v32(model, ours, theirs, fmt: str) -> list[float]:
    """Both runs' choices. -> the shares of clear keys, by request and layer.

    In the second layer e is larger, because the first layer's choice changes its input.
    """
    shares = []
    for (layer, request), seen in ours.items():
        other = theirs[layer, request]
        assert len(seen.chosen) == sum(step.get(request, 0) for step in STEPS)
        if layer == 0:
            np.testing.assert_array_equal(seen.hidden, other.hidden)
        coded, u = our_scores(model, seen, fmt)
        rounding = ROUNDING * u.max(1)
        assert check_choice(as_sets(seen.chosen), coded, rounding, TOPK) > 0.99
        scores = module_scores(model, layer, other)
        error = largest(difference(scores, coded)) + rounding
        check_choice(as_sets(other.chosen), scores, error, TOPK)
        shares.append(check_choice(as_sets(seen.chosen), scores, error, TOPK))
    return shares


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_model_served_with_both_indexers_chooses_the_same_keys(
    model, with_its_own, monkeypatch, fmt
):
    shares = check_v32(model, serve(model, fmt, monkeypatch), with_its_own, fmt)
    assert min(shares) > CLEAR[fmt]


@pytest.mark.parametrize("fault", ["layout", "direction"])
def test_the_comparison_sees_faults(model, with_its_own, monkeypatch, fault):
    from sparse_mla.integrations import _v32_indexer

    if fault == "layout":
        monkeypatch.setattr(_v32_indexer, "pairs_last", lambda x: x)
    else:
        right = _v32_indexer.rotate_pairs
        monkeypatch.setattr(_v32_indexer, "rotate_pairs", lambda k, cos, sin: right(k, cos, -sin))
    with pytest.raises(AssertionError):
        check_v32(model, serve(model, "fp8_index", monkeypatch), with_its_own, "fp8_index")


# --- DeepSeek-V4: the indexer of a layer with ratio 4 --------------------------------------------

RATIO = 4


class V4Indexer:
    """Transformers' indexer with random weights, and what its projections make of random tokens."""

    tokens, topk = 300, 8

    def __init__(self) -> None:
        self.torch, self.module = torch, made = make_v4_part("DeepseekV4Indexer", 512)
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(1, self.tokens, V4_HIDDEN, generator=generator)
        q_resid = torch.randn(1, self.tokens, 32, generator=generator)
        positions = torch.arange(self.tokens)
        with watch_top_k(torch) as watch:
            self.their_choice = made(hidden, q_resid, positions[None], None, 0)[0].numpy()
        self.their_scores = watch.scores[0].astype(F64)

        self.kv, self.score = made.kv_proj(hidden)[0], made.gate_proj(hidden)[0]
        self.q = made.q_b_proj(q_resid)[0].unflatten(1, (-1, 128))
        self.weights = made.scorer.weights_proj(hidden)[0]
        cos, sin = made.rotary_emb(hidden, positions[None], layer_type="compress")
        self.table = torch.cat([cos[0], sin[0]], 1)
        self.contexts = (positions + 1) // RATIO

    def keys(self, fmt: str | None) -> np.ndarray:
        """[groups, 128] fp64, by the compressor's reference: exact (fmt None) or quantised."""
        norm, table = self.module.kv_norm, self.table.numpy()
        states = compressor.state_rows(
            self.kv.numpy(),
            self.score.numpy(),
            self.module.position_bias.numpy(),
            np.arange(self.tokens),
        )
        slots = np.arange(self.tokens)  # pages of one state
        closing = range(RATIO - 1, self.tokens, RATIO)
        groups = [compressor.find_group(states, slots, 1, p, RATIO, 128) for p in closing]
        rest = norm.weight.numpy(), table, norm.variance_epsilon
        if fmt is None:
            return np.array([compressor.exact_key(group, *rest)[0] for group in groups])
        bits = np.array([compressor.key_bits(group, *rest) for group in groups])
        return quantise(ref.bf16_decode(bits), fmt)

    def queries(self, fmt: str | None) -> np.ndarray:
        q, table = self.q.numpy(), self.table.numpy()
        if fmt is None:
            return turn(q.astype(F64), table.astype(F64))
        return quantise(turn(ref.bf16_decode(ref.bf16_encode(q)), table), fmt)

    def scores(self, q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scorer = self.module.scorer
        weights = self.weights.numpy().astype(F64) * scorer.softmax_scale * scorer.weights_scaling
        return score(q, k, weights, self.contexts)

    def run(self, fmt: str, steps) -> tuple[np.ndarray, np.ndarray]:
        """Our operators. -> logits [T, groups], the choice [T, k]"""
        torch, made, place = self.torch, self.module, device.NAME
        groups, block_size = self.tokens // RATIO, 5
        kv, gate, q, weights, table, ape, norm_weight = (
            x.to(place)
            for x in (
                *(self.kv, self.score, self.q.bfloat16(), self.weights, self.table),
                *(made.position_bias, made.kv_norm.weight),
            )
        )
        state = torch.zeros((self.tokens // 4, 4, 2 * kv.shape[1]), device=place)
        shape = (groups // block_size, block_size, rows.FORMATS[fmt].row_bytes)
        cache = torch.zeros(shape, dtype=torch.uint8, device=place)
        state_table, block_table = (
            torch.arange(len(pages), dtype=torch.int32, device=place)[None]
            for pages in (state, cache)
        )
        logits, chosen = [], []
        for start, end in steps:
            its, token = slice(start, end), torch.arange(start, end, device=place)
            request = torch.zeros(end - start, dtype=torch.int32, device=place)
            sparse_mla.compress_norm_rope_store(
                state,
                state_table,
                request,
                token,
                token,
                cache,
                torch.where((token + 1) % RATIO == 0, token // RATIO, -1),
                norm_weight,
                table,
                eps=made.kv_norm.variance_epsilon,
                ratio=RATIO,
                kv=kv[its],
                score=gate[its],
                ape=ape,
            )
            codes, step_weights, *q_scale = sparse_mla.fused_indexer_q_rope_quant(
                q[its],
                weights[its],
                token,
                table,
                softmax_scale=made.scorer.softmax_scale,
                head_scale=made.scorer.weights_scaling,
                use_fp4=fmt == "mxfp4_index",
            )
            lens = ((token + 1) // RATIO).int()
            its_logits = sparse_mla.indexer_logits(
                codes,
                step_weights,
                cache,
                lens,
                block_table=block_table,
                req_id_per_token=request,
                q_scale=q_scale[0] if q_scale else None,
            )
            best = sparse_mla.top_k_per_row(its_logits, torch.zeros_like(lens), lens, k=self.topk)
            logits.append(its_logits.cpu().numpy().astype(F64))
            chosen.append(best.cpu().numpy())
        return np.concatenate(logits), np.concatenate(chosen)


@pytest.fixture(scope="module")
def v4():
    return V4Indexer()


def test_unquantised_scores_are_those_of_v4(v4):
    """The compressor's errors are parts of a key's largest value, so u is taken with this value."""
    q, k = v4.queries(None), v4.keys(None)
    scores, _ = v4.scores(q, k)
    largest_k = np.repeat(np.abs(k).max(1, keepdims=True), 128, 1)
    assert (np.isfinite(v4.their_scores) == np.isfinite(scores)).all()
    assert scores.shape == (v4.tokens, v4.tokens // RATIO)
    bound = ROUNDING * v4.scores(q, largest_k)[1]
    assert (np.abs(difference(v4.their_scores, scores)) <= bound).all()


@pytest.mark.parametrize("in_steps", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
def test_v4_s_indexer_chooses_the_same_keys(v4, fmt, in_steps):
    coded, u = v4.scores(v4.queries(fmt), v4.keys(fmt))
    logits, chosen = v4.run(fmt, steps_of(v4.tokens) if in_steps else [(0, v4.tokens)])
    assert (np.isfinite(logits) == np.isfinite(coded)).all()
    assert (np.abs(difference(logits, coded)) <= ROUNDING * u).all()
    rounding = ROUNDING * u.max(1)
    assert check_choice(as_sets(chosen), coded, rounding, v4.topk) > 0.99
    error = largest(difference(v4.their_scores, coded)) + rounding
    check_choice(as_sets(v4.their_choice), v4.their_scores, error, v4.topk)
    assert check_choice(as_sets(chosen), v4.their_scores, error, v4.topk) > CLEAR[fmt]
