"""Code of an instruction set runs only where csrc/cpu/isa.c has chosen it: what isa.c's rows name,
and what buildtools/instruction_sets.py and smaller_cpu.py find in small objects made here."""

from __future__ import annotations

import importlib
import platform
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILDTOOLS = ROOT / "buildtools"
CPU = ROOT / "csrc/cpu"
ISA = (CPU / "isa.c").read_text()
# A row names a list of instances: {NAMES(avx2), SMLA_AVX2_KERNELS(USE)}.
ROWS = {
    row[1]: row[2] for row in re.finditer(r"\{NAMES\((\w+)\),.*SMLA_(\w+)_KERNELS\(USE\)\}", ISA)
}
# A list takes another as it is, and then adds to it or replaces some: list -> that list, pairs.
LISTS = {
    name: (other, re.findall(r"\bX\((\w+), (\w+)\)", body))
    for name, other, body in re.findall(
        r"^#define SMLA_(\w+)_KERNELS\(X\) +\\\n"
        r"(?: +SMLA_(\w+)_KERNELS\(X\) +\\\n)?((?:.*\\\n)*.*)",
        (CPU / "isa/instances.h").read_text(),
        re.MULTILINE,
    )
}

needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None or shutil.which("readelf") is None or platform.machine() != "x86_64",
    reason="needs cc, readelf and x86-64",
)


@pytest.fixture
def tool(monkeypatch):
    """Loads a module of buildtools/ as `python buildtools/NAME.py` does."""
    monkeypatch.syspath_prepend(str(BUILDTOOLS))
    return importlib.import_module


@pytest.fixture
def sets(tool):
    return tool("instruction_sets")


# --- isa.c ---------------------------------------------------------------------------------------


def test_every_set_has_a_row(sets):
    assert set(ROWS) == {*sets.FLAGS, "base"}


def test_every_set_has_a_list_and_a_header():
    assert [name.upper() for name in ROWS] == list(ROWS.values())
    assert set(LISTS) == set(ROWS.values())
    assert {path.stem for path in (CPU / "isa").iterdir()} == {*ROWS, "instances"}


@pytest.mark.parametrize("name", ROWS)
def test_a_list_has_instances_of_its_own_set_and_follows_a_smaller_one(sets, name):
    smaller, pairs = LISTS[ROWS[name]]
    assert {isa for _, isa in pairs} == {name}
    assert bool(smaller) == (name != "base")
    if smaller:
        assert sets.includes(name, smaller.lower()) and smaller != ROWS[name]


def test_every_kernel_file_has_instances(tool):
    """A row of the base set has all kernels, and other rows take its."""
    files = {path.stem.removesuffix("_kernel") for path in CPU.glob("*/*_kernel.c")}
    pairs = [pair for _, pairs in LISTS.values() for pair in pairs]
    assert len(pairs) == len(set(pairs))
    assert {kernel for kernel, _ in LISTS["BASE"][1]} == {kernel for kernel, _ in pairs} == files
    instances = tool("graph").instances()
    assert {(kernel, isa) for kernel, found in instances.items() for isa in found} == set(pairs)


@needs_compiler
def test_the_build_has_the_instances_of_this_machine_and_no_others(tool):
    graph = tool("graph")
    files = CPU.glob("*/*_kernel.c")
    names = {graph.object_of(file, isa).stem for file in files for isa in graph.sets_of(file)}
    mine = {"base", *graph.FLAGS_BY_MACHINE["x86_64"]}
    pairs = [pair for _, pairs in LISTS.values() for pair in pairs]
    assert names == {f"{kernel}_{isa}" for kernel, isa in pairs if isa in mine}
    assert "mqa_amx" in names
    assert names.isdisjoint({"mqa_neon", "cache_amx", "mqa_kernel", "mqa_"})


def test_a_row_is_reached_by_its_own_question_and_name():
    assert re.search(r"\.name = #set, \.is_supported = support_##set,", ISA)
    assert '"mqa_" #set ".c"' in ISA


