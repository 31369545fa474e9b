"""Evaluation suites for causal models, all on the same held-out items with the same settings and seeds.

    documents, sampled_stories, gaps     bits per byte, sampled stories, fill-in-the-middle
    solved                               pass@k of generated programs, judged in the sandbox
    answered                             BLEU, chrF, ROUGE of text answers

Tool calls are evaluated in `tools.py`. Each suite returns metrics (with `_low`, `_high`) and a row per item;
`*left_out` counts items whose prompt leaves no room in the context. A sample's seed is hashed from (seed, suite, id,
sample), so batch size, order and number of processes do not matter. Suites run under the caller's autocast: in bf16, a
few of 200 answers differ from those in float32, some better and some worse.

`purposes` lists the suites for each model, chosen by what the model is for. A chat model no longer writes stories or
drills, and a model trained only on documents cannot answer questions. Running every suite on every model took longer
than many of the training stages. A model without an entry (from a custom stage) gets every suite, as do all models if
`evaluate.every_suite` is set. Both models in a comparison or claim in the report need the suite that it uses
(tests/test_purposes.py). A suite that was not run is absent from metrics/eval/<model>.json rather than 0.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pipeline import wings
from pipeline.evaluation import code, codebleu, likelihood
from pipeline.evaluation.intervals import Interval, effective_n, ratio, wilson
from pipeline.generation.sampling import Completion, Sampling, generate, rows_within
from pipeline.ingest.records import Dialogue, Message, Problem, Text, fields_of
from pipeline.model.transformer import Transformer
from pipeline.run.device import Hardware, generator, stable_hash
from pipeline.run.errors import ConfigError
from pipeline.run.tracking import Number, say
from pipeline.run.types import JsonObject
from pipeline.run.workdir import canonical_hash
from pipeline.sandbox.judge import Judge
from pipeline.synthetic import stories
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer

S = TypeVar("S", bound="Subject")
CUT = 2000  # characters of output kept in a row
PASS_AT = (1, 5, 10)


@dataclass(frozen=True, kw_only=True)
class SuiteSettings:
    """The `evaluate` block: how many items to evaluate, and how to sample answers."""

    documents: int
    """Documents of each kind for bits per byte."""
    stories: int
    """Stories sampled from the openings of held-out stories."""
    problems: int
    """Held-out programming problems; also the number of trained and of untrained facts."""
    samples: int
    """Sampled answers per problem in addition to the greedy one; 0: greedy only."""
    dialogues: int
    """Held-out conversations with tool calls, and half as many with text answers."""
    gaps: int
    """Lines of held-out code to fill in."""
    cross_file: int = 200
    """Lines for cross-file completion with and without other files, and half as many functions; 0 disables it."""
    max_new_tokens: int
    """Maximum answer length, in tokens."""
    story_tokens: int
    """Maximum story length, in tokens."""
    temperature: float
    """Sampling temperature for answers and stories."""
    top_p: float
    """Nucleus sampling: keep the most likely tokens up to this total probability; 1: all tokens."""
    context: int
    """Window for likelihoods, in tokens; must be even."""
    bootstrap: int
    """Number of bootstrap resamples."""
    constrained: int = 0
    """Dialogues answered a second time with grammar-constrained decoding."""
    bertscore: str | None = None
    """Local BERT directory for BERTScore of answers against references; none disables it."""
    bertscore_layer: int | None = None
    """The BERT layer to compare; none: the last."""

    def __post_init__(self) -> None:
        if min(self.documents, self.max_new_tokens, self.story_tokens, self.bootstrap) < 1:
            raise ValueError("documents, max_new_tokens, story_tokens, bootstrap: expected at least 1 each")
        for key in ("stories", "problems", "samples", "dialogues", "gaps", "cross_file", "temperature", "constrained"):
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
    settings: SuiteSettings
    seed: int

    def complete(
        self, suite: str, prompts: dict[str, list[int]], *, tokens: int, temperature: float, sample: int = 0
    ) -> dict[str, Completion]:
        """One completion per prompt, by id; prompts that leave no room in the context are skipped."""
        room = self.model.config.max_context - 8
        fitting = {name: ids for name, ids in prompts.items() if 0 < len(ids) < room}
        sampling = Sampling(tokens, temperature=temperature, top_p=self.settings.top_p if temperature else 1.0)
        seeds = [stable_hash(self.seed, suite, name, sample) % 2**63 for name in fitting]
        stop = {self.tokenizer.turn_end, self.tokenizer.end_of_text}
        rows = rows_within(self.model, max(map(len, fitting.values()), default=0) + sampling.max_new_tokens)
        completions = generate(self.model, list(fitting.values()), sampling, stop=stop, seeds=seeds, batch_rows=rows)
        return dict(zip(fitting, completions, strict=True))

    def bootstrap(self, tops: Sequence[float], bottoms: Sequence[float] | None = None) -> Interval:
        """A mean or a ratio of sums, with its interval over items."""
        draws = generator("bootstrap", self.seed, len(tops))
        return ratio(tops, bottoms, generator=draws, resamples=self.settings.bootstrap)


@dataclass
class SuiteResult:
    """The metrics of a suite, and a row per item."""

    numbers: JsonObject = field(default_factory=dict)
    rows: list[JsonObject] = field(default_factory=list)

    def measure(self, name: str, value: Interval) -> None:
        """Add a metric with its interval."""
        self.numbers |= value.named(name)

    def item(
        self, suite: str, name: str, completion: Completion, output: str, *, asked: object, **more: object
    ) -> None:
        """Add a row for one item. `asked` is everything that defines the item; its hash shows whether two runs
        evaluated the same item.
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
    """Bits per byte over documents; a row of `suite` for each document, with its bits and bytes.

    For code, also `bpb_generated`, over programs generated by this project, and `bpb_files`, over all others.
    """
    result = SuiteResult()
    scored = likelihood.likelihood(
        subject.model, subject.tokenizer, [text.text for text in texts], context=subject.settings.context
    )
    result.numbers |= {"documents": len(scored.documents), "left_out": scored.left_out}
    if scored.documents:
        bits, sizes = [d.nats / math.log(2) for d in scored.documents], [float(d.bytes) for d in scored.documents]
        result.measure("bpb", subject.bootstrap(bits, sizes))
        result.numbers["effective_documents"] = effective_n(sizes)
        groups = [_group(texts[index]) for index in scored.places]
        for group in sorted(set(groups)) if suite == "code" else []:
            members = [i for i, of_document in enumerate(groups) if of_document == group]
            some_bits, some_sizes = [bits[i] for i in members], [sizes[i] for i in members]
            result.measure(f"bpb_{group}", subject.bootstrap(some_bits, some_sizes))
            result.numbers |= {f"{group}_documents": len(members), f"{group}_effective": effective_n(some_sizes)}
        nats, tokens = [d.nats for d in scored.documents], [float(d.tokens) for d in scored.documents]
        result.measure("perplexity", subject.bootstrap(nats, tokens).exp())
        result.rows += counted(suite, "bits", texts, scored)
    return result


