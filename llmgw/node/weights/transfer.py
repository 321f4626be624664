"""Brings one file: goes on where an earlier try stopped, and believes nothing before the digest is right."""

from __future__ import annotations

import os
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import attrs
import httpx
import structlog
import trio

from llmgw.backoff import Backoff
from llmgw.node.weights.errors import BrokenWeights, FetchFailed, Unreachable
from llmgw.node.weights.manifest import File, hash_of

log = structlog.get_logger(__name__)

#: Bytes that are hashed and written at once, in a thread.
PIECE = 1 << 20
_CATCH_UP = 32 << 20
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
_PASSING = frozenset({408, 409, 421, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})


class Gone(FetchFailed):
    """The file is not at its address (any more)."""


class Again(Exception):
    """A try that failed in a way that may pass. `after`: seconds that the other side asks for."""

    def __init__(self, words: str, after: float = 0.0) -> None:
        super().__init__(words)
        self.after = after


@attrs.frozen
class Patience:
    """When a source is given up: after so many seconds without one byte. Retries are spread by `backoff`.

    A connection on which nothing came for `silent` seconds is given up for another one. A server that says when to
    come back (429 and 503 with Retry-After) is obeyed for `bidden` seconds in all.
    """

    seconds: float = 120.0
    silent: float = 30.0
    bidden: float = 900.0
    backoff: Backoff = Backoff(base=1.0, cap=20.0)


async def patiently(
    work: Callable[[], Awaitable[bool]], patience: Patience, what: str, noted: Callable[[str], None]
) -> None:
    """Do `work` until it says that it is done, again and again while it fails in passing.

    It returns True when done, and False when it came further without being done. Raises Unreachable in the end.
    """
    attempt, moved_at, bidden = 0, trio.current_time(), 0.0
    while True:
        try:
            if await work():
                return
            attempt, moved_at, bidden = 0, trio.current_time(), 0.0
        except Again as again:
            waited = trio.current_time() - moved_at
            # Who says when to come back is there: that wait does not count, but it does not go on for ever either.
            after = min(again.after, patience.bidden - bidden)
            delay = patience.backoff.delay(attempt, random.random(), retry_after=after)
            if waited + delay - after > patience.seconds:
                raise Unreachable(
                    f"{what}: {again}; given up after {attempt + 1} tries in {waited:.0f} s",
                    remedy="what was fetched is kept; the next start goes on from there",
                ) from None
            noted(str(again))
            log.info("a fetch is tried again", what=what, attempt=attempt + 1, delay=round(delay, 1), why=str(again))
            attempt, moved_at, bidden = attempt + 1, moved_at + after, bidden + after
            await trio.sleep(delay)


