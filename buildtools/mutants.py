"""Puts one-line faults into the source, one at a time, and reports which of them no test notices.

    make mutants                                   what the last commit and later edits changed
    make mutants ARGS='csrc/core/rule.c sparse_mla/flash_mla.py'
    make mutants ARGS='all --count 60 --seed 3'    a sample of all of it
    make mutants ARGS='--again build/mutants/survived.txt --tests "test_cache*,test_errors.c"'

This works on a copy in build/mutants, without CUDA: CUDA's kernels are left out, and its host code
is tested by tests/c/test_cuda_*.c and tests/arrays/test_fake_gpu*.py. Each fault is built. The C
programs whose bytes it changes are run, and pytest is run if it changes the extension or the
package. The tests that caught an earlier fault of the same file go first, then the tests that share
a word with the file's name, then those of the file's family, then the short ones. A test that runs
far longer than it did without a fault counts as having noticed the fault.

A fault takes three lines in a list: `@ file function`, `- ` the code, `+ ` the fault. In
tests/equivalent_mutants.txt, the list of faults that no test can notice, a fourth line `= ` says
why the fault changes nothing. A fault that leaves every program's bytes alone needs no such
explanation. A fault is "not built", and does not count, where it does not compile, or where this
machine does not compile its file or cannot run it: integrations need their frameworks.
"""

import argparse
import fnmatch
import hashlib
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import faults

WORK = Path("build/mutants")
TREE = WORK / "tree"
SURVIVED = WORK / "survived.txt"
EXPLAINED = Path("tests/equivalent_mutants.txt")
SOURCES = (
    "csrc/**/*.[ch]",
    "sparse_mla/*.py",
    "sparse_mla/[!_]*/*.py",  # all folders but that of the demo
)
# The folder of a source file → the folder of its tests, where they have other names.
FAMILIES = {
    **dict.fromkeys(("backend", "dense", "paged", "steps", "v4"), "step"),
    "integrations": "frameworks",
}
COPIED = re.compile(r"(csrc|sparse_mla|shim|tests|buildtools|examples|docs|benchmarks)/|[^/]+$")
# The tests that load build/release/tests/fake_gpu.so.
FAKE_GPU = ("arrays/test_fake_gpu.py", "arrays/test_fake_gpu_kept.py")
FAKE_GPU += ("arrays/test_fake_gpu_tensors.py", "arrays/test_fake_gpu_builder.py")
FAKE_GPU += ("arrays/test_fake_gpu_v4.py", "calls/test_fake_gpu_failures.py")
OUTCOMES = ("caught", "survived", "explained", "not built")


