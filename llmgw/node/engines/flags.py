"""Arguments that users give beside ours: which they may give, and which are ours to set.

Users extend the command. What the node decides itself (where to listen, under which name to serve) cannot be
theirs as well: an engine told twice takes one of them silently, and the plane would believe the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from llmgw.node.engines import Objection


def flags(args: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Each option with its value as far as that can be told: `--port=80`, `--port 80`, `--metrics`.

    Underscores are dashes, as argparse-based engines have it.
    """
    for at, word in enumerate(args):
        if not word.startswith("-") or _number(word):
            continue
        name, mark, value = word.partition("=")
        if name.startswith("--"):
            name = "--" + name[2:].replace("_", "-")
        if mark:
            yield name, value
        else:
            after = args[at + 1] if at + 1 < len(args) else None
            yield name, after if after is not None and (not after.startswith("-") or _number(after)) else None


def given(args: Sequence[str], *names: str) -> bool:
    """Whether the user gave any of these options."""
    return any(name in names for name, _ in flags(args))


def value(args: Sequence[str], *names: str) -> str | None:
    """The value of the last of these options that was given: the last one counts for every engine."""
    found = None
    for name, text in flags(args):
        if name in names:
            found = text
    return found


def whole(args: Sequence[str], *names: str) -> int | None:
    """The same as a whole number; None where it is not given or no number."""
    text = value(args, *names)
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def conflicts(args: Sequence[str], ours: Mapping[str, str]) -> Iterator[Objection]:
    """An objection for each argument that is ours to set. `ours` says for each option what to do instead."""
    for name, _ in flags(args):
        if name in ours:
            yield Objection("bad-argument", f"{name} cannot be given in the profile's arguments", ours[name])


def shortened(args: Sequence[str], *names: str) -> Iterator[Objection]:
    """An objection for each argument that an argparse-based engine would take for one of these, cut short as it is.

    `names` has whole names of other options as well where one of these begins with them: a whole name is itself.
    """
    for name, _ in flags(args):
        meant = [] if name in names or not name.strip("-") else [whole for whole in names if whole.startswith(name)]
        if meant:
            yield Objection("bad-argument", f"{name} is short for {meant[0]}", "write the argument's whole name")


def taken(env: Mapping[str, str], ours: Mapping[str, str]) -> Iterator[Objection]:
    """The same of variables in the profile's `env`: `ours` says for each name what to do instead."""
    for name in env:
        if name in ours:
            yield Objection("bad-argument", f"{name} cannot be set in the profile's env", ours[name])


def _number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
