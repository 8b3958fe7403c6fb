# NVMe/TCP with TLS and DH-HMAC-CHAP: what the scenarios of both directions have in common.

# tlshd, keyctl and nvme of the kernel's suite.
PATH=/lab/secure/bin:$PATH
HOST=nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555
HOST_ID=11111111-2222-3333-4444-555555555555
SUBSYSTEM=nqn.2026-01.example:secure
DISCOVERY=nqn.2014-08.org.nvmexpress.discovery
NVMET=/sys/kernel/config/nvmet
echo "$HOST" >/etc/nvme/hostnqn
echo "$HOST_ID" >/etc/nvme/hostid

refused() { ! "$@"; }

# prepare: modules, tlshd with the keyring of NVMe.
prepare() {
    for module in tls nvme-tcp nvmet-tcp loop; do
        modprobe $module || return 1
    done
    mount -t configfs configfs /sys/kernel/config
    printf '[debug]\nloglevel=1\n[authenticate]\nkeyrings=.nvme\n' >/etc/tlshd.conf
    tlshd -s -c /etc/tlshd.conf >/tmp/tlshd.log 2>&1 &
    within 20 grep -q "'.nvme' linked" /tmp/tlshd.log
}
# mark, new_messages: the kernel's messages since then.
mark() {
    marks=$((${marks:-0} + 1))
    echo "lab: mark $marks." >/dev/kmsg
}
new_messages() { dmesg | sed -n "/lab: mark $marks\./,\$p"; }
# Linux since 6.16 has secure concatenation.
can_concatenate() { nvme connect --help 2>&1 | grep -q -e --concat && grep -q concat /dev/nvme-fabrics; }

# GnuTLS 3.8.9, which came with tlshd 1.0, computes binders of SHA-384 wrong.
has_sha384() { ! tlshd --version 2>&1 | grep -q 'ktls-utils 1\.0'; }

# tls_key HASH: a new configured PSK (1: SHA-256, 32 bytes; 2: SHA-384, 48 bytes).
tls_key() { nvme gen-tls-key --hmac="$1" | grep -o 'NVMeTLSkey-1:.*'; }
# chap_secret HASH LENGTH NQN: a new secret; HASH 0 stands for one that is not transformed.
chap_secret() { nvme gen-dhchap-key --hmac="$1" --key-length="$2" --nqn="$3" | grep -o 'DHHC-1:.*'; }

# linux_has KEY VERSION [SUBSYSTEM [OPTION]]: gives the kernel the key with the identity of that version.
linux_has() {
    nvme check-tls-key --keydata="$1" --identity="$2" --hostnqn=$HOST \
        --subsysnqn="${3:-$SUBSYSTEM}" --insert $4
}
linux_forgets() { keyctl clear %:.nvme; }
# Identities of the keys that the kernel has.
linux_keys() { keyctl show %:.nvme | sed -n 's/.*psk: //p'; }

# connect PORT OPTION...: connects the Linux host; the disk is /dev/nvme0n1.
connect() {
    port=$1
    shift
    mark
    timeout 60 nvme connect -t tcp -a 127.0.0.1 -s "$port" -n $SUBSYSTEM --nr-io-queues 1 "$@" &&
        within 20 there /dev/nvme0n1
}
disconnect() { nvme disconnect -n $SUBSYSTEM && within 20 gone /sys/class/nvme/nvme0; }
# of NAME: what sysfs tells of the connected controller.
of() { cat "/sys/class/nvme/nvme0/$1"; }
# The identity of the key with which the connection was made; the attribute has its serial number.
used_identity() { keyctl rdescribe "$((0x$(of tls_key)))" | sed 's/.*;//'; }

# verify [SIZE]: written by the Linux host, read again and compared.
verify() {
    timeout 120 fio --name=verify --filename=/dev/nvme0n1 --direct=1 --ioengine=libaio --rw=randwrite \
        --bsrange=512-64k --size="${1:-2m}" --iodepth=8 --verify=crc32c --verify_state_save=0 \
        --output-format=terse
}

# fio's load in the background, as the Linux host; `load_ends` is its verdict.
load() {
    fio --name=load --filename=/dev/nvme0n1 --direct=1 --ioengine=libaio --rw=randwrite --bs=4k --size=16m \
        --iodepth=8 --verify=crc32c --verify_backlog=64 --time_based --runtime="$1" >load.log 2>&1 &
    loading=$!
}
load_ends() { wait $loading && grep -q 'ios=[1-9][0-9]*/[1-9]' load.log; }

