# Two SSDs that no IOMMU tells from each other: functions of one slot, in one group. The process that
# has one may open the other, and no other process may.

modprobe nvme
modprobe vfio-pci
modprobe vfio_iommu_type1
modprobe iommufd
ulimit -l unlimited
refused() { ! "$@"; }
both() { [ -n "$(place LAB1)" ] && [ -n "$(place LAB2)" ]; }
check 'the kernel has both' within 20 both || exit 1
ONE=$(place LAB1)
TWO=$(place LAB2)
driver_is() { [ "$(basename "$(readlink -f "/sys/bus/pci/devices/$1/driver")")" = "$2" ]; }
group() { basename "$(readlink -f "/sys/bus/pci/devices/$1/iommu_group")"; }
check 'they are in one group' [ "$(group "$ONE")" = "$(group "$TWO")" ] || exit 1

# While the kernel drives one of them.
shows 'the other is not bound, and it is named' "$TWO" refused tenmil bind "$ONE"
cat /tmp/output
check 'both are, in one command' tenmil bind "$ONE" "$TWO"
check 'the first has a device node' [ -n "$(ls "/sys/bus/pci/devices/$ONE/vfio-dev")" ]

load() { tenmil perf "$@" -w randrw --verify -q 16 -t 2 --overwrite; }
for way in iommufd group; do
    check "$way: both in one command, verified" load "pcie:$ONE?vfio=$way" "pcie:$TWO?vfio=$way"
    check "$way: one alone" load "pcie:$TWO?vfio=$way"
    # The same memory for both: a copy from one to the other.
    check "$way: one is copied to the other" \
        tenmil copy "pcie:$ONE?vfio=$way" "pcie:$TWO?vfio=$way" --overwrite --verify
done
shows 'one so and one so is refused by name' 'was opened in another mode (vfio=)' refused \
    tenmil perf "pcie:$ONE?vfio=iommufd" "pcie:$TWO?vfio=group" -w randread -t 1
cat /tmp/output

# One process has one of them; others do not get the other.
for way in iommufd group; do
    tenmil perf "pcie:$ONE?vfio=$way" -w randread -q 8 -t 60 >/tmp/driven.log 2>&1 &
    driving=$!
    sleep 3
    check "the first is driven by $way" kill -0 $driving
    for other in iommufd group; do
        shows "the second is not had by $other then" 'nother process has' refused \
            tenmil identify "pcie:$TWO?vfio=$other"
        cat /tmp/output
    done
    for at in "$ONE" "$TWO"; do
        shows "nor is $at given back" "unbind $at: process $driving" refused tenmil unbind "$at"
        cat /tmp/output
        check 'it keeps its driver' driver_is "$at" vfio-pci
    done
    check 'nor is it disturbed' kill -0 $driving
    # Without a farewell: the kernel resets it, and has the group again.
    kill -9 $driving
    wait $driving 2>/dev/null
    check "after kill -9 both are had by $way" load "pcie:$ONE?vfio=$way" "pcie:$TWO?vfio=$way"
done

# One goes back to the kernel, which may not be while the other can reach its memory.
check 'one goes back' tenmil unbind "$TWO"
check 'and is the kernel'"'"'s' within 20 [ -n "$(place LAB2)" ]
for way in iommufd group; do
    shows "then the other is not had by $way" "$ONE" refused tenmil identify "pcie:$ONE?vfio=$way"
    cat /tmp/output
done
check 'tenmil unbind --all' tenmil unbind --all
check 'the kernel has both again' within 20 both
