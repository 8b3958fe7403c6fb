# Functions of all scenarios. A check is one line on the console: see console.rs.

# What the last command said, in a line.
said() { tail -n 4 /tmp/output | tr '\n' ' ' | cut -c 1-240; }

# check WHAT COMMAND...: passes if the command does.
check() {
    what=$1
    shift
    if "$@" >/tmp/output 2>&1; then
        echo "@@ ok $what"
    else
        echo "@@ not ok $what: $(said)"
        cat /tmp/output
        return 1
    fi
}

# shows WHAT PATTERN COMMAND...: passes if the command says something that fits.
shows() {
    what=$1 pattern=$2
    shift 2
    if "$@" >/tmp/output 2>&1 && grep -q -e "$pattern" /tmp/output; then
        echo "@@ ok $what"
    else
        echo "@@ not ok $what: nothing fits '$pattern': $(said)"
        cat /tmp/output
        return 1
    fi
}

# within SECONDS COMMAND...: tries until it passes.
within() {
    tries=$(($1 * 5))
    shift
    until "$@" >/dev/null 2>&1; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || return 1
        sleep 0.2
    done
}

# outside WHAT: has something done to the machine from outside, by its name in scenario.rs.
outside() {
    echo "@@ do $*" >/dev/console
    read -r -t 30 answer </dev/console && echo "$answer" && [ "$answer" = 'done' ]
}

# place SERIAL: where the SSD is that the kernel drives under that serial number.
place() {
    for found in /sys/class/nvme/nvme*; do
        grep -q "^$1" "$found/serial" && basename "$(readlink -f "$found/device")"
    done
}

# note WHAT: a line for the report that is no check.
note() { echo "@@ note $*"; }

skip() { echo "@@ skip $*"; }

is_short() { grep -q 'lab_short=1' /proc/cmdline; }

# whole WHAT: whether that is tried, too. In a short run it is not, and that is said.
whole() {
    is_short || return 0
    skip "$*: not in a short run"
    return 1
}

there() { [ -e "$1" ]; }
gone() { [ ! -e "$1" ]; }
