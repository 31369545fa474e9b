"""The Dockerfile: what hadolint and our own checks say of it, and its steps run in a folder, without Docker.

The environment in that folder links exactly the packages that `pip install` would bring, so a package missing there is
missing here. The model and the code are copied as COPY does, and each RUN on them is executed. Then the ENTRYPOINT
serves, where possible as process 1 and user 65534 with nothing writable, and the HEALTHCHECK queries it.
"""

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from packaging.requirements import Requirement

from pipeline.export import huggingface
from pipeline.model.transformer import Transformer
from pipeline.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
KEY = "k" * 32
NOBODY = 65534
INDENT = re.compile(r"\\\n\s*")


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile in order, with continued lines joined."""
    text = INDENT.sub("", "\n".join(line for line in (ROOT / "Dockerfile").read_text().splitlines() if line[:1] != "#"))
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def of(kind: str) -> list[str]:
    """The arguments of all instructions of a kind."""
    return [arguments for name, arguments in instructions() if name == kind]


def form(kind: str) -> list[str]:
    """The command of ENTRYPOINT, CMD or HEALTHCHECK, which has to be a JSON list, so that no shell comes in between."""
    (arguments,) = of(kind)
    return json.loads(arguments[arguments.index("[") :])


def installed() -> list[Requirement]:
    """What `pip install` is asked for."""
    (command,) = [run for run in of("RUN") if " install " in run]
    words = shlex.split(command.partition(" install ")[2].replace("  ", " "))
    names = [word for word in words if not word.startswith("--") and "/" not in word]
    return [Requirement(name) for name in names]


def closure(roots: list[Requirement]) -> dict[str, importlib.metadata.Distribution]:
    """The packages that pip would install, by normalized name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    todo = [(root, "") for root in roots]
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonical(requirement.name)
        if name not in found or requirement.extras:
            found[name] = importlib.metadata.distribution(requirement.name)
            needed = [Requirement(line) for line in found[name].requires or []]
            todo += [(one, extra) for one in needed for extra in ("", *requirement.extras)]
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_image_is_pinned_unprivileged_and_holds_no_build_tools() -> None:
    (base,) = [argument for argument in of("ARG") if argument.startswith("BASE=")]
    assert re.fullmatch(r"BASE=python:3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", base)
    assert of("FROM") == ["${BASE} AS build", "${BASE}"]
    final = instructions()[[name for name, _ in instructions()].index("FROM", 4) :]
    assert ("USER", f"{NOBODY}:{NOBODY}") in final  # numeric: Kubernetes' runAsNonRoot cannot check names
    kinds = [name for name, _ in final]
    assert kinds.index("USER") > max(n for n, kind in enumerate(kinds) if kind in ("RUN", "COPY"))
    assert [run.split()[:2] for name, run in final if name == "RUN"] == [["pip", "uninstall"]]
    assert not {"ADD", "VOLUME", "ONBUILD", "SHELL"} & {name for name, _ in instructions()}
    assert "apt-get" not in str(of("RUN")) and not re.search(
        "(?i)key|token|secret|password", str(of("ENV") + of("ARG"))
    )
    assert form("CMD") == ["models/deploy"] and form("HEALTHCHECK")[0] == form("ENTRYPOINT")[0] == "python"


def test_every_package_of_the_image_is_a_dependency_with_the_version_of_the_lock() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    lock = dict(re.match(r"([\w.-]+)==(\S+)", line).groups() for line in lines if not line.startswith("#"))  # type: ignore[union-attr]
    locked = {canonical(name): version for name, version in lock.items()}
    packages = closure(installed())
    assert "torch" in packages and "torch" not in locked
    assert not {name for name in packages if name not in locked and not name.startswith(("torch", "triton", "nvidia-"))}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    named = {canonical(Requirement(line).name): Requirement(line) for line in project}
    pinned = {canonical(one.name): one for one in installed()}
    assert pinned.keys() <= named.keys()
    assert str(pinned["torch"].specifier) == str(named["torch"].specifier)
    assert not {"dvc", "mlflow", "datasets", "matplotlib", "transformers", "pytest"} & packages.keys()


