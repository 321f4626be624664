"""What is wrong with RDMA ports: links that are down, come and go, are slow or full of errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from llmgw.node.problems.memory import Baseline, Facts, PortPast, Symptom
from llmgw.node.problems.peers import below, figure, spelled
from llmgw.rdma.counters import CEILINGS, delta, saturated
from llmgw.rdma.gids import address_of, choose
from llmgw.wire.facts import Grade, Port, PortLoad, Problem

HOUR, MINUTE, DAY = 3600.0, 60.0, 86400.0

#: A link that went away so often in so many seconds flaps. The second rule is the one large fleets use for a day.
FLAPS = ((3, 10 * MINUTE), (5, DAY))
#: A link that stays away so long was dropped, not merely interrupted.
DROP = 4 * MINUTE
#: After flapping, a link must hold this long.
STICKY = 10 * MINUTE
#: An InfiniBand link that waits so long for its subnet manager has none.
MANAGER_WITHIN = 15.0

#: Growth per hour from which a counter is named. Congestion is not in here: it is no fault.
ERRORS = {
    "symbol_error": 120,
    "link_error_recovery": 3,
    "port_rcv_errors": 10,
    "local_link_integrity_errors": 3,
    "excessive_buffer_overrun_errors": 3,
    "port_rcv_remote_physical_errors": 10,
    "port_xmit_discards": 1000,
    "port_xmit_constraint_errors": 10,
    "port_rcv_constraint_errors": 10,
    "out_of_sequence": 10_000,
    "packet_seq_err": 10_000,
    "local_ack_timeout_err": 10,
    "rnr_nak_retry_err": 10_000,
    "roce_adp_retrans_to": 10,
    "rx_icrc_encapsulated": 1,
    "completer_retry_err": 1000,
    "retry_exceeded_err": 1,
}
#: Counters whose ceiling hides faults, so that reaching it is told.
WATCHED = frozenset(ERRORS) | {"link_downed"}
BASELINE_EVERY = 5 * MINUTE


def name_of(port: Port | PortLoad) -> str:
    return port.device if port.number == 1 else f"{port.device}/{port.number}"


def subject(port: Port | PortLoad) -> str:
    return f"port:{port.device}/{port.number}"


def _symptom(port: Port, code: str, grade: Grade, text: str, remedy: str, **times: float) -> Symptom:
    words = f"{name_of(port)}: {text}"
    return Symptom(Problem(subject=subject(port), code=code, grade=grade, text=words, remedy=remedy), **times)


def _active(state: str) -> bool:
    return state.startswith("ACTIVE")


# --- history -------------------------------------------------------------------------------------------------


def remembered(facts: Facts, past: dict[str, PortPast], now: float) -> dict[str, PortPast]:
    """Each port's history with this look added. Ports that vanished are kept, so that they can be missed."""
    found = dict(past)
    known = {subject(port): port for port in facts.ports.ports}
    for load in facts.ports.loads:
        name = subject(load)
        found[name] = _grown(past.get(name, PortPast()), load, known.get(name), now)
    return found


def _grown(old: PortPast, load: PortLoad, port: Port | None, now: float) -> PortPast:
    active = _active(load.state)
    count = load.counters.get("link_downed")
    # A link may have gone and come back between two looks: the counter knows.
    counted = delta("link_downed", old.link_downed, count) if count is not None else None
    fell = int(_active(old.state) and not active)
    times = max(fell, counted or 0)
    downs = (*(at for at in old.downs if now - at <= DAY), *([now] * min(times, 100)))[-200:]
    watched = {name: value for name, value in load.counters.items() if name in ERRORS}
    baselines = tuple(each for each in old.baselines if now - each.at <= HOUR)
    if not baselines or now - baselines[-1].at >= BASELINE_EVERY:
        baselines = (*baselines, Baseline(now, watched))
    return PortPast(
        state=load.state,
        up_at=now if active else old.up_at,
        down_since=None if active else old.down_since or now,
        downs=downs,
        link_downed=count if count is not None else old.link_downed,
        baselines=baselines,
        seen_at=now,
        pci=port.pci if port else old.pci,
        vf=port.vf if port else old.vf,
    )


