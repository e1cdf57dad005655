"""One part over HTTP: taken once, checked, and refused with a reason."""

import asyncio
import errno
import math
import os
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
import xxhash

from rollout_service.errors import error_classes
from rollout_service.ingest import http_listener, upload_server
from rollout_service.ingest.ingest import Ingest
from rollout_service.ingest.staged_parts import Incoming
from rollout_service.ingest.upload_address import UploadAddress
from rollout_service.ingest.upload_server import UploadServer
from rollout_service.ingest.upload_session import UploadSession
from rollout_service.protocol.base import MAX_VERSION
from rollout_service.protocol.upload import (
    DTYPE_BYTES,
    PART_DIGEST_HEADER,
    UPLOAD_KEY_HEADER,
    BeginUpload,
    CommitUpload,
    PartReceipt,
    PathSource,
    SharedTensors,
    UploadPlan,
    UploadTensor,
)
from rollout_service.runtime.tls import tls_context
from rollout_service.store.log import WeightLog
from rollout_service.store.upload_record import STAGED_FILE
from tests.support.certificates import make_certificate
from tests.unit.ingest.faults import fail
from tests.unit.ingest.trainer import (
    Trainer,
    Weights,
    begin_of,
    config_of,
    journal_of,
    open_files,
    parts_of,
    settle,
    started,
)


@pytest.fixture
async def plan(ingest: Ingest, weights: Weights) -> UploadPlan:
    """Version 1 has begun; none of its parts is there."""
    return await ingest.begin(begin_of(1, weights))


@pytest.fixture
def parts(weights: Weights, plan: UploadPlan) -> list[bytes]:
    return parts_of(weights, plan.part_bytes)


def received_files(log: WeightLog) -> list[str]:
    """Return the parts in the journal of version 1."""
    return sorted({f"part {line.split()[0]}" for line in journal_of(log.root / "staging" / "1.parts")})


def first_part(log: WeightLog, nbytes: int) -> bytes:
    return (log.root / "staging" / "1.parts" / STAGED_FILE).read_bytes()[:nbytes]


class TestPart:
    async def test_the_table_is_added_up_once_and_not_for_each_part(self, trainer, parts, weights, monkeypatch):
        added = 0

        def nbytes(tensor: UploadTensor) -> int:
            nonlocal added
            added += 1
            return math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]

        await trainer.put(1, 0, parts[0])
        monkeypatch.setattr(UploadTensor, "nbytes", property(nbytes))
        for number, data in enumerate(parts[1:], start=1):
            await trainer.put(1, number, data)
        assert len(parts) > 5
        assert added < len(parts) * len(weights) / 2  # how many parts are converted at once depends on threads

    async def test_a_part_gets_a_receipt_and_is_missing_no_more(self, trainer, ingest, parts, plan, log):
        last = plan.num_parts - 1
        assert len(parts) == plan.num_parts and len(parts[last]) < plan.part_bytes
        digest = xxhash.xxh3_128_hexdigest(parts[last])
        reply = await trainer.put(1, last, parts[last], digest.upper())
        receipt = PartReceipt(version=1, part=last, nbytes=len(parts[last]), digest=digest)
        assert reply.status_code == 200 and PartReceipt.model_validate(reply.json()) == receipt
        assert last not in (await ingest.status(1)).missing_parts
        assert received_files(log) == [f"part {last}"]

    async def test_a_part_sent_twice_is_accepted_once(self, trainer, plan, parts, ingest, log):
        first = await trainer.put(1, 0, parts[0])
        again = await trainer.put(1, 0, parts[0])
        assert again.status_code == 200 and again.json() == first.json()
        assert received_files(log) == ["part 0"]
        await trainer.send(plan, parts, range(len(parts)))
        assert (await ingest.commit(1, CommitUpload())).state == "committed"

    async def test_senders_of_one_part_at_once_do_not_mix_their_bytes(self, trainer, parts, log):
        assert (await trainer.put(1, 0, bytes(len(parts[0])))).status_code == 200  # is replaced
        replies = await asyncio.gather(*(trainer.put(1, 0, parts[0]) for _ in range(8)))
        assert {reply.status_code for reply in replies} == {200}
        assert received_files(log) == ["part 0"]
        assert first_part(log, len(parts[0])) == parts[0]


