"""Transcripts: tool conversations as plain text, for the corpus that the language model reads.

In: a seed and a number. Out: `Text` records of source "transcripts", made by the generators of stage tasks (half of
them choices) from another seed and from their training split alone: the held-out tools and wordings never occur. Control tokens cannot stand in a text
(`Tokenizer.encode` gives none), so a turn is its role on a line and then what is said; a call is its JSON.

They are there so that the tokenizer learns the words of schemas and requests as whole tokens (measured, docs/LOG.md), and
so that reading a schema is practised before the small stage of fine-tuning (not measured alone).

Not promised: the chat format, which only `text/chat.py` writes; and that a conversation differs in more than its values from
one that stage tasks makes.
"""

import json

from pipeline.streams.records import Text
from pipeline.synthesis import tool_choices, tools

SOURCE = "transcripts"


def record(seed: int, number: int) -> Text:
    """Transcript `number`, a pure function of (seed, number)."""
    if number % 4 < 2:
        dialogue = tool_choices.dialogue("train", seed, number)
    else:
        (dialogue,) = tools.dialogues("train", number + 1, seed, number)
    lines = ["Tools you can call:", *(json.dumps(tool["function"], ensure_ascii=False) for tool in dialogue.tools)]
    for message in dialogue.messages:
        lines.append(message["role"])
        if message["content"]:
            lines.append(message["content"])
        for name, arguments in tools.calls(message):
            lines.append(json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False))
    return Text(text="\n".join((*lines, "")), source=SOURCE, path=f"{SOURCE}/{seed}/{number}", licence="CC0-1.0")
