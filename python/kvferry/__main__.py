# SPDX-License-Identifier: Apache-2.0
"""The program ``kvferry`` (docs/cli.md), as ``python -m kvferry`` and as the script that the wheel installs."""

import os
import sys

from ._kvferry import _main


def main() -> int:
    sys.stdout.flush()
    return _main([os.fsencode(argument) for argument in ["kvferry", *sys.argv[1:]]])


if __name__ == "__main__":
    sys.exit(main())
