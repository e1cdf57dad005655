"""The text of completions while they are made, and the names of their tokens."""

from collections.abc import Sequence
from typing import Any

from rollout_service.fleet.detokenizer import Detokenizer, TokenStrings, decoder_of
from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling import Sampling


def token_strings(prompt: Sequence[int], tokenizer: Any) -> TokenStrings:
    """Return the names of the tokens that follow ``prompt``."""
    return TokenStrings(decoder_of(tokenizer), prompt)


class TextStream:
    """The text of one completion, piece by piece, as vLLM makes it: what its tokens add to the text of the prompt.

    It ends before the stop string or stop token that ended the completion, or with it. vLLM looks for stop strings from
    the last place at which one can begin that ends in the newest token.
    """

    def __init__(self, prompt: Sequence[int], sampling: Sampling, tokenizer: Any, partial: Sequence[int] = ()) -> None:
        """``tokenizer``: None if the model has none; there is no text then.

        ``partial``: tokens before the first piece, whose text comes with it.
        """
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(decoder_of(tokenizer), prompt, sampling.skip_special_tokens)
        self._keeps_stop = sampling.include_stop_str_in_output
        self._longest_stop = max(map(len, sampling.stop), default=1)
        self._tail = "" if self._detokenizer is None else self._detokenizer.add(partial)
        """The end of the text, in which a stop string may begin."""
        self._returned = 0
        """Characters of the tail that were returned."""
        self._before_last = len(self._tail)
        """Characters of the tail before the newest token."""

    def add(self, made: Completion, is_last: bool) -> str:
        """Return the text that is new with the next tokens, but for the beginning of what may be a stop string.

        ``made``: these tokens alone.
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