def output_of(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


# ---- Which faults ------------------------------------------------------------------------------


def changed_lines():
    """File → the lines that the last commit, and edits since then, have changed."""
    lines, path = {}, None
    for line in output_of("git", "diff", "-U0", "--no-prefix", "HEAD~1").splitlines():
        if line.startswith("+++ "):
            path = line[4:]
        elif match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(match[1]), int(match[2] or 1)
            lines.setdefault(path, set()).update(range(first, first + count))
    return lines


def source_files():
    return sorted(str(path) for pattern in SOURCES for path in Path().glob(pattern))


def choose_faults(args):
    """The faults that the command line asks for, in the order of files and lines."""
    if args.again:
        wanted = set(read_list(args.again))
        chosen = [f for path in sorted({key[0] for key in wanted}) for f in faults_in(path)]
        return [fault for fault in chosen if fault.key in wanted]
    lines = {} if args.files else changed_lines()
    files = source_files() if args.files == ["all"] else args.files or source_files()
    chosen = [
        fault
        for path in files
        if args.files or path in lines
        for fault in faults_in(path)
        if args.files or lines[path].intersection(range(fault.line, fault.last_line + 1))
    ]
    if args.count is not None and args.count < len(chosen):
        sample = random.Random(args.seed).sample(range(len(chosen)), args.count)
        chosen = [chosen[i] for i in sorted(sample)]
    return chosen


def faults_in(path):
    return faults.find_faults(path, Path(path).read_text())


def read_list(path):
    """The keys of a list's faults, each with its explanation, or "" where it has none."""
    found, key = {}, ()
    for line in Path(path).read_text().splitlines():
        mark, _, rest = line.partition(" ")
        if mark == "@":
            key = (*rest.partition(" ")[::2],)
        elif mark in ("-", "+"):
            key = (*key, rest)
            found.update({key: ""} if mark == "+" else {})
        elif mark == "=":
            found[key] += rest
    return found


def first_failure():
    """The first failed test that output.txt names, or a few words where it names none."""
    text = (WORK / "output.txt").read_text(errors="replace")
    found = re.search(r"^(?:FAILED|ERROR) (tests/\S+)", text, re.MULTILINE)
    return found[1] if found else "a test that crashed or took too long"


def listed(fault):
    path, place, before, after = fault.key
    return f"@ {f'{path} {place}'.strip()}\n- {before}\n+ {after}\n"


# ---- The copy, its build and its tests ---------------------------------------------------------


def copy_sources():
    """Brings the copy up to date, writes only what differs, and returns each file's digest."""
    names = output_of("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    names = [name for name in names if COPIED.match(name) and Path(name).is_file()]
    digests = {}
    for name in sorted(names):
        content, target = Path(name).read_bytes(), TREE / name
        digests[name] = hashlib.sha256(content).hexdigest()
        if not target.is_file() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, target)
    for folder in ("csrc", "tests", "sparse_mla"):
        for path in (TREE / folder).rglob("*.[chp]*"):
            if path.is_file() and str(path.relative_to(TREE)) not in names:
                path.unlink()
    return digests


def frameworks_of(path):
    """What must be installed for the tests of a file to run."""
    if Path(path).parent.name != "integrations":
        return ()
    return ("vllm",) if "vllm" in Path(path).stem else ("torch", "jax", "transformers")


def is_installed(names):
    return all(importlib.util.find_spec(name) is not None for name in names)


class Suite:
    """The tests of the copy: how to build them, how long they take, which of them to run."""

    def __init__(self, pattern):
        patterns = pattern.split(",")

        def selected(folder, start):
            paths = sorted((TREE / folder).glob(start))
            return [
                p
                for p in paths
                if any(fnmatch.fnmatch(name, x) for name in (p.stem, p.name) for x in patterns)
            ]

        self.programs = [path.stem for path in selected("tests/c", "test_*.c")]
        # test_mutants.py compares the list of explained faults with the text of the source, not
        # with what the source does. vLLM for CPUs and SGLang have environments of their own.
        left_out = ("test_gpu_", "test_mutants", "test_vllm_cpu", "test_sglang")
        files = [p for p in selected("tests", "*/test_*.py") if not p.name.startswith(left_out)]
        self.files = [f"{path.parent.name}/{path.name}" for path in files]
        self.seconds = {}
        self.bytes = {}
        self.objects = set()
        self.idle = set()
        self.catchers = {}  # source path → the test files that caught one of its faults

    def run(self, *command, limit=None):
        """Whether a command succeeds within `limit` seconds; output.txt has what it printed."""
        environment = os.environ | {
            "SPARSE_MLA_CUDA": "off",
            "PYTHONSAFEPATH": "1",
            "PYTHONPATH": str(TREE.resolve()),
            "PYTHONDONTWRITEBYTECODE": "1",  # two faults in one second would share bytecode
            "SMLA_EXPECT_ROOT": str(TREE.resolve()),
            "SMLA_FIRST_FAILURE": "1",
        }
        with (WORK / "output.txt").open("w") as output:
            process = subprocess.Popen(
                list(map(str, command)),
                cwd=TREE,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that a test's child processes end with it
            )
            try:
                return process.wait(limit) == 0
            except subprocess.TimeoutExpired:
                return False
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, 9)
                    process.wait()

    def build(self):
        """Whether programs, library and extension compile; if so, the extension is put in place."""
        ninja = [sys.executable, "-m", "ninja", "-f", "build/release/build.ninja"]
        good = self.run(*ninja, "lib", "extension", "tests")
        if good:
            shutil.copy(TREE / "build/release/_C.abi3.so", TREE / "sparse_mla")
        return good

    def compiles(self):
        """Whether the copy compiles with its fault. The answer is also no where the fault changes
        nothing that this machine compiles, or only kernels that it has no instructions for."""
        if not self.build():
            return False
        text = (WORK / "output.txt").read_text()
        changed = self.cpu_objects() - self.objects
        is_idle = bool(changed) and {stem.rpartition("_")[2] for stem, _ in changed} <= self.idle
        return "no work to do" not in text and not (is_idle and "obj/tests/" not in text)

    def can_import(self, path):
        """Whether a file of Python runs here, after a build without the C fault before it."""
        return is_installed(frameworks_of(path)) and self.build()

    def cpu_objects(self):
        """The name and the digest of every object file of csrc/cpu."""
        paths = (TREE / "build/release/obj/csrc/cpu").rglob("*.o")
        return {(path.stem, hashlib.sha256(path.read_bytes()).digest()) for path in paths}

    def find_idle(self):
        """The CPU's instruction sets that this machine cannot run; objects' names end in them."""
        program = "import json, sparse_mla; print(json.dumps(sparse_mla.kernels()))"
        if not self.run(sys.executable, "-c", program):
            sys.exit(f"error: the copy's package does not work, see {WORK}/output.txt")
        rows = json.loads((WORK / "output.txt").read_text())
        return {row["arch"] for row in rows if row["device"] == "cpu" and not row["available"]}

    def built(self):
        """The digests of the programs, of the extension and of the library."""
        paths = [*(TREE / "build/release/tests").iterdir(), TREE / "build/release/_C.abi3.so"]
        paths += [TREE / "build/lib/libsparse_mla.so"]
        return {path.stem: hashlib.sha256(path.read_bytes()).digest() for path in paths}

    def run_programs(self, stems, limit=None):
        return all(self.run(f"build/release/tests/{stem}", limit=limit) for stem in stems)

    def run_pytest(self, names, *options, limit=None):
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options]
        return self.run(*command, *(f"tests/{name}" for name in names), limit=limit)

    def prepare(self, digests):
        """Builds the copy, checks that all tests pass, and measures their times. Where only tests
        have changed since the last time, only those tests are run."""
        setup = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        if not (self.run(*setup) and self.build()):
            sys.exit(f"error: the copy does not build, see {WORK}/output.txt")
        self.bytes = self.built()
        self.objects = self.cpu_objects()
        self.idle = self.find_idle()
        record = WORK / "baseline.json"
        paths = {f"tests/c/{stem}.c": stem for stem in self.programs}
        paths |= {f"tests/{name}": name for name in self.files}
        is_test = re.compile(r"tests/\w+/test_\w+\.(c|py)").fullmatch
        is_text = re.compile(r"docs/|.*\.(md|txt)$").match
        rest = {n: digest for n, digest in digests.items() if not (is_test(n) or is_text(n))}
        known = json.loads(record.read_text()) if record.exists() else {}
        if known.get("rest") != rest:
            known = {"rest": rest, "tests": {}, "seconds": {}}
        stale = {name for path, name in paths.items() if known["tests"].get(path) != digests[path]}
        self.seconds = known["seconds"]
        for stem in stale.intersection(self.programs):
            start = time.monotonic()
            if not self.run_programs([stem]):
                sys.exit(f"error: {stem} fails without a fault, see {WORK}/output.txt")
            self.seconds[stem] = time.monotonic() - start
        files = sorted(stale.intersection(self.files))
        if files and not self.run_pytest(files, "--junit-xml=../pytest.xml"):
            sys.exit(f"error: pytest fails without a fault, see {WORK}/output.txt")
        self.seconds.update(dict.fromkeys(files, 0.0))
        report = ElementTree.parse(WORK / "pytest.xml").iter("testcase") if files else ()
        for case in report:
            name = "/".join(case.get("classname").split(".")[1:3]) + ".py"
            self.seconds[name] += float(case.get("time"))
        known["tests"].update({path: digests[path] for path in paths})
        record.write_text(json.dumps(known))

    def judge(self, fault):
        """The outcome of a fault that the copy holds, and what caught or explains the fault."""
        is_python = fault.path.endswith(".py")
        if not (self.can_import(fault.path) if is_python else self.compiles()):
            return "not built", ""
        changed = {stem for stem, digest in self.built().items() if self.bytes[stem] != digest}
        if not is_python and not changed:
            return "explained", "same bytes"
        has_package = is_python or not changed.isdisjoint(("_C.abi3", "libsparse_mla"))
        on_fake_gpu = [name for name in self.files if name in FAKE_GPU and "fake_gpu" in changed]
        files = self.files if has_package else on_fake_gpu
        for names in self.in_rounds(fault.path, changed.intersection(self.programs), files):
            limit = 30 + 3 * sum(self.seconds[name] for name in names)
            is_pytest = names[0].endswith(".py")
            passed = (self.run_pytest if is_pytest else self.run_programs)(names, limit=limit)
            if not passed and is_pytest:
                by = first_failure()
                if match := re.match(r"tests/(\w+/\w+\.py)", by):
                    self.catchers.setdefault(fault.path, set()).add(match[1])
                return "caught", by
            if not passed:
                return "caught", "a C program"
        return "survived", ""

    def in_rounds(self, path, programs, files):
        """The tests in the order to run them, as lists of either C programs or pytest files."""
        words = set(Path(path).stem.strip("_").split("_"))

        def is_close(name):
            return bool(words & set(Path(name).stem.split("_")))

        programs = sorted(programs, key=self.seconds.get)
        files = sorted(files, key=self.seconds.get)
        quick = [name for name in programs if is_close(name) or self.seconds[name] < 1]
        known = [name for name in files if name in self.catchers.get(path, ())]
        close = [name for name in files if is_close(name) and name not in known]
        slow = [name for name in programs if name not in quick]
        folder = Path(path).parent.name
        family = [
            name
            for name in files
            if name not in known + close and Path(name).parent.name == FAMILIES.get(folder, folder)
        ]
        rest = [name for name in files if name not in known + close + family]
        return [names for names in (quick, known, close, slow, family, rest) if names]


