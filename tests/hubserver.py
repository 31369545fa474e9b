"""A small Hugging Face hub, for tests: commits on demand, files from a dict, faults on demand.

    GET  /api/datasets/ID[/revision/REV]              about the data set; /api/models for a model
    GET  /api/datasets/ID/tree/REV[/folder]           its files, one level or all
    GET  /datasets/ID/resolve/REV/path                a file; HEAD, GET, Range; without /datasets for a model
    POST /api/repos/create, /api/models/ID/branch/B   an empty repository, a branch of another's files
    POST /api/validate-yaml                           whether a card's metadata is valid
    POST /api/models/ID/preupload/REV                 which files are large, and the hashes of existing ones
    POST /ID.git/info/lfs/objects/batch               where to put each large file that is missing
    PUT  /storage/OID, POST /storage/OID              the file, or its parts and the request that joins them
    POST /ID.git/info/lfs/verify                      whether it arrived
    POST /api/models/ID/commit/REV                    the commit, as lines of JSON

`faults` is consumed from the front, one entry for each GET of a file: None serves it, a number answers with that
status, "break" closes the connection in the middle, "hold" does so after waiting for `released`. `put_faults` does the
same for uploads, by the number of the PUT.

Writing needs a token in `tokens`, with the role `read`, `write`, or the one namespace that it may write to.
"""

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

REVISION = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".gguf", ".onnx")  # what .gitattributes assigns to Git LFS
LICENSES = ("mit", "apache-2.0", "other", "unknown")


