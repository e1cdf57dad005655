"""Bodies of the routes by which Tinker's SDK 0.38 samples."""

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollout_service.errors import InvalidRequest
from rollout_service.protocol.adapters import read_adapter_name
from rollout_service.protocol.base import Frozen
from rollout_service.protocol.generate import TokenIds
from rollout_service.protocol.sampling import MOST_COMPLETIONS, Sampling, Scoring

Id = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9@._~-]+$")]
"""The id of a session or a request."""
_Size = Annotated[int, Field(ge=1)]
PATH = "tinker://"
"""The beginning of an adapter's path."""


class Ignored(BaseModel):
    """A body without effect."""

    model_config = ConfigDict(extra="allow")


class CreateSamplingSession(Frozen):
    """Body of ``POST /api/v1/create_sampling_session``."""

    session_id: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    """A name of the served model."""
    model_path: str | None = None
    """An adapter: ``tinker://run-a`` is its newest version at each sample, ``tinker://run-a@3`` exactly that one."""
    type: Literal["create_sampling_session"] = "create_sampling_session"

    @property
    def adapter(self) -> str | None:
        """Return the adapter in ``model_path``; None: the model itself. Raises InvalidRequest."""
        if self.model_path is None:
            return None
        name = self.model_path.removeprefix(PATH)
        if not self.model_path.startswith(PATH) or read_adapter_name(name) is None:
            raise InvalidRequest(
                f"model_path={self.model_path!r} is no adapter here: push one with push_adapter, and name it as "
                f"{PATH}run-a or {PATH}run-a@3"
            )
        return name

    def sampler_id(self) -> str:
        """Return the id of the sampling session. It has all that the session is, so that no gateway keeps any."""
        return f"{self.session_id}-{self.sampling_session_seq_id}~{self.adapter or ''}"


def adapter_of(sampler_id: str) -> str | None:
    """Return the adapter of a sampling session; None: the model itself."""
    return sampler_id.partition("~")[2] or None


class Chunk(Frozen):
    """Tokens of a prompt."""

    tokens: TokenIds
    type: Literal["encoded_text"] = "encoded_text"
    """Images and audio are refused."""


class ModelInput(Frozen):
    """A prompt."""

    chunks: Annotated[tuple[Chunk, ...], Field(fail_fast=True)]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the prompt's tokens."""
        return tuple(token for chunk in self.chunks for token in chunk.tokens)


class SamplingParams(Frozen):
    """Tinker's sampling parameters."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: (
        str
        | Annotated[tuple[str, ...], Field(fail_fast=True)]
        | Annotated[tuple[int, ...], Field(fail_fast=True)]
        | None
    ) = None
    """``[]``: nothing ends a completion, not even the end of sequence."""
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def sampling(self, **more: object) -> Sampling:
        """Return the service's parameters. Raises pydantic.ValidationError."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        return Sampling.model_validate(
            {
                **self.model_dump(exclude={"stop"}),
                "stop": [each for each in stop if isinstance(each, str)],
                "stop_token_ids": [each for each in stop if isinstance(each, int)],
                "ignore_eos": self.stop == (),
                **more,
            }
        )


class Tensor(Frozen):
    """A matrix of token ids, dense or as CSR."""

    data: TokenIds
    dtype: Literal["int64"]
    shape: tuple[_Size, _Size]
    sparse_crow_indices: TokenIds | None = None
    sparse_col_indices: TokenIds | None = None

    def rows(self) -> list[tuple[int, ...]]:
        """Return the ids in each row, without those that ask for nothing (-1). Raises InvalidRequest."""
        (height, width), starts = self.shape, self.sparse_crow_indices
        cells = height * width if starts is None else len(self.sparse_col_indices or ())
        if len(self.data) != cells:
            raise InvalidRequest(f"target_prompt_logprobs has {len(self.data)} ids, and {cells} belong to its shape")
        if starts is None:
            starts = tuple(range(0, cells + 1, width))
        ascending = all(a <= b for a, b in pairwise(starts))
        if len(starts) != height + 1 or not ascending or (starts[0], starts[-1]) != (0, cells):
            raise InvalidRequest(f"target_prompt_logprobs: its indices are not those of a {list(self.shape)} matrix")
        found = [self.data[a:b] for a, b in pairwise(starts)]
        return [tuple(each for each in row if each != -1) for row in found]


class Sample(Frozen):
    """Body of ``POST /api/v1/asample``."""

    sampling_session_id: Id
    seq_id: int = Field(ge=0)
    """Number of the sample in its session. The same number names the same sample."""
    num_samples: int = Field(default=1, ge=1, le=MOST_COMPLETIONS)
    prompt: ModelInput
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Tensor | None = None
    """Needs a GPU."""
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    prompt_alt_tokens_k: Literal[0] = 0
    """Draws at each position of the prompt: not implemented."""
    record_stability_info: Literal[False] | None = None
    """For training: not implemented."""
    base_model: None = None
    """The sampling session has it."""
    model_path: None = None
    type: Literal["sample"] = "sample"

    @property
    def request_id(self) -> str:
        """Return the sample's id."""
        return f"{self.sampling_session_id}~{self.seq_id}"

    def sampling(self) -> Sampling:
        """Return the parameters for an engine. Raises pydantic.ValidationError."""
        wants_prompt = bool(self.prompt_logprobs or self.topk_prompt_logprobs) and self.target_prompt_logprobs is None
        return self.sampling_params.sampling(
            n=self.num_samples,
            logprobs=self.topk_sample_logprobs,
            prompt_logprobs=self.topk_prompt_logprobs if wants_prompt else None,
        )

    def scoring(self) -> Scoring | None:
        """Return the target tokens, each prompt token before those of its position. Raises InvalidRequest."""
        if self.target_prompt_logprobs is None:
            return None
        if self.topk_prompt_logprobs:
            raise InvalidRequest("topk_prompt_logprobs and target_prompt_logprobs are given: send one of them")
        rows, scored = self.target_prompt_logprobs.rows(), self.prompt.token_ids[1:]
        if len(rows) != len(scored):
            raise InvalidRequest(
                f"target_prompt_logprobs has {len(rows)} rows, and {len(scored)} tokens follow the prompt's first: "
                "send a row for each"
            )
        targets = tuple((token, *row) for token, row in zip(scored, rows, strict=True))
        return Scoring(start=1, target_token_ids=targets)


class RetrieveFuture(BaseModel):
    """Body of ``POST /api/v1/retrieve_future`` and ``/api/v1/cancel_future``."""

    request_id: str
    allow_metadata_only: bool = False
    """Not used: the whole result is returned."""
