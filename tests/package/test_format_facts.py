"""docs/formats.md, computed again: its table, headings, diagrams, rules and vectors follow from the
reference of the formats (tests/kit), which tests/cache compares with the library byte for byte."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import reference as ref
from row_formats import (
    ALL_FORMATS,
    E2M1_VALUES,
    E4M3_576,
    FORMATS,
    INDEX_FORMATS,
    Format,
    e2m1_encode,
)

from sparse_mla import _C

PAGE = "docs/formats.md"
TEXT = (Path(__file__).parents[2] / PAGE).read_text()
WORDS = " ".join(TEXT.split())
VALUES, ROPE = ref.V_DIM, ref.ROPE_DIM
# The formats of keys with 576 values, which `reference` has.
DS_MLA = Format(
    "fp8_ds_mla", ref.HEAD_DIM, VALUES + 2 * ROPE, 16, "e4m3", "any fp32", ref.TILE, ROPE
)
TOKEN = dataclasses.replace(DS_MLA, name="fp8_token")  # its scales are four copies of one
WITH_ROPE = Format("bfloat16", ref.HEAD_DIM, 2 * ref.HEAD_DIM, 0, "bf16", "none")
ALL = (WITH_ROPE, DS_MLA, TOKEN, *ALL_FORMATS.values())


def format_of(name: str) -> Format:
    return next(f for f in ALL if f.name == name)


def scales_of(f: Format) -> int:
    return (f.width - f.rope) // f.tile if f.tile else 0


def section(title: str) -> str:
    found = re.search(rf"^###? {title}.*?(?=^##|\Z)", TEXT, re.M | re.S)
    assert found, title
    return found[0]


# --- the table and the headings ------------------------------------------------------------------

ROW = re.compile(
    r"^\| `(\w+)`[^|]*\| \[pages, block_size, (\d+)\](, split)? \| ([^|]+) \| (\d+) \|$", re.M
)
# A name stands for a format under another one, too: the table's first column says so.
NAMES = {"bfloat16": "auto"}


def test_the_table_has_every_format_with_its_facts():
    found = {
        (name, int(row), bool(split), element, int(size))
        for name, row, split, element, size in ROW.findall(section("The cache array"))
    }
    assert found == {
        (
            NAMES.get(f.name, f.name),
            f.width if f.codes == "bf16" else f.row_bytes,
            f.split,
            "bf16" if f.codes == "bf16" else "uint8, int8 or e4m3",
            f.row_bytes,
        )
        for f in ALL
    }
    in_library = {(name, row) for name, rows in _C.KV_FORMATS.items() for row in rows}
    assert {(f.name, f.width if f.codes == "bf16" else f.row_bytes) for f in ALL} == in_library
    assert {f.name for f in ALL if f.split} == set(_C.SPLIT_KV_FORMATS)


def test_the_headings_have_the_bytes_of_their_formats():
    names = "|".join({f.name for f in ALL})
    found = [
        (name, int(size))
        for line in re.findall(r"^## .*bytes.*$", TEXT, re.M)
        for listed, size in re.findall(rf"((?:{names})(?: and (?:{names}))*), (\d+) bytes", line)
        for name in listed.split(" and ")
    ]
    assert sorted(found) == sorted((f.name, f.row_bytes) for f in ALL)


# --- the diagrams --------------------------------------------------------------------------------

SIZES = {"bf16": 2, "fp32": 4, "e4m3": 1, "UE8M0": 1, "e2m1": 0.5}
CELL = re.compile(r"(\d+) (?:× )?(bf16|fp32|e4m3|UE8M0|e2m1)")


def parts_of(diagram: str) -> list[tuple[list[int], list[list[str]]]]:
    """Per row of boxes its ruler, and the lines of text of each box."""
    found = []
    for ruler, boxes in re.findall(
        r"^(?:byte|data|scales) +(0 .*)\n((?: +[+|].*\n)+)", diagram, re.M
    ):
        lines = [line.strip().strip("|").split("|") for line in boxes.splitlines() if "|" in line]
        found.append(([int(x) for x in ruler.split()], [list(x) for x in zip(*lines, strict=True)]))
    return found


def check_diagram(f: Format, diagram: str) -> None:
    parts = parts_of(diagram)
    assert len(parts) == (2 if f.split else 1), f.name
    where, codes, scales = 0.0, 0, 0
    for ruler, boxes in parts:
        ends = [0.0]
        for box in boxes:
            text = " ".join(x.strip() for x in box)
            count, kind = CELL.search(text).groups() if text.strip() != "0" else ("1", "e4m3")
            ends.append(ends[-1] + int(count) * SIZES[kind])
            is_scale = kind in ("fp32", "UE8M0") or "scale" in text
            if is_scale:
                scales += int(count)
            elif kind != "bf16" and text.strip() != "0":
                codes += int(count)
            for tile in re.findall(r"in tiles of (\d+)", text):
                assert int(tile) == f.tile, f"{f.name}: {text}"
        assert ruler == ends, f"{PAGE}, {f.name}: {ruler} above boxes that end at {ends}"
        where += ends[-1]
    assert where == f.row_bytes, f.name
    if f.codes != "bf16":
        assert codes == f.width - f.rope, f"{PAGE}, {f.name}: {codes} codes"
        assert scales == scales_of(f), f"{PAGE}, {f.name}: {scales} scales of {codes} values"


DIAGRAMS = {
    "bfloat16, 1152": WITH_ROPE,
    "fp8_ds_mla": DS_MLA,
    "fp8_v4,": FORMATS["fp8_v4"],
    "fp8_e4m3, 576": ALL_FORMATS[E4M3_576],
    "fp8_v41 and": FORMATS["fp8_v41"],
    "fp4_v41 and": FORMATS["fp4_v41"],
}


@pytest.mark.parametrize("title", DIAGRAMS)
def test_a_diagram_s_offsets_are_the_ends_of_its_boxes(title):
    check_diagram(DIAGRAMS[title], section(title))


def test_every_diagram_of_a_row_is_checked():
    rulers = re.findall(r"^(?:byte|data|scales) +0 +\d", TEXT, re.M)
    assert len(rulers) == sum(len(parts_of(section(title))) for title in DIAGRAMS)


# --- sentences -----------------------------------------------------------------------------------


V4, INDEX, FP4_INDEX = FORMATS["fp8_v4"], FORMATS["fp8_index"], FORMATS["mxfp4_index"]
V41, FP4, NOPE = FORMATS["fp8_v41"], FORMATS["fp4_v41"], FORMATS["fp8_nope"]
TOP = f"{ref.E4M3_MAX:.0f}"
POWER = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def two_to(number: float) -> str:
    exponent = int(np.log2(number))
    assert 2.0**exponent == number
    return "2" + str(exponent).translate(POWER)


FLT_MIN = two_to(float(ref.FLT_MIN))
SUBNORMAL = two_to(float(ref.E4M3_VALUES[1]))
SIGN, NAN_CODE = (int(e2m1_encode(np.float32(x))) for x in (-0.0, np.nan))
NANS = np.flatnonzero(np.isnan(ref.E4M3_VALUES))
TIES = [(x, int(e2m1_encode(np.float32(x)))) for x in (0.25, 0.75, 2.5, 5)]


def shown(x: float) -> str:
    return f"{x:g}"


SHARED = sorted({f.row_bytes for f in ALL if f.codes != "bf16" and f.needs_name}, reverse=True)

STATED = (
    f"A key has {ref.HEAD_DIM} values: {VALUES} NoPE values",
    f"and {ROPE} RoPE values. For models without RoPE, and for DeepSeek V4, a key has {V4.width}",
    f"in V4 the last {V4.rope} are RoPE values. The keys of an indexer have {INDEX.width} values.",
    f"except for rows of {SHARED[0]} and {SHARED[1]} bytes, which need a name",
    f"Rows of {DS_MLA.row_bytes} bytes are `fp8_ds_mla` unless they are named `fp8_token`.",
    f"A row of `fp8_ds_mla` whose {VALUES} NoPE values are one tile:",
    f"but these two and the rows with {ref.HEAD_DIM} values",
    f"for FP8 the strides and the base address are multiples of {V41.alignment} bytes",
    f"a multiple of {V4.alignment} bytes for `fp8_v4`, of {INDEX.alignment} for the indexer's "
    f"formats, else of {V41.alignment}.",
    f"{FORMATS['bfloat16'].width} × bf16, which are both the key and the value. Such rows are "
    "written with a `k_pe` [tokens, 0].",
    f"Queries are one array [tokens, heads, {VALUES}], not a pair",
    f"so it takes only rows of {ref.HEAD_DIM}.",
    f"exactly `e4m3[i] · scale[i // {ref.TILE}]`",
    f"is subnormal, in steps of {SUBNORMAL}. The largest value is {TOP} (`0x7E`)",
    f"{VALUES} × e4m3, and one fp32 `kv_scale` for the whole cache",
    f"or the same bytes in split pages: data {V41.data_bytes}, scales {V41.scale_bytes}.",
    f"or the same bytes in split pages: data {FP4.data_bytes}, scales {FP4.scale_bytes}.",
    f"without its RoPE part: {NOPE.width} × e4m3 in tiles of {NOPE.tile}, then "
    f"{scales_of(NOPE)} × fp32 scale.",
    f"Keys of {INDEX.width} values, in split pages. `fp8_index`: data {INDEX.data_bytes} × e4m3, "
    f"scale {scales_of(INDEX)} × fp32.",
    f"`mxfp4_index`: data {FP4_INDEX.width} × e2m1, scale {scales_of(FP4_INDEX)} × UE8M0, one per "
    f"{FP4_INDEX.tile} values.",
    f"`0x{NANS[0]:02X}` and `0x{NANS[1]:02X}` are NaN; there is no infinity.",
    f"engines allocate pages in other units ({V4.data_bytes} bytes,",
    f"`scale = max(amax, 1e-10) / {TOP}`, and the same bytes",
    f"e2m1 has {8 * FP4.data_bytes // FP4.width} bits:",
    f"a sign ({SIGN}), then the code of {', '.join(shown(x) for x in E2M1_VALUES[:-1])} or "
    f"{shown(E2M1_VALUES[-1])}.",
    "ties to the even code ("
    + ", ".join(f"{shown(x)} → {shown(E2M1_VALUES[code])}" for x, code in TIES)
    + f"), saturates at ±{shown(E2M1_VALUES[-1])}, and NaN of any sign becomes code {NAN_CODE}.",
    "UE8M0 is the exponent of a power of two: byte e means 2^(e − 127), 255 is NaN.",
    "has a sign bit, 4 exponent bits with bias 7 and 3 mantissa bits.",
    f"for each tile of {DS_MLA.tile} NoPE values, in fp32",
    f"`scale = max(amax / {TOP}, FLT_MIN)`, FLT_MIN = {FLT_MIN}. A tile of zeros has",
    f"saturate to ±{TOP}. Zeros keep their sign; NaN becomes `0x7F` with its sign",
)


# Numbers of steps, an exponent of 0, a head axis of size 1.
LEFT = ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("text", STATED)
def test_a_sentence_has_the_numbers_of_the_reference(text):
    assert text in WORDS, f"{PAGE} must have: {text}"


def test_no_number_of_the_rows_is_left_out():
    """Behind what is checked, only factors and numbers of steps are left."""
    words = TEXT.split("## Test vectors")[0]
    words = re.sub(r"```.*?```|^#.*?$|^\|.*?$", "", words, flags=re.M | re.S)
    words = " ".join(words.split())
    for text in STATED:
        words = words.replace(text, "")
    numbers = re.findall(r"(?<![\w.⁻])\d[\d.e-]*", re.sub(r"`\w+`", "", words))
    assert sorted({number.rstrip(".e-") for number in numbers}) == LEFT


def test_which_formats_the_writers_take():
    """The table's order decides what "the first three" and "the last two" are."""
    names = [name for name, *_ in ROW.findall(section("The cache array"))]
    first = {("bfloat16" if name == "auto" else name) for name in names[:3]}
    assert set(_C.CONCAT_KV_FORMATS) == first | {"fp8_e4m3", "fp8_nope", "fp8_token"}
    assert names[-2:] == INDEX_FORMATS
    assert (
        "writes the first three formats, `fp8_e4m3`, `fp8_nope` and `fp8_token`, "
        "`indexer_k_quant_and_cache` the last two"
    ) in WORDS


