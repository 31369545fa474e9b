"""The server: OpenAI's routes, a few of its neighbours' (/tokenize, /score, /metrics), and the page.

    make(options) -> an ASGI application; models load behind it, /health says 503 until they are there

Routes are thin: a body is checked (`protocol.py`), understood (`chats.py`, `completions.py`), asked of the engine
(`asking.py`) and told whole or as a stream. What takes long and is no engine's is done in rooms of its own
(`rooms.py`), never on the event loop. Every error is OpenAI's object (`faults.py`), every request passed the guard. The
log holds a request's id, counts and times, never a text or a key.

Routes beside OpenAI's: what the page needs to show how a model reads and what a reward model thinks, and where choices
go.

POST /tokenize  /detokenize  /apply-template      ids, pieces, the rendered prompt
POST /score                                       the reward of each conversation's last answer
POST /preferences                                 one answer is better than the other (with --feedback)
POST /render                                      Markdown as clean HTML
GET  /  /page/{name}                              the page's files
"""

import asyncio
import functools
import gc
import hashlib
import logging
import math
import os
import re
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.run.errors import InputError, StagecoachError
from pipeline.serve import asking, chats, completions
from pipeline.serve.asking import Answers, EventStream, refuse_when_full
from pipeline.serve.chats import Rooms, Who, spelled
from pipeline.serve.chats import render as rendered
from pipeline.serve.feedback import Feedback
from pipeline.serve.guard import Guard, Keys, ParsedRoute
from pipeline.serve.limits import Rates
from pipeline.serve.models import Catalogue, Metrics, Served, load
from pipeline.serve.options import Options
from pipeline.serve.protocol import (
    ApiFault,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    JsonResponse,
    PreferenceBody,
    RenderBody,
    ScoreBody,
    TemplateBody,
    TokenizeBody,
    internal,
)
from pipeline.serve.workshop import Refused, Workshop

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
            raise ApiFault(
                400, f"tokens: {wrong} is not one of the tokenizer's {served.tokenizer.vocab_size} ids", param="tokens"
            )
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
                raise ApiFault(
                    400, f"conversations.{index}: expected to end with an assistant's message", param="conversations"
                )
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
            raise ApiFault(
                404, "preferences are not collected; start the server with --feedback FILE", code="no_feedback"
            )
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


# -- api ---------------------------------------------------------------------------------------------------------------


LOG = logging.getLogger(__name__)
WATCH_SECONDS = 0.5


