"""The navigation of the site: the sections and tables of docs/README.md, in their order."""

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"^\| \[(.+?)\]\((\S+?\.md)\)")


def on_config(config: Any) -> Any:
    """MkDocs calls this before it reads the pages."""
    docs = Path(config.docs_dir, "docs")
    navigation: list[dict[str, Any]] = [{"Home": "README.md"}, {"All docs": "docs/README.md"}]
    section: list[dict[str, str]] = []
    for line in (docs / "README.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = []
            navigation.append({line.removeprefix("## "): section})
        elif link := LINK.match(line):
            title, target = link.groups()
            page = (docs / target).resolve().relative_to(Path(config.docs_dir).resolve())
            section.append({title: page.as_posix()})
    config.nav = [entry for entry in navigation if all(entry.values())]
    return config
