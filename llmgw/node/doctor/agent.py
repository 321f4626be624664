"""Checks of the agent itself: its identity, its plane, its engines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import trio

from llmgw import pki
from llmgw.errors import LlmgwError, NotFound
from llmgw.node import files
from llmgw.node.doctor.check import Number, check, check_async, fail, ok, skipped, warn
from llmgw.node.doctor.patient import Patient
from llmgw.node.engines.places import whereabouts
from llmgw.node.identity import Identity
from llmgw.node.installs.shelf import Shelf
from llmgw.wire.control import Finding

ENGINES = ("llamacpp", "vllm", "sglang")
CONNECT_WITHIN = 2.5
REJOIN = "join again: llmgw-node join URL --token TOKEN --again"


@check("agent.identity")
def identity(patient: Patient) -> Iterator[Finding]:
    if patient.settings.insecure:
        yield warn("insecure mode: this node has no identity", "join a plane: llmgw-node join URL --token TOKEN")
        return
    try:
        mine = Identity.load(patient.settings.directory)
    except NotFound as error:
        yield skipped(str(error))
        return
    except LlmgwError as error:
        yield fail(error.what, error.remedy or REJOIN)
        return
    left = mine.peer.not_after - time.time()
    text = f"{mine.node}, certificate good until {pki.utc(mine.peer.not_after)}"
    if left <= 0:
        yield fail(f"{text}: expired", REJOIN, seconds_left=round(left))
    elif mine.renew_due(time.time() - 3600):
        yield warn(
            f"{text}: its renewal is overdue",
            "is the plane reachable? journalctl -u llmgw-node",
            seconds_left=round(left),
        )
    else:
        yield ok(text, seconds_left=round(left))


@check_async("agent.plane")
async def plane(patient: Patient) -> Sequence[Finding]:
    if not patient.settings.addresses:
        return [skipped("this node knows no plane")]
    found = []
    for address in patient.settings.addresses[:3]:
        where = f"{address.host}:{address.port}"
        began = trio.current_time()
        try:
            with trio.move_on_after(CONNECT_WITHIN / min(3, len(patient.settings.addresses))) as scope:
                stream = await trio.open_tcp_stream(address.host, address.port)
                await stream.aclose()
        except OSError as error:
            found.append(
                fail(f"{where} cannot be reached: {error.strerror or error}", f"nc -vz {address.host} {address.port}")
            )
            continue
        if scope.cancelled_caught:
            remedy = "check routes and firewalls on the way; agents dial out, nothing dials in"
            found.append(fail(f"{where} does not answer", remedy))
        else:
            took = round((trio.current_time() - began) * 1000, 1)
            found.append(ok(f"{where} takes connections ({took} ms)", milliseconds=took))
    return found


@check("agent.engines")
def engines(patient: Patient) -> Iterator[Finding]:
    commands = {name: engine.command for name, engine in patient.settings.engines.items()}
    found = {name: place for name in ENGINES if (place := whereabouts(name, commands)) is not None}
    shelf = Shelf(patient.settings.path(patient.settings.installs.directory))
    # Of several that the agent installed the newest stands for all.
    found |= {kept.record.engine: kept.place for kept in shelf.all() if kept.record.engine not in found}
    missing = [name for name in commands if name not in found]
    if missing:
        yield fail(
            f"the settings name a program for {', '.join(missing)} that is not there", "correct [engines] in node.toml"
        )
    elif found:
        told = ", ".join(f"{name} ({place.command[0]})" for name, place in found.items())
        yield ok(f"engines: {told}", engines=len(found))
    else:
        how = "name one in [engines] of the plane, or install llama-server, vLLM or SGLang"
        yield warn("no engine is installed: no model can run here", how, engines=0)


@check("agent.ports")
def ports(patient: Patient) -> Iterator[Finding]:
    wanted = patient.settings.engine_ports
    taken = sorted(port for port in listening(patient) if wanted.first <= port <= wanted.last)
    room = wanted.last - wanted.first + 1 - len(taken)
    numbers: dict[str, Number] = {"free": room, "taken": len(taken)}
    if room < 16:
        yield warn(f"{room} of the ports {wanted} for engines are free", "widen engine_ports in node.toml", **numbers)
    else:
        yield ok(f"{room} of the ports {wanted} for engines are free", **numbers)


def listening(patient: Patient) -> set[int]:
    """TCP ports that somebody listens on, by /proc."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in (files.text(patient.view.at(f"proc/net/{name}")) or "").splitlines()[1:]:
            words = line.split()
            if len(words) > 3 and words[3] == "0A":
                found.add(int(words[1].rpartition(":")[2], 16))
    return found
