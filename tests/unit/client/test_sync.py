import asyncio
import inspect
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import httpx
import pytest
import torch
from starlette.requests import Request
from starlette.responses import Response

from rollout_service.client import RolloutClient, SyncRolloutClient, _tensors
from rollout_service.client._sessions import AgentSession
from rollout_service.client._sync import SyncAgentSession
from rollout_service.errors import NotFound, RolloutServiceError
from tests.unit.client.service import Service, serving_in_a_thread, until_disconnected, until_gone

ASYNC_ONLY = {"aclose"}


def test_it_generates_and_pushes(threaded_service):
    with SyncRolloutClient(threaded_service.url) as client:
        assert client.generate([1, 2], n=2).prompt_token_ids == (1, 2)
        assert len(client.generate_batch([[1], [2]], max_tokens=4)) == 2
        assert client.push_weights(1, {"w": torch.ones(4)}).version == 1
        assert client.wait_live(1).state == "live"
        assert [status.version for status in client.weights()] == [1]
        assert client.weights(1).version == 1


def test_a_push_goes_by_the_cuda_stream_of_the_callers_thread(threaded_service, monkeypatch):
    thread, followed = threading.local(), list[int]()

    def follow_this() -> Callable[[], None]:
        caller = threading.get_ident()
        return lambda: setattr(thread, "follows", caller)

    class Tensors(dict[str, torch.Tensor]):
        def items(self) -> Any:
            followed.append(thread.follows)
            return super().items()

    monkeypatch.setattr(_tensors, "_cuda_stream_of_this_thread", follow_this)
    with SyncRolloutClient(threaded_service.url) as client:
        client.push_weights(1, Tensors(w=torch.ones(4)))
        with pytest.raises(RolloutServiceError, match="404"):  # this service has no adapters
            client.push_adapter("run-a", Tensors(w=torch.ones(4)), config={})
    assert followed == 2 * [threading.get_ident()]


async def test_it_works_where_an_event_loop_is_running_already(threaded_service):
    assert asyncio.get_running_loop().is_running()
    with SyncRolloutClient(threaded_service.url) as client:
        assert client.generate([1]).prompt_token_ids == (1,)
        with pytest.raises(NotFound, match="no version 8"):
            client.weights(8)


def test_ctrl_c_cancels_on_the_service():
    service, gone = Service(), threading.Event()
    main_thread = threading.main_thread().ident
    assert main_thread == threading.get_ident()

    async def interrupt(request: Request) -> Response:
        await request.body()
        signal.pthread_kill(main_thread, signal.SIGINT)
        await until_disconnected(request)
        gone.set()
        return Response()

    service.generate = interrupt
    with serving_in_a_thread(service), SyncRolloutClient(service.url) as client:
        with pytest.raises(KeyboardInterrupt):
            client.generate([1])
        assert gone.wait(30)
        assert client.weights() == []


def test_ctrl_c_cancels_a_call_that_was_just_begun(monkeypatch):
    service, accepted, gone = Service(), threading.Event(), threading.Event()
    service.generate = until_gone(accepted, gone)
    begin = asyncio.run_coroutine_threadsafe

    def interrupted(call: Any, loop: asyncio.AbstractEventLoop) -> Any:
        begin(call, loop)
        assert accepted.wait(30)
        raise KeyboardInterrupt

    with serving_in_a_thread(service), SyncRolloutClient(service.url) as client:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
            client.generate([1])
        assert gone.wait(30)
        assert client.weights() == []


def test_several_threads_may_share_it(threaded_service):
    arrived, both = threading.Semaphore(0), asyncio.Event()

    async def wait_for_the_other(request: Request) -> Response:
        body = await request.json()
        arrived.release()
        if body["token_ids"] == [2]:
            both.set()
        await both.wait()
        return await threaded_service._generate(request)

    threaded_service.generate = wait_for_the_other
    results: list[tuple[int, ...]] = []
    with SyncRolloutClient(threaded_service.url) as client:
        first = threading.Thread(target=lambda: results.append(client.generate([1]).prompt_token_ids))
        first.start()
        arrived.acquire()
        assert client.generate([2]).prompt_token_ids == (2,)
        first.join()
    assert results == [(1,)]


def test_closing_cancels_a_call_of_another_thread():
    service, accepted, gone = Service(), threading.Event(), threading.Event()
    service.generate = until_gone(accepted, gone)
    outcome: list[str] = []

    def call(client: SyncRolloutClient) -> None:
        with pytest.raises(CancelledError):
            client.generate([1])
        outcome.append("cancelled")

    with serving_in_a_thread(service):
        client = SyncRolloutClient(service.url)
        caller = threading.Thread(target=call, args=(client,))
        caller.start()
        assert accepted.wait(30)
        client.close()
        caller.join()
        assert gone.wait(30)
    assert outcome == ["cancelled"]


