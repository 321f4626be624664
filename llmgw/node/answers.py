"""Which requests this agent answers, and by what (A11).

One table: the features that a Register announces are computed from it, so an agent cannot announce what it does
not answer. A handler is an async function of the request and of `say`, by which it reports that it goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog
from msgspec import Raw, Struct

from llmgw.errors import LlmgwError
from llmgw.wire.agent import Listening, Reply, RequestFailed, Working
from llmgw.wire.codec import encode
from llmgw.wire.control import Request, tag_of

log = structlog.get_logger("llmgw.answers")

Say = Callable[[Working | Listening], None]
#: A request's handler. The request type is the table's key, so the reply's type cannot be said here.
Handler = Callable[[Any, Say], Awaitable[Struct]]
Answers = Mapping[type[Request[Any]], Handler]


def features(answers: Answers) -> tuple[str, ...]:
    """What a Register announces: every feature that some handler in the table answers, sorted."""
    return tuple(sorted({kind.feature for kind in answers if kind.feature}))


async def answer(answers: Answers, request: Request[Any], say: Say) -> Reply | RequestFailed:
    """Do what was asked and wrap what came of it; an error becomes this request's failure and nothing else's."""
    handler = answers.get(type(request))
    number = request.request_id
    if handler is None:
        return RequestFailed(
            request_id=number, error=f"this agent does not answer {tag_of(request)!r}", code="unsupported"
        )
    try:
        value = await handler(request, say)
    except LlmgwError as error:
        return RequestFailed(request_id=number, error=str(error), code=error.code)
    except Exception as error:
        log.exception("request failed", request=tag_of(request))
        return RequestFailed(
            request_id=number,
            error=f"the agent failed at {tag_of(request)!r} ({type(error).__name__}: {error}); its log says more",
        )
    return Reply(request_id=number, value=Raw(encode(value)))
