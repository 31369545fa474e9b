"""BERTScore of answers: the package's own numbers from a local directory, and what is said without one."""

import json
from pathlib import Path

import pytest

from pipeline.evaluation.likelihood import bertscore
from pipeline.run.errors import ConfigError

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat", "road", "it", "rains", "in", "oslo", "rome", "today"]


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a BERT model directory"):
        bertscore(["a"], ["b"], str(tmp_path), None)


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
def test_it_is_the_package_s_number_at_the_layer_that_is_asked_for(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    package = pytest.importorskip("bert_score")
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    transformers.BertTokenizer(str(tmp_path / "vocab.txt"), model_max_length=62).save_pretrained(tmp_path)
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32
    )
    transformers.set_seed(3)
    transformers.BertModel(config).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 3
    answers, references = (
        ["the cat sat on the mat", "it rains in oslo"],
        ["a dog ran on the road", "it rains in rome today"],
    )
    for layer in (None, 1):
        _, _, expected = package.score(answers, references, model_type=str(tmp_path), num_layers=layer or 3)
        assert bertscore(answers, references, str(tmp_path), layer) == pytest.approx(expected.tolist(), abs=1e-6)
    assert bertscore(references, references, str(tmp_path), None) == pytest.approx([1.0, 1.0], abs=1e-5)
