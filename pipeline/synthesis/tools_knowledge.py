"""Sixteen tools without state: numbers, text, dates, weather. All four domains occur in training."""

from pipeline.synthesis import tool_functions as functions
from pipeline.synthesis.tool_shape import Tool, array, optional, param
from pipeline.synthesis.tool_values import CITY, DATE, NUMBER, TEXT, TIME, WORD, Kind, integer, one_of, several

UNITS = ("m", "km", "cm", "mile", "foot", "inch")
SENTENCE = Kind(lambda rng: " ".join(WORD.draw(rng) for _ in range(rng.randint(2, 4))), 1.0)

NUMBERS = (
    Tool(
        name="power",
        domain="numbers",
        description="Raise a base to an exponent.",
        params={"base": param("number", NUMBER), "exponent": param("integer", integer(2, 6))},
        run=functions.power,
        wordings=(
            "raise {base} to the power {exponent}",
            "compute {base} to the power of {exponent}",
            "raise the base {base} to the exponent {exponent}",
            "give me {base} to the power {exponent}",
            "work out base {base} with exponent {exponent}",
        ),
        missing=(("exponent", "raise {base} to a power"), ("base", "raise a number to the power {exponent}")),
        answer="The result is {result}.",
    ),
    Tool(
        name="percentage",
        domain="numbers",
        description="Take a percentage of a value.",
        params={"percent": param("number", integer(1, 99)), "value": param("number", NUMBER)},
        run=functions.percentage,
        wordings=(
            "compute {percent} percent of {value}",
            "take {percent} percent of {value}",
            "find {percent}% of {value}",
            "tell me {percent} percent of the value {value}",
            "work out how much {percent} percent of {value} is",
        ),
        missing=(("value", "compute {percent} percent of my number"), ("percent", "take a percentage of {value}")),
        answer="That is {result}.",
    ),
    Tool(
        name="mean",
        domain="numbers",
        description="Mean of some numbers.",
        params={"numbers": array("number", several(integer(1, 99), 2, 4))},
        run=functions.mean,
        wordings=(
            "find the mean of {numbers}",
            "compute the mean of the numbers {numbers}",
            "average {numbers}",
            "get the average of {numbers}",
            "work out the mean value of {numbers}",
        ),
        missing=(("numbers", "compute the mean of my numbers"),),
        answer="The mean is {mean}.",
    ),
    Tool(
        name="convert_length",
        domain="numbers",
        description="Convert a length between units.",
        params={
            "value": param("number", NUMBER),
            "from_unit": param("string", one_of(*UNITS), enum=UNITS),
            "to_unit": param("string", one_of(*UNITS), enum=UNITS),
        },
        run=functions.convert_length,
        wordings=(
            "convert {value} {from_unit} to {to_unit}",
            "turn {value} {from_unit} into {to_unit}",
            "convert the length {value} from {from_unit} to {to_unit}",
            "express {value} {from_unit} in {to_unit}",
            "work out how long {value} {from_unit} is in {to_unit}",
        ),
        missing=(("to_unit", "convert {value} {from_unit} to another unit"),),
        answer="{value} {from_unit} is {result} {to_unit}.",
    ),
)

TEXTS = (
    Tool(
        name="count_words",
        domain="text",
        description="Count the words of a text.",
        params={"text": param("string", SENTENCE)},
        run=functions.count_words,
        wordings=(
            "count the words in {text}",
            "count the words of {text}",
            "tell me the number of words in {text}",
            "say how many words {text} has",
            "find the word count of {text}",
        ),
        missing=(("text", "count the words in my text"),),
        answer="It has {words} words.",
    ),
    Tool(
        name="reverse_text",
        domain="text",
        description="Reverse a text.",
        params={"text": param("string", TEXT, "text to reverse")},
        run=functions.reverse_text,
        wordings=(
            "reverse {text}",
            "reverse the text {text}",
            "write {text} backwards",
            "turn the text {text} around",
            "flip the letters of {text}",
        ),
        missing=(("text", "reverse a text"),),
        answer='Reversed: "{text}".',
    ),
    Tool(
        name="replace_word",
        domain="text",
        description="Replace a word in a text.",
        params={"text": param("string", SENTENCE), "old": param("string", WORD), "new": param("string", WORD)},
        run=functions.replace_word,
        wordings=(
            "in {text} replace {old} with {new}",
            "take the text {text} and replace {old} by {new}",
            "in the text {text} change the old word {old} to the new word {new}",
            "replace {old} with {new} in {text}",
            "edit {text} so that {new} stands for {old}",
        ),
        missing=(("new", "in {text} replace the word {old}"),),
        answer='The text is now "{text}".',
    ),
    Tool(
        name="repeat_text",
        domain="text",
        description="Repeat a text.",
        params={
            "text": param("string", TEXT),
            "times": param("integer", integer(2, 9)),
            "separator": optional(param("string", one_of("-", "+", "/", "*"), "put between"), " "),
        },
        run=functions.repeat_text,
        wordings=(
            "repeat {text} {times} times",
            "write {text} {times} times with separator {separator}",
            "repeat the text {text} {times} times",
            "repeat {text} {times} times with the separator {separator}",
            "give me {text} over and over, {times} times",
        ),
        missing=(("times", "repeat {text} some times"),),
        answer="{text}",
    ),
)

