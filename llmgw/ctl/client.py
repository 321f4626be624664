"""Speaks HTTPS with a plane; every failure becomes an error that an operator can act on."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import attrs
import httpx
import msgspec

from llmgw import errors
from llmgw.ctl.target import Target
from llmgw.errors import BadInput, Conflict, Failed, LlmgwError, NotFound, Refused, TimedOut, Unavailable
from llmgw.tls import client_context, explain
from llmgw.wire.apicommon import API, ApiError, ErrorReply

T = TypeVar("T")

#: Seconds to reach the plane, and to wait for an answer that the plane owes at once.
CONNECT_WITHIN = 5.0
ANSWER_WITHIN = 15.0

Query = Mapping[str, str | int | float]


@attrs.frozen
class Answer:
    """A good answer: its bytes as they came, and a way to read them."""

    data: bytes

    def read(self, kind: type[T]) -> T:
        """The answer as a value. Raises LlmgwError for what cannot be read as one."""
        try:
            return msgspec.json.decode(self.data, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise LlmgwError(
                f"the plane's answer cannot be read: {error}",
                remedy="are ctl and the plane of very different versions?",
            ) from None


class Plane:
    """The plane's admin API."""

    def __init__(self, target: Target, http: httpx.AsyncClient) -> None:
        self._target = target
        self._http = http

    async def get(self, path: str, query: Query | None = None, *, within: float = ANSWER_WITHIN) -> Answer:
        """An answer within so many seconds beyond those that the plane itself may take."""
        return await self._send("GET", path, query=query, within=within)

    async def post(
        self, path: str, body: object = None, *, query: Query | None = None, within: float = ANSWER_WITHIN
    ) -> Answer:
        """Change something. A body of bytes goes as it is, anything else as JSON."""
        content = body if isinstance(body, bytes) else msgspec.json.encode({} if body is None else body)
        return await self._send("POST", path, query=query, content=content, within=within)

    async def delete(self, path: str) -> Answer:
        return await self._send("DELETE", path)

    @asynccontextmanager
    async def lines(
        self, path: str, body: object, *, silent_after: float = 30.0
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """An answer that comes line by line for as long as the block reads it; leaving the block ends it there too."""
        timeout = httpx.Timeout(silent_after, connect=CONNECT_WITHIN)
        content = msgspec.json.encode(body)
        try:
            async with self._http.stream("POST", f"/api/v{API}/{path}", content=content, timeout=timeout) as response:
                if not response.is_success:
                    await response.aread()
                    raise _refusal(response)
                yield (line.encode() async for line in response.aiter_lines() if line)
        except httpx.HTTPError as error:
            raise self._unreachable(error, silent_after) from None

    async def _send(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        content: bytes | None = None,
        within: float = ANSWER_WITHIN,
    ) -> Answer:
        timeout = httpx.Timeout(within, connect=CONNECT_WITHIN)
        try:
            response = await self._http.request(
                method, f"/api/v{API}/{path}", params=dict(query or {}), content=content, timeout=timeout
            )
        except httpx.HTTPError as error:
            raise self._unreachable(error, within) from None
        if response.is_success:
            return Answer(response.content)
        raise _refusal(response)

    def _unreachable(self, error: httpx.HTTPError, within: float) -> LlmgwError:
        where = f"the plane at {self._target.url}"
        tls = _tls_error(error)
        if isinstance(tls, ssl.SSLCertVerificationError):
            return Refused(explain(tls, where), remedy="give the plane's CA with --ca (ca.pem in its directory)")
        if tls is not None:
            return Refused(explain(tls, where))
        match error:
            case httpx.ConnectTimeout():
                return Unavailable(f"{where} does not answer", remedy="is the address right, and no firewall between?")
            case httpx.ConnectError():
                return Unavailable(
                    f"{where} cannot be reached: {_words(error)}", remedy="is llmgw-plane running there?"
                )
            case httpx.TimeoutException():
                return TimedOut(f"{where} did not answer within {within:g} s")
            case _:
                plain = self._target.url.startswith("http://")
                return Unavailable(
                    f"{where} ended the connection: {_words(error).rstrip('.')}",
                    remedy="does it speak TLS? write https://"
                    if plain
                    else "is it restarting, or is this not its admin port?",
                )


@asynccontextmanager
async def connected(target: Target) -> AsyncIterator[Plane]:
    """A plane to ask. Nothing is sent before the first question; leaving the block ends what is under way."""
    verify: ssl.SSLContext | bool = False
    if target.url.startswith("https://"):
        if target.ca is None:
            raise BadInput(
                "the plane's CA is not given", remedy="use --ca or LLMGW_CA with ca.pem from the plane's directory"
            )
        verify = client_context(target.ca, target.cert)
    headers = {"Authorization": f"Bearer {target.token}"} if target.token else {}
    # No proxy from the environment: it is set for the outside, and the plane is inside.
    async with httpx.AsyncClient(base_url=target.url, verify=verify, headers=headers, trust_env=False) as http:
        yield Plane(target, http)


def _refusal(response: httpx.Response) -> LlmgwError:
    try:
        found = msgspec.json.decode(response.content, type=ErrorReply).error
        if not response.headers.get("Content-Security-Policy"):
            # OpenAI's errors look like ours.
            found = ApiError(message=f"it answered {found.message!r}: is this the gateway, and not the admin port?")
    except (msgspec.MsgspecError, UnicodeDecodeError):
        found = ApiError(
            message=f"it answered {response.status_code}, and not as a plane does: is this its admin port?"
        )
    return _kind(found.code, response.status_code)(found.message, remedy=found.remedy)


def error_of(said: ApiError) -> LlmgwError:
    """The error that a plane tells inside an answer."""
    return _kind(said.code, 0)(said.message, remedy=said.remedy)


_BY_CODE = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, LlmgwError) and kind is not LlmgwError
}
_BY_STATUS: dict[int, type[LlmgwError]] = {
    400: BadInput,
    401: Refused,
    403: Refused,
    404: NotFound,
    409: Conflict,
    413: BadInput,
    502: Failed,
    503: Unavailable,
    504: TimedOut,
}


def _kind(code: str, status: int) -> type[LlmgwError]:
    return _BY_CODE.get(code) or _BY_STATUS.get(status, LlmgwError)


def _tls_error(error: BaseException | None) -> ssl.SSLError | None:
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _words(error: BaseException) -> str:
    """What the operating system said at the bottom of it, when it said anything."""
    return _system_words(error) or str(error) or type(error).__name__


def _system_words(error: BaseException | None) -> str:
    while error is not None:
        if isinstance(error, BaseExceptionGroup):
            return next(filter(None, map(_system_words, error.exceptions)), "")
        if isinstance(error, OSError) and error.errno is not None:
            # A name that cannot be resolved has a negative number and words of its own.
            return os.strerror(error.errno) if error.errno > 0 else str(error.strerror)
        error = error.__cause__ or error.__context__
    return ""
