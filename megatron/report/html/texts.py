"""The captions of the page."""

PROTOCOLS = {
    "equal_tokens": "Every model and every length is scored on the same held-out tokens, cut into"
    " windows of that length. A token near the start of its window has little context.",
    "paper": "The procedure of the KERPLE and MEP papers: the same number of windows at every"
    " length, shuffled with the run's seed. Each length and each seed is scored on other text.",
    "tail": "Only the last tokens of each window are scored. They are the same tokens at every"
    " length; longer windows give them more context.",
    "position": "Loss by position, from one pass over the longest windows. Shorter lengths are the"
    " beginnings of these windows.",
    "sliding": "Windows overlap. Each scores only the tokens that no earlier window scored, so"
    " nearly every token has a long context.",
    "within_document": "Every window lies inside one document, so all context belongs to the same"
    " text.",
}
UNKNOWN = "This page has no description of this protocol."

# What the band of a curve is, by `Curve.band`.
BANDS = {
    "seeds": "Bands: one standard deviation over seeds.",
    "windows": "Bands of single seeds: 95 % interval over the windows of the text. Other seeds"
    " would differ by more.",
    "paired": "Bands of single seeds: 95 % interval of the difference from {reference} on the same"
    " text. {reference} has no band. Other seeds would differ by more.",
}
MEANS = "Means over seeds."
NEAR = "Only the curves that stay below twice the lowest value."
OF_SEEDS = "Mean ± standard deviation over seeds."
OF_WINDOWS = (
    "In brackets, for a single seed: 95 % interval over the windows of the text. Other seeds would"
    " differ by more."
)
BOLD = (
    "Bold: the lowest mean of a column, and those whose 95 % interval of the difference from it"
    " (over seeds) contains 0."
)
NOT_BOLD = (
    "Nothing is bold: which encoding is lower is a claim about training, and needs at least"
    " {seeds} seeds of each."
)
PAIRED = (
    "Loss minus the loss of {reference} on the same text, in nats. In brackets: 95 % interval,"
    " {about}. Hover for the ratio of perplexities and each seed's difference."
)
BY_SEED = "The same difference for each training seed. Hover for the seed."
POSITIONS = "Loss by position in the longest windows, averaged over half octaves of position."
DIFFERENCES = (
    "Loss by position minus the loss of {reference} on the same text, averaged over half octaves."
    " Below zero is better. A curve ends where the difference exceeds 1 nat."
)

TRAINING = {
    "train": "Training loss by step.",
    "valid": "Validation loss by step.",
}

PROBES = {
    "passkey": "A cue and random tokens stand once in held-out text. The cue is repeated at the"
    " end: does the model continue with these tokens?",
    "copy": "A random string, then the same string again: does the model predict the repetition?"
    " Depth is the place in the string.",
    "recall": "Pairs of key and value are spread over held-out text. Each key is repeated at the"
    " end: does the model continue with its value?",
    "receptive_field": "How much of the gradient of the last token's loss falls on tokens within a"
    " distance (Sandwich, arXiv 2212.10356).",
    "attention": "How much attention goes to a distance or further, averaged over the last 256"
    " queries and all heads.",
}
GAIN = (
    "Accuracy: the fraction of answers that are the model's first choice (guessing: {chance:.2g})."
    " Gain: log-probability of the answer minus that in a context with another answer, in nats; 0"
    " where nothing is retrieved."
)
SPEED = (
    "Tokens per second. Evaluation: all tokens that pass through the model, scored or not, mean"
    " over rows. Training: median of the log."
)
