# QEMU's NVMe devices behind an emulated IOMMU: taken from the kernel, driven by tenmil, given back.
# One has two namespaces and stays; the other is in a slot, pulled under load and put in again.

modprobe nvme
modprobe vfio-pci
modprobe vfio_iommu_type1
ulimit -l unlimited
# disk FUNCTION NSID: its block device.
disk() {
    for found in /sys/block/nvme*; do
        [ "$(basename "$(readlink -f "$found/device/device")")" = "$1" ] &&
            [ "$(cat "$found/nsid")" = "$2" ] && echo "/dev/${found##*/}"
    done
}
all() { [ "$(ls -d /sys/block/nvme*n* | wc -l)" = 3 ]; }
check 'the kernel has three disks' within 20 all || exit 1
AT=$(place LAB1)
SLOT=$(place LAB2)
shows 'tenmil list tells who drives it' "$AT.*serial LAB1, driver nvme" tenmil list

refused() { ! "$@"; }
# Another block size, by the kernel's own tool.
check 'nvme format to blocks of 4 KiB' nvme format "$(disk "$AT" 2)" --lbaf=4 --force
formatted() { [ "$(cat /sys/block/"$(basename "$(disk "$AT" 2)")"/queue/logical_block_size)" = 4096 ]; }
check 'Linux sees them' within 10 formatted

check 'tenmil bind, and a first block' tenmil bind "$AT" --try
cat /tmp/output
shows 'vfio-pci has it' vfio-pci readlink "/sys/bus/pci/devices/$AT/driver"
shows 'tenmil list tells that' "$AT.*vfio-pci" tenmil list

D=pcie:$AT
shows 'tenmil identify' QEMU tenmil identify "$D"
cat /tmp/output
# The kernel's disk and its own tools have it again.
back() { [ -e "$(disk "$AT" 1)" ]; }
verify() {
    timeout 120 fio --name=verify --filename="$(disk "$AT" 1)" --direct=1 --ioengine=libaio \
        --rw=randwrite --bs=4k --size=8m --iodepth=16 --verify=crc32c --output-format=terse
}
check 'reads at depth 32' tenmil perf "$D" -w randread -q 32 -t 3
check 'verified writes and reads, asleep when idle' \
    tenmil perf "$D" -w randrw --verify -q 16 -t 3 --overwrite
check 'verified writes and reads, always looking' \
    tenmil perf "$D" -w randrw --verify -q 16 -t 3 --overwrite --poll always

# Interrupts: how many vfio-pci has passed on to the process that drives now.
interrupts() {
    awk '/vfio-msi/ { for (i = 2; $i ~ /^[0-9]+$/; i++) sum += $i } END { print sum + 0 }' \
        /proc/interrupts
}
# drive ARGUMENTS...: begins to read at depth 1; $before and $after are interrupts, some seconds apart.
drive() {
    tenmil perf "$D" -w randread -q 1 -t 6 --json "$@" >/tmp/driven.json 2>/tmp/driven.log &
    driving=$!
    sleep 3
    before=$(interrupts)
    sleep 2
    after=$(interrupts)
    kill -0 $driving
}
# told NAME: a number of its report.
number() { sed -n "s/^  \"$1\": *\([0-9]*\).*/\1/p" /tmp/driven.json | head -n 1; }
check 'depth 1, asleep when idle: it is driven' drive
check "interrupts come: $before, and then $after" [ "$after" -gt "$before" ]
check 'it ends well' wait $driving
check "it slept $(number sleeps) times for $(number ios) I/Os" [ "$(number sleeps)" -gt 10 ]
check 'depth 1, always looking: it is driven' drive --poll always
check "no interrupt comes: $before, and then $after" [ "$after" = "$before" ]
check 'it ends well' wait $driving
check "it slept $(number sleeps) times for $(number ios) I/Os" [ "$(number sleeps)" = 0 ]

if ! whole 'other blocks, doorbells, copies, kills, SSDs that are pulled'; then
    check 'tenmil unbind gives it back' tenmil unbind "$AT"
    check 'the kernel has it again' within 20 back
    check 'and it works' verify
    exit 0
fi

check 'blocks of 128 KiB' tenmil perf "$D" -w randrw --verify -q 8 -o 128k -t 3 --overwrite
check 'depth 1' tenmil perf "$D" -w randread -q 1 -t 3
cat /tmp/output

