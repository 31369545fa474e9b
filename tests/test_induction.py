"""Fresh weights with induction heads: they copy before the first step, and plain fresh weights do not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn.functional import cross_entropy

from pipeline.learning import gates
from pipeline.model.config import ModelConfig
from pipeline.model.initialization import induction_heads, relate_variants
from pipeline.model.transformer import Transformer
from pipeline.run.errors import ConfigError

CONF = Path(__file__).parents[1] / "conf" / "model"
NANO = ModelConfig(**yaml.safe_load((CONF / "nano.yaml").read_text()))


def fresh(config: ModelConfig, *, heads: bool) -> Transformer:
    """A model from a fixed seed."""
    draws = torch.Generator().manual_seed(0)
    model = Transformer(config, draws)
    if heads:
        induction_heads(model, draws)
    return model.train(False)


def said_twice(config: ModelConfig, length: int = 60) -> Tensor:
    """(8, 2 * length) rows whose second half repeats the first; no token occurs twice in a half."""
    draws = torch.Generator().manual_seed(1)
    half = torch.stack([torch.randperm(config.vocab_size, generator=draws)[:length] for _ in range(8)])
    return torch.cat((half, half), dim=1)


@torch.no_grad()
def halves(model: Transformer, ids: Tensor) -> tuple[float, float]:
    """Loss per token over the first and the second half of the rows."""
    losses = cross_entropy(model(ids)[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    middle = ids.size(1) // 2
    return losses[:, : middle - 1].mean().item(), losses[:, middle:].mean().item()


def test_the_second_mention_is_expected_before_any_training() -> None:
    ids = said_twice(NANO)
    first, second = halves(fresh(NANO, heads=True), ids)
    assert second < first - 0.7
    first, second = halves(fresh(NANO, heads=False), ids)
    assert abs(second - first) < 0.2


def test_the_right_token_ranks_among_the_first_before_any_training() -> None:
    ids = said_twice(NANO)

    def median_rank(*, heads: bool) -> float:
        with torch.no_grad():
            logits = fresh(NANO, heads=heads)(ids)[:, 60:-1]
        right = logits.gather(-1, ids[:, 61:, None])
        return (logits > right).sum(-1).float().median().item()

    assert median_rank(heads=True) < 300 < 1500 < median_rank(heads=False)


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_size_starts_near_a_uniform_guess(path: Path) -> None:
    """Each size is cut to two layers, a narrow MLP (which starts at zero) and a small vocabulary; the gate of the first
    loss decides.
    """
    shape = {key: value for key, value in yaml.safe_load(path.read_text()).items() if key != "memory"}
    config = ModelConfig(**(shape | {"layers": 2, "d_ff": 64, "vocab_size": 4096, "max_context": 128}))
    ids = torch.randint(0, 4096, (4, 65), generator=torch.Generator().manual_seed(1))
    model = fresh(config, heads=True)
    with torch.no_grad():
        nats = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).item()
    gates.first_loss(nats, model, from_scratch=True)
    gates.causal(model)


def test_the_heads_depend_on_the_generator_alone() -> None:
    one, two = fresh(NANO, heads=True).state_dict(), fresh(NANO, heads=True).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"layers": 1}, "two layers"), ({"attention": "bidirectional"}, "causal"), ({"rope_theta": 50.0}, "rope_theta")],
)
def test_a_shape_without_room_for_them_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fresh(replace(NANO, **change), heads=True)  # type: ignore[arg-type]


def test_variants_of_a_word_start_half_alike_and_others_do_not() -> None:
    spelled = [b"Oslo", b"_oslo", b" Oslo", b"Rome", b' "', b"", b"a", b" 7", b" 8"]
    spelled += [b"%d" % n for n in range(10, NANO.vocab_size + 1)]
    draws = torch.Generator().manual_seed(0)
    model = Transformer(NANO, draws)
    before = model.model.embed_tokens.weight.clone()
    relate_variants(model, spelled, draws)
    table = model.model.embed_tokens.weight
    alike = torch.nn.functional.cosine_similarity
    assert all(0.3 < alike(table[i], table[j], dim=0) < 0.7 for i, j in ((0, 1), (0, 2), (1, 2)))
    assert torch.equal(table[3:], before[3:])
    assert abs(table[:3].std().item() - NANO.initializer_range) < 0.006
