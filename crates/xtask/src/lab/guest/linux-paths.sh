# A configuration with two listeners, and Linux's multipath over both: paths that change, namespaces
# that come and go, hosts that are not let in, a server that says nothing for too long.

HOST=nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555
SUBSYSTEM=nqn.2026-01.example:paths
echo "$HOST" >/etc/nvme/hostnqn
echo 11111111-2222-3333-4444-555555555555 >/etc/nvme/hostid
modprobe nvme-tcp

# configure ACCESS-OF-4420 ACCESS-OF-4421 [MORE]
configure() {
    cat >target.toml <<EOF
[[listener]]
address = "127.0.0.1:4420"
[[listener]]
address = "127.0.0.1:4421"
[[subsystem]]
nqn = "$SUBSYSTEM"
allowed-hosts = ["$HOST"]
[[subsystem.namespace]]
uri = "file:/tmp/disk?size=64m"
nsid = 1
$3
[[subsystem.path]]
listener = "127.0.0.1:4420"
ana-group = 1
ana-state = "$1"
[[subsystem.path]]
listener = "127.0.0.1:4421"
ana-group = 1
ana-state = "$2"
EOF
}
applied() { grep -c 'note: target.toml: ' serve.log; }
change() {
    before=$(applied)
    configure "$@"
    kill -HUP $server
    more() { [ "$(applied)" -gt "$before" ]; }
    within 10 more
}
serve() {
    tenmil serve --config target.toml >serve.log 2>&1 &
    server=$!
    within 20 grep -q ready serve.log
}
configure optimized non-optimized
check 'tenmil serves a configuration' serve || { cat serve.log; exit 1; }

nvme connect -t tcp -a 127.0.0.1 -s 4420 -n $SUBSYSTEM -q nqn.2026-01.example:stranger \
    -I 99999999-2222-3333-4444-555555555555 >/tmp/output 2>&1 && stranger=in
check 'a host that is on no list is not let in' test -z "$stranger"
for port in 4420 4421; do
    check "connect by port $port" \
        nvme connect -t tcp -a 127.0.0.1 -s $port -n $SUBSYSTEM -c 1 -k 5 || exit 1
done
check 'the namespace is one block device' within 20 there /dev/nvme0n1 || exit 1
D=/dev/nvme0n1
# state PORT: what Linux takes the path by that port for.
state() {
    for path in /sys/class/nvme/nvme*/nvme*c*n*; do
        grep -q "trsvcid=$1" "${path%/*}/address" && cat "$path/ana_state"
    done
}
is() { [ "$(state "$1")" = "$2" ]; }
check 'port 4420 is optimized' within 10 is 4420 optimized
check 'port 4421 is non-optimized' within 10 is 4421 non-optimized
shows 'nvme ana-log reads it' 'ANA' nvme ana-log "$(ls -d /dev/nvme[0-9] | head -n 1)"
nvme list-subsys

fio --name=load --filename=$D --direct=1 --ioengine=libaio --rw=randwrite --bs=4k --size=32m \
    --iodepth=8 --verify=crc32c --verify_backlog=64 --time_based --runtime=45 >load.log 2>&1 &
loading=$!
sleep 3
check 'the first becomes inaccessible, the second optimized' change inaccessible optimized
check 'Linux sees that of the first' within 10 is 4420 inaccessible
check 'and of the second' within 10 is 4421 optimized
sleep 3
check 'and back' change optimized inaccessible
check 'Linux sees it' within 10 is 4420 optimized

DB='volume:[file:/tmp/pool]/db'
check 'a store is made' tenmil pool create 'file:/tmp/pool?size=64m'
check 'and a volume' tenmil volume create $DB --size 16m
check 'it is added as a namespace under load' change optimized non-optimized "
[[subsystem.namespace]]
uri = '$DB'
nsid = 5"
has() { grep -qx "$1" /sys/block/nvme*n*/nsid; }
check 'Linux has it' within 10 has 5
# sectors NUMBER: whether Linux takes namespace 5 for so long.
sectors() {
    for nsid in /sys/block/nvme*n*/nsid; do
        grep -qx 5 $nsid && cat "${nsid%/*}/size"
    done | grep -qx "$1"
}
check 'with 16 MiB' within 10 sectors 32768
check 'it grows while it is served' tenmil volume resize $DB --size 24m
check 'Linux sees its new end, told by the event' within 10 sectors 49152
check 'and taken away again' change optimized non-optimized
lacks() { ! has "$1"; }
check 'Linux has it no more' within 10 lacks 5

check 'a mistake in the file is refused' sh -c "
    echo 'acess = 1' >>target.toml; kill -HUP $server; sleep 2; grep -q 'acess' serve.log"

# Silence: the host's keep-alive time is over, and it connects again.
kill -STOP $server
sleep 12
kill -CONT $server
lives() { [ "$(cat /sys/class/nvme/nvme*/state | grep -c live)" -ge 2 ]; }
check 'after twelve seconds of silence both paths live again' within 40 lives
check 'no I/O of the load failed, no block was wrong' wait $loading
shows 'and blocks were read back' 'ios=[1-9][0-9]*/[1-9]' cat load.log
cat load.log

check 'nvme disconnect' nvme disconnect -n $SUBSYSTEM
kill $server
served() { wait $server; }
check 'the server ends by itself' served
cat serve.log
