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
ISA = (ROOT / "csrc/cpu/isa.c").read_text()
ROWS = {row[1]: row[0] for row in re.finditer(r'\{\.name = "(\w+)",.*?\}', ISA, re.DOTALL)}

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


@pytest.mark.parametrize("name", ROWS)
def test_a_row_names_kernels_of_its_own_set(sets, name):
    tables = re.findall(r"&smla_\w+?_(\w+)", ROWS[name])
    assert len(tables) == 9
    assert [table for table in tables if not sets.includes(name, table)] == []
    assert f".is_supported = support_{name}," in ROWS[name]
    assert f'"attention_{name}.c"' in ROWS[name]


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
    "x_avx2": KERNEL,
    "x_avx512": KERNEL,
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
