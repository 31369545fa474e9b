"""Tool calls and JSON that were promised: the grammar that holds an answer to them, and the proof before it is told.

Grammars are compiled off the event loop, within COMPILE_SECONDS. What comes out is read again and checked by another program than the
one that made it, before an answer says that it is a call: a grammar that was wrong is our failure, a 500 and a counter, and never the
client's surprise.
"""

import asyncio
from typing import Any

from pipeline.generation import schemas
from pipeline.generation.constrain import Constraint, Grammar
from pipeline.generation.schemas import SchemaError
from pipeline.serve.answers import Assembler, Call
from pipeline.serve.faults import ApiFault
from pipeline.serve.models import Served
from pipeline.serve.protocol import ChatBody, NamedTool

COMPILE_SECONDS = 2.0
INVALID = "invalid_structure"


async def constraints(body: ChatBody, served: Served, budget: int) -> list[Constraint | None]:
    """What holds each of the `n` answers, or nothing. Raises ApiFault 400 for what cannot be promised."""
    count = body.n or 1
    param = "tools" if body.tools else "response_format"
    try:
        async with asyncio.timeout(COMPILE_SECONDS):
            grammar = await asyncio.to_thread(_grammar, body, served)
        return [grammar.constraint(budget) if grammar is not None else None for _ in range(count)]
    except SchemaError as error:
        raise ApiFault(400, str(error), param="max_tokens" if error.code == "budget_too_small" else param, code=error.code) from None  # fmt: skip
    except TimeoutError:
        raise ApiFault(400, f"the schema took more than {COMPILE_SECONDS:.0f} seconds to compile; make it simpler", param=param, code="schema_too_slow") from None  # fmt: skip


def _grammar(body: ChatBody, served: Served) -> Grammar | None:
    choice = body.tool_choice or "auto"
    if body.tools and choice != "none":
        name = choice.function.name if isinstance(choice, NamedTool) else choice
        tools = [tool.plain() for tool in body.tools]
        # a model that was told which tool to call calls it once
        parallel = body.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
        return served.grammars.tool_calls(tools, choice=name, parallel=parallel)
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    return served.grammars.json_object() if wanted.json_schema is None else served.grammars.json_schema(wanted.json_schema.rules)  # fmt: skip


def check(body: ChatBody, assembler: Assembler) -> None:
    """Raises ApiFault 500 where a call is not whole, or does not fit its tool."""
    rules = {tool.function.name: tool.function.parameters or {} for tool in body.tools or []}
    if any(not _fits(call, rules) for call in assembler.calls):
        raise ApiFault(500, "the model's call does not fit its tool", code=INVALID)


def _fits(call: Call, rules: dict[str, dict[str, Any]]) -> bool:
    if not call.closed or call.name not in rules:
        return False
    return schemas.mistake({**rules[call.name], "type": "object"}, call.arguments) is None


def check_format(body: ChatBody, assembler: Assembler) -> bool:
    """Whether a form was asked for. Raises ApiFault 500 where the answer is not of it."""
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return False
    rules = {"type": "object"} if wanted.json_schema is None else wanted.json_schema.rules
    if schemas.mistake(rules, assembler.content) is not None:
        raise ApiFault(500, "the model's answer does not fit the response_format", code=INVALID)
    return True
