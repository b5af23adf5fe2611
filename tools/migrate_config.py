"""Print published files (KERPLE, MEP, GPT-NeoX) in today's spelling.

python tools/migrate_config.py train.yml exp_configs/ali_tanh_gau_all003_fp32_openwebtext2_1235.yml
python tools/migrate_config.py exp_configs/*.yml -o configs/mine

If the pos-emb of a file of MEP hides its mixture, explicit kernels are proposed from the file's
name. Without -o nothing is written, and no file is ever replaced.

400 files of MEP share one pos-emb, 176 another: the authors chose the kernels by commenting source
lines in and out, and noted them in the file's name. docs/published_files.md lists the words.
"""

import re
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from megatron.cli_errors import command_parser, guarded
from megatron.config.legacy import SPELLINGS, complete_recipe, fold, translate
from megatron.config.messages import Report, bad_configuration, shortened
from megatron.config.yaml_files import find_file, read_file
from megatron.errors import UserError, visible
from megatron.files import write_output
from megatron.positions import ALIASES, REGISTRY, options_of
from megatron.strict_yaml import on_one_line

EXPERIMENT = re.compile(r"(.+)_(openwebtext2|github|arxiv|pg19)_\d+")
PREFIX = re.compile(r"(len1024_)?(medium_)?(snope_)?")
COUNT = re.compile(r"all00(\d)")  # that many kernels of equal weight
HIDES_MIXTURE = "snope"  # the beginning of such spellings of the MEP fork


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    parser.add_argument(
        "files", type="path", nargs="+", metavar="FILE", help="YAML files, each by itself"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="folder for the new files; default: none"
    )
    options = parser.parse_args(argv)
    for name in options.files:
        try:
            path = find_file(name)
            source = read_file(path)
        except ValueError as fault:
            raise UserError(str(fault)) from None
        report = Report()
        settings = translate(source, report)
        complete_recipe([source], settings, report)
        encoding = settings.get("pos_emb")
        if encoding in REGISTRY:
            fold(settings, set(options_of(encoding)), report)
        elif encoding is not None:
            report.fault(f"pos_emb: no encoding is called {encoding!r}")
        if report.faults:
            raise bad_configuration([str(path)], report.faults)

        published = source.get("pos_emb")
        lines = [f"# {shortened(path.name)} in today's spelling, by tools/migrate_config.py."]
        lines += [f"# {note}" for note in report.notes]
        if str(published).startswith(HIDES_MIXTURE) and published in ALIASES:
            default = [*options_of(str(encoding))["kernels"].default]
            lines.append(f"# pos_emb: the released code computes kernels: {on_one_line(default)}")
            named = mixture_named(path.stem, published)
            if isinstance(named, str):
                lines.append(f"# pos_emb: the file's name does not say which were meant: {named}")
            else:
                lines.append(
                    "# pos_emb: these kernels were derived from the file's name; check them"
                )
                settings |= {"pos_emb": "mep", "pos_emb_args": named}
        lines += [f"{key}: {on_one_line(value)}" for key, value in settings.items()]
        text = "\n".join(lines) + "\n"
        print(visible(f"--- {path}\n{text}"))
        if options.output is not None:
            write_output(options.output / path.name, text.encode())
    return 0


def mixture_named(stem: str, pos_emb: str) -> dict[str, Any] | str:
    """The options of `mep` that a file's name, without .yml, gives, or why it gives none."""
    match = EXPERIMENT.fullmatch(stem)
    name = match[1] if match else stem
    if name.startswith(pos_emb):
        return "it repeats pos-emb and names no kernels"
    name = PREFIX.sub("", name, count=1).replace("gaussian_def05", "gaussian05")
    words = SPELLINGS["mixtures"]
    with_weights = words["with_weights"].get(name.removesuffix("_fp32"))
    if with_weights:
        return dict(with_weights)
    kernels = []
    expected = 0
    for word in name.split("_"):
        count = COUNT.fullmatch(word)
        if count:
            expected = int(count[1])
        elif word in words["kernels"]:
            kernels.append(deepcopy(words["kernels"][word]))
        elif word and word not in words["silent"]:
            reasons = [
                why for beginning, why in words["unknown"].items() if word.startswith(beginning)
            ]
            return reasons[0] if reasons else f"its word {word!r} is not known"
    if not kernels:
        return "it names no kernels"
    if expected not in (0, len(kernels)):
        return f"it names {len(kernels)} kernels and says that they are {expected}"
    return {"kernels": kernels}


if __name__ == "__main__":
    sys.exit(main())
