"""What save_partial_states and compress_norm_rope_store refuse, and that a refused call writes
nothing."""

from __future__ import annotations

import device
import numpy as np
import pytest
import reference as ref
from cases import angles
from compressor_steps import F32, MAX_POS, Case
from helpers import assert_same_bits


def refused(case: Case, text: str, error=ValueError, *, save=False, fused=False, **options) -> None:
    """The call raises this text, and writes nothing."""
    before = case.memory.tobytes(), case.pages.memory.tobytes()
    op = "save_partial_states" if save else "compress_norm_rope_store"
    with pytest.raises(error) as info:
        if save:
            case.save(**options)
        else:
            case.close(**(case.step if fused else {}), **options)
    assert str(info.value).startswith(f"{op}: {text}"), info.value
    assert (case.memory.tobytes(), case.pages.memory.tobytes()) == before


def changed(case: Case, **arrays) -> Case:
    for name, x in arrays.items():
        (case.step if name in case.step else case.arrays)[name] = x
    return case


def test_bad_widths():
    """c is 2 where r is 4, and only there."""
    wide = np.zeros((20, 1024), F32)
    state = np.zeros((4, 4, 2048), F32)
    case = changed(Case(ratio=2), kv=wide, score=wide, ape=np.zeros((2, 1024), F32))
    refused(
        case, "`ape` must have 128 or 512 columns for a ratio of 2 (its rows), got 1024", save=True
    )
    case = changed(Case(), kv=wide[:, :512], score=wide[:, :512], ape=np.zeros((4, 512), F32))
    refused(
        case, "`ape` must have 256 or 1024 columns for a ratio of 4 (its rows), got 512", save=True
    )
    refused(Case(ratio=2), "`state` must have shape [any, any, 2048], got [", ratio=4)
    case = changed(Case(), state=state[:, :, :1024])
    refused(case, "`state` must have shape [any, any, 2048], got [4, 4, 1024]")
    refused(case, "`state` must have shape [any, any, 2048], got [4, 4, 1024]", save=True)
    case = changed(Case(), state=state[:, :0])
    refused(case, "`state` must have pages of at least 1 row, got 0")
    refused(case, "`state` must have pages of at least 1 row, got 0", save=True)
    weight = np.zeros(128, F32)
    refused(changed(Case(), norm_weight=weight), "`state` must have shape [any, any, 512], got [")
    case = changed(Case(fmt="fp8_index"), norm_weight=np.zeros(127, F32))
    refused(case, "`norm_weight` must have 512 weights, or 128 for rows of an indexer, got 127")
    case = changed(Case(fmt="fp8_index"), kv_cache=Case().pages.cache)
    refused(case, "`kv_cache` must be of a format that this operator takes (")
    ape = np.zeros((3, 1024), F32)
    refused(changed(Case(), ape=ape), "`ape` must have shape [4, 1024], got [3, 1024]", fused=True)
    case = changed(Case(), ape=np.zeros((0, 1024), F32))
    refused(case, "`ape` must have 1 to 2147483647 rows", save=True)


def test_bad_arguments():
    refused(Case(), "`ape` must be given, got none", kv=np.zeros((18, 1024), F32))  # fmt: skip
    refused(Case(), "`kv` must be given, got none", ape=np.zeros((4, 1024), F32))  # fmt: skip
    case = Case()
    case.step["score"] = case.step["score"].astype(ref.BF16)
    refused(case, "`score` must be float32, got bfloat16", TypeError, fused=True)
    refused(case, "`score` must be float32, got bfloat16", TypeError, save=True)
    case.step["kv"] = case.step["kv"].astype(np.float16)
    refused(case, "`kv` must be bfloat16 or float32, got float16", TypeError, save=True)
    refused(Case(), "`ratio` must be 1 to 2147483647, got 0", ratio=0)
    refused(Case(), "`eps` must be finite and at least 0, got -1", eps=-1.0)
    refused(Case(), "`kv_scale` must be 1 for format fp8_v4", kv_scale=2.0)
    refused(Case(fmt="fp8_e4m3"), "`kv_scale` must be a positive normal float32", kv_scale=0.0)
    refused(Case(), "`kv_format` must be", kv_format="fp5")
    cases = (Case(fmt="fp8_v41"), Case(fmt="fp4_v41_split"))
    for case in cases:
        refused(case, "`kv_cache` must come with kv_format=", kv_format=None)
    wide = np.zeros((2, 4, 656), np.uint8)
    refused(
        changed(Case(), kv_cache=wide), "`kv_cache` must be of a format that this operator takes ("
    )
    short = Case().arrays["positions"][:3]
    refused(changed(Case(), positions=short), "`positions` must have shape [>= 18], got [3]")
    refused(changed(Case(), positions=short), "`positions` must have shape [>= 18]", save=True)
    refused(changed(Case(), kv_slot_mapping=short), "`kv_slot_mapping` must have shape [>= 18]")
    ids = Case().arrays["req_id_per_token"]
    refused(changed(Case(), req_id_per_token=ids[:3]), "`req_id_per_token` must have shape [>= 18]")
    refused(
        changed(Case(), slot_mapping=ids.astype(F32)),
        "`slot_mapping` must be int32 or int64",
        TypeError,
    )
    refused(changed(Case(), rope_table=angles()[:, :32]), "`rope_table` must have shape [any, 64]")
    refused(
        changed(Case(), rope_table=angles().astype(np.float64)),
        "`rope_table` must be float32",
        TypeError,
    )
    kv = Case().step["kv"][:3]
    refused(changed(Case(), kv=kv), "`kv` must have shape [>= 18, 1024], got [3, 1024]", fused=True)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("fused", [False, True])
