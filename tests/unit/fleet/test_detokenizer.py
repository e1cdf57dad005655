"""The text of a completion is what vLLM's own detokenizer makes of it."""

import random
from collections.abc import Sequence

import pytest
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from rollout_service.config.engine import EngineConfig
from rollout_service.fleet.continuation import continuation_call, merge_completions
from rollout_service.fleet.detokenizer import Detokenizer, TokenStrings, decoder_of
from rollout_service.fleet.dispatch import Dispatcher
from rollout_service.gateway.streams import TextStream
from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.sampling import GenerateCall, Sampling
from tests.support.tokenizers import TOKENIZERS, byte_level, in_python, sentence_piece
from tests.unit.fleet.completions import completion_of

TEXTS = [
    " Paris",
    "Paris",
    "    return x",
    "a  b\tEND",
    "é😀漢 done.",
    "\n\nUser: x",
    "\u200d👩‍👩‍👧 ok",
    "stop STOP",
    "🙂🙂",
]
PROMPTS = ["def f(x):\n", "User: say hi\n\nAssistant:", "", "漢", " "]


@pytest.fixture(params=list(TOKENIZERS), scope="module")
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]()


def vllm_detokenizer(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], sampling: Sampling
) -> IncrementalDetokenizer:
    """Return vLLM's, for one request."""
    params = SamplingParams(
        stop=list(sampling.stop),
        min_tokens=sampling.min_tokens,
        max_tokens=sampling.max_tokens,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    known = {"request_id": "r", "prompt_token_ids": list(prompt), "sampling_params": params}
    fields = {name: known.get(name) for name in EngineCoreRequest.__struct_fields__}
    return IncrementalDetokenizer.from_new_request(tokenizer, EngineCoreRequest(**fields | {"arrival_time": 0.0}))


def generate(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], tokens: Sequence[int], sampling: Sampling
) -> tuple[Completion, str]:
    """Return what an engine makes of ``tokens``, which are sampled one after the other, and vLLM's text of it."""
    detokenizer = vllm_detokenizer(tokenizer, prompt, sampling)
    for count, token in enumerate(tokens[: sampling.max_tokens], start=1):
        if (stop := detokenizer.update([token], False)) is not None:
            return completion_of(tokens[:count], end="stop", stop=stop), detokenizer.get_next_output_text(True, False)
    is_longest = sampling.max_tokens is not None and len(tokens) >= sampling.max_tokens
    completion = completion_of(tokens[: sampling.max_tokens], end="length" if is_longest else "abort")
    return completion, detokenizer.get_next_output_text(True, False)


def encode(tokenizer: PreTrainedTokenizerBase, text: str, after: str = "") -> list[int]:
    """Return the tokens that ``text`` adds to those of ``after``."""
    return tokenizer.encode(after + text, add_special_tokens=False)[
        len(tokenizer.encode(after, add_special_tokens=False)) :
    ]


