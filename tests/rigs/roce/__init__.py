"""Two guests with RDMA between them, in software: real verbs and the real perftest without an adapter.

Each guest is a QEMU machine that boots Debian's kernel and sees this machine's files read-only, so Python, the
project and perftest are here and there the same. Two Ethernet rails join them, with Soft-RoCE (rxe) on each; a third
interface reaches this machine's loopback at 10.0.2.2. Everything runs as root on two CPU cores, without KVM.
"""