class TestRefusedPart:
    async def test_bytes_that_do_not_hash_to_the_digest_are_refused(self, trainer, parts, ingest, log):
        reply = await trainer.put(1, 0, b"!" + parts[0][1:], digest=xxhash.xxh3_128_hexdigest(parts[0]))
        assert reply.status_code == 422
        error = reply.json()["error"]
        assert error["type"] == "DigestMismatch" and "send it again" in error["message"]
        assert error["detail"]["expected"] == xxhash.xxh3_128_hexdigest(parts[0])
        assert received_files(log) == [] and 0 in (await ingest.status(1)).missing_parts
        for headers in ({}, {PART_DIGEST_HEADER: "0" * 31}, {PART_DIGEST_HEADER: "0" * 60_000}):
            without = await trainer.http.put("/v1/weights/1/parts/0", content=parts[0], headers=headers)
            assert without.status_code == 422 and "32 hexadecimal digits" in without.json()["error"]["message"]
        assert (await trainer.put(1, 0, parts[0])).status_code == 200

    async def test_a_part_of_another_size_is_refused(self, trainer, parts, log):
        short, long = await trainer.put(1, 0, parts[0][:-1]), await trainer.put(1, 0, parts[0] + b"!")
        assert (short.status_code, long.status_code) == (422, 413)
        assert f"must have {len(parts[0])} bytes, not {len(parts[0]) - 1}" in short.json()["error"]["message"]
        error = long.json()["error"]
        assert error["type"] == "PayloadTooLarge" and error["detail"] == {"limit_bytes": len(parts[0])}
        assert error["message"].startswith(f"part 0 of version 1 has {len(parts[0])} bytes")
        assert received_files(log) == []

    @pytest.mark.usefixtures("plan")
    async def test_a_chunked_body_is_refused(self, trainer, log):
        async def endless() -> AsyncIterator[bytes]:
            while True:
                yield bytes(1 << 16)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(http_listener, "MAX_DISCARDED_BYTES", 1 << 20)
            with suppress(httpx.TransportError):  # a caller that goes on sending may miss the reply
                sending = trainer.http.put(
                    "/v1/weights/1/parts/0", content=endless(), headers={PART_DIGEST_HEADER: "0" * 32}
                )
                assert (await sending).status_code == 411
        for thread in upload_threads():  # the caller may leave before the listener does
            await asyncio.to_thread(thread.join)
        assert received_files(log) == []

    @pytest.mark.parametrize(
        ("version", "part", "status", "says"),
        [
            (1, -1, 404, "version 1 has parts 0 to {last}, not -1"),
            (1, 10_000, 404, "version 1 has parts 0 to {last}, not 10000"),
            (2, 0, 404, "version 2 is not staged (staged: [1])"),
            *[(version, 0, 422, "version") for version in (-1, MAX_VERSION + 1, 10**255)],
            (1, "first", 422, "part"),
        ],
    )
    async def test_a_part_of_nothing_that_is_staged_is_refused(self, trainer, parts, version, part, status, says):
        reply = await trainer.put(version, part, parts[0])
        assert reply.status_code == status
        assert says.format(last=len(parts) - 1) in reply.json()["error"]["message"]

    async def test_a_version_read_from_a_path_takes_no_parts(self, model, tmp_path):
        config = config_of(model, tmp_path / "log", weights={"source_roots": [model.parent.resolve()]})
        async with started(config) as ingest:
            await ingest.begin(BeginUpload(version=1, source=PathSource(path=model)))
            reply = await Trainer(ingest).put(1, 0, b"")
            assert reply.status_code == 422 and "it takes no parts" in reply.json()["error"]["message"]


class SlowBody:
    """A body whose beginning is sent at once and whose rest waits for ``go_on``."""

    def __init__(self, data: bytes) -> None:
        self._data, self.nbytes = data, len(data)
        self.go_on = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._data[:1000]
        await self.go_on.wait()
        yield self._data[1000:]


def send_slowly(trainer: Trainer, part: int, body: SlowBody, digest: str) -> asyncio.Task[httpx.Response]:
    headers = {PART_DIGEST_HEADER: digest, "Content-Length": str(body.nbytes)}
    put = trainer.http.put(f"/v1/weights/1/parts/{part}", content=body, headers=headers)
    return asyncio.create_task(put)


BATCH = SharedTensors(transfer="a" * 32, batch=0, first=0, count=1, offset=0)


