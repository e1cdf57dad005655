"""The nouns hold their invariants from the moment they are made."""

import functools
import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from rollout_service.compat.pydantic_internals import fail_fast_validator
from rollout_service.gateway.tinker import Chunk, CreateSamplingSession, ModelInput, Sample, SamplingParams, Tensor
from rollout_service.protocol.adapters import read_adapter_name
from rollout_service.protocol.base import FEW, MAX_VERSION, Frozen, KnownVersion, NewVersion, WeightVersion
from rollout_service.protocol.compact_logprobs import CompactLogprobs
from rollout_service.protocol.fleet import Fleet, ReplicaStatus, UpdateTimings
from rollout_service.protocol.generate import GenerateRequest, StreamOptions, WantedVersion
from rollout_service.protocol.mismatch import MismatchReceipt, MismatchRow, MismatchTable, Suspicion
from rollout_service.protocol.rollout import Candidate, Completion, PromptCandidates, Rollout, Span, merge_spans
from rollout_service.protocol.sampling import ExtraArgs, GenerateCall, Sampling, StructuredOutputs
from rollout_service.protocol.sessions import OpenSession
from rollout_service.protocol.upload import Announcement, BeginUpload, PathSource, UploadTensor
from rollout_service.protocol.weights import WeightStatus

STATUS = ReplicaStatus(
    replica_id="engine#1",
    version=3,
    state="ready",
    target=4,
    running=2,
    update=UpdateTimings(stage_s=0.5, closed_s=0.1, load_s=0.05),
)
ROLLOUT = Rollout(
    request_id="r-1",
    prompt_token_ids=(5, 6),
    completions=(
        Completion(
            index=0,
            token_ids=(7, 8),
            logprobs=(-0.5, 0.0),
            finish_reason="stop",
            spans=(Span(version=3, start=0, end=2),),
        ),
    ),
    replica_id="engine#1",
)
SUSPICION = Suspicion(replica_id="engine#1", since=1.5e9, tokens=9, k3=0.5, prob_error=1.2)
ROW = MismatchRow(
    version=3,
    replica_id=None,
    tokens=9,
    sequences=0,
    k1=-0.1,
    k3=0.1,
    chi2_token=0.2,
    chi2_seq=None,
    ess_ratio=0.9,
    prob_error=1.2,
    abs_diff_max=3.0,
    outside_ratio=0.1,
    quantiles={0.5: 0.01, 0.999: 2.0},
)
NOUNS = [
    ROLLOUT,
    STATUS,
    WeightStatus(version=3, state="live", digest="ab", total_bytes=10, replicas=(STATUS,)),
    WeightStatus(version=3, state="live", suspect=(SUSPICION,)),
    Fleet(latest_version=3, paused=False, replicas=(STATUS,)),
    MismatchTable(rows=(ROW,), versions=(ROW,)),
    MismatchReceipt(tokens=3),
]


def completion(**changes: Any) -> Completion:
    fields: dict[str, Any] = {
        "index": 0,
        "token_ids": (1, 2, 3),
        "logprobs": (-1.0, -2.0, -3.0),
        "finish_reason": "length",
        "spans": ({"version": 1, "start": 0, "end": 2}, {"version": 2, "start": 2, "end": 3}),
    }
    return Completion.model_validate(fields | changes)


class TestNoun:
    @pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: type(noun).__name__)
    def test_a_noun_survives_json_and_refuses_other_fields(self, noun):
        assert type(noun).model_validate_json(noun.model_dump_json()) == noun
        with pytest.raises(ValidationError, match="colour"):
            type(noun).model_validate(noun.model_dump() | {"colour": "red"})

    def test_a_noun_cannot_be_changed(self):
        with pytest.raises(ValidationError, match="frozen"):
            STATUS.version = 4


