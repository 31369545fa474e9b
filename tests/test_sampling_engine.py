"""An engine that samples for a policy: our server as another process, and engines that misbehave."""

import copy
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from pipeline.generation.sampling import Sampling
from pipeline.learning import policy_losses
from pipeline.model import checkpoint
from pipeline.model.transformer import Transformer
from pipeline.rl import engine
from pipeline.rl.engine import RolloutEngine
from pipeline.run.errors import ConfigError, SamplerError
from pipeline.serve import engine as serving_engine
from pipeline.serve.loop import Ended, EngineStopped, Event, GenerationRequest
from tests import sharded
from tests.conftest import ROOT
from tests.server import Running, random_model, serving
from tests.workspace import Workspace, arguments

SERVER = {"sampler": "server", "runtime.save_steps": 1000}
JsonObject = dict[str, Any]


# -- importance weights ------------------------------------------------------------------------------------------------


def test_weights_of_tokens_by_hand() -> None:
    """exp of the difference, at most 2; for the whole answer if the method has one ratio per answer."""
    own, sampled = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -1.5, -4.0])
    assert policy_losses.importance(own, sampled, whole=False).tolist() == pytest.approx(
        [math.exp(0.5), math.exp(-0.5), 2]
    )
    assert policy_losses.importance(own, sampled, whole=True).tolist() == [2.0] * 3  # e^1
    assert policy_losses.importance(sampled, own, whole=True).tolist() == pytest.approx([math.exp(-1)] * 3)


@pytest.mark.parametrize("whole", [False, True])
def test_an_answer_far_off_as_a_whole_does_not_train(whole: bool) -> None:
    sampled, factor = torch.full((4,), -2.0), math.log(3) / 4
    assert policy_losses.importance(sampled + factor + 1e-3, sampled, whole=whole).tolist() == [0.0] * 4
    assert policy_losses.importance(sampled + factor - 1e-3, sampled, whole=whole).min() > 1
    assert policy_losses.importance(sampled, sampled, whole=whole).tolist() == [1.0] * 4


# -- our server --------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(coded: Workspace) -> Iterator[Running]:
    (coded.folder / ".work").mkdir()
    with serve_rollouts(coded) as server:
        yield server


def serve_rollouts(coded: Workspace) -> Any:
    """Our server with the policy's initial weights, in the workspace."""
    folder = coded.folder
    return serving([folder / "models/tools"], "--rollouts", str(folder / ".work"), log=folder / "server.log")


def differences(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.7, "beta": 0.05, "iterations": 20},
        {"adapter": {"rank": 2, "alpha": 4}},
        {"method": "dapo", "epochs": 2},
        {"method": "gspo"},
    ],
    ids=["grpo", "adapter", "dapo", "gspo"],
)
def test_it_trains_what_the_policys_own_sampler_trains(changes: JsonObject, coded: Workspace, own: Running) -> None:
    """The same answers, and weights that differ by rounding."""
    changes = {"method": "grpo", "iterations": 4, "eps": 1e-2, "runtime.save_steps": 1000} | changes
    assert coded.command("grpo", **changes).code == 0
    start, alone, curve = coded.weights("tools"), coded.weights("grpo"), coded.curve("grpo")
    ended = coded.command("grpo", **changes | SERVER | {"runtime.sampler.url": own.url})
    assert ended.code == 0, ended.said
    served = coded.weights("grpo")
    assert differences(start, alone) > 1e-3
    assert differences(served, alone) < 1e-5
    rows = [row for row in coded.curve("grpo") if row.get("sampler/importance/mean")]
    assert len(rows) >= changes["iterations"] / 2  # dapo draws no answers where all groups have equal scores
    assert all(abs(float(row["sampler/importance/mean"]) - 1) < 1e-4 for row in rows)
    assert all(float(row["sampler/logp_difference/max"]) < 1e-3 and float(row["sampler/masked"]) == 0 for row in rows)
    assert [row["completions/mean_length"] for row in coded.curve("grpo")] == [
        row["completions/mean_length"] for row in curve
    ]
    assert not list((coded.folder / ".work").rglob("sampler"))  # the weights for the engine are gone


