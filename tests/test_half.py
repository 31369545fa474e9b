"""Training in bf16 on a CPU: each hand-written part, and the whole model, against the plain formula in float64."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.learning.losses import next_token
from pipeline.model import lora, transformer
from pipeline.model.cache import KVCache
from pipeline.model.config import ModelConfig
from pipeline.model.cpu import attention, layers, native, primitives
from pipeline.model.cpu.layers import ragged_attention
from pipeline.model.layers import Branches, Documents, Layout, Line, Masked, Padded, Rows, attention_plan
from pipeline.model.lora import AdapterConfig
from pipeline.model.transformer import Transformer

ROUNDING = 0.02  # relative error of a part in bf16
CONFIG = ModelConfig(
    vocab_size=128,
    width=48,
    layers=2,
    heads=6,
    kv_heads=2,
    head_dim=16,
    d_ff=80,
    max_context=1280,
    rope_theta=1e4,
    tied=True,
)
LENGTHS = {
    "one document": (640,),
    "full rows": (256, 256, 256),
    "as they come": (3, 120, 1, 200, 129, 47, 128, 90, 60),
    "shorter than a tile": (5, 9),
    "longer than what is kept": (700, 40),
}


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(
    found: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor], dtypes: list[torch.dtype]
) -> None:
    """Value and gradients of `found` on inputs rounded to their dtypes, against those of `plain` in float64."""
    given = [x.to(dtype).requires_grad_() for x, dtype in zip(inputs, dtypes, strict=True)]
    exact = [x.detach().double().requires_grad_() for x in given]
    out, expected = found(*given), plain(*exact)
    above = drawn(99, *expected.shape)
    gradients = torch.autograd.grad(out, given, above.to(out.dtype))
    wanted = torch.autograd.grad(expected, exact, above)
    for got, want, dtype in zip((out, *gradients), (expected, *wanted), (out.dtype, *dtypes), strict=True):
        assert got.dtype == dtype
        assert (got.double() - want).norm() <= ROUNDING * want.norm()


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@pytest.mark.parametrize("piece", [1, 2**17])
def test_a_product_behind_a_norm_is_the_plain_formula(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primitives, "AT_ONCE", piece)
    inputs = [drawn(0, 30, 32), 1 + drawn(1, 32) / 4, drawn(2, 24, 32), drawn(3, 40, 32)]
    close(
        lambda x, weight, *matrices: layers.normed_product(x, weight, 1e-6, *matrices),
        lambda x, weight, *matrices: norm(x, weight) @ torch.cat(matrices).T,
        inputs,
        [torch.float32] * 4,
    )


def test_a_norm_before_frozen_matrices_hands_the_gradient_on() -> None:
    x, weight, matrix = drawn(0, 9, 8).float().requires_grad_(), torch.ones(8), drawn(1, 4, 8).float()
    layers.normed_product(x, weight, 1e-6, matrix).float().sum().backward()
    exact = x.detach().double().requires_grad_()
    (norm(exact, weight.double()) @ matrix.double().T).sum().backward()
    assert x.grad is not None and exact.grad is not None
    assert (x.grad - exact.grad).norm() <= ROUNDING * exact.grad.norm()


def test_a_product_and_a_gated_unit_are_the_plain_formulas() -> None:
    close(
        layers.product,
        lambda x, matrix: x @ matrix.T,
        [drawn(0, 30, 16), drawn(1, 8, 16)],
        [layers.BF16, torch.float32],
    )
    close(
        layers.gated,
        lambda x: functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
        [drawn(2, 30, 24)],
        [layers.BF16],
    )


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1)])
def test_attention_in_tiles_is_that_within_each_document(
    lengths: tuple[int, ...], causal: bool, heads: int, kv_heads: int
) -> None:
    """With norms and rotation, on a line that need not fill its last tile."""
    tokens, size = sum(lengths), 16
    angles = drawn(3, tokens, 1, size // 2)
    cos, sin = angles.cos(), angles.sin()

    def plain(x: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        q, k, v = x.split([heads, kv_heads, kv_heads], dim=1)
        q, k = turned(norm(q, queries), cos, sin), turned(norm(k, keys), cos, sin)
        return ragged_attention(q, k, v, lengths, causal=causal).flatten(1)

    def found(x: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        plan = attention.plan(lengths, causal, heads)
        return layers.attention(x, cos.float(), sin.float(), (queries, keys), 1e-6, heads, plan)

    inputs = [drawn(4, tokens, heads + 2 * kv_heads, size), 1 + drawn(5, size) / 4, 1 + drawn(6, size) / 4]
    close(found, plain, inputs, [layers.BF16, torch.float32, torch.float32])


TREES = {  # lengths, before, parents
    "a pair": ((300, 40), (0, 250), (0, 0)),
    "groups": ((150, 40, 1, 60, 90, 30, 2), (0, 140, 149, 100, 0, 88, 30), (0, 0, 1, 0, 3, 4, 5)),
    "prompts that begin alike": ((20, 200, 50, 180, 50, 50), (0, 20, 190, 20, 170, 180), (0, 0, 1, 0, 3, 4)),
    "longer than what is kept": ((700, 40), (0, 650), (0, 0)),
}


@pytest.mark.parametrize(("lengths", "before", "parents"), TREES.values(), ids=TREES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1)])
def test_attention_in_a_tree_is_that_of_each_document_alone(
    lengths: tuple[int, ...], before: tuple[int, ...], parents: tuple[int, ...], heads: int, kv_heads: int
) -> None:
    """Value and gradients; the reference computes every document from its first token on."""
    tokens, size = sum(lengths), 16
    rows: list[Tensor] = []  # for each document, its tokens' places on the line
    for length, shared, parent in zip(lengths, before, parents, strict=True):
        own = torch.arange(length) + sum(lengths[: len(rows)])
        rows.append(torch.cat([rows[parent][:shared], own]) if shared else own)
    angles = drawn(3, tokens, 1, size // 2)
    cos, sin = angles.cos(), angles.sin()

    def plain(x: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        q, k, v = x.split([heads, kv_heads, kv_heads], dim=1)
        q, k = turned(norm(q, queries), cos, sin), turned(norm(k, keys), cos, sin)
        alone = [
            ragged_attention(q[row], k[row], v[row], (len(row),), causal=True)[-n:] for row, n in zip(rows, lengths)
        ]
        return torch.cat(alone).flatten(1)

    def found(x: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        plan = attention.tree_plan(lengths, before, parents, heads)
        return layers.attention(x, cos.float(), sin.float(), (queries, keys), 1e-6, heads, plan)

    inputs = [drawn(4, tokens, heads + 2 * kv_heads, size), 1 + drawn(5, size) / 4, 1 + drawn(6, size) / 4]
    close(found, plain, inputs, [layers.BF16, torch.float32, torch.float32])


def test_a_tree_multiplies_no_keys_of_other_branches() -> None:
    """64 answers of 128 tokens to one prompt of 128: all tiles but the first have the keys of two tiles."""
    plan = attention.tree_plan((256, *(128,) * 63), (0, *(128,) * 63), (0,) * 64, 4)
    assert sum(len(group.mask) for group in plan.groups) == 65
    assert {group.mask.shape[-1] for group in plan.groups} == {128, 256}


@pytest.fixture
def in_cpp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if native.compiler() is None:
        pytest.skip("no C++ compiler")
    native.load(tmp_path_factory.getbasetemp() / "native")
    yield
    native.unload()


@pytest.mark.usefixtures("in_cpp")
def test_the_pieces_in_cpp_are_the_plain_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    for lengths in LENGTHS.values():
        test_attention_in_tiles_is_that_within_each_document(lengths, True, 3, 1)
        test_attention_in_tiles_is_that_within_each_document(lengths, False, 4, 2)
    test_a_common_part_of_all_values_leaves_no_gradient_in_the_scores()
    for tree in TREES.values():
        test_attention_in_a_tree_is_that_of_each_document_alone(*tree, 4, 2)
    monkeypatch.setattr(native, "has_attention_blocks", lambda: False)  # as without AMX: in tiles
    test_attention_in_tiles_is_that_within_each_document((3, 120, 1, 200, 60), True, 4, 2)
    for tree in TREES.values():
        test_attention_in_a_tree_is_that_of_each_document_alone(*tree, 4, 2)
    test_a_product_behind_a_norm_is_the_plain_formula(1, monkeypatch)
    test_a_product_and_a_gated_unit_are_the_plain_formulas()
    logits, targets = drawn(7, 9, 40).to(layers.BF16), torch.arange(7)
    e, sums, total = primitives.exponentials(logits.clone(), targets)
    exact = logits[:7].double()
    expected = exact - exact.amax(-1, keepdim=True)
    torch.testing.assert_close(e[:7].double(), expected.exp(), atol=0, rtol=2**-8)
    torch.testing.assert_close(sums[:7].double(), expected.exp().sum(-1, keepdim=True), atol=0, rtol=1e-6)
    assert not e[7:].any() and sums[7:].eq(1).all()
    torch.testing.assert_close(
        total.double(), functional.cross_entropy(exact, targets, reduction="sum"), atol=0, rtol=1e-6
    )


@pytest.mark.usefixtures("in_cpp")
def test_attention_in_blocks_is_the_same_in_two_threads_and_without_padding() -> None:
    if not native.has_attention_blocks():
        pytest.skip("no AMX")
    x, flat = drawn(0, 320, 5, 64).to(layers.BF16), torch.zeros(320, 1, 32)
    plan = attention.plan((70, 60), True, 3)
    assert isinstance(plan, attention.BlockPlan)
    threads = torch.get_num_threads()

    def found(tokens: int) -> tuple[Tensor, Tensor]:
        part = x[:tokens].clone().requires_grad_()
        out = layers.attention(part, flat[:tokens] + 1, flat[:tokens], None, 1e-6, 3, plan)
        above = torch.ones_like(out)
        above[130:] = 0
        return out[:130].detach(), torch.autograd.grad(out, part, above)[0][:130]

    try:
        results = []
        for count, tokens in ((1, 130), (1, 192), (2, 130)):
            torch.set_num_threads(count)
            results.append(found(tokens))
    finally:
        torch.set_num_threads(threads)
    (out, grad), (padded, of_padded), (shared, of_shared) = results
    assert torch.equal(out, padded) and torch.equal(grad, of_padded) and torch.equal(out, shared)
    torch.testing.assert_close(grad, of_shared, atol=1e-2, rtol=2**-7)  # a sum in another order, rounded
    with pytest.raises(AssertionError, match="shorter line"):
        found(320)


def test_attention_without_head_norms_only_rotates() -> None:
    angles = drawn(3, 20, 1, 8)

    def plain(x: Tensor) -> Tensor:
        q, k, v = x.split([2, 1, 1], dim=1)
        q, k = (turned(part, angles.cos(), angles.sin()) for part in (q, k))
        return ragged_attention(q, k, v, (20,), causal=True).flatten(1)

    def found(x: Tensor) -> Tensor:
        cos, sin = angles.cos().float(), angles.sin().float()
        return layers.attention(x, cos, sin, None, 1e-6, 2, attention.plan((20,), True, 2))

    close(found, plain, [drawn(4, 20, 4, 16)], [layers.BF16])


def test_a_common_part_of_all_values_leaves_no_gradient_in_the_scores() -> None:
    """sum(do o) is subtracted in float32, so a large constant in the values cancels without rounding errors."""
    x = drawn(0, 64, 4, 16)
    x[:, 3] = 100.0
    x = x.to(layers.BF16).requires_grad_()
    flat = torch.zeros(64, 1, 8)
    out = layers.attention(x, flat + 1, flat, None, 1e-6, 2, attention.plan((64,), True, 2))
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert grad[:, :3].abs().max() <= 1e-3 * grad[:, 3].abs().max()


@pytest.mark.parametrize("config", [CONFIG, ModelConfig(**{**vars(CONFIG), "qk_norm": False, "kv_heads": 6})])
@pytest.mark.parametrize("documents", [True, False])
def test_a_model_trains_in_bf16_as_it_does_in_float32(config: ModelConfig, documents: bool) -> None:
    model = Transformer(config, torch.Generator().manual_seed(0))
    ids = torch.randint(0, 128, (3, 131), generator=torch.Generator().manual_seed(5))
    line = (torch.arange(131) // 41).expand(3, 131) if documents else None
    weights = drawn(6, 3, 131, 48).float()

    def gradients(half_precision: bool) -> dict[str, Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half_precision):
            hidden = model.hidden(ids, documents=line)
        (hidden.float() * weights).sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    exact, rounded = gradients(False), gradients(True)
    assert exact.keys() == rounded.keys()
    for name, value in exact.items():
        assert (rounded[name] - value).norm() <= 0.03 * value.norm(), name


def test_rows_that_begin_alike_train_in_bf16_as_each_row_alone_in_float64() -> None:
    """Gradients of log-probabilities, rewards and the like are no further off than for rows that share nothing."""
    model = Transformer(CONFIG, torch.Generator().manual_seed(0))
    ids = torch.randint(0, 128, (6, 150), generator=torch.Generator().manual_seed(5))
    ids[1:3, :90], ids[4, :70], ids[5] = ids[0, :90], ids[3, :70], ids[3]
    documents = torch.arange(6)[:, None].expand(6, 150)
    weights = drawn(6, 6, 150, 48)

    def gradients(model: Transformer, documents: Tensor | None, half_precision: bool) -> dict[str, Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half_precision):
            hidden = model.hidden(ids, documents=documents)
        (hidden.double() * weights).sum().backward()
        return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}

    layout = Line.of(documents, True, ids).layout
    assert isinstance(layout, Branches) and layout.before.count(0) == 2
    tree, alone = gradients(model, documents, True), gradients(model, None, True)
    exact = gradients(model.double(), None, False)
    for name, value in exact.items():
        assert (tree[name] - value).norm() <= 1.1 * (alone[name] - value).norm() + 1e-3 * value.norm(), name
        assert (tree[name] - value).norm() <= 0.03 * value.norm(), name


def test_all_of_plain_projections_in_bf16_goes_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """So do frozen passes and documents that share a beginning; float32 and decoding keep the other operations."""
    calls: list[str] = []
    for name in ("attention", "gated"):
        whole = getattr(layers, name)
        monkeypatch.setattr(layers, name, lambda *given, own=name, whole=whole: calls.append(own) or whole(*given))
    ids, alone = torch.zeros(1, 20, dtype=torch.long), torch.zeros(1, 20, dtype=torch.int32)

    def called(model: Transformer, ids: Tensor, documents: Tensor, *, half_precision: bool = True) -> set[str]:
        calls.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=half_precision):
            model(ids, documents=documents)
        return set(calls)

    model = Transformer(CONFIG, torch.Generator().manual_seed(0))
    assert called(model, ids, alone) == {"attention", "gated"}
    assert called(model, ids, alone, half_precision=False) == set()
    assert called(model, ids.expand(2, 20), alone.expand(2, 20)) == {"attention", "gated"}
    with torch.no_grad():
        assert called(model, ids, alone) == {"attention", "gated"}
        calls.clear()
        with torch.autocast("cpu", torch.bfloat16):
            model(ids, cache=KVCache(CONFIG, 1, dtype=torch.float32, device=ids.device))
        assert not calls
    lora.attach(model, AdapterConfig(rank=2, alpha=4.0), torch.Generator().manual_seed(0))
    assert called(model, ids, alone) == {"attention", "gated"}
    with lora.disabled(model):
        assert called(model, ids, alone) == {"attention", "gated"}
    lora.detach(model)
    lora.attach(model, AdapterConfig(rank=2, alpha=4.0, dropout=0.5), torch.Generator().manual_seed(0))
    assert called(model, ids, alone) == {"gated"}  # its adapters are on the projections of attention alone
    lora.detach(model)
    lora.attach(model, AdapterConfig(rank=2, alpha=4.0, dora=True), torch.Generator().manual_seed(0))
    assert called(model.eval(), ids, alone) == {"gated"}


def test_the_plan_of_a_layout_is_that_of_its_documents() -> None:
    def plan_of(layout: Layout, tokens: int) -> attention.Plan | None:
        return attention_plan(layout, tokens, 2)

    documents = Documents((4, 5), causal=True)
    assert plan_of(documents, 9) is plan_of(Padded(documents, 9), 128) is attention.plan((4, 5), True, 2)
    assert plan_of(Rows(3, causal=False), 12) is attention.plan((4, 4, 4), False, 2)
    assert plan_of(Padded(Rows(2, causal=True), 10), 128) is attention.plan((5, 5), True, 2)
    assert plan_of(Masked(torch.ones(1, 1, 4, 4, dtype=torch.bool)), 4) is None
    branches = Branches((4, 2), (0, 3), (0, 0), torch.arange(9))
    assert plan_of(branches, 6) is attention.tree_plan((4, 2), (0, 3), (0, 0), 2)


def test_few_products_of_few_shapes_whatever_the_lengths_are() -> None:
    """oneDNN compiles a kernel for each shape, so lengths that differ by a token must give the same shapes."""
    shapes = {
        tuple(
            (len(group.keys), group.mask.shape[0]) for group in attention.plan((300 + n, 300 - n, 424), True, 4).groups
        )
        for n in range(5)
    }
    assert len(shapes) == 1
    assert transformer.EVEN_ROWS == attention.TILE  # so a line padded to EVEN_ROWS needs no more padding here


class Products(TorchDispatchMode):
    """Counts the matrix products that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operation is torch.ops.aten.mm.default
        return operation(*args, **(kwargs or {}))


