"""The measurements that every causal model gets, on the same held-out items with the same settings and seeds.

    text, stories, code     bits per byte, sampled stories, gaps filled
    problems                pass@k of generated programs, judged in the sandbox
    tools                   tool calls, in suites_tools.py
    answers                 BLEU, chrF, ROUGE of answers in words

Each suite gives its numbers (with `_low`, `_high`) and a row per item; `*left_out` counts the items whose prompt leaves
no room in the context. A sample's seed is hashed from (seed, suite, id, sample), so batch size, order and processes
change nothing.

Which suites a causal model is measured by: those that say something about what it is for.

A model that learnt conversations has left stories and drills behind, and one that only read documents answers no
questions: measuring every model by everything took longer than many a stage trains. A model that is not named here, one
of a person's own stage, is measured by everything; so are all with `evaluate.every_suite`. What a comparison or a claim
of the report reads must stand in both of its models (tests/test_purposes.py). A suite that is left out is absent from
metrics/eval/<model>.json, never 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from pipeline.evaluation import code, likelihood
from pipeline.evaluation.intervals import Interval, ratio, wilson
from pipeline.generation.sampling import Completion, Sampling, generate, rows_within
from pipeline.ingest.records import Dialogue, Problem, Text
from pipeline.model.transformer import Transformer
from pipeline.run.device import generator, stable_hash
from pipeline.run.workdir import canonical_hash
from pipeline.sandbox.judge import Judge
from pipeline.synthetic import stories
from pipeline.synthetic.stories import check
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

CUT = 2000  # characters of an output that are kept
PASS_AT = (1, 5, 10)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The block `evaluate`: how much is measured, and how answers are sampled."""

    documents: int
    """Of each kind for bits per byte."""
    stories: int
    """Sampled from the openings of held-out stories."""
    problems: int
    """Held-out programming problems; facts, trained and untrained, as many of each."""
    samples: int
    """Answers to each problem besides the greedy one; 0: greedy only."""
    dialogues: int
    """Held-out conversations with tool calls, and half as many with answers in words."""
    gaps: int
    """Lines of held-out code to fill in."""
    max_new_tokens: int
    """Of an answer."""
    story_tokens: int
    """Of a story."""
    temperature: float
    """Of sampled answers and stories."""
    top_p: float
    """They are drawn from the most likely tokens that hold this share; 1: from all."""
    context: int
    """Window of the likelihoods."""
    bootstrap: int
    """Resamples of the items."""
    constrained: int = 0
    """Of the dialogues so many are answered again under the grammar of their tools."""
    bertscore: str | None = None
    """A local directory of a BERT: how near answers are to their references; none: not measured."""
    bertscore_layer: int | None = None
    """Whose output is compared; none: its last."""

    def __post_init__(self) -> None:
        if min(self.documents, self.max_new_tokens, self.story_tokens, self.bootstrap) < 1:
            raise ValueError("documents, max_new_tokens, story_tokens, bootstrap: expected at least 1")
        for key in ("stories", "problems", "samples", "dialogues", "gaps", "temperature", "constrained"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key}: expected at least 0, got {getattr(self, key)}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected more than 0 and at most 1, got {self.top_p}")
        if self.context % 2 or self.context < 2:
            raise ValueError(f"context: expected an even number, got {self.context}")


@dataclass(frozen=True)
class Subject:
    """The model under test."""

    model: Transformer
    tokenizer: Tokenizer
    settings: Settings
    seed: int

    def complete(
        self, suite: str, prompts: dict[str, list[int]], *, tokens: int, temperature: float, sample: int = 0
    ) -> dict[str, Completion]:
        """One completion for each prompt, by id; prompts that leave no room in the context are left out."""
        room = self.model.config.max_context - 8
        fitting = {name: ids for name, ids in prompts.items() if 0 < len(ids) < room}
        sampling = Sampling(tokens, temperature=temperature, top_p=self.settings.top_p if temperature else 1.0)
        seeds = [stable_hash(self.seed, suite, name, sample) % 2**63 for name in fitting]
        stop = {self.tokenizer.turn_end, self.tokenizer.end_of_text}
        rows = rows_within(self.model, max(map(len, fitting.values()), default=0) + sampling.max_new_tokens)
        done = generate(self.model, list(fitting.values()), sampling, stop=stop, seeds=seeds, batch_rows=rows)
        return dict(zip(fitting, done, strict=True))

    def bootstrap(self, tops: Sequence[float], bottoms: Sequence[float] | None = None) -> Interval:
        """A mean or ratio with its interval over items."""
        draws = generator("bootstrap", self.seed, len(tops))
        return ratio(tops, bottoms, generator=draws, resamples=self.settings.bootstrap)


