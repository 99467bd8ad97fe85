"""What a person can act on, made from what the Hub, the network or huggingface_hub said.

The Hub answers 401 for private repositories and for those that do not exist, so that nobody can
find out which there are; `X-Error-Code` tells the rest apart. Of URLs only host and path are shown:
behind a redirect they are signed, which makes them secrets.
Source: hf_raise_for_status, huggingface_hub/utils/_http.py at 1.0 and 2.4.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from mxfp4prep import io
from mxfp4prep.errors import InvalidCheckpoint, IOFailed, Mxfp4PrepError
from mxfp4prep.hub.address import Address

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_MESSAGE = 200  # characters of a server's own words
_LATER = "try again later"
_SECRETS = re.compile(r"(?<=://)[^/@\s]*@|(?<=\?)[^\s'\"]+")  # passwords, signatures in URLs


class Refused(Exception):
    """An HTTP answer that is none: its status, its X-Error-Code, its own words and its host."""

    def __init__(
        self, status: int, headers: Mapping[str, str], host: str, message: str | None = None
    ) -> None:
        self.status = status
        self.code = headers.get("X-Error-Code")
        self.message = message or headers.get("X-Error-Message") or ""
        self.host = host
        self.retry_after = headers.get("Retry-After", "")
        super().__init__(f"HTTP {status}")


class CutShort(Exception):
    """An answer with fewer bytes than it announced."""


def unwrapped(error: Exception) -> Exception:
    """The answer or failure that huggingface_hub's own errors stand for."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # it looked for a cached file after a request had failed
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        response = error.response
        host = response.url.host
        return Refused(response.status_code, response.headers, host, error.server_message)
    return error


def is_passing(error: Exception) -> bool:
    """Whether the same request may well succeed in a moment."""
    if isinstance(error, Refused):
        return error.status in {408, 429, 500, 502, 503, 504}
    return isinstance(error, (CutShort, _network_error()))


def _network_error() -> type[Exception]:
    """What httpx or httpx2, whichever huggingface_hub is built on, raises for the network."""
    from huggingface_hub.errors import HfHubHTTPError

    return next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")


def failure(address: Address, name: str | None, error: Exception) -> Mxfp4PrepError:
    """What to tell about `error`, met while reading the repository's file `name`."""
    from huggingface_hub import errors

    where = str(address) if name is None else f"{address}: {name}"
    if isinstance(error, Refused):
        return _refusal(address, where, error)
    if isinstance(error, CutShort):
        return IOFailed(where, f"the answer was cut short: {error}", hint=_LATER)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return IOFailed(where, "not in the cache, and HF_HUB_OFFLINE is set", hint="unset it")
    if isinstance(error, _network_error()):
        what = f"no answer from {endpoint_host()}: {_words(error)}"
        hint = "check network, proxy and HF_ENDPOINT; HF_HUB_OFFLINE=1 takes what the cache has"
        return IOFailed(where, what, hint=hint)
    if isinstance(error, OSError) and error.errno is not None:
        failed = io.failed(error.filename or where, error)
        hint = f"{failed.hint}; " if failed.hint else ""
        return IOFailed(
            failed.where, failed.what, hint=f"{hint}HF_HOME says where the Hub's cache lies"
        )
    if isinstance(error, UnicodeEncodeError):  # headers hold ASCII, and the token is the user's
        return IOFailed(
            where, "HF_TOKEN holds characters that no token has", hint="copy the token again"
        )
    what = f"{endpoint_host()} does not answer as a Hub does: {_words(error)}"
    return IOFailed(where, what, hint="check HF_ENDPOINT, and update huggingface_hub")


def _refusal(address: Address, where: str, error: Refused) -> Mxfp4PrepError:
    status, code, page = error.status, error.code, f"{_endpoint()}/{address.repo}"
    words = f": {_short(error.message)}" if error.message else ""
    if code == "GatedRepo":
        return IOFailed(
            where,
            f"the repository is gated, and {_who()} has no access to it",
            hint=f"accept its conditions at {page}, and set HF_TOKEN to a token of that account",
        )
    if code == "RevisionNotFound":
        return InvalidCheckpoint(
            where,
            "the repository has no such revision",
            found=address.revision or "main",
            expected="a branch, a tag or a commit",
            hint=f"see {page}/tree/main for those there are",
        )
    if code == "EntryNotFound":
        return InvalidCheckpoint(where, "the Hub lists the file, but does not have it", hint=_LATER)
    if code == "RepoNotFound" or (status == 404 and code is None):
        return InvalidCheckpoint(
            where,
            f"no such directory, and {endpoint_host()} has no such model repository, or none that "
            f"{_who()} may see",
            hint="check the name; for a private repository set HF_TOKEN",
        )
    if error.host != _hostname():
        return IOFailed(where, f"{error.host} answers {status}{words}", hint=_LATER)
    if status in (401, 403):
        return IOFailed(
            where,
            f"{endpoint_host()} gives no access to {_who()} (HTTP {status}){words}",
            hint="set HF_TOKEN to a valid token that may read this repository",
        )
    if status == 429:
        hint = "wait a while; with HF_TOKEN set the limit is higher"
        return IOFailed(where, f"too many requests (HTTP 429){words}", hint=hint)
    return IOFailed(where, f"{endpoint_host()} answers {status}{words}", hint=_LATER)


def _who() -> str:
    from huggingface_hub import get_token

    return "somebody without a token" if get_token() is None else "this token"


def _endpoint() -> str:
    """The Hub's address, without a password that may be part of it."""
    from huggingface_hub import constants

    return f"{urlsplit(constants.ENDPOINT).scheme}://{endpoint_host()}"


def endpoint_host() -> str:
    """The Hub's host, and its port if one is named."""
    from huggingface_hub import constants

    return urlsplit(constants.ENDPOINT).netloc.rpartition("@")[2]


def _hostname() -> str | None:
    from huggingface_hub import constants

    return urlsplit(constants.ENDPOINT).hostname


def _words(error: Exception) -> str:
    text = _short(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _short(text: str) -> str:
    line = " ".join(_SECRETS.sub("", text).split())
    return line if len(line) <= _MAX_MESSAGE else f"{line[:_MAX_MESSAGE]}..."
