"""Serve models over HTTP: an OpenAI-compatible API and a chat page.

    python -m pipeline.serve models/rlhf [models/dpo models/reward ...] [--host 127.0.0.1] [--port 8000]
        [--weights int8|native] [--rows 8] [--queue 32] [--rate 200] [--api-key-file FILE]
        [--feedback FILE] [--allow-host NAME ...] [--allow-origin ORIGIN ...]

Without arguments, it serves the first of models/deploy, models/rlhf, models/tools and models/code that exists, together
with the reward model. Port 0 picks a free port and prints it. API keys come from a file (one per line) or from
STAGECOACH_API_KEYS; without keys, only loopback addresses are allowed.

To serve an adapter, also name its base; here the adapter becomes the model `tools:lora`:

    python -m pipeline.serve models/tools models/lora/adapter

To sample from a policy in training (grpo.sampler: server), serve only that model; the training run publishes its
weights below the given folder.

    python -m pipeline.serve models/tools --rollouts .work --port 8100

One worker process (granian, HTTP/1.1) handles all requests and is restarted if it dies. SIGTERM stops the server;
running requests get 20 seconds to finish. There is no TLS: put a proxy in front.
"""

import argparse
import dataclasses
import functools
import ipaddress
import logging
import math
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from granian import Granian
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from starlette.types import ASGIApp

from pipeline.run.errors import ConfigError, StagecoachError
from pipeline.run.processes import die_with_parent
from pipeline.serve.guard import KEYS, Keys, Options

DEFAULT_MODELS = ("deploy", "rlhf", "tools", "code")  # the first that was built
DRAIN_SECONDS = 20
HEADER_BYTES, HEADER_MILLISECONDS = 16_384, 10_000
# how long the engine's thread may block a request's thread; Python's default, 5 ms, is half of a refusal's time budget
SWITCH_SECONDS = 0.001


def choose_models(models: list[Path], root: Path = Path("models")) -> list[Path]:
    """The directories to serve. Raises ConfigError if no model has been built yet."""
    if models:
        return models
    built = [root / name for name in DEFAULT_MODELS if (root / name / "config.json").is_file()]
    if not built:
        raise ConfigError(f"{root}/ has no model to serve; run make to build one, or name a directory")
    reward = root / "reward"
    return [built[0], *([reward] if (reward / "config.json").is_file() else [])]


def check_address(host: str, keys: Keys) -> None:
    """Raise ConfigError for an address that other machines can reach, unless there are keys."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise ConfigError(f"--host: expected an address such as 127.0.0.1 or 0.0.0.0, got {host!r}") from None
    if not loopback and not keys:
        raise ConfigError(f"--host {host} is open to others: first set {KEYS} or --api-key-file (openssl rand -hex 24)")


def free_port(host: str, port: int) -> int:
    """The port, or a free one for 0. Raises ConfigError if it is taken or invalid."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port: expected 0 (a free port) to 65535, got {port}")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"--port {port}: {error.strerror}; choose another port, or 0 for a free one") from None
        return probe.getsockname()[1]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; exits with a message if it is invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.serve", description="Serve models: an OpenAI-compatible API and a chat page."
    )
    parser.add_argument("models", type=Path, nargs="*", help="model directories (default: those built by `make`)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: pick a free port")
    parser.add_argument(
        "--weights", choices=("int8", "native"), help="default: int8 for 50 M parameters and up on an x86 CPU"
    )
    parser.add_argument(
        "--rows", type=int, help="requests decoded at a time (8; with --rollouts, 64): about 2 per concurrent user"
    )
    parser.add_argument("--queue", type=int, help="requests that may wait (32; with --rollouts, 1024); more get 429")
    parser.add_argument(
        "--rate",
        type=float,
        help="requests per second per key or address (200; with --rollouts, no limit); 0: no limit",
    )
    parser.add_argument(
        "--rollouts", type=Path, help="serve a policy in training; its weights appear below this folder (.work)"
    )
    parser.add_argument("--api-key-file", type=Path, help="API keys, one per line")
    parser.add_argument(
        "--feedback", type=Path, help="where to store preferences (feedback/preferences.jsonl); labels go next to it"
    )
    parser.add_argument("--allow-host", action="append", default=[], help="a Host to accept in addition to localhost")
    parser.add_argument("--allow-origin", action="append", default=[], help="an Origin whose pages may call the API")
    arguments = parser.parse_args(argv)
    for name, usual, for_rollouts in (("rows", 8, 64), ("queue", 32, 1024), ("rate", 200.0, 0.0)):
        if getattr(arguments, name) is None:
            setattr(arguments, name, usual if arguments.rollouts is None else for_rollouts)
    if arguments.rows < 1 or arguments.queue < 0 or not 0 <= arguments.rate < math.inf:
        parser.error("expected --rows of at least 1, and --queue and --rate of at least 0")
    return arguments


def main() -> int:
    """Check everything that can be checked up front, then serve until a signal arrives. Returns an exit code."""
    arguments = parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    try:
        keys = Keys.load(arguments.api_key_file)
        check_address(arguments.host, keys)
        models = choose_models(arguments.models)
        if arguments.rollouts is not None and not arguments.models:
            models = models[:1]  # without the reward model
        options = Options(
            models=tuple(models),
            weights=arguments.weights,
            rows=arguments.rows,
            queue=arguments.queue,
            rate=arguments.rate,
            api_key_file=arguments.api_key_file,
            feedback=arguments.feedback,
            rollouts=arguments.rollouts,
            hosts=(*arguments.allow_host, arguments.host),
            origins=tuple(arguments.allow_origin),
        )
        options.check()
        port = free_port(arguments.host, arguments.port)
    except StagecoachError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    address = f"http://{f'[{arguments.host}]' if ':' in arguments.host else arguments.host}:{port}"
    sys.stdout.write(welcome(address, options.models, bool(keys)))
    sys.stdout.flush()
    failure = Path(tempfile.mkstemp(prefix="stagecoach-serve-")[1])
    options = dataclasses.replace(options, failure=failure)
    server = Granian(
        "pipeline.serve.api:make",
        address=arguments.host,
        port=port,
        interface=Interfaces.ASGI,
        http=HTTPModes.http1,
        websockets=False,
        http1_settings=HTTP1Settings(header_read_timeout=HEADER_MILLISECONDS, max_buffer_size=HEADER_BYTES),
        respawn_failed_workers=True,
        workers_kill_timeout=DRAIN_SECONDS,
        log_access=False,
    )
    server.serve(target_loader=functools.partial(load, options), wrap_loader=False)
    code, _, message = failure.read_text(encoding="utf-8").partition("\n")
    failure.unlink()
    sys.stderr.write(message)
    return int(code or 0)


def load(options: Options) -> ASGIApp:
    """Create the application in the worker process, which exits with its parent."""
    from pipeline.serve.api import make  # imported here so that the parent does not load torch

    die_with_parent(os.getppid())
    sys.setswitchinterval(SWITCH_SECONDS)
    return make(options)


def welcome(address: str, models: Sequence[Path], keyed: bool) -> str:
    """The address, the served models, and a command to try."""
    name = models[0].resolve().name
    key = ' -H "Authorization: Bearer $KEY"' if keyed else ""
    return (
        f"{address}  serves {', '.join(str(model) for model in models)}\n"
        f"curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        f"""-d '{{"model": "{name}", "messages": [{{"role": "user", "content": "Tell a story that begins: """
        f"""Anna was a beetle in a narrow house beside the cottage."}}]}}'\n"""
    )


if __name__ == "__main__":
    raise SystemExit(main())
