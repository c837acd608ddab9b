"""Tool calls in text: whatever a model says can be read, well-formed calls come out as they went in, and a model that
calls a tool reads its own ids again."""

from __future__ import annotations

import json
from copy import copy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import RESPONSE_TEMPLATE, encode, letters
from transformers import AutoTokenizer

from memopd.engine.guide import guides_of
from memopd.gateway.ask import ApiError, Tool
from memopd.gateway.drift import History, Reply, chat_ids, drift, reply_of
from memopd.gateway.tools import CLOSE, OPEN, ToolForm

TOKENIZERS = Path(__file__).parents[3] / "shared" / "tokenizers"
QWEN, SMOL = "qwen2.5-coder-0.5b", "smollm2-135m"
ADD = Tool("add", "adds", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})

pytestmark = pytest.mark.skipif(not TOKENIZERS.is_dir(), reason="needs the real tokenizers of ../shared/tokenizers")


@cache
def tokenizer(name: str = QWEN):
    return AutoTokenizer.from_pretrained(TOKENIZERS / name)


@cache
def form(name: str = QWEN) -> ToolForm:
    return ToolForm(tokenizer(name))


def rendered(*messages, tools=(ADD,)) -> str:
    given = [tool.for_template() for tool in tools]
    return tokenizer().apply_chat_template(list(messages), tools=given, tokenize=False, add_generation_prompt=True)


def assistant(text: str, *calls: tuple[str, dict]) -> dict:
    functions = [{"type": "function", "function": {"name": name, "arguments": a}} for name, a in calls]
    return {"role": "assistant", "content": text} | ({"tool_calls": functions} if calls else {})


def user(text: str) -> dict:
    return {"role": "user", "content": text}


EOS = 151645  # <|im_end|>


def test_the_end_token_is_the_tokenizers():
    assert tokenizer().eos_token_id == EOS


# ---- reading ----------------------------------------------------------------------------------------------------

CALL = '{"name": "f", "arguments": {}}'
WHOLE = f"\n{OPEN}{CALL}{CLOSE}"
marks = st.sampled_from(
    [WHOLE, WHOLE, OPEN, CLOSE, CALL, "\n", "{", "}", '"name": "f"', ', "arguments": {}', '"', "\\", "NaN"]
)
any_text = st.lists(st.one_of(st.text(max_size=8), marks), max_size=14).map("".join)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=6,
)
plain = st.text(st.characters(codec="utf-8"), max_size=20).filter(lambda text: OPEN not in text)
arguments = st.dictionaries(st.text(st.characters(codec="utf-8")), values, max_size=3)
names = st.text(st.characters(codec="utf-8", exclude_characters='"\\', min_codepoint=32), min_size=1, max_size=9)
calls = st.lists(st.tuples(names, arguments), max_size=3)


@settings(max_examples=150, deadline=None)
@given(any_text, st.lists(st.integers(1, 9), min_size=1))
def test_any_text_can_be_read_and_streams_as_it_is_read(text, steps):
    whole = form().parse(text)
    if not whole.calls:
        assert whole.text == text  # a malformed call stays text
    for call in whole.calls:
        assert json.loads(call.json) == call.arguments
    shown, at, turn = 0, 0, 0
    while at < len(text):
        at, turn = at + steps[turn % len(steps)], turn + 1
        certain = form().certain(text[:at])
        assert certain >= shown or text[:at].find(OPEN) >= 0
        shown = max(shown, certain)
        assert whole.text.startswith(text[:shown])  # what was streamed stays


@settings(max_examples=100, deadline=None)
@given(plain, calls)
def test_what_the_template_renders_is_read_as_it_was(text, calls):
    """An empty text, or one of spaces, is none beside calls."""
    prompt, after = rendered(user("x")), "<|im_end|>\n<|im_start|>assistant\n"
    said = rendered(user("x"), assistant(text, *calls)).removeprefix(prompt).removesuffix(after)
    parsed = form().parse(said)
    if calls:
        assert parsed.text == (text if text.strip() else "")
        assert [(call.name, call.arguments) for call in parsed.calls] == calls
    else:
        assert (parsed.text, parsed.calls) == (text, ())


