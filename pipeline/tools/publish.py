"""Publish a deployed model to a Hugging Face hub in one commit.

    models/deploy, metrics/eval/<model>.json -> the repository OWNER/NAME on a hub

    HF_TOKEN=... python -m pipeline.tools.publish models/deploy --to OWNER/NAME [--public] [--revision BRANCH]
        [--endpoint URL] [--license ID] [--language CODE ...] [--replace] [--dry-run]

The files listed in SHA256SUMS are verified before anything is uploaded. The model card from stage deploy gets the hub's
metadata: license, languages, tags, the base model from the lineage, and, as `model-index`, the headlines and named
benchmarks measured on exactly these weights. SHA256SUMS is updated for the new card.

Large files (Git LFS) are uploaded one by one before the commit refers to them, so a second run sends only what is
missing from the hub. The commit fails if the branch has moved in the meantime. Success is reported only after comparing
the hub's file list with ours, by hash.

Not guaranteed: resuming within a file. Uploads with Xet, the hub's newer protocol, are untested; enable them with
HF_HUB_DISABLE_XET=0.
"""

import argparse
import hashlib
import ipaddress
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pipeline.export import huggingface
from pipeline.export.huggingface import SUMS
from pipeline.report.metrics import HEADLINES, Headline, lookup
from pipeline.run import workdir
from pipeline.run.errors import ConfigError, ModelError, StagecoachError
from pipeline.run.tracking import say
from pipeline.run.types import JsonObject

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, HfApi, RepoFile

NEEDED = ("config.json", "tokenizer.json", "lineage.json", "README.md", SUMS)
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
HUBS_OWN = ".gitattributes"  # the hub adds it to a new repository
RESUME = "not published; run again to resume: large files already uploaded are not sent again"
DATA = "\n## Data\n"  # the results go before this heading in card.md
SEEDS = ("data_seed", "fresh_seed")  # seeds of the evaluated items
Files = Mapping[str, Path | bytes]  # path in the repository -> file, or generated contents


@dataclass(frozen=True)
class Target:
    """Where a model is published."""

    repo: str  # OWNER/NAME
    branch: str
    public: bool


# -- the folder --------------------------------------------------------------------------------------------------------


def check(folder: Path) -> JsonObject:
    """The lineage of a complete, unchanged folder from stage deploy. Raises ModelError for any other folder."""
    huggingface.check(folder)
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    missing = [name for name in NEEDED if name not in present]
    if not any(name.endswith(".safetensors") for name in present):
        missing.append("*.safetensors")
    if missing:
        raise ModelError(
            f"{folder}: expected a deployed model, but {', '.join(missing)} is missing; run dvc repro stage_deploy"
        )
    lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    if unnamed := sorted(present - {line.partition("  ")[2] for line in lines} - {SUMS}):
        raise ModelError(f"{folder}: not listed in {SUMS}: {', '.join(unnamed)}; delete these files, or deploy again")
    try:
        lineage = json.loads((folder / "lineage.json").read_text(encoding="utf-8"))
        model, inputs, tokenizer = lineage["model"], lineage["inputs"], lineage["tokenizer"]
        assert isinstance(inputs, dict), inputs
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise ModelError(f"{folder / 'lineage.json'}: expected model, inputs and tokenizer ({error!r})") from error
    found = workdir.sha256(folder / "tokenizer.json")
    if found != tokenizer:
        raise ModelError(
            f"{folder}: its lineage has tokenizer {tokenizer[:12]}..., but tokenizer.json is {found[:12]}...: these are"
            f" parts of two different models; deploy {model} again"
        )
    return lineage


