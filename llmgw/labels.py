"""What labels of nodes may be called and hold, whoever writes them: so that NAME=VALUE and NAME- can be read again."""

from __future__ import annotations

from llmgw.errors import BadInput

_LONGEST_NAME, _LONGEST_VALUE = 128, 256


def check_label(name: str, value: str = "") -> None:
    """Raises BadInput for a name or a value that no label can have."""
    unclear = any(c.isspace() or not c.isprintable() or c in "=," for c in name)
    if unclear or not 0 < len(name) <= _LONGEST_NAME or name.endswith("-"):
        raise BadInput(
            f"{name[:60]!r} cannot be a label's name",
            remedy=f"use 1 to {_LONGEST_NAME} characters without spaces, '=' and ',', and no '-' at the end",
        )
    if len(value) > _LONGEST_VALUE or not value.isprintable():
        raise BadInput(
            f"the label {name} cannot have the value {value[:60]!r}",
            remedy=f"use up to {_LONGEST_VALUE} characters in one line",
        )
