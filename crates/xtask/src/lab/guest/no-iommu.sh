# An SSD of a machine that has no IOMMU: nothing is done without the word, and with it everything is
# that is done behind one, in memory that lies in a row.

modprobe nvme
modprobe vfio-pci
modprobe vfio_iommu_type1
refused() { ! "$@"; }
free() { cat /sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages; }
all_free() { [ "$(free)" = "$(cat /proc/sys/vm/nr_hugepages)" ]; }
switch() { cat /sys/module/vfio/parameters/enable_unsafe_noiommu_mode; }

check 'the kernel has a disk' within 20 there /dev/nvme0n1 || exit 1
AT=$(place LAB1)
D="pcie:$AT?unsafe-no-iommu=yes"
shows 'tenmil bind refuses it' 'no IOMMU group' refused tenmil bind "$AT"
shows 'and says what there is' 'unsafe-no-iommu' refused tenmil bind "$AT"
check 'told so, it takes it' tenmil bind "$AT" --unsafe-no-iommu
shows 'vfio-pci has it' vfio-pci readlink "/sys/bus/pci/devices/$AT/driver"
shows 'the kernel says that it is not safe' Y switch

shows 'pcie: wants the word, too' 'pcie:.*unsafe-no-iommu=yes' refused tenmil identify "pcie:$AT"
shows 'and huge pages' 'vm.nr_hugepages' refused tenmil identify "$D"
cat /tmp/output
sysctl -w vm.nr_hugepages=128 >/dev/null
check 'huge pages are there' [ "$(free)" = 128 ]
shows 'tenmil identify' QEMU tenmil identify "$D"
check 'the pages are free again' within 5 all_free

check 'reads at depth 32' tenmil perf "$D" -w randread -q 32 -t 3
cat /tmp/output
check 'verified writes and reads, asleep when idle' \
    tenmil perf "$D" -w randrw --verify -q 16 -t 3 --overwrite
check 'verified writes and reads, always looking' \
    tenmil perf "$D" -w randrw --verify -q 16 -t 3 --overwrite --poll always
check 'blocks of 128 KiB' tenmil perf "$D" -w randrw --verify -q 8 -o 128k -t 3 --overwrite
check 'through the block layer' \
    tenmil perf "$D" -w randrw --verify -q 16 -o 64k --block mq -t 3 --overwrite

round_trip() {
    dd if=/dev/urandom of=/tmp/source bs=1M count=64 2>/dev/null &&
        tenmil copy file:/tmp/source "split:[$D]?size=64m" --overwrite &&
        tenmil copy "split:[$D]?size=64m" 'file:/tmp/back?size=64m' && cmp /tmp/source /tmp/back
}
check 'a copy goes there and comes back' round_trip
check 'the pages are free again after that' within 5 all_free

# serve WORD...: until it listens.
serve() {
    : >/tmp/serve.log
    tenmil serve "$D" "$@" >/tmp/serve.log 2>&1 &
    serving=$!
    within 20 grep -q ready /tmp/serve.log
}
shows 'a target with more memory than there is in a row is refused' 'vm.nr_hugepages' \
    refused tenmil serve "$D" --listen tcp://127.0.0.1:4420
cat /tmp/output
check 'one with less is served' serve --listen tcp://127.0.0.1:4420 --buffer-memory 32m
cat /tmp/serve.log
check 'and verified over NVMe/TCP' tenmil perf tcp://127.0.0.1:4420/nqn.2026-01.org.tenmil:disk \
    -w randrw --verify -q 16 -t 3 --overwrite
kill $serving
check 'it ends when it is told to' wait $serving
shows 'a guest is not given it' 'expected one behind an IOMMU' \
    refused tenmil serve "$D" --listen vfio-user:/tmp/nvme.sock

tenmil perf "$D" -w randread -q 32 -t 30 >/tmp/killed.log 2>&1 &
sleep 4
check 'kill -9 under load' kill -9 $!
# The device is held until the process is gone.
wait $! 2>/dev/null
check 'after that it can be had again' tenmil perf "$D" -w randrw --verify -q 32 -t 2 --overwrite
check 'and all pages are free' within 5 all_free

check 'tenmil unbind gives it back' tenmil unbind "$AT"
shows 'the switch is where it was' N switch
check 'the kernel has it again' within 20 there /dev/nvme0n1
verify() {
    timeout 60 fio --name=verify --filename=/dev/nvme0n1 --direct=1 --ioengine=libaio \
        --rw=randwrite --bs=4k --size=8m --iodepth=16 --verify=crc32c --output-format=terse
}
check 'and it works' verify
