"""Prints the requirements of a development environment, one per line, for `pip install -r`.

    python requirements.py GROUP…

The requirements to build and to run always come first, then those of the named groups of
[dependency-groups]. So pyproject.toml stays the one place that lists them, and any version of pip
can install them.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
print(*project["build-system"]["requires"], *project["project"]["dependencies"], sep="\n")
for group in sys.argv[1:]:
    print(*project["dependency-groups"][group], sep="\n")
