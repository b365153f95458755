"""Writes which versions of the site there are, for its menu, and leads visitors to the newest.

    python site/versions.py dist/site

The file is that of mike (https://github.com/jimporter/mike), which the theme's menu reads.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

FORWARD = """<!doctype html>
<meta charset="utf-8">
<title>kvshm</title>
<meta http-equiv="refresh" content="0; url={newest}/index.html">
<a href="{newest}/index.html">kvshm {newest}</a>
"""


def order(version: str) -> tuple[list[int], bool]:
    """Numbers first; what is in development comes before the version itself."""
    numbers = re.match(r"[\d.]*", version)
    assert numbers
    return [int(part) for part in numbers[0].strip(".").split(".")], ".dev" not in version


def main(site: Path) -> None:
    found = [path.name for path in site.iterdir() if (path / "index.html").exists()]
    versions = sorted(found, key=order, reverse=True)
    about = [{"version": each, "title": each, "aliases": []} for each in versions]
    (site / "versions.json").write_text(json.dumps(about))
    (site / "index.html").write_text(FORWARD.format(newest=versions[0]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
