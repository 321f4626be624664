"""What can go wrong, in an operator's words.

Every error names the thing, what happened and what to do about it. The entry points print `str(error)`
and leave with `error.exit_status`; nothing else of an `LlmgwError` ever reaches a person.
"""

from __future__ import annotations

from typing import ClassVar


class LlmgwError(Exception):
    """Something an operator can act on."""

    exit_status: ClassVar[int] = 1
    #: A stable word for programs (`-o json`, the admin API's `error.code`).
    code: ClassVar[str] = "error"
    #: The HTTP status under which the admin API answers it.
    http_status: ClassVar[int] = 500

    def __init__(self, what: str, *, remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}" if self.remedy else self.what


class BadInput(LlmgwError):
    """A file, an argument or a request that cannot be meant."""

    exit_status, code, http_status = 2, "bad-input", 400


class NotFound(LlmgwError):
    """A name that nothing has."""

    exit_status, code, http_status = 3, "not-found", 404


class Conflict(LlmgwError):
    """What was asked does not fit what is."""

    exit_status, code, http_status = 4, "conflict", 409


class Refused(LlmgwError):
    """The other side knows who is asking, or does not, and will not do it."""

    exit_status, code, http_status = 5, "refused", 403


class Unavailable(LlmgwError):
    """Nobody who could answer can be reached now; trying again later may help."""

    exit_status, code, http_status = 6, "unavailable", 503


class AgentGone(Unavailable):
    """No agent is connected, or its stream ended while we waited."""

    code = "agent-gone"


class NotKeepingUp(Unavailable):
    """The queue of commands to one node is full (A9)."""

    code = "not-keeping-up"


class TooOld(Refused):
    """The agent does not have the feature that the request needs (A11)."""

    code, http_status = "too-old", 409


class TimedOut(LlmgwError):
    """A reply did not come within its deadline (A10)."""

    exit_status, code, http_status = 7, "timed-out", 504


class Failed(LlmgwError):
    """The node did what was asked, and it failed there; the words are the node's, and so is the code in `said`."""

    exit_status, code, http_status = 8, "failed", 502

    def __init__(self, what: str, *, remedy: str = "", said: str = "") -> None:
        super().__init__(what, remedy=remedy)
        self.said = said
