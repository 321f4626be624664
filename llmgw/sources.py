"""What a model's source says: a repository of a hub, or a file on a web server with its digest. Pure.

hf://org/model              the default branch
hf://org/model@v1.0         a branch, tag or commit; refs/pr/3 too
hf://org/model@main/q4.gguf a file or folder of it (all parts, where a file is the first of several)
https://host/x.gguf#sha256=HEX
"""

from __future__ import annotations

import hashlib
import re
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

import attrs

from llmgw.errors import BadInput

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REVISION = re.compile(r"(refs/[a-z]+/[^/]+|[^/]+)(?:/(.*))?")
_FORMS = "use hf://org/model[@revision][/file], https://HOST/FILE#sha256=DIGEST, or a path of this node"


class BadSource(BadInput):
    """A source that cannot be meant."""


@attrs.frozen
class HubSource:
    """A repository of a hub at a revision, all of it or what lies at `inside`."""

    repository: str
    revision: str = "main"
    inside: str = ""

    @property
    def folder(self) -> str:
        """Its folder in the cache, named as hubs' own caches name it."""
        return "models--" + self.repository.replace("/", "--")


@attrs.frozen
class WebSource:
    """One file on a web server. The digest is part of the source: without one nothing says what was meant."""

    url: str
    sha256: str
    name: str

    @property
    def folder(self) -> str:
        return f"files--{self.sha256}"


def is_path(source: str) -> bool:
    """Whether a source is a path of the node itself, from which nothing is fetched."""
    return source.removeprefix("file://").startswith("/")


def parse(source: str) -> HubSource | WebSource:
    """Read a source. Raises BadSource for one that cannot be meant."""
    if source.startswith(("https://", "http://")):
        return _web(source)
    if source.startswith("hf://") or re.fullmatch(r"[^/:@~.][^/:@]*/[^/:@]+(@[^/]+)?", source):
        return _hub(source.removeprefix("hf://"), source)
    raise BadSource(f"{source!r} is no source of weights", remedy=_FORMS)


def pinned(source: str, revision: str) -> str:
    """The same of a hub's repository at one commit, as a source of its own; a web server's file is one already."""
    try:
        found = parse(source)
    except BadSource:
        return source
    if isinstance(found, WebSource):
        return source
    return f"hf://{found.repository}@{revision}" + (f"/{found.inside}" if found.inside else "")


def _hub(text: str, source: str) -> HubSource:
    named, at, rest = text.rstrip("/").partition("@")
    if at:
        found = _REVISION.fullmatch(rest)
        revision, inside = (found[1], found[2] or "") if found else ("", "")
    else:
        words = named.split("/", 2)
        named, revision, inside = "/".join(words[:2]), "main", words[2] if len(words) == 3 else ""
    if not revision or not _REPOSITORY.fullmatch(named) or "--" in named or ".." in named:
        raise BadSource(f"{source!r} names no repository of a hub", remedy=_FORMS)
    if not safe(inside or "x") or ".." in revision:
        raise BadSource(f"{source!r} names a file outside its repository", remedy=_FORMS)
    return HubSource(named, revision, inside)


def _web(source: str) -> WebSource:
    try:
        split = urlsplit(source)
        split.port  # noqa: B018 - it is read when it is asked for
    except ValueError as error:
        raise BadSource(f"{source} is no URL: {error}", remedy=_FORMS) from None
    query = parse_qsl(split.query, keep_blank_values=True)
    fragment = split.fragment.removeprefix("sha256=") if split.fragment.startswith("sha256=") else ""
    digest = (fragment or dict(query).get("sha256", "")).lower()
    if not _SHA256.fullmatch(digest):
        raise BadSource(
            f"{source} says no SHA-256 of its file, so nothing could tell whether it came whole",
            remedy="append #sha256= and the 64 digits that `sha256sum FILE` prints",
        )
    asked = split.query if fragment else urlencode([pair for pair in query if pair[0] != "sha256"])
    name = unquote(split.path.rpartition("/")[2])
    if not split.hostname or not name or not safe(name) or "/" in name:
        raise BadSource(f"{source} names no file", remedy=_FORMS)
    return WebSource(urlunsplit(split._replace(query=asked, fragment="")), digest, name)


def safe(name: str) -> bool:
    """Whether a name from elsewhere can be a file below a folder of ours, and nowhere else."""
    parts = name.split("/")
    return bool(name) and not any(p in ("", ".", "..") or "\0" in p or "\\" in p or len(p) > 240 for p in parts)


def key(source: str) -> str:
    """A file name for a source: legible, and another for every other source."""
    legible = re.sub(r"[^A-Za-z0-9._-]+", "-", source.partition("://")[2] or source).strip("-.")[:80]
    return f"{legible}-{hashlib.sha256(source.encode()).hexdigest()[:12]}"
