"""Sample answers with an external inference engine: a separate server process that runs the policy's current weights.

    engine = RolloutEngine(url, folder, temperature=..., ...)      ConfigError if no engine answers; `close` disconnects
    engine.publish(write)           writes the weights to `folder`, has the engine load them, and checks that it did
    engine.generate(ids, seeds)     one completion per prompt: ids, the engine's log-probabilities, reason for stopping

The client uses the OpenAI protocol, with vLLM's and SGLang's extensions for reinforcement learning:

    POST /v1/completions                prompt as ids, one answer per request, `return_token_ids` (vLLM): the response
                                        has `prompt_token_ids` and `token_ids`, so nothing is re-tokenized
    POST /update_weights_from_disk      SGLang's and ours: loads a folder of safetensors and clears the prefix cache
    POST /collective_rpc, /reset_prefix_cache      vLLM's, with VLLM_SERVER_DEV_MODE=1, if the route above is missing

    python -m pipeline.serve models/tools --rollouts .work          ours

Log-probabilities must be at the sampling temperature (`--rollouts` does that; vLLM: `--logprobs-mode
processed_logprobs`). Engines with a different precision or different kernels compute slightly different values than the
policy, so the policy rescores each answer, and `policy_losses.importance` corrects for the difference.

The run ends with a SamplerError if the engine is down, times out, or answers with unexpected ids or weights.
The state is saved first, so rerunning the same command resumes the run.

Weights are published as a folder, so engine and trainer must share a file system. Only our server reports which weights
it uses (`system_fingerprint`). With other servers, log-probabilities that are far off are detected (MISMATCH), but
weights that are one update old are not. Out of scope: starting an engine.
"""

import ipaddress
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import httpx

from pipeline.generation.sampling import Completion
from pipeline.run.config import without_password
from pipeline.run.errors import ConfigError, SamplerError
from pipeline.run.tracking import say
from pipeline.run.types import JsonObject
from pipeline.sandbox.remote import address

KEY = "STAGECOACH_SAMPLER_KEY"
OUR_FINGERPRINT = "fp_"
CONNECTIONS = 64  # concurrent requests
ANSWER_SECONDS = 600.0  # for one answer, including queueing
LOAD_SECONDS = 1800.0  # for loading weights: 14 GB from a slow disk
SLOW_SECONDS = 60.0  # interval of progress messages while waiting
MISMATCH = 0.5  # nats per token between engine and policy: a larger difference is not rounding