def _group(text: Text) -> str:
    return "generated" if text.source == "generated" else "files"


def counted(suite: str, key: str, texts: Sequence[Text], scored: likelihood.Likelihood) -> list[JsonObject]:
    """The bits and bytes of each document, for comparing two models document by document."""
    return [
        {
            "suite": suite,
            "id": texts[index].path,
            "item": canonical_hash(texts[index].text),
            "group": _group(texts[index]),
            key: round(document.nats / math.log(2), 3),
            "bytes": document.bytes,
        }
        for index, document in zip(scored.places, scored.documents, strict=True)
    ]


def sampled_stories(subject: Subject, texts: Sequence[Text]) -> SuiteResult:
    """Stories sampled from held-out openings, and the checker's verdicts.

    With fewer openings than `stories`, each is continued several times.
    """
    result, settings = SuiteResult(), subject.settings
    openings: dict[str, str] = {}
    for n in range(settings.stories if texts else 0):
        repeat, index = divmod(n, len(texts))
        name = texts[index].path + (f"#{repeat}" if repeat else "")
        openings[name] = stories.opening(texts[index].text)
    if not openings:
        return result
    start = [subject.tokenizer.end_of_text]
    prompts = {name: start + subject.tokenizer.encode(opening) for name, opening in openings.items()}
    completions = subject.complete("stories", prompts, tokens=settings.story_tokens, temperature=settings.temperature)
    result.numbers["samples_left_out"] = len(prompts) - len(completions)
    if not completions:
        return result
    all_pass, coherent, clause_counts = [], [], dict[str, int]()
    for name, completion in completions.items():
        story = openings[name] + subject.tokenizer.decode(completion.ids)
        verdicts = stories.check(story)
        all_pass.append(all(verdicts.values()))
        coherent.append(all_pass[-1] and stories.follows_plot(story))
        for clause, holds in verdicts.items():
            clause_counts[clause] = clause_counts.get(clause, 0) + holds
        failed = ", ".join(clause for clause, holds in verdicts.items() if not holds)
        result.item(
            "stories",
            name,
            completion,
            story,
            asked=openings[name],
            prompt=openings[name],
            verdict=f"fails {failed}" if failed else "passes every clause",
            right=int(not failed),
            told=int(coherent[-1]),
            ended=int(completion.stop == "stop"),
        )
    result.measure("story_rate", wilson(sum(all_pass), len(all_pass)))
    result.measure("coherent_rate", wilson(sum(coherent), len(coherent)))
    result.measure("end_rate", wilson(sum(c.stop == "stop" for c in completions.values()), len(completions)))
    result.measure("repeat_4", subject.bootstrap([likelihood.repeat_4(c.ids) for c in completions.values()]))
    result.numbers["clauses"] = {clause: count / len(completions) for clause, count in clause_counts.items()}
    return result


