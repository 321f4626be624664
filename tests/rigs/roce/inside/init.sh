#!/bin/busybox sh
# The first process of a guest: the host's files below, a memory file system above them, and into that.
box=/bin/busybox
export PATH=/sbin:/bin
fail() { echo "guest: $*"; $box poweroff -f; }
$box mount -t proc proc /proc && $box mount -t sysfs sysfs /sys && $box mount -t devtmpfs dev /dev || fail "no kernel file systems"
for module in virtio_pci virtio-rng 9pnet_virtio 9p overlay virtio_net; do
    $box modprobe $module || echo "guest: no module $module"
done
$box mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,ro,cache=loose host /host || fail "no files of the host"
$box mount -t tmpfs -o size=70% memory /memory && $box mkdir /memory/upper /memory/work
$box mount -t overlay -o lowerdir=/host,upperdir=/memory/upper,workdir=/memory/work overlay /root || fail "no overlay"
release=$($box uname -r)
$box mkdir -p /root/lib/modules/$release /root/share
$box cp -a /lib/modules/$release/. /root/lib/modules/$release/
# Not over /tmp: the project itself may lie there. What a guest writes there stays in its memory all the same.
$box mount -t tmpfs tmpfs /root/run
$box mkdir -p /root/run/netns /root/run/guest
$box cp /up.sh /execd.py /root/run/guest/
$box mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,cache=none share /root/share || echo "guest: no shared folder"
for place in proc sys dev; do $box mount --move /$place /root/$place; done
$box mkdir -p /root/dev/pts /root/dev/shm
$box mount -t devpts devpts /root/dev/pts; $box mount -t tmpfs tmpfs /root/dev/shm
$box chroot /root /bin/sh /run/guest/up.sh </root/dev/null >/root/dev/console 2>&1
fail "ended"
