"""Asking an engine how it is, over its own HTTP, and what the answers mean.

Asking and judging are apart: `ask` returns one of a few words, `judge` is pure and decides over time. Refused is
one thing, slow is another: an engine under load may take long for everything, and restarting it for that loses all
its work (EN10).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum

import attrs
import httpx

from llmgw.node.engines import Asking


class Answer(Enum):
    """REFUSED: nobody listens. SLOW: connected, but no answer in time. UNWELL: the engine says so. WELL: it serves."""

    REFUSED = "nobody listens"
    SLOW = "no answer in time"
    UNWELL = "it says that it is not well"
    WELL = "well"


@attrs.frozen
class Counters:
    """Work as the engine's metrics tell it: requests in it, and a count of tokens that grows while it works."""

    requests: float
    tokens: float


@attrs.frozen
class Patience:
    """How long what is borne, in seconds or in a number of times in a row.

    `hung`: without any answer; `stalled`: with requests in it and not one token made. Of a replica of several nodes
    a token is asked for after every `probe` seconds in which nobody had one made, and it may take `token` seconds:
    behind a long prompt it waits.
    """

    period: float = 5.0
    refused: int = 3
    hung: float = 300.0
    stalled: float = 300.0
    probe: float = 15.0
    token: float = 120.0


@attrs.frozen
class Course:
    """How it went so far: what `judge` remembers from one asking to the next."""

    last: Answer = Answer.WELL
    in_a_row: int = 0
    well_at: float = -math.inf
    counters: Counters | None = None
    moved_at: float = -math.inf


@attrs.frozen
class Dead:
    """The engine must be given up, and why."""

    code: str
    text: str
    remedy: str = ""


def judge(
    course: Course, answer: Answer, counters: Counters | None, now: float, asking: Asking, patience: Patience
) -> tuple[Course, Dead | None]:
    """Add one answer to the course. Death is only what no load explains, or what lasted beyond all patience."""
    in_a_row = course.in_a_row + 1 if answer is course.last else 1
    well_at = now if answer is Answer.WELL or course.well_at == -math.inf else course.well_at
    moved_at = course.moved_at
    if answer is not Answer.WELL or _moves(counters, course.counters, asking):
        moved_at = now
    after = Course(answer, in_a_row, well_at, counters or course.counters, moved_at)
    if answer is Answer.REFUSED and in_a_row >= patience.refused:
        return after, Dead("not-listening", "its process lives but nobody listens on its port", "look at its log")
    if answer is Answer.UNWELL and in_a_row >= asking.dead_after:
        return after, Dead(
            "engine-dead", f"it says of itself that it is not well, {in_a_row} times in a row", "look at its log"
        )
    if answer is not Answer.WELL and now - well_at >= patience.hung:
        return after, Dead(
            "hung", f"it has not answered for {now - well_at:.0f} s", "look at its log and at its GPUs' problems"
        )
    if now - moved_at >= patience.stalled:
        holds = "shows no counters of its work" if counters is None else f"holds {counters.requests:.0f} requests"
        words = f"it {holds} and has not made a token for {now - moved_at:.0f} s"
        return after, Dead("stalled", words, "look at its log and at its GPUs' problems")
    return after, None


def _moves(now: Counters | None, before: Counters | None, asking: Asking) -> bool:
    """Whether an engine works, or has nothing to do. Where it shows no counters (they can be switched off) only a token
    tells: unknown is no progress, unless there is nothing to be asked."""
    if now is None:
        return not asking.made or not asking.token
    return now.requests <= 0 or before is None or now.tokens != before.tokens


#: How many times in a row an engine must fail at a token before it is given up, and the pause between, in seconds.
TOKENS_FAILED = 2
TOKEN_AGAIN = 1.0


