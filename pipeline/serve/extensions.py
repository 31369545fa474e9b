"""Routes beside OpenAI's: what the page needs to show how a model reads and what a reward model thinks, and where choices go.

POST /tokenize  /detokenize  /apply-template      ids, pieces, the rendered prompt
POST /score                                       the reward of each conversation's last answer
POST /preferences                                 one answer is better than the other (with --feedback)
POST /render                                      Markdown as clean HTML
GET  /  /page/{name}                              the page's files
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from pipeline.errors import InputError
from pipeline.serve.chats import render as rendered
from pipeline.serve.chats import spelled
from pipeline.serve.faults import ApiFault, JsonResponse
from pipeline.serve.feedback import Feedback
from pipeline.serve.guard import ParsedRoute
from pipeline.serve.models import Catalogue, Served
from pipeline.serve.protocol import DetokenizeBody, PreferenceBody, RenderBody, ScoreBody, TemplateBody, TokenizeBody
from pipeline.serve.rooms import Rooms, Who
from pipeline.serve.workshop import Refused

PAGE = Path(__file__).parent / "page"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def pieces(served: Served, ids: list[int]) -> list[dict[str, Any]]:
    """Each token's id and text; `special` says that it is a control token."""
    controls = set(served.tokenizer.control_ids.values())
    return [{"id": id_, "text": spelled(served.tokenizer, id_)[1], "special": id_ in controls} for id_ in ids]


def router(catalogue: Callable[[], Catalogue], feedback: Feedback | None, rooms: Rooms) -> APIRouter:
    """The routes that need a key."""
    routes = APIRouter()
    routes.include_router(_reading(catalogue, rooms))
    routes.include_router(_judging(catalogue, feedback, rooms))
    return routes


def _reading(catalogue: Callable[[], Catalogue], rooms: Rooms) -> APIRouter:
    """How a model reads a text and a conversation; Markdown as a person reads it."""
    routes = APIRouter(route_class=ParsedRoute)

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        """A text's ids. Control tokens that it spells are text."""
        served = catalogue().find(body.model)

        def told() -> Response:
            ids = served.tokenizer.encode(body.prompt)
            found = {"tokens": ids, "pieces": pieces(served, ids), "count": len(ids), "max_model_len": served.context}
            return JsonResponse(found)

        return await rooms.texts.run(Who.of(request).asker, told)

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:
        """The text of ids."""
        served = catalogue().find(body.model)
        if wrong := next((id_ for id_ in body.tokens if id_ >= served.tokenizer.vocab_size), None):
            raise ApiFault(400, f"tokens: {wrong} is not one of the tokenizer's {served.tokenizer.vocab_size} ids", param="tokens")  # fmt: skip
        return JsonResponse(
            {"prompt": await rooms.texts.run(Who.of(request).asker, served.tokenizer.decode, body.tokens)}
        )

    @routes.post("/apply-template")
    async def apply_template(body: TemplateBody, request: Request) -> Response:
        """A conversation as the model reads it."""
        served, who = catalogue().find(body.model), Who.of(request)
        messages, tools = [m.plain() for m in body.messages], [t.plain() for t in body.tools or []]
        ids = await rendered(served, messages, tools, who, rooms, generation_prompt=body.add_generation_prompt)

        def told() -> Response:
            text = served.tokenizer.decode(ids, skip_special=False)
            return JsonResponse({"prompt": text, "tokens": ids, "pieces": pieces(served, ids), "count": len(ids)})

        return await rooms.texts.run(who.asker, told)

    @routes.post("/render")
    async def render(body: RenderBody, request: Request) -> Response:
        """HTML without scripts, styles and pictures."""
        try:
            return JsonResponse({"html": await rooms.workshop.html(body.markdown, Who.of(request).asker)})
        except Refused as error:
            raise ApiFault(400, str(error), param="markdown", code=error.code) from None

    return routes


def _judging(catalogue: Callable[[], Catalogue], feedback: Feedback | None, rooms: Rooms) -> APIRouter:
    """What a reward model and a person think of answers."""
    routes = APIRouter(route_class=ParsedRoute)

    @routes.post("/score")
    async def score(body: ScoreBody, request: Request) -> Response:
        """Raw rewards: comparable within a prompt only."""
        served = catalogue().find(body.model, "reward")
        found = []
        for index, one in enumerate(body.conversations):
            if one.messages[-1].role != "assistant":
                raise ApiFault(400, f"conversations.{index}: expected to end with an assistant's message", param="conversations")  # fmt: skip
            messages, tools = [m.plain() for m in one.messages], [t.plain() for t in one.tools or []]
            served.refuse_endless("".join(message["content"] for message in messages), "conversations")
            try:
                reward = await rooms.scores.run(Who.of(request).asker, served.score, messages, tools)
            except InputError as error:
                raise ApiFault(400, str(error), param="conversations") from None
            found.append({"index": index, "object": "score", "reward": reward})
        return JsonResponse({"object": "list", "model": served.id, "data": found})

    @routes.post("/preferences")
    async def preferences(body: PreferenceBody, request: Request) -> Response:
        """Store a choice."""
        if feedback is None:
            raise ApiFault(404, "preferences are not collected; start the server with --feedback FILE", code="no_feedback")  # fmt: skip
        catalogue().find(body.model, "causal")
        who = Who.of(request)
        new, count = await rooms.choices.run(who.asker, feedback.add, body, who.owner)
        return JsonResponse({"stored": new, "count": count}, 201 if new else 200)

    return routes


def page() -> APIRouter:
    """The page: public, since it holds nothing; what it asks for needs the key."""
    routes = APIRouter()
    files = {path.name: path.read_bytes() for path in sorted(PAGE.iterdir()) if path.suffix in KINDS}

    def answer(request: Request, name: str) -> Response:
        if name not in files:
            raise ApiFault(404, "the page has no such file", code="not_found")
        etag = f'"{hashlib.sha256(files[name]).hexdigest()[:16]}"'
        headers = {"etag": etag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(files[name], media_type=f"{KINDS[Path(name).suffix]}; charset=utf-8", headers=headers)

    @routes.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        return answer(request, "index.html")

    @routes.get("/page/{name}", include_in_schema=False)
    async def file(request: Request, name: str) -> Response:
        return answer(request, name)

    return routes
