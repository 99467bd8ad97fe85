"""One commit of a repository on the Hub: its list of files, its JSON files, its shards' headers.

Everything is read at one commit, so that a push in between cannot mix two models. What the cache
holds is read there: config.json and the index come to lie in it, headers do not.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxfp4prep.directory import is_utf8
from mxfp4prep.documents import JSON_LIMIT, read_object
from mxfp4prep.errors import InvalidCheckpoint, IOFailed
from mxfp4prep.hub.address import Address
from mxfp4prep.hub.ranges import GUESS_NBYTES, RemoteFile, fetch_header, guess_nbytes
from mxfp4prep.hub.retrying import Cancelled, patiently
from mxfp4prep.safefile import Header, read_header

if TYPE_CHECKING:
    from collections.abc import Iterator

CONNECTIONS = 8
"""Headers that are read at a time."""

Progress = Callable[[int, int], None]
"""Called with the number of headers read and their number in all."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_LIBRARY = "mxfp4prep"


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository at one commit. `sizes` has every file, with its size where the Hub tells it."""

    address: Address
    commit: str
    sizes: Mapping[str, int | None]


def find_repository(address: Address) -> Repository:
    """The repository at the commit that its revision is now.

    Raises OfflineModeIsEnabled of huggingface_hub when it must not ask, else as `patiently`.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    info = patiently(
        lambda: HfApi(library_name=_LIBRARY).model_info(
            address.repo,
            revision=address.revision,
            files_metadata=True,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        ),
        address,
        None,
        let_through=(OfflineModeIsEnabled,),
    )
    if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
        what = "the Hub names no commit"
        raise IOFailed(address, what, found=repr(info.sha)[:60], hint="check HF_ENDPOINT")
    sizes: dict[str, int | None] = {}
    for sibling in info.siblings or ():
        name, nbytes = sibling.rfilename, sibling.size
        usable = isinstance(name, str) and "\0" not in name and is_utf8(name)
        if not usable or {"", ".", ".."} & set(name.split("/")):
            raise InvalidCheckpoint(
                address, "the Hub lists a file that can be none", found=repr(name)[:100]
            )
        sizes[name] = nbytes if isinstance(nbytes, int) and nbytes >= 0 else None
    return Repository(address, info.sha, sizes)


def fetch(repository: Repository, name: str) -> Path:
    """Where the repository's small file `name` lies in the cache, downloaded if need be."""
    from huggingface_hub import hf_hub_download

    nbytes = repository.sizes[name]
    if nbytes is not None and nbytes > JSON_LIMIT:
        found, expected = f"{nbytes} bytes", f"at most {JSON_LIMIT}"
        raise InvalidCheckpoint(name, "the file is too large", found=found, expected=expected)
    address, commit = repository.address, repository.commit
    with _no_bars():
        path = Path(
            patiently(
                lambda: hf_hub_download(address.repo, name, revision=commit, library_name=_LIBRARY),
                address,
                name,
                retry=False,  # it tries for half a minute itself
            )
        )
    if path.parent.name != commit:
        raise IOFailed(
            f"{address}: {name}",
            "the Hub answers with another commit",
            found=path.parent.name,
            expected=commit,
            hint="check HF_ENDPOINT and a proxy in between",
        )
    return path


def fetch_object(repository: Repository, name: str) -> tuple[bytes, dict[str, Any]]:
    """The bytes of the repository's JSON file `name` and the object in them."""
    return read_object(fetch(repository, name), name)


def cached_file(repo: str, revision: str | None, name: str) -> Path | None:
    """Where the file lies in the cache, None if it does not."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, name, revision=revision)
    return Path(found) if isinstance(found, str) else None


def fetch_headers(
    repository: Repository,
    names: Sequence[str],
    indexed: Mapping[str, str],
    progress: Progress | None = None,
) -> list[Header]:
    """The headers of the shards `names`, in this order, several at a time.

    indexed   tensor -> shard: how much of each file to ask for; may be empty

    Raises the failure of the first shard in order that has one, once none is being read anymore.
    """
    listed: dict[str, list[str]] = {}
    for tensor, name in indexed.items():
        listed.setdefault(name, []).append(tensor)
    credentials = _credentials()
    stop, lock, done = threading.Event(), threading.Lock(), 0

    def read(name: str) -> Header:
        nonlocal done
        guess = guess_nbytes(listed[name]) if name in listed else GUESS_NBYTES
        header = _header(repository, name, guess, credentials, stop)
        with lock:
            done += 1
            if progress is not None and not stop.is_set():
                progress(done, len(names))
        return header

    pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix=_LIBRARY)
    try:
        return [future.result() for future in [pool.submit(read, name) for name in names]]
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _header(
    repository: Repository,
    name: str,
    guess: int,
    credentials: Mapping[str, str],
    stop: threading.Event,
) -> Header:
    from huggingface_hub import hf_hub_url

    address, commit = repository.address, repository.commit
    here = cached_file(address.repo, commit, name)
    if here is not None:
        return read_header(here, name=name)

    def check() -> None:
        if stop.is_set():
            raise Cancelled

    url = hf_hub_url(address.repo, name, revision=commit)
    file = RemoteFile(url, name, repository.sizes[name], credentials)
    return patiently(partial(fetch_header, file, guess, check), address, name, stop)


def _credentials() -> dict[str, str]:
    """Request headers with the token, if there is one. httpx drops it where a redirect leads to
    another host."""
    from huggingface_hub.utils import build_hf_headers

    return dict(build_hf_headers(library_name=_LIBRARY))


@contextmanager
def _no_bars() -> Iterator[None]:
    """Without huggingface_hub's progress bars, unless they were asked for: two small files."""
    from huggingface_hub import constants
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
