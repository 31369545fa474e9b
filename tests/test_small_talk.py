"""Conversations without tools: no call, the same name in the answer, held-out wordings in the test split alone."""

from pipeline.synthetic.tools import talk_dialogue
from pipeline.synthetic.wording import lines, sentences, table, words
from pipeline.text.chat import formatted

TALKS = [talk_dialogue("train", 3, number) for number in range(1200)]
TESTS = [talk_dialogue("test", 3, number) for number in range(1200)]


def test_a_number_decides_and_no_tool_occurs() -> None:
    assert [talk_dialogue("train", 3, number) for number in range(1200)] == TALKS
    assert {talk.category for talk in TALKS} == {"greeting", "question", "refusal", "request"}
    for talk in TALKS + TESTS:
        assert not talk.tools
        assert [m["role"] for m in talk.messages] == ["user", "assistant"] * (len(talk.messages) // 2)
        assert not any(m.get("tool_calls") for m in talk.messages)
        assert not any("{" in m["content"] for m in talk.messages if not formatted(m["content"]))  # else a dict's code


def test_a_wish_that_needs_a_tool_is_refused() -> None:
    refused = [m["content"] for talk in TALKS if talk.category == "refusal" for m in talk.messages[1:2]]
    assert len(refused) > 150 and set(refused) == set(sentences("refusals"))


def test_code_is_the_answer_to_a_request_for_code_and_to_nothing_else() -> None:
    for talk in TALKS + TESTS:
        code = [formatted(message["content"]) for message in talk.messages[1::2]]
        assert code[0] == (talk.category == "request")
        assert all(
            "def solve(" in m["content"] for m, is_code in zip(talk.messages[1::2], code, strict=True) if is_code
        )
    assert sum(talk.category == "request" for talk in TALKS) > 200


def test_the_answer_to_a_name_holds_the_name() -> None:
    greeted = 0
    for talk in TALKS + TESTS:
        asked, answer = (message["content"] for message in talk.messages[:2])
        if answer.startswith("Hello ") and answer.endswith(", how can I help?"):
            name = answer.removeprefix("Hello ").removesuffix(", how can I help?")
            assert name in words("first_names") and name in asked
            greeted += 1
    assert greeted > 50


def test_held_out_wordings_stand_in_the_test_split_alone() -> None:
    rhymes, greetings = sentences("unserved")[-3].split("{")[0], list(table("tools.yaml")["greetings"])[4].split("{")[0]
    messages = {
        name: [m["content"] for t in talks for m in t.messages] for name, talks in (("train", TALKS), ("test", TESTS))
    }
    said = {name: "\n".join(contents) for name, contents in messages.items()}
    for wording in (rhymes, greetings):
        assert wording in said["test"] and wording not in said["train"]
    for name in ("keep_even", "sum", "reverse_words"):
        request = lines("requests.yaml", name)[-1]
        assert request in messages["test"] and request not in messages["train"]
    first = sentences("unserved")[0].split("{")[0]
    assert first in said["train"] and first not in said["test"]
