"""Three public harnesses against a real server, and our own scores on the same items.

    python -m tests.matrix.harnesses              a small model that memorizes the items
    python -m tests.matrix.harnesses MODEL_DIR    any exported causal model

    lm_eval     EleutherAI's lm-evaluation-harness: choices.jsonl by log-probabilities, questions.jsonl by generation
    evalplus    EvalPlus: humaneval_plus.jsonl, base and plus tests
    bfcl        bfcl-eval: a few rows of each Python category of its bundled files, answered by the model; and
                all rows of these files with constructed right and wrong answers, judged by both

Each runs in its own environment (`make clients`); one that is not installed is reported, and the others run. Our scores
come from pipeline/evaluation in this process, without the server: once on the prompts that the harness sends, so that
both measure the same thing, and once on our benchmarks' own prompts, to show how much a prompt matters.

Exits with 1 if an item differs without a known reason (`agreement.py`). Not guaranteed: a sandbox around EvalPlus,
which runs the model's code in its own processes; with MODEL_DIR, nobody has reviewed that code.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from pipeline.evaluation import benchmarks, bfcl, code, likelihood
from pipeline.evaluation.suites import Subject, SuiteSettings
from pipeline.generation.sampling import Completion
from pipeline.model import checkpoint
from pipeline.run.errors import StagecoachError
from pipeline.run.types import JsonObject
from pipeline.sandbox.judge import Candidate, Judge, SandboxConfig
from pipeline.serve.protocol import ChatBody
from pipeline.synthetic.tool_schemas import problems
from pipeline.text import chat
from tests.matrix import agreement, lessons
from tests.matrix.agreement import Comparison, Protocol
from tests.matrix.lessons import Said
from tests.matrix.snippets import CLIENTS
from tests.server import serving

HERE = Path(__file__).parent
CHOICES, QUESTIONS, PROBLEMS = (HERE / f"{name}.jsonl" for name in ("choices", "questions", "humaneval_plus"))
KEY = "a-key-that-nobody-guesses"
SECONDS = 900  # for a harness on a slow machine
CATEGORIES = ("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance")
JUDGED = (*CATEGORIES[:4], "live_simple", "live_parallel", "live_parallel_multiple")  # live_multiple takes minutes
ASKED, LONGEST = 5, 1500  # rows of each category that a model answers, and the maximum number of characters in a row
NEW_TOKENS = 768  # EvalPlus's
SETTINGS = SuiteSettings(
    documents=1,
    stories=0,
    problems=0,
    samples=0,
    dialogues=0,
    gaps=0,
    max_new_tokens=NEW_TOKENS,
    story_tokens=1,
    temperature=0.8,
    top_p=0.95,
    context=2048,
    bootstrap=1,
)


@dataclass(frozen=True)
class Setting:
    """What every harness needs: the model under test, its folder, its server, and a folder to work in."""

    subject: Subject
    model: Path
    url: str
    folder: Path


class NotInstalled(Exception):
    """A harness has no environment to run in."""


class HarnessFailed(Exception):
    """A harness's script ended without a result."""


def measure(folder: Path, model: Path | None = None) -> list[Comparison]:
    """Comparisons for the installed harnesses, and the reasons why the others did not run."""
    found: list[Comparison] = []
    prompts: dict[str, JsonObject] = {}
    try:
        prompts = bfcl_prompts(folder)
    except NotInstalled as error:
        found.append(Comparison("bfcl-eval", "all", absent=str(error)))
    except HarnessFailed as error:
        found.append(Comparison("bfcl-eval", "all", failed=str(error)))
    if model is None:
        said = [*said_texts(), *said_programs(), *said_calls(prompts, folder)]
        tokenizer = lessons.tokenizer_of(said)
        model = folder / "pupil"
        checkpoint.save(model, lessons.learn(tokenizer, said), tokenizer, {})
    loaded, tokenizer = checkpoint.load(model)
    subject = Subject(loaded.train(False), tokenizer, SETTINGS, 0)
    tasks: dict[str, Callable[[Setting], list[Comparison]]] = {
        "lm-evaluation-harness": with_lm_eval,
        "EvalPlus": with_evalplus,
    }
    if prompts:
        tasks["bfcl-eval"] = lambda setting: with_bfcl(setting, prompts)
    with serving([model], log=folder / "harnesses.log", environment={"STAGECOACH_API_KEYS": KEY}) as server:
        setting = Setting(subject, model, server.url, folder)
        for harness, run in tasks.items():
            try:
                found += run(setting)
            except NotInstalled as error:
                found.append(Comparison(harness, "all", absent=str(error)))
            except HarnessFailed as error:
                found.append(Comparison(harness, "all", failed=str(error)))
    return found


