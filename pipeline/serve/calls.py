"""Tool calls and JSON that were promised: the grammar that holds an answer to them, and the proof before it is told.

Grammars are judged in another process (`workshop.py`), and compiled here only when that was found to be cheap; where none is
asked for nothing is done. What comes out is read again and checked by another program than the one that made it, before an answer
says that it is a call: a grammar that was wrong is our failure, a 500 and a counter, and never the client's surprise.
"""

from typing import Any

from pipeline.generation import grammars, schemas
from pipeline.generation.constrain import Constraint
from pipeline.generation.schemas import SchemaError
from pipeline.serve.answers import Assembler, Call
from pipeline.serve.faults import ApiFault
from pipeline.serve.models import Served
from pipeline.serve.places import Pool
from pipeline.serve.protocol import ChatBody, NamedTool, ResponseFormat
from pipeline.serve.workshop import Refused, Workshop

INVALID = "invalid_structure"


class Makers:
    """What makes grammars: the workshop, and a thread for those that it let pass."""

    def __init__(self, workshop: Workshop) -> None:
        self.workshop = workshop
        self._thread = Pool("grammars", running=1, waiting=64)

    async def constraints(self, body: ChatBody, served: Served, budget: int, asker: str) -> list[Constraint | None]:
        """What holds each of the `n` answers, or nothing. Raises ApiFault: 400 for what cannot be promised, 429."""
        count, job = body.n or 1, _job(body)
        if job is None:
            return [None] * count
        param = "tools" if body.tools else "response_format"
        try:
            verdict = await self.workshop.grammar(served.id, job, asker)
            grammar = await self._thread.run(asker, lambda: served.grammars.take(verdict.written, verdict.plan))
            return [grammar.constraint(budget) for _ in range(count)]
        except (SchemaError, Refused) as error:
            raise ApiFault(400, str(error), param="max_tokens" if error.code == "budget_too_small" else param, code=error.code) from None  # fmt: skip


def _job(body: ChatBody) -> dict[str, Any] | None:
    """What the workshop is to judge, or nothing."""
    choice, wanted = body.tool_choice or "auto", body.response_format
    if body.tools and choice != "none":
        name = choice.function.name if isinstance(choice, NamedTool) else choice
        tools = [tool.plain() for tool in body.tools]
        # a model that was told which tool to call calls it once
        parallel = body.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
        return {"kind": "tools", "tools": tools, "choice": name, "parallel": parallel}
    if wanted is None or wanted.type == "text":
        return None
    return {"kind": "schema", "schema": grammars.ANY_OBJECT if wanted.json_schema is None else wanted.json_schema.rules}


def check(body: ChatBody, assembler: Assembler) -> None:
    """Raises ApiFault 500 where a call is not whole, or does not fit its tool."""
    rules = {tool.function.name: tool.function.parameters or {} for tool in body.tools or []}
    if any(not _fits(call, rules) for call in assembler.calls):
        raise ApiFault(500, "the model's call does not fit its tool", code=INVALID)


def _fits(call: Call, rules: dict[str, dict[str, Any]]) -> bool:
    if not call.closed or call.name not in rules:
        return False
    return schemas.mistake({**rules[call.name], "type": "object"}, call.arguments) is None


def check_format(wanted: ResponseFormat, assembler: Assembler) -> None:
    """Raises ApiFault 500 where the answer is not of the form that was asked for."""
    rules = {"type": "object"} if wanted.json_schema is None else wanted.json_schema.rules
    if schemas.mistake(rules, assembler.content) is not None:
        raise ApiFault(500, "the model's answer does not fit the response_format", code=INVALID)
