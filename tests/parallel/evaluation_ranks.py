"""Several evaluations by two ranks that share each window.

evaluation_ranks.py FILE WORDS writes rows of each, or why it is refused; WORDS is JSON, by a name.
"""

import json
import sys
from pathlib import Path

from evaluate import add_all_options
from megatron.cli_errors import command_parser
from megatron.entry import load_configuration, settings_first
from megatron.errors import UserError
from megatron.evaluation.evaluate_checkpoint import evaluate
from megatron.evaluation.options import Options
from megatron.parallel.grid import here, left_at_the_end

SHARED = ["context_parallel_size=2"]


def results(cases: dict[str, list[str]], *more: str) -> dict[str, list[dict] | str]:
    """What evaluate.py finds for the words of each case."""
    answers: dict[str, list[dict] | str] = {}
    for name, words in cases.items():
        parser = command_parser("")
        parser.add_argument("words", nargs="*")
        add_all_options(parser)
        options = parser.parse_intermixed_args(settings_first([*words, *more]))
        try:
            config = load_configuration([], options.words, options, "evaluate", needed=False)
            [rows] = evaluate(config, Options.of(options)).rows.values()
            answers[name] = [dict(row) for row in rows]
        except UserError as fault:
            answers[name] = str(fault)
    return answers


if __name__ == "__main__":
    with left_at_the_end():
        answers = results(json.loads(sys.argv[2]), *SHARED)
        if here().first:
            Path(sys.argv[1]).write_text(json.dumps(answers))
