"""From text to samples: corpora, tokenizers, token files, splits, batches."""
