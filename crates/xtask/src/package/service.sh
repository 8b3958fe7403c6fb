# Runs under systemd: the service of the package is started, used, reloaded, stopped and watched.
. /packages/checks.sh

uri=tcp://127.0.0.1/nqn.2026-01.org.tenmil:example/1
property() { systemctl show --property "$1" --value tenmil; }
has() { # property, text
    property "$1" >/packages/property
    grep -q -e "$2" /packages/property || { cat /packages/property; return 1; }
}
within() { # seconds, command...
    for _ in $(seq $(($1 * 10))); do
        if (shift; "$@") >/packages/within 2>&1; then return 0; fi
        sleep 0.1
    done
    cat /packages/within
    return 1
}
journal() { journalctl --no-pager -u tenmil -o cat "$@"; }
journal_has() { # text, match...
    text=$1
    shift
    journal "$@" >/packages/journal
    grep -q -e "$text" /packages/journal || { cat /packages/journal; return 1; }
}

echo '== the service'
check 'install' dpkg -i new.deb
refuse 'it is not started by the installation' systemctl is-active tenmil
check 'start' systemctl start tenmil
check 'it is started when it listens' has StatusText '^listening at tcp://127.0.0.1:4420$'
check 'a host reads' tenmil perf $uri -w randread -t 0.5
refuse 'no host writes' tenmil perf $uri -w randwrite --overwrite -t 0.5
pid=$(property MainPID)
status() { grep -q -e "$1" "/proc/$pid/status"; }
check 'it runs as its user' status "^Uid:.*$(id -u tenmil)"
check 'without a capability' status '^CapEff:.*0000000000000000$'
check 'and none can be had' status '^CapBnd:.*0000000000000000$'
check 'system calls are filtered' status '^Seccomp:.*2$'
check 'the sandbox is reported' journal_has 'sandbox: capabilities: none'
refuse 'nothing of the sandbox is missing' journal_has 'sandbox: not available'
refuse 'no system call is denied' journal_has 'denied system call'
refuse 'there are no errors' sh -c 'journalctl -q -u tenmil -p err -o cat | grep .'

check 'root reaches its control socket' tenmil get process
check 'the sandbox is in force' sh -c 'tenmil get sandbox --json | grep -q "\"seccomp\":\"in force\""'

echo '== its log'
check 'connects have fields' journal_has ' created controller ' TENMIL_EVENT=connect
check 'disconnects too' within 5 journal_has ' disconnected controller ' TENMIL_EVENT=disconnect
check 'values are fields' sh -c 'journalctl -u tenmil -o json TENMIL_EVENT=disconnect | grep -q "\"TENMIL_READS\":\"[1-9]"'
check 'priority of a note' sh -c 'journalctl -u tenmil -o json TENMIL_EVENT=connect | grep -q "\"PRIORITY\":\"6\""'

echo '== reload'
sed -i 's/^nqn = .*/nqn = "nqn.2026-01.org.tenmil:other"/' /etc/tenmil/target.toml
check 'reload' systemctl reload tenmil
check 'the change is applied' within 5 tenmil perf tcp://127.0.0.1/nqn.2026-01.org.tenmil:other/1 -t 0.2
check 'it is logged' within 5 journal_has 'offers nqn.2026-01.org.tenmil:other' TENMIL_EVENT=configuration
echo 'wrong = 1' >>/etc/tenmil/target.toml
check 'reload with an error' systemctl reload tenmil
check 'the status says so' within 5 has StatusText 'the last reload changed nothing'
check 'it still serves' tenmil perf tcp://127.0.0.1/nqn.2026-01.org.tenmil:other/1 -t 0.2
sed -i -e '/^wrong/d' -e 's/^nqn = .*/nqn = "nqn.2026-01.org.tenmil:example"/' /etc/tenmil/target.toml

echo '== stop'
check 'stop' systemctl stop tenmil
check 'it has ended in order' has Result success
check 'it has ended by itself' has ExecMainStatus '^0$'

echo '== watchdog'
mkdir -p /etc/systemd/system/tenmil.service.d
printf '[Service]\nWatchdogSec=2\nTimeoutAbortSec=1\n' >/etc/systemd/system/tenmil.service.d/test.conf
systemctl daemon-reload
check 'start' systemctl start tenmil
sleep 5
check 'it is not restarted while it makes progress' has NRestarts '^0$'
kill -STOP "$(property MainPID)"
check 'a process that is stuck is restarted' within 30 has NRestarts '^1$'
check 'and serves again' within 30 tenmil perf $uri -t 0.2
check 'stop' systemctl stop tenmil

echo '== sockets of systemd'
refuse 'they are not enabled' systemctl is-enabled tenmil.socket
check 'start the sockets' systemctl start tenmil.socket
refuse 'that starts no service' systemctl is-active tenmil
check 'a host that connects starts it' tenmil perf $uri -t 0.2
check 'it uses the socket' has StatusText '^listening at tcp://127.0.0.1:4420$'
refuse 'and no other' journal_has 'no listener has this address'
check 'restart' systemctl restart tenmil
check 'a host connects' tenmil perf $uri -t 0.2
check 'stop' systemctl stop tenmil.socket tenmil

echo '== an upgrade of a service that runs'
check 'start' systemctl start tenmil
pid=$(property MainPID)
check 'install again' dpkg -i --force-confold new.deb
check 'it runs' within 10 systemctl is-active tenmil
refuse 'as a new process' test "$(property MainPID)" = "$pid"
check 'purge' dpkg -P tenmil
refuse 'it is stopped' systemctl is-active tenmil
echo "$checks checks passed"
