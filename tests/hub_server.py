"""A Hub on loopback: serves a folder as one model repository, misbehaves on request, notes all.

It answers what huggingface_hub asks for one model: the repository's description at a revision
(`/api/models/ID/revision/REV?blobs=true`) and its files (`/ID/resolve/COMMIT/FILE`, HEAD and GET
with ranges). With `cdn`, safetensors files are redirected to a second server, as the real Hub does.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PIECE = 64 << 10


class Seen(NamedTuple):
    """One request that came in, and the bytes of body that went out for it."""

    server: str  # "hub" or "cdn"
    method: str
    path: str
    range: str | None
    authorization: str | None
    encoding: str | None  # Accept-Encoding
    status: int
    nbytes: int


UNANSWERED = Seen("", "", "", None, None, None, 0, 0)


@dataclass
class Hub:
    """What the server serves and how. Tests change it at any time.

    faults    file name or "api" -> what to do wrong, one a request; the last one stays if `forever`
    files     more files, or other content for some: name -> bytes
    listed    what the description says instead: name -> size, None for no size
    """

    root: Path
    repo: str
    commit: str = COMMIT
    revisions: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    gated: bool = False
    cdn: bool = False
    delay: float = 0.0
    faults: dict[str, list[str]] = field(default_factory=dict)
    forever: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    listed: dict[str, int | None] = field(default_factory=dict)
    description: bytes | None = None
    url: str = ""
    cdn_url: str = ""
    most_waiting: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _now: int = 0
    _waiting: int = 0
    _seen: list[Seen] = field(default_factory=list)

    @property
    def seen(self) -> list[Seen]:
        """All requests as they came in, once none is being answered anymore."""
        deadline = time.monotonic() + 10
        while self._now and time.monotonic() < deadline:
            time.sleep(0.002)
        return self._seen

    def arrived(self) -> int:
        """The place in `seen` of a request that has come in."""
        with self._lock:
            self._seen.append(UNANSWERED)
            return len(self._seen) - 1

    def note(self, place: int, seen: Seen) -> None:
        """Keeps a request that was answered."""
        with self._lock:
            self._seen[place] = seen

    def names(self) -> list[str]:
        """Every file of the repository."""
        there = [p.relative_to(self.root).as_posix() for p in self.root.rglob("*") if p.is_file()]
        return sorted({*there, *self.files})

    def size(self, name: str) -> int:
        """The size of a file."""
        content = self.files.get(name)
        return (self.root / name).stat().st_size if content is None else len(content)

    def read(self, name: str, first: int, count: int) -> bytes:
        """A part of a file."""
        content = self.files.get(name)
        if content is not None:
            return content[first : first + count]
        with (self.root / name).open("rb") as handle:
            handle.seek(first)
            return handle.read(count)

    def fault(self, name: str) -> str | None:
        """What to do wrong with this request."""
        with self._lock:
            waiting = self.faults.get(name, [])
            if not waiting:
                return None
            return waiting[0] if self.forever and len(waiting) == 1 else waiting.pop(0)

    def of(self, name: str, method: str = "GET") -> list[Seen]:
        """The requests for one file."""
        return [s for s in self.seen if s.method == method and s.path.endswith(f"/{name}")]

    def body_nbytes(self, suffix: str = "") -> int:
        """Bytes of body that went out for files whose name ends so."""
        return sum(seen.nbytes for seen in self.seen if seen.path.endswith(suffix))

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While a request is being answered."""
        with self._lock:
            self._now += 1
        try:
            yield
        finally:
            with self._lock:
                self._now -= 1

    def pause(self) -> None:
        """Waits for `delay`, and notes how many clients are kept waiting at the same time."""
        with self._lock:
            self._waiting += 1
            self.most_waiting = max(self.most_waiting, self._waiting)
        time.sleep(self.delay)
        with self._lock:
            self._waiting -= 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    role: str

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        self._status, self._sent = 0, 0
        with self.hub.answering():
            place = self.hub.arrived()
            try:
                self._answer()
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True
            self.hub.note(
                place,
                Seen(
                    self.role,
                    self.command,
                    unquote(urlsplit(self.path).path),
                    self.headers.get("range"),
                    self.headers.get("authorization"),
                    self.headers.get("accept-encoding"),
                    self._status,
                    self._sent,
                ),
            )

    def _answer(self) -> None:
        hub, parts = self.hub, urlsplit(self.path)
        if self.role == "cdn":
            return self._file(unquote(parts.path).removeprefix("/"))
        org, _, rest = parts.path.removeprefix("/").partition("/")
        if parts.path.startswith("/api/models/"):
            return self._describe(parts.path, parse_qs(parts.query))
        if f"{org}/{rest.partition('/')[0]}" != hub.repo:
            return self._refuse(404, "RepoNotFound", "Repository not found")
        _, _, after = parts.path.partition("/resolve/")
        revision, _, name = after.partition("/")
        name = unquote(name)
        if unquote(revision) != hub.commit:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if not self._may_read():
            return None
        if name not in hub.names():
            return self._refuse(404, "EntryNotFound", "Entry not found")
        if hub.cdn and name.endswith(".safetensors"):
            return self._send(
                302, {"Location": f"{hub.cdn_url}/{name}?sig=secret", "Content-Length": "0"}
            )
        return self._file(name)

    def _may_read(self) -> bool:
        hub, given = self.hub, self.headers.get("authorization")
        if hub.gated:
            self._refuse(403 if given else 401, "GatedRepo", "Access to model is restricted")
            return False
        if hub.token is not None and given != f"Bearer {hub.token}":
            if given is None:
                self._refuse(401, "RepoNotFound", "Repository not found")
            else:
                self._refuse(401, None, "Invalid credentials in Authorization header")
            return False
        return True

    def _describe(self, path: str, query: dict[str, list[str]]) -> None:
        hub = self.hub
        repo, _, revision = path.removeprefix("/api/models/").partition("/revision/")
        fault = hub.fault("api")
        if fault is not None and self._fail(fault):
            return
        if hub.token is not None and not self._may_read():
            return
        if repo != hub.repo:
            self._refuse(404, "RepoNotFound", "Repository not found")
            return
        commits = {"": hub.commit, "main": hub.commit, hub.commit: hub.commit, **hub.revisions}
        commit = commits.get(unquote(revision))
        if commit is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {unquote(revision)}")
            return
        sizes = {name: hub.size(name) for name in hub.names()} | hub.listed
        siblings: list[dict[str, object]] = [
            {"rfilename": name} | ({} if size is None or "blobs" not in query else {"size": size})
            for name, size in sizes.items()
        ]
        document = {"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "tags": []}
        body = json.dumps(document).encode() if hub.description is None else hub.description
        self._send(200, {"Content-Type": "application/json"}, body)

    def _refuse(self, status: int, code: str | None, message: str) -> None:
        headers = {"X-Error-Message": message, "Content-Type": "application/json"}
        if code is not None:
            headers["X-Error-Code"] = code
        self._send(status, headers, json.dumps({"error": message}).encode())

    def _fail(self, fault: str) -> bool:
        """Answers with a status or resets the connection, if that is the fault."""
        kind, _, detail = fault.partition(":")
        if kind.isdigit():
            headers = {"Retry-After": detail} if detail else {}
            self._send(int(kind), headers, b"stumbled")
        elif kind == "reset":
            self.close_connection = True
            self.connection.shutdown(2)
        elif kind == "html":
            self._send(200, {"Content-Type": "text/html"}, b"<html>Please log in</html>")
        elif kind == "loop":
            self._send(302, {"Location": self.path, "Content-Length": "0"})
        else:
            return False
        return True

    def _file(self, name: str) -> None:
        hub = self.hub
        if hub.delay:
            hub.pause()
        fault = hub.fault(name) if self.command == "GET" or hub.forever else None
        if fault is not None and self._fail(fault):
            return
        total = hub.size(name)
        headers = {
            "ETag": f'"{hashlib.sha256(name.encode()).hexdigest()}"',
            "X-Repo-Commit": "f" * 40 if fault == "other commit" else hub.commit,
            "Accept-Ranges": "bytes",
        }
        if fault == "no commit":
            del headers["X-Repo-Commit"]
        first, last, status = 0, total - 1, 200
        asked = self.headers.get("range")
        if asked and fault not in ("no range", "no range, no length"):
            start, _, end = asked.removeprefix("bytes=").partition("-")
            first, last, status = int(start), min(int(end or last), total - 1), 206
            if first >= total:
                self._send(416, {"Content-Range": f"bytes */{total}"}, b"")
                return
            headers["Content-Range"] = f"bytes {first}-{last}/{total}"
        count = last - first + 1
        match fault:
            case "shifted":
                headers["Content-Range"] = f"bytes {first + 1}-{last + 1}/{total}"
            case "shorter":
                count -= 1
                headers["Content-Range"] = f"bytes {first}-{last - 1}/{total}"
            case "other total":
                headers["Content-Range"] = f"bytes {first}-{last}/{total + 1}"
            case "no total":
                headers["Content-Range"] = f"bytes {first}-{last}/*"
            case "no content range":
                del headers["Content-Range"]
            case "encoded":
                headers["Content-Encoding"] = "gzip"
            case "416":
                self._send(416, {"Content-Range": f"bytes */{total}"}, b"")
                return
        length: int | None = count
        if fault in ("no range, no length", "closed early"):
            length, self.close_connection = None, True
            headers["Connection"] = "close"
        if fault in ("cut", "closed early"):
            count = min(count, 300)
            self.close_connection = True
        self._begin(status, headers, length)
        if self.command == "HEAD":
            return
        while count > 0:
            piece = hub.read(name, first, min(PIECE, count))
            self.wfile.write(piece)
            self._sent += len(piece)
            first += len(piece)
            count -= len(piece)

    def _begin(self, status: int, headers: dict[str, str], length: int | None) -> None:
        self._status = status
        self.send_response_only(status)
        for key, value in headers.items():
            self.send_header(key, value)
        if length is not None and "Content-Length" not in headers:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self._begin(status, headers, len(body))
        if self.command != "HEAD" and body:
            self.wfile.write(body)
            self._sent += len(body)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """`hub` on two ports of 127.0.0.1: the Hub itself, and the CDN that it may redirect to."""
    servers = []
    for role in ("hub", "cdn"):
        handler = type("Handler", (_Handler,), {"hub": hub, "role": role})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
    hub.url, hub.cdn_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
