"""Prints the largest stack frames of the C code in csrc/, from the reports that the compiler writes
beside the objects of a release build.

    python buildtools/frames.py build/release

The exit status is 1 if a frame is larger than MAX_FRAME, if its size depends on the input, or if
there are no reports. In a build with CUDA the host files of csrc/cuda have reports, too.
"""

import sys
from pathlib import Path
from typing import NamedTuple

from graph import MAX_FRAME

NUM_PRINTED = 8


class Frame(NamedTuple):
    bytes: int
    function: str  # file:line:column:name
    is_bounded: bool


def read_report(text: str) -> list[Frame]:
    """Reads lines of: function, bytes, and "static", "dynamic" or "dynamic,bounded"."""
    fields = (line.split("\t") for line in text.splitlines())
    return [Frame(int(size), function, kind != "dynamic") for function, size, kind in fields]


def main(build: str) -> int:
    reports = sorted(Path(build, "obj", "csrc").rglob("*.su"))
    # An inline function has a report in each file that includes it.
    frames = sorted({frame for path in reports for frame in read_report(path.read_text())})[::-1]
    if not frames:
        print(f"error: no reports of stack frames in {build}: the compiler wrote none")
        return 1
    print(f"The largest stack frames of {len(reports)} files, in bytes (at most {MAX_FRAME}):")
    for frame in frames[:NUM_PRINTED]:
        print(f"{frame.bytes:8} {frame.function}")
    bad = [frame for frame in frames if frame.bytes > MAX_FRAME or not frame.is_bounded]
    for frame in bad:
        print(
            f"error: {frame.function}: {frame.bytes} bytes{'' if frame.is_bounded else ' or more'}"
        )
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
