"""A rollout on engines that refuse, abort and die."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

from rollout_service.config.engine import EngineConfig
from rollout_service.errors import (
    EngineFailed,
    InvalidRequest,
    NotReady,
    Overloaded,
    RolloutServiceError,
    TooEarly,
)
from rollout_service.fleet import dispatch as dispatch_module
from rollout_service.fleet.dispatch import Dispatcher
from rollout_service.fleet.progress import RolloutProgress
from rollout_service.metrics import process, table
from rollout_service.protocol.fleet import FailedStart, FailedStarts, Fleet, ReplicaStatus
from rollout_service.protocol.progress import Piece, ProgressAsk, ProgressReply
from rollout_service.protocol.rollout import Candidate, Completion, FinishReason, Rollout
from rollout_service.protocol.sampling import GenerateCall, Reasoning, Sampling, Scoring
from rollout_service.runtime.placements import PLACEMENTS, RoutedFleet, RoutedReplica
from rollout_service.runtime.rpc import EngineClient
from tests.support.handles import FakeMethod
from tests.unit.fleet.completions import completion_of
from tests.unit.ingest.trainer import settle
from tests.unit.metrics.counts import Counts

Step = Callable[[GenerateCall], Rollout] | Exception


def raised(error: RolloutServiceError) -> RayTaskError:
    """``error`` as it arrives from another process."""
    return RayTaskError("generate", "", error).as_instanceof_cause()


def refusal(cls: type[RolloutServiceError], replica_id: str) -> Exception:
    return raised(cls("no", {"replica_id": replica_id}))


def passed(replica_id: str, version: int) -> Exception:
    """A refusal by a replica that serves ``version``."""
    return raised(TooEarly("no", {"replica_id": replica_id, "live_version": version}))


def made(*lengths: int, version: int = 3, end: FinishReason = "length", replica_id: str = "a") -> Step:
    """An answer with a completion of each length, ended by ``end``."""

    def step(call: GenerateCall) -> Rollout:
        tokens = ((version,) * length for length in lengths)
        completions = (completion_of(t, *[(version, len(t))] * bool(t), index=i, end=end) for i, t in enumerate(tokens))
        return rollout_of(call, completions, replica_id)

    return step


def rollout_of(call: GenerateCall, completions: Iterable[Completion], replica_id: str = "a") -> Rollout:
    return Rollout(
        request_id=call.request_id,
        prompt_token_ids=call.prompt_token_ids,
        completions=tuple(completions),
        replica_id=replica_id,
    )


class Response:
    """What a handle's ``remote`` returns."""

    def __init__(self, step: Step | None, call: GenerateCall) -> None:
        self._step, self._call, self.cancelled = step, call, False

    def __await__(self):
        return self._result().__await__()

    async def _result(self) -> Rollout:
        await asyncio.sleep(0)
        if self._step is None:
            await asyncio.Event().wait()
        if isinstance(self._step, Exception):
            raise self._step
        assert self._step is not None
        return self._step(self._call)

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Script(FakeMethod):
    """An engine deployment whose answers are written down; None never comes."""

    steps: list[Step | None]
    calls: list[GenerateCall] = field(default_factory=list)
    responses: list[Response] = field(default_factory=list)

    @property
    def generate(self) -> "Script":
        return self

    def remote(self, call: GenerateCall) -> Response:
        self.calls.append(call)
        self.responses.append(Response(self.steps.pop(0), call))
        return self.responses[-1]


class Ingest:
    """Knows two replicas."""

    async def fleet(self) -> Fleet:
        replicas = [ReplicaStatus(replica_id=i, version=v, state="ready") for i, v in (("a", 3), ("b", 4))]
        return Fleet(latest_version=4, paused=False, replicas=tuple(replicas))


def call(n: int = 1, **fields: object) -> GenerateCall:
    return GenerateCall(request_id="r", prompt_token_ids=(1, 2), sampling=Sampling(n=n, max_tokens=9), **fields)


def dispatcher(engine: Script, **limits: float) -> Dispatcher:
    limits = {"version_wait_s": 0.0, "replica_wait_s": 0.0, **limits}
    return Dispatcher(EngineClient(engine), Ingest(), EngineConfig(**limits))


DIED = ActorDiedError()


