"""Join tokens: each lets one machine in, once, until it expires.

A token's text carries the fingerprint of the fleet's CA, so that the machine can tell the plane from an
impostor before it says the secret. Only a hash of the secret is stored.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable

import msgspec

from llmgw import pki
from llmgw.errors import BadInput, NotFound, Refused
from llmgw.plane.store import Moved, Store
from llmgw.units import format_duration

PREFIX = "tokens/"
DEFAULT_LIFE = 3600.0
LONGEST_LIFE = 365 * pki.DAY
#: How long an ended token stays listed.
REMEMBERED = 7 * pki.DAY


class Token(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What may be known of a token. Times are wall-clock seconds; `used_key` marks the key it was used for."""

    id: str
    created: float
    expires: float
    node: str = ""  # only this node may use it; "": any
    note: str = ""
    replace: bool = False  # a live certificate of the same name is replaced
    used_at: float | None = None
    used_by: str = ""
    used_from: str = ""
    used_key: str = ""
    revoked_at: float | None = None

    def state(self, now: float) -> str:
        """ "open", "used", "revoked" or "expired"."""
        if self.used_at is not None:
            return "used"
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if now >= self.expires else "open"


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    token: Token
    hash: str  # SHA-256 of the secret: 256 random bits need no slow hash


class Tokens:
    """The tokens in the store. Everything is persisted before it returns."""

    def __init__(self, store: Store, fingerprint: str, wall: Callable[[], float] = time.time) -> None:
        self._store, self._fingerprint, self._wall = store, fingerprint, wall

    async def create(
        self, ttl: float = DEFAULT_LIFE, *, node: str | None = None, note: str = "", replace: bool = False
    ) -> tuple[str, Token]:
        """A new token: its text, which is shown once and stored nowhere, and what may be known of it.

        `ttl` is in seconds. Raises BadInput for a life or a name that cannot be meant.
        """
        if not 1 <= ttl <= LONGEST_LIFE:
            raise BadInput(f"a token cannot live for {format_duration(ttl)}", remedy="give from 1 second to 365 days")
        if replace and not node:
            raise BadInput("a token that replaces needs the node's name", remedy="add --node NAME")
        now = self._wall()
        token = Token(
            id=base64.b32encode(secrets.token_bytes(5)).decode().lower(),
            created=now,
            expires=now + ttl,
            node=pki.check_name(node) if node else "",
            note=note[:200],
            replace=replace,
        )
        secret = secrets.token_urlsafe(32)
        stored = _Stored(token=token, hash=_hash(secret))
        ended = [PREFIX + old.id for old in await self.list() if _ended(old, now) < now - REMEMBERED]
        await self._store.commit({PREFIX + token.id: msgspec.json.encode(stored)}, ended)
        return f"llmgw1.{token.id}.{secret}.{self._fingerprint}", token

    async def list(self) -> tuple[Token, ...]:
        """Every token that is not long over, oldest first."""
        snapshot = await self._store.load(PREFIX)
        return tuple(
            sorted((_read(value).token for value in snapshot.values.values()), key=lambda token: token.created)
        )

    async def revoke(self, id: str) -> Token:
        """End a token. Raises NotFound; one that is over already stays as it is."""
        while True:
            revision, stored = await self._load(id)
            if stored is None:
                raise NotFound(f"there is no token {id!r}", remedy="see `llmgw ctl token list`")
            now = self._wall()
            if stored.token.state(now) != "open":
                return stored.token
            token = msgspec.structs.replace(stored.token, revoked_at=now)
            if await self._replace(revision, stored, token):
                return token

    async def check(self, text: str, node: str, key: str) -> Token:
        """Would this token let `node` in? Raises Refused, with the same words for a wrong id and a wrong secret."""
        _, stored = await self._load(_parts(text)[0])
        return _admitted(stored, text, node, key, self._wall())

    async def redeem(self, text: str, node: str, key: str, address: str = "") -> Token:
        """Use a token, once: of two machines that come with it together, one is refused.

        `key` marks the public key that the identity is for (`pki.key_mark`). The same node with the same key may
        come again until the token expires: its answer was lost on the way. Raises Refused.
        """
        while True:
            revision, stored = await self._load(_parts(text)[0])
            now = self._wall()
            token = _admitted(stored, text, node, key, now)
            assert stored is not None
            used = msgspec.structs.replace(token, used_at=now, used_by=node, used_key=key, used_from=address)
            if await self._replace(revision, stored, used):
                return used

    async def _load(self, id: str) -> tuple[int, _Stored | None]:
        snapshot = await self._store.load(PREFIX + id)
        value = snapshot.values.get(PREFIX + id)
        return snapshot.revision, _read(value) if value is not None else None

    async def _replace(self, revision: int, stored: _Stored, token: Token) -> bool:
        value = msgspec.json.encode(msgspec.structs.replace(stored, token=token))
        try:
            await self._store.commit({PREFIX + token.id: value}, if_revision=revision)
        except Moved:
            return False
        return True


def _admitted(stored: _Stored | None, text: str, node: str, key: str, now: float) -> Token:
    _, secret = _parts(text)
    if stored is None or not hmac.compare_digest(stored.hash, _hash(secret)):
        raise Refused("this token is not known here", remedy="was it copied whole, and is it for this plane?")
    token, again = stored.token, "make a new one with `llmgw ctl token create`"
    if token.node and token.node != node:
        raise Refused(f"this token is for {token.node}, not for {node}", remedy=f"join with --name {token.node}")
    match token.state(now):
        case "revoked":
            raise Refused(f"token {token.id} was revoked at {pki.utc(token.revoked_at or 0)}", remedy=again)
        case "used" if (token.used_by, token.used_key) != (node, key) or now >= token.expires:
            when = pki.utc(token.used_at or 0)
            raise Refused(f"token {token.id} was used by {token.used_by} at {when}", remedy=again)
        case "expired":
            raise Refused(f"token {token.id} expired at {pki.utc(token.expires)}", remedy=again)
    return token


def _parts(text: str) -> tuple[str, str]:
    match text.strip().split("."):
        case ["llmgw1", id, secret, _] if id.isalnum() and secret:
            return id, secret
    raise Refused("this is not a join token", remedy="it looks like llmgw1.ID.SECRET.FINGERPRINT, all in one word")


def _ended(token: Token, now: float) -> float:
    """When a token ended; now for one that has not."""
    match token.state(now):
        case "used":
            return token.used_at or now
        case "revoked":
            return token.revoked_at or now
        case "expired":
            return token.expires
    return now


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _read(value: bytes) -> _Stored:
    return msgspec.json.decode(value, type=_Stored)