class TestSpan:
    @pytest.mark.parametrize(("start", "end"), [(2, 2), (3, 1), (-1, 2)])
    def test_a_span_holds_at_least_one_token(self, start, end):
        with pytest.raises(ValidationError):
            Span(version=1, start=start, end=end)

    @pytest.mark.parametrize(
        "change",
        [
            {"version": 2},
            {"replica_id": "b"},
            {"label": "step-1"},
            {"label": None},
            {"adapter": "a", "adapter_version": 2},
        ],
        ids=str,
    )
    def test_neighbours_of_other_weights_or_of_another_replica_stay_apart(self, change):
        first = Span(version=1, start=0, end=2, replica_id="a", label="step-0")
        second = first.model_copy(update={"start": 2, "end": 3} | change)
        assert merge_spans([first, second]) == (first, second)

    @given(
        st.lists(st.sampled_from([(1, "a", None), (1, "b", None), (2, "b", None), (2, "b", "x")]), max_size=9),
        st.data(),
    )
    def test_merged_spans_say_the_same_of_every_token_and_are_as_few_as_can_be(self, makers, data):
        lengths = [data.draw(st.integers(1, 3)) for _ in makers]
        apart = [
            Span(version=version, replica_id=replica_id, label=label, start=0, end=length).shift(sum(lengths[:i]))
            for i, ((version, replica_id, label), length) in enumerate(zip(makers, lengths, strict=True))
        ]
        whole = merge_spans(apart)
        told = [(s.version, s.replica_id, s.label) for s in whole]
        assert [m for m, s in zip(told, whole, strict=True) for _ in range(s.start, s.end)] == [
            maker for maker, length in zip(makers, lengths, strict=True) for _ in range(length)
        ]
        assert told == [maker for maker, _ in itertools.groupby(makers)]
        assert [s.start for s in whole] == [0, *(s.end for s in whole)][: len(whole)]
        cut = data.draw(st.integers(0, len(apart)))
        assert merge_spans([*merge_spans(apart[:cut]), *merge_spans(apart[cut:])]) == whole

    def test_a_span_documents_both_forms_in_replies_only(self):
        of_requests, of_replies = (Span.model_json_schema(mode=mode) for mode in ("validation", "serialization"))
        assert of_requests["properties"]["version"]["type"] == "integer"
        assert [form["type"] for form in of_replies["properties"]["version"]["anyOf"]] == ["integer", "string"]


class TestCompletion:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"logprobs": (-1.0,)}, "3 tokens but 1 logprobs"),
            ({"spans": ()}, "do not cover 3 tokens"),
            ({"spans": ({"version": 1, "start": 0, "end": 2},)}, "do not cover 3 tokens"),
            ({"spans": ({"version": 1, "start": 1, "end": 3},)}, "gap at token 0"),
            ({"spans": ({"version": 1, "start": 0, "end": 1}, {"version": 2, "start": 2, "end": 3})}, "gap at token 1"),
            ({"spans": ({"version": 1, "start": 0, "end": 2}, {"version": 2, "start": 1, "end": 3})}, "gap at token 2"),
            ({"spans": ({"version": 1, "start": 0, "end": 4},)}, "do not cover 3 tokens"),
            ({"finish_reason": "tired"}, "finish_reason"),
            ({"index": -1}, "index"),
        ],
    )
    def test_a_completion_whose_parts_do_not_fit_together_is_refused(self, changes, message):
        with pytest.raises(ValidationError, match=message):
            completion(**changes)

    @given(st.lists(st.integers(min_value=1, max_value=5), max_size=6))
    def test_contiguous_spans_up_to_the_last_token_are_accepted(self, lengths):
        ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        spans = tuple(
            Span(version=i, start=end - length, end=end)
            for i, (end, length) in enumerate(zip(ends, lengths, strict=True))
        )
        tokens = tuple(range(sum(lengths)))
        made = completion(token_ids=tokens, logprobs=(0.0,) * len(tokens), spans=spans)
        assert made.versions == tuple(range(len(lengths)))


class TestVersion:
    @pytest.mark.parametrize("version", [-1, MAX_VERSION + 1, 2**63, 10**255])
    def test_a_version_that_json_does_not_hold_exactly_is_refused(self, version):
        with pytest.raises(ValidationError, match="version"):
            Span(version=version, start=0, end=1)
        with pytest.raises(ValidationError, match="version"):
            BeginUpload(version=version, source=PathSource(path=Path("weights")))
        with pytest.raises(ValidationError, match="min_weight_version"):
            GenerateCall(request_id="r", prompt_token_ids=(1,), sampling=Sampling(), min_weight_version=version)

    def test_the_largest_version_is_exact_in_json_and_in_a_double(self):
        span = Span(version=MAX_VERSION, start=0, end=1)
        assert Span.model_validate_json(span.model_dump_json()) == span
        assert Span.model_validate({"version": str(MAX_VERSION), "start": 0, "end": 1}) == span  # as vLLM writes it
        assert int(float(MAX_VERSION)) == MAX_VERSION


