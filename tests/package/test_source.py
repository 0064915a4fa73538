"""Rules of the source that no other test checks."""

from __future__ import annotations

import ast
import functools
import json
import re
import shlex
import subprocess
import tokenize
import tomllib
from collections import Counter
from pathlib import Path
from token import NUMBER

import pytest

import sparse_mla

ROOT = Path(__file__).parents[2]
SOURCES = (".c", ".h", ".cu", ".cuh", ".py", ".pyi", ".md")
CSRC = sorted(path for path in (ROOT / "csrc").rglob("*.[ch]*") if path.is_file())
PYTHON = ("sparse_mla", "tests", "benchmarks/bench", "buildtools", "examples")
UMBRELLA = ROOT / "csrc" / "sparse_mla.h"
PUBLIC = [UMBRELLA, *sorted((ROOT / "csrc" / "sparse_mla").iterdir())]


def included_by(path: Path) -> set[Path]:
    """The files of csrc that a file includes. Every include is spelled from csrc on."""
    names = re.findall(r'^#include "(.*)"', path.read_text(), re.M)
    return {ROOT / "csrc" / name for name in names}


def database() -> list[dict[str, str]]:
    """The entries of compile_commands.json, which the build writes."""
    file = ROOT / "compile_commands.json"
    if not file.exists():
        pytest.skip("no build here")
    return json.loads(file.read_text())


def commands() -> dict[str, dict[str, str]]:
    """source file -> an entry of it; the CPU's kernels have one per instruction set."""
    return {entry["file"]: entry for entry in database()}


def find_circle(graph: dict[Path, set[Path]]) -> list[str]:
    """The names of files that form a circle in the graph; empty where there is none."""
    done: set[Path] = set()
    way: list[Path] = []

    def visit(path: Path) -> list[str]:
        if path in way:
            return [x.name for x in (*way[way.index(path) :], path)]
        if path not in done:
            way.append(path)
            for other in sorted(graph.get(path, ())):
                if circle := visit(other):
                    return circle
            done.add(way.pop())
        return []

    return next(filter(None, map(visit, graph)), [])


def test_a_circle_is_found():
    a, b, c = map(Path, "abc")
    assert find_circle({a: {b}, b: {c}, c: {b}}) == ["b", "c", "b"]
    assert find_circle({a: {b, c}, b: {c}, c: set()}) == []


def test_no_file_includes_itself_by_way_of_others():
    graph = {path: included_by(path) for path in CSRC}
    assert sum(map(len, graph.values())) > 100, "the includes are found"
    assert set().union(*graph.values()) <= set(graph), "each name is a file's"
    assert find_circle(graph) == []


Symbols = tuple[set[str], set[str]]  # defined by a file, and taken from other files


def symbols_of(objects: list[Path]) -> dict[Path, Symbols]:
    """What `nm -A` prints: `file: name kind value size`, a line for each symbol of each file."""
    command = ["nm", "-gPA", *objects]
    table = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    symbols: dict[Path, Symbols] = {path: (set(), set()) for path in objects}
    for line in table.splitlines():
        path, name, kind = re.match(r"(.*): (\S+) (\w)", line).groups()
        symbols[Path(path)][kind in "Uw"].add(name)
    return symbols


def test_no_file_calls_the_compiler_s_openmp_library():
    """A file with parallel loops includes threads.h, so that they run on pool.c."""
    symbols = object_symbols()
    users = [name for _, names in symbols.values() for name in names]
    assert "smla_pool_run" in users or "clang" in sparse_mla.build_info()["compiler"]
    if "smla_pool_run" in users:
        assert [name for name in users if name.startswith(("GOMP_", "omp_"))] == []


@functools.cache
def object_symbols() -> dict[Path, Symbols]:
    """The symbols of every compiled file of csrc; a CPU kernel's are those of all its objects."""
    folder = commands()["csrc/core/error.c"]["output"].removesuffix("csrc/core/error.o")
    objects = [
        (ROOT / entry["file"], ROOT / entry["output"])
        for entry in database()
        if entry["output"].startswith(f"{folder}csrc/")
    ]
    kernels = [path for path in CSRC if path.suffix == ".cu"]
    objects += [(path, ROOT / folder / f"{path.relative_to(ROOT)}.o") for path in kernels]
    built = [(path, file) for path, file in objects if file.exists()]
    of_file = symbols_of([file for _, file in built])
    symbols: dict[Path, Symbols] = {}
    for path, file in built:
        defined, taken = symbols.setdefault(path, (set(), set()))
        defined.update(of_file[file][0])
        taken.update(of_file[file][1])
    assert len(symbols) > 40, "objects are found"
    return {path: (defined, taken - defined) for path, (defined, taken) in symbols.items()}


