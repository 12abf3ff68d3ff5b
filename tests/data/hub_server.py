"""A hub in miniature on 127.0.0.1: as much of the API of huggingface.co as `huggingface_hub` and `datasets` ask of a data set.

    with serving({"org/name": Repository({"data/train.jsonl": b"..."}, revisions={"v1": {...}})}) as hub: hub.url, hub.asked

Paths and answers are those of https://huggingface.co/docs/hub/api.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

DATE = "2026-01-01T00:00:00.000Z"
Files = Mapping[str, bytes]
CARD = """---
configs:
- config_name: small
  data_files:
  - {split: train, path: data/train-00000*}
- config_name: large
  data_files:
  - {split: train, path: data/train-*}
  - {split: test, path: data/test-*}
---
"""
"""README.md of a data set with two configurations, of which the larger one has two files, and a split for tests."""


@dataclass
class Repository:
    """A data set: its files at `main`, and at other tags or branches."""

    main: Files
    revisions: Mapping[str, Files] = field(default_factory=dict)
    gated: bool = False

    def files_at(self, revision: str) -> tuple[str, Files] | None:
        """(commit, files) of a branch, a tag or a commit."""
        states = {"main": self.main, **self.revisions}
        commits = {commit_of(files): files for files in states.values()}
        files = states.get(revision, commits.get(revision))
        return None if files is None else (commit_of(files), files)


@dataclass
class Hub:
    url: str
    repositories: dict[str, Repository]
    asked: list[str] = field(default_factory=list)
    """Method and path of each request."""


def commit_of(files: Files) -> str:
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


@contextmanager
def serving(repositories: dict[str, Repository]) -> Iterator[Hub]:
    hub = Hub("", repositories)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        name, repository, words = self._repository(path.removeprefix("/api").removeprefix("/datasets/"))
        if repository is None:
            self._refuse(401 if "/" in name else 404, "RepoNotFound", "Repository not found")
        elif repository.gated:
            self._refuse(401, "GatedRepo", f"Access to dataset {name} is restricted. You must have access to it and be authenticated.")
        elif (state := repository.files_at(words[1] if len(words) > 1 else "main")) is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {words[1]}")
        elif not path.startswith("/api/"):
            self._file(*state, "/".join(words[2:]))
        else:
            self._describe(name, *state, words, body)

    def _repository(self, path: str) -> tuple[str, Repository | None, list[str]]:
        """(name, repository, the words of the path after the name)"""
        words = path.split("/")
        name = "/".join(words[:2])
        return name, self.hub.repositories.get(name), [word for word in words[2:] if word]

    def _describe(self, name: str, commit: str, files: Files, words: list[str], body: bytes) -> None:
        entries = [
            {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest(), "lastCommit": None}
            for path, data in sorted(files.items())
        ]
        kind = words[0] if words else "revision"
        if kind == "revision":
            siblings = [{"rfilename": entry["path"]} for entry in entries]
            known = {"_id": "0", "id": name, "sha": commit, "private": False, "gated": False, "disabled": False, "tags": [], "downloads": 0}
            self._json({**known, "lastModified": DATE, "siblings": siblings})
        elif kind == "tree":
            self._tree(entries, "/".join(words[2:]))
        elif kind == "paths-info":
            wanted = json.loads(body)["paths"] if body.startswith(b"{") else []
            self._json([entry for entry in entries if entry["path"] in wanted])
        else:
            self._refuse(404, "EntryNotFound", f"nothing at {kind}")

    def _tree(self, entries: list[dict], folder: str) -> None:
        """What lies in `folder`; with `recursive`, in the folders below, too."""
        prefix = f"{folder}/" if folder else ""
        inside = [entry for entry in entries if entry["path"].startswith(prefix)]
        below = [entry["path"].removeprefix(prefix).split("/") for entry in inside]
        deeper = {prefix + words[0] for words in below if len(words) > 1}
        if folder and not inside:
            self._refuse(404, "EntryNotFound", f"{folder} does not exist")
            return
        if parse_qs(urlsplit(self.path).query).get("recursive", [""])[0].lower() not in ("true", "1"):
            inside = [entry for entry in inside if "/" not in entry["path"].removeprefix(prefix)]
        self._json([*({"type": "directory", "path": path, "size": 0, "oid": "0"} for path in sorted(deeper)), *inside])

    def _file(self, commit: str, files: Files, path: str) -> None:
        data = files.get(path)
        if data is None:
            self._refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
            return
        self._send(200, data, "application/octet-stream", {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'})

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), "application/json", {})

    def _refuse(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        said = {"X-Error-Code": code, "X-Error-Message": message, **(headers or {})}
        self._send(status, json.dumps({"error": message}).encode(), "application/json", said)

    def _send(self, status: int, data: bytes, kind: str, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