@pytest.mark.full
def test_an_engine_killed_in_an_iteration_ends_the_run_and_another_goes_on(coded: Workspace, own: Running) -> None:
    """The resumed run ends with the weights of an undisturbed one."""
    changes = {"method": "grpo", "iterations": 6, "eps": 1e-2, "max_new_tokens": 40} | SERVER
    assert coded.command("grpo", **changes | {"runtime.sampler.url": own.url}).code == 0
    whole = coded.weights("grpo")
    line = arguments("grpo", changes | {"runtime.sampler.url": own.url, "runtime.fresh": True})
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "stages.grpo", *line], env=environment, stderr=subprocess.PIPE, text=True
    )
    answered = "tools 200 "  # the server's log line for an answer
    before, deadline = own.log.read_text().count(answered), time.monotonic() + 120
    while own.log.read_text().count(answered) < before + 3 * 12 + 3 and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.002)
    for number in (*children(own.process.pid), own.process.pid):
        os.kill(number, signal.SIGKILL)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 1 and "Traceback" not in said, said
    assert re.search(r"runtime.sampler.url: the engine at http://127.0.0.1:\d+ is unreachable", said), said
    assert coded.states("grpo")
    with serve_rollouts(coded) as another:
        ended = coded.command("grpo", **changes | {"runtime.sampler.url": another.url})
    assert ended.code == 0 and "resumed at step" in ended.said, ended.said
    assert differences(coded.weights("grpo"), whole) < 1e-5


@pytest.mark.full
def test_it_serves_two_processes_that_share_a_model(coded: Workspace, own: Running) -> None:
    """Rank 0 publishes the gathered weights and each rank asks for its own answers, with the result of one process."""
    changes = {"method": "grpo", "iterations": 3, "prompts": 4, "beta": 0.05} | sharded.SMOOTH
    sharded.ended("grpo", arguments("grpo", changes))
    alone = coded.weights("grpo")
    sharded.ended("grpo", arguments("grpo", changes | SERVER | {"runtime.sampler.url": own.url}), 2)
    assert differences(coded.weights("grpo"), alone) < 1e-5
    assert differences(coded.weights("tools"), alone) > 1e-3


@pytest.mark.full
def test_what_one_process_finds_wrong_ends_both(coded: Workspace, own: Running) -> None:
    """An engine that is far off for one prompt is far off for the process that has it; both save and end."""
    marked: list[list[int]] = []

    def partly_off(path: str, body: JsonObject) -> tuple[int, Any]:
        answer = httpx.post(f"{own.url}{path}", json=body | ({"model": "tools"} if "model" in body else {}), timeout=60)
        said = answer.json()
        if path == "/v1/completions":
            marked.append(body["prompt"])
            if body["prompt"] == marked[0]:
                found = said["choices"][0]["logprobs"]
                found["token_logprobs"] = [value - 9 for value in found["token_logprobs"]]
        return answer.status_code, said

    with fake(partly_off) as url:
        line = arguments("grpo", {"method": "grpo", "prompts": 4} | SERVER | {"runtime.sampler.url": url})
        process = sharded.started("grpo", line, 2)
        said = process.communicate(timeout=sharded.SECONDS)[1]
    assert process.returncode in (1, 143), said  # the first to end has 1; the launcher may end the other meanwhile
    assert all(f"{who}: runtime.sampler.url" in said for who in ("stage_grpo", "(rank 1)")), said
    assert coded.states("grpo") and not (coded.folder / "models/grpo").exists()


