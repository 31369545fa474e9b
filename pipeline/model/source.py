"""Where the first model comes from: fresh weights, a local model directory, or a model of the Hugging Face hub.

    language.{start,pretrained,hub} -> Start;  located(start, ...) -> Checkpoint: a folder, and the commit of the hub

`stage_tokenizer` takes the tokenizer from there and `stage_language` the weights. A directory is an input of both
stages, so DVC and the work key depend on its contents. For the hub, `stage_tokenizer` resolves the revision to a commit
once, prints it, and writes it to `data/tokenizer/pretrained.json`; `stage_language` reads that commit, so both use one
checkpoint, and adds it to the lineage. Only config.json, tokenizer.json and safetensors are fetched, into
huggingface_hub's cache; its variables HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE apply.

Nothing here needs torch, so the tokenizer's stage does not depend on the model's code.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from pipeline.run.errors import ModelError
from pipeline.run.tracking import say
from pipeline.run.types import JsonObject

STARTS = ("scratch", "pretrained", "hub")
RECORD = "pretrained.json"  # beside the tokenizer: the commit that it is from
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where `stage_language` starts: keys of its block, which `stage_tokenizer` reads too. Raises ValueError."""

    start: str = "scratch"
    """scratch; pretrained: from the folder below; hub: from the id below."""
    pretrained: str = "data/pretrained"
    """A directory with Qwen3, Qwen2 or LLaMA weights and their tokenizer.json."""
    hub: str | None = None
    """Owner/name@revision on the Hugging Face hub; best 40 hex digits, else resolved once."""

    def __post_init__(self) -> None:
        if self.start not in STARTS:
            raise ValueError(f"start: expected {', '.join(STARTS)}, got {self.start!r}")
        if self.start == "hub" and not HUB_ID.fullmatch(self.hub or ""):
            raise ValueError(f"hub: expected owner/name or owner/name@revision, got {self.hub!r}")

    @property
    def scratch(self) -> bool:
        """Whether the weights are fresh."""
        return self.start == "scratch"

    def inputs(self) -> dict[str, str]:
        """The inputs of a stage for this start, by the names of its `Wiring` (run/stage.py). Raises ModelError."""
        if self.start != "pretrained":
            return {}
        if not Path(self.pretrained).is_dir():
            hint = " For a model of the hub set language.start=hub and language.hub=" + self.pretrained
            raise ModelError(
                f"language.pretrained: expected a model directory, {self.pretrained} is none."
                f"{hint if HUB_ID.fullmatch(self.pretrained) else ' Give its path'}"
            )
        return {"checkpoint": self.pretrained}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    folder: Path
    commit: str | None  # of the hub; None: a local folder


def located(start: Start, folder: Path | None, *, weights: bool, tokenizer: Path | None = None) -> Checkpoint:
    """The checkpoint: in `folder`, an input of the stage, or fetched from the hub, with or without its weights.

    `tokenizer` is the folder whose record names the commit to take; None resolves `start.hub`. Raises ModelError.
    """
    if folder is not None:
        return Checkpoint(folder, None)
    match = HUB_ID.fullmatch(start.hub or "")
    assert match is not None  # Start has checked it
    name, revision = match[1], match[2] or "main"
    commit = _resolve_commit(name, revision) if tokenizer is None else recorded(tokenizer, start)
    files = [_fetch(name, commit, file) for file in ("config.json", "tokenizer.json")]
    if weights:
        _fetch_weights(name, commit)
    return Checkpoint(files[0].parent, commit)


def record(folder: Path, start: Start, commit: str | None) -> None:
    """Write the commit beside the tokenizer taken from it; nothing for a local folder, whose contents are hashed."""
    if commit is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RECORD).write_text(
            json.dumps({"hub": start.hub, "commit": commit}, indent=2) + "\n", encoding="utf-8"
        )


def recorded(folder: Path, start: Start) -> str:
    """The commit that `record` wrote. Raises ModelError where the tokenizer is from another checkpoint."""
    path = folder / RECORD
    values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if values.get("hub") != start.hub:
        raise ModelError(
            f"{folder}: expected the tokenizer of {start.hub}, found {values.get('hub', 'another')}; run dvc repro "
            "stage_tokenizer"
        )
    return values["commit"]


def lineage(start: Start, commit: str | None) -> JsonObject:
    """An entry of the lineage besides its inputs: the model of the hub with its commit."""
    return {} if commit is None else {"pretrained": f"{(start.hub or '').partition('@')[0]}@{commit}"}


def _resolve_commit(name: str, revision: str) -> str:
    """The commit of a revision: huggingface_hub puts it into the path of the files that it fetches."""
    commit = _fetch(name, revision, "config.json").parent.name
    if not COMMIT.fullmatch(commit):
        raise ModelError(
            f"{name}: the hub names no commit for {revision}; write one: language.hub={name}@<40 hex digits>"
        )
    if commit != revision:
        say(f"{name}: revision {commit}")
    return commit


def _fetch_weights(name: str, commit: str) -> None:
    """One file, or the shards of the index. Raises ModelError, also for a checkpoint of pickles alone."""
    if _fetch(name, commit, WEIGHTS, optional=True) is not None:
        return
    index = _fetch(name, commit, INDEX, optional=True)
    if index is None:
        raise ModelError(
            f"{name}@{commit}: has neither {WEIGHTS} nor {INDEX}; pickles (.bin) are not fetched: use a checkpoint in"
            " safetensors"
        )
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{name}@{commit}: {INDEX}: expected a JSON object with weight_map ({error!r})") from error
    for shard in shards:
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(f"{name}@{commit}: {INDEX} names {shard!r}; expected safetensors of the same folder")
        _fetch(name, commit, shard)


@overload
def _fetch(name: str, revision: str, file: str) -> Path: ...
@overload
def _fetch(name: str, revision: str, file: str, *, optional: bool) -> Path | None: ...
def _fetch(name: str, revision: str, file: str, *, optional: bool = False) -> Path | None:
    """A file in huggingface_hub's cache, fetched if missing; None for an optional file that the model lacks."""
    import httpx  # here and below: seconds to import, needed for the hub alone
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(hf_hub_download(name, file, revision=revision))
    except RemoteEntryNotFoundError as error:
        if optional:
            return None
        raise ModelError(f"{name}@{revision}: the model has no {file}; it cannot be continued from") from error
    except GatedRepoError as error:
        raise ModelError(
            f"{name}: a gated model: accept its terms at https://huggingface.co/{name} and set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        what = "such model" if isinstance(error, RepositoryNotFoundError) else f"revision {revision}"
        raise ModelError(
            f"{name}: the hub has no {what}, or HF_TOKEN does not open it; check language.hub, expected"
            " owner/name@revision"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, OSError, httpx.HTTPError) as error:
        offline = isinstance(error, OfflineModeIsEnabled) or isinstance(error.__cause__, OfflineModeIsEnabled)
        if offline and file == WEIGHTS:
            return None  # the checkpoint may be in shards; if their index is missing too, fetching it raises
        why = "HF_HUB_OFFLINE is set" if offline else f"the hub could not be reached ({_cause(error)})"
        raise ModelError(
            f"{name}@{revision}: {why}, and {file} is not in the cache of huggingface_hub. Run again with a network"
            " (what was fetched is kept), or copy the model to this machine and set language.start=pretrained,"
            " language.pretrained=<folder>"
        ) from error


def _cause(error: BaseException) -> str:
    """The first line of the root cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__
