#!/usr/bin/env python
"""Start a script on all devices: python deepy.py train.py FILE… key=value… (see --help)."""

import sys

from megatron.commands.deepy import main

if __name__ == "__main__":
    main(sys.argv[1:])
