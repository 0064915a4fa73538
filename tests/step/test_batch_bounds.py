"""max_query_len and max_seq_len are bounds, which engines take from a captured graph: what a step
plans and gives is of the batch's own lengths."""

from __future__ import annotations

import dataclasses

import cases
import engine
import numpy as np
import pytest
import reference_v4 as plan
from device import host
from helpers import assert_same_bits
from library import sparse_mla
from v4_plans import assert_step, make_config, v4

ABOVE = [0, 1, 37, 500]


def fields_of(x) -> dict:
    """Everything that a part of the metadata says, arrays as NumPy's."""
    found = {}
    for f in dataclasses.fields(x):
        value = getattr(x, f.name)
        if dataclasses.is_dataclass(value):
            value = fields_of(value)
        elif isinstance(value, list):
            value = [fields_of(y) if dataclasses.is_dataclass(y) else y for y in value]
        elif isinstance(value, dict):
            value = {key: fields_of(y) for key, y in value.items()}
        elif hasattr(value, "shape"):
            value = host(value).tolist()
        if not f.name.startswith("_"):
            found[f.name] = value
    return found


@pytest.mark.parametrize("above", ABOVE)
@pytest.mark.parametrize("path", ["mixed", "separate", "direct"])
def test_v32(path, above):
    batch = cases.make_batch([1, 1, 9, 30], [70, 3, 200, 30])
    step = engine.make_step(batch, 17)
    config = engine.config(sparse_mla, num_heads=17, path=path, max_model_len=1024)
    found = []
    for more in (None, above):
        changes = {"max_query_len": None, "max_seq_len": None}
        if more is not None:
            changes = {"max_query_len": 30 + more, "max_seq_len": 200 + more}
        metadata = sparse_mla.MetadataBuilder(config).build(batch.common(sparse_mla, **changes))
        results = sparse_mla.SparseMLA(config).forward(
            step.q, step.fp8_cache, step.topk_indices, metadata
        )
        fields = fields_of(metadata)
        bounds = fields.pop("max_query_len"), fields.pop("max_seq_len")
        assert bounds == (30 + (more or 0), 200 + (more or 0))
        found.append((fields, results))
    assert found[0][0] == found[1][0]
    for x, y in zip(found[0][1], found[1][1], strict=True):
        assert_same_bits(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("above", ABOVE)
def test_v4(above):
    sizes = plan.Sizes(decode_threshold=3)
    rng = np.random.default_rng(above)
    builder = v4.MetadataBuilder(make_config(sizes))
    seen = 0
    for _ in range(12):
        batch = plan.random_batch(rng, sizes)
        batch.max_seq_len = min(int(batch.seq_lens.max(initial=0)) + above, sizes.max_model_len)
        common = batch.common(sparse_mla)
        common = dataclasses.replace(common, max_query_len=common.max_query_len + above)
        got = builder.build(common, compressed=batch.compressed, states=batch.states)
        assert_step(got, sizes, batch)  # decode_query_len, too
        seen += got.decode is not None
    assert seen > 3


@pytest.mark.parametrize("name", ["max_query_len", "max_seq_len"])
def test_bounds_below_the_batch_are_refused(name):
    batch = cases.make_batch([1, 9], [70, 30])
    largest = {"max_query_len": 9, "max_seq_len": 70}[name]
    rule = f"^CommonAttentionMetadata: `{name}` must be at least the batch's largest, {largest}"
    with pytest.raises(ValueError, match=rule):
        batch.common(sparse_mla, **{name: largest - 1})