def run(harness: str, facts: JsonObject, folder: Path, **environment: str) -> Any:
    """Run a harness's script and return the result it wrote. Raises NotInstalled and HarnessFailed."""
    python = CLIENTS / harness / "bin" / "python"
    if not (CLIENTS / harness / ".ready").is_file():
        raise NotInstalled(f"not installed; `make clients` installs tests/matrix/{harness}.txt, or says why it cannot")
    answer, log = folder / f"{harness}.json", folder / f"{harness}.log"
    answer.unlink(missing_ok=True)
    home = {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "HF_HOME": str(folder / "cache" / "hf")}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("a") as output:
        ended = subprocess.run(
            [str(python), str(HERE / f"with_{harness}.py"), json.dumps(facts | {"answer": str(answer)})],
            cwd=folder,
            env=os.environ | home | offline | {"OMP_NUM_THREADS": "1", "OPENAI_API_KEY": KEY} | environment,
            stdout=output,
            stderr=output,
            timeout=SECONDS,
        )
    if ended.returncode or not answer.is_file():
        raise HarnessFailed(f"ended with {ended.returncode}: {log.read_text(errors='replace')[-2000:]}")
    return json.loads(answer.read_text(encoding="utf-8"))


def version(harness: str, package: str) -> str:
    """Version of a package in a harness's environment."""
    folders = map(str, (CLIENTS / harness).glob("lib/python*/site-packages"))
    return next(found.version for found in distributions(name=package, path=list(folders)))


# -- lm-evaluation-harness ---------------------------------------------------------------------------------------------


def question(row: JsonObject) -> str:
    """`PROMPT` of with_lm_eval.py."""
    return f"Question: {row['question']}\nAnswer:"


def said_texts() -> list[Said]:
    """The answers to learn: right for most questions, wrong for every fourth."""
    chosen = [
        (row, (row["answer"] + (n % 4 == 3)) % len(row["choices"])) for n, row in enumerate(lessons.rows(CHOICES))
    ]
    said = [Said(question(row), f" {row['choices'][number]}") for row, number in chosen]
    for n, row in enumerate(lessons.rows(QUESTIONS)):
        said.append(Said(question(row), f" {row['answer']}{' or so' if n % 4 == 3 else ''}\n"))
    return said


def with_lm_eval(setting: Setting) -> list[Comparison]:
    """Both tasks, and the choices once more after the token with which our evaluation begins a document."""
    subject, tokenizer = setting.subject, setting.subject.tokenizer
    context = subject.model.config.max_context
    facts = {"url": setting.url, "key": KEY, "model": setting.model.name, "tokenizer": str(setting.model)}
    files = {"choices": str(CHOICES), "questions": str(QUESTIONS), "context": context}
    found = run("lm_eval", facts | files, setting.folder)
    sent, generated = found["sent"]["loglikelihood"], found["sent"]["generate_until"]
    fields = ", ".join(f"{name} {sent[name]}" for name in ("max_tokens", "logprobs", "echo", "temperature"))
    prompt, start = tokenizer.decode(sent["prompt"][0], skip_special=False), "<|endoftext|>"
    exact = "log-probabilities from the model's logits, no server"
    theirs, ours = Protocol(prompt, "none", f"log-probabilities: {fields}"), Protocol(prompt, "none", exact)
    greedy = f"greedy: temperature {generated['temperature']:g}, max_tokens {generated['max_tokens']}"
    asked = tokenizer.decode(generated["prompt"][0], skip_special=False)
    rows = lessons.rows(CHOICES)
    as_they = [scored(subject, row, begins=False) for row in rows]
    as_we = [
        as_verdict(scored(subject, row, begins=True), [(f"our documents begin with {start}", True)]) for row in rows
    ]
    others = [as_verdict(row, []) for row in found["choices"]]
    texts = agreement.texts([completed(subject, row) for row in lessons.rows(QUESTIONS)], found["questions"])
    compared = partial(Comparison, "lm-evaluation-harness", versions=version("lm_eval", "lm_eval"))
    return [
        compared("choices", items=agreement.choices(as_they, found["choices"]), ours=ours, theirs=theirs),
        compared(
            "choices, our form", items=agreement.verdicts(as_we, others), ours=replace(ours, prompt=start + prompt)
        ),
        compared(
            "questions",
            items=texts,
            ours=Protocol(asked, "end-of-turn and end-of-text tokens; cut at the end of the line", greedy),
            theirs=Protocol(asked, f"{generated['stop']}", greedy),
        ),
    ]