def unproved(
    answer: Answer, took: float, before: Counters | None, after: Counters | None, failed: int, within: float
) -> Dead | None:
    """Whether an engine that was asked for a token for the `failed`th time in vain, for `took` seconds, is dead. Pure.

    /health stays 200 when another member has died, so only tokens count. A slow one is death at once, for its deadline
    is above what load explains, unless others' tokens were made meanwhile.
    """
    if answer is Answer.WELL:
        return None
    if answer is Answer.SLOW and took >= within:
        if before is not None and after is not None and after.tokens != before.tokens:
            return None
        words = f"it made no token within {within:.0f} s"
    elif failed < TOKENS_FAILED:
        return None
    else:
        said = "it hung up" if answer is Answer.SLOW else answer.value
        words = f"it makes no tokens any more ({said}, {failed} times in a row)"
    return Dead("token-failed", words, "a member of the replica or what joins them may be gone: look at all their logs")


def counted(metrics: str, asking: Asking) -> Counters | None:
    """Requests and tokens from Prometheus text; None when the series are not there."""
    wanted = {*asking.running, *asking.waiting, *asking.made}
    sums: dict[str, float] = {}
    for line in metrics.splitlines():
        name = line.split("{", 1)[0].split(" ", 1)[0]
        if name not in wanted:
            continue
        words = line[line.rfind("}") + 1 if "{" in line else len(name) :].split()
        try:
            sums[name] = sums.get(name, 0.0) + float(words[0])
        except (ValueError, IndexError):
            continue
    requests = [sums[name] for name in (*asking.running, *asking.waiting) if name in sums]
    tokens = [sums[name] for name in asking.made if name in sums]
    if not requests or not tokens or not all(map(math.isfinite, (*requests, *tokens))):
        return None
    return Counters(sum(requests), sum(tokens))


def served(body: object) -> Iterable[str]:
    """The names in an answer of /v1/models."""
    data = body.get("data") if isinstance(body, dict) else None
    return (
        [str(entry["id"]) for entry in data if isinstance(entry, dict) and "id" in entry]
        if isinstance(data, list)
        else []
    )


class Line:
    """One engine's HTTP. Use as a block; the connection is kept between askings."""

    def __init__(self, asking: Asking, address: str, port: int) -> None:
        self.asking = asking
        host = f"[{address}]" if ":" in address else address
        # No proxy of the environment, no certificates: the engine is on this machine.
        self._client = httpx.AsyncClient(
            base_url=f"http://{host}:{port}",
            trust_env=False,
            verify=False,
            timeout=asking.timeout,
            follow_redirects=False,
        )

    async def __aenter__(self) -> Line:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ask(self, within: float | None = None) -> Answer:
        """How are you? `within` seconds, else as long as this engine may take."""
        return await self._answer("GET", self.asking.health, within=within)

    async def serves(self, model: str) -> tuple[Answer, tuple[str, ...]]:
        """Whether it lists the model, and everything that it lists."""
        try:
            response = await self._client.get(self.asking.models)
            names = tuple(served(response.json())) if response.status_code == 200 else ()
        except (httpx.HTTPError, ValueError) as error:
            return _word(error), ()
        return (Answer.WELL if model in names else Answer.UNWELL), names

    async def token(self, model: str, within: float) -> Answer:
        """Let it make one token. A refusal of the kind of request is no illness: some models only embed."""
        body = {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        return await self._answer("POST", self.asking.completions, body, within)

    async def counters(self) -> Counters | None:
        if not self.asking.made:
            return None
        try:
            response = await self._client.get(self.asking.metrics)
        except httpx.HTTPError:
            return None
        return counted(response.text, self.asking) if response.status_code == 200 else None

    async def _answer(self, method: str, path: str, body: object = None, within: float | None = None) -> Answer:
        try:
            response = await self._client.request(
                method, path, json=body, timeout=self.asking.timeout if within is None else within
            )
        except httpx.HTTPError as error:
            return _word(error)
        return Answer.WELL if response.status_code < 500 or response.status_code == 501 else Answer.UNWELL


def _word(error: Exception) -> Answer:
    match error:
        case httpx.ConnectTimeout() | httpx.TimeoutException():
            return Answer.SLOW
        case httpx.ConnectError():
            return Answer.REFUSED
        case httpx.NetworkError() | httpx.RemoteProtocolError():
            return Answer.SLOW  # it hung up in the middle: if it is dying, its end is noticed by itself
    return Answer.UNWELL
