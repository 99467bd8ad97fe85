"""The header of one safetensors file on the Hub, by HTTP range: its data is never downloaded.

One request is enough when the guess is; a second one asks for exactly the rest. A server without
range support (RFC 9110, 14.2: it may answer 200 with the whole file) is read until the header ends
and then hung up on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxfp4prep.errors import InvalidCheckpoint, IOFailed
from mxfp4prep.hub.failures import CutShort, Refused
from mxfp4prep.safefile import Header, header_length, parse_header

if TYPE_CHECKING:
    from collections.abc import Callable

GUESS_NBYTES = 256 << 10
"""What the first request asks for when nothing is known about the file."""
TENSOR_NBYTES = 96
"""What a tensor takes in a header beside its name: 60 to 82 in checkpoints of all sizes."""
MAX_GUESS_NBYTES = 8 << 20

_PREFIX_NBYTES = 512  # what header_length wants to see
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.ASCII)
_UNSATISFIED = re.compile(r"bytes \*/(\d{1,18})", re.ASCII)
_ON_THE_HUB = "the file on the Hub is so: try another revision, or tell the repository's owner"


def guess_nbytes(tensors: Iterable[str]) -> int:
    """How many first bytes of a file hold the header of these tensors, if it is written tightly."""
    nbytes = sum(len(name.encode("utf-8", "replace")) + TENSOR_NBYTES for name in tensors)
    return min(max(nbytes + _PREFIX_NBYTES, _PREFIX_NBYTES), MAX_GUESS_NBYTES)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file to be read by range. `nbytes` is its size as the Hub lists it, None if it does not."""

    url: str
    name: str
    nbytes: int | None
    headers: Mapping[str, str]


def fetch_header(file: RemoteFile, guess: int, check: Callable[[], None]) -> Header:
    """The header of `file`, checked as strictly as a local one.

    guess   bytes that the first request asks for
    check   called between pieces; may raise to stop

    Raises InvalidCheckpoint for a header that lies, IOFailed for answers that contradict
    themselves, and CutShort, Refused or what the HTTP library raises when there is none.
    """
    if file.nbytes == 0:  # no range of it can be asked for
        with _on_the_hub():
            header_length(b"", 0, file.name)
    content = bytearray()
    with _answer(file, 0, guess) as answer:
        total = answer.file_nbytes
        _fill(content, min(_PREFIX_NBYTES, total), answer, check)
        with _on_the_hub():
            need = 8 + header_length(content, total, file.name)
        # The rest of a range is read even if the header ends before: it keeps the connection.
        _fill(content, need if answer.whole else answer.end, answer, check)
        if not answer.whole:
            next(answer.pieces, None)
    if len(content) < need:
        with _answer(file, len(content), need) as answer:
            if answer.whole or answer.file_nbytes != total:
                raise _odd(file, "another answer than a moment ago", str(answer.file_nbytes), total)
            _fill(content, need, answer, check)
            next(answer.pieces, None)
    with _on_the_hub():
        tensors, metadata = parse_header(content[8:need], total - need, file.name)
    return Header(tensors, metadata, need, total)


@contextmanager
def _on_the_hub() -> Iterator[None]:
    """The same findings as of a local file, but not its way out: nothing was downloaded."""
    try:
        yield
    except InvalidCheckpoint as error:
        raise InvalidCheckpoint(
            error.where, error.what, found=error.found, expected=error.expected, hint=_ON_THE_HUB
        ) from error


@dataclass(frozen=True, slots=True)
class _Answer:
    """Bytes up to `end` of a file of `file_nbytes`; `whole` when no range was honoured."""

    end: int
    file_nbytes: int
    whole: bool
    pieces: Iterator[bytes]


@contextmanager
def _answer(file: RemoteFile, first: int, end: int) -> Iterator[_Answer]:
    """The answer to a request for the bytes from `first` up to but not including `end`."""
    from huggingface_hub import constants, get_session

    asked = {"range": f"bytes={first}-{end - 1}", "accept-encoding": "identity"}
    with get_session().stream(
        "GET",
        file.url,
        headers={**file.headers, **asked},
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        follow_redirects=True,
    ) as response:
        headers = response.headers
        if headers.get("content-encoding", "identity") != "identity":
            raise _odd(file, "the answer is encoded", headers["content-encoding"], "plain bytes")
        pieces = response.iter_raw()
        if response.status_code == 206:
            file_nbytes = _check_range(file, headers.get("content-range", ""), first, end)
            yield _Answer(min(end, file_nbytes), file_nbytes, whole=False, pieces=pieces)
        elif response.status_code == 200:
            file_nbytes = _check_size(file, headers.get("content-length", ""))
            yield _Answer(file_nbytes, file_nbytes, whole=True, pieces=pieces)
        elif response.status_code == 416:
            match = _UNSATISFIED.fullmatch(headers.get("content-range", ""))
            file_nbytes = _check_size(file, match[1] if match else "")
            if file_nbytes > first:
                raise _odd(file, "a range within the file is refused", f"{first}", file_nbytes)
            yield _Answer(file_nbytes, file_nbytes, whole=True, pieces=iter(()))
        else:
            raise Refused(response.status_code, headers, response.url.host)


def _check_range(file: RemoteFile, text: str, first: int, end: int) -> int:
    """The file's size, from the Content-Range of an answer that must be the one asked for."""
    match = _CONTENT_RANGE.fullmatch(text)
    if match is None:
        raise _odd(file, "Content-Range", repr(text[:60]), f"bytes {first}-{end - 1}/SIZE")
    file_nbytes = _check_size(file, "" if match[3] == "*" else match[3])
    expected = f"bytes {first}-{min(end, file_nbytes) - 1}/{match[3]}"
    if text != expected:
        raise _odd(file, "Content-Range", text, expected)
    return file_nbytes


def _check_size(file: RemoteFile, text: str) -> int:
    """The file's size as an answer states it, or as the Hub lists it if the answer does not."""
    stated = int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None
    if stated is None and file.nbytes is None:
        raise _odd(file, "neither the answer nor the Hub's list says how large the file is")
    if stated is not None and file.nbytes is not None and stated != file.nbytes:
        raise _odd(file, "size", f"{stated} bytes", f"{file.nbytes}, as the Hub lists it")
    return stated if stated is not None else file.nbytes or 0


def _fill(content: bytearray, nbytes: int, answer: _Answer, check: Callable[[], None]) -> None:
    """Appends pieces to `content` until it holds `nbytes`."""
    while len(content) < nbytes:
        check()
        piece = next(answer.pieces, None)
        if piece is None:
            raise CutShort(f"{len(content)} of {nbytes} bytes came")
        content += piece


def _odd(
    file: RemoteFile, what: str, found: str | None = None, expected: object = None
) -> IOFailed:
    hint = "check HF_ENDPOINT and a proxy in between, or audit a downloaded directory"
    return IOFailed(file.name, what, found=found, expected=expected, hint=hint)
