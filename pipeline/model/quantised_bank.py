"""Banks in 8 or 4 bits, after training: numbers and one scale a row.

    s = max |row| / 127 (int4: / 7)      q = round(row / s), within +-127 (+-7; two to a byte)      |row - s q| <= s / 2

Rows are gathered first and made floats again after. Of a factorised bank the rows' factor is quantised, the other stays.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.model.memory import Bank, Memory

LEVELS = {8: 127, 4: 7}


class QuantisedBank(nn.Module):
    """N rows of M numbers in few bits; not trainable."""

    numbers: Tensor
    scales: Tensor

    def __init__(self, bank: Bank, bits: int) -> None:
        """Raises ValueError for other than 8 or 4 bits, and for rows that do not fill bytes."""
        super().__init__()
        if bits not in LEVELS:
            raise ValueError(f"quantise: expected 8 or 4 bits, got {bits}")
        rows = bank.rows.detach()
        if bits == 4 and rows.shape[1] % 2:
            raise ValueError(
                f"quantise: two numbers of 4 bits make a byte; expected rows of an even length, got {rows.shape[1]}"
            )
        self.bits = bits
        numbers, scales = quantise(rows, bits)
        self.register_buffer("numbers", numbers)
        self.register_buffer("scales", scales)
        self.factor = bank.factor

    def forward(self, which: Tensor | None = None) -> Tensor:
        """As `Bank.forward`."""
        numbers, scales = (self.numbers, self.scales) if which is None else (self.numbers[which], self.scales[which])
        rows = dequantise(numbers, scales, self.bits)
        return rows if self.factor is None else functional.linear(rows, self.factor)


def quantise(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Numbers (N, M) int8, or (N, M / 2) uint8 of two each, the even place low; and scales (N, 1)."""
    most = LEVELS[bits]
    scales = rows.abs().amax(1, keepdim=True) / most
    whole = (rows / scales.clamp_min(torch.finfo(rows.dtype).tiny)).round().clamp(-most, most).to(torch.int8)
    if bits == 8:
        return whole, scales
    raised = (whole + 8).to(torch.uint8)  # 1 to 15
    return raised[:, 0::2] | (raised[:, 1::2] << 4), scales


def dequantise(numbers: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The rows again, (..., M)."""
    if bits == 4:
        low, high = numbers & 15, numbers >> 4
        numbers = torch.stack([low, high], -1).flatten(-2).to(torch.int8) - 8
    return numbers.to(scales.dtype) * scales


def quantised(memory: Memory, bits: int) -> None:
    """Put all banks of a memory into so many bits. Raises ValueError."""
    for number, bank in enumerate(memory.bank):
        assert isinstance(bank, Bank), "quantised already"
        memory.bank[number] = QuantisedBank(bank, bits)