class TestLostReplica:
    @pytest.mark.parametrize("loss", [DIED, refusal(EngineFailed, "a")], ids=["the replica died", "its engine died"])
    async def test_a_rollout_that_lost_its_replica_starts_anew_on_another(self, loss):
        engine = Script([loss, made(9, 9, replica_id="b")])
        rollout = await dispatcher(engine).complete(call(n=2))
        assert (rollout.attempts, rollout.replica_id, len(rollout.completions)) == (2, "b", 2)
        assert engine.calls[1].sampling == engine.calls[0].sampling

    async def test_the_replica_that_lost_a_rollout_is_avoided(self):
        engine = Script([refusal(EngineFailed, "a"), refusal(EngineFailed, "b"), made(9)])
        await dispatcher(engine).complete(call())
        assert [c.avoid for c in engine.calls] == [(), ("a",), ("a", "b")]

    async def test_attempts_are_bounded(self):
        engine = Script([DIED] * 3)
        with pytest.raises(EngineFailed, match="attempt 3 of 3") as failed:
            await dispatcher(engine).complete(call())
        assert failed.value.detail == {"attempts": 3} and engine.steps == []

    async def test_an_error_of_the_request_itself_is_not_tried_again(self):
        engine = Script([raised(InvalidRequest("bad"))])
        with pytest.raises(InvalidRequest, match="bad"):
            await dispatcher(engine).complete(call())


class DyingEngine:
    """Replicas that tell some tokens and then die, all but the last one."""

    def __init__(self, *told: tuple[Completion, ...], last: Step, loss: RolloutServiceError | None = None) -> None:
        self._told, self._last, self._loss = list(told), last, loss or EngineFailed("it died")
        self.calls: list[GenerateCall] = []
        self._taken_in = asyncio.Event()

    async def generate(self, call: GenerateCall) -> Rollout:
        self.calls.append(call)
        if not self._told:
            assert callable(self._last)
            return self._last(call)
        PLACEMENTS.note(call.origin, call.number, f"r{len(self.calls)}")
        await self._taken_in.wait()
        self._taken_in.clear()
        raise self._loss

    async def progress(self, ask: ProgressAsk) -> ProgressReply:
        if ask.acknowledged:  # what was told before is in the gateway's record
            self._taken_in.set()
            await asyncio.Event().wait()
        number = self.calls[-1].number
        pieces = tuple(Piece(call=number, start=0, made=completion) for completion in self._told.pop(0))
        return ProgressReply(number=1, pieces=pieces)


class TestWhatALostReplicaTold:
    async def test_a_rollout_goes_on_from_the_tokens_that_had_left_the_replica(self):
        first, second = completions_of(made(4, end="abort")), completions_of(made(2, version=4, end="abort"))
        engine = DyingEngine(first, second, last=made(3, version=5, replica_id="b"))
        rollout = await Dispatcher(engine, Ingest(), EngineConfig()).complete(call())
        [completion] = rollout.completions
        assert completion.token_ids == (3,) * 4 + (4,) * 2 + (5,) * 3
        assert [(s.version, s.start, s.end, s.replica_id) for s in completion.spans] == [
            (3, 0, 4, "r1"), (4, 4, 6, "r2"), (5, 6, 9, "b"),
        ]  # fmt: skip
        assert (rollout.attempts, rollout.replica_id, completion.finish_reason) == (3, "b", "length")
        assert [len(c.prompt_token_ids) for c in engine.calls] == [2, 6, 8]
        assert [c.sampling.max_tokens for c in engine.calls] == [9, 5, 3]
        assert engine.calls[2].avoid == ("r1", "r2")

    async def test_so_does_one_whose_answer_was_lost_on_its_way(self):
        first = completions_of(made(4, end="abort"))
        lost = NotReady("the engine did not take this call: OwnerDiedError")
        engine = DyingEngine(first, last=made(5, version=4, replica_id="b"), loss=lost)
        rollout = await Dispatcher(engine, Ingest(), EngineConfig()).complete(call())
        assert rollout.completions[0].token_ids == (3,) * 4 + (4,) * 5 and rollout.attempts == 2
        assert [c.avoid for c in engine.calls] == [(), ("r1",)]

    async def test_completions_that_had_ended_are_not_made_again(self):
        ended, cut = completions_of(made(9, 4, end="abort"))
        engine = DyingEngine((ended.model_copy(update={"finish_reason": "stop", "stop_reason": 3}), cut), last=made(5))
        rollout = await Dispatcher(engine, Ingest(), EngineConfig()).complete(call(n=2))
        assert [(c.index, c.finish_reason, len(c.token_ids)) for c in rollout.completions] == [
            (0, "stop", 9), (1, "length", 9),
        ]  # fmt: skip
        assert len(engine.calls) == 2 and engine.calls[1].sampling.n == 1

    async def test_a_completion_that_was_whole_is_not_asked_for_more(self):
        engine = DyingEngine(completions_of(made(9, end="abort")), last=DIED)
        rollout = await Dispatcher(engine, Ingest(), EngineConfig()).complete(call())
        assert [(c.finish_reason, len(c.token_ids)) for c in rollout.completions] == [("length", 9)]

    async def test_who_continues_by_itself_gets_them_as_aborted(self):
        engine = DyingEngine(completions_of(made(4, end="abort")), last=DIED)
        rollout = await Dispatcher(engine, Ingest(), EngineConfig()).complete(call(), on_abort="return")
        assert [(c.finish_reason, len(c.token_ids)) for c in rollout.completions] == [("abort", 4)]


