"""buildtools/mutants.py, which puts faults into the source: which faults it finds, and which tests
it runs for a fault."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[2] / "buildtools"))
import faults
import mutants

sys.path.pop()


def changes(text: str, path: str = "csrc/x.c") -> set[tuple[str, str]]:
    """-> for every fault of the text, its line before and after the fault."""
    text = textwrap.dedent(text)
    found = faults.find_faults(path, text)
    for fault in found:
        assert fault.apply(text) != text
        assert fault.before in " ".join(text.split())
        assert fault.after in " ".join(fault.apply(text).split())
    return {(fault.before, fault.after) for fault in found}


def python_changes(text: str) -> set[tuple[str, str]]:
    return changes(text, "sparse_mla/x.py")


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("return a < b;", {"return a <= b;"}),
        ("return a >= b;", {"return a > b;"}),
        ("return a == b;", {"return a != b;"}),
        ("return a + b;", {"return a - b;"}),
        ("return f(-a);", set()),
        ("return -a;", set()),
        ("return a << b;", set()),
        ("return a->b;", set()),
        ("return a && b;", {"return a || b;"}),
        ("return 7u;", {"return 8u;"}),
        ("return 0x0Fu;", {"return 0x10u;"}),
        ("return 1.5f * x;", set()),
        ("if (a) {", {"if (!(a)) {"}),
        ("while (f(a)) {", {"while (!(f(a))) {"}),
        ("return fmaxf(a, b);", {"return fminf(a, b);"}),
        ("return min_int64(a, b);", {"return max_int64(a, b);"}),
        ("return minus(a, b);", set()),
        ("return a < b ? a : b;", {"return a > b ? a : b;"}),
        ("return p->a < q ? q : p->a;", {"return p->a > q ? q : p->a;"}),
        ("return a < b ? c : a;", {"return a <= b ? c : a;"}),
        ("a = b;", {";"}),
        ("p->a[i] += b;", {";", "p->a[i] -= b;"}),
        ("*p = b;", {";"}),
        ("i++;", {";"}),
        ("f(a);", {";"}),
        ("int a = b;", set()),
        ("type *a = b;", set()),
        ("const int a = b;", set()),
        ("assert(a);", set()),
        ("/* a < b + 1 */", set()),
        ("// a < b + 1", set()),
        ('puts("a < b + 1");', {";"}),
        ("return ' ' + '<';", {"return ' ' - '<';"}),
        ("g(SMLA_DTYPE_BF16);", {";", "g((SMLA_DTYPE_BF16 | SMLA_DTYPE_FP32));"}),
        ("return a == SMLA_DTYPE_BF16;", {"return a != SMLA_DTYPE_BF16;"}),
        ("return SMLA_RULE_OUTPUT;", {"return 0;"}),
    ],
)
def test_faults_of_a_c_line(line, wanted):
    close = "}" * line.count("{")
    found = changes(f"int\nf(void)\n{{\n    {line}\n    {close}\n}}\n")
    assert found == {(line, after) for after in wanted}


def test_rules_become_weaker():
    line = "return require(&(r){.shape = {SMLA_ANY, k}}) + smla_require_2d(c, n, x, d, f(y), z, g);"
    found = {after for _, after in changes(f"int\nf(void)\n{{\n    {line}\n}}\n")}
    sizes = "{SMLA_ANY, k}", "{SMLA_ANY, SMLA_ANY}"
    assert {line.replace(*x) for x in (sizes, ("f(y)", "SMLA_ANY"), ("z", "SMLA_ANY"))} <= found
    assert len(found) == 4  # the fourth changes the sign


def test_a_preprocessor_line_is_left_alone():
    assert (
        changes("#define N (A + 1) /* two\nlines */\n#if A < 2 && \\\n    B > 1\n#endif\n") == set()
    )


def test_a_return_is_removed_where_another_follows():
    code = """
        int
        f(int a)
        {
            if (a)
                return b;
            if (c) {
                return smla_fail(error,
                                 text);
            }
            for (;;)
                g();
            return d;
        }
        """
    removed = {before for before, after in changes(code) if after == ";"}
    assert removed == {"return smla_fail(error, text);", "g();"}


def test_a_fault_knows_its_place():
    text = "enum { N = 1 };\n\nstatic int\nf(void)\n{\n    return 1;\n}\n\n"
    text += "int\ng(void)\n{\n    return 2;\n}\n"
    found = faults.find_faults("csrc/x.c", text)
    assert [(fault.place, fault.line) for fault in found] == [("", 1), ("f", 6), ("g", 12)]
    moved = faults.find_faults("csrc/x.c", "int x;\n" + text)
    assert [fault.key for fault in moved] == [fault.key for fault in found]
    text = "class A:\n    def f(self):\n        return 1\n\n    x = 2\n"
    found = faults.find_faults("sparse_mla/x.py", text)
    assert {(fault.place, fault.line) for fault in found} == {("f", 3), ("A", 5)}


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("x < y", {"x <= y"}),
        ("x < y < z", {"x <= y < z", "x < y <= z"}),
        ("f(x) == (y)", {"f(x) != (y)"}),
        ("x is None", {"x is not None"}),
        ("x not in y", {"x in y"}),
        ("x and y or z", {"x or y or z", "x and y and z"}),
        ("'é' + x - y", {"'é' - x - y", "'é' + x + y"}),
        ("x[3]", {"x[4]"}),
        ("True", set()),
        ("'a < 1'", set()),
        ("f'{x < 1}'", set()),
        ("a if b else c", {"a if not (b) else c"}),
        ("min(x, y)", {"max(x, y)"}),
        ("x.min(y)", set()),
    ],
)
def test_faults_of_a_python_expression(line, wanted):
    found = python_changes(
        f"def f(a: 'x < 1' = None) -> 'y < 1':\n    '''z < 1'''\n    return {line}\n"
    )
    found = {after for _, after in found if after != "pass"}
    assert found == {f"return {after}" for after in wanted}


def test_faults_of_python_statements():
    code = """
        \"\"\"1 < 2\"\"\"
        if typing.TYPE_CHECKING and x < 1:
            import x
        def f(x):
            \"\"\"3 < 4\"\"\"
            # 5 < 6
            g(x)
            x.y = z
            while x:
                raise ValueError(
                    x)
            return x
        """
    assert python_changes(code) == {
        ("g(x)", "pass"),
        ("x.y = z", "pass"),
        ("while x:", "while not (x):"),
        ("raise ValueError( x)", "pass"),
        ("return x", "pass"),
    }


def test_lists_are_read_as_they_are_written(tmp_path):
    one, other = faults.find_faults(
        "csrc/x.c", "enum { A = 1 };\nint\nf(void)\n{\n    return 2;\n}\n"
    )
    file = tmp_path / "list"
    file.write_text(
        "What this is.\n\n" + mutants.listed(one) + "\n" + mutants.listed(other) + "= Why.\n"
    )
    assert mutants.read_list(file) == {one.key: "", other.key: "Why."}


def arguments(*words: str):
    return mutants.parse(list(words))


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project of two files whose last commit changed line 2 of one."""
    for name, text in (
        ("csrc/a.c", "int a = 1;\nint b = 2;\nint c = 3;\n"),
        ("csrc/b.c", "int d = 4;\n"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mutants, "changed_lines", lambda: {"csrc/a.c": {2}, "README.md": {1}})
    return tmp_path


def test_which_faults_are_chosen(project):
    def chosen(*words):
        return [fault.before for fault in mutants.choose_faults(arguments(*words))]

    everything = ["int a = 1;", "int b = 2;", "int c = 3;", "int d = 4;"]
    assert chosen() == ["int b = 2;"]
    assert chosen("all") == everything
    assert chosen("csrc/b.c") == everything[3:]
    assert chosen("all", "--count", "9") == everything
    samples = {tuple(chosen("all", "--count", "2", "--seed", str(seed))) for seed in range(20)}
    assert all(len(sample) == 2 and list(sample) == sorted(sample) for sample in samples)
    assert len(samples) > 1
    assert chosen("all", "--count", "2", "--seed", "5") == chosen(
        "all", "--count", "2", "--seed", "5"
    )
    (project / "list").write_text("".join(map(mutants.listed, mutants.choose_faults(arguments()))))
    (project / "csrc/a.c").write_text("\n\nint b = 2;\nint b = 3;\n")
    assert chosen("--again", "list") == ["int b = 2;"]


def test_changed_lines(monkeypatch):
    diff = "+++ csrc/a.c\n@@ -3,0 +4,2 @@ f\n+x\n+y\n@@ -9 +11 @@\n-z\n+z\n"
    diff += "+++ b.py\n@@ -1,2 +0,0 @@\n-z\n"
    monkeypatch.setattr(mutants, "output_of", lambda *_: diff)
    assert mutants.changed_lines() == {"csrc/a.c": {4, 5, 11}, "b.py": set()}


class FakeSuite(mutants.Suite):
    """A suite that compiles nothing. A fault changes the bytes of the programs `changed`, and the
    tests `breaks` fail."""

    def __init__(self, changed=(), breaks=(), builds=True):
        self.programs = ["test_plan", "test_slow", "test_quick"]
        self.files = ["step/test_rest.py", "step/test_plan.py"]
        self.seconds = {"test_plan": 9, "test_slow": 8, "test_quick": 0.1}
        self.seconds |= {"step/test_rest.py": 1, "step/test_plan.py": 5}
        self.bytes = dict.fromkeys([*self.programs, "_C.abi3", "libsparse_mla"], 0)
        self.catchers = {}
        self.changed, self.breaks, self.builds, self.ran = changed, breaks, builds, []

    def compiles(self):
        return self.builds

    def build(self):
        self.changed = ()  # the source has no fault of C
        return True

    def built(self):
        return self.bytes | dict.fromkeys(self.changed, 1)

    def run_programs(self, names, limit):
        self.ran += names
        return not set(names).intersection(self.breaks)

    run_pytest = run_programs


EVERYTHING = ("test_plan", "test_slow", "test_quick", "_C.abi3")


@pytest.mark.parametrize(
    ("path", "suite", "outcome", "ran"),
    [
        ("csrc/plan.c", FakeSuite(builds=False), "not built", ""),
        ("csrc/plan.c", FakeSuite(), "explained", ""),
        ("csrc/plan.c", FakeSuite(["test_slow"]), "survived", "test_slow"),
        ("csrc/plan.c", FakeSuite(["_C.abi3"]), "survived", "step/test_plan.py step/test_rest.py"),
        ("csrc/plan.c", FakeSuite(EVERYTHING, ["test_plan"]), "caught", "test_quick test_plan"),
        (
            "csrc/plan.c",
            FakeSuite(EVERYTHING, ["step/test_rest.py"]),
            "caught",
            "test_quick test_plan step/test_plan.py test_slow step/test_rest.py",
        ),
        (
            "sparse_mla/_plan.py",
            FakeSuite(builds=False),
            "survived",
            "step/test_plan.py step/test_rest.py",
        ),
        ("sparse_mla/ops.py", FakeSuite(), "survived", "step/test_rest.py step/test_plan.py"),
    ],
)
def test_the_tests_of_a_fault(path, suite, outcome, ran, monkeypatch):
    monkeypatch.setattr(mutants, "first_failure", lambda: "a test")
    found, by = suite.judge(SimpleNamespace(path=path))
    assert found == outcome
    assert (by in ("a test", "a C program")) == (outcome == "caught")
    assert " ".join(suite.ran) == ran


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("sparse_mla/steps/common.py", "step/test_rest.py step/test_plan.py calls/test_other.py"),
        ("sparse_mla/dense/layer.py", "step/test_rest.py step/test_plan.py calls/test_other.py"),
        ("sparse_mla/steps/plan.py", "step/test_plan.py step/test_rest.py calls/test_other.py"),
        ("csrc/cpu/calls/x.c", "calls/test_other.py step/test_rest.py step/test_plan.py"),
        ("csrc/cpu/x.c", "calls/test_other.py step/test_rest.py step/test_plan.py"),
    ],
)
def test_the_tests_of_a_file_s_family_go_before_the_others(path, wanted):
    suite = FakeSuite()
    suite.files.append("calls/test_other.py")
    suite.seconds["calls/test_other.py"] = 0.5
    assert [name for names in suite.in_rounds(path, [], suite.files) for name in names] == (
        wanted.split()
    )