def gradients_and_products(policy: Any, dropout: float) -> tuple[list[Tensor], int]:
    """Gradients of the loss of a packed batch in bf16, and how many matrix products they took."""
    model = Transformer(CONFIG, torch.Generator().manual_seed(0)).train()
    model.checkpointing, model.dropout = policy, dropout
    ids = torch.randint(0, 128, (2, 300), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[0] * 120 + [1] * 180, [0] * 300])
    torch.manual_seed(0)
    with Products() as products:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(
                ids,
                documents=documents,
                select=torch.ones_like(ids, dtype=torch.bool),
                head=lambda hidden, table, _: next_token(hidden, table, ids.flatten()),
            )
        loss.backward()
    return [x.grad for x in model.parameters() if x.grad is not None], products.count


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("policy", "again"), [("full", 8), ("every_2", 4), ("selective", 0)])
def test_layers_that_are_computed_again_give_the_same_bits(policy: str, again: int, dropout: float) -> None:
    """Each of two layers has four products; "selective" keeps them unchanged, even those inside autograd functions."""
    plain, products = gradients_and_products("none", dropout)
    found, more = gradients_and_products(policy, dropout)
    assert len(plain) == len(list(Transformer(CONFIG).parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert more - products == again


@pytest.mark.usefixtures("in_cpp")
@pytest.mark.parametrize(("policy", "again"), [("full", 8), ("every_2", 4), ("selective", 0)])
def test_layers_with_pieces_in_cpp_are_computed_again_alike(policy: str, again: int) -> None:
    """A write from C++ does not count as a new version, so autograd would not notice that a kept tensor changed."""
    test_layers_that_are_computed_again_give_the_same_bits(policy, again, 0.0)
