"""The sections of the configuration: every key with its type, default and description."""