@pytest.mark.parametrize(
    "text",
    [
        f'{OPEN}\n{{"name": "add"}}\n{CLOSE}',
        f'{OPEN}\n{{"name": "add", "arguments": [1]}}\n{CLOSE}',
        f'{OPEN}\n{{"name": 3, "arguments": {{}}}}\n{CLOSE}',
        f'{OPEN}\n{{"name": "add", "arguments": {{"a": NaN}}}}\n{CLOSE}',
        f'{OPEN}\n{{"name": "add", "arguments": {{"a": 1',
        f'{OPEN}\n{{"name": "add", "arguments": {{"a": "\\ud800"}}}}\n{CLOSE}',
        f'{OPEN}\n{{"name": "add", "arguments": {{}}}} and more',
        f"{OPEN}\n{'[' * 20_000}",
        f'{OPEN}\n{{"name": "add", "arguments": {{"a": {"[" * 100}{"]" * 100}}}}}\n{CLOSE}',
        f"{OPEN}{CLOSE}",
    ],
)
def test_malformed_calls_stay_text(text):
    assert form().parse(text).calls == ()
    assert form().parse(text).text == text


def test_a_mark_inside_an_argument_ends_nothing():
    call = json.dumps({"name": "say", "arguments": {"text": f"{CLOSE} and {OPEN}"}})
    parsed = form().parse(f"So:\n{OPEN}\n{call}\n{CLOSE}")
    assert parsed.text == "So:"
    assert parsed.calls[0].arguments == {"text": f"{CLOSE} and {OPEN}"}


def test_a_tokenizer_that_reads_its_own_answers():
    own = copy(tokenizer(SMOL))
    own.response_template = RESPONSE_TEMPLATE
    own.chat_template = "{{ tools }}" + own.chat_template
    reads = ToolForm(own)
    reads.check()
    text = '<think>hm</think>So: <call>{"name": "add", "arguments": {"a": 2}}</call>'
    prompt = encode(own, "<|im_start|>assistant\n")
    parsed = reads.parse_whole(own, text, text + "<|im_end|>", prompt, [ADD])
    assert [(call.name, call.arguments) for call in parsed.calls] == [("add", {"a": 2})]
    assert (parsed.text.strip(), parsed.reasoning) == ("So:", "hm")
    broken = "<call>{</call>"
    assert reads.parse_whole(own, broken, broken, prompt, [ADD]).text == broken
    with pytest.raises(ApiError, match="cannot be required"):
        reads.grammar([ADD], True, None)
    with pytest.raises(ApiError, match="send tools or a schema for the answer, not both") as caught:
        reads.grammar([ADD], True, {"type": "object"})
    assert (caught.value.status, caught.value.param) == (400, "tools")
    assert reads.grammar([], True, {"type": "object"}).startswith("start: %json")


def test_models_that_would_not_see_tools_or_whose_calls_nobody_can_read():
    with pytest.raises(ApiError, match="drops `tools`") as caught:
        form(SMOL).check()
    assert (caught.value.status, caught.value.param) == (400, "tools")
    form().check()
    other = copy(tokenizer(SMOL))
    other.chat_template = "{{ tools }}" + other.chat_template
    with pytest.raises(ApiError, match="has no response_template"):
        ToolForm(other).check()


# ---- requiring --------------------------------------------------------------------------------------------------


def test_a_grammar_takes_what_the_template_writes_and_nothing_else():
    """With Qwen's tokenizer, in which the marks are tokens of their own; test_wire_formats.py has one without them."""
    guides = guides_of(tokenizer(), len(tokenizer()), [EOS])
    odd = Tool('say "東京"', None, {"$defs": {"w": {"enum": ["a", "b"]}}, "properties": {"w": {"$ref": "#/$defs/w"}}})
    one, two = ((tool.name, a) for tool, a in ((ADD, {"a": 2}), (odd, {"w": "b"})))
    prompt, after = rendered(user("x")), "<|im_end|>\n<|im_start|>assistant\n"

    def follows(grammar: str, text: str) -> bool:
        guide = guides(grammar)
        for id in [*encode(tokenizer(), text), EOS]:
            if not guide.allowed()[id]:
                return False
            guide.take(id) if id != EOS else None
        return True

    def said(*calls) -> str:
        return rendered(user("x"), assistant("", *calls)).removeprefix(prompt).removesuffix(after)

    both, single = form().grammar([ADD, odd], True, None), form().grammar([ADD], False, None)
    either = form().grammar([ADD], True, {"type": "object", "properties": {"b": {"type": "null"}}})
    written = said(two).replace('say "東京"', 'say \\"東京\\"')  # this template does not escape names
    assert follows(both, written)
    assert follows(both, said(one) + "\n" + written)
    assert follows(single, said(one))
    assert follows(either, said(one))
    assert follows(either, '{"b": null}')
    for text in (said(one, one), written, "I add.\n" + said(one), "no", said(("add", {"a": "2"})), said(("add", {}))):
        assert not follows(single, text), text
    assert not follows(both, said((odd.name, {"w": "c"})).replace('say "東京"', 'say \\"東京\\"'))