def of_the_prompt(prompt: Sequence[int]) -> tuple[tuple[Candidate, ...] | None, ...]:
    """Return logprobs of a prompt."""
    return (None, *((Candidate(token, -1.0, 1),) for token in prompt[1:]))


def with_prompt_logprobs(step: Step) -> Step:
    """The same answer, with logprobs of its prompt if they were asked for."""
    assert callable(step)

    def answer(call: GenerateCall) -> Rollout:
        rollout, asked = step(call), call.sampling.prompt_logprobs is not None
        extras = {"prompt_logprobs": of_the_prompt(call.prompt_token_ids) if asked else None}
        return rollout.model_copy(
            update={"completions": tuple(c.model_copy(update=extras) for c in rollout.completions)}
        )

    return answer


class TestPromptLogprobsOfALostReplica:
    """Replicas do not report them, so another one must compute them."""

    def _asking(self, n: int = 1) -> GenerateCall:
        return call().model_copy(update={"sampling": Sampling(n=n, max_tokens=9, prompt_logprobs=0)})

    async def test_completions_that_had_ended_take_them_from_another(self):
        ended, cut = completions_of(made(9, 4, end="abort"))
        engine = DyingEngine((ended, cut), last=with_prompt_logprobs(made(5)))
        rollout = await Dispatcher(engine, Ingest(), EngineConfig()).complete(self._asking(n=2))
        assert [c.prompt_logprobs for c in rollout.completions] == [of_the_prompt((1, 2))] * 2
        assert [len(c.token_ids) for c in rollout.completions] == [9, 9] and len(engine.calls) == 2

    @pytest.mark.parametrize("loss", [EngineFailed("it died"), NotReady("OwnerDiedError")], ids=["died", "answer lost"])
    async def test_a_rollout_that_had_ended_is_made_again(self, loss):
        told = completions_of(made(9, 9))
        engine = DyingEngine(told, last=with_prompt_logprobs(made(9, 9, version=4)), loss=loss)
        rollout = await Dispatcher(engine, Ingest(), EngineConfig()).complete(self._asking(n=2))
        assert [(c.versions, c.prompt_logprobs) for c in rollout.completions] == [((4,), of_the_prompt((1, 2)))] * 2
        assert rollout.attempts == 2 and engine.calls[1].avoid == ("r1",)

    async def test_scores_are_made_again_too(self):
        engine = DyingEngine(completions_of(made(9)), last=made(9, version=4))
        asked = call(scoring=Scoring(start=1, target_token_ids=((7,),)))
        rollout = await Dispatcher(engine, Ingest(), EngineConfig()).complete(asked)
        assert rollout.completions[0].versions == (4,) and rollout.attempts == 2

    async def test_a_rest_that_had_ended_is_made_again(self):
        told = completions_of(made(4, end="abort")), completions_of(made(5, version=4))
        engine = DyingEngine(*told, last=with_prompt_logprobs(made(5, version=5)))
        rollout = await Dispatcher(engine, Ingest(), EngineConfig()).complete(self._asking())
        [completion] = rollout.completions
        assert (completion.versions, completion.prompt_logprobs) == ((3, 5), of_the_prompt((1, 2)))
        assert rollout.attempts == 3

    async def test_a_stream_has_none_and_is_not_made_again(self):
        engine = DyingEngine(completions_of(made(9)), last=DIED)
        rollout = await Dispatcher(engine, Ingest(), EngineConfig()).complete(
            self._asking(), rollout=RolloutProgress(1)
        )
        assert rollout.completions[0].versions == (3,) and len(engine.calls) == 1


def completions_of(step: Step) -> tuple[Completion, ...]:
    assert callable(step)
    return step(call()).completions