def test_every_file_of_the_package_has_faults_and_a_family():
    """The demo is left out: its command is tested, not its numbers."""
    root = Path(__file__).parents[2]
    package = {path.relative_to(root) for path in (root / "sparse_mla").rglob("*.py")}
    with contextlib.chdir(root):
        found = set(map(Path, mutants.source_files()))
    left_out = {path.parts[1] for path in package - found}
    assert left_out == {"_demo"}
    folders = {path.parent.name for path in found if path.parts[0] == "sparse_mla"}
    tests = {path.name for path in (root / "tests").iterdir()}
    assert {"dense", "steps", "integrations", "backend", "v4"} <= folders
    assert {mutants.FAMILIES.get(name) for name in folders - {"sparse_mla", "ops"}} <= tests
    assert set(mutants.FAMILIES) <= folders


@pytest.mark.parametrize(
    ("path", "installed", "outcome"),
    [
        ("sparse_mla/integrations/torch.py", ("torch", "jax", "transformers"), "survived"),
        ("sparse_mla/integrations/_schema.py", ("torch", "transformers"), "not built"),
        ("sparse_mla/integrations/vllm.py", ("torch", "jax", "transformers"), "not built"),
        ("sparse_mla/integrations/vllm.py", ("vllm",), "survived"),
        ("sparse_mla/dense/layer.py", (), "survived"),
    ],
)
def test_faults_of_an_integration_need_its_framework(path, installed, outcome, monkeypatch):
    monkeypatch.setattr(
        mutants.importlib.util, "find_spec", lambda name: name if name in installed else None
    )
    assert FakeSuite().judge(SimpleNamespace(path=path))[0] == outcome


