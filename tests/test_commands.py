"""docs/commands: every command has a page with today's options, and its examples run."""

import pytest

from tests.support import ROOT
from tools.document_commands import (
    ENVIRONMENT,
    PAGES,
    examples_of,
    index_of,
    make_clone,
    options_of,
    session,
)

pytestmark = pytest.mark.docs

# Commands for those who maintain the project.
WITHOUT_A_PAGE = {
    "tools/document_commands.py",
    "tools/document_positions.py",
    "tools/fix_environment.py",
}


def test_every_command_has_a_page():
    pages = session()
    scripts = {path.name for path in ROOT.glob("*.py")}
    scripts |= {f"tools/{path.name}" for path in (ROOT / "tools").glob("*.py")}
    assert {page.script for page in pages} == scripts - WITHOUT_A_PAGE
    assert {path.stem for path in PAGES.glob("*.md")} == {page.page for page in pages} | {"README"}
    assert (PAGES / "README.md").read_text(encoding="utf-8") == index_of(pages)


def test_the_pages_list_todays_options_and_their_examples_run(forks, tmp_path):
    log = tmp_path / "log"

    def in_fork(words, folder):
        log.write_text("")
        status = forks.wait(forks.start(*words, log=log, env=ENVIRONMENT, cwd=folder))
        return status, log.read_text(encoding="utf-8")

    clone = tmp_path / "clone"
    clone.mkdir()
    make_clone(clone)
    for page in session():
        text = (PAGES / f"{page.page}.md").read_text(encoding="utf-8")
        assert text.endswith(options_of(page, clone, in_fork)), f"{page.page}: run `make docs`"
        examples_of(page, clone, in_fork)