class TestRefusal:
    @pytest.mark.parametrize("cls", [Overloaded, NotReady, TooEarly])
    async def test_a_refusal_is_no_attempt_and_another_replica_is_asked(self, cls):
        engine = Script([refusal(cls, "a"), made(9, replica_id="b")])
        rollout = await dispatcher(engine).complete(call(min_weight_version=3))
        assert (rollout.attempts, rollout.replica_id) == (1, "b")
        assert engine.calls[1].avoid == ("a",)

    @pytest.mark.parametrize("cls", [Overloaded, NotReady])
    async def test_a_rollout_waits_for_as_long_as_all_replicas_refuse(self, cls):
        engine = Script([refusal(cls, "a"), refusal(cls, "b"), refusal(cls, "a"), made(9)])
        assert (await dispatcher(engine).complete(call())).attempts == 1
        assert [c.avoid for c in engine.calls] == [(), ("a",), ("a", "b"), ()]

    async def test_a_rollout_that_was_accepted_once_waits_for_a_place(self):
        engine = Script([DIED, *[refusal(Overloaded, "b")] * 2, made(9, replica_id="b")])
        assert (await dispatcher(engine).complete(call())).attempts == 2

    async def test_a_deployment_that_cannot_start_is_no_reason_to_wait(self):
        with pytest.raises(NotReady, match="no replica of the engine can be started"):
            await dispatcher(Script([DeploymentUnavailableError("engine")])).complete(call())

    async def test_calls_that_serve_cannot_send_end_with_its_reason(self):
        with pytest.raises(NotReady, match="did not take this call"):
            await dispatcher(Script([RayServeException("broken")] * 3)).complete(call())

    async def test_sends_that_fail_between_refusals_end_no_call(self):
        failed, full = RayServeException("broken"), refusal(Overloaded, "a")
        engine = Script([failed, full, full, failed, full, full, failed, full, full, failed, made(9)])
        assert (await dispatcher(engine).complete(call())).attempts == 1

    async def test_a_missing_version_is_awaited_and_refused_with_live_ones(self):
        steps = [refusal(TooEarly, "a"), refusal(TooEarly, "b"), refusal(TooEarly, "a")]
        with pytest.raises(TooEarly, match=r"version=7 after .* \(live: {'a': 3, 'b': 4}\): push") as refused:
            await dispatcher(Script(list(steps))).complete(call(min_weight_version=7))
        assert refused.value.detail == {"min_weight_version": 7, "latest_version": 4, "live": {"a": 3, "b": 4}}
        waited = await dispatcher(Script([*steps, made(9)]), version_wait_s=60).complete(call(min_weight_version=7))
        assert waited.attempts == 1


class TestExactVersion:
    async def test_exact_version_that_all_passed_is_refused_at_once(self):
        engine = Script([*[passed("a", 3), passed("b", 4)], passed("a", 3)])
        with pytest.raises(TooEarly, match=r"exact_version=2 any more \(live: [^)]*\): ask for") as refused:
            await dispatcher(engine, version_wait_s=1e9).complete(call(exact_weight_version=2))
        assert refused.value.detail == {"exact_version": 2, "latest_version": 4, "live": {"a": 3, "b": 4}}

    async def test_exact_version_that_may_come_is_awaited(self):
        engine = Script([passed("a", 3), passed("b", 5), passed("a", 3), made(9, version=4)])
        rollout = await dispatcher(engine, version_wait_s=60).complete(call(exact_weight_version=4))
        assert rollout.completions[0].versions == (4,) and rollout.attempts == 1

    @pytest.mark.parametrize(
        ("asked", "group_answers"),
        [
            ({"exact_weight_version": 4}, True),
            ({"exact_weight_version": 9}, False),
            ({"min_weight_version": 4}, False),
            ({}, False),
        ],
    )
    async def test_only_calls_for_its_exact_version_reach_a_group(self, asked, group_answers):
        pinned, fleet = Script([made(9, version=4, replica_id="pinned")]), RoutedFleet()
        fleet.update({"pinned": RoutedReplica("ready", 4, 0)})
        group = Dispatcher(EngineClient(pinned), Ingest(), EngineConfig(), fleet=fleet)
        others = Script([made(9, version=9)])
        whole = Dispatcher(EngineClient(others), Ingest(), EngineConfig(), groups=[group])
        assert ((await whole.complete(call(**asked))).replica_id == "pinned") == group_answers
        assert (len(pinned.calls), len(others.calls)) == (int(group_answers), int(not group_answers))

    async def test_interrupted_exact_call_continues_with_its_version(self):
        engine = Script([made(4, version=4, end="abort"), passed("a", 5), made(5, version=4, replica_id="b")])
        rollout = await dispatcher(engine).complete(call(exact_weight_version=4))
        assert rollout.completions[0].versions == (4,) and len(rollout.completions[0].token_ids) == 9
        assert [(c.exact_weight_version, c.min_weight_version) for c in engine.calls[1:]] == [(4, None)] * 2

    async def test_interrupted_exact_call_without_its_version_is_aborted(self):
        engine = Script([made(4, version=4, end="abort"), *[passed("a", 5)] * 2])
        rollout = await dispatcher(engine, version_wait_s=1e9).complete(call(exact_weight_version=4))
        [completion] = rollout.completions
        assert (completion.finish_reason, completion.versions) == ("abort", (4,)) and len(completion.token_ids) == 4

    async def test_exact_call_cut_before_its_first_token_is_refused(self):
        engine = Script([made(0, end="abort"), *[passed("a", 5)] * 2])
        with pytest.raises(TooEarly, match="exact_version=4 "):
            await dispatcher(engine, version_wait_s=1e9).complete(call(exact_weight_version=4))