# nvmet_offers: a namespace of memory, for one host only.
nvmet_offers() {
    truncate -s 64M /tmp/linux-disk && losetup /dev/loop0 /tmp/linux-disk &&
        mkdir -p $NVMET/hosts/$HOST &&
        mkdir $NVMET/subsystems/$SUBSYSTEM &&
        echo 0 >$NVMET/subsystems/$SUBSYSTEM/attr_allow_any_host &&
        ln -s $NVMET/hosts/$HOST $NVMET/subsystems/$SUBSYSTEM/allowed_hosts/$HOST &&
        mkdir $NVMET/subsystems/$SUBSYSTEM/namespaces/1 &&
        echo /dev/loop0 >$NVMET/subsystems/$SUBSYSTEM/namespaces/1/device_path &&
        echo 1 >$NVMET/subsystems/$SUBSYSTEM/namespaces/1/enable
}
# nvmet_listens PORT off|allowed|required
nvmet_listens() {
    at=$NVMET/ports/$1
    mkdir "$at" && echo tcp >"$at/addr_trtype" && echo ipv4 >"$at/addr_adrfam" &&
        echo 127.0.0.1 >"$at/addr_traddr" && echo "$1" >"$at/addr_trsvcid" || return 1
    # The second makes TLS required, unless the third allows both.
    [ "$2" = off ] || echo tls1.3 >"$at/addr_tsas" || return 1
    [ "$2" != allowed ] || echo 'not required' >"$at/addr_treq" || return 1
    ln -s $NVMET/subsystems/$SUBSYSTEM "$at/subsystems/$SUBSYSTEM"
}
# nvmet_asks HASH GROUP HOST-SECRET [CONTROLLER-SECRET]: what it authenticates the host with. The kernel
# takes a new line for a part of the secret.
nvmet_asks() {
    at=$NVMET/hosts/$HOST
    echo "hmac($1)" >$at/dhchap_hash && echo "$2" >$at/dhchap_dhgroup &&
        printf %s "$3" >$at/dhchap_key && printf %s "${4:-}" >$at/dhchap_ctrl_key
}
nvmet_asks_nothing() {
    rm $NVMET/subsystems/$SUBSYSTEM/allowed_hosts/$HOST && rmdir $NVMET/hosts/$HOST &&
        mkdir $NVMET/hosts/$HOST &&
        ln -s $NVMET/hosts/$HOST $NVMET/subsystems/$SUBSYSTEM/allowed_hosts/$HOST
}

# Keys of tenmil are files of its keyring.
export TENMIL_KEYRING=/tmp/keys
# tenmil_has NAME TEXT
tenmil_has() { printf '%s\n' "$2" | tenmil key import "$1" --force; }
# has_tls: whether tenmil was built with it; if not, it names the feature.
has_tls() {
    ! tenmil identify "tcp://127.0.0.1:9/$SUBSYSTEM/1?tls=required&key=absent" 2>&1 | grep -q feature
}
# configure TLS KEYS-OF-THE-HOST [LINES-OF-THE-SUBSYSTEM [OTHER-TABLES]]
configure() {
    cat >target.toml <<EOF
keyring = "$TENMIL_KEYRING"
[[listener]]
address = "127.0.0.1:4420"
tls = "$1"
[[subsystem]]
nqn = "$SUBSYSTEM"
allowed-hosts = [{ nqn = "$HOST"${2:+, $2} }]
$3
[[subsystem.namespace]]
uri = "${DISK:-file:/tmp/disk?size=64m}"
nsid = 1
$4
EOF
}
# Options of the server, if a scenario has any.
SERVE_OPTIONS=
serve() {
    tenmil serve --config target.toml $SERVE_OPTIONS >serve.log 2>&1 &
    server=$!
    served() { grep -q ready serve.log || ! kill -0 $server; }
    within 30 served && kill -0 $server
}
# stop: if there is a server, it ends, and without an error.
stop() {
    [ -n "$server" ] || return 0
    kill $server
    wait $server
    ended=$?
    server=
    [ $ended = 0 ] || { echo "exit status $ended" && cat serve.log && return 1; }
}
# serves TLS KEYS-OF-THE-HOST [LINES-OF-THE-SUBSYSTEM [OTHER-TABLES]]: a server with this configuration.
serves() { stop && configure "$@" && { serve || { cat serve.log; return 1; }; }; }
# reconfigures ...: the same of the server that runs, at once.
reconfigures() {
    before=$(grep -c 'note: target.toml: ' serve.log)
    configure "$@" && kill -HUP $server || return 1
    applied() { [ "$(grep -c 'note: target.toml: ' serve.log)" -gt "$before" ]; }
    within 10 applied
}
# hides WHAT SECRET...: nothing that the server tells, and no dump of its memory, has one of the secrets.
hides() {
    name=$1
    shift
    tenmil events >events.log 2>&1 &
    listening=$!
    for object in nvme_connections exports process environment; do
        tenmil get $object --json
    done >answers.log 2>&1
    kill $listening
    tr '\0' '\n' <"/proc/$server/cmdline" >process.log
    tr '\0' '\n' <"/proc/$server/environ" >>process.log
    echo /tmp/core >/proc/sys/kernel/core_pattern
    (ulimit -c unlimited && kill -ABRT $server)
    wait $server
    server=
    [ -e core ] || note "$name: the process leaves no core dump"
    shows "$name: the answers name the host" "$HOST" cat answers.log
    for secret in "$@"; do
        # The part in Base64, of which an encoding of another beginning would differ.
        text=${secret#*:*:}
        check "$name: the keyring has the secret" grep -q -r -F -e "${text%:}" $TENMIL_KEYRING
        for file in serve.log events.log answers.log process.log core; do
            check "$name: no secret in ${file%.log}" refused grep -q -F -e "${text%:}" $file
        done
    done
    rm -f core
}
