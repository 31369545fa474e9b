"""The toolbox: 56 real tools in 14 domains, the held-out domains, and the pairs in which one tool feeds another.

`tools()` returns the entire toolbox. Three domains (`HELD_OUT_DOMAINS`, 12 tools) never occur in training, and two more
(`FRESH_DOMAINS`, 8 tools) occur only with `evaluate.fresh_seed`: no design choice was based on them.
`run(world, name, arguments)` executes a call by name; results, including refusals `{"error": message}`, are JSON
objects. To add a tool, write a function, a PARAMETERS entry and its wordings in `toolbox.yaml` (docs/extending.md).

Every function takes the `ToolWorld` first, then exactly the tool's parameters, and returns a JSON object (the result in
a conversation). It raises ToolError if the world cannot fulfill the request.

Not guaranteed: that the tools match the real world, or sensible results for arguments that do not match the tool's
schema (`run` checks them first).
"""

import datetime
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from pipeline.synthetic.tool_schemas import (
    Chain,
    Param,
    Result,
    ToolError,
    ToolSpec,
    ToolWorld,
    array,
    choice,
    declared,
    execute,
    function,
    hash_of,
    nested,
    noted,
    optional,
    param,
    parse_date,
    problems,
    require_known,
    require_person,
    round_number,
    string,
    whole,
)
from pipeline.synthetic.wording import (
    AMOUNT,
    CITY,
    CODE,
    DATE,
    EMAIL,
    FIRST,
    FOLDER,
    LABEL,
    NUMBER,
    PATH,
    PERSON,
    PHONE,
    PRODUCT,
    ROOM,
    SENTENCE,
    STREET,
    TEXT,
    TIME,
    TITLE,
    WORD,
    YES,
    Kind,
    Value,
    conjunction,
    integer,
    one_of,
    products,
    several,
    table,
    words,
)

HELD_OUT_DOMAINS = ("travel", "bank", "messages")
FRESH_DOMAINS = ("library", "garden")
METRES = {"m": 1.0, "km": 1000.0, "cm": 0.01, "mile": 1609.344, "foot": 0.3048, "inch": 0.0254}
EUROS = {"EUR": 1.0, "USD": 0.9, "GBP": 1.2, "JPY": 0.006, "CHF": 1.05, "INR": 0.01}


@cache
def tools() -> dict[str, ToolSpec]:
    """The tools, by name."""
    functions = {function.__name__: (function, params) for function, params in PARAMETERS}
    tools = {
        name: _declared(name, domain, **row) if "takes" in row else _tool(domain, *functions[name], **row)
        for domain, rows in table("toolbox.yaml")["tools"].items()
        for name, row in rows.items()
    }
    assert set(functions) <= set(tools), set(functions) - set(tools)
    return tools


def _declared(name: str, domain: str, *, takes: str, **row: Any) -> ToolSpec:
    """A tool without its own function, from its row: `takes` has one parameter per line."""
    return replace(_tool(domain, noted, dict(map(declared, takes.splitlines())), **row), name=name)


def _tool(
    domain: str,
    run: Callable[..., Result],
    params: dict[str, Param],
    *,
    description: str,
    wordings: str,
    missing: str,
    answer: str,
    fragile: str | None = None,
) -> ToolSpec:
    """A tool from its row: one wording per line, and lines `parameter: wording without it`."""
    without = [line.split(": ", 1) for line in missing.splitlines()]
    return ToolSpec(
        name=run.__name__,
        domain=domain,
        description=description,
        params=params,
        run=run,
        wordings=tuple(wordings.splitlines()),
        missing=tuple((name, wording) for name, wording in without),
        answer=answer,
        fragile=fragile,
    )


@cache
def seen() -> tuple[ToolSpec, ...]:
    """The tools that occur in training."""
    return tuple(tool for tool in tools().values() if tool.domain not in HELD_OUT_DOMAINS + FRESH_DOMAINS)


@cache
def unseen() -> tuple[ToolSpec, ...]:
    """The tools in HELD_OUT_DOMAINS, which do not occur in training."""
    return tuple(tool for tool in tools().values() if tool.domain in HELD_OUT_DOMAINS)


@cache
def fresh() -> tuple[ToolSpec, ...]:
    """The tools that occur only if `evaluate.fresh_seed` is set."""
    return tuple(tool for tool in tools().values() if tool.domain in FRESH_DOMAINS)


@cache
def chains() -> tuple[Chain, ...]:
    """The pairs of tools in which one feeds the other."""
    return tuple(Chain(**{**row, "tails": tuple(row["tails"].splitlines())}) for row in table("toolbox.yaml")["chains"])


