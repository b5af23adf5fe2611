"""docs/commands: every command has a page, whose options and examples are those of today."""

import pytest

from tests.support import ROOT
from tools.document_commands import (
    PAGES,
    help_of,
    index_of,
    make_clone,
    outputs_in,
    outputs_of,
    session,
    shown,
    text_of,
    without_numbers,
)

SESSION = session()
# Commands for those who maintain the project, and `make demo`.
WITHOUT_A_PAGE = {
    "tools/demo.py",
    "tools/document_commands.py",
    "tools/document_notebook.py",
    "tools/document_positions.py",
    "tools/fix_environment.py",
    "tools/list_dependencies.py",
}


@pytest.fixture(scope="module")
def run(forks, tmp_path_factory):
    """Runs a command of the session, its outputs together in their order."""
    logs = tmp_path_factory.mktemp("logs")

    def in_fork(words, folder, environment):
        log = logs / "log"
        log.write_text("")
        status = forks.wait(forks.start(*words, log=log, env=environment, cwd=folder))
        return status, log.read_text(encoding="utf-8")

    return in_fork


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    make_clone(folder)
    return folder


def existing(page) -> str:
    return (PAGES / f"{page.page}.md").read_text(encoding="utf-8")


def test_every_command_has_a_page():
    scripts = {path.name for path in ROOT.glob("*.py")}
    scripts |= {f"tools/{path.name}" for path in (ROOT / "tools").glob("*.py")}
    assert {page.script for page in SESSION} == scripts - WITHOUT_A_PAGE
    names = {path.stem for path in PAGES.glob("*.md")}
    assert names == {page.page for page in SESSION} | {"README"}
    assert (PAGES / "README.md").read_text(encoding="utf-8") == index_of(SESSION)


@pytest.mark.parametrize("page", SESSION, ids=lambda page: page.page)
def test_a_page_lists_todays_options(page, clone, run):
    text = existing(page)
    expected = text_of(page, outputs_in(text), help_of(page, clone, run))
    assert text == expected, "run `make docs`"


def test_the_examples_print_what_the_pages_show(clone, run):
    """All of them, one after another; numbers and what follows from the machine may differ."""
    for page in SESSION:
        outputs = outputs_of(page, clone, run)
        if page.varies:
            continue
        for command, output, expected in zip(
            page.run, outputs, outputs_in(existing(page)), strict=True
        ):
            found = without_numbers(shown(output))
            assert found == without_numbers(expected), f"{command}: run `make docs`"


def test_long_outputs_lose_their_middle():
    lines = [f"line {number}" for number in range(100)]
    cut = shown("\n".join(lines)).splitlines()
    assert cut[0] == "line 0"
    assert cut[-1] == "line 99"
    assert cut[17] == "… 67 more lines …"
    assert len(cut) == 34


def test_numbers_and_hashes_are_alike_and_words_are_not():
    first = without_numbers("loss 5.53  lr 2.3e-03  config 92cf2166b9c4  0:00:01 left")
    second = without_numbers("loss 15.1   lr 1e-4  config 81524945332a  0:10:01 left")
    assert first == second
    assert without_numbers("a 1") != without_numbers("b 1")
