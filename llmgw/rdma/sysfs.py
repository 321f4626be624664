"""RDMA ports from what `/sys/class/infiniband/<device>` held when somebody read it.

A tree is a mapping from path below the device to text, or to the reason why there is none: any file may be
missing, refuse, or hold anything, and costs only itself. Pure: text in, `Port` and `PortLoad` out.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence

import attrs

from llmgw.wire.facts import Gid, Port, PortLoad


@attrs.frozen
class Unread:
    """A file that could not be read, and the kernel's word for it ("EINVAL", "EACCES", ...)."""

    reason: str


Tree = Mapping[str, "str | Unread"]

#: Data rate as a share of the figure that sysfs prints: 8b/10b below FDR; FDR prints 56 for 14.0625 x 64/66 a lane.
ENCODING = {"SDR": 0.8, "DDR": 0.8, "QDR": 0.8, "FDR": 4 * 14.0625 * 64 / 66 / 56}

#: What kernel drivers are named; names that udev gives to devices begin with other words.
NAMED_DRIVERS = ("mlx5", "mlx4", "irdma", "bnxt_re", "efa", "hfi1", "qedr", "rxe", "siw", "mana", "ionic", "erdma")
UNSET_LIDS = frozenset({0, 0xFFFF})

#: Files whose absence an operator should know of, and one more on InfiniBand; any other may be missing.
CORE, CORE_IB = ("state", "phys_state", "rate", "link_layer"), ("lid",)

_rate = re.compile(r"([\d.]+)\s*Gb/sec(?:\s*\((\d+)X\s*([A-Z0-9]+)\))?")
_word = re.compile(r"^\s*\d+\s*:\s*(.*)$")
_pci = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

#: Everything that precedes a RoCE packet's payload in the kernel's reckoning (iboe_get_mtu), in bytes.
ROCE_HEADERS = 96
MTUS = (4096, 2048, 1024, 512, 256)

#: PCIe generation by sysfs's words for its speed.
GENERATIONS = {"2.5": 1, "5": 2, "5.0": 2, "8": 3, "8.0": 3, "16.0": 4, "16": 4, "32.0": 5, "32": 5, "64.0": 6, "64": 6}

#: RDMA node types that speak iWARP or nothing that the ib_* tools speak (4: RNIC, 5 and 6: usNIC).
OTHER_NODES = frozenset({"4", "5", "6"})
#: "7: unspecified" is what EFA calls itself; its node GUID is zero and its state always ACTIVE.
UNSPECIFIED, AMAZON = "7", "0x1d0f"


def text(tree: Tree, path: str) -> str:
    """A file's text, "" when it has none."""
    found = tree.get(path)
    return found.strip() if isinstance(found, str) else ""


def integer(words: str, base: int = 0) -> int | None:
    """A whole number as the kernel writes it: decimal, or hexadecimal with 0x."""
    try:
        return int(words, base)
    except ValueError:
        return None


def word(words: str) -> str:
    """`4: ACTIVE` is ACTIVE."""
    found = _word.match(words)
    return found[1].strip() if found else words


def guid(words: str) -> str:
    """A GUID in 16 hexadecimal digits; "" when it is zero or none: zero identifies nothing (GI08)."""
    value = integer("0x" + words.lower().removeprefix("0x").replace(":", ""), 16) if words else None
    return f"{value:016x}" if value is not None and 0 < value < 1 << 64 else ""


def gbps(words: str, ethernet: bool = False) -> float | None:
    """`400 Gb/sec (4X NDR)` as what the link carries as data. None when unknown or zero (SY14).

    On Ethernet the words in brackets only name the nearest InfiniBand figure: nothing is to be taken off.
    """
    found = _rate.match(words.strip())
    try:
        value = float(found[1]) if found else 0.0
    except ValueError:
        return None
    if found is None or not 0 < value < 1e6:
        return None
    share = 1.0 if ethernet else ENCODING.get(found[3] or "", 1.0)
    return round(value * share, 3)


def kind_of(tree: Tree, device: str, number: str, driver: str) -> str:
    """ "ib", "roce", "efa", "opa" or "other"; the link layer decides, but not for those that only borrow its words."""
    layer = text(tree, f"ports/{number}/link_layer").lower()
    node = text(tree, "node_type").partition(":")[0].strip()
    named = layer not in ("infiniband", "ethernet") and (node == UNSPECIFIED or device.startswith("rdmap"))
    if driver == "efa" or named or (text(tree, "device/vendor") == AMAZON and layer != "ethernet"):
        return "efa"
    if driver.startswith("hfi") or device.startswith(("hfi", "opap")):
        return "opa"
    if node in OTHER_NODES:
        return "other"
    if not layer:  # kernels and drivers from before the file, and files that cannot be read
        return _kind_by_traces(tree, number)
    return {"infiniband": "ib", "ethernet": "roce"}.get(layer, "other")


