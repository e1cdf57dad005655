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
"""Maximum number of tokens without a complete character with which each new token is decoded."""


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
        self._before = self._text(self._ids[: self._known])
        self._unfinished_prompt = self._text(self._ids) if len(self._ids) > self._known else None
        """The text of a prompt that ends inside a character, until that character is complete."""

    @property
    def is_inside_character(self) -> bool:
        """Return True if the tokens so far end inside a character."""
        return self._known < len(self._ids) and self._text(self._ids).endswith(INCOMPLETE)

    @property
    def has_context(self) -> bool:
        """Return True if the next token follows complete characters, so that its text does not depend on them."""
        return bool(self._before) and self._known == len(self._ids)

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the new text of the next tokens. It does not depend on how many are added at once."""
        if not token_ids:
            return ""
        num_pending, is_one = len(self._ids) - self._known, len(token_ids) == 1
        text = self._text([*self._recent(), *token_ids]) if is_one or not num_pending else INCOMPLETE
        if not is_one and (not text.startswith(self._before) or INCOMPLETE in text[len(self._before) :]):
            # with byte fallback, an invalid byte makes the bytes beside it invalid: add it alone, as vLLM does
            middle = len(token_ids) // 2
            return self.add(token_ids[:middle]) + self.add(token_ids[middle:])
        self._ids += token_ids
        if num_pending > _MAX_PENDING and not text.endswith(INCOMPLETE):
            text = self._text(self._ids)
        return "" if text.endswith(INCOMPLETE) else self._advance(text)

    def text_of_next(self, token_id: int) -> str:
        """Return the text of a possible next token; empty if it ends inside a character."""
        text = self._text([*self._ids[: self._known], token_id])
        if not text.endswith(INCOMPLETE):
            return text[len(self._before) :]
        text = self._text([*self._recent(), token_id])
        return "" if text.endswith(INCOMPLETE) else self._new_in(text)

    def _advance(self, text: str) -> str:
        """Return the new part of ``text``, the text of all tokens; the next text begins there."""
        if self._unfinished_prompt is None and not text.startswith(self._before):
            # invalid bytes made a character before them invalid, too: like vLLM, drop them and begin anew
            self._ids, self._known, self._before = self._ids[-1:], 0, ""
            text = self._text(self._ids)
        new = self._new_in(text)
        if not new:  # special tokens that are left out: the context stays before them
            if len(self._ids) - self._known >= _MAX_PENDING:
                del self._ids[self._known :]
            return ""
        self._unfinished_prompt = None
        if len(self._ids) > 2 * _CONTEXT:
            begin, _ = self._context_in(self._ids)
            del self._ids[:begin]
            text = self._text(self._ids)
        self._known, self._before = len(self._ids), text
        return new

    def _new_in(self, text: str) -> str:
        # a prompt may end with bytes that no token completes, which are not part of the completion
        if self._unfinished_prompt is not None and text.startswith(self._unfinished_prompt):
            return text[len(self._unfinished_prompt) :]
        return text[len(self._before) :]

    def _recent(self) -> list[int]:
        """Return the context and the last pending tokens. If their text ends inside a character, that of all does."""
        return self._ids[: self._known] + self._ids[self._known :][-_MAX_PENDING:]

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._decode(token_ids, self._skip_special)

    def _context_in(self, ids: Sequence[int]) -> tuple[int, int]:
        """Return begin and end of the context for decoding the next tokens: complete characters, and not empty."""
        for end in range(len(ids), max(-1, len(ids) - _CHARACTER), -1):
            for size in (*range(_CONTEXT, _CONTEXT + _CHARACTER), 8 * _CONTEXT, 64 * _CONTEXT):
                begin = max(0, end - size)
                text = self._text(ids[begin:end])
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
