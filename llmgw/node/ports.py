"""The node's RDMA ports, read from sysfs and watched.

Reads of a sick adapter can block for ever, so adapters are read in a thread that can be left behind, and the one it
hangs at is named and hides no other. Counters that refuse are not asked again soon: each refusal is a line in some
kernels' logs.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence

import attrs
import msgspec
import trio

from llmgw.cell import Cell
from llmgw.node import files
from llmgw.node.run import NotStarted, run
from llmgw.node.view import View
from llmgw.rdma.devinfo import active_mtus
from llmgw.rdma.roles import assigned, nearest
from llmgw.rdma.sysfs import Tree, Unread, loads, ports
from llmgw.wire.facts import Gpu, Port, PortLoad

#: Seconds between two whole readings: GID tables, LIDs, PCI, netdevs.
WHOLE_PERIOD = 60.0
#: Seconds after which an adapter's reading is not waited for any more.
WITHIN = 2.0
#: Seconds until a counter that refused is tried again.
REFUSED_AGAIN = 3600.0
#: Seconds between two askings of `ibv_devinfo` for the MTU of InfiniBand links.
DEVINFO_PERIOD, DEVINFO_WITHIN = 600.0, 20.0
MOST_BYTES = 4096

DEVICE_FILES = ("node_guid", "sys_image_guid", "node_type", "fw_ver", "board_id", "hca_type", "parent")
PORT_FILES = ("state", "phys_state", "rate", "link_layer", "lid", "sm_lid")
MOVING_FILES = ("state", "phys_state", "rate", "sm_lid")
PCI_FILES = ("vendor", "numa_node", "current_link_speed", "current_link_width", "max_link_speed", "max_link_width")


def read(path: str) -> str | Unread:
    """One small file, or why not. Never raises for what a file system may do."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, MOST_BYTES).decode(errors="replace").replace("\0", "")
        finally:
            os.close(descriptor)
    except OSError as error:
        return Unread(errno.errorcode.get(error.errno or 0, "EIO"))
    except ValueError:
        return Unread("EINVAL")