def _kind_by_traces(tree: Tree, number: str) -> str:
    """Without a word on the link layer: RoCE has types in its GID table, InfiniBand has a LID."""
    types = {text(tree, path) for path in tree if path.startswith(f"ports/{number}/gid_attrs/types/")}
    if any("v2" in each for each in types):
        return "roce"
    return "ib" if lid(text(tree, f"ports/{number}/lid")) is not None else "other"


def driver_of(tree: Tree, device: str) -> str:
    """The kernel driver: by its link, else by the device's name where that is still the driver's."""
    driver = text(tree, "@driver")
    if driver:
        return {"mlx5_core": "mlx5", "mlx4_core": "mlx4", "ice": "irdma", "i40e": "irdma"}.get(driver, driver)
    if text(tree, "parent") and device.startswith(("rxe", "siw")):
        return device[:3]
    return next((name for name in NAMED_DRIVERS if device.startswith(name)), "")


def numbers(tree: Tree) -> tuple[str, ...]:
    """The ports' numbers, in order."""
    found = {path.split("/")[1] for path in tree if path.startswith("ports/")}
    return tuple(sorted(filter(_index, found), key=int))


def _index(words: str) -> bool:
    """Whether a file's name is a port's or a row's number."""
    return words.isascii() and words.isdecimal() and len(words) <= 5


def gids(tree: Tree, number: str) -> Iterator[Gid]:
    """The rows of a port's GID table that hold something. An unreadable type is "", not an error (GI03)."""
    prefix = f"ports/{number}/gids/"
    rows = sorted(int(path[len(prefix) :]) for path in tree if path.startswith(prefix) and _index(path[len(prefix) :]))
    for index in rows:
        value = text(tree, f"{prefix}{index}")
        if value and value.strip("0:"):
            yield Gid(
                index,
                value,
                text(tree, f"ports/{number}/gid_attrs/types/{index}"),
                text(tree, f"ports/{number}/gid_attrs/ndevs/{index}"),
            )


def ports(device: str, tree: Tree) -> tuple[Port, ...]:
    """Every port of one adapter; roles, rails and labels are for whoever knows the others (`roles`)."""
    return tuple(_port(device, tree, number) for number in numbers(tree))


def _port(device: str, tree: Tree, number: str) -> Port:
    below = f"ports/{number}/"
    driver = driver_of(tree, device)
    kind = kind_of(tree, device, number, driver)
    table = tuple(gids(tree, number))
    first = next((row.gid for row in table if row.index == 0), "")
    netdev = netdev_of(tree, number, table)
    state = state_of(tree, number, kind, netdev)
    speed = speed_of(tree, netdev)
    netdev_mtu = integer(text(tree, f"@net/{netdev}/mtu"))
    bonded = bool(text(tree, f"@net/{netdev}/bonding"))
    pci = text(tree, "@pci").lower()
    up = linked(state)
    return Port(
        device=device,
        number=int(number),
        kind=kind,
        driver=driver,
        state=state,
        physical_state=word(text(tree, below + "phys_state")),
        rate_gbps=rate_of(tree, number, kind, speed, bonded) if up else None,
        rate_text=text(tree, below + "rate"),
        link_layer=text(tree, below + "link_layer"),
        node_guid=guid(text(tree, "node_guid")),
        system_guid=guid(text(tree, "sys_image_guid")),
        port_guid=_half(first, 64) if kind in ("ib", "opa") else "",
        prefix=_half(first, 0) if kind in ("ib", "opa") else "",
        lid=lid(text(tree, below + "lid")) if kind in ("ib", "opa") and up else None,
        sm_lid=lid(text(tree, below + "sm_lid")) if kind in ("ib", "opa") and up else None,
        gids=table,
        netdev=netdev,
        netdev_speed_mbps=speed,
        mtu=roce_mtu(netdev_mtu) if kind == "roce" else None,
        firmware=text(tree, "fw_ver"),
        board=text(tree, "board_id"),
        hca_type=text(tree, "hca_type"),
        pci=pci if _pci.fullmatch(pci) else "",
        pcie_gen=generation(text(tree, "device/current_link_speed")),
        pcie_width=width(text(tree, "device/current_link_width")),
        pcie_gen_max=generation(text(tree, "device/max_link_speed")),
        pcie_width_max=width(text(tree, "device/max_link_width")),
        numa_node=_numa(text(tree, "device/numa_node")),
        vf=bool(text(tree, "@physfn")),
        bond=netdev if bonded else text(tree, f"@net/{netdev}/master") if text(tree, f"@net/{netdev}/slave") else "",
        unreadable=tuple(unreadable(tree, number, kind)),
        libfabric=f"{device}-rdm" if kind == "efa" else "",
        shut=text(tree, "@shut"),
    )


def loads(known: Sequence[Port], tree: Tree) -> tuple[PortLoad, ...]:
    """Each known port of one adapter now: states, rate, and each counter that is a number."""
    return tuple(_load(port, tree) for port in known)


