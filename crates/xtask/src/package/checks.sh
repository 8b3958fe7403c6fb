# Checks of a script: each is counted, and the first that fails ends it.
cd /packages
checks=0
check() { # what, command...
    what=$1
    shift
    checks=$((checks + 1))
    if ! "$@" >/tmp/said 2>&1; then
        echo "FAILED: $what: $*"
        cat /tmp/said
        exit 1
    fi
}
refuse() { # what, command...
    what=$1
    shift
    checks=$((checks + 1))
    if "$@" >/tmp/said 2>&1; then
        echo "FAILED: $what: $* succeeded, expected that it does not"
        exit 1
    fi
}
owner() { [ "$(stat -c '%U:%G %a' "$2")" = "$1" ]; }
equal() { [ "$1" = "$2" ]; }

