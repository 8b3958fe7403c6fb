# Linux's block layer and ours, over nothing. Time is emulated, so only ratios mean something.

rounds=3 seconds=5
is_short && rounds=1 seconds=2

reads() {
    fio --name=reads --filename=/dev/nullb0 --direct=1 --ioengine=io_uring --rw=randread --bs=4k \
        --iodepth=32 --numjobs="$1" --group_reporting --time_based --runtime=$seconds \
        --output-format=json >/tmp/fio.json || return 1
    sed -n '/"read"/,/}/s/^ *"iops" : \([0-9]*\).*/\1/p' /tmp/fio.json | head -n 1
}
# of A B: what B is of A.
of() { awk -v a="${1:-0}" -v b="${2:-0}" 'BEGIN { if (a > 0) printf "%.2f", b / a }'; }

# queue_mode 0 is bio, 1 is one queue by request (not there any more), 2 is multi-queue.
linux() {
    for mode in 'bio 0 1' 'mq-1 2 1' 'mq-2 2 2'; do
        set -- $mode
        modprobe -r null_blk 2>/dev/null
        check "null_blk $1" modprobe null_blk queue_mode="$2" submit_queues="$3" irqmode=0 gb=4 ||
            continue
        one=$(reads 1)
        two=$(reads 2)
        for iops in $one $two; do
            check "null_blk $1 does $iops IOPS" test "${iops:-0}" -gt 0
        done
        note "round $round: null_blk $1, 2 threads do $(of "$one" "$two") of what 1 does"
    done
}

# rows FILE: mode, contexts and I/Os per second of one thread and of two, a line each.
rows() {
    awk -F '[:,]' '/"null_blk"/ { inside = 1 }
        inside && /"contexts"/ { contexts = $2 + 0 }
        inside && /"mode"/ { gsub(/[" ]/, "", $2); mode = $2 }
        inside && /"iops"/ { iops = $2 + 0 }
        inside && /"threads"/ { of[mode "-" contexts, $2 + 0] = iops
            if ($2 + 0 == 2) printf "%s-%d %.0f %.0f\n", mode, contexts, of[mode "-" contexts, 1], iops }' "$1"
}
ours() {
    check 'tenmil perf --null-blk' tenmil perf --null-blk -t $seconds --json=/tmp/ours.json || return
    rows /tmp/ours.json >/tmp/rows
    check 'its modes are single, bypass, and mq with one context and with two' \
        [ "$(wc -l </tmp/rows)" = 4 ]
    while read -r mode one two; do
        check "ours $mode does $two IOPS" test "$two" -gt 0
        note "round $round: ours $mode, 2 threads do $(of "$one" "$two") of what 1 does"
    done </tmp/rows
}

for round in $(seq $rounds); do
    linux
    ours
done
