# A proxy between the ends that alters what passes: it strips TLS, the request for authentication, or what
# discovery tells of TLS. netsed replaces bytes by as many others, and neither end knows of it.

check 'modules, and tlshd with the keyring .nvme' prepare || { cat /tmp/tlshd.log; exit 1; }
has_tls || { skip 'altered connections: this tenmil was built without TLS'; exit 0; }
# listens PORT: a process does.
listens() { grep -q ":$(printf %04X "$1") 0*:0000 0A" /proc/net/tcp /proc/net/tcp6; }
# alters PORT PORT-OF-THE-TARGET RULE...: a proxy.
alters() {
    stop_altering
    from=$1 to=$2
    shift 2
    netsed tcp "$from" 127.0.0.1 "$to" "$@" >netsed.log 2>&1 &
    altering=$!
    within 10 listens "$from" || { cat netsed.log; return 1; }
}
stop_altering() {
    [ -n "$altering" ] || return 0
    kill $altering
    wait $altering 2>/dev/null
    altering=
}
# has_altered WHAT: a refusal without that would prove nothing.
has_altered() { shows "$1: the proxy has altered something" 'Applying rule' grep -m 1 'Applying rule' netsed.log; }
at() { echo "tcp://127.0.0.1:$1/$SUBSYSTEM/1?hostnqn=$HOST&$2"; }
# refuses_linux WHAT OPTION...: Linux's host is not connected by the proxy, and soon.
refuses_linux() {
    name=$1
    shift
    begun=$(cut -d . -f 1 /proc/uptime)
    check "$name: Linux is not connected" refused connect 4430 "$@"
    took=$(($(cut -d . -f 1 /proc/uptime) - begun))
    check "$name: within 20 s (took $took s)" [ $took -le 20 ]
    check "$name: no disk is left" gone /dev/nvme0n1
    has_altered "$name, Linux"
    : >netsed.log
}
# refuses_tenmil WHAT PATTERN OPTIONS: nor is tenmil's host.
refuses_tenmil() {
    shows "$1: tenmil's host refuses" "$2" refused timeout 40 tenmil identify "$(at 4430 "$3")"
    cat /tmp/output
    has_altered "$1, tenmil"
    : >netsed.log
}

host=$(chap_secret 1 32 $HOST)
controller=$(chap_secret 1 32 $SUBSYSTEM)
key=$(tls_key 2)
tenmil_has host "$host"
tenmil_has controller "$controller"
tenmil_has psk "$key"
linux_has "$key" 1 >/dev/null

# Discovery in the clear, of a target that requires a secure channel.
check 'tenmil serves' serves allowed 'dhchap = ["host"], dhchap-controller = "controller"' \
    'authentication = "required"
secure-channel = "required"' || { cat serve.log; exit 1; }
discovers() { nvme discover -t tcp -a 127.0.0.1 -s "$1"; }
shows 'discovery: unaltered it has TLS' 'sectype: *tls13' discovers 4420
cat /tmp/output
# SECTYPE follows TRADDR. netsed compares beyond the end of a packet, so a rule begins with what ends none.
traddr=127.0.0.1$(printf '%%20%.0s' $(seq 247))
check 'discovery: a proxy clears SECTYPE and TREQ' \
    alters 4430 4420 "s/$traddr%02/$traddr%00" 's/%03%01%02%05/%03%01%02%04' \
    's/%03%01%02%01/%03%01%02%00'
shows 'discovery: SECTYPE is gone' 'sectype: *none' discovers 4430 || {
    cut -c 1-120 netsed.log | tail -n 40
    dmesg | tail -n 20
}
shows 'discovery: TREQ is, too' 'treq: *not specified' discovers 4430
has_altered 'discovery'
# The response to Connect asks for a secure channel, which Linux refuses without --concat.
check 'discovery: Linux, which believes it, does not connect' \
    refused connect 4420 --dhchap-secret "$host"
shows 'discovery: Linux names the reason' 'secure concatenation is not supported' new_messages
shows "discovery: so is tenmil's host" 'TLS' refused timeout 40 tenmil identify "$(at 4420 dhchap=host)"
# A device is opened by what its URI requires, whatever discovery has said.
check "discovery: tenmil's host connects securely" tenmil identify "$(at 4420 'tls=concatenate&dhchap=host')"

# The request for authentication in the response to Connect (ATR, ASCR) is cleared, for each of some CNTLIDs.
response=%05%00%18%00%18%00%00%00
clearing=
for cntlid in 01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f 10; do
    for asked in 06 04 02; do
        clearing="$clearing s/$response%$cntlid%00%$asked%00/$response%$cntlid%00%00%00"
    done
done
check 'concatenation: tenmil serves' serves allowed 'dhchap = ["host"], dhchap-controller = "controller"' \
    'authentication = "required"
secure-channel = "required"'
check 'concatenation: a proxy clears the request for authentication' alters 4430 4420 $clearing
refuses_linux 'concatenation' --dhchap-secret "$host" --concat
refuses_tenmil 'concatenation' 'does not request authentication' 'tls=concatenate&dhchap=host'
check 'authentication: tenmil serves' serves off 'dhchap = ["host"], dhchap-controller = "controller"' \
    'authentication = "required"'
check 'authentication: a proxy clears the request for it' alters 4430 4420 $clearing
refuses_linux 'authentication' --dhchap-secret "$host" --dhchap-ctrl-secret "$controller"
refuses_tenmil 'authentication' 'does not request authentication' \
    'dhchap=host&dhchap-controller=controller'
check 'nothing altered: it connects' connect 4420 --dhchap-secret "$host" --dhchap-ctrl-secret "$controller"
check 'nothing altered: disconnected' disconnect

# TLS itself: the beginning of a ClientHello, so that it is none, and records of an open connection.
for tls in required allowed; do
    check "TLS $tls: tenmil serves" serves $tls 'psk = ["psk"]' 'secure-channel = "required"'
    check "TLS $tls: a proxy alters the ClientHello" alters 4430 4420 's/%16%03%01/%00%03%01'
    refuses_linux "TLS $tls, ClientHello" --tls
    refuses_tenmil "TLS $tls, ClientHello" 'TLS' 'tls=required&key=psk'
done
check 'TLS: a proxy alters records' alters 4430 4420 's/%17%03%03%00/%17%03%02%00'
refuses_linux 'TLS, records' --tls
refuses_tenmil 'TLS, records' 'TLS' 'tls=required&key=psk'
check 'TLS: a proxy alters nothing' alters 4430 4420 s/nothing-to-be-found/nothing-to-be-fooled
check 'TLS: through it Linux connects' connect 4430 --tls
check 'TLS: verified' verify
check 'TLS: disconnected' disconnect
shows 'the target goes on, and has no association left' '\[\]' tenmil get nvme_connections --json
check 'the server ends by itself' stop

# nvmet behind the proxy: what tenmil's host refuses there.
check 'nvmet offers a namespace' nvmet_offers || exit 1
check 'by a port that allows TLS' nvmet_listens 4421 allowed || exit 1
check 'nvmet asks' nvmet_asks sha256 ffdhe2048 "$host" "$controller"
check 'nvmet: a proxy clears the request for authentication' alters 4430 4421 $clearing
refuses_tenmil 'nvmet, concatenation' 'does not request authentication' 'tls=concatenate&dhchap=host'
refuses_tenmil 'nvmet, authentication' 'does not request authentication' \
    'dhchap=host&dhchap-controller=controller'
stop_altering