class HubServer(ThreadingHTTPServer):
    """Serves `files[data set id][path]`, or `files[id@branch][path]` for a branch. `gets` lists the requested files in
    order, `requests` counts writing requests by route, `stored_bytes` the bytes uploaded for each file, also by a PUT
    that broke off.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.faults: list[int | str | None] = []
        self.gets: list[str] = []
        self.commits = [REVISION]  # the last one is main, until something is committed
        self.heads: dict[str, str] = {}  # of branches with commits: ID or ID@branch -> commit
        self.snapshots: dict[str, dict[str, bytes]] = {}  # commit -> its files
        self.holding, self.released = threading.Event(), threading.Event()
        self.tokens: dict[str, str] = {}
        self.private: set[str] = set()
        self.objects: dict[str, bytes] = {}  # large files that arrived, by sha256
        self.parts: dict[str, dict[int, bytes]] = {}  # of large files that arrive in parts
        self.part_size: int | None = None
        self.put_faults: dict[int, int | str] = {}
        self.requests: Counter[str] = Counter()
        self.stored_bytes: Counter[str] = Counter()
        self.headers_seen: list[str] = []
        self.echoes = False  # a refusal repeats the request's address and token
        self.at_commit: Any = None  # called before a commit is made
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

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
        url = urlsplit(self.path)
        match = re.fullmatch(
            r"/(?:api/)?(?:datasets/|models/)?([^/]+/[^/]+)(?:/(revision|tree|resolve)/([^/]+)/?(.*))?", url.path
        )
        revision = unquote(match[3] or "main") if match else "main"
        files = self.files_of(match[1], revision) if match else None
        if self.role() == "":
            return self.refuse(401, "Invalid credentials in Authorization header")
        if match is None or (files is None and match[1] not in self.server.files):
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if files is None:
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        is_commit = revision in self.server.commits or revision in self.server.snapshots
        self.commit = revision if is_commit else self.head(ref(match[1], revision))
        if match[2] in (None, "revision"):
            info = {"id": match[1], "sha": self.commit, "siblings": [{"rfilename": path} for path in files]}
            return self.send_json({**info, "private": match[1] in self.server.private})
        if match[2] == "tree":
            return self.send_json(tree(files, match[4], deep="recursive=true" in url.query.lower()))
        if match[4] not in files:
            return self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        self.file(match[4], files[match[4]])

    def files_of(self, repo: str, revision: str) -> dict[str, bytes] | None:
        """The files of a branch or a commit; None if there is no such repository or revision."""
        if revision in self.server.snapshots:
            return self.server.snapshots[revision]
        return self.server.files.get(repo if revision in self.server.commits else ref(repo, revision))

    def head(self, ref: str) -> str:
        """The commit that a branch points to."""
        return self.server.heads.get(ref, self.server.commits[-1])

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

    def send_json(self, content: object, status: int = 200) -> None:
        self.answer(status, json.dumps(content).encode())

    def refuse(self, status: int, message: str) -> None:
        if self.server.echoes:
            message += f" ({self.path} {self.headers.get('Authorization')})"
        self.answer(status, json.dumps({"error": message}).encode(), {"X-Error-Message": message})

    # -- writing -------------------------------------------------------------------------------------------------------

    def role(self, namespace: str = "") -> str | None:
        """What the request's token may do: None without a token, "" with an unknown one."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        role = self.server.tokens.get(token, "") if token else None
        return "write" if role and role == namespace else role

    def may_write(self, repo: str) -> bool:
        """Whether the request may write; if not, answers as the hub does."""
        role = self.role(repo.partition("/")[0])
        if role == "write":
            return True
        self.refuse(403, "You don't have the rights to create a model under the namespace") if role else self.refuse(
            401, "Invalid credentials in Authorization header"
        )
        return False

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.headers_seen.append(str(self.headers))
        path = unquote(urlsplit(self.path).path)
        routes = {
            "create": (r"/api/repos/create()()", self.create),
            "validate": (r"/api/validate-yaml()()", self.validate),
            "branch": (r"/api/models/([^/]+/[^/]+)/branch/(.+)", self.branch),
            "preupload": (r"/api/models/([^/]+/[^/]+)/preupload/(.+)", self.preupload),
            "batch": (r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch()", self.batch),
            "verify": (r"/([^/]+/[^/]+)\.git/info/lfs/verify()", self.verify),
            "parts": (r"/storage/()([0-9a-f]{64})", self.join),
            "commit": (r"/api/models/([^/]+/[^/]+)/commit/(.+)", self.make_commit),
        }
        for name, (pattern, route) in routes.items():
            if match := re.fullmatch(pattern, path):
                self.server.requests[name] += 1
                if name in ("create", "validate", "parts") or self.may_write(match[1]):
                    route(match[1], match[2], body)
                return
        self.refuse(404, f"no route {path}")

    def create(self, _repo: str, _branch: str, body: bytes) -> None:
        asked = json.loads(body)
        repo = f"{asked['organization']}/{asked['name']}"
        if not self.may_write(repo):
            return
        if repo in self.server.files:
            return self.refuse(409, "You already created this model repo")
        self.server.files[repo] = {".gitattributes": "".join(f"*{end} filter=lfs\n" for end in LARGE).encode()}
        if asked["visibility"] == "private":
            self.server.private.add(repo)
        self.send_json({"url": f"{self.server.url}/{repo}", "name": repo})

    def validate(self, _repo: str, _branch: str, body: bytes) -> None:
        _, front, _ = json.loads(body)["content"].split("---\n", 2)
        metadata = yaml.safe_load(front)
        errors = [] if metadata.get("license") in LICENSES else [{"message": '"license" must be one of the list'}]
        errors += [
            {"message": f'"model-index[0].results[{n}]" lacks a value'}
            for index in metadata.get("model-index", [])
            for n, result in enumerate(index["results"])
            if not all(isinstance(metric["value"], int | float) for metric in result["metrics"])
        ]
        self.send_json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def branch(self, repo: str, branch: str, _body: bytes) -> None:
        self.server.files[ref(repo, branch)] = dict(self.server.files[repo])
        self.server.heads[ref(repo, branch)] = self.head(repo)
        self.send_json({})

    def preupload(self, repo: str, branch: str, body: bytes) -> None:
        files = self.files_of(repo, branch) or {}
        asked = [file["path"] for file in json.loads(body)["files"]]
        self.send_json(
            {
                "files": [
                    {
                        "path": path,
                        "uploadMode": "lfs" if path.endswith(LARGE) else "regular",
                        "shouldIgnore": False,
                        "oid": entry(path, files[path])["oid"] if path in files else None,
                    }
                    | ({"oid": hashlib.sha256(files[path]).hexdigest()} if path in files and is_large(path) else {})
                    for path in asked
                ]
            }
        )

    def batch(self, repo: str, _branch: str, body: bytes) -> None:
        objects = []
        for asked in json.loads(body)["objects"]:
            oid, size = asked["oid"], asked["size"]
            objects.append(dict(asked))
            if oid in self.server.objects:
                continue  # no action: it is already there
            address = f"{self.server.url}/storage/{oid}"
            upload: dict[str, Any] = {"href": f"{address}?signature=s3cret"}
            if (step := self.server.part_size) is not None and size > step:
                parts = {str(n): f"{address}?part={n}&signature=s3cret" for n in range(1, -(-size // step) + 1)}
                upload["header"] = {"chunk_size": str(step), **parts}
            verify = {"href": f"{self.server.url}/{repo}.git/info/lfs/verify"}
            objects[-1]["actions"] = {"upload": upload, "verify": verify}
        self.send_json({"transfer": "basic", "objects": objects})

    def do_PUT(self) -> None:
        """Store a large file, or a part of one; an upload that breaks off is not stored."""
        url, length = urlsplit(self.path), int(self.headers["Content-Length"])
        oid = url.path.rpartition("/")[2]
        self.server.requests["put"] += 1
        fault = self.server.put_faults.get(self.server.requests["put"])
        content = self.rfile.read(length // 2 if isinstance(fault, str) else length)
        self.server.stored_bytes[oid] += len(content)
        if isinstance(fault, int):
            return self.refuse(fault, "Request has expired")
        if fault is not None:
            self.server.holding.set()
            self.server.released.wait(60 if fault == "hold" else 0)
            self.close_connection = True
            return None
        if part := re.search(r"part=(\d+)", url.query):
            self.server.parts.setdefault(oid, {})[int(part[1])] = content
            return self.answer(200, b"", {"ETag": f'"{hashlib.md5(content).hexdigest()}"'})
        return self.store(oid, content)

    def join(self, _repo: str, oid: str, body: bytes) -> None:
        numbers = [part["partNumber"] for part in json.loads(body)["parts"]]
        self.store(oid, b"".join(self.server.parts[oid][number] for number in numbers))

    def store(self, oid: str, content: bytes) -> None:
        if hashlib.sha256(content).hexdigest() != oid:
            return self.refuse(400, "the bytes are others than announced")
        self.server.objects[oid] = content
        return self.answer(200, b"")

    def verify(self, _repo: str, _branch: str, body: bytes) -> None:
        asked = json.loads(body)
        right = len(self.server.objects.get(asked["oid"], b"")) == asked["size"]
        self.send_json({}) if right else self.refuse(404, "the object is not there")

    def make_commit(self, repo: str, branch: str, body: bytes) -> None:
        if self.server.at_commit is not None:
            self.server.at_commit()
        lines = [json.loads(line) for line in body.splitlines()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        files = self.files_of(repo, branch)
        if files is None:
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if header.get("parentCommit") not in (None, self.head(ref(repo, branch))):
            return self.refuse(412, "A commit has happened since. Please refresh and try again.")
        changed = dict(files)
        for key, value in ((line["key"], line["value"]) for line in lines):
            if key == "file":
                changed[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                if value["oid"] not in self.server.objects:
                    return self.refuse(400, f"{value['path']}: its LFS object is not there")
                changed[value["path"]] = self.server.objects[value["oid"]]
            elif key == "deletedFile":
                del changed[value["path"]]
        commit = hashlib.sha1(self.head(ref(repo, branch)).encode() + body).hexdigest()
        self.server.heads[ref(repo, branch)] = commit
        self.server.files[ref(repo, branch)] = self.server.snapshots[commit] = changed
        return self.send_json({"commitUrl": f"{self.server.url}/{repo}/commit/{commit}", "commitOid": commit})


def ref(repo: str, branch: str) -> str:
    """The key of a branch in `files` and `heads`."""
    return repo if branch == "main" else f"{repo}@{branch}"


def is_large(path: str) -> bool:
    """Whether Git LFS stores the file."""
    return path.endswith(LARGE)


def entry(path: str, content: bytes) -> dict[str, Any]:
    """A file as the hub lists it: with its blob's hash and, if it is large, that of its contents."""
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    listed: dict[str, Any] = {"type": "file", "oid": oid, "size": len(content), "path": path}
    if is_large(path):
        listed["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return listed


def tree(files: dict[str, bytes], folder: str, *, deep: bool = False) -> list[dict[str, Any]]:
    """One level of a data set, folders included, as the hub lists it; `deep`: all its files."""
    prefix = f"{folder}/" if folder else ""
    entries: dict[str, dict[str, Any]] = {}
    for path, content in files.items():
        if path.startswith(prefix):
            name, slash, _ = path.removeprefix(prefix).partition("/")
            if slash:
                entries[prefix + name] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": prefix + name}
            if deep or not slash:
                entries[path] = entry(path, content)
    return list(entries.values())
