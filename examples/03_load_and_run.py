"""Load a prepared checkpoint and run its layers on a CPU: whole, and as two tensor-parallel ranks.

    python examples/03_load_and_run.py [PREPARED_DIR]

Without an argument it prepares a small checkpoint first.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

import mxfp4prep
from mxfp4prep import Mxfp4PrepError
from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.convert import convert
from mxfp4prep.plan import make_plan, surveyed_degrees
from mxfp4prep.survey import survey

HERE = Path(__file__).parent
DEFAULT = HERE.parent / "tests/data/fixtures/llama-w4a4-aligned"


def run(prepared_dir: Path) -> None:
    prepared = mxfp4prep.load(prepared_dir)
    print(f"{len(prepared)} layers; backends:")
    for backend in mxfp4prep.backends():
        print(f"  {backend.name}: {'available' if backend.available else backend.reason}")

    name = next((name for name in prepared.names if name.endswith("down_proj")), None)
    if name is None:
        sys.exit(f"{prepared_dir}: no down_proj, which this example runs")
    layer = prepared[name]
    print(f"\n{name}\n{layer}")
    x = torch.randn(4, layer.k, dtype=torch.bfloat16)
    whole = layer(x)

    # Row-parallel: each rank holds half of the columns, takes half of the input, and the outputs
    # are summed (an all-reduce in an engine).
    ranks = [mxfp4prep.load(prepared_dir, tp_rank=rank, tp_size=2)[name] for rank in (0, 1)]
    halves = x.chunk(2, dim=-1)
    summed = sum(rank(half.float()) for rank, half in zip(ranks, halves, strict=True))
    print(
        f"two ranks of {ranks[0].n} x {ranks[0].k}:", (summed - layer(x.float())).abs().max().item()
    )
    print("output:", tuple(whole.shape), whole.dtype)


def main() -> None:
    if len(sys.argv) > 1:
        run(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        tp = (1, 2)
        plan = make_plan(survey(open_checkpoint(DEFAULT), surveyed_degrees(tp)), tp)
        run(convert(plan, Path(folder) / "prepared").out)


if __name__ == "__main__":
    try:
        main()
    except Mxfp4PrepError as error:  # says what is wrong, and where
        sys.stderr.write(f"error: {error}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        sys.exit(error.exit_code)
