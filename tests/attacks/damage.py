"""Damages a prepared checkpoint in every way that it knows, one at a time, and asks `verify` what it sees.

    python tests/attacks/damage.py                 # a tiny checkpoint made on the spot
    python tests/attacks/damage.py --bits 100000   # more random bits of tensors

Shown: for each kind of damage, how many were tried, found, and named with the tensor that they are in.
Damage is undone after each try; what is not found is printed and makes the exit code 1. Edits that are
made consistently, the manifest's digest in SHA256SUMS included, are tried too: of those, the ones that
nothing else in the directory contradicts are listed in `UNPROVABLE` and shown apart.
"""

# ruff: noqa: E501 - the description of a command

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from quark_factory import write_checkpoint

from mxfp4prep import file_checks, stream
from mxfp4prep import verify as subject
from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.convert import convert
from mxfp4prep.errors import Mxfp4PrepError
from mxfp4prep.plan import make_plan, surveyed_degrees
from mxfp4prep.prepared import open_prepared, read_digests
from mxfp4prep.survey import survey

MANIFEST, DIGESTS, SUMS = "mxfp4prep.json", "mxfp4prep.digests.json", "SHA256SUMS"
PAGE = 4096
LAYER = "model.layers.0"
LINEARS = {
    f"{LAYER}.self_attn.q_proj": (64, 256),
    f"{LAYER}.self_attn.k_proj": (64, 256),
    f"{LAYER}.self_attn.v_proj": (64, 256),
    f"{LAYER}.self_attn.o_proj": (32, 64),
    f"{LAYER}.mlp.gate_proj": (32, 64),
    f"{LAYER}.mlp.up_proj": (32, 64),
    f"{LAYER}.mlp.down_proj": (64, 32),
}
UNPROVABLE = {
    ("tool_version",),
    ("source", "name"),
    ("source", "repo"),
    ("source", "commit"),
    ("target", "expert_parallel"),  # without experts it changes nothing
}
"""Places in the manifest that no other file knows anything about."""


class Seen(NamedTuple):
    """What was reported: (file, tensor) of every problem, or the error that was raised."""

    places: frozenset[tuple[str, str | None]]
    error: str = ""

    def __bool__(self) -> bool:
        return bool(self.places or self.error)


def build(base: Path) -> tuple[Path, Path]:
    """A tiny checkpoint of one llama layer in `base`, and what convert makes of it."""
    generator = torch.Generator().manual_seed(5)
    vectors = ("input_layernorm.weight", "post_attention_layernorm.weight", "mlp.down_proj.bias")
    vectors += tuple(f"self_attn.{x}_{y}" for x in "qk" for y in ("norm.weight", "proj.bias"))
    extra = {
        f"{LAYER}.{name}": torch.randn(64, generator=generator).to(torch.bfloat16)
        for name in (*vectors, "self_attn.v_proj.bias")
    }
    source = write_checkpoint(base / "m", LINEARS, extra=extra, shards=2)
    judged = survey(open_checkpoint(source), surveyed_degrees((1,)))
    return source, convert(make_plan(judged, (1,)), base / "out", workers=1).out


@contextmanager
def small_pieces() -> Iterator[None]:
    """Files are read 64 KiB at a time: buffers of the usual size take longer to make than to fill."""
    before = stream.PIECE_NBYTES
    stream.PIECE_NBYTES = 1 << 16
    try:
        yield
    finally:
        stream.PIECE_NBYTES = before


def look(root: Path, level: str = "full", source: Path | None = None) -> Seen:
    """What `verify` says about `root`."""
    try:
        report = subject.verify(root, level, source, workers=1)
    except Mxfp4PrepError as error:
        return Seen(frozenset(), str(error))
    return Seen(frozenset((problem.file, problem.tensor) for problem in report.problems))


