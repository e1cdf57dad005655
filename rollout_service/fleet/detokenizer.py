"""The text of a completion's tokens, computed like vLLM's incremental detokenizer."""

from collections.abc import Callable, Sequence
from typing import Any

Decode = Callable[[Sequence[int], bool], str]
"""Returns the text of token ids; the second argument leaves out special tokens."""
INCOMPLETE = "\ufffd"
"""The text of an incomplete character."""
_CONTEXT = 8
"""Number of previous tokens with which new ones are decoded."""
_CHARACTER = 4
"""Maximum number of tokens of one character."""
_MAX_PENDING = 32
"""Maximum number of tokens without a complete character. Only a broken model's output has more, and each new token
would be decoded with all of them."""


def decoder_of(tokenizer: Any) -> Decode:
    """Return the tokenizer's ``decode``, without transformers' changes to the text afterwards, as vLLM uses it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return lambda token_ids, skip: str(backend.decode(list(token_ids), skip_special_tokens=skip))
    size = len(tokenizer)

    def decode(token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        # models may sample ids beyond the vocabulary, which have no text; the tokenizers library leaves them out itself
        known = [token for token in token_ids if token < size]
        return str(tokenizer.decode(known, skip_special_tokens, clean_up_tokenization_spaces=False))

    return decode


class Detokenizer:
    """Turns the tokens of one completion into text, piece by piece.

    The text of a token depends on the tokens before it, including the prompt's: SentencePiece tokenizers drop a leading
    space. A token that ends inside a character has no text; the token that completes the character has all of it.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._decode, self._skip_special = decode, skip_special_tokens
        begin, end = self._context_in(prompt)
        self._ids = list(prompt[begin:])
        """Tokens with known text, followed by tokens of an incomplete character."""
        self._known = end - begin
        self._before = self._text(self._known)
        self._unfinished_prompt = self._text() if len(self._ids) > self._known else None
        """The text of a prompt that ends inside a character, until that character is complete."""

    @property
    def is_inside_character(self) -> bool:
        """Return True if the tokens so far end inside a character."""
        return self._known < len(self._ids) and self._text().endswith(INCOMPLETE)

    @property
    def has_context(self) -> bool:
        """Return True if the next token follows complete characters, so that its text does not depend on them."""
        return bool(self._before) and self._known == len(self._ids)

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the new text of the next tokens."""
        start = len(self._ids)
        self._ids += token_ids
        found = self._last_whole(_CHARACTER)
        if found is not None:
            return self._advance(*found)
        waiting = self._ids[start:]  # invalid bytes, or too few tokens for a character
        del self._ids[start:]
        made = []
        while waiting:
            room = max(1, _MAX_PENDING - (len(self._ids) - self._known))
            self._ids += waiting[:room]
            del waiting[:room]
            found = self._last_whole(_MAX_PENDING)
            if found is None and len(self._ids) - self._known >= _MAX_PENDING:
                found = len(self._ids), self._text()
            if found is not None:
                made.append(self._advance(*found))
        return "".join(made)

    def text_of_next(self, token_id: int) -> str:
        """Return the text of a possible next token; empty if it ends inside a character."""
        text = self._decode([*self._ids[: self._known], token_id], self._skip_special)
        if not text.endswith(INCOMPLETE):
            return text[len(self._before) :]
        text = self._decode([*self._ids, token_id], self._skip_special)
        return "" if text.endswith(INCOMPLETE) else self._new_in(text)

    def _last_whole(self, max_tokens: int) -> tuple[int, str] | None:
        """Return the end of the last complete character among the last ``max_tokens`` ends, and the text up to there.

        None if there is none after the known tokens.
        """
        for end in range(len(self._ids), max(self._known, len(self._ids) - max_tokens), -1):
            if not (text := self._text(end)).endswith(INCOMPLETE):
                return end, text
        return None

    def _advance(self, end: int, text: str) -> str:
        """Return the new part of ``text``, the text of the tokens up to ``end``; the next text begins there."""
        new = self._new_in(text)
        if not new:  # special tokens that are left out: the context stays before them
            if end - self._known >= _MAX_PENDING:
                del self._ids[self._known : end]
            return ""
        self._known, self._unfinished_prompt = end, None
        if end > 2 * _CONTEXT:
            begin, _ = self._context_in(self._ids[:end])
            del self._ids[:begin]
            self._known -= begin
            text = self._text(self._known)
        self._before = text
        return new

    def _new_in(self, text: str) -> str:
        # a prompt may end with bytes that no token completes, which are not part of the completion
        if self._unfinished_prompt is not None and text.startswith(self._unfinished_prompt):
            return text[len(self._unfinished_prompt) :]
        return text[len(self._before) :]

    def _text(self, end: int | None = None) -> str:
        return self._decode(self._ids[:end], self._skip_special)

    def _context_in(self, ids: Sequence[int]) -> tuple[int, int]:
        """Return begin and end of the context for decoding the next tokens: complete characters, and not empty."""
        for end in range(len(ids), max(-1, len(ids) - _CHARACTER), -1):
            for size in (*range(_CONTEXT, _CONTEXT + _CHARACTER), 8 * _CONTEXT, 64 * _CONTEXT):
                begin = max(0, end - size)
                text = self._decode(ids[begin:end], self._skip_special)
                is_whole = not text.startswith(INCOMPLETE) and not text.endswith(INCOMPLETE)
                if is_whole and (text or begin == 0):
                    return begin, end
                if text.endswith(INCOMPLETE) and not text.startswith(INCOMPLETE):
                    break
        return max(0, len(ids) - _CONTEXT), len(ids)


class TokenStrings:
    """Text of each token of one completion, and of alternative tokens at the same positions."""

    def __init__(self, decode: Decode, prompt: Sequence[int]) -> None:
        self._detokenizer = Detokenizer(decode, prompt, skip_special_tokens=False)
        self._known: dict[int, str] = {}
        """The text of tokens that have the same text after any other."""

    def of_next(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each possible next token."""
        return [self._of_next(token) for token in token_ids]

    def add(self, token_id: int) -> None:
        """Advance to the position after ``token_id``."""
        self._detokenizer.add((token_id,))

    def _of_next(self, token: int) -> str:
        if not self._detokenizer.has_context:  # the token may end a character that others have begun
            return self._detokenizer.text_of_next(token)
        if token not in self._known:
            self._known[token] = self._detokenizer.text_of_next(token)
        return self._known[token]
