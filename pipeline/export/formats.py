"""What the export needs of a wing's own kind of model, which no other program runs: its directory, what else it has
than a `Transformer`, and the calls of the smoke test.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pipeline import wings
from pipeline.model.heads import RewardModel, TrunkModel
from pipeline.model.transformer import Transformer
from pipeline.run.types import JsonObject
from pipeline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pipeline.export.smoke import ServedModel


Exportable = Transformer | TrunkModel


class OwnFormat(Protocol):
    """What a wing offers as `export`: its own kind of model, which no other program runs."""

    WHAT: str  # the kind in the model card

    def opens(self, folder: Path) -> bool:
        """Whether a directory holds such a model."""
        ...

    def owns(self, model: object) -> bool:
        """Whether a model is such a one."""
        ...

    def load(self, folder: Path) -> tuple[TrunkModel, Tokenizer]:
        """The model of a directory and its tokenizer."""
        ...

    def save(self, folder: Path, model: Any, tokenizer: Tokenizer, lineage: JsonObject) -> None:
        """Write a model directory."""
        ...

    def check_same(self, model: Any, exported: Any, out: Path) -> None:
        """Raise GateError where two models differ besides their trunks."""
        ...

    def smoke_calls(self, server: "ServedModel", model: Any) -> int:
        """Calls to a server of the model; their number. Raises GateError."""
        ...


def own_formats() -> list[OwnFormat]:
    """Those of the wings."""
    return [offer() for offer in wings.each("export")]


def own_format(model: object) -> OwnFormat | None:
    """That of a model."""
    return next((own for own in own_formats() if own.owns(model)), None)


def trunk(model: Exportable) -> Transformer | RewardModel:
    """A model without what a wing puts around it."""
    return model if isinstance(model, Transformer | RewardModel) else model.trunk
