# Linux's NVMe/TCP host and nvme-cli against `tenmil serve`.

HOST=nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555
SUBSYSTEM=nqn.2026-01.example:lab
AT="-t tcp -a 127.0.0.1 -s 4420"
echo "$HOST" >/etc/nvme/hostnqn
echo 11111111-2222-3333-4444-555555555555 >/etc/nvme/hostid

modprobe nvme-tcp
modprobe ext4

serve() {
    tenmil serve 'file:/tmp/disk?size=192m' ram:64m --listen tcp://127.0.0.1:4420 --nqn $SUBSYSTEM >serve.log 2>&1 &
    server=$!
    within 20 grep -q ready serve.log
}
check 'tenmil serves' serve || { cat serve.log; exit 1; }
cat serve.log

# What Linux finds, and how it connects.
shows 'nvme discover finds the subsystem' $SUBSYSTEM nvme discover $AT
check 'nvme connect, both digests, two I/O queues' \
    nvme connect $AT -n $SUBSYSTEM --hdr-digest --data-digest --nr-io-queues 2 || exit 1
check 'its namespaces are block devices' within 20 there /dev/nvme0n2 || exit 1
nvme list
# disk CONTROLLER: its block device of namespace 1. Linux numbers them in the order in which it finds them.
disk() {
    for found in /sys/block/$1n*; do
        [ "$(cat "$found/nsid")" = 1 ] && echo "/dev/${found##*/}"
    done
}
D=$(disk nvme0)
shows 'its size is what was served' '^201326592$' blockdev --getsize64 $D

# What nvme-cli makes of what the controller says of itself.
for log in id-ctrl smart-log error-log fw-log effects-log supported-log-pages; do
    check "nvme $log" nvme $log /dev/nvme0
done
check 'nvme id-ns' nvme id-ns $D
check 'nvme ns-descs' nvme ns-descs $D
check 'nvme list-ns' nvme list-ns /dev/nvme0
shows 'nvme get-feature tells how many queues' 'Number of Queues' nvme get-feature /dev/nvme0 -f 7 -H
check 'nvme flush' nvme flush $D
check 'nvme dsm deallocates' nvme dsm $D --ad -s 0 -b 8
check 'nvme write-zeroes' nvme write-zeroes $D -s 8 -c 7
check 'nvme read' nvme read $D -s 0 -c 7 -z 4096 -d /dev/null

# Data.
verify() {
    timeout 120 fio --name=verify --filename=$D --direct=1 --ioengine=libaio --rw=randwrite \
        --bs="$1" --size="$2" --iodepth=16 --verify=crc32c --output-format=terse
}
sizes='512,1m 4k,8m 64k,16m 1m,32m'
is_short && sizes='4k,8m 1m,16m'
for of in $sizes; do
    set -- "${of%,*}" "${of#*,}"
    check "fio writes and verifies $2 by blocks of $1" verify "$1" "$2"
done

file_system() {
    mkfs.ext4 -q $D && mount $D /mnt &&
        dd if=/dev/urandom of=/mnt/file bs=1M count=16 && sum=$(md5sum </mnt/file) &&
        umount /mnt && mount $D /mnt && [ "$sum" = "$(md5sum </mnt/file)" ] &&
        fstrim /mnt && umount /mnt && e2fsck -f -n $D
}
check 'a file system keeps a file, is trimmed and is clean' file_system

