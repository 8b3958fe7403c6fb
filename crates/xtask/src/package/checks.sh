# Checks of a script: each is counted, and the first that fails ends it.
cd /packages
checks=0
check() { # what, command...
    what=$1
    shift
    checks=$((checks + 1))
    if ! "$@" >/packages/said 2>&1; then
        echo "FAILED: $what: $*"
        cat /packages/said
        # What the service itself says, where there is one.
        journalctl --no-pager -u tenmil -n 20 2>/dev/null || true
        exit 1
    fi
}
refuse() { # what, command...
    what=$1
    shift
    checks=$((checks + 1))
    if "$@" >/packages/said 2>&1; then
        echo "FAILED: $what: $* succeeded, expected that it does not"
        exit 1
    fi
}
owner() { [ "$(stat -c '%U:%G %a' "$2")" = "$1" ]; }
equal() { [ "$1" = "$2" ]; }