class RolloutEngine:
    """A client for the engine at an address."""

    def __init__(
        self, url: str, folder: Path, *, vocab_size: int, stop: int, max_new_tokens: int, temperature: float
    ) -> None:
        """`stop` ends an answer. Raises ConfigError if no engine answers at the address, or the address is remote
        and no key is set.
        """
        base, key = address(url, "runtime.sampler.url"), os.environ.get(KEY, "")
        self.url, self.folder = without_password(base), folder.resolve()
        self.vocab_size, self.stop = vocab_size, stop
        self.sampling = {"max_tokens": max_new_tokens, "temperature": temperature, "top_p": 1.0}
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        if not key and not is_loopback(base):
            raise ConfigError(
                f"runtime.sampler.url: {self.url} is on another machine: set {KEY} to that engine's key,"
                " or use an engine on this machine"
            )
        limits = httpx.Limits(max_connections=CONNECTIONS)
        timeout = httpx.Timeout(10.0, read=ANSWER_SECONDS, pool=None)
        self._client = httpx.Client(base_url=base, headers=headers, timeout=timeout, limits=limits, trust_env=False)
        self._pool = ThreadPoolExecutor(CONNECTIONS, "sampler")
        self.model, self.fingerprint = self._served(), ""

    def close(self) -> None:
        """Close the connections."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def _served(self) -> str:
        """The name of the model served by the engine. Raises ConfigError."""
        try:
            answer = self._client.get("/v1/models", timeout=30.0)
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"runtime.sampler.url: expected an engine at {self.url}, found none ({error or type(error).__name__});"
                " start one with python -m pipeline.serve MODEL --rollouts .work --port 8100"
            ) from error

    # -- weights -------------------------------------------------------------------------------------------------------

    def publish(self, write: Callable[[Path], str]) -> None:
        """Have the engine load the weights that `write` saves to a new folder; `write` returns their digest.

        Raises SamplerError if the engine does not load them or loads different ones.
        """
        digest = write(self.folder)
        body = {"model_path": str(self.folder), "flush_cache": True}
        answer = self._post("/update_weights_from_disk", body, LOAD_SECONDS)
        if answer is None:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}}
            if self._post("/collective_rpc", reload, LOAD_SECONDS) is None:
                self._fail("cannot load weights: it has neither /update_weights_from_disk nor /collective_rpc")
            self._post("/reset_prefix_cache", {}, LOAD_SECONDS)
            answer = {}
        if answer.get("success") is False:
            self._fail(f"did not load the weights: {str(answer.get('message'))[:300]}")
        self.fingerprint = f"{OUR_FINGERPRINT}{digest[:12]}"

    # -- answers -------------------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Completion]:
        """One completion per prompt. Raises SamplerError."""
        answers = [self._pool.submit(self._complete, *pair) for pair in zip(prompts, seeds, strict=True)]
        done = threading.Event()
        threading.Thread(target=self._say_if_slow, args=(answers, done), daemon=True).start()
        try:
            return [answer.result() for answer in answers]
        finally:
            done.set()
            for answer in answers:
                answer.cancel()

    def _say_if_slow(self, answers: Sequence[Future[Completion]], done: threading.Event) -> None:
        began = time.monotonic()
        while not done.wait(SLOW_SECONDS):
            ended, seconds = sum(answer.done() for answer in answers), time.monotonic() - began
            say(f"the engine at {self.url} has sampled {ended} of {len(answers)} answers in {seconds:.0f} s")

    def _complete(self, prompt: Sequence[int], seed: int) -> Completion:
        extra = {"logprobs": 0, "return_token_ids": True, "ignore_eos": True, "stop_token_ids": [self.stop]}
        body = {"model": self.model, "prompt": list(prompt), "seed": seed} | self.sampling | extra
        answer = self._post("/v1/completions", body, ANSWER_SECONDS)
        if answer is None:
            self._fail(f"answered /v1/completions with 404: it no longer serves {self.model}")
        try:
            choice = answer["choices"][0]
            ids, sent, reason = choice["token_ids"], choice["prompt_token_ids"], choice["finish_reason"]
            logprobs = choice["logprobs"]["token_logprobs"]
        except (LookupError, TypeError) as error:
            self._fail(f"sent a response without {error}: expected token_ids, prompt_token_ids and logprobs")
        if sent != list(prompt):
            self._fail(f"used a different prompt than it was sent: {str(sent)[:60]} for {str(list(prompt))[:60]}")
        if not _are(ids, int) or any(not 0 <= id_ < self.vocab_size for id_ in ids):
            self._fail(f"returned ids outside the vocabulary of {self.vocab_size} tokens: {str(ids)[:60]}")
        if not _are(logprobs, int, float) or len(logprobs) != len(ids) or not all(map(math.isfinite, logprobs)):
            self._fail(f"returned {len(ids)} ids with mismatched log-probabilities: {str(logprobs)[:60]}")
        fingerprint = str(answer.get("system_fingerprint") or "")
        if fingerprint.startswith(OUR_FINGERPRINT) and fingerprint != self.fingerprint:
            self._fail(f"uses weights {fingerprint}, expected {self.fingerprint}: is another run using this engine?")
        stopped = bool(ids) and ids[-1] == self.stop
        if reason not in ("stop", "length") or stopped != (reason == "stop") or self.stop in ids[:-1]:
            self._fail(f"ended an answer with {reason!r} and ids {ids[-3:]!s}: expected {self.stop} only at a stop")
        return Completion(ids[:-1] if stopped else ids, [float(value) for value in logprobs], reason)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _post(self, path: str, body: JsonObject, seconds: float) -> JsonObject | None:
        """The response JSON; None for 404. Retries while the engine is at capacity. Raises SamplerError."""
        until = time.monotonic() + seconds
        while True:
            try:
                answer = self._client.post(path, json=body, timeout=httpx.Timeout(10.0, read=seconds, pool=None))
            except httpx.TimeoutException:
                self._fail(f"did not answer {path} within {seconds:.0f} s")
            except httpx.HTTPError as error:
                self._fail(f"is unreachable ({error or type(error).__name__})")
            if answer.status_code == 404:
                return None
            if answer.status_code in (429, 503) and time.monotonic() < until:
                wait = answer.headers.get("Retry-After", "")
                time.sleep(min(5, int(wait)) if wait.isdecimal() else 1)
                continue
            if answer.status_code >= 400:
                self._fail(f"answered {path} with {answer.status_code}: {answer.text[:300]}")
            try:
                parsed = answer.json() if answer.content else {}
            except ValueError:
                self._fail(f"answered {path} with invalid JSON: {answer.text[:100]!r}")
            return parsed if isinstance(parsed, dict) else {}

    def _fail(self, what: str) -> NoReturn:
        raise SamplerError(f"runtime.sampler.url: the engine at {self.url} {what}")


def _are(values: object, *kinds: type) -> bool:
    return isinstance(values, list) and all(isinstance(value, kinds) for value in values)


def is_loopback(url: str) -> bool:
    """Whether an address is on this machine."""
    host = httpx.URL(url).host
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
