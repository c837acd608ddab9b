"""Replies that come back as text: sampled ids where that is exact, and where it is not, the place."""

from __future__ import annotations

import numpy as np
import pytest
from gateway_parts import encode, letters, tokenizer, user

from memopd.gateway.drift import History, Reply, chat_ids, drift, reply_of

EOS = tokenizer().eos_token_id


def reply(ids: list[int], shown: int = 10**6) -> Reply:
    return reply_of(tokenizer(), np.asarray(ids, np.int32), shown)


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def rendered(*messages: dict[str, str]) -> str:
    return tokenizer().apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)


SAID = "the old town by the river"


def test_sampled_ids_stand_in_for_their_text():
    messages = [user("where?"), assistant(SAID), user("sure?"), assistant("yes, the river"), user("then go")]
    ids = chat_ids(tokenizer(), messages, [reply([*letters(SAID), EOS]), reply(letters("yes, the river"))])
    assert tokenizer().decode(ids) == rendered(*messages)
    prompt = encode(rendered(user("where?")))
    assert ids[: len(prompt) + len(SAID) + 1] == [*prompt, *letters(SAID), EOS]
    assert len(ids) > len(encode(rendered(*messages)))


def test_nothing_is_put_in_for_other_texts_or_other_speakers():
    replies = [reply(letters(SAID))]
    for messages in (
        [user(SAID)],
        [user("?"), assistant(SAID + " "), user("?")],
        [user("?"), assistant(""), user("?")],
    ):
        assert chat_ids(tokenizer(), messages, replies) == encode(rendered(*messages))


def test_nothing_is_put_in_where_the_text_would_change():
    """A special token in the middle of a reply is not the text that the client sends back."""
    start = tokenizer().convert_tokens_to_ids("<|im_start|>")
    odd = Reply(np.asarray([*letters("old"), start, *letters(" town")], np.int32), "old town", "old town")
    messages = [user("?"), assistant("old town"), user("?")]
    assert chat_ids(tokenizer(), messages, [odd]) == encode(rendered(*messages))


@pytest.mark.parametrize(
    "content",
    [
        "message['content'] | trim",
        "message['content'] | upper",
        "''",
        "message['content'] * 2",
        "message['content'][:4]",
    ],
)
def test_templates_that_change_replies_are_left_alone(content):
    changed = tokenizer().__class__(tokenizer_object=tokenizer().backend_tokenizer, eos_token="<|im_end|>")
    changed.chat_template = tokenizer().chat_template.replace("message['content']", content)
    messages = [user("where?"), assistant(f" {SAID} "), user("sure?")]
    text = changed.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = chat_ids(changed, messages, [reply(letters(f" {SAID} "))])
    assert ids == encode(text)


def test_drift_begins_where_the_ids_part():
    sampled = [*encode("the old town"), *letters(" by the river"), EOS]
    before = encode("you said: ")
    again = encode("the old town by the river, then")
    common = next(n for n, (a, b) in enumerate(zip(sampled, again, strict=False)) if a != b)
    assert common > 1
    assert drift(tokenizer(), [*before, *again], [reply(sampled)]) == History(1, 1, len(before) + common)
    assert drift(tokenizer(), [*before, *sampled[:-1], *before], [reply(sampled)]) == History(1, 0, None)
    assert drift(tokenizer(), before, [reply(sampled)]) == History(0, 0, None)
    assert drift(tokenizer(), [], []) == History()


def test_a_token_over_the_edge_is_drift():
    """' the' holds the space before a reply that was sampled without it."""
    sampled = letters("the old town by")
    prompt = encode("you said the old town by")
    position = len(encode("you said"))
    assert drift(tokenizer(), prompt, [reply(sampled)]) == History(1, 1, position)


def test_a_reply_cut_at_its_stop_string():
    """The client saw it up to the stop string; ids that cover what it saw are no drift."""
    sampled = encode("the old town") + letters("</search>")
    shown = len("the old town")
    prompt = [*encode("you said: "), *encode("the old town"), *encode("! yes")]
    assert drift(tokenizer(), prompt, [reply(sampled, shown)]) == History(1, 0, None)
    spelled = [*encode("you said: "), *letters("the old town"), *encode("! yes")]
    assert drift(tokenizer(), spelled, [reply(sampled, shown)]) == History(1, 1, len(encode("you said: ")))


def test_bytes_of_two_neighbours_are_no_match():
    ids = np.asarray([1, 2, 3, 4], np.int32)
    shifted = np.frombuffer(b"\0" + ids.tobytes() + b"\0\0\0", np.int32)
    assert drift(tokenizer(), [n % 300 for n in shifted.tolist()], [Reply(ids, "zzzz", "zzzz")]) == History()


def test_short_replies_are_not_compared():
    assert drift(tokenizer(), letters("yes it is"), [reply(encode("it"))]) == History()


def test_half_characters():
    sampled = letters("東京 🙂 東京")
    assert drift(tokenizer(), [*encode("é"), *letters("東京 🙂 東京")], [reply(sampled)]) == History(1, 0, None)
    assert drift(tokenizer(), [*encode("é"), *sampled[:-1]], [reply(sampled)]) == History(0, 0, None)