def scored(subject: Subject, row: JsonObject, *, begins: bool) -> JsonObject:
    """Log-probabilities of a row's choices; with `begins`, after the token that begins a document."""
    context = subject.tokenizer.encode(question(row))
    wholes = [subject.tokenizer.encode(f"{question(row)} {choice}") for choice in row["choices"]]
    start = subject.tokenizer.end_of_text if begins else context[0]
    documents = [ids if begins else ids[1:] for ids in wholes]
    nats = likelihood.token_nats(subject.model, documents, start=start, context=subject.model.config.max_context)
    skipped = len(context) - (not begins)
    logprobs = [-sum(values[skipped:]) for values in nats]
    by_length = [value / len(choice) for value, choice in zip(logprobs, row["choices"], strict=True)]
    best, best_by_length = logprobs.index(max(logprobs)), by_length.index(max(by_length))
    return {
        "id": row["id"],
        "logprobs": logprobs,
        "acc": float(best == row["answer"]),
        "acc_norm": float(best_by_length == row["answer"]),
    }


def as_verdict(row: JsonObject, causes: list[tuple[str, bool]]) -> JsonObject:
    """A scored row, reduced to right or wrong."""
    return {"id": row["id"], "right": row["acc"] == 1, "found": f"acc {row['acc']:g}", "causes": causes}


def completed(subject: Subject, row: JsonObject) -> JsonObject:
    """The greedy completion of a row's question, up to the end of the line."""
    ids = subject.tokenizer.encode(question(row))
    completion = subject.complete("questions", {row["id"]: ids}, tokens=32, temperature=0.0)[row["id"]]
    text = subject.tokenizer.decode(completion.ids).partition("\n")[0].strip()
    return {"id": row["id"], "text": text, "exact_match": float(text == row["answer"])}


# -- EvalPlus ----------------------------------------------------------------------------------------------------------


SYSTEM = "You are a helpful assistant good at coding."
INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
)
CUT_DIFFERENTLY = "EvalPlus takes the longest span of an answer that parses; we take its only fenced code block"
TOLERANCE = "EvalPlus accepts floats within 1e-6; our assertions compare exactly"
TIME = "the time limits differ: at least 1 s of wall-clock time per test for EvalPlus, 3 s of CPU time for us"
OTHER_PROMPT = "our benchmarks use a different prompt"


def evalplus_messages(problem: JsonObject) -> list[JsonObject]:
    """The messages that EvalPlus sends for a problem."""
    asked = f"{INSTRUCTION}\n```python\n{problem['prompt'].strip()}\n```"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]


def said_programs() -> list[Said]:
    """Answers to EvalPlus's prompts: `lessons.program`."""
    return [Said(evalplus_messages(row), lessons.program(row, n)) for n, row in enumerate(lessons.rows(PROBLEMS))]


