# A target whose configuration is changed by commands while Linux's host is connected and loads it:
# namespaces, subsystems, hosts, listeners, ANA states, limits. What Linux finds is compared each time, and
# no I/O of the load may fail.

HOST=nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555
SUBSYSTEM=nqn.2026-01.example:live
OTHER=nqn.2026-01.example:other
DISCOVERY=nqn.2014-08.org.nvmexpress.discovery
AT="-t tcp -a 127.0.0.1 -s 4420"
echo "$HOST" >/etc/nvme/hostnqn
echo 11111111-2222-3333-4444-555555555555 >/etc/nvme/hostid
modprobe nvme-tcp

mkdir -p /tmp/etc
cat >/tmp/etc/target.toml <<EOF
# Disks of the lab.
[[listener]]
address = "127.0.0.1:4420" # the only one

[[subsystem]]
nqn = "$SUBSYSTEM"
allowed-hosts = ["$HOST"]

[[subsystem.namespace]]
uri = "file:/tmp/disk?size=64m" # under load
nsid = 1

EOF
serve() {
    tenmil serve --config /tmp/etc/target.toml >>serve.log 2>&1 &
    server=$!
    served() { tenmil get subsystems | grep -q live; }
    within 20 served
}
check 'tenmil serves a configuration' serve || { cat serve.log; exit 1; }
refused() { ! "$@"; }

# Asynchronous events of the discovery service reach programs of Linux as events of its devices.
uevent env >uevents.log 2>&1 &
listening=$!
persistent() {
    printf %s "nqn=$DISCOVERY,transport=tcp,traddr=127.0.0.1,trsvcid=4420,hostnqn=$HOST,\
hostid=11111111-2222-3333-4444-555555555555,keep_alive_tmo=30" >/dev/nvme-fabrics
}
check 'Linux stays connected to the discovery service' persistent
# After an event, the next comes when the log has been read by that controller: nvme-cli finds it.
reads_log() {
    nvme discover $AT >/dev/null
    count=$(grep -c 'NVME_AEN=0x70f002' uevents.log)
}
# notified: the discovery log has changed since `reads_log`.
notified() { [ "$(grep -c 'NVME_AEN=0x70f002' uevents.log)" -gt "$count" ]; }

check 'nvme connect' nvme connect $AT -n $SUBSYSTEM --nr-io-queues 2 || exit 1
# controller PORT [SUBSYSTEM]: that of the subsystem by that port.
controller() {
    for found in /sys/class/nvme/nvme*; do
        grep -qx "${2:-$SUBSYSTEM}" "$found/subsysnqn" && grep -q "trsvcid=$1" "$found/address" &&
            basename "$found"
    done
}
# disk NSID: the block device of that namespace.
disk() {
    for found in /sys/block/nvme[0-9]n*; do
        [ "$(cat "$found/nsid" 2>/dev/null)" = "$1" ] && echo "/dev/${found##*/}" && return
    done
    return 1
}
within 20 disk 1 || exit 1
D=$(disk 1)
[ -b "$D" ] || { ls -la /dev/nvme*; exit 1; }
fio --name=load --filename="$D" --direct=1 --ioengine=libaio --rw=randwrite --bs=4k --size=16m \
    --iodepth=8 --rate_iops=400 --verify=crc32c --verify_backlog=64 --time_based --runtime=3000 \
    >load.log 2>&1 &
loading=$!
# Whether the connections are those of the beginning.
connections() { tenmil get nvme_connections --json | grep '"queue"\|"peer"' | tr -d '\n '; }
sleep 2
before=$(connections)
same() { [ "$(connections)" = "$before" ]; }