class Service:
    """What the routes share."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.keys = Keys.load(options.api_key_file)
        self.feedback = Feedback(options.feedback) if options.feedback is not None else None
        self.workshop = Workshop(options.models)
        self.rooms = Rooms(self.workshop)
        self.engines = ExitStack()
        self.state = "loading"  # ready, failed, stopping
        self._catalogue: Catalogue | None = None
        self._metrics: Metrics | None = None

    def start(self) -> None:
        """Load the models and start their engines; whoever asks before that hears 503."""
        try:
            catalogue = Catalogue(
                load(
                    self.options.models,
                    rows=self.options.rows,
                    queue=self.options.queue,
                    weights=self.options.weights,
                    onnx=self.options.engine == "onnx",
                )
            )
        except StagecoachError as error:
            LOG.error("%s", error)
            self._fail(error.exit_code, str(error))
            return
        except Exception as error:
            LOG.exception("the models could not be loaded")
            self._fail(1, f"the models could not be loaded ({type(error).__name__}: {error})")
            return
        engines = [served.engine for served in catalogue.served.values() if served.engine is not None]
        for engine in engines:
            engine.others = [other for other in engines if other is not engine]
            self.engines.enter_context(engine)
        self._catalogue, self._metrics = catalogue, Metrics(catalogue)
        gc.freeze()  # a large body makes Python look through all that lives: models need not be looked at
        self.state = "ready"
        LOG.info(
            "ready: %s",
            ", ".join(f"{one.id} ({one.kind}, {one.parameters:,} parameters)" for one in catalogue.served.values()),
        )

    def _fail(self, code: int, message: str) -> None:
        """Tell the parent why there is no server, and end it: started again this worker would fail again."""
        self.state = "failed"
        if self.options.failure is not None:
            self.options.failure.write_text(f"{code}\n{message}\n", encoding="utf-8")
            os.kill(os.getppid(), signal.SIGTERM)

    async def watch(self) -> None:
        """Restart an engine whose loop has died; until then /health says so, and its requests hear 503."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for served in self._catalogue.served.values() if self._catalogue is not None else ():
                if served.engine is not None and not served.engine.alive and self.state == "ready":
                    await asyncio.to_thread(served.engine.restart)
                    LOG.error("%s: its engine died and was restarted", served.id)
                    self.metrics.restarts.labels(served.id).inc()

    def stop(self) -> None:
        """End the engines; what they still say ends with an error."""
        self.state = "stopping"
        self.engines.close()

    @property
    def catalogue(self) -> Catalogue:
        """The models. Raises ApiFault 503 until they are loaded."""
        if self._catalogue is None:
            raise ApiFault(503, "the models are being loaded; try again", code="model_loading", retry=2)
        return self._catalogue

    @property
    def metrics(self) -> Metrics:
        """The counters. Raises as `catalogue`."""
        _ = self.catalogue
        assert self._metrics is not None
        return self._metrics

    def health(self) -> str:
        """ready, or why not."""
        if self.state == "ready" and not all(
            one.engine is None or one.engine.alive for one in self.catalogue.served.values()
        ):
            return "restarting"
        return self.state


def make(options: Options) -> ASGIApp:
    """The application. Raises ConfigError for keys or a feedback file that cannot be used."""
    service = Service(options)
    app = FastAPI(title="Stagecoach", openapi_url=None, docs_url=None, redoc_url=None, lifespan=_lifespan(service))
    _faults(app, service)
    keyed = [Depends(service.keys.asker)]
    app.include_router(_openai(service))
    app.include_router(_about(service, app), dependencies=keyed)
    app.include_router(router(lambda: service.catalogue, service.feedback, service.rooms), dependencies=keyed)
    app.include_router(page())

    @app.get("/health")
    async def health() -> Response:
        """200 where a request would be answered, else 503; public."""
        state = service.health()
        return JsonResponse({"status": "ok" if state == "ready" else state}, 200 if state == "ready" else 503)

    rates = Rates(options.rate) if options.rate else None
    return Guard(_Logged(app), keys=service.keys, rates=rates, hosts=options.hosts, origins=options.origins)


def _lifespan(service: Service) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loading = threading.Thread(target=service.start, name="loading", daemon=True)
        loading.start()
        watching = asyncio.create_task(service.watch())
        with service.workshop:  # on this thread: the worker ends with it
            try:
                yield
            finally:
                watching.cancel()
                await asyncio.to_thread(service.stop)

    return lifespan


def _openai(service: Service) -> APIRouter:
    """The routes whose shape is OpenAI's and that take an engine's time."""
    routes = APIRouter(route_class=ParsedRoute, dependencies=[Depends(service.keys.asker)])

    @routes.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """An assistant's turn."""
        served, engine = service.catalogue.writer(body.model)
        who = Who.of(request)
        refuse_when_full(engine, who.owner)
        talk = await chats.understand(body, served, engine, who, service.rooms)
        return await _answer(
            service,
            request,
            served.id,
            talk.answers(who.identity),
            bool(body.stream),
            functools.partial(chats.whole, talk),
            functools.partial(chats.stream, talk),
        )

    @routes.post("/v1/completions")
    async def text_completions(body: CompletionBody, request: Request) -> Response:
        """A text that goes on."""
        served, engine = service.catalogue.engine(body.model)
        who = Who.of(request)
        refuse_when_full(engine, who.owner)
        text = await service.rooms.texts.run(who.asker, completions.understand, body, served, engine, who.owner)
        scores = await asking.unless_gone(request.receive, completions.scores(text, who.identity))
        return await _answer(
            service,
            request,
            served.id,
            text.answers(who.identity),
            bool(body.stream),
            functools.partial(completions.whole, text, scores),
            functools.partial(completions.stream, text, scores),
        )

    return routes


