# Linux's NVMe/TCP host against Linux's target, in one kernel: whether the lab's kernel, tlshd and
# nvme-cli can do what the scenarios ask of their peers. Nothing of tenmil takes part.

check 'modules, and tlshd with the keyring .nvme' prepare || { cat /tmp/tlshd.log; exit 1; }
note "$(tlshd --version 2>&1), $(nvme version | head -n 1)"
check 'nvmet offers a namespace' nvmet_offers || exit 1
check 'by a port that requires TLS' nvmet_listens 4420 required || exit 1
check 'by one that allows it' nvmet_listens 4421 allowed || exit 1

# Both suites and versions of identities.
suites='1:sha256 2:sha384'
if ! has_sha384; then
    skip 'TLS, sha384: tlshd 1.0 with GnuTLS 3.8.9 computes its binder with SHA-256'
    suites=1:sha256
fi
for of_key in $suites; do
    for version in 0 1; do
        name="TLS, ${of_key#*:}, identity version $version"
        key=$(tls_key ${of_key%:*})
        linux_forgets
        check "$name: a key" linux_has "$key" $version || continue
        check "$name: connected" connect 4420 --tls || continue
        shows "$name: the key that was used" "^NVMe${version}R0${of_key%:*} $HOST $SUBSYSTEM" used_identity
        check "$name: verified" verify
        check "$name: disconnected" disconnect
    done
done
linux_has "$key" 1 $DISCOVERY >/dev/null
shows 'discovery by TLS' 'sectype: tls13' nvme discover -t tcp -a 127.0.0.1 -s 4420 --tls
check 'without TLS the port that requires it refuses' refused connect 4420
linux_forgets
shows 'without a key there is no connection' 'PSK\|key is missing' refused connect 4421 --tls

# Authentication.
for case in 'sha256 null 1 32' 'sha384 ffdhe2048 2 48' 'sha512 ffdhe4096 3 64' 'sha256 ffdhe3072 0 32'; do
    set -- $case
    name="CHAP, $1, $2"
    host=$(chap_secret $3 $4 $HOST)
    check "$name: nvmet asks" nvmet_asks $1 $2 "$host" || continue
    check "$name: connected" connect 4421 --dhchap-secret "$host" || continue
    shows "$name: by it" "with hash hmac($1) dhgroup $2" new_messages
    check "$name: verified" verify
    check "$name: disconnected" disconnect
    check "$name: another secret is refused" \
        refused connect 4421 --dhchap-secret "$(chap_secret $3 $4 $HOST)"
done
host=$(chap_secret 1 32 $HOST)
controller=$(chap_secret 2 48 $SUBSYSTEM)
check 'bidirectional: nvmet answers' nvmet_asks sha256 ffdhe2048 "$host" "$controller"
check 'bidirectional: connected' \
    connect 4421 --dhchap-secret "$host" --dhchap-ctrl-secret "$controller" && {
    check 'bidirectional: verified' verify
    check 'bidirectional: disconnected' disconnect
}
check 'bidirectional: another secret of the controller is refused' refused \
    connect 4421 --dhchap-secret "$host" --dhchap-ctrl-secret "$(chap_secret 2 48 $SUBSYSTEM)"

if ! can_concatenate; then
    skip 'secure concatenation: this kernel has none, since Linux 6.16'
    exit 0
fi
linux_forgets
check 'concatenation: nvmet asks' nvmet_asks sha384 ffdhe3072 "$host"
check 'concatenation: connected' connect 4421 --dhchap-secret "$host" --concat --reconnect-delay=1 || exit 1
shows 'concatenation: the generated key is used' '^NVMe1G02' used_identity
shows 'concatenation: sysfs tells of it' '^concat$' of tls_mode
check 'concatenation: verified' verify
load 10
sleep 3
check 'concatenation: the port is removed under load' rm $NVMET/ports/4421/subsystems/$SUBSYSTEM
sleep 1
check 'concatenation: and given back' \
    ln -s $NVMET/subsystems/$SUBSYSTEM $NVMET/ports/4421/subsystems/$SUBSYSTEM
check 'concatenation: no I/O of the load failed, no block was wrong' load_ends
check 'concatenation: disconnected' disconnect
