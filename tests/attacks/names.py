"""Hostile names, links and things that are no files, in every place that a stranger can write to.

    python tests/attacks/names.py

Each name stands as a tensor's, a layer's, a shard's, a side file's, in config.json, in a manifest,
and as SOURCE on the command line; audit, diff, convert, show, verify, restore and selfcheck run on
it. Shown: a line for each try that went wrong. Wrong is a traceback or internal error, a character
on stdout or stderr that a terminal would obey, anything changed outside the named output, an output
that restores to other bytes, and the wrong exit code. The exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from quark_factory import model_config, mxfp4_tensors, quant_config, write_checkpoint
from safetensors.torch import save_file

from mxfp4prep import cli

STRINGS = {
    "parent": "../../escaped",
    "absolute": "/tmp/escaped",
    "dots": "..",
    "backslashes": "..\\..\\escaped",
    "newline": "a\nb",
    "carriage return": "a\rb",
    "tab": "a\tb",
    "clear screen": "a\x1b[2J\x1b[H",
    "colour": "\x1b[31mred",
    "title": "\x1b]0;title\x07",
    "C1 control": "a\x9b31mb",
    "bell": "\x07",
    "backspace": "safe\x08\x08\x08\x08evil",
    "delete": "a\x7f",
    "right to left": "\u202egnp.exe",
    "isolate": "a\u2066b",
    "no width": "a\u200bb",
    "byte order mark": "\ufeffa",
    "line separator": "a\u2028b",
    "no-break space": "a\u00a0b",
    "private use": "\ue000",
    "no character": "\uffff",
    "emoji": "\U0001f468\u200d\U0001f469",
    "combining": "e" + "\u0301" * 50,
    "wide": "\uff21\u4e2d",
    "markup": "[red]a[/red] [/] [link=http://x]",
    "HTML": "<script>alert(1)</script>",
    "template": "{0} {x} %s %n ${HOME} $(touch escaped) `touch escaped`",
    "formula": "=1+1",
    "option": "--overwrite",
    "home": "~",
    "device": "CON",
    "ours": "mxfp4prep",
    "glob": "*[a]?",
    "quotes": "a'b\"c\\",
    "4 KiB": "n" * 4096,
}
"""Names that a format may hold."""
UNUSABLE = {"NUL": "a\0b", "empty": "", "lone surrogate": "\ud800", "metadata": "__metadata__"}
"""Names that no tensor may have."""
WIDTH = 200
"""Bytes of a name that every filesystem takes."""


class Try(NamedTuple):
    """One name in one place, and what went wrong with it: nothing, when `wrong` is empty."""

    what: str
    wrong: tuple[str, ...]


def run(*words: object) -> tuple[int, str, list[str]]:
    """A command line in this process: exit code, stdout, and what is wrong with how it ended."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main([str(word) for word in words])
    wrong = []
    command = str(words[0])
    if code in (70, 130) or "Traceback" in err.getvalue():
        wrong.append(f"{command}: exit code {code}: {err.getvalue()[:300]!r}")
    for stream, text in (("stdout", out.getvalue()), ("stderr", err.getvalue())):
        bad = {c for c in text if not c.isprintable()} - {"\n"}
        if bad:
            wrong.append(f"{command}: {bad!r} on {stream}")
    return code, out.getvalue(), wrong


def tree(root: Path) -> dict[str, str]:
    """What stands under `root`: kinds, link targets, digests of contents."""
    found = {}
    for path in root.rglob("*"):
        name = os.fsencode(path.relative_to(root)).hex()
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)!r}"  # noqa: PTH115 - as it was written
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = f"kind {path.lstat().st_mode}"
    return found


@contextlib.contextmanager
def untouched(base: Path, wrong: list[str], *outputs: Path) -> Iterator[None]:
    """Notes what has changed under `base`, outputs aside."""
    for path in outputs:
        shutil.rmtree(path, ignore_errors=True)
    before, escaped = tree(base), Path("/tmp/escaped").exists()
    yield
    after = tree(base)
    mine = [os.fsencode(path.relative_to(base)).hex() for path in outputs]
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    for name in changed:
        if not name.startswith(tuple(mine)):
            wrong.append(f"changed outside the output: {bytes.fromhex(name)!r}")
    if Path("/tmp/escaped").exists() != escaped:
        wrong.append("/tmp/escaped")