def test_only_what_the_image_copies_is_sent_to_docker() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    assert lines[0] == "*"
    copied = {copy.split()[0] for copy in of("COPY") if not copy.startswith("--from")}
    assert {line[1:] for line in lines if line.startswith("!")} == copied


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="needs hadolint")
def test_hadolint_finds_nothing() -> None:
    done = subprocess.run(["hadolint", str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def image() -> Iterator[Path]:
    """An empty folder that everyone may read, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="stagecoach-image-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def interpreter() -> tuple[str, list[str]]:
    """A Python of this version, and the command that runs it as user 65534 (empty where that is not possible)."""
    minor = f"python{sys.version_info.major}.{sys.version_info.minor}"
    become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    reach = "import os, sys; os.stat(sys.executable)"  # fails if it is in root's home
    for path in (os.path.realpath(sys.executable), f"/usr/bin/{minor}"):
        works = os.getuid() == 0 and shutil.which("setpriv") is not None
        if works and subprocess.run([*become, path, "-c", reach], capture_output=True, cwd="/").returncode == 0:
            alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
            ended = subprocess.run([*alone, "true"], capture_output=True).returncode if shutil.which("unshare") else 1
            return path, [*(alone if ended == 0 else []), *become]
    return sys.executable, []


def build(image: Path, model: Path, python: str) -> None:
    """Run the steps of the Dockerfile in `image` instead of in /."""
    packages = image / "opt/venv/lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    workdir = "/"
    for kind, arguments in instructions()[: [name for name, _ in instructions()].index("FROM", 4)]:
        if kind == "WORKDIR":
            workdir = arguments
            (image / workdir.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif kind == "COPY":
            source, target = arguments.split()
            there = image / (workdir if target == "./" else target).lstrip("/")
            if (ROOT / source).is_file():
                there.mkdir(parents=True, exist_ok=True)
            path = model if source == "models/deploy" else ROOT / source
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, there, dirs_exist_ok=True, ignore=skip) if path.is_dir() else shutil.copy(path, there)
        elif kind == "RUN":
            command, _, install = arguments.partition(" && pip --python")
            command = re.sub(r" /(opt|app|build)\b", rf" {image}/\1", f" {command}").replace(" python ", f" {python} ")
            subprocess.run(command, shell=True, check=True, cwd=image / workdir.lstrip("/"))
            if install:
                link(packages)


def everything(folder: Path) -> list[Path]:
    """The folder itself, and all files and folders in it that are not links."""
    found = [Path(root, name) for root, folders, files in os.walk(folder) for name in (*folders, *files)]
    return [folder, *(path for path in sorted(found) if not path.is_symlink())]


def link(packages: Path) -> None:
    """Link what `pip install` would put there."""
    for distribution in closure(installed()).values():
        for name in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(str(distribution.locate_file(name)))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, as the image does")
def test_its_steps_make_a_folder_that_serves_the_model_unprivileged_and_without_writing(
    image: Path, tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = tmp_path / "deploy"
    huggingface.export(tiny_model, byte_tokenizer, {"model": "tools"}, model)
    for name in ("gguf/a.gguf", "ollama/Modelfile"):
        (model / name).parent.mkdir()
        (model / name).write_bytes(b"other programs")
    huggingface.seal(model)
    python, prefix = interpreter()
    build(image, model, python)
    served = {path.name for path in (image / "app/models/deploy").iterdir()}
    assert "model.safetensors" in served and not {"gguf", "ollama"} & served
    assert not {"pip", "dvc", "mlflow"} & {path.name for path in image.glob("opt/venv/lib/*/*/*")}
    for path in everything(image):
        path.chmod(path.stat().st_mode & 0o555)
    scratch = Path(tempfile.mkdtemp(prefix="stagecoach-tmp-"))  # in place of --tmpfs /tmp
    scratch.chmod(0o777)
    before = everything(image)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home = {"HOME": str(scratch), "TMPDIR": str(scratch), "STAGECOACH_API_KEYS": KEY, "OMP_NUM_THREADS": "1"}
    env = {"PATH": f"{image}/opt/venv/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", **home}
    command = [*prefix, *form("ENTRYPOINT"), *form("CMD"), "--port", str(port)]
    health = [word.replace(":8000/", f":{port}/") for word in form("HEALTHCHECK")]
    assert health != form("HEALTHCHECK")
    asked = {"env": env, "cwd": image / "app", "capture_output": True}
    assert subprocess.run(health, **asked).returncode != 0  # nothing serves yet
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=env, cwd=image / "app", stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while subprocess.run(health, **asked).returncode != 0:
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.2)
        body = {"model": "deploy", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        url, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {KEY}"}
        assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 401
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] <= 8
        assert httpx.get(url).status_code == 200  # the page
        rendered = httpx.post(f"{url}/render", json={"markdown": "**a**"}, headers=headers, timeout=60)  # by a worker
        assert rendered.json()["html"].strip() == "<p><strong>a</strong></p>"
        schema = {"type": "json_schema", "json_schema": {"name": "yes", "schema": {"type": "boolean"}}}
        answer = httpx.post(
            f"{url}/v1/chat/completions", json=body | {"response_format": schema}, headers=headers, timeout=60
        )
        assert answer.json()["choices"][0]["message"]["content"] in ("true", "false"), answer.text
        server = psutil.Process(process.pid)
        if "unshare" in prefix:
            (server,) = server.children()
        if prefix:
            assert set(server.uids()) == {NOBODY}
        server.send_signal(signal.SIGTERM)  # as `docker stop` does
        process.wait(30)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(scratch)
        for path in everything(image):
            path.chmod(path.stat().st_mode | 0o200)
    assert everything(image) == before


def docker_works() -> bool:
    """Whether a daemon answers."""
    return shutil.which("docker") is not None and not subprocess.run(["docker", "info"], capture_output=True).returncode


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.skipif(not docker_works(), reason="needs a Docker daemon")
def test_docker_builds_an_image_whose_health_check_passes(
    tiny_model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    context = tmp_path / "context"
    context.mkdir()
    for name in ("Dockerfile", ".dockerignore", "LICENSE", "requirements.lock"):
        shutil.copy(ROOT / name, context)
    shutil.copytree(ROOT / "pipeline", context / "pipeline")
    huggingface.export(tiny_model, byte_tokenizer, {"model": "tools"}, context / "models/deploy")
    huggingface.seal(context / "models/deploy")
    indexes = [f"--build-arg={name}" for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL") if name in os.environ]
    tag = f"stagecoach-test-{os.getpid()}"
    subprocess.run(["docker", "build", "--quiet", "--tag", tag, *indexes, str(context)], check=True)
    run = [
        "docker",
        "run",
        "--detach",
        "--read-only",
        "--tmpfs=/tmp",
        "--cap-drop=ALL",
        f"--env=STAGECOACH_API_KEYS={KEY}",
    ]
    container = subprocess.check_output([*run, tag], text=True).strip()
    try:
        state, deadline = "", time.monotonic() + 120
        while state != "healthy" and time.monotonic() < deadline:
            time.sleep(1)
            asked = ["docker", "inspect", "--format={{.State.Health.Status}}", container]
            state = subprocess.check_output(asked, text=True).strip()
        assert state == "healthy"
    finally:
        subprocess.run(["docker", "rm", "--force", container], check=True)
        subprocess.run(["docker", "rmi", tag], check=True)