def gaps(subject: Subject, texts: Sequence[Text]) -> SuiteResult:
    """Fill in missing lines of held-out code greedily from both sides; only the exact line counts as correct."""
    result, tokenizer = SuiteResult(), subject.tokenizer
    prompts, references, asked = {}, {}, {}
    for document in texts:
        lines = document.text.splitlines(keepends=True)[:40]
        candidates = [n for n, line in enumerate(lines) if len(line.strip()) >= 12 and 2 < n < len(lines) - 2]
        if not candidates or len(prompts) >= subject.settings.gaps:
            continue
        gap = candidates[stable_hash(subject.seed, "gap", document.path) % len(candidates)]
        before, after = "".join(lines[max(0, gap - 15) : gap]), "".join(lines[gap + 1 : gap + 11])
        prompts[document.path] = [
            tokenizer.fim_prefix,
            *tokenizer.encode(before),
            tokenizer.fim_suffix,
            *tokenizer.encode(after),
            tokenizer.fim_middle,
        ]
        references[document.path], asked[document.path] = lines[gap], [before, lines[gap], after]
    if not prompts:
        return result
    completions = subject.complete("gaps", prompts, tokens=64, temperature=0.0)
    result.numbers["gaps_left_out"] = len(prompts) - len(completions)
    if not completions:
        return result
    for path, completion in completions.items():
        filled = tokenizer.decode(completion.ids)
        right = filled.strip("\n") == references[path].strip("\n")
        verdict = "exact" if right else "differs"
        result.item(
            "gaps",
            path,
            completion,
            filled,
            asked=asked[path],
            reference=references[path],
            verdict=verdict,
            right=int(right),
        )
    result.measure("fim_exact_match", wilson(sum(row["verdict"] == "exact" for row in result.rows), len(result.rows)))
    return result


@dataclass(frozen=True)
class Attempts:
    """The completions of each prompt that fits: one greedy, and `samples` sampled."""

    greedy: dict[str, Completion]
    drawn: list[dict[str, Completion]]


def attempt(subject: Subject, suite: str, prompts: dict[str, list[int]]) -> Attempts:
    """Complete every prompt greedily and by sampling."""
    tokens, temperature = subject.settings.max_new_tokens, subject.settings.temperature
    greedy = subject.complete(suite, prompts, tokens=tokens, temperature=0.0)
    fitting = {name: ids for name, ids in prompts.items() if name in greedy}
    numbers = range(1, subject.settings.samples + 1) if fitting else ()
    drawn = [
        subject.complete(suite, fitting, tokens=tokens, temperature=temperature, sample=sample) for sample in numbers
    ]
    return Attempts(greedy, drawn)


def pass_rates(subject: Subject, judged: Sequence[code.Judged], sampled: Sequence[code.Judged]) -> SuiteResult:
    """`pass_at_1_greedy` (Wilson), `pass_at_<k>` of the samples (bootstrap over problems), `n`."""
    part = SuiteResult()
    part.measure("pass_at_1_greedy", wilson(sum(j.verdict == "passed" for j in judged), len(judged)))
    for k in PASS_AT:
        rows = code.pass_rows(sampled, k)
        if rows:
            part.measure(f"pass_at_{k}", subject.bootstrap(list(rows.values())))
    part.numbers["n"] = len(judged)
    return part