def contents(folder: Path, card: str) -> Files:
    """The files for the repository: those in `folder`, with the new model card and matching checksums."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    readme = card.encode()
    sums = (folder / SUMS).read_text(encoding="utf-8")
    sums = re.sub(r"^\S+(?=  README\.md$)", hashlib.sha256(readme).hexdigest(), sums, flags=re.MULTILINE)
    return paths | {"README.md": readme, SUMS: sums.encode()}


def size(content: Path | bytes) -> int:
    """The size of a file in bytes."""
    return len(content) if isinstance(content, bytes) else content.stat().st_size


# -- the card ----------------------------------------------------------------------------------------------------------


def measured(folder: Path, lineage: JsonObject) -> JsonObject:
    """metrics/eval/<model>.json next to models/; empty if missing. Raises ModelError if it is for other weights."""
    name, root = f"models/{lineage['model']}", folder.absolute().parents[1]
    path = root / "metrics" / "eval" / f"{lineage['model']}.json"
    if not path.is_file():
        say(f"{path}: not found; the card will have no results")
        return {}
    try:
        numbers = json.loads(path.read_text(encoding="utf-8"))
        ours, theirs = lineage["inputs"].get(name), numbers["lineage"]["inputs"].get(name)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: expected the output of stage evaluate ({error!r:.200}); run dvc repro") from error
    if ours != theirs:
        raise ModelError(
            f"{path}: evaluated {name} {theirs}, but deployed {ours}; run dvc repro to evaluate and deploy"
            " the same weights"
        )
    return numbers


def headlines(numbers: JsonObject) -> list[Headline]:
    """The headlines, then those measures of each named benchmark that have an interval."""
    sets = {name: part for name, part in numbers.get("benchmarks", {}).items() if isinstance(part, dict)}
    return [
        *HEADLINES,
        *(
            Headline(("benchmarks", name, key), f"{name}: {key}", "", f"{name}_{key}")
            for name, part in sets.items()
            for key in part
            if f"{key}_low" in part
        ),
    ]


def results(numbers: JsonObject, task: str) -> "list[EvalResult]":
    """The measurements as the hub's evaluation results: shares from 0 to 1, with the interval in `metric_args`."""
    from huggingface_hub import EvalResult

    found = []
    for headline in headlines(numbers):
        if (value := lookup(numbers, headline)) is None:
            continue
        *suite, measure = headline.path
        found.append(
            EvalResult(
                task_type=task,
                dataset_type=suite[-1] if suite[0] == "benchmarks" else f"stagecoach-{suite[0]}",
                dataset_name=suite[-1] if suite[0] == "benchmarks" else f"Stagecoach {suite[0]}, held out",
                dataset_config=suite[1] if len(suite) > 1 and suite[0] != "benchmarks" else None,
                dataset_split="test",
                dataset_args={key: seed for key in SEEDS if isinstance(seed := numbers["settings"].get(key), int)},
                metric_type=measure.replace("_at_", "@"),
                metric_name=headline.title,
                metric_value=value["value"],
                metric_args={key: value[key] for key in ("low", "high") if key in value} or None,
            )
        )
    return found


def results_table(numbers: JsonObject) -> str:
    """The same results as a Markdown table."""
    rows = []
    for headline in headlines(numbers):
        if (value := lookup(numbers, headline)) is not None:
            interval = f"{headline.show(value['low'])} to {headline.show(value['high'])}" if "low" in value else ""
            unit = "" if headline.unit == "share" else f", {headline.unit}"
            better = "" if headline.higher_is_better else " (lower is better)"
            rows.append(f"| {headline.title}{unit}{better} | {headline.show(value['value'])} | {interval} |")
    if not rows:
        return "\n## Results\n\nThis model was not evaluated.\n"
    head = "For `model.safetensors`; the other files differ as described above.\n\n| held out | value | 95% interval |"
    return "\n".join(["\n## Results\n", head, "|---|---|---|", *rows, ""])


def base_models(models: Path, lineage: JsonObject) -> list[str]:
    """The hub checkpoints that a model was derived from, as OWNER/NAME. They are found through the lineages of the
    neighboring folders, if these are still the versions that the model was made from.
    """
    if "base" in lineage:
        return [lineage["base"].partition("@")[0]]
    found = []
    for name, digest in sorted(lineage.get("inputs", {}).items()):
        folder = models / name.removeprefix("models/")
        path = folder / "lineage.json"
        if name.startswith("models/") and path.is_file() and workdir.digest(folder) == digest:
            found += base_models(models, json.loads(path.read_text(encoding="utf-8")))
    return list(dict.fromkeys(found))


def card(
    folder: Path, lineage: JsonObject, numbers: JsonObject, target: Target, *, license: str, languages: Sequence[str]
) -> str:
    """The model card from stage deploy plus the hub's metadata, the results, and download instructions."""
    from huggingface_hub import ModelCard, ModelCardData

    made = ModelCard((folder / "README.md").read_text(encoding="utf-8"))
    task = made.data.get("pipeline_tag")
    if DATA not in made.text or task is None:
        raise ModelError(f"{folder / 'README.md'}: expected the model card from stage deploy; deploy the model again")
    name = f"stagecoach-{lineage['model']}"
    made.data = ModelCardData(
        license=license,
        language=list(languages),
        library_name=made.data.get("library_name"),
        pipeline_tag=task,
        base_model=base_models(folder.absolute().parent, lineage) or None,
        tags=["stagecoach", lineage["model"]],
        model_name=name,
        eval_results=results(numbers, task) or None,
    )
    revision = "" if target.branch == "main" else f" --revision {target.branch}"
    fetch = f"```\nhf download {target.repo}{revision} --local-dir models/deploy   # the path used below\n```\n"
    text = re.sub(r"^(# .*\n)", rf"\g<1>\n{fetch}", made.text, count=1, flags=re.MULTILINE)
    made.text = text.replace(DATA, results_table(numbers) + DATA, 1)
    return str(made)


# -- the hub -----------------------------------------------------------------------------------------------------------


