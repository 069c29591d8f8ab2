"""`python -m fpmjax` is the command `fpmjax`."""

import sys

from fpmjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
