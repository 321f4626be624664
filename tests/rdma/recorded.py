"""Reads the recordings of real perftest runs: per side a command, its exit code and both streams."""

from __future__ import annotations

import re
from pathlib import Path

import attrs

ROCE = Path(__file__).parents[1] / "recorded" / "roce"


@attrs.frozen
class Side:
    command: str
    exit_code: int
    stdout: str
    stderr: str
    cut_short: bool

    @property
    def size(self) -> int | None:
        asked = re.search(r"-s (\d+)", self.command)
        return int(asked[1]) if asked else None


def sides(name: str) -> dict[str, Side]:
    """The sides of a recording: "server" and "client", or "client" alone."""
    text = (ROCE / f"{name}.txt").read_text()
    found = {}
    for block in re.split(r"^### ", text, flags=re.M)[1:]:
        match = re.match(
            r"(server|client).*?\n\$ (.*?)\n--- rc=(\d+) secs=\S+ killed_by_our_timeout=(\w+)\n"
            r"--- stdout\n(.*?)--- stderr\n(.*)",
            block,
            re.S,
        )
        if match:
            role, command, code, late, out, err = match.groups()
            found[role] = Side(command, int(code), out, err, late == "True")
    return found
