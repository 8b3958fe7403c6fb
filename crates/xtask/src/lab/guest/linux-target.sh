# tenmil's NVMe/TCP host against Linux's target (nvmet-tcp), which is set up through configfs.

SUBSYSTEM=nqn.2026-01.example:linux
HOST=nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555
NVMET=/sys/kernel/config/nvmet

modprobe nvmet-tcp
modprobe null_blk nr_devices=0
modprobe loop
mount -t configfs configfs /sys/kernel/config

# A disk of memory with contents: a file on a tmpfs behind a loop device.
dd if=/dev/zero of=/tmp/disk bs=1M count=64 2>/dev/null
losetup /dev/loop0 /tmp/disk

offer() {
    mkdir $NVMET/subsystems/$SUBSYSTEM &&
        echo 1 >$NVMET/subsystems/$SUBSYSTEM/attr_allow_any_host &&
        mkdir $NVMET/subsystems/$SUBSYSTEM/namespaces/1 &&
        echo /dev/loop0 >$NVMET/subsystems/$SUBSYSTEM/namespaces/1/device_path &&
        reserve_if_it_can &&
        echo 1 >$NVMET/subsystems/$SUBSYSTEM/namespaces/1/enable
}
# Reservations have to be allowed before the namespace is enabled; since Linux 6.13.
CAN_RESERVE=$NVMET/subsystems/$SUBSYSTEM/namespaces/1/resv_enable
reserve_if_it_can() { [ ! -e $CAN_RESERVE ] || echo 1 >$CAN_RESERVE; }
listen() {
    mkdir "$NVMET/ports/$1" &&
        echo tcp >"$NVMET/ports/$1/addr_trtype" &&
        echo ipv4 >"$NVMET/ports/$1/addr_adrfam" &&
        echo 127.0.0.1 >"$NVMET/ports/$1/addr_traddr" &&
        echo "$2" >"$NVMET/ports/$1/addr_trsvcid" &&
        ln -s $NVMET/subsystems/$SUBSYSTEM "$NVMET/ports/$1/subsystems/$SUBSYSTEM"
}
check 'Linux offers a namespace' offer || exit 1
check 'and listens' listen 1 4420 || exit 1
AT=tcp://127.0.0.1:4420
DISK=$AT/$SUBSYSTEM?ns=1

shows 'tenmil discover finds the subsystem' $SUBSYSTEM tenmil discover $AT
shows 'tenmil identify tells what it is' Linux tenmil identify "$DISK"

perf() { tenmil perf "$@" --overwrite -t 3; }
check 'reads' perf "$DISK" -w randread -q 32
check 'writes and reads that are verified' perf "$DISK" -w randrw --verify -q 16
check 'both digests' perf "$DISK&hdgst=yes&ddgst=yes" -w randrw --verify -q 16

# Two hosts and a pool: the target refuses the former owner, so that no force is needed.
ONE="$DISK&hostnqn=nqn.2026-01.example:one"
TWO="$DISK&hostnqn=nqn.2026-01.example:two"
own() {
    tenmil pool create "$ONE" --overwrite &&
        tenmil volume create "volume:[$ONE]/v" --size 16m &&
        tenmil perf "volume:[$ONE]/v" -w randwrite -q 4 -o 4k -t 2 --overwrite
}
own_under_load() {
    tenmil perf "volume:[$ONE]/v" -w randwrite -q 4 -o 4k -t 60 --overwrite >/tmp/owner.log 2>&1 &
    owning=$!
}
is_owned() { ! tenmil volume create "volume:[$TWO]/w" --size 1m; }
fails() { ! wait "$1"; }
if there $CAN_RESERVE; then
    check 'a host makes a pool' own
    own_under_load
    check 'and has it open' within 10 is_owned
    sleep 2
    check 'another host takes it over without force' tenmil pool takeover "$TWO"
    check 'the former owner ends with an error' fails $owning
    shows 'which is a reservation conflict' 'Reservation Conflict' cat /tmp/owner.log
    check 'the new owner writes' tenmil volume create "volume:[$TWO]/w" --size 1m
    check 'and finds a pool that is whole' tenmil pool check "$TWO"
    shows 'the former owner is refused, as it may still run' 'has reserved it' \
        eval '! tenmil volume create "volume:[$ONE]/x" --size 1m'
    check 'until it takes the pool over' tenmil pool takeover "$ONE"
    # Clears it for what follows, which has another host identifier.
    check 'a third host takes it, too' tenmil pool takeover "$DISK"
    check 'and has the device for itself' perf "$DISK" -w randwrite -q 4
else
    skip 'a pool that is excluded by the device: needs resv_enable, Linux 6.13'
fi
whole 'other sizes, copies, a port that is lost under load, paths' || exit 0
check 'blocks of 128 KiB' perf "$DISK" -w randrw --verify -q 8 -o 128k
check 'depth 1' perf "$DISK" -w randread -q 1

# A copy goes there and comes back.
round_trip() {
    dd if=/dev/urandom of=/tmp/source bs=1M count=64 2>/dev/null &&
        tenmil copy file:/tmp/source "$DISK" --overwrite &&
        tenmil copy "$DISK" 'file:/tmp/back?size=64m' && cmp /tmp/source /tmp/back &&
        cmp /tmp/source /tmp/disk
}
check 'a copy goes there and comes back' round_trip
rm -f /tmp/source /tmp/back

# Loss of the port under load: it comes back, and so does the host.
load() {
    tenmil perf "$DISK" -w randrw --verify -q 8 --overwrite -t 15 >/tmp/load.log 2>&1 &
    loading=$!
}
load
sleep 4
lose() { rm $NVMET/ports/1/subsystems/$SUBSYSTEM; }
regain() { ln -s $NVMET/subsystems/$SUBSYSTEM $NVMET/ports/1/subsystems/$SUBSYSTEM; }
check 'the port is taken away under load' lose
sleep 2
check 'and given back' regain
check 'the load goes on, and every block is right' wait $loading
cat /tmp/load.log

# Two ports, one of them made inaccessible: paths.
check 'a second port' listen 2 4421
groups() {
    mkdir $NVMET/ports/1/ana_groups/2 && mkdir $NVMET/ports/2/ana_groups/2 &&
        echo "$1" >$NVMET/ports/1/ana_groups/1/ana_state &&
        echo "$2" >$NVMET/ports/2/ana_groups/1/ana_state
}
check 'one optimized, one not' groups optimized non-optimized
TWO=tcp://127.0.0.1:4420,127.0.0.1:4421/$SUBSYSTEM?ns=1
load_on_two() {
    tenmil perf "$TWO" -w randrw --verify -q 8 --overwrite -t 15 >/tmp/load.log 2>&1 &
    loading=$!
}
load_on_two
sleep 4
turn() {
    echo "$1" >$NVMET/ports/1/ana_groups/1/ana_state &&
        echo "$2" >$NVMET/ports/2/ana_groups/1/ana_state
}
check 'the first becomes inaccessible, the second optimized' turn inaccessible optimized
sleep 3
check 'and back' turn optimized inaccessible
check 'the load goes on over the other path, and every block is right' wait $loading
cat /tmp/load.log
