# Linux's host, `tenmil serve`, and Linux's target in a row: each I/O goes through tenmil's target and
# its host, and each hop is secure.

check 'modules, and tlshd with the keyring .nvme' prepare || { cat /tmp/tlshd.log; exit 1; }
check 'nvmet offers a namespace' nvmet_offers || exit 1
check 'by a port that allows TLS' nvmet_listens 4421 allowed || exit 1
host=$(chap_secret 1 32 $HOST)
controller=$(chap_secret 2 48 $SUBSYSTEM)
key=$(tls_key 2)
tenmil_has host "$host"
tenmil_has controller "$controller"
tenmil_has psk "$key"
BEHIND="tcp://127.0.0.1:4421/$SUBSYSTEM/1?hostnqn=$HOST&keep-alive-timeout=5s"

# The first is the only one without TLS, so that it says something of any tenmil.
check 'CHAP: nvmet asks' nvmet_asks sha256 ffdhe2048 "$host" "$controller"
DISK="$BEHIND&dhchap=host&dhchap-controller=controller" \
    check 'CHAP: tenmil serves what nvmet offers' \
    serves off 'dhchap = ["host"], dhchap-controller = "controller"' 'authentication = "required"' || exit 1
check 'CHAP: Linux connects to tenmil' connect 4420 --dhchap-secret "$host" --dhchap-ctrl-secret "$controller"
check 'CHAP: verified' verify
if whole 'rotation at both ends'; then
    # nvmet has one secret at a time; tenmil authenticates again when its keys change.
    new=$(chap_secret 1 32 $HOST)
    load 20
    mark
    check 'rotation: nvmet takes the new secret under load' \
        nvmet_asks sha256 ffdhe2048 "$new" "$controller"
    check 'rotation: tenmil gets it under the same name' tenmil_has host "$new"
    check 'rotation: and reads its keys again' tenmil set configuration reload=true
    check 'rotation: Linux gets it' eval 'printf %s "$new" >/sys/class/nvme/nvme0/dhchap_secret'
    sleep 3
    check 'rotation: the port of nvmet is removed' rm $NVMET/ports/4421/subsystems/$SUBSYSTEM
    sleep 1
    check 'rotation: and given back' \
        ln -s $NVMET/subsystems/$SUBSYSTEM $NVMET/ports/4421/subsystems/$SUBSYSTEM
    check 'rotation: no I/O of the load failed, no block was wrong' load_ends
    new_messages
    host=$new
fi
check 'CHAP: disconnected' disconnect
check 'CHAP: another secret is refused' refused connect 4420 --dhchap-secret "$(chap_secret 1 32 $HOST)"

if ! has_tls; then
    skip 'TLS and concatenation: this tenmil was built without them'
    check 'the server ends by itself' stop
    exit 0
fi

DISK="$BEHIND&tls=concatenate&dhchap=host" \
    check 'concatenation: tenmil serves what nvmet offers' \
    serves allowed 'dhchap = ["host"], psk = ["psk"]' 'secure-channel = "required"' || exit 1
check 'concatenation: Linux connects to tenmil' connect 4420 --dhchap-secret "$host" --concat
shows 'concatenation: by the generated key' '^NVMe1G0' used_identity
check 'concatenation: verified' verify
check 'concatenation: disconnected' disconnect
check 'a host without TLS is refused' refused connect 4420 --dhchap-secret "$host"

check 'nvmet asks nothing' nvmet_asks_nothing
check 'TLS: Linux has the key' linux_has "$key" 1
DISK="$BEHIND&tls=required&key=psk" \
    check 'TLS: tenmil serves what nvmet offers' serves required 'psk = ["psk"]' || exit 1
check 'TLS: Linux connects to tenmil' connect 4420 --tls --reconnect-delay=1
shows 'TLS: by the key' '^NVMe1R02' used_identity
check 'TLS: verified' verify
if whole 'a port and a server that are lost under load'; then
    load 30
    sleep 3
    check 'the port of nvmet is removed under load' rm $NVMET/ports/4421/subsystems/$SUBSYSTEM
    sleep 2
    check 'and given back' ln -s $NVMET/subsystems/$SUBSYSTEM $NVMET/ports/4421/subsystems/$SUBSYSTEM
    check 'tenmil is connected again' within 30 grep -q 'it is there again' serve.log
    sleep 2
    check 'the server is stopped under load' stop
    sleep 1
    check 'and serves again' serve
    check 'no I/O of the load failed, no block was wrong' load_ends
fi
check 'TLS: disconnected' disconnect
check 'the server ends by itself' stop
