from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.sources import BadSource, HubSource, WebSource, key, parse, safe

DIGEST = "ab" * 32


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://org/model", HubSource("org/model")),
        ("hf://org/model/", HubSource("org/model")),
        ("org/model", HubSource("org/model")),
        ("hf://gpt2", HubSource("gpt2")),
        ("hf://org/model@v1.0", HubSource("org/model", "v1.0")),
        ("hf://org/model@refs/pr/3", HubSource("org/model", "refs/pr/3")),
        ("hf://org/model@refs/pr/3/a/b.gguf", HubSource("org/model", "refs/pr/3", "a/b.gguf")),
        ("hf://org/model/q4.gguf", HubSource("org/model", "main", "q4.gguf")),
        ("hf://org/model@main/d/q4.gguf", HubSource("org/model", "main", "d/q4.gguf")),
        (f"https://h/a/x.gguf#sha256={DIGEST}", WebSource("https://h/a/x.gguf", DIGEST, "x.gguf")),
        (f"https://h/a/x.gguf?sha256={DIGEST.upper()}", WebSource("https://h/a/x.gguf", DIGEST, "x.gguf")),
        (f"https://h/x.gguf?k=1&sha256={DIGEST}", WebSource("https://h/x.gguf?k=1", DIGEST, "x.gguf")),
        (f"https://h/x.gguf?k=1%2F2#sha256={DIGEST}", WebSource("https://h/x.gguf?k=1%2F2", DIGEST, "x.gguf")),
    ],
)
def test_a_source_is_read(text: str, expected: HubSource | WebSource) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "hf://", "hf:///x/y/z", "hf://../x", "hf://org/model@", "hf://org/model@main/../../etc/passwd", "hf://a--b/c",
        "https://h/x.gguf", "https://h/x.gguf#sha256=abc", f"https://h/#sha256={DIGEST}", "s3://bucket/x", "", "x",
        f"https://h/%2e%2e#sha256={DIGEST}", f"https://h/a%2fb#sha256={DIGEST}",
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(BadSource) as caught:
        parse(text)
    assert caught.value.remedy


@given(st.text(max_size=60))
def test_any_text_is_a_source_or_refused(text: str) -> None:
    for prefix in ("", "hf://", "https://", "https://h/x#sha256="):
        try:
            found = parse(prefix + text)
        except BadSource:
            continue
        assert "/" not in found.folder
        assert safe(found.folder)
        if isinstance(found, HubSource):
            assert ".." not in found.inside.split("/")


@given(st.text(min_size=1, max_size=300), st.text(min_size=1, max_size=300))
def test_every_source_has_a_file_name_of_its_own(one: str, other: str) -> None:
    assert safe(key(one))
    assert len(key(one)) < 120
    assert (key(one) == key(other)) == (one == other)
