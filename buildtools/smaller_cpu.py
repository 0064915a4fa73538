"""Copies test programs so that they run as on a CPU that lacks instruction sets.

    python buildtools/smaller_cpu.py avx2 build/sanitize/tests build/sanitize/tests-avx2

In a copy the functions of csrc/cpu/isa.c that look for an instruction set say no, unless `avx2`
includes it, and every function that was compiled for such a set consists of breakpoints. So a call
of one ends the program, whatever instructions the compiler took for it. The copies run on the
processor itself: AddressSanitizer's shadow is 14 TiB, for which qemu-user 7.2 has no memory.
Constructors that a sanitizer adds to each object stay, because it runs them on every machine.
"""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from graph import FLAGS_BY_MACHINE, MACHINE
from instruction_sets import includes

BREAKPOINT = b"\xcc"  # int3
SAY_NO = b"\x31\xc0\xc3"  # xor eax, eax; ret
SECTION = re.compile(r"\[ *(\d+)\] \S+ +PROGBITS +([0-9a-f]+) ([0-9a-f]+) ")


class Function(NamedTuple):
    name: str
    begin: int  # in the program's file
    size: int


@dataclass
class Object:
    """The static functions that an object file has brought into a program."""

    file: str = ""  # the source file, without its suffix
    of_set: str = ""  # the instruction set, which a symbol of csrc/cpu/isa/*.h names
    functions: list[Function] = field(default_factory=list)


def read_objects(program: Path) -> list[Object]:
    """The objects of a program. What an object has brought follows its file's name."""
    command = ["readelf", "--wide", "--section-headers", "--syms", str(program)]
    listing = subprocess.run(command, text=True, check=True, capture_output=True).stdout
    shifts = {i: int(at, 16) - int(address, 16) for i, address, at in SECTION.findall(listing)}
    objects = [Object()]
    for line in listing.splitlines():
        fields = line.split()
        if len(fields) != 8 or not fields[0].removesuffix(":").isdigit():
            continue
        _, address, size, kind, _, _, section, name = fields
        if kind == "FILE":
            objects.append(Object(Path(name).stem))
        elif kind == "FUNC" and section in shifts:
            begin = int(address, 16) + shifts[section]
            objects[-1].functions.append(Function(name, begin, int(size, 0)))
        elif kind == "OBJECT" and name.startswith("isa_"):
            objects[-1].of_set = name.removeprefix("isa_")
    return objects


def take_away(program: Path, lacking: set[str]) -> bytes:
    """The program without the code of instruction sets."""
    code = bytearray(program.read_bytes())
    taken = set()
    objects = read_objects(program)
    for o in objects:
        for f in o.functions:
            if o.file == "isa" and f.name.removeprefix("support_") in lacking:
                code[f.begin : f.begin + len(SAY_NO)] = SAY_NO
                taken.add(f.name.removeprefix("support_"))
            elif o.of_set in lacking and not f.name.startswith(("_sub_I_", "_sub_D_")):
                code[f.begin : f.begin + f.size] = BREAKPOINT * f.size
    if taken and taken != lacking:
        sys.exit(f"error: {program}: isa.c has no support_NAME for {lacking - taken}")
    if taken and (unseen := lacking - {o.of_set for o in objects}):
        sys.exit(f"error: {program}: no object has a symbol isa_NAME for {unseen}")
    return bytes(code)


def main(machine: str, programs: str, copies: str) -> None:
    lacking = {name for name in FLAGS_BY_MACHINE[MACHINE] if not includes(machine, name)}
    Path(copies).mkdir(exist_ok=True)
    for program in sorted(Path(programs).iterdir()):
        if program.suffix != ".so":
            copy = Path(shutil.copy(program, copies))
            copy.write_bytes(take_away(program, lacking))


if __name__ == "__main__":
    main(*sys.argv[1:])
