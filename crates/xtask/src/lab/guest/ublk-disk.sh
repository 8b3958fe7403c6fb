# A disk by ublk, for the scenarios about one: what serves it, what loads it, and their ends.

# says_no COMMAND...: passes if the command does not.
says_no() { ! "$@"; }
# serve LOG ARGUMENTS...: waits until it is ready; $served is its process.
serve() {
    log=/tmp/$1.log
    shift
    cat "$log" >>/tmp/before.log 2>/dev/null
    : >"$log"
    tenmil serve "$@" >"$log" 2>&1 &
    served=$!
    within 30 grep -q '^ready' "$log" || {
        cat "$log"
        return 1
    }
}
# is_sandboxed: what a process that serves an ublk disk has left of its rights.
is_sandboxed() {
    note "$(grep -o 'sandbox: .*' "$log" | head -n 1)"
    shows 'it has dropped its other rights' \
        'note: sandbox: capabilities: CAP_SYS_ADMIN; [1-9][0-9]* system calls allowed; [1-9][0-9]* paths allowed' \
        cat "$log"
}
# denies_nothing: nor was it denied anything that it has tried since.
denies_nothing() { check 'the sandbox has denied nothing' says_no grep 'denied system call' /tmp/*.log; }
ended() { ! kill -0 "$served" 2>/dev/null; }
# Writes that disk 3 has ended.
written() { awk '{ print $5 }' /sys/block/ublkb3/stat; }
# Whether it has ended so many since there were $start.
has_written() { [ "$(written)" -gt $((start + $1)) ]; }
# Waits for the load to end; says what it said if that was no good end.
ends_well() {
    wait "$load" || {
        echo "it ended with $?"
        cat /tmp/load.log
        return 1
    }
}
# killed_under PROCESS COUNT ARGUMENTS...: begins that load, and kills the process when so many writes
# of it have ended.
killed_under() {
    victim=$1 count=$2
    shift 2
    start=$(written)
    verify "$@" >/tmp/load.log 2>&1 &
    load=$!
    within 20 has_written "$count"
    kill -9 "$victim"
    before=$(written)
    wait "$victim" 2>/dev/null
}
# went_on COUNT: another one is there, and the load that was under way has done as much more.
went_on() {
    check 'its load has seen no error' ends_well
    check 'and was not over before' [ "$(written)" -gt $((before + $1)) ]
}
# is_ended: SIGTERM while disk 3 is written to.
is_ended() {
    verify --filename=/dev/ublkb3 --rw=randwrite --bs=4k --size=64m --iodepth=16 --time_based \
        --runtime=20 >/tmp/load.log 2>&1 &
    sleep 3
    kill "$served"
    check 'SIGTERM under load ends it' within 20 ended
    check 'and takes disk and device away' within 5 eval 'gone /dev/ublkb3 && gone /dev/ublkc3'
}
# is_clean: nor has the kernel seen an error of disk 3.
is_clean() { says_no sh -c 'dmesg | grep -i "i/o error.*ublkb3"'; }
# A file system on disk 3, and its end.
has_files() { mkdir -p /tmp/disk && mkfs.ext4 -q /dev/ublkb3 && mount -t ext4 /dev/ublkb3 /tmp/disk; }
is_whole() { umount /tmp/disk && e2fsck -fn /dev/ublkb3; }
# room_for_files: a file system for the files that are served.
room_for_files() {
    within 20 there /dev/nvme0n1 && mkfs.ext4 -q /dev/nvme0n1 && mount -t ext4 /dev/nvme0n1 /mnt
}
# trims: what files on disk 3 took is given back to the file that is served.
trims() {
    full=$(room /mnt/image)
    rm /tmp/disk/verify* && sync && fstrim /tmp/disk && sync &&
        [ "$(room /mnt/image)" -lt $((full - 80000)) ]
}
# speed RW SIZE: what disk 3 does of it in a second.
speed() {
    fio --name=speed --filename=/dev/ublkb3 --direct=1 --ioengine=libaio --rw="$1" --bs="$2" \
        --iodepth=16 --time_based --runtime=4 --output-format=json >/tmp/fio.json || return 1
    case $1 in *read) part='"read"' ;; *) part='"write"' ;; esac
    sed -n "/$part/,/}/s/^ *\"iops\" : \([0-9]*\).*/\1/p" /tmp/fio.json | head -n 1
}
# with_and_without LOG URI LISTEN WHAT...: how fast that is with copies and without, and that what is
# said of copies is true.
with_and_without() {
    told=$1 uri=$2 listen=$3
    shift 3
    for way in on off; do
        check "zero-copy=$way" serve "$told" "$uri" --listen "$listen&zero-copy=$way" --cores 0,1 ||
            exit 1
        for what in "$@"; do
            # shellcheck disable=SC2086
            count=$(speed $what)
            check "zero-copy=$way, $what: $count IOPS" [ "${count:-0}" -gt 0 ]
        done
        kill "$served"
        check 'SIGTERM ends that, too' within 20 ended
        case $way in
        on) expected='; [1-9][0-9]* bytes went without a copy, 0 with one' ;;
        off) expected='; 0 bytes went without a copy, [1-9][0-9]* with one' ;;
        esac
        shows "zero-copy=$way is true of every byte" "$expected" cat "/tmp/$told.log"
        within 5 gone /dev/ublkc3
    done
}
# What a file takes, in blocks of 512 bytes.
room() { stat -c %b "$1"; }
verify() {
    timeout 150 fio --name=verify --direct=1 --ioengine=libaio --verify=crc32c \
        --output-format=terse "$@"
}
