"""Facts that pages state: the numbers of docs/mla.md are computed again, and the fields that
docs/c.md names are those of the struct that its sentence is about."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import sparse_mla
from sparse_mla.dense.absorbed import INPUT_GROUPS
from sparse_mla.ops.projection_weights import TILE, WEIGHT_GROUPS

ROOT = Path(__file__).parents[2]


# --- docs/mla.md: numbers ------------------------------------------------------------------------

# DeepSeek-V3's sizes: heads, latent, head sizes, latent of queries, hidden size.
H, L, PN, R, PV, LQ, HIDDEN = 128, 512, 128, 64, 128, 1536, 7168
YARN = {"factor": 40, "orig_max_pos": 4096, "mscale": 1, "mscale_all_dim": 1}
ROWS = 65536
BF16 = 2  # bytes

SEPARATE, ABSORBED = 2 * (PN + R + PV), 2 * (2 * L + R)  # FLOP of a pair, per head
ABSORBED_WEIGHTS = LQ * H * L + H * L * HIDDEN


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


STATED = (
    f"| H | query heads | {H} |",
    f"| L | `kv_lora_rank`, the size of a latent | {L} |",
    f"`qk_nope_head_dim`, `qk_rope_head_dim`, `v_head_dim` | {PN}, {R}, {PV} |",
    f"times YaRN's factor | {sparse_mla.mla_softmax_scale(PN + R):.4f}; "
    f"{sparse_mla.mla_softmax_scale(PN + R, yarn=YARN):.4f} |",
    f"L + R = {L + R} numbers a token",
    f"2 (Pn + R + Pv) = {SEPARATE} multiplications",
    f"2 (2 L + R) = {ABSORBED} multiplications",
    f"additions per head, {ABSORBED / SEPARATE:.1f} times as many",
    f"a row of {L + R} numbers is read once",
    f"equal at n_q = {2 * L * (PN + PV) / (ABSORBED - SEPARATE):.0f}.",
    f"{gigabytes(ROWS * H * (PN + PV) * BF16)} for {ROWS} rows and {H} heads",
    f"V3's pair has {gigabytes(ABSORBED_WEIGHTS * BF16)} a layer in bf16",
    f"where W_UK and W_UV have {L * H * (PN + PV) * BF16 / 1e6:.0f} MB",
)
PLAN = (ROOT / "csrc/step/plans/plan_dense.h").read_text()
MOST_INPUTS = int(re.findall(r"LATENT_TILES = (\d+) / SMLA_SCALE_TILE", PLAN)[0])
TILED = WEIGHT_GROUPS["block"]
STATED += (
    f"| `block` | {TILED[0]} × {TILED[1]} values | token and {INPUT_GROUPS['block'][1]} values | "
    f"[⌈out/{TILED[0]}⌉, ⌈in/{TILED[1]}⌉] |",
    f"Lq is a multiple of {TILE} then, and at most {MOST_INPUTS}, or about 1000 · H",
    "the schemes lose 4 % of the result's norm, half by the weights and half by the inputs",
)
LETTERS = {"H": H, "L": L, "Pn": PN, "R": R, "Pv": PV}


def words_of(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


@pytest.mark.parametrize("text", STATED)
def test_numbers_of_the_page_about_mla(text):
    assert text in words_of("docs/mla.md")


def test_numbers_of_the_docstrings():
    """DenseMLA and its Config tell the same sizes."""
    layer = " ".join((sparse_mla.dense.DenseMLA.__doc__ or "").split())
    config = " ".join((sparse_mla.dense.Config.__doc__ or "").split())
    assert f"has {gigabytes(ABSORBED_WEIGHTS * BF16)} of weights in bf16, and half in e4m3" in layer
    size = gigabytes(ROWS * H * (PN + PV) * BF16)
    assert f"with {ROWS} rows and {H} heads the latter take {size}" in config


def test_every_equation_of_the_page_is_right():
    """`formula = number`, in the letters of DeepSeek-V3."""
    found = re.findall(r"([0-9]* ?\(?[0-9A-Za-z+() ]+\)?) = (\d+)\b", words_of("docs/mla.md"))
    seen = 0
    for formula, number in found:
        letters = re.findall(r"[A-Za-z_]+", formula)
        words = [word for word in letters if word not in LETTERS]
        formula = formula[formula.rfind(words[-1]) + len(words[-1]) :] if words else formula
        if re.search(r"[A-Z]", formula):
            product = re.sub(r"(?<=[\w)])\s+(?=[(\w])", " * ", formula.strip())
            assert eval(product, {}, LETTERS) == int(number), (formula, number)
            seen += 1
    assert seen == 3


def test_no_number_of_the_page_is_left_out():
    """What is not computed here are the factors, exponents and ends of formulas."""
    words = words_of("docs/mla.md").split("## Calls")[0]
    for text in STATED:
        words = words.replace(text, "")
    numbers = re.findall(r"(?<![\w.])\d[\d.]*", words)
    assert {float(number.rstrip(".")) for number in numbers} <= {0, 1, 2}


def rounded(values: np.ndarray, group: tuple[int, int]) -> np.ndarray:
    """The values as e4m3 by scales of these groups, in fp32."""
    coded, scale = sparse_mla.scaled_quantize(values, group=group)
    sizes = [-(-n // k) for n, k in zip(values.shape, scale.shape, strict=True)]
    return coded.astype(np.float32) * np.kron(scale, np.ones(sizes, np.float32))


@pytest.mark.parametrize("scheme", WEIGHT_GROUPS)
def test_what_a_scheme_loses(scheme):
    rng = np.random.default_rng(0)
    inputs, weights = rng.normal(0, 1, (2, 256, 512)).astype(np.float32)
    coded = rounded(inputs, INPUT_GROUPS[scheme]), rounded(weights, WEIGHT_GROUPS[scheme])
    want = inputs @ weights.T
    by_both, by_inputs, by_weights = (
        np.linalg.norm(x @ w.T - want) / np.linalg.norm(want)
        for x, w in (coded, (coded[0], weights), (inputs, coded[1]))
    )
    assert round(100 * by_both) == 4
    for part in (by_inputs, by_weights):
        assert part**2 / by_both**2 == pytest.approx(0.5, abs=0.05)


def test_from_how_many_heads_the_scratch_of_absorbed_weights_is_no_larger():
    """`workspace_bytes` grows by the same bytes with each head, once there are nine."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128}
    made = [
        sparse_mla.dense.MetadataBuilder(
            sparse_mla.dense.Config(heads, softmax_scale=0.1, path="mixed", **limits)
        ).workspace_bytes
        for heads in range(1, 15)
    ]
    steps = [after - before for before, after in itertools.pairwise(made)]
    assert "unless there are fewer than nine heads" in words_of("docs/mla.md")
    assert len(set(steps[8:])) == 1
    assert steps[7] != steps[8]