def names_in(kernel_file: Path) -> Symbols:
    """The symbols of a .cu file, by its text: a CPU-only build has no object of it."""
    text = kernel_file.read_text()
    defined = set(re.findall(r"^(smla_\w+)\(", text, re.M))
    return defined, set(re.findall(r"\b(smla_\w+)\(", text)) - defined


def test_no_file_calls_itself_by_way_of_others():
    texts = {path: names_in(path) for path in CSRC if path.suffix == ".cu"}
    symbols = texts | object_symbols()
    owners = {name: path for path, (defined, _) in symbols.items() for name in defined}
    graph = {
        path: {owners[name] for name in taken if name in owners} - {path}
        for path, (_, taken) in symbols.items()
    }
    assert sum(map(len, graph.values())) > 100, "calls are found"
    started = [path for path in texts if graph[path] & set(texts)]
    assert started, "launchers that call other files' are found"
    assert find_circle(graph) == []


def test_no_file_is_long():
    folders = [ROOT / name for name in ("csrc", *PYTHON)]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in SOURCES]
    ours = [path for path in files if "include" not in path.relative_to(ROOT).parts]
    assert len(ours) > 700
    assert [path for path in ours if len(path.read_text().splitlines()) > 600] == []


def test_no_line_of_c_is_wider_than_100_columns():
    """clang-format leaves long comments alone."""
    folders = [ROOT / name for name in ("csrc", "tests/c", "examples/c")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in SOURCES[:4]]
    assert len(files) > 200
    lines = [(path, line) for path in files for line in path.read_text().splitlines()]
    assert [f"{path.name}: {line}" for path, line in lines if len(line) > 100] == []


def test_the_public_header_includes_and_lists_its_rooms():
    assert included_by(UMBRELLA) == set(PUBLIC) - {UMBRELLA}
    listed = re.findall(r"^ \*   (\w+\.h) ", UMBRELLA.read_text(), re.M)
    assert sorted(listed) == [path.name for path in PUBLIC[1:]]


def test_public_headers_include_no_others():
    assert set().union(*map(included_by, PUBLIC)) <= set(PUBLIC)


def test_file_names_are_unique():
    """But for public headers, which are named after the families whose folders are inside."""
    names = Counter(path.name for path in CSRC if path.parent.name != "sparse_mla")
    assert [name for name, count in names.items() if count > 1] == []


def find_files(folder: str, pattern: str) -> list[Path]:
    files = [path for path in (ROOT / folder).rglob("*.*") if path.suffix in SOURCES]
    return [path for path in files if re.search(pattern, path.read_text(), re.M)]


OPERATOR = r"X\((\w+),\s*(smla_\w+_args),\s*smla_\w+,\s*(\w+)\)"
OPERATORS = re.findall(OPERATOR, (ROOT / "csrc/core/operators.h").read_text().replace("\\\n", " "))


@pytest.mark.parametrize(("name", "args", "family"), OPERATORS, ids=lambda x: x)
def test_an_operator_s_family_has_one_stem_on_every_floor(name, args, family):
    floors = {
        "csrc/sparse_mla": (rf"^}} {args};", rf"{family}\.h"),
        "csrc/ops": (rf"^smla_check_{name}\(", rf"check_{family}(_\w+)?\.c"),
        "csrc/cpu": (rf"^smla_cpu_{name}\(", rf"{family}/\w+\.c"),
        "csrc/cuda": (rf"^smla_cuda_launch_{name}\(", rf"{family}/.*|cuda_backend\.c"),
        "csrc/python/ops": (rf"^[^/]*\b{name}\b", rf"ops_{family}\.c"),
        "sparse_mla/ops": (rf"^def _?{name}\(", rf"{family}(_\w+)?\.pyi?"),
    }
    for floor, (pattern, stem) in floors.items():
        found = find_files(floor, pattern)
        assert found or name.endswith("_proj") or "projection" in name, floor
        for path in found:
            assert re.fullmatch(stem, str(path.relative_to(ROOT / floor))), path


def test_operators_are_found():
    assert len(OPERATORS) > 30


