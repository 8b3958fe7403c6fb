# A stock guest whose disk is our controller, by QEMU's client of vfio-user. It boots three
# times: once more by a restart, and once more in a new machine after its server was killed.

# What is not answered is given up after 5 s, and not after 30.
modprobe nvme-core io_timeout=5 admin_timeout=5
modprobe nvme
modprobe ext4
check 'the disk is there' within 20 there /dev/nvme0n1 || exit 1
D=/dev/nvme0n1
PART=${D}p1
shows 'its size is what is served' '^268435456$' blockdev --getsize64 $D
shows 'it has a queue for each processor' '[1-9]' cat /sys/class/nvme/nvme0/queue_count

verify() {
    timeout 90 fio --name=verify --filename=$D --direct=1 --ioengine=libaio --rw=randwrite \
        --bs="$1" --size="$2" --iodepth=16 --verify=crc32c --output-format=terse
}
# load SECONDS
load() {
    fio --name=load --filename=$D --offset=128m --direct=1 --ioengine=libaio --rw=randwrite --bs=4k \
        --size=32m --iodepth=8 --verify=crc32c --verify_backlog=64 --time_based --runtime="$1" \
        >load.log 2>&1 &
    loading=$!
}
load_ended() { ! kill -0 $loading 2>/dev/null; }
refused() { ! "$@"; }
file_is_there() {
    mount -t ext4 $PART /mnt && (cd /mnt && md5sum -c sum) && umount /mnt && e2fsck -f -n $PART
}

# The first time there are no partitions.
if [ ! -b $PART ]; then
    for log in id-ctrl smart-log error-log effects-log; do
        check "nvme $log" nvme $log /dev/nvme0
    done
    sizes='512,1m 4k,16m 64k,32m 1m,64m'
    is_short && sizes='4k,8m 1m,16m'
    for of in $sizes; do
        set -- "${of%,*}" "${of#*,}"
        check "fio writes and verifies $2 by blocks of $1" verify "$1" "$2"
    done
    shows 'interrupts come' 'nvme0q1' grep nvme0q1 /proc/interrupts
    check 'nvme flush' nvme flush $D
    check 'nvme dsm deallocates' nvme dsm $D --ad -s 0 -b 8

    if whole 'a reset under load'; then
        load 15
        sleep 5
        check 'nvme reset under load' nvme reset /dev/nvme0
        check 'no I/O of the load failed, no block was wrong' wait $loading
        shows 'and blocks were read back' 'ios=[1-9][0-9]*/[1-9]' cat load.log
    fi

    # New, primary, number, first, last, twice; and write.
    partition() {
        printf '%s\n' n p 1 '' +64M n p 2 '' '' w | fdisk $D
        within 10 there $PART && within 10 there ${D}p2
    }
    check 'fdisk makes two partitions' partition || exit 1
    shows 'the first has 64 MiB' '^67[0-9]\{6\}$' blockdev --getsize64 $PART
    file_system() {
        mkfs.ext4 -q $PART && mount $PART /mnt && dd if=/dev/urandom of=/mnt/file bs=1M count=16 &&
            (cd /mnt && md5sum file >sum) && umount /mnt
    }
    check 'a file system on the first, and a file' file_system
    if ! whole 'a restart of the guest, and one of its server'; then
        check 'the file is what it was' file_is_there
        exit 0
    fi
    sync
    reboot -f
    sleep 1000
fi

check 'after a restart the other partition is there' there ${D}p2
check 'the file is what it was, and the file system is clean' file_is_there
marked() { mount -t ext4 $PART /mnt && "$@" /mnt/third; ended=$?; umount /mnt; return $ended; }
if marked test -e; then
    check 'a new machine works with the server that was started again' verify 4k 8m
    exit 0
fi

# Its server is killed and started again. The protocol has no way to go on from there: QEMU's client
# does not connect once more. Either its QEMU ends then (11.1 fails an assertion of its own), or the
# controller is dead and the guest is not.
check 'the third start will know itself' marked touch
load 60
sleep 3
check 'it is written' kill -0 $loading
echo '@@ kill beside'
dead() { grep -q dead /sys/class/nvme/nvme0/state; }
check 'after a kill -9 of the server its controller is dead' within 120 dead
shows 'and the kernel says that it has given it up' 'Disabling device after reset failure' dmesg
check 'the guest is well' sh -c 'dd if=/dev/urandom of=/tmp/well bs=1M count=8 && md5sum /tmp/well'
check 'and nothing is reported as written: the load waits' kill -0 $loading
echo '@@ cold start'
sleep 1000
