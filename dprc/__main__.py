"""``python -m dprc``: the same as the console script."""

import sys

from dprc.cli import main

if __name__ == "__main__":
    sys.exit(main())
