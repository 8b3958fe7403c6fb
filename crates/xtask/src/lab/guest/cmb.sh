# QEMU's NVMe devices with a controller memory buffer, of NVMe 1.4 and of before, and one without:
# submission queues lie there if they are asked to, and otherwise that is said.

modprobe nvme
modprobe vfio-pci
modprobe vfio_iommu_type1
ulimit -l unlimited
all() { [ "$(ls -d /sys/block/nvme*n* | wc -l)" = 3 ]; }
check 'the kernel has three disks' within 20 all || exit 1
NEW=$(place LAB1)
OLD=$(place LAB2)
NONE=$(place LAB3)
check 'tenmil bind' tenmil bind "$NEW" "$OLD" "$NONE"

# measured WHAT NAME: verified writes and reads, and how many commands lay in the buffer for an I/O.
measured() {
    what=$1
    tenmil perf "$2" -w randrw --verify --overwrite -q 16 -t 3 --json >/tmp/json 2>/tmp/notes
    ended=$?
    per_io=$(sed -n 's/.*"cmb_commands_per_io": *\([0-9.e-]*\).*/\1/p' /tmp/json)
    iops=$(sed -n 's/^  "iops": *\([0-9.e-]*\).*/\1/p' /tmp/json)
    echo "$what: $per_io commands per I/O in the buffer, $iops I/Os per second"
    cat /tmp/notes
    check "$what: verified" [ $ended = 0 ]
}
each() { awk -v a="${1:-0}" 'BEGIN { exit !(a > 0.9 && a < 1.1) }'; }
none() { awk -v a="${1:-1}" 'BEGIN { exit !(a == 0) }'; }
refused() { ! "$@"; }

for style in new old; do
    AT=$NEW
    [ $style = old ] && AT=$OLD
    shows "$style style: tenmil identify shows the buffer" 'sqs  *yes' tenmil identify "pcie:$AT"
    grep -A 6 -e '^CMB' /tmp/output
    measured "$style style, told to" "pcie:$AT?cmb=queues"
    check "$style style: every command lay there" each "$per_io"
    check "$style style: nothing is to be said" [ ! -s /tmp/notes ]
    measured "$style style, as it is" "pcie:$AT"
    check "$style style: none lies there unless it is told to" none "$per_io"
    measured "$style style, deep queues" "pcie:$AT?cmb=queues&depth=1023"
    check "$style style: deep queues lie there, too" each "$per_io"
    tenmil perf "pcie:$AT?cmb=queues" -w randread -q 32 -t 30 >/tmp/killed.log 2>&1 &
    sleep 4
    check "$style style: kill -9 under load" kill -9 $!
    # The device is held until the process is gone.
    wait $! 2>/dev/null
    measured "$style style, after that" "pcie:$AT?cmb=queues"
    check "$style style: every command lies there again" each "$per_io"
done

measured 'without a buffer' "pcie:$NONE?cmb=queues"
check 'without a buffer: none lies there' none "$per_io"
shows 'and why is said' "host's memory: there is no controller memory buffer" cat /tmp/notes
shows 'what it is not for is refused' 'expected' refused tenmil perf "pcie:$NEW?cmb=data" -t 1

check 'tenmil unbind gives them back' tenmil unbind --all
check 'the kernel has them again' within 20 all
verify() {
    timeout 60 fio --name=verify --filename="$1" --direct=1 --ioengine=libaio \
        --rw=randwrite --bs=4k --size=4m --iodepth=16 --verify=crc32c --output-format=terse
}
for disk in /dev/nvme0n1 /dev/nvme1n1 /dev/nvme2n1; do
    check "and $disk works" verify $disk
done