@dataclass
class SuiteResult:
    """Numbers of a suite, and a row per item."""

    numbers: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, name: str, value: Interval) -> None:
        """Keep a number with its interval."""
        self.numbers |= {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}

    def item(self, suite: str, name: str, completion: Completion, output: str, *, asked: Any, **more: Any) -> None:
        """Keep what was answered to one item; `asked` is all that makes the item, so that two runs know whether it
        is the same.
        """
        row = {
            "suite": suite,
            "id": name,
            "item": canonical_hash(asked),
            "output": output[:CUT],
            "stop": completion.stop,
            "tokens": len(completion.ids),
        }
        self.rows.append(row | more)


def documents(subject: Subject, suite: str, texts: Sequence[Text]) -> SuiteResult:
    """Bits per byte over whole documents; a row of `suite` for each, with its bits and bytes."""
    result = SuiteResult()
    scored = likelihood.likelihood(
        subject.model, subject.tokenizer, [t.text for t in texts], context=subject.settings.context
    )
    result.numbers |= {"documents": len(scored.documents), "left_out": scored.left_out}
    if scored.documents:
        bits = [d.nats / math.log(2) for d in scored.documents]
        result.measure("bpb", subject.bootstrap(bits, [d.bytes for d in scored.documents]))
        result.numbers["perplexity"] = scored.perplexity
        result.rows += counted(suite, "bits", texts, scored)
    return result


def counted(suite: str, key: str, texts: Sequence[Text], scored: likelihood.Likelihood) -> list[dict[str, Any]]:
    """What each document costs, for comparing two models document by document."""
    return [
        {
            "suite": suite,
            "id": texts[place].path,
            "item": canonical_hash(texts[place].text),
            key: round(d.nats / math.log(2), 3),
            "bytes": d.bytes,
        }
        for place, d in zip(scored.places, scored.documents, strict=True)
    ]


def sampled_stories(subject: Subject, texts: Sequence[Text]) -> SuiteResult:
    """Stories continued from held-out openings, and what the checker says of them.

    Where there are fewer openings than `stories`, each is continued several times.
    """
    result, settings = SuiteResult(), subject.settings
    chosen: dict[str, str] = {}
    for n in range(settings.stories if texts else 0):
        again, place = divmod(n, len(texts))
        name = texts[place].path + (f"#{again}" if again else "")
        chosen[name] = stories.opening(texts[place].text)
    if not chosen:
        return result
    start = [subject.tokenizer.end_of_text]
    prompts = {name: start + subject.tokenizer.encode(opening) for name, opening in chosen.items()}
    done = subject.complete("stories", prompts, tokens=settings.story_tokens, temperature=settings.temperature)
    result.numbers["samples_left_out"] = len(prompts) - len(done)
    if not done:
        return result
    whole, clauses = [], dict[str, int]()
    for name, completion in done.items():
        story = chosen[name] + subject.tokenizer.decode(completion.ids)
        verdicts = check(story)
        whole.append(all(verdicts.values()))
        for clause, holds in verdicts.items():
            clauses[clause] = clauses.get(clause, 0) + holds
        failed = ", ".join(clause for clause, holds in verdicts.items() if not holds)
        result.item(
            "stories",
            name,
            completion,
            story,
            asked=chosen[name],
            prompt=chosen[name],
            verdict=f"fails {failed}" if failed else "passes every clause",
            right=int(not failed),
            ended=int(completion.stop == "stop"),
        )
    result.measure("story_rate", wilson(sum(whole), len(whole)))
    result.measure("end_rate", wilson(sum(c.stop == "stop" for c in done.values()), len(done)))
    result.measure("repeat_4", subject.bootstrap([likelihood.repeat_4(c.ids) for c in done.values()]))
    result.numbers["clauses"] = {clause: count / len(done) for clause, count in clauses.items()}
    return result


