"""How people ask: the sentences around a wording, requests that no tool serves, and the assistant's plain sentences.

Each list of families ends in its held-out fifth (`HELD_OUT_SHARE`): training and validation draw from the part before
it, a test item of the quadrant "unseen template" from the held-out part alone.
"""

from collections.abc import Sequence
from random import Random

from pipeline.synthesis.tool_shape import Tool, leaf_values, places, words
from pipeline.synthesis.tool_values import ADJECTIVES, CITIES, FIRST_NAMES, NOUNS, Value, conjunction

HELD_OUT_SHARE = 0.2

FRAMES = (
    "{}.",
    "please {}.",
    "can you {}?",
    "could you please {}?",
    "I need you to {}.",
    "I want you to {}.",
    "{}, please.",
    "hello, {}.",
    "would you {} for me?",
    "my wish for today: {}.",
)
CHATTER = (
    "I am {first} and I just came home.",
    "It is a {adjective} day in {city}.",
    "My {noun} is {adjective} again.",
    "{first} told me about you.",
    "I have a {adjective} week in {city}.",
    "Sorry to bother you, I am {first}.",
    "I work with {first} in {city}.",
    "We have a {adjective} {noun} at home.",
    "Life is {adjective} since {first} left {city}.",
    "{first} sends greetings from {city}.",
)
UNSERVED = (
    "Write a poem about a {adjective} {noun}.",
    "Tell me a joke about a {noun}.",
    "Who invented the {noun}?",
    "What is the capital near {city}?",
    "Explain how a {noun} works.",
    "Tell me the history of {city}.",
    "What is the meaning of the word {noun}?",
    "Sing a song about {city}.",
    "Why is the {noun} {adjective}?",
    "Draw a {adjective} {noun}.",
    "Give me a riddle with a {noun}.",
    "Do you like {city}?",
    "Is a {noun} better than a {other}?",
    "Tell {first} a story about a {adjective} {noun}.",
    "What do you think of a {adjective} {noun}?",
    "How old is {first}?",
    "Make up a tale of {first} and the {noun}.",
    "What rhymes with {noun}?",
    "Which language do people speak in {city}?",
    "How does one cook a {adjective} {noun}?",
)
REFUSALS = ("I have no tool for that.", "None of my tools can do that.", "Sorry, I cannot do that with my tools.")
PLAIN = (
    ("Hello, I am {first}.", "Hello {first}, how can I help?"),
    ("Good morning from {city}!", "Good morning! How can I help?"),
    ("Thank you, {first} and I are happy.", "You are welcome."),
    ("Hi, {first} here, just saying hello.", "Hello {first}, how can I help?"),
    ("Greetings, my name is {first}.", "Hello {first}, how can I help?"),
)
NEWS = ("Here is a new tool:", "You can use this tool now:", "I added a tool:")
AGAIN = ("Try again.", "Please try again.", "Does it work now?")
REPLIES = ("{value}", "{value}.", "Use {value}.", "The {param} is {value}.", "It is {value}.")


def family(families: Sequence[str], unseen: bool, rng: Random) -> str:
    """A member of the seen part, or of the held-out part."""
    border = len(families) - max(1, round(HELD_OUT_SHARE * len(families)))
    return rng.choice(families[border:] if unseen else families[:border])


def sentence(wording: str, unseen: bool, rng: Random) -> str:
    """The filled wording inside a frame, with a capital first letter where a letter comes first."""
    text = family(FRAMES, unseen, rng).replace("{}", wording)
    return text[0].upper() + text[1:]


def filled(template: str, rng: Random) -> str:
    """A template of this file with its places filled."""
    noun, other = rng.sample(NOUNS, 2)
    names = {"first": rng.choice(FIRST_NAMES), "city": rng.choice(CITIES), "adjective": rng.choice(ADJECTIVES)}
    return template.format_map({**names, "noun": noun, "other": other})


def joined(parts: list[str], rng: Random) -> str:
    """Several wordings in one sentence."""
    link = rng.choice((" and ", ", then ", " and also "))
    return link.join((", ".join(parts[:-1]), parts[-1])) if len(parts) > 1 else parts[0]


def coordinated(tool: Tool, wording: str, values: list[dict[str, Value]], rng: Random) -> str | None:
    """ "find the phone of A and B": one wording for calls that differ in its last place alone; None where it has none."""
    last = places(wording)[-1]
    if not wording.endswith(f"{{{last}}}") or last not in tool.params:
        return None
    if tool.params[last].schema["type"] not in ("string", "number", "integer") or "enum" in tool.params[last].schema:
        return None
    stem = wording[: -len(last) - 2]
    ends = [words(tool, f"{{{last}}}", {last: each[last]}, rng) for each in values]
    head = words(tool, stem, values[0], rng) if places(stem) else stem
    return head + conjunction(ends)


def asking(name: str, rng: Random) -> str:
    """The question for a missing parameter; it names the parameter as the schema does."""
    spoken = name.replace("_", " ")
    return rng.choice((f"Which {spoken} should I use?", f"Which {spoken} do you mean?", f"What is the {spoken}?"))


def reply(tool: Tool, name: str, value: Value, rng: Random) -> str:
    """The user's answer to that question."""
    kind = tool.params[name].kind
    if isinstance(kind, dict):
        text = " and ".join(f"{leaf} {item}" for leaf, item in value.items())
    else:
        text = words(tool, f"{{{name}}}", {name: value}, rng)
    assert all(str(leaf) in text for leaf in leaf_values(value)), (name, value, text)
    return rng.choice(REPLIES).format(value=text, param=name.replace("_", " "))
