"""Continue an interrupted completion on another replica, and merge its pieces."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import xxhash

from rollout_service.config.engine import EngineConfig
from rollout_service.errors import TooEarly
from rollout_service.fleet.detokenizer import Decode, Detokenizer
from rollout_service.protocol.adapters import WantedAdapter
from rollout_service.protocol.rollout import Completion, Rollout, merge_spans
from rollout_service.protocol.routed_experts import RoutedExperts
from rollout_service.protocol.sampling import LARGEST_SEED, GenerateCall, Sampling
from rollout_service.protocol.sampling_mask import repack

_T = TypeVar("_T")
_WINDOW = 4096
"""Number of tokens before a seam that are searched for the beginning of a stop string: the longest has 1024
characters."""


def continuation_call(call: GenerateCall, partial: Completion, attempt: int) -> GenerateCall:
    """Return the request for the tokens that ``partial``, one of the call's completions, still lacks.

    Its ``min_weight_version`` is at least the version of the last token of ``partial``, unless the call has an exact
    version, which stays. An adapter stays at the version that made the tokens. Routed experts are requested from the
    last token on, which no engine has read, or from the call's start if ``partial`` has none.
    """
    done = len(partial.token_ids)
    sampling, is_exact = call.sampling, call.exact_weight_version is not None
    changes = dict[str, object]()
    adapter, scoring = call.adapter, call.scoring if partial.scores is None else None
    if adapter is not None and partial.spans:
        adapter = WantedAdapter(name=adapter.name, exact_version=partial.spans[-1].adapter_version)
    if scoring is not None and scoring.target_token_ids is not None:  # vLLM wants a row for each token of its prompt
        rows = scoring.target_token_ids + ((),) * done
        scoring = scoring.model_copy(update={"target_token_ids": rows})
    if partial.prompt_logprobs is not None:  # a lost replica does not report prompt logprobs
        changes["prompt_logprobs"] = None
    if sampling.routed_experts_prompt_start is not None and partial.routed_experts is not None:
        changes["routed_experts_prompt_start"] = len(call.prompt_token_ids) + done - 1
    return call.model_copy(
        update={
            "request_id": f"{call.request_id}-{partial.index}-{attempt}",
            "prompt_token_ids": call.prompt_token_ids + partial.token_ids,
            "partial_tokens": call.partial_tokens + done,
            "min_weight_version": None if is_exact else min_version_of_rest(call.min_weight_version, partial),
            "adapter": adapter,
            "scoring": scoring,
            "sampling": sampling_of_the_rest(sampling, partial.index, done).model_copy(update=changes),
        }
    )


def min_version_of_rest(asked: int | None, partial: Completion) -> int | None:
    """Return the oldest weight version that may continue ``partial``: no older than its last token, nor than asked."""
    if not partial.spans:
        return asked
    return max(asked or 0, partial.spans[-1].version)


def is_version_gone(refusal: TooEarly, version: int | None) -> bool:
    """Return True if the log's newest version is now older than ``version``, which was served before.

    A log in memory is lost with its host; the service then continues from the newest version that was saved.
    """
    latest = refusal.detail.get("latest_version")
    return isinstance(latest, int) and version is not None and latest < version


def sampling_of_the_rest(sampling: Sampling, index: int, done: int) -> Sampling:
    """Return the sampling parameters for the rest of completion ``index``, which has ``done`` tokens: the remaining
    ``max_tokens`` and ``min_tokens``, and another seed."""
    changes: dict[str, object] = {"n": 1, "min_tokens": max(0, sampling.min_tokens - done)}
    if sampling.max_tokens is not None:
        changes["max_tokens"] = sampling.max_tokens - done
    if sampling.seed is not None:
        own = sampling.seed + index  # as in vLLM, which takes -1 for none
        if own == -1:
            changes["seed"] = None
        elif done:  # the same seed would repeat the random numbers of the first tokens
            changes["seed"] = xxhash.xxh3_64_intdigest(f"{sampling.seed} {index} {done}".encode()) % LARGEST_SEED
        else:
            changes["seed"] = own
    return sampling.model_copy(update=changes)


def of_version(completion: Completion, version: int) -> Completion:
    """Return the completion up to its first token of another weight version. If there is one, it ends with "abort"."""
    end = next((span.start for span in completion.spans if span.version != version), None)
    if end is None:
        return completion
    cut: dict[str, object] = {"finish_reason": "abort", "stop_reason": None}
    if end == 0:  # the other version has read the prompt, too
        cut |= {"prompt_logprobs": None, "scores": None}
    return slice_completion(completion, 0, end).model_copy(update=cut)


def with_replica_id(rollout: Rollout) -> Rollout:
    """Return the rollout with the replica in each span, since its completions may be merged with those of other
    replicas."""
    completions = tuple(
        c.model_copy(update={"spans": tuple(s.model_copy(update={"replica_id": rollout.replica_id}) for s in c.spans)})
        for c in rollout.completions
    )
    return rollout.model_copy(update={"completions": completions})


def why_restart(sampling: Sampling, limits: EngineConfig) -> str | None:
    """Return the reason why an interrupted completion cannot continue from its tokens, as part of a prompt; None: it
    can.

    Sampling parameters that depend on the completion's own tokens must see those of the first part, too. vLLM's
    grammars cannot be advanced by them. Penalties count them only if the engines have ``PartialPenalties``.
    """
    if sampling.structured_outputs is not None:
        return "structured_outputs, which vLLM cannot take up in their middle"
    is_penalized = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    if is_penalized and (why := limits.why_penalties_start_anew) is not None:
        return f"presence_penalty and frequency_penalty, and {why}"
    return None


def without_tokens(partial: Completion) -> Completion:
    """Return ``partial`` without its tokens, to start anew."""
    nothing: dict[str, tuple[()] | None] = {"token_ids": (), "logprobs": (), "spans": ()}
    nothing |= dict.fromkeys(("top_logprobs", "packed_sampling_mask", "routed_experts"))
    return partial.model_copy(update=nothing)


def merge_completions(call: GenerateCall, partial: Completion, rest: Completion) -> Completion:
    """Merge a partial completion of the call with its continuation; it ends as ``rest`` ended."""
    done = len(partial.token_ids)
    of_the_prompt = partial.prompt_logprobs
    if of_the_prompt is None and rest.prompt_logprobs is not None:  # the prompt of ``rest`` contains the first tokens
        of_the_prompt = rest.prompt_logprobs[: len(rest.prompt_logprobs) - done]
    scores = partial.scores
    if scores is None and rest.scores is not None:  # likewise
        scores = rest.scores.model_copy(update={"offsets": rest.scores.offsets[: len(rest.scores.offsets) - done]})
    return Completion(
        index=partial.index,
        token_ids=partial.token_ids + rest.token_ids,
        logprobs=partial.logprobs + rest.logprobs,
        finish_reason=rest.finish_reason,
        stop_reason=rest.stop_reason,
        spans=merge_spans((*partial.spans, *(span.shift(done) for span in rest.spans))),
        top_logprobs=_concatenate([piece.top_logprobs for piece in (partial, rest) if piece.token_ids]),
        prompt_logprobs=None if of_the_prompt is None else tuple(of_the_prompt),
        scores=scores,
        packed_sampling_mask=_concatenate([piece.packed_sampling_mask for piece in (partial, rest) if piece.token_ids]),
        routed_experts=_joined_experts(partial, rest, len(call.prompt_token_ids)),
    )


def _joined_experts(partial: Completion, rest: Completion, prompt_tokens: int) -> RoutedExperts | None:
    """Merge the routed experts of both parts. If ``partial`` has none, the rows of its tokens are marked as missing:
    from the prompt's last token to the last but one of its own. The second engine read these tokens in its prompt, and
    its routing there is not the one with which they were sampled."""
    first, second = partial.routed_experts, rest.routed_experts
    if first is None and second is not None:
        return second.without(prompt_tokens - 1, prompt_tokens + len(partial.token_ids) - 1)
    return first if second is None or first is None else first.followed_by(second)


def fill_from_others(call: GenerateCall, completions: tuple[Completion, ...]) -> tuple[Completion, ...]:
    """Fill what a lost replica did not report of ended completions, from others of the same prompt.

    These are the prompt's logprobs, and the routed experts of its tokens. The rows of a completion's own tokens are
    marked as missing.
    """
    logprobs = next((each.prompt_logprobs for each in completions if each.prompt_logprobs is not None), None)
    experts = next((each.routed_experts for each in completions if each.routed_experts is not None), None)
    last = len(call.prompt_token_ids) - 1

    def filled(completion: Completion) -> Completion:
        if completion.finish_reason == "abort":
            return completion
        changes = dict[str, object]()
        if completion.prompt_logprobs is None:
            changes["prompt_logprobs"] = logprobs
        if completion.routed_experts is None and experts is not None:
            nothing = RoutedExperts.of(experts.rows()[:0], last + len(completion.token_ids))
            changes["routed_experts"] = experts.until(last).followed_by(nothing)
        return completion.model_copy(update=changes)

    return tuple(map(filled, completions))


def slice_completion(completion: Completion, start: int, end: int) -> Completion:
    """Return tokens ``[start, end)`` of a completion, with spans that count from the first of them, without routed
    experts."""
    spans = (
        span.model_copy(update={"start": max(start, span.start) - start, "end": min(end, span.end) - start})
        for span in completion.spans
        if span.start < end and span.end > start
    )
    likeliest, mask = completion.top_logprobs, completion.packed_sampling_mask
    return completion.model_copy(
        update={
            "token_ids": completion.token_ids[start:end],
            "logprobs": completion.logprobs[start:end],
            "spans": tuple(spans),
            "top_logprobs": None if likeliest is None else likeliest[start:end],
            "packed_sampling_mask": None if mask is None else repack(mask, start, end),
            "routed_experts": None,
        }
    )


class StopSearch:
    """Searches for stop strings across the seam of a continued completion, where the engine's own search is wrong.

    The engine has the first tokens in its prompt, which it does not search. Stop strings that begin before the seam and
    end after it are therefore searched here. If the prompt ends inside a character, vLLM counts the text of the whole
    prompt as the completion's once the character is complete, and stops at a stop string in the prompt. All stop
    strings are then searched here, until the completion's own text is longer than they are. As in vLLM, a stop string
    that is complete before ``min_tokens`` tokens is ignored.
    """

    def __init__(self, call: GenerateCall, base: Sequence[int], decode: Decode) -> None:
        """``base``: tokens of the completion before the seam, after those that the call already contains."""
        sampling = call.sampling
        self._stops = sampling.stop
        self._least = sampling.min_tokens - len(base)
        """Number of tokens after the seam in which stop strings are ignored."""
        self._longest = max(map(len, self._stops), default=0)
        prompt_tokens = len(call.prompt_token_ids) - call.partial_tokens
        tokens = (*call.prompt_token_ids, *base)
        begin = max(prompt_tokens, len(tokens) - _WINDOW)
        self._text = Detokenizer(decode, tokens[:begin], sampling.skip_special_tokens)
        text = self._text.add(tokens[begin:])
        self._held = text[max(0, len(text) - self._longest + 1) :]
        """Text that may contain a stop string or its beginning: some text before the seam, and all text after it."""
        self._seam = len(self._held)
        """Number of characters in it before the seam."""
        self.doubts_engine = self._text.is_inside_character
        """True if the engine may stop the completion at a stop string of its prompt."""
        self._num_tokens = 0

    @property
    def is_over(self) -> bool:
        """Return True if the engine finds every stop string that can still occur, and no other."""
        return len(self._held) - self._seam >= max(self._longest - 1, int(self.doubts_engine))

    def end_in(self, tokens: Iterable[int]) -> tuple[int, str] | None:
        """Search the next tokens after the seam. Return the number of tokens up to the one that completes a stop
        string, and the string; None: none is complete yet."""
        for token in tokens:
            if self.is_over:
                return None
            self._num_tokens += 1
            looked_at = len(self._held)
            self._held += self._text.add((token,))
            found = self._first_ended(looked_at)
            if found is not None and self._num_tokens > self._least:
                return self._num_tokens, found
        return None

    def refutes(self, completion: Completion, seam: int) -> bool:
        """Return True if ``completion``, whose tokens were all searched, was ended at a stop string of its prompt."""
        ended_by_string = completion.finish_reason == "stop" and isinstance(completion.stop_reason, str)
        return ended_by_string and self.doubts_engine and self._num_tokens == len(completion.token_ids) - seam

    def _first_ended(self, looked_at: int) -> str | None:
        """Return the stop string that ends first after ``looked_at`` characters; None if the engine finds it."""
        found = [(self._held.find(stop, max(0, looked_at - len(stop) + 1)), stop) for stop in self._stops]
        ended = [(start + len(stop), order, start, stop) for order, (start, stop) in enumerate(found) if start >= 0]
        if not self.doubts_engine and all(start >= self._seam for _, _, start, _ in ended):
            return None
        return min(ended)[3] if ended else None


def cut_at_stop(call: GenerateCall, completion: Completion, count: int, stop: str) -> Completion:
    """Return a completion that ends at the stop string which its token ``count`` completes."""
    experts = completion.routed_experts
    if experts is not None:
        experts = experts.until(len(call.prompt_token_ids) + count - 1)
    ended = {"finish_reason": "stop", "stop_reason": stop, "routed_experts": experts}
    return slice_completion(completion, 0, count).model_copy(update=ended)


def _concatenate(pieces: list[tuple[_T, ...] | None]) -> tuple[_T, ...] | None:
    """Concatenate lists; None if an engine returned none. A completion that was aborted before its first token has
    none."""
    return None if not pieces or None in pieces else tuple(each for piece in pieces for each in piece or ())
