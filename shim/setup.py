"""Puts the .pth file beside the package, where every start of Python reads it."""

from setuptools import setup
from setuptools.command.build_py import build_py

PTH = "sparse_mla_flash_mla.pth"


class BuildWithPth(build_py):
    def run(self):
        super().run()
        self.copy_file(PTH, f"{self.build_lib}/{PTH}")

    def get_source_files(self):
        return [*super().get_source_files(), PTH]


setup(cmdclass={"build_py": BuildWithPth})
