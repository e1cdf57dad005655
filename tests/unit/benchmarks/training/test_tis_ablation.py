"""The configurations of the ablation's services, and a training step."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.common.gpu_service import laid_over
from benchmarks.common.paths import CPU_DEPLOYMENT
from benchmarks.trainers import pretraining
from benchmarks.training.tasks import GPU_DEPLOYMENT, Addition, Digits
from benchmarks.training.tis_ablation import SERVICES
from examples import grpo
from examples.as_engine import InBf16
from rollout_service.local import load_config
from rollout_service.protocol.rollout import Completion, Rollout, Span

DIGITS = Digits(Path("unused"), CPU_DEPLOYMENT)
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}<|im_end|>"


@pytest.fixture(scope="module")
def addition(tmp_path_factory: pytest.TempPathFactory) -> Addition:
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretraining, "_qwen3_template", lambda: TEMPLATE)
        tokenizer = pretraining.make_tokenizer()
    tokenizer.save_pretrained(folder)
    pretraining.make_model("tiny-moe", tokenizer).save_pretrained(folder)
    (folder / "pretraining.json").write_text(json.dumps({"numbers": [7, 12]}))
    return Addition(folder, prompts=2, completions=2)


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("deployment", [CPU_DEPLOYMENT, GPU_DEPLOYMENT])
def test_each_service_is_a_configuration(service, deployment, addition):
    config = load_config(deployment, laid_over(addition.sections, SERVICES[service]))
    assert config.model.path == addition.folder and config.scaling.max_replicas == 1
    assert (config.quant.weights == "none") == (service == "bf16")
    assert (config.kv_cache.dtype == "bfloat16") == (service in ("bf16", "fp8_linear"))
    digits = load_config(deployment, laid_over(DIGITS.sections, SERVICES[service]))
    assert digits.kv_cache.scales_policy == "unit"


def test_a_step_trains_a_mixture_with_prompts_of_any_length(addition):
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(addition.folder)
    model = addition.start(addition.folder, seed=0)

    def rollout(prompt: int, lengths: list[int]) -> Rollout:
        made = [
            Completion(
                index=index,
                token_ids=tuple(range(50, 50 + n)),
                logprobs=(-7.0,) * n,
                finish_reason="length" if n == 5 else "stop",
                spans=(Span(version=1, start=0, end=n, replica_id="r"),),
                text=str(index),
            )
            for index, n in enumerate(lengths)
        ]
        return Rollout(
            request_id="a", replica_id="r", prompt_token_ids=tuple(range(20, 20 + prompt)), completions=tuple(made)
        )

    task = replace(addition.task, reward=lambda prompt, text: float(text))
    batch = grpo.make_batch(task, ["", ""], [rollout(3, [5, 2]), rollout(6, [4, 4])], tokenizer)
    assert batch.mask.sum(1).tolist() == [5, 2, 4, 4] and batch.tokens.shape == (4, 10)
    assert batch.cut_off == 0.25
    assert batch.tokens[:, -7:][batch.mask].tolist() == [*range(50, 55), *range(50, 52), *range(50, 54), *range(50, 54)]
    with torch.no_grad():
        alone = InBf16(model).logits(batch.tokens[2:3], 10)[0].log_softmax(-1)  # tokens 6 to 9 are the completion
    with addition.policy(model) as policy:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        before = model.lm_head.weight.clone()
        logprobs, metrics = grpo.optimize(model, optimizer, batch, grpo.TIS, policy)
    expected = [alone[position - 1, batch.tokens[2, position]].item() for position in range(6, 10)]
    assert grpo.of_completions(logprobs, batch)[2].tolist() == pytest.approx(expected, abs=0.02)
    assert metrics["grad_norm"] > 0 and not torch.equal(before, model.lm_head.weight)
    experts = model.model.layers[0].mlp.experts.gate_up_proj
    assert experts.grad is not None and experts.grad.abs().sum() > 0