# --- docs/c.md: fields ---------------------------------------------------------------------------

HEADERS = "\n".join(path.read_text() for path in sorted((ROOT / "csrc/sparse_mla").glob("*.h")))
COMMENT = re.compile(r"/\*.*?\*/", re.S)


def find_fields() -> dict[str, set[str]]:
    """Struct -> the names of its fields."""
    found = {}
    for name, body in re.findall(
        r"typedef struct (\w+) \{\n(.*?)\n\} \1;", COMMENT.sub("", HEADERS), re.S
    ):
        declared = re.sub(r"\[[^]]*\]", "", body)
        found[name] = set(re.findall(r"(\w+)\s*(?=[;,])", declared))
    return found


FIELDS = find_fields()
# Function -> the structs of its parameters.
PARAMETERS = {
    name: set(re.findall(r"\b(smla_\w+)\b", parameters)) & set(FIELDS)
    for name, parameters in re.findall(r"(smla_\w+)\(([^;{]*?)\);", COMMENT.sub("", HEADERS), re.S)
}


def fields_of(structs: set[str]) -> set[str]:
    """Their fields, and those of the structs that they hold arrays of."""
    return {field for struct in structs for field in FIELDS[struct]}


def structs_of(text: str) -> set[str]:
    """The structs that a piece of the page is about: those of its functions, and its own."""
    names = set(re.findall(r"\bsmla_\w+", text))
    found = {struct for name in names for struct in PARAMETERS.get(name, ())}
    return found | (names & set(FIELDS))