async def _answer(
    service: Service,
    request: Request,
    model: str,
    answers: Answers,
    streamed: bool,
    whole: Callable[[Answers], Coroutine[Any, Any, dict[str, Any] | bytes]],
    stream: Callable[[Answers], AsyncIterator[bytes]],
) -> Response:
    """Ask, tell, and count."""

    def count(status: int, code: str | None) -> None:
        seconds, usage, metrics = time.monotonic() - answers.began, answers.usage, service.metrics
        LOG.info(
            "%s %s %d prompt=%d cached=%d said=%d first=%.3f seconds=%.3f",
            request.scope["identity"],
            model,
            status,
            usage.prompt,
            usage.cached,
            usage.completion,
            answers.first or math.nan,
            seconds,
        )
        metrics.broken.labels(model).inc(code == chats.INVALID)
        for end in answers.ends:
            metrics.ended.labels(model, end.reason if end is not None else "abandoned").inc()
        metrics.whole.labels(model).observe(seconds)
        if answers.first is not None:
            metrics.first.labels(model).observe(answers.first)
            if usage.completion > len(answers.ends):
                metrics.between.labels(model).observe(
                    (seconds - answers.first) * len(answers.ends) / (usage.completion - len(answers.ends))
                )

    if streamed:
        await answers.__aenter__()  # a refusal is told before the stream begins
        return EventStream(answers, stream, count)
    status, code = 500, None
    try:
        response = await asking.whole(request, answers, whole)
        status = 200
        return response
    except ApiFault as fault:
        status, code = fault.status, fault.code
        raise
    finally:
        count(status, code)


def _about(service: Service, app: FastAPI) -> APIRouter:
    """What is served, and how it does."""
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models() -> Response:
        """All of them."""
        cards = [served.card(service.feedback is not None) for served in service.catalogue.served.values()]
        return JsonResponse({"object": "list", "data": cards})

    @routes.get("/v1/models/{name}")
    async def model(name: str) -> Response:
        """One of them."""
        return JsonResponse(service.catalogue.find(name).card(service.feedback is not None))

    @routes.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @routes.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        """This interface."""
        return JsonResponse(app.openapi())

    return routes


def _faults(app: FastAPI, service: Service) -> None:
    """Every error becomes OpenAI's object."""

    def counted(fault: ApiFault) -> Response:
        if service.state == "ready":
            service.metrics.faults.labels(str(fault.status)).inc()
        return fault.response()

    @app.exception_handler(ApiFault)
    async def known(_: Request, fault: ApiFault) -> Response:
        return counted(fault)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return counted(unfit(error.errors()))

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> Response:
        return counted(
            ApiFault(error.status_code, str(error.detail), code="not_found" if error.status_code == 404 else None)
        )

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, _: Exception) -> Response:  # raised again behind it, and logged by _Logged
        return counted(internal(request.scope["identity"]))


def unfit(errors: Sequence[Any]) -> ApiFault:
    """The first thing wrong with a body, by its field."""
    first = errors[0]
    place = [
        str(part) for part in first["loc"][1:] if isinstance(part, int) or re.fullmatch(r"[A-Za-z_]{1,40}", str(part))
    ]
    place = [part for part in place if part not in ("str", "list", "int", "dict")]
    message = first["msg"].removeprefix("Value error, ")
    where = ".".join(place)
    return ApiFault(400, f"{where}: {message}" if where else message, param=where or None, code="invalid_value")


class _Logged:
    """Writes what nobody foresaw to the log, under the request's id; the client hears the id alone."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except Exception:
            if scope["type"] != "http":
                raise
            LOG.exception("%s failed", scope["identity"])
