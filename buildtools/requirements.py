"""Prints the requirements of a development environment, one per line, for `pip install -r`.

    python requirements.py GROUP…
    python requirements.py --of DISTRIBUTION

The requirements to build and to run always come first, then those of the named groups of
[dependency-groups]. So pyproject.toml stays the one place that lists them, and any version of pip
can install them. With --of, they are those of a distribution that was installed without any.
"""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

# Registries have these for GPUs alone, so they do not load beside a PyTorch for CPUs, and models
# that read and write text do without them.
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")


def requirements_of(distribution):
    """Without extras, and of a PyTorch for CPUs by its plain version, which any registry has."""
    for line in importlib.metadata.requires(distribution):
        name = re.match(r"[\w.-]+", line)[0]
        if name not in LEFT_OUT and "extra ==" not in line:
            yield line.replace("+cpu", "")


if sys.argv[1:2] == ["--of"]:
    print(*requirements_of(sys.argv[2]), sep="\n")
else:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    print(*project["build-system"]["requires"], *project["project"]["dependencies"], sep="\n")
    for group in sys.argv[1:]:
        print(*project["dependency-groups"][group], sep="\n")