@pytest.mark.parametrize(
    ("method", "version", "body", "status", "says"),
    [
        ("POST", 1, BATCH.model_dump_json(), 409, f"another push than {BATCH.transfer}"),
        ("POST", 7, BATCH.model_dump_json(), 404, ""),
        ("POST", 1, "{", 400, ""),
        ("POST", 1, '{"transfer": "a", "batch": -1}', 422, ""),
        ("POST", 1, " " * 1001, 413, "1000 bytes"),
        ("PUT", 1, "{}", 405, "only POST"),
    ],
    ids=["comes in parts", "nobody began", "no JSON", "no batch", "too large", "another method"],
)
@pytest.mark.usefixtures("plan")
async def test_a_batch_of_shared_memory_that_cannot_be_taken(trainer, monkeypatch, method, version, body, status, says):
    """What is taken: tests/unit/client/test_shared_memory.py."""
    monkeypatch.setattr(upload_server, "MOST_JSON_BYTES", 1000)
    headers = {UPLOAD_KEY_HEADER: trainer._address.key(version)}
    reply = await trainer.http.request(method, f"/v1/weights/{version}/shared", content=body, headers=headers)
    assert reply.status_code == status and says in reply.json()["error"]["message"]
    assert reply.json()["error"]["type"] in error_classes()


@pytest.fixture
async def server(ingest: Ingest, plan: UploadPlan) -> AsyncIterator[UploadServer]:
    """A listener that version 1 may be sent to."""
    server = UploadServer(ingest, "127.0.0.1")
    server.start()
    yield server
    await server.stop()


def headers_of(server: UploadServer, digest: str) -> dict[str, str]:
    address = server._ingest.upload_address = server._ingest.upload_address or UploadAddress("127.0.0.1", 7000)
    return {PART_DIGEST_HEADER: digest, UPLOAD_KEY_HEADER: address.key(1)}


def url_of(server: UploadServer) -> str:
    return f"http://{server.host}:{server.port}/v1/weights/1/parts/0"


