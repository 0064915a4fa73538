"""The package's page on an index such as PyPI: links of the project, and README.md.

The tree does not know where it is published. SPARSE_MLA_PROJECT_URL=https://host/owner/name tells
the build, or else what GitHub's CI sets, GITHUB_SERVER_URL and GITHUB_REPOSITORY. With an address,
README's links are absolute. Without one, the page shows their texts alone.
"""

import os
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
# [text](file) or ![text](file); an address has a colon, and a part of this page begins with "#".
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^):#][^):]*)\)")


def project_url():
    """The address without a slash at its end, or an empty text."""
    given = os.environ.get("SPARSE_MLA_PROJECT_URL")
    server, repository = map(os.environ.get, ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY"))
    hosted = f"{server}/{repository}" if server and repository else ""
    return (given or hosted).rstrip("/")


def project_urls():
    url = project_url()
    if not url:
        return {}
    return {
        "Source": url,
        "Documentation": f"{url}/blob/HEAD/README.md",
        "Changelog": f"{url}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }


def description():
    """README.md for readers who do not see the files beside it."""
    url = project_url()

    def lead_there(link):
        mark, text, file = link.groups()
        if not url:
            return text
        return f"{mark}[{text}]({url}/{'raw' if mark else 'blob'}/HEAD/{file})"

    return LINK.sub(lead_there, README.read_text(encoding="utf-8"))
