"""Scripts as after `pip install .`: what the extra `train` installs cannot be imported.

python tests/light_install.py COMMANDS: a JSON list of [script, word, …], in the current folder.
Prints a JSON list of [status, output, errors]. Each command has a process of its own, a fork of
this one, which has imported what takes long.
"""

import json
import os
import runpy
import sys
import tempfile
from pathlib import Path

from megatron.errors import OF_TRAIN

ABSENT = OF_TRAIN | {"accelerate", "lm_eval"}


class Absent:
    """Finds nothing where Python looks first, and says so for packages of `train`."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def main(commands):
    sys.meta_path.insert(0, Absent())
    import pandas  # noqa: F401

    import megatron.model
    import megatron.results.table  # noqa: F401

    assert "megatron.cli_errors" not in sys.modules  # each script must import it early enough
    results = []
    for script, *words in commands:
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = os.fork()
            if process == 0:
                os.dup2(output.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                sys.argv = [script, *words]
                sys.path[0] = str(Path(script).parent)
                runpy.run_path(script, run_name="__main__")
                sys.exit(0)
            _, status = os.waitpid(process, 0)
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read().decode())
            results.append([os.waitstatus_to_exitcode(status), *texts])
    print(json.dumps(results))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