def run(world: ToolWorld, name: str, arguments: Value) -> Result:
    """Execute any call that a model wrote, valid or not.

    An unknown tool, arguments that violate the schema, a refusal and unusable values (an infinite number, "half past"
    as a time) return `{"error": message}`.
    """
    tool = tools().get(name)
    if tool is None:
        return {"error": f"no tool {name}"}
    faults = problems(function(tool)["function"]["parameters"], arguments)
    if faults:
        return {"error": faults[0]}
    try:
        return execute(tool, world, arguments)
    except (ToolError, ArithmeticError, ValueError) as error:
        return {"error": str(error)}


# -- functions ---------------------------------------------------------------------------------------------------------


def power(_: ToolWorld, base: float, exponent: int) -> Result:
    """Raise a base to an exponent."""
    if abs(exponent) > 20:
        raise ToolError("the exponent is at most 20")
    return {"result": round_number(float(base) ** exponent)}


def percentage(_: ToolWorld, percent: float, value: float) -> Result:
    """Take a percentage of a value."""
    return {"result": round_number(percent * value / 100)}


def mean(_: ToolWorld, numbers: list[float]) -> Result:
    """Mean of some numbers."""
    return {"mean": round_number(sum(numbers) / len(numbers))}


def convert_length(_: ToolWorld, value: float, from_unit: str, to_unit: str) -> Result:
    """Convert a length between units."""
    return {"result": round_number(value * METRES[from_unit] / METRES[to_unit])}


def count_words(_: ToolWorld, text: str) -> Result:
    """Count the words of a text."""
    return {"words": len(text.split())}


def reverse_text(_: ToolWorld, text: str) -> Result:
    """Reverse a text."""
    return {"text": text[::-1]}


def replace_word(_: ToolWorld, text: str, old: str, new: str) -> Result:
    """Replace a word in a text."""
    return {"text": " ".join(new if word == old else word for word in text.split(" "))}


def repeat_text(_: ToolWorld, text: str, times: int, separator: str = " ") -> Result:
    """Repeat a text."""
    return {"text": separator.join([text] * min(times, 20))}


def add_days(_: ToolWorld, date: str, days: int) -> Result:
    """Add days to a date."""
    return {"date": (parse_date(date) + datetime.timedelta(days=days)).isoformat()}


def days_between(_: ToolWorld, start: str, end: str) -> Result:
    """Days from a start date to an end date."""
    return {"days": (parse_date(end) - parse_date(start)).days}


def get_weekday(_: ToolWorld, date: str) -> Result:
    """Weekday of a date."""
    names = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
    return {"weekday": names[parse_date(date).weekday()]}


def add_minutes(_: ToolWorld, time: str, minutes: int) -> Result:
    """Add minutes to a time."""
    hours, _colon, rest = time.partition(":")
    total = (int(hours) * 60 + int(rest) + minutes) % 1440
    return {"time": f"{total // 60:02d}:{total % 60:02d}"}


def get_weather(_: ToolWorld, city: str, unit: str = "celsius") -> Result:
    """Current weather in a city."""
    celsius = hash_of("weather", require_known("city", city, words("cities"))) % 35 - 2
    sky = ("sunny", "cloudy", "rainy", "windy", "foggy")[hash_of("sky", city) % 5]
    return {"temperature": celsius if unit == "celsius" else round_number(celsius * 1.8 + 32), "sky": sky}


def get_forecast(_: ToolWorld, city: str, days: int = 3) -> Result:
    """Weather forecast for the next few days."""
    require_known("city", city, words("cities"))
    return {"temperatures": [hash_of("forecast", city, d) % 30 for d in range(min(days, 14))]}


def get_wind(_: ToolWorld, city: str) -> Result:
    """Wind speed in a city."""
    return {"speed": hash_of("wind", require_known("city", city, words("cities"))) % 60}


def warmest_city(_: ToolWorld, cities: list[str]) -> Result:
    """Find the warmest of some cities."""
    return {
        "city": max(
            cities, key=lambda city: (hash_of("weather", require_known("city", city, words("cities"))) % 35, city)
        )
    }


def find_phone(world: ToolWorld, name: str) -> Result:
    """Find the phone number of a person."""
    if name in world.contacts:
        return {"phone": world.contacts[name]["phone"]}
    return {"phone": f"{hash_of('phone', require_person(name)) % 800 + 200}-{hash_of('line', name) % 9000 + 1000}"}


