"""Drafts by prompt lookup: the tokens that followed the last few where they stood before are likely to follow again.

    Drafter(prompt).guess(8) -> up to 8 tokens, which one step of the model then checks all at once

Prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding) is speculative decoding (Leviathan et al.
2022, arXiv:2211.17192) without a second model. A draft token is accepted where it equals the token that the position's
own uniform number samples, so an answer is the same with drafts and without, at any temperature.

Code and tool calls repeat earlier text. Where a text does not, drafts cost time: after a failed draft the row waits 1,
then 2, 4, ... tokens before it tries again.
"""

from collections.abc import Iterable

DRAFT = 8  # tokens of a draft
MATCHED = (3, 2)  # how many last tokens are looked up, the longer match first
# checking DRAFT tokens takes as long as up to PAYS more steps (docs/LOG.md): a draft with fewer accepted ones fails
PAYS = 2
LONGEST_WAIT = 64


class Drafter:
    """The text of one request so far, with an index of its pairs and triples of tokens."""

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids: list[int] = []
        self.after: dict[tuple[int, ...], int] = {}  # a pair or triple -> the position behind its last occurrence
        self.failures = self.wait = 0
        for token in ids:
            self._append(token)

    def hear(self, token: int) -> None:
        """Append a generated token."""
        self.wait = max(0, self.wait - 1)
        self._append(token)

    def guess(self, most: int) -> list[int]:
        """At most `most` and DRAFT tokens that may come next; a repeating text is drafted to keep repeating."""
        if self.wait or most < 1:
            return []
        for length in MATCHED:
            begin = self.after.get(tuple(self.ids[-length:]))
            if begin is not None:
                period = len(self.ids) - begin
                return [self.ids[begin + index % period] for index in range(min(most, DRAFT))]
        return []

    def judge(self, right: int) -> None:
        """Adapt the wait to how many tokens of the last draft were accepted."""
        self.failures = 0 if right >= PAYS else self.failures + 1
        self.wait = min(2**self.failures // 2, LONGEST_WAIT)

    def _append(self, token: int) -> None:
        end = len(self.ids)
        for length in MATCHED:
            if end >= length:
                self.after[tuple(self.ids[end - length :])] = end
        self.ids.append(token)