def note_receiving(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set once there is a file for a part of version 1 that has begun to come."""
    begun, opened = threading.Event(), Incoming.open

    def noted(incoming: Incoming) -> None:
        opened(incoming)
        begun.set()

    monkeypatch.setattr(Incoming, "open", noted)
    return begun


def upload_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("upload")]


async def test_a_target_that_is_no_url_is_refused(server):
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n")
    writer.write_eof()
    reply = await reader.read()
    writer.close()
    assert reply.startswith(b"HTTP/1.1 400 ") and b"is not a request target" in reply


class TestBadMoments:
    async def test_a_part_whose_version_is_discarded_midway_is_not_found(
        self, trainer, ingest, parts, log, monkeypatch
    ):
        body, begun = SlowBody(parts[0]), note_receiving(monkeypatch)
        sending = send_slowly(trainer, 0, body, xxhash.xxh3_128_hexdigest(parts[0]))
        await asyncio.to_thread(begun.wait)
        await ingest.discard(1)
        body.go_on.set()
        reply = await sending
        assert (
            reply.status_code == 404 and "was discarded before part 0 was complete" in reply.json()["error"]["message"]
        )
        assert list((log.root / "staging").iterdir()) == []

    async def test_a_part_that_cannot_be_stored_says_why(self, trainer, plan, parts, monkeypatch):
        fail(monkeypatch, os, "dup", errno.EMFILE)
        reply = await trainer.put(1, 0, parts[0])
        message = reply.json()["error"]["message"]
        assert reply.status_code == 500
        assert message.startswith("part 0 of version 1 was not stored: ") and message.endswith("; send it again")

    async def test_a_part_repeated_during_the_commit_gets_its_receipt(self, trainer, ingest, parts, log, monkeypatch):
        for number, part in enumerate(parts):
            await trainer.put(1, number, part)
        body, begun, begin_part = SlowBody(parts[0]), asyncio.Event(), UploadSession.begin_part

        async def noted(*arguments: Any) -> Incoming | None:
            begun.set()
            return await begin_part(*arguments)

        monkeypatch.setattr(UploadSession, "begin_part", noted)
        sending = send_slowly(trainer, 0, body, xxhash.xxh3_128_hexdigest(parts[0]))
        await begun.wait()
        assert (await ingest.commit(1, CommitUpload())).state == "committed"
        body.go_on.set()
        assert (await sending).status_code == 200
        assert list((log.root / "staging").iterdir()) == []

    async def test_a_sender_that_disconnects_leaves_no_file_or_descriptor(self, server, ingest, parts, log):
        before = open_files()
        head = f"PUT /v1/weights/1/parts/0 HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(parts[0])}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers_of(server, "0" * 32).items())
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(f"{head}\r\n".encode() + parts[0][:1000])
        writer.write_eof()
        reply = await reader.read()
        writer.close()
        assert reply.startswith(b"HTTP/1.1 400 ") and b"was cut off" in reply
        await server.stop()
        assert received_files(log) == [] and open_files() == before
        assert 0 in (await ingest.status(1)).missing_parts

    async def test_a_part_that_is_written_when_the_listener_stops_ends_well(self, server, parts, log, monkeypatch):
        writing, go_on, write = threading.Event(), threading.Event(), Incoming.write

        def held(incoming: Incoming, start: int, data: memoryview) -> None:
            writing.set()
            go_on.wait(30)
            write(incoming, start, data)

        monkeypatch.setattr(Incoming, "write", held)
        headers = headers_of(server, xxhash.xxh3_128_hexdigest(parts[0]))
        async with httpx.AsyncClient(timeout=None) as http:
            sending = asyncio.create_task(http.put(url_of(server), content=parts[0], headers=headers))
            await asyncio.to_thread(writing.wait, 30)
            stopping = asyncio.create_task(server.stop())
            await settle()
            go_on.set()
            assert (await sending).status_code == 200
            await stopping
        assert received_files(log) == ["part 0"] and upload_threads() == []

    async def test_a_part_that_does_not_end_is_cut_off_when_the_listener_stops(
        self, server, ingest, parts, log, monkeypatch
    ):
        monkeypatch.setattr(upload_server, "STOP_S", 0.0)
        body, begun = SlowBody(parts[0]), note_receiving(monkeypatch)
        async with httpx.AsyncClient(timeout=None) as http:
            headers = headers_of(server, "0" * 32) | {"Content-Length": str(body.nbytes)}
            sending = asyncio.create_task(http.put(url_of(server), content=body, headers=headers))
            await asyncio.to_thread(begun.wait)
            await server.stop()
            assert received_files(log) == [] and upload_threads() == []
            body.go_on.set()
            with suppress(httpx.TransportError):  # or 400: the reply is sent if it still can be
                assert (await sending).status_code == 400

    async def test_a_stopped_listener_fails_its_health_check(self, server, parts):
        headers = headers_of(server, xxhash.xxh3_128_hexdigest(parts[0]))
        async with httpx.AsyncClient(timeout=None) as http:
            assert (await http.put(url_of(server), content=parts[0], headers=headers)).status_code == 200
            await server.check_health()
            await server.stop()  # a connection is open still
            with pytest.raises(httpx.ConnectError):
                await http.get(url_of(server))
        with pytest.raises(RuntimeError, match="has stopped"):
            await server.check_health()
        assert upload_threads() == []

    async def test_a_listener_with_a_certificate_takes_parts_over_tls_only(self, ingest, parts, tmp_path):
        made = make_certificate(tmp_path / "tls", "127.0.0.1")
        server = UploadServer(ingest, "127.0.0.1", certificate=(made.certfile, made.keyfile))
        server.start()
        headers = headers_of(server, xxhash.xxh3_128_hexdigest(parts[0]))
        route = f"127.0.0.1:{server.port}/v1/weights/1/parts/0"
        async with httpx.AsyncClient(verify=tls_context(made.certfile), timeout=None) as http:
            for _ in range(2):
                assert (await http.put(f"https://{route}", content=parts[0], headers=headers)).status_code == 200
            with pytest.raises(httpx.TransportError):
                await http.put(f"http://{route}", content=parts[0], headers=headers)
        await server.stop()
        assert server.certificate == made.pem and upload_threads() == []

    def test_a_listener_whose_key_is_another_s_does_not_start(self, tmp_path):
        made, other = make_certificate(tmp_path / "one", "a"), make_certificate(tmp_path / "two", "a")
        with pytest.raises(ValueError, match=r"^weights\.upload_ssl_certfile and weights\.upload_ssl_keyfile: "):
            UploadServer(None, "127.0.0.1", certificate=(made.certfile, other.keyfile))
