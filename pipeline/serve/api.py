"""The server: OpenAI's routes, a few from other servers (/tokenize, /score, /metrics), and the page.

    make(options) -> an ASGI application; models load in the background, and /health returns 503 until they are ready

Routes are thin: a body is validated (`protocol.py`), prepared (`chat_completions.py`, `completions.py`), submitted to
an engine and answered, in one piece or as a stream (`answers.py`). Slow work that needs no engine runs in separate
thread pools (`guard.py`), never on the event loop. Every error is an OpenAI error object, and every request has passed
the guard. The log records a request's id, counts and times, never text or keys.

Routes in addition to OpenAI's, for the page: tokenization, rewards and human feedback.

    POST /tokenize  /detokenize  /apply-template      ids, pieces, the rendered prompt
    POST /score                                       the reward of each conversation's last answer
    POST /preferences                                 one answer is better than the other (with --feedback)
    POST /labels                                      an answer is good or bad (with --feedback)
    POST /render                                      Markdown to sanitized HTML
    POST /update_weights_from_disk                    new weights for a policy in training (with --rollouts)
    GET  /  /page/{name}                              the page's files

The names and docstrings of the route functions are part of /openapi.json.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from pathlib import Path

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.run.errors import InputError, StagecoachError
from pipeline.run.types import JsonObject
from pipeline.serve import chat_completions as chats
from pipeline.serve import completions
from pipeline.serve.answers import Answers, EventStream, refuse_when_full, respond, unless_disconnected
from pipeline.serve.chat_completions import Pools, Sender, decode_token
from pipeline.serve.feedback import Feedback, labels_beside
from pipeline.serve.guard import Guard, Keys, Options, ParsedRoute, Rates
from pipeline.serve.loop import EngineStopped
from pipeline.serve.models import Catalog, Metrics, Served, load, update
from pipeline.serve.protocol import (
    ApiFault,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    JsonResponse,
    LabelBody,
    PreferenceBody,
    RenderBody,
    ScoreBody,
    TemplateBody,
    TokenizeBody,
    WeightsBody,
    internal,
    invalid,
)
from pipeline.serve.workshop import JobRefused, Workshop

LOG = logging.getLogger(__name__)
WATCH_SECONDS = 0.5
PAGE = Path(__file__).parent / "page"
MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def make(options: Options) -> ASGIApp:
    """Create the application. Raises ConfigError for unusable keys or an unusable feedback file."""
    service = Service(options)
    app = FastAPI(title="Stagecoach", openapi_url=None, docs_url=None, redoc_url=None, lifespan=_lifespan(service))
    _handle_errors(app, service)
    keyed = [Depends(service.keys.authenticate)]
    app.include_router(_openai(service))
    app.include_router(_about(service, app), dependencies=keyed)
    app.include_router(_texts(service), dependencies=keyed)
    app.include_router(_judgments(service), dependencies=keyed)
    if options.rollouts is not None:
        app.include_router(_weights(service, options.rollouts.resolve()), dependencies=keyed)
    app.include_router(_page())

    @app.get("/health")
    async def health() -> Response:
        """200 if the server can answer requests, else 503; needs no key."""
        state = service.health()
        return JsonResponse({"status": "ok" if state == "ready" else state}, 200 if state == "ready" else 503)

    rates = Rates(options.rate) if options.rate else None
    return Guard(_ErrorLog(app), keys=service.keys, rates=rates, hosts=options.hosts, origins=options.origins)


class Service:
    """State shared by the routes."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.keys = Keys.load(options.api_key_file)
        self.preferences = Feedback(options.feedback) if options.feedback is not None else None
        self.labels = Feedback(labels_beside(options.feedback)) if options.feedback is not None else None
        self.workshop = Workshop(options.models)
        self.pools = Pools(self.workshop)
        self.state = "loading"  # ready, failed, stopping
        self._engines = ExitStack()
        self._catalog: Catalog | None = None
        self._metrics: Metrics | None = None

    def start(self) -> None:
        """Load the models and start their engines; until then, requests get 503."""
        try:
            catalog = Catalog(
                load(
                    self.options.models,
                    rows=self.options.rows,
                    queue=self.options.queue,
                    weights=self.options.weights,
                    rollouts=self.options.rollouts is not None,
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
        engines = [served.engine for served in catalog.served.values() if served.engine is not None]
        for engine in engines:
            engine.others = [other for other in engines if other is not engine]
            self._engines.enter_context(engine)
        self._catalog, self._metrics = catalog, Metrics(catalog)
        gc.freeze()  # so that a full garbage collection, as after a large body, skips the models' objects
        self.state = "ready"
        models = [f"{model.id} ({model.kind}, {model.parameters:,} parameters)" for model in catalog.served.values()]
        LOG.info("ready: %s", ", ".join(models))

    def _fail(self, code: int, message: str) -> None:
        """Report the failure to the parent process and stop it: a restarted worker would fail again."""
        self.state = "failed"
        if self.options.failure is not None:
            self.options.failure.write_text(f"{code}\n{message}\n", encoding="utf-8")
            os.kill(os.getppid(), signal.SIGTERM)

    async def watch(self) -> None:
        """Restart engines whose loop has died; until then /health and their requests return 503."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for served in self._catalog.served.values() if self._catalog is not None else ():
                if served.engine is not None and not served.engine.alive and self.state == "ready":
                    await asyncio.to_thread(served.engine.restart)
                    LOG.error("the engine of %s died and was restarted", served.id)
                    self.metrics.restarts.labels(served.id).inc()

    def stop(self) -> None:
        """Stop the engines; answers in progress end with an error."""
        self.state = "stopping"
        self._engines.close()

    @property
    def catalogue(self) -> Catalog:
        """The served models. Raises ApiFault 503 until they are loaded."""
        if self._catalog is None:
            raise ApiFault(503, "the models are still loading; try again", code="model_loading", retry=2)
        return self._catalog

    @property
    def metrics(self) -> Metrics:
        """The metrics. Raises the same error as `catalogue`."""
        _ = self.catalogue
        assert self._metrics is not None
        return self._metrics

    def health(self) -> str:
        """The state: "ready", or why the server is not ready."""
        if self.state == "ready" and not all(
            model.engine is None or model.engine.alive for model in self.catalogue.served.values()
        ):
            return "restarting"
        return self.state


def _lifespan(service: Service) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loading = threading.Thread(target=service.start, name="loading", daemon=True)
        loading.start()
        watching = asyncio.create_task(service.watch())
        with service.workshop:  # on this thread: the worker exits with it
            try:
                yield
            finally:
                watching.cancel()
                await asyncio.to_thread(service.stop)

    return lifespan


# -- generation --------------------------------------------------------------------------------------------------------


def _openai(service: Service) -> APIRouter:
    """OpenAI's routes, which need an engine."""
    routes = APIRouter(route_class=ParsedRoute, dependencies=[Depends(service.keys.authenticate)])

    @routes.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Generate an assistant turn."""
        served, engine = service.catalogue.generative(body.model)
        sender = Sender.of(request)
        refuse_when_full(engine, sender.owner)
        chat = await chats.prepare(body, served, engine, sender, service.pools)
        return await _answer(
            service,
            request,
            served.id,
            chat.answers(sender.identity),
            bool(body.stream),
            functools.partial(chats.complete, chat),
            functools.partial(chats.stream, chat),
        )

    @routes.post("/v1/completions")
    async def text_completions(body: CompletionBody, request: Request) -> Response:
        """Complete a text prompt."""
        served, engine = service.catalogue.causal(body.model)
        sender = Sender.of(request)
        refuse_when_full(engine, sender.owner)
        completion = await service.pools.texts.run(
            sender.asker, completions.prepare, body, served, engine, sender.owner
        )
        scoring = completions.score_prompts(completion, sender.identity)
        scores = await unless_disconnected(request.receive, scoring)
        return await _answer(
            service,
            request,
            served.id,
            completion.answers(sender.identity),
            bool(body.stream),
            functools.partial(completions.complete, completion, scores),
            functools.partial(completions.stream, completion, scores),
        )

    return routes


async def _answer(
    service: Service,
    request: Request,
    model: str,
    answers: Answers,
    streamed: bool,
    complete: Callable[[Answers], Awaitable[JsonObject | bytes]],
    stream: Callable[[Answers], AsyncIterator[bytes]],
) -> Response:
    """Submit the requests, respond with their answers, and record the outcome."""
    record = functools.partial(_record, service.metrics, request.scope["identity"], model, answers)
    if streamed:
        await answers.__aenter__()  # a refusal must be sent before the stream begins
        return EventStream(answers, stream, record)
    status, code = 500, None
    try:
        response = await respond(request, answers, complete)
        status = 200
        return response
    except ApiFault as fault:
        status, code = fault.status, fault.code
        raise
    finally:
        record(status, code)


def _record(metrics: Metrics, identity: str, model: str, answers: Answers, status: int, code: str | None) -> None:
    """Record the outcome of a request in the log and the metrics."""
    seconds, usage = time.monotonic() - answers.began, answers.usage
    LOG.info(
        "%s %s %d prompt=%d cached=%d said=%d first=%.3f seconds=%.3f",
        identity,
        model,
        status,
        usage.prompt,
        usage.cached,
        usage.completion,
        answers.first_seconds or math.nan,
        seconds,
    )
    metrics.invalid_structures.labels(model).inc(code == chats.INVALID_STRUCTURE)
    for end in answers.ends:
        metrics.answers.labels(model, end.reason if end is not None else "abandoned").inc()
    metrics.request_seconds.labels(model).observe(seconds)
    if answers.first_seconds is not None:
        metrics.first_token_seconds.labels(model).observe(answers.first_seconds)
        if usage.completion > len(answers.ends):
            metrics.inter_token_seconds.labels(model).observe(
                (seconds - answers.first_seconds) * len(answers.ends) / (usage.completion - len(answers.ends))
            )


# -- other routes ------------------------------------------------------------------------------------------------------


def _about(service: Service, app: FastAPI) -> APIRouter:
    """The served models and the state of the server."""
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models() -> Response:
        """List the models."""
        cards = [served.card(service.preferences is not None) for served in service.catalogue.served.values()]
        return JsonResponse({"object": "list", "data": cards})

    @routes.get("/v1/models/{name}")
    async def model(name: str) -> Response:
        """Retrieve a model."""
        return JsonResponse(service.catalogue.find(name).card(service.preferences is not None))

    @routes.get("/metrics")
    async def metrics() -> Response:
        """The metrics, in Prometheus text format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @routes.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return JsonResponse(app.openapi())

    return routes


def _texts(service: Service) -> APIRouter:
    """Tokenize text, render conversations, and convert Markdown to HTML."""
    routes, pools = APIRouter(route_class=ParsedRoute), service.pools

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        """Tokenize text. Control tokens spelled out in it are treated as ordinary text."""
        served = service.catalogue.find(body.model)

        def build() -> Response:
            ids = served.tokenizer.encode(body.prompt)
            return JsonResponse(
                {"tokens": ids, "pieces": _pieces(served, ids), "count": len(ids), "max_model_len": served.context}
            )

        return await pools.texts.run(Sender.of(request).asker, build)

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:
        """Convert token ids to text."""
        served = service.catalogue.find(body.model)
        if wrong := next((id_ for id_ in body.tokens if id_ >= served.tokenizer.vocab_size), None):
            raise invalid("tokens", f"tokens: {wrong} is not one of the tokenizer's {served.tokenizer.vocab_size} ids")
        text = await pools.texts.run(Sender.of(request).asker, served.tokenizer.decode, body.tokens)
        return JsonResponse({"prompt": text})

    @routes.post("/apply-template")
    async def apply_template(body: TemplateBody, request: Request) -> Response:
        """Render a conversation with the model's chat template."""
        served, sender = service.catalogue.find(body.model), Sender.of(request)
        messages, tools = [message.plain() for message in body.messages], [tool.plain() for tool in body.tools or []]
        ids = await chats.encode(served, messages, tools, sender, pools, generation_prompt=body.add_generation_prompt)

        def build() -> Response:
            text = served.tokenizer.decode(ids, skip_special=False)
            return JsonResponse({"prompt": text, "tokens": ids, "pieces": _pieces(served, ids), "count": len(ids)})

        return await pools.texts.run(sender.asker, build)

    @routes.post("/render")
    async def render(body: RenderBody, request: Request) -> Response:
        """Render Markdown as HTML without scripts, styles or images."""
        try:
            return JsonResponse({"html": await service.workshop.html(body.markdown, Sender.of(request).asker)})
        except JobRefused as error:
            raise invalid("markdown", str(error), error.code) from None

    return routes


def _pieces(served: Served, ids: list[int]) -> list[JsonObject]:
    """Each token's id and text, and whether it is a control token."""
    controls = set(served.tokenizer.control_ids.values())
    return [{"id": id_, "text": decode_token(served.tokenizer, id_)[1], "special": id_ in controls} for id_ in ids]


def _judgments(service: Service) -> APIRouter:
    """Rewards from a reward model and feedback from people."""
    routes, pools = APIRouter(route_class=ParsedRoute), service.pools

    @routes.post("/score")
    async def score(body: ScoreBody, request: Request) -> Response:
        """Compute raw rewards, comparable only between answers to the same prompt."""
        served = service.catalogue.find(body.model, "reward")
        scores = []
        for index, conversation in enumerate(body.conversations):
            if conversation.messages[-1].role != "assistant":
                raise invalid("conversations", f"conversations.{index}: expected a final assistant message")
            messages = [message.plain() for message in conversation.messages]
            tools = [tool.plain() for tool in conversation.tools or []]
            served.refuse_overlong("".join(message["content"] for message in messages), "conversations")
            try:
                reward = await pools.scores.run(Sender.of(request).asker, served.score, messages, tools)
            except InputError as error:
                raise invalid("conversations", str(error)) from None
            scores.append({"index": index, "object": "score", "reward": reward})
        return JsonResponse({"object": "list", "model": served.id, "data": scores})

    @routes.post("/preferences")
    async def preferences(body: PreferenceBody, request: Request) -> Response:
        """Store a preference between two answers."""
        return await stored(service.preferences, "preferences", body, request)

    @routes.post("/labels")
    async def labels(body: LabelBody, request: Request) -> Response:
        """Store a good or bad label for an answer."""
        return await stored(service.labels, "labels", body, request)

    async def stored(
        file: Feedback | None, what: str, body: PreferenceBody | LabelBody, request: Request
    ) -> JsonResponse:
        if file is None:
            raise ApiFault(404, f"{what} are not collected; start the server with --feedback FILE", code="no_feedback")
        service.catalogue.find(body.model, "causal")
        sender = Sender.of(request)
        new, count = await pools.feedback.run(sender.asker, file.add, body, sender.owner)
        return JsonResponse({"stored": new, "count": count}, 201 if new else 200)

    return routes


def _weights(service: Service, folder: Path) -> APIRouter:
    """New weights for a policy in training (--rollouts)."""
    routes = APIRouter(route_class=ParsedRoute)

    @routes.post("/update_weights_from_disk")
    async def update_weights(body: WeightsBody) -> Response:
        """Load new weights from a directory and clear the prefix cache; the route is SGLang's."""
        path, (served, *_) = Path(body.model_path).resolve(), service.catalogue.served.values()
        if not path.is_relative_to(folder):
            raise invalid("model_path", "model_path: expected a directory below the --rollouts folder")
        try:
            await asyncio.to_thread(update, served, path)
        except (InputError, OSError) as error:
            return JsonResponse({"success": False, "message": str(error)}, 400)
        except EngineStopped:
            raise ApiFault(503, "the model is being restarted; try again", code="model_restarting", retry=5) from None
        return JsonResponse({"success": True, "message": served.fingerprint})

    return routes


def _page() -> APIRouter:
    """The page. It is public, since it contains no secrets; its API calls need the key."""
    routes = APIRouter()
    files = {path.name: path.read_bytes() for path in sorted(PAGE.iterdir()) if path.suffix in MEDIA_TYPES}

    def respond(request: Request, name: str) -> Response:
        if name not in files:
            raise ApiFault(404, "the page has no such file", code="not_found")
        etag = f'"{hashlib.sha256(files[name]).hexdigest()[:16]}"'
        headers = {"etag": etag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(files[name], media_type=f"{MEDIA_TYPES[Path(name).suffix]}; charset=utf-8", headers=headers)

    @routes.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        return respond(request, "index.html")

    @routes.get("/page/{name}", include_in_schema=False)
    async def file(request: Request, name: str) -> Response:
        return respond(request, name)

    return routes


# -- errors ------------------------------------------------------------------------------------------------------------


def _handle_errors(app: FastAPI, service: Service) -> None:
    """Turn every error into an OpenAI error object."""

    def respond(fault: ApiFault) -> Response:
        if service.state == "ready":
            service.metrics.faults.labels(str(fault.status)).inc()
        return fault.response()

    @app.exception_handler(ApiFault)
    async def api_fault(_: Request, fault: ApiFault) -> Response:
        return respond(fault)

    @app.exception_handler(RequestValidationError)
    async def invalid_body(_: Request, error: RequestValidationError) -> Response:
        return respond(_validation_fault(error.errors()))

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        return respond(
            ApiFault(error.status_code, str(error.detail), code="not_found" if error.status_code == 404 else None)
        )

    @app.exception_handler(Exception)
    async def unexpected(request: Request, _: Exception) -> Response:  # starlette raises it again; _ErrorLog logs it
        return respond(internal(request.scope["identity"]))


def _validation_fault(errors: Sequence[JsonObject]) -> ApiFault:
    """The error for the first invalid field of a body."""
    first = errors[0]
    path = [
        str(part) for part in first["loc"][1:] if isinstance(part, int) or re.fullmatch(r"[A-Za-z_]{1,40}", str(part))
    ]
    name = ".".join(part for part in path if part not in ("str", "list", "int", "dict"))
    message = first["msg"].removeprefix("Value error, ")
    return invalid(name or None, f"{name}: {message}" if name else message, "invalid_value")


class _ErrorLog:
    """Logs unexpected exceptions with the request's id; the client gets only the id."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except Exception:
            if scope["type"] != "http":
                raise
            LOG.exception("%s failed", scope["identity"])