def find_email(world: ToolWorld, name: str) -> Result:
    """Find the email address of a person."""
    if name in world.contacts and world.contacts[name]["email"]:
        return {"email": world.contacts[name]["email"]}
    first, nouns = require_person(name).split()[0].lower(), words("nouns")
    return {"email": f"{first}.{nouns[hash_of('mail', name) % len(nouns)]}@{nouns[hash_of(name) % 40]}.org"}


def add_contact(world: ToolWorld, name: str, phone: str, email: str | None = None) -> Result:
    """Add a contact."""
    world.contacts[name] = {"phone": phone, "email": email}
    return {"saved": name}


def delete_contact(world: ToolWorld, name: str) -> Result:
    """Delete a contact."""
    if name not in world.contacts:
        require_person(name)
    world.contacts.pop(name, None)
    world.removed.append(name)
    return {"deleted": name}


def add_task(world: ToolWorld, title: str, priority: str = "normal") -> Result:
    """Add a task to the list."""
    world.tasks.append({"title": title, "priority": priority})
    return {"task_id": f"T{hash_of('task', title) % 9000 + 1000}"}


def set_due_date(world: ToolWorld, task_id: str, date: str) -> Result:
    """Set the due date of a task."""
    world.due[task_id] = parse_date(date).isoformat()
    return {"task_id": task_id, "due": date}


def set_reminder(world: ToolWorld, text: str, minutes: int) -> Result:
    """Remind the user after some minutes."""
    world.timers.append({"label": text, "minutes": minutes, "kind": "reminder"})
    return {"minutes": minutes}


def start_timer(world: ToolWorld, minutes: int, label: str = "timer") -> Result:
    """Start a timer."""
    world.timers.append({"label": label, "minutes": minutes, "kind": "timer"})
    return {"label": label, "minutes": minutes}


def _room(world: ToolWorld, room: str) -> Result:
    return world.rooms.setdefault(require_known("room", room, words("rooms")), {})


def set_light(world: ToolWorld, room: str, brightness: int) -> Result:
    """Set the light in a room."""
    _room(world, room)["light"] = brightness
    return {"room": room, "brightness": brightness}


def set_heating(world: ToolWorld, room: str, degrees: float) -> Result:
    """Set the heating in a room."""
    _room(world, room)["heating"] = degrees
    return {"room": room, "degrees": degrees}


def play_music(world: ToolWorld, song: str, room: str = "kitchen") -> Result:
    """Play a song in a room."""
    _room(world, room)["song"] = song
    return {"playing": song, "room": room}


def save_scene(world: ToolWorld, name: str, settings: Result) -> Result:
    """Save a scene with light and heating."""
    world.scenes[name] = settings
    return {"scene": name}


def create_file(world: ToolWorld, path: str, content: str = "") -> Result:
    """Create a file."""
    world.files[path] = content
    return {"created": path}


def read_file(world: ToolWorld, path: str) -> Result:
    """Read a file."""
    nouns = words("nouns")
    content = [nouns[hash_of(path, i) % len(nouns)] for i in range(2 + hash_of(path) % 3)]
    return {"content": world.files.get(path, " ".join(content))}


def rename_file(world: ToolWorld, path: str, new_path: str) -> Result:
    """Rename a file."""
    world.files[new_path] = world.files.pop(path, "")
    return {"renamed": new_path}


def move_files(world: ToolWorld, paths: list[str], folder: str) -> Result:
    """Move files to a folder."""
    for path in paths:
        world.files[f"{folder}/{path.rsplit('/', 1)[-1]}"] = world.files.pop(path, "")
    return {"moved": len(paths)}


def find_product(_: ToolWorld, name: str) -> Result:
    """Find a product by name."""
    require_known("product", name, products())
    return {"product_id": f"P{hash_of('product', name) % 900 + 100}", "price": hash_of("price", name) % 90 + 9}


def order_product(world: ToolWorld, product_id: str, quantity: int = 1, gift: bool = False) -> Result:
    """Order a product."""
    world.orders.append({"product_id": product_id, "quantity": quantity, "gift": gift})
    return {"order_id": f"R{hash_of('order', product_id, quantity) % 90000 + 10000}"}


def track_order(_: ToolWorld, order_id: str) -> Result:
    """Track an order."""
    return {"status": ("packed", "sent", "delivered", "delayed")[hash_of("track", order_id) % 4]}


def order_items(world: ToolWorld, items: list[Result]) -> Result:
    """Order several items at once."""
    world.orders.extend(items)
    return {"order_id": f"R{hash_of('items', items) % 90000 + 10000}"}


