"""The commands: each module parses its options and calls the package."""
