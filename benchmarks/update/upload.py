"""How fast 2 GB of weights get into the log: by parts and by path, beside plain sockets, a bare PUT and a file copy.

    python -m benchmarks.update.upload

The ingest runs in a process of its own with its real routes and its real upload listener, without Ray and without
engines: seconds until the version is committed, quantized and synced to disk. One ingest has its log on a disk, another
in memory (a tmpfs). The plain sockets are the limit: the same bytes over as many connections, neither hashed nor kept.
The bare PUT is a route under uvicorn that writes each part into a new file and syncs it, fed by httpx.
Memory is what each process grows by while it works, sampled every 20 ms, without pages of files.
"""

import asyncio
import functools
import itertools
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
import psutil
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from benchmarks.common import results
from benchmarks.common.command import run
from benchmarks.update import plain_sockets
from benchmarks.update.upload_servers import PART_BYTES, process, serve_bare, serve_ingest
from rollout_service.client import RolloutClient
from rollout_service.client._parts import BODY_CHUNK_BYTES
from rollout_service.client._upload import Quantize
from rollout_service.config import WeightsConfig

LAYERS = 20
"""100 MB of BF16 each."""
PARALLEL = 4
IN_MEMORY = ", log in memory"
"""Ways that end so go to the ingest whose log is in memory."""


def make_model(folder: Path) -> int:
    """A Qwen3 of 2 GB with random weights; returns its bytes."""
    from transformers import Qwen3Config

    from rollout_service.model.served_model import ServedModel

    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=128,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    )
    config.save_pretrained(folder)
    shapes = ServedModel.load(folder).shapes
    save_file({name: torch.randn(shape).mul_(0.02).bfloat16() for name, shape in shapes.items()}, weights_of(folder))
    return sum(2 * torch.Size(shape).numel() for shape in shapes.values())


def weights_of(folder: Path) -> Path:
    """The model's only file."""
    return folder / "model.safetensors"


# --- what is measured


@dataclass
class Way:
    """One way in."""

    name: str
    seconds: list[float] = field(default_factory=list)
    grown_bytes: dict[str, int] = field(default_factory=dict)
    """Process → the most it grew by."""


class Memory:
    """Watches what processes grow by while a block runs."""

    def __init__(self, processes: dict[str, int]) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in processes.items()}

    @contextmanager
    def watched(self, way: Way) -> Iterator[None]:
        """Keep the largest growth of each process in ``way``."""
        before = {name: anonymous_bytes(p) for name, p in self._processes.items()}
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(0.02):
                for name, p in self._processes.items():
                    grown = anonymous_bytes(p) - before[name]
                    way.grown_bytes[name] = max(grown, way.grown_bytes.get(name, 0))

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def anonymous_bytes(p: psutil.Process) -> int:
    """Resident memory that is no page of a file."""
    memory = p.memory_info()
    return int(memory.rss - memory.shared)


@dataclass
class Weights:
    """Named tensors that lie one after the other in ``stream`` [bytes], which is what they are sent as."""

    tensors: dict[str, torch.Tensor]
    stream: memoryview

    @classmethod
    def load(cls, file: Path) -> "Weights":
        """The tensors of one file, all of one dtype."""
        loaded = load_file(file)
        flat = torch.cat([tensor.flatten() for tensor in loaded.values()])
        pieces = flat.split([tensor.numel() for tensor in loaded.values()])
        tensors = {name: piece.view(loaded[name].shape) for name, piece in zip(loaded, pieces, strict=True)}
        return cls(tensors, flat.view(torch.uint8).numpy().data)


async def bare_put(url: str, stream: memoryview) -> None:
    """The same parts through the same number of connections. Raises a group of httpx.HTTPError."""
    slots = asyncio.Semaphore(PARALLEL)

    async def put(number: int, part: memoryview) -> None:
        headers = {"Content-Length": str(part.nbytes)}
        (await http.put(f"{url}/{number}", content=chunks(part), headers=headers)).raise_for_status()

    async with httpx.AsyncClient(timeout=120) as http, asyncio.TaskGroup() as group:
        for number, start in enumerate(range(0, stream.nbytes, PART_BYTES)):
            await slots.acquire()
            task = group.create_task(put(number, stream[start : start + PART_BYTES]))
            task.add_done_callback(lambda _: slots.release())


async def chunks(part: memoryview) -> AsyncIterator[bytes]:
    """A body in pieces, as the client sends it."""
    for start in range(0, part.nbytes, BODY_CHUNK_BYTES):
        yield bytes(part[start : start + BODY_CHUNK_BYTES])