def children(pid: int) -> list[int]:
    """The children of a process."""
    return [int(number) for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_new_weights_answer_after_a_load_and_only_those_below_the_folder(coded: Workspace, own: Running) -> None:
    tokenizer, model = coded.tokenizer, checkpoint.load(Path("models/tools"))[0]
    old = f"fp_{checkpoint.weights_digest(model)[:12]}"
    old = f"fp_{checkpoint.weights_digest(model)[:12]}"
    prompt = tokenizer.encode("The pilot asked")
    before = asked(own, prompt)
    assert before["system_fingerprint"] == old
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    for folder in (Path(".work/new"), Path("elsewhere")):
        checkpoint.save(folder, model, tokenizer, {})
    new = f"fp_{checkpoint.weights_digest(model)[:12]}"
    assert new != old and loaded(own, ".work/new").json() == {"success": True, "message": new}
    after = asked(own, prompt)
    assert after["system_fingerprint"] == new
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 and after["choices"] != before["choices"]
    refused = loaded(own, "elsewhere")
    assert refused.status_code == 400 and "below the --rollouts folder" in refused.text
    Path(".work/link").symlink_to(Path("elsewhere").resolve())
    assert loaded(own, ".work/link").status_code == 400
    assert loaded(own, ".work/none").json()["success"] is False
    checkpoint.save(Path(".work/other"), random_model(tokenizer), tokenizer, {})
    other = loaded(own, ".work/other")
    assert other.status_code == 400 and "expected a model with the shape of tools" in other.json()["message"]
    assert asked(own, prompt)["choices"] == after["choices"]


def asked(server: Running, prompt: list[int], **changes: Any) -> JsonObject:
    body = {"model": "tools", "prompt": prompt, "max_tokens": 12, "seed": 3, "return_token_ids": True, "logprobs": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body | changes)
    assert answer.status_code == 200, answer.text
    return answer.json()


def loaded(server: Running, path: str) -> httpx.Response:
    body = {"model_path": str(Path(path).absolute())}
    return httpx.post(f"{server.url}/update_weights_from_disk", json=body, timeout=60)


def test_it_says_the_stop_token_and_log_probabilities_at_the_sampling_temperature(
    coded: Workspace, own: Running
) -> None:
    model, prompt = checkpoint.load(Path("models/tools"))[0].train(False), coded.tokenizer.encode("The pilot asked")
    first = asked(own, prompt, temperature=0.5, ignore_eos=True)["choices"][0]
    stop = first["token_ids"][4]
    choice = asked(own, prompt, temperature=0.5, ignore_eos=True, stop_token_ids=[stop])["choices"][0]
    expected = first["token_ids"][: first["token_ids"].index(stop) + 1]
    assert choice["token_ids"] == expected and choice["finish_reason"] == "stop"
    ids = torch.tensor([prompt + expected])
    with torch.no_grad():
        logprobs = (model(ids)[0, len(prompt) - 1 : -1].float() / 0.5).log_softmax(-1)
    found = choice["logprobs"]["token_logprobs"]
    assert found == pytest.approx(logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].tolist(), abs=1e-4)


def test_without_rollouts_nobody_loads_weights(coded: Workspace) -> None:
    with serving([coded.folder / "models/tools"], log=coded.folder / "server.log") as server:
        assert loaded(server, "models/tools").status_code == 404


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("models/tools", "models/code", "--rollouts", "."), "--rollouts: expected one model"),
        (("models/tools", "--weights", "int8", "--rollouts", "."), "with native weights"),
        (("models/tools", "--rollouts", "nowhere"), "--rollouts: expected a folder, found none at nowhere"),
        (("models/reward", "--rollouts", "."), "--rollouts: expected a causal model"),
    ],
)
def test_a_server_that_cannot_is_not_started(options: tuple[str, ...], text: str, coded: Workspace) -> None:
    command = [sys.executable, "-m", "pipeline.serve", *options, "--port", "0"]
    ended = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=60
    )
    assert ended.returncode == 2 and text in ended.stderr


