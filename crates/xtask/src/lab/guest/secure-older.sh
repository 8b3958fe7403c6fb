# Both directions with Debian 13: its nvme-cli derives keys as libnvme before 1.15 does, and its tlshd
# computes the binder of SHA-384 wrong, even for itself.

check 'modules, and tlshd with the keyring .nvme' prepare || { cat /tmp/tlshd.log; exit 1; }
note "$(tlshd --version 2>&1), $(nvme version | head -n 1)"
check 'nvmet offers a namespace' nvmet_offers || exit 1
check 'by a port that allows TLS' nvmet_listens 4421 allowed || exit 1
OURS="tcp://127.0.0.1:4421/$SUBSYSTEM/1?hostnqn=$HOST"
perf() { tenmil perf "$1" -w randrw --verify -q 8 --overwrite -t 2; }

host=$(chap_secret 1 32 $HOST)
controller=$(chap_secret 2 48 $SUBSYSTEM)
tenmil_has host "$host"
tenmil_has controller "$controller"
check 'CHAP: nvmet asks' nvmet_asks sha512 ffdhe2048 "$host" "$controller"
check 'CHAP: tenmil as the host, verified' perf "$OURS&dhchap=host&dhchap-controller=controller"
check 'CHAP: tenmil serves' serves off 'dhchap = ["host"], dhchap-controller = "controller"'
check 'CHAP: Linux connects' connect 4420 --dhchap-secret "$host" --dhchap-ctrl-secret "$controller"
check 'CHAP: verified' verify
check 'CHAP: disconnected' disconnect
check 'nvmet asks nothing' nvmet_asks_nothing

if ! has_tls; then
    skip 'TLS: this tenmil was built without it'
    check 'the server ends by itself' stop
    exit 0
fi
key=$(tls_key 1)
tenmil_has psk "$key"
linux_has "$key" 1 >/dev/null
shows 'TLS: the derivation of the specification is refused, and the cause named' 'libnvme before 1.15' \
    refused tenmil identify "$OURS&tls=required&key=psk"
check 'TLS: tenmil serves' serves required 'psk = ["psk"]' || exit 1
for version in 0 1; do
    name="TLS, sha256, identity version $version"
    linux_forgets
    check "$name: Linux has the key" linux_has "$key" $version || continue
    check "$name: between Linux and Linux" connect 4421 --tls
    check "$name: disconnected" disconnect
    check "$name: tenmil as the host, verified" \
        perf "$OURS&tls=required&key=psk&derivation=libnvme-1.13"
    check "$name: Linux connects to tenmil" connect 4420 --tls
    shows "$name: the key that was used" "^NVMe${version}R01 $HOST $SUBSYSTEM" used_identity
    check "$name: verified" verify
    check "$name: disconnected" disconnect
done
check 'the server ends by itself' stop