def solved(subject: Subject, problems: Sequence[Problem], judge: Judge, *, suite: str = "problems") -> SuiteResult:
    """Programming problems: greedy pass@1 and pass@k of the samples, overall and by group; how many answers parse."""
    result = SuiteResult()
    problems = problems[: subject.settings.problems]
    prompts = {p.id: user(subject.tokenizer, p.question) for p in problems}
    if not prompts:
        return result
    attempts = attempt(subject, suite, prompts)
    greedy = attempts.greedy
    result.numbers["left_out"] = len(prompts) - len(greedy)
    if not greedy:
        return result
    problems = [p for p in problems if p.id in greedy]
    answers = {name: subject.tokenizer.decode(c.ids) for name, c in greedy.items()}
    judged = code.judge_answers(judge, problems, [[answers[p.id]] for p in problems])
    samples = [[subject.tokenizer.decode(drawn[p.id].ids) for drawn in attempts.drawn] for p in problems]
    sampled = code.judge_answers(judge, problems, samples)
    for group in ("", *sorted({p.group for p in problems})):
        ids = {p.id for p in problems if group in ("", p.group)}
        of_group = ([j for j in part if j.problem in ids] for part in (judged, sampled))
        numbers = pass_rates(subject, *of_group).numbers
        result.numbers |= {group: numbers} if group else numbers
    result.numbers |= code.rates(judged)
    result.measure("parse_rate", wilson(sum(j.parses for j in judged), len(judged)))
    result.measure("format_rate", wilson(sum(j.formatted for j in judged), len(judged)))
    _compare_with_references(result, problems, judged, subject)
    shares = code.pass_rows(sampled, 1)
    for problem, answer in zip(problems, judged, strict=True):
        sampled_share = {"sampled": shares[problem.id]} if problem.id in shares else {}
        result.item(
            suite,
            problem.id,
            greedy[problem.id],
            answers[problem.id],
            asked=fields_of(problem),
            prompt=problem.question,
            verdict=answer.verdict,
            score=answer.score,
            group=problem.group,
            right=int(answer.verdict == "passed"),
            parses=int(answer.parses),
            **sampled_share,
        )
    return result


def _compare_with_references(
    result: SuiteResult, problems: Sequence[Problem], judged: Sequence[code.Judged], subject: Subject
) -> None:
    """Add the similarity of the greedy answers to the reference solutions."""
    pairs = [(j.source or "", chat.extract(p.answer) or "") for p, j in zip(problems, judged, strict=True) if p.answer]
    if not pairs:
        return
    result.measure("exact_match", wilson(sum(code.exact_match(a, b) for a, b in pairs), len(pairs)))
    sides = [a for a, _ in pairs], [b for _, b in pairs]
    draws = generator("bootstrap", subject.seed, len(pairs))
    similarity, score = codebleu.with_interval(*sides, generator=draws, resamples=subject.settings.bootstrap)
    result.numbers["codebleu_py"] = asdict(similarity) | score.named("score") | {"parts": similarity.parts}