class Starting:
    """A deployment whose replicas have not started; calls wait in Serve's handle until a test places them."""

    def __init__(self) -> None:
        self.calls, self.cancelled = list[GenerateCall](), 0
        self.sent, self.placed = asyncio.Event(), asyncio.Event()

    async def generate(self, call: GenerateCall) -> Rollout:
        self.calls.append(call)
        self.sent.set()
        try:
            await self.placed.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return made(9)(call)


class FailingStarts:
    """An ingest that learns of a failed start each time that it is asked."""

    tries = 0

    async def fleet(self) -> Fleet:
        self.tries += 1
        start = FailedStart(replica_id="a", reason="no GPU", at=0.0)
        failed = FailedStarts(tries=self.tries, first=start, last=start, over=False)
        return Fleet(latest_version=0, paused=False, replicas=(), failed_starts=failed)


class TestFleet:
    def of(self, engine: object, fleet: RoutedFleet, ingest: object = None, **limits: int) -> Dispatcher:
        config = EngineConfig.model_validate(limits)
        return Dispatcher(engine, ingest or Ingest(), config, None, fleet, 1)

    async def test_one_call_wakes_a_fleet_of_zero_and_the_others_follow_at_once(self):
        engine, fleet = Starting(), RoutedFleet()
        dispatch = self.of(engine, fleet, admission_limit=4)
        calls = [asyncio.create_task(dispatch.complete(call(n=2))) for _ in range(9)]
        await engine.sent.wait()
        assert len(engine.calls) == 1 and dispatch.queue.sequences == 16
        fleet.update({"a": RoutedReplica("ready", 3, 0)})
        await settle()
        assert len(engine.calls) == 2
        fleet.update({"a": RoutedReplica("ready", 3, 0), "b": RoutedReplica("ready", 3, 0)})
        await settle()
        assert len(engine.calls) == 4
        engine.placed.set()
        assert len(await asyncio.gather(*calls)) == 9

    async def test_a_fleet_that_cannot_start_ends_calls_with_the_reason(self, monkeypatch):
        monkeypatch.setattr(dispatch_module, "_UNPLACED_S", 0.0)
        engine = Starting()
        ingest = FailingStarts()
        dispatch = self.of(engine, RoutedFleet(), ingest)
        calls = [asyncio.create_task(dispatch.complete(call())) for _ in range(5)]
        for each in calls:
            with pytest.raises(NotReady, match=r"[34567] starts have failed, the first .* with: no GPU"):
                await each
        assert ingest.tries == 2 + len(calls)  # two failures are no reason to give up
        assert engine.cancelled == len(engine.calls) >= 5

    async def test_a_call_without_a_replica_is_sent_ever_more_rarely(self, monkeypatch):
        monkeypatch.setattr(dispatch_module, "_UNPLACED_S", 0.0)
        engine, sent, enough = Starting(), list[int](), asyncio.Event()

        class Looking(Ingest):
            async def fleet(self) -> Fleet:
                sent.append(len(engine.calls))
                if len(sent) >= 8:
                    enough.set()
                return await super().fleet()

        waiting = asyncio.create_task(self.of(engine, RoutedFleet(), Looking()).complete(call()))
        await enough.wait()
        waiting.cancel()
        assert sent[:8] == [1, 2, 2, 3, 3, 3, 3, 4]

    @pytest.mark.parametrize(
        ("fields", "nbytes"),
        [
            ({"prompt_token_ids": (1,) * 10_000}, 10_000 * 32),
            ({"scoring": Scoring(start=1, target_token_ids=((1000,) * 20,) * 10_000)}, 10_000 * 20 * 32),
            ({"scoring": Scoring(start=1, target_token_ids=((),) * 10_000)}, 10_000 * 40),
            ({"reasoning": Reasoning(parser_kwargs={"chat_template_kwargs": {"text": "x" * 300_000}})}, 300_000),
        ],
        ids=["prompt", "targets", "positions", "reasoning"],
    )
    async def test_the_queue_counts_the_bytes_of_what_a_call_holds(self, fields, nbytes):
        engine = Starting()
        dispatch = self.of(engine, RoutedFleet())
        calls = [asyncio.create_task(dispatch.complete(call().model_copy(update=fields))) for _ in range(2)]
        await engine.sent.wait()
        assert nbytes < dispatch.queue.nbytes < 2 * nbytes + (32 << 10)  # one of them waits
        for each in calls:
            each.cancel()

    async def test_a_cancelled_call_leaves_the_queue(self):
        engine = Starting()
        dispatch = self.of(engine, RoutedFleet())
        running, waiting = (asyncio.create_task(dispatch.complete(call(n=3))) for _ in range(2))
        await engine.sent.wait()
        waiting.cancel()
        await settle()
        assert dispatch.queue.sequences == 0
        running.cancel()
        await settle()
        assert engine.cancelled == 1

    @pytest.mark.parametrize("of_a_group", [False, True])
    async def test_the_length_of_the_queue_is_exported(self, monkeypatch, of_a_group):
        counts, shown = Counts(), asyncio.Event()
        monkeypatch.setattr(process, "sink", counts)
        engine = Starting()
        dispatch = self.of(engine, RoutedFleet())
        calls = [asyncio.create_task(dispatch.complete(call(n=3))) for _ in range(3)]
        await engine.sent.wait()

        async def sleep(seconds: float) -> None:
            shown.set()
            await asyncio.Event().wait()

        shows = Dispatcher(engine, Ingest(), EngineConfig(), groups=[dispatch]) if of_a_group else dispatch
        showing = asyncio.create_task(shows.show_queue(sleep))
        await shown.wait()
        assert counts.values[(table.QUEUE_SEQUENCES.name,)] == [6]
        for task in (*calls, showing):
            task.cancel()


