"""The metadata of a wheel, with and without an address of the project: its links and README's."""

import email
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import require

require("setuptools")

ROOT = Path(__file__).parents[2]
ADDRESSES = ("SPARSE_MLA_PROJECT_URL", "GITHUB_SERVER_URL", "GITHUB_REPOSITORY")
URL = "https://example.org/owner/name"
TARGET = re.compile(r"(!?)\[([^\]]*)\]\(([^)]*)\)")


def metadata_of(tmp_path, **environment):
    """PKG-INFO, which setuptools makes a wheel's METADATA of."""
    clean = {key: value for key, value in os.environ.items() if key not in ADDRESSES}
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=clean | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return email.message_from_bytes((tmp_path / "sparse_mla.egg-info/PKG-INFO").read_bytes())


def page_of(metadata) -> str:
    assert metadata["Description-Content-Type"] == "text/markdown"
    return metadata.get_payload(decode=True).decode()


@pytest.mark.parametrize(
    "environment",
    [
        {"SPARSE_MLA_PROJECT_URL": URL},
        {"SPARSE_MLA_PROJECT_URL": URL + "/", "GITHUB_REPOSITORY": "someone/else"},
        {"GITHUB_SERVER_URL": "https://example.org", "GITHUB_REPOSITORY": "owner/name"},
    ],
)
def test_links_are_absolute_where_the_address_is_known(tmp_path, environment):
    metadata = metadata_of(tmp_path, **environment)
    urls = dict(entry.split(", ") for entry in metadata.get_all("Project-URL"))
    assert urls["Source"] == URL
    assert set(urls) == {"Source", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(URL) for url in urls.values())
    assert (ROOT / urls["Changelog"].removeprefix(f"{URL}/blob/HEAD/")).exists()
    links = TARGET.findall(page_of(metadata))
    relative = TARGET.findall((ROOT / "README.md").read_text())
    assert len(links) == len(relative) > 10
    for (mark, text, target), (_, its_text, file) in zip(links, relative, strict=True):
        kind = "raw" if mark else "blob"
        assert target == (file if file[0] == "#" else f"{URL}/{kind}/HEAD/{file}")
        assert text == its_text
    assert any(mark for mark, *_ in links), "README opens with a plot"


@pytest.mark.parametrize("environment", [{}, {"GITHUB_SERVER_URL": "https://example.org"}])
def test_without_an_address_links_are_plain_text(tmp_path, environment):
    metadata = metadata_of(tmp_path, **environment)
    assert metadata.get_all("Project-URL") is None
    page = page_of(metadata)
    assert all(target.startswith("#") for _, _, target in TARGET.findall(page))
    texts = [text for _, text, _ in TARGET.findall((ROOT / "README.md").read_text())]
    assert all(text in page for text in texts)
    example = re.search(r"```python\n.*?```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    assert example in page


def test_every_relative_link_of_the_readme_leads_to_a_file():
    targets = [target for _, _, target in TARGET.findall((ROOT / "README.md").read_text())]
    for target in targets:
        if not target.startswith(("#", "https:")):
            assert (ROOT / target.partition("#")[0]).is_file(), target


# Those that a reader begins with; a row of a table is one line.
PROSE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_no_line_of_prose_is_wider_than_120_columns(page):
    lines = page.read_text().split("\n")
    wide = [n for n, line in enumerate(lines, 1) if len(line) > 120 and not line.startswith("|")]
    assert not wide


def test_recipes_are_lists():
    """A recipe names its files one by one."""
    text = (ROOT / "docs/architecture.md").read_text()
    recipes = text.split("## To add something\n")[1].split("\n## ")[0]
    assert "|" not in re.sub(r"`[^`]*`", "", recipes)
    assert len(re.findall(r"^\d\. ", recipes, re.M)) > 20
