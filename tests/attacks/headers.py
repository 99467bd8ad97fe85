"""Throws broken and hostile headers, manifests and indexes at the readers.

    python tests/attacks/headers.py                  # the table of huge inputs: time and memory of each
    python tests/attacks/headers.py --seconds 60     # mutated headers and manifests, guided by coverage
                                                     # where atheris is installed

Of the fuzzing shown: executions, how many inputs were accepted, and every exception that is none of ours
(the input is kept in /tmp and its place printed; the exit code is 1). Whatever is accepted is read by
safetensors too, and must mean the same there. Of the table: peak memory and processor seconds of a
process of its own, and what was said.
"""

# ruff: noqa: E501 - the description of a command

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from mxfp4prep import manifest
from mxfp4prep.checkpoint import open_checkpoint
from mxfp4prep.errors import Mxfp4PrepError
from mxfp4prep.safefile import header_length, parse_header, read_header

FIXTURES = Path(__file__).parents[1] / "data" / "fixtures"
MEMORY_LIMIT = 1 << 30
"""Bytes that a hostile input may cost."""
SECONDS_LIMIT = 60
"""Processor seconds after which a reader is taken to hang. They are meant to take less than 5."""


class Outcome(NamedTuple):
    """What a process said, its peak memory in bytes and its processor seconds; code 0: it ended."""

    said: str
    nbytes: int
    seconds: float
    code: int


def measured(action: Callable[[], object]) -> Outcome:
    """What `action` does in a process of its own: "read", or our error's text."""
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            code = 70
            try:
                resource.setrlimit(resource.RLIMIT_CPU, (SECONDS_LIMIT, SECONDS_LIMIT))
                try:
                    action()
                    text = "read"
                except Mxfp4PrepError as error:
                    text = str(error)
                os.write(said.fileno(), text.encode())
                code = 0
            finally:
                os._exit(code)
        _, status, usage = os.wait4(child, 0)
        said.seek(0)
        text = said.read().decode()
    return Outcome(text, usage.ru_maxrss << 10, usage.ru_utime + usage.ru_stime, status)


def header_file(root: Path, pieces: list[bytes], data: int = 0) -> Callable[[], object]:
    """Reads a safetensors file whose header is these pieces, with `data` bytes of a hole behind."""
    path = root / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", sum(map(len, pieces))))
        file.writelines(pieces)
        file.truncate(file.tell() + data)
    return lambda: read_header(path)


def many_tensors(count: int) -> list[bytes]:
    entries = (
        f'"t{i}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}' for i in range(count)
    )
    return [b"{", ",".join(entries).encode(), b"}"]


