"""A Hugging Face Hub on loopback: as much of its HTTP API as the real client uses to push models and to pull them.

    with LoopbackHub() as hub:
        HfApi(endpoint=hub.url, token=hub.token).create_repo("me/model")
        hub.fail("PUT", "/lfs/")  # from now on, uploads of large files are cut off
        ...
        hub.faults.clear()

Everything is kept in memory; one user, `me`, may write, and everybody may read. Large files go to a storage of their own
(`/lfs/<sha256>`) and are reached by a redirect to another host name, as on the Hub.
"""

import base64
import hashlib
import json
import math
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml


LARGE_FILES = re.compile(r"\.(safetensors|bin|pt|pth|onnx|model|h5|gguf)$|^tokenizer\.json$")
REPO_ID = r"[\w.-]+/[\w.-]+"


@dataclass(frozen=True)
class File:
    """A file in a commit; a large one is named by its SHA-256, another by the hash that git gives it."""

    content: bytes
    large: bool

    @property
    def oid(self) -> str:
        if self.large:
            return hashlib.sha256(self.content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass
class Repository:
    """Every commit with all its files, oldest first, and the branches that point to them."""

    repo_id: str
    private: bool = False
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, File], message: str) -> str:
        sha = hashlib.sha1(f"{self.repo_id} {len(self.commits)} {message}".encode()).hexdigest()
        self.commits[sha] = files
        self.messages.append(message)
        self.branches[branch] = sha
        return sha

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """Contents by path."""
        return {path: file.content for path, file in self.commits[self.sha(revision)].items()}

    def sha(self, revision: str = "main") -> str:
        sha = self.branches.get(revision, revision)
        if sha not in self.commits:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha


@dataclass
class Fault:
    """Requests that go wrong: with an error status, or (`status` None) cut off after `cut` bytes of the file."""

    method: str
    path: str
    status: int | None
    cut: int
    times: float


