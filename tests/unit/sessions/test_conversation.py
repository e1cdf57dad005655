"""When conversations are the same."""

import pytest

from rollout_service.protocol.sessions import Message
from rollout_service.sessions.conversation import as_one_message, keys_of, keys_with

ASKED: Message = {"role": "user", "content": "add"}
CALLED: Message = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}],
    "reasoning": "only told",
}


def key_of(messages: list[Message], context: object) -> str:
    [key] = keys_with(messages[:-1], messages[-1:], context)
    return key


class TestKeys:
    @pytest.mark.parametrize(
        "sent_back",
        [
            {**CALLED, "content": ""},
            {**CALLED, "name": "agent"},
            {name: value for name, value in CALLED.items() if name != "reasoning"},
            {**CALLED, "content": []},
            {
                "role": "assistant",
                "tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": {"b": 2, "a": 1}}}],
            },
            {
                "role": "assistant",
                "tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": {"b": 2.0, "a": 1}}}],
            },
            {
                "role": "assistant",
                "tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": '{"a":1.0,"b":0.2e1}'}}],
            },
        ],
    )
    def test_a_reply_sent_back_in_another_form_is_the_same(self, sent_back):
        assert key_of([ASKED, sent_back], None) == key_of([ASKED, CALLED], None)

    def test_parts_of_text_are_their_text(self):
        parts = [{"type": "text", "text": "add"}]
        for fields in ({}, {"type": "message", "name": None}):
            assert key_of([{"role": "user", "content": parts, **fields}], None) == key_of([ASKED], None)
        assert key_of([{"role": "assistant", "content": parts}], None) == key_of([{**ASKED, "role": "assistant"}], None)

    def test_a_reply_in_several_messages_is_one(self):
        parts: list[Message] = [{"role": "assistant", "content": "so "}, {"role": "assistant", "content": "on"}, CALLED]
        whole = {**CALLED, "content": "so on"}
        assert key_of([ASKED, *parts], None) == key_of([ASKED, whole], None)
        assert key_of([ASKED, *parts, ASKED], None) == key_of([ASKED, whole, ASKED], None)
        assert key_of([ASKED, parts[0], ASKED, *parts[1:]], None) != key_of([ASKED, whole, ASKED], None)

    def test_parts_of_a_reply_are_put_together(self):
        parts: list[Message] = [
            {"role": "assistant", "reasoning": "hm"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
            CALLED,
            CALLED,
        ]
        assert as_one_message(parts) == {
            "role": "assistant",
            "content": "so",
            "reasoning": "hmonly toldonly told",
            "tool_calls": [*CALLED["tool_calls"], *CALLED["tool_calls"]],
        }
        assert as_one_message([]) == {"role": "assistant", "content": ""}

    @pytest.mark.parametrize(
        "other",
        [
            [{"role": "user", "content": "Add"}],
            [{"role": "system", "content": "add"}],
            [ASKED, ASKED],
            [{"role": "tool", "content": "add", "tool_call_id": "c1"}],
            [{"role": "user", "content": "add", "name": "Ada"}],
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "dd"}]}],
            [{"role": "user", "content": "add", "tools": [{"name": "add"}]}],
            [{"role": "assistant", "content": "add"}],
        ],
    )
    def test_other_words_are_another_conversation(self, other):
        assert key_of(other, None) != key_of([ASKED], None)

    def test_each_beginning_that_ends_with_the_assistant_has_its_key(self):
        said: Message = {"role": "assistant", "content": "so"}
        messages = [said, ASKED, said, CALLED, ASKED, ASKED, said]
        found = list(keys_of(messages, {"tools": []}))
        assert found == [(count, key_of(messages[:count], {"tools": []})) for count in (1, 3, 4, 7)]

    def test_each_reply_to_a_conversation_has_its_key(self):
        replies: list[Message] = [{"role": "assistant", "content": "so"}, CALLED, ASKED]
        for messages in ([], [ASKED], [ASKED, CALLED]):
            keys = list(keys_with(messages, replies, None))
            assert keys == [key_of([*messages, reply], None) for reply in replies]

    def test_other_tools_are_another_conversation(self):
        assert key_of([ASKED], [{"name": "add"}]) != key_of([ASKED], None)

    def test_a_call_of_a_custom_tool_counts_without_its_id(self):
        def called(number: str, text: str) -> str:
            call = {"id": number, "type": "custom", "custom": {"name": "run", "input": text}}
            return key_of([{"role": "assistant", "content": "so", "tool_calls": [call]}], None)

        assert called("c1", "ls") == called("c2", "ls") != called("c1", "pwd")