shows 'the second namespace has the fifth format' 'flbas  *4 ' tenmil identify "$D?ns=2"
check 'and is verified' tenmil perf "$D?ns=2" -w randrw --verify -q 16 -t 3 --overwrite
shows 'blocks of 512 bytes are refused there' '4096' refused \
    tenmil perf "$D?ns=2" -w randread -o 512 -t 1
check 'and done on the first' tenmil perf "$D" -w randrw --verify -o 512 -q 16 -t 2 --overwrite
shows 'of a third it says which there are' 'expected one of: 1, 2' refused \
    tenmil perf "$D?ns=3" -w randread -t 1

# Doorbells: how many are rung, and how many of them reach a register.
# per_io DEPTH YES-OR-NO: both for an I/O.
per_io() {
    tenmil perf "$D?shadow-doorbells=$2" -w randrw --verify --overwrite -q "$1" -t 3 --json \
        >/tmp/rung.json 2>/tmp/output || return 1
    for name in doorbells_per_io doorbell_registers_per_io; do
        sed -n "s/.*\"$name\": *\([0-9.e-]*\).*/\1/p" /tmp/rung.json
    done | tr '\n' ' '
}
less() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a < b) }'; }
spared=
for depth in 1 4 16 64; do
    set -- $(per_io $depth no)
    echo "depth $depth, registers: $*"
    check "depth $depth: without shadows every doorbell is a register's" [ "${1:-0}" = "${2:-1}" ]
    set -- $(per_io $depth yes)
    echo "depth $depth, shadows: $*"
    no_more() { [ -n "$2" ] && ! less "$1" "$2"; }
    check "depth $depth: with shadows no more reach a register than are rung" no_more "$@"
    less "${2:-1}" "${1:-0}" && spared=$depth
done
# QEMU asks to be told of the next one after each that it takes: few are spared, at depth 1 none, and on a
# busy machine none at all.
if [ -n "$spared" ]; then
    check 'with shadows not every doorbell is one' [ -n "$spared" ]
else
    skip 'doorbells that shadows spare: QEMU has asked for every one of them'
fi

round_trip() {
    dd if=/dev/urandom of=/tmp/source bs=1M count=64 2>/dev/null &&
        tenmil copy file:/tmp/source "split:[$D]?size=64m" --overwrite &&
        tenmil copy "split:[$D]?size=64m" 'file:/tmp/back?size=64m' && cmp /tmp/source /tmp/back
}
check 'a copy goes there and comes back' round_trip

# Served by a process that has dropped its rights.
# serve NAME LISTENER: until it is ready, and what it has left is as expected.
serve() {
    log=/tmp/$1.log
    tenmil serve "$D" --listen "$2" --sandbox=on >"$log" 2>&1 &
    serving=$!
    within 20 grep -q '^ready' "$log" || { cat "$log"; return 1; }
}
# is_sandboxed WHAT CAPABILITIES
is_sandboxed() {
    note "$1: $(grep -o 'sandbox: .*' "$log" | head -n 1)"
    shows "$1: the rights that are left" \
        "note: sandbox: capabilities: $2; [1-9][0-9]* system calls allowed; [1-9][0-9]* paths allowed" cat "$log"
}
served_ends() {
    kill $serving
    check "$1: it ends when it is told to" wait $serving
    check "$1: the sandbox has denied nothing" refused grep 'denied system call' "$log"
    cat "$log"
}
modprobe ublk_drv
check 'served over ublk' serve ublk ublk:0
is_sandboxed 'ublk' CAP_SYS_ADMIN
verify_disk() {
    timeout 120 fio --name=verify --filename=/dev/ublkb0 --direct=1 --ioengine=libaio --rw=randwrite \
        --bsrange=4k-256k --size=16m --iodepth=8 --verify=crc32c --output-format=terse
}
check 'ublk: verified' verify_disk
served_ends 'ublk'

tenmil perf "$D" -w randread -q 32 -t 30 >/tmp/killed.log 2>&1 &
sleep 4
check 'kill -9 under load' kill -9 $!
# The device is held until the process is gone.
wait $! 2>/dev/null
check 'after that it can be had again' tenmil perf "$D" -w randread -q 32 -t 2

check 'tenmil unbind gives it back' tenmil unbind "$AT"
check 'the kernel has it again' within 20 back
check 'and it works' verify

