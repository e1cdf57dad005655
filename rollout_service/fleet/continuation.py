"""How a completion that was cut short goes on elsewhere, and how its pieces become one."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import xxhash

from rollout_service.protocol.rollout import Completion, Rollout, Span
from rollout_service.protocol.routed_experts import RoutedExperts
from rollout_service.protocol.sampling import LARGEST_SEED, GenerateCall, Sampling
from rollout_service.protocol.sampling_mask import repacked

_T = TypeVar("_T")
Decode = Callable[[Sequence[int], bool], str]
"""Text of token ids; whether special tokens are left out of it."""
_WINDOW = 4096
"""Tokens before a seam in which a stop string may begin: the longest has 1024 characters."""


def remainder(call: GenerateCall, partial: Completion, attempt: int) -> GenerateCall:
    """The request for the tokens that ``partial``, one of the call's completions, still lacks.

    Experts are asked for from the last token on, which no engine has read; from where the call wants them, if
    ``partial`` came without any.
    """
    done = len(partial.token_ids)
    sampling = call.sampling
    changes: dict[str, object] = {"n": 1, "min_tokens": max(0, sampling.min_tokens - done)}
    if partial.prompt_logprobs is not None:  # of what a lost replica told there are none
        changes["prompt_logprobs"] = None
    if sampling.max_tokens is not None:
        changes["max_tokens"] = sampling.max_tokens - done
    if sampling.seed is not None:
        changes["seed"] = _seed(sampling.seed, partial.index, done)
    if sampling.routed_experts_prompt_start is not None and partial.routed_experts is not None:
        changes["routed_experts_prompt_start"] = len(call.prompt_token_ids) + done - 1
    return call.model_copy(
        update={
            "request_id": f"{call.request_id}-{partial.index}-{attempt}",
            "prompt_token_ids": call.prompt_token_ids + partial.token_ids,
            "sampling": sampling.model_copy(update=changes),
        }
    )


def named(rollout: Rollout) -> Rollout:
    """With the replica in each span, as the completions may be joined with what other replicas make."""
    completions = tuple(
        c.model_copy(update={"spans": tuple(s.model_copy(update={"replica_id": rollout.replica_id}) for s in c.spans)})
        for c in rollout.completions
    )
    return rollout.model_copy(update={"completions": completions})


def goes_on(sampling: Sampling) -> bool:
    """Whether a completion that is cut short can go on from its tokens.

    Not where sampling looks back at the completion's own tokens and would not see those that have become part of a
    prompt: presence and frequency penalties, and how far into a JSON object it is. Such a completion starts anew.
    """
    penalized = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    return not penalized and sampling.structured_outputs is None


def kept(partial: Completion, sampling: Sampling) -> Completion:
    """The part of ``partial`` that can be continued: all of it, or nothing."""
    nothing: dict[str, tuple[()] | None] = {"token_ids": (), "logprobs": (), "spans": ()}
    nothing |= dict.fromkeys(("top_logprobs", "packed_sampling_mask", "routed_experts"))
    return partial if goes_on(sampling) else partial.model_copy(update=nothing)


def joined(call: GenerateCall, partial: Completion, rest: Completion) -> Completion:
    """One completion of a partial one of the call's and what was made after it; it ends as ``rest`` ended."""
    done = len(partial.token_ids)
    of_the_prompt = partial.prompt_logprobs
    if of_the_prompt is None and rest.prompt_logprobs is not None:  # its prompt had the first tokens in it
        of_the_prompt = rest.prompt_logprobs[: len(rest.prompt_logprobs) - done]
    return Completion(
        index=partial.index,
        token_ids=partial.token_ids + rest.token_ids,
        logprobs=partial.logprobs + rest.logprobs,
        finish_reason=rest.finish_reason,
        stop_reason=rest.stop_reason,
        spans=_joined_spans(partial.spans, tuple(_moved(span, done) for span in rest.spans)),
        top_logprobs=_joined([piece.top_logprobs for piece in (partial, rest) if piece.token_ids]),
        prompt_logprobs=of_the_prompt,
        packed_sampling_mask=_joined([piece.packed_sampling_mask for piece in (partial, rest) if piece.token_ids]),
        routed_experts=_joined_experts(partial, rest, len(call.prompt_token_ids)),
    )