class TestAnnouncement:
    @pytest.mark.parametrize(
        "what",
        [
            {"source": {"path": "/a" * 2049}},
            {"tensors": [{"name": "a" * 1025, "dtype": "bfloat16", "shape": [1]}]},
        ],
    )
    def test_a_path_and_a_name_have_a_bound(self, what):
        with pytest.raises(ValidationError, match="at most"):
            Announcement.model_validate({"version": 1, **what})

    @pytest.mark.parametrize("shape", [(-1,), (1 << 63,), (1,) * 65])
    def test_a_shape_that_no_tensor_has_is_refused(self, shape):
        with pytest.raises(ValidationError, match="shape"):
            UploadTensor(name="w", dtype="bfloat16", shape=shape)

    @pytest.mark.parametrize(
        "what", [{}, {"tensors": [{"name": "w", "dtype": "bfloat16", "shape": [3]}], "source": {"path": "/tmp"}}]
    )
    def test_tensors_and_a_source_exclude_each_other(self, what):
        with pytest.raises(ValidationError, match="not both and not neither"):
            Announcement.model_validate({"version": 1, **what})

    @pytest.mark.parametrize(
        "what",
        [
            {"tensors": (UploadTensor(name="w", dtype="bfloat16", shape=(3, 4)),), "kv_scales": {"a.q_scale": 0.1}},
            {"source": PathSource(path=Path("/weights"))},
        ],
        ids=["tensors", "path"],
    )
    def test_it_is_the_same_in_another_process(self, what):
        for announced in (Announcement(version="next", uploader="u", **what), BeginUpload(version=7, **what)):
            again = pickle.loads(pickle.dumps(announced))
            assert again == announced and type(again) is type(announced) and again.nbytes == announced.nbytes


class Ring(Frozen):
    """A noun that caches what it derives."""

    radius: float

    @functools.cached_property
    def width(self) -> float:
        """Twice the radius."""
        return 2 * self.radius


def test_a_copy_derives_its_properties_anew():
    ring = Ring(radius=1)
    assert ring.width == 2
    assert ring.model_copy(update={"radius": 3}).width == 6 and ring.model_copy() == ring


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf], ids=str)
def test_a_scale_that_is_no_number_reaches_the_ingest(scale):
    announced = BeginUpload(version=1, source=PathSource(path=Path("/a")), kv_scales={"k": scale})
    for received in (
        pickle.loads(pickle.dumps(announced)),
        BeginUpload.model_validate_json(announced.model_dump_json()),
    ):
        assert repr(received) == repr(announced)


@pytest.mark.parametrize("version", [0, 10**15, MAX_VERSION])
def test_every_version_of_an_adapter_can_be_named(version):
    assert read_adapter_name(f"run-a@{version}") == ("run-a", version)


def test_compact_logprobs_without_offsets_are_refused():
    with pytest.raises(ValidationError, match="offsets"):
        CompactLogprobs(data="", offsets=[], num_top_logprobs=0)


def test_pickled_candidates_of_a_prompt_are_the_same():
    best, other = Candidate(150_000, -1e-9, 1), Candidate(0, -87.25, 150_001)
    rows = PromptCandidates([0, 2, 2, 3], *zip(best, other, other, strict=True))
    unpickled = pickle.loads(pickle.dumps(rows))
    assert len(rows) == len(unpickled) == 4
    assert list(rows) == list(unpickled) == [None, (best, other), (), (other,)]
    assert [type(value) for value in unpickled[1][0]] == [int, float, int]
    assert unpickled[1:3] == ((best, other), ())


BODIES: list[type[Frozen]] = [
    *(Chunk, CreateSamplingSession, ModelInput, Sample, SamplingParams, Tensor),
    *(ExtraArgs, GenerateRequest, OpenSession, Sampling, StreamOptions, StructuredOutputs, WantedVersion),
]


@pytest.mark.parametrize("body", BODIES)
def test_many_unknown_names_are_one_problem(body):
    names = {f"x{i}": 1 for i in range(FEW + 1)}
    validator = fail_fast_validator(body)
    with pytest.raises(ValidationError, match=f"{FEW + 1} names are no fields here, or not implemented") as refused:
        validator.validate_python(names)
    assert refused.value.error_count() == 1
    with pytest.raises(ValidationError, match="x0\n  Extra inputs are not permitted"):
        validator.validate_python({"x0": 1})


def test_an_alias_is_a_known_name_and_nulls_are_none():
    idle = {f"x{i}": None for i in range(FEW + 1)}
    assert fail_fast_validator(StructuredOutputs).validate_python({"json": "{}", **idle}).json_schema == "{}"
    assert fail_fast_validator(Sampling).validate_python({"n": 2, **idle}).n == 2


def test_a_field_may_be_named_as_a_key_of_schemas():
    class Named(Frozen):
        metadata: dict[str, str]
        default: tuple[int, ...] = ()

    for wrong in ({"metadata": {"a": 1, "b": 1}}, {"metadata": {}, "default": ["a", "b"]}):
        with pytest.raises(ValidationError) as refused:
            fail_fast_validator(Named).validate_python(wrong)
        assert refused.value.error_count() == 1


@pytest.mark.parametrize("kind", [WeightVersion, NewVersion, KnownVersion])
def test_no_boolean_is_a_version(kind):
    with pytest.raises(ValidationError, match="not a boolean"):
        TypeAdapter(kind).validate_python(True)
