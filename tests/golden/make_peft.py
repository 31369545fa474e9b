"""Write peft.json: what peft makes of one small linear layer. Run from the repository's root:

    python tests/golden/make_peft.py        (peft as in the extra `dev`; CPU, float32, one thread)

Inputs are rounded to 9 digits first, so that the file has exactly the numbers that went in.
"""

import json
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor

SEED, IN, OUT, RANK, ALPHA, ROWS = 20, 6, 5, 2, 3, 4
CASES: dict[str, dict[str, Any]] = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}


def digits(tensor: Tensor) -> Any:
    """Nested lists of numbers with 9 digits, from which each float32 can be restored exactly."""
    return [digits(row) for row in tensor] if tensor.ndim else float(f"{float(tensor.detach()):.9g}")


def case(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Forward, gradients and merged weight of an adapter with nonzero weights."""
    generator = torch.Generator().manual_seed(SEED)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    linear = torch.nn.Linear(IN, OUT)
    linear.weight.data, linear.bias.data = drawn(OUT, IN), drawn(OUT)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["layer"], **options)
    model: Any = peft.get_peft_model(torch.nn.ModuleDict({"layer": linear}), config)  # pyright: ignore[reportArgumentType]
    layer = model.base_model.model["layer"]
    inputs = {"weight": linear.weight.detach().clone(), "bias": linear.bias.detach(), "x": drawn(ROWS, IN)}
    parameters = {n.replace(".default", ""): p for n, p in layer.named_parameters() if "lora_" in n}
    for key, parameter in parameters.items():
        parameter.data = drawn(*parameter.shape).abs() if "magnitude" in key else drawn(*parameter.shape)
        inputs[key] = parameter.detach()
    inputs["upstream"] = drawn(ROWS, OUT)  # the gradient of the output
    out = layer(inputs["x"])
    (out * inputs["upstream"]).sum().backward()
    expected = {"forward": out} | {f"grad.{key}": parameter.grad for key, parameter in parameters.items()}
    layer.merge()
    expected["merged"] = layer.get_base_layer().weight
    settings = {"r": RANK, "lora_alpha": ALPHA, "use_rslora": False, "use_dora": False} | options
    given, wanted = ({key: digits(tensor) for key, tensor in group.items()} for group in (inputs, expected))
    return {"name": name, **settings, "inputs": given, "expected": wanted}


if __name__ == "__main__":
    torch.set_num_threads(1)
    golden = {
        "oracle": "peft",
        "version": peft.__version__,
        "torch": torch.__version__.partition("+")[0],
        "call": "peft.tuners.lora.Linear.forward, .merge; gradients of sum(out * upstream)",
        "seed": SEED,
        "cases": [case(name, options) for name, options in CASES.items()],
    }
    path = Path(__file__).with_name("peft.json")
    path.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
