"""Conversations in which no tool is offered: greetings, questions about the assistant, and wishes that need a tool.

Without them a model that is mostly trained on calls writes a call to whatever it is asked, also where there is nothing to
call. In: split, seed, number. Out: `Dialogue` records of kind "talk", a pure function of the three; the categories are
"greeting", "question" (about the assistant) and "refusal". Held-out wordings occur in the split "test" alone.

Not promised: knowledge. What the assistant cannot do it says it cannot do.
"""

from random import Random

from pipeline.streams.records import Dialogue, Message
from pipeline.synthesis import tool_requests as requests
from pipeline.synthesis.tool_shape import draw, told, words
from pipeline.synthesis.toolbox import SEEN

ABLE = "I can write Python functions, tell stories and call the tools that you offer."
QUESTIONS = (
    ("What can you do?", ABLE),
    ("Who are you?", "I am a small code assistant, trained with Stagecoach."),
    ("What are you?", "I am a small code assistant, trained with Stagecoach."),
    ("Can you help me?", ABLE),
    ("How can you help me?", ABLE),
    ("How are you?", "I am fine. How can I help?"),
    ("Are you a human?", "No, I am a small code assistant, trained with Stagecoach."),
    ("Thanks!", "You are welcome."),
    ("Thank you very much.", "You are welcome."),
    ("Bye!", "Goodbye."),
)
GREETINGS = (
    ("Hi", "Hello, how can I help?"),
    ("Hello!", "Hello, how can I help?"),
    ("Hey there", "Hello, how can I help?"),
)


def dialogue(split: str, seed: int, number: int) -> Dialogue:
    """Conversation `number` of a split: one to three exchanges, the first of which gives the category."""
    id_ = f"talk/{split}/{seed}/{number}"
    rng = Random(id_)
    unseen = split == "test"
    category = rng.choice(("greeting", "question", "refusal", "refusal"))
    messages: list[Message] = []
    for form in (category, *rng.choices(("question", "refusal", "refusal"), k=rng.choice((0, 0, 1, 2)))):
        asked, answer = _exchange(form, unseen, rng)
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return Dialogue(id=id_, kind="talk", category=category, messages=messages)


def _exchange(form: str, unseen: bool, rng: Random) -> tuple[str, str]:
    """What the user says, and the answer."""
    if form == "question":
        return rng.choice(QUESTIONS)
    if form == "refusal":
        return _wish(unseen, rng), rng.choice(requests.REFUSALS)
    if rng.random() < 0.4 and not unseen:
        return rng.choice(GREETINGS)
    said, answer = requests.PLAIN[4 if unseen else rng.randrange(4)]
    state = rng.getstate()
    said = requests.filled(said, rng)
    rng.setstate(state)  # the same name in the answer
    return said, requests.filled(answer, rng)


def _wish(unseen: bool, rng: Random) -> str:
    """Something that needs a tool, or knowledge."""
    if rng.random() < 0.5:
        return requests.filled(requests.family(requests.UNSERVED, unseen, rng), rng)
    tool = rng.choice(SEEN)
    wording = requests.family(tool.wordings, unseen, rng)
    return requests.sentence(words(tool, wording, told(tool, wording, draw(tool, rng)), rng), unseen, rng)