class Refusal(Exception):
    """An answer with an error status and the Hub's headers for it."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str):
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **headers}


class LoopbackHub:
    """The server, running in a thread between `__enter__` and `__exit__`.

    Attributes:
        url: for `HF_ENDPOINT`.
        token: with it, one is `me`.
        repositories: by their id.
        requests: method and path of every request so far.
        faults: what goes wrong, see [`LoopbackHub.fail`].
    """

    user, token = "me", "hf_loopback"

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.storage: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.faults: list[Fault] = []

    def __enter__(self) -> "LoopbackHub":
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.storage_url = f"http://localhost:{self._server.server_port}"
        Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fail(
        self, method: str, path: str, status: int | None = None, cut: int = 1000, times: float = math.inf
    ) -> None:
        """Let requests whose path contains `path` fail, so many `times` or until `faults` is cleared."""
        self.faults.append(Fault(method, path, status, cut, times))

    def next_fault(self, method: str, path: str) -> Fault | None:
        """What is to go wrong with a request."""
        for fault in self.faults:
            if fault.method == method and fault.path in path and fault.times > 0:
                fault.times -= 1
                return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    hub: LoopbackHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *arguments) -> None:
        pass

    def handle_request(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        self.fault = self.hub.next_fault(self.command, path)
        if self.fault is not None and self.fault.status is None and self.command != "GET":
            return self.hang_up()
        body = self.read_body()
        try:
            if self.fault is not None and self.fault.status is not None:
                raise Refusal(self.fault.status, "made to fail")
            self.check_token()
            for method, pattern, respond in ROUTES:
                match = re.fullmatch(pattern, path)
                if match and self.command in method:
                    return respond(self, body, **match.groupdict())
            raise Refusal(404, f"{self.command} {path} is no part of this Hub")
        except Refusal as refusal:
            self.answer({"error": refusal.message}, refusal.status, **refusal.headers)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def hang_up(self) -> None:
        """Take a little of what is sent, and close the connection."""
        self.rfile.read(min(self.fault.cut, int(self.headers.get("Content-Length", 0))))
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def answer(self, content: Any, status: int = 200, **headers: str) -> None:
        """Send bytes, or anything else as JSON."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def send_file(self, content: bytes, **headers: str) -> None:
        """Send a file, from where the client asks for it on; a fault cuts it off."""
        start, status = 0, 200
        if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start, status = int(wanted[1]), 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if self.fault is None or self.command == "HEAD":
            return self.answer(content[start:], status, **headers)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content) - start), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content[start : max(start, self.fault.cut)])
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    @property
    def given_token(self) -> str | None:
        header = self.headers.get("Authorization")
        return None if header is None else header.removeprefix("Bearer ")

    def check_token(self) -> None:
        if self.given_token not in (None, self.hub.token):
            raise Refusal(401, "Invalid credentials in Authorization header")

    def check_may_write(self, repo_id: str) -> None:
        if self.given_token is None:
            raise Refusal(401, "Invalid username or password.")
        if repo_id.split("/")[0] != self.hub.user:
            raise Refusal(403, f"You don't have the rights to write to {repo_id}")

    def repository(self, repo_id: str) -> Repository:
        repository = self.hub.repositories.get(repo_id)
        if repository is None or (repository.private and self.given_token is None):
            # To strangers the Hub does not say which of the two it is.
            raise Refusal(404 if self.given_token else 401, "Repository not found", "RepoNotFound")
        return repository

    # What the Hub does, in the order of a push and a pull.

    def who_am_i(self, body: bytes) -> None:
        if self.given_token is None:
            raise Refusal(401, "Invalid username or password.")
        self.answer({"type": "user", "name": self.hub.user, "orgs": [], "auth": {"type": "access_token"}})

    def create_repository(self, body: bytes) -> None:
        wanted = json.loads(body)
        repo_id = f"{wanted.get('organization') or self.hub.user}/{wanted['name']}"
        self.check_may_write(repo_id)
        url = f"{self.hub.url}/{repo_id}"
        if repo_id in self.hub.repositories:
            return self.answer({"error": "You already created this model repo", "url": url}, 409)
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        self.hub.repositories[repo_id] = Repository(repo_id, private)
        self.hub.repositories[repo_id].commit("main", {}, "initial commit")
        self.answer({"url": url, "name": repo_id})

    def create_branch(self, body: bytes, repo_id: str, branch: str) -> None:
        self.check_may_write(repo_id)
        repository = self.repository(repo_id)
        if branch in repository.branches:
            raise Refusal(409, f"Reference already exists: {branch}")
        repository.branches[branch] = repository.sha(json.loads(body).get("startingPoint") or "main")
        self.answer({})

    def validate_yaml(self, body: bytes) -> None:
        errors = card_errors(json.loads(body)["content"])
        self.answer({"errors": [{"message": error} for error in errors], "warnings": []}, 400 if errors else 200)

    def preupload(self, body: bytes, repo_id: str, revision: str) -> None:
        self.check_may_write(repo_id)
        repository = self.repository(repo_id)
        present = repository.commits[repository.sha(revision)]
        ignored = present[".gitignore"].content.decode() if ".gitignore" in present else ""
        ignored, answers = json.loads(body).get("gitIgnore", ignored).split(), []
        for file in json.loads(body)["files"]:
            path = file["path"]
            mode = "lfs" if LARGE_FILES.search(path) else "regular"
            should_ignore = any(fnmatch(path, pattern) for pattern in ignored)
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": should_ignore})
            if path in present:
                answers[-1]["oid"] = present[path].oid
        self.answer({"files": answers})

    def large_files(self, body: bytes, repo_id: str) -> None:
        self.check_may_write(repo_id)
        objects = []
        for wanted in json.loads(body)["objects"]:
            objects.append({"oid": wanted["oid"], "size": wanted["size"]})
            if wanted["oid"] not in self.hub.storage:
                verify = {"href": f"{self.hub.url}/{repo_id}.git/info/lfs/verify"}
                objects[-1]["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}, "verify": verify}
        self.answer({"transfer": "basic", "objects": objects})

    def store(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refusal(400, "the content is not what its name says")
        self.hub.storage[oid] = body
        self.answer({})

    def verify(self, body: bytes, repo_id: str) -> None:
        wanted = json.loads(body)
        if len(self.hub.storage.get(wanted["oid"], b"")) != wanted["size"]:
            raise Refusal(404, "the object was not uploaded")
        self.answer({})

    def commit(self, body: bytes, repo_id: str, revision: str) -> None:
        self.check_may_write(repo_id)
        repository = self.repository(repo_id)
        header, *operations = (json.loads(line) for line in body.splitlines() if line.strip())
        parent = header["value"].get("parentCommit")
        if parent not in (None, repository.sha(revision)):
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        files = dict(repository.commits[repository.sha(revision)])
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]), large=False)
            elif operation["key"] == "lfsFile":
                if value["oid"] not in self.hub.storage:
                    raise Refusal(400, f"LFS pointer of {value['path']} leads to nothing")
                files[value["path"]] = File(self.hub.storage[value["oid"]], large=True)
            elif files.pop(value["path"], None) is None:
                raise Refusal(404, "A file with this name doesn't exist", "EntryNotFound")
        sha = repository.commit(revision, files, header["value"]["summary"])
        self.answer({"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{repo_id}/commit/{sha}"})

    def model_info(self, body: bytes, repo_id: str, revision: str | None) -> None:
        repository = self.repository(repo_id)
        sha = repository.sha(revision or "main")
        siblings = [{"rfilename": path} for path in repository.commits[sha]]
        names = {"id": repo_id, "modelId": repo_id, "private": repository.private}
        self.answer({**names, "sha": sha, "siblings": siblings, "tags": [], "downloads": 0, "likes": 0})

    def tree(self, body: bytes, repo_id: str, revision: str, folder: str | None) -> None:
        repository = self.repository(repo_id)
        sha = repository.sha(revision)
        entries = []
        for path, file in repository.commits[sha].items():
            if folder and not path.startswith(f"{folder}/"):
                continue
            entries.append({"type": "file", "path": path, "size": len(file.content), "oid": file.oid})
            if file.large:
                entries[-1]["lfs"] = {"oid": file.oid, "size": len(file.content), "pointerSize": 134}
        if folder and not entries:
            raise Refusal(404, f"{folder} does not exist on {revision}", "EntryNotFound", **{"X-Repo-Commit": sha})
        self.answer(entries)

    def resolve(self, body: bytes, repo_id: str, revision: str, path: str) -> None:
        repository = self.repository(repo_id)
        sha = repository.sha(revision)
        headers = {"X-Repo-Commit": sha}
        file = repository.commits[sha].get(path)
        if file is None:
            raise Refusal(404, "Entry not found", "EntryNotFound", **headers)
        if not file.large:
            return self.send_file(file.content, ETag=f'"{file.oid}"', **headers)
        headers |= {"X-Linked-Etag": f'"{file.oid}"', "X-Linked-Size": str(len(file.content))}
        self.answer(b"", 302, Location=f"{self.hub.storage_url}/lfs/{file.oid}", **headers)

    def retrieve(self, body: bytes, oid: str) -> None:
        if self.given_token is not None:
            raise Refusal(400, "the storage takes no tokens of the Hub: they must not be sent to other hosts")
        if oid not in self.hub.storage:
            raise Refusal(404, "Entry not found")
        self.send_file(self.hub.storage[oid], ETag=f'"{oid}"')


