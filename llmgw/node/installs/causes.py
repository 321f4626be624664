"""Why an installation failed, from what the installer said. Pure; every text of pip and uv has an answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llmgw.node.engines.causes import Cause, Row, search
from llmgw.node.installs.packages import canonical

#: The first row that matches wins: causes before their consequences.
ROWS = (
    Row.of(
        "no-disk",
        r"No space left on device|os error 28\b|\[Errno 28\]|Disk quota exceeded|os error 122\b",
        "the disk is full",
        "make room, or put installs.directory on another disk",
    ),
    Row.of(
        "no-venv",
        r"ensurepip is not available|No module named '?(?:venv|ensurepip)\b|The virtual environment was not created",
        "this Python cannot make virtual environments",
        "install python3-venv, or uv, or name another Python by installs.python",
    ),
    Row.of(
        "no-python",
        r"No interpreter found|[Nn]o such file or directory: '[^']*python|Could not find a Python"
        r"|python[\d.]*['’]?: (?:not found|No such file)",
        "the Python of installs.python is not there",
        "name one that is, or none",
    ),
    Row.of(
        "not-trusted",
        r"CERTIFICATE_VERIFY_FAILED|invalid peer certificate|UnknownIssuer",
        "the package index shows a certificate that this machine does not trust",
        "add its CA to the machine, or set PIP_CERT or SSL_CERT_FILE in the agent's unit",
    ),
    Row.of(
        "not-allowed",
        r"\b(?:401|403) (?:Client Error|Unauthorized|Forbidden)|status code 40[13]|HTTP (?:error )?40[13]\b",
        "the package index refused it",
        "check the user name and password in the index's address",
    ),
    Row.of(
        "no-network",
        r"Temporary failure in name resolution|Name or service not known|NameResolutionError|failed to lookup address"
        r"|Network is unreachable|NewConnectionError|Connection (?:refused|reset)|ConnectTimeoutError|Read timed out"
        r"|error sending request|[Tt]unnel error|ProxyError|dns error|operation timed out|Remote end closed connection",
        "the package index cannot be reached",
        "check network and proxy, or name a mirror by installs.index, or wheels by installs.find_links",
    ),
    Row.of(
        "python-too-old",
        r"requires a different Python|Requires-Python|[Bb]ecause the current Python version"
        r"|does not satisfy Python|[Bb]ecause \S+ requires Python",
        "it does not fit this version of Python",
        "name a Python that it supports by installs.python",
    ),
    Row.of(
        "other-platform",
        r"is not a supported wheel on this platform|no wheels? (?:with|are available|that)"
        r"|no matching (?:platform|Python ABI)"
        r"|has no (?:usable )?wheels|platform tag|no source distribution",
        "there is no build of it for this platform",
        "name a package that is built for it in [packages]",
    ),
    Row.of(
        "broken-wheel",
        r"[Bb]ad[ _]?[Zz]ip|[Ii]s an invalid wheel|[Ii]nvalid wheel|has an invalid wheel|do not match the hashes"
        r"|hash mismatch|Wheel .* is invalid|end of central directory|Failed to (?:extract|read)",
        "a downloaded package is damaged",
        "look at the index or the mirror that it came from",
    ),
    Row.of(
        "conflict",
        r"ResolutionImpossible|conflicting dependencies|requirements are unsatisfiable.*conflict|are incompatible",
        "its requirements contradict each other",
        "see the log; packages.NAME.also may pin one",
    ),
    Row.of(
        "no-version",
        r"No matching distribution found|from versions: |there is no version of|no versions of|was not found in the"
        r"|not found in the package registry|No solution found|requirements are unsatisfiable",
        "the index has no such version for this platform and Python",
        "look at the version in [engines] and at the index",
    ),
    Row.of(
        "no-compiler",
        r"Failed building wheel|Failed to build|metadata-generation-failed|error: command '.*(?:gcc|cc|g\+\+)' failed",
        "one of its requirements must be compiled, and that failed",
        "install what the log names, or use an index that has it built",
    ),
    Row.of(
        "permission",
        r"Permission denied|Read-only file system|Operation not permitted",
        "this user may not write there",
        "check the owner of installs.directory",
    ),
)

#: What another try a minute later will not mend.
LASTING = frozenset(
    {
        "no-venv",
        "no-python",
        "python-too-old",
        "other-platform",
        "no-version",
        "no-requirement",
        "conflict",
        "permission",
    }
)


#: What was looked for in vain: the package and the rest of the requirement.
_NOT_FOUND = re.compile(
    r"No matching distribution found for (?P<pip>[\w.-]+)"
    r"|there (?:is|are) no versions? of (?P<version>[\w.-]+)"
    r"|[Bb]ecause (?P<nothing>[\w.-]+) was not found in"
)


def probable(lines: Sequence[str], package: str = "", version: str = "") -> Cause | None:
    """The probable cause of a failed installation of this version of a package."""
    cause = search(ROWS, [line for line in lines if not _beside_the_point(line, version)])
    if cause is None or cause.code != "no-version" or not package:
        return cause
    missing = [name for line in lines if (found := _NOT_FOUND.search(line)) for name in found.groups() if name]
    if not missing or canonical(missing[0]) == canonical(package):
        return cause
    text = f"one of its requirements, {missing[0]}, is not in the index for this platform and Python"
    return Cause("no-requirement", text, "see the log; extra_index in [packages] may name where it is", cause.line)


def _beside_the_point(line: str, version: str) -> bool:
    # pip lists every version that is too new or too old for this Python, whether or not it was asked for.
    ignored = bool(version) and "Ignored the following" in line and f" {version} Requires-Python" not in line
    # A connection that came about at a later try is no cause.
    return ignored or ("Retrying (Retry(total=" in line and "(Retry(total=0" not in line)
