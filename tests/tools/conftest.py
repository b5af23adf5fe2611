"""The benchmarks import each other: their folder must be on the path."""

import sys

from tests.support import ROOT

sys.path.insert(0, str(ROOT / "tools/bench"))
