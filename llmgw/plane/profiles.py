"""What differs between two profiles of a model, in words. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from llmgw.plane.world import Profile
from llmgw.units import format_duration
from llmgw.wire.facts import Resources

#: Variables whose values nobody wants to read over a shoulder.
_SECRET = re.compile(r"token|secret|passw|credential|(^|_)key($|_)|api_?key", re.IGNORECASE)

#: Fields that are told as they are, in the order in which models.toml lists them.
_PLAIN = ("engine", "engine_version", "source", "context", "nodes", "network", "rails", "spread")
_TIMES = ("ready_within", "grace")


def differences(before: Profile, after: Profile) -> tuple[str, ...]:
    """What changed, one thing each; nothing for equal profiles."""
    found = [
        _changed(name, _shown(getattr(before, name)), _shown(getattr(after, name)))
        for name in _PLAIN
        if getattr(before, name) != getattr(after, name)
    ]
    found += [
        _changed(name, *_times(getattr(before, name), getattr(after, name)))
        for name in _TIMES
        if getattr(before, name) != getattr(after, name)
    ]
    found += _arguments(before.args, after.args)
    found += _names("apart", before.apart, after.apart)
    found += _table("env", before.env, after.env)
    found += _table("labels", before.labels, after.labels)
    found += _table("resources", _amounts(before.resources), _amounts(after.resources))
    return tuple(found)


def secret(name: str) -> bool:
    """Whether a variable of this name is one that is not to be shown."""
    return _SECRET.search(name) is not None


def _shown(value: object) -> str:
    return str(value) if value else "none"


def _changed(name: str, before: str, after: str) -> str:
    return f"{name} {before} -> {after}"


def _times(before: float, after: float) -> tuple[str, str]:
    words = format_duration(before), format_duration(after)
    return words if words[0] != words[1] else (f"{before!r} s", f"{after!r} s")


def _arguments(before: tuple[str, ...], after: tuple[str, ...]) -> list[str]:
    """Arguments that came and went, each option with its value."""
    old, new = _options(before), _options(after)
    gone = [option for option in old if option not in new]
    come = [option for option in new if option not in old]
    if before != after and not gone and not come:
        return ["args arranged differently"]
    return [f"args without {' '.join(gone)}"] * bool(gone) + [f"args with {' '.join(come)}"] * bool(come)


def _options(args: tuple[str, ...]) -> list[str]:
    found: list[str] = []
    for text in args:
        if text.startswith("-") or not found or not found[-1].startswith("-") or " " in found[-1]:
            found.append(text)
        else:
            found[-1] += f" {text}"
    return found


def _names(what: str, before: tuple[str, ...], after: tuple[str, ...]) -> list[str]:
    gone, come = sorted(set(before) - set(after)), sorted(set(after) - set(before))
    return [f"{what} without {', '.join(gone)}"] * bool(gone) + [f"{what} with {', '.join(come)}"] * bool(come)


def _table(what: str, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    found = []
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if secret(name):
            found.append(f"{what} {name} {'set' if old is None else 'removed' if new is None else 'changed'}")
        else:
            found.append(_changed(f"{what} {name}", "none" if old is None else old, "none" if new is None else new))
    return found


def _amounts(resources: Resources) -> dict[str, str]:
    capability = resources.compute_capability
    amounts = {
        "gpus": str(resources.gpus or ""),
        "gpu_memory": _bytes(resources.gpu_memory_bytes),
        "compute_capability": "{}.{}".format(*capability) if capability is not None else "",
        "cpu_threads": str(resources.cpu_threads or ""),
        "memory": _bytes(resources.memory_bytes),
        "disk": _bytes(resources.disk_bytes),
    }
    return {name: amount for name, amount in amounts.items() if amount}


def _bytes(count: int) -> str:
    """Bytes in the largest unit of which there is a whole number: two amounts that differ never look alike."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count and count % size == 0:
            return f"{count // size}{unit}"
    return str(count or "")
