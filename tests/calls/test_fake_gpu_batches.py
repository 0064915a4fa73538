"""One builder over batches of every two shapes, one after the other, on the fake GPUs of
fake_gpu.py: a step's results are those of a new builder, so nothing of the step before is left in
what goes to the GPU."""

from __future__ import annotations

from itertools import permutations

import cases
import engine
import numpy as np
import pytest
import test_fake_gpu_builder as builders
import test_fake_gpu_v4 as v4_steps
import v4_attend_cases as attend
from helpers import assert_same_bits
from test_fake_gpu_failures import PLACE, PUTS, make_dense_config, values

# New tokens and tokens of the context, per request.
BATCHES = {
    "all": ([1, 1, 1, 2, 30, 9], [39, 3, 0, 48, 30, 80]),
    "decodes": ([1, 1, 1], [3, 60, 8]),
    "a prompt": ([20], [0]),
    "prefills": ([7, 25], [100, 40]),
    "more decodes": ([1] * 7, [60, 0, 9, 33, 1, 70, 64]),
}


def lengths(name: str) -> tuple[list[int], list[int]]:
    """New tokens, and tokens in all."""
    new, context = BATCHES[name]
    return new, [a + b for a, b in zip(new, context, strict=True)]


def of_v32(package, path):
    """-> what makes a builder, and what a builder's step of a batch gives"""
    config = builders.make_config(package, path, PLACE)
    layer = package.SparseMLA(config)

    def run(builder, name):
        step = engine.make_step(cases.make_batch(*lengths(name)), builders.HEADS)
        arrays = builders.arrays_of(step, path, PLACE)
        return layer.forward(*arrays, builder.build(builders.place(package, step.batch, PLACE)))

    return lambda: package.MetadataBuilder(config), run


def of_v4(package, ratio, path):
    def step_of(name):
        new, context = BATCHES[name]
        return v4_steps.V4Step(
            package, ratio, path, PLACE, attend.make_case(ratio, path, new, context)
        )

    def run(builder, name):
        step = step_of(name)
        step.builder = builder
        return step.attend(step.build())

    config = step_of("all").config
    return lambda: package.v4.MetadataBuilder(config), run


def of_dense(package, path, plan):
    config = make_dense_config(package, path, max_num_seqs=8, context_plan=plan)
    put = PUTS["cupy"]
    weight = put(cases.random_bf16(np.random.default_rng(7), 512, 2 * 256, std=0.04))
    layer = package.dense.DenseMLA(
        config, kv_b_proj=weight, rope_table=put(package.rope_table(256))
    )

    def run(builder, name):
        rng = np.random.default_rng(len(name))
        batch = cases.make_batch(*lengths(name), block_size=16)
        tokens = batch.num_actual_tokens
        shapes = (tokens, 2, 192), (tokens, 512), (tokens, 64)
        cache = cases.make_rows(rng, batch.num_pages * 16, "fp8").reshape(-1, 16, 656)
        given = [put(cases.random_bf16(rng, *shape)) for shape in shapes]
        return layer.forward(
            *given, put(cache), builder.build(builders.place(package, batch, PLACE))
        )

    return lambda: package.dense.MetadataBuilder(config), run


STEPS = {
    **{f"v32, {path}": (of_v32, path) for path in ("mixed", "separate", "direct", "bf16")},
    **{
        f"v4, {ratio}, {path}": (of_v4, ratio, path)
        for ratio in attend.RATIOS
        for path in ("direct", "separate")
    },
    "dense, mixed": (of_dense, "mixed", "equal"),
    "dense, separate, equal": (of_dense, "separate", "equal"),
    "dense, separate, packed": (of_dense, "separate", "packed"),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_builder_keeps_nothing_of_the_step_before(package, gpu, cupy, name):
    make, run = STEPS[name][0](package, *STEPS[name][1:])
    cupy.stream, cupy.current = gpu.new_stream(PLACE), PLACE
    want = {batch: values(run(make(), batch)) for batch in BATCHES}
    for first, then in permutations(BATCHES, 2):
        builder = make()
        for batch in (first, then, first):
            for got, x in zip(values(run(builder, batch)), want[batch], strict=True):
                assert_same_bits(got, x, f"{batch}, with {first} and {then} in turn")