def checkpoint(
    root: Path, config: bytes = b"{}", index: bytes | None = None
) -> Callable[[], object]:
    """Opens a directory with one empty shard, this config.json and this index."""
    (root / "config.json").write_bytes(config)
    (root / "a.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    if index is not None:
        (root / "model.safetensors.index.json").write_bytes(index)
    return lambda: open_checkpoint(root)


def index_of(entries: dict[str, str]) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": entries}).encode()


def manifest_of(**changes: object) -> bytes:
    """A manifest without layers, with other values put in."""
    document = {
        "schema_version": 1,
        "tool_version": "0",
        "source": {"name": "x", "config_sha256": "0"},
        "target": {
            "gfx": "gfx950", "tp": [1], "rule_version": 1, "layouts": [], "layout": "auto",
            "keep": [], "parallel": [],
        },
        "digests": {"name": "d", "sha256": "0", "algorithm": "xxh3_128"},
        "files": [],
        "layers": [],
        "tensors": [],
    }  # fmt: skip
    return json.dumps(document | changes).encode()


HUGE: dict[str, tuple[Callable[[Path], Callable[[], object]], str]] = {
    # what -> (makes the input, returns what reads it), a part of what is said
    "a header of 100 MB, all in lists": (lambda root: header_file(root, [b'{"a":[', b"[]," * 33_000_000, b"[]]}"]), "too many values"),
    "a header of 100 MB, all one name": (lambda root: header_file(root, [b'{"', b"n" * 99_000_000, b'":1}']), "not a JSON object"),
    "a header of 100 MB, all padding": (lambda root: header_file(root, [b"{}", b" " * 99_999_998]), "read"),
    "a header of a million tensors": (lambda root: header_file(root, many_tensors(1_000_000), 1_000_000), "read"),
    "a shape of 20 million sizes": (lambda root: header_file(root, [b'{"a":{"dtype":"U8","shape":[', b"1," * 20_000_000, b'1],"data_offsets":[0,1]}}'], 1), "too many values"),
    "a header 100,000 lists deep": (lambda root: header_file(root, [b'{"a":', b"[" * 100_000]), "nested too deeply"),
    "a header 100,000 objects deep": (lambda root: header_file(root, [b'{"a":' * 100_000]), "nested too deeply"),
    "a shape of 1e308 by 1e308": (lambda root: header_file(root, [b'{"a":{"dtype":"U8","shape":[1e308,1e308],"data_offsets":[0,0]}}']), "shape is wrong"),
    "a shape of 10^308 by 10^308": (lambda root: header_file(root, [b'{"a":{"dtype":"U8","shape":[%d,%d],"data_offsets":[0,0]}}' % (10**308, 10**308)]), "shape is wrong"),
    "a shape of 100,000 times 2": (lambda root: header_file(root, [b'{"a":{"dtype":"U8","shape":[', b"2," * 99_999, b'2],"data_offsets":[0,0]}}']), "shape overflows"),
    "an index of 100,000 shards": (lambda root: checkpoint(root, index=index_of({f"t{i}": f"m-{i}.safetensors" for i in range(100_000)})), "100000 of 100000 files"),
    "an index 100,000 deep": (lambda root: checkpoint(root, index=b'{"weight_map":' * 100_000), "not valid JSON"),
    "a config of 40 MB of empty lists": (lambda root: checkpoint(root, b'{"a":[' + b"[]," * 13_000_000 + b"[]]}"), "more JSON values than fit"),
    "a config 100,000 deep": (lambda root: checkpoint(root, b'{"a":' + b"[" * 100_000), "not valid JSON"),
    "a manifest of three million empty layers": (lambda root: lambda: manifest.parse(manifest_of(layers=[{}] * 3_000_000)), "layers.0.name"),
    "a layer of a million faults": (lambda root: lambda: manifest.parse(manifest_of(layers=[{"reasons": [1] * 1_000_000}])), "layers.0.reasons: found more than"),
    "a manifest 100,000 deep": (lambda root: lambda: manifest.parse(b'{"a":' * 100_000), "not a manifest"),
}  # fmt: skip


def seeds() -> list[bytes]:
    """Real headers and manifests, cut to a size that can be mutated."""
    found = [path.read_bytes() for path in sorted(FIXTURES.rglob("version-*/*.safetensors"))[:2]]
    whole = []
    for content in found:
        length = 8 + int.from_bytes(content[:8], "little")
        whole.append(content[:length])
    entry = '{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
    small = f'{{"__metadata__":{{"format":"pt"}},"a":{entry}}}'.encode()
    whole.append(struct.pack("<Q", len(small)) + small + b"1234")
    layer = {
        "name": "l", "kind": "linear", "parallel": "row", "group": None, "scheme": "w4a4",
        "activation": {"dtype": "fp4"}, "n": 64, "k": 256, "n_padded": 64, "k_padded": 256,
        "experts": None, "gate_up": None, "path": "asm", "reasons": [], "hazards": [],
        "verdict": {"1": "asm"}, "bias": None, "input_scale": None,
        "weight": {"tensor": "l.weight", "file": "m", "layout": "tile16x16", "shape": [4, 2048], "source_shape": [64, 128]},
        "scale": {"tensor": "l.weight_scale", "file": "m", "layout": "tile32x8", "shape": [2, 256], "source_shape": [64, 8]},
    }  # fmt: skip
    file = {"name": "m", "nbytes": 5, "sha256": "1", "role": "shard", "source_header": "same"}
    whole.append(manifest_of(layers=[layer], files=[file]))
    return whole


def feed(content: bytes) -> bool:
    """Gives the input to the reader and to the manifest's parser; whether one of them took it.

    Raises whatever is none of our errors, and AssertionError where safetensors reads otherwise.
    """
    if content[:1] == b"{":
        try:
            manifest.dump(manifest.parse(content))
        except Mxfp4PrepError as error:
            return not_taken(error)
        return True
    try:
        length = header_length(content[:512], len(content), "f")
        tensors, metadata = parse_header(content[8 : 8 + length], len(content) - 8 - length, "f")
    except Mxfp4PrepError as error:
        return not_taken(error)
    if "safetensors" in sys.modules:
        same_to_safetensors(content, tensors, metadata)
    return True


def not_taken(error: Mxfp4PrepError) -> bool:
    """False, after a look at the message: it is for terminals."""
    assert str(error).isprintable()
    return False


def same_to_safetensors(content: bytes, tensors: object, metadata: object) -> None:
    safetensors = sys.modules["safetensors"]
    found = {name: (t["dtype"], t["shape"]) for name, t in safetensors.deserialize(content)}
    assert found == {e.name: (e.dtype, list(e.shape)) for e in tensors}  # type: ignore[attr-defined]


WORDS = rb"""
" \ { } [ ] : , 0 -0 1 4 9223372036854775808 1e400 NaN null true {} [] \ud800 \u0000 "a" "U8" "F4"
"BF16" "dtype" "shape" "data_offsets" "__metadata__" "layers" "layer_defaults" "verdict" "raw"
""".split()


def mutated(content: bytes, rng: random.Random) -> bytes:
    """One to four changes: bits, words of JSON, cuts and copies; the length made to fit or not."""
    is_header = content[:1] != b"{"
    body = bytearray(content[8:] if is_header else content)
    for _ in range(rng.choice((1, 1, 2, 3, 4))):
        at = rng.randrange(len(body) + 1)
        to = min(len(body), at + rng.choice((1, 1, 2, 5, 20)))
        match rng.randrange(5):
            case 0 if at < len(body):
                body[at] ^= 1 << rng.randrange(8)
            case 1:
                body[at:to] = rng.choice(WORDS)
            case 2:
                body[at:at] = rng.choice(WORDS)
            case 3:
                del body[at:to]
            case _:
                body[at:at] = body[at:to]
    if not is_header:
        return bytes(body)
    changed = len(body) - (len(content) - 8)
    length = int.from_bytes(content[:8], "little") + rng.choice((changed,) * 9 + (0, 1))
    return struct.pack("<Q", max(0, length)) + bytes(body)


def fuzz(seconds: float, seed: int) -> int:
    """Mutates seeds, and what was accepted, until the time is up; 1 if anything else was raised."""
    rng, pool = random.Random(seed), seeds()
    count = accepted = failed = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        content = mutated(rng.choice(pool), rng)
        count += 1
        try:
            taken = feed(content)
        except Exception as error:
            failed += 1
            with tempfile.NamedTemporaryFile(prefix="header-", delete=False) as file:
                file.write(content)
            print(f"{type(error).__name__}: {error}: {file.name}")
            continue
        if taken:
            accepted += 1
            if len(pool) < 2000:
                pool.append(content)
    print(f"{count:,} executions, {accepted:,} accepted, {failed} failed")
    return 1 if failed else 0


def guided(seconds: float, atheris: object) -> int:
    """The same, guided by coverage: libFuzzer prints the executions; a failure ends it with a trace."""
    with tempfile.TemporaryDirectory() as corpus:
        for position, content in enumerate(seeds()):
            (Path(corpus) / str(position)).write_bytes(content)
        words = [sys.argv[0], f"-max_total_time={int(seconds)}", "-rss_limit_mb=1024", "-timeout=60", "-print_final_stats=1", corpus]  # fmt: skip
        atheris.Setup(words, feed)  # type: ignore[attr-defined]
        atheris.Fuzz()  # type: ignore[attr-defined]
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, help="fuzz for so long instead")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.seconds is None:
        worst = 0
        for what, (make, expected) in HUGE.items():
            with tempfile.TemporaryDirectory() as root:
                outcome = measured(make(Path(root)))
            well = outcome.code == 0 and expected in outcome.said and outcome.nbytes <= MEMORY_LIMIT
            worst |= not well
            print(
                f"{'' if well else 'NOT '}well: {what}: {outcome.seconds:.1f} s, {outcome.nbytes >> 20} MiB, {outcome.said[:80]}"
            )
        return worst
    try:
        import safetensors
    except ImportError:
        print("safetensors is not here to compare with")
    else:
        assert safetensors.deserialize
    try:
        import atheris
    except ImportError:
        return fuzz(arguments.seconds, arguments.seed)
    from mxfp4prep import documents, header_json, safefile

    for module in (safefile, header_json, documents, manifest):
        for name, value in vars(module).items():
            if (
                callable(value)
                and getattr(value, "__module__", "") == module.__name__
                and not isinstance(value, type)
            ):
                setattr(module, name, atheris.instrument_func(value))
    return guided(arguments.seconds, atheris)


if __name__ == "__main__":
    sys.exit(main())
