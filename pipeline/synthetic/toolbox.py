"""The toolbox: 48 real tools in 12 domains, which of them are held out, and the pairs in which one feeds the other.

`TOOLS` is the whole box; three domains (`HELD_OUT_DOMAINS`, 12 tools) never occur in training. `run(world, name,
arguments)` executes a call by name; results are JSON objects, also a refusal: `{"error": message}`. To add a tool,
write a function and an entry in one of the three modules of tools (docs/extending.md). Not promised: that the tools
match the real world.
"""

from dataclasses import dataclass

from pipeline.synthetic import tools_household, tools_knowledge, tools_services
from pipeline.synthetic.tool_values import Result, Tool, ToolError, Value, World, execute, function, problems

TOOLS: dict[str, Tool] = {
    tool.name: tool for tool in (*tools_knowledge.TOOLS, *tools_household.TOOLS, *tools_services.TOOLS)
}
HELD_OUT_DOMAINS = ("travel", "bank", "messages")
SEEN = tuple(tool for tool in TOOLS.values() if tool.domain not in HELD_OUT_DOMAINS)
UNSEEN = tuple(tool for tool in TOOLS.values() if tool.domain in HELD_OUT_DOMAINS)


@dataclass(frozen=True)
class Chain:
    """Two tools, the second of which needs a value from the first one's result."""

    first: str
    key: str  # in the first result
    second: str
    param: str  # of the second tool
    tails: tuple[str, ...]  # wordings of the second request; the last is held out


CHAINS = (
    Chain(
        "find_product",
        "product_id",
        "order_product",
        "product_id",
        ("order {quantity} of it", "order that product", "order it, quantity {quantity}", "buy {quantity} pieces"),
    ),
    Chain(
        "order_items",
        "order_id",
        "track_order",
        "order_id",
        ("track that order", "track it", "check where the order is", "see how far it has come"),
    ),
    Chain(
        "add_task",
        "task_id",
        "set_due_date",
        "task_id",
        ("make it due on {date}", "set its due date to {date}", "set the due date to {date}", "let it end by {date}"),
    ),
    Chain(
        "read_file",
        "content",
        "count_words",
        "text",
        ("count the words of its content", "count its words", "count the words in it", "find the word count"),
    ),
    Chain(
        "read_file",
        "content",
        "reverse_text",
        "text",
        ("reverse its content", "reverse the text", "reverse what it says", "flip the letters"),
    ),
    Chain(
        "add_days",
        "date",
        "get_weekday",
        "date",
        (
            "find the weekday of that date",
            "get its weekday",
            "tell me which weekday that is",
            "say the day of the week",
        ),
    ),
    Chain(
        "days_between",
        "days",
        "add_days",
        "days",
        (
            "add as many days to {date}",
            "add that many days to {date}",
            "add the days to {date}",
            "go as far from {date}",
        ),
    ),
    Chain(
        "power",
        "result",
        "percentage",
        "value",
        (
            "take {percent} percent of the result",
            "take {percent} percent of it",
            "compute {percent} percent of that",
            "work out {percent} percent of that",
        ),
    ),
    Chain(
        "get_weather",
        "temperature",
        "set_heating",
        "degrees",
        (
            "set the heating in the {room} to that",
            "heat the {room} to the temperature",
            "set the heating in the {room} to as many degrees",
            "warm the {room} just as much",
        ),
    ),
    Chain(
        "find_flight",
        "flight_id",
        "book_flight",
        "flight_id",
        ("book {seats} seats on it", "book that flight", "book it with {seats} seats", "reserve {seats} places"),
    ),
    Chain(
        "find_account",
        "account",
        "get_balance",
        "account",
        ("get the balance of that account", "get its balance", "tell me the balance", "say how much money is on it"),
    ),
    Chain(
        "find_phone",
        "phone",
        "send_sms",
        "phone",
        (
            "send the text {text} to it",
            "send that phone the text {text}",
            "send it the text {text}",
            "let them know {text}",
        ),
    ),
    Chain(
        "find_email",
        "email",
        "send_email",
        "to",
        (
            "send an email there with subject {subject}",
            "send an email to it with subject {subject}",
            "email that address with the subject {subject}",
            "write there about {subject}",
        ),
    ),
)


def run(world: World, name: str, arguments: Value) -> Result:
    """Execute a call, whatever a model wrote.

    An unknown tool, arguments that violate the schema, a refusal and unusable values (an infinite number, "half past"
    as a time) return `{"error": message}`.
    """
    tool = TOOLS.get(name)
    if tool is None:
        return {"error": f"no tool {name}"}
    faults = problems(function(tool)["function"]["parameters"], arguments)
    if faults:
        return {"error": faults[0]}
    try:
        return execute(tool, world, arguments)
    except (ToolError, ArithmeticError, ValueError) as error:
        return {"error": str(error)}
