"""Who may use the admin API: an administrator's certificate, a bearer token, or a page's session for reading."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from typing import cast

import attrs
import structlog
from quart import Request

from llmgw.errors import LlmgwError, Refused
from llmgw.plane.admin.connection import Caller
from llmgw.plane.certs import Authority

log = structlog.get_logger("llmgw.admin")

#: The session's cookie. The prefix makes browsers insist on Secure, Path=/ and this very host.
COOKIE = "__Host-llmgw"
#: A working day; then the token is asked for again.
SESSION_SECONDS = 12 * 3600.0
_MOST_SESSIONS = 1000
_READING = frozenset({"GET", "HEAD"})


class Unauthenticated(Refused):
    """Nobody who may: no certificate, no token, or a wrong one."""

    code, http_status = "not-authenticated", 401


@attrs.frozen
class Session:
    who: str
    until: float
    still: Callable[[], bool]  # whether what it was opened with still opens


class Sessions:
    """Browsers that showed a token, by a hash of their cookie; forgotten when the plane restarts."""

    def __init__(self) -> None:
        self._open: dict[bytes, Session] = {}

    def open(self, who: str, now: float, still: Callable[[], bool]) -> str:
        """A new cookie for somebody."""
        self._open = {key: session for key, session in self._open.items() if session.until > now}
        while len(self._open) >= _MOST_SESSIONS:
            del self._open[next(iter(self._open))]  # the oldest
        cookie = secrets.token_urlsafe(32)
        self._open[_digest(cookie)] = Session(who, now + SESSION_SECONDS, still)
        return cookie

    def who(self, cookie: str, now: float) -> str | None:
        session = self._open.get(_digest(cookie))
        return session.who if session is not None and session.until > now and session.still() else None

    def close(self, cookie: str) -> None:
        self._open.pop(_digest(cookie), None)


def _digest(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode()).digest()


def caller_of(request: Request) -> Caller:
    """Who is at the other end of the request's connection."""
    return cast(Caller, request.scope["state"]["caller"])


#: Whose bearer token this is; None: nobody's. It takes the same time for every wrong one.
Administrator = Callable[[str], str | None]


def whose(administrator: Administrator, token: str) -> str | None:
    """As `administrator` says; tokens that cannot be read now are nobody's, and a stranger hears nothing of why."""
    try:
        return administrator(token)
    except LlmgwError as error:
        log.error("administrators' tokens cannot be read: none counts", error=str(error))
        return None


def identify(
    request: Request, administrator: Administrator, authority: Authority, sessions: Sessions, now: float
) -> str:
    """Who asks, for the log. Raises Unauthenticated or Refused, saying which door was tried and why it stayed shut."""
    if (authorization := request.headers.get("Authorization")) is not None:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated(
                f"the authorization scheme {scheme!r} is not understood", remedy="send `Authorization: Bearer TOKEN`"
            )
        who = whose(administrator, token.strip())
        if who is None:
            raise Unauthenticated(
                "the token is not an administrator's token of this plane",
                remedy="take the one in admin.token in the plane's directory",
            )
        return who
    cookie = request.cookies.get(COOKIE)
    if cookie and (who := sessions.who(cookie, now)) is not None:
        if request.method not in _READING:
            raise Refused("a page's session may only read", remedy="use `llmgw ctl`, or send a bearer token")
        return who
    peer = caller_of(request).peer
    if peer is None:
        raise Unauthenticated(
            "no token and no client certificate were given",
            remedy="send `Authorization: Bearer TOKEN` (admin.token in the plane's directory)",
        )
    if peer.role != "admin":
        raise Refused(f"the certificate of {peer.name!r} is for a {peer.role}, not for an administrator")
    if why := authority.refused(peer):
        raise Refused(why)
    return f"certificate {peer.name}"