def publish(api: "HfApi", target: Target, files: Files, *, message: str, replace: bool) -> str:
    """Commit `files` to the hub and verify the result; returns the commit's URL.

    Raises ConfigError if the repository's visibility differs from the target's, or if it has other files and
    `replace` is not set.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    head, has_branch = _open(api, target)
    present = _listed(api, target.repo, head)
    others = sorted(set(present) - (set(files) if "lineage.json" in present else set()))
    if others and not replace:
        named = ", ".join(others[:5]) + (" ..." if len(others) > 5 else "")
        raise ConfigError(
            f"{target.repo} has other files: {named}; choose another name or --revision, or use --replace to replace"
            " them with the deployed files (the old files stay in the branch's history)"
        )
    if not has_branch:
        api.create_branch(target.repo, branch=target.branch, revision=head)
    stale = [CommitOperationDelete(name) for name in others if name not in files]
    added = [CommitOperationAdd(name, content) for name, content in files.items()]
    done = api.create_commit(
        target.repo, [*added, *stale], commit_message=message, revision=target.branch, parent_commit=head
    )
    _verify(api, target.repo, done.oid, files)
    return done.commit_url


def _open(api: "HfApi", target: Target) -> tuple[str, bool]:
    """The parent commit, and whether the target's branch exists. Creates the repository if it is missing."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        info = api.model_info(target.repo)
    except RepositoryNotFoundError as error:
        if error.response.status_code != 404:
            raise  # the hub returns 401 for a token that it does not accept
        api.create_repo(target.repo, private=not target.public)
        info = api.model_info(target.repo)
    if bool(info.private) == target.public:
        raise ConfigError(
            f"{target.repo} is private; make it public on its page, or omit --public"
            if info.private
            else f"{target.repo} is public: pass --public if everyone may read the model, or choose another name"
        )
    assert info.sha is not None
    try:
        head = api.model_info(target.repo, revision=target.branch).sha
    except RevisionNotFoundError:
        return info.sha, False  # a new branch starts with the files of main
    assert head is not None
    return head, True


def _listed(api: "HfApi", repo: str, commit: str) -> "dict[str, RepoFile]":
    """The files of a commit, without those added by the hub itself."""
    from huggingface_hub import RepoFile

    entries = api.list_repo_tree(repo, recursive=True, revision=commit)
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile) and entry.path != HUBS_OWN}


def _verify(api: "HfApi", repo: str, commit: str, files: Files) -> None:
    """Raise StagecoachError unless the hub has exactly these files, by hash."""
    held = _listed(api, repo, commit)
    wrong = set(held) ^ set(files)
    for name in set(held) & set(files):
        large = held[name].lfs
        if _hash(files[name], large=large is not None) != (large.sha256 if large else held[name].blob_id):
            wrong.add(name)
    if wrong:
        raise StagecoachError(f"{repo}: {commit[:8]} differs from what was sent: {', '.join(sorted(wrong))}; run again")


def _hash(content: Path | bytes, *, large: bool) -> str:
    """The hash that the hub lists for a file: sha256 for a large one, Git's blob hash otherwise."""
    if large and isinstance(content, Path):
        return workdir.sha256(content)
    data = content.read_bytes() if isinstance(content, Path) else content
    return hashlib.sha256(data).hexdigest() if large else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def explained(target: Target, token: str) -> Iterator[None]:
    """Turn errors from huggingface_hub into ours, which suggest a fix and contain neither the token nor signed URLs."""
    from huggingface_hub.errors import HfHubHTTPError

    network = HfHubHTTPError.__bases__[0]  # base error of its HTTP library, which differs between major versions
    try:
        yield
    except Exception as error:
        if isinstance(error, StagecoachError) or not isinstance(error, (RuntimeError, ValueError, OSError, network)):
            raise
        chain = [error, *filter(None, (error.__cause__, error.__context__))]
        answer = next((one for one in chain if isinstance(one, HfHubHTTPError)), None)
        said = "" if answer is None else f"{answer.response.status_code} {answer.server_message or ''}"
        if answer is not None and not isinstance(error, RuntimeError):
            raise _refusal(target, answer.response.status_code, _safe(said, token), _safe(str(error), token)) from None
        if isinstance(error, ValueError):  # the hub rejects the card, or a file
            raise ConfigError(f"{target.repo}: {_safe(str(error), token)}; not published") from None
        # RuntimeError: uploading a file to the storage failed; its responses are unrelated to the token
        said = said or ("" if error.__cause__ is None else repr(error.__cause__))
        what = _safe(f"{str(error) or repr(error)} {said}", token)
        raise StagecoachError(f"{target.repo}: {what}; is the hub reachable? {RESUME}") from None


