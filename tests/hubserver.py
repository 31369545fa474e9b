"""A small Hugging Face hub, for tests: three routes, commits on demand, files from a dict, faults on demand.

    /api/datasets/ID/revision/REV         what the data set is
    /api/datasets/ID/tree/REV[/folder]    one level of its files
    /datasets/ID/resolve/REV/path         a file; HEAD, GET, Range; of a model without /datasets

`faults` is a list taken from the front, one entry for each GET of a file: None serves it, a number answers with that
status, "break" closes the connection in the middle, "hold" as well, but waits for `released` first.
"""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"


class HubServer(ThreadingHTTPServer):
    """Serves `files[data set id][path]`; `gets` lists the files asked for, in order."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.faults: list[int | str | None] = []
        self.gets: list[str] = []
        self.commits = [REVISION]  # the last one is main
        self.holding, self.released = threading.Event(), threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        match = re.fullmatch(
            r"/(?:api/)?(?:datasets/|models/)?([^/]+/[^/]+)/(revision|tree|resolve)/([^/]+)/?(.*)",
            urlsplit(self.path).path,
        )
        files = self.server.files.get(match[1]) if match else None
        if match is None or files is None:
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if match[3] not in (*self.server.commits, "main"):
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        self.commit = self.server.commits[-1] if match[3] == "main" else match[3]
        if match[2] == "revision":
            info = {"id": match[1], "sha": self.commit, "siblings": [{"rfilename": path} for path in files]}
            return self.answer(200, json.dumps(info).encode())
        if match[2] == "tree":
            return self.answer(200, json.dumps(tree(files, match[4])).encode())
        if match[4] not in files:
            return self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        self.file(match[4], files[match[4]])

    def file(self, path: str, content: bytes) -> None:
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": self.commit,
            "Accept-Ranges": "bytes",
        }
        status, total = 200, len(content)
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(wanted[1]), min(int(wanted[2] or total), total - 1)
            content, status = content[start : end + 1], 206
            headers["Content-Range"] = f"bytes {start}-{end}/{total}"
        fault = None
        if self.command == "GET" and not path.endswith(".md"):
            self.server.gets.append(path)
            fault = self.server.faults.pop(0) if self.server.faults else None
        if isinstance(fault, int):
            return self.answer(fault, b"fault")
        if fault == "hold":
            self.server.holding.set()
            self.server.released.wait(60)
        self.answer(status, content, headers, cut=fault is not None)

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = self.close_connection or cut


def tree(files: dict[str, bytes], folder: str) -> list[dict[str, object]]:
    """One level of a data set, folders included, as the hub lists it."""
    prefix = f"{folder}/" if folder else ""
    entries: dict[str, dict[str, object]] = {}
    for path, content in files.items():
        if path.startswith(prefix):
            name, slash, _ = path.removeprefix(prefix).partition("/")
            oid = hashlib.sha1(content).hexdigest()
            kind = {"type": "directory", "size": 0} if slash else {"type": "file", "size": len(content)}
            entries[prefix + name] = {**kind, "oid": oid, "path": prefix + name}
    return list(entries.values())
