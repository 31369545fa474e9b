"""Stage overlap: find the test items that occur in the training data. They are excluded from every measurement.

    data/raw/{text,code} + data/{dialogues,problems} -> data/overlap.json    {"dialogues": [id, ...], "problems": ...}

An item is listed if its text (the opening request of a dialogue, the reference answer of a problem) matches
a training document or a user message in a training dialogue (ingest/duplicates.py, `Index.hits`). The stage is separate
from stage tasks so that fine-tuning your own checkpoint needs no corpus, and so that changing a key in `tasks` does not
retrain the language model.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from pipeline.ingest import duplicates
from pipeline.ingest.records import Dialogue, Problem, read
from pipeline.run.stage import main
from pipeline.run.workdir import Job
from pipeline.synthetic import programs


@dataclass(frozen=True, kw_only=True)
class Params:
    """The stage has no keys."""


def run(params: Params, job: Job, *, text: Path, code: Path, dialogues: Path, problems: Path, out: Path) -> None:
    """Write the ids of the test items contained in the training data, by kind."""
    items = [
        (f"dialogues {d.id}", next((m["content"] for m in d.messages if m["role"] == "user"), ""))
        for d in read(dialogues / "test.jsonl", Dialogue)
        if d.kind != "story"  # the answer is sampled, and the request only gives the topic
    ]
    items += [
        (f"problems {p.id}", p.question if p.group == programs.REQUEST else programs.unfenced(p.answer))
        for p in read(problems / "test.jsonl", Problem)
        if p.answer
    ]
    said = (
        message["content"]
        for dialogue in read(dialogues / "train.jsonl", Dialogue)
        if dialogue.kind != "code"  # requests for code are the problems themselves
        for message in dialogue.messages
        if message["role"] == "user"
    )
    hits = duplicates.found_in(items, [text, code], said, job.workers)
    contained = {
        kind: [name.removeprefix(f"{kind} ") for name, _ in items if name in hits and name.startswith(f"{kind} ")]
        for kind in ("dialogues", "problems")
    }
    out.write_text(json.dumps(contained, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    job.report(contained={kind: len(ids) for kind, ids in contained.items()}, items=len(items))


if __name__ == "__main__":
    main(
        run,
        inputs={
            "text": "data/raw/text",
            "code": "data/raw/code",
            "dialogues": "data/dialogues",
            "problems": "data/problems",
        },
        outs={"out": "data/overlap.json"},
        seed="data_seed",
    )
