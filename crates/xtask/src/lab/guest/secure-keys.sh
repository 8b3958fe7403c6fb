# Keys of the kernel's keyring at tenmil's target and host, and keys that are replaced. The target has dropped
# its rights.

check 'modules, and tlshd with the keyring .nvme' prepare || { cat /tmp/tlshd.log; exit 1; }
has_tls || { skip 'keys of the kernel: this tenmil was built without TLS'; exit 0; }
mkdir -p /tmp/disks
DISK='file:/tmp/disks/disk?size=64m'
SERVE_OPTIONS='--sandbox=on --sandbox-path=/tmp/disks'
sandboxed() {
    shows "$1: the rights that are left" \
        'note: sandbox: capabilities: none; [1-9][0-9]* system calls allowed; [1-9][0-9]* paths allowed' \
        cat serve.log
    note "$(grep -o 'sandbox: capabilities.*' serve.log)"
}

# A target whose keys are those of the kernel, in a sandbox.
linux_forgets
key=$(tls_key 2)
configure required 'psk = [".nvme"]'
check 'target: without a key in .nvme it does not start' refused serve
server=
shows 'target: and says which is missing' "has none of host $HOST and subsystem $SUBSYSTEM" cat serve.log
check 'target: Linux has the key, by nvme-cli' linux_has "$key" 1
shows 'tenmil lists it' "NVMe1R02 $HOST $SUBSYSTEM" tenmil key list --kernel
check 'target: tenmil serves with the keys of .nvme' serve || { cat serve.log; exit 1; }
sandboxed 'target'
shows 'target: the host has .nvme for its key' '\.nvme' tenmil get hosts
check 'target: Linux connects' connect 4420 --tls --reconnect-delay=1
shows 'target: by that key' '^NVMe1R02' used_identity
check 'target: verified' verify
check 'target: disconnected' disconnect
# The other version and suite, beside a key of the directory.
other=$(tls_key 1)
tenmil_has psk "$(tls_key 1)"
linux_forgets
check 'target: a key with an identity of version 0' linux_has "$other" 0
check 'target: it reads .nvme again in its sandbox' reconfigures required 'psk = ["psk", ".nvme"]'
check 'target: Linux connects by version 0' connect 4420 --tls --reconnect-delay=1
shows 'target: by that key, too' '^NVMe0R01' used_identity
check 'target: verified by version 0' verify
check 'target: disconnected by version 0' disconnect
linux_forgets
kill -HUP $server
check 'target: a reload without keys is refused' within 10 grep -q 'has none of host' serve.log
check 'target: the sandbox has denied nothing' refused grep 'denied system call' serve.log
check 'target: the server ends by itself' stop

# The same as another user, for whom the keyring is invisible: the keys are read again all the same.
linux_forgets
linux_has "$key" 1 >/dev/null
rm -rf /tmp/disks/disk
echo 'lab:x:65534:65534::/:/bin/sh' >>/etc/passwd
echo 'lab:x:65534:' >>/etc/group
SERVE_OPTIONS='--user=lab --sandbox=on --sandbox-path=/tmp/disks'
chmod 1777 . && configure required 'psk = [".nvme"]'
check 'user: tenmil serves with the keys of .nvme' serve || { cat serve.log; exit 1; }
shows 'user: as that user' '^Uid:.65534.65534' cat /proc/$server/status
check 'user: Linux connects' connect 4420 --tls --reconnect-delay=1
check 'user: verified' verify
check 'user: disconnected' disconnect
newer=$(tls_key 2)
linux_forgets
linux_has "$newer" 1 >/dev/null
check 'user: it reads .nvme again' reconfigures required 'psk = [".nvme"]'
check 'user: Linux connects with the new key' connect 4420 --tls --reconnect-delay=1
check 'user: disconnected again' disconnect
linux_forgets
linux_has "$(tls_key 2)" 1 >/dev/null
check 'user: a key that the server does not have is refused' refused connect 4420 --tls
check 'user: the sandbox has denied nothing' refused grep 'denied system call' serve.log
check 'user: the server ends by itself' stop
linux_forgets
SERVE_OPTIONS='--sandbox=on --sandbox-path=/tmp/disks'

# A host whose keys are those of the kernel, and of which nothing but the connection tells that they were
# replaced: `tenmil perf` has no reload.
check 'nvmet offers a namespace' nvmet_offers || exit 1
check 'by a port that requires TLS' nvmet_listens 4422 required || exit 1
check 'by one that allows it' nvmet_listens 4421 allowed || exit 1
at() { echo "tcp://127.0.0.1:$1/$SUBSYSTEM/1?hostnqn=$HOST&keep-alive-timeout=5s&$2"; }
# connected PORT: two connections at least are accepted there.
connected() { [ "$(grep -c ": 0100007F:$(printf %04X "$1") [0-9A-F:]* 01 " /proc/net/tcp)" -ge 2 ]; }
loads() {
    tenmil perf "$(at "$1" "$2")" -w randrw --verify -q 8 --overwrite -t 20 >/tmp/load.log 2>&1 &
    loading=$!
    within 30 connected "$1"
    sleep 2
}
port_is() {
    case $2 in
        away) rm "$NVMET/ports/$1/subsystems/$SUBSYSTEM" ;;
        back) ln -s $NVMET/subsystems/$SUBSYSTEM "$NVMET/ports/$1/subsystems/$SUBSYSTEM" ;;
    esac
}
# replaced WHAT PORT COMMAND...: the keys are replaced while the port is missing.
replaced() {
    name=$1 port=$2
    shift 2
    check "$name: the port is removed under load" port_is "$port" away
    check "$name: the keys are replaced" "$@"
    sleep 2
    check "$name: the port is given back" port_is "$port" back
    check "$name: the load goes on, and every block is right" wait $loading
    shows "$name: it was connected again" 'it is there again' cat /tmp/load.log
    shows "$name: after it has looked its keys up" 'keyring has others by now' cat /tmp/load.log
    cat /tmp/load.log
}
shows 'host: without a key in .nvme it does not connect' "has none of host $HOST" \
    refused tenmil identify "$(at 4422 'key=.nvme')"
check 'host: Linux has the key' linux_has "$key" 1
shows 'host: it connects with a key of .nvme' TLS \
    tenmil perf "$(at 4422 'key=.nvme')" -w randrw --verify -q 8 --overwrite -t 2
new_key() { linux_forgets && linux_has "$(tls_key 2)" 1; }
loads 4422 'key=.nvme'
replaced 'host, .nvme' 4422 new_key
new_named_key() {
    key=$(tls_key 2)
    linux_forgets && linux_has "$key" 1 && tenmil_has named "$key"
}
new_named_key >/dev/null
loads 4422 'key=named'
replaced 'host, TLS' 4422 new_named_key
host=$(chap_secret 1 32 $HOST)
tenmil_has host "$host"
check 'host: nvmet asks' nvmet_asks sha256 ffdhe2048 "$host"
new_secret() {
    host=$(chap_secret 1 32 $HOST)
    tenmil_has host "$host" && nvmet_asks sha256 ffdhe2048 "$host"
}
loads 4421 dhchap=host
replaced 'host, CHAP' 4421 new_secret