def with_evalplus(setting: Setting) -> list[Comparison]:
    """Base and plus tests with the prompts that EvalPlus sends, and base tests with our own prompts."""
    facts = {"url": setting.url, "model": setting.model.name, "folder": str(setting.folder / "evalplus")}
    found = run("evalplus", facts, setting.folder, HUMANEVAL_OVERRIDE_PATH=str(PROBLEMS))
    rows = lessons.rows(PROBLEMS)
    sent = found["sent"]
    assert evalplus_messages(rows[-1]) == sent["messages"], f"EvalPlus sends another prompt: {sent['messages']}"
    subject, tokenizer = setting.subject, setting.subject.tokenizer
    exercises = {exercise.id: exercise for exercise in benchmarks.load(PROBLEMS).exercises}
    prompts = {row["task_id"]: rendered(setting, {"messages": evalplus_messages(row)}) for row in rows}
    answers = subject.complete("evalplus", prompts, tokens=NEW_TOKENS, temperature=0.0)
    texts = {name: tokenizer.decode(completion.ids) for name, completion in answers.items()}
    statuses = {task: results[0] for task, results in found["eval"].items()}
    comparisons = []
    theirs = Protocol(
        tokenizer.decode(prompts[rows[0]["task_id"]], skip_special=False),
        "end-of-turn and end-of-text tokens",
        f"greedy: temperature {sent['temperature']}, max_tokens {sent['max_tokens']}",
    )
    versions = version("evalplus", "evalplus")
    with Judge(SandboxConfig(), 1) as judge:
        for part in ("base", "plus"):
            tests = tests_of(judge, rows, part)
            own = [
                judged_program(
                    judge, exercises[name], tests[name], texts[name], found["raw"][name], statuses[name], part
                )
                for name in exercises
            ]
            other = [
                {"id": name, "right": status[f"{part}_status"] == "pass", "found": str(status[f"{part}_status"])}
                for name, status in statuses.items()
            ]
            comparisons.append(
                Comparison("EvalPlus", f"HumanEval+ {part}", versions, agreement.verdicts(own, other), theirs, theirs)
            )
        usual = benchmarks.solved(subject, "usual", list(exercises.values()), judge, completes=False)
    first = next(iter(exercises.values()))
    ours = Protocol(first.asked, "end-of-turn and end-of-text tokens", f"greedy, {NEW_TOKENS} tokens")
    right = {row["id"]: row["verdict"] == "passed" for row in usual.rows if row["suite"] == "usual"}
    own = [
        {"id": name, "right": passed, "found": "passed" if passed else "failed", "causes": [(OTHER_PROMPT, True)]}
        for name, passed in right.items()
    ]
    comparisons.append(
        Comparison(
            "EvalPlus", "HumanEval+ base, our form", versions, agreement.verdicts(own, other_base(statuses)), ours
        )
    )
    return comparisons


def other_base(statuses: dict[str, JsonObject]) -> list[JsonObject]:
    """EvalPlus's verdicts on the base tests."""
    return [
        {"id": name, "right": status["base_status"] == "pass", "found": str(status["base_status"])}
        for name, status in statuses.items()
    ]


def tests_of(judge: Judge, rows: Sequence[JsonObject], part: str) -> dict[str, list[JsonObject]]:
    """Assertions for the inputs of a part, base or plus; the reference solution gives the expected values."""
    checks = []
    for row in rows:
        name = row["entry_point"]
        calls = [", ".join(map(repr, inputs)) for inputs in row[f"{part}_input"]]
        lines = [f"    assert candidate({call}) == reference({call})" for call in calls]
        source = "\n".join([f"reference = {name}", "def check(candidate):", *lines])
        checks.append(code.function(source, name, row["prompt"] + row["canonical_solution"], row["task_id"]))
    protected = code.protect(judge, checks)
    assert not any(tests.unprotected for tests in protected), "an input in the file has no literal form"
    return {row["task_id"]: tests.tests for row, tests in zip(rows, protected, strict=True)}


