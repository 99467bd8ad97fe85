"""Audit a checkpoint from Python: what will happen when it is served, per degree.

    python examples/01_audit.py [MODEL_DIR or ORG/NAME]

Reads headers only and never imports torch.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from mxfp4prep import Mxfp4PrepError
from mxfp4prep.auditing import EngineQuestion, run_audit
from mxfp4prep.report.recommendation import recommend

HERE = Path(__file__).parent
DEFAULT = HERE.parent / "tests/data/fixtures/qwen2moe-w4a4-shared-expert"


def main() -> None:
    source = sys.argv[1] if len(sys.argv) > 1 else str(DEFAULT)
    audit = run_audit(source, tp=(1, 2, 4, 8), engine=EngineQuestion("vllm-0.33"))
    for tp, cost in audit.costs.items():
        paths = Counter(made[tp].path for made in audit.decisions.values())
        counts = ", ".join(f"{count} {path}" for path, count in sorted(paths.items()))
        print(f"tp {tp}: {counts}; the fullest rank holds {cost.rank_nbytes:,} bytes")
        if audit.prediction is not None:
            ends = Counter(made[tp].outcome for made in audit.prediction.outcomes.values())
            print(f"    {audit.prediction.engine.name}: {dict(ends)}")
    print()
    for item in audit.survey.layers[:3]:
        verdict = item.verdicts[1]
        why = ", ".join(verdict.reasons) or "nothing stands in the way"
        print(f"{item.layer.name}: scale {verdict.scale_shard}: {verdict.path} ({why})")
    for finding in audit.findings:
        print(f"{finding.severity}: {finding.where}: {finding.message}")
    print()
    print(recommend(audit))


if __name__ == "__main__":
    try:
        main()
    except Mxfp4PrepError as error:  # says what is wrong, and where
        sys.stderr.write(f"error: {error}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        sys.exit(error.exit_code)
