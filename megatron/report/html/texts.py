"""The captions of the page."""

PROTOCOLS = {
    "equal_tokens": "The same held-out tokens for every model and length, cut into windows. Tokens"
    " near the start of a window have little context.",
    "paper": "As in the KERPLE and MEP papers: equally many windows at every length, shuffled by"
    " the run's seed. The text differs between lengths and between seeds.",
    "tail": "Only the last tokens of each window are scored: the same tokens at every length, with"
    " more context at longer ones.",
    "position": "One pass over the longest windows. A shorter length is the mean over their first"
    " tokens.",
    "sliding": "Windows overlap. Each scores only new tokens, so nearly all have a long context.",
    "within_document": "Every window lies inside one document.",
}
UNKNOWN = "This page has no description of this protocol."

# What the band of a curve is, by `Curve.band`.
BANDS = {
    "seeds": "Bands: one standard deviation over seeds.",
    "windows": "Bands of single seeds: 95 % interval over windows; other seeds would differ more.",
    "paired": "Bands of single seeds: 95 % interval of the difference from {reference}, which has"
    " no band; other seeds would differ more.",
}
MEANS = "Means over seeds."
NEAR = "Only the curves that stay below twice the lowest value."
OF_SEEDS = "Mean ± standard deviation over seeds."
OF_WINDOWS = (
    "In brackets, for single seeds: 95 % interval over windows; other seeds would differ more."
)
BOLD = (
    "Bold: the lowest mean of a column, and those whose 95 % interval of the difference from it"
    " (over seeds) contains 0."
)
NOT_BOLD = (
    "Nothing is bold: which encoding is lower is a claim about training, and needs at least"
    " {seeds} seeds of each."
)
BITS = (
    "Bits per byte of text (mean over seeds): unlike perplexity, it can be compared between"
    " tokenizers."
)
ACROSS = (
    "Each row is a run. Tokenizers that differ cut different text out of the same number of tokens:"
    " compare runs that scored about the same bytes."
)
PAIRED = (
    "Loss minus the loss of {reference} on the same text, in nats. In brackets: 95 % interval,"
    " {about}. Hover for the ratio of perplexities and each seed's difference."
)
BY_SEED = "The same difference for each training seed. Hover for the seed."
POSITIONS = (
    "Loss by position in the longest windows. Each point is a mean from position p to about 1.4 p."
)
DIFFERENCES = (
    "Loss minus the loss of {reference} on the same text: below zero is better. Each point is a"
    " mean from position p to about 1.4 p. A curve ends where it exceeds 1 nat."
)

TRAINING = {
    "train": "Training loss by step.",
    "valid": "Validation loss by step.",
}

PROBES = {
    "passkey": "Held-out text contains a cue and random tokens after it; the cue is repeated at"
    " the end. Does the model repeat the tokens?",
    "copy": "A random string stands twice. Does the model predict the second one? Depth: position"
    " in the string.",
    "recall": "Held-out text contains keys with values; each key is repeated at the end. Does the"
    " model repeat its value?",
    "multikey": "Held-out text contains four needles, each a key of two tokens and a value. Keys"
    " share their tokens, so only both together name a needle. One key is repeated at the end. Does"
    " the model name its value?",
    "multikey_dense": "The same where needles fill the whole context.",
    "variable_tracking": "Held-out text contains chains of assignments: a variable has a value, the"
    " next one has the first, and so on. Does the model name the value of a variable that is some"
    " assignments away?",
    "common_words": "Of 36 words in a list, 4 occur four times as often as the others. Does the"
    " model name them?",
    "frequent_words": "The words of a list have counts that fall as 1 / rank. Does the model name"
    " the first three in their order?",
    "receptive_field": "The gradient of the last token's loss: its fraction within a distance"
    " (Sandwich, arXiv 2212.10356).",
    "attention": "The probability of attention at a distance or further, mean over heads and the"
    " last 256 queries.",
}
GAIN = (
    "Accuracy: the fraction of answer tokens with the highest logit (guessing: {chance:.2g})."
    " Gain: how much the answer in the context raises their log-probability, in nats."
)
GUESS = (
    "Guess rate: the accuracy of a model that draws among what the context offers (the values of"
    " all needles or chains, the tokens of the list) without regard to key, chain or count. In"
    " brackets beneath an accuracy: 95 % Wilson interval over contexts."
)
SPEED = (
    "Tokens per second through the model. Evaluation (eval): mean over rows. Training: median of"
    " the log."
)