def as_digits(token_ids: Sequence[int], skip_special_tokens: bool) -> str:
    return "".join(map(str, token_ids))


class TestAbort:
    async def test_an_aborted_completion_goes_on_from_its_tokens(self):
        engine = Script([made(4, end="abort"), made(5, version=4, replica_id="b")])
        rollout = await dispatcher(engine).complete(call())
        (completion,) = rollout.completions
        assert completion.token_ids == (3,) * 4 + (4,) * 5 and completion.finish_reason == "length"
        assert completion.versions == (3, 4) and (rollout.attempts, rollout.replica_id) == (2, "b")
        assert engine.calls[1].prompt_token_ids == (1, 2, 3, 3, 3, 3) and engine.calls[1].sampling.max_tokens == 5
        assert rollout.prompt_token_ids == (1, 2)

    async def test_only_the_aborted_completions_of_a_rollout_go_on(self):
        def mixed(c: GenerateCall) -> Rollout:
            rollout = made(9, 4, 0)(c)
            first, *rest = rollout.completions
            aborted = [d.model_copy(update={"finish_reason": "abort"}) for d in rest]
            return rollout.model_copy(update={"completions": (first, *aborted)})

        engine = Script([mixed, made(5, replica_id="b"), made(9, version=4)])
        rollout = await dispatcher(engine).complete(call(n=3))
        assert [c.index for c in rollout.completions] == [0, 1, 2]
        assert [[(s.version, s.replica_id, s.start, s.end) for s in c.spans] for c in rollout.completions] == [
            [(3, "a", 0, 9)],
            [(3, "a", 0, 4), (3, "b", 4, 9)],
            [(4, "a", 0, 9)],
        ]

    async def test_it_starts_anew_where_engines_cannot_count_them(self):
        engine = Script([made(4, end="abort"), made(9, version=4)])
        sampling = Sampling(max_tokens=9, presence_penalty=1.0)
        dispatching = dispatcher(engine, return_sampling_mask=True)
        rollout = await dispatching.complete(call().model_copy(update={"sampling": sampling}))
        assert rollout.completions[0].token_ids == (4,) * 9 and rollout.attempts == 2
        assert engine.calls[1].prompt_token_ids == (1, 2) and engine.calls[1].sampling == sampling

    async def test_a_stop_string_across_the_seam_ends_a_completion(self):
        engine = Script([made(4, end="abort"), made(5, version=4)])
        dispatching = Dispatcher(EngineClient(engine), Ingest(), EngineConfig(), as_digits)
        sampling = Sampling(max_tokens=9, stop=("344",))
        rollout = await dispatching.complete(call().model_copy(update={"sampling": sampling}))
        [completion] = rollout.completions
        assert completion.token_ids == (3,) * 4 + (4,) * 2
        assert (completion.finish_reason, completion.stop_reason, rollout.attempts) == ("stop", "344", 2)

    async def test_a_stop_string_that_began_before_the_call_ends_it(self):
        engine = Script([made(9)])
        dispatching = Dispatcher(EngineClient(engine), Ingest(), EngineConfig(), as_digits)
        asked = {"sampling": Sampling(max_tokens=9, stop=("2333",)), "partial_tokens": 1}
        [completion] = (await dispatching.complete(call().model_copy(update=asked))).completions
        assert (completion.token_ids, completion.finish_reason) == ((3,) * 3, "stop")

    async def test_an_aborted_completion_is_returned_as_is_when_asked_for(self):
        engine = Script([made(4, end="abort")])
        rollout = await dispatcher(engine).complete(call(), on_abort="return")
        assert (rollout.completions[0].finish_reason, rollout.attempts) == ("abort", 1)

    async def test_after_the_last_attempt_a_partial_completion_is_returned(self):
        engine = Script([made(2, end="abort")] * 3)
        rollout = await dispatcher(engine).complete(call())
        assert (rollout.completions[0].finish_reason, len(rollout.completions[0].token_ids)) == ("abort", 6)
        assert rollout.attempts == 3

    async def test_partial_tokens_survive_the_loss_of_the_next_replica(self):
        engine = Script([made(4, end="abort"), DIED, made(5, version=4)])
        rollout = await dispatcher(engine).complete(call())
        assert (rollout.completions[0].versions, rollout.attempts) == ((3, 4), 3)
        hopeless = await dispatcher(Script([made(4, end="abort"), DIED, DIED])).complete(call())
        assert (hopeless.completions[0].finish_reason, len(hopeless.completions[0].token_ids)) == ("abort", 4)