# What the target counts, and what Linux counts: reads, bytes read, writes, bytes written.
theirs() { awk '{ print $1, $3 * 512, $5, $7 * 512 }' /sys/block/${D##*/}/stat; }
ours() {
    tenmil get io_statistics export=$SUBSYSTEM --json | tr -d ',' | awk '
        $1 == "\"namespace\":" { is_first = $2 == 1 }
        is_first { value[$1] = $2 }
        END {
            print value["\"reads\":"], value["\"read_bytes\":"], value["\"writes\":"], \
                value["\"written_bytes\":"]
        }'
}
counts_agree() {
    echo "$(theirs) $(ours)" >before
    timeout 60 fio --name=mixed --filename=$D --direct=1 --ioengine=libaio --rw=randrw --bsrange=512-64k \
        --size=8m --iodepth=8 --output-format=terse >/dev/null || return 1
    echo "$(theirs) $(ours)" | cat before - | tee /dev/stderr | awk '
        NR == 1 { split($0, before) }
        NR == 2 { for (i = 1; i <= 4; i++) if ($i - before[i] != $(i + 4) - before[i + 4] || $i == before[i]) exit 1 }'
}
check 'reads, writes and their bytes are counted as by Linux' counts_agree

# Reservations, by commands of the kernel's host.
check 'a key is registered' nvme resv-register $D --nrkey=0x1234 --rrega=0
check 'a reservation is acquired' nvme resv-acquire $D --crkey=0x1234 --rtype=1 --racqa=0
shows 'and reported' 'regctl *: 1' nvme resv-report $D --eds
check 'it is released' nvme resv-release $D --crkey=0x1234 --rtype=1 --rrela=0
check 'and the key is gone' nvme resv-register $D --crkey=0x1234 --rrega=1

# Resets and losses, under load.
load() {
    fio --name=load --filename=$D --direct=1 --ioengine=libaio --rw=randwrite --bs=4k --size=32m \
        --iodepth=8 --verify=crc32c --verify_backlog=64 --time_based --runtime=$seconds >load.log 2>&1 &
    loading=$!
}
seconds=30
is_short && seconds=20
load
sleep 4
check 'nvme reset under load' nvme reset /dev/nvme0
sleep 4
check 'SIGTERM under load ends the server' kill $server
served() { wait $server; }
check 'and it says that all is well' served
check 'it serves again' serve
check 'no I/O of the load failed, no block was wrong' wait $loading
shows 'and blocks were read back' 'ios=[1-9][0-9]*/[1-9]' cat load.log
cat load.log
shows 'the host is connected again' live cat /sys/class/nvme/nvme0/state

check 'nvme disconnect' nvme disconnect -n $SUBSYSTEM
check 'no device is left' within 10 gone $D
# connections: how many the target has.
connections() { tenmil get nvme_connections --json | grep -c '"queue"'; }
forgotten() { [ "$(connections)" = 0 ]; }
check 'the target has forgotten its host' within 5 forgotten
refused() { ! "$@"; }

# Queues of each kind: one for what is written, one for what is read, one that is polled.
mount -t debugfs debug /sys/kernel/debug
check 'nvme connect, a queue of each kind' nvme connect $AT -n $SUBSYSTEM \
    --nr-io-queues 1 --nr-write-queues 1 --nr-poll-queues 1 || exit 1
found() { [ -b "$(disk nvme0)" ]; }
check 'its disk is there' within 20 found || exit 1
D=$(disk nvme0)
shows 'Linux tells which there are' 'mapped 1/1/1 default/read/poll queues' dmesg
shows 'each is a queue of the target, beside the admin queue' '^4$' connections
# queue KIND: where Linux tells of the queue of that kind.
queue() { dirname "$(grep -lx "$1" /sys/kernel/debug/block/nvme0*n"${D##*n}"/hctx*/type)"; }
# What is in flight there.
polled=$(queue poll)/busy
# through KIND FIO-ARGUMENTS...: whether they go through the queue of that kind, and end well.
through() {
    kind=$1 flying=$(queue "$1")/busy
    shift
    timeout 90 fio --name=through --filename=$D --direct=1 --bs=4k --size=4m --loops=5 --iodepth=16 \
        --verify=crc32c --verify_state_save=0 "$@" >/tmp/through.log 2>&1 &
    loading=$!
    # All the while, for it may take no longer than some looks.
    seen=1
    while [ $seen = 1 ] && kill -0 $loading 2>/dev/null; do
        grep -q . "$flying" && seen=0
    done
    if [ "$kind" != poll ] && grep . "$polled"; then seen=2; fi
    wait $loading && [ $seen = 0 ] || {
        echo "seen: $seen"
        tail -n 4 /tmp/through.log
        return 1
    }
}
check 'what is written goes through its queue' \
    through default --ioengine=libaio --rw=randwrite --do_verify=0
check 'what is read goes through its queue, and is verified' \
    through read --ioengine=libaio --rw=randread
check 'io_uring with --hipri goes through the polled queue, verified' \
    through poll --ioengine=io_uring --hipri=1 --rw=randwrite

# The host is told to disconnect while it writes, and to connect again.
load
sleep 3
check 'it is writing' kill -0 $loading
check 'nvme disconnect under load' nvme disconnect -n $SUBSYSTEM
load_ended() { ! kill -0 $loading 2>/dev/null; }
check 'the load ends' within 20 load_ended
check 'with an error' refused wait $loading
check 'the target has forgotten its host, too' within 5 forgotten
check 'nvme connect' nvme connect $AT -n $SUBSYSTEM --nr-io-queues 2 || exit 1
check 'the disk is there again' within 20 found || exit 1
D=$(disk nvme0)
check 'and is verified' verify 64k 8m
check 'nvme disconnect again' nvme disconnect -n $SUBSYSTEM
check 'no host is connected' within 5 forgotten

if ! whole 'reservations by ioctls, a host that falls silent'; then
    kill $server
    check 'the server ends by itself' served
    exit 0
fi

# Reservations as the kernel makes them for callers of its ioctls, and two hosts that contend.
# Without multipath each host has a block device of its own.
OTHER=nqn.2014-08.org.nvmexpress:uuid:66666666-7777-8888-9999-aaaaaaaaaaaa
OTHER_ID=66666666-7777-8888-9999-aaaaaaaaaaaa
single_path() {
    rmmod nvme_tcp && rmmod nvme_fabrics && rmmod nvme_core && modprobe nvme-core multipath=N &&
        modprobe nvme-tcp
}
check 'Linux takes every path for a disk' single_path || exit 1
check 'a host connects' nvme connect $AT -n $SUBSYSTEM --nr-io-queues 1 || exit 1
# nvme-cli takes the second for the first, whatever its name is; the kernel does not.
another() {
    printf %s "transport=tcp,traddr=127.0.0.1,trsvcid=4420,nqn=$SUBSYSTEM,nr_io_queues=1,\
hostnqn=$OTHER,hostid=$OTHER_ID" >/dev/nvme-fabrics
}
check 'and another' another || exit 1
both() { [ -n "$(disk nvme0)" ] && [ -n "$(disk nvme1)" ]; }
check 'each has its own block device' within 20 both || exit 1
A=$(disk nvme0)
B=$(disk nvme1)
shows 'the second is known by its own name' $OTHER cat /sys/class/nvme/nvme1/hostnqn

# pr DEVICE COMMAND...: a reservation ioctl.
pr() {
    device=$1
    shift
    blkpr "$@" $device
}
write_to() { dd if=/dev/urandom of=$1 bs=4k count=4 oflag=direct conv=notrunc; }
read_from() { dd if=$1 of=/dev/null bs=4k count=4 iflag=direct; }
# What a program is told of a conflict: EBADE by reads and writes, PR_STS_RESERVATION_CONFLICT by
# the ioctls.
conflicts='exchange'
refuses='error code 0x18'
# The key of the holder, and how many are registered.
holder_of() { nvme resv-report $A --eds -o json | tr -d ' \n'; }

shows 'who is not registered reserves nothing' "$refuses" \
    refused pr $A -c reserve -k 0xa -t write-exclusive
check 'IOC_PR_REGISTER registers a host' pr $A -c register -k 0xa
check 'and the other' pr $B -c register -k 0xb
shows 'a wrong old key replaces nothing' "$refuses" refused pr $B -c register -K 0xbad -k 0xc
check 'the right one does' pr $B -c register -K 0xb -k 0xc
check 'IOC_PR_RESERVE reserves' pr $A -c reserve -k 0xa -t write-exclusive
shows 'nvme-cli reports two hosts' '"regctl":2' holder_of
shows 'the other cannot reserve' "$refuses" refused pr $B -c reserve -k 0xc -t write-exclusive
check 'the holder writes' write_to $A
shows 'the other gets a conflict' "$conflicts" refused write_to $B
check 'and reads' read_from $B
shows 'who holds nothing cannot release' '"rtype":1' \
    eval 'pr $B -c release -k 0xc -t write-exclusive; holder_of'
check 'IOC_PR_RELEASE releases' pr $A -c release -k 0xa -t write-exclusive
check 'then the other writes' write_to $B

check 'exclusive access' pr $A -c reserve -k 0xa -t exclusive-access
shows 'keeps the other from reading, too' "$conflicts" refused read_from $B
# Own key first, then the victim's: so the kernel hands them on.
check 'IOC_PR_PREEMPT takes it over' pr $B -c preempt -K 0xc -k 0xa -t exclusive-access
check 'who took it writes' write_to $B
shows 'who lost it gets a conflict' "$conflicts" refused write_to $A
shows 'and is registered no more' '"regctl":1' eval 'nvme resv-report $B --eds -o json | tr -d " \n"'
shows 'so it cannot take it back' "$refuses" \
    refused pr $A -c preempt -K 0xa -k 0xc -t exclusive-access
check 'registered again' pr $A -c register -k 0xa
check 'IOC_PR_PREEMPT_ABORT does it' pr $A -c preempt-abort -K 0xa -k 0xc -t exclusive-access
shows 'and now the other gets the conflict' "$conflicts" refused write_to $B
check 'IOC_PR_CLEAR clears' pr $A -c clear -k 0xa
check 'both write: one' write_to $A
check 'and the other' write_to $B
shows 'no host is registered' '"regctl":0' holder_of
check 'nvme disconnect of both' nvme disconnect -n $SUBSYSTEM
kill $server
check 'the server ends by itself' served

# A host that falls silent: the target is in a network of its own, and the cable is cut at the host's end,
# so that nothing reaches the target any more, not even the end of a connection.
if ! modprobe veth; then
    skip 'a host that falls silent: this kernel has no veth'
    exit 0
fi
unshare -n sleep 10000 &
network=$!
there_do() { nsenter -t $network -n "$@"; }
cable() {
    ip link add lab0 type veth && ip link set veth0 netns $network &&
        ip addr add 10.0.0.1/24 dev lab0 && ip link set lab0 up &&
        there_do ip addr add 10.0.0.2/24 dev veth0 && there_do ip link set veth0 up
}
check 'a network of its own' cable || exit 1
nsenter -t $network -n tenmil serve ram:64m --listen tcp://10.0.0.2:4420 --nqn $SUBSYSTEM \
    --host $HOST >silence.log 2>&1 &
server=$!
check 'tenmil serves there' within 20 grep -q ready silence.log || exit 1
check 'nvme connect, a keep-alive time-out of 2 s' nvme connect -t tcp -a 10.0.0.2 -s 4420 \
    -n $SUBSYSTEM --keep-alive-tmo=2 --reconnect-delay=1 --nr-io-queues 1 || exit 1
check 'a disk' within 20 found
D=$(disk nvme0)
check 'verified' verify 64k 4m
# Twice the time-out with nothing to do: only keep-alives are sent.
sleep 4
shows 'an idle host is kept' '^2$' connections
tenmil events >events.log 2>&1 &
listening=$!
seconds=40
load
sleep 2
cut=$(cut -d ' ' -f 1 /proc/uptime)
check 'the cable is cut under load' ip link set lab0 down
check 'the target forgets its host' within 20 forgotten
check 'and the reason is its keep-alive timeout' \
    within 5 grep -q 'keep-alive timeout of the host expired' events.log
# Events have the clock of /proc/uptime. A keep-alive may have come a second before the cut, and whether
# another has come is looked at when a time-out is over.
took=$(awk -v cut="$cut" '/keep-alive time-out/ { print $1 - cut; exit }' events.log)
check "it took $took s from the cut, by a time-out of 2 s" \
    awk -v took="$took" 'BEGIN { exit !(took > 0.5 && took < 8) }'
sleep 3
check 'no host is connected without a cable' forgotten
check 'the cable is whole again' ip link set lab0 up
lives() { grep -q live /sys/class/nvme/nvme0/state; }
check 'the host connects by itself' within 60 lives
shows 'with both queues' '^2$' connections
check 'no I/O of the load failed, no block was wrong' wait $loading
shows 'and blocks were read back' 'ios=[1-9][0-9]*/[1-9]' cat load.log
check 'verified again' verify 64k 4m
shows 'which is told of no other time' '^1$' grep -c 'keep-alive time-out' events.log
cat silence.log events.log
kill $listening
check 'nvme disconnect' nvme disconnect -n $SUBSYSTEM
kill $server
check 'that server ends by itself, too' served
kill $network
