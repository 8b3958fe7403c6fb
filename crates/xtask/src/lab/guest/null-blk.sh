# Linux's block layer and ours, over nothing. Time is emulated, so only ratios mean something.

reads() {
    fio --name=reads --filename=/dev/nullb0 --direct=1 --ioengine=io_uring --rw=randread --bs=4k \
        --iodepth=32 --numjobs="$1" --group_reporting --time_based --runtime=5 \
        --output-format=json >/tmp/fio.json || return 1
    sed -n '/"read"/,/}/s/^ *"iops" : \([0-9]*\).*/\1/p' /tmp/fio.json | head -n 1
}

# queue_mode 0 is bio, 1 is one queue by request (not there any more), 2 is multi-queue.
for mode in 'bio 0 1' 'mq-1 2 1' 'mq-2 2 2'; do
    set -- $mode
    modprobe -r null_blk 2>/dev/null
    check "null_blk $1" modprobe null_blk queue_mode="$2" submit_queues="$3" irqmode=0 gb=4 || continue
    for threads in 1 2; do
        iops=$(reads $threads)
        check "null_blk $1, $threads threads: $iops IOPS" test "${iops:-0}" -gt 0
    done
done

check 'tenmil perf --null-blk' tenmil perf --null-blk -t 3 --json=/tmp/ours.json
cat /tmp/output
