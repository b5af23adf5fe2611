"""What tests of several files here share."""

import importlib
import sys
from unittest import mock

import pytest

from megatron.positions import ALIASES, FILES, REGISTRY
from tests.interop.models import BUMP


@pytest.fixture
def bump(tmp_path):
    """A user's file with an encoding, forgotten afterwards."""
    path = tmp_path / "bump.py"
    path.write_text(BUMP)
    with mock.patch.dict(REGISTRY), mock.patch.dict(ALIASES), mock.patch.dict(FILES):
        yield path


@pytest.fixture(scope="session")
def own_modules(tmp_path_factory):
    """Where transformers copies code that it runs: a folder that is gone afterwards."""
    dynamic_modules = importlib.import_module("transformers.dynamic_module_utils")
    folder = str(tmp_path_factory.mktemp("modules"))
    with mock.patch.object(dynamic_modules, "HF_MODULES_CACHE", folder):
        yield
    sys.path[:] = [path for path in sys.path if path != folder]
    # A package that stays imported is looked for in the folder where it was found first.
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]