def test_an_errand_that_fails_is_its_callers_and_the_engines(tiny_model: Transformer) -> None:
    """Its exception is raised in the caller; the engine is restarted and loads the next weights."""
    found = serving_engine.Engine(tiny_model, rows=2, rollouts=True)
    with found:
        with pytest.raises(ZeroDivisionError):
            found.between_answers(lambda: 1 // 0)
        found.restart()
        found.load(copy.deepcopy(tiny_model))
        assert found.model is not tiny_model
    with pytest.raises(EngineStopped):
        found.load(tiny_model)


def test_a_load_waits_for_answers_that_have_begun_and_ends_with_the_engine(tiny_model: Transformer) -> None:
    found = serving_engine.Engine(tiny_model, rows=2, rollouts=True)  # its thread is not started: only `step` runs
    heard: list[Event] = []
    for _ in range(2):
        request = GenerationRequest(ids=[1, 2], sampling=Sampling(3), seed=1, listener=heard.append)
        found.submit(request)
        found.step()
    loading = threading.Thread(target=found.load, args=(copy.deepcopy(tiny_model),))
    loading.start()
    found.submit(request)
    while loading.is_alive():
        assert sum(isinstance(event, Ended) for event in heard) <= 2
        found.step()
        time.sleep(0.001)
    assert sum(isinstance(event, Ended) for event in heard) == 2 and found.model is not tiny_model
    while found.busy or found.waiting:
        found.step()
    assert sum(isinstance(event, Ended) for event in heard) == 3


# -- engines that misbehave --------------------------------------------------------------------------------------------


Answering = Callable[[str, JsonObject], tuple[int, Any]]  # path, body -> status, answer


@contextmanager
def fake(answering: Answering) -> Iterator[str]:
    """An engine that answers with the results of a function. Yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {"data": [{"id": "policy"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(*answering(self.path, body))

        def _answer(self, status: int, answer: Any) -> None:
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def completion(body: JsonObject, **changes: Any) -> JsonObject:
    """A correct answer: token 5 twice, then the end."""
    choice = {
        "prompt_token_ids": body["prompt"],
        "token_ids": [5, 5, 9],
        "logprobs": {"token_logprobs": [-1.0, -2.0, -0.5]},
        "finish_reason": "stop",
    }
    fingerprint = changes.pop("system_fingerprint", None)
    return {"choices": [choice | changes], "system_fingerprint": fingerprint}


def connected(url: str, tmp_path: Path) -> RolloutEngine:
    return RolloutEngine(url, tmp_path / "sampler", vocab_size=20, stop=9, max_new_tokens=4, temperature=1.0)


def published(found: RolloutEngine) -> None:
    found.publish(lambda folder: "0123456789abcdef")


def answers_with(**changes: Any) -> Answering:
    return lambda path, body: (200, completion(body, **changes) if path == "/v1/completions" else {"success": True})


def test_an_engine_of_vllm_is_asked_by_its_own_routes(tmp_path: Path) -> None:
    heard: list[tuple[str, JsonObject]] = []

    def vllm(path: str, body: JsonObject) -> tuple[int, Any]:
        heard.append((path, body))
        if path == "/update_weights_from_disk":
            return 404, {}
        return 200, completion(body) if path == "/v1/completions" else b""

    with fake(vllm) as url:
        found = connected(url, tmp_path)
        published(found)
        drawn = found.generate([[1, 2], [3]], [7, 8])
        found.close()
    assert [path for path, _ in heard[:3]] == ["/update_weights_from_disk", "/collective_rpc", "/reset_prefix_cache"]
    assert heard[1][1] == {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "sampler")}}
    assert [(one.ids, one.logprobs, one.stop) for one in drawn] == [([5, 5], [-1.0, -2.0, -0.5], "stop")] * 2
    bodies = sorted((body for _, body in heard[3:]), key=lambda body: body["seed"])
    assert [(body["prompt"], body["seed"]) for body in bodies] == [([1, 2], 7), ([3], 8)]
    assert all(body["return_token_ids"] and body["stop_token_ids"] == [9] and body["ignore_eos"] for body in bodies)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"system_fingerprint": "fp_ffffffffffff"}, "uses weights fp_ffffffffffff, expected fp_0123456789ab"),
        ({"prompt_token_ids": [1, 3]}, r"used a different prompt than it was sent: \[1, 3\] for \[1, 2\]"),
        ({"token_ids": [5, 20, 9]}, "ids outside the vocabulary of 20"),
        ({"token_ids": [5, "6", 9]}, "ids outside the vocabulary of 20"),
        ({"token_ids": [5, 9]}, "returned 2 ids with mismatched log-probabilities"),
        ({"token_ids": None}, "outside the vocabulary"),
        ({"logprobs": None}, "a response without"),
        ({"logprobs": {"token_logprobs": [-1.0, None, -0.5]}}, "mismatched log-probabilities"),
        ({"logprobs": {"token_logprobs": [-1.0, math.nan, -0.5]}}, "mismatched log-probabilities"),
        ({"finish_reason": "length"}, "ended an answer with 'length' and ids"),
        ({"finish_reason": "abort"}, "ended an answer with 'abort'"),
        ({"token_ids": [9, 5, 9]}, "expected 9 only at a stop"),
    ],
)
def test_an_answer_that_cannot_be_right_ends_the_run(changes: JsonObject, text: str, tmp_path: Path) -> None:
    with fake(answers_with(**changes)) as url:
        found = connected(url, tmp_path)
        published(found)
        with pytest.raises(SamplerError, match=text):
            found.generate([[1, 2]], [7])
        found.close()


@pytest.mark.parametrize(
    ("status", "answer", "text"),
    [
        (500, {"error": "out of memory"}, "answered /update_weights_from_disk with 500: .*out of memory"),
        (200, {"success": False, "message": "no such tensor"}, "did not load the weights: no such tensor"),
        (200, b"<html>", "with invalid JSON: '<html>'"),
        (404, {}, "cannot load weights"),
    ],
)
def test_weights_that_are_not_loaded_end_the_run(status: int, answer: Any, text: str, tmp_path: Path) -> None:
    with fake(lambda path, body: (status, answer)) as url:
        found = connected(url, tmp_path)
        with pytest.raises(SamplerError, match=text):
            published(found)
        found.close()


def test_a_full_engine_is_asked_again(tmp_path: Path) -> None:
    turns = iter([429, 503, 200])

    def busy(path: str, body: JsonObject) -> tuple[int, Any]:
        return (200, {}) if path != "/v1/completions" else (next(turns), completion(body))

    with fake(busy) as url:
        found = connected(url, tmp_path)
        published(found)
        assert found.generate([[1]], [7])[0].ids == [5, 5]
        found.close()


def test_a_slow_engine_is_said_and_then_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "SLOW_SECONDS", 0.2)
    monkeypatch.setattr(engine, "ANSWER_SECONDS", 0.7)
    released = threading.Event()

    def slow(path: str, body: JsonObject) -> tuple[int, Any]:
        if path == "/v1/completions":
            released.wait(5)
        return 200, completion(body) if path == "/v1/completions" else {}

    with fake(slow) as url:
        found = connected(url, tmp_path)
        published(found)
        with pytest.raises(SamplerError, match="did not answer /v1/completions within 1 s"):
            found.generate([[1, 2]], [7])
        released.set()
        found.close()
    assert "has sampled 0 of 1 answers in" in capsys.readouterr().err


def test_an_engine_with_other_log_probabilities_ends_the_run(coded: Workspace) -> None:
    """The engine does not say which weights it has."""

    def far_off(path: str, body: JsonObject) -> tuple[int, Any]:
        if path != "/v1/completions":
            return 200, {}
        logprobs = {"token_logprobs": [-0.1, -0.1, -0.1]}
        return 200, completion(body, token_ids=[70, 71, *body["stop_token_ids"]], logprobs=logprobs)

    with fake(far_off) as url:
        ended = coded.command("grpo", method="grpo", **SERVER | {"runtime.sampler.url": url})
    assert ended.code == 1 and re.search(r"differ from the policy's by [\d.]+ nats per token", ended.said), ended.said
    assert not (coded.folder / "models/grpo").exists()


def test_an_address_that_cannot_be_used_is_refused(
    coded: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "runtime.sampler.url: missing" in coded.command("grpo", method="grpo", sampler="server").said
    assert "sampler: expected model or server, got 'own'" in coded.command("grpo", method="grpo", sampler="own").said
    monkeypatch.delenv(engine.KEY, raising=False)
    for url, text in (
        ("http://10.0.0.2:8100", f"on another machine: set {engine.KEY}"),
        ("http://127.0.0.1:1", "found none"),
        ("ftp://127.0.0.1", "expected an address"),
    ):
        with pytest.raises(ConfigError, match=text):
            connected(url, tmp_path)
