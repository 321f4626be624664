"""API keys: who may ask, and for which models. Only hashes are kept.

A key is 256 random bits, so a plain SHA-256 of it cannot be searched and a slow hash would buy nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable

import attrs

from llmgw.plane.gateway.refusal import Refusal

_HASH = re.compile(r"sha256:[0-9a-f]{64}\Z")


def _whole_hash(_key: object, _attribute: object, value: str) -> None:
    if not _HASH.match(value):
        # Not a word of the value: it may be the key itself.
        raise ValueError("not the hash of an API key, which has the form sha256:<64 hexadecimal digits>")


@attrs.frozen
class Key:
    """One API key by its hash. `models` are those it may ask for; empty: all."""

    name: str
    hash: str = attrs.field(validator=_whole_hash, repr=False)
    models: tuple[str, ...] = ()

    def allows(self, model: str) -> bool:
        return not self.models or model in self.models


def hash_of(secret: str | bytes) -> str:
    raw = secret if isinstance(secret, bytes) else secret.encode()
    return "sha256:" + hashlib.sha256(raw).hexdigest()


def new_key(name: str, models: Iterable[str] = ()) -> tuple[str, Key]:
    """A fresh secret, shown once, and the Key to keep."""
    secret = "sk-" + secrets.token_urlsafe(32)
    return secret, Key(name=name, hash=hash_of(secret), models=tuple(models))


class Keyring:
    """The keys a gateway accepts. Looking one up takes the same time whether or not it is known."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._by_hash = {key.hash: key for key in keys}
        self.on = bool(self._by_hash)

    def admit(self, authorization: bytes) -> Key:
        """The key that an Authorization header proves. Raises Refusal (401)."""
        scheme, _, secret = authorization.partition(b" ")
        secret = secret.strip()
        if scheme.lower() != b"bearer" or not secret:
            raise Refusal(
                401,
                "This gateway needs an API key: send it as 'Authorization: Bearer <key>'.",
                code="missing_api_key",
            )
        # The dictionary is asked with a hash that the asker cannot steer, and the answer compared in constant time.
        hash_ = hash_of(secret)
        key = self._by_hash.get(hash_)
        if not hmac.compare_digest(key.hash if key else "sha256:", hash_) or key is None:
            raise Refusal(401, "This API key is not known here.", code="invalid_api_key")
        return key
