"""A checkpoint by the words a person gives: a directory, or a repository on the Hub.

Of a repository only config.json, the index and the shards' headers are read. Which Hub, which
token and which cache, and whether the network may be used, is huggingface_hub's business:
HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_CACHE and HF_HUB_OFFLINE mean what they mean everywhere.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mxfp4prep.checkpoint import (
    Checkpoint,
    Files,
    local_files,
    open_checkpoint,
    read_checkpoint,
)
from mxfp4prep.directory import SKIPPED_DIRS
from mxfp4prep.documents import CONFIG_NAME, INDEX_NAME
from mxfp4prep.errors import InvalidCheckpoint, IOFailed, Unsupported, naming
from mxfp4prep.hub.address import Address, parse_source
from mxfp4prep.hub.reading import (
    Progress,
    Repository,
    cached_file,
    fetch,
    fetch_headers,
    fetch_object,
    find_repository,
)

_OLDEST = 1  # major version of huggingface_hub; before it the session was not httpx


def open_source(
    source: str, *, revision: str | None = None, progress: Progress | None = None
) -> Checkpoint:
    """The checkpoint that `source` names: a directory, or `ORG/NAME[@REVISION]` on the Hub.

    revision   instead of @REVISION
    progress   called as headers come from the Hub, from any thread

    Raises as open_checkpoint; InvalidCheckpoint for a name, repository or revision that is none,
    IOFailed without network or access, Unsupported without huggingface_hub.
    """
    place = parse_source(source, revision)
    if isinstance(place, Path):
        return open_checkpoint(place)
    with naming(place):
        return open_address(place, progress)


def open_address(address: Address, progress: Progress | None = None) -> Checkpoint:
    """The checkpoint in a repository on the Hub, from the cache alone if HF_HUB_OFFLINE says so."""
    _require_library(address)
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        repository = find_repository(address)
    except OfflineModeIsEnabled:
        return read_checkpoint(_cached_files(address))
    return read_checkpoint(_remote_files(repository, progress))


def _require_library(address: Address) -> None:
    found = "none"
    try:
        import huggingface_hub

        found = huggingface_hub.__version__
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "huggingface_hub":
            found = f"one that lacks {error.name}"
    major = found.partition(".")[0]
    if not major.isdigit() or int(major) < _OLDEST:
        raise Unsupported(
            address,
            "no such directory, and reading it from the Hub needs huggingface_hub",
            found=found,
            expected=f"{_OLDEST}.0 or newer",
            hint="pip install 'mxfp4prep[hub]'",
        )


def _remote_files(repository: Repository, progress: Progress | None) -> Files:
    every = sorted(repository.sizes)
    if CONFIG_NAME not in repository.sizes:
        raise InvalidCheckpoint(
            repository.address, f"no {CONFIG_NAME} in it", hint=_place_hint(every)
        )
    root = fetch(repository, CONFIG_NAME).parent
    skipped = {name.partition("/")[0] for name in every if "/" in name} & SKIPPED_DIRS
    names = [name for name in every if "/" not in name or name.partition("/")[0] not in skipped]
    return Files(
        where=repository.address,
        root=root,
        names=names,
        skipped=sorted(skipped),
        document=partial(fetch_object, repository),
        headers=partial(fetch_headers, repository, progress=progress),
        again="the repository is incomplete: try another revision, or tell its owner",
        absent=frozenset(
            name
            for name in names
            if name not in (CONFIG_NAME, INDEX_NAME)
            and cached_file(repository.address.repo, repository.commit, name) is None
        ),
    )


def _place_hint(names: list[str]) -> str:
    below = [name for name in names if name.endswith(f"/{CONFIG_NAME}")]
    if below:
        folder = below[0].removesuffix(CONFIG_NAME)
        return f"{below[0]} is there: download the repository and give its folder {folder}"
    return f"a checkpoint's repository holds {CONFIG_NAME} and *.safetensors"


def _cached_files(address: Address) -> Files:
    """The files of the snapshot in the cache that the address leads to."""
    config = cached_file(address.repo, address.revision, CONFIG_NAME)
    download = f"hf download {address.repo}"
    if address.revision is not None:
        download += f" --revision {address.revision}"
    if config is None:
        commits = _cached_commits(address)
        raise IOFailed(
            address,
            f"HF_HUB_OFFLINE is set, and the cache has no {CONFIG_NAME} of its revision "
            f"{address.revision or 'main'}",
            found=f"the commits {', '.join(commits)}" if commits else None,
            hint=f"unset it, or run `{download}` while there is a network",
        )
    again = f"HF_HUB_OFFLINE is set: unset it, or run `{download}` while there is a network"
    return local_files(config.parent, again=again)


def _cached_commits(address: Address) -> list[str]:
    from huggingface_hub import constants

    folder = f"models--{address.repo.replace('/', '--')}"
    snapshots = Path(constants.HF_HUB_CACHE) / folder / "snapshots"
    return sorted(path.name for path in snapshots.glob("*"))[:3]
