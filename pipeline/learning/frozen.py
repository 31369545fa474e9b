"""How frozen weights are stored. One rule: `narrows`.

Not promised yet: anything but float32 (see `narrows`).
"""


def narrows(kind: str, precision: str) -> bool:
    """Whether frozen matrices lie in the 2 bytes that autocast would cast them to."""
    return False
