"""Write docs/commands, a page for each command: see --help."""

from megatron.commands.document_commands import main

if __name__ == "__main__":
    raise SystemExit(main())