# --- rules ---------------------------------------------------------------------------------------


RAISED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


def number(text: str) -> float:
    """A number of the page, such as `6 · 2⁻¹²⁶`, −3.1 or 1/3."""
    text = re.sub("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda x: f"**({x[0].translate(RAISED)})", text)
    for sign, plain in (("−", "-"), ("·", "*"), ("∞", "inf")):
        text = text.replace(sign, plain)
    return -0.0 if text == "-0" else float(eval(text.lower(), {"inf": np.inf, "nan": np.nan}))


RULE = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| (.*?) ?\| (.*) \|$", re.M)


def test_rules():
    """One row per kind of scales; each constant is the one that the reference encodes with."""
    rules = {
        format_of(name): (scale, code)
        for names, scale, code in RULE.findall(section("Writing a whole key"))
        for name in re.findall(r"\w+", names)
    }
    split = {f for f in FORMATS.values() if f.name.endswith("_split")}
    assert set(rules) | split == {f for f in FORMATS.values() if f.codes != "bf16"}
    for f, (scale, code) in rules.items():
        top = 448 if f.codes == "e4m3" else 6
        rounding = "satE4M3" if f.codes == "e4m3" else "e2m1"
        if f.scales in ("ue8m0", "fp32"):
            found = re.fullmatch(r"s = P2\(amax, (\d+), (.*)\)", scale)
            assert (int(found[1]), number(found[2])) == (top, f.least), f"{f.name}: {scale}"
        elif f.scales == "e4m3":
            assert scale == f"s = satE4M3(clip(amax / {top}, {SUBNORMAL}, {TOP}))", f.name
        else:
            assert scale == ("" if f.scales == "cache" else f"s = max(amax / {top}, FLT_MIN)")
        scaled = "x · (1 / kv_scale)" if f.scales == "cache" else "x / s"
        assert code.startswith(f"{rounding}({scaled})"), f"{f.name}: {code}"


# --- vectors -------------------------------------------------------------------------------------

VECTORS = section("Test vectors")
BELOW = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")


def rows_below(title: str) -> list[list[str]]:
    """The cells of the table below a bold title."""
    rows = re.findall(r"^\| (.*) \|$", VECTORS.split(title)[1].split("\n**")[0], re.M)
    return [row.split(" | ") for row in rows[1:]]


def hexes(text: str) -> list[int]:
    return [int(x, 16) for found in re.findall(r"`([\dA-F ]+)`", text) for x in found.split()]


def steps(value: float, shown: str) -> bool:
    """Whether a number is shown right, to its last digit."""
    digits = re.search(r"\.(\d+)", shown)
    least = 10.0 ** -(len(digits[1]) if digits else 0)
    power = re.search(r"e(-?\d+)", shown)
    return abs(value - number(shown)) <= 0.5001 * least * 10.0 ** int(power[1] if power else 0)


def test_tile_with_amax_1():
    scale = np.float32(1) / ref.E4M3_MAX
    word = f"{scale.view(np.uint32):08X}"
    assert f"scale = 1 / {TOP} = `{word}` (bytes `{scale.tobytes().hex(' ').upper()}`)" in VECTORS
    rows = rows_below("**Tile with amax 1.**")
    assert len(rows) == 7
    for x, bits, scaled, code, value, gathered in rows:
        xs = np.array([number(part) for part in x.split(", ")], np.float32)
        patterns = ref.bf16_encode(xs)
        rounded = ref.bf16_decode(patterns)
        assert hexes(bits.replace("`, `", " ")) == patterns.tolist(), x
        codes = ref.e4m3_encode(rounded / scale)
        assert hexes(code) == codes.tolist(), x
        got = ref.e4m3_decode(codes) * scale
        assert hexes(gathered) == ref.bf16_encode(got).tolist(), x
        for shown, one in zip(value.split(", "), got, strict=True):
            assert steps(one, shown), (x, shown, one)
        for shown in re.findall(r"= (.*)", bits):
            assert steps(rounded[0], shown), x
        first = scaled.split(", ")[0]
        assert steps(rounded[0] / scale, first), (x, first)
        between = re.search(r"between (\d+) and (\d+)(?: · (\S+))?", scaled)
        if between:
            low, high = (int(n) * number(between[3] or "1") for n in between.groups()[:2])
            at = abs(float(rounded[0] / scale))
            assert low < at < high, x
            nearest = np.searchsorted(ref.E4M3_VALUES[:127], [low, high])
            assert (ref.E4M3_VALUES[nearest] == [low, high]).all(), x
            assert nearest[1] == nearest[0] + 1, x
        for shown in re.findall(r"= (.*)", code):
            assert number(shown) == ref.e4m3_decode(codes)[0], x


def test_tile_with_amax_448():
    assert f"**Tile with amax {TOP}.** scale = 1 = `3F800000`" in VECTORS
    rows = rows_below("**Tile with amax 448.**")
    assert len(rows) == 7
    for x, rounded, code, value, _ in rows:
        want = ref.bf16_decode(ref.bf16_encode(np.float32([number(x)])))
        assert number(rounded) == want[0], x
        codes = ref.e4m3_encode(want)
        assert hexes(code) == codes.tolist(), x
        assert number(value) == ref.e4m3_decode(codes)[0], x


def test_tiles_of_zeros_of_infinities_and_rope():
    least, most = ref.FLT_MIN, np.float32(ref.FLT_MAX) / ref.E4M3_MAX
    text = f"scale = FLT_MIN = `{least.view(np.uint32):08X}` "
    assert text + f"(bytes `{least.tobytes().hex(' ')}`); 0 → `00`, −0 → `80`" in VECTORS
    assert f"scale = FLT_MAX / {TOP} = `{most.view(np.uint32):08X}`" in VECTORS
    rows = re.findall(r"^\| (?:x|byte) \| (.*) \|$", VECTORS.split("∞ and NaN.**")[1], re.M)
    named, codes = (row.split(" | ") for row in rows[:2])
    values = np.array([-np.nan if x == "−NaN" else number(x) for x in named], np.float32)
    with np.errstate(invalid="ignore"):
        want = ref.e4m3_encode(ref.bf16_decode(ref.bf16_encode(values)) / most)
    assert [hexes(code)[0] for code in codes] == want.tolist()
    values, found = re.search(r"\*\*RoPE.\*\* (.*?) → (.*)\.", VECTORS).groups()
    patterns = ref.bf16_encode(np.array([number(x) for x in values.split(", ")], np.float32))
    assert hexes(found) == list(patterns.tobytes())


def key(width: int, text: str) -> np.ndarray:
    """`x₀ = 448, x₁ = −1, else 0`, where values without a place follow each other."""
    x = np.zeros((1, width), np.float32)
    place = 0
    for item in text.split(", "):
        at, value = re.fullmatch(r"(?:x([₀-₉]+) = )?(\S+)", item).groups()
        place = int(at.translate(BELOW)) if at else place
        x[0, place] = -np.nan if value == "−NaN" else number(value)
        place += 1
    return x


def listed(text: str) -> list[str]:
    """`125, 14 × 105, 109` as its items."""
    found = re.findall(r"(?:(\d+) × )?(`[\dA-F ]+`|\d+)", text)
    return [x for count, one in found for x in one.strip("`").split() * int(count or 1)]


# Format, values, bytes with their places, scales.
KEYS = [
    (name, values, found, scales)
    for title, values, rest in re.findall(
        r"^\*\*([\w ]+)\.\*\* (.*?),? else 0[:.] (.*)$",
        re.sub(r"(?<!\n)\n(?!\n)", " ", VECTORS),
        re.M,
    )
    for name, found, scales in re.findall(
        r"(FP8|FP4|)(?:: |\b)(?:data )?bytes (.*?); scales (.*?)\.(?: |$)", rest
    )
    for name in [{"FP8": "fp8_v41", "FP4": "fp4_v41", "": title}[name]]
]


@pytest.mark.parametrize(("name", "values", "found", "scales"), KEYS, ids=lambda x: x[:12])
def test_keys(name, values, found, scales):
    f = format_of(name)
    data, codes = f.encode(ref.bf16_encode(key(f.width, values)))
    want = data[0].tolist()
    for first, last, code in re.findall(r"(\d+)(?:–(\d+))? `([\dA-F ]+)`", found):
        last = int(last or first)
        assert want[int(first) : last + 1] == hexes(f"`{code}`"), f"{name}: {first}"
        want[int(first) : last + 1] = [0] * (last + 1 - int(first))
    assert not any(want), "the other bytes are 0"
    base = 16 if f.scales == "e4m3" else 10
    shown = [int(x, base) for x in listed(scales)]
    assert shown == codes[0].tolist(), name


def test_every_key_is_checked():
    assert sorted(name for name, *_ in KEYS) == ["fp4_v41", "fp8_v4", "fp8_v41", "mxfp4_index"]


def test_other_keys():
    """The indexer's FP8 keys, special values, and a scale for a whole array."""
    two = np.full((1, INDEX.width), 2, np.float32)
    data, scale = INDEX.encode(ref.bf16_encode(two))
    _, least = INDEX.encode(ref.bf16_encode(0 * two))
    scale, least = (two_to(float(x.view(np.float32)[0, 0])) for x in (scale, least))
    text = f"{INDEX.width} × 2: bytes `{data[0, 0]:02X}`, scale {scale}. Zeros have scale {least}."
    assert text in WORDS
    special = key(V4.width, "NaN, −NaN, ∞, −∞, −0, 1")
    data, scale = V4.encode(ref.bf16_encode(special))
    codes, power = data[0, :6].tobytes().hex(" ").upper(), two_to(2.0 ** (int(scale[0, 0]) - 127))
    assert f"in `fp8_v4`: `{codes}`, scale {scale[0, 0]} = {power}." in WORDS
    codes, scale = ref.dynamic_per_tensor_quant(np.array([1, -2, 3.5, 0], np.float32))
    text = f"→ scale 3.5 / {TOP} = {two_to(float(scale))} = `{scale.view(np.uint32):08X}`, "
    assert text + f"bytes `{codes.tobytes().hex(' ').upper()}`." in WORDS
    _, scale = ref.dynamic_per_tensor_quant(np.zeros(1, np.float32))
    assert f"`scale = max(amax, 1e-10) / {TOP}`" in WORDS
    assert scale == np.float32(1e-10) / ref.E4M3_MAX


# --- fixtures ------------------------------------------------------------------------------------

FOLDER = Path(__file__).parents[1] / "fixtures" / "formats"
FILES = {
    name: [int(n) for n in shape.split("x")]
    for name, _, shape, _ in (path.name.split(".") for path in FOLDER.glob("*.bin"))
}
FIXTURES = section("Fixtures")


def test_the_shapes_of_fixtures_are_those_of_the_files():
    found = re.findall(r"`(\w+)` \[([\d, ]+)\]", FIXTURES)
    assert len(found) == 14
    for name, shape in found:
        assert [int(n) for n in shape.split(", ")] == FILES[name], name


def test_the_numbers_of_fixtures_are_those_of_the_script_that_makes_them():
    script = (FOLDER / "make.py").read_text()
    constants: dict[str, object] = {}
    for line in re.findall(r"^[A-Z][A-Z_, ]* = .*", script, re.M):
        exec(line, constants)
    words = " ".join(FIXTURES.split())
    slots, sizes = constants["SLOTS"], constants["TILE_SIZES"]
    shown = ", ".join(map(str, slots)).replace("-", "−")
    size = sum(path.stat().st_size for path in FOLDER.glob("*.bin"))
    begin = slots[0] * DS_MLA.row_bytes
    ends = [begin + n for n in (VALUES, VALUES + DS_MLA.scale_bytes, DS_MLA.row_bytes)]
    assert sizes == [1, 2.0**-10, 300, 1e-30]
    for text in (
        f"{round(size / 1000)} kB in all",
        f"go to the slots of `slot_mapping`: {shown}.",
        f"The cache has {constants['PAGES']} pages of {constants['BLOCK_SIZE']} tokens",
        f"page size {constants['KEY_BLOCK_SIZE']}; kv_scale 1/{1 / constants['KV_SCALE']:.0f} for",
        f"`topk_indices`, page size {constants['BLOCK_SIZE']} |",
        f"softmax scale 1/{1 / constants['SOFTMAX_SCALE']:.0f} |",
        f"Slot {slots[0]} begins at byte {slots[0]} · {DS_MLA.row_bytes} = {begin} of",
        f"its e4m3 values end at {ends[0]}, its scales at {ends[1]}, its RoPE values at {ends[2]}.",
        "have the sizes 1, 2⁻¹⁰, 300 and 10⁻³⁰.",
        "NaN, −NaN, ∞, −∞, 10³⁸, 1 and 2⁻¹⁴⁰.",
        f"keys of {INDEX.width} | the first {INDEX.width} values of `kv_c`",
    ):
        assert text in words, f"{PAGE} must have: {text}"
