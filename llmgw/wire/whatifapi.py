"""What the admin API answers to a what-if: the values that the plane encodes as JSON and `ctl` reads.

Every key is always there; fields are only ever added, each with a default. `at`, `begin` and `end` are seconds from
now, at the earliest: how long engines take to start is not known.
"""

from __future__ import annotations

from msgspec import Struct

from llmgw.wire.apicommon import API
from llmgw.wire.modelapi import ReasonView


class FateView(Struct, frozen=True, kw_only=True):
    """What becomes of one replica; `before` and `after` are its nodes by rank.

    `what`: "stays", "restarts", "moves", "replaced" (by the replica `by`), "starts", "stops", or "unplaced".
    One that "stays" has a `why` where it was to leave a node that is drained, and there is no room for it elsewhere.
    """

    model: str = ""
    replica: str = ""
    what: str = ""
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    by: str = ""
    at: float | None = None
    why: str = ""


class ShortView(Struct, frozen=True, kw_only=True):
    """A model with fewer ready replicas in the end than wanted and than now. `reasons` are those of the nearest nodes,
    `more_reasons` so many are left out."""

    model: str = ""
    wanted: int = 0
    before: int = 0
    after: int = 0
    reasons: tuple[ReasonView, ...] = ()
    more_reasons: int = 0
    smallest_change: str = ""


class GapView(Struct, frozen=True, kw_only=True):
    """A model that serves now and has no ready replica for a while; `end` is null where that is how it stays."""

    model: str = ""
    begin: float = 0.0
    end: float | None = None


class MomentView(Struct, frozen=True, kw_only=True):
    """Something that happens; `kind` is the event's that will say it."""

    at: float = 0.0
    kind: str = ""
    text: str = ""


class WhatIfReply(Struct, frozen=True, kw_only=True):
    """What would happen; nothing has been changed. `text` says the change in words.

    `seconds` is how long it takes beside the starts of engines. `complete` is false where it was not followed to its
    end. `restless`: the fleet is on its way now already, so that some of this happens anyway.
    """

    api: int = API
    text: str = ""
    replicas: tuple[FateView, ...] = ()
    short: tuple[ShortView, ...] = ()
    gaps: tuple[GapView, ...] = ()
    moments: tuple[MomentView, ...] = ()
    more_moments: int = 0
    seconds: float = 0.0
    complete: bool = True
    restless: bool = False
