"""What the page says about protocols and probes."""

PROTOCOLS = {
    "equal_tokens": "The same stretch of held-out text for every model and length, cut into windows of each length:"
    " every length is scored on the same targets, and a target near the start of its window sees little before it.",
    "paper": "As KERPLE and MEP evaluated: the same number of windows at every length, in the order of their training"
    " code's dataset, shuffled by the seed of the run. Every length and every seed scores other text.",
    "tail": "Loss on the last tokens of each window only: the same targets see a longer context at each length.",
    "position": "Loss by position, from one pass over the longest windows; shorter lengths are prefixes of these.",
    "sliding": "Windows that overlap: each scores only the tokens that the one before has not, so that every target has"
    " most of a window before it.",
    "within_document": "Windows that lie inside one document: what is far away belongs to the same text.",
}
UNKNOWN = "A protocol that this page has no description of; the code that wrote the rows has."
PROBES = {
    "passkey": "A cue and a needle of random tokens once in held-out text; the cue again at the end: what comes next?",
    "copy": "A random string and the same string again; depth is the place in the string.",
    "recall": "Pairs of key and value spread over held-out text; at the end every key again: what was its value?",
    "receptive_field": "Share of the gradient of the last token's loss that falls on the tokens up to a distance"
    " (Sandwich, arXiv 2212.10356).",
    "attention": "Share of attention that goes to a distance or further, over the last 256 queries and all heads.",
}
GAIN = (
    "Accuracy is the share of answers that are the argmax (guessing: {chance:.2g}). Gain is how much more"
    " log-probability an answer has than in the same context with another answer in its place, in nats; 0 is what a"
    " model gets that retrieves nothing."
)
OVER_SEEDS = (
    "Mean over seeds ± standard deviation, which is the band of the figure. Of one seed: 95 % interval over its"
    " windows, of which neighbours are alike; what another seed would change is not in it."
)
BANDS = (
    "In the figure the band of one seed is the interval of its difference from {reference}, which has none: that some"
    " windows are harder is the same for all."
)
BOLD = (
    "Bold: the lowest mean of a column, and those whose 95 % interval of the difference from it, paired by window or"
    " seed, holds 0."
)
DIFFERENCES = (
    "Loss by position minus that of {reference} on the same text, over half octaves of position, mean over seeds; below"
    " zero is better. A curve ends where it is more than 1 nat away."
)
