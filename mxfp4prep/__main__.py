"""`python -m mxfp4prep`, and what the `mxfp4prep` command runs: signals first, then all the rest.

Importing the command line takes a tenth of a second and more, in which Ctrl-C is to end it as
quietly as later.
"""

import sys

from mxfp4prep.stopping import AtOnce


def main() -> int:
    """Runs the command line of this process and returns its exit code."""
    at_once = AtOnce()
    at_once.take()
    from mxfp4prep.cli import main as run

    at_once.code = run()
    return at_once.code


if __name__ == "__main__":
    sys.exit(main())
