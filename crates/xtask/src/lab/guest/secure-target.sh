# Linux's NVMe/TCP host with TLS and DH-HMAC-CHAP against `tenmil serve`.

check 'modules, and tlshd with the keyring .nvme' prepare || { cat /tmp/tlshd.log; exit 1; }

# used WHAT OPTION...: the connection is made, verified, and ended.
used() {
    name=$1
    shift
    check "$name: connected" connect 4420 "$@" || return 1
    [ -z "$identity" ] || shows "$name: the key that was used" "^$identity $HOST $SUBSYSTEM" used_identity
    [ -z "$by" ] || shows "$name: by it" "$by" new_messages
    check "$name: verified" verify
    check "$name: disconnected" disconnect
}
# refuses WHAT OPTION...: the connection is not made, and soon.
refuses() {
    name=$1
    shift
    begun=$(cut -d . -f 1 /proc/uptime)
    check "$name is refused" refused connect 4420 "$@"
    took=$(($(cut -d . -f 1 /proc/uptime) - begun))
    check "$name: within 20 s (took $took s)" [ $took -le 20 ]
}
# because WHAT PATTERN: the server tells why.
because() { shows "$1: the server names the reason" "$2" cat serve.log; }

# Authentication.
identity=
for case in 'sha256 null 1 32' 'sha384 ffdhe2048 2 48' 'sha512 ffdhe4096 3 64' 'sha256 ffdhe3072 0 32'; do
    set -- $case
    name="CHAP, $1, $2"
    host=$(chap_secret $3 $4 $HOST)
    tenmil_has host "$host"
    check "$name: tenmil serves" \
        serves off 'dhchap = ["host"]' "dhchap-hashes = [\"$1\"]