def gaps(subject: Subject, texts: Sequence[Text]) -> SuiteResult:
    """Lines of held-out code filled in from both sides, greedily; exact means the very line."""
    result, tokenizer = SuiteResult(), subject.tokenizer
    prompts, wanted, asked = {}, {}, {}
    for document in texts:
        lines = document.text.splitlines(keepends=True)[:40]
        places = [n for n, line in enumerate(lines) if len(line.strip()) >= 12 and 2 < n < len(lines) - 2]
        if not places or len(prompts) >= subject.settings.gaps:
            continue
        place = places[stable_hash(subject.seed, "gap", document.path) % len(places)]
        before, after = "".join(lines[max(0, place - 15) : place]), "".join(lines[place + 1 : place + 11])
        prompts[document.path] = [
            tokenizer.fim_prefix,
            *tokenizer.encode(before),
            tokenizer.fim_suffix,
            *tokenizer.encode(after),
            tokenizer.fim_middle,
        ]
        wanted[document.path], asked[document.path] = lines[place], [before, lines[place], after]
    if not prompts:
        return result
    done = subject.complete("gaps", prompts, tokens=64, temperature=0.0)
    result.numbers["gaps_left_out"] = len(prompts) - len(done)
    if not done:
        return result
    for path, completion in done.items():
        filled = tokenizer.decode(completion.ids)
        right = filled.strip("\n") == wanted[path].strip("\n")
        verdict = "exact" if right else "differs"
        result.item(
            "gaps",
            path,
            completion,
            filled,
            asked=asked[path],
            reference=wanted[path],
            verdict=verdict,
            right=int(right),
        )
    result.measure("fim_exact_match", wilson(sum(r["verdict"] == "exact" for r in result.rows), len(result.rows)))
    return result


@dataclass(frozen=True)
class Attempts:
    """What was answered to each prompt that fits: one greedy completion, and `samples` drawn ones."""

    greedy: dict[str, Completion]
    drawn: list[dict[str, Completion]]


def attempt(subject: Subject, suite: str, prompts: dict[str, list[int]]) -> Attempts:
    """Answer every prompt greedily and by sampling."""
    tokens, temperature = subject.settings.max_new_tokens, subject.settings.temperature
    greedy = subject.complete(suite, prompts, tokens=tokens, temperature=0.0)
    fitting = {name: ids for name, ids in prompts.items() if name in greedy}
    numbers = range(1, subject.settings.samples + 1) if fitting else ()
    drawn = [subject.complete(suite, fitting, tokens=tokens, temperature=temperature, sample=s) for s in numbers]
    return Attempts(greedy, drawn)


def pass_rates(subject: Subject, judged: Sequence[code.Judged], sampled: Sequence[code.Judged]) -> SuiteResult:
    """`pass_at_1_greedy` of one answer each (Wilson), `pass_at_<k>` of the samples (bootstrap over problems), `n`."""
    part = SuiteResult()
    part.measure("pass_at_1_greedy", wilson(sum(j.verdict == "passed" for j in judged), len(judged)))
    for k in PASS_AT:
        rows = code.pass_rows(sampled, k)
        if rows:
            part.measure(f"pass_at_{k}", subject.bootstrap(list(rows.values())))
    part.numbers["n"] = len(judged)
    return part


def solved(subject: Subject, problems: Sequence[Problem], judge: Judge) -> SuiteResult:
    """Programming problems: greedy pass@1, pass@k from samples, form; by group and over all."""
    result = SuiteResult()
    problems = problems[: subject.settings.problems]
    prompts = {p.id: user(subject.tokenizer, p.question) for p in problems}
    if not prompts:
        return result
    attempts = attempt(subject, "problems", prompts)
    greedy = attempts.greedy
    result.numbers["left_out"] = len(prompts) - len(greedy)
    if not greedy:
        return result
    problems = [p for p in problems if p.id in greedy]
    answers = {name: subject.tokenizer.decode(c.ids) for name, c in greedy.items()}
    judged = code.judge_answers(judge, problems, [[answers[p.id]] for p in problems])
    texts = [[subject.tokenizer.decode(d[p.id].ids) for d in attempts.drawn] for p in problems]
    sampled = code.judge_answers(judge, problems, texts)
    for group in ("", *sorted({p.group for p in problems})):
        ids = {p.id for p in problems if group in ("", p.group)}
        mine, drawn = ([j for j in part if j.problem in ids] for part in (judged, sampled))
        numbers = pass_rates(subject, mine, drawn).numbers
        result.numbers |= {group: numbers} if group else numbers
    result.numbers |= code.rates(judged)
    result.measure("parse_rate", wilson(sum(j.parses for j in judged), len(judged)))
    result.measure("format_rate", wilson(sum(j.formatted for j in judged), len(judged)))
    _references(result, problems, judged)
    shares = code.pass_rows(sampled, 1)
    for problem, one in zip(problems, judged, strict=True):
        more = {"sampled": shares[problem.id]} if problem.id in shares else {}
        result.item(
            "problems",
            problem.id,
            greedy[problem.id],
            answers[problem.id],
            asked=asdict(problem),
            prompt=problem.question,
            verdict=one.verdict,
            score=one.score,
            group=problem.group,
            right=int(one.verdict == "passed"),
            parses=int(one.parses),
            **more,
        )
    return result