@dataclass(frozen=True)
class Passage:
    """What every passage goes from and to."""

    client: RolloutClient
    in_memory: RolloutClient
    bare_url: str
    plain: tuple[str, int]
    weights: Weights
    folder: Path

    async def through(self, way: str, version: int) -> None:
        """One."""
        model, client = self.folder / "model", self.in_memory if way.endswith(IN_MEMORY) else self.client
        way = way.removesuffix(IN_MEMORY)
        if way == "file copy":
            await asyncio.to_thread(copy_and_sync, weights_of(model), self.folder / "copy")
        elif way == "plain sockets":
            await asyncio.to_thread(plain_sockets.send, self.plain, self.weights.stream, PARALLEL)
        elif way == "bare PUT":
            await bare_put(f"{self.bare_url}/{version}", self.weights.stream)
        elif way == "path":
            await client.push_path(version, model, wait="none")
        else:
            quantize: Quantize = "service" if way == "parts" else "trainer"
            await client.push_weights(
                version, self.weights.tensors, quantize=quantize, wait="none", parallel_parts=PARALLEL
            )


async def measure(folder: Path, memory_folder: Path, repeats: int, say: Callable[[str], None]) -> list[Way]:
    """All ways, one after the other, ``repeats`` times."""
    weights = Weights.load(weights_of(folder / "model"))
    pushes = ("parts", "parts, quantized by the trainer")
    names = ("plain sockets", "file copy", "bare PUT", *pushes, *(push + IN_MEMORY for push in pushes), "path")
    ways = [Way(name) for name in names]
    ingests = {"ingest": folder / "log", "ingest, log in memory": memory_folder / "log"}
    with ExitStack() as stack:
        urls, processes = [], {"client": os.getpid()}
        for name, log in ingests.items():
            url, processes[name] = stack.enter_context(process(functools.partial(serve_ingest, log), folder))
            urls.append(url)
        bare_url, processes["bare server"] = stack.enter_context(process(serve_bare, folder))
        plain = ("127.0.0.1", httpx.get(f"{bare_url}/plain").json())
        memory = Memory(processes)
        async with RolloutClient(urls[0]) as client, RolloutClient(urls[1]) as in_memory:
            passage = Passage(client, in_memory, bare_url, plain, weights, folder)
            versions = itertools.count(1)
            for way in ways * repeats:
                remove_old(folder)
                with memory.watched(way):
                    started = time.perf_counter()
                    await passage.through(way.name, next(versions))
                    way.seconds.append(time.perf_counter() - started)
                say(f"{way.name}: {way.seconds[-1]:.1f} s")
    return ways


def remove_old(folder: Path) -> None:
    """Of bare pushes, keep as many as the log keeps versions.

    The files of each are new, as a version's are: what is written over an old file gets pages that are warm.
    """
    kept = WeightsConfig().keep_versions
    for old in sorted((folder / "bare").glob("*"))[:-kept]:
        shutil.rmtree(old)


def copy_and_sync(source: Path, target: Path) -> None:
    """A plain copy, as safe on disk as a version is."""
    shutil.copyfile(source, target)
    with target.open("rb") as stream:
        os.fsync(stream.fileno())


def table_of(ways: list[Way], nbytes: int) -> Table:
    """For people."""
    limit = next(statistics.median(way.seconds) for way in ways if way.name == "plain sockets")
    table = Table(title=f"{nbytes / 1e9:.2f} GB of BF16 weights on {results.machine()}")
    for column in ("way", "s", "GB/s of BF16", "of plain sockets", "client grew", "server grew"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for way in ways:
        seconds = statistics.median(way.seconds)
        servers = [nbytes for name, nbytes in way.grown_bytes.items() if name != "client"]
        grown = [f"{nbytes / 1e6:.0f} MB" for nbytes in (way.grown_bytes.get("client", 0), max(servers, default=0))]
        table.add_row(way.name, f"{seconds:.2f}", f"{nbytes / seconds / 1e9:.2f}", f"{limit / seconds:.2f}", *grown)
    return table


def main(repeats: int = 3, memory: Path = Path("/dev/shm")) -> None:
    """Measure, print the table, and write benchmarks/results/<machine>/update_upload.json.

    ``memory``: a folder in a tmpfs.
    """
    console = Console()
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir=memory) as in_memory:
        folder = Path(name)
        nbytes = make_model(folder / "model")
        console.log(f"made a model of {nbytes / 1e9:.2f} GB")
        ways = asyncio.run(measure(folder, Path(in_memory), repeats, console.log))
    console.print(table_of(ways, nbytes))
    content = {
        "nbytes": nbytes,
        "part_bytes": PART_BYTES,
        "connections": PARALLEL,
        "ways": [asdict(way) for way in ways],
    }
    console.print(f"wrote {results.write('update_upload', content)}")


if __name__ == "__main__":
    run(main)
