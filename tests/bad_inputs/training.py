"""Training that cannot start: folders, logging, signals and the optimizer."""

from tests.bad_inputs.case import TRAIN, Case


def of_word(word: str, line: str) -> Case:
    """A training with one more word; line: the fault."""
    return Case(word, [*TRAIN, word], f"bad configuration (command line)\n  {line}")


CASES: list[Case] = [
    of_word("exit_interval=-1", "exit_interval: must be >= 0, got -1"),
    of_word("exit_duration=0", "exit_duration: must be > 0, got 0"),
    of_word("skip_nonfinite=-1", "skip_nonfinite: must be >= 0, got -1"),
    of_word("extra_save_iters=[5,-1]", "extra_save_iters: must be >= 0, got -1"),
    of_word("checkpoint_scale=exp", "checkpoint_scale: must be linear or log, got 'exp'"),
    of_word(
        "checkpoint_scale=log",
        "checkpoint_scale: log saves at the powers of save_interval = 0;"
        " set save_interval to 2 or more",
    ),
]