def find_flight(_: ToolWorld, from_city: str, to_city: str, date: str) -> Result:
    """Find a flight between two cities."""
    require_known("city", from_city, words("cities"))
    require_known("city", to_city, words("cities"))
    seed = (from_city, to_city, parse_date(date))
    return {"flight_id": f"F{hash_of('flight', *seed) % 900 + 100}", "price": hash_of("fare", *seed) % 400 + 60}


def book_flight(world: ToolWorld, flight_id: str, seats: int = 1) -> Result:
    """Book seats on a flight."""
    world.bookings.append({"flight_id": flight_id, "seats": seats})
    return {"booking_id": f"B{hash_of('seat', flight_id) % 9000 + 1000}"}


def book_hotel(world: ToolWorld, city: str, nights: int, stars: int = 3) -> Result:
    """Book a hotel in a city."""
    world.bookings.append({"city": require_known("city", city, words("cities")), "nights": nights, "stars": stars})
    return {"booking_id": f"B{hash_of('hotel', city, nights) % 9000 + 1000}"}


def book_taxi(world: ToolWorld, address: Result, time: str) -> Result:
    """Book a taxi to an address."""
    world.bookings.append({"address": address, "time": time})
    return {"booking_id": f"B{hash_of('taxi', sorted(address.items()), time) % 9000 + 1000}"}


def find_account(_: ToolWorld, owner: str) -> Result:
    """Find the account of an owner."""
    return {"account": f"AC{hash_of('account', require_person(owner)) % 9000 + 1000}"}


def get_balance(world: ToolWorld, account: str) -> Result:
    """Get the balance of an account."""
    moved = sum(
        (t["to_account"] == account) * t["amount"] - (t["from_account"] == account) * t["amount"]
        for t in world.transfers
    )
    return {"balance": round_number(hash_of("balance", account) % 9000 + 3000 + moved)}


def transfer_money(world: ToolWorld, from_account: str, to_account: str, amount: float) -> Result:
    """Transfer an amount between accounts."""
    if amount > 20000:
        raise ToolError("the limit is 20000")
    world.transfers.append({"from_account": from_account, "to_account": to_account, "amount": amount})
    return {"transferred": amount}


def convert_currency(_: ToolWorld, amount: float, from_currency: str, to_currency: str) -> Result:
    """Convert an amount to another currency."""
    return {"result": round_number(amount * EUROS[from_currency] / EUROS[to_currency])}


def send_email(world: ToolWorld, to: str, subject: str, body: str | None = None) -> Result:
    """Send an email."""
    world.sent.append({"to": to, "subject": subject, "body": body})
    return {"sent": to}


def send_sms(world: ToolWorld, phone: str, text: str) -> Result:
    """Send a text message to a phone."""
    world.sent.append({"phone": phone, "text": text})
    return {"sent": phone}


def schedule_meeting(world: ToolWorld, title: str, people: list[str], time: str) -> Result:
    """Schedule a meeting with people."""
    world.sent.append({"title": title, "people": people, "time": time})
    return {"meeting": title, "time": time}


def post_message(world: ToolWorld, channel: str, text: str, urgent: bool = False) -> Result:
    """Post a message to a channel."""
    world.sent.append({"channel": channel, "text": text, "urgent": urgent})
    return {"posted": channel}


def find_book(_: ToolWorld, author: str) -> Result:
    """Find a book by an author."""
    return {"book_id": f"BK{hash_of('book', require_person(author)) % 9000 + 1000}"}


# -- parameters --------------------------------------------------------------------------------------------------------

Signature = tuple[Callable[..., Result], dict[str, Param]]


def _takes(run: Callable[..., Result], /, **params: Param) -> Signature:
    return run, params


PRIORITIES = ("low", "normal", "high")
DEGREES = ("celsius", "fahrenheit")
UNITS, CURRENCIES = tuple(METRES), tuple(EUROS)
ITEMS = Param(
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"product_id": {"type": "string"}, "quantity": {"type": "integer"}},
            "required": ["product_id", "quantity"],
        },
    },
    Kind(
        lambda rng: [{"product_id": CODE.draw(rng), "quantity": rng.randint(2, 9)} for _ in range(rng.randint(1, 2))],
        show=lambda items: conjunction([f"{item['quantity']} of {item['product_id']}" for item in items]),
    ),
)

