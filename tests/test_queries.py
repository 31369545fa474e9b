"""Requests for SQL: each statement does what its request asks, and runs in SQLite."""

import sqlite3

import pytest

from pipeline.ingest.records import Dialogue
from pipeline.synthetic.drills import queries


@pytest.fixture(scope="module")
def some() -> list[Dialogue]:
    return list(queries("train", 400, 3))


def table_of(dialogue: Dialogue) -> tuple[str, list[str], str]:
    """The table, its columns, and the request."""
    head, wish = dialogue.messages[0]["content"].split("\n")
    table, _, columns = head.removeprefix("Table ").removesuffix(".").partition(": ")
    return table, columns.split(", "), wish


def test_every_statement_runs_and_names_what_its_request_names(some: list[Dialogue]) -> None:
    for dialogue in some:
        table, columns, wish = table_of(dialogue)
        statement = dialogue.messages[1]["content"]
        with sqlite3.connect(":memory:") as world:
            world.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
            world.execute(statement)
        words = set(wish.replace(",", " ").replace(".", " ").split())
        named = {column for column in columns if column in statement.replace(",", " ").replace("(", " ").split()}
        assert named <= words | {column for column in columns if f"({column})" in statement}, dialogue


def test_statements_give_the_rows_that_their_words_ask_for() -> None:
    rows = [("Rome", 3, 10.0), ("Oslo", 7, 20.0), ("Rome", 9, 60.0)]
    asked = {
        "SELECT city FROM maps WHERE rank > 4;": ["Oslo", "Rome"],
        "SELECT COUNT(*) FROM maps WHERE city = 'Rome';": [2],
        "SELECT city, AVG(price) FROM maps GROUP BY city;": ["Oslo", "Rome"],
        "SELECT rank FROM maps ORDER BY price DESC LIMIT 2;": [9, 7],
    }
    with sqlite3.connect(":memory:") as world:
        world.execute("CREATE TABLE maps (city, rank, price)")
        world.executemany("INSERT INTO maps VALUES (?, ?, ?)", rows)
        for statement, first in asked.items():
            assert [row[0] for row in world.execute(statement)] == first


def test_a_table_is_in_one_split_and_a_record_depends_on_its_seed_alone(some: list[Dialogue]) -> None:
    assert list(queries("train", 20, 3)) == some[:20] and list(queries("train", 20, 4)) != some[:20]
    tables = {
        split: {(table, *sorted(columns)) for table, columns, _ in map(table_of, queries(split, 300, 3))}
        for split in ("train", "val", "test")
    }
    assert not tables["train"] & tables["test"] and not tables["val"] & (tables["train"] | tables["test"])
    with pytest.raises(KeyError):
        next(queries("rl", 1, 3))
