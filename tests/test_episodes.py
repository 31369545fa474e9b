"""Several turns with tools: what is sampled and what is appended, who learns what, environments in the sandbox, the
stage on a tiny model that calls.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.generation.sampling import Completion
from pipeline.learning import losses, policy_losses
from pipeline.learning.policy_losses import METHODS
from pipeline.model import checkpoint
from pipeline.model.transformer import Transformer
from pipeline.rl import answers, episodes
from pipeline.rl.answers import Answer, Prompt, Task
from pipeline.rl.episodes import Environment
from pipeline.rl.rewards import Score
from pipeline.rl.rollout import Rollout, group_loss
from pipeline.run.errors import DataError
from pipeline.sandbox.config import Limits
from pipeline.sandbox.judge import Judge, SandboxConfig
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer
from tests import rollouts
from tests.conftest import ROOT
from tests.server import serving
from tests.stopping import Stopped, hooked, stop
from tests.workspace import Workspace

SHIPPED = ("search", "calculator", "store", "files")
FOLDER = ROOT / "conf/environment"
LOOK = """
def task(split, number, seed):
    tools = [{"type": "function", "function": {"name": "look"}}]
    return {"question": "Which " + str(number) + "?", "tools": tools, "state": {"looks": 0}, "goal": 1}


def call(state, name, arguments):
    state["looks"] += 1
    if name == "hang":
        while True:
            pass
    if name == "huge":
        return "x" * 1_000_000
    if name == "object":
        return object()
    if name == "quit":
        raise SystemExit(0)
    if name != "look":
        raise ValueError("no such tool: " + name)
    return state["looks"]


def score(state, goal, answer):
    return 0.5 * (state["looks"] >= goal) + 0.5 * ("left" in answer)
