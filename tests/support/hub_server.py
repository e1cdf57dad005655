"""A Hugging Face hub on loopback: the endpoints that huggingface_hub uses, over folders of this machine."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

_INFO = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?")
_TREE = re.compile(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_PART_BYTES = 1 << 16
_PROJECT = Path(__file__).parents[2]


@dataclass
class Repository:
    """What a repository holds at each commit."""

    commits: dict[str, Path] = field(default_factory=dict)
    """Hash → folder."""
    revisions: dict[str, str] = field(default_factory=dict)
    """Branch or tag → hash."""
    gated: bool = False
    """Its files are for those who send ``HubServer.token``; that it is there is for all to see."""

    def folder(self, revision: str) -> Path | None:
        return self.commits.get(self.revisions.get(revision, revision))


@dataclass
class HubServer:
    """Repositories by id, and every request that came."""

    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    """``GET /Qwen/…/model.safetensors bytes=100-``: method, path and range."""
    token: str = "hf_of_one_who_may"
    cut_once: dict[str, int] = field(default_factory=dict)
    """Name of a file → bytes of it after which the connection breaks, the first time that it is asked for."""
    held: dict[str, threading.Event] = field(default_factory=dict)
    """Name of a file → what its answer waits for."""
    asked_for_held: threading.Event = field(default_factory=threading.Event)
    """Somebody waits for one of ``held``."""

    def publish(self, repo_id: str, folder: Path, *revisions: str) -> str:
        """Commit what ``folder`` holds, and have ``revisions`` name it, by default ``main``. Returns the hash."""
        names = sorted(path.name for path in folder.iterdir())
        content = b"".join(name.encode() + (folder / name).read_bytes() for name in names)
        commit = hashlib.sha1(content).hexdigest()
        repository = self.repositories.setdefault(repo_id, Repository())
        repository.commits[commit] = folder
        repository.revisions |= dict.fromkeys(revisions or ("main",), commit)
        return commit

    def env(self, cache: Path, **variables: str) -> list[str]:
        """The command ``env``: a program under it uses this hub and that cache, whatever a developer's shell sets."""
        own = {"PYTHONPATH": str(_PROJECT), "HF_ENDPOINT": self.url, "HF_HOME": str(cache)}
        forgotten = [option for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE") for option in ("-u", name)]
        return ["env", *forgotten, *(f"{name}={value}" for name, value in {**own, **variables}.items())]

    def downloaded(self) -> list[str]:
        """Names of the files whose bytes were asked for, in order."""
        return [request.split()[1].rpartition("/")[2] for request in self.requests if self._is_download(request)]

    @staticmethod
    def _is_download(request: str) -> bool:
        method, path, *_ = request.split()
        return method == "GET" and "/resolve/" in path


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """Serve until the block ends."""
    hub = HubServer("")

    class Handler(_Handler):
        server_of = hub

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            for event in hub.held.values():
                event.set()
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of: HubServer

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server_of.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}")
        for pattern, answer in ((_TREE, self._tree), (_INFO, self._info), (_FILE, self._file)):
            if match := pattern.fullmatch(path):
                repository = self.server_of.repositories.get(match[1])
                if repository is None:
                    return self._refuse(404, "RepoNotFound", "Repository not found")
                folder = repository.folder(match[2] or "main")
                if folder is None:
                    return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {match[2]}")
                return answer(repository, folder, *match.groups())
        return self._refuse(404, "", f"no {path} here")

    def _info(self, repository: Repository, folder: Path, repo_id: str, revision: str | None) -> None:
        commit = next(known for known, at in repository.commits.items() if at == folder)
        siblings = [{"rfilename": path.name} for path in folder.iterdir()]
        self._json({"id": repo_id, "sha": commit, "siblings": siblings})

    def _tree(self, repository: Repository, folder: Path, *_: str) -> None:
        files = [
            {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": _etag(path)}
            for path in sorted(folder.iterdir())
        ]
        self._json(files)

    def _file(self, repository: Repository, folder: Path, repo_id: str, revision: str, name: str) -> None:
        if repository.gated and self.headers["Authorization"] != f"Bearer {self.server_of.token}":
            return self._refuse(403, "GatedRepo", f"Access to model {repo_id} is restricted")
        file = folder / name
        if not file.is_file():
            return self._refuse(404, "EntryNotFound", f"{name} does not exist")
        if self.command == "GET" and name in self.server_of.held:
            self.server_of.asked_for_held.set()
            self.server_of.held[name].wait()
        data, first = file.read_bytes(), 0
        if requested := self.headers.get("Range"):
            first = int(requested.removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if requested else 200)
        if requested:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.send_header("ETag", f'"{_etag(file)}"')
        self.send_header("X-Repo-Commit", next(c for c, at in repository.commits.items() if at == folder))
        self.send_header("Content-Length", str(len(data) - first))
        self.end_headers()
        if self.command == "GET":
            self._send(name, data[first:])

    def _send(self, name: str, data: bytes) -> None:
        cut = self.server_of.cut_once.pop(name, None)
        for start in range(0, len(data[:cut]), _PART_BYTES):
            self.wfile.write(data[:cut][start : start + _PART_BYTES])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True

    def _json(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing into the tests' output."""


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
