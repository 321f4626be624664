"""What of a node is worth a line in the log when it changes (B7): fabrics, NVLink, IMEX, memory, engines. Pure."""

from __future__ import annotations

from collections import Counter

from llmgw.wire.agent import Register
from llmgw.wire.facts import Imex, InstallState


def traits(facts: Register) -> dict[str, str]:
    """A node's lasting character in words, by name. Subnet managers have events of their own (B6)."""
    fabrics = {port.fabric for port in facts.ports if port.fabric and port.role == "fabric"}
    domains = Counter(gpu.fabric.domain for gpu in facts.gpus if gpu.fabric is not None and gpu.fabric.domain)
    readable = sum(not gpu.unreadable for gpu in facts.gpus)
    installed = [i for i in facts.installs if i.state is InstallState.INSTALLED]
    return {
        "fabrics": ", ".join(sorted(fabrics)),
        "nvlink": ", ".join(f"{domain} ({_gpus(count)})" for domain, count in sorted(domains.items())),
        "imex": _imex(facts.imex),
        "memory": f"{facts.host.memory_bytes / (1 << 30):.1f} GiB",
        "gpus": f"{readable} of {len(facts.gpus)} readable" if facts.gpus else "",
        "engines": ", ".join(sorted(f"{i.engine} {i.version}".strip() for i in installed)),
        "provision": ", ".join(
            sorted(
                f"{i.engine} {i.version}".strip() + f" {i.state.value}"
                for i in facts.installs
                if i.state is not InstallState.INSTALLED
            )
        ),
    }


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count != 1 else ''}"


def _imex(imex: Imex | None) -> str:
    if imex is None:
        return ""
    words = [imex.state, f"{len(imex.nodes)} nodes" if imex.nodes else "", f"{imex.channels} channels"]
    words += [f"not connected to {', '.join(imex.disconnected)}" if imex.disconnected else ""]
    words += [f"differs from {', '.join(imex.mismatch)}" if imex.mismatch else ""]
    return ", ".join(filter(None, words))


def difference(before: dict[str, str], after: dict[str, str]) -> dict[str, tuple[str, str]] | None:
    """What changed, as (before, after) by name; None when nothing did."""
    changed = {name: (before[name], after[name]) for name in after if before[name] != after[name]}
    return changed or None
