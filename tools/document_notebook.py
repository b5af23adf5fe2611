"""Run docs/first_encoding.ipynb and keep its outputs: see --help."""

from megatron.commands.document_notebook import main

if __name__ == "__main__":
    raise SystemExit(main())