class Adapter:
    """One device below /sys/class/infiniband: what to read of it and what it refused. Runs in a thread."""

    def __init__(self, view: View, name: str) -> None:
        self.name = name
        self._folder = str(view.at("sys/class/infiniband") / name)
        self._net = view.at("sys/class/net")
        self._class, self._devices = view.at("sys/class/infiniband_verbs"), view.at("dev/infiniband")
        self._verbs = ""
        self._refused: dict[str, float] = {}
        self._moving: tuple[str, ...] = ()
        self._netdevs: tuple[str, ...] = ()
        self._asked: tuple[str, ...] = ("speed",)
        self.path = ""

    def whole(self) -> Tree:
        """Everything of lasting interest, and the counters."""
        tree: dict[str, str | Unread] = {}
        for name in DEVICE_FILES:
            self._take(tree, name)
        device = files.real(f"{self._folder}/device")
        if device is not None and device.name != "device":
            self.path = str(device)
            tree["@pci"] = device.name
            driver = files.real(device / "driver")
            if driver is not None:
                tree["@driver"] = driver.name
                self._asked = ("speed", "operstate") if driver.name == "efa" else ("speed",)
            if (device / "physfn").exists():
                tree["@physfn"] = "1"
            for name in PCI_FILES:
                self._take(tree, f"device/{name}")
        if shut := self._shut():
            tree["@shut"] = shut
        moving = []
        for number in files.names(f"{self._folder}/ports"):
            below = f"ports/{number}/"
            tree[below] = ""  # there is a port, whatever its files say
            for name in PORT_FILES:
                self._take(tree, below + name)
            self._table(tree, below)
            moving += [below + name for name in MOVING_FILES]
            for folder in ("counters/", "hw_counters/"):
                moving += [below + folder + name for name in files.names(f"{self._folder}/{below}{folder}")]
        self._moving = tuple(path for path in moving if not path.endswith("/lifespan"))
        for path in self._moving:
            self._take(tree, path)
        self._interfaces(tree)
        return tree

    def moving(self) -> Tree:
        """What changes from one heartbeat to the next."""
        tree: dict[str, str | Unread] = {}
        for path in self._moving:
            self._take(tree, path)
        for name in self._netdevs:
            for file in self._asked:
                tree[f"@net/{name}/{file}"] = read(f"{self._net}/{name}/{file}")
        return tree

    def _take(self, tree: dict[str, str | Unread], path: str) -> None:
        since = self._refused.get(path)
        if since is not None:
            if time.monotonic() - since < REFUSED_AGAIN:
                tree[path] = Unread("EINVAL")
                return
            del self._refused[path]
        value = read(f"{self._folder}/{path}")
        if isinstance(value, Unread):
            if value.reason == "ENOENT":
                return
            # A counter that refuses does so for good; a state or a rate may only be in a reset.
            if value.reason in ("EINVAL", "EOPNOTSUPP") and "counters/" in path:
                self._refused[path] = time.monotonic()
        tree[path] = value

    def _shut(self) -> str:
        """Why no program here can open the adapter. In a container it may be seen and be somebody else's (RA06).

        That there are no such devices at all is told of the host (`uverbs`).
        """
        if not any(name.startswith("uverbs") for name in files.names(self._devices)):
            return ""
        if not self._is_mine(self._verbs):
            self._verbs = next(filter(self._is_mine, files.names(self._class)), "")
        if self._verbs:
            try:
                os.close(os.open(self._devices / self._verbs, os.O_RDWR | os.O_CLOEXEC))
            except OSError as error:
                return f"/dev/infiniband/{self._verbs}: {error.strerror}"
        return ""

    def _is_mine(self, verbs: str) -> bool:
        return files.text(self._class / verbs / "ibdev") == self.name

    def _table(self, tree: dict[str, str | Unread], below: str) -> None:
        """The GID table. Types and netdevs of empty rows refuse, so only full rows are asked for them."""
        for index in files.names(f"{self._folder}/{below}gids"):
            value = read(f"{self._folder}/{below}gids/{index}")
            if not isinstance(value, str) or not value.strip().strip("0:"):
                continue
            tree[f"{below}gids/{index}"] = value
            for name in ("types", "ndevs"):
                tree[f"{below}gid_attrs/{name}/{index}"] = read(f"{self._folder}/{below}gid_attrs/{name}/{index}")

    def _interfaces(self, tree: dict[str, str | Unread]) -> None:
        """The network interfaces of the adapter, of its soft parent and of its GIDs."""
        own = set(files.names(f"{self._folder}/device/net"))
        wanted = set(own)
        for path, value in tree.items():
            if isinstance(value, str) and (path == "parent" or "/gid_attrs/ndevs/" in path):
                wanted.add(value.strip())
        for name in sorted(wanted - {""}):
            folder = self._net / name
            if "/" in name or not folder.exists():
                continue
            for file in ("speed", "mtu", "dev_port", "operstate"):
                tree[f"@net/{name}/{file}"] = read(f"{folder}/{file}")
            if name in own:
                tree[f"@net/{name}/own"] = "1"
            if (folder / "bonding").exists():
                tree[f"@net/{name}/bonding"] = "1"
            master = files.real(folder / "master")
            if master is not None:
                tree[f"@net/{name}/master"] = master.name
            if (folder / "bonding_slave").exists():
                tree[f"@net/{name}/slave"] = "1"
        # What is asked at each heartbeat: the few whose speed is a port's rate.
        self._netdevs = tuple(sorted({*own, *(str(tree.get("parent", "")).strip(),)} - {""}))[:4]


@attrs.frozen
class PortView:
    """Ports at the last reading. `silent` names adapters whose reading does not return, and since when (monotonic)."""

    at: float | None = None
    ports: tuple[Port, ...] = ()
    loads: tuple[PortLoad, ...] = ()
    silent: Mapping[str, float] = attrs.field(factory=dict)


class _Reading:
    """An adapter with what it said last. `busy` while a thread reads it, which may be for ever."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.ports: tuple[Port, ...] = ()
        self.loads: tuple[PortLoad, ...] = ()
        self.busy = False
        self.silent_since: float | None = None
        self.whole_at = float("-inf")

    def look(self, began: float) -> None:
        """In a thread. A late result is as good as a timely one: it is the newest there is."""
        if not self.ports or began - self.whole_at >= WHOLE_PERIOD:
            tree = self.adapter.whole()
            self.ports = ports(self.adapter.name, tree)
            self.whole_at = began
        else:
            tree = self.adapter.moving()
        self.loads = loads(self.ports, tree)


class _Sweep:
    """One thread's way through adapters."""

    def __init__(self, readings: Sequence[_Reading], began: float) -> None:
        self._readings = list(readings)
        self._began = began
        self._at = 0
        self._abandoned = False

    def run(self) -> None:
        for reading in self._readings:
            reading.busy = True
            reading.look(self._began)
            reading.busy = False
            reading.silent_since = None
            if self._abandoned:  # somebody else went on with the others
                return
            self._at += 1

    def left_behind(self) -> list[_Reading]:
        """After the time is up: name the adapter that it hangs at, and give the ones it has not come to."""
        self._abandoned = True
        if self._at < len(self._readings):
            self._readings[self._at].silent_since = self._began
        return self._readings[self._at + 1 :]