def _references(result: SuiteResult, problems: Sequence[Problem], judged: Sequence[code.Judged]) -> None:
    """How near the greedy answers are to the reference solutions."""
    pairs = [(j.source or "", chat.extract(p.answer) or "") for p, j in zip(problems, judged, strict=True) if p.answer]
    if not pairs:
        return
    result.measure("exact_match", wilson(sum(code.exact_match(a, b) for a, b in pairs), len(pairs)))
    result.numbers["codebleu_py"] = asdict(code.codebleu([a for a, _ in pairs], [b for _, b in pairs]))


def answered(subject: Subject, dialogues: Sequence[Dialogue]) -> SuiteResult:
    """Answers in words against the reference: turns of the test conversations that call nothing; greedy."""
    result = SuiteResult()
    chosen: list[tuple[str, Dialogue, int]] = []
    for dialogue in dialogues:
        places = [n for n, m in enumerate(dialogue.messages) if m["role"] == "assistant" and not m.get("tool_calls")]
        if places and dialogue.kind != "story" and len(chosen) < subject.settings.dialogues // 2:
            chosen.append((f"{dialogue.id}#{places[-1]}", dialogue, places[-1]))
    prompts = {
        name: chat.render(subject.tokenizer, d.messages[:turn], d.tools, generation_prompt=True).ids
        for name, d, turn in chosen
    }
    if not prompts:
        return result
    done = subject.complete("answers", prompts, tokens=subject.settings.max_new_tokens, temperature=0.0)
    result.numbers["left_out"] = len(prompts) - len(done)
    given, references = [], []
    for name, dialogue, turn in chosen:
        if name in done:
            given.append(chat.parse(subject.tokenizer.decode(done[name].ids)).content)
            references.append(dialogue.messages[turn]["content"])
            result.item(
                "answers",
                name,
                done[name],
                given[-1],
                asked=[dialogue.messages[: turn + 1], dialogue.tools],
                prompt=last(dialogue.messages[:turn]),
                reference=references[-1],
            )
    if given:
        result.numbers |= likelihood.text_scores(given, references) | {"n": len(given)}
        result.numbers |= likelihood.bertscore(
            given, references, subject.settings.bertscore, subject.settings.bertscore_layer
        )
    return result


def user(tokenizer: Tokenizer, content: str) -> list[int]:
    """A prompt of one turn of the user."""
    return chat.render(tokenizer, [{"role": "user", "content": content}], generation_prompt=True).ids


def last(messages: Sequence[dict[str, Any]]) -> str:
    """What was said last before an answer, cut."""
    return str(messages[-1]["content"])[:CUT]


# -- purposes ----------------------------------------------------------------------------------------------------------


T = TypeVar("T")

READS = ("text", "stories", "stories_held_out", "drills", "transcripts", "stories sampled", "code")
ANSWERS = ("code", "problems", "tools", "answers")
SUITES: dict[str, tuple[str, ...]] = {
    "language": READS,
    "code": (
        "text",
        "code",
        "code gaps",
        "problems",
        "tools",
        "facts",
    ),  # problems, tools, facts: what others begin from
    "tools": ("stories sampled", "code gaps", *ANSWERS),
    "lora": ANSWERS,
    "dpo": ANSWERS,
    "grpo": ANSWERS,
    "rlhf": ANSWERS,
    "diffusion_control": ("code", "problems"),  # beside the masked model
    "memory": ("text", "code", "facts"),
    "memory_baseline": ("text", "code", "facts"),
}


def of(model: str, plan: Mapping[str, T]) -> dict[str, T]:
    """The part of a plan that a model of this name is measured by, in the plan's order."""
    wanted = SUITES.get(model)
    return {name: suite for name, suite in plan.items() if wanted is None or name in wanted}
