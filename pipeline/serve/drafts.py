"""Drafts by looking up: what followed the last few tokens where they stood before is guessed to follow again.

    Drafter(prompt).guess(8) -> up to 8 tokens, which one step of the model then checks all at once

Prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding), a kind of speculative decoding (Leviathan et
al. 2022, arXiv:2211.17192) without a second model. A guess is kept as long as it is what the place's own uniform number
samples, so a text is the same with drafts and without, at any temperature. Code and tool calls repeat what was said
before; where a text does not, drafts cost: after one that fails the row waits 1, then 2, 4, ... tokens before it tries
again.
"""

from collections.abc import Iterable

DRAFT = 8  # tokens of a guess
MATCHED = (3, 2)  # so many last tokens are looked up, the longer first
# a check of DRAFT tokens takes as long as up to PAYS steps more (docs/LOG.md): a guess with fewer right ones fails
PAYS = 2
LONGEST_WAIT = 64


class Drafter:
    """The text of one request so far, and where its pairs and triples stood last."""

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids: list[int] = []
        self.after: dict[tuple[int, ...], int] = {}  # some last tokens -> where what followed them begins
        self.failures = self.wait = 0
        for token in ids:
            self._append(token)

    def hear(self, token: int) -> None:
        """One more token was said."""
        self.wait = max(0, self.wait - 1)
        self._append(token)

    def guess(self, most: int) -> list[int]:
        """What may come next, at most `most` and DRAFT tokens; a piece that is being repeated is guessed to go on."""
        if self.wait or most < 1:
            return []
        for length in MATCHED:
            begin = self.after.get(tuple(self.ids[-length:]))
            if begin is not None:
                period = len(self.ids) - begin
                return [self.ids[begin + place % period] for place in range(min(most, DRAFT))]
        return []

    def judge(self, right: int) -> None:
        """Learn how many tokens of the last guess were right."""
        self.failures = 0 if right >= PAYS else self.failures + 1
        self.wait = min(2**self.failures // 2, LONGEST_WAIT)

    def _append(self, token: int) -> None:
        end = len(self.ids)
        for length in MATCHED:
            if end >= length:
                self.after[tuple(self.ids[end - length :])] = end
        self.ids.append(token)
