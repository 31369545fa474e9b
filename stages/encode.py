"""Stage encode: tokenize a corpus into files of token ids that training memory-maps.

    data/tokenizer + data/raw/{text,code} -> data/tokens/{text,code}

One worker process per parquet file; a killed run resumes with the remaining files. The stage has no keys: the result
depends only on the corpus and the tokenizer.
"""

from dataclasses import dataclass
from pathlib import Path

from pipeline.ingest import shards
from pipeline.run.processes import pool_map
from pipeline.run.stage import main
from pipeline.run.tracking import progress
from pipeline.run.workdir import Job, remove
from pipeline.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Params:
    """The stage has no keys."""


def run(params: Params, job: Job, *, tokenizer: Path, corpus: Path, out: Path) -> None:
    """Encode each parquet file of `corpus` in a worker process and join the parts in `out`."""
    shards.check_apart(corpus)
    parts = job.folder / "parts"
    contexts = shards.has_contexts(corpus)
    tasks = {
        split: [shards.EncodeTask(path, tokenizer, parts, contexts) for path in shards.files(corpus, split)]
        for split in shards.SPLITS
    }
    counts: dict[str, list[shards.Counts]] = {split: [] for split in shards.SPLITS}
    all_tasks = [(split, task) for split, split_tasks in tasks.items() for task in split_tasks]
    with progress(total=len(all_tasks), desc=f"encode {corpus.name}", unit="file") as bar:
        encoded = pool_map(shards.encode_file, [task for _, task in all_tasks], job.workers)
        for (split, _), result in zip(all_tasks, encoded, strict=True):
            counts[split].append(result)
            bar.update(1)
    splits = {split: shards.join(split, tasks[split], counts[split], out) for split in shards.SPLITS}
    shards.write_meta(out, Tokenizer.load(tokenizer), splits)
    job.report(**{split: {name: entry[name] for name in entry if name != "sha256"} for split, entry in splits.items()})
    remove(parts)


if __name__ == "__main__":
    main(
        run,
        inputs={"tokenizer": "data/tokenizer", "corpus": "data/raw/{item}"},
        outs={"out": "data/tokens/{item}"},
        seed="data_seed",
        items=("text", "code"),
    )