# Namespaces.
check 'a namespace is created' tenmil namespace create $SUBSYSTEM ram:32m --nsid 7
check 'Linux has it' within 10 disk 7
shows 'with its size' '^33554432$' blockdev --getsize64 "$(disk 7)"
verify() {
    timeout 120 fio --name=verify --filename="$1" --direct=1 --ioengine=libaio --rw=randwrite \
        --bsrange=512-64k --size=4m --iodepth=8 --verify=crc32c --verify_state_save=0 --output-format=terse
}
check 'and verifies it' verify "$(disk 7)"
# A second host of the list, for which the namespace is masked.
check 'a host is created' tenmil host create $SUBSYSTEM nqn.2026-01.example:somebody
check 'the namespace is for that host only' \
    tenmil namespace set $SUBSYSTEM 7 --allowed-hosts nqn.2026-01.example:somebody
lacks() { ! disk "$1"; }
check 'Linux removes it' within 10 lacks 7
check 'the namespace is for all' tenmil namespace set $SUBSYSTEM 7 --unset allowed-hosts
check 'Linux has it again' within 10 disk 7
check 'it becomes read-only' tenmil namespace set $SUBSYSTEM 7 --read-only
check 'a write fails' refused dd if=/dev/zero of="$(disk 7)" bs=4k count=1 oflag=direct
check 'and writable again' tenmil namespace set $SUBSYSTEM 7 --read-only=false
writable() { dd if=/dev/zero of="$(disk 7)" bs=4k count=1 oflag=direct; }
check 'a write succeeds' within 10 writable
check 'the namespace is deleted' tenmil namespace delete $SUBSYSTEM 7
check 'Linux removes it, too' within 10 lacks 7
check 'the connections are those of the beginning' same

# Subsystems, hosts.
reads_log
check 'a subsystem is created' tenmil subsystem create $OTHER
check 'with a namespace' tenmil namespace create $OTHER ram:16m --nsid 3
check 'a host that is on no list is refused' refused nvme connect $AT -n $OTHER --nr-io-queues 1
check 'the host is created' tenmil host create $OTHER $HOST
check 'the discovery service notifies Linux' within 10 notified
shows 'nvme discover finds it' $OTHER nvme discover $AT
check 'Linux connects' nvme connect $AT -n $OTHER --nr-io-queues 1 --ctrl-loss-tmo=5 --reconnect-delay=1
check 'its namespace is a disk' within 20 disk 3
check 'which Linux verifies' verify "$(disk 3)"
reads_log
check 'the host is deleted' tenmil host delete $OTHER $HOST
left() { [ -z "$(controller 4420 $OTHER)" ]; }
check 'Linux loses the controller' within 40 left
check 'after a notification' within 10 notified
check 'the subsystem is deleted' tenmil subsystem delete $OTHER
check 'a wrong name is refused' refused tenmil subsystem create foo
check 'the connections are those of the beginning, too' same

# Listeners, and ANA states of a subsystem that had none.
reads_log
check 'a listener is created' tenmil listener create 127.0.0.1:4421
check 'the discovery service notifies Linux of it' within 10 notified
shows 'nvme discover has it' 'trsvcid: *4421' nvme discover $AT
check 'Linux connects by it' nvme connect -t tcp -a 127.0.0.1 -s 4421 -n $SUBSYSTEM --nr-io-queues 1
# state PORT: what Linux takes the path by that port for.
state() {
    for path in /sys/class/nvme/nvme*/nvme*c*n*; do
        grep -q "trsvcid=$1" "${path%/*}/address" && grep -qx $SUBSYSTEM "${path%/*}/subsysnqn" &&
            cat "$path/ana_state"
    done
}
is() { [ "$(state "$1")" = "$2" ]; }
set_state() { tenmil set ana_state subsystem=$SUBSYSTEM listener=127.0.0.1:"$1" state="$2"; }
sleep 2
before=$(connections)
check 'the first path becomes inaccessible' set_state 4420 inaccessible
check 'Linux sees it' within 10 is 4420 inaccessible
check 'the second is optimized' within 10 is 4421 optimized
check 'the load goes by it' kill -0 $loading
check 'the first becomes non-optimized' set_state 4420 non-optimized
check 'Linux sees that' within 10 is 4420 non-optimized
check 'and optimized' set_state 4420 optimized
check 'Linux sees that, too' within 10 is 4420 optimized
check 'no state has cost a connection' same
check 'the second listener is deleted' tenmil listener delete 127.0.0.1:4421
nvme disconnect --device="$(controller 4421)"
gone_path() { [ -z "$(controller 4421)" ]; }
check 'its path is gone' within 30 gone_path