def _joined_experts(partial: Completion, rest: Completion, prompt_tokens: int) -> RoutedExperts | None:
    """Those of both. Tokens that ``partial`` made without telling its experts are missing: what the rest's engine chose
    for them is not what they were sampled with. Only the last of them was read there first."""
    first, second = partial.routed_experts, rest.routed_experts
    if first is None and second is not None:
        return second.without(prompt_tokens, prompt_tokens + len(partial.token_ids) - 1)
    return first if second is None or first is None else first.followed_by(second)


def part(completion: Completion, start: int, end: int) -> Completion:
    """Its tokens ``[start, end)``, with spans that count from the first of them, and without routed experts."""
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
            "packed_sampling_mask": None if mask is None else repacked(mask, start, end),
            "routed_experts": None,
        }
    )


def ended_at_stop(call: GenerateCall, completion: Completion, seam: int, decode: Decode) -> Completion:
    """A completion of the call's, ended at the first stop string that begins before token ``seam`` and ends after it.

    The engine that made what comes after the seam had the rest in its prompt, where it does not look for stop strings.
    As in vLLM, a stop string that is complete before ``min_tokens`` tokens ends nothing.
    """
    tokens, begin, sampling = completion.token_ids, max(0, seam - _WINDOW), call.sampling
    longest = max(map(len, sampling.stop), default=0)
    before = previous = decode(tokens[begin:seam], sampling.skip_special_tokens)
    for at in range(seam, len(tokens)):
        text = decode(tokens[begin : at + 1], sampling.skip_special_tokens)
        found = _first_ended(text, len(previous), len(before), sampling.stop)
        if found is not None and at >= sampling.min_tokens:
            experts = completion.routed_experts
            if experts is not None:
                experts = experts.until(len(call.prompt_token_ids) + at)
            ended = {"finish_reason": "stop", "stop_reason": found, "routed_experts": experts}
            return part(completion, 0, at + 1).model_copy(update=ended)
        if len(text) - len(before) >= longest:
            break
        previous = text
    return completion


def _first_ended(text: str, looked_at: int, seam: int, stops: tuple[str, ...]) -> str | None:
    """The stop string that ends first after ``looked_at`` characters, of those that begin before ``seam``."""
    found = [(text.find(stop, max(0, looked_at - len(stop) + 1)), stop) for stop in stops]
    ended = [(start + len(stop), order, stop) for order, (start, stop) in enumerate(found) if 0 <= start < seam]
    return min(ended)[2] if ended else None


def _joined(pieces: list[tuple[_T, ...] | None]) -> tuple[_T, ...] | None:
    """None where an engine returns none; a completion cut off before its first token has none either."""
    return None if not pieces or None in pieces else tuple(each for piece in pieces for each in piece or ())


def _moved(span: Span, by: int) -> Span:
    return span.model_copy(update={"start": span.start + by, "end": span.end + by})


def _joined_spans(first: tuple[Span, ...], second: tuple[Span, ...]) -> tuple[Span, ...]:
    seam = (*first[-1:], *second[:1])
    if len(seam) == 2 and (seam[0].version, seam[0].replica_id) == (seam[1].version, seam[1].replica_id):
        return (*first[:-1], seam[0].model_copy(update={"end": seam[1].end}), *second[1:])
    return first + second


def _seed(seed: int, index: int, done: int) -> int:
    """Another stream of random numbers for the rest: the same one again would repeat the draws of the first tokens.

    Completion ``index`` starts with ``seed + index``, as in vLLM.
    """
    if done == 0:
        return seed + index
    return xxhash.xxh3_64_intdigest(f"{seed} {index} {done}".encode()) % LARGEST_SEED
