# `tenmil serve file:… --listen ublk:N` where the kernel lends the data of requests, with that and
# without it.

# speed RW SIZE: what disk 3 does of it in a second.
speed() {
    fio --name=speed --filename=/dev/ublkb3 --direct=1 --ioengine=libaio --rw="$1" --bs="$2" \
        --iodepth=16 --time_based --runtime=4 --output-format=json >/tmp/fio.json || return 1
    case $1 in *read) part='"read"' ;; *) part='"write"' ;; esac
    sed -n "/$part/,/}/s/^ *\"iops\" : \([0-9]*\).*/\1/p" /tmp/fio.json | head -n 1
}

modprobe nvme
modprobe ext4
modprobe ublk_drv
check 'a file system for files' eval 'within 20 there /dev/nvme0n1 && mkfs.ext4 -q /dev/nvme0n1 &&
    mount -t ext4 /dev/nvme0n1 /mnt' || exit 1
F='file:/mnt/image?size=192m'
L='ublk:3?queues=2&depth=64'

check 'a disk in a file' serve file "$F" --listen "$L" --cores 0,1 || exit 1
shows 'its data are not copied' 'without a copy$' cat /tmp/file.log
check 'data of 512 bytes to 1 MiB verified' verify --filename=/dev/ublkb3 --rw=randwrite \
    --bsrange=512-1m --size=64m --iodepth=8
check 'data verified over both queues' verify --filename=/dev/ublkb3 --rw=randwrite --bs=4k \
    --size=12m --numjobs=2 --offset_increment=96m --iodepth=32
check 'and through the page cache' verify --filename=/dev/ublkb3 --direct=0 --ioengine=psync \
    --rw=randwrite --bs=3k --size=12m --fsync=32
mkdir -p /tmp/disk
check 'mkfs and mount' eval 'mkfs.ext4 -q /dev/ublkb3 && mount -t ext4 /dev/ublkb3 /tmp/disk'
check 'files verified' verify --directory=/tmp/disk --rw=randwrite --bsrange=1k-64k --size=24m \
    --numjobs=2 --iodepth=8 --fsync=64
full=$(room /mnt/image)
rm /tmp/disk/verify*
sync
check 'fstrim gives room back' eval 'fstrim /tmp/disk && sync &&
    [ $(room /mnt/image) -lt $((full - 80000)) ]'
check 'unmounted and whole' eval 'umount /tmp/disk && e2fsck -fn /dev/ublkb3'

# Nobody serves it for a while, and nobody notices.
start=$(written)
verify --filename=/dev/ublkb3 --rw=randwrite --bs=4k --size=48m --iodepth=16 --numjobs=2 \
    --offset_increment=96m >/tmp/load.log 2>&1 &
load=$!
within 20 has_written 500
kill -9 $served
before=$(written)
wait $served 2>/dev/null
check 'after kill -9 under it the disk stays' there /dev/ublkb3
check 'the same command goes on with it' serve file "$F" --listen "$L" --cores 0,1
shows 'and says so' 'was left behind by a process that has died' cat /tmp/file.log
shows 'still without a copy' 'without a copy$' cat /tmp/file.log
check 'the load has seen no error' ends_well
check 'and was not over before' [ "$(written)" -gt $((before + 1000)) ]
check 'mkfs and mount again' eval 'mkfs.ext4 -q /dev/ublkb3 && mount -t ext4 /dev/ublkb3 /tmp/disk'
start=$(written)
verify --directory=/tmp/disk --rw=randwrite --bs=8k --size=64m --iodepth=8 --fsync=32 \
    >/tmp/load.log 2>&1 &
load=$!
within 20 has_written 300
kill -9 $served
before=$(written)
wait $served 2>/dev/null
check 'a file system goes on, too, with copies' \
    serve file "$F" --listen "$L&zero-copy=off" --cores 0,1
shows 'which says why' 'are copied: zero copy was turned off' cat /tmp/file.log
check 'its load has seen no error' ends_well
check 'and was not over before, either' [ "$(written)" -gt $((before + 200)) ]
check 'unmounted and whole again' eval 'umount /tmp/disk && e2fsck -fn /dev/ublkb3'
check 'nor has the kernel seen one' says_no sh -c 'dmesg | grep -i "i/o error.*ublkb3"'
kill $served
check 'SIGTERM ends it' within 20 ended
shows 'every byte of that was copied' '; 0 bytes went without a copy, [1-9][0-9]* with one' \
    cat /tmp/file.log
check 'disk and device are away' within 5 eval 'gone /dev/ublkb3 && gone /dev/ublkc3'

for turn in 1 2; do
    for way in on off; do
        check "zero-copy=$way" serve file "$F" --listen "$L&zero-copy=$way" --cores 0,1 || exit 1
        for what in 'randread 4k' 'randwrite 4k' 'randread 256k' 'randwrite 256k'; do
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
        shows "zero-copy=$way is true of every byte" "$expected" cat /tmp/file.log
        within 5 gone /dev/ublkc3
    done
done

check 'a file without direct transfers' serve file "$F&direct=no" --listen "$L" --cores 0,1
shows 'goes without a copy of ours as well' 'without a copy$' cat /tmp/file.log
check 'and is verified' verify --filename=/dev/ublkb3 --rw=randwrite --bsrange=512-1m --size=24m
verify --filename=/dev/ublkb3 --rw=randwrite --bs=4k --size=64m --iodepth=16 --time_based \
    --runtime=20 >/tmp/load.log 2>&1 &
sleep 3
kill $served
check 'SIGTERM under load ends it' within 20 ended
check 'and takes disk and device away again' within 5 eval 'gone /dev/ublkb3 && gone /dev/ublkc3'
check 'what is only read' serve file "$F" --listen "$L" --read-only
check 'is read without a copy' dd if=/dev/ublkb3 of=/dev/null bs=1M count=16
kill $served
check 'and ends' within 20 ended
shows 'as it says' '; [1-9][0-9]* bytes went without a copy, 0 with one' cat /tmp/file.log
check 'a disk in memory is served' serve ram ram:16m --listen ublk:3
shows 'and says why it copies' 'are copied: it works on data in memory' cat /tmp/ram.log
kill $served
check 'and ends as well' within 20 ended