def test_a_fault_of_python_runs_without_the_fault_of_c_before_it():
    suite = FakeSuite(["_C.abi3"])
    assert suite.judge(SimpleNamespace(path="sparse_mla/dense/layer.py"))[0] == "survived"
    assert not suite.changed


def test_who_caught_a_fault_of_the_file_goes_first(monkeypatch):
    monkeypatch.setattr(mutants, "first_failure", lambda: "tests/step/test_rest.py::test_a[b]")
    suite = FakeSuite(["_C.abi3"], ["step/test_rest.py"])
    for ran in (["step/test_plan.py", "step/test_rest.py"], ["step/test_rest.py"]):
        suite.ran.clear()
        assert suite.judge(SimpleNamespace(path="csrc/plan.c"))[0] == "caught"
        assert suite.ran == ran
    suite.judge(SimpleNamespace(path="csrc/other.c"))
    assert suite.ran[1:] == ["step/test_rest.py", "step/test_plan.py"], "of that file alone"


@pytest.mark.parametrize(
    ("changed", "output", "is_good", "compiles"),
    [
        ([], "cc x.o", True, True),
        (["mqa_amx"], "cc x.o", True, False),
        (["mqa_amx", "mha_amx"], "cc x.o", True, False),
        (["mqa_amx", "mqa_avx2"], "cc x.o", True, True),
        (["mqa_avx2"], "cc x.o", True, True),
        (["mqa_avx2"], "cc x.o", False, False),
        (["mqa_amx"], "cc build/release/obj/tests/c/test_cache.o", True, True),
        ([], "ninja: no work to do.", True, False),
    ],
)
def test_what_cannot_run_here_is_no_fault(
    changed, output, is_good, compiles, tmp_path, monkeypatch
):
    """A fault is none where it changes only kernels that this machine cannot run. A kernel that was
    compiled again has changed where its object file has other bytes."""
    monkeypatch.setattr(mutants, "WORK", tmp_path)
    monkeypatch.setattr(mutants, "TREE", tmp_path)
    (tmp_path / "output.txt").write_text(f"[1/9] {output}\n")
    folder = tmp_path / "build/release/obj/csrc/cpu/attention"
    folder.mkdir(parents=True)
    for stem in ("mqa_amx", "mha_amx", "mqa_avx2"):
        (folder / f"{stem}.o").write_text("before")
    suite = mutants.Suite("*")
    suite.idle = {"amx"}
    suite.objects = suite.cpu_objects()
    assert len(suite.objects) == 3
    for stem in changed:
        (folder / f"{stem}.o").write_text("after")
    suite.build = lambda: is_good
    assert suite.compiles() == compiles