# --- symptoms ------------------------------------------------------------------------------------------------


def ports(facts: Facts, past: dict[str, PortPast], now: float) -> Iterator[Symptom]:
    """Everything about ports; `past` already has this look in it."""
    loads = {subject(load): load for load in facts.ports.loads}
    groups: dict[tuple[str, str], list[Port]] = defaultdict(list)
    for port in facts.ports.ports:
        groups[port.role, port.kind].append(port)
    for (role, _), peers in sorted(groups.items()):
        if role == "vf":
            continue
        for port in peers:
            load = loads.get(subject(port))
            if load is None:
                continue
            history = past.get(subject(port), PortPast())
            yield from _link(port, load, history, peers, loads, now)
            yield from _counters(port, load, history, now)
            yield from _reachable(port, load)
        yield from _against_peers(peers, loads)
    yield from _shut([port for port in facts.ports.ports if port.role != "vf"])
    yield from _gone(facts, past, now)


def _link(
    port: Port, load: PortLoad, past: PortPast, peers: list[Port], loads: dict[str, PortLoad], now: float
) -> Iterator[Symptom]:
    flapping = next(
        ((count, window) for most, window in FLAPS if (count := sum(now - at <= window for at in past.downs)) >= most),
        None,
    )
    if flapping:
        count, window = flapping
        span = "24 h" if window == DAY else f"{window / MINUTE:.0f} min"
        yield _symptom(
            port,
            "port-flapping",
            Grade.BAD if window < DAY and port.role == "fabric" else Grade.WARN,
            f"its link went away {count} times in {span}",
            "clean or exchange the cable or transceiver; compare with the switch's port",
            clear=STICKY,
        )
    if not load.state or _active(load.state):
        return
    up = sum(1 for peer in peers if peer is not port and (other := loads.get(subject(peer))) and _active(other.state))
    others = f"; {spelled(up)} of its {spelled(len(peers) - 1)} peers are up" if up else ""
    others = others or ("; none of its peers is up" if len(peers) > 1 else "")
    since = past.down_since if past.down_since is not None else now
    long = f" for {round((now - since) / MINUTE)} min" if now - since >= DROP else ""
    waits = load.state in ("INIT", "ARMED")
    if waits and port.kind in ("ib", "opa"):
        yield _symptom(
            port,
            "port-no-manager",
            Grade.BAD if port.role == "fabric" else Grade.WARN,
            f"the link is up and in state {load.state}{long}: no subnet manager has configured it{others}",
            f"check that a subnet manager runs on this fabric: {'sminfo' if port.kind == 'ib' else 'opafabricinfo'}",
            after=MANAGER_WITHIN,
        )
        return
    if load.physical_state == "Disabled":
        yield _symptom(
            port,
            "port-disabled",
            Grade.WARN if up and port.role == "fabric" else Grade.NOTE,
            f"down by administration (phys_state Disabled){long}{others}",
            f"ibportstate -C {port.device} -P {port.number} -D 0 {port.number} enable"
            if port.kind == "ib"
            else f"ip link set {port.netdev or 'IFACE'} up",
        )
        return
    was_up = past.up_at is not None
    expected = was_up or 2 * up > len(peers)
    if port.role == "fabric":
        grade = Grade.BAD if was_up else Grade.WARN if expected else Grade.NOTE
    else:
        grade = Grade.WARN if was_up else Grade.NOTE
    how = "was up before" if was_up else "never seen up by this agent"
    what = "not active" if waits else "dropped" if was_up and now - since >= DROP else "down"
    yield _symptom(
        port,
        "port-down",
        grade,
        f"{what}{long} ({load.state}, {load.physical_state or 'physical state unknown'}; {how}){others}",
        _cure(port, load.physical_state),
        after=MANAGER_WITHIN if waits else 0.0,
    )