def judged_program(
    judge: Judge,
    exercise: benchmarks.Exercise,
    tests: list[JsonObject],
    text: str,
    raw: str,
    status: JsonObject,
    part: str,
) -> JsonObject:
    """Our verdict on our own answer, and possible causes if theirs differs."""

    def passes(source: str | None, tests: list[JsonObject], compare: str = "strict") -> bool:
        program = Candidate(
            source=source, entry_point=exercise.entry_point, tests=tests, cpu_seconds=code.CPU_SECONDS, compare=compare
        )
        return code.judge_sources(judge, [(exercise.id, 0, text, program)])[0].verdict == "passed"

    right, theirs = passes(exercise.answered(text), tests), status[f"{part}_status"] == "pass"
    causes = []
    if right != theirs:
        same = text == raw
        values = [as_value(test) for test in tests]
        causes = [
            (CUT_DIFFERENTLY, same and passes(status["solution"], tests) == theirs),
            (TOLERANCE, same and passes(status["solution"], values, "close") == theirs),
            (TIME, same and status[f"{part}_status"] == "timeout"),
        ]
    return {"id": exercise.id, "right": right, "found": "passed" if right else "failed", "causes": causes}


def as_value(test: JsonObject) -> JsonObject:
    """Convert `assert f(1) == (2)` to arguments and an expected value."""
    (statement,) = ast.parse(test["assert"]).body
    assert isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare)
    assert isinstance(statement.test.left, ast.Call)
    arguments = ", ".join(map(ast.unparse, statement.test.left.args))
    return {"args": f"[{arguments}]", "expected": ast.unparse(statement.test.comparators[0]), "visible": False}


def rendered(setting: Setting, asked: JsonObject) -> list[int]:
    """The token ids into which the server turns a chat request."""
    body = ChatBody.model_validate({"model": setting.model.name} | asked)
    messages, tools = [message.plain() for message in body.messages], [tool.plain() for tool in body.tools or []]
    return chat.render(setting.subject.tokenizer, messages, tools, generation_prompt=True).ids


# -- bfcl-eval ---------------------------------------------------------------------------------------------------------


BY_ORDER = "bfcl-eval pairs each expected call, in order, with the first call that fits; we accept any assignment"
IN_LISTS = "bfcl-eval rejects an integer in a list of floats; we accept it"
GRAMMAR = "the server enforces the tools' schemas; without them, the model generates a call that they forbid"
CUT = "our answer was cut off at the token limit"


def bfcl_files() -> Path:
    """The folder with bfcl-eval's bundled files. Raises NotInstalled."""
    found = list((CLIENTS / "bfcl").glob("lib/python*/site-packages/bfcl_eval/data"))
    if not found:
        raise NotInstalled("not installed; `make clients` installs tests/matrix/bfcl.txt, or says why it cannot")
    return found[0]


def bfcl_prompts(folder: Path) -> dict[str, JsonObject]:
    """The rows that the model answers, by id, as bfcl-eval sends them; also written as files to `folder`.

    Raises NotInstalled.
    """
    data = folder / "bfcl"
    shutil.copytree(bfcl_files(), data)  # bfcl-eval's table of results reads the files of all categories
    for category in CATEGORIES:
        name = f"BFCL_v4_{category}.json"
        short = [line for line in (bfcl_files() / name).read_text(encoding="utf-8").splitlines() if len(line) < LONGEST]
        (data / name).write_text("\n".join(short[:ASKED]) + "\n", encoding="utf-8")
        if category != "irrelevance":
            ids = [json.loads(line)["id"] for line in short[:ASKED]]
            truths = {row["id"]: row for row in lessons.rows(bfcl_files() / "possible_answer" / name)}
            text = "".join(json.dumps(truths[id_]) + "\n" for id_ in ids)
            (data / "possible_answer" / name).write_text(text, encoding="utf-8")
    facts = {"task": "prompts", "data": str(data), "project": str(folder), "categories": CATEGORIES, "models": {}}
    return run("bfcl", facts, folder)


