"""How engines find this package's plugins in tests: by entry points, as when installed."""

import tomllib
from pathlib import Path

import sparse_mla

ROOT = Path(__file__).parents[2]


def write_entry_point(folder: Path, *more: str, group: str = "vllm.general_plugins") -> list[Path]:
    """Folders for PYTHONPATH: `folder`, where pyproject.toml's entry points of a group and `more`
    get a distribution, and the one that has this package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [f"{name} = {value}" for name, value in project["entry-points"][group].items()]
    info = folder / "sparse_mla_plugin-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sparse-mla-plugin\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, *more]) + "\n")
    return [folder, Path(sparse_mla.__file__).parents[1]]