def test_files_begin_with_their_names():
    for path in CSRC:
        assert path.read_text().startswith(f"/* {path.name}: "), path


def code_of(path: Path) -> str:
    """A C file without its comments and strings."""
    return re.sub(r'/\*.*?\*/|"(?:\\.|[^"\\])*"', " ", path.read_text(), flags=re.S)


def files_with(pattern: str) -> set[str]:
    return {path.name for path in CSRC if re.search(pattern, code_of(path))}


ROW_FACTS = {"656", "528", "576", "584", "1152"}


def test_sizes_of_rows_stand_in_the_table():
    """Python takes them from the table, too. `align` of V4's pages is FlashMLA's number, not a
    row's."""
    numbers = "|".join(ROW_FACTS)
    assert files_with(rf"\b({numbers})\b") == {"kv_format.h"}
    folders = [ROOT / name for name in ("sparse_mla", "benchmarks/bench", "shim", "buildtools")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(files) > 60
    with_numbers = set()
    for path in files:
        with path.open("rb") as file:
            tokens = [x.string for x in tokenize.tokenize(file.readline) if x.type == NUMBER]
        if ROW_FACTS & set(tokens):
            with_numbers.add(str(path.relative_to(ROOT)))
    assert with_numbers == {"benchmarks/bench/tables/v4.py", "sparse_mla/v4/facts.py"}


def test_the_library_prints_nothing_but_its_log_and_never_exits():
    assert "rule.c" in files_with(r"\bvsnprintf\("), "calls are found"
    assert files_with(r"\b(f?printf|puts|perror|abort|_?exit)\(") == set()
    assert files_with(r"\b(fputs\(|std(out|err)\b)") == {"log.c"}


def test_assembly_stands_where_instructions_are_wrapped():
    folder = ROOT / "csrc" / "cuda" / "ptx"
    wrappers = {path.name for path in folder.glob("*.cuh")}
    others = {"attention_tiles.h", "fp_mode.h", "isa.c", "pool.c", "threads.h"}
    assert files_with(r"\basm\b|__asm__") == wrappers | others


def test_headers_are_included_once():
    headers = [path for path in CSRC if path.suffix in (".h", ".cuh")]
    assert {path for path in headers if "#pragma once\n" not in path.read_text()} == set(PUBLIC)
    for path in PUBLIC:  # a guard that every compiler knows
        guard = re.sub(r"\W", "_", str(path.relative_to(ROOT / "csrc"))).upper()
        lines = [line for line in path.read_text().splitlines() if line.startswith("#")]
        assert lines[:2] == [f"#ifndef {guard}", f"#define {guard}"]
        assert lines[-1] == f"#endif /* {guard} */"


# A trailing comment that reads on from its identifier has no noun: `int size; /* of a page */`.
NO_NOUN = r"[;,{] +/\* (of|that|which|whose|from|by|with|behind|beside|for) "
NO_NOUN_IN_PYTHON = r"[^ \n]  # (of|that|which|whose|by|with|behind|beside) "


def test_trailing_comments_name_their_noun():
    c = [*CSRC, *(ROOT / "tests" / "c").rglob("*.[ch]")]
    python = [p for folder in PYTHON for p in (ROOT / folder).rglob("*.py")]
    assert [p.name for p in c if re.search(NO_NOUN, p.read_text())] == []
    assert [p.name for p in python if re.search(NO_NOUN_IN_PYTHON, p.read_text())] == []


def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of a file of Python."""
    return [*ast.walk(ast.parse(path.read_text()))]


def names_of(nodes: list[ast.AST]) -> set[str]:
    """The names that a file of Python assigns, defines or imports anywhere."""
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def test_what_tests_import_from_each_other_exists():
    """Where there is no GPU, nothing else reads the files of its tests."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    modules = {path.stem: nodes_of(path) for path in files}
    names = {stem: names_of(nodes) for stem, nodes in modules.items()}
    missing = []
    for stem, nodes in modules.items():
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                given = names.get(node.module)
                if given is None and node.module.startswith("test_"):
                    missing.append((stem, node.module))
                missing += [(stem, x.name) for x in node.names if given and x.name not in given]
            elif isinstance(node, ast.Import):
                others = [x.name for x in node.names if x.name.startswith("test_")]
                missing += [(stem, name) for name in others if name not in names]
    assert missing == []


# Of other projects: a command line, and DeepGEMM's order of arguments.
FOREIGN_CALLS = {"run", "module.fp8_paged_mqa_logits"}


def test_calls_of_more_than_six_values_name_them():
    calls = [
        (path.name, node.lineno, ast.unparse(node.func), len(node.args))
        for folder in ("sparse_mla", "benchmarks/bench", "shim", "buildtools")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
    ]
    assert len(calls) > 5000
    assert [x for x in calls if x[3] > 6 and x[2] not in FOREIGN_CALLS] == []


# --- limits --------------------------------------------------------------------------------------


def compiler_of(source: str) -> list[str]:
    """The command that compiled a file, changed to check the C text on standard input instead."""
    command = shlex.split(commands()[source]["command"])
    command = [flag for flag in command[: command.index("-MMD")] if flag != "-fstack-usage"]
    return [*command, "-fsyntax-only", "-x", "c", "-"]


TABLE = """
#include "python/call/operator.h"
typedef struct args {{ size_t struct_size; char more[{bytes}]; }} args;
static const smla_py_param params[{rows}];
const smla_py_operator op = {{SMLA_PY_TABLE(params, args, args)}};
"""


@pytest.mark.parametrize(
    ("rows", "num_bytes", "fits"), [(32, 312, True), (33, 8, False), (1, 313, False)]
)
def test_tables_that_are_too_long_do_not_compile(rows, num_bytes, fits):
    command = compiler_of("csrc/python/call/run.c")
    done = subprocess.run(
        command,
        input=TABLE.format(rows=rows, bytes=num_bytes),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert (done.returncode == 0) == fits, done.stderr
    if not fits:
        assert "negative" in done.stderr, done.stderr


def test_the_wheel_has_every_package():
    """And nothing else of the tree, such as the benchmarks."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = settings["tool"]["setuptools"]["packages"]
    folders = [path.parent.relative_to(ROOT) for path in (ROOT / "sparse_mla").rglob("__init__.py")]
    assert sorted(packages) == sorted(".".join(folder.parts) for folder in folders)


def test_operators_are_tested_in_their_family_s_folder():
    """A developer runs the tests of his family, which is the file of csrc/python/ops that has the
    operator's table. They name the operator, and no other family's tests do so more often."""
    families = {
        name: path.stem.removeprefix("ops_")
        for path in (ROOT / "csrc" / "python" / "ops").glob("ops_*.c")
        for name in re.findall(r'\.name = "([a-z]\w+)"', path.read_text())
    }
    assert set(sparse_mla.ops.__all__) & set(families)
    texts = {
        family: "".join(
            path.read_text()
            for path in (ROOT / "tests" / family).glob("test_*.py")
            if not path.name.startswith("test_gpu_")
        )
        for family in families.values()
    }
    for name, family in families.items():
        counts = {x: len(re.findall(rf"\b{name}\b", text)) for x, text in texts.items()}
        assert 0 < counts[family] == max(counts.values()), (name, family, counts)


def fields_of_args(*types: str) -> set[tuple[str, str]]:
    """The fields of some types in the args of all operators, each with the operator's member of
    any_args."""
    cases = (ROOT / "tests" / "c" / "good_args.h").read_text()
    union = re.search(r"typedef union any_args \{(.*?)\n\}", cases, re.S)[1]
    structs = {
        name: fields
        for path in PUBLIC
        for fields, name in re.findall(
            r"typedef struct \w+ \{\n((?:    .*\n)*)\} (\w+);", path.read_text()
        )
    }
    return {
        (member, field)
        for struct, member in re.findall(r"(smla_\w+_args) (\w+);", union)
        for field in re.findall(rf"^    (?:{'|'.join(types)}) (\w+);", structs[struct], re.M)
    }


@pytest.mark.parametrize(
    ("row", "types", "least"),
    [
        (r"ROW\(\w+,\s*\"\w+\",\s*(\w+),\s*(\w+),", ["int64_t"], 60),
        (
            r"\n    SCALAR\(\w+,\s*\w+,\s*(\w+),\s*(\w+)(?:\.value)?\)",
            ["int32_t", "double", "smla_scale_arg"],
            70,
        ),
    ],
    ids=["sizes", "others"],
)
def test_every_number_of_c_is_tried(row, types, least):
    """A table of tests/c/numbers.h has a row for each number of an operator's args."""
    wanted = fields_of_args(*types)
    assert len(wanted) > least
    assert wanted == {*re.findall(row, (ROOT / "tests" / "c" / "numbers.h").read_text())}