class ShardCheck:
    """verify's check of single shards, without the rest of verify: half a millisecond each."""

    def __init__(self, root: Path) -> None:
        files = open_prepared(root)
        self.records = {record.name: record for record in files.files("shard")}
        self.run = file_checks.new_run(files, "full")
        self.run.digests = read_digests(files)

    def __call__(self, name: str) -> Seen:
        self.run.problems.clear()
        file_checks.file_job(self.run, self.records[name])()
        return Seen(frozenset((problem.file, problem.tensor) for problem in self.run.problems))


def shards(root: Path) -> list[Path]:
    return sorted(root.glob("*.safetensors"))


def header(path: Path) -> tuple[dict[str, Any], int]:
    """The header's JSON and where the data begin, read by nothing but json."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:start]), start


def entry_spans(path: Path) -> dict[str, tuple[int, int]]:
    """Byte range in the file of each tensor's entry: from its name's quote to its brace."""
    entries, start = header(path)
    raw = path.read_bytes()[:start]
    spans = {}
    for name in entries.keys() - {"__metadata__"}:
        begin = raw.index(json.dumps(name).encode() + b":{")
        spans[name] = begin, raw.index(b"}", begin) + 1
    return spans


def data_spans(path: Path) -> dict[str, tuple[int, int]]:
    """Byte range in the file of each tensor's data."""
    entries, start = header(path)
    return {
        name: (start + entry["data_offsets"][0], start + entry["data_offsets"][1])
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def holder(spans: dict[str, tuple[int, int]], at: int) -> str | None:
    """The tensor in whose range byte `at` lies."""
    return next((name for name, (begin, end) in spans.items() if begin <= at < end), None)


@contextmanager
def flipped(fd: int, bit: int) -> Iterator[None]:
    """One bit of an open file turned over, and back."""
    [byte] = os.pread(fd, 1, bit // 8)
    os.pwrite(fd, bytes([byte ^ 1 << bit % 8]), bit // 8)
    try:
        yield
    finally:
        os.pwrite(fd, bytes([byte]), bit // 8)


@contextmanager
def replaced(path: Path, content: bytes) -> Iterator[None]:
    """A file with other content, and as it was again."""
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


def is_named(seen: Seen, file: str, tensor: str | None) -> bool:
    """Whether a problem names the file, and the tensor where there is one."""
    return any(f == file and tensor in (None, t) for f, t in seen.places)


def header_flips(root: Path) -> Iterator[tuple[str, int, str | None, Seen]]:
    """Every bit of every header: (file, bit, the tensor in whose entry it is, what was seen)."""
    check = ShardCheck(root)
    for path in shards(root):
        spans, (_, start) = entry_spans(path), header(path)
        with path.open("r+b", buffering=0) as file:
            for bit in range(8 * start):
                with flipped(file.fileno(), bit):
                    yield path.name, bit, holder(spans, bit // 8), check(path.name)


def data_flips(root: Path, count: int, seed: int = 0) -> Iterator[tuple[str, int, str, Seen]]:
    """`count` random bits of tensors: (file, bit, tensor, what was seen)."""
    check, rng = ShardCheck(root), random.Random(seed)
    paths = shards(root)
    for turn, path in enumerate(paths):
        spans, (_, start), nbytes = data_spans(path), header(path), path.stat().st_size
        with path.open("r+b", buffering=0) as file:
            for _ in range(turn, count, len(paths)):
                bit = rng.randrange(8 * start, 8 * nbytes)
                with flipped(file.fileno(), bit):
                    yield path.name, bit, holder(spans, bit // 8) or "?", check(path.name)


def swaps(root: Path) -> Iterator[tuple[set[tuple[str, str]], Seen]]:
    """Every two tensors of equal size, in one file or two: (the places, what was seen)."""
    places = [
        (path, name, *span) for path in shards(root) for name, span in data_spans(path).items()
    ]
    contents = {path: path.read_bytes() for path in shards(root)}
    for i, (path, name, begin, end) in enumerate(places):
        for other, name2, begin2, end2 in places[i + 1 :]:
            first, second = contents[path][begin:end], contents[other][begin2:end2]
            if len(first) != len(second) or first == second:
                continue
            changed = {path: bytearray(contents[path]), other: bytearray(contents[other])}
            changed[path][begin:end] = second
            changed[other][begin2:end2] = first
            for each, content in changed.items():
                each.write_bytes(content)
            yield {(path.name, name), (other.name, name2)}, look(root)
            for each in changed:
                each.write_bytes(contents[each])


def zeroed_pages(root: Path) -> Iterator[tuple[set[tuple[str, str]], Seen]]:
    """Every page of every shard's data, zeroed: (the tensors that lost bytes, what was seen)."""
    for path in shards(root):
        raw, spans, (_, start) = path.read_bytes(), data_spans(path), header(path)
        for begin in range(start, len(raw), PAGE):
            end = min(begin + PAGE, len(raw))
            hit = {
                (path.name, n)
                for n, (a, b) in spans.items()
                if any(raw[max(a, begin) : min(b, end)])
            }
            if hit:
                with replaced(path, raw[:begin] + bytes(end - begin) + raw[end:]):
                    yield hit, look(root)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every place of a JSON document that is no object, lists themselves included."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
        return
    if isinstance(value, list):
        for i, inner in enumerate(value):
            yield from leaves(inner, (*path, i))
    yield path, value


def others(value: Any) -> list[Any]:
    """Other values of the same kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value * 2 + 1]
    if isinstance(value, str):
        end = value[-1:]
        return [value[:-1] + ("1" if end == "0" else "0")]
    if isinstance(value, list):
        more = value[-1:]
        if all(type(item) is int for item in value):
            more = (
                [value[-1] + 1] if value else [1]
            )  # a degree that is there twice says nothing new
        return [value[:-1], [*value, *more]] if value else [["x"]]
    return ["x"]


def put(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of `document` with another value at one place."""
    result = copy.deepcopy(document)
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return result


def edited(document: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The document with each of its values replaced, one at a time: (place, document)."""
    for path, value in leaves(document):
        for other in others(value):
            if path:
                yield path, put(document, path, other)


def sum_again(root: Path) -> None:
    """Makes SHA256SUMS say of every file that it lists what the file is now."""
    lines = [line.split("  ", 1) for line in (root / SUMS).read_text().splitlines()]
    (root / SUMS).write_text("".join(f"{sha256(root / name)}  {name}\n" for _, name in lines))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def consistent(root: Path, changes: dict[str, bytes]) -> Iterator[None]:
    """Files with other content, and every digest of them in the manifest and the sums made to fit."""
    names = [*changes, MANIFEST, SUMS]
    before = {name: (root / name).read_bytes() for name in names}
    try:
        for name, content in changes.items():
            (root / name).write_bytes(content)
        document = json.loads((root / MANIFEST).read_bytes())
        for record in [*document["files"], document["digests"]]:
            if record["name"] in changes:
                record["sha256"] = sha256(root / record["name"])
                if "nbytes" in record:
                    record["nbytes"] = len(changes[record["name"]])
        if "source/config.json" in changes:
            document["source"]["config_sha256"] = sha256(root / "source/config.json")
        if MANIFEST not in changes:
            (root / MANIFEST).write_text(json.dumps(document))
        sum_again(root)
        yield
    finally:
        for name, content in before.items():
            (root / name).write_bytes(content)


def manifest_edits(
    root: Path, *, sums: bool, **more: object
) -> Iterator[tuple[tuple[Any, ...], Seen]]:
    """Each value of the manifest edited; with `sums`, SHA256SUMS made to fit: (place, seen).

    more   values of keys that are edited each time
    """
    document = json.loads((root / MANIFEST).read_bytes())
    for path, changed in edited(document):
        raw = json.dumps({**changed, **more}).encode()
        with consistent(root, {MANIFEST: raw}) if sums else replaced(root / MANIFEST, raw):
            yield path, look(root, "full" if sums else "quick")


def document_edits(root: Path, name: str) -> Iterator[tuple[tuple[Any, ...], Seen, Seen]]:
    """Each value of a JSON file edited: (place, seen, seen when every digest was made to fit)."""
    document = json.loads((root / name).read_bytes())
    for path, changed in edited(document):
        raw = json.dumps(changed, indent=2).encode()
        with replaced(root / name, raw):
            alone = look(root)
        with consistent(root, {name: raw}):
            yield path, alone, look(root)


def forgeries(root: Path, source: Path) -> Iterator[tuple[tuple[Any, ...], Seen]]:
    """source/config.json edited with all that follows from it: only the source knows better."""
    original = json.loads((root / "source/config.json").read_bytes())
    prepared = json.loads((root / "config.json").read_bytes())
    section = prepared["quantization_config"]
    for path, changed in edited(original):
        ours = {**changed, "quantization_config": {**section}}
        ours["quantization_config"]["source_quantization_config"] = changed["quantization_config"]
        files = {
            "source/config.json": json.dumps(changed, indent=2).encode(),
            "config.json": (json.dumps(ours, indent=2, ensure_ascii=False) + "\n").encode(),
        }
        with consistent(root, files):
            yield path, look(root, "deep", source)


def sums_edits(root: Path) -> Iterator[tuple[str, Seen]]:
    """SHA256SUMS with each line changed, dropped, doubled, renamed; reversed and padded."""
    lines = (root / SUMS).read_text().splitlines(keepends=True)
    for i, line in enumerate(lines):
        digit = "1" if line[0] == "0" else "0"
        for what, new in (
            ("digit", [digit + line[1:]]),
            ("dropped", []),
            ("doubled", [line, line]),
            ("renamed", [line.rstrip("\n") + "x\n"]),
            ("binary mark", [line.replace("  ", " *", 1)]),
        ):
            with replaced(root / SUMS, "".join([*lines[:i], *new, *lines[i + 1 :]]).encode()):
                yield f"{what}: {line.split()[1]}", look(root, "quick")
    for what, text in (
        ("reversed", "".join(reversed(lines))),
        ("a line more", "".join([*lines, f"{'0' * 64}  more\n"])),
        ("CRLF", "".join(lines).replace("\n", "\r\n")),
        ("empty", ""),
        ("noise", "\0\xff"),
    ):
        with replaced(root / SUMS, text.encode("latin-1")):
            yield what, look(root, "quick")


def file_changes(root: Path) -> Iterator[tuple[str, Seen]]:
    """Every file removed, emptied, cut, lengthened, renamed, replaced by a folder or a link to another."""
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
    other = root / names[0]
    for name in names:
        path = root / name
        raw = path.read_bytes()
        changes: dict[str, Callable[[], object]] = {
            "emptied": lambda path=path: path.write_bytes(b""),
            "cut": lambda path=path, raw=raw: path.write_bytes(raw[:-1]),
            "lengthened": lambda path=path, raw=raw: path.write_bytes(raw + b"\0"),
            "removed": path.unlink,
            "a folder": lambda path=path: (path.unlink(), path.mkdir()),
            "a link to another file": lambda path=path: (
                path.unlink(),
                path.symlink_to(other if path != other else root / names[1]),
            ),
            "a dangling link": lambda path=path: (path.unlink(), path.symlink_to("nowhere")),
            "a link to itself": lambda path=path: (path.unlink(), path.symlink_to(path)),
            "a pipe": lambda path=path: (path.unlink(), os.mkfifo(path)),
            "renamed": lambda path=path: path.rename(path.with_name(path.name + "x")),
        }
        for what, change in changes.items():
            change()
            yield (
                f"{name}: {what}",
                look(root, "full" if what == "a link to another file" else "quick"),
            )
            for left in (path, path.with_name(path.name + "x")):
                if left.is_dir() and not left.is_symlink():
                    left.rmdir()
                else:
                    left.unlink(missing_ok=True)
            path.write_bytes(raw)
    for added in (
        "extra.bin",
        "source/extra",
        "sub/extra.json",
        ".hidden",
        "model-00003-of-00003.safetensors",
    ):
        path = root / added
        had = path.parent.exists()
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
        yield f"{added}: added", look(root, "quick")
        path.unlink()
        if not had:
            path.parent.rmdir()


def digest_edits(root: Path) -> Iterator[tuple[str, Seen, Seen]]:
    """Each half of each tensor's digest pair: (tensor, seen, seen when every sum was made to fit)."""
    document = json.loads((root / DIGESTS).read_bytes())
    for name, pair in document["tensors"].items():
        for half in (0, 1):
            changed = put(document, ("tensors", name, half), others(pair[half])[0])
            raw = json.dumps(changed).encode()
            with replaced(root / DIGESTS, raw):
                alone = look(root, "quick")
            with consistent(root, {DIGESTS: raw}):
                yield name, alone, look(root)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bits", type=int, default=2000, help="random bits of tensors to turn over"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with small_pieces():
        return attack(arguments.bits, arguments.seed)


def attack(bits: int, seed: int) -> int:
    """Every damage in turn, a line a kind; 1 if something was not found."""
    base = Path(tempfile.mkdtemp(prefix="damage-"))
    missed = 0

    def tell(kind: str, tries: Iterator[tuple[str, bool, bool]]) -> None:
        nonlocal missed
        count = found = named = 0
        for what, seen, well in tries:
            count, found, named = count + 1, found + seen, named + well
            if not (seen and well):
                print(f"  not as it should be: {what}")
        missed += count - named
        print(f"{kind:42} {count:7,} tried {found:7,} found {named:7,} named")

    try:
        source, root = build(base)
        tell(
            "every bit of every header",
            ((f"{f} bit {b}", bool(s), is_named(s, f, t)) for f, b, t, s in header_flips(root)),
        )
        tell(
            "random bits of tensors",
            (
                (f"{f} bit {b}", bool(s), (f, t) in s.places)
                for f, b, t, s in data_flips(root, bits, seed)
            ),
        )
        tell(
            "equal tensors swapped",
            ((str(places), bool(s), places <= s.places) for places, s in swaps(root)),
        )
        tell(
            "pages zeroed",
            ((str(places), bool(s), places <= s.places) for places, s in zeroed_pages(root)),
        )
        tell(
            "the manifest edited",
            ((str(p), bool(s), bool(s)) for p, s in manifest_edits(root, sums=False)),
        )
        tell(
            "the manifest and its sum edited",
            (
                (str(p), bool(s), bool(s))
                for p, s in manifest_edits(root, sums=True)
                if p not in UNPROVABLE
            ),
        )
        for name in ("config.json", "source/config.json", "model.safetensors.index.json"):
            tell(
                f"{name} edited",
                ((str(p), bool(a and s), bool(a and s)) for p, a, s in document_edits(root, name)),
            )
        tell(
            "digests edited",
            (
                (n, bool(a and s), (DIGESTS, None) in a.places and n in {t for _, t in s.places})
                for n, a, s in digest_edits(root)
            ),
        )
        tell("SHA256SUMS edited", ((w, bool(s), bool(s)) for w, s in sums_edits(root)))
        tell("files changed", ((w, bool(s), bool(s)) for w, s in file_changes(root)))
        tell(
            "whole forgeries, with the source at hand",
            ((str(p), bool(s), bool(s)) for p, s in forgeries(root, source)),
        )
        print(
            "not provable without the source:", ", ".join(".".join(p) for p in sorted(UNPROVABLE))
        )
        if look(root):
            print("the checkpoint is not as it was")
            missed += 1
    finally:
        shutil.rmtree(base)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