DATES = (
    Tool(
        name="add_days",
        domain="dates",
        description="Add days to a date.",
        params={"date": param("string", DATE), "days": param("integer", integer(2, 90))},
        run=functions.add_days,
        wordings=(
            "add to {date} {days} days",
            "add {days} days to {date}",
            "tell me the date {days} days after {date}",
            "start at the date {date} and go {days} days on",
            "find the day that comes {days} days later than {date}",
        ),
        missing=(("days", "add some days to {date}"), ("date", "add {days} days to my date")),
        answer="That is {date}.",
    ),
    Tool(
        name="days_between",
        domain="dates",
        description="Days from a start to an end date.",
        params={"start": param("string", DATE), "end": param("string", DATE)},
        run=functions.days_between,
        wordings=(
            "count the days from {start} to {end}",
            "count the days between {start} and {end}",
            "find the number of days from start {start} to end {end}",
            "tell me how many days lie between {start} and {end}",
            "measure the days until {end}, beginning with {start}",
        ),
        missing=(("end", "count the days since {start}"),),
        answer="There are {days} days.",
    ),
    Tool(
        name="get_weekday",
        domain="dates",
        description="Weekday of a date.",
        params={"date": param("string", DATE, "as 2025-03-14")},
        run=functions.get_weekday,
        wordings=(
            "find the weekday of {date}",
            "get the weekday of the date {date}",
            "tell me which weekday {date} is",
            "look up the day of the week for {date}",
            "say what day of the week falls on {date}",
        ),
        missing=(("date", "find the weekday of my birthday"),),
        answer="It is a {weekday}.",
    ),
    Tool(
        name="add_minutes",
        domain="dates",
        description="Add minutes to a time.",
        params={"time": param("string", TIME), "minutes": param("integer", integer(2, 180))},
        run=functions.add_minutes,
        wordings=(
            "add {minutes} minutes to {time}",
            "take the time {time} and add {minutes} minutes",
            "tell me the time {minutes} minutes after {time}",
            "add to the time {time} another {minutes} minutes",
            "find what the clock shows {minutes} minutes past {time}",
        ),
        missing=(("minutes", "add some minutes to {time}"),),
        answer="That is {time}.",
    ),
)

DEGREES = ("celsius", "fahrenheit")
WEATHER = (
    Tool(
        name="get_weather",
        domain="weather",
        description="Current weather in a city.",
        params={
            "city": param("string", CITY),
            "unit": optional(param("string", one_of(*DEGREES), enum=DEGREES), "celsius"),
        },
        run=functions.get_weather,
        wordings=(
            "get the weather in {city}",
            "tell me the weather in {city} in {unit}",
            "check the current weather in {city}",
            "get the weather of {city} with unit {unit}",
            "look outside for me in {city}",
        ),
        missing=(("city", "get the weather in {unit}"), ("city", "check the current weather")),
        answer="It is {sky} with {temperature} degrees in {city}.",
        fragile="city",
    ),
    Tool(
        name="get_forecast",
        domain="weather",
        description="Weather forecast for the next days.",
        params={"city": param("string", CITY), "days": optional(param("integer", integer(2, 9)), 3)},
        run=functions.get_forecast,
        wordings=(
            "get the forecast for {city}",
            "get the weather forecast for {city} for {days} days",
            "show me the forecast in {city} for the next {days} days",
            "find the {days} day forecast for {city}",
            "tell me what to expect in {city} over {days} days",
        ),
        missing=(("city", "get the weather forecast for {days} days"),),
        answer="I expect {temperatures} degrees.",
        fragile="city",
    ),
    Tool(
        name="get_wind",
        domain="weather",
        description="Wind speed in a city.",
        params={"city": param("string", CITY)},
        run=functions.get_wind,
        wordings=(
            "get the wind in {city}",
            "find the wind speed in {city}",
            "tell me the wind speed in {city}",
            "check how fast the wind is in {city}",
            "say how hard it blows in {city}",
        ),
        missing=(("city", "find the wind speed"),),
        answer="The wind in {city} has speed {speed}.",
        fragile="city",
    ),
    Tool(
        name="warmest_city",
        domain="weather",
        description="Find the warmest of some cities.",
        params={"cities": array("string", several(CITY, 2, 3), "city names")},
        run=functions.warmest_city,
        wordings=(
            "find the warmest city of {cities}",
            "find the warmest of the cities {cities}",
            "tell me which is the warmest: {cities}",
            "compare {cities} and pick the warmest city",
            "say where it is hottest among {cities}",
        ),
        missing=(("cities", "find the warmest of my cities"),),
        answer="{city} is the warmest.",
    ),
)

TOOLS = (*NUMBERS, *TEXTS, *DATES, *WEATHER)