def chain(base: Path, source: Path, *, serve: bool = False) -> list[str]:
    """What went wrong in each command on `source`, outputs in `base`; `serve`: selfcheck too."""
    out, back, page = base / "out", base / "back", base / "page"
    wrong: list[str] = []
    with untouched(base, wrong, out, back, page):
        page.mkdir()
        for words in (("--fail-on", "never"), ("--format", "json"), ("--format", "csv")):
            _, text, bad = run("audit", source, *words)
            wrong += bad
            if "json" in words:
                json.loads(text)
        wrong += run("audit", source, "--html", page / "a.html", "-q")[2]
        html = page / "a.html"
        if html.exists() and not html.read_text().replace("\n", "").isprintable():
            wrong.append("the page holds characters that are not printable")
        wrong += run("diff", source, source)[2]
        code, _, bad = run("convert", source, out, "--no-progress")
        wrong += bad
        if code == 0:
            for words in (("show", out), ("verify", out), ("restore", out, back)):
                code, _, bad = run(*words)
                wrong += bad
                if code:
                    wrong.append(f"{words[0]}: exit code {code}")
            if tree(back) != tree(source):
                wrong.append("restored to something else")
            if serve:
                wrong += run("selfcheck", out)[2]
    return wrong


def named(
    source: Path, tensors: list[str], layers: list[str], side: list[str], **config: object
) -> Path:
    """A checkpoint with tensors, MXFP4 layers and side files of these names."""
    generator = torch.Generator().manual_seed(1)
    parts = {name: torch.ones(8, dtype=torch.bfloat16) for name in tensors}
    for layer in layers:
        parts |= mxfp4_tensors(layer, 32, 64, generator=generator)
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    save_file(parts, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text(json.dumps(model_config(**config)))
    for name in side:
        (source / name).write_bytes(b"x")
    return source


def as_file(name: str) -> str:
    """The nearest name that a file can have."""
    return name.replace("/", "_").encode()[:WIDTH].decode(errors="ignore") + ".txt"


def every_tensor(base: Path) -> Iterator[Try]:
    """All names at once: of copied tensors, of layers, of side files."""
    layer = "model.layers.0.mlp.down_proj"
    names = list(STRINGS.values())
    for what, source in (
        ("tensor", named(base / "m1", names, [layer], [])),
        ("layer", named(base / "m2", [], [f"model.{name}.down_proj" for name in names], [])),
        ("side file", named(base / "m3", [], [layer], [as_file(name) for name in names])),
    ):
        wrong = tuple(chain(base, source, serve=what == "layer"))
        for name in STRINGS:
            yield Try(f"{what}: {name}", wrong)


def every_unusable(base: Path) -> Iterator[Try]:
    """Names that must be refused, with exit code 3."""
    for what, name in UNUSABLE.items():
        source = named(base / "m", [], ["model.layers.0.mlp.down_proj"], [])
        path = source / "model.safetensors"
        entries = [f'{json.dumps(name)}:{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}']
        header = f"{{{','.join(entries)}}}".encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + b"1")
        wrong: list[str] = []
        with untouched(base, wrong, base / "out"):
            for words in (("audit", source), ("convert", source, base / "out")):
                code, _, bad = run(*words)
                wrong += [*bad, *([f"{words[0]}: exit code {code}"] if code != 3 else [])]
        yield Try(f"tensor: {what}", tuple(wrong))


def every_shard(base: Path) -> Iterator[Try]:
    """As the file of a tensor in the index: refused by audit, or a file that is there and read."""
    linears = {"model.layers.0.mlp.down_proj": (32, 64)}
    for what, name in {**STRINGS, **UNUSABLE}.items():
        shutil.rmtree(base / "m", ignore_errors=True)
        source = write_checkpoint(base / "m", linears, shards=2)
        index = source / "model.safetensors.index.json"
        document = json.loads(index.read_text())
        shard = f"{name}.safetensors"
        document["weight_map"]["model.norm.weight"] = shard
        index.write_text(json.dumps(document))
        wrong: list[str] = []
        with untouched(base, wrong, base / "out"):
            for words in (("audit", source), ("convert", source, base / "out")):
                code, _, bad = run(*words)
                wrong += [*bad, *([f"{words[0]}: exit code {code}"] if code != 3 else [])]
        yield Try(f"shard: {what}", tuple(wrong))


def every_config(base: Path) -> Iterator[Try]:
    """In config.json: model type, architecture, patterns."""
    layer = "model.layers.0.mlp.down_proj"
    for what, name in {**STRINGS, **UNUSABLE}.items():
        changes = {"model_type": name, "architectures": [name], name: name}
        quantization = quant_config(exclude=[name, f"*{name}"])
        source = named(base / "m", ["model.norm.weight"], [layer], [], quantization=quantization)
        document = json.loads((source / "config.json").read_text()) | changes
        (source / "config.json").write_text(json.dumps(document))
        wrong: list[str] = []
        with untouched(base, wrong, base / "out"):
            for words in (("audit", source), ("convert", source, base / "out", "-q")):
                wrong += run(*words)[2]
            if (base / "out").exists():
                wrong += run("show", base / "out")[2]
        yield Try(f"config: {what}", tuple(wrong))