def try_fault(suite, fault):
    """Puts the fault into the copy, judges it and takes it out again."""
    target = TREE / fault.path
    text = target.read_text()
    target.write_text(fault.apply(text))
    try:
        return suite.judge(fault)
    finally:
        target.write_text(text)


# ---- The report --------------------------------------------------------------------------------


def table(results):
    """One line per file: how many faults, and what became of them."""
    counts = Counter((fault.path, outcome) for fault, outcome in results)
    files = sorted({path for path, _ in counts})
    width = max(map(len, [*files, "all"]))
    lines = [f"{'file':{width}}  faults" + "".join(f"  {outcome:>9}" for outcome in OUTCOMES)]
    for name in [*files, "all"]:
        row = [
            sum(
                n for (path, what), n in counts.items() if name in (path, "all") and what == outcome
            )
            for outcome in OUTCOMES
        ]
        faults_of_row = sum(row[:3])  # a fault that does not compile does not count
        lines.append(f"{name:{width}}  {faults_of_row:6}" + "".join(f"  {n:9}" for n in row))
    return "\n".join(lines)


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", help="source files, or `all`; else what changed")
    parser.add_argument("--count", type=int, help="how many faults, sampled")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--again", metavar="FILE", help="the faults of a list, and no others")
    parser.add_argument("--tests", default="*", metavar="PATTERN,…", help="run these tests only")
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    return parser.parse_args(arguments)


def main(arguments=None):
    args = parse(arguments)
    chosen = choose_faults(args)
    if args.list or not chosen:
        print(*map(listed, chosen), sep="\n")
        print(f"{len(chosen)} faults")
        return 0
    explanations = read_list(EXPLAINED)
    TREE.mkdir(parents=True, exist_ok=True)
    digests = copy_sources()
    suite = Suite(args.tests)
    suite.prepare(digests)
    results = []
    with SURVIVED.open("w") as survivors:
        for i, fault in enumerate(chosen, 1):
            start = time.monotonic()
            known = fault.key in explanations
            outcome, by = ("explained", "") if known else try_fault(suite, fault)
            results.append((fault, outcome))
            seconds = time.monotonic() - start
            place = f"{fault.path}:{fault.line}"
            print(f"{i}/{len(chosen)} {place} {outcome} {seconds:.0f} s {by}", flush=True)
            if outcome == "survived":
                print(listed(fault), file=survivors, flush=True)
    print(table(results), SURVIVED.read_text(), sep="\n\n", end="")
    return int(any(outcome == "survived" for _, outcome in results))


if __name__ == "__main__":
    sys.exit(main())
