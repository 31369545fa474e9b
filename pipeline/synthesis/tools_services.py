"""Sixteen tools of services: shop (in training), travel, bank and messages (held out: no training conversation offers them)."""

from pipeline.synthesis import tool_functions as functions
from pipeline.synthesis.tool_shape import Param, Tool, array, nested, optional, param
from pipeline.synthesis.tool_values import (
    AMOUNT,
    CITY,
    CODE,
    DATE,
    EMAIL,
    FIRST,
    LABEL,
    LAST_NAMES,
    PERSON,
    PHONE,
    PRODUCT,
    TEXT,
    TIME,
    TITLE,
    YES,
    Kind,
    conjunction,
    integer,
    one_of,
    several,
)

CURRENCIES = ("EUR", "USD", "GBP", "JPY", "CHF", "INR")
STREET = Kind(lambda rng: f"{rng.choice(LAST_NAMES)} Street", 0.3)
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

SHOP = (
    Tool(
        name="find_product",
        domain="shop",
        description="Find a product by name.",
        params={"name": param("string", PRODUCT)},
        run=functions.find_product,
        wordings=(
            "find the product {name}",
            "look up the product {name}",
            "find {name} in the shop",
            "search the product {name}",
            "see if the shop sells {name}",
        ),
        missing=(("name", "find a product"),),
        answer="It is {product_id} and costs {price}.",
        fragile="name",
    ),
    Tool(
        name="order_product",
        domain="shop",
        description="Order a product.",
        params={
            "product_id": param("string", CODE),
            "quantity": optional(param("integer", integer(2, 20)), 1),
            "gift": optional(param("boolean", YES), False),
        },
        run=functions.order_product,
        wordings=(
            "order the product {product_id}",
            "order {quantity} of product {product_id}",
            "order product {product_id} with quantity {quantity} and gift {gift}",
            "order {product_id}, quantity {quantity}",
            "buy me {quantity} pieces of {product_id}",
        ),
        missing=(("product_id", "order {quantity} of a product"),),
        answer="Your order is {order_id}.",
    ),
    Tool(
        name="track_order",
        domain="shop",
        description="Track an order.",
        params={"order_id": param("string", CODE, "id of the order")},
        run=functions.track_order,
        wordings=(
            "track the order {order_id}",
            "track order {order_id}",
            "tell me the state of order {order_id}",
            "check where the order {order_id} is",
            "see how far {order_id} has come",
        ),
        missing=(("order_id", "track my order"),),
        answer="The order is {status}.",
    ),
    Tool(
        name="order_items",
        domain="shop",
        description="Order several items at once.",
        params={"items": ITEMS},
        run=functions.order_items,
        wordings=(
            "order the items {items}",
            "order these items: {items}",
            "place one order with the items {items}",
            "order {items} at once",
            "buy {items} in one go",
        ),
        missing=(("items", "order several items"),),
        answer="Your order is {order_id}.",
    ),
)

TRAVEL = (
    Tool(
        name="find_flight",
        domain="travel",
        description="Find a flight between two cities, to fly there on a date.",
        params={"from_city": param("string", CITY), "to_city": param("string", CITY), "date": param("string", DATE)},
        run=functions.find_flight,
        wordings=(
            "find a flight from {from_city} to {to_city} on {date}",
            "find a flight from {from_city} to {to_city} with date {date}",
            "search a flight from the city {from_city} to the city {to_city} on {date}",
            "get me a flight on {date} from {from_city} to {to_city}",
            "see how I can fly from {from_city} to {to_city} on {date}",
        ),
        missing=(
            ("date", "find a flight from {from_city} to {to_city}"),
            ("to_city", "find a flight on {date} from {from_city}"),
        ),
        answer="Flight {flight_id} costs {price}.",
        fragile="from_city",
    ),
    Tool(
        name="book_flight",
        domain="travel",
        description="Book or reserve seats, the places on a flight.",
        params={"flight_id": param("string", CODE), "seats": optional(param("integer", integer(2, 9)), 1)},
        run=functions.book_flight,
        wordings=(
            "book the flight {flight_id}",
            "book {seats} seats on flight {flight_id}",
            "book flight {flight_id} with {seats} seats",
            "book {seats} seats on the flight {flight_id}",
            "reserve {seats} places on {flight_id}",
        ),
        missing=(("flight_id", "book {seats} seats on a flight"),),
        answer="Your booking is {booking_id}.",
    ),
    Tool(
        name="book_hotel",
        domain="travel",
        description="Book a hotel or reserve a room in a city.",
        params={
            "city": param("string", CITY),
            "nights": param("integer", integer(2, 14)),
            "stars": optional(param("integer", integer(2, 5)), 3),
        },
        run=functions.book_hotel,
        wordings=(
            "book a hotel in {city} for {nights} nights",
            "book a hotel in {city} for {nights} nights with {stars} stars",
            "book a hotel in the city {city}, {nights} nights",
            "book {nights} nights at a hotel in {city}",
            "reserve a room with {stars} stars in {city} for {nights} nights",
        ),
        missing=(("nights", "book a hotel in {city}"), ("city", "book a hotel for {nights} nights")),
        answer="Your booking is {booking_id}.",
        fragile="city",
    ),
    Tool(
        name="book_taxi",
        domain="travel",
        description="Book a taxi, a cab that is sent to an address.",
        params={
            "address": nested({"street": ("string", STREET), "number": ("integer", integer(2, 250))}),
            "time": param("string", TIME),
        },
        run=functions.book_taxi,
        wordings=(
            "book a taxi to street {street} number {number} at {time}",
            "book a taxi to {street}, number {number}, at {time}",
            "book a taxi to the address {street} {number} for the time {time}",
            "get a taxi at {time} to {street} number {number}",
            "send a cab to {street} {number} at {time}",
        ),
        missing=(("time", "book a taxi to {street} number {number}"), ("address", "book a taxi at {time}")),
        answer="Your booking is {booking_id}.",
    ),
)

