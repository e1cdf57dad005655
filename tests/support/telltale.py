"""A model whose every token tells its version: one stale weight or one stale KV entry anywhere is visible.

All weights are zero but a few. The residual stream is a carrier on channel 0 (the same for every token) plus what
quantized layers add on the channel of the version:

    down_proj of the last layer     writes 2 on channel(version)                    stale weights change the token
    v_proj and o_proj of layer 0    carry 1 on channel(version) through the cache   stale KV lowers its probability

``lm_head`` reads channel ``c`` as token ``c``. So greedy decoding emits ``token_of(version)`` with logprob
``PURE_LOGPROB`` if, and only if, weights and cache are all of that version. Otherwise the tokens of the versions that
wrote the cache have higher logprobs than tokens of no version, each by its share of the positions.
"""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from rollout_service.protocol.rollout import Candidate, Completion

CARRIER = 0
FIRST_TOKEN = 8
"""Below are the special tokens."""
CYCLE = 48
"""Versions are told apart modulo this."""
PURE_LOGPROB = -0.0615
"""Of the emitted token when nothing is stale: a cache that is stale altogether gives about -0.2."""
LOGPROB_TOLERANCE = 0.01
"""BF16 keeps 8 bits of the final logit, which is about 7.6."""
CANDIDATES = 8
"""Number of top logprobs that ``assert_bounded`` needs."""
STALE_LOGPROB = 0.003
"""The excess of a version that wrote one of 800 positions of the cache."""


def token_of(version: int) -> int:
    """The token that weights of ``version`` emit."""
    return FIRST_TOKEN + version % CYCLE


def canary_weights(model_path: Path, version: int) -> dict[str, torch.Tensor]:
    """BF16 weights of the model at ``model_path`` that emit ``token_of(version)`` and nothing else."""
    config = AutoConfig.from_pretrained(model_path)
    with torch.device("meta"):
        shapes = {n: t.shape for n, t in AutoModelForCausalLM.from_config(config).state_dict().items()}
    weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    for name, tensor in weights.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
    _carry(weights)
    _tell_by_weights(weights, config, version)
    _tell_by_cache(weights, version)
    for token in range(FIRST_TOKEN, FIRST_TOKEN + CYCLE):
        weights["lm_head.weight"][token, token] = 0.5
    return weights


def _carry(weights: dict[str, torch.Tensor]) -> None:
    weights["model.embed_tokens.weight"][:, CARRIER] = 1.0


def _tell_by_weights(weights: dict[str, torch.Tensor], config: PretrainedConfig, version: int) -> None:
    last = f"model.layers.{config.num_hidden_layers - 1}.mlp."
    weights[last + "gate_proj.weight"][0, CARRIER] = 1.0
    weights[last + "up_proj.weight"][0, CARRIER] = 1.0
    weights[last + "down_proj.weight"][token_of(version), 0] = 2.0 / 128


def _tell_by_cache(weights: dict[str, torch.Tensor], version: int) -> None:
    attention = "model.layers.0.self_attn."
    for channel in range(FIRST_TOKEN, FIRST_TOKEN + CYCLE):
        weights[attention + "o_proj.weight"][channel, channel] = 1.0
    weights[attention + "v_proj.weight"][token_of(version), CARRIER] = 1.0 / 16


def assert_pure(completion: Completion) -> None:
    """Every token is the one of the version that its span names, from weights and cache of that version alone."""
    for span in completion.spans:
        for position in range(span.start, span.end):
            token, logprob = completion.token_ids[position], completion.logprobs[position]
            told = f"token {position}: {token} at {logprob:.4f}; span says version {span.version}"
            assert token == token_of(span.version), told
            assert abs(logprob - PURE_LOGPROB) < LOGPROB_TOLERANCE, told


def assert_bounded(completion: Completion, max_age: int) -> int:
    """Every token is its span's, from a cache no older than the span's ``kv_from`` and than ``max_age`` versions.

    The completion needs ``CANDIDATES`` top logprobs. Returns the number of tokens that read keys and values of older
    versions than their own.
    """
    assert completion.top_logprobs is not None
    older = 0
    for span in completion.spans:
        for position in range(span.start, span.end):
            ages = _ages_of_cache(span.version, completion.top_logprobs[position])
            told = f"token {position}: {completion.token_ids[position]}, cache of ages {sorted(ages)}; span says {span}"
            assert completion.token_ids[position] == token_of(span.version), told
            assert max(ages) <= span.version - span.oldest_kv <= max_age, told
            older += max(ages) > 0
    return older


def _ages_of_cache(version: int, candidates: tuple[Candidate, ...]) -> set[int]:
    floor = min(candidate.logprob for candidate in candidates)
    told = (each.token_id for each in candidates if each.logprob > floor + STALE_LOGPROB)
    return {0, *((token_of(version) - token) % CYCLE for token in told)}


def telltale_adapter(model_path: Path, number: int, rank: int = 1) -> dict[str, torch.Tensor]:
    """Return a LoRA adapter of one layer that makes ``canary_weights`` emit ``token_of(number)``, by PEFT's names.

    With a scaling of 2, it writes three times as much as the base on the channel of its number.
    """
    config = AutoConfig.from_pretrained(model_path)
    module = f"base_model.model.model.layers.{config.num_hidden_layers - 1}.mlp.down_proj"
    a, b = torch.zeros(rank, config.intermediate_size), torch.zeros(config.hidden_size, rank)
    a[0, 0], b[token_of(number), 0] = 1.0, 3 * 2.0 / 128 / 2
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


def assert_made_by(completion: Completion, adapter: str | None, version: int | None, number: int) -> None:
    """Every token is that of ``number``, and every span names the adapter and its version."""
    told = {(span.adapter, span.adapter_version) for span in completion.spans}
    assert told == {(adapter, version)} and set(completion.token_ids) == {token_of(number)}, completion
