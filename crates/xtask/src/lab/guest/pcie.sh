# QEMU's NVMe device behind an emulated IOMMU: taken from the kernel, driven by tenmil, given back.

modprobe nvme
modprobe vfio-pci
modprobe vfio_iommu_type1
ulimit -l unlimited
check 'the kernel has the disk' within 20 there /dev/nvme0n1 || exit 1
AT=$(basename "$(readlink -f /sys/class/nvme/nvme0/device)")
shows 'tenmil list tells who drives it' nvme tenmil list

check 'tenmil bind' tenmil bind "$AT"
shows 'vfio-pci has it' vfio-pci readlink "/sys/bus/pci/devices/$AT/driver"
shows 'tenmil list tells that' vfio-pci tenmil list

D=pcie:$AT
shows 'tenmil identify' QEMU tenmil identify "$D"
check 'reads at depth 32' tenmil perf "$D" -w randread -q 32 -t 3
check 'verified writes and reads, asleep when idle' \
    tenmil perf "$D" -w randrw --verify -q 16 -t 3 --overwrite
check 'verified writes and reads, always looking' \
    tenmil perf "$D" -w randrw --verify -q 16 -t 3 --overwrite --poll always
check 'blocks of 128 KiB' tenmil perf "$D" -w randrw --verify -q 8 -o 128k -t 3 --overwrite
check 'depth 1' tenmil perf "$D" -w randread -q 1 -t 3
cat /tmp/output

round_trip() {
    dd if=/dev/urandom of=/tmp/source bs=1M count=64 2>/dev/null &&
        tenmil copy file:/tmp/source "split:[$D]?size=64m" --overwrite &&
        tenmil copy "split:[$D]?size=64m" 'file:/tmp/back?size=64m' && cmp /tmp/source /tmp/back
}
check 'a copy goes there and comes back' round_trip

tenmil perf "$D" -w randread -q 32 -t 30 >/tmp/killed.log 2>&1 &
sleep 4
check 'kill -9 under load' kill -9 $!
check 'after that it can be had again' tenmil perf "$D" -w randread -q 32 -t 2

check 'tenmil unbind gives it back' tenmil unbind "$AT"
check 'the kernel has it again' within 20 there /dev/nvme0n1
verify() {
    timeout 60 fio --name=verify --filename=/dev/nvme0n1 --direct=1 --ioengine=libaio \
        --rw=randwrite --bs=4k --size=8m --iodepth=16 --verify=crc32c --output-format=terse
}
check 'and it works' verify

# The kernel wants it back while it is driven.
check 'bound once more' tenmil bind "$AT"
tenmil perf "$D" -w randread -q 32 -t 60 >/tmp/removed.log 2>&1 &
driving=$!
sleep 4
(echo 1 >"/sys/bus/pci/devices/$AT/remove") &
ended() { ! kill -0 $driving 2>/dev/null; }
check 'when the kernel removes it, its user ends' within 20 ended
shows 'and says why' 'wants it back\|gone\|removed' cat /tmp/removed.log
