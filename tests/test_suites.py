"""The suites over scripted answers with known numbers, and the one thing they share: a sample depends on its seed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pipeline.evaluation import likelihood, suites
from pipeline.evaluation import tools as evaluation_tools
from pipeline.evaluation.suites import Subject
from pipeline.generation.sampling import Completion
from pipeline.ingest.records import Dialogue
from pipeline.model.transformer import Transformer
from pipeline.synthetic import programs as synthetic_programs
from pipeline.synthetic import stories
from pipeline.synthetic import tools as synthetic_tools
from pipeline.text import chat
from pipeline.text.tokenizer import Tokenizer
from tests.judges import KnowingJudge
from tests.suites import SETTINGS, SOURCE, problem, text
from tests.suites import scripted_subjects as scripted_subjects


@pytest.fixture
def subject(tiny_model: Transformer, byte_tokenizer: Tokenizer) -> Subject:
    return Subject(tiny_model, byte_tokenizer, SETTINGS, 7)


def test_a_sample_depends_on_its_id_suite_and_number_and_on_nothing_else(subject: Subject) -> None:
    prompts = {f"p{n}": subject.tokenizer.encode("Once there was a " + "very " * n) for n in range(6)}
    whole = subject.complete("s", prompts, tokens=8, temperature=1.0)
    turned = subject.complete("s", dict(reversed(prompts.items())), tokens=8, temperature=1.0)
    alone = subject.complete("s", {"p3": prompts["p3"]}, tokens=8, temperature=1.0)
    assert {n: c.ids for n, c in turned.items()} == {n: c.ids for n, c in whole.items()}
    assert alone["p3"].ids == whole["p3"].ids
    others = [
        subject.complete("s", prompts, tokens=8, temperature=1.0, sample=1),
        subject.complete("t", prompts, tokens=8, temperature=1.0),
    ]
    others.append(replace(subject, seed=8).complete("s", prompts, tokens=8, temperature=1.0))
    assert all(other["p3"].ids != whole["p3"].ids for other in others)


def test_a_prompt_without_room_is_left_out_and_counted(subject: Subject) -> None:
    long, short = "long " * 300, "The pilot."
    prompts = {"long": subject.tokenizer.encode(long), "short": subject.tokenizer.encode(short), "empty": []}
    assert list(subject.complete("s", prompts, tokens=2, temperature=0.0)) == ["short"]
    asked = [replace(problem("a", "easy"), question=long)]
    assert suites.solved(subject, asked, KnowingJudge([])).numbers == {"left_out": 1}  # type: ignore[arg-type]


def test_bits_per_byte_are_those_of_the_documents(subject: Subject) -> None:
    texts = [text("a", "The pilot asked. " * 9), text("b", "def add(left, right):\n"), text("c", "né\n")]
    result = suites.documents(subject, "text", texts)
    scored = likelihood.likelihood(subject.model, subject.tokenizer, [t.text for t in texts], context=64)
    assert result.numbers["bpb"] == pytest.approx(scored.bits_per_byte)
    assert result.numbers["bpb_low"] <= result.numbers["bpb"] <= result.numbers["bpb_high"]
    assert (result.numbers["documents"], result.numbers["left_out"]) == (3, 0)
    assert suites.documents(subject, "text", []).numbers == {"documents": 0, "left_out": 0}


def test_code_has_a_number_for_files_and_one_for_generated_programs(subject: Subject) -> None:
    texts = [replace(text("a", "def add(left, right):\n"), source="generated"), text("b", "x = 1\n"), text("c", "y\n")]
    numbers = suites.documents(subject, "code", texts).numbers
    alone = {
        group: suites.documents(subject, "text", part).numbers
        for group, part in {"generated": texts[:1], "files": texts[1:]}.items()
    }
    for group, part in alone.items():
        assert numbers[f"bpb_{group}"] == pytest.approx(part["bpb"])
        assert numbers[f"{group}_documents"] == part["documents"]
    assert numbers["files_effective"] == pytest.approx((6 + 2) ** 2 / (6**2 + 2**2))


def test_stories_are_judged_by_the_checker_with_their_opening(scripted: Any) -> None:
    paths = ["stories/trade/50", "stories/gift/100", "stories/lost/50", "stories/learn/50"]
    texts = [text(path, stories.story(path)) for path in paths]
    rest = [t.text.removeprefix(stories.opening(t.text)) for t in texts]
    answers = {
        paths[0]: rest[0],
        paths[1]: rest[1],
        paths[2]: (" The pilot sat.", "length"),
        paths[3]: (rest[3], "length"),
    }
    subject = scripted(answers, stories=4)
    result = suites.sampled_stories(subject, texts)
    assert (result.numbers["story_rate"], result.numbers["end_rate"]) == (0.75, 0.5)
    assert result.numbers["story_rate_low"] == pytest.approx(0.30064, abs=1e-5)  # Wilson, 3 of 4
    assert result.numbers["coherent_rate"] == 0.75
    assert [row["told"] for row in result.rows] == [1, 1, 0, 1]
    assert [row["verdict"] == "passes every clause" for row in result.rows] == [True, True, False, True]
    assert result.rows[0]["output"] == texts[0].text
    assert result.numbers["samples_left_out"] == 0
    assert set(result.numbers["clauses"].values()) <= {0.75, 1.0}
    assert subject.asked[paths[0]][0] == subject.tokenizer.end_of_text


def test_few_openings_are_continued_several_times(scripted: Any) -> None:
    texts = [text(path, stories.story(path)) for path in ("stories/trade/50", "stories/gift/100")]
    ending = texts[0].text.removeprefix(stories.opening(texts[0].text))
    answers = {
        "stories/trade/50": ending,
        "stories/gift/100": "",
        "stories/trade/50#1": "",
        "stories/gift/100#1": "",
        "stories/trade/50#2": ending,
    }
    result = suites.sampled_stories(scripted(answers, stories=5), texts)
    assert [row["id"] for row in result.rows] == list(answers)
    assert result.numbers["story_rate"] == 0.4


def test_a_gap_is_right_when_it_is_the_very_line(scripted: Any, byte_tokenizer: Tokenizer) -> None:
    texts = [text(str(n), SOURCE) for n in range(4)] + [text("short", "x = 1\n" * 9)]
    reference = {r["id"]: r["reference"] for r in suites.gaps(scripted({str(n): "" for n in range(4)}), texts).rows}
    assert set(reference.values()) <= {line + "\n" for line in SOURCE.splitlines()[3:7] if line}
    answers = {"0": reference["0"], "1": reference["1"].rstrip("\n"), "2": reference["2"].strip(), "3": "x"}
    subject = scripted(answers)
    result = suites.gaps(subject, texts)
    rights = [True, True, reference["2"].startswith("def"), False]
    assert [row["verdict"] == "exact" for row in result.rows] == rights
    assert result.numbers["fim_exact_match"] == sum(rights) / 4
    ids, t = subject.asked["0"], byte_tokenizer
    before, _, after = SOURCE.partition(reference["0"])
    assert ids == [t.fim_prefix, *t.encode(before), t.fim_suffix, *t.encode(after), t.fim_middle]


def test_problems_are_counted_by_group_greedy_and_sampled(scripted: Any) -> None:
    problems = [problem("a", "easy"), problem("b", "easy"), problem("c", "hard")]
    good = {p.id: f"def {p.id}(x):\n    return x\n" for p in problems}
    bad = synthetic_programs.fenced("def wrong(x):\n    return 0")
    answers: dict[Any, Any] = {
        ("a", 0): synthetic_programs.fenced(good["a"].strip()),
        ("b", 0): "no code",
        ("c", 0): bad,
    }
    for sample in range(1, 6):  # right samples: a 2 of 5, b 5 of 5, c 0 of 5
        answers |= {
            ("a", sample): synthetic_programs.fenced(good["a"].strip()) if sample < 3 else bad,
            ("b", sample): synthetic_programs.fenced(good["b"].strip()),
            ("c", sample): bad,
        }
    result = suites.solved(scripted(answers, samples=5), problems, KnowingJudge(good.values()))  # type: ignore[arg-type]
    numbers = result.numbers
    assert (numbers["n"], numbers["easy"]["n"], numbers["hard"]["n"]) == (3, 2, 1)
    assert (numbers["pass_at_1_greedy"], numbers["easy"]["pass_at_1_greedy"]) == (pytest.approx(1 / 3), 0.5)
    assert numbers["pass_at_1"] == pytest.approx((0.4 + 1 + 0) / 3)
    assert numbers["pass_at_5"] == pytest.approx(2 / 3)
    assert "pass_at_10" not in numbers
    assert numbers["easy"]["pass_at_1"] == pytest.approx(0.7)
    assert (numbers["parse_rate"], numbers["format_rate"]) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert numbers["parse_rate_low"] == pytest.approx(0.20766, abs=1e-5)  # Wilson, 2 of 3
    assert numbers["exact_match"] == pytest.approx(1 / 3)
    similarity = numbers["codebleu_py"]
    other = ("score", "score_low", "score_high", "parts")
    parts = [value for name, value in similarity.items() if name not in other and value is not None]
    assert similarity["score_low"] <= similarity["score"] <= similarity["score_high"]
    assert similarity["parts"] == len(parts) and similarity["score"] == pytest.approx(sum(parts) / len(parts))
    assert [(r["id"], r["verdict"]) for r in result.rows] == [("a", "passed"), ("b", "failed"), ("c", "failed")]


def test_an_item_is_another_one_when_anything_of_it_is_though_its_id_stays(scripted: Any) -> None:
    """Runs are comparable only with the same hidden tests, the same document to the character, and the same tools."""

    def items(result: suites.SuiteResult) -> list[str]:
        assert result.rows
        return [row["item"] for row in result.rows]

    asked = problem("a", "easy")
    others = [
        replace(asked, tests=[{"args": "[1]", "expected": "2", "visible": False}]),
        replace(asked, question="Write b."),
    ]
    first, *rest = (items(suites.solved(scripted({"a": "no"}), [p], KnowingJudge([]))) for p in (asked, *others, asked))  # type: ignore[arg-type]
    assert first == rest[-1] and first not in rest[:-1]
    whole, cut = (
        items(suites.documents(scripted({}), "text", [text("a", "The pilot asked." + end)])) for end in ("", "?")
    )
    assert whole != cut
    story = stories.story("stories/trade/50")
    told = [
        items(suites.sampled_stories(scripted({"s": "x"}, stories=1), [text("s", one)]))
        for one in (story, story.replace(" ", "  ", 3))
    ]
    assert told[0] != told[1]
    gaps = [
        items(suites.gaps(scripted({"g": "x"}), [text("g", SOURCE.replace("+ 1", end).replace("+ 2", end))]))
        for end in ("+ 1", "+ 3")
    ]
    assert gaps[0] != gaps[1]
    (talk,) = synthetic_tools.dialogues("test", 1, 1)
    turn = synthetic_tools.turns(talk)[0]
    fewer = replace(talk, tools=[*talk.tools, talk.tools[0] | {"more": 1}])
    called = [
        items(evaluation_tools.called(scripted({f"{talk.id}#{turn}": "no"}), [one])) for one in (talk, fewer, talk)
    ]
    assert called[0] == called[2] != called[1]


def truthful(dialogue: Dialogue, turn: int) -> str:
    """The correct message as the model would write it."""
    shown = chat.render_text([dialogue.messages[turn]]).removeprefix("<|im_start|>assistant\n")
    return shown.removesuffix("<|im_end|>\n")


def test_true_calls_score_one_and_words_alone_nothing_where_calls_are_asked(scripted: Any) -> None:
    dialogues = list(synthetic_tools.dialogues("test", 40, 1))
    turns = [(d, turn) for d in dialogues for turn in synthetic_tools.turns(d)]
    category = {d.id: synthetic_tools.facets(d).category for d in dialogues}
    right = evaluation_tools.called(scripted({f"{d.id}#{turn}": truthful(d, turn) for d, turn in turns}), dialogues)
    assert right.numbers["ast"] == right.numbers["ast_high"] == 1.0
    calling = {row["id"].partition("#")[0] for row in right.rows if row["category"] in evaluation_tools.AST}
    for name, dialogues_of_it in (("ast", calling), ("ast_simple", {i for i in calling if category[i] == "simple"})):
        n = len(dialogues_of_it)
        assert right.numbers[f"{name}_low"] == pytest.approx(n / (n + 1.959964**2))  # Wilson, n of n
    assert (right.numbers["false_call_rate"], right.numbers["argument_f1"], right.numbers["n"]) == (
        0.0,
        1.0,
        len(turns),
    )
    assert {row["verdict"] for row in right.rows} == {"right"}
    wanted = {row["id"]: row["wanted"] for row in right.rows}
    assert wanted == {
        f"{d.id}#{turn}": "call"
        if synthetic_tools.truth(d, turn)
        else "question"
        if category[d.id] == "missing"
        else "nothing"
        for d, turn in turns
    }
    silent = evaluation_tools.called(scripted({f"{d.id}#{turn}": "I cannot." for d, turn in turns}), dialogues)
    assert (silent.numbers["ast"], silent.numbers["irrelevance"], silent.numbers["left_out"]) == (0.0, 1.0, 0)


def test_the_interval_of_tool_calls_is_over_dialogues_and_holds_the_value(scripted: Any) -> None:
    dialogues = list(synthetic_tools.dialogues("test", 40, 1))
    turns = [(d, turn) for d in dialogues for turn in synthetic_tools.turns(d)]
    half = {
        f"{d.id}#{turn}": truthful(d, turn) if n % 2 else "No."
        for n, d in enumerate(dialogues)
        for turn in synthetic_tools.turns(d)
    }
    numbers = evaluation_tools.called(scripted(half), dialogues).numbers
    assert len(half) == len(turns)
    for name in ("ast", "name_accuracy"):
        assert 0 < numbers[f"{name}_low"] < numbers[name] < numbers[f"{name}_high"] < 1
    assert "n_low" not in numbers


def test_the_first_dialogues_are_answered_again_under_the_grammar_of_their_tools(
    scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In turns whose truth calls a tool, the model is made to write the call; its free answers call nothing."""
    dialogues = list(synthetic_tools.dialogues("test", 12, 1))
    turns = [(d, turn) for d in dialogues for turn in synthetic_tools.turns(d)]
    silent = {f"{d.id}#{turn}": "I cannot." for d, turn in turns}
    assert not [name for name in evaluation_tools.called(scripted(silent), dialogues).numbers if "constrained" in name]
    asked: list[int] = []

    def guided(model: Any, prompts: list[list[int]], grammars: list[Any], **_: Any) -> list[Completion]:
        asked.append(len(prompts))
        mine = [(d, turn) for d, turn in turns if d.id in {d.id for d in dialogues[:5]}]
        return [Completion(byte(truthful(d, turn)), [], "stop") for d, turn in mine]

    subject = scripted(silent, constrained=5)
    byte = subject.tokenizer.encode
    monkeypatch.setattr(
        subject.tokenizer, "decode", lambda ids: next((t for t in texts if byte(t) == list(ids)), "I cannot.")
    )
    texts = [truthful(d, turn) for d, turn in turns]
    monkeypatch.setattr(evaluation_tools, "guided", guided)
    numbers = evaluation_tools.called(subject, dialogues).numbers
    assert asked == [sum(d.id in {one.id for one in dialogues[:5]} for d, _ in turns)]
    assert (
        numbers["ast"],
        numbers["ast_constrained"],
        numbers["ast_constrained_high"],
        numbers["constrained_left_out"],
    ) == (0.0, 1.0, 1.0, 0)