def answered(subject: Subject, dialogues: Sequence[Dialogue]) -> SuiteResult:
    """Scores of greedy text answers against references: the last turn without calls in each test conversation."""
    result = SuiteResult()
    items: list[tuple[str, Dialogue, int]] = []
    for dialogue in dialogues:
        turns = [n for n, m in enumerate(dialogue.messages) if m["role"] == "assistant" and not m.get("tool_calls")]
        if turns and dialogue.kind != "story" and len(items) < subject.settings.dialogues // 2:
            items.append((f"{dialogue.id}#{turns[-1]}", dialogue, turns[-1]))
    prompts = {
        name: chat.render(subject.tokenizer, d.messages[:turn], d.tools, generation_prompt=True).ids
        for name, d, turn in items
    }
    if not prompts:
        return result
    completions = subject.complete("answers", prompts, tokens=subject.settings.max_new_tokens, temperature=0.0)
    result.numbers["left_out"] = len(prompts) - len(completions)
    answers, references = [], []
    for name, dialogue, turn in items:
        if name in completions:
            answers.append(chat.parse(subject.tokenizer.decode(completions[name].ids)).content)
            references.append(dialogue.messages[turn]["content"])
            result.item(
                "answers",
                name,
                completions[name],
                answers[-1],
                asked=[dialogue.messages[: turn + 1], dialogue.tools],
                prompt=last(dialogue.messages[:turn]),
                reference=references[-1],
            )
    if answers:
        result.numbers |= {"n": len(answers)}
        result.numbers |= likelihood.text_scores(answers, references, resamples=subject.settings.bootstrap)
        rows = likelihood.rouge_rows(answers, references)
        for name in likelihood.ROUGE:
            result.measure(name, subject.bootstrap([row[name] for row in rows]))
        exact = sum(map(likelihood.exact_match, answers, references))
        result.measure("exact_match", wilson(exact, len(answers)))
        settings = subject.settings
        if settings.bertscore is None:
            result.numbers["bertscore_f1"] = "skipped: no local weights"
        else:
            similarities = likelihood.bertscore(answers, references, settings.bertscore, settings.bertscore_layer)
            result.measure("bertscore_f1", subject.bootstrap(similarities))
    return result


def user(tokenizer: Tokenizer, content: str) -> list[int]:
    """The ids of a prompt with a single user turn."""
    return chat.render(tokenizer, [{"role": "user", "content": content}], generation_prompt=True).ids


def last(messages: Sequence[Message]) -> str:
    """The content of the last message before an answer, truncated to CUT characters."""
    return str(messages[-1]["content"])[:CUT]


def solve(
    subject: S,
    problems: list[Problem],
    sandbox: Callable[[], Judge],
    suite: Callable[[S, list[Problem], Judge], SuiteResult] | None = None,
) -> SuiteResult:
    """The result of a problem suite (None: `solved`), or the reason it was skipped."""
    try:
        with sandbox() as judge:
            return (suite or solved)(subject, problems, judge)
    except ConfigError as error:
        say(f"skipping problems: {error}")
        return SuiteResult({"skipped": "skipped: no sandbox"})


# -- suites of each model ----------------------------------------------------------------------------------------------


T = TypeVar("T")
Plan = dict[str, Callable[[], SuiteResult]]  # metrics are merged if the names start with the same word


class OwnSuites(Protocol):
    """The suites that a wing provides as `evaluation`, for models that are not autoregressive."""

    def opens(self, folder: Path) -> bool:
        """Whether this wing evaluates the model in a directory."""
        ...

    def plan(
        self,
        model: Path,
        settings: SuiteSettings,
        own: Any,
        *,
        seed: int,
        hardware: Hardware,
        sources: list[Text],
        problems: list[Problem],
        sandbox: Callable[[], Judge],
    ) -> tuple[Plan, JsonObject]:
        """The suites for a model, and their settings; `own` has the wing's `evaluation_keys`."""
        ...

    def curve_rows(self, numbers: JsonObject) -> list[dict[str, Number]]:
        """The rows of a model's curves other than pass@k, from the metrics of its suites."""
        ...


READS = ("text", "stories", "stories_held_out", "drills", "transcripts", "stories sampled", "code")
ANSWERS = ("code", "problems", "requests", "tools", "answers")
SUITES: dict[str, tuple[str, ...]] = {
    "language": READS,
    # problems and tools show the starting point of other models
    "code": ("text", "stories sampled", "code", "code gaps", "problems", "tools"),
    "tools": ("text", "stories sampled", "code gaps", *ANSWERS),
    "lora": ("text", "code"),  # the stage itself evaluates what it taught
    "dpo": ANSWERS,
    "kto": ANSWERS,
    "grpo": ANSWERS,
    "distill": ANSWERS,
    "rlhf": ("text", "stories sampled", *ANSWERS),
}


def purposes() -> dict[str, tuple[str, ...]]:
    """SUITES, plus the suites for the wings' models and for the models they are compared with."""
    merged = dict(SUITES)
    for offer in wings.each("purposes"):
        for model, names in offer().items():
            merged[model] = (*merged.get(model, ()), *names)
    return merged


def of(model: str, plan: Mapping[str, T]) -> dict[str, T]:
    """The suites in a plan for the model with this name, in plan order."""
    wanted = purposes().get(model)
    return {name: suite for name, suite in plan.items() if wanted is None or name in wanted}
