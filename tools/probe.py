"""Ask a checkpoint what perplexity hides. See --help, or megatron/commands/probe.py."""

from megatron.commands.probe import command

if __name__ == "__main__":
    command()
