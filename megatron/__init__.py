"""A GPT-NeoX-style pretraining framework for research on positional encodings and length extrapolation."""