def card_errors(content: str) -> list[str]:
    """What the Hub would refuse in a README.md, so far as it is about the shape of the metadata."""
    block = re.match(r"\s*---\n(.*?)\n---", content, flags=re.DOTALL)
    if block is None:
        return []
    try:
        metadata = yaml.safe_load(block[1])
    except yaml.YAMLError as error:
        return [f"metadata is not YAML: {error}"]
    if not isinstance(metadata, dict):
        return ["metadata must be a mapping"]
    errors = [
        f'"{name}" must be a string or a list of strings'
        for name in (
            "language",
            "license",
            "tags",
            "datasets",
            "metrics",
            "pipeline_tag",
            "library_name",
            "base_model",
        )
        if not all(isinstance(value, str) for value in as_list(metadata.get(name)))
    ]
    for base in as_list(metadata.get("base_model")):
        if not re.fullmatch(rf"{REPO_ID}|[\w.-]+", str(base)):
            errors.append(f'"base_model" with value "{base}" is not valid: it must be a model id from hf.co')
    for entry in metadata.get("model-index", []):
        for result in entry["results"]:
            wanted = [
                (result, "task"),
                (result["task"], "type"),
                (result["dataset"], "type"),
                (result["dataset"], "name"),
            ]
            wanted += [(metric, name) for metric in result["metrics"] for name in ("type", "value")]
            errors += [f'"model-index" lacks "{name}"' for mapping, name in wanted if mapping.get(name) is None]
    return errors


def as_list(value: Any) -> list:
    return [] if value is None else value if isinstance(value, list) else [value]


ROUTES: list[tuple[tuple[str, ...], str, Callable]] = [
    (("GET",), "/api/whoami-v2", _Handler.who_am_i),
    (("POST",), "/api/repos/create", _Handler.create_repository),
    (("POST",), "/api/validate-yaml", _Handler.validate_yaml),
    (("POST",), f"/api/models/(?P<repo_id>{REPO_ID})/branch/(?P<branch>.+)", _Handler.create_branch),
    (("POST",), f"/api/models/(?P<repo_id>{REPO_ID})/preupload/(?P<revision>.+)", _Handler.preupload),
    (("POST",), f"/(?P<repo_id>{REPO_ID}).git/info/lfs/objects/batch", _Handler.large_files),
    (("PUT",), r"/lfs/(?P<oid>\w+)", _Handler.store),
    (("POST",), f"/(?P<repo_id>{REPO_ID}).git/info/lfs/verify", _Handler.verify),
    (("POST",), f"/api/models/(?P<repo_id>{REPO_ID})/commit/(?P<revision>.+)", _Handler.commit),
    (("GET",), f"/api/models/(?P<repo_id>{REPO_ID})(/revision/(?P<revision>.+))?", _Handler.model_info),
    (("GET",), f"/api/models/(?P<repo_id>{REPO_ID})/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", _Handler.tree),
    (("GET", "HEAD"), f"/(?P<repo_id>{REPO_ID})/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.resolve),
    (("GET", "HEAD"), r"/lfs/(?P<oid>\w+)", _Handler.retrieve),
]
