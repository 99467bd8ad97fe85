"""Load a prepared checkpoint with transformers, generate, save it, prove that the copy is whole.

    python examples/05_transformers.py [PREPARED_DIR]

Without an argument it prepares a small mixture-of-experts checkpoint first. The one line that a
program of yours needs beside its usual ones is `import mxfp4prep.integrations.hf`.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import mxfp4prep.integrations.hf  # makes prepared checkpoints known to transformers
from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.convert import convert
from mxfp4prep.errors import Mxfp4PrepError
from mxfp4prep.plan import make_plan, surveyed_degrees
from mxfp4prep.prepared import open_prepared
from mxfp4prep.survey import survey
from mxfp4prep.verify import verify

HERE = Path(__file__).parent
DEFAULT = HERE.parent / "tests/data/fixtures/qwen2moe-w4a4-shared-expert"


def run(prepared_dir: Path, saved_dir: Path) -> None:
    mxfp4prep.integrations.hf.register(verify=True)  # every tensor's digest is compared
    model = AutoModelForCausalLM.from_pretrained(prepared_dir, dtype="auto")
    kinds = Counter(type(module).__name__ for module in model.modules())
    stored = {name: count for name, count in kinds.items() if name.startswith("Stored")}
    print(f"{type(model).__name__}: {stored}")
    print(model.model.layers[0].mlp)

    prompt = torch.arange(8).unsqueeze(0)
    tokens = model.generate(prompt, do_sample=False, max_new_tokens=8, pad_token_id=0)
    print(f"\ntokens: {tokens[0, 8:].tolist()}")

    model.save_pretrained(saved_dir)
    report = verify(saved_dir, "full")
    print(f"saved: {report.files} files, {len(report.problems)} problems")


def prepare(out: Path) -> Path:
    source = survey(open_checkpoint(DEFAULT), surveyed_degrees((1,)))
    return convert(make_plan(source, (1,)), out).out


def main() -> None:
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        given = open_prepared(Path(sys.argv[1])).root if sys.argv[1:] else None
        run(given or prepare(root / "prepared"), root / "saved")


if __name__ == "__main__":
    try:
        main()
    except Mxfp4PrepError as error:  # says what is wrong, and where
        sys.stderr.write(f"error: {error}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        sys.exit(error.exit_code)