def _load(port: Port, tree: Tree) -> PortLoad:
    below = f"ports/{port.number}/"
    state = state_of(tree, str(port.number), port.kind, port.netdev)
    up = linked(state)
    managed = port.kind in ("ib", "opa") and up
    return PortLoad(
        port.device,
        port.number,
        state,
        word(text(tree, below + "phys_state")),
        rate_of(tree, str(port.number), port.kind, speed_of(tree, port.netdev), bool(port.bond)) if up else None,
        lid(text(tree, below + "sm_lid")) if managed else None,
        counters(tree, str(port.number)),
    )


def counters(tree: Tree, number: str) -> dict[str, int]:
    """Counters by name; those of `counters/` come before the same names in `hw_counters/`."""
    found: dict[str, int] = {}
    for folder in ("hw_counters/", f"ports/{number}/hw_counters/", f"ports/{number}/counters/"):
        for path, value in tree.items():
            # `lifespan` is how long the driver caches the others, not a count.
            if path.startswith(folder) and isinstance(value, str) and not path.endswith("/lifespan"):
                count = integer(value.strip(), 10)
                if count is not None and 0 <= count < 1 << 64:
                    found[path[len(folder) :]] = count
    return found


def state_of(tree: Tree, number: str, kind: str, netdev: str) -> str:
    """A port's state. EFA calls itself active whatever happens: there its network interface's word counts (SY13)."""
    if kind == "efa" and text(tree, f"@net/{netdev}/operstate") == "down":
        return "DOWN"
    return word(text(tree, f"ports/{number}/state"))


def linked(state: str) -> bool:
    """Whether a state has a link whose rate and LIDs are not left over from before (SY07)."""
    return state not in ("DOWN", "NOP", "")


def rate_of(tree: Tree, number: str, kind: str, speed_mbps: int | None, bonded: bool) -> float | None:
    """A linked port's data rate. On RoCE the netdev's own speed is the truth and sysfs's words are the nearest
    InfiniBand figure; a bond's speed is the sum of what one connection cannot use together."""
    said = gbps(text(tree, f"ports/{number}/rate"), ethernet=kind != "ib" and kind != "opa")
    if kind not in ("roce", "efa", "other") or speed_mbps is None:
        return said
    own = speed_mbps / 1000
    return min(own, said) if bonded and said is not None else own


def netdev_of(tree: Tree, number: str, table: Sequence[Gid]) -> str:
    """The network interface that belongs to a port: the device's own, else its soft parent's, else its first GID's."""
    own = [path.split("/")[1] for path in tree if path.startswith("@net/") and path.endswith("/own")]
    if len(own) > 1:
        own = [name for name in own if integer(text(tree, f"@net/{name}/dev_port")) == int(number) - 1] or own
    bonds = {text(tree, f"@net/{name}/master") for name in own} - {""}
    named = [row.netdev for row in table if row.netdev]
    if bonds & set(named):  # the adapter's GIDs are the bond's: the port is used through that
        return min(bonds & set(named))
    if own:
        return min(own)
    return text(tree, "parent") or text(tree, f"ports/{number}/gid_attrs/ndevs/0") or (named[0] if named else "")


def speed_of(tree: Tree, netdev: str) -> int | None:
    """A network interface's speed in Mb/s; None where the driver says -1 (or that as an unsigned number) or nothing."""
    speed = integer(text(tree, f"@net/{netdev}/speed")) if netdev else None
    return speed if speed is not None and 0 < speed < 0xFFFFFFFF else None


def lid(words: str) -> int | None:
    value = integer(words)
    return None if value is None or value in UNSET_LIDS or not 0 < value < 0x10000 else value


def roce_mtu(netdev_mtu: int | None) -> int | None:
    """The RDMA MTU that fits into a network interface's."""
    room = (netdev_mtu or 0) - ROCE_HEADERS
    return next((each for each in MTUS if each <= room), None)


def generation(words: str) -> int | None:
    """`32.0 GT/s PCIe` is 5."""
    return GENERATIONS.get(words.split(" ")[0])


def width(words: str) -> int | None:
    value = integer(words.removeprefix("x"), 10)
    return value if value is not None and 0 < value <= 32 else None


def _numa(words: str) -> int | None:
    value = integer(words, 10)
    return value if value is not None and value >= 0 else None


def _half(gid: str, at: int) -> str:
    """The upper (0: the subnet prefix) or lower (64: the port GUID) half of a GID."""
    try:
        value = int(ipaddress.IPv6Address(gid))
    except ValueError:
        return ""
    half = (value >> (64 - at)) & (1 << 64) - 1
    return f"{half:016x}" if half else ""


def unreadable(tree: Tree, number: str, kind: str) -> Iterator[str]:
    """Files of a port that could not be read. What is merely absent counts only where every port of its kind has it."""
    below = f"ports/{number}/"
    for name in (*CORE, *CORE_IB) if kind == "ib" else CORE:
        value = tree.get(below + name)
        if not isinstance(value, str):
            yield f"{name}: {value.reason if isinstance(value, Unread) else 'ENOENT'}"
    for path, value in tree.items():
        if isinstance(value, Unread) and path.startswith((below + "counters/", below + "hw_counters/")):
            yield f"{path[len(below) :]}: {value.reason}"
