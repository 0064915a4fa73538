"""Checks that code of an instruction set can run only where csrc/cpu/isa.c has chosen it.

    python buildtools/instruction_sets.py build/release

A kernel file's object consists of instructions that the machine may lack, in every function, even
in one that only adds two numbers. So others reach it by the table that isa.c has chosen and by no
other way. The exit status is 1 if

- an object of an instruction set defines anything but data for others: the linker may give a
  function to callers in objects that every machine runs;
- an object names a symbol of an instruction set that its own does not include; only the rows of
  isa.c, which are data, may name all;
- isa.c lets others see its rows, or there are no objects of instruction sets.
"""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from graph import FLAGS_BY_MACHINE, suffix

FLAGS = {name: flags.split() for sets in FLAGS_BY_MACHINE.values() for name, flags in sets.items()}
CHOICE = "isa"  # the stem of the file whose rows name all instruction sets


class Symbol(NamedTuple):
    name: str
    kind: str  # FUNC, OBJECT, ...
    binding: str  # LOCAL, GLOBAL, WEAK, ...
    is_defined: bool


class Reference(NamedTuple):
    section: str  # the one that refers to the symbol
    name: str


class Object(NamedTuple):
    path: Path
    symbols: list[Symbol]
    references: list[Reference]

    @property
    def set(self) -> str:
        """The instruction set that it is compiled for, or "" for that of every machine."""
        return suffix(self.path) if suffix(self.path) in FLAGS else ""

    @property
    def exports(self) -> list[Symbol]:
        return [s for s in self.symbols if s.is_defined and s.binding != "LOCAL"]


def includes(machine: str, wanted: str) -> bool:
    """Whether a machine that has one instruction set has the other."""
    return set(FLAGS.get(wanted, ())) <= set(FLAGS.get(machine, ()))


def read_object(path: Path) -> Object:
    command = ["readelf", "--wide", "--syms", "--relocs", str(path)]
    listing = subprocess.run(command, text=True, check=True, capture_output=True).stdout
    found, section = Object(path, [], []), ""
    for line in listing.splitlines():
        fields = line.split()
        if line.startswith("Relocation section "):
            section = fields[2].strip("'").removeprefix(".rela")
        elif len(fields) == 8 and fields[0].removesuffix(":").isdigit():
            _, _, _, kind, binding, _, index, name = fields
            found.symbols.append(Symbol(name, kind, binding, index != "UND"))
        elif len(fields) >= 5 and fields[2].startswith("R_"):
            found.references.append(Reference(section, fields[4]))
    return found


def find_faults(objects: list[Object]) -> list[str]:
    faults = []
    owners = {symbol.name: o for o in objects if o.set for symbol in o.exports}
    for o in objects:
        for symbol in o.exports:
            is_table = symbol.kind == "OBJECT" and symbol.binding == "GLOBAL"
            if o.set and not is_table:
                faults.append(
                    f"{o.path}: `{symbol.name}` must be static, as code for {o.set} alone"
                )
            if o.path.stem == CHOICE and symbol.kind == "OBJECT":
                faults.append(f"{o.path}: `{symbol.name}` must be static: rows are for isa.c alone")
        for section, name in sorted(set(o.references)):
            owner = owners.get(name)
            is_row = o.path.stem == CHOICE and not section.startswith(".text")
            if owner and not includes(o.set, owner.set) and not is_row:
                faults.append(f"{o.path}: {section} refers to `{name}`, which is for {owner.set}")
    return faults


def main(build: str) -> int:
    objects = [read_object(path) for path in sorted(Path(build, "obj").rglob("*.o"))]
    sets = sorted({o.set for o in objects} - {""})
    faults = find_faults(objects) if sets else [f"no objects of instruction sets in {build}"]
    for fault in faults:
        print(f"error: {fault}")
    if not faults:
        print(f"Code for {', '.join(sets)} is reached through isa.c alone")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
