"""Checks that hold for every engine: what was asked for against what this node has."""

from __future__ import annotations

from collections.abc import Iterator

from llmgw.node.engines import Objection, source_of
from llmgw.node.engines.contents import Contents
from llmgw.wire.agent import Register
from llmgw.wire.facts import ShardSpec

_WHAT = {
    "missing-weights": "check the profile's source",
    "broken-weights": "fetch the model again",
}


def general(spec: ShardSpec, facts: Register, contents: Contents | None) -> Iterator[Objection]:
    """GPUs there and well, threads and memory there, the model's files complete, the context within the model's."""
    path, hub, _ = source_of(spec.source)
    if path is None and not hub:
        yield Objection(
            "missing-weights",
            f"the source {spec.source!r} is neither a path nor a hub's name",
            "give an absolute path, or hf://org/model",
        )
    yield from _gpus(spec, facts)
    resources, host = spec.resources, facts.host
    if resources.cpu_threads > host.cpu.threads:
        yield Objection(
            "not-enough-cpu",
            f"{resources.cpu_threads} CPU threads were asked for and this node has {host.cpu.threads}",
            "ask for fewer",
        )
    if host.memory_bytes and resources.memory_bytes > host.memory_bytes:
        yield Objection(
            "not-enough-memory",
            f"{_gib(resources.memory_bytes)} of memory were asked for and this node has {_gib(host.memory_bytes)}",
            "ask for less",
        )
    if spec.rank and spec.rank >= len(spec.peers):
        yield Objection("bad-shape", f"rank {spec.rank} of {len(spec.peers)} members", "")
    if contents is None:
        return
    for fault in contents.faults:
        yield Objection(fault.code, fault.text, _WHAT.get(fault.code, ""))
    if spec.context is not None and contents.context is not None and spec.context > contents.context:
        yield Objection(
            "context-too-long",
            f"a context of {spec.context} tokens was asked for and the model was made for {contents.context}",
            "lower the context",
        )


def _gpus(spec: ShardSpec, facts: Register) -> Iterator[Objection]:
    gpus = {gpu.uuid: gpu for gpu in facts.gpus}
    slices = {mig.uuid: gpu for gpu in facts.gpus for mig in gpu.mig_devices}
    if len(spec.gpus) < spec.resources.gpus:
        yield Objection(
            "gpu-missing", f"{spec.resources.gpus} GPUs were asked for and {len(spec.gpus)} were chosen", ""
        )
    if len(set(spec.gpus)) != len(spec.gpus):
        yield Objection("bad-shape", "the same GPU was chosen twice", "")
    for uuid in spec.gpus:
        gpu = gpus.get(uuid) or slices.get(uuid)
        if gpu is None:
            yield Objection("gpu-missing", f"GPU {uuid} is not on this node", "")
            continue
        if gpu.unreadable:
            yield Objection(
                "gpu-missing", f"GPU {uuid} cannot be read: {gpu.unreadable}", "look at the node's problems"
            )
        # Its problems are for the plane to judge: an operator may have acknowledged one, which is not known here.
        if gpu.fabric is not None and gpu.fabric.state == "not-started":
            yield Objection(
                "fabric-manager",
                f"GPU {uuid}: the fabric manager has not started its NVLink fabric, and CUDA fails with error 802",
                "systemctl restart nvidia-fabricmanager",
            )
        elif gpu.fabric is not None and gpu.fabric.state == "in-progress" and len(spec.gpus) > 1:
            yield Objection(
                "fabric-manager",
                f"GPU {uuid}: its NVLink fabric is not ready (In Progress), so it cannot work together with others",
                "wait some minutes after boot; then look at the fabric manager's log",
            )
        if gpu.mig_enabled and uuid in gpus:
            yield Objection("gpu-missing", f"GPU {uuid} is divided (MIG)", "choose one of its slices")
        need, has = spec.resources.compute_capability, gpu.compute_capability
        if need is not None and has is not None and has < need:
            yield Objection(
                "gpu-unsupported", f"GPU {uuid} has compute capability {has[0]}.{has[1]}, below {need[0]}.{need[1]}", ""
            )
        size = next((mig.memory_bytes for mig in gpu.mig_devices if mig.uuid == uuid), gpu.memory_bytes)
        if size is not None and spec.resources.gpu_memory_bytes > size:
            yield Objection(
                "not-enough-memory",
                f"{_gib(spec.resources.gpu_memory_bytes)} of GPU memory were asked for and {uuid} has {_gib(size)}",
                "",
            )


def memory(spec: ShardSpec, contents: Contents) -> Iterator[Objection]:
    """Whether weights and cache fit into the memory that all members of a CPU replica asked for."""
    most = spec.resources.memory_bytes * max(1, len(spec.peers))
    if not most:
        return
    if contents.bytes > most:
        yield Objection(
            "not-enough-memory",
            f"the weights alone are {_gib(contents.bytes)} and {_gib(most)} of memory were asked for",
            "ask for more memory",
        )
        return
    context = spec.context or contents.context
    if context and contents.kv_bytes_per_token:
        cache = context * contents.kv_bytes_per_token
        if contents.bytes + cache > most:
            yield Objection(
                "not-enough-memory",
                f"weights of {_gib(contents.bytes)} and a cache of {_gib(cache)} for {context} tokens "
                f"do not fit into the {_gib(most)} that were asked for",
                "ask for more memory, or lower the context",
            )


def gpu_weights(spec: ShardSpec, contents: Contents) -> Iterator[Objection]:
    """Whether the weights, spread evenly, fit into the GPU memory that was asked for."""
    each = spec.resources.gpu_memory_bytes
    count = len(spec.gpus) * max(1, len(spec.peers))
    if spec.gpus and each and contents.bytes > each * count:
        yield Objection(
            "not-enough-memory",
            f"the weights are {_gib(contents.bytes)} and the shard's GPUs offer {_gib(each * count)}",
            "ask for more GPUs or more GPU memory",
        )


def utilization(spec: ShardSpec, total: int | None) -> str | None:
    """The share of a GPU's memory that was reserved, as engines want it: two digits, rounded down, at most 0.98."""
    if not spec.resources.gpu_memory_bytes or not total:
        return None
    share = min(98, spec.resources.gpu_memory_bytes * 100 // total)
    return f"{max(1, share) / 100:.2f}"


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
