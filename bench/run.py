"""Speed and memory of the command line against plain `cp` and the stated limits, as JSON.

    python bench/run.py [--only convert,manifest,audit,real,start] [--dir DIR] [--layers 8]
                        [--runs 5]

Every ratio compares two things measured in turn in the same run, so a slow or busy machine moves
both. Sizes are decimal (MB = 10^6 bytes).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import checkpoints
import measure

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import real_models

LIMITS = {
    "convert_ratio_to_cp": 1.25,
    "convert_extra_memory_mb": 400,
    "manifest_mb": 30,
    "manifest_load_s": 1.5,
    "audit_s": 2.0,
    "audit_mb": 300,
    "help_s": 0.4,
}

LOAD_MANIFEST = """
import pathlib, sys, time
from mxfp4prep.manifest import parse
raw = pathlib.Path(sys.argv[1]).read_bytes()
started = time.perf_counter()
manifest = parse(raw)
print(time.perf_counter() - started, len(manifest.layers))
"""


def bench_convert(work: Path, layers: int, runs: int) -> dict[str, Any]:
    """convert against `cp -r` and `sync`, alternating, after one pass to warm the page cache.

    The third of each round is the floor of the machine for the same guarantee with plain tools: the
    copy, the sync, and sha256sum of every file, two at a time.
    """
    source = work / "source"
    made = checkpoints.write(
        source, checkpoints.dense_layers(layers), shard_nbytes=1 << 30, fill=True
    )
    os.sync()
    subprocess.run(["cat", *map(str, source.iterdir())], stdout=subprocess.DEVNULL, check=True)
    copies, converts, floors = [], [], []
    copy = f"cp -r '{source}' '{work / 'copy'}' && sync"
    sums = f"find '{work / 'copy'}' -type f -print0 | xargs -0 -n 1 -P 2 sha256sum"
    for _ in range(runs):
        copies.append(measure.run(["sh", "-c", copy]))
        _remove(work / "copy")
        converts.append(
            measure.run(
                [*measure.mxfp4prep(), "convert", source, work / "prepared", "--no-progress"]
            )
        )
        _remove(work / "prepared")
        floors.append(measure.run(["sh", "-c", f"{copy} && {sums}"]))
        _remove(work / "copy")
    floor_ratios = [b["wall_s"] / a["wall_s"] for a, b in zip(floors, converts, strict=True)]
    ratios = [b["wall_s"] / a["wall_s"] for a, b in zip(copies, converts, strict=True)]
    one = measure.run(
        [*measure.mxfp4prep(), "convert", source, work / "prepared", "--workers", "1", "-q"]
    )
    full = measure.run([*measure.mxfp4prep(), "verify", work / "prepared", "--full"])
    largest = made["largest_tensor_nbytes"] / 1e6
    peak = max(run["peak_mb"] for run in converts)
    _remove(source)
    _remove(work / "prepared")
    return {
        **made,
        "cp_and_sync_s": measure.spread([run["wall_s"] for run in copies]),
        "convert_s": measure.spread([run["wall_s"] for run in converts]),
        "convert_cpu_s": measure.spread([run["cpu_s"] for run in converts]),
        "ratio": measure.spread(ratios),
        "ratio_of_medians": round(
            measure.spread([r["wall_s"] for r in converts])["median"]
            / measure.spread([r["wall_s"] for r in copies])["median"],
            3,
        ),
        "cp_sync_and_sha256sum_s": measure.spread([run["wall_s"] for run in floors]),
        "ratio_to_cp_sync_and_sha256sum": measure.spread(floor_ratios),
        "import_torch_s": measure.spread(
            [measure.run([sys.executable, "-c", "import torch"])["wall_s"] for _ in range(runs)]
        ),
        "one_worker_s": round(one["wall_s"], 2),
        "verify_full_s": round(full["wall_s"], 2),
        "peak_mb": round(peak, 1),
        "peak_one_worker_mb": round(one["peak_mb"], 1),
        "peak_limit_mb": round(2 * largest + LIMITS["convert_extra_memory_mb"], 1),
    }


def bench_manifest(work: Path) -> dict[str, Any]:
    """Size and load time of the manifest of 70,272 layers (61 layers, 384 experts)."""
    source = work / "experts"
    made = checkpoints.write(
        source,
        checkpoints.expert_layers(61, 384, 256, 64),
        tensors_per_shard=1600,
        fill=False,
        model_type="kimi_k2",
    )
    prepared = work / "experts-prepared"
    convert = measure.run([*measure.mxfp4prep(), "convert", source, prepared, "-q"])
    path = prepared / "mxfp4prep.json"
    loads = []
    for _ in range(5):
        text = subprocess.run(
            [sys.executable, "-c", LOAD_MANIFEST, str(path)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        seconds, count = text.split()
        loads.append(float(seconds))
    result = {
        "layers": int(count),
        "tensors": made["tensors"],
        "manifest_mb": round(path.stat().st_size / 1e6, 2),
        "digests_mb": round((prepared / "mxfp4prep.digests.json").stat().st_size / 1e6, 2),
        "load_s": measure.spread(loads),
        "convert_s": round(convert["wall_s"], 2),
    }
    _remove(source)
    _remove(prepared)
    return result


def bench_audit(work: Path, runs: int) -> dict[str, Any]:
    """audit of 100 header-only shards with 100,000 tensors, text and JSON; torch must stay out."""
    source = work / "headers"
    made = checkpoints.write(
        source,
        checkpoints.expert_layers(66, 253, 4096, 1536),
        tensors_per_shard=1003,
        fill=False,
        model_type="qwen3_moe",
    )
    result = {**made, **_audits(source, runs)}
    _remove(source)
    return result


def bench_real(work: Path, runs: int) -> dict[str, Any]:
    """audit of Qwen3-235B's headers at real size: the model the limits were set for."""
    source = work / "qwen3-235b"
    made = real_models.write(source, real_models.MODELS["qwen3-235b"])
    result = {**made, **_audits(source, runs)}
    _remove(source)
    return result


