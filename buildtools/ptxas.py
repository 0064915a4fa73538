"""Runs one nvcc command and keeps what ptxas says about every kernel.

    python ptxas.py [--title=…] [--strict] [--allow-spills] REPORT nvcc …

REPORT becomes a table of registers, stack, spills and shared memory. A kernel that uses local
memory, by spilling or by an array with a computed index, fails the compilation, because no test
would see how slow it is. With --strict, warnings and advice of ptxas fail it too, for example a
serialised wgmma. Advice comes and goes with the compiler's version, so where the toolkit has
cuobjdump, wgmma products and waits for them are counted in the machine code of Hopper's kernels:
one wait for every product or two fails the compilation, too.
"""

import argparse
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
FUNCTION = re.compile(r"Function properties for (\w+)")
MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
CHATTER = re.compile(r"ptxas info +: (\d+ bytes gmem|Compile time|Function properties)")
PRIVATE = re.compile(r"\(anonymous namespace\)::|_INTERNAL_\w+::")  # in demangled names
ADVICE = re.compile(r"ptxas (warning|info +: \(C\d+\))")
FUNCTION_OF_CODE = re.compile(r"Function : (\w+)")
MOST_WAITS_PER_PRODUCT = 0.6  # a kernel that is not serialised has at most 0.42


@dataclass
class Usage:
    """One kernel for one architecture, or a function that kernels call without inlining it."""

    name: str
    arch: str
    registers: str = "-"
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    shared: int = 0

    def uses_local_memory(self):
        return self.stack + self.spill_stores + self.spill_loads > 0


def parse(output):
    """The usages that ptxas reports, and the output lines that people should read."""
    usages, lines = [], []
    entry, arch = None, "-"
    for line in output.splitlines():
        if match := ENTRY.search(line):
            name, arch = match.groups()
            entry = Usage(name, arch)
            usages.append(entry)
        elif match := FUNCTION.search(line):
            if entry is None or match[1] != entry.name:
                usages.append(Usage(match[1], arch))
        elif match := MEMORY.search(line):
            usages[-1].stack, usages[-1].spill_stores, usages[-1].spill_loads = map(
                int, match.groups()
            )
        elif match := REGISTERS.search(line):
            entry.registers = match[1]
            entry.shared = int(shared[1]) if (shared := SHARED.search(line)) else 0
        elif not CHATTER.match(line):
            lines.append(line)
    return usages, lines


def demangle(usages):
    """Gives usages names with template arguments instead of mangled ones, where c++filt exists."""
    if usages and shutil.which("c++filt"):
        names = "\n".join(usage.name for usage in usages)
        names = subprocess.run(["c++filt", "-p"], input=names, capture_output=True, text=True)
        for usage, name in zip(usages, names.stdout.splitlines(), strict=True):
            usage.name = PRIVATE.sub("", name)


def disassemble(command):
    """The machine code of what a command for Hopper alone makes; "" without cuobjdump."""
    output = command[command.index("-o") + 1] if "-o" in command else ""
    compiler = next((Path(word) for word in command if Path(word).name == "nvcc"), Path("nvcc"))
    tool = shutil.which("cuobjdump", path=compiler.parent) or shutil.which("cuobjdump")
    if not output.endswith("_sm90.cu.o") or tool is None:
        return ""
    return subprocess.run([tool, "-sass", output], capture_output=True, text=True).stdout


def serialised_kernels(code):
    """The kernels in a disassembly that wait for most wgmma products alone."""
    parts = FUNCTION_OF_CODE.split(code)
    for name, part in zip(parts[1::2], parts[2::2], strict=True):
        products = len(re.findall(r"[HQ]GMMA\.", part))
        waits = part.count("DEPBAR.LE gsb")
        if waits > MOST_WAITS_PER_PRODUCT * products:
            yield f"error: kernel {name} waits {waits} times for {products} wgmma products"


def table(title, usages):
    yield title
    rows = [("arch", "registers", "stack", "spill stores", "spill loads", "shared", "kernel")]
    for u in sorted(usages, key=lambda u: (u.name, u.arch)):
        numbers = (u.registers, u.stack, u.spill_stores, u.spill_loads, u.shared)
        rows.append((u.arch, *map(str, numbers), u.name))
    rows = list(dict.fromkeys(rows))  # a function may be listed once for each of its callers
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for arch, *numbers, name in rows:
        cells = (cell.rjust(width) for cell, width in zip(numbers, widths[1:-1], strict=True))
        yield "  ".join((arch.ljust(widths[0]), *cells, name))


def complaints(usages, lines, strict, allow_spills):
    for usage in usages:
        if usage.uses_local_memory() and not allow_spills:
            yield (
                f"error: kernel {usage.name} for {usage.arch} uses local memory: "
                f"{usage.stack} bytes of stack, {usage.spill_stores} bytes of spill stores, "
                f"{usage.spill_loads} of loads; ALLOW_SPILLS=1 builds the slow kernel"
            )
    if strict and any(ADVICE.match(line) for line in lines):
        yield "error: WERROR=1 and ptxas has advice, see above"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--title", default="")
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--allow-spills", action="store_true")
    parser.add_argument("report", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    done = subprocess.run(
        options.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    usages, lines = parse(done.stdout)
    demangle(usages)
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text("\n".join(table(options.title, usages)) + "\n")
    errors = list(complaints(usages, lines, options.strict, options.allow_spills))
    errors += serialised_kernels(disassemble(options.command))
    if text := "\n".join(lines + errors):
        print(text, file=sys.stderr)
    sys.exit(done.returncode or bool(errors))


if __name__ == "__main__":
    main()
