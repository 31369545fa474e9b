"""The catalogue of the museum: every bug, and the tests that fail when the bug is put back.

A test that belongs to its module stays there; its docstring says that it is an exhibit. Not guaranteed: that a test
fails for its bug; that was checked manually, by putting each bug back.
"""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
HERE = "regressions/test_"
EXHIBITS = {
    "pad = EOS (huggingface/trl 1623)": [
        f"{HERE}batches.py::test_the_end_of_a_turn_is_trained_whatever_token_pads",
        f"{HERE}batches.py::test_a_tokenizer_that_pads_with_the_end_of_a_turn_is_refused",
    ],
    "last token by padding side (huggingface/trl 2778)": [
        f"{HERE}batches.py::test_a_reward_is_read_at_the_last_token_of_its_own_row"
    ],
    "double shift (huggingface/trl 44)": [f"{HERE}batches.py::test_a_token_is_scored_by_what_stands_before_it"],
    "dropout (huggingface/trl 744)": [
        f"{HERE}references.py::test_a_policy_in_training_says_twice_the_same",
        f"{HERE}references.py::test_dropout_is_refused_in_every_model_of_alignment",
    ],
    "mean of means (huggingface/trl 3021)": [
        f"{HERE}policy_gradients.py::test_a_gradient_is_over_the_step_s_tokens_however_they_are_cut"
    ],
    "padding in metrics (huggingface/trl 6121)": [
        f"{HERE}policy_gradients.py::test_numbers_of_an_answer_are_over_its_own_tokens"
    ],
    "score on pad, custom stop id (huggingface/trl 3750)": [
        f"{HERE}policy_gradients.py::test_a_score_stands_on_the_token_that_ended_the_answer_whichever_that_is"
    ],
    "reference in another dtype": [f"{HERE}references.py::test_the_reference_has_the_policy_s_dtype"],
    "reference reloaded from disk": [
        f"{HERE}references.py::test_the_reference_is_the_policy_that_was_loaded_and_is_not_read_again"
    ],
    "tool tokens trained (volcengine/verl 3960)": [f"{HERE}batches.py::test_what_a_tool_says_is_never_trained"],
    "empty output earns 1 (volcengine/verl 7853)": [
        f"{HERE}rewards.py::test_an_answer_without_code_passes_no_test",
        f"{HERE}rewards.py::test_an_answer_that_says_nothing_is_no_right_call_and_no_right_refusal",
    ],
    "unloadable reward model (hiyouga/LLaMA-Factory 947)": ["test_heads.py::test_what_was_saved_is_loaded_bit_for_bit"],
    "one-sided temperature (OpenRLHF/OpenRLHF 853)": [
        f"{HERE}references.py::test_every_log_probability_is_at_the_temperature_of_sampling"
    ],
    "no position ids (CarperAI/trlx 508)": [
        f"{HERE}batches.py::test_places_are_counted_from_the_start_of_each_text",
        f"{HERE}batches.py::test_the_sampler_counts_places_as_training_does",
    ],
    "all-zero mask": [
        f"{HERE}policy_gradients.py::test_no_token_at_all_is_a_zero_and_not_a_nan",
        f"{HERE}policy_gradients.py::test_an_answer_without_tokens_leaves_the_others_as_they_are",
        f"{HERE}policy_gradients.py::test_a_critic_without_tokens_gives_no_advantage_and_no_loss",
    ],
    "smoothing ignored": [
        "test_objectives_pairs.py::test_a_constant_that_is_allowed_changes_the_loss",
        "test_objectives_pairs.py::test_a_constant_that_the_loss_does_not_read_is_refused",
    ],
    "returns reset at tool tokens": [
        "test_objectives_policy_by_hand.py::test_gae_by_hand",
        "test_objectives_policy_by_hand.py::test_deleting_masked_tokens_changes_no_number",
    ],
    "whitening one token": ["test_objectives_policy_by_hand.py::test_one_token_alone_is_not_whitened"],
    "lost part as 0": [
        "test_rewards.py::test_a_part_that_is_not_known_makes_the_whole_unknown",
        "test_estimators.py::test_an_answer_without_a_score_teaches_nothing_and_moves_nobody_s_baseline",
    ],
    "weights ignored": ["test_rewards.py::test_a_total_is_the_weighted_sum_held_within_ten"],
}


def docstring(name: str) -> str:
    """The docstring of a test "file.py::test", on one line."""
    path, _, test = name.partition("::")
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == test]
    assert len(found) == 1, f"{name}: expected one such test, found {len(found)}"
    return " ".join((ast.get_docstring(found[0]) or "").split())


@pytest.mark.parametrize("bug", EXHIBITS)
def test_every_bug_has_its_tests_which_name_it(bug: str) -> None:
    assert EXHIBITS[bug]
    for name in EXHIBITS[bug]:
        assert f"Bug museum: {bug}" in docstring(name)


def test_every_test_of_the_museum_is_in_the_catalogue() -> None:
    known = {name for names in EXHIBITS.values() for name in names}
    for path in (TESTS / "regressions").glob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and path.name != Path(__file__).name:
                assert f"regressions/{path.name}::{node.name}" in known
