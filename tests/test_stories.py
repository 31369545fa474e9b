"""Tests of the story generator, its checker and its kinds of damage. The floors are those of the data specification."""

import itertools
import lzma
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from pipeline.ingest.records import Text
from pipeline.run.device import generator
from pipeline.run.errors import DataError
from pipeline.synthetic.stories import (
    FAMILIES,
    HELD_OUT,
    QUESTIONS,
    check,
    edits,
    family_of,
    follows_plot,
    fresh_records,
    is_held_out,
    opening,
    records,
    sentences,
    story,
)
from pipeline.synthetic.story_world import Event, Plot, lexicon, moments, new_world, plan, plots, tell

KINDS_OF_DAMAGE = [
    "pronoun changed",
    "name changed",
    "object changed",
    "events swapped",
    "ending cut",
    "sentence repeated",
]


@pytest.fixture(scope="module")
def small() -> list[str]:
    """197 kB of stories from all families."""
    return [record.text for record in records(FAMILIES, 197_000)]


@pytest.fixture(scope="module")
def large() -> tuple[list[Text], float]:
    """2 MB of stories from all families, and the CPU seconds that they took."""
    began = time.process_time()
    return list(records(FAMILIES, 2_000_000)), time.process_time() - began


@pytest.fixture(scope="module", params=[500, pytest.param(2_000, marks=pytest.mark.slow)])
def many(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    """500 or 2,000 stories with their families."""
    found = itertools.islice(records(FAMILIES, 2_000_000), request.param)
    return [(record.source, record.text) for record in found]


def xz_ratio(texts: list[str]) -> float:
    raw = "\n\n".join(texts).encode()
    return len(lzma.compress(raw)) / len(raw)


def test_small_sample_holds_the_diversity_floors(small: list[str]) -> None:
    words = re.findall(r"[a-z'-]+", " ".join(small).lower())
    grams = list(zip(words, words[1:], words[2:], words[3:], strict=False))
    parts = [part for text in small for part in sentences(text)]
    assert xz_ratio(small) >= 0.18
    assert len(set(grams)) / len(grams) >= 0.55
    assert len(set(parts)) / len(parts) >= 0.90
    assert len(set(words)) >= 1_200


@pytest.mark.slow
@pytest.mark.full
def test_two_megabytes_compress_no_better_than_the_floor_and_come_fast_enough(large: tuple[list[Text], float]) -> None:
    texts = [record.text for record in large[0]]
    assert xz_ratio(texts) >= 0.13
    assert len(set(texts)) == len(texts)
    assert large[1] < 5


def test_check_answers_true_eight_times_on_every_story(many: list[tuple[str, str]]) -> None:
    failed = Counter(question for _, text in many for question, holds in check(text).items() if not holds)
    assert not failed
    assert tuple(check(many[0][1])) == QUESTIONS


def test_every_story_follows_its_plot_and_nonsense_in_the_middle_does_not(many: list[tuple[str, str]]) -> None:
    draw, followed, clauses = random.Random(1), 0, 0
    for _, text in many[:300]:
        assert follows_plot(text), text
        parts = sentences(text)
        place = draw.randrange(3, len(parts) - 2)
        said = parts[place][:-1].split()
        draw.shuffle(said)
        salad = " ".join([*parts[:place], " ".join(said).capitalize() + parts[place][-1], *parts[place + 1 :]])
        followed, clauses = followed + follows_plot(salad), clauses + all(check(salad).values())
    assert followed <= 3 < 100 < clauses


def test_an_event_before_what_it_needs_follows_no_plot() -> None:
    """An idea comes after an attempt, the deed after an idea, the ending after the deed, and Tom keeps the kite."""
    told = [
        "Tom was a brave fox.",
        "Tom had a red kite, but now the kite was lost, so he felt sad.",
        "Tom lifted a stone to look for the kite, but there was just some hay.",
        "Tom saw a rope in the barn and had an idea how to find the kite.",
        "Tom opened a box to look for the kite.",
        "At last Tom found the kite, because he had looked under the bed.",
        "So Tom put the kite on the shelf and slept.",
    ]
    assert follows_plot(" ".join(told))
    for first in range(1, 6):
        swapped = list(told)
        swapped[first], swapped[first + 1] = told[first + 1], told[first]
        assert not follows_plot(" ".join(swapped)), swapped
    for other in ("So Anna put the kite on the shelf and slept.", "So Tom put the drum on the shelf and slept."):
        assert not follows_plot(" ".join([*told[:-1], other]))
    assert not any(follows_plot(" ".join(told[:count])) for count in range(7))


def test_fresh_stories_are_held_out_and_in_no_corpus() -> None:
    records = fresh_records(30, 5)
    assert len({record.path for record in records}) == 30 and {record.source for record in records} == {
        family for family in FAMILIES if family not in HELD_OUT
    }
    assert all(is_held_out(record.path) for record in records)
    assert min(int(record.path.rpartition("/")[2]) for record in records) == 60_000_000


def test_the_goal_tells_the_family(many: list[tuple[str, str]]) -> None:
    assert all(family_of(text) == family for family, text in many)


def test_four_in_ten_stories_have_dialogue(many: list[tuple[str, str]]) -> None:
    share = sum('"' in text for _, text in many) / len(many)
    assert abs(share - 0.4) < 0.03


def test_stories_stay_within_the_length_that_a_small_context_holds(many: list[tuple[str, str]]) -> None:
    lengths = [len(text.split()) for _, text in many]
    assert min(lengths) >= 60 and max(lengths) <= 260


def test_every_damage_lowers_the_check(many: list[tuple[str, str]]) -> None:
    draw = generator("damage")
    for number, (family, text) in enumerate(many[::16]):
        damaged = edits(text, f"stories/{family}/{number}", draw)
        assert list(damaged) == KINDS_OF_DAMAGE, text
        for kind, bad in damaged.items():
            assert sum(check(bad).values()) < len(QUESTIONS), (kind, bad)


def test_edits_are_a_function_of_text_path_and_generator() -> None:
    path = "stories/lost/3"
    first, second, other = (edits(story(path), path, generator(seed)) for seed in (1, 1, 2))
    assert first == second
    assert first != other


@pytest.mark.parametrize(
    ("question", "old", "new"),
    [
        ("protagonist_introduced", "a brave fox who", "brave and"),
        ("pronouns_resolve", "He looked", "She looked"),
        ("pronouns_resolve", "He looked", "They looked"),
        ("pronouns_resolve", "At last Tom found the kite", "At last Tom found it"),
        ("names_known", "Mia knew", "Ida knew"),
        ("names_known", "a shy owl named Mia", "Mia"),
        ("names_known", "looked under the bed", "looked under the Brumm"),
        ("wanted_object_in_resolution", "From that day on, Tom kept the kite", "From that day on, Tom kept the drum"),
        ("wanted_object_in_resolution", "asked about the kite", "asked about the drum"),
        ("no_sentence_twice", "Mia knew", "He looked under the bed, but the kite was not there. Mia knew"),
        ("quotes_balanced", '"My red kite', "My red kite"),
        ("length", "asked about the kite", "asked" + " very" * 400),
        ("family_ending", "At last Tom found the kite", "At last Tom sold the kite"),
        ("family_ending", "is lost", "is here"),
    ],
)
def test_each_question_notices_its_own_fault(question: str, old: str, new: str) -> None:
    text = (
        'Tom was a brave fox who lived near the old mill. "My red kite is lost!" cried Tom by the '
        "well. He looked under the bed, but the kite was not there. Then a shy owl named Mia came by with bread and "
        "asked about the kite. Mia knew that a long ladder might help, so she ran to the barn. At last Tom found the "
        "kite on the roof of the barn. From that day on, Tom kept the kite near the window."
    )
    assert all(check(text).values())
    assert old in text
    assert not check(text.replace(old, new))[question]


@pytest.mark.parametrize("text", ["", " ", '"', "Tom", "he", "It is. It is.", "\n\n", "a" * 5_000, "é ß 中"])
def test_check_of_any_text_is_false_and_does_not_raise(text: str) -> None:
    assert not all(check(text).values())


def test_check_judges_cut_stories_without_raising() -> None:
    rng = random.Random(0)
    for number in range(100):
        text = story(f"stories/share/{number}")
        cut = text[: rng.randrange(len(text) - 60)].rstrip()
        if cut.endswith((".", "!", "?", '"')):  # cut between sentences, it may be whole, so cut into one
            cut = cut.rstrip('.!?"')
        assert not all(check(cut).values())


def test_a_story_is_the_same_in_another_process_and_hash_seed() -> None:
    code = (
        "import random; from pipeline.synthetic.story_world import tell\n"
        "print([tell('gift', random.Random(f'{n}'), speaks=n % 2 == 0) for n in range(20)])"
    )
    root = Path(__file__).parent.parent
    environment = {"PYTHONHASHSEED": "7", "LC_ALL": "C", "PYTHONPATH": str(root)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, env=environment)
    assert result.stdout.strip() == str([tell("gift", random.Random(f"{n}"), speaks=n % 2 == 0) for n in range(20)])


def test_held_out_are_three_families_and_every_fiftieth_number() -> None:
    assert len(FAMILIES) == 14 and len(HELD_OUT) == 3 and set(HELD_OUT) < set(FAMILIES)
    assert tuple(plots()) == FAMILIES
    assert is_held_out("stories/grow/1") and is_held_out("stories/lost/50") and is_held_out("stories/lost/0")
    assert not is_held_out("stories/lost/51")


def test_training_records_hold_nothing_held_out_and_fill_the_bytes() -> None:
    found = list(records(FAMILIES, 60_000, held_out=False))
    assert not any(is_held_out(record.path) for record in found)
    assert all(is_held_out(record.path) for record in records(FAMILIES, 30_000, held_out=True))
    filled = sum(len(record.text.encode()) for record in found)
    assert 60_000 <= filled < 60_000 + len(found[-1].text.encode())
    assert found[0].source in FAMILIES and found[0].license == "CC0-1.0" and found[0].text == story(found[0].path)


@pytest.mark.parametrize(
    "path", ["", "stories/lost", "stories/none/1", "tales/lost/1", "stories/lost/-1", "stories/lost/x"]
)
def test_a_wrong_path_is_refused_with_the_form_expected(path: str) -> None:
    with pytest.raises(DataError, match="expected a path stories/"):
        story(path)


def test_records_refuse_unknown_families_and_training_on_held_out_ones() -> None:
    with pytest.raises(DataError, match="expected one or more"):
        next(records(["nothing"], 10))
    with pytest.raises(DataError, match="no training stories"):
        next(records(HELD_OUT, 10, held_out=False))


def test_the_opening_is_the_first_sentence_and_names_the_protagonist() -> None:
    text = story("stories/brave/4")
    assert text.startswith(opening(text)) and opening(text).endswith(".")
    assert check(opening(text))["protagonist_introduced"]


def all_events(plot: Plot) -> list[Event]:
    return [plot.goal, plot.attempt, plot.deed, plot.ending]


@pytest.mark.parametrize("plot", plots().values(), ids=lambda plot: plot.family)
def test_every_event_has_six_wordings_and_the_signs_fit_their_wordings(plot: Plot) -> None:
    for event in all_events(plot):
        assert len(event.plain) >= 6 and len(set(event.plain + event.spoken)) == len(event.plain + event.spoken)
    for line in plot.goal.plain + plot.goal.spoken:
        assert re.search(plot.goal_sign, line, re.IGNORECASE), line
        assert re.search(r"\{(a )?full\}", line), line
    for line in plot.ending.plain + plot.ending.spoken:
        assert re.search(plot.ending_sign, line, re.IGNORECASE), line
        assert re.search(r"\{(obj|a noun|noun|full|a full)\}", line), line


def test_no_goal_wording_carries_the_sign_of_another_family_nor_does_a_list() -> None:
    entries = [
        entry
        for group in (lexicon().lists, lexicon().things, lexicon().feelings, lexicon().deeds, lexicon().manners)
        for words in group.values()
        for entry in words
    ]
    for plot in plots().values():
        assert not [entry for entry in entries if re.search(plot.goal_sign, entry)]
        assert not [entry for entry in entries if re.search(plot.ending_sign, entry)]
        for other in plots().values():
            for line in other.goal.plain + other.goal.spoken if other is not plot else ():
                assert not re.search(plot.goal_sign, line, re.IGNORECASE), (plot.family, line)


def test_wanted_things_stand_in_no_other_list_and_no_wording() -> None:
    lists = {word for words in lexicon().lists.values() for entry in words for word in entry.split()}
    assert not lists & lexicon().wanted
    assert not (set(lexicon().traits) | set(lexicon().colours)) & lexicon().wanted
    lines = [*moments(), *lexicon().all_phrases]
    for plot in plots().values():
        for event in all_events(plot):
            lines += event.plain + event.spoken
    for line in lines:
        fixed = re.sub(r"\{[^}]*\}", " ", line)
        assert not set(re.findall(r"[a-z-]+", fixed.lower())) & lexicon().wanted, line


def test_a_name_has_one_pronoun() -> None:
    assert not set(lexicon().names["he"]) & set(lexicon().names["she"])


def test_in_every_plan_needs_hold_bars_do_not_and_there_are_five_to_ten_events() -> None:
    orders = set()
    for family, plot in plots().items():
        for seed in range(60):
            world = new_world(random.Random(f"{family}{seed}"), ("kite",), plot.aims)
            events = plan(plot, world)
            facts: set[str] = set()
            for event in events:
                assert event.needs <= facts and not event.bars & facts
                facts |= event.gives
            assert 5 <= len(events) <= 10 and "done" in facts
            orders.add(tuple(event.name for event in events[2:-3]))
    assert len(orders) > 60
