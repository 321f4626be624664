"""What every part of the admin API speaks of: its version, errors, problems and events."""

from __future__ import annotations

from msgspec import Struct

#: The version of the API, in its path and in every answer.
API = 1


# --- errors ------------------------------------------------------------------------------------------


class ApiError(Struct, frozen=True, kw_only=True):
    """What went wrong, in words, with a stable `code` for programs and what to do about it."""

    code: str = "error"
    message: str = ""
    remedy: str = ""


class ErrorReply(Struct, frozen=True, kw_only=True):
    error: ApiError = ApiError()


# --- problems ----------------------------------------------------------------------------------------


class ProblemView(Struct, frozen=True, kw_only=True):
    """Something wrong now. `age` since it was first seen; `acknowledged_for` what is left of an acknowledgement."""

    node: str = ""
    subject: str = ""
    code: str = ""
    grade: str = ""
    text: str = ""
    remedy: str = ""
    age: float = 0.0
    first_clock: float = 0.0
    acknowledged_for: float | None = None


class ProblemsReply(Struct, frozen=True, kw_only=True):
    api: int = API
    problems: tuple[ProblemView, ...] = ()


# --- events --------------------------------------------------------------------------------------------


class EventView(Struct, frozen=True, kw_only=True):
    """Something that happened. `id` grows and is never used twice."""

    id: int = 0
    clock: float = 0.0
    kind: str = ""
    subject: str = ""
    text: str = ""
    data: dict[str, str] = {}
