"""Words in columns, for the terminal."""

from collections.abc import Sequence


def in_columns(lines: Sequence[Sequence[str]]) -> list[str]:
    """A text line for each line of words. Every column begins at the same place in all of them."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for words in lines:
        padded = [word.ljust(width) for word, width in zip(words, widths, strict=True)]
        texts.append("  ".join(padded).rstrip())
    return texts
