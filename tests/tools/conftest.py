"""The benchmarks are scripts beside each other: they find each other when their folder is on the path."""

import sys

from tests.support import ROOT

sys.path.insert(0, str(ROOT / "tools/bench"))
