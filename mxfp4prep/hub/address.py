"""What SOURCE names: a directory that exists, or `ORG/NAME[@REVISION]` on the Hub."""

from __future__ import annotations

import os.path
import re
from pathlib import Path
from typing import NamedTuple

from mxfp4prep.errors import InvalidCheckpoint, UsageError

FORMS_HINT = "give a checkpoint directory, or a Hub repository as ORG/NAME or ORG/NAME@REVISION"

_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_REPO = re.compile(rf"{_NAME}/{_NAME}")  # the rule huggingface_hub checks, in ASCII
_PART = r"[A-Za-z0-9_+=#%][A-Za-z0-9_.+=#%@,!-]*"
_REVISION = re.compile(rf"{_PART}(?:/{_PART})*")  # main, v1.0, refs/pr/3, a commit
_MAX_REVISION = 250


class Address(NamedTuple):
    """A model repository on the Hub, and the revision asked for: None is its main branch."""

    repo: str
    revision: str | None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def parse_source(source: str, revision: str | None = None) -> Path | Address:
    """Where `source` leads: what exists is local, `ORG/NAME[@REVISION]` is on the Hub.

    Raises InvalidCheckpoint for anything else, UsageError for a `revision` that cannot apply.
    """
    if os.path.lexists(source):  # Path.exists fails on names that no file can have
        if revision is not None:
            what = "a directory has no revisions"
            raise UsageError("--revision", what, found=f"the directory {source}")
        return Path(source)
    repo, at, named = source.partition("@")
    if repo.count("/") != 1 or repo[0] in "/.~" or repo.endswith("/"):
        raise InvalidCheckpoint(source or "''", "no such directory", hint=FORMS_HINT)
    if not _REPO.fullmatch(repo) or "--" in repo or ".." in repo or repo.endswith(".git"):
        raise InvalidCheckpoint(
            source,
            "no such directory, and not the name of a repository either",
            expected="ORG/NAME of letters, digits, '.', '_' and '-', at most 96 each",
            hint=FORMS_HINT,
        )
    if at and revision is not None and named != revision:
        found = f"{named} and {revision}"
        raise UsageError("--revision", "the revision is given twice", found=found)
    asked = named if at else revision
    if asked is not None:
        _check_revision(source, asked)
    return Address(repo, asked)


def _check_revision(source: str, revision: str) -> None:
    usable = _REVISION.fullmatch(revision) and len(revision) <= _MAX_REVISION
    if not usable or ".." in revision:
        raise InvalidCheckpoint(
            source,
            "not usable as a revision",
            found=repr(revision[:100]),
            expected="a branch, a tag or a commit",
            hint="give it as ORG/NAME@REVISION; without one it is the main branch",
        )
