"""The product-key memory that ours is compared with: it finds the best of all n * n values, and looks at no other
token.
"""

import torch

from benchmarks import memory as benchmark
from benchmarks.memory_product_keys import ProductKeys, ProductKeysConfig
from pipeline.memory.config import MemoryConfig
from pipeline.model.lora import AdapterConfig
from tests.memory_models import NANO, TINY


def product_keys(**changes: int) -> ProductKeys:
    config = ProductKeysConfig(**{"layers": (0, 2), "keys": 9, "half": 5, "heads": 2, "top_k": 6} | changes)  # type: ignore[arg-type]
    made = ProductKeys(config, TINY, torch.Generator().manual_seed(0))
    for reader in made.readers.values():
        reader.o_proj.weight.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))  # type: ignore[union-attr, operator]
    return made


def test_the_best_sums_are_those_of_an_enumeration() -> None:
    made = product_keys()
    reader = made.readers["0"]
    normed = torch.randn(11, 32, generator=torch.Generator().manual_seed(2))
    which, weights = reader.choose(normed)  # type: ignore[operator]
    q = reader.q_proj(normed).unflatten(-1, (2, 2, 5))  # type: ignore[operator]
    for token in range(11):
        for head in range(2):
            first, second = (reader.keys[half, head] @ q[token, head, half] for half in (0, 1))  # type: ignore[index]
            best = (first[:, None] + second).flatten().topk(6)
            assert which[token, head].tolist() == best.indices.tolist()
            torch.testing.assert_close(weights[token, head], best.values.softmax(0))
    read = torch.stack([sum(weights[n, h] @ made.values.weight[which[n, h]] for h in range(2)) for n in range(11)])  # type: ignore[misc]
    x = torch.randn(11, 32, generator=torch.Generator().manual_seed(2))
    gate = torch.nn.functional.silu(reader.gate_proj(reader.norm(x)))  # type: ignore[operator]
    which, weights = reader.choose(reader.norm(x))  # type: ignore[operator]
    read = torch.stack([sum(weights[n, h] @ made.values.weight[which[n, h]] for h in range(2)) for n in range(11)])  # type: ignore[misc]
    torch.testing.assert_close(reader(x, made.values), reader.o_proj(gate * read))  # type: ignore[operator]


def test_its_costs_are_its_weights_and_a_fresh_one_changes_nothing() -> None:
    made = product_keys()
    assert made.config.parameters(TINY.width) == made.num_parameters()
    fresh = ProductKeys(made.config, TINY, torch.Generator().manual_seed(0))
    x = torch.randn(4, 32)
    assert torch.equal(fresh.reads(x, None, None, None)(0, x), x)  # type: ignore[arg-type]
    assert torch.equal(made.reads(x, None, None, None)(1, x), x), "a layer that has none"  # type: ignore[arg-type]
    assert not torch.equal(made.reads(x, None, None, None)(2, x), x)  # type: ignore[arg-type]


def test_contenders_cost_what_the_memory_costs() -> None:
    config = MemoryConfig(rows=1024, chapters=63, shared=1, top_k=8, layers="all", gated=True)
    found = benchmark.contenders(config, NANO)
    ours = found["memory"]
    for name, one in found.items():
        cost = "flops" if "FLOPs" in name else "parameters"
        if "rows" not in name:
            assert abs(getattr(one, cost) / getattr(ours, cost) - 1) < 0.02, name
    assert {name for name in found if "rows" in name} == {"memory, 256 rows", "memory, 4096 rows"}
    assert found["memory, 4096 rows"].parameters - ours.parameters == 3072 * NANO.width


def test_beside_an_adapter_all_have_it_and_adapters_alone_are_as_large() -> None:
    config = MemoryConfig(rows=1024, chapters=63, shared=1, top_k=8, layers="all", gated=True)
    adapter = AdapterConfig(rank=8, alpha=16, targets=("q_proj", "v_proj"))
    plain, found = benchmark.contenders(config, NANO), benchmark.contenders(config, NANO, adapter)
    extra = NANO.layers * 8 * ((192 + 192) + (192 + 64))  # a down and an up matrix each
    for name, one in found.items():
        if name.startswith("lora"):
            assert one.adapter is None
        else:
            assert one.adapter == adapter and one.parameters == plain[name].parameters + extra
            assert one.flops == plain[name].flops + 2 * extra
    assert abs(found["lora"].parameters / found["memory"].parameters - 1) < 0.02
    assert abs(found["lora, equal FLOPs"].flops / found["memory"].flops - 1) < 0.02
