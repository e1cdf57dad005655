"""Penalties of what goes on are those of vLLM, had it made all of the completion's tokens itself.

vLLM's own arithmetic is the reference. Its V1 model runner is tested with an engine, too
(``tests/engine/test_engine.py``), and V2, which needs a GPU, in ``tests/gpu/test_partial_penalties.py``.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.sample.ops.penalties import apply_all_penalties
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState

from rollout_service.engine.adapter import vllm_sampling
from rollout_service.engine.partial_penalties import PartialPenalties
from rollout_service.protocol.sampling import Sampling

VOCABULARY = 50
CONFIG: Any = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY))
PROMPT, MADE, NEW = [1, 2, 3], [3, 4, 4, 5], [4, 6, 6]
ALL_THREE = Sampling(presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.7)
OTHERS = Sampling(presence_penalty=-0.4)


def params(sampling: Sampling, partial_tokens: int = len(MADE)) -> SamplingParams:
    return vllm_sampling(sampling, len(PROMPT) + len(MADE), partial_tokens)


def reference(logits: torch.Tensor, sampling: Sampling, output: list[int]) -> torch.Tensor:
    """What vLLM makes of a row if the completion was not cut."""

    def one(value: float) -> torch.Tensor:
        return torch.tensor([value])

    return apply_all_penalties(
        logits.clone().unsqueeze(0),
        torch.tensor([PROMPT]),
        one(sampling.presence_penalty),
        one(sampling.frequency_penalty),
        one(sampling.repetition_penalty),
        [output],
    )[0]


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(0))


def test_only_requests_that_go_on_with_such_penalties_are_ours():
    assert params(ALL_THREE, 0).extra_args is None and params(ALL_THREE, 0).repetition_penalty == 1.7
    assert params(Sampling(repetition_penalty=1.7)).extra_args is None  # counts the prompt, and is right by itself
    ours = params(ALL_THREE)
    assert ours.extra_args is not None
    assert (ours.presence_penalty, ours.frequency_penalty, ours.repetition_penalty) == (0.0, 0.0, 1.0)


class TestModelRunnerV1:
    def test_rows_are_penalized_as_they_grow_and_move(self, logits):
        processor, output = PartialPenalties(CONFIG, torch.device("cpu"), False), list[int]()
        other = [6]
        added = [
            (0, params(ALL_THREE), PROMPT + MADE, output),
            (1, SamplingParams(), PROMPT, []),
            (2, params(OTHERS), PROMPT + MADE, other),
        ]
        processor.update_state(BatchUpdate(batch_size=3, removed=[], added=added, moved=[]))
        assert not processor.is_argmax_invariant()
        for token in (*NEW, None):
            made = processor.apply(logits.clone())
            assert torch.equal(made[0], reference(logits[0], ALL_THREE, MADE + output))
            assert torch.equal(made[1], logits[1]) and torch.equal(made[3], logits[3])
            assert torch.equal(made[2], reference(logits[2], OTHERS, MADE + other))
            if token is not None:
                output.append(token)
                processor.update_state(None)
        output.append(-1)  # a token that was sampled, and whose number is still on its way
        assert torch.equal(processor.apply(logits.clone())[0], reference(logits[0], ALL_THREE, MADE + NEW))
        output[-1] = 7
        swap = (0, 2, MoveDirectionality.SWAP)
        processor.update_state(BatchUpdate(batch_size=3, removed=[], added=[], moved=[swap]))
        made = processor.apply(logits.clone())
        assert torch.equal(made[2], reference(logits[2], ALL_THREE, MADE + NEW + [7]))
        assert torch.equal(made[0], reference(logits[0], OTHERS, MADE + other))
        one_way = (2, 1, MoveDirectionality.UNIDIRECTIONAL)
        processor.update_state(BatchUpdate(batch_size=2, removed=[0], added=[], moved=[one_way]))
        made = processor.apply(logits.clone())
        assert torch.equal(made[1], reference(logits[1], ALL_THREE, MADE + NEW + [7]))
        assert torch.equal(made[0], logits[0]) and torch.equal(made[2], logits[2])


class TestModelRunnerV2:
    def test_rows_of_slots_are_penalized_by_the_tokens_up_to_their_position(self, logits):
        tokens = torch.full((8, 32), 2**31 - 1, dtype=torch.int32)  # what nobody wrote is no token
        sequence = PROMPT + MADE + NEW
        tokens[5, : len(sequence)] = tokens[2, : len(sequence)] = torch.tensor(sequence, dtype=torch.int32)
        states = LogitsProcRequestState(
            device=torch.device("cpu"),
            max_num_reqs=8,
            vocab_size=VOCABULARY,
            all_token_ids=SimpleNamespace(gpu=tokens),
            prompt_len=SimpleNamespace(gpu=torch.full((8,), len(PROMPT + MADE), dtype=torch.int32)),
            prefill_len=SimpleNamespace(gpu=None),
            total_len=SimpleNamespace(gpu=None),
        )
        processor = PartialPenalties(CONFIG, states)
        assert processor.add_request(5, params(ALL_THREE)) and processor.add_request(2, params(OTHERS))
        assert not processor.add_request(3, SamplingParams())
        slots, lengths = [3, 5, 2], [4, len(sequence), len(sequence) - 2]
        made = processor.apply(logits[:3].clone(), context(slots, lengths))
        assert torch.equal(made[0], logits[0])
        assert torch.allclose(made[1], reference(logits[1], ALL_THREE, MADE + NEW))
        assert torch.allclose(made[2], reference(logits[2], OTHERS, MADE + NEW[:1]))
        assert not processor.add_request(5, SamplingParams())  # another request has the slot now
        assert torch.equal(processor.apply(logits[:1].clone(), context([5], [4])), logits[:1])


def context(slots: list[int], lengths: list[int]) -> LogitsContext:
    """Of a step without speculation."""
    mapping = torch.tensor(slots, dtype=torch.int32)
    return LogitsContext(
        expanded_idx_mapping=mapping,
        idx_mapping=mapping,
        idx_mapping_np=np.array(slots, dtype=np.int32),
        expanded_local_pos=torch.zeros_like(mapping),
        input_ids=torch.zeros_like(mapping),
        pos=torch.tensor(lengths) - 1,
        seq_lens_upper_bound_np=np.array(lengths, dtype=np.int32),
    )
