"""Which plane `llmgw ctl` speaks to, whom it trusts there, and what it shows for itself.

Each of address, CA and credential is taken from the first place that has it: the option, the environment, a
plane's directory that was named with --dir, ~/.config/llmgw/ctl.toml, and the plane's directory on this machine.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import attrs

from llmgw.errors import BadInput, NotFound, Refused
from llmgw.files import read_whole

#: Where a plane that was set up without --dir keeps what it is.
PLANE_DIR = Path("/var/lib/llmgw-plane")
ADMIN_PORT = 7444
#: In a plane's directory.
CA_FILE, TOKEN_FILE, SETTINGS_FILE = "ca.pem", "admin.token", "plane.toml"

_KEYS = {"plane", "ca", "token", "token_file", "cert"}


@attrs.frozen
class Given:
    """What one place says; None is "nothing"."""

    plane: str | None = None
    ca: Path | None = None
    token: str | None = None
    token_file: Path | None = None
    cert: Path | None = None


@attrs.frozen
class Target:
    """A plane's address, its CA, and a token or the file of a client certificate with its key."""

    url: str
    ca: Path | None
    token: str = attrs.field(repr=False, default="")
    cert: Path | None = None


def find_target(
    options: Given, environment: Mapping[str, str], home: Path, directory: Path | None, local: Path = PLANE_DIR
) -> Target:
    """The plane to speak to. Raises LlmgwError, saying what is missing and how to give it."""
    places = list(_places(options, environment, home, directory, local))
    url = next((place.plane for place in places if place.plane is not None), None)
    if url is None:
        raise BadInput(
            "no plane is given",
            remedy="use --plane https://HOST:PORT or LLMGW_PLANE, or --dir with a plane's directory on this machine",
        )
    ca = next((place.ca for place in places if place.ca is not None), None)
    for place in places:
        # A credential belongs together: the token of one place is not mixed with the certificate of another.
        if place.token is not None:
            return Target(_address(url), ca, _plain(place.token))
        if place.token_file is not None:
            return Target(_address(url), ca, _token(place.token_file))
        if place.cert is not None:
            return Target(_address(url), ca, cert=place.cert)
    raise Refused(
        "no token and no certificate are given",
        remedy=f"use --token-file (the plane's {TOKEN_FILE}), --cert, LLMGW_TOKEN or LLMGW_TOKEN_FILE",
    )


def _places(
    options: Given, environment: Mapping[str, str], home: Path, directory: Path | None, local: Path
) -> Iterator[Given]:
    yield options
    yield Given(
        plane=environment.get("LLMGW_PLANE") or None,
        ca=_path(environment.get("LLMGW_CA")),
        token=environment.get("LLMGW_TOKEN") or None,
        token_file=_path(environment.get("LLMGW_TOKEN_FILE")),
        cert=_path(environment.get("LLMGW_CERT")),
    )
    if directory is not None:
        if not (directory / SETTINGS_FILE).exists():
            raise NotFound(f"{directory} is no plane's directory: it holds no {SETTINGS_FILE}")
        yield _plane_directory(directory)
    config = Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "llmgw" / "ctl.toml"
    if _there(config):
        yield _config(config)
    if directory is None and _there(local / SETTINGS_FILE):
        yield _plane_directory(local)


def _there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False  # in a directory that this user may not look into


def _plane_directory(directory: Path) -> Given:
    """What lies on the plane's own machine."""
    found = _toml(directory / SETTINGS_FILE)
    listen, tokens = found.get("admin_listen"), found.get("admin_tokens")
    host, port = _listen(listen if isinstance(listen, str) else f":{ADMIN_PORT}")
    return Given(
        plane=f"{'http' if found.get('insecure') is True else 'https'}://{host}:{port}",
        ca=directory / CA_FILE,
        token_file=directory / (tokens if isinstance(tokens, str) else TOKEN_FILE),
    )


def _listen(text: str) -> tuple[str, str]:
    """An address to reach what listens there: all addresses are reached by loopback."""
    host, _, port = text.rpartition(":")
    bare = host.strip("[]")
    if bare in ("", "0.0.0.0", "*"):
        return "127.0.0.1", port
    return ("[::1]" if bare == "::" else f"[{bare}]" if ":" in bare else bare), port


def _config(path: Path) -> Given:
    found = _toml(path)
    for key, value in found.items():
        if key not in _KEYS:
            raise BadInput(f"{path} has an unknown key {key!r}", remedy=f"there are {', '.join(sorted(_KEYS))}")
        if not isinstance(value, str):
            raise BadInput(f"{path}: {key} must be text")
    texts = {key: str(value) for key, value in found.items()}
    return Given(
        plane=texts.get("plane"),
        ca=_path(texts.get("ca")),
        token=texts.get("token"),
        token_file=_path(texts.get("token_file")),
        cert=_path(texts.get("cert")),
    )


def _toml(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(read_whole(path).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from None


def _token(path: Path) -> str:
    """The first token of a file that has one a line, perhaps with a name before it."""
    try:
        lines = read_whole(path, "an administrator's token").decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise BadInput(f"{path} holds no token") from None
    for line in lines:
        if words := line.partition("#")[0].split():
            return _plain(words[-1])
    raise BadInput(f"{path} is empty where a token is due")


def _plain(token: str) -> str:
    """A token that can stand in a header. What it is is not repeated: it may be a secret with a slip in it."""
    bare = token.strip()
    if not bare.isascii() or not bare.isprintable() or " " in bare or not bare:
        raise BadInput("what is given as a token is no token", remedy="it is one word of letters and digits")
    return bare


def _address(url: str) -> str:
    """The plane's address, checked. Plain http is for the insecure mode of tests, on loopback alone."""
    bare = "://" not in url
    try:
        parts = urlsplit(f"https://{url}" if bare else url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BadInput(f"{url!r} is no address of a plane: {error}", remedy="write https://HOST:PORT") from None
    odd = any(c.isspace() or not c.isprintable() for c in url)
    if parts.scheme not in ("https", "http") or not host or parts.path.strip("/") or odd:
        raise BadInput(f"{url!r} is no address of a plane", remedy="write https://HOST:PORT")
    if parts.scheme == "http" and host not in ("localhost", "127.0.0.1", "::1"):
        raise BadInput(f"{url!r} would send the token in the clear", remedy="write https://")
    return f"{parts.scheme}://{parts.netloc}" + (f":{ADMIN_PORT}" if bare and port is None else "")


def _path(text: str | None) -> Path | None:
    return Path(text).expanduser() if text else None
