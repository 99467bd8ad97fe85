"""Shows that a conversion's bytes depend on its input alone.

    python tests/attacks/determinism.py [--rounds 8] [--locales DIR]

Processes with different hash seeds and locales each convert one checkpoint again and again, each
time with other workers, umask, time zone, working directory and spelling of the paths; each audits
it, too. Every file must have one SHA-256 throughout, and mode 0666 less the umask. 8 rounds are 72
conversions. DIR is for the locale that few machines have, tr_TR.UTF-8: localedef compiles it there.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]

WORKERS = ("1", "2", "4")
UMASKS = (0o022, 0o077, 0o000, 0o027)
ZONES = ("UTC", "Asia/Kathmandu", "America/St_Johns", "XYZ-13:30")
ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {"PYTHONHASHSEED": "0", "LC_ALL": "C"},
    {"PYTHONHASHSEED": "1", "LC_ALL": "C.UTF-8"},
    {"PYTHONHASHSEED": "random", "LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8"},
)
"""Of one process each."""

SIDE_FILES = {
    "tokenizer.json": b"{}\n",
    "code/modeling.py": b"x = 1\n",
    "code/deep/notes.txt": b"\n",
    "donn\u00e9es/\u0130stanbul.txt": b"i\n",
}


def write_source(root: Path) -> Path:
    """A checkpoint with both paths, NaN scales, an index to mend and names of many kinds."""
    import torch
    from quark_factory import write_checkpoint

    bank = "model.layers.1.mlp.experts"
    linears = {
        "model.layers.0.mlp.gate_proj": (64, 256),
        "model.layers.0.mlp.up_proj": (64, 256),
        "model.layers.0.mlp.down_proj": (256, 160),
        "model.layers.0.self_attn.o_proj": (96, 256),
        "model.layers.0.\u0130I\u0131i": (32, 256),
        **{f"{bank}.{e}.{part}": (64, 256) for e in range(4) for part in ("gate_proj", "up_proj")},
    }
    nan = torch.full((64, 8), 255, dtype=torch.uint8)
    extra = {f"odd.{name}": torch.ones(4) for name in ("b", "a", "\u00e9", "10", "9")}
    write_checkpoint(root, linears, extra=extra, shards=3, side_files=SIDE_FILES)
    _set(root, "model.layers.0.mlp.up_proj.weight_scale", nan)
    index = root / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"total_size": ', '"total_size": 1'))
    return root


def _set(root: Path, name: str, value: Any) -> None:
    from safetensors.torch import load_file, save_file

    for path in sorted(root.glob("*.safetensors")):
        tensors = load_file(path)
        if name in tensors:
            save_file({**tensors, name: value}, path, metadata={"format": "pt"})


def combinations(rounds: int) -> list[dict[str, Any]]:
    """How the conversions of one process differ, one for each number of workers a round."""
    return [
        {
            "workers": WORKERS[turn % 3],
            "umask": UMASKS[(turn // 3 + turn) % len(UMASKS)],
            "zone": ZONES[turn % len(ZONES)],
            "inside": turn % 2 == 1,
        }
        for turn in range(3 * rounds)
    ]


def inside(source: Path, work: Path, rounds: int) -> dict[str, Any]:
    """{"files": {name: digests}, "wrong": modes, "conversions": count, "locale": its name}."""
    import locale

    from mxfp4prep import cli

    try:
        locale.setlocale(locale.LC_ALL, "")
        told = locale.setlocale(locale.LC_ALL)
    except locale.Error:
        told = "not here"
    seen: dict[str, set[str]] = {}
    wrong = []
    turns = combinations(rounds)
    for number, turn in enumerate(turns):
        os.environ["TZ"] = str(turn["zone"])
        time.tzset()
        out = work / f"out-{number}"
        os.chdir(source.parent if turn["inside"] else "/")
        words = [source.name, os.path.relpath(out)] if turn["inside"] else [source, out]
        before = os.umask(int(turn["umask"]))
        try:
            code = cli.main(
                ["convert", *map(str, words), "--tp", "1,2", "--workers", turn["workers"], "-q"]
            )
        finally:
            os.umask(before)
        assert code == 0, code
        for path in out.rglob("*"):
            expected = (0o777 if path.is_dir() else 0o666) & ~int(turn["umask"])
            if stat.S_IMODE(path.stat().st_mode) != expected:
                wrong.append(f"{path}: {path.stat().st_mode:o}, not {expected:o}")
            if path.is_file():
                name = path.relative_to(out).as_posix()
                seen.setdefault(name, set()).add(hashlib.sha256(path.read_bytes()).hexdigest())
        shutil.rmtree(out)
    for kind in ("json", "csv"):
        text = io.StringIO()
        with redirect_stdout(text):
            words = ["audit", str(source), "--format", kind, "--html", str(work / "page.html")]
            cli.main([*words, "--engine", "vllm-0.33", "--values", "--no-progress"])
        seen.setdefault(f"audit.{kind}", set()).add(_sha256(text.getvalue().encode()))
        seen.setdefault("audit.html", set()).add(_sha256((work / "page.html").read_bytes()))
    os.chdir("/")
    files = {name: sorted(digests) for name, digests in seen.items()}
    return {"files": files, "wrong": wrong, "conversions": len(turns), "locale": told}


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def outside(
    source: Path, work: Path, rounds: int, locales: Path | None = None
) -> list[dict[str, Any]]:
    """What `inside` says in a process of each of ENVIRONMENTS, one after the other."""
    said = []
    for number, changes in enumerate(ENVIRONMENTS):
        folder = work / f"process-{number}"
        folder.mkdir()
        env = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG"))} | changes
        if locales is not None:
            env["LOCPATH"] = str(locales)
        done = subprocess.run(
            [sys.executable, __file__, "--inside", str(source), str(folder), str(rounds)],
            env=env,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said.append(json.loads(done.stdout.splitlines()[-1]))
    return said


def compile_locales(folder: Path) -> Path:
    """`folder` with the locale that few machines have: its i is no I in lower case."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "tr_TR.UTF-8"
    subprocess.run(["localedef", "-i", "tr_TR", "-f", "UTF-8", str(target)], check=True)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--locales", type=Path)
    parser.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    if given.inside:
        source, work, rounds = given.inside
        print(json.dumps(inside(Path(source), Path(work), int(rounds))))
        return 0
    locales = compile_locales(given.locales) if given.locales else None
    with tempfile.TemporaryDirectory(prefix="mxfp4prep-determinism-") as folder:
        source = write_source(Path(folder) / "model")
        said = outside(source, Path(folder), given.rounds, locales)
    several = {
        name: digests
        for name in said[0]["files"]
        if len(digests := {d for each in said for d in each["files"][name]}) > 1
    }
    wrong = [line for each in said for line in each["wrong"]]
    for line in (*wrong, *(f"{name}: {len(d)} digests" for name, d in several.items())):
        print(line)
    count = sum(each["conversions"] for each in said)
    places = ", ".join(each["locale"] for each in said)
    print(f"{count} conversions, {len(said[0]['files'])} files each, locales {places}: ", end="")
    print("not the same" if several or wrong else "one digest a file, modes as the umask has them")
    return 1 if several or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
