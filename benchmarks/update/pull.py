"""Time from ``POST /pull_weights`` until every replica serves a delta that a trainer has published.

    python -m benchmarks.update.pull [--source folder --source http]

Writes random weights of a published shape and versions in the format of slime and miles, each of which changes the
last two bits of 1% of the elements. Starts the service as it comes, and pulls the versions while rollouts run.

- ``folder``: from a local disk. The page cache holds the versions, as after a trainer on the same host;
- ``http``: from a web server on loopback, beside reading the same files with the standard library.

Each source is a case of benchmarks/results/<machine>/update_pull.json. ``served_s`` ends when the last replica serves
the version; ``fetch_s`` is of a URL, and ``closed_s`` the slowest replica's. On a CPU: ``--model tiny``.
"""

import socket
import statistics
import sys
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import torch
from aiohttp import web
from safetensors import safe_open

from benchmarks.common import results
from benchmarks.common.command import run
from benchmarks.common.processes import process, raise_at_sigterm, wait_until
from benchmarks.common.shipped_service import ServedOptions, shipped_service
from benchmarks.update.busy import rollouts
from rollout_service.client import SyncRolloutClient
from rollout_service.ingest.stores import Stores
from rollout_service.local import free_port
from rollout_service.runtime.threads import in_threads
from tests.support.delta_writer import Change, change, write_version

RESULT = "update_pull"
_MODULE = "benchmarks.update.pull"
SAME = ("model", "replicas", "source")
SHARE = 0.01  # share of the elements that a version changes
FILES = 8  # files of a version
PULLS, FIRST = 5, 2
"""Versions from each source, and those reported apart: the first one copies the model, and memory is registered."""


class SourceKind(StrEnum):
    """Where versions are published."""

    FOLDER = "folder"
    HTTP = "http"


class PullOptions(ServedOptions):
    """What is measured."""

    source: tuple[SourceKind, ...] = (SourceKind.FOLDER, SourceKind.HTTP)
    """May be repeated."""


class Source(NamedTuple):
    """A place with all versions."""

    kind: SourceKind
    place: str  # the folder, or its URL for the service
    http: str | None = None  # the address under which a plain GET reads the same files


def write_versions(model: Path, store: Path, count: int) -> None:
    """Publish versions 1 to ``count``, each as changes to the one before; version 0 is the model."""
    places = []
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as reader:
            places += [(file, name) for name in reader.keys()]  # noqa: SIM118 - it is no mapping

    def changes(place: tuple[Path, str]) -> list[Change]:
        file, name = place
        with safe_open(file, "pt") as reader:
            tensor = reader.get_tensor(name).flatten()
        old = tensor.view(getattr(torch, f"int{8 * tensor.element_size()}")).numpy()
        random, found = np.random.default_rng(zlib.crc32(name.encode())), []
        for _ in range(count):
            new = old.copy()
            changed = random.integers(new.size, size=max(1, int(SHARE * new.size)))
            new[changed] ^= random.integers(1, 4, size=changed.size, dtype=new.dtype)
            found.append(change(old.view(np.uint8), new.view(np.uint8)))
            old = new
        return found

    found = list(in_threads(changes, places))
    for version in range(1, count + 1):
        of_version = {name: each[version - 1] for (_, name), each in zip(places, found, strict=True)}
        write_version(store, version, of_version, files=FILES)


def file_server(arguments: list[str]) -> web.Application:
    """Return a web server of a folder, and of ranges of its files, for ``python -m aiohttp.web``."""
    application = web.Application()
    application.router.add_static("/", arguments[0])
    return application


@contextmanager
def opened(kind: SourceKind, store: Path) -> Iterator[Source]:
    """Publish the versions in a folder from ``kind`` until the block ends."""
    if kind is SourceKind.FOLDER:
        yield Source(kind, str(store))
        return
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = ["aiohttp.web", "-H", "127.0.0.1", "-P", str(port), f"{_MODULE}:file_server", str(store.parent)]
    log = store.with_suffix(f".{kind}.log")
    with process([sys.executable, "-m", *command], log, folder=store, environment={}, grace_s=1) as server:
        wait_until(lambda: _is_open(port), server, 30, log)
        yield Source(kind, f"{address}/{store.name}", f"{address}/{store.name}")


