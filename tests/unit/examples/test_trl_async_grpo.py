import importlib.util

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from typer import Typer
from typer.testing import CliRunner

from examples.trl_async_grpo import main, tokenizer_of
from examples.trl_on_a_cpu import flash_attn_varlen_func

app = Typer()
app.command()(main)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is not None, reason="TRL is installed here")
def test_without_trl_it_says_how_to_install_it(tmp_path):
    run = CliRunner().invoke(app, ["--out", str(tmp_path / "out")])
    assert run.exit_code == 2
    assert "make clients" in run.output
    assert not (tmp_path / "out").exists()


def test_its_tokenizer_renders_a_prompt_as_it_is(tiny_model):
    tokenizer = tokenizer_of(str(tiny_model))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "40917>"}], return_dict=False)
    assert prompt == tokenizer.encode("40917>")
    answer = tokenizer.encode("71904<eos>")
    assert tokenizer.parse_response(answer, prefix=prompt) == {"role": "assistant", "content": "71904"}


@pytest.mark.parametrize("window", [-1, 2])
def test_attention_of_segments_is_that_of_each_alone(window):
    """Two segments, the second of which continues keys that it does not ask for: the end of a branch of the tree."""
    torch.manual_seed(0)
    lengths_q, lengths_k = [4, 3], [4, 6]
    query = torch.randn(7, 4, 8)
    key, value = torch.randn(10, 2, 8), torch.randn(10, 2, 8)
    output = flash_attn_varlen_func(
        query, key, value, torch.tensor([0, 4, 7]), torch.tensor([0, 4, 10]), 4, 6,
        softmax_scale=0.3, causal=True, window_size=(window, 0 if window > 0 else -1),
    )  # fmt: skip
    start_q = start_k = 0
    for length_q, length_k in zip(lengths_q, lengths_k, strict=True):
        for i in range(length_q):
            last = length_k - length_q + i
            first = 0 if window < 0 else max(0, last - window)
            k, v = (
                x[start_k + first : start_k + last + 1].repeat_interleave(2, 1).transpose(0, 1) for x in (key, value)
            )
            alone = scaled_dot_product_attention(query[start_q + i, :, None], k, v, scale=0.3)[:, 0]
            torch.testing.assert_close(output[start_q + i], alone)
        start_q, start_k = start_q + length_q, start_k + length_k


def test_attention_that_is_not_causal_is_refused():
    one = torch.ones(1, 1, 8)
    with pytest.raises(NotImplementedError, match="causal=False"):
        flash_attn_varlen_func(
            one, one, one, torch.tensor([0, 1]), torch.tensor([0, 1]), 1, 1,
            softmax_scale=None, causal=False, window_size=(-1, -1),
        )  # fmt: skip
