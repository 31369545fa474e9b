"""The frozen copy that a policy is compared with: how it is lent, kept off the device, and released."""

import pytest
import torch

from pipeline.learning.reference import Reference
from pipeline.model import lora
from pipeline.model.lora import AdapterConfig
from pipeline.model.transformer import Transformer
from pipeline.run.errors import GateError

IDS = torch.arange(12)[None]


def moved(policy: Transformer) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1)


def test_a_copy_stays_where_the_policy_began(tiny_model: Transformer) -> None:
    with torch.no_grad():
        start = tiny_model(IDS)
    reference = Reference(tiny_model, adapted=False)
    moved(tiny_model)
    with reference.model() as frozen:
        assert torch.equal(frozen(IDS), start)
        assert not frozen(IDS).requires_grad
    reference.check()


def test_released_it_is_gone_and_was_checked(tiny_model: Transformer) -> None:
    reference = Reference(tiny_model, adapted=False)
    digest = reference.digest
    reference.release()
    reference.check()
    assert reference.digest == digest
    with pytest.raises(AssertionError, match="released"), reference.model():
        pass
    changed = Reference(tiny_model, adapted=False)
    with changed.model() as frozen:
        moved(frozen)
    with pytest.raises(GateError, match="the reference"):
        changed.release()


def test_with_an_adapter_releasing_keeps_the_policy_under_watch(tiny_model: Transformer) -> None:
    lora.attach(tiny_model, AdapterConfig(rank=2, alpha=4), torch.Generator().manual_seed(0))
    reference = Reference(tiny_model, adapted=True)
    reference.release()
    with torch.no_grad():
        tiny_model.model.norm.weight.add_(1.0)
    with pytest.raises(GateError, match="the reference"):
        reference.check()


def test_parked_it_goes_back_after_each_use(tiny_model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Reference(tiny_model, adapted=False)
    places: list[str] = []
    monkeypatch.setattr(Transformer, "to", lambda self, where: places.append(str(where)) or self)
    with reference.model(torch.device("meta")):
        assert places == ["meta"]
    assert places == ["meta"]
    reference.parked = True
    with reference.model(torch.device("meta")):
        pass
    assert places == ["meta", "meta", "cpu"]
