"""Incremental text of running completions, and the text of single tokens."""

from collections.abc import Sequence
from typing import Any

from rollout_service.fleet.detokenizer import Detokenizer, TokenStrings, decoder_of
from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling import Sampling


def token_strings(prompt: Sequence[int], tokenizer: Any) -> TokenStrings:
    """Return the strings of the tokens that follow ``prompt``."""
    return TokenStrings(decoder_of(tokenizer), prompt)


class TextStream:
    """The text of one completion, piece by piece, as in vLLM: the text that its tokens add to the prompt's text.

    The text ends before the stop string or stop token, or after it if the request keeps it. Like vLLM, it searches only
    for stop strings that end in the newest token.
    """

    def __init__(self, prompt: Sequence[int], sampling: Sampling, tokenizer: Any, partial: Sequence[int] = ()) -> None:
        """Create the stream.

        Args:
            prompt, sampling: the request.
            tokenizer: None if the model has none; the text is then empty.
            partial: tokens before the first piece. The first piece includes their text.
        """
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(decoder_of(tokenizer), prompt, sampling.skip_special_tokens)
        self._keeps_stop = sampling.include_stop_str_in_output
        self._longest_stop = max(map(len, sampling.stop), default=1)
        self._tail = "" if self._detokenizer is None else self._detokenizer.add(partial)
        """The end of the text, in which a stop string may begin."""
        self._returned = 0
        """Number of characters of the tail that were returned."""
        self._before_last = len(self._tail)
        """Number of characters of the tail before the newest token."""

    def add(self, made: Completion, is_last: bool) -> str:
        """Return the new text of the next tokens. Holds back characters that may begin a stop string.

        ``made``: the completion with only these tokens.
        """
        if self._detokenizer is None:
            return ""
        tokens, stop = made.token_ids, made.stop_reason
        is_stopped = is_last and made.finish_reason == "stop"
        if is_stopped and not isinstance(stop, str) and not self._keeps_stop:
            tokens = tokens[:-1]
        if tokens:
            self._tail += self._detokenizer.add(tokens[:-1])
            self._before_last = len(self._tail)
            self._tail += self._detokenizer.add(tokens[-1:])
        end = len(self._tail)
        if is_stopped and isinstance(stop, str):
            found = self._tail.find(stop, max(0, self._before_last - len(stop) + 1))
            if found >= 0:
                end = found + len(stop) * self._keeps_stop
        elif not is_last and not self._keeps_stop:
            end -= self._longest_stop - 1
        text = self._tail[self._returned : max(0, end)]
        self._returned += len(text)
        done = max(0, min(self._returned, self._before_last - self._longest_stop))
        self._tail = self._tail[done:]
        self._returned -= done
        self._before_last -= done
        return text
