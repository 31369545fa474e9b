"""Odd requests that no normal client sends: bodies, schemas, headers and paths drawn from a seed. Used by `abuse.py`.

    Maker(random.Random(seed)).make() -> Odd(kind, method, path, headers, body, cut)

Unlike requests generated from the API description (tests/test_api_fuzz.py), these target the code behind the API: valid
but unsatisfiable schemas, numbers at the limits of their formats, Markdown that is slow to parse, texts that spell
control tokens, bytes that are almost JSON, clients that disconnect mid-stream.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

NUMBERS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    0.5,
    -0.5,
    1e-9,
    1e-45,
    1e-300,
    5e-324,
    1e15,
    2**31,
    2**53,
    2**53 + 1,
    2**63,
    2**64,
    -(2**63),
    1e22,
    1e300,
    -1e300,
    10**60,
    0.1,
    99.999,
    9973,
    9999991,
]
TEXTS = [
    "",
    "a",
    "<|im_end|>",
    "<tool_call>\n{}",
    "\u0000",
    "é" * 50,
    "日本語",
    "🚂" * 9,
    "\u202e",
    "a\r\nb: c",
    "{{ 7 * 7 }}",
    "../../etc/passwd",
    "%00",
    "x" * 3000,
    '"}]}',
    "\\",
    "null",
    "NaN",
]
PATTERNS = [
    "^a{1,40}$",
    "(a|a)*b",
    "(x+x+)+y",
    "[a-z]*a.{15}",
    "^\\d{3}-\\d{4}$",
    "^[^]]{0,90}$",
    "(?=a)b",
    "\\p{L}+",
    "(?i)abc",
    "^$",
    "[",
    "(",
    "a{5,2}",
    "\\",
    "^((ab){2}c){3}$",
    ".*",
    "a^",
    "$a",
    "\\bword\\b",
    "(?P<n>a)(?P=n)",
    "^.{200,900}$",
]
KINDS_OF_VALUE = ["string", "integer", "number", "boolean", "null", "object", "array"]
PIECES = [
    "# a\n",
    "> " * 30,
    "- " * 40,
    "[" * 400,
    "](",
    "*" * 300,
    "`" * 90,
    "```python\n",
    "~~~\n",
    "<b>",
    "|a|b|\n|-|-|\n",
    "&#0;",
    "![x](y)",
    "\\" * 50,
    "1. ",
    "    ",
    "\n\n",
    "[a]: b\n",
    "<!--",
    "http://a.b/",
    "_" * 200,
    "~~",
]
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "FOO"]
PATHS = [
    "/",
    "/health",
    "/metrics",
    "/v1/models",
    "/v1/models/nano",
    "/v1/models/%00",
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize",
    "/render",
    "/page/x.js",
    "/page/..%2fapi.py",
    "//v1/models",
    "/v1/models/" + "a" * 900,
    "/%ff",
    "/v1/chat/completions/",
    "/openapi.json",
    "/x?y=" + "z" * 500,
]


@dataclass(frozen=True)
class Odd:
    """One request. `cut`: bytes of the answer after which the client leaves."""

    kind: str
    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None


class Maker:
    """Draws requests."""

    def __init__(self, draw: random.Random, model: str = "nano", masked: str = "masked", judge: str = "judge") -> None:
        self.draw, self.model, self.masked, self.judge = draw, model, masked, judge
        self.kinds: list[Callable[[], Odd]] = [
            self.sampled,
            self.shaped,
            self.called,
            self.completed,
            self.mutated,
            self.raw,
            self.headed,
            self.rendered,
            self.told,
            self.judged,
            self.unread,
            self.denoised,
            self.scored,
        ]

    def make(self) -> Odd:
        """The next request."""
        return self.draw.choice(self.kinds)()

    # -- with generation -----------------------------------------------------------------------------------------------

    def sampled(self) -> Odd:
        """Sampling parameters at their limits."""
        draw = self.draw
        body = self.chat() | {
            "temperature": draw.choice([0, 1e-300, 5e-324, 1e-46, 1e-30, 1e-6, 1e-5, 0.3, 2]),
            "top_p": draw.choice([1, 1e-300, 5e-324, 1e-10, 0.5]),
            "top_k": draw.choice([None, 0, 1, 319, 10**6]),
            "seed": draw.choice([0, -1, 2**63 - 1, -(2**63)]),
            "logit_bias": {
                str(draw.randrange(340)): draw.choice([-100, 100, 0, 1e-300]) for _ in range(draw.randrange(4))
            },
            "n": draw.randint(1, 3),
        }
        if draw.random() < 0.5:
            body |= {"logprobs": True, "top_logprobs": draw.choice([0, 1, 20])}
        return self.post("sampled", "/v1/chat/completions", body)

    def shaped(self) -> Odd:
        """An answer with a random schema."""
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": self.schema(4)}}
        return self.post(
            "shaped",
            "/v1/chat/completions",
            self.chat() | {"response_format": form, "max_tokens": self.draw.choice([1, 20, 60])},
        )

    def called(self) -> Odd:
        """Tool calls with random schemas."""
        names = [self.draw.choice(["f", "g.h", "a" * 64, "", "x y", "f-1"]) for _ in range(self.draw.randint(1, 3))]
        tools = [{"type": "function", "function": {"name": name, "parameters": self.parameters()}} for name in names]
        choice = self.draw.choice(["auto", "none", "required", {"type": "function", "function": {"name": names[0]}}])
        return self.post(
            "called", "/v1/chat/completions", self.chat() | {"tools": tools, "tool_choice": choice, "max_tokens": 60}
        )

    def completed(self) -> Odd:
        """Completions of strings and ids, echoed and scored."""
        draw = self.draw
        prompt = draw.choice(
            [
                self.text(),
                [self.text()] * 2,
                [draw.randrange(330) for _ in range(draw.randint(1, 60))],
                [[5]] * 3,
                [],
                [[]],
                "x" * 90_000,
                [[70] * 2047],
            ]
        )
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": draw.choice([0, 1, 8, None]),
            "echo": draw.choice([True, False, None]),
            "logprobs": draw.choice([None, 0, 5, 20]),
            "suffix": draw.choice([None, None, self.text()]),
            "n": draw.choice([1, 2]),
            "stream": draw.random() < 0.3,
        }
        return self.post("completed", "/v1/completions", body)

    def denoised(self) -> Odd:
        """A chat with a masked-diffusion model: its canvases, and parameters that it does not support."""
        draw = self.draw
        more = draw.choice(
            [
                {},
                {"stream": True, "stream_options": {"include_denoising": True}},
                {"logprobs": True},
                {"n": 2},
                {"stop": self.text()},
            ]
        )
        cold = {"temperature": draw.choice([0, 1e-300, 1, 2]), "top_p": draw.choice([1, 1e-300, 0.9])}
        return self.post("denoised", "/v1/chat/completions", self.chat() | {"model": self.masked} | cold | more)

    def unread(self) -> Odd:
        """A stream whose client disconnects."""
        body = self.chat() | {"stream": True, "max_tokens": 200, "ignore_eos": True, "n": self.draw.randint(1, 4)}
        made = self.post("unread", "/v1/chat/completions", body)
        return Odd(made.kind, made.method, made.path, made.body, made.headers, cut=self.draw.choice([0, 1, 300, 2000]))

    # -- without generation --------------------------------------------------------------------------------------------

    def rendered(self) -> Odd:
        """Markdown made of fragments."""
        text = "".join(self.draw.choice(PIECES) for _ in range(self.draw.randint(0, 60)))
        return self.post("rendered", "/render", {"markdown": text})

    def told(self) -> Odd:
        """Conversions of strings to ids and back."""
        path = self.draw.choice(["/tokenize", "/detokenize", "/apply-template"])
        ids = [self.draw.choice([0, 5, 319, 320, 2**31 - 1, -1]) for _ in range(self.draw.randrange(9))]
        return self.post(
            "told", path, {"model": self.model, "prompt": self.text(), "tokens": ids, "messages": self.messages()}
        )

    def scored(self) -> Odd:
        """Conversations for the reward model."""
        talks = [
            {"messages": [*self.messages(), {"role": "assistant", "content": self.text()}]}
            for _ in range(self.draw.randint(1, 3))
        ]
        return self.post(
            "scored", "/score", {"model": self.draw.choice([self.judge, self.model]), "conversations": talks}
        )

    def judged(self) -> Odd:
        """Preferences, most of them refused."""
        sides = [[{"role": self.draw.choice(["assistant", "user"]), "content": self.text()}] for _ in range(2)]
        return self.post(
            "judged",
            "/preferences",
            {"model": self.model, "prompt": self.messages(), "chosen": sides[0], "rejected": sides[1]},
        )

    def mutated(self) -> Odd:
        """A valid body with a few arbitrary fields."""
        path = self.draw.choice(
            [
                "/v1/chat/completions",
                "/v1/completions",
                "/tokenize",
                "/score",
                "/preferences",
                "/apply-template",
                "/render",
                "/detokenize",
            ]
        )
        body: dict[str, Any] = self.chat() | {
            "prompt": "a",
            "markdown": "a",
            "tokens": [5],
            "conversations": [],
            "chosen": [],
            "rejected": [],
        }
        for name in self.draw.sample(sorted(body), 2):
            body[name] = self.value(3)
        body[
            self.draw.choice(
                ["tools", "response_format", "stop", "logit_bias", "stream_options", "tool_choice", "seed"]
            )
        ] = self.value(3)
        return self.post("mutated", path, body)

    def raw(self) -> Odd:
        """Bytes that are almost JSON."""
        draw = self.draw
        good = json.dumps(self.chat()).encode()
        place = draw.randrange(len(good))
        made = draw.choice(
            [
                good[:place],
                good + good,
                b"\xef\xbb\xbf" + good,
                good.replace(b'"nano"', b'"\\ud800"'),
                good[:place] + bytes([draw.randrange(256)]) + good[place:],
                b"[" * 5000,
                b'{"a":' * 900,
                b"9" * 5000,
                b"1e999",
                b"-0",
                b"{}",
                b"[]",
                b'""',
                b"null",
                b" ",
                good.decode().encode("utf-16"),
                b"[],[]",
                b'{"model": "nano", "prompt": [' + b"[]," * 20_000 + b"[]]}",
                good.replace(b"4", b"1e999"),
                b'{"model": "nano", "model": 5}',
            ]
        )
        return Odd(
            "raw",
            "POST",
            draw.choice(["/v1/chat/completions", "/v1/completions", "/tokenize"]),
            made,
            {"content-type": "application/json"},
        )

    def headed(self) -> Odd:
        """Odd methods, paths and headers."""
        draw = self.draw
        headers = {
            "content-type": draw.choice(
                ["application/json", "application/json;charset=x", "text/plain", "application/json, text/html", ""]
            )
        }
        headers |= draw.choice(
            [
                {},
                {"origin": "null"},
                {"host": "evil.example"},
                {"authorization": "Bearer"},
                {"authorization": "Bearer " + "k" * 5000},
                {"accept": "*/*;q=x"},
                {"x-y": "z" * 9000},
                {"expect": "100-continue"},
                {"if-none-match": "*"},
                {"content-length": "x"},
            ]
        )
        return Odd("headed", draw.choice(METHODS), draw.choice(PATHS), draw.choice([b"", b"{}", b"[1]"]), headers)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def post(self, kind: str, path: str, body: Any) -> Odd:
        """A POST request with a JSON body."""
        return Odd(kind, "POST", path, json.dumps(body).encode(), {"content-type": "application/json"})

    def chat(self) -> dict[str, Any]:
        """A small valid request."""
        return {"model": self.model, "messages": self.messages(), "max_tokens": 4}

    def messages(self) -> list[dict[str, Any]]:
        """A conversation."""
        return [
            {"role": self.draw.choice(["user", "user", "system", "developer"]), "content": self.text()}
            for _ in range(self.draw.randint(1, 3))
        ]

    def text(self) -> str:
        """A string."""
        return self.draw.choice(TEXTS)

    def value(self, depth: int) -> Any:
        """Any JSON value."""
        made = self.draw.randrange(7 if depth else 5)
        if made < 5:
            return [self.draw.choice(NUMBERS), self.text(), None, True, False][made]
        if made == 5:
            return [self.value(depth - 1) for _ in range(self.draw.randrange(4))]
        return {
            self.draw.choice(["a", "type", "role", "name", "function", "", "schema"]): self.value(depth - 1)
            for _ in range(self.draw.randrange(4))
        }

    def schema(self, depth: int) -> Any:
        """A schema: mostly valid for its draft, often unsatisfiable."""
        draw = self.draw
        if draw.random() < 0.5:
            return self.plain(depth)
        if draw.random() < 0.04:
            return self.value(2)
        found: dict[str, Any] = {}
        if draw.random() < 0.8:
            found["type"] = draw.choice(KINDS_OF_VALUE) if draw.random() < 0.85 else draw.sample(KINDS_OF_VALUE, 2)
        for key, share in (
            ("minimum", 0.2),
            ("maximum", 0.2),
            ("exclusiveMinimum", 0.1),
            ("exclusiveMaximum", 0.1),
            ("multipleOf", 0.1),
        ):
            if draw.random() < share:
                found[key] = draw.choice(NUMBERS)
        for key in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"):
            if draw.random() < 0.08:
                found[key] = draw.choice([0, 1, 2, 5, 40, 600, 10**6, 10**30])
        for key, make in (
            ("pattern", lambda: draw.choice(PATTERNS)),
            ("format", lambda: draw.choice(["date", "uuid", "email", "uri", "x"])),
            ("enum", lambda: [self.value(1) for _ in range(draw.randrange(4))]),
            ("const", lambda: self.value(2)),
            ("$ref", lambda: draw.choice(["#", "#/properties/a", "#/$defs/a", "http://127.0.0.1:1/x", "#/$defs/%25"])),
            ("uniqueItems", lambda: True),
            ("required", lambda: draw.sample("abc", draw.randint(1, 2))),
        ):
            if draw.random() < 0.07:
                found[key] = make()
        if depth and draw.random() < 0.7:
            key = draw.choice(
                [
                    "properties",
                    "properties",
                    "patternProperties",
                    "$defs",
                    "items",
                    "additionalProperties",
                    "prefixItems",
                    "anyOf",
                    "allOf",
                    "oneOf",
                    "not",
                ]
            )
            inner = [self.schema(depth - 1) for _ in range(draw.randint(1, 3))]
            if key in ("properties", "$defs", "patternProperties"):
                names = (
                    draw.sample("abc", len(inner))
                    if key != "patternProperties"
                    else [draw.choice(PATTERNS) for _ in inner]
                )
                found[key] = dict(zip(names, inner))
            else:
                found[key] = inner if key in ("prefixItems", "anyOf", "allOf", "oneOf") else inner[0]
        return found

    def parameters(self) -> Any:
        """A tool's parameters, mostly an object."""
        if self.draw.random() < 0.3:
            return self.schema(3)
        return {"type": "object", "properties": {"a": self.schema(2), "b": self.plain(1)}, "required": ["a"]}

    def plain(self, depth: int) -> dict[str, Any]:
        """A schema that most models can satisfy."""
        draw = self.draw
        low, many = draw.randint(-50, 50), draw.randint(0, 4)
        leaves: list[dict[str, Any]] = [
            {"type": "integer", "minimum": low, "maximum": low + draw.randrange(900)},
            {"type": "boolean"},
            {"enum": ["red", "green", 3, None]},
            {"type": "string", "maxLength": 5 + many},
            {"type": "string", "pattern": f"^[a-c]{{1,{1 + many}}}$"},
            {"type": "number", "multipleOf": 0.5},
        ]
        if not depth or draw.random() < 0.4:
            return draw.choice(leaves)
        inner = [
            self.schema(depth - 1) if draw.random() < 0.1 else self.plain(depth - 1) for _ in range(draw.randint(1, 3))
        ]
        named = dict(zip("abc", inner))
        return draw.choice(
            [
                {
                    "type": "object",
                    "properties": named,
                    "required": draw.sample(sorted(named), draw.randrange(len(named) + 1)),
                },
                {"type": "array", "items": inner[0], "minItems": many // 2, "maxItems": many},
                {"anyOf": inner},
                {"type": "object", "additionalProperties": inner[0]},
                {"type": "array", "prefixItems": inner, "items": False},
            ]
        )