def streamed(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], completion: Completion, sampling: Sampling, *cuts: int
) -> str:
    """Return the text of a completion that is read in pieces."""
    text, ends = TextStream(prompt, sampling, tokenizer), [*cuts, len(completion.token_ids)]
    pieces = [completion_of(completion.token_ids[a:b], end="abort") for a, b in zip([0, *cuts], ends, strict=True)]
    pieces[-1] = pieces[-1].model_copy(
        update={"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
    )
    return "".join(text.add(piece, piece is pieces[-1]) for piece in pieces)


class TestText:
    @pytest.mark.parametrize("prompt_text", PROMPTS, ids=repr)
    def test_whole_and_streamed_text_are_what_vllm_says(self, tokenizer, prompt_text):
        prompt = tokenizer.encode(prompt_text, add_special_tokens=False)
        for text in TEXTS:
            tokens = [*encode(tokenizer, text, after="x"), tokenizer.eos_token_id, *encode(tokenizer, " Paris", "x")]
            for skip in (True, False):
                sampling = Sampling(max_tokens=100, skip_special_tokens=skip)
                for length in (len(tokens), 3, 1, 0):  # some end inside a character
                    completion, wanted = generate(tokenizer, prompt, tokens[:length], sampling)
                    assert streamed(tokenizer, prompt, completion, sampling) == wanted
                    cuts = range(1, len(completion.token_ids))
                    assert streamed(tokenizer, prompt, completion, sampling, *cuts) == wanted

    def test_a_tokenizer_in_python_says_what_vllm_says(self, tmp_path):
        tokenizer = in_python(tmp_path)
        prompt, sampling = tokenizer.encode("Hello", add_special_tokens=False), Sampling(max_tokens=100, stop=(" .",))
        tokens = [len(tokenizer) + 3, *encode(tokenizer, " Paris , stop .", after="Hello")]  # the first one is padding
        completion, wanted = generate(tokenizer, prompt, tokens, sampling)
        assert wanted == " Paris , stop" and completion.finish_reason == "stop"
        assert streamed(tokenizer, prompt, completion, sampling) == wanted
        assert streamed(tokenizer, prompt, completion, sampling, *range(1, len(tokens))) == wanted

    @pytest.mark.parametrize("include", [False, True])
    def test_stop_strings_cut_text_where_vllm_cuts_it(self, tokenizer, include):
        prompt = tokenizer.encode("q:", add_special_tokens=False)
        for text, stop in [("a Paris b", " Paris"), ("é😀漢 done.", "😀"), ("a  b\tEND", "b\tE"), (" Paris", " P")]:
            tokens = encode(tokenizer, text, after="q:")
            sampling = Sampling(stop=(stop,), max_tokens=100, include_stop_str_in_output=include)
            completion, wanted = generate(tokenizer, prompt, tokens, sampling)
            assert completion.finish_reason == "stop"
            cuts = range(1, len(completion.token_ids))
            assert streamed(tokenizer, prompt, completion, sampling) == wanted
            assert streamed(tokenizer, prompt, completion, sampling, *cuts) == wanted

    def test_a_character_that_the_prompt_began_is_whole(self, tokenizer):
        tokens = encode(tokenizer, "a😀 b", after="x")
        cut = next(i for i in range(1, len(tokens)) if tokenizer.decode(tokens[:i]).endswith("\ufffd"))
        assert streamed(tokenizer, tokens[:cut], completion_of(tokens[cut:], end="length"), Sampling()) == "😀 b"

    def test_invalid_bytes_have_vllm_s_text_however_cut(self, tokenizer):
        rnd, words = random.Random(3), [encode(tokenizer, text, "x") for text in ("é", "😀", "b", " P")]
        whole, half = words[0], words[1][:2]
        words += [[token] for token in (*whole, *half)]
        for case in range(300):
            chosen = rnd.sample(words, rnd.randint(1, 3))
            tokens = [token for _ in range(rnd.choice([4, 8, 40])) for token in rnd.choice(chosen)]
            tokens = [*whole, *tokens] if case % 2 else tokens
            prompt, sampling = tokenizer.encode("x", add_special_tokens=False), Sampling(max_tokens=200)
            completion, wanted = generate(tokenizer, prompt, tokens, sampling)
            every = range(1, len(tokens))
            some = sorted(rnd.sample(every, rnd.randint(0, len(every))))
            for cuts in ((), every, some):
                assert streamed(tokenizer, prompt, completion, sampling, *cuts) == wanted, (tokens, cuts)

    def test_bytes_that_are_no_text_cost_little_each(self):
        tokenizer, lengths = byte_level(), list[int]()
        decode = decoder_of(tokenizer)

        def counting(tokens: Sequence[int], skip: bool) -> str:
            lengths.append(len(tokens))
            return decode(tokens, skip)

        [half, *_] = tokenizer.encode("😀", add_special_tokens=False)
        for endless in (half, tokenizer.eos_token_id):
            lengths.clear()
            detokenizer = Detokenizer(counting, tokenizer.encode("x"))
            for _ in range(500):
                detokenizer.add([endless])
            assert max(lengths) < 100
            detokenizer.add([endless] * 5000)
            assert sum(lengths) < 100 * 5500


class TestTokenStrings:
    def test_strings_of_tokens_are_the_text(self, tokenizer):
        prompt = tokenizer.encode("q:", add_special_tokens=False)
        for text in TEXTS:
            tokens, names = encode(tokenizer, text, after="q:"), TokenStrings(decoder_of(tokenizer), prompt)
            strings = []
            for token in tokens:
                strings += names.of_next([token])
                names.add(token)
            assert "".join(strings) == text

    def test_a_byte_that_was_a_candidate_before_ends_its_character(self, tokenizer):
        names = TokenStrings(decoder_of(tokenizer), tokenizer.encode("q:", add_special_tokens=False))
        tokens = encode(tokenizer, "é", after="q:")
        names.of_next(tokens)
        strings = []
        for token in tokens:
            strings += names.of_next([token])
            names.add(token)
        assert "".join(strings) == "é"

    def test_a_candidate_keeps_its_space(self):
        tokenizer = sentence_piece()
        names = TokenStrings(decoder_of(tokenizer), tokenizer.encode("q:"))
        ids = tokenizer.convert_tokens_to_ids(["▁Paris", "Paris", "▁▁▁▁", "</s>", "<0xF0>"])
        assert names.of_next(ids) == [" Paris", "Paris", "    ", "</s>", ""]


class TestSeam:
    """Completions that are cut short anywhere, and go on in an engine that has their beginning in its prompt."""

    def _continued(
        self, tokenizer: PreTrainedTokenizerBase, call: GenerateCall, tokens: list[int], seams: list[int]
    ) -> Completion:
        """Return the completion after generations that end at the seams, or at what their detokenizer says."""
        dispatcher = Dispatcher(None, None, EngineConfig(), decoder_of(tokenizer))
        ends = [*seams, len(tokens)]
        completion = completion_of((), end="abort")
        while completion.finish_reason == "abort" and len(completion.token_ids) < len(tokens):
            done = len(completion.token_ids)
            end = next(end for end in ends if end > done)
            request = continuation_call(call, completion, 2) if done else call
            rest, _ = generate(tokenizer, request.prompt_token_ids, tokens[done:end], request.sampling)
            completion = dispatcher._end_at_stop_string(call, merge_completions(call, completion, rest), done)
        return completion

    def test_a_stop_string_of_the_prompt_ends_nothing(self, tokenizer):
        prompt = tokenizer.encode("User: say hi\n\nAssistant: ", add_special_tokens=False)
        tokens = encode(tokenizer, "well 😀 hello", after="User: say hi\n\nAssistant: ")
        sampling = Sampling(stop=("\n\n", "User:"), max_tokens=60)
        call = GenerateCall(request_id="r", prompt_token_ids=tuple(prompt), sampling=sampling)
        for seam in range(len(tokens)):
            assert self._continued(tokenizer, call, tokens, [seam]).token_ids == tuple(tokens), seam

    def test_completions_end_as_if_nothing_had_been_in_the_way(self, tokenizer):
        rnd, seen = random.Random(5), set[str]()
        for _ in range(60):
            text = "".join(rnd.choice(TEXTS) for _ in range(rnd.randint(1, 4)))
            tokens = encode(tokenizer, text, after="x")
            starts = [rnd.randrange(len(text)) for _ in range(rnd.randint(0, 2))]
            stops = ("q: ", *{text[at : at + rnd.randint(1, 6)] for at in starts})
            prompt = tuple(tokenizer.encode(rnd.choice(["q: ", "q: 漢", "q: x"]), add_special_tokens=False))
            length = len(tokens) + rnd.choice([0, 3])
            sampling = Sampling(stop=stops, max_tokens=length, min_tokens=rnd.choice([0, 0, min(4, length)]))
            call = GenerateCall(request_id="r", prompt_token_ids=prompt, sampling=sampling)
            seams = sorted(rnd.sample(range(len(tokens)), min(rnd.randint(1, 3), len(tokens))))
            wanted, text_wanted = generate(tokenizer, prompt, tokens, sampling)
            got = self._continued(tokenizer, call, tokens, seams)
            assert (got.token_ids, got.finish_reason, got.stop_reason) == (
                wanted.token_ids, wanted.finish_reason, wanted.stop_reason
            ), (text, stops, seams)  # fmt: skip
            assert streamed(tokenizer, prompt, got, sampling) == text_wanted
            seen.add(got.finish_reason)
        assert seen == {"stop", "length", "abort"}