def _shut(ports: list[Port]) -> Iterator[Symptom]:
    """A container is often given some of the machine's adapters: the others are none of its troubles."""
    grade = Grade.WARN if all(port.shut for port in ports) else Grade.NOTE
    for port in ports:
        if port.shut:
            text = f"no program here can open it ({port.shut})"
            yield _symptom(port, "port-shut", grade, text, "pass the device into this container, or chmod 666 it")


#: What a port's physical state says of its cable.
CURES = {
    "Polling": "Polling: no cable, or nothing at its other end; check cable, transceiver and switch port",
    "LinkErrorRecovery": "its signal is lost again and again: clean or exchange the cable or transceiver",
    "PortConfigurationTraining": "both ends do not agree on a speed: compare their settings, exchange the cable",
}


def _cure(port: Port, physical: str) -> str:
    if port.kind == "efa":
        return f"ip link set {port.netdev or 'IFACE'} up; see the instance's network interfaces"
    return CURES.get(physical) or f"check cable, transceiver and switch port; {_log(port)}"


def _log(port: Port) -> str:
    """Where the driver says more."""
    return f"dmesg | grep {port.driver or port.device}"


def _counters(port: Port, load: PortLoad, past: PortPast, now: float) -> Iterator[Symptom]:
    base = past.baselines[0] if past.baselines else None
    if base is not None and now > base.at:
        hours = max((now - base.at) / HOUR, BASELINE_EVERY / HOUR)
        grown = []
        for name, limit in ERRORS.items():
            value = load.counters.get(name)
            moved = delta(name, base.counters.get(name), value) if value is not None else None
            # Few events are compared with the limit as they are: one in a minute is not sixty in an hour.
            if moved is not None and moved >= limit and moved / hours >= limit:
                grown.append(
                    f"{name} grew by {moved} in {max(1, round((now - base.at) / MINUTE))} min (limit {limit}/h)"
                )
        if grown:
            yield _symptom(
                port,
                "port-errors",
                Grade.WARN,
                "; ".join(grown),
                "clean or exchange the cable; compare with the other end's counters",
                clear=STICKY,
            )
    full = [
        f"{name} = {CEILINGS[name]}"
        for name in sorted(WATCHED & load.counters.keys())
        if saturated(name, load.counters[name])
    ]
    if full:
        yield _symptom(
            port,
            "port-counters-full",
            Grade.NOTE,
            f"at the ceiling, so growth cannot be seen any more: {', '.join(full)}",
            f"perfquery -C {port.device} -P {port.number} -R"
            if port.kind == "ib"
            else "they begin anew when the driver is loaded again",
        )


def _reachable(port: Port, load: PortLoad) -> Iterator[Symptom]:
    core = [words for words in port.unreadable if "/" not in words]
    if core:
        text = f"cannot be read: {', '.join(core)}"
        yield _symptom(port, "port-unreadable", Grade.WARN, text, f"check the driver: {_log(port)}")
    if not _active(load.state):
        return
    if port.kind == "roce" and port.role == "fabric":
        gid, reason = choose(port)
        remedy = f"ip addr add ADDRESS/PREFIX dev {port.netdev or 'IFACE'}"
        if gid is None:
            yield _symptom(port, "port-no-gid", Grade.WARN, reason, remedy)
        elif (address := address_of(gid.gid)) is not None and address.is_link_local:
            text = f"only link-local GIDs, the best is {address} at index {gid.index}: no router passes them on"
            yield _symptom(port, "port-link-local", Grade.NOTE, text, remedy)
        if port.mtu is not None and port.mtu < 4096:
            yield _symptom(
                port,
                "port-small-mtu",
                Grade.NOTE,
                f"RDMA MTU {port.mtu}: every packet carries more overhead than with 4096",
                f"ip link set {port.netdev or 'IFACE'} mtu 4200, on switches too",
            )
    if port.kind == "ib" and port.lid is None and not any(words.startswith("lid:") for words in core):
        yield _symptom(port, "port-no-lid", Grade.WARN, "active without a LID", "check the subnet manager: sminfo")