def _refusal(target: Target, status: int, said: str, message: str) -> StagecoachError:
    """The error for a request that the hub rejected."""
    owner = target.repo.partition("/")[0]
    if status == 400:
        return ConfigError(f"{target.repo}: {message}; not published")
    if status == 401:
        return ConfigError(
            f"{target.repo}: the hub does not accept the token ({said}); create one with write access in the hub's"
            " settings, and set HF_TOKEN or run `hf auth login`; not published"
        )
    if status == 403:
        return ConfigError(
            f"{target.repo}: the token lacks permission ({said}); it needs the role `write`, or, if fine-grained,"
            f" write access to repositories of {owner}; not published"
        )
    if status in (409, 412):
        return StagecoachError(f"{target.repo}: the branch was changed in the meantime ({said}); {RESUME}")
    return StagecoachError(f"{target.repo}: the hub answered {said}; {RESUME}")


def _safe(text: str, token: str) -> str:
    """A message without the token and URL queries, which may contain signatures."""
    return re.sub(r"\?[^\s'\")]*", "", " ".join(text.split()).replace(token, "***"))[:400]


# -- the command -------------------------------------------------------------------------------------------------------


def check_endpoint(endpoint: str) -> None:
    """Raise ConfigError for an invalid URL, or one that would expose the token."""
    url = urlsplit(endpoint)
    host = url.hostname or ""
    if url.scheme not in ("http", "https") or not host or url.username or url.password or url.query:
        raise ConfigError(
            "--endpoint: expected an address such as https://hub.example.org, without a user name or password"
        )
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if url.scheme == "http" and not loopback:
        raise ConfigError(f"--endpoint http://{host}: the token would be sent unencrypted; use https")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; exits with a message if it is invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.tools.publish", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="the output of stage deploy: models/deploy")
    parser.add_argument("--to", required=True, metavar="OWNER/NAME", help="the repository; created if it is missing")
    parser.add_argument("--public", action="store_true", help="make the repository public (default: private)")
    parser.add_argument("--revision", default="main", metavar="BRANCH", help="the branch; created from main if missing")
    parser.add_argument("--endpoint", help="hub URL; default: HF_ENDPOINT, or huggingface.co if unset")
    parser.add_argument("--license", default="unknown", help="the hub's id for the weights' license, for example mit")
    parser.add_argument(
        "--language", nargs="+", default=["en", "code"], help="languages of the model's data; default: en code"
    )
    parser.add_argument("--replace", action="store_true", help="replace the repository's existing files")
    parser.add_argument("--dry-run", action="store_true", help="only check and list the files; contact no hub")
    return parser.parse_args(arguments)


def run(chosen: argparse.Namespace) -> str:
    """Check everything that can be checked, then publish. Returns the text to print. Raises StagecoachError."""
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.utils import disable_progress_bars, validate_repo_id

    if "HF_HUB_DISABLE_XET" not in os.environ:
        constants.HF_HUB_DISABLE_XET = True  # read at each upload; the environment variable is read only on import
    try:
        validate_repo_id(chosen.to)
    except ValueError as error:
        raise ConfigError(f"--to: expected OWNER/NAME, got {chosen.to!r} ({error})") from error
    if not NAME.fullmatch(chosen.to):
        raise ConfigError(f"--to: expected OWNER/NAME, such as me/my-assistant, got {chosen.to!r}")
    endpoint = (chosen.endpoint or constants.ENDPOINT).rstrip("/")
    check_endpoint(endpoint)
    target = Target(chosen.to, chosen.revision, chosen.public)
    lineage = check(chosen.folder)
    numbers = measured(chosen.folder, lineage)
    text = card(chosen.folder, lineage, numbers, target, license=chosen.license, languages=chosen.language)
    files = contents(chosen.folder, text)
    total = f"{len(files)} files, {sum(map(size, files.values())):,} bytes"
    where = f"{target.repo} ({'public' if target.public else 'private'}, {target.branch}) at {endpoint}"
    if chosen.dry_run:
        listed = "".join(f"{size(content):>15,}  {name}\n" for name, content in sorted(files.items()))
        return f"{listed}{total} for {where}; nothing was sent\n"
    token = get_token()
    if token is None:
        raise ConfigError("no token: create one with write access in the hub's settings, and set HF_TOKEN")
    if not sys.stderr.isatty():
        disable_progress_bars()
    with explained(target, token):
        api = HfApi(endpoint=endpoint, token=token)
        message = f"stagecoach-{lineage['model']} {lineage.get('key', '')}".strip()
        url = publish(api, target, files, message=message, replace=chosen.replace)
    return f"published {total} to {where}\n{url}\n"


def main(arguments: list[str]) -> int:
    """Publish; returns an exit code from `errors.py`."""
    chosen = parse(arguments)
    try:
        sys.stdout.write(run(chosen))
    except StagecoachError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: not published; run again to resume\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