def said_calls(prompts: dict[str, JsonObject], folder: Path) -> list[Said]:
    """Answers to learn, in turn within each category: right, wrong, with required arguments only, without a call."""
    said: list[Said] = []
    if not prompts:
        return said
    for question in questions(folder / "bfcl", CATEGORIES).values():
        asked = prompts[question.id]
        number = list(prompts).index(question.id) % ASKED
        kinds = ("truth", "last-values", "other-texts", "required-alone", "no-call")
        names = [tool["function"]["name"] for tool in asked["tools"]]
        calls = lessons.VARIANTS[kinds[number]](question.truth)
        if not question.truth:  # irrelevance: any call is wrong; one without required arguments is impossible
            calls = [{"name": names[0], "arguments": {}}] if number == 2 else []
        plain = tuple(call | {"name": call["name"].replace(".", "_")} for call in calls)
        body = ChatBody.model_validate({"model": "pupil"} | asked)
        messages, tools = [m.plain() for m in body.messages], tuple(t.plain() for t in body.tools or [])
        said.append(Said(messages, "" if plain else "None of these can help.", tools, plain))
    return said


def questions(data: Path, categories: Sequence[str]) -> dict[str, bfcl.Question]:
    """The questions of BFCL's files as our evaluation reads them, by id."""
    files = [data / f"BFCL_v4_{category}.json" for category in categories]
    read = [benchmarks.load(file).questions for file in files]
    return {question.id: question for one in read if one is not None for question in one.asked}


def with_bfcl(setting: Setting, prompts: dict[str, JsonObject]) -> list[Comparison]:
    """The model's answers, its answers to our own prompts, and constructed answers to all rows of the files."""
    data, models = setting.folder / "bfcl", {"stagecoach": setting.model.name}
    facts = {"data": str(data), "project": str(setting.folder), "categories": CATEGORIES, "models": models}
    url = {"OPENAI_BASE_URL": f"{setting.url}/v1"}
    found = run("bfcl", facts | {"task": "run"}, setting.folder, **url)["stagecoach"]
    subject, asked = setting.subject, questions(data, CATEGORIES)
    ids = {name: rendered(setting, prompt) for name, prompt in prompts.items()}
    answers = subject.complete("bfcl", ids, tokens=NEW_TOKENS, temperature=0.0)
    own = [judged_calls(subject, asked[name], prompts[name]["tools"], answers[name], found[name]) for name in asked]
    other = [
        {"id": name, "right": row["valid"], "found": f"{row['error']} {row['answer']}".strip()}
        for name, row in found.items()
    ]
    usual = {}
    for category in CATEGORIES:
        part = benchmarks.load(data / f"BFCL_v4_{category}.json").questions
        assert part is not None
        usual |= {row["id"]: row["verdict"] for row in bfcl.score(subject, category, part).rows}
    words = {
        name: chat.render(subject.tokenizer, question.messages, question.tools, generation_prompt=True).ids
        for name, question in asked.items()
    }
    in_our_form = [
        {
            "id": name,
            "right": verdict == "right",
            "found": verdict,
            "causes": [(OTHER_PROMPT, words[name] != ids[name])],
        }
        for name, verdict in usual.items()
    ]
    name, versions = next(iter(asked)), version("bfcl", "bfcl_eval")
    theirs = Protocol(
        subject.tokenizer.decode(ids[name], skip_special=False),
        "end-of-turn and end-of-text tokens",
        "greedy: temperature 0, no max_tokens (the rest of the context); calls constrained by the tools' grammar",
    )
    ours = replace(theirs, decoding=f"greedy, {NEW_TOKENS} tokens, no grammar")
    in_our_words = replace(ours, prompt=subject.tokenizer.decode(words[name], skip_special=False))
    return [
        Comparison("bfcl-eval", "BFCL v4", versions, agreement.verdicts(own, other), ours, theirs),
        Comparison("bfcl-eval", "BFCL v4, our form", versions, agreement.verdicts(in_our_form, other), in_our_words),
        fixed(setting.folder, versions),
    ]


def judged_calls(
    subject: Subject, question: bfcl.Question, tools: list[JsonObject], completion: Completion, theirs: JsonObject
) -> JsonObject:
    """Our verdict on our own answer to bfcl-eval's prompt, and possible causes if theirs differs."""
    text = subject.tokenizer.decode(completion.ids)
    reply = chat.parse(text)
    verdict = in_their_names(question, reply.tool_calls)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    forbidden = reply.error is not None or any(
        call["name"] not in schemas or problems(schemas[call["name"]], call["arguments"]) for call in reply.tool_calls
    )
    causes = [(GRAMMAR, forbidden), (CUT, completion.stop == "length")]
    causes += known_causes(question, reply.tool_calls, verdict)
    found = f"{'right' if verdict.valid else verdict.error}: {text}"
    return {"id": question.id, "right": verdict.valid, "found": found, "causes": causes}


