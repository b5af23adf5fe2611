"""Probes: what a perplexity does not show.

retrieval asks whether a model can use far tokens, ruler whether it can tell keys apart, follow
chains and count, receptive_field which tokens change its output, attention how far back it attends.
"""
