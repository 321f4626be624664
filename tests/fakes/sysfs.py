"""Makes the parts of /sys that RDMA adapters and GPUs have, below a folder of a test."""

from __future__ import annotations

from pathlib import Path

ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"
#: A file of every Linux machine that answers EINVAL to a read: loopback has no speed.
REFUSES = Path("/sys/class/net/lo/speed")

COUNTERS = (
    "VL15_dropped", "excessive_buffer_overrun_errors", "link_downed", "link_error_recovery",
    "local_link_integrity_errors", "port_rcv_constraint_errors", "port_rcv_data", "port_rcv_errors",
    "port_rcv_packets", "port_rcv_remote_physical_errors", "port_rcv_switch_relay_errors",
    "port_xmit_constraint_errors", "port_xmit_data", "port_xmit_discards", "port_xmit_packets",
    "port_xmit_wait", "symbol_error",
    "unicast_rcv_packets", "unicast_xmit_packets", "multicast_rcv_packets", "multicast_xmit_packets",
)  # fmt: skip
HW_COUNTERS = (
    "duplicate_request", "implied_nak_seq_err", "lifespan", "local_ack_timeout_err", "out_of_buffer", "out_of_sequence",
    "packet_seq_err", "req_cqe_error", "req_cqe_flush_error", "req_remote_access_errors", "req_remote_invalid_request",
    "resp_cqe_error", "resp_cqe_flush_error", "resp_local_length_error", "resp_remote_access_errors",
    "rnr_nak_retry_err", "roce_adp_retrans", "roce_adp_retrans_to", "roce_slow_restart", "rx_atomic_requests",
)  # fmt: skip


class Machine:
    """A root with a `sys` below it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        # Whoever reads it meanwhile sees the one text or the other, as of the kernel's files.
        beside = self.root / ".being-written"
        beside.write_text(text + "\n")
        beside.replace(file)
        return file

    def refuse(self, path: str) -> None:
        """Make a file answer EINVAL."""
        file = self.root / path
        file.unlink(missing_ok=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.symlink_to(REFUSES)

    def gpu(self, pci: str, bridge: str = "pci0000:00/0000:00:01.0", numa: int = 0) -> None:
        place = f"sys/devices/{bridge}/{pci}"
        for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", str(numa))):
            self.write(f"{place}/{name}", text)
        self._link(f"sys/bus/pci/devices/{pci}", place)

    def adapter(
        self,
        device: str,
        *,
        pci: str = "",
        bridge: str = "pci0000:00/0000:00:01.0",
        layer: str = "InfiniBand",
        state: str = "4: ACTIVE",
        physical: str = "5: LinkUp",
        rate: str = "400 Gb/sec (4X NDR)",
        guid: str = "946d:ae03:0000:0001",
        hca: str = "MT4129",
        driver: str = "mlx5_core",
        netdev: str = "",
        speed: int | None = None,
        mtu: int = 4200,
        lid: str = "0x5",
        sm_lid: str = "0x1",
        gids: tuple[tuple[int, str, str, str], ...] = (),
        vf: bool = False,
        bond: bool = False,
        node_type: str = "1: CA",
    ) -> str:
        """One adapter with one port; where its files are below the root."""
        here = f"sys/class/infiniband/{device}"
        port = f"{here}/ports/1"
        for name, text in (
            ("node_guid", guid), ("sys_image_guid", guid), ("node_type", node_type), ("fw_ver", "28.39.1002"),
            ("board_id", "MT_0000000838"), ("hca_type", hca),
        ):  # fmt: skip
            self.write(f"{here}/{name}", text)
        for name, text in (
            ("state", state), ("phys_state", physical), ("rate", rate), ("link_layer", layer), ("lid", lid),
            ("sm_lid", sm_lid),
        ):  # fmt: skip
            self.write(f"{port}/{name}", text)
        for name in COUNTERS:
            self.write(f"{port}/counters/{name}", "0")
        for name in HW_COUNTERS:
            self.write(f"{port}/hw_counters/{name}", "0")
        table = gids or (((0, f"fe80:0000:0000:0000:{guid}", "IB/RoCE v1", netdev),) if layer == "InfiniBand" else ())
        for index in range(4):
            self.write(f"{port}/gids/{index}", ZERO)
        for index, gid, kind, owner in table:
            self.write(f"{port}/gids/{index}", gid)
            self.write(f"{port}/gid_attrs/types/{index}", kind)
            if owner:
                self.write(f"{port}/gid_attrs/ndevs/{index}", owner)
        if pci:
            place = f"sys/devices/{bridge}/{pci}"
            for name, text in (
                ("vendor", "0x15b3"), ("numa_node", "0"), ("current_link_speed", "32.0 GT/s PCIe"),
                ("current_link_width", "16"), ("max_link_speed", "32.0 GT/s PCIe"), ("max_link_width", "16"),
            ):  # fmt: skip
                self.write(f"{place}/{name}", text)
            self._link(f"sys/bus/pci/devices/{pci}", place)
            self._link(f"{here}/device", place)
            (self.root / "sys/bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
            self._link(f"{place}/driver", f"sys/bus/pci/drivers/{driver}")
            if vf:
                self._link(f"{place}/physfn", place)
        if netdev:
            self.netdev(netdev, speed=speed, mtu=mtu, bond=bond)
            if pci:
                (self.root / f"sys/devices/{bridge}/{pci}/net/{netdev}").mkdir(parents=True, exist_ok=True)
        return here

    def netdev(self, name: str, *, speed: int | None = None, mtu: int = 1500, bond: bool = False) -> None:
        here = f"sys/class/net/{name}"
        self.write(f"{here}/mtu", str(mtu))
        self.write(f"{here}/operstate", "up")
        if speed is None:
            self.refuse(f"{here}/speed")
        else:
            self.write(f"{here}/speed", str(speed))
        if bond:
            (self.root / here / "bonding").mkdir(exist_ok=True)

    def _link(self, path: str, target: str) -> None:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(self.root / target)


def hgx(root: Path) -> Machine:
    """A node with eight 400 Gb/s InfiniBand rails, a bond for storage, and eight GPUs, in pairs behind switches."""
    machine = Machine(root)
    buses = ("18", "2a", "3a", "5d", "9a", "ab", "ba", "db")
    for number, bus in enumerate(buses):
        bridge = f"pci0000:{bus[0]}0/0000:{bus[0]}0:01.0/0000:{bus}:00.0"
        machine.gpu(f"0000:{0x1B + number:02x}:00.0", bridge=bridge, numa=number // 4)
        machine.adapter(
            f"mlx5_{(number + 3) % 8}",
            pci=f"0000:{bus}:00.1",
            bridge=bridge,
            guid=f"946d:ae03:0000:{number + 1:04x}",
            lid=hex(10 + number),
        )
    machine.adapter(
        "mlx5_bond_0",
        pci="0000:50:00.0",
        layer="Ethernet",
        rate="200 Gb/sec (2X NDR)",
        netdev="bond0",
        speed=200000,
        bond=True,
        guid="946d:ae03:0000:00ff",
        gids=((0, "fe80:0000:0000:0000:966d:aeff:fe00:00ff", "RoCE v2", "bond0"),),
        lid="0x0",
        sm_lid="0x0",
    )
    return machine