class Ports:
    """Watches the RDMA ports.

    `gpus` tells the GPUs as known now, for nearness; an adapter that has not answered after `within` seconds is not
    waited for any more.
    """

    def __init__(self, view: View, gpus: Callable[[], tuple[Gpu, ...]] = tuple, *, within: float = WITHIN) -> None:
        self._where = view
        self._gpus = gpus
        self._within = within
        self._adapters: dict[str, _Reading] = {}
        self._mtus: dict[tuple[str, int], int] = {}
        self._made: tuple[Port, ...] = ()
        self._made_of: tuple[object, ...] = ()
        self.view: Cell[PortView] = Cell(PortView())
        self.asked = trio.Event()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_mtus)
            while True:
                began = trio.current_time()
                await self.look()
                self.asked.set()
                await trio.sleep_until(began + self._where.period)

    async def look(self) -> PortView:
        """Read every adapter once. One that hangs costs the time limit once and nothing after."""
        names = files.names(self._where.at("sys/class/infiniband"))
        for name in names:
            if name not in self._adapters:
                self._adapters[name] = _Reading(Adapter(self._where, name))
        for name in self._adapters.keys() - {*names}:
            del self._adapters[name]
        await self._read()
        view = self.so_far()
        self.view.set(view)
        return view

    def so_far(self) -> PortView:
        """What is known now, also of a look that was not waited for; an adapter that never answered is silent."""
        now, everything = time.monotonic(), self._adapters.values()
        silent = {
            reading.adapter.name: now if reading.silent_since is None else reading.silent_since
            for reading in everything
            if reading.silent_since is not None or reading.whole_at == float("-inf")
        }
        return PortView(now, self.facts(), tuple(load for reading in everything for load in reading.loads), silent)

    def facts(self) -> tuple[Port, ...]:
        """Every port's lasting facts; the same object as before while nothing that goes into them is new."""
        gpus, everything = self._gpus(), tuple(self._adapters.values())
        made_of = (gpus, self._mtus, *(reading.ports for reading in everything))
        if len(made_of) != len(self._made_of) or any(a is not b for a, b in zip(made_of, self._made_of, strict=True)):
            self._made_of = made_of
            self._made = assigned(
                (self._completed(port, reading.adapter) for reading in everything for port in reading.ports),
                roles=self._where.roles,
                rails=self._where.rails,
                fabrics=self._where.fabrics,
            )
        return self._made

    async def _read(self) -> None:
        """Every adapter that is not hanging already. One thread goes through them all, since threads that read side by
        side cost more than the reading; where it gets stuck another goes on behind that one."""
        todo = [reading for reading in self._adapters.values() if not reading.busy]
        while todo:
            sweep = _Sweep(todo, time.monotonic())
            with trio.move_on_after(self._within):
                await trio.to_thread.run_sync(sweep.run, abandon_on_cancel=True)
            todo = sweep.left_behind()

    def _completed(self, port: Port, adapter: Adapter) -> Port:
        """A port with what its own files do not tell: the MTU of its link, and which GPUs are near."""
        where = []
        for gpu in self._gpus():
            folder = files.real(self._where.at("sys/bus/pci/devices") / gpu.pci) if gpu.pci and adapter.path else None
            where.append((gpu.uuid, str(folder or ""), gpu.numa_node))
        return msgspec.structs.replace(
            port,
            mtu=self._mtus.get((port.device, port.number), port.mtu),
            nearest_gpus=nearest(adapter.path, port.numa_node, where),
        )

    async def _watch_mtus(self) -> None:
        """Ask `ibv_devinfo`, where it is installed: sysfs has no word on a link's MTU."""
        await self.asked.wait()
        while True:
            tool = shutil.which("ibv_devinfo")
            if tool and any(port.kind == "ib" for port in self.view.value.ports):
                self._mtus = await mtus(tool)
            await trio.sleep(DEVINFO_PERIOD)


async def mtus(tool: str) -> dict[tuple[str, int], int]:
    """(device, port) -> MTU in bytes, as the verbs know it; empty when the tool fails or hangs."""
    try:
        return active_mtus((await run([tool], limit=DEVINFO_WITHIN)).stdout)
    except NotStarted:
        return {}
