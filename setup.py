"""setuptools' side of the build: the extension `sparse_mla._C`, stable ABI, CPython 3.11 and later.
A free-threaded CPython has no stable ABI, and gets an extension for its version alone.

    python setup.py build_ext --inplace       build what `pip install .` builds, in the source tree
    python setup.py ninja --targets=lib       build other targets of the graph: lib, tests, fuzz
    JOBS=1 python setup.py …                  compile one file at a time

Metadata and requirements are in pyproject.toml, the package's page in buildtools/page.py; sources,
flags and variants in buildtools/graph.py.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent / "buildtools"))
import graph
import page
import stubs


def public_version(distribution):
    """The version without what buildtools/release.py adds: +cpu, +cu130."""
    return distribution.get_version().partition("+")[0]


def run_ninja(distribution, *targets):
    """Builds targets, and writes compile_commands.json for clang-tidy and editors."""
    with graph.alone_in(Path("build")):
        path = graph.write_graph(public_version(distribution))
        ninja = [sys.executable, "-m", "ninja", "-f", path]
        database = subprocess.check_output([*ninja, "-t", "compdb", "cc"])
        Path("compile_commands.json").write_bytes(database)
        if jobs := os.environ.get("JOBS"):
            ninja += ["-j", jobs]
        if status := subprocess.run([*ninja, *targets]).returncode:
            sys.exit(status)


class BuildExtension(build_ext):
    def finalize_options(self):
        super().finalize_options()
        self.force = True  # always copy: the file there may be newer and of another variant

    def run(self):
        super().run()
        package = Path("sparse_mla") if self.inplace else Path(self.build_lib, "sparse_mla")
        shared = graph.shared_name(public_version(self.distribution))
        files = [Path("include", name) for name in graph.public_headers()]
        files += [Path("lib", name) for name in (shared, *graph.CONFIG_FILES)]
        for file in files:
            self.mkpath(str((package / file).parent))
            self.copy_file(str(graph.PREFIX / file), str(package / file))
        # A wheel has no symbolic links, so what -lsparse_mla finds is a script of the linker.
        (package / "lib/libsparse_mla.so").write_text(f"INPUT({shared})\n")
        for path, text in stubs.make_stubs().items():
            (package.parent / path).write_text(text)

    def build_extension(self, ext):
        run_ninja(self.distribution, "extension", "lib")
        target = Path(self.get_ext_fullpath(ext.name))
        self.mkpath(str(target.parent))
        for other in target.parent.glob("_C.*.so"):  # of another ABI, which Python may find first
            other.unlink()
        self.copy_file(str(graph.EXTENSION), str(target))


class Ninja(Command):
    description = "build other targets of the ninja graph"
    user_options: ClassVar = [("targets=", None, "lib, tests or fuzz, separated by commas")]

    def initialize_options(self):
        self.targets = None

    def finalize_options(self):
        self.ensure_string_list("targets")

    def run(self):
        run_ninja(self.distribution, *self.targets)


setup(
    long_description=page.description(),
    long_description_content_type="text/markdown",
    project_urls=page.project_urls(),
    cmdclass={"build_ext": BuildExtension, "ninja": Ninja},
    ext_modules=[Extension("sparse_mla._C", sources=[], py_limited_api=graph.HAS_LIMITED_API)],
    options={
        "build": {"build_lib": str(graph.BUILD / "python")},
        "bdist_wheel": {"py_limited_api": "cp311"} if graph.HAS_LIMITED_API else {},
    },
)