def one_cut_short(*lengths: int) -> Step:
    """Return an answer whose last completion was aborted; the others have ended."""
    whole = made(*lengths)

    def step(call: GenerateCall) -> Rollout:
        rollout = whole(call)
        *ended, last = rollout.completions
        return rollout.model_copy(update={"completions": (*ended, last.model_copy(update={"finish_reason": "abort"}))})

    return step


class TestFailedRest:
    @pytest.mark.parametrize(
        "error", [Overloaded, TooEarly, NotReady, InvalidRequest, EngineFailed], ids=lambda e: e.__name__
    )
    async def test_one_rest_that_fails_loses_no_other_completion(self, error):
        engine = Script([one_cut_short(9, 9, 9, 4), *[refusal(error, "b")] * 4])
        rollout = await dispatcher(engine).complete(call(n=4))
        assert [(c.finish_reason, len(c.token_ids)) for c in rollout.completions] == [
            ("length", 9), ("length", 9), ("length", 9), ("abort", 4),
        ]  # fmt: skip

    async def test_a_rest_that_cannot_start_anew_leaves_the_tokens(self):
        engine = Script([one_cut_short(9, 4), refusal(Overloaded, "b"), refusal(Overloaded, "b")])
        sampling = Sampling(n=2, max_tokens=9, structured_outputs={"json_object": True})
        rollout = await dispatcher(engine).complete(call().model_copy(update={"sampling": sampling}))
        assert [len(c.token_ids) for c in rollout.completions] == [9, 4]

    async def test_a_rollout_without_any_token_raises_the_error(self):
        engine = Script([made(0, 0, end="abort"), *[refusal(Overloaded, "b")] * 4])
        with pytest.raises(Overloaded):
            await dispatcher(engine).complete(call(n=2))

    async def test_a_rest_that_finds_no_room_leaves_the_tokens(self):
        engine = HalfEngine()
        fleet = RoutedFleet()
        dispatch = Dispatcher(engine, Ingest(), EngineConfig(replica_wait_s=0.0, admission_limit=1), None, fleet)
        fleet.update({"a": RoutedReplica("ready", 3, 0)})
        rollout = asyncio.create_task(dispatch.complete(call()))
        others = asyncio.create_task(dispatch.complete(call(priority=-1)))
        await settle()
        engine.cut.set()
        assert [len(c.token_ids) for c in (await rollout).completions] == [4]
        others.cancel()


class HalfEngine:
    """A replica that aborts its first call when a test says so, and answers no other."""

    def __init__(self) -> None:
        self.cut, self._calls = asyncio.Event(), 0

    async def generate(self, call: GenerateCall) -> Rollout:
        self._calls += 1
        await (self.cut if self._calls == 1 else asyncio.Event()).wait()
        return made(4, end="abort")(call)


def decode_bytes(token_ids: Sequence[int], skip_special_tokens: bool) -> str:
    return bytes(token_ids).decode(errors="replace")


def of_bytes(made: bytes, end: FinishReason, stop: str | None = None, n: int = 1) -> Step:
    """Return an answer of ``n`` completions whose tokens are bytes."""

    return lambda call: rollout_of(call, (completion_of(made, index=i, end=end, stop=stop) for i in range(n)))


