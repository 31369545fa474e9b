"""EvalPlus against our server: its code generation with the openai backend, and its evaluation, on a local HumanEval+.

Runs in the harness's own environment; HUMANEVAL_OVERRIDE_PATH names the file. argv[1] is JSON from the driver: {url,
model, folder, answer: the file to write}. Writes: {"eval": {task: [{base_status, plus_status, solution}]}, "raw":
{task: the raw answer}, "sent": the fields of a request}. EvalPlus runs the code in processes without a sandbox.
"""

import json
import sys
from pathlib import Path
from typing import Any

from evalplus.codegen import run_codegen
from evalplus.evaluate import evaluate
from evalplus.gen.util import openai_request

FACTS: dict[str, Any] = json.loads(sys.argv[1])


def main() -> None:
    """Generate greedily, evaluate, and merge EvalPlus's two files into one."""
    sent: dict[str, Any] = {}
    request = openai_request.make_request

    def recorded(client: Any, **asked: Any) -> Any:
        create = client.chat.completions.create

        def note(**fields: Any) -> Any:
            sent.update(fields)
            return create(**fields)

        client.chat.completions.create = note
        try:
            return request(client, **asked)
        finally:
            client.chat.completions.create = create

    openai_request.make_request = recorded
    samples = run_codegen(
        model=FACTS["model"],
        dataset="humaneval",
        root=FACTS["folder"],
        backend="openai",
        base_url=f"{FACTS['url']}/v1",
        greedy=True,
    )
    evaluate(dataset="humaneval", samples=samples, parallel=1)
    results = json.loads(Path(samples.replace(".jsonl", "_eval_results.json")).read_text(encoding="utf-8"))
    raw = [json.loads(line) for line in Path(samples.replace(".jsonl", ".raw.jsonl")).read_text().splitlines()]
    answers = {row["task_id"]: row["solution"] for row in raw}
    found = {"eval": results["eval"], "raw": answers, "sent": sent}
    Path(FACTS["answer"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