# ---- ids that come back ---------------------------------------------------------------------------------------------

SAID = f'I add.\n{OPEN}\n{{"name":"add",  "arguments": {{"a":2}}}}\n{CLOSE}'  # not as the template writes it
TOOL = {"role": "tool", "content": "4"}


def reply(ids: list[int]) -> Reply:
    return reply_of(tokenizer(), np.asarray(ids, np.int32), 10**6, form())


def ids_of(messages, replies) -> list[int]:
    options = {"tools": [ADD.for_template()]}
    return chat_ids(tokenizer(), messages, replies, form=form(), options=options)


@pytest.mark.parametrize("spell", [encode, letters])
@pytest.mark.parametrize("tail", ["", f'\n{OPEN}\n{{"name": "add", "arguments": {{"a": 3}}}}\n{CLOSE}'])
def test_sampled_ids_stand_in_for_calls_that_the_template_writes_anew(spell, tail):
    sampled = spell(tokenizer(), SAID + tail)
    given = [("add", {"a": 2})] + ([("add", {"a": 3})] if tail else [])
    messages = [user("2+2?"), assistant("I add.", *given), TOOL, assistant("It is 4."), user("sure?")]
    replies = [reply([*sampled, EOS]), reply([*letters(tokenizer(), "It is 4."), EOS])]
    ids = ids_of(messages, replies)
    prompt = encode(tokenizer(), rendered(user("2+2?")))
    assert ids[: len(prompt) + len(sampled) + 1] == [*prompt, *sampled, EOS]
    after = rendered(*messages).rpartition(f"\n{CLOSE}<|im_end|>")[2]
    assert tokenizer().decode(ids[len(prompt) + len(sampled) + 1 :]) == after
    assert drift(tokenizer(), ids, replies, messages) == History(2, 0, None)


@pytest.mark.parametrize(
    "message",
    [
        assistant("I add.", ("add", {"a": 5})),
        assistant("I add", ("add", {"a": 2})),
        assistant("I add.", ("sub", {"a": 2})),
        assistant("I add.", ("add", {"a": 2}), ("add", {"a": 2})),
        assistant("I add."),
    ],
)
def test_other_calls_are_what_the_client_sent(message):
    messages = [user("2+2?"), message, TOOL]
    replies = [reply([*encode(tokenizer(), SAID), EOS])]
    ids = ids_of(messages, replies)
    assert ids == encode(tokenizer(), rendered(*messages))
    assert drift(tokenizer(), ids, replies, messages) == History()


def test_a_template_that_changes_calls_is_left_alone():
    """It writes the first of two calls, so the prompt does not have what the model said."""
    short = copy(tokenizer())
    short.chat_template = short.chat_template.replace("in message.tool_calls %}", "in message.tool_calls[:1] %}")
    messages = [user("2+2?"), assistant("I add.", ("add", {"a": 2}), ("add", {"a": 3})), TOOL]
    said = [reply([*encode(tokenizer(), SAID + SAID.removeprefix("I add.").replace("2", "3")), EOS])]
    ids = chat_ids(short, messages, said, form=form(), options={"tools": [ADD.for_template()]})
    assert ids == encode(tokenizer(), rendered(messages[0], assistant("I add.", ("add", {"a": 2})), TOOL))
    assert drift(tokenizer(), ids, said, messages) == History(1, 1, None)


def test_calls_that_cannot_be_put_back_have_drifted():
    """A template that refuses a result without its call leaves no place to put the sampled ids."""
    strict = copy(tokenizer())
    check = "{%- for m in messages %}{%- if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    strict.chat_template = check + "{{ raise_exception('no call') }}{%- endif %}{%- endfor %}" + strict.chat_template
    messages = [user("2+2?"), assistant("I add.", ("add", {"a": 2})), TOOL]
    replies = [reply([*encode(tokenizer(), SAID), EOS])]
    ids = chat_ids(strict, messages, replies, form=form(), options={"tools": [ADD.for_template()]})
    assert ids == encode(tokenizer(), rendered(*messages))
    assert drift(tokenizer(), ids, replies, messages) == History(1, 1, None)
    assert drift(tokenizer(), ids, replies) == History()


def test_a_client_that_takes_one_call_at_a_time_has_drifted():
    messages = [user("2+2?"), assistant("I add.", ("add", {"a": 2})), TOOL]
    twice = reply([*encode(tokenizer(), SAID + SAID.removeprefix("I add.")), EOS])
    ids = ids_of(messages, [twice])
    assert ids == encode(tokenizer(), rendered(*messages))
    assert drift(tokenizer(), ids, [twice], messages) == History(1, 1, None)
