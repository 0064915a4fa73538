"""Attention operators and layers give the bits of the commit that made tests/fixtures/golden.json
(tests/kit/golden.py). `make golden` compares more cases, instruction sets and threads.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import device
import golden
import golden_lines
import helpers
import library
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
KNOWN = json.loads((ROOT / "tests/fixtures/golden.json").read_text())
CASES = golden_lines.GROUP
SETS = [isa for isa in library.ISAS if isa in KNOWN]


@pytest.mark.skipif(device.ON_CUDA, reason="plans of a GPU depend on it; golden.py --save compares")
@pytest.mark.parametrize("isa", SETS[:1])
def test_bits(isa, tmp_path):
    """The first group of cases of every subject, on the best instruction set that has hashes."""
    to = tmp_path / "hashes.json"
    environment = {"SPARSE_MLA_CPU_ISA": isa, "OMP_NUM_THREADS": "2"}
    program = ROOT / "tests/kit/golden.py"
    helpers.printed_by_python(program, to, str(CASES), **environment)
    assert golden_lines.differences(json.loads(to.read_text()), KNOWN[isa]) is None


def test_every_subject_has_500_cases_on_every_set():
    names = [subject.__name__ for subject in golden.SUBJECTS]
    for isa, lines in KNOWN.items():
        assert sorted(lines) == sorted(names)
        least = 25 if isa.startswith("neon") else 500
        for each in lines.values():
            assert len(each) * CASES >= least
            assert len(set(each)) == len(each)


def test_subjects_are_the_attentions():
    """Every attention of core/operators.h has cases, and so has every layer."""
    text = (ROOT / "csrc/core/operators.h").read_text()
    attentions = set(re.findall(r"X\((\w*(?:attention|attn|dsv4)\w*),", text))
    names = {subject.__name__ for subject in golden.SUBJECTS}
    assert attentions <= names
    assert {"v32_layer", "dense_layer", "dense_layer_absorbed", "v4_attend", "v4_layer"} <= names


def test_one_bit_is_seen():
    results = golden.merge_attn_states(3)
    changed = copy.deepcopy(results)
    bits = np.asarray(changed[0]).view(np.uint16)
    bits[tuple(0 for _ in bits.shape)] ^= 1
    same, other = (golden.digest_of(x) for x in (results, changed))
    assert same != other
    assert golden.digest_of(copy.deepcopy(results)) == same
    known = golden_lines.lines_of([same] * 60)
    got = golden_lines.lines_of([*[same] * 40, other, *[same] * 19])
    assert golden_lines.changed_cases(known, known) == []
    assert golden_lines.changed_cases(got, known) == [40]
    assert golden_lines.differences({"a": got}, {"a": known}) == "a gives other bits in cases 40"
    assert golden_lines.differences({"a": known}, {}) == "a has no hashes"


def test_a_changed_group_is_named():
    """Two digits of a case may be equal by chance; the hash of the group is not."""
    known = ["0" * 16 + " " + "ab" * 25]
    got = ["1" * 16 + " " + "ab" * 25]
    assert golden_lines.changed_cases(got, known) == ["one of 0 to 24"]