"""
CALL = chat.CALL + '\n{"name": "look", "arguments": {}}\n' + chat.CALL_END


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(SandboxConfig(limits=Limits(cpu_seconds=0.2)), 1) as opened:
        yield opened


@pytest.fixture
def look(judge: Judge, tmp_path: Path) -> Environment:
    (tmp_path / "look.py").write_text(LOOK)
    return Environment.of(tmp_path / "look.py", judge)


def prompts(tokenizer: Tokenizer, world: Environment, count: int = 1) -> list[Prompt]:
    return answers.task_prompts(world.tasks("train", count, 1), tokenizer, 200)


class Script:
    """A sampler that says given turns and records what it was asked."""

    def __init__(self, tokenizer: Tokenizer, *turns: str, ends: bool = True) -> None:
        self.turns, self.ends, self.tokenizer = list(turns), ends, tokenizer
        self.asked: list[list[int]] = []
        self.seeds: list[int] = []
        self.said: list[list[int]] = []

    def __call__(self, asked: list[list[int]], seeds: list[int]) -> list[Completion]:
        text = self.turns.pop(0)
        self.asked += asked
        self.seeds += seeds
        ids = encoded(self.tokenizer, text)
        self.said.append(ids)
        return [Completion(ids, [-0.5] * (len(ids) + self.ends), "stop" if self.ends else "length") for _ in asked]


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """What a policy says, control tokens included."""
    pieces = re.split(f"({re.escape(chat.CALL)}|{re.escape(chat.CALL_END)})", text)
    known = {chat.CALL: chat.CALL, chat.CALL_END: chat.CALL_END}
    return [
        id_
        for piece in pieces
        if piece
        for id_ in ([tokenizer.control_ids[known[piece]]] if piece in known else tokenizer.encode(piece))
    ]


def played(
    tokenizer: Tokenizer, world: Environment, *turns: str, limit: int = 400, max_turns: int = 4, ends: bool = True
) -> tuple[Answer, Script]:
    script = Script(tokenizer, *turns, ends=ends)
    (answer,) = episodes.play(
        script, [(prompts(tokenizer, world)[0], 0)], tokenizer, world, seed=1, max_turns=max_turns, max_new_tokens=limit
    )
    return answer, script


def test_results_continue_the_ids_of_the_conversation(byte_tokenizer: Tokenizer) -> None:
    asked = [{"role": "user", "content": "Go."}]
    calls = [{"id": str(n), "function": {"name": "look", "arguments": "{}"}} for n in range(2)]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    shown = [{"role": "tool", "tool_call_id": str(n), "content": f" {n}\n"} for n in range(2)]
    before = chat.render(byte_tokenizer, [*asked, said]).ids
    after = chat.render(byte_tokenizer, [*asked, said, *shown], generation_prompt=True).ids
    end = len(before) - len(byte_tokenizer.encode("\n"))  # where the policy's turn ends
    assert before[:end] + chat.results(byte_tokenizer, [" 0\n", " 1\n"]) == after


def test_an_answer_is_what_was_sampled_with_results_between(byte_tokenizer: Tokenizer, look: Environment) -> None:
    answer, script = played(byte_tokenizer, look, CALL + "\n" + CALL, "left")
    end, first, second = byte_tokenizer.turn_end, *script.said
    between = chat.results(byte_tokenizer, ["1", "2"])
    assert answer.ids == [*first, end, *between, *second, end]
    assert answer.own == [True] * (len(first) + 1) + [False] * len(between) + [True] * (len(second) + 1)
    assert len(answer.logprobs) == sum(answer.own)
    assert answer.finished and answer.text == "left" and [c["name"] for c in answer.calls] == ["look", "look"]
    prompt = answer.prompt.ids
    assert script.asked == [prompt, prompt + answer.ids[: len(first) + 1 + len(between)]]
    assert len(set(script.seeds)) == 2
    assert script.seeds[0] == answers.seed_of(1, answer.prompt, 0)  # as with one turn
    assert look.scores([answer]) == [1.0]


def test_an_answer_ends_after_its_turns_or_where_no_room_is_left(byte_tokenizer: Tokenizer, look: Environment) -> None:
    answer, _ = played(byte_tokenizer, look, CALL, CALL, max_turns=2)
    assert answer.finished and len(answer.calls) == 1  # nobody would read the second result
    whole = len(answer.ids)
    cut, _ = played(byte_tokenizer, look, CALL, CALL, max_turns=2, limit=whole - 1)
    assert cut.ids == answer.ids[:-1] and not cut.finished and len(cut.logprobs) == sum(cut.own or [])
    first = answer.ids.index(byte_tokenizer.turn_end) + 1
    short, script = played(byte_tokenizer, look, CALL, CALL, limit=first + 5)  # there is no room for the result
    assert short.ids == answer.ids[:first] and not short.finished and len(script.asked) == 1
    unended, _ = played(byte_tokenizer, look, CALL, ends=False)
    assert not unended.finished and not unended.calls and unended.ids == answer.ids[: first - 1]


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("nothing", '{"error": "ValueError: no such tool: nothing"}'),
        ("hang", '{"error": "the tool failed: cpu limit"}'),
        ("quit", '{"error": "the tool failed: SystemExit: 0"}'),
        ("object", '{"error": "TypeError: Object of type object is not JSON serializable"}'),
    ],
)
def test_a_tool_that_fails_has_the_reason_as_its_result(name: str, result: str, look: Environment) -> None:
    task = look.tasks("train", 1, 1)["look/train/0"]
    assert look.results([(task, [{"name": name, "arguments": {}}])]) == [result]


def test_a_long_result_is_cut(look: Environment) -> None:
    task = look.tasks("train", 1, 1)["look/train/0"]
    (result,) = look.results([(task, [{"name": "huge", "arguments": {}}])])
    assert result.startswith('"xxx') and result.endswith("... (1000002 characters in all)") and len(result) < 2100


def test_a_call_that_cannot_be_read_is_answered(byte_tokenizer: Tokenizer, look: Environment) -> None:
    answer, script = played(byte_tokenizer, look, chat.CALL + "{look}" + chat.CALL_END, CALL, "left")
    assert "a call that cannot be read" in byte_tokenizer.decode(script.asked[1], skip_special=False)
    assert answer.finished and len(answer.calls) == 1


def test_the_state_counts_all_calls_before(byte_tokenizer: Tokenizer, look: Environment) -> None:
    answer, script = played(byte_tokenizer, look, CALL, CALL, "right")
    texts = [byte_tokenizer.decode(ids, skip_special=False) for ids in script.asked[1:]]
    assert f"{chat.RESPONSE}\n1\n{chat.RESPONSE_END}" in texts[0]
    assert f"{chat.RESPONSE}\n2\n{chat.RESPONSE_END}" in texts[1]
    assert look.scores([answer]) == [0.5] and look.verdicts([answer]) == ["failed"]


def test_a_policy_cannot_reach_the_goal_of_another_or_the_source_of_the_trainer(look: Environment) -> None:
    """Arguments are data: they are written as literals, whatever they contain."""
    task = look.tasks("train", 1, 1)["look/train/0"]
    hostile = {"name": "look", "arguments": {"x": "'] + [open('/etc/passwd')] #", "__class__": "\x00"}}
    assert look.results([(task, [hostile])]) == ["1"]


# -- who learns what ---------------------------------------------------------------------------------------------------


def test_nothing_is_learned_from_results(byte_tokenizer: Tokenizer, tiny_model: Transformer, look: Environment) -> None:
    """The gradient is that of the policy's tokens alone, in a conversation read whole."""
    answer, _ = played(byte_tokenizer, look, CALL, "left " * 3)
    config = rollouts.config(prompts=1, samples=1, minibatches=1, max_new_tokens=400)
    one = rollouts.stream(config, prompts=1)
    advantages = np.linspace(-1, 2, len(answer.logprobs)).astype(np.float32)
    one.rollouts = [Rollout(answer, Score(1.0, {}), {"advantages": advantages})]
    (read,) = answers.logprobs_of(tiny_model, [answer], byte_tokenizer.pad, 1.0)
    batch = replace(one.batch(0, 1000, np.array([0])), old=torch.from_numpy(read).float())
    shown = [n for n, own in enumerate(answer.own or []) if not own]
    targets = (batch.targets[0] >= 0).nonzero().flatten().tolist()
    places = {len(answer.prompt.ids) + n - 1 for n in range(len(answer.ids))}
    assert set(targets) == places - {len(answer.prompt.ids) + n - 1 for n in shown} and len(shown) > 10
    assert len(targets) == len(batch.row_of) == len(batch.old) == batch.counts["tokens"]

    def gradients(result: losses.Loss) -> list[torch.Tensor]:
        tiny_model.zero_grad()
        sum(term.sum for term in result.terms).backward()  # type: ignore[union-attr]
        return [parameter.grad.clone() for parameter in tiny_model.parameters() if parameter.grad is not None]

    found = gradients(group_loss(tiny_model, batch, method=METHODS["dapo"], config=config))
    ids = torch.tensor([answer.prompt.ids + answer.ids])
    logits = tiny_model(ids, documents=torch.zeros_like(ids))[0]
    logits.retain_grad()
    at = torch.tensor(targets)
    logprobs = logits.log_softmax(-1)[at, ids[0, at + 1]]
    whole = policy_losses.group_policy(
        logprobs,
        -logprobs.detach(),
        old=batch.old,
        advantages=batch.arrays["advantages"],
        reference=None,
        row_of=batch.row_of,
        num_rows=1,
        method=METHODS["dapo"],
        max_tokens=400,
    )
    for a, b in zip(found, gradients(whole), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert logits.grad is not None
    silent = torch.ones(len(logits), dtype=torch.bool)
    silent[at] = False
    assert (logits.grad[silent] == 0).all() and (logits.grad[at].abs().sum(1) > 0).all()


def test_log_probabilities_of_several_turns_are_those_of_sampling(
    byte_tokenizer: Tokenizer, caller: Transformer, look: Environment
) -> None:
    """Teacher forcing over the whole conversation gives each of the policy's tokens the same as sampling did."""
    from pipeline.generation.sampling import Sampling, sampler

    generate = sampler(caller, Sampling(60, temperature=0.9), {byte_tokenizer.turn_end})
    requests = [(prompt, n) for prompt in prompts(byte_tokenizer, look, 4) for n in range(2)]
    given = episodes.play(generate, requests, byte_tokenizer, look, seed=3, max_turns=3, max_new_tokens=150)
    assert sum(bool(answer.calls) for answer in given) > 4
    read = answers.logprobs_of(caller, given, byte_tokenizer.pad, 0.9)
    for answer, logprobs in zip(given, read, strict=True):
        assert np.allclose(answer.logprobs, logprobs, atol=1e-4)
    alone = [
        episodes.play(generate, [one], byte_tokenizer, look, seed=3, max_turns=3, max_new_tokens=150)[0]
        for one in requests
    ]
    assert [one.ids for one in alone] == [one.ids for one in given]


@pytest.fixture
def caller(byte_tokenizer: Tokenizer, tiny_model: Transformer, look: Environment) -> Transformer:
    """The tiny model after a few steps on conversations that call `look` and then say what they found."""
    taught = []
    for name, task in look.tasks("train", 8, 1).items():
        asked = [{"role": "user", "content": task.question}]
        calls = [{"id": "0", "function": {"name": "look", "arguments": {}}}]
        said = [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "0", "content": "1"},
            {"role": "assistant", "content": "left" if int(name[-1]) % 2 else "right"},
        ]
        taught.append(chat.render(byte_tokenizer, [*asked, *said], task.tools))
    longest = max(len(one.ids) for one in taught)
    ids = torch.tensor([one.ids + [byte_tokenizer.pad] * (longest - len(one.ids)) for one in taught])
    trained = torch.tensor([one.trained + [False] * (longest - len(one.ids)) for one in taught])
    optimizer = torch.optim.AdamW(tiny_model.parameters(), lr=1e-2)
    for _ in range(60):
        logits = tiny_model(ids)[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits[trained[:, 1:]], ids[:, 1:][trained[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5
    return tiny_model.train(False)


# -- environments of conf/ ---------------------------------------------------------------------------------------------


@dataclass
class World:
    """An environment and one of its tasks, for an expert to solve."""

    environment: Environment
    task: Task

    def do(self, *calls: tuple[str, dict[str, Any]], answer: str = "Done.") -> float:
        """The score of these calls and this answer."""
        made = [{"name": name, "arguments": arguments} for name, arguments in calls]
        given = Answer(Prompt("x", [1], "task", self.task), 0, [1], [0.0], True, answer, calls=made)
        (score,) = self.environment.scores([given])
        assert score is not None
        return score


def find(world: World) -> float:
    state, goal = world.task.state, world.task.goal
    key, name = re.fullmatch(r"What is the (\w+) of the \w+ of (\w+)\?", world.task.question).groups()  # type: ignore[union-attr]
    first = (state["find"], {"name": name})
    second = (f"{state['tell']}_{key}", {f"{state['noun']}_id": goal["id"]})  # type: ignore[index]
    assert world.do(first) == 0.2 and world.do(first, second) == 0.5
    return world.do(first, second, answer=f"The {key} is {goal['value']}.")  # type: ignore[index]


def compute(world: World) -> float:
    names = {kind: name for name, kind in world.task.state["names"].items()}
    kinds = {"plus": "sum", "minus": "difference", "times": "product"}
    a, one, b, two, c = re.findall(r"\d+|plus|minus|times", world.task.question)
    keys = world.task.state["parameters"]
    middle = {"plus": int(a) + int(b), "minus": int(a) - int(b), "times": int(a) * int(b)}[one]
    first = (names[kinds[one]], dict(zip(keys, (int(a), int(b)), strict=True)))
    second = (names[kinds[two]], dict(zip(keys, (middle, int(c)), strict=True)))
    assert world.do(first) == 0.0 and world.do(first, second) == 0.5
    assert world.do(answer=f"{world.task.goal}") == 0.0  # right, but no call computed it
    return world.do(first, second, answer=f"It is {world.task.goal}.")


def change(world: World) -> float:
    put, remove, clone = world.task.state["names"]
    calls: list[tuple[str, dict[str, Any]]] = []
    for wish in world.task.question.rstrip(".").split(" and "):
        verb, *words = wish.lower().split()
        if verb == "set":
            calls.append((put, {"key": words[0], "value": words[2]}))
        elif verb == "delete":
            calls.append((remove, {"key": words[0]}))
        else:
            calls.append((clone, {"source": words[0], "target": words[2]}))
    return world.do(*calls)


def move(world: World) -> float:
    words = world.task.question.rstrip(".?").split()
    if words[0] == "Rename":
        return world.do(("rename", {"path": words[1], "new_path": words[3]}))
    if words[0] == "Add":
        return world.do(("append", {"path": words[5], "line": words[3]}))
    return world.do(("read", {"path": words[4]}), answer=f"It has {world.task.goal['count']} lines.")  # type: ignore[index]


EXPERTS: dict[str, Callable[[World], float]] = {"search": find, "calculator": compute, "store": change, "files": move}


@pytest.mark.parametrize("name", SHIPPED)
def test_an_expert_reaches_every_goal_and_who_does_nothing_none(name: str, judge: Judge) -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} >= {"none", *SHIPPED}
    world = Environment.of(FOLDER / f"{name}.py", judge)
    for split in ("train", "val"):
        for task in world.tasks(split, 12, 3).values():
            assert EXPERTS[name](World(world, task)) == 1.0, task
            assert World(world, task).do() == 0.0, task


@pytest.mark.parametrize("name", SHIPPED)
def test_tasks_are_a_function_of_split_number_and_seed(name: str, judge: Judge) -> None:
    world = Environment.of(FOLDER / f"{name}.py", judge)
    many = world.tasks("train", 120, 1)
    assert len({task.question for task in many.values()}) > 20
    assert list(world.tasks("train", 60, 1).values()) == list(many.values())[:60]
    assert world.tasks("train", 5, 2) != world.tasks("train", 5, 1)
    held_out = world.tasks("val", 60, 1)

    def tools(tasks: Any) -> set[str]:
        return {tool["function"]["name"] for task in tasks.values() for tool in task.tools}

    if name != "files":
        assert not tools(many) & tools(held_out)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def task(: pass", "not Python"),
        (LOOK.replace("def score", "def rate"), "found no score"),
        (LOOK.replace("tools = ", "tools = nobody"), r"task\(\.\.\.\) failed: NameError"),
        (LOOK.replace('"goal": 1', '"aim": 1'), "expected `question`, `tools`, `state` and `goal`"),
        (LOOK.replace('"looks": 0', '"looks": {1}'), "not JSON serializable"),
    ],
)
def test_a_file_that_is_no_environment_is_refused(source: str, message: str, judge: Judge, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(source)
    with pytest.raises(DataError, match=message):
        Environment.of(tmp_path / "own.py", judge).tasks("train", 2, 1)


# -- the stage ---------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {
    "environment": "look",
    "tasks": 8,
    "rewards": {"task": 1.0},
    "max_prompt": 140,
    "max_new_tokens": 110,
    "eval_problems": 8,
    "learning_rate": 1e-3,
    "prompts": 8,
    "samples": 8,
    "iterations": 8,
}


@pytest.fixture
def calling(workspace: Workspace, caller: Transformer) -> Workspace:
    """A workspace with the environment `look`, and a policy that calls."""
    conf = workspace.folder / "conf"
    ours = conf.resolve()
    conf.unlink()
    (conf / "environment").mkdir(parents=True)
    for path in ours.iterdir():
        if path.name != "environment":
            (conf / path.name).symlink_to(path)
    (conf / "environment/look.py").write_text(LOOK)
    checkpoint.save(workspace.folder / "models/tools", caller, workspace.tokenizer, {})
    return workspace


@pytest.mark.slow
@pytest.mark.full
def test_a_policy_learns_from_tasks_and_resumes_to_the_bit(calling: Workspace) -> None:
    changes = SETTINGS | {"runtime.save_steps": 1}
    ended = calling.command("grpo", **changes)
    assert ended.code == 0, ended.said
    whole = calling.published()
    held_out = calling.numbers("grpo")["held_out"]
    assert held_out["n"] == 8 and held_out["pass_at_1"] > held_out["pass_at_1_before"]
    rewards = [float(row["rewards/task/mean"]) for row in calling.curve("grpo") if row.get("rewards/task/mean")]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3])
    lines = [json.loads(line) for line in Path("metrics/samples/grpo.jsonl").read_text().splitlines()]
    assert lines[0]["prompt"].startswith("Which") and any(line["calls_after"] for line in lines)
    with hooked(stop(9)), pytest.raises(Stopped):
        calling.command("grpo", **changes | {"runtime.fresh": True})
    again = calling.command("grpo", **changes)
    assert again.code == 0 and "resumed at step" in again.said
    assert calling.published() == whole


