"""Audit a checkpoint from Python: which layers would run on the ASM GEMM, per degree.

    python examples/01_audit.py [MODEL_DIR]

Reads headers only and never imports torch.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.survey import survey

HERE = Path(__file__).parent
DEFAULT = HERE.parent / "tests/data/fixtures/qwen2moe-w4a4-shared-expert"


def main() -> None:
    model_dir = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT
    result = survey(open_checkpoint(model_dir), tp=(1, 2, 4, 8))
    for tp in result.tp:
        paths = Counter(verdict.path for verdict in result.decided(tp).values())
        print(f"tp {tp}:", ", ".join(f"{count} {path}" for path, count in sorted(paths.items())))
    print()
    for item in result.layers[:3]:
        verdict = item.verdicts[1]
        why = ", ".join(verdict.reasons) or "nothing stands in the way"
        print(f"{item.layer.name}: scale {verdict.scale_shard}: {verdict.path} ({why})")
    for finding in result.findings:
        print(f"{finding.severity}: {finding.where}: {finding.message}")


if __name__ == "__main__":
    main()