def test_isa_c_calls_nothing_of_a_row_but_its_questions():
    called = set(re.findall(r"(?:->|\.)(\w+)\(", ISA))
    assert called == {"is_supported", "is_slow"}


def questions_of(name: str) -> set[str]:
    """What support_NAME asks the CPU for, with the functions that it calls."""
    body = re.search(rf"^support_{name}\(void\)\n\{{(.*?)^\}}", ISA, re.DOTALL | re.MULTILINE)[1]
    asked = set(re.findall(r'__builtin_cpu_supports\("(\w+)"\)', body))
    return asked.union(*map(questions_of, re.findall(r"support_(\w+)\(\)", body)))


def test_a_set_is_asked_for_all_that_its_code_may_use(sets):
    # AVX2 comes with AVX-512, and F16C with AVX2; AMX is asked for by its bits.
    elsewhere = {"avx2", "f16c", "amx-tile", "amx-bf16"}
    asked_for_something = 0
    for name, flags in sets.FLAGS.items():
        wanted = {flag[2:] for flag in flags if re.match("-m(?!arch)", flag)}
        assert wanted - questions_of(name) <= elsewhere, name
        asked_for_something += bool(wanted)
    assert asked_for_something >= 4


# --- the objects ---------------------------------------------------------------------------------

TABLE = "typedef struct { int (*f)(void); } table;\n"
KERNEL = TABLE + "static int f(void) { return 1; }\nconst table smla_x_SET = {f};\n"
KERNEL += 'static const char isa_SET[] __attribute__((used)) = "";\n'
TABLES = TABLE + "extern const table smla_x_avx512, smla_x_avx2;\n"
CHOICE = TABLES + "static const table *const rows[] = {&smla_x_avx512, &smla_x_avx2};\n"
CHOICE += "const table *choose(int i) { return rows[i]; }\n"
GOOD = {
    "isa": CHOICE,
    "x_avx2": KERNEL,
    "x_avx512": KERNEL,
    "x": TABLE + "const table *choose(int i);\nint run(void) { return choose(1)->f(); }\n",
}


def compile_all(folder: Path, files: dict[str, str]) -> Path:
    objects = folder / "obj"
    objects.mkdir()
    for name, text in files.items():
        source = folder / f"{name}.c"
        source.write_text(text.replace("SET", name.rpartition("_")[2]))
        command = ["cc", "-O1", "-g", "-fPIC", "-c", source, "-o", objects / f"{name}.o"]
        subprocess.run(command, check=True)
    return folder


@needs_compiler
def test_objects_that_the_choice_alone_joins(sets, tmp_path, capsys):
    assert sets.main(compile_all(tmp_path, GOOD)) == 0
    assert capsys.readouterr().out == "Code for avx2, avx512 is reached through isa.c alone\n"


@needs_compiler
@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        # a call that isa.c has not chosen; the same from data, and from a smaller set
        ("x", f"{TABLES}int run(void) {{ return smla_x_avx2.f(); }}", "refers to `smla_x_avx2`"),
        (
            "y",
            f"{TABLES}const table *const own[] = {{&smla_x_avx512}};",
            "refers to `smla_x_avx512`",
        ),
        (
            "y_avx2",
            f"{TABLES}static int g(void) {{ return smla_x_avx512.f(); }}\nconst table t = {{g}};",
            "refers to `smla_x_avx512`, which is for avx512",
        ),
        # isa.c's code names a row, or its rows are everyone's
        ("isa", f"{CHOICE}int own(void) {{ return smla_x_avx2.f(); }}", ".text refers to"),
        ("isa", CHOICE.replace("static ", ""), "`rows` must be static"),
        # functions that the linker may give to other objects
        ("y_avx2", "int shared(int x) { return x + 1; }", "`shared` must be static"),
        ("y_avx2", "__attribute__((weak)) int shared(int x) { return x; }", "`shared` must be"),
        ("y_avx2", "extern inline int shared(int x) { return x; }", "`shared` must be static"),
    ],
)
def test_objects_with_another_way_to_a_set(sets, tmp_path, capsys, file, text, fault):
    assert sets.main(compile_all(tmp_path, {**GOOD, file: text})) == 1
    said = capsys.readouterr().out
    assert said.startswith("error: ")
    assert fault in said


