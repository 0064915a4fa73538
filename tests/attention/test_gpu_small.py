"""Hopper's kernel for few columns with 64 heads, on the GPU. The schedule takes it for batches of 9
to 16 requests of 64 heads, and of 5 to 8 of 128, so these cases leave num_splits out. The plans of
all of these shapes are in tests/c/test_cuda_schedule.c."""

from dataclasses import replace

import cases
import numpy as np
import pytest
import test_gpu_holes as holes
from cases import AttentionCase
from helpers import NO_NAN, assert_right_again, assert_same_bits, assert_within_bounds
from helpers import guarded_attention as run
from library import sparse_mla as library
from test_v4_attention import V4Case

import sparse_mla

attend = library.sparse_attention

KERNEL = "attention_small_sm90.cu, 64 heads per CTA"
SHAPES = {  # tokens, heads, K: all of them have splits of at most 256 columns
    "64 heads": (12, 64, 2048),
    "40 heads": (9, 40, 2048),
    "128 heads": (8, 128, 2048),
    "100 heads": (10, 100, 1024),
    "20 tokens": (20, 64, 1024),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
DATA = ["outlier", "heavy", "monotone", "huge", "tiles", "wide", "subnormal"]

pytestmark = pytest.mark.skipif(
    all(row["name"] != KERNEL or not row["available"] for row in sparse_mla.kernels()),
    reason="Hopper's kernels do not run on this GPU",
)


def check(case, **options) -> dict:
    want = case.reference()
    got = run(attend, case, **options)
    assert_within_bounds(want, got)
    assert_right_again(attend, case, want, got)
    return got


@every_shape
def test_the_schedule_takes_it(shape):
    plans = sparse_mla.ops._attention_plans(*shape, device="cuda")
    fp8 = next(plan for plan in plans if plan["kv_format"] == "fp8_ds_mla")
    assert [kernel for _, _, kernel in fp8["runs"]] == [KERNEL]


@pytest.mark.parametrize("topk_length", [False, True])
@pytest.mark.parametrize("data", ["normal", *DATA])
@every_shape
def test_values(shape, data, topk_length):
    check(AttentionCase(*shape, data=data, topk_length=topk_length, sink=True, pages=20).make())


@pytest.mark.parametrize("keys", cases.KEYS)
@pytest.mark.parametrize("num_heads", [64, 128])
def test_holes(num_heads, keys):
    num_tokens = 20 * 64 // num_heads
    holes.check(
        holes.make("fp8", keys, 1024, 0, num_heads=num_heads, num_tokens=num_tokens, ragged=True)
    )


@pytest.mark.parametrize("extra", ["random", "none"])
@pytest.mark.parametrize("num_heads", [64, 128])
def test_two_lists(num_heads, extra):
    case = holes.make("fp8", "all", 256, 0, num_heads=num_heads, num_tokens=1280 // num_heads)
    keys = "half of them" if extra == "random" else "none"
    holes.check(holes.add_list(case, "fp8", keys, 768, ragged=True))


@pytest.mark.parametrize("q_layout", ["head_major", "odd_stride", "pair"])
@every_shape
def test_queries_of_other_strides(shape, q_layout):
    check(AttentionCase(*shape, q_layout=q_layout, block_size=5, pages=130).make())


@every_shape
def test_one_key(shape):
    """A work item with one key gives that key's value, by the portable code."""
    case = holes.make("fp8", "all", shape[2], 0, num_heads=shape[1], num_tokens=shape[0])
    case.indices[1:] = -1
    case.indices[1:, 7] = np.arange(1, shape[0])
    check(case)


@every_shape
def test_a_nan_spoils_its_own_token(shape):
    case = holes.make("fp8", "all", shape[2], 0, num_heads=shape[1], num_tokens=shape[0])
    want = run(attend, case)
    rows = case.kv.reshape(holes.NUM_SLOTS, -1)
    case.indices[case.indices == 5] = 6
    clean = run(attend, case)
    rows[5, 300] = 0x7F
    case.indices[2, 3] = 5
    got = run(attend, case, poison=NO_NAN)
    others = np.arange(shape[0]) != 2
    for name, x in got.items():
        assert_same_bits(x[others], clean[name][others], f"{name} of other tokens")
    assert np.isnan(got["out"][2].astype(np.float32)).all()
    assert want.keys() == got.keys()


@pytest.mark.parametrize("data", ["normal", "mixed", "zeros", "spread", "rope"])
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("shape", [(24, 64, 512), (24, 50, 512), (11, 128, 1024), (9, 100, 1024)])
def test_rows_of_v4(shape, lengths, data):
    num_tokens, num_heads, chosen = shape
    case = V4Case(num_tokens, num_heads, 128, extra="fp8_v4", extra_K=chosen, data=data, sink=True)
    made = replace(case, lengths=lengths, extra_block_size=64).make()
    check(made)
