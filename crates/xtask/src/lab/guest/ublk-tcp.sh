# `tenmil serve tcp://… --listen ublk:N` where the kernel offers zero copy: data go between its
# buffers and a socket, with that and without it.

# target: begins it, over what it has left; $target is its process.
target() {
    : >/tmp/target.log
    tenmil serve 'file:/tmp/blocks?size=160m' --listen tcp://127.0.0.1:4420 --nqn $N \
        >/tmp/target.log 2>&1 &
    target=$!
    within 30 grep -q '^ready' /tmp/target.log || {
        cat /tmp/target.log
        return 1
    }
}

# loaded WHAT ARGUMENTS...: as verify; if it fails, what its server and its target have said is told.
loaded() {
    verify "$@" || {
        cat /tmp/tcp.log /tmp/target.log
        dmesg | tail -n 20
        return 1
    }
}

modprobe ublk_drv
modprobe ext4
N=nqn.2026-01.example:lab
U="tcp://127.0.0.1:4420/$N?keep-alive-timeout=2s&reconnect-delay=500ms"
L='ublk:3?queues=2&depth=64'

check 'a target over memory' target || exit 1
check 'a disk behind it' serve tcp "$U" --listen "$L" --cores 0,1 || exit 1
shows 'its data are not copied' 'without a copy$' cat /tmp/tcp.log
check 'data of 512 bytes to 1 MiB verified' loaded --filename=/dev/ublkb3 --rw=randwrite \
    --bsrange=512-1m --size=64m --iodepth=8
check 'data verified over both queues' loaded --filename=/dev/ublkb3 --rw=randwrite --bs=4k \
    --size=8m --numjobs=2 --offset_increment=64m --iodepth=32
check 'and through the page cache' loaded --filename=/dev/ublkb3 --direct=0 --ioengine=psync \
    --rw=randwrite --bs=3k --size=8m --fsync=32
check 'mkfs and mount' has_files
check 'files verified' loaded --directory=/tmp/disk --rw=randwrite --bsrange=1k-64k --size=16m \
    --numjobs=2 --iodepth=8 --fsync=64
check 'unmounted and whole' is_whole

# The target dies and comes back under load: connections break in the middle of data.
killed_under $target 100 --filename=/dev/ublkb3 --rw=randwrite --bsrange=4k-256k --size=48m \
    --iodepth=16 --numjobs=2 --offset_increment=64m
check 'after kill -9 of the target it is there again' target
went_on 100
check 'nor has the kernel seen one' is_clean
shows 'it says so' 'it is away: .*it is called again' cat /tmp/tcp.log
shows 'and that it is back' 'it is there again, after' cat /tmp/tcp.log

# It reconnects while it is idle, too, and its queues come back for the first request.
kill -9 $target
wait $target 2>/dev/null
check 'after kill -9 of an idle target it is there again' target
sleep 2
check 'and data are verified over both queues' loaded --filename=/dev/ublkb3 --rw=randwrite --bs=4k \
    --size=8m --numjobs=2 --offset_increment=64m --iodepth=32

# The disk has no server for a while, and no I/O fails.
killed_under $served 500 --filename=/dev/ublkb3 --rw=randwrite --bs=4k --size=32m --iodepth=16 \
    --numjobs=2 --offset_increment=64m
check 'after kill -9 under it the disk stays' there /dev/ublkb3
check 'the same command goes on with it' serve tcp "$U" --listen "$L" --cores 0,1
shows 'and says so' 'was left behind by a process that has died' cat /tmp/tcp.log
shows 'still without a copy' 'without a copy$' cat /tmp/tcp.log
went_on 1000
is_ended
shows 'not a byte was copied' '; [1-9][0-9]* bytes went without a copy, 0 with one' cat /tmp/tcp.log

with_and_without tcp "$U" "$L" 'randread 512' 'randread 4k' 'randwrite 4k' 'randread 256k' \
    'randwrite 256k'

check 'header digests and a queue for reads' serve tcp "$U&hdgst=yes&read-queue=yes" \
    --listen "$L" --cores 0,1
check 'change nothing' loaded --filename=/dev/ublkb3 --rw=randwrite --bsrange=512-1m --size=16m
kill $served
check 'and end' within 20 ended
shows 'without a copy' '; [1-9][0-9]* bytes went without a copy, 0 with one' cat /tmp/tcp.log
within 5 gone /dev/ublkc3
check 'data digests' serve tcp "$U&ddgst=yes" --listen "$L" --cores 0,1
shows 'say why data are copied' 'are copied: its data have a digest' cat /tmp/tcp.log
check 'and they are verified' loaded --filename=/dev/ublkb3 --rw=randwrite --bsrange=512-1m --size=16m
kill $served
check 'and it ends as well' within 20 ended
shows 'every byte copied' '; 0 bytes went without a copy, [1-9][0-9]* with one' cat /tmp/tcp.log
is_sandboxed
denies_nothing
