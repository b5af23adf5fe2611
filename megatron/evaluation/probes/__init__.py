"""What perplexity hides: whether far tokens are found again (retrieval), which of them act (receptive_field) and where
attention looks (attention)."""
