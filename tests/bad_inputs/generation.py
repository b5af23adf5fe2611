"""Bad words, prompts and checkpoints of generate.py."""

from tests.bad_inputs.case import Case

WORDS = ["generate.py", "--checkpoint", "{trained}", "--prompt", "a"]


def case(name: str, message: str, *words: str, **changes) -> Case:
    return Case(f"generation {name}", [*WORDS, *words], message, **changes)


def prompts(name: str, message: str, content: str | bytes, file: str = "p.jsonl") -> Case:
    """A file of prompts that cannot be used."""
    words = ["generate.py", "--checkpoint", "{trained}", "--prompts", file]
    return Case(f"prompts {name}", words, message, {file: content})


CASES: list[Case] = [
    Case(
        "generation without a checkpoint",
        ["generate.py", "--checkpoint", "nowhere", "--prompt", "a"],
        "checkpoint: no folder nowhere - train first, or set load to the folder that training"
        " saved to",
    ),
    case(
        "with wrong numbers",
        "--temperature -1.0: give 0 for the likeliest token, or more\n"
        "--top-k 0: give a number of tokens of at least 1, or leave it out\n"
        "--top-p 2.0: give a probability above 0 and up to 1, or leave it out\n"
        "--repetition-penalty -1.0: give a number of 0.000001 to 1000000; 1 is none\n"
        "--max-new-tokens 0: give a whole number of 1 to 16777216",
        *("--temperature", "-1", "--top-k", "0", "--top-p", "2"),
        *("--repetition-penalty", "-1", "--max-new-tokens", "0"),
    ),
    case(
        "with sinks alone",
        "--sinks 3: without a window all keys are visible; give --window too",
        *("--sinks", "3"),
    ),
    case(
        "with an empty stop string",
        "--stop: an empty string would end every text at once; leave it out",
        *("--stop", ""),
    ),
    case(
        "of a file that is not there",
        "--prompt-file: gone.txt cannot be read as text ([Errno 2] No such file or directory:"
        " 'gone.txt')",
        *("--prompt-file", "gone.txt"),
    ),
    prompts("without a line", "--prompts: p.txt has no line with a prompt", "\n \n", "p.txt"),
    prompts("of no JSON", "--prompts: p.jsonl: no has no prompt", '{"prompt": "a"}\nno\n'),
]
