"""One thing has one name: docs/names.md, against operators, configs and the headers of C."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import sparse_mla
from sparse_mla import ops

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/names.md").read_text()
PEERS, OURS = (part.split("\n## ")[0] for part in PAGE.split("\n## ")[1:3])
HEADERS = "\n".join(path.read_text() for path in (ROOT / "csrc/sparse_mla").glob("*.h"))
WORD = re.compile(r"`(\w+)`")

# An operator that keeps a peer's names may have those that others never have.
KEEPERS = {"sparse_mla_dsv4"}
DATA = (
    *(sparse_mla.Config, sparse_mla.dense.Config, sparse_mla.v4.Config),
    *(sparse_mla.v4.Weights, sparse_mla.v4.Caches),
)


def rows(part: str) -> list[list[str]]:
    cells = [line.strip("|").split("|") for line in part.split("\n") if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in cells[1:]]


FORBIDDEN = {name for row in rows(OURS) for name in WORD.findall(row[2])}
ROWS_OF_TOKENS = {
    "fused_q_kv_rmsnorm",
    "fused_qnorm_rope_kv_insert",
    "save_partial_states",
    "compress_norm_rope_store",
}


def arguments(op: str) -> set[str]:
    return {*inspect.signature(ops.OPERATORS[op]).parameters}


def fields_of(struct: str) -> set[str]:
    body = re.search(rf"typedef struct {struct} \{{(.*?)\n\}}", HEADERS, re.S)
    assert body, struct
    code = re.sub(r"/\*.*?\*/", "", body[1], flags=re.S)
    return {*re.findall(r"(\w+)(?:\[\w+\])?;", code)}


STRUCTS = re.findall(r"typedef struct (smla_\w+) \{", HEADERS)


def test_names_are_found():
    assert {"cache", "cos_sin", "table", "sinks"} <= FORBIDDEN
    assert "kv_cache" in arguments("sparse_attention") & fields_of("smla_sparse_attention_args")
    assert len(STRUCTS) > 40


@pytest.mark.parametrize("op", ops.OPERATORS)
def test_operators_have_no_other_names(op):
    found = arguments(op)
    assert op in KEEPERS or not found & FORBIDDEN
    assert ("kv" in found) == (op in ROWS_OF_TOKENS)


@pytest.mark.parametrize("struct", STRUCTS)
def test_structs_of_c_have_no_other_names(struct):
    assert struct == "smla_sparse_mla_dsv4_args" or not fields_of(struct) & FORBIDDEN


@pytest.mark.parametrize("kind", DATA)
def test_configs_and_weights_have_no_other_names(kind):
    assert not {field.name for field in dataclasses.fields(kind)} & FORBIDDEN


@pytest.mark.parametrize("row", rows(PEERS), ids=lambda row: row[0])
def test_names_of_peers_are_there(row):
    """Each name that the page says an operator keeps is an argument of it."""
    named = [op for op in WORD.findall(row[0]) if op in ops.OPERATORS]
    every = {name for op in ops.OPERATORS for name in arguments(op)}
    every |= {field for struct in STRUCTS for field in fields_of(struct)}
    every |= {field.name for kind in DATA for field in dataclasses.fields(kind)}
    known = {name for op in named for name in arguments(op)} if named else every
    assert {*WORD.findall(row[2])} <= known