def _against_peers(peers: list[Port], loads: dict[str, PortLoad]) -> Iterator[Symptom]:
    by_name = {subject(port): port for port in peers}
    grade = Grade.WARN
    rates = {
        name: load.rate_gbps
        for name in by_name
        if (load := loads.get(name)) is not None and _active(load.state) and load.rate_gbps
    }
    for name, value, common in below(rates):
        text = f"{figure(value)} Gb/s, {common.others} {figure(common.value)}"
        remedy = "compare width and speed at both ends: iblinkinfo, or ethtool; exchange the cable"
        yield _symptom(by_name[name], "port-slow", grade, text, remedy)
    for what, code, values in (
        ("PCIe x", "port-pcie-width", {n: float(p.pcie_width) for n, p in by_name.items() if p.pcie_width}),
        ("PCIe generation ", "port-pcie-speed", {n: float(p.pcie_gen) for n, p in by_name.items() if p.pcie_gen}),
        ("RDMA MTU ", "port-odd-mtu", {n: float(p.mtu) for n, p in by_name.items() if p.mtu and n in rates}),
    ):
        for name, value, common in below(values):
            text = f"{what}{figure(value)}, {common.others} {figure(common.value)}"
            yield _symptom(by_name[name], code, grade, text, "reseat the adapter; compare the settings of its peers")
    yield from _odd_firmware(peers)


def _odd_firmware(peers: Iterable[Port]) -> Iterator[Symptom]:
    versions: dict[str, dict[str, list[Port]]] = defaultdict(lambda: defaultdict(list))
    for port in peers:
        if port.firmware and port.board:
            versions[port.board][port.firmware].append(port)
    for by_version in versions.values():
        if len(by_version) < 2:
            continue
        most = max(by_version, key=lambda version: (len(by_version[version]), version))
        for version, having in by_version.items():
            if 2 * len(having) < len(by_version[most]):
                for port in having:
                    text = f"firmware {version}, the other {spelled(len(by_version[most]))} {most}"
                    yield _symptom(port, "port-odd-firmware", Grade.NOTE, text, "flash the same firmware on all")


def _gone(facts: Facts, past: dict[str, PortPast], now: float) -> Iterator[Symptom]:
    present = {subject(port) for port in facts.ports.ports}
    for name, history in sorted(past.items()):
        if name in present or history.vf or facts.ports.at is None or history.up_at is None:
            continue
        # A soft device has no place on a bus: somebody took it away on purpose.
        grade = Grade.BAD if history.pci else Grade.NOTE
        where = f" (it was at {history.pci})" if history.pci else ""
        text = f"{name.removeprefix('port:')}: the adapter is gone{where}"
        remedy = "look at dmesg | grep -i -e mlx5 -e pcie; power-cycle the node, reseat the adapter"
        yield Symptom(Problem(subject=name, code="port-missing", grade=grade, text=text, remedy=remedy))
    for device, since in sorted(facts.ports.silent.items()):
        if now - since < 5:
            continue
        found = next((port for port in facts.ports.ports if port.device == device), Port(device=device))
        text = f"its files do not answer for {round(now - since)} s: the driver or the adapter hangs"
        yield _symptom(found, "adapter-silent", Grade.BAD, text, f"look at {_log(found)}; a reboot is likely needed")


def kernel(facts: Facts, now: float) -> Iterator[Symptom]:
    """What the kernel's log says of adapters."""
    by_pci = {port.pci: port for port in facts.ports.ports if port.pci}
    meanings = {
        "mlx5-health": (Grade.BAD, "the adapter's health is compromised", "power-cycle the node; update the firmware"),
        "module-error": (Grade.WARN, "its cable or transceiver has a fault", "exchange the transceiver or cable"),
        "pcie-error": (Grade.WARN, "PCIe errors", "reseat the adapter; check its slot"),
    }
    for event in reversed(facts.events):
        port = by_pci.get(event.pci)
        if event.kind not in meanings or port is None or now - event.at > HOUR / 2:
            continue
        grade, words, remedy = meanings[event.kind]
        yield _symptom(port, event.kind, grade, f"{words} [{event.text[:200]}]", remedy, clear=STICKY)