PARAMETERS: tuple[Signature, ...] = (
    # numbers
    _takes(power, base=param("number", NUMBER), exponent=whole(2, 6)),
    _takes(percentage, percent=param("number", integer(1, 99)), value=param("number", NUMBER)),
    _takes(mean, numbers=array("number", several(integer(1, 99), 2, 4))),
    _takes(convert_length, value=param("number", NUMBER), from_unit=choice(*UNITS), to_unit=choice(*UNITS)),
    # text
    _takes(count_words, text=string(SENTENCE)),
    _takes(reverse_text, text=string(TEXT, "text to reverse")),
    _takes(replace_word, text=string(SENTENCE), old=string(WORD), new=string(WORD)),
    _takes(
        repeat_text,
        text=string(TEXT),
        times=whole(2, 9),
        separator=optional(string(one_of("-", "+", "/", "*"), "put between"), " "),
    ),
    # dates
    _takes(add_days, date=string(DATE), days=whole(2, 90)),
    _takes(days_between, start=string(DATE), end=string(DATE)),
    _takes(get_weekday, date=string(DATE, "as 2025-03-14")),
    _takes(add_minutes, time=string(TIME), minutes=whole(2, 180)),
    # weather
    _takes(get_weather, city=string(CITY), unit=optional(choice(*DEGREES), "celsius")),
    _takes(get_forecast, city=string(CITY), days=optional(whole(2, 9), 3)),
    _takes(get_wind, city=string(CITY)),
    _takes(warmest_city, cities=array("string", several(CITY, 2, 3), "city names")),
    # contacts
    _takes(find_phone, name=string(PERSON)),
    _takes(find_email, name=string(PERSON)),
    _takes(
        add_contact, name=string(PERSON), phone=string(PHONE), email=optional(param(["string", "null"], EMAIL), None)
    ),
    _takes(delete_contact, name=string(PERSON, "full name")),
    # tasks
    _takes(add_task, title=string(TITLE), priority=optional(choice(*PRIORITIES), "normal")),
    _takes(set_due_date, task_id=string(CODE), date=string(DATE)),
    _takes(set_reminder, text=string(TEXT), minutes=whole(2, 120)),
    _takes(start_timer, minutes=whole(2, 90), label=optional(string(LABEL, "name of the timer"), "timer")),
    # home
    _takes(set_light, room=string(ROOM), brightness=whole(2, 100, "0 to 100")),
    _takes(set_heating, room=string(ROOM), degrees=param("number", integer(14, 26))),
    _takes(play_music, song=string(TITLE), room=optional(string(ROOM), "kitchen")),
    _takes(
        save_scene,
        name=string(LABEL),
        settings=nested({"light": ("integer", integer(0, 100)), "heating": ("integer", integer(14, 26))}),
    ),
    # files
    _takes(create_file, path=string(PATH), content=optional(string(TEXT), "")),
    _takes(read_file, path=string(PATH)),
    _takes(rename_file, path=string(PATH), new_path=string(PATH)),
    _takes(move_files, paths=array("string", several(PATH, 2, 3)), folder=string(FOLDER)),
    # shop
    _takes(find_product, name=string(PRODUCT)),
    _takes(
        order_product,
        product_id=string(CODE),
        quantity=optional(whole(2, 20), 1),
        gift=optional(param("boolean", YES), False),
    ),
    _takes(track_order, order_id=string(CODE, "id of the order")),
    _takes(order_items, items=ITEMS),
    # travel (held out)
    _takes(find_flight, from_city=string(CITY), to_city=string(CITY), date=string(DATE)),
    _takes(book_flight, flight_id=string(CODE), seats=optional(whole(2, 9), 1)),
    _takes(book_hotel, city=string(CITY), nights=whole(2, 14), stars=optional(whole(2, 5), 3)),
    _takes(
        book_taxi,
        address=nested({"street": ("string", STREET), "number": ("integer", integer(2, 250))}),
        time=string(TIME),
    ),
    # bank (held out)
    _takes(find_account, owner=string(PERSON)),
    _takes(get_balance, account=string(CODE)),
    _takes(transfer_money, from_account=string(CODE), to_account=string(CODE), amount=param("number", AMOUNT)),
    _takes(
        convert_currency,
        amount=param("number", AMOUNT),
        from_currency=choice(*CURRENCIES),
        to_currency=choice(*CURRENCIES),
    ),
    # messages (held out)
    _takes(send_email, to=string(EMAIL), subject=string(TITLE), body=optional(param(["string", "null"], TEXT), None)),
    _takes(send_sms, phone=string(PHONE), text=string(TEXT)),
    _takes(schedule_meeting, title=string(TITLE), people=array("string", several(FIRST, 2, 3)), time=string(TIME)),
    _takes(post_message, channel=string(LABEL), text=string(TEXT), urgent=optional(param("boolean", YES), False)),
    # library (fresh)
    _takes(find_book, author=string(PERSON)),
)
