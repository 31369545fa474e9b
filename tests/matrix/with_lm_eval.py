"""EleutherAI's lm-evaluation-harness against our server: `local-completions`, two tasks in local files, offline.

Runs in the harness's own environment. argv[1] is JSON from the driver: {url, key, model, tokenizer: a model's folder,
choices, questions: files, answer: the file to write}. Writes: {task: [{id, logprobs, acc, acc_norm} or {id, text,
exact_match}]}, and the payload of one request of each kind, as sent by the harness.
"""

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.models.openai_completions import LocalCompletionsAPI

FACTS: dict[str, Any] = json.loads(sys.argv[1])
PROMPT = "Question: {{question}}\nAnswer:"
NEW_TOKENS = 32
TASKS: list[dict[str, Any]] = [
    {
        "task": "choices",
        "output_type": "multiple_choice",
        "dataset_kwargs": {"data_files": {"test": FACTS["choices"]}},
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    {
        "task": "questions",
        "output_type": "generate_until",
        "dataset_kwargs": {"data_files": {"test": FACTS["questions"]}},
        "doc_to_target": "answer",
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "temperature": 0.0, "max_gen_toks": NEW_TOKENS},
        "filter_list": [{"name": "text", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}],
        "metric_list": [{"metric": "exact_match"}],
    },
]


class Recorded(LocalCompletionsAPI):
    """`local-completions`, keeping the payloads that it sends."""

    sent: dict[str, Any]

    def _create_payload(self, messages: Any, generate: bool = False, **settings: Any) -> dict[str, Any]:
        payload = super()._create_payload(messages, generate=generate, **settings)
        self.sent.setdefault("generate_until" if generate else "loglikelihood", payload)
        return payload


def main() -> None:
    """Run both tasks and write their samples to a file."""
    common = {"dataset_path": "json", "test_split": "test", "doc_to_text": PROMPT}
    model = Recorded(
        base_url=f"{FACTS['url']}/v1/completions",
        model=FACTS["model"],
        tokenizer=FACTS["tokenizer"],
        tokenizer_backend="huggingface",
        max_length=FACTS["context"],
        header={"Authorization": f"Bearer {FACTS['key']}"},
    )
    model.sent = {}
    results = lm_eval.simple_evaluate(model=model, tasks=[common | task for task in TASKS], bootstrap_iters=0)
    assert results is not None
    samples = results["samples"]
    found = {
        "choices": [
            {
                "id": sample["doc"]["id"],
                "logprobs": [float(value) for value, _ in sample["filtered_resps"]],
                "acc": sample["acc"],
                "acc_norm": sample["acc_norm"],
            }
            for sample in samples["choices"]
        ],
        "questions": [
            {"id": sample["doc"]["id"], "text": sample["filtered_resps"][0], "exact_match": sample["exact_match"]}
            for sample in samples["questions"]
        ],
        "sent": model.sent,
    }
    Path(FACTS["answer"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
