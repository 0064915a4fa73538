"""Runs the GPU tests marked `sanitizer` under compute-sanitizer's tools, in several processes.

    make memcheck                                  one tool; also racecheck, synccheck
    python buildtools/sanitizers.py                all three at once, on the extension as it is
    python buildtools/sanitizers.py racecheck --processes 2 -k top_k

Each tool gets --processes processes, which share its tests; pytest's options choose the tests. A
tool slows a test down by ten times and more, mostly on the host, so processes help as long as there
are cores. With six each on 16 cores and an H100, memcheck took 45 s, synccheck 65 s and racecheck
110 s, all at once.
COMPUTE_SANITIZER names another program than the one in the PATH.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = {
    # The tests themselves check what CUDA calls return; some calls return errors on purpose.
    "memcheck": ["--report-api-errors", "no"],
    "racecheck": [],
    # The mbarriers of a grid. The tool's own guess is too low; each takes 36 KB of GPU memory, and
    # more of them make every launch slower.
    "synccheck": ["--num-cuda-barriers", "30000"],
}
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "PYTHONSAFEPATH": "1",
    **os.environ,
    "SMLA_DEVICE": "cuda",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # a memory pool would hide accesses beyond an array
}
# pytest-benchmark, where it is installed, warns; warnings are errors.
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "-p", "no:cacheprovider"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) * 3 // 8))
    parser.add_argument("--seconds", type=float, help="a process that takes longer has failed")
    options, others = parser.parse_known_args()
    tools = [word for word in others if word in TOOLS] or list(TOOLS)
    tests = find_tests([word for word in others if word not in TOOLS])
    shares = [tests[i :: options.processes] for i in range(min(options.processes, len(tests)))]
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            Run(tool, share, Path(folder, f"{tool}-{i}"))
            for tool in tools
            for i, share in enumerate(shares)
        ]
        end = None if options.seconds is None else time.monotonic() + options.seconds
        try:
            failures = [run for run in runs if not run.passes(end)]
        finally:
            for run in runs:
                run.stop()
    print(f"{len(runs)} runs of {len(tests)} tests, {len(failures)} failed")
    return 1 if failures or not runs else 0


def find_tests(arguments: list[str]) -> list[str]:
    command = [*PYTEST, "--collect-only", "-m", "sanitizer", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode != 0 or not tests:
        raise SystemExit(f"{done.stdout}no tests were found")
    return tests


class Run:
    """A tool over some of the tests, in a process of its own."""

    def __init__(self, tool: str, tests: list[str], log: Path) -> None:
        program = os.environ.get("COMPUTE_SANITIZER", "compute-sanitizer")
        command = [program, "--tool", tool, "--error-exitcode", "1", *TOOLS[tool], *PYTEST, *tests]
        self.tool, self.num_tests, self.log = tool, len(tests), log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=ENVIRONMENT,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def passes(self, end: float | None) -> bool:
        """Waits for the process and prints a line about it, or all of its output if it failed."""
        try:
            status = self.process.wait(None if end is None else max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.stop()
            status = "out of time"
        lines = self.log.read_text(errors="replace").splitlines()
        if status == 0:
            said = [line for line in lines if "SUMMARY" in line or " passed" in line]
            print(f"{self.tool}: {'; '.join(said)}", flush=True)
            return True
        print(f"{self.tool}: FAILED ({status}), {self.num_tests} tests", *lines, sep="\n")
        return False

    def stop(self) -> None:
        """Ends the process, if it still runs, and those that it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


if __name__ == "__main__":
    sys.exit(main())
