"""docs/commands: every command has a page with today's options, and its examples run."""

import pytest

from megatron.cli_errors import purpose
from megatron.report.document import ENVIRONMENT, PAGES, make_clone, session, text_of
from tests.support import ROOT

pytestmark = pytest.mark.docs

WITHOUT_A_PAGE = {"tools/bench.py"}  # for those who maintain the project


def test_every_command_has_a_page_with_todays_options_and_its_examples_run(forks, tmp_path):
    pages = session()
    paths = [*ROOT.glob("*.py"), *(ROOT / "tools").glob("*.py")]
    scripts = {str(path.relative_to(ROOT)) for path in paths}
    assert {page["script"] for page in pages} == scripts - WITHOUT_A_PAGE
    assert {path.stem for path in PAGES.glob("*.md")} == {page["page"] for page in pages} | {
        "README"
    }
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    for page in pages:
        assert (
            f"| [`{page['script']}`]({page['page']}.md) | {purpose(ROOT / page['script'])} |\n"
            in index
        )

    def in_fork(words, folder):
        done = forks.run(*words, env=ENVIRONMENT, cwd=folder)
        return done.returncode, done.stdout + done.stderr

    clone = tmp_path / "clone"
    clone.mkdir()
    make_clone(clone)
    for page in pages:
        _, _, stored = (PAGES / f"{page['page']}.md").read_text(encoding="utf-8").partition("## ")
        _, _, todays = text_of(page, clone, in_fork).partition("## Options")
        assert stored.endswith(todays), f"{page['page']}: run `make docs`"