dhchap-groups = [\"$2\"]" || continue
    by="with hash hmac($1) dhgroup $2" used "$name" --dhchap-secret "$host"
done
refuses 'another secret' --dhchap-secret "$(chap_secret 0 32 $HOST)"
because 'another secret' "$HOST"
refuses 'no secret'
controller=$(chap_secret 2 48 $SUBSYSTEM)
tenmil_has controller "$controller"
check 'bidirectional: tenmil serves' \
    serves off 'dhchap = ["host"], dhchap-controller = "controller"' 'authentication = "required"'
by='controller authenticated' used 'bidirectional' \
    --dhchap-secret "$host" --dhchap-ctrl-secret "$controller"
refuses 'another secret of the controller' \
    --dhchap-secret "$host" --dhchap-ctrl-secret "$(chap_secret 2 48 $SUBSYSTEM)"

# Rotation: both are valid, then the new one only.
new=$(chap_secret 1 32 $HOST)
tenmil_has new "$new"
check 'rotation: connected with the old secret' connect 4420 --dhchap-secret "$host" --reconnect-delay=1
tenmil events >events.log 2>&1 &
listening=$!
load 30
check 'rotation: the new one is added' reconfigures off 'dhchap = ["host", "new"]'
check 'rotation: the host gets it' eval 'printf %s "$new" >/sys/class/nvme/nvme0/dhchap_secret'
# Linux 7.2 never ends the reset of a controller whose connection is lost while it authenticates again.
both() { [ "$(grep -c 'authenticated again' events.log)" = 2 ]; }
check 'rotation: both queues are authenticated again' within 30 both
kill $listening
check 'rotation: the old one is removed' reconfigures off 'dhchap = ["new"]'
shows 'rotation: the connection stays' '^live$' of state
check 'rotation: a reset under load' nvme reset /dev/nvme0
check 'rotation: no I/O of the load failed, no block was wrong' load_ends
check 'rotation: disconnected' disconnect
refuses 'the old secret' --dhchap-secret "$host"
by=authenticated used 'the new secret' --dhchap-secret "$new"

check 'restart: connected' connect 4420 --dhchap-secret "$new" --reconnect-delay=1
load 20
sleep 3
check 'restart: the server is stopped under load' stop
sleep 1
check 'restart: tenmil serves again' serve
check 'restart: no I/O of the load failed, no block was wrong' load_ends
check 'restart: disconnected' disconnect

# Discovery with authentication.
check 'discovery, CHAP: tenmil serves' serves off 'dhchap = ["new"]' '' "[discovery]
allowed-hosts = [{ nqn = \"$HOST\", dhchap = [\"new\"] }]"
# nvme-cli 2.16 does not give the kernel the secret for this subsystem.
discover_as() {
    printf %s "nqn=$DISCOVERY,transport=tcp,traddr=127.0.0.1,trsvcid=4420,hostnqn=$HOST,hostid=$HOST_ID,\
dhchap_secret=$1" >/dev/nvme-fabrics && nvme discover --device=nvme0 && nvme disconnect --device=nvme0
}
shows 'discovery, CHAP: the subsystem is found' $SUBSYSTEM discover_as "$new"
check 'discovery, CHAP: another secret is refused' refused discover_as "$host"

if ! has_tls; then
    skip 'TLS: this tenmil was built without it'
    check 'the server ends by itself' stop
    exit 0
fi

# TLS: both suites and versions of identities.
by=
for of_key in 1:sha256 2:sha384; do
    key=$(tls_key ${of_key%:*})
    tenmil_has psk "$key"
    name="TLS, ${of_key#*:}"
    check "$name: tenmil serves" serves required 'psk = ["psk"]' || continue
    for version in 0 1; do
        name="TLS, ${of_key#*:}, identity version $version"
        linux_forgets
        check "$name: Linux has the key" linux_has "$key" $version || continue
        identity="NVMe${version}R0${of_key%:*}" used "$name" --tls
        linux_forgets
        linux_has "$(tls_key ${of_key%:*})" $version >/dev/null
        refuses "$name: another key" --tls
    done
done
refuses 'a connection without TLS'
# Of the identity of version 1 the digest is of the key, so the same identity is the same key.
linux_forgets
linux_has "$key" 1 >/dev/null
expected=$(linux_keys)
linux_forgets
check 'tenmil inserts the key into the keyring of the kernel' \
    tenmil key insert psk --hostnqn $HOST --subsysnqn $SUBSYSTEM
check 'under the identity that nvme-cli gives it' [ "$(linux_keys)" = "$expected" ]
used 'with that key' --tls
linux_forgets
linux_has "$key" 1 >/dev/null
check 'TLS, restart: connected' connect 4420 --tls --reconnect-delay=1
load 20
sleep 3
check 'TLS, restart: the server is stopped under load' stop
sleep 1
check 'TLS, restart: tenmil serves again' serve
check 'TLS, restart: no I/O of the load failed, no block was wrong' load_ends
check 'TLS, restart: disconnected' disconnect

# Rotation of the key of TLS.
new_key=$(tls_key 1)
tenmil_has new-psk "$new_key"
check 'TLS, rotation: both keys' reconfigures required 'psk = ["psk", "new-psk"]'
used 'TLS, rotation: the old key' --tls
check 'TLS, rotation: the new key' reconfigures required 'psk = ["new-psk"]'
refuses 'TLS, rotation: the old key, removed' --tls
linux_forgets
linux_has "$new_key" 1 >/dev/null
used 'TLS, rotation: the new key' --tls

# Both on one port, and both at once.
check 'TLS allowed: tenmil serves' serves allowed 'psk = ["new-psk"]'
used 'TLS allowed: with it' --tls
used 'TLS allowed: without it'
check 'TLS and CHAP: tenmil serves' serves required 'psk = ["new-psk"], dhchap = ["new"]'
by=authenticated used 'TLS and CHAP' --tls --dhchap-secret "$new"
refuses 'TLS and another secret' --tls --dhchap-secret "$host"
check 'TLS and CHAP: connected' connect 4420 --tls --dhchap-secret "$new"
hides 'TLS and CHAP' "$new" "$new_key"
check 'TLS and CHAP: disconnected' disconnect

# Discovery with TLS: the identity has the name of the discovery service.
check 'discovery, TLS: tenmil serves' serves required 'psk = ["new-psk"]' '' "[discovery]
allowed-hosts = [{ nqn = \"$HOST\", psk = [\"new-psk\"] }]"
# The well-known NQN, and the unique one, to which nvme-cli goes on with the same options.
linux_has "$new_key" 1 $DISCOVERY >/dev/null
unique=$(nvme discover -vvv -t tcp -a 127.0.0.1 -s 4420 --tls 2>&1 |
    sed -n "s/^connect ctrl, 'nqn=\(nqn[^,]*:uuid:[^,]*\),.*/\1/p")
note "discovery subsystem $unique"
linux_has "$new_key" 1 "$unique" >/dev/null
shows 'discovery, TLS: the subsystem is found' $SUBSYSTEM nvme discover -t tcp -a 127.0.0.1 -s 4420 --tls
shows 'discovery, TLS: and what it requires' 'sectype: tls13' \
    nvme discover -t tcp -a 127.0.0.1 -s 4420 --tls
check 'discovery, TLS: refused without it' refused nvme discover -t tcp -a 127.0.0.1 -s 4420

# Secure channel concatenation.
linux_forgets
for case in 'sha256 ffdhe2048' 'sha384 ffdhe3072'; do
    set -- $case
    name="concatenation, $1, $2"
    check "$name: tenmil serves" serves allowed 'dhchap = ["new"], dhchap-controller = "controller"' \
        "secure-channel = \"required\"
dhchap-hashes = [\"$1\"]
dhchap-groups = [\"$2\"]"
    by="with hash hmac($1) dhgroup $2" identity='NVMe1G0[12]' \
        used "$name" --dhchap-secret "$new" --concat
done
refuses 'concatenation: another secret' --dhchap-secret "$host" --concat
refuses 'concatenation: a host that wants none' --dhchap-secret "$new"

# Linux authenticates the admin queue again, which gives a new key for the connections that come.
newer=$(chap_secret 1 32 $HOST)
tenmil_has newer "$newer"
concatenates() { reconfigures allowed "dhchap = [$1], dhchap-controller = \"controller\"" 'secure-channel = "required"'; }
check 'concatenation, rotation: one secret' concatenates '"new"'
check 'concatenation, rotation: connected with it' \
    connect 4420 --dhchap-secret "$new" --concat --reconnect-delay=1
first_identity=$(used_identity)
tenmil events >events.log 2>&1 &
listening=$!
load 30
check 'concatenation, rotation: the new one is added' concatenates '"new", "newer"'
check 'concatenation, rotation: the host gets it' \
    eval 'printf %s "$newer" >/sys/class/nvme/nvme0/dhchap_secret'
check 'concatenation, rotation: the admin queue is authenticated again' \
    within 30 grep -q 'authenticated again' events.log
kill $listening
cat events.log
check 'concatenation, rotation: the old one is removed' concatenates '"newer"'
sleep 2
shows 'concatenation, rotation: the connection stays' '^live$' of state
check 'concatenation, rotation: a reset under load' nvme reset /dev/nvme0
shows 'concatenation, rotation: by a generated key' '^NVMe1G0[12]' used_identity
check 'concatenation, rotation: which is another' [ "$(used_identity)" != "$first_identity" ]
check 'concatenation, rotation: no I/O of the load failed, no block was wrong' load_ends
check 'concatenation, rotation: disconnected' disconnect
refuses 'concatenation, rotation: the old secret' --dhchap-secret "$new" --concat
new=$newer

check 'concatenation, restart: connected' \
    connect 4420 --dhchap-secret "$new" --concat --reconnect-delay=1
load 30
sleep 3
check 'concatenation, restart: the server is stopped under load' stop
sleep 1
check 'concatenation, restart: tenmil serves again' serve
check 'concatenation, restart: no I/O of the load failed, no block was wrong' load_ends
check 'concatenation, restart: disconnected' disconnect
check 'the server ends by itself' stop
