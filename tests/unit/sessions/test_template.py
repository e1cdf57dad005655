"""What a template writes after a reply, for templates of the kinds that models have."""

import json

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from rollout_service.protocol.sessions import Message
from rollout_service.sessions.template import BeginsBranch, Rendering, Reply, render_after

USER: Message = {"role": "user", "content": "add"}
MORE: Message = {"role": "user", "content": "more"}
SAID: Message = {"role": "assistant", "content": "<think>hm</think>2", "reasoning": "hm"}
CALLED: Message = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
}
RESULT: Message = {"role": "tool", "tool_call_id": "c1", "content": "2"}
END, OTHER_END = "<|im_end|>", "<|endoftext|>"

# reasoning stays behind the last message of the user alone, as Qwen3, Qwen3.5 and gpt-oss have it
CHATML = (
    "{% set ns = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.user = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if loop.index0 > ns.user %}<think>\n{{ m.reasoning }}\n</think>\n\n{% endif %}"
    "{{ (m.content or '').split('</think>')[-1] }}{% for c in m.tool_calls %}\n<tool_call>\n{{ c.function | tojson }}\n"
    "</tool_call>{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# the next role ends a reply, as GLM-4 has it
GLM = (
    "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content or '' }}"
    "{% for c in m.tool_calls %}<call>{{ c.function.arguments | tojson }}</call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GLM_ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")
NO_CALLS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}<assistant>"


def after(
    template: str,
    messages: list[Message],
    end: str | None = END,
    ends: tuple[str, ...] = (END, OTHER_END),
    stop: int = 2,
) -> str:
    """What follows the reply in front of message ``stop``."""

    def render(wanted: Rendering) -> str | None:
        conversation = [_parsed(message) for message in wanted.messages]
        try:
            [text], _ = render_jinja_template(
                [conversation], chat_template=template, add_generation_prompt=wanted.with_generation_prompt
            )
        except jinja2.TemplateError:
            return None
        return str(text)

    return render_after(render, messages, Reply.of(messages, stop, end), ends)


def _parsed(message: Message) -> Message:
    """Arguments as vLLM gives them to a template."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls}


NEW = "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n<think>\n"


class TestReplies:
    def test_a_reply_that_is_written_anew_continues(self):
        assert after(CHATML, [USER, SAID, MORE]) == NEW
        assert after(CHATML, [USER, CALLED, RESULT, SAID, MORE], stop=4) == NEW

    def test_a_cut_reply_gets_its_end(self):
        assert after(CHATML, [USER, SAID, MORE], end=None) == END + NEW

    def test_another_end_stands_for_the_templates(self):
        assert after(CHATML, [USER, SAID, MORE], end=OTHER_END) == NEW

    @pytest.mark.parametrize(("end", "before"), [(END, ""), (OTHER_END, ""), (None, END)])
    def test_a_tool_call_ends_with_the_reply(self, end, before):
        tail = "\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n<think>\n"
        assert after(CHATML, [USER, CALLED, RESULT], end=end) == before + tail

    def test_a_reply_of_several_messages_is_one(self):
        assert after(CHATML, [USER, SAID, CALLED, MORE], stop=3) == NEW

    def test_a_template_without_calls_continues(self):
        assert after(NO_CALLS, [USER, CALLED, RESULT], end="</s>", ends=("</s>",)) == "<tool>2</s><assistant>"


class TestNextRoleEndsReply:
    @pytest.mark.parametrize(("end", "before"), [("<|user|>", ""), (None, "<|user|>"), ("<|endoftext|>", "<|user|>")])
    def test_the_next_role_is_written_once(self, end, before):
        assert after(GLM, [USER, SAID, MORE], end, GLM_ENDS) == before + "\nmore<|assistant|>\n"

    @pytest.mark.parametrize(
        ("end", "before"), [("<|observation|>", ""), (None, "<|observation|>"), ("<|user|>", "<|observation|>")]
    )
    def test_the_role_after_a_call_is_written_once(self, end, before):
        assert after(GLM, [USER, CALLED, RESULT, MORE], end, GLM_ENDS) == before + "\n2<|user|>\nmore<|assistant|>\n"


def each(written: str) -> str:
    """A template that writes each message so."""
    return "{% for m in messages %}" + written + "</s>{% endfor %}<assistant>"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (each("{{ 'TOOLS' if loop.last }}<{{ m.role }}>{{ m.content }}"), "rewritten_history"),  # as Mistral's tools
        (each("<{{ m.role }}>{{ m.content[: 99 if loop.revindex < 3 else 1] }}"), "rewritten_history"),
        (each("<{{ m.role }}>{{ m.content }}{{ ' /think' if loop.last }}"), "rewritten_history"),
        ("{{ messages | length }}" + each("<{{ m.role }}>{{ m.content }}"), "rewritten_history"),
        (each("{% if m.role != 'assistant' %}<{{ m.role }}>{{ m.content }}{% endif %}"), "hidden_reply"),
        (each("<{{ m.role }}>{{ m.content }} {{ m.content }}"), "hidden_reply"),
        (each("{{ raise_exception('no') if m.role == 'assistant' and m.content | length > 20 }}<{{ m.role }}>"),
         "refused_by_template"),
    ],
)  # fmt: skip
def test_a_template_that_rewrites_history_begins_a_branch(template, why):
    with pytest.raises(BeginsBranch) as branch:
        after(template, [USER, SAID, MORE], "</s>", ("</s>",))
    assert branch.value.why == why


def test_a_call_without_an_end_begins_a_branch():
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}{% if m.tool_calls %}"
        "{{ '!' if loop.last else '.' }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    with pytest.raises(BeginsBranch) as branch:
        after(template, [USER, CALLED, RESULT], None, ())
    assert branch.value.why == "unknown_end"