def _audits(source: Path, runs: int) -> dict[str, Any]:
    """Time and memory of audit as text and as JSON, and whether it imports torch."""
    result: dict[str, Any] = {}
    for kind in ("text", "json"):
        audits = [
            measure.run(
                [*measure.mxfp4prep(), "audit", source, "--format", kind, "--fail-on", "never"]
            )
            for _ in range(runs)
        ]
        result[f"{kind}_s"] = measure.spread([run["wall_s"] for run in audits])
        result[f"{kind}_cpu_s"] = measure.spread([run["cpu_s"] for run in audits])
        result[f"{kind}_mb"] = measure.spread([run["peak_mb"] for run in audits])
    probe = (
        "import sys; from mxfp4prep.cli import main; sys.argv = ['mxfp4prep', 'audit', sys.argv[1],"
        " '--fail-on', 'never']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, str(source)], capture_output=True, text=True, check=True
    )
    result["imports_torch"] = done.stderr.strip().endswith("True")
    return result


def bench_start(runs: int) -> dict[str, Any]:
    """`mxfp4prep --help` and --version, against an interpreter that only imports typer."""
    result = {}
    commands = {
        "help_s": [*measure.mxfp4prep(), "--help"],
        "version_s": [*measure.mxfp4prep(), "--version"],
        "python_and_typer_s": [sys.executable, "-c", "import typer"],
    }
    for name, command in commands.items():
        result[name] = measure.spread([measure.run(command)["wall_s"] for _ in range(runs)])
    return result


def _remove(path: Path) -> None:
    shutil.rmtree(path)


def main() -> None:
    """Runs the chosen benchmarks and prints one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="start,audit,real,manifest,convert")
    parser.add_argument("--dir", type=Path, default=None, help="where to make the checkpoints")
    parser.add_argument("--layers", type=int, default=9, help="Llama-70B layers, 0.455 GB each")
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    results: dict[str, Any] = {"limits": LIMITS, "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory(dir=given.dir, prefix="mxfp4prep-bench-") as folder:
        work = Path(folder)
        for name in given.only.split(","):
            print(f"{name} ...", file=sys.stderr, flush=True)
            if name == "convert":
                results[name] = bench_convert(work, given.layers, given.runs)
            elif name == "manifest":
                results[name] = bench_manifest(work)
            elif name == "audit":
                results[name] = bench_audit(work, given.runs)
            elif name == "real":
                results[name] = bench_real(work, given.runs)
            else:
                results[name] = bench_start(max(given.runs, 5))
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