class TestStopStringOfThePrompt:
    """An engine whose prompt ends inside a character may find a stop string there."""

    half, rest = "é".encode()[:1], "é".encode()[1:]

    def _asking(self, prompt: bytes, max_tokens: int = 9, n: int = 1) -> GenerateCall:
        sampling = Sampling(n=n, max_tokens=max_tokens, stop=("END",))
        return GenerateCall(request_id="r", prompt_token_ids=tuple(prompt), sampling=sampling)

    def _dispatcher(self, *steps: Step) -> tuple[Script, Dispatcher]:
        engine = Script(list(steps))
        return engine, Dispatcher(EngineClient(engine), Ingest(), EngineConfig(), decode_bytes)

    async def test_it_ends_no_rest_and_costs_no_attempt(self):
        cut, falsely = of_bytes(b"ab" + self.half, "abort"), of_bytes(self.rest, "stop", "END")
        engine, dispatching = self._dispatcher(cut, falsely, of_bytes(b"cdefg", "length"))
        rollout = await dispatching.complete(self._asking(b"END "))
        [completion] = rollout.completions
        assert bytes(completion.token_ids) == "abécdefg".encode() and completion.finish_reason == "length"
        assert (rollout.attempts, len({c.request_id for c in engine.calls})) == (2, 3)

    async def test_it_ends_no_completion_that_the_caller_continues(self):
        falsely = of_bytes(self.rest, "stop", "END", n=2)
        engine, dispatching = self._dispatcher(falsely, *[of_bytes(b"cd", "abort")] * 2)
        rollout = await dispatching.complete(self._asking(b"END " + self.half, n=2), on_abort="return")
        assert [(bytes(c.token_ids), c.finish_reason) for c in rollout.completions] == [
            (self.rest + b"cd", "abort")
        ] * 2
        assert rollout.attempts == 1 and len(engine.calls) == 3

    async def test_a_longest_completion_ends_by_its_length(self):
        _, dispatching = self._dispatcher(of_bytes(self.rest, "stop", "END"))
        [completion] = (await dispatching.complete(self._asking(b"END " + self.half, max_tokens=1))).completions
        assert (completion.finish_reason, completion.stop_reason) == ("length", None)

    async def test_a_stop_string_of_the_completion_ends_it(self):
        _, dispatching = self._dispatcher(of_bytes(self.rest + b"END", "stop", "END"))
        [completion] = (await dispatching.complete(self._asking(b"END " + self.half))).completions
        assert (completion.finish_reason, completion.stop_reason) == ("stop", "END")


class TestVersionOfTheRest:
    async def test_a_rest_waits_for_the_version_of_its_beginning(self):
        engine = Script([made(4, end="abort"), made(5, version=4)])
        await dispatcher(engine).complete(call(min_weight_version=1))
        assert [c.min_weight_version for c in engine.calls] == [1, 3]

    async def test_a_rest_of_a_version_that_no_log_has_takes_another(self):
        engine = Script([made(4, version=9, end="abort"), *[refusal(TooEarly, "a")] * 2, made(5, version=4)])
        rollout = await dispatcher(engine).complete(call(min_weight_version=2))
        assert [c.min_weight_version for c in engine.calls] == [2, 9, 9, 2]
        assert rollout.completions[0].versions == (9, 4) and rollout.attempts == 2

    async def test_a_rest_never_takes_weights_older_than_asked(self):
        engine = Script([made(4, version=4, end="abort"), *[refusal(TooEarly, "a")] * 2])
        rollout = await dispatcher(engine).complete(call(min_weight_version=4))
        assert rollout.completions[0].finish_reason == "abort" and len(rollout.completions[0].token_ids) == 4


def returned(step: Step) -> Step:
    """The same answer, made while such a pause came."""
    assert callable(step)
    return lambda call: step(call).model_copy(update={"returned": True})


class TestCancel:
    async def test_cancelling_a_rollout_cancels_every_call_in_flight(self):
        engine = Script([made(4, 4, end="abort"), None, None])
        rollout = asyncio.create_task(dispatcher(engine).complete(call(n=2)))
        while len(engine.calls) < 3:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        assert [response.cancelled for response in engine.responses] == [False, True, True]


class TestReturningPause:
    async def test_what_a_returning_pause_aborts_is_not_continued(self):
        engine = Script([returned(made(3, 9, end="abort"))])
        rollout = await dispatcher(engine).complete(call(n=2))
        assert len(engine.calls) == 1 and rollout.attempts == 1
        assert [(c.finish_reason, len(c.token_ids)) for c in rollout.completions] == [("abort", 3), ("abort", 9)]

    async def test_a_returning_pause_ends_a_continuation_too(self):
        engine = Script([made(3, end="abort"), returned(made(2, end="abort", version=4, replica_id="b"))])
        rollout = await dispatcher(engine).complete(call())
        [completion] = rollout.completions
        assert (completion.finish_reason, completion.versions, len(completion.token_ids)) == ("abort", (3, 4), 5)
        assert len(engine.calls) == 2
