"""`python -m mxfp4prep`: the same as the `mxfp4prep` command."""

import sys

from mxfp4prep.cli import main

if __name__ == "__main__":
    sys.exit(main())
