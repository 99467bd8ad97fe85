"""Every failure a user can meet: a place, what was found, what was expected and a way out.

The exit code belongs to the error class, so that the command line only has to print and leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar


def printable(text: str) -> str:
    """`text` with control, bidirectional and other unprintable characters escaped.

    Names come out of files that strangers wrote; they must not reach a terminal raw.
    """
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode("ascii")
        for c in text
    )


HINT = "hint: "
"""How the note of an error begins that is its hint."""

IN = "in the checkpoint "
"""How the note of an error begins that says in which directory it is."""

MOST_SHOWN = 300
"""Characters of a fact that an error shows: a value from a file may have thousands."""


def _short(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text)} characters)"


class Mxfp4PrepError(Exception):
    """`WHERE: what is wrong: found ..., expected ...`, and `hint`, a flag or a command that helps.

    `where` and `what` may hold names from files: they are escaped when the message is made.
    """

    exit_code: ClassVar[int] = 3

    def __init__(
        self,
        where: object,
        what: str,
        *,
        found: object | None = None,
        expected: object | None = None,
        hint: str | None = None,
    ) -> None:
        self.where = str(where)
        self.what = what
        self.found = found
        self.expected = expected
        self.hint = None if hint is None else printable(hint)
        facts = []
        if found is not None:
            facts.append(f"found {_short(str(found))}")
        if expected is not None:
            facts.append(f"expected {_short(str(expected))}")
        text = f"{self.where}: {what}" + (f": {', '.join(facts)}" if facts else "")
        super().__init__(printable(text))
        if self.hint is not None:
            self._note_hint()

    def advise(self, hint: str) -> None:
        """Gives the way out to an error that has none yet."""
        if self.hint is None:
            self.hint = printable(hint)
            self._note_hint()

    def _note_hint(self) -> None:
        self.add_note(f"{HINT}{self.hint}")  # a traceback shows it: engines print no other

    def __reduce__(self) -> tuple[Any, ...]:
        """Goes from a worker process to its parent as it is, notes included."""
        return _revived, (type(self), self.args, self.__dict__)


def _revived(
    kind: type[Mxfp4PrepError], args: tuple[str, ...], state: dict[str, Any]
) -> Mxfp4PrepError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class UsageError(Mxfp4PrepError):
    """The call's words are off."""

    exit_code = 2


@contextmanager
def naming(root: object, way_out: str | None = None) -> Iterator[None]:
    """Failures inside say of which checkpoint: a command line and an engine name several.

    root      its directory or address. What has a place of its own, as a word of the call or a
              whole path, keeps that.
    way_out   the hint of a file's fault that comes without one
    """
    try:
        yield
    except UsageError:
        raise
    except Mxfp4PrepError as error:
        where = error.where
        named = where == str(root) or where.startswith(f"{root}/") or Path(where).is_absolute()
        notes = getattr(error, "__notes__", ())
        if not named and not any(note.startswith(IN) for note in notes):
            error.add_note(printable(f"{IN}{root}"))
        if way_out is not None and isinstance(error, InvalidCheckpoint | IntegrityError):
            error.advise(way_out)
        raise


class InvalidCheckpoint(Mxfp4PrepError):
    """The checkpoint cannot be read, or contradicts itself."""

    exit_code = 3


class InvalidManifest(InvalidCheckpoint):
    """The manifest of a prepared checkpoint is missing, foreign, newer than us or inconsistent."""


class LayoutError(InvalidCheckpoint, ValueError):
    """A shape that a layout cannot hold."""


class IntegrityError(Mxfp4PrepError):
    """Bytes that are not the ones the manifest was written for: the answer is no."""

    exit_code = 1


class Unsupported(Mxfp4PrepError):
    """A valid input that is not ours to handle."""

    exit_code = 4


class BackendUnavailable(Unsupported):
    """A GEMM backend that cannot run here; the message says why."""


class CannotShard(Unsupported):
    """A layer that cannot be cut at a tensor-parallel degree without breaking a 32-group.

    `reason` is split_rows, split_cols or split_groups.
    """

    def __init__(self, where: object, what: str, *, reason: str, hint: str | None = None) -> None:
        self.reason = reason
        super().__init__(where, what, hint=hint)


class UnsafeOutput(Mxfp4PrepError):
    """The output exists, is somebody else's, or lies where writing would harm."""

    exit_code = 5


class IOFailed(Mxfp4PrepError):
    """The operating system refused: disk full, permission, a file that vanished."""

    exit_code = 6
