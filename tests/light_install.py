"""Scripts as after `pip install .`: what the extra `train` installs cannot be imported.

python tests/light_install.py FIRST SECOND [WORDS]: two scripts one after the other, in the current
folder; the second gets the words.
"""

import runpy
import sys
from pathlib import Path

from megatron.errors import OF_TRAIN

ABSENT = OF_TRAIN | {"accelerate", "lm_eval"}


class Absent:
    """Finds nothing where Python looks first, and says so for packages of `train`."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if __name__ == "__main__":
    sys.meta_path.insert(0, Absent())
    _, first, *sys.argv = sys.argv
    runpy.run_path(first, run_name="__main__")
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
