"""What the tests of clients share: their questions."""

from typing import Any

import openai

ASK: list[Any] = [{"role": "user", "content": "Which way would the ferry go?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city"],
        },
    },
}
TIME: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
}


def chat(client: openai.OpenAI, **asked: Any) -> Any:
    """A chat completion of twelve tokens, unless asked otherwise."""
    return client.chat.completions.create(**({"model": "nano", "messages": ASK, "max_tokens": 12, "seed": 5} | asked))
