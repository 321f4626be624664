"""models.toml: what somebody wants served, read into models (D5). Pure.

[profiles.small]
engine = "llamacpp"
source = "/models/tiny.gguf"
resources = { cpu_threads = 1, memory = "512MiB" }

[[models]]
name = "tiny"
profile = "small"       # or a table of its own; every key of a profile may also stand here and wins
replicas = 2
surge = 1               # so many replicas of a changed profile may run beside the old ones while they are replaced
idle = "30m"            # unloaded after so long without a request; the next one loads it again
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from immutables import Map
from msgspec.structs import replace

from llmgw.errors import BadInput
from llmgw.labels import check_label
from llmgw.plane.rollout import after_change
from llmgw.plane.world import Model, Profile, slug
from llmgw.sources import BadSource, is_path, parse
from llmgw.toml import BadToml, Bytes, Seconds, Table, near, read_toml
from llmgw.wire.facts import ModelName, Resources

#: Engines that a profile may name. A node's own adapters decide which of them it can run.
ENGINES = ("llamacpp", "sglang", "vllm")
#: How people write them too.
ALIASES = {"llama.cpp": "llamacpp", "llama-cpp": "llamacpp", "vLLM": "vllm", "SGLang": "sglang"}

#: What may join the nodes of a replica, and how people write it too.
NETWORKS = ("rdma", "nvlink", "tcp")
_MEANT = {"infiniband": "rdma", "ib": "rdma", "roce": "rdma", "nvl": "nvlink", "mnnvl": "nvlink", "ethernet": "tcp"}

#: How a profile's keys are written, and as what.
_PROFILE: Mapping[str, object] = {
    "engine": str,
    "source": str,
    "engine_version": str,
    "args": tuple[str, ...],
    "env": Mapping[str, str],
    "context": int,
    "nodes": int,
    "ready_within": Annotated[float, "seconds"],
    "grace": Seconds,
    "labels": Mapping[str, str],
    "network": str,
    "rails": int,
    "spread": str,
    "apart": tuple[str, ...],
}
#: The numbers among them, and the least and most that can be meant.
_RANGES: Mapping[str, tuple[float, float]] = {
    "context": (1, 1 << 40),
    "nodes": (1, 256),
    "ready_within": (0.1, 7 * 86400.0),
    "rails": (0, 64),
}
_RESOURCES: Mapping[str, tuple[str, object]] = {
    "gpus": ("gpus", int),
    "gpu_memory": ("gpu_memory_bytes", Bytes),
    "cpu_threads": ("cpu_threads", int),
    "memory": ("memory_bytes", Bytes),
    "disk": ("disk_bytes", Bytes),
}
_PROFILE_KEYS = (*_PROFILE, "resources")
_RESOURCE_KEYS = (*_RESOURCES, "compute_capability")
MOST_REPLICAS = 10_000
#: A shorter time without a request is a pause between two questions.
_LEAST_IDLE = 1.0

#: A model's name goes into URLs, file names, environment variables and shard ids. A slash is common in names of hubs.
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,94}[A-Za-z0-9])?")


def models_of(text: str, name: str = "models.toml") -> tuple[Model, ...]:
    """The models of a document, by name. Raises BadInput that names the file, the line and the near miss."""
    table = read_toml(text, name)
    table.refuse_unknown(("profiles", "models"))
    profiles: dict[str, dict[str, Any]] = {}
    named = table.table("profiles")
    for key in named.values:
        profiles[key] = _profile(named.table(key))
    found: dict[str, Model] = {}
    for entry in table.tables("models"):
        model = _model(entry, profiles)
        other = found.setdefault(slug(model.name), model)
        if other is not model:
            same = "two models are" if other.name == model.name else f"the models {other.name!r} and {model.name!r} are"
            words = f"{same} called {model.name!r}" if other.name == model.name else f"{same} one in names of files"
            raise entry.error(words, "name", remedy="every model needs its own name")
    for entry, model in zip(table.tables("models"), list(found.values()), strict=True):
        _apart(entry, model, [str(known.name) for known in found.values()])
    return tuple(sorted(found.values(), key=lambda model: model.name))


def revised(before: Map[ModelName, Model], wanted: tuple[Model, ...], clock: float = 0.0) -> Map[ModelName, Model]:
    """The wanted models with revisions: another one where a profile differs from the model there was.

    What a model was before is kept in its history, the last few of them; `clock` (Unix seconds) is when it ended. A
    profile that a model had before gets its old revision again.
    """
    after: dict[ModelName, Model] = {}
    for model in wanted:
        was = before.get(model.name)
        if was is None:
            after[model.name] = replace(model, revision=1, history=())
        else:
            kept = after_change(was, model.profile, clock)
            after[model.name] = replace(model, revision=kept.revision, history=kept.history)
    return Map(after)


def _model(table: Table, profiles: Mapping[str, dict[str, Any]]) -> Model:
    table.refuse_unknown(("name", "replicas", "surge", "idle", "profile", *_PROFILE_KEYS))
    name = str(table.value("name", str))
    if not _NAME.fullmatch(name) or "//" in name or ".." in name:
        raise table.error(
            f"{name!r} cannot be a model's name",
            "name",
            remedy="use up to 96 letters, digits, and . _ - / between them",
        )
    replicas = table.value("replicas", int) if "replicas" in table.values else 1
    surge = table.value("surge", int) if "surge" in table.values else 1
    idle = table.value("idle", Seconds) if "idle" in table.values else 0.0
    assert isinstance(replicas, int)
    assert isinstance(surge, int)
    assert isinstance(idle, float | int)
    if not 0 <= replicas <= MOST_REPLICAS:
        raise table.error(f"{replicas} replicas cannot be meant", "replicas", remedy=f"give 0 to {MOST_REPLICAS}")
    if not 0 <= surge <= MOST_REPLICAS:
        remedy = f"give 0 to {MOST_REPLICAS}; 0 stops one replica before its successor starts"
        raise table.error(f"a surge of {surge} cannot be meant", "surge", remedy=remedy)
    if idle and not idle >= _LEAST_IDLE:
        remedy = f"give {_LEAST_IDLE:g} s or more, or 0 for a model that stays loaded"
        raise table.error(f"{idle:g} s without a request are no idle time", "idle", remedy=remedy)
    base: dict[str, Any] = {}
    profile = table.values.get("profile")
    if isinstance(profile, dict):
        base = _profile(table.table("profile"))
    elif profile is not None:
        named = str(table.value("profile", str))
        if named not in profiles:
            meant = near(named, profiles)
            known = ", ".join(sorted(profiles)) or "none"
            remedy = f"did you mean {meant!r}?" if meant else f"known profiles are: {known}"
            raise table.error(f"there is no profile {named!r}", "profile", remedy=remedy)
        base = profiles[named]
    own = _profile(table)
    merged = {**base, **own}
    merged["resources"] = {**base.get("resources", {}), **own.get("resources", {})}
    for key in ("engine", "source"):
        if not merged.get(key):
            raise table.error(f"the key {key!r} is missing", remedy=f"give it here or in the profile of {name!r}")
    resources = Resources(**merged.pop("resources"))
    if resources.gpu_memory_bytes and not resources.gpus:
        raise table.error("gpu_memory is asked for, but no GPUs", "resources", remedy="set gpus as well")
    made = Profile(**merged, resources=resources)
    _joined(table, made)
    return Model(name=ModelName(name), profile=made, replicas=replicas, surge=surge, idle=float(idle))


def _joined(table: Table, made: Profile) -> None:
    """Raise for what cannot join the nodes of a replica."""

    def refuse(words: str, key: str, remedy: str) -> BadToml:
        return table.error(words, key if key in table.values else "profile", remedy=remedy)

    if made.rails and made.network in ("tcp", "nvlink"):
        joined = "TCP" if made.network == "tcp" else "NVLink"
        raise refuse(
            f"{made.rails} rails are asked for, but its nodes are joined by {joined}",
            "rails",
            'rails are RDMA\'s: set network = "rdma", or leave rails out',
        )
    if made.nodes > 1 and made.engine == "llamacpp" and made.network in ("rdma", "nvlink"):
        raise refuse(
            f"llama.cpp's members reach each other by TCP, not by {made.network}",
            "network",
            'set network = "tcp", or leave it out',
        )
    if made.nodes > 1 and made.network == "nvlink" and not made.resources.gpus:
        raise refuse("NVLink joins GPUs, but no GPUs are asked for", "network", "set gpus in its resources as well")


def _apart(table: Table, model: Model, known: list[str]) -> None:
    """Raise for a model to keep away from that the document does not have: a slip of the pen would let them meet."""
    for name in model.profile.apart:
        if name not in known:
            meant = near(name, known)
            remedy = f"did you mean {meant!r}?" if meant else f"known models are: {', '.join(sorted(known))}"
            raise table.error(f"there is no model {name!r} to stay apart from", "apart", remedy=remedy)


def _profile(table: Table) -> dict[str, Any]:
    """The keys of a profile that are there, checked one by one."""
    at_model = table.path[:1] == ("models",) and table.path[-1:] != ("profile",)
    if not at_model:
        table.refuse_unknown(_PROFILE_KEYS)
    found: dict[str, Any] = {key: table.value(key, hint) for key, hint in _PROFILE.items() if key in table.values}
    if "engine" in found:
        found["engine"] = ALIASES.get(found["engine"], found["engine"])
    if "engine" in found and found["engine"] not in ENGINES:
        meant = near(found["engine"], ENGINES)
        remedy = f"did you mean {meant!r}?" if meant else f"use one of {', '.join(ENGINES)}"
        raise table.error(f"there is no engine {found['engine']!r}", "engine", remedy=remedy)
    for key, (least, most) in _RANGES.items():
        if key in found and not least <= found[key] <= most:
            remedy = f"give {least:g} or more" if found[key] < least else f"give {most:.0f} or less"
            raise table.error(f"{found[key]:g} cannot be meant", key, remedy=remedy)
    if "network" in found:
        found["network"] = _network(table, found["network"])
    for key, labels in (("labels", found.get("labels", {})), ("spread", {found.get("spread") or "none": ""})):
        for name, value in labels.items():
            try:
                check_label(name, value)
            except BadInput as error:
                raise table.error(error.what, key, remedy=error.remedy) from None
    if "apart" in found:
        found["apart"] = tuple(dict.fromkeys(ModelName(name) for name in found["apart"]))
    if "source" in found and not found["source"].strip():
        raise table.error(
            "an empty source says nothing", "source", remedy="give a path or a URL such as hf://org/model"
        )
    if "source" in found and not is_path(found["source"]):
        try:
            parse(found["source"])
        except BadSource as error:
            raise table.error(error.what, "source", remedy=error.remedy) from None
    for key in found.get("env", {}):
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            raise table.table("env").error(f"{key!r} cannot be the name of a variable", key)
    for key in ("args", "env"):
        texts = found.get(key, ())
        for text in texts.values() if isinstance(texts, Mapping) else texts:
            if "\0" in text:
                raise table.error("a NUL character cannot be passed to a program", key)
    if "resources" in table.values:
        found["resources"] = _resources(table.table("resources"))
    return found


def _network(table: Table, text: str) -> str:
    """What joins a replica's nodes; "" leaves it to the plane."""
    if text and text not in NETWORKS:
        meant = _MEANT.get(text.casefold(), "") or near(text, NETWORKS)
        remedy = f"did you mean {meant!r}?" if meant else f"use one of {', '.join(NETWORKS)}, or leave it out"
        raise table.error(f"there is no network {text!r}", "network", remedy=remedy)
    return text


def _resources(table: Table) -> dict[str, Any]:
    table.refuse_unknown(_RESOURCE_KEYS)
    found: dict[str, Any] = {}
    for key, (field, hint) in _RESOURCES.items():
        if key in table.values:
            value = table.value(key, hint)
            assert isinstance(value, int)
            if value < 0:
                raise table.error(f"{value} cannot be meant", key, remedy="give 0 or more")
            found[field] = value
    if "compute_capability" in table.values:
        found["compute_capability"] = _capability(table)
    return found


def _capability(table: Table) -> tuple[int, int]:
    """ "9.0" as NVIDIA writes it; a bare 9.0 is read as well."""
    value = table.values["compute_capability"]
    text = str(value) if isinstance(value, str | float) and not isinstance(value, bool) else ""
    match = re.fullmatch(r"(\d{1,2})\.(\d)", text)
    if match is None:
        raise table.error(
            f"{value!r} is not a compute capability", "compute_capability", remedy='write it as "9.0" or "8.6"'
        )
    return int(match[1]), int(match[2])
