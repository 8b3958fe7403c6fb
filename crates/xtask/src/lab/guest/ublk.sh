# `tenmil serve URI --listen ublk:N` as a disk of the guest's own kernel.

# Ticks of the clock that a process has run for.
ticks() { cut -d ' ' -f 14,15 "/proc/$1/stat" | tr ' ' '+' | sed 's/^/echo $((/;s/$/))/' | sh; }

modprobe nvme
modprobe ext4
shows 'without the module it says what to load' 'modprobe ublk_drv' \
    says_no tenmil serve ram:1m --listen ublk:
check 'modprobe ublk_drv' modprobe ublk_drv || exit 1
shows 'tenmil doctor finds it' 'driver ublk_drv.*may be used' tenmil doctor

check 'a disk in memory, its number picked' \
    serve ram ram:256m --listen 'ublk:?queues=2&depth=32' --cores 0,1 || exit 1
is_sandboxed
shows 'it is ready at its file' '^ready /dev/ublkb0$' cat /tmp/ram.log
shows 'it has two queues' '^2$' sh -c 'ls /sys/block/ublkb0/mq | wc -l'
shows 'its number is in use' 'is in use: process' says_no tenmil serve ram:1m --listen ublk:0
check 'data verified over both queues' verify --filename=/dev/ublkb0 --rw=randwrite --bs=4k \
    --size=16m --numjobs=2 --offset_increment=64m --iodepth=16
check 'data of 512 bytes to 1 MiB verified' verify --filename=/dev/ublkb0 --rw=randwrite \
    --bsrange=512-1m --size=64m --iodepth=8
before=$(ticks $served)
sleep 4
after=$(ticks $served)
shows 'asleep when idle: ticks in four seconds' '^[0-9]\?[0-9]$' echo $((after - before))
kill -9 $served
check 'what was in memory does not come back: kill -9 takes the disk away' \
    within 20 gone /dev/ublkb0
check 'the number can be had again' serve ram ram:64m --listen ublk:0
kill $served
check 'SIGTERM ends it' within 20 ended
check 'and takes disk and device away' eval 'gone /dev/ublkb0 && gone /dev/ublkc0'

check 'a file system for files' room_for_files || exit 1
F='file:/mnt/image?size=192m'
L='ublk:3?queues=2&depth=64'
Q=/sys/block/ublkb3/queue
check 'a disk in a file' serve file "$F" --listen "$L" --cores 0,1 || exit 1
shows 'it has a cache that can be flushed' 'write back' cat $Q/write_cache
shows 'and passed by' 1 cat $Q/fua
shows 'and can be discarded and zeroed' '^[1-9][0-9]* [1-9][0-9]*$' \
    eval 'echo $(cat $Q/discard_max_bytes $Q/write_zeroes_max_bytes)'
check 'mkfs and mount' has_files
check 'files verified' verify --directory=/tmp/disk --rw=randwrite --bsrange=1k-64k --size=24m \
    --numjobs=2 --iodepth=8 --fsync=64
check 'fstrim gives room back' trims
check 'unmounted and whole' is_whole
check 'blkdiscard gives all of it back' eval 'blkdiscard /dev/ublkb3 &&
    [ $(room /mnt/image) -lt 4096 ]'

# The disk has no server for a while, and no I/O fails.
killed_under $served 500 --filename=/dev/ublkb3 --rw=randwrite --bs=4k --size=48m --iodepth=16 \
    --numjobs=2 --offset_increment=96m
check 'after kill -9 under it the disk stays' there /dev/ublkb3
sleep 1
shows 'something else is not served there' 'it served something else' \
    says_no tenmil serve 'file:/mnt/other?size=192m' --listen ublk:3
check 'the same command goes on with it' serve file "$F" --listen "$L" --cores 0,1
shows 'and says so' 'was left behind by a process that has died' cat /tmp/file.log
went_on 1000
check 'nor has the kernel seen one' is_clean

# The same beneath a file system.
check 'mkfs and mount again' has_files
killed_under $served 300 --directory=/tmp/disk --rw=randwrite --bs=8k --size=64m --iodepth=8 \
    --fsync=32
check 'a file system goes on, too' serve file "$F" --listen "$L" --cores 0,1
went_on 200
check 'unmounted and whole again' is_whole

is_ended
check 'what it had is in the file' serve file "$F" --listen ublk:3 --read-only
shows 'which is read-only' '^1$' cat /sys/block/ublkb3/ro
kill $served
check 'SIGTERM ends that, too' within 20 ended
denies_nothing
