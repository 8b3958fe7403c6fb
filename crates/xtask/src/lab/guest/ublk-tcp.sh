# `tenmil serve tcp://… --listen ublk:N` where the kernel lends the data of requests: they go between
# it and a socket, with that and without it.

# speed RW SIZE: what disk 3 does of it in a second.
speed() {
    fio --name=speed --filename=/dev/ublkb3 --direct=1 --ioengine=libaio --rw="$1" --bs="$2" \
        --iodepth=16 --time_based --runtime=4 --output-format=json >/tmp/fio.json || return 1
    case $1 in *read) part='"read"' ;; *) part='"write"' ;; esac
    sed -n "/$part/,/}/s/^ *\"iops\" : \([0-9]*\).*/\1/p" /tmp/fio.json | head -n 1
}
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
U="tcp://127.0.0.1:4420/$N?detect=2s&retry=500ms"
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
mkdir -p /tmp/disk
check 'mkfs and mount' eval 'mkfs.ext4 -q /dev/ublkb3 && mount -t ext4 /dev/ublkb3 /tmp/disk'
check 'files verified' loaded --directory=/tmp/disk --rw=randwrite --bsrange=1k-64k --size=16m \
    --numjobs=2 --iodepth=8 --fsync=64
check 'unmounted and whole' eval 'umount /tmp/disk && e2fsck -fn /dev/ublkb3'

# The target dies and comes back under load: connections break in the middle of data.
start=$(written)
verify --filename=/dev/ublkb3 --rw=randwrite --bsrange=4k-256k --size=48m --iodepth=16 \
    --numjobs=2 --offset_increment=64m >/tmp/load.log 2>&1 &
load=$!
within 20 has_written 100
kill -9 $target
before=$(written)
wait $target 2>/dev/null
check 'after kill -9 of the target it is there again' target
check 'and the load has seen no error' ends_well
check 'nor was it over before' [ "$(written)" -gt $((before + 100)) ]
check 'nor has the kernel seen one' says_no sh -c 'dmesg | grep -i "i/o error.*ublkb3"'

shows 'it says so' 'it is away: .*it is called again' cat /tmp/tcp.log
shows 'and that it is back' 'it is there again, after' cat /tmp/tcp.log

# So it does while nobody wants anything, and its queues come back for the first who does.
kill -9 $target
wait $target 2>/dev/null
check 'after kill -9 of an idle target it is there again' target
sleep 2
check 'and data are verified over both queues' loaded --filename=/dev/ublkb3 --rw=randwrite --bs=4k \
    --size=8m --numjobs=2 --offset_increment=64m --iodepth=32

# Nobody serves the disk for a while, and nobody notices.
start=$(written)
verify --filename=/dev/ublkb3 --rw=randwrite --bs=4k --size=32m --iodepth=16 --numjobs=2 \
    --offset_increment=64m >/tmp/load.log 2>&1 &
load=$!
within 20 has_written 500
kill -9 $served
before=$(written)
wait $served 2>/dev/null
check 'after kill -9 under it the disk stays' there /dev/ublkb3
check 'the same command goes on with it' serve tcp "$U" --listen "$L" --cores 0,1
shows 'and says so' 'was left behind by a process that has died' cat /tmp/tcp.log
shows 'still without a copy' 'without a copy$' cat /tmp/tcp.log
check 'the load has seen no error' ends_well
check 'and was not over before' [ "$(written)" -gt $((before + 1000)) ]
verify --filename=/dev/ublkb3 --rw=randwrite --bs=64k --size=64m --iodepth=16 --time_based \
    --runtime=20 >/tmp/load.log 2>&1 &
sleep 3
kill $served
check 'SIGTERM under load ends it' within 20 ended
shows 'not a byte was copied' '; [1-9][0-9]* bytes went without a copy, 0 with one' cat /tmp/tcp.log
check 'disk and device are away' within 5 eval 'gone /dev/ublkb3 && gone /dev/ublkc3'

for way in on off; do
    check "zero-copy=$way" serve tcp "$U" --listen "$L&zero-copy=$way" --cores 0,1 || exit 1
    for what in 'randread 512' 'randread 4k' 'randwrite 4k' 'randread 256k' 'randwrite 256k'; do
        # shellcheck disable=SC2086
        count=$(speed $what)
        check "zero-copy=$way, $what: $count IOPS" [ "${count:-0}" -gt 0 ]
    done
    kill $served
    check 'SIGTERM ends that, too' within 20 ended
    case $way in
    on) expected='; [1-9][0-9]* bytes went without a copy, 0 with one' ;;
    off) expected='; 0 bytes went without a copy, [1-9][0-9]* with one' ;;
    esac
    shows "zero-copy=$way is true of every byte" "$expected" cat /tmp/tcp.log
    within 5 gone /dev/ublkc3
done

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
