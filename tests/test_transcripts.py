"""The transcripts: pure functions of their number, whole conversations, and nothing that is held out."""

import json

from pipeline.synthetic import tools
from pipeline.synthetic.toolbox import unseen
from pipeline.synthetic.tools import dialogues
from pipeline.synthetic.wording import words

TEXTS = [tools.record(3, number).text for number in range(150)]


def test_a_transcript_is_a_function_of_its_seed_and_number() -> None:
    assert [tools.record(3, number).text for number in range(150)] == TEXTS
    assert len(set(TEXTS)) == 150
    assert tools.record(4, 0).text != TEXTS[0]
    made = tools.record(3, 7)
    assert (made.source, made.path, made.license) == ("transcripts", "transcripts/3/7", "CC0-1.0")


def test_a_transcript_says_what_the_conversation_says_in_its_order() -> None:
    whole = list(dialogues("train", 150, 3))
    talks = [tools.choice_dialogue("train", 3, n) if n % 4 < 2 else whole[n] for n in range(150)]
    for text, dialogue in zip(TEXTS, talks, strict=True):
        said = [json.dumps(tool["function"], ensure_ascii=False) for tool in dialogue.tools]
        for message in dialogue.messages:
            said += [message["content"]] if message["content"] else []
            said += [call["function"]["arguments"] for call in message.get("tool_calls", [])]
        rest = text
        for part in said:
            _, found, rest = rest.partition(part)
            assert found == part, (part, text)


def test_no_transcript_offers_or_calls_a_held_out_tool() -> None:
    names = {f'"name": "{tool.name}"' for tool in unseen()}
    assert len(names) == len(unseen()) > 10
    assert not [text for text in TEXTS if any(name in text for name in names)]


def test_the_common_words_hold_none_of_the_held_out_tools() -> None:
    common = words("common")
    names = {word for tool in unseen() for name in (tool.name, *tool.params) for word in name.split("_")}
    assert {"currency", "hotel"} <= names
    assert not names & set(common)
    assert len(set(common)) == len(common) > 1500
    assert all(word.isascii() and word.isalpha() and word.islower() for word in common)
