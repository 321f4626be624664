from __future__ import annotations

import pytest

from llmgw.plane.gateway.keys import Key, Keyring, hash_of, new_key
from llmgw.plane.gateway.refusal import Refusal


def test_a_key_is_known_by_its_secret_and_kept_as_a_hash() -> None:
    secret, key = new_key("team")
    assert Keyring([key]).admit(b"bearer  " + secret.encode()) is key
    assert secret not in repr(key)
    assert key.hash == hash_of(secret)


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (b"", "missing_api_key"),
        (b"Bearer", "missing_api_key"),
        (b"Basic x", "missing_api_key"),
        (b"Bearer \xff", "invalid_api_key"),
    ],
)
def test_what_proves_no_key_is_401(header: bytes, code: str) -> None:
    with pytest.raises(Refusal) as refused:
        Keyring([new_key("team")[1]]).admit(header)
    assert (refused.value.status, refused.value.code) == (401, code)


def test_a_key_written_where_its_hash_belongs_is_refused_without_repeating_it() -> None:
    with pytest.raises(ValueError, match="sha256") as wrong:
        Key("team", "sk-secret")
    assert "sk-secret" not in str(wrong.value)