@pytest.mark.slow
@pytest.mark.full
def test_an_engine_samples_each_turn_of_an_answer(calling: Workspace) -> None:
    """The turns are the same, and the weights differ only by rounding."""
    folder = calling.folder
    (folder / ".work").mkdir()
    changes = SETTINGS | {"iterations": 4, "eps": 1e-2, "runtime.save_steps": 1000}
    assert calling.command("grpo", **changes).code == 0
    start, alone, curve = calling.weights("tools"), calling.weights("grpo"), calling.curve("grpo")
    with serving([folder / "models/tools"], "--rollouts", str(folder / ".work"), log=folder / "server.log") as server:
        ended = calling.command("grpo", **changes, sampler="server", **{"runtime.sampler.url": server.url})
    assert ended.code == 0, ended.said
    served = calling.weights("grpo")
    assert max(float((start[name] - alone[name]).abs().max()) for name in start) > 1e-3
    assert max(float((served[name] - alone[name]).abs().max()) for name in start) < 1e-5
    for measure in ("completions/mean_length", "rewards/task/mean"):
        assert [row[measure] for row in calling.curve("grpo")] == [row[measure] for row in curve]


@pytest.mark.slow
def test_keys_that_do_not_go_together_are_refused(calling: Workspace) -> None:
    for changes, message in (
        ({"rewards": {"code": 1.0}}, "rewards: `code` needs tests; with `environment: look`, use `task` instead"),
        ({"max_turns": 0}, "tasks, max_turns: expected at least 1"),
        ({"environment": "nobody"}, "conf/environment/nobody.py does not exist"),
        ({"max_prompt": 20}, "have prompts of more than max_prompt = 20 tokens"),
    ):
        ended = calling.command("grpo", **SETTINGS | changes)
        assert ended.code != 0 and message in ended.said.replace("\n", " "), ended.said
        assert not (calling.folder / "models/grpo").exists()
