# Brings a guest's network and RDMA up, in the host's files, then serves commands. Settings come as guest.NAME=VALUE
# on the kernel's command line.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
for word in $(cat /proc/cmdline); do
    case $word in guest.*=*) name=${word%%=*}; eval "${name#guest.}='${word#*=}'" ;; esac
done
hostname "$host"
ip link set lo up
ip link set eth0 up
ip addr add 10.0.2.15/24 dev eth0
ip route add default via 10.0.2.2
for module in crc32_generic rdma_rxe ib_uverbs rdma_ucm 8021q sch_netem; do
    modprobe $module || echo "guest: no module $module"
done
rail=0
while [ $rail -lt "$rails" ]; do
    netdev=eth$((rail + 1))
    ip link set $netdev mtu "$mtu" up
    ip addr add 192.168.$((100 + rail)).$number/24 dev $netdev
    rdma link add rxe$rail type rxe netdev $netdev || echo "guest: no rxe$rail"
    rail=$((rail + 1))
done
ulimit -l unlimited
exec "$python" -S /run/guest/execd.py