# Limits: the rate of Linux's I/O, within a tenth, by fio's count.
kill -INT $loading
wait $loading
check 'no I/O of the load failed, no block was wrong' grep -q 'err= 0' load.log
shows 'and blocks were read back' 'ios=[1-9][0-9]*/[1-9]' cat load.log
# near EXPECTED FOUND: not above it, and not far below where the machine has other work.
near() { awk -v e="$1" -v f="$2" 'BEGIN { exit !(f > 0.7 * e && f < 1.1 * e) }'; }
# rate FIELD FIO-ARGUMENTS...: that field of fio's line, after a second that fills what bursts allow.
rate() {
    field=$1
    shift
    timeout 60 fio --name=rate --filename="$D" --direct=1 --ioengine=libaio --size=16m --iodepth=16 \
        --time_based --ramp_time=1 --runtime=6 --output-format=terse --terse-version=3 "$@" 2>/dev/null |
        awk -F ';' -v field="$field" 'NF > 50 { print $field }'
}
# Fields: 8 reads a second, 7 KiB of them; 49 writes a second, 48 KiB of them.
limited() {
    name=$1 expected=$2
    shift 2
    found=$(rate "$@")
    check "$name: fio has $found, the limit is $expected" near "$expected" "$found"
}
free=$(rate 8 --rw=randread --bs=4k)
note "without a limit: $free reads a second"
check 'a limit of reads' tenmil set namespace_limits subsystem=$SUBSYSTEM namespace=1 read_iops=300
limited 'reads of the namespace' 300 8 --rw=randread --bs=4k
free_writes=$(rate 49 --rw=randwrite --bs=4k)
note "writes beside it: $free_writes a second"
check 'writes are not limited by it' [ "${free_writes%.*}" -gt 330 ]
check 'it is changed' tenmil set namespace_limits subsystem=$SUBSYSTEM namespace=1 \
    read_iops=0 write_bytes=4194304
limited 'bytes written to the namespace, KiB' 4096 48 --rw=randwrite --bs=16k
check 'a limit of the host' tenmil set host_limits subsystem=$SUBSYSTEM host=$HOST iops=200
limited 'commands of the host' 200 8 --rw=randread --bs=4k
check 'and of the subsystem, lower' tenmil set subsystem_limits subsystem=$SUBSYSTEM iops=100
limited 'commands of the subsystem' 100 8 --rw=randread --bs=4k
shows 'the waits are counted' '[1-9]' tenmil get limits
cat /tmp/output
for none in 'subsystem_limits iops=0' "host_limits host=$HOST iops=0" 'namespace_limits namespace=1 write_bytes=0'; do
    set -- $none
    method=$1
    shift
    check "no ${method%_limits} limit any more" tenmil set "$method" subsystem=$SUBSYSTEM "$@"
done

# The file is what is served, with its comments.
shows 'comments of the file are kept' '# Disks of the lab' cat /tmp/etc/target.toml
shows 'also behind values' 'size=64m" # under load' cat /tmp/etc/target.toml
unchanged() { tenmil apply /tmp/etc/target.toml --dry-run --json | tr -d ' \n' | grep -q '"difference":\[\]'; }
check 'nothing differs from the file' unchanged
tenmil apply /tmp/etc/target.toml --dry-run --json
cat /tmp/etc/target.toml
kill $server
ended() { wait $server; }
check 'the server ends by itself' ended
check 'another serves the written file' serve
lives() { grep -qx live "/sys/class/nvme/$(controller 4420)/state"; }
check 'Linux connects again' within 30 lives
check 'and verifies' verify "$D"
kill $listening
check 'nvme disconnect' nvme disconnect -n $SUBSYSTEM
kill $server
check 'the server ends by itself, too' ended
cat serve.log
