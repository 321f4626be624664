"""Something that happened, as a value that pure code can return."""

from __future__ import annotations

from msgspec import Struct


class Event(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened. `clock` is the plane's wall clock, `kind` a stable word, `text` a whole sentence.

    `subject` is "node:<id>", "model:<name>", "shard:<id>" or "plane". `id` grows by one with each event and
    is 0 until the event was added.
    """

    kind: str
    subject: str
    text: str
    data: dict[str, str] = {}
    clock: float = 0.0
    id: int = 0
