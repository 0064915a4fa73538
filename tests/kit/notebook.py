"""Runs a notebook in a new kernel, as Jupyter would, and prints what its cells print.

    python tests/kit/notebook.py examples/quickstart.ipynb

The kernel's working folder is a temporary one and holds the kernel's sockets, so no port is opened.
It imports the sparse_mla that Python finds, and that of the source tree where Python finds none. A
cell that raises ends the run with its traceback.
"""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat
from jupyter_client import AsyncKernelManager

ROOT = Path(__file__).parents[2]
CELL_SECONDS = 300


def run(path: Path, folder: str) -> None:
    notebook = nbformat.read(path, as_version=4)
    kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{folder}/kernel")
    place = {"metadata": {"path": folder}}
    nbclient.NotebookClient(notebook, timeout=CELL_SECONDS, km=kernel, resources=place).execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            print(output.get("text", ""), end="")


def find_package() -> None:
    """Lets the kernel, which inherits the environment, find a sparse_mla."""
    if importlib.util.find_spec("sparse_mla") is None:
        folders = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))


if __name__ == "__main__":
    find_package()
    with tempfile.TemporaryDirectory() as folder:
        run(Path(sys.argv[1]), folder)
