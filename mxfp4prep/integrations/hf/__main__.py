"""`python -m mxfp4prep.integrations.hf MODULE_OR_SCRIPT [ARGUMENTS]`: that program, with prepared
checkpoints known to its transformers."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Runs the program that the command line names as Python would. The package is imported by
    `-m` itself, and with it registered."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m mxfp4prep.integrations.hf MODULE_OR_SCRIPT [ARGUMENTS]")
    program = sys.argv[1]
    sys.argv = sys.argv[1:]
    if Path(program).is_file():
        sys.path.insert(0, str(Path(program).resolve().parent))
        runpy.run_path(program, run_name="__main__")
    else:
        sys.path.insert(0, "")
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
