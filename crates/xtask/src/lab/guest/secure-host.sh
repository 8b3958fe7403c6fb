# tenmil's NVMe/TCP host with TLS and DH-HMAC-CHAP against Linux's target.

check 'modules, and tlshd with the keyring .nvme' prepare || { cat /tmp/tlshd.log; exit 1; }
check 'nvmet offers a namespace' nvmet_offers || exit 1
check 'by a port without TLS' nvmet_listens 4420 off || exit 1
check 'by one that allows it' nvmet_listens 4421 allowed || exit 1
check 'by one that requires it' nvmet_listens 4422 required || exit 1

# at PORT OPTIONS: the device.
at() { echo "tcp://127.0.0.1:$1/$SUBSYSTEM/1?hostnqn=$HOST${2:+&$2}"; }
# used WHAT PORT OPTIONS: the connection is made, and verified.
used() {
    mark
    check "$1: verified" tenmil perf "$(at "$2" "$3")" -w randrw --verify -q 8 --overwrite -t 2
    [ -z "$by" ] || shows "$1: by it" "$by" new_messages
}
# refuses WHAT PATTERN PORT OPTIONS: the connection is not made, soon, and the error names the reason.
refuses() {
    shows "$1 is refused, by a reason" "$2" refused timeout 40 tenmil identify "$(at "$3" "$4")"
    cat /tmp/output
}
# load SECONDS PORT OPTIONS. The host waits for its keep-alive timeout before it sends writes again.
load() {
    tenmil perf "$(at "$2" "$3&keep-alive-timeout=5s")" -w randrw --verify -q 8 --overwrite -t "$1" >/tmp/load.log 2>&1 &
    loading=$!
}
# restarted WHAT PORT: the port is removed under load and added again.
restarted() {
    sleep 4
    check "$1: the port is removed under load" rm "$NVMET/ports/$2/subsystems/$SUBSYSTEM"
    sleep 2
    check "$1: and given back" \
        ln -s $NVMET/subsystems/$SUBSYSTEM "$NVMET/ports/$2/subsystems/$SUBSYSTEM"
    check "$1: the load goes on, and every block is right" wait $loading
    shows "$1: it was connected again" 'it is there again' cat /tmp/load.log
    cat /tmp/load.log
}

# Authentication.
for case in 'sha256 null 1 32' 'sha384 ffdhe2048 2 48' 'sha512 ffdhe4096 3 64' 'sha256 ffdhe3072 0 32'; do
    set -- $case
    name="CHAP, $1, $2"
    host=$(chap_secret $3 $4 $HOST)
    tenmil_has host "$host"
    check "$name: nvmet asks" nvmet_asks $1 $2 "$host" || continue
    by='with DH-HMAC-CHAP' used "$name" 4420 dhchap=host
done
tenmil_has wrong "$(chap_secret 1 32 $HOST)"
refuses 'another secret' 'authenticat' 4420 dhchap=wrong
refuses 'no secret' 'authenticat' 4420
refuses 'a key that is not there' "nothing.*$TENMIL_KEYRING\|$TENMIL_KEYRING.*nothing" 4420 dhchap=nothing
controller=$(chap_secret 2 48 $SUBSYSTEM)
tenmil_has controller "$controller"
check 'bidirectional: nvmet answers' nvmet_asks sha256 ffdhe2048 "$host" "$controller"
used 'bidirectional' 4420 'dhchap=host&dhchap-controller=controller'
refuses 'another secret of the controller' 'controller' 4420 'dhchap=host&dhchap-controller=wrong'
load 15 4420 dhchap=host
restarted 'CHAP, restart' 4420

new=$(chap_secret 1 32 $HOST)
tenmil_has new "$new"

# A target that requires no authentication.
check 'nvmet asks nothing' nvmet_asks_nothing
shows 'discovery without TLS' $SUBSYSTEM tenmil discover "tcp://127.0.0.1:4420?hostnqn=$HOST"
refuses 'a target that does not prove its identity' 'authenticat' 4420 \
    'dhchap=host&dhchap-controller=controller'

if ! has_tls; then
    skip 'TLS: this tenmil was built without it'
    exit 0
fi

for of_key in 1:sha256 2:sha384; do
    key=$(tls_key ${of_key%:*})
    tenmil_has psk "$key"
    for version in 0 1; do
        name="TLS, ${of_key#*:}, identity version $version"
        linux_forgets
        check "$name: Linux has the key" linux_has "$key" $version || continue
        by=TLS used "$name" 4422 'tls=required&key=psk'
    done
done
tenmil_has wrong-psk "$(tls_key 2)"
linux_forgets
linux_has "$key" 0 >/dev/null
by=TLS used 'TLS, an identity of version 0 only' 4422 'tls=required&key=psk&tls-identity=0'
linux_forgets
linux_has "$key" 1 >/dev/null
refuses 'another key' 'key' 4422 'tls=required&key=wrong-psk'
refuses 'no TLS where it is required' '' 4422
refuses 'TLS where there is none' '' 4420 'tls=required&key=psk'
used 'TLS where it is allowed' 4421 'tls=required&key=psk'
used 'no TLS where it is allowed' 4421
load 15 4422 'tls=required&key=psk'
restarted 'TLS, restart' 4422
linux_has "$key" 1 $DISCOVERY >/dev/null
shows 'discovery by TLS' $SUBSYSTEM \
    tenmil discover "tcp://127.0.0.1:4422?tls=required&key=psk&hostnqn=$HOST"

check 'TLS and CHAP: nvmet asks' nvmet_asks sha256 ffdhe2048 "$new"
# nvmet authenticates no host that has a TLS key, so that one that insists is refused.
used 'TLS and CHAP' 4422 'tls=required&key=psk&dhchap=new'
refuses 'TLS, and a target that does not prove its identity' 'authenticat' 4422 \
    'tls=required&key=psk&dhchap=new&dhchap-controller=controller'

if ! can_concatenate; then
    skip 'secure concatenation: this kernel has none, since Linux 6.16'
    exit 0
fi
linux_forgets
for case in 'sha256 ffdhe2048' 'sha384 ffdhe3072'; do
    set -- $case
    check "concatenation, $1, $2: nvmet asks" nvmet_asks $1 $2 "$new" "$controller"
    by=', TLS' used "concatenation, $1, $2" 4421 'tls=concatenate&dhchap=new'
done
refuses 'concatenation: another secret' 'authenticat' 4421 'tls=concatenate&dhchap=wrong'
refuses 'concatenation where there is no TLS' '' 4420 'tls=concatenate&dhchap=new'
load 20 4421 'tls=concatenate&dhchap=new'
restarted 'concatenation, restart' 4421
