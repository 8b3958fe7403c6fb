# A disk by ublk, for the scenarios about one: what serves it, what loads it, and their ends.

# says_no COMMAND...: passes if the command does not.
says_no() { ! "$@"; }
# serve LOG ARGUMENTS...: waits until it is ready; $served is its process.
serve() {
    log=/tmp/$1.log
    shift
    : >"$log"
    tenmil serve "$@" >"$log" 2>&1 &
    served=$!
    within 30 grep -q '^ready' "$log" || {
        cat "$log"
        return 1
    }
}
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
# What a file takes, in blocks of 512 bytes.
room() { stat -c %b "$1"; }
verify() {
    timeout 150 fio --name=verify --direct=1 --ioengine=libaio --verify=crc32c \
        --output-format=terse "$@"
}
