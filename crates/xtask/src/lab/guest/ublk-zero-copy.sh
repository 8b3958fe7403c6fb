# `tenmil serve file:… --listen ublk:N` where the kernel offers zero copy, with that and without it.

modprobe nvme
modprobe ext4
modprobe ublk_drv
check 'a file system for files' room_for_files || exit 1
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
check 'mkfs and mount' has_files
check 'files verified' verify --directory=/tmp/disk --rw=randwrite --bsrange=1k-64k --size=24m \
    --numjobs=2 --iodepth=8 --fsync=64
check 'fstrim gives room back' trims
check 'unmounted and whole' is_whole

# The disk has no server for a while, and no I/O fails.
killed_under $served 500 --filename=/dev/ublkb3 --rw=randwrite --bs=4k --size=48m --iodepth=16 \
    --numjobs=2 --offset_increment=96m
check 'after kill -9 under it the disk stays' there /dev/ublkb3
check 'the same command goes on with it' serve file "$F" --listen "$L" --cores 0,1
shows 'and says so' 'was left behind by a process that has died' cat /tmp/file.log
shows 'still without a copy' 'without a copy$' cat /tmp/file.log
went_on 1000
check 'mkfs and mount again' has_files
killed_under $served 300 --directory=/tmp/disk --rw=randwrite --bs=8k --size=64m --iodepth=8 \
    --fsync=32
check 'a file system goes on, too, with copies' \
    serve file "$F" --listen "$L&zero-copy=off" --cores 0,1
shows 'which says why' 'are copied: zero copy was turned off' cat /tmp/file.log
went_on 200
check 'unmounted and whole again' is_whole
check 'nor has the kernel seen one' is_clean
kill $served
check 'SIGTERM ends it' within 20 ended
shows 'every byte of that was copied' '; 0 bytes went without a copy, [1-9][0-9]* with one' \
    cat /tmp/file.log
check 'disk and device are away' within 5 eval 'gone /dev/ublkb3 && gone /dev/ublkc3'

for _ in 1 2; do
    with_and_without file "$F" "$L" 'randread 4k' 'randwrite 4k' 'randread 256k' 'randwrite 256k'
done

check 'a file without direct transfers' serve file "$F&direct=no" --listen "$L" --cores 0,1
shows 'goes without a copy of ours as well' 'without a copy$' cat /tmp/file.log
check 'and is verified' verify --filename=/dev/ublkb3 --rw=randwrite --bsrange=512-1m --size=24m
is_ended
check 'what is only read' serve file "$F" --listen "$L" --read-only
check 'is read without a copy' dd if=/dev/ublkb3 of=/dev/null bs=1M count=16
kill $served
check 'and ends' within 20 ended
shows 'as it says' '; [1-9][0-9]* bytes went without a copy, 0 with one' cat /tmp/file.log
check 'a disk in memory is served' serve ram ram:16m --listen ublk:3
shows 'and says why it copies' 'are copied: it works on data in memory' cat /tmp/ram.log
kill $served
check 'and ends as well' within 20 ended
is_sandboxed
denies_nothing
