"""bfcl-eval against our server: its function-calling handler for OpenAI's API, and its evaluation, on local files.

Runs in the harness's own environment. argv[1] is JSON from the driver: {data: the folder of BFCL's files, project: a
folder to work in, categories, answer: the file to write} and one task:

    {"task": "prompts"}                        -> {id: {messages, tools}} as the handler sends them
    {"task": "run", "models": {name: served}}  -> {name: {id: {valid, error, answer}}} for the models' answers
    {"task": "judge", "models": {name: any}}   -> the same for answers that are already in result/

Model names must not contain "_", which bfcl-eval turns into "/" in a folder's name.

bfcl-eval's table of models imports the clients of eleven vendors, including sentence-transformers. It is replaced by a
table of ours, in which all models have the handler for OpenAI's API; the rest of the package is untouched.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

FACTS: dict[str, Any] = json.loads(sys.argv[1])
PROJECT = Path(FACTS["project"])
os.environ["BFCL_PROJECT_ROOT"] = str(PROJECT)  # read when the package is imported


@dataclass
class Model:
    """A row of bfcl-eval's table of models, with the fields that bfcl-eval reads."""

    model_name: str
    model_handler: Any = None
    display_name: str = "stagecoach"
    url: str = ""
    org: str = ""
    license: str = ""
    input_price: float | None = None
    output_price: float | None = None
    is_fc_model: bool = True
    underscore_to_dot: bool = True  # as for OpenAI's models: names are sent with "_" for "."


TABLE = ModuleType("bfcl_eval.constants.model_config")
TABLE.MODEL_CONFIG_MAPPING = {name: Model(served) for name, served in FACTS["models"].items()}  # pyright: ignore
sys.modules[TABLE.__name__] = TABLE

from bfcl_eval.constants import eval_config  # noqa: E402

eval_config.PROMPT_PATH = Path(FACTS["data"])
eval_config.POSSIBLE_ANSWER_PATH = Path(FACTS["data"]) / "possible_answer"

from bfcl_eval._llm_response_generation import main as generate  # noqa: E402
from bfcl_eval.constants.enums import ModelStyle  # noqa: E402
from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI  # noqa: E402
from bfcl_eval.eval_checker.eval_runner import main as evaluate  # noqa: E402
from bfcl_eval.model_handler.api_inference.openai_completion import OpenAICompletionsHandler  # noqa: E402
from bfcl_eval.model_handler.utils import convert_to_tool  # noqa: E402
from bfcl_eval.utils import load_dataset_entry  # noqa: E402


def prompts() -> dict[str, Any]:
    """The requests that the handler sends, by id."""
    return {
        entry["id"]: {
            "messages": entry["question"][0],
            "tools": convert_to_tool(entry["function"], GORILLA_TO_OPENAPI, ModelStyle.OPENAI_COMPLETIONS),
        }
        for category in FACTS["categories"]
        for entry in load_dataset_entry(category)
    }


def ask(model: str) -> None:
    """Generate a model's answers greedily."""
    generate(
        SimpleNamespace(
            model=[model],
            test_category=FACTS["categories"],
            temperature=0.0,
            include_input_log=True,
            exclude_state_log=True,
            num_threads=1,
            result_dir=None,
            run_ids=False,
            allow_overwrite=True,
        )
    )


def verdicts(model: str) -> dict[str, Any]:
    """bfcl-eval's verdict on each answer of a model, by id, from the files that it wrote."""
    wrong = {row["id"]: row for row in _rows(PROJECT / "score" / model) if "id" in row}
    return {
        row["id"]: {
            "valid": row["id"] not in wrong,
            "error": str(wrong.get(row["id"], {}).get("error_type", "")),
            "answer": row["result"],
        }
        for row in _rows(PROJECT / "result" / model)
    }


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(folder.rglob("*.json")) for line in file.read_text().splitlines()]


def main() -> None:
    """Run one task and write its result to a file."""
    for model in TABLE.MODEL_CONFIG_MAPPING.values():
        model.model_handler = OpenAICompletionsHandler
    if FACTS["task"] == "prompts":
        found: dict[str, Any] = prompts()
    else:
        for model in FACTS["models"] if FACTS["task"] == "run" else ():
            ask(model)
        evaluate(list(FACTS["models"]), FACTS["categories"], None, None, partial_eval=True)
        found = {model: verdicts(model) for model in FACTS["models"]}
    Path(FACTS["answer"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
