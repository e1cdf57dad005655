"""The models whose keys no FP8 cache takes as they are: other keys, and the same function."""

import pytest
import torch

from rollout_service.kv_scales.observer import observe_qkv
from tests.support.key_channels import LOUD, with_key_factors
from tests.unit.kv_scales.small import small_model, tokens


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_keys_grow_by_the_factor_and_no_bit_of_a_logit_changes(family):
    model, logits, keys = small_model(family), [], []
    for factor in (1.0, LOUD):
        model.load_state_dict(with_key_factors(model.state_dict(), torch.full((64,), factor)))
        with torch.no_grad(), observe_qkv(model) as observation:
            logits.append(model(tokens(0)).logits)
        keys.append(observation.amax()["model.layers.1.self_attn"][0, 1])
    assert torch.equal(*logits) and keys[1] == LOUD * keys[0]