@pytest.mark.slow  # rouge-score imports scikit-learn
def test_answers_in_words_are_compared_with_the_last_word(scripted: Any) -> None:
    def talk(name: str, kind: str, *answers: str) -> Dialogue:
        messages: list[dict[str, Any]] = []
        for answer in answers:
            messages += [{"role": "user", "content": "and?"}, {"role": "assistant", "content": answer}]
        return Dialogue(id=name, kind=kind, category="x", messages=messages)

    dialogues = [
        talk("a", "chat", "one two three four", "five six seven eight"),
        talk("b", "chat", "nine"),
        talk("s", "story", "no"),
    ]
    result = suites.answered(scripted({"a#3": "five six seven eight", "b#1": "ten"}), dialogues)
    assert (result.numbers["n"], result.numbers["exact_match"], result.numbers["rouge1"]) == (2, 0.5, 0.5)
    assert [row["reference"] for row in result.rows] == ["five six seven eight", "nine"]


@pytest.mark.parametrize("change", [{"documents": 0}, {"context": 63}, {"bootstrap": 0}])
def test_settings_that_measure_nothing_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        replace(SETTINGS, **change)


def test_nothing_to_measure_gives_no_numbers_and_no_error(scripted: Any) -> None:
    empty: Sequence[Any] = []
    for suite in (suites.sampled_stories, suites.gaps, evaluation_tools.called, suites.answered):
        assert suite(scripted({}), empty).numbers == {}
    assert suites.solved(scripted({}), empty, KnowingJudge([])).numbers == {}  # type: ignore[arg-type]


def test_requests_that_no_tool_serves_are_counted_beside_the_other_conversations(scripted: Any) -> None:
    """Up to `dialogues` of each, wherever they are: false calls are rare, and ten prompts say little about them."""
    served = list(synthetic_tools.dialogues("test", 12, 3))
    unserved = list(synthetic_tools.unserved_dialogues(6, 3))
    known = [*unserved, *served]
    silent = {f"{d.id}#{turn}": "Sorry." for d in known for turn in synthetic_tools.turns(d)}
    result = evaluation_tools.called(scripted(silent, dialogues=4), known)
    assert {row["id"].partition("#")[0] for row in result.rows} == {d.id for d in (*served[:4], *unserved[:4])}
    assert result.numbers["irrelevance"] == 1.0 and result.numbers["false_call_rate"] == 0.0
    assert all(d.category.startswith("irrelevance/") and not synthetic_tools.calls(d.messages[1]) for d in unserved)
