"""Bad YAML files, keys and values."""

from tests.bad_inputs.case import TRAIN, Case

CASES: list[Case] = [
    Case(
        "unknown key",
        [*TRAIN, "num_layer=3"],
        "bad configuration (command line)\n  num_layer: no such key; did you mean num_layers?",
    ),
]
