"""Imported first by every tool: puts the project on the path, so that `python tools/NAME.py` works from anywhere."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