BANK = (
    Tool(
        name="find_account",
        domain="bank",
        description="Find the account of an owner: where somebody banks.",
        params={"owner": param("string", PERSON)},
        run=functions.find_account,
        wordings=(
            "find the account of {owner}",
            "look up the account of {owner}",
            "get the account with owner {owner}",
            "find the account that {owner} has",
            "tell me where {owner} banks",
        ),
        missing=(("owner", "find the account of a friend"),),
        answer="The account is {account}.",
        fragile="owner",
    ),
    Tool(
        name="get_balance",
        domain="bank",
        description="Get the balance of an account: how much money is on it.",
        params={"account": param("string", CODE)},
        run=functions.get_balance,
        wordings=(
            "get the balance of {account}",
            "get the balance of the account {account}",
            "tell me the balance of account {account}",
            "show the balance of {account}",
            "say how much money is on {account}",
        ),
        missing=(("account", "get the balance of my account"),),
        answer="The balance is {balance}.",
    ),
    Tool(
        name="transfer_money",
        domain="bank",
        description="Transfer an amount of money out of one account to another.",
        params={
            "from_account": param("string", CODE),
            "to_account": param("string", CODE),
            "amount": param("number", AMOUNT),
        },
        run=functions.transfer_money,
        wordings=(
            "transfer from {from_account} to {to_account} the amount {amount}",
            "transfer {amount} from {from_account} to {to_account}",
            "transfer the amount {amount} from account {from_account} to account {to_account}",
            "move money from {from_account} to {to_account}, amount {amount}",
            "let {to_account} have {amount} out of {from_account}",
        ),
        missing=(
            ("amount", "transfer money from {from_account} to {to_account}"),
            ("to_account", "transfer {amount} from {from_account}"),
        ),
        answer="I transferred {transferred}.",
    ),
    Tool(
        name="convert_currency",
        domain="bank",
        description="Convert an amount to another currency: what it is worth there.",
        params={
            "amount": param("number", AMOUNT),
            "from_currency": param("string", one_of(*CURRENCIES), enum=CURRENCIES),
            "to_currency": param("string", one_of(*CURRENCIES), enum=CURRENCIES),
        },
        run=functions.convert_currency,
        wordings=(
            "convert {amount} {from_currency} to {to_currency}",
            "convert the amount {amount} from {from_currency} to {to_currency}",
            "turn {amount} {from_currency} into {to_currency}",
            "change {amount} from currency {from_currency} to currency {to_currency}",
            "work out what {amount} {from_currency} is worth in {to_currency}",
        ),
        missing=(("to_currency", "convert {amount} {from_currency} to another currency"),),
        answer="That is {result} {to_currency}.",
    ),
)

MESSAGES = (
    Tool(
        name="send_email",
        domain="messages",
        description="Send an email: write to somebody about a subject.",
        params={
            "to": param("string", EMAIL),
            "subject": param("string", TITLE),
            "body": optional(param(["string", "null"], TEXT), None),
        },
        run=functions.send_email,
        wordings=(
            "send an email to {to} with subject {subject}",
            "send an email to {to} with subject {subject} and body {body}",
            "email {to} with the subject {subject}",
            "send {to} an email, subject {subject}, body {body}",
            "write to {to} about {subject}",
        ),
        missing=(("subject", "send an email to {to}"), ("to", "send an email with subject {subject}")),
        answer="I sent it to {sent}.",
    ),
    Tool(
        name="send_sms",
        domain="messages",
        description="Send a text message to a phone, to let somebody know.",
        params={"phone": param("string", PHONE), "text": param("string", TEXT)},
        run=functions.send_sms,
        wordings=(
            "send to the phone {phone} the text {text}",
            "send the text {text} to {phone}",
            "send {phone} a message with text {text}",
            "send a text message to phone {phone}: {text}",
            "let {phone} know {text}",
        ),
        missing=(("text", "send a text message to {phone}"), ("phone", "send the text message {text}")),
        answer="I sent it to {sent}.",
    ),
    Tool(
        name="schedule_meeting",
        domain="messages",
        description="Schedule a meeting: gather people to talk at a time.",
        params={
            "title": param("string", TITLE),
            "people": array("string", several(FIRST, 2, 3)),
            "time": param("string", TIME),
        },
        run=functions.schedule_meeting,
        wordings=(
            "schedule the meeting {title} with {people} at {time}",
            "schedule a meeting with title {title} for the people {people} at {time}",
            "schedule {title} with {people} at {time}",
            "schedule a meeting at {time} with {people}, title {title}",
            "gather {people} at {time} to talk about {title}",
        ),
        missing=(("time", "schedule the meeting {title} with {people}"),),
        answer="The meeting is at {time}.",
    ),
    Tool(
        name="post_message",
        domain="messages",
        description="Post a message in a channel: tell everyone there.",
        params={
            "channel": param("string", LABEL),
            "text": param("string", TEXT),
            "urgent": optional(param("boolean", YES), False),
        },
        run=functions.post_message,
        wordings=(
            "post in the channel {channel} the text {text}",
            "post {text} in the channel {channel}",
            "post the message {text} in {channel}",
            "post the text {text} in channel {channel} with urgent {urgent}",
            "tell everyone in {channel} that {text}",
        ),
        missing=(("text", "post a message in {channel}"), ("channel", "post the message {text}")),
        answer="I posted it in {posted}.",
    ),
)

TOOLS = (*SHOP, *TRAVEL, *BANK, *MESSAGES)
