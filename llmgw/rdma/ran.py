"""What a run of an InfiniBand tool came to, and in words why it failed.

The tools of infiniband-diags mix their outcomes: a map without links ends with 0, counters over a threshold
end with 1, the `iberror` line goes to standard output and `ibwarn` to standard error. So both streams and
the exit status are judged together, here and nowhere else. Pure.
"""

from __future__ import annotations

import re

import attrs


@attrs.frozen
class Ran:
    """One run of a tool: its streams as text, its exit status, and whether its time limit ended it.

    `exit` is negative for a signal and None when the tool could not be started; 255 is the tools' -1.
    """

    tool: str
    exit: int | None
    out: str = ""
    err: str = ""
    seconds: float = 0.0
    timed_out: bool = False
    argv: tuple[str, ...] = ()


@attrs.frozen
class Trouble:
    """Why a tool gave no answer. `code` is a stable word; `text` and `remedy` are for a person.

    Codes: "not-installed", "timed-out", "crashed", "no-umad", "no-permission", "no-device", "roce", "no-sm",
    "sm-silent", "port-down", "failed".
    """

    code: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.text}: {self.remedy}" if self.remedy else self.text


_UNANSWERED = re.compile(r"bad status \d+|timed out|_do_madrpc failed|recv failed")
_CANNOT_OPEN = re.compile(r"can't open UMAD port \((?P<device>.*?):\d+\)|Failed to open '?(?P<other>[^' ]*)'?")
_DESTINATION = re.compile(r"dport \((?P<where>[^)]*)\)")
_SM_LID = re.compile(r"Lid (\d+)")
_UMAD = (
    "run modprobe ib_umad; in a container, pass /dev/infiniband in; "
    "run the agent as root or give its user the right to read and write these devices"
)


def unanswered(ran: Ran) -> bool:
    """Whether something on the fabric did not answer during this run: then what it printed has holes."""
    return bool(_UNANSWERED.search(ran.err) or _UNANSWERED.search(ran.out))


def silent_lid(ran: Ran) -> int | None:
    """The LID that a query went to and that did not answer; 0: it had nowhere to go. None: no such line.

    `sminfo` asks the LID that the port was last given as its subnet manager's; a port that never had one
    asks along a directed route to itself.
    """
    found = _DESTINATION.search(ran.err)
    if not found:
        return None
    lid = _SM_LID.search(found["where"])
    return int(lid[1]) if lid else 0


def trouble(ran: Ran, *, port_down: bool = False, can_read_umad: bool | None = None) -> Trouble | None:
    """Why this run gave no answer, None when it gave one (which may still have holes: see `unanswered`).

    `port_down` is what sysfs says of the local port and `can_read_umad` whether there is a /dev/infiniband/umad* that
    may be opened (None: nobody looked): the tools themselves print the same line where there is none (in a container),
    for a missing right and for a wrong device name.
    """
    tool, said = ran.tool, f"{ran.out}\n{ran.err}"
    if ran.exit is None:
        return Trouble(
            "not-installed",
            f"{tool} cannot be run ({ran.err.strip() or 'not found'})",
            "install the package infiniband-diags",
        )
    if ran.timed_out:
        return Trouble(
            "timed-out",
            f"{tool} did not end within {ran.seconds:.0f} s",
            "many silent switches make a scan slow; raise the time limit or look for dead switches",
        )
    if ran.exit < 0:
        return Trouble("crashed", f"{tool} was ended by signal {-ran.exit}")
    if "can't read ABI version" in said:
        return Trouble(
            "no-umad", f"{tool} finds no MAD device: the kernel module ib_umad is not loaded", "run modprobe ib_umad"
        )
    if "Permission denied" in said or (can_read_umad is False and _CANNOT_OPEN.search(said)):
        return Trouble("no-permission", f"{tool} finds no /dev/infiniband/umad* that it may open", _UMAD)
    if "client_register for mgmt" in said:
        return Trouble(
            "roce",
            f"{tool} was asked through a port that is not InfiniBand (RoCE has no fabric to scan)",
            "name an InfiniBand port",
        )
    if "No SM/SA found on port" in said:
        # saquery says the same line without any MAD device; only the panic's errno differs then (none was set).
        if "Failed to bind to the SA: Success" in said:
            return Trouble("no-umad", f"{tool} finds no MAD device", "run modprobe ib_umad")
        return _no_sm(tool)
    opened = _CANNOT_OPEN.search(said)
    if opened or "umad_open_port" in said:
        name = (opened and (opened["device"] or opened["other"])) or ""
        if name in ("", "(null)", "(null):0"):
            # It was told no name and took the first device that there is.
            return Trouble("no-umad", f"{tool} finds no MAD device that it may open (/dev/infiniband/umad*)", _UMAD)
        return Trouble(
            "no-device",
            f"{tool} cannot open the port {name}: no such InfiniBand device",
            "see `ibstat -l` for the devices of this node",
        )
    if ran.exit == 0 or (ran.exit == 1 and tool == "ibqueryerrors"):
        return None
    silent = unanswered(ran) or (tool == "sminfo" and _last_line(ran).endswith("iberror: failed: query"))
    if port_down and silent:
        return Trouble("port-down", f"{tool} gets no answer: the local port is down", "check the cable of this port")
    if tool in ("sminfo", "saquery", "perfquery") and silent:
        lid = silent_lid(ran)
        if lid == 0:
            return _no_sm(tool)
        where = f" at LID {lid}" if lid else ""
        return Trouble(
            "sm-silent",
            f"the subnet manager{where} does not answer {tool}",
            "it stopped, hangs, or the path to it is broken; see the fabric's managers",
        )
    line = _last_line(ran)
    return Trouble("failed", f"{tool} failed with exit status {ran.exit}{': ' + line if line else ''}")


def _no_sm(tool: str) -> Trouble:
    return Trouble(
        "no-sm",
        f"{tool} finds no subnet manager: the port was never given a LID; the cable may be fine",
        "start a subnet manager (opensm, UFM or a managed switch's)",
    )


def _last_line(ran: Ran) -> str:
    lines = [line.strip() for line in f"{ran.err}\n{ran.out}".splitlines() if line.strip()]
    said = [line for line in lines if "iberror" in line or "ibpanic" in line or "Fatal" in line]
    return (said or lines or [""])[-1][:300]