def test_structs_and_functions_are_found():
    assert len(FIELDS) > 40
    some = {"q", "kv_cache", "is_causal", "cp_size", "struct_size"}
    assert some <= FIELDS["smla_mla_attention_args"]
    assert PARAMETERS["smla_dense_forward"] >= {"smla_dense_forward_args"}
    assert "smla_dense_metadata" in FIELDS


PAGE = (ROOT / "docs/c.md").read_text()
BLOCKS = re.findall(r"```c\n(.*?)```", PAGE, re.S)
INITIALIZER = re.compile(r"(smla_\w+) \w+ = \{(.*?)\};", re.S)


def test_the_initializers_of_a_block_are_fields_of_their_struct():
    seen = 0
    for block in BLOCKS:
        for struct, body in INITIALIZER.findall(COMMENT.sub("", block)):
            names = set(re.findall(r"\.(\w+) =", body))
            assert names, struct
            assert names <= FIELDS[struct], names - FIELDS[struct]
            seen += len(names)
        for name in re.findall(r"\b(smla_\w+)\(", block):
            assert name in PARAMETERS, name
    assert seen > 10


# Arrays of the examples, which the page names beside fields.
OF_EXAMPLES = {"qr": ROOT / "examples/c/v4_layer.c", "starts": ROOT / "docs/c.md"}
# What a row of the table may name of a step that is planned.
OF_A_STEP = {"smla_v4_metadata", "smla_v4_group"}
FIELD = re.compile(r"`([a-z]\w*(?:\[i\]\.\w+)?)`")


def pieces_of(page: str) -> list[tuple[str, set[str]]]:
    """Paragraphs and rows of tables, with the structs that they are about: a row is about those of
    its own functions, and a paragraph about those of its section."""
    found = []
    for section in re.sub(r"```.*?```", "", page, flags=re.S).split("\n## "):
        for piece in re.split(r"\n\n|\n(?=\| )", section):
            is_row = piece.startswith("| ")
            found.append((piece, structs_of(piece) | OF_A_STEP if is_row else structs_of(section)))
    return found


def unknown_fields(page: str) -> list[str]:
    """The names in backticks that are neither fields where they stand nor other known names."""
    return [
        name
        for piece, structs in pieces_of(page)
        for name in FIELD.findall(piece)
        if not name.startswith("smla_") and name not in OF_EXAMPLES
        for part in name.split("[i].")
        if part not in fields_of(structs)
    ]


def test_the_fields_that_the_page_names_are_those_of_its_structs():
    assert unknown_fields(PAGE) == []
    assert sum(len(FIELD.findall(piece)) for piece, _ in pieces_of(PAGE)) > 40
    for name, path in OF_EXAMPLES.items():
        assert re.search(rf"ARRAY\({name},", path.read_text()), name


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("`cp_size`", "`num_ranks`"),
        ("`seq_lens_cpu`", "`seq_lens_host`"),
        ("`slots`, `lens`: the", "`slots`, `swa_block_size`: the"),  # a field of another struct
        ("`groups[i].slot_mapping`", "`groups[i].slots`"),
    ],
)
def test_a_wrong_field_is_found(right, wrong):
    assert right in PAGE
    assert unknown_fields(PAGE.replace(right, wrong)) != []


def test_functions_that_the_page_names_are_there():
    for name in re.findall(r"`(smla_\w+)`", PAGE):
        stems = [known for known in (*PARAMETERS, *FIELDS) if known.startswith(name.rstrip("*"))]
        assert stems, name