def in_their_names(question: bfcl.Question, calls: Sequence[JsonObject]) -> bfcl.TurnCheck:
    """Our verdict with "_" for "." in the names, as bfcl-eval sends them to OpenAI's API and expects them back."""
    if not question.truth:
        return bfcl.TurnCheck(not calls, "called" if calls else "", greedy=not calls)
    functions = [tool["function"] | {"name": tool["function"]["name"].replace(".", "_")} for tool in question.tools]
    expected = [{name.replace(".", "_"): given for name, given in call.items()} for call in question.truth]
    return bfcl.check(functions, calls, expected)


def known_causes(
    question: bfcl.Question, calls: Sequence[JsonObject], verdict: bfcl.TurnCheck
) -> list[tuple[str, bool]]:
    """Differences by design between our rules and bfcl-eval's (`pipeline/evaluation/bfcl.py`)."""
    return [
        (BY_ORDER, verdict.greedy_disagrees),
        (IN_LISTS, verdict.valid and any(whole_among_fractions(question, call) for call in calls)),
    ]


def whole_among_fractions(question: bfcl.Question, call: JsonObject) -> bool:
    """Whether a call passes an integer in a list of numbers."""
    by_name = {tool["function"]["name"].replace(".", "_"): tool["function"] for tool in question.tools}
    properties = by_name.get(call["name"], {}).get("parameters", {}).get("properties", {})
    return any(
        isinstance(value, list)
        and properties.get(key, {}).get("items", {}).get("type") == "number"
        and any(type(entry) is int for entry in value)
        for key, value in call["arguments"].items()
    )


def fixed(folder: Path, versions: str) -> Comparison:
    """All rows of bfcl-eval's bundled files, answered by each of `lessons.VARIANTS` and judged by both."""
    asked = questions(bfcl_files(), JUDGED)
    answers = {
        (variant, name): [call | {"name": call["name"].replace(".", "_")} for call in change(question.truth)]
        for variant, change in lessons.VARIANTS.items()
        for name, question in asked.items()
    }
    project = folder / "judged"
    for variant in lessons.VARIANTS:
        for category in JUDGED:
            group = "live" if category.startswith("live") else "non_live"
            file = project / "result" / variant / group / f"BFCL_v4_{category}_result.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            lines = [
                json.dumps({"id": name, "result": [{c["name"]: json.dumps(c["arguments"])} for c in calls]}) + "\n"
                for (of, name), calls in answers.items()
                if of == variant and name.rpartition("_")[0] == category
            ]
            file.write_text("".join(lines), encoding="utf-8")
    facts = {"task": "judge", "data": str(bfcl_files()), "project": str(project), "categories": JUDGED}
    found = run("bfcl", facts | {"models": {variant: variant for variant in lessons.VARIANTS}}, folder)
    own, other = [], []
    for (variant, name), calls in answers.items():
        verdict, row = in_their_names(asked[name], calls), found[variant][name]
        causes = known_causes(asked[name], calls, verdict)
        id_ = f"{name} {variant}"
        own.append({"id": id_, "right": verdict.valid, "found": verdict.error or "right", "causes": causes})
        other.append({"id": id_, "right": row["valid"], "found": row["error"] or "right"})
    return Comparison("bfcl-eval", "BFCL v4, constructed answers", versions, agreement.verdicts(own, other))


# -- command line ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Run all tasks; returns 1 if an item differs without a known reason."""
    try:
        with tempfile.TemporaryDirectory() as name:
            comparisons = measure(Path(name), Path(arguments[0]) if arguments else None)
    except StagecoachError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    found = agreement.failures(comparisons)
    print("\n".join([*agreement.told(comparisons), "", agreement.section(comparisons)]))
    print("\n".join([*found, f"{len(found)} items differ without a known reason"]))
    return 1 if found else 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main(sys.argv[1:]))