def test_a_call_that_comes_while_it_closes_is_refused():
    refused: list[str] = []

    class Closing(httpx.MockTransport):
        async def aclose(self) -> None:  # in the client's thread, whose loop still runs
            await asyncio.to_thread(call)

    def call() -> None:
        with pytest.raises(RuntimeError) as error:
            client.weights()
        refused.append(str(error.value))

    client = SyncRolloutClient("http://service", transport=Closing(lambda _: httpx.Response(500)))
    client.close()
    assert set(refused) == {"this SyncRolloutClient is closed: make a new one"}


def test_a_forked_process_is_refused_while_another_thread_calls(threaded_service):
    client, held, forked = SyncRolloutClient(threaded_service.url), threading.Event(), threading.Event()

    def hold() -> None:
        with client._lock:
            held.set()
            forked.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)  # ends it
        try:
            client.generate([1])
        except RuntimeError:
            client.close()
            os._exit(0)
        finally:
            os._exit(1)
    forked.set()
    assert os.waitpid(child, 0)[1] == 0
    thread.join()
    client.close()


def test_closing_twice_is_closing_once_and_ends_the_thread(threaded_service):
    before = threading.active_count()
    with pytest.raises(ValueError, match="not the address"):
        SyncRolloutClient("nowhere")
    client = SyncRolloutClient(threaded_service.url)
    assert threading.active_count() == before + 1
    client.close()
    client.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        client.weights()


def test_a_progress_callback_may_not_call_its_client(threaded_service):
    with SyncRolloutClient(threaded_service.url) as client, pytest.raises(RuntimeError, match="wait for itself"):
        client.push_weights(1, {"w": torch.ones(1)}, progress=lambda sent, total: client.health() and None)


def signature(function: Any) -> str:
    """Parameters and defaults, whether or not their types are spelt as strings."""
    return str(inspect.signature(function)).replace("'", "").replace('"', "").replace("pathlib.", "")


def public_methods(kind: type) -> dict[str, Any]:
    return {name: m for name, m in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def test_both_clients_have_the_same_methods_and_documentation():
    asynchronous, blocking = public_methods(RolloutClient), public_methods(SyncRolloutClient)
    assert asynchronous.keys() - ASYNC_ONLY == blocking.keys() - {"close"}
    for name in asynchronous.keys() - ASYNC_ONLY - {"session", "generate_stream"}:
        assert signature(asynchronous[name]) == signature(blocking[name]), name
        assert asynchronous[name].__doc__ == blocking[name].__doc__
    assert signature(RolloutClient) == signature(SyncRolloutClient)
    given = "session_id: str | None = None, *, ttl_s: float = 3600.0"
    assert signature(RolloutClient.session) == f"(self, {given}) -> AgentSession"
    assert signature(SyncRolloutClient.session) == f"(self, {given}) -> SyncAgentSession"


def test_both_sessions_have_the_same_members_and_documentation():
    asynchronous, blocking = public_members(AgentSession), public_members(SyncAgentSession)
    assert asynchronous.keys() == blocking.keys()
    for name, member in asynchronous.items():
        assert member.__doc__.replace("async with", "with") == blocking[name].__doc__


def public_members(kind: type) -> dict[str, Any]:
    return {name: member for name, member in inspect.getmembers(kind) if not name.startswith("_")}


class TestSession:
    """What it does with a service is in ``tests/unit/gateway/test_sessions.py``."""

    def test_it_is_closed_at_the_end_of_its_block(self, threaded_service):
        paths = {"openai_path": "/v1/sessions/a/v1", "anthropic_path": "/v1/sessions/a"}
        threaded_service.json_at("POST", "/v1/sessions", {"session_id": "a", **paths})
        threaded_service.json_at("DELETE", "/v1/sessions/a", None)
        with (
            SyncRolloutClient(threaded_service.url) as client,
            pytest.raises(KeyError),
            client.session("a") as session,
        ):
            assert session.openai_base_url == f"{threaded_service.url}/v1/sessions/a/v1"
            raise KeyError
        assert threaded_service.log == [("POST", "/v1/sessions"), ("DELETE", "/v1/sessions/a")]

    def test_a_session_that_is_not_open_says_so(self, threaded_service):
        with SyncRolloutClient(threaded_service.url) as client:
            session = client.session()
            for use in (lambda: session.session_id, session.trajectory, session.close):
                with pytest.raises(RuntimeError, match="the session is not open: use it in a `with` block"):
                    use()
        with pytest.raises(RuntimeError, match="this SyncRolloutClient is closed"):
            session.open()
