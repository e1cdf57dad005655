"""What sessions do with models' own chat templates, which TRL's package holds. Its code is not imported."""

from importlib.metadata import files
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from benchmarks.common.marked import markdown_table
from rollout_service.protocol.sessions import Message
from rollout_service.sessions.probe import CONVERSATIONS, Outcome, outcomes

DOCS = Path(__file__).parents[3] / "docs/agents.md"
BAR = "\N{FULLWIDTH VERTICAL LINE}"
ENDS = (
    *("<eos>", "</s>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>"),
    *("<end_of_turn>", "<turn|>", "<|eot|>", "<|tool_response>", "<|user|>", "<|observation|>", "<end_of_utterance>"),
    *("<|END_OF_TURN_TOKEN|>", f"<{BAR}end▁of▁sentence{BAR}>"),
)
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}


def templates() -> dict[str, str]:
    packed = [file for file in files("trl") or () if file.match("trl/chat_templates/*.jinja")]
    return {file.stem: file.read_text(encoding="utf-8") for file in packed}


def found(template: str) -> dict[str, Outcome]:
    def write(messages: list[Message], with_generation_prompt: bool, tools: list[dict[str, Any]] | None) -> str:
        [text], _ = render_jinja_template(
            [messages], chat_template=template, tools=tools, add_generation_prompt=with_generation_prompt, **SPECIAL
        )
        return str(text)

    return outcomes(write, ENDS)


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Outcome]]:
    return {name: found(template) for name, template in templates().items()}


def test_every_template_continues_or_says_why(results):
    assert len(results) >= 70
    branches = {
        (name, conversation): outcome
        for name, each in results.items()
        for conversation, outcome in each.items()
        if outcome not in ("continues", "takes none")
    }
    # its first call of a turn has a header that a later one lacks
    assert branches == {("deepseekv3_training", "two tool calls"): "rewritten_history"}
    assert all(each["a reply"] == "continues" for each in results.values())


def test_the_documentation_has_every_outcome(results):
    by_outcomes: dict[tuple[Outcome, ...], list[str]] = {}
    for name, each in sorted(results.items()):
        if each != results.get(name.removesuffix("_training"), {}) or not name.endswith("_training"):
            by_outcomes.setdefault(tuple(each.values()), []).append(f"`{name}`")
    others = max(by_outcomes, key=lambda each: len(by_outcomes[each]))
    by_outcomes[others] = [f"the other {len(by_outcomes[others])}"]
    header = ["template", *CONVERSATIONS]
    made = markdown_table(header, ([", ".join(names), *each] for each, names in by_outcomes.items()))
    assert made in DOCS.read_text(), f"put this table into {DOCS.name}:\n{made}"