def _is_open(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def read(source: Source, files: list[Path]) -> float:
    """Return the seconds for reading the files of a version by HTTP, several at once."""

    def size(file: Path) -> int:
        with urllib.request.urlopen(f"{source.http}/{file.parent.name}/{file.name}") as reply:
            return len(reply.read())

    started = time.perf_counter()
    sizes = list(in_threads(size, files))
    took_s = time.perf_counter() - started
    if sizes != [file.stat().st_size for file in files]:
        raise RuntimeError(f"{source.http} gave files of {sizes} bytes")
    return took_s


def pulled(client: SyncRolloutClient, url: str, source: Source, number: int) -> results.Json:
    """Pull a version; return its digest, and the seconds of its stages."""
    fleet, fetched = client.fleet(), None
    if source.http is not None and fleet.log is not None:
        fetched = Stores(fleet.log.root / "trainer/stores", (source.place,)).folder(source.place) / _folder(number)
    body = {"source_dir" if source.http is None else "uri": source.place, "target_version": number}
    found: dict[str, float] = {}
    started = time.perf_counter()
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(httpx.post, f"{url}/pull_weights", json=body, timeout=600)
        while "served_s" not in found and not call.done():
            if "fetch_s" not in found and fetched is not None and fetched.exists():
                found["fetch_s"] = time.perf_counter() - started
            if all((replica.version or 0) > fleet.latest_version for replica in client.fleet().replicas):
                found["served_s"] = time.perf_counter() - started
            time.sleep(0.005)
        reply = call.result()
    reply_s = time.perf_counter() - started
    while fleet.log is not None and (fleet.log.root / "trainer/PENDING").exists():  # the next delta's base is kept
        time.sleep(0.005)
    if reply.is_error:
        raise RuntimeError(f"version {number} of {source.place}: {reply.text}")
    found.setdefault("served_s", reply_s)
    status = next(status for status in client.weights() if status.version == reply.json()["version"])
    updates = [replica.update for replica in status.replicas if replica.update is not None]
    return {"digest": status.digest, **found, "closed_s": max(update.closed_s for update in updates)}


def case_of(client: SyncRolloutClient, url: str, source: Source, store: Path) -> results.Json:
    """Pull all versions from a source; return the seconds of each, and the digest of the last."""
    each, read_s = [], list[float]()
    for number in range(1, PULLS + 1):
        files = sorted((store / _folder(number)).glob("*.safetensors"))
        if source.http is not None:
            read_s.append(read(source, files))
        each.append(pulled(client, url, source, number))
        time.sleep(1.0)  # a trainer's step lasts longer
    first, rest = each[:FIRST], each[FIRST:]
    names = [name for name in rest[0] if name.endswith("_s") and all(name in one for one in rest)]
    return {
        "delta_bytes": sum(file.stat().st_size for file in files),
        "changed_share": SHARE,
        "median_served_s": statistics.median(one["served_s"] for one in rest),
        "first": first,
        **{name: [one[name] for one in rest] for name in names},
        "read_s": read_s[-len(rest) :],
        "digest": each[-1]["digest"],
    }


def _folder(number: int) -> str:
    return f"weight_v{number:06d}"


def main(asked: PullOptions) -> None:
    """Publish, start the shipped service, pull from each source, and write the result."""
    raise_at_sigterm()
    model = asked.model_folder()
    found: list[results.Json] = []
    with ExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="published-", dir=asked.folder)))
        store = store.resolve() / "run"
        store.mkdir()
        started = time.perf_counter()
        write_versions(model, store, PULLS)
        print(f"wrote {PULLS} versions in {time.perf_counter() - started:.0f} s", flush=True)
        sources = [stack.enter_context(opened(kind, store)) for kind in asked.source]
        allowed: dict[str, object] = {
            "source_roots": [str(store)],
            "source_urls": [source.place for source in sources if source.http is not None],
        }
        url, start = stack.enter_context(shipped_service(asked, "1", weights=allowed))
        client = stack.enter_context(SyncRolloutClient(url))
        fleet = client.fleet()
        common: results.Json = {"model": asked.model, "replicas": 1, "staging": fleet.replicas[0].staging}
        common |= {"log": None if fleet.log is None else str(fleet.log.root), "start_s": start["start_s"]}
        counts = stack.enter_context(rollouts(url, 8 if asked.model == "tiny" else 64))
        for source in sources:
            before = counts[:]
            case = common | {"source": source.kind, **case_of(client, url, source, store)}
            ended, aborted = (now - then for now, then in zip(counts[:], before, strict=True))
            case |= {"rollouts": ended, "aborted": aborted}
            found.append(case)
            results.add(RESULT, [case], SAME)
    if len({case["digest"] for case in found}) > 1:
        raise RuntimeError("the last version's digests differ between sources")


if __name__ == "__main__":
    run(main)