def every_source(base: Path) -> Iterator[Try]:
    """As SOURCE of a command: a directory that is not there, or a repository that cannot be."""
    for what, name in {**STRINGS, **UNUSABLE}.items():
        wrong: list[str] = []
        with untouched(base, wrong):
            for words in (
                ("audit", "--", f"org/{name}/x"),
                ("audit", "--", f"org/name@{name}/.."),
                ("diff", "--", f"{name}/a/b", f"{name}/a/b"),
                ("convert", "--", f"{base}/absent/{name[:WIDTH]}"),
                ("verify", "--", f"{base}/absent/{name[:WIDTH]}"),
            ):
                code, _, bad = run(*words)
                wrong += [*bad, *([f"{words}: exit code {code}"] if code not in (2, 3, 6) else [])]
        yield Try(f"source: {what}", tuple(wrong))


MANIFEST_PLACES = (("files", -1, "name"), ("tensors", 0, "name"), ("digests", "name"))


def every_manifest(base: Path) -> Iterator[Try]:
    """In the manifest of a prepared checkpoint: the name of a file, of a tensor, of the digests."""
    source = named(base / "m", ["model.norm.weight"], ["model.layers.0.mlp.down_proj"], ["x.txt"])
    run("convert", source, base / "p", "-q")
    path = base / "p" / "mxfp4prep.json"
    raw = path.read_bytes()
    for what, name in {**STRINGS, **UNUSABLE}.items():
        wrong: list[str] = []
        for place in MANIFEST_PLACES:
            document = json.loads(raw)
            inner = document
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = name
            path.write_text(json.dumps(document))
            with untouched(base, wrong, base / "back"):
                code, _, bad = run("verify", base / "p", "--quick")
                wrong += bad
                if code not in (1, 3, 6):
                    wrong.append(f"{place}: verify: exit code {code}")
                if place[0] == "files":
                    code, _, bad = run("restore", base / "p", base / "back")
                    wrong += bad
                    if code not in (1, 3, 5, 6):
                        wrong.append(f"{place}: restore: exit code {code}")
                    wrong += run("show", base / "p")[2]
        path.write_bytes(raw)
        yield Try(f"manifest: {what}", tuple(wrong))
    if run("verify", base / "p")[0]:
        yield Try("manifest: as it was", ("verify finds something",))


def every_thing(base: Path) -> Iterator[Try]:
    """Links that lead astray and things that are no files, in place of each kind of file."""
    outside = base / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    things: dict[str, Callable[[Path], object]] = {
        "a link to itself": lambda path: path.symlink_to(path),
        "a link to nothing": lambda path: path.symlink_to(base / "nothing"),
        "a link to a folder outside": lambda path: path.symlink_to(outside),
        "a link to its own folder": lambda path: path.symlink_to(path.parent),
        "a link to a device": lambda path: path.symlink_to("/dev/zero"),
        "a pipe": os.mkfifo,
        "a socket": _socket,
        "a folder": Path.mkdir,
    }
    for what, make in things.items():
        for place in ("x.txt", "config.json", "model.safetensors", "model.safetensors.index.json"):
            source = named(base / "m", ["n"], ["model.layers.0.mlp.down_proj"], ["y.txt"])
            path = source / place
            path.unlink(missing_ok=True)
            make(path)
            wrong: list[str] = []
            harmless = what == "a folder" and place in ("x.txt", "model.safetensors.index.json")
            with untouched(base, wrong, base / "out"):
                for words in (("audit", source), ("convert", source, base / "out", "-q")):
                    code, _, bad = run(*words)
                    wrong += bad
                    if not harmless and code not in (3, 4, 6):
                        wrong.append(f"{words[0]}: exit code {code}")
            yield Try(f"{place}: {what}", tuple(wrong))


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        before = Path.cwd()
        os.chdir(path.parent)  # a socket's path must be short
        try:
            made.bind(path.name)
        finally:
            os.chdir(before)


EVERYTHING = (
    every_tensor,
    every_unusable,
    every_shard,
    every_config,
    every_source,
    every_manifest,
    every_thing,
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = {kind.__name__.removeprefix("every_"): kind for kind in EVERYTHING}
    parser.add_argument("kinds", nargs="*", choices=[*kinds, []], help="these only")
    chosen = parser.parse_args().kinds or list(kinds)
    failed = 0
    for kind in map(kinds.__getitem__, chosen):
        base = Path(tempfile.mkdtemp(prefix="names-"))
        try:
            tries = list(kind(base))
        finally:
            shutil.rmtree(base)
        for each in tries:
            for wrong in each.wrong:
                print(f"  {each.what}: {wrong}")
        bad = sum(bool(each.wrong) for each in tries)
        failed += bad
        print(f"{(kind.__doc__ or '').splitlines()[0]} {len(tries)} tried, {bad} went wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