# The one in the slot is pulled under load, and put in again.
tenmil list --follow --json >/tmp/follow.log 2>&1 &
following=$!
# told EVENT [WHAT]: whether the follower has said that of the one in the slot.
told() { grep "\"$SLOT\"" /tmp/follow.log | grep "\"event\":\"$1\"" | grep -q -e "$2"; }
check 'tenmil list --follow tells of it' within 20 told present '"driver":"nvme"'
check 'it is bound' tenmil bind "$SLOT"
check 'which the follower tells' within 10 told changed '"driver":"vfio-pci"'
tenmil perf "pcie:$SLOT" -w randrw --verify -q 16 -t 120 --overwrite >/tmp/pulled.log 2>&1 &
driving=$!
ended() { ! kill -0 $driving 2>/dev/null; }
sleep 4
check 'it is driven' kill -0 $driving
check 'it is pulled' outside pull
check 'its user ends within 20 s' within 20 ended
shows 'and says why' 'wants it back\|gone\|removed\|pulled' cat /tmp/pulled.log
cat /tmp/pulled.log
check 'the kernel has let go of it' within 20 gone "/sys/bus/pci/devices/$SLOT"
check 'the follower tells that it is gone' within 10 told gone .
shows 'a name that is not there is refused' 'no\|not' refused tenmil identify "pcie:$SLOT"
check 'it is put in again' within 10 outside put in
check 'the kernel has found it' within 20 there "/sys/bus/pci/devices/$SLOT/driver"
check 'and the follower' within 10 told added .
in_slot() { [ "$(place LAB2)" = "$SLOT" ]; }
check 'its controller lives' within 20 in_slot
shows 'tenmil list has it' "$SLOT.*serial LAB2" tenmil list
check 'it is bound again' tenmil bind "$SLOT"
check 'verified writes and reads again' \
    tenmil perf "pcie:$SLOT" -w randrw --verify -q 16 -t 4 --overwrite
tenmil perf "pcie:$SLOT" -w randread -q 32 -t 30 >/tmp/killed.log 2>&1 &
sleep 4
check 'kill -9 under load there, too' kill -9 $!
check 'it is given back' within 10 tenmil unbind "$SLOT"
check 'to the kernel, where it lives' within 20 in_slot

# It comes and goes, as fast as that is; the follower keeps nothing of what has gone.
held() { echo "$(ls /proc/$following/fd | wc -l) descriptors, $(ls /proc/$following/task | wc -l) threads"; }
count() { grep "\"$SLOT\"" /tmp/follow.log | grep -c "\"event\":\"$1\""; }
has_told() { [ "$(count "$1")" -ge "$2" ]; }
baseline=$(held)
left=$(count removed) came=$(count added)
cycles=10
begun=$(date +%s)
for cycle in $(seq $cycles); do
    within 20 outside pull && within 20 gone "/sys/bus/pci/devices/$SLOT" &&
        within 20 outside put in && within 20 there "/sys/bus/pci/devices/$SLOT/driver" || break
done >/tmp/output 2>&1
check "it came and went $cycle times in $(($(date +%s) - begun)) s" [ "$cycle" = $cycles ] &&
    check 'and is there' there "/sys/bus/pci/devices/$SLOT/driver"
check 'its controller lives' within 20 in_slot
check 'the follower has told each time that it went' within 10 has_told removed $((left + cycles))
check 'and that it came' within 10 has_told added $((came + cycles))
check "the follower holds what it held: $baseline" [ "$(held)" = "$baseline" ] || held
check 'it is bound after that' tenmil bind "$SLOT"
check 'and verified' tenmil perf "pcie:$SLOT" -w randrw --verify -q 16 -t 2 --overwrite
check 'and given back' within 10 tenmil unbind "$SLOT"
check 'the follower is well' kill -0 $following
kill -INT $following
check 'and ends by Ctrl-C' wait $following
cat /tmp/follow.log
shows 'what is not in the table is not done' 'not done: the guest asked for' refused outside quit

# The kernel wants it back while it is driven.
check 'bound once more' tenmil bind "$AT"
tenmil perf "$D" -w randread -q 32 -t 60 >/tmp/removed.log 2>&1 &
driving=$!
sleep 4
(echo 1 >"/sys/bus/pci/devices/$AT/remove") &
check 'when the kernel removes it, its user ends' within 20 ended
shows 'and says why' 'wants it back\|gone\|removed' cat /tmp/removed.log
