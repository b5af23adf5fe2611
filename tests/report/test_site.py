"""The site has every page: `make docs-site` builds it."""

import runpy
from types import SimpleNamespace

from tests.support import ROOT


def test_the_navigation_has_every_page_once():
    hook = runpy.run_path(str(ROOT / "docs/site_navigation.py"))["on_config"]
    navigation = hook(SimpleNamespace(docs_dir=str(ROOT), nav=None)).nav
    titled = [page for entry in navigation for page in entry.values() if isinstance(page, list)]
    pages = [path for section in titled for page in section for path in page.values()]
    assert len(pages) == len(set(pages))
    written = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert written - {"docs/README.md"} <= set(pages)
