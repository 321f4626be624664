"""How the admin API reads requests and writes answers: JSON of frozen values, errors in an operator's words."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import structlog
from quart import Quart, Request, Response, request
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from llmgw.errors import BadInput, LlmgwError
from llmgw.wire.apicommon import ApiError, ErrorReply

log = structlog.get_logger("llmgw.admin")

T = TypeVar("T", bound=msgspec.Struct)

#: The longest request body: a models.toml of thousands of models.
MOST_BYTES = 4 << 20
#: The longest a request may ask to be kept waiting, in seconds.
MOST_WAIT = 60.0

_encoder = msgspec.json.Encoder()


def answer(value: msgspec.Struct, status: int = 200) -> Response:
    return Response(_encoder.encode(value), status, content_type="application/json")


def line(value: msgspec.Struct) -> bytes:
    """One line of an ndjson stream."""
    return _encoder.encode(value) + b"\n"


def error_answer(error: LlmgwError) -> Response:
    response = answer(
        ErrorReply(error=ApiError(code=error.code, message=error.what, remedy=error.remedy)), error.http_status
    )
    if error.http_status == 401:
        response.headers["WWW-Authenticate"] = 'Bearer realm="llmgw"'
    return response


async def body(kind: type[T]) -> T:
    """The request's JSON body. Raises BadInput, naming the key that cannot be meant."""
    data = await request.get_data()
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"the request's body cannot be read: {error}", remedy="see docs/api.md") from None


def number(name: str, default: float, *, least: float = 0.0, most: float = float("inf")) -> float:
    """A query parameter that is a number. Raises BadInput."""
    text = request.args.get(name)
    if text is None or text == "":
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        bounds = f"from {least:g} to {most:g}" if most < float("inf") else f"of at least {least:g}"
        raise BadInput(f"{name}={text!r} cannot be meant", remedy=f"give a number {bounds}")
    return value


def flag(name: str) -> bool:
    """A query parameter that is yes or no; without a value it is yes."""
    return request.args.get(name, "no").lower() in ("", "1", "true", "yes", "on")


def answer_errors(app: Quart) -> None:
    """Let every error of a request end in the API's own JSON, whatever it was; nothing shows a traceback."""

    @app.errorhandler(LlmgwError)
    async def ours(error: LlmgwError) -> Response:
        return error_answer(error)

    @app.errorhandler(HTTPException)
    async def theirs(error: HTTPException) -> Response:
        status = error.code or 500
        message, remedy = _words(request, error)
        code = (error.name or "error").lower().replace(" ", "-")
        response = answer(ErrorReply(error=ApiError(code=code, message=message, remedy=remedy)), status)
        for name, value in error.get_headers():
            if name.lower() in ("allow", "retry-after"):
                response.headers[name] = value
        return response

    @app.errorhandler(Exception)
    async def unforeseen(error: Exception) -> Response:
        log.error("request failed", method=request.method, path=request.path, exc_info=error)
        return answer(
            ErrorReply(
                error=ApiError(
                    code="internal",
                    message=f"the plane failed while it answered: {type(error).__name__}",
                    remedy="see the plane's log (`journalctl -u llmgw-plane`) and report it",
                )
            ),
            500,
        )


def _words(request: Request, error: HTTPException) -> tuple[str, str]:
    if isinstance(error, RequestEntityTooLarge):
        return f"the body is longer than {MOST_BYTES >> 20} MiB", ""
    if error.code == 404:
        return f"nothing is served at {request.path!r}", "docs/api.md lists what is; is ctl newer than the plane?"
    if error.code == 405:
        return f"{request.method} is not for {request.path!r}", "docs/api.md lists what is"
    return (error.description or error.name).rstrip("."), ""
