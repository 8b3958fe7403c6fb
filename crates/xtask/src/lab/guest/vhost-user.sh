# A guest whose virtio disk is ours, by QEMU's front end of vhost-user. The server is killed twice.

modprobe virtio_pci
modprobe virtio_blk
modprobe ext4
check 'the disk is there' within 20 there /dev/vda || exit 1
D=/dev/vda
Q=/sys/block/vda/queue
shows 'its size is what is served' '^268435456$' blockdev --getsize64 $D
shows 'its serial number is of its URI' '^tenmil[0-9a-f]\{14\}$' cat /sys/block/vda/serial
shows 'it has a queue for each processor' '^2$' sh -c 'ls /sys/block/vda/mq | wc -l'
shows 'it has a cache that can be flushed' 'write back' cat $Q/write_cache
shows 'and can be discarded and zeroed' '^[1-9][0-9]* [1-9][0-9]*$' \
    eval 'echo $(cat $Q/discard_max_bytes $Q/write_zeroes_max_bytes)'

verify() {
    timeout 90 fio --name=verify --filename=$D --direct=1 --ioengine=libaio --rw=randwrite \
        --bs="$1" --size="$2" --iodepth=16 --verify=crc32c --output-format=terse
}
sizes='512,1m 4k,16m 64k,32m 1m,64m'
is_short && sizes='4k,8m'
for of in $sizes; do
    set -- "${of%,*}" "${of#*,}"
    check "fio writes and verifies $2 by blocks of $1" verify "$1" "$2"
done
check 'over both queues' timeout 90 fio --name=both --filename=$D --direct=1 --ioengine=libaio \
    --rw=randwrite --bs=4k --size=8m --numjobs=2 --offset_increment=64m --iodepth=8 --verify=crc32c
check 'blkdiscard' blkdiscard -o 0 -l 16777216 $D

# Writes that the disk has ended.
written() { awk '{ print $5 }' /sys/block/vda/stat; }
moves() { before=$(written); sleep 1; [ "$(written)" -gt "$before" ]; }

seconds=25
is_short && seconds=12
fio --name=load --filename=$D --direct=1 --ioengine=libaio --rw=randwrite --bs=4k --size=32m \
    --iodepth=16 --verify=crc32c --verify_backlog=64 --time_based --runtime=$seconds >load.log 2>&1 &
loading=$!
check 'a load writes' within 20 moves
echo '@@ kill beside'
sleep 3
check 'after kill -9 and a start it goes on' within 20 moves
check 'no I/O of the load failed, no block was wrong' wait $loading
shows 'and blocks were read back' 'ios=[1-9][0-9]*/[1-9]' cat load.log

whole 'files, and a kill beneath them' || exit 0
check 'mkfs and mount' eval 'mkfs.ext4 -q $D && mount -t ext4 $D /mnt' || exit 1
fio --name=files --directory=/mnt --rw=randwrite --bsrange=1k-64k --size=16m --numjobs=2 \
    --ioengine=libaio --direct=1 --iodepth=8 --fsync=32 --verify=crc32c --time_based --runtime=20 \
    >files.log 2>&1 &
loading=$!
check 'files are written' within 20 moves
echo '@@ kill beside'
check 'files are verified over a kill -9' wait $loading
check 'unmount' umount /mnt
check 'the file system is clean' e2fsck -f -n $D
check 'the kernel saw no error' sh -c '! dmesg | grep -i "i/o error.*vda"'