class Partial:
    """A file that grows on the disk, and the digest of what is in it. Its methods block: call them in a thread."""

    def __init__(self, path: Path, file: File) -> None:
        """Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.file = path, file
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        self.size = os.fstat(self._handle).st_size
        #: As far as it ever came: a try that does not come further has brought nothing, however much it sent.
        self.furthest = self.size
        self.hashed = 0
        self._hash = hash_of(file)
        if self.size > file.size:
            self.empty()

    def close(self) -> None:
        os.close(self._handle)

    def catch_up(self) -> bool:
        """Hash another stretch of what was there already; False when all of it is hashed."""
        if self._hash is None:
            self.hashed = self.size
        data = os.pread(self._handle, min(_CATCH_UP, self.size - self.hashed), self.hashed)
        if self._hash is not None:
            self._hash.update(data)
        self.hashed += len(data)
        return self.hashed < self.size and bool(data)

    def append(self, data: bytes | bytearray) -> None:
        """Raises OSError, as on a full disk; what was written of it until then is taken back."""
        view = memoryview(data)
        done = 0
        try:
            while done < len(view):
                done += os.pwrite(self._handle, view[done:], self.size + done)
        except OSError:
            os.ftruncate(self._handle, self.size)
            raise
        if self._hash is not None:
            self._hash.update(view)
        self.size += done
        self.hashed = self.size

    def empty(self) -> None:
        os.ftruncate(self._handle, 0)
        self.size = self.hashed = 0
        self._hash = hash_of(self.file)

    def drop(self) -> None:
        """Remove it: there is nothing in it to go on from."""
        self.path.unlink(missing_ok=True)

    def advanced(self) -> bool:
        """Whether it has come further than ever before, since this was asked last."""
        before, self.furthest = self.furthest, max(self.furthest, self.size)
        return self.size > before

    @property
    def digest(self) -> str:
        return f"{self.file.digest.partition(':')[0]}:{self._hash.hexdigest()}" if self._hash is not None else ""

    def finish(self, whole: Path) -> tuple[int, int]:
        """Make it the file that it is, durably; its stamp."""
        os.fsync(self._handle)
        os.replace(self.path, whole)
        directory = os.open(whole.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        seen = os.fstat(self._handle)
        return seen.st_size, seen.st_mtime_ns


@attrs.frozen
class Way:
    """How a file is brought: by which client, from where, at which pace, with which patience; `moved` counts bytes."""

    client: httpx.AsyncClient
    url: str
    headers: Mapping[str, str]
    pace: Callable[[int], Awaitable[None]]
    patience: Patience
    moved: Callable[[int], None]
    noted: Callable[[str], None]


async def bring(way: Way, file: File, at: Path, whole: Path, what: str) -> tuple[int, int]:
    """Bring a file to `whole` by way of the partial file `at`; its stamp there.

    `moved` was told of what lies in `at` already. Raises FetchFailed, and OSError as of a full disk.
    """
    partial = await trio.to_thread.run_sync(Partial, at, file)
    try:
        while await trio.to_thread.run_sync(partial.catch_up):
            pass
        fresh = False
        while True:
            fresh = fresh or partial.size == 0
            await patiently(lambda: _some(way, partial), way.patience, f"{what}: {file.name}", way.noted)
            if partial.digest == file.digest:
                return await trio.to_thread.run_sync(partial.finish, whole)
            # What was there before may have been cut off by a power cut or be another file's; a fresh copy may not.
            got = partial.digest
            way.moved(-partial.size)
            await trio.to_thread.run_sync(partial.empty)
            partial.furthest = 0
            if fresh:
                raise BrokenWeights(
                    f"{what}: {file.name} came whole and is not what was announced: its digest is {got}, "
                    f"not {file.digest}",
                    remedy="see whether a proxy or mirror changes it; for https:// check the digest in the source",
                )
            log.warning("a partial file was no part of it: fetched anew", what=what, file=file.name)
            fresh = True
    except (FetchFailed, OSError):
        if partial.size == 0:
            await trio.to_thread.run_sync(partial.drop)
        raise
    finally:
        partial.close()


async def _some(way: Way, partial: Partial) -> bool:
    """One request for what is not there yet; whether all is there now. Raises Again, FetchFailed, OSError."""
    size = partial.file.size
    if partial.size == size:
        return True
    headers = {**way.headers, "Accept-Encoding": "identity"}
    if partial.size:
        headers["Range"] = f"bytes={partial.size}-"
    buffer, broken = bytearray(), ""

    async def flush() -> None:
        await trio.to_thread.run_sync(partial.append, bytes(buffer))
        way.moved(len(buffer))
        buffer.clear()

    async def start_over(words: str) -> None:
        way.moved(-partial.size)
        await trio.to_thread.run_sync(partial.empty)
        raise Again(words)

    try:
        async with way.client.stream("GET", way.url, headers=headers) as response:
            await _right(response, partial, way, start_over)
            async with _pieces(response) as pieces:
                async for data in pieces:
                    await way.pace(len(data))
                    buffer += data
                    if partial.size + len(buffer) > size:
                        await start_over(f"more came than the {size} bytes that were announced")
                    if len(buffer) >= PIECE:
                        await flush()
            await flush()
    except httpx.TransportError as error:
        await flush()
        broken = words_of(error)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise FetchFailed(f"{way.url} cannot be fetched: {error}") from None
    if partial.size < size and not partial.advanced():
        raise Again(broken or f"the answer ended after {partial.size} of {size} bytes")
    return partial.size == size


@asynccontextmanager
async def _pieces(response: httpx.Response) -> AsyncIterator[AsyncIterator[bytes]]:
    """The body as it comes. However the block ends, the client's generators have ended with it."""
    pieces = response.aiter_raw()
    try:
        yield pieces
    finally:
        # One generator reads from the next, down to the socket: only an end from below ends them all.
        with trio.CancelScope(shield=True) as ending, suppress(httpx.HTTPError):
            ending.cancel()
            async for _ in pieces:
                pass


async def _right(
    response: httpx.Response, partial: Partial, way: Way, start_over: Callable[[str], Awaitable[None]]
) -> None:
    """Go on only with an answer that begins where the partial file ends. An error's body is never taken for data."""
    status, size = response.status_code, partial.file.size
    host = response.url.host
    if status == 206:
        found = _RANGE.fullmatch(response.headers.get("content-range", ""))
        if found is None or int(found[1]) != partial.size or found[2] not in ("*", str(size)):
            await start_over(f"{host} sent another part than was asked for")
        return
    if status == 200:
        length = response.headers.get("content-length", "")
        if length.isdecimal() and int(length) != size and not response.headers.get("content-encoding"):
            raise Again(f"{host} has {length} bytes where {size} were announced")
        if partial.size:
            way.moved(-partial.size)
            await trio.to_thread.run_sync(partial.empty)
        return
    if status == 416:
        await start_over(f"{host} has no such part")
    if status in _PASSING or status >= 500:
        raise Again(f"{host} answers {status}", retry_after(response.headers))
    if status in (404, 410):
        raise Gone(f"{way.url} is not there ({status})", remedy="check the source")
    if status in (401, 403):
        raise FetchFailed(
            f"{host} refuses {partial.file.name} ({status})", remedy="check the agent's token (HF_TOKEN) and the source"
        )
    raise FetchFailed(f"{host} answers {status} for {partial.file.name}", remedy="check the source")


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds after which a server wants to be asked again; 0 where it does not say, or says a date."""
    text = headers.get("retry-after", "")
    return float(text) if text.isdecimal() and len(text) < 6 else 0.0


def words_of(error: httpx.TransportError) -> str:
    """Its own words, or those of what brought it about: of a failed handshake the client says nothing."""
    cause: BaseException | None = error
    while cause is not None and not str(cause):
        cause = cause.__cause__ or cause.__context__
    kind = type(error).__name__
    return f"{kind}: {cause}" if cause is not None else kind
