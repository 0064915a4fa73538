"""Lines of hashes: one for each GROUP of cases, and what two lists of lines say about the cases."""

from __future__ import annotations

import hashlib

GROUP = 25
WHOLE = 16  # digits of the hash of a group
EACH = 2  # digits of each case's hash, which tell the case that has changed


def lines_of(digests: list[str]) -> list[str]:
    groups = [digests[i : i + GROUP] for i in range(0, len(digests), GROUP)]
    whole = (hashlib.sha256("".join(group).encode()).hexdigest()[:WHOLE] for group in groups)
    each = ("".join(x[:EACH] for x in group) for group in groups)
    return [f"{x} {y}" for x, y in zip(whole, each, strict=True)]


def changed_cases(got: list[str], want: list[str]) -> list[int | str]:
    """The numbers of the cases whose hashes differ; lines that only one of the two has are no
    difference. A group whose cases look the same has a name instead."""
    found = []
    for i, lines in enumerate(zip(got, want, strict=False)):
        if lines[0] == lines[1]:
            continue
        a, b = (line[WHOLE + 1 :] for line in lines)
        columns = range(0, max(len(a), len(b)), EACH)
        cases = [i * GROUP + k // EACH for k in columns if a[k : k + EACH] != b[k : k + EACH]]
        found += cases or [f"one of {i * GROUP} to {(i + 1) * GROUP - 1}"]
    return found


def differences(found: dict[str, list[str]], known: dict[str, list[str]]) -> str | None:
    """An error text, if an operator's or layer's results have changed, or it has no lines."""
    errors = []
    for name, lines in found.items():
        if not lines or not known.get(name):
            errors.append(f"{name} has no hashes")
        elif changed := changed_cases(lines, known[name]):
            errors.append(f"{name} gives other bits in cases {', '.join(map(str, changed[:9]))}")
    return "; ".join(errors) or None
