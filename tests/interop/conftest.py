"""What tests of several files here share."""

import pytest

from megatron.positions import ALIASES, FILES, REGISTRY
from tests.interop.exports import BUMP


@pytest.fixture
def bump(tmp_path):
    """A user's file with an encoding, forgotten afterwards."""
    known, aliases, files = dict(REGISTRY), dict(ALIASES), dict(FILES)
    path = tmp_path / "bump.py"
    path.write_text(BUMP)
    yield path
    for table, before in ((REGISTRY, known), (ALIASES, aliases), (FILES, files)):
        table.clear()
        table.update(before)
