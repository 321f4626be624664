"""What a model's files say of themselves: whether they are all there, and what shape the model has.

Only headers are read, so a model of hundreds of gigabytes takes milliseconds. An engine finds a missing part or a
cut-off download only after it has loaded for minutes; this finds it before. Reading may block on a slow disk: call
it in a thread.
"""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import attrs

from llmgw.node.engines.gguf import Broken, Header, header
from llmgw.node.engines.safetensors import Config, config, cut_off, listed


@attrs.frozen
class Fault:
    """Something wrong with the files; `code` is "missing-weights" or "broken-weights"."""

    code: str
    text: str


@attrs.frozen
class Contents:
    """A model as it lies on the disk. `kind` is "gguf", "hub" (a folder with config.json) or "unknown".

    `path` is what an engine is given: for a folder with one GGUF in it, that file. Sizes in bytes; None is unknown.
    """

    path: Path
    kind: str = "unknown"
    bytes: int = 0
    context: int | None = None
    heads: int | None = None
    kv_bytes_per_token: int | None = None  # with 16-bit values
    faults: tuple[Fault, ...] = ()
    layers: int | None = None
    dtype: str = ""  # of its values as config.json has it: "bfloat16"


_PART = re.compile(r"^(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf$")


def read_contents(path: Path) -> Contents:
    """Look at a file or folder. Never raises for anything that a disk may hold."""
    try:
        if path.is_dir():
            return _folder(path)
        if path.is_file():
            return _gguf(path) if path.suffix == ".gguf" or _magic(path) else Contents(path, bytes=path.stat().st_size)
        return Contents(path, faults=(Fault("missing-weights", f"{path} is not there"),))
    except OSError as error:
        return Contents(path, faults=(Fault("missing-weights", f"{path} cannot be read: {error.strerror or error}"),))


def _magic(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _folder(folder: Path) -> Contents:
    if (folder / "config.json").is_file():
        return _hub(folder)
    models = sorted(
        path
        for path in folder.glob("*.gguf")
        if (part := _PART.match(path.name)) is None or part["part"] == "00001"
        if not path.name.startswith(("mmproj", "."))
    )
    if len(models) == 1:
        return _gguf(models[0])
    if models:
        names = ", ".join(path.name for path in models[:4])
        return Contents(
            folder, faults=(Fault("missing-weights", f"{folder} holds several models ({names}): name one"),)
        )
    return Contents(folder, faults=(Fault("missing-weights", f"{folder} holds neither config.json nor a .gguf file"),))


# --- GGUF ---------------------------------------------------------------------------------------------


def _gguf(path: Path) -> Contents:
    try:
        first = _header(path)
    except Broken as error:
        return Contents(path, "gguf", path.stat().st_size, faults=(Fault("broken-weights", f"{path}: {error}"),))
    faults = list(_cut_off(path, first))
    size = path.stat().st_size
    parts = first.whole("split.count") or 1
    if parts > 1:
        found = _PART.match(path.name)
        if first.whole("split.no") != 0 or found is None or int(found["part"]) != 1:
            faults.append(
                Fault("broken-weights", f"{path.name} is not the first of the model's {parts} parts: name that one")
            )
        else:
            for number in range(2, parts + 1):
                part = path.with_name(f"{found['stem']}-{number:05d}-of-{parts:05d}.gguf")
                if not part.is_file():
                    faults.append(
                        Fault("missing-weights", f"{part.name}, one of the model's {parts} parts, is not there")
                    )
                    continue
                size += part.stat().st_size
                try:
                    faults += _cut_off(part, _header(part))
                except Broken as error:
                    faults.append(Fault("broken-weights", f"{part}: {error}"))
    cache = first.kv_bytes_per_token
    return Contents(path, "gguf", size, first.context, first.heads, cache, tuple(faults), first.layers)


def _header(path: Path) -> Header:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < 24:
            raise Broken("too short to be a model")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return header(view)


def _cut_off(path: Path, head: Header) -> list[Fault]:
    size = path.stat().st_size
    if size >= head.end:
        return []
    return [Fault("broken-weights", f"{path} has {size} bytes of at least {head.end}: a download was probably cut off")]


# --- a folder as hubs have it ---------------------------------------------------------------------------


def _hub(folder: Path) -> Contents:
    shape: Config = config(folder / "config.json")
    cache = shape.kv_bytes_per_token
    faults = [Fault("broken-weights", shape.error)] if shape.error else []
    names, error = listed(folder)
    if error:
        faults.append(Fault("broken-weights", error))
    if not names and not error:
        others = [path for pattern in ("*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern)]
        if not others:
            faults.append(Fault("missing-weights", f"{folder} has a config.json but no weights"))
        size = sum(path.stat().st_size for path in others)
        return Contents(
            folder, "hub", size, shape.context, shape.heads, cache, tuple(faults), shape.layers, shape.dtype
        )
    size, missing = 0, list[str]()
    for name in names:
        path = folder / name
        if not path.is_file():  # also a link of the cache whose blob is gone
            missing.append(name)
            continue
        size += path.stat().st_size
        if wrong := cut_off(path):
            faults.append(Fault("broken-weights", wrong))
    if missing:
        some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        faults.append(
            Fault("missing-weights", f"{len(missing)} of the model's {len(names)} files are not there: {some}")
        )
    return Contents(folder, "hub", size, shape.context, shape.heads, cache, tuple(faults), shape.layers, shape.dtype)