def test_bad_values_write_nothing(fused):
    for position in (MAX_POS, -1, 2**62):
        case = Case()
        case.arrays["positions"][17] = position
        rule = (
            f"`positions` must be rows of `rope_table`, which has 800, got {position} for token 17"
        )
        refused(case, rule, fused=fused)
    for name, array in (("slot_mapping", "state"), ("kv_slot_mapping", "kv_cache")):
        for slot in (10**4, 2**40):
            case = Case()
            case.arrays[name][2] = slot
            refused(case, f"`{name}` must be below the ", fused=fused)
            with pytest.raises(ValueError, match=rf"slots of `{array}`, got {slot} at token 2"):
                case.close()
    for req in (-1, 3, 2**31 - 1):
        case = Case(((0, 8),), padding=0)
        case.arrays["req_id_per_token"][7] = req
        req_text = f"(0 to 0), got {req} at token 7"
        refused(
            case, f"`req_id_per_token` must name a row of `block_table` {req_text}", fused=fused
        )
    case = Case(((0, 8),), padding=0)
    case.table[0, 1] = 99
    refused(
        case,
        "`block_table` must name pages of `state` (0 to 3) or be negative, "
        "got 99 for request 0, block 1",
        fused=fused,
    )


@pytest.mark.usefixtures("checked")
def test_bad_values_of_states_write_nothing():
    for position in (-1, -(2**62)):
        case = Case()
        case.arrays["positions"][17] = position
        refused(case, f"`positions` must be >= 0, got {position} for token 17", save=True)
    case = Case()
    case.arrays["slot_mapping"][2] = 10**4
    refused(case, "`slot_mapping` must be below the ", save=True)


def test_values_that_nothing_reads():
    """Request ids and pages of tokens that close no group, and of positions that no group has."""
    case = Case(((0, 6), (9, 2)), padding=0)
    closing = case.arrays["kv_slot_mapping"] >= 0
    want = case.want_memory(), case.want_pages(case.want_memory())
    case.arrays["req_id_per_token"][~closing] = 77
    if not device.ON_CUDA:  # a GPU needs to know the neighbours of a request
        case.close(**case.step)
        assert_same_bits(case.memory, want[0])
        assert_same_bits(case.pages.memory, want[1])
    else:
        case.save()
        case.close()
        assert_same_bits(case.pages.memory, want[1])


def test_overlaps():
    case = Case()
    refused(
        changed(case, kv=case.memory.reshape(-1, 2048)[:18, :1024]),
        "`state` must not overlap `kv`",
        fused=True,
    )
    refused(case, "`state` must not overlap `kv`", save=True)
    flat = Case(fmt="bfloat16", layout="flat")
    weight = flat.pages.cache[0]
    refused(changed(flat, norm_weight=weight), "`kv_cache` must not overlap `norm_weight`")


@pytest.mark.skipif(device.DEVICE != "cpu", reason="copies are never read-only")
def test_a_read_only_state():
    """The state is written where kv is given, else it is not."""
    case = Case()
    case.state.flags.writeable = False
    with pytest.raises(BufferError, match=r"`state` must be writable, got a read-only"):
        case.close(**case.step)
    want = case.want_pages(case.memory)
    case.close()
    assert_same_bits(case.pages.memory, want)