@needs_compiler
def test_a_larger_set_may_call_a_smaller_one(sets, tmp_path):
    text = f"{TABLES}static int g(void) {{ return smla_x_avx512.f(); }}\nconst table t = {{g}};"
    assert sets.main(compile_all(tmp_path, {**GOOD, "y_avx512bf16": text})) == 0


@needs_compiler
def test_a_build_without_objects_of_sets(sets, tmp_path, capsys):
    assert sets.main(compile_all(tmp_path, {"x": "int x;"})) == 1
    assert "no objects of instruction sets" in capsys.readouterr().out


# --- smaller_cpu.py ------------------------------------------------------------------------------

ANSWERS = "".join(
    f"static int support_{name}(void) {{ return 1; }}\n"
    for name in ("amx", "avx512bf16", "avx512", "avx2")
)
PROGRAM = {
    "isa": f"{CHOICE}{ANSWERS}int (*const has[])(void) = {{support_avx512, support_avx2, "
    "support_amx, support_avx512bf16};\n",
    **{f"x_{name}": KERNEL for name in ("amx", "avx512bf16", "avx512", "avx2")},
    "main": TABLE + "#include <stdio.h>\nextern int (*const has[])(void);\n"
    "const table *choose(int i);\n"
    "int main(int argc, char **argv) { int i = argc > 1 ? argv[1][0] - '0' : 0;\n"
    'printf("%d%d\\n", has[0](), has[1]()); fflush(stdout); return choose(i)->f() - 1; }\n',
}


def link(build: Path) -> Path:
    programs = build / "programs"
    programs.mkdir()
    subprocess.run(["cc", *(build / "obj").iterdir(), "-o", programs / "run"], check=True)
    return programs


@needs_compiler
@pytest.mark.parametrize(("cpu", "answers", "works"), [("base", "00", ""), ("avx2", "01", "1")])
def test_a_program_as_on_a_smaller_cpu(tool, tmp_path, cpu, answers, works):
    programs = link(compile_all(tmp_path, PROGRAM))
    tool("smaller_cpu").main(cpu, programs, tmp_path / "copies")
    for row in "01":  # avx512, avx2
        assert subprocess.run([programs / "run", row]).returncode == 0
        copy = subprocess.run([tmp_path / "copies/run", row], capture_output=True, text=True)
        assert copy.stdout == f"{answers}\n"
        assert copy.returncode == (0 if row in works else -signal.SIGTRAP)


@needs_compiler
def test_a_program_whose_questions_have_other_names(tool, tmp_path):
    other = PROGRAM["isa"].replace("support_amx", "supports_amx")
    programs = link(compile_all(tmp_path, {**PROGRAM, "isa": other}))
    with pytest.raises(SystemExit, match=r"no support_NAME for \{'amx'\}"):
        tool("smaller_cpu").main("avx2", programs, tmp_path / "copies")


@needs_compiler
def test_a_program_whose_objects_do_not_tell_their_set(tool, tmp_path):
    """Without the symbol of csrc/cpu/isa/*.h the copy would keep the code of a set."""
    silent = KERNEL.replace("isa_SET", "isa")
    programs = link(compile_all(tmp_path, {**PROGRAM, "x_avx512": silent}))
    with pytest.raises(SystemExit, match=r"no object has a symbol isa_NAME for \{'avx512'\}"):
        tool("smaller_cpu").main("avx2", programs, tmp_path / "copies")
