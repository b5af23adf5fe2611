"""What the numbers of an evaluation may be."""

BOUNDS = {
    "step": (0, 10**12),
    "lengths": (1, 2**24),  # beyond, positions are not exact in float32
    "windows": (1, 10**6),
    "start": (0, 10**12),
    "tail": (1, 2**24),
    "stride": (1, 2**24),
    "depths": (1, 1000),
    "trials": (1, 10**6),
    "probe_seed": (0, 2**63 - 1),
}
"""The least and the largest value of each option."""
LONGEST_SHOWN = 40  # characters of a wrong value


def number_fault(option: str, value: int) -> str | None:
    """What is wrong with the value of an option; None: nothing."""
    least, largest = BOUNDS[option]
    if least <= value <= largest:
        return None
    text = str(value)
    if len(text) > LONGEST_SHOWN:
        text = f"{text[:LONGEST_SHOWN]}…"
    return f"{text} is beyond its bounds - give {least} to {largest:,}"
