# A stock guest whose disk is our controller, by QEMU's client of vfio-user. It boots twice.

modprobe nvme
modprobe ext4
check 'the disk is there' within 20 there /dev/nvme0n1 || exit 1
D=/dev/nvme0n1
shows 'its size is what is served' '^268435456$' blockdev --getsize64 $D
shows 'it has a queue for each processor' '[1-9]' cat /sys/class/nvme/nvme0/queue_count

if mount -t ext4 $D /mnt 2>/dev/null && [ -e /mnt/again ]; then
    check 'after a restart the file is what it was' sh -c 'cd /mnt && md5sum -c sum'
    umount /mnt
    check 'and the file system is clean' e2fsck -f -n $D
    exit 0
fi

for log in id-ctrl smart-log error-log effects-log; do
    check "nvme $log" nvme $log /dev/nvme0
done
verify() {
    timeout 60 fio --name=verify --filename=$D --direct=1 --ioengine=libaio --rw=randwrite \
        --bs="$1" --size="$2" --iodepth=16 --verify=crc32c --output-format=terse
}
for of in '512 1m' '4k 16m' '64k 32m' '1m 64m'; do
    set -- $of
    check "fio writes and verifies $2 by blocks of $1" verify "$1" "$2"
done
shows 'interrupts come' 'nvme0q1' grep nvme0q1 /proc/interrupts
check 'nvme flush' nvme flush $D
check 'nvme dsm deallocates' nvme dsm $D --ad -s 0 -b 8

load() {
    fio --name=load --filename=$D --direct=1 --ioengine=libaio --rw=randwrite --bs=4k --size=32m \
        --iodepth=8 --verify=crc32c --verify_backlog=64 --time_based --runtime=15 >load.log 2>&1 &
    loading=$!
}
load
sleep 5
check 'nvme reset under load' nvme reset /dev/nvme0
check 'no I/O of the load failed, no block was wrong' wait $loading
shows 'and blocks were read back' 'ios=[1-9][0-9]*/[1-9]' cat load.log

file_system() {
    mkfs.ext4 -q $D && mount $D /mnt && dd if=/dev/urandom of=/mnt/file bs=1M count=16 &&
        (cd /mnt && md5sum file >sum && touch again) && umount /mnt
}
check 'a file system and a file' file_system
sync
reboot -f
