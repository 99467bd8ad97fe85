"""Prepare a checkpoint, prove the result, undo it, and compare with the original.

    python examples/02_convert_and_verify.py [MODEL_DIR]

Writes to a temporary directory only.
"""

from __future__ import annotations

import filecmp
import sys
import tempfile
from pathlib import Path

from mxfp4prep import Mxfp4PrepError
from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.convert import convert
from mxfp4prep.plan import make_plan, surveyed_degrees
from mxfp4prep.restore import restore
from mxfp4prep.survey import survey
from mxfp4prep.verify import verify

HERE = Path(__file__).parent
DEFAULT = HERE.parent / "tests/data/fixtures/llama-w4a4-aligned"


def main() -> None:
    model_dir = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT
    tp = (1, 2)
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(survey(open_checkpoint(model_dir), surveyed_degrees(tp)), tp)
        for layer in plan.layers[:3]:
            print(f"{layer.layer.name}: {layer.path} {list(layer.reasons)}")

        result = convert(plan, Path(folder) / "prepared")
        print(f"wrote {len(result.manifest.files)} files, {plan.nbytes} tensor bytes")

        report = verify(result.out, "deep", model_dir)
        print(f"verify: {report.tensors} tensors, {len(report.problems)} problems")

        back = restore(result.out, Path(folder) / "restored")
        names = [p.relative_to(model_dir) for p in model_dir.rglob("*") if p.is_file()]
        _, different, missing = filecmp.cmpfiles(model_dir, back.out, names, shallow=False)
        print(f"restored {back.files} files; different or missing: {different + missing}")


if __name__ == "__main__":
    try:
        main()
    except Mxfp4PrepError as error:  # says what is wrong, and where
        sys.stderr.write(f"error: {error}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        sys.exit(error.exit_code)