def test_a_fault_is_taken_out_again(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "TREE", tmp_path)
    source = tmp_path / "x.py"
    source.write_text("x = 1\n")
    (fault,) = (f for f in faults.find_faults("x.py", "x = 1\n") if f.new == "2")
    seen = []

    def judge(_):
        seen.append(source.read_text())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mutants.try_fault(SimpleNamespace(judge=judge), fault)
    assert seen == ["x = 2\n"]
    assert source.read_text() == "x = 1\n"


def test_a_command_that_takes_too_long_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "TREE", tmp_path)
    monkeypatch.setattr(mutants, "WORK", tmp_path)
    suite = FakeSuite()
    assert suite.run("sh", "-c", "echo $SPARSE_MLA_CUDA", limit=60)
    assert (tmp_path / "output.txt").read_text() == "off\n"
    assert not suite.run("false")
    assert not suite.run("sleep", "60", limit=0.05)


@pytest.mark.parametrize(
    ("printed", "test"),
    [
        (
            "..F\nFAILED tests/test_a.py::test_b[c-d] - AssertionError\nFAILED tests/x.py\n",
            "tests/test_a.py::test_b[c-d]",
        ),
        ("ERROR tests/test_a.py - ImportError\n", "tests/test_a.py"),
        ("Segmentation fault\n", "a test that crashed or took too long"),
    ],
)
def test_what_a_fault_is_caught_by(printed, test, tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "WORK", tmp_path)
    (tmp_path / "output.txt").write_text(printed)
    assert mutants.first_failure() == test


def test_the_table_counts_what_compiles():
    results = [
        (SimpleNamespace(path=path), outcome)
        for path, outcome in (
            *(("csrc/a.c", outcome) for outcome in mutants.OUTCOMES),
            ("csrc/a.c", "caught"),
            ("b.py", "survived"),
        )
    ]
    lines = [line.split() for line in mutants.table(results).splitlines()]
    assert lines[1:] == [
        ["b.py", "1", "0", "1", "0", "0"],
        ["csrc/a.c", "4", "2", "1", "1", "1"],
        ["all", "5", "2", "2", "1", "1"],
    ]


def test_explanations_are_of_faults_that_exist():
    root = Path(__file__).parents[2]
    explained = mutants.read_list(root / mutants.EXPLAINED)
    found = {
        fault.key
        for path in {key[0] for key in explained}
        for fault in faults.find_faults(path, (root / path).read_text())
    }
    assert set(explained) <= found, set(explained) - found
    assert all(explained.values()), "each has a reason"
