# SSDs by their own device nodes, with iommufd, on a kernel that has both interfaces. After this the
# scenario does all that `pcie` does.

modprobe nvme
modprobe vfio-pci
modprobe vfio_iommu_type1
modprobe iommufd
ulimit -l unlimited
refused() { ! "$@"; }
check 'the kernel has a disk' within 20 there /dev/nvme0n1 || exit 1
check 'and iommufd' there /dev/iommu
AT=$(place LAB1)
SLOT=$(place LAB2)
D=pcie:$AT
check 'tenmil bind, and a first block' tenmil bind "$AT" --try
cat /tmp/output
check 'its own device node is there' [ -c "/dev/vfio/devices/$(ls "/sys/bus/pci/devices/$AT/vfio-dev")" ]

shows 'iommufd is used where it is' 'over VFIO and iommufd' tenmil perf "$D" -w randread -q 8 -t 1
cat /tmp/output
shows 'and the group where that is asked for' 'over a group of VFIO' \
    tenmil perf "$D?vfio=group" -w randread -q 8 -t 1
check 'verified by iommufd' tenmil perf "$D?vfio=iommufd" -w randrw --verify -q 16 -t 2 --overwrite
check 'verified through the group' tenmil perf "$D?vfio=group" -w randrw --verify -q 16 -t 2 --overwrite
check 'the other SSD is bound, too' tenmil bind "$SLOT"
check 'both in one command' \
    tenmil perf "$D" "pcie:$SLOT" -w randrw --verify -q 16 -t 2 --overwrite

# The second process is told that there is a first, whichever interface each of them uses.
# driven BY: one process drives it so; others try to.
driven() {
    tenmil perf "$D?vfio=$1" -w randread -q 8 -t 60 >/tmp/driven.log 2>&1 &
    driving=$!
    sleep 3
    check "it is driven by $1" kill -0 $driving
    for way in iommufd group; do
        shows "it is not had by $way then" 'nother process has it' refused \
            tenmil identify "$D?vfio=$way"
        cat /tmp/output
    done
    shows 'tenmil unbind names who has it' "$driving" refused tenmil unbind "$AT"
    cat /tmp/output
    kill $driving
    wait $driving
}
driven iommufd
driven group

# A user whom root gave it to.
echo 'somebody:x:1000:1000::/tmp:/bin/sh' >/etc/passwd
chmod 1777 /tmp
# as WORD...: tenmil, as that user.
as() { start-stop-daemon -S -c somebody -x /bin/tenmil -- "$@"; }
check 'it goes back' tenmil unbind "$AT"
check 'and is bound for a user' tenmil bind "$AT" --owner 1000
chmod 0600 /dev/iommu
shows 'who may not open /dev/iommu, takes the group, and is told' 'through its group.*dev/iommu' \
    as perf "$D" -w randread -q 8 -t 1
cat /tmp/output
shows 'and is refused iommufd by name' 'open /dev/iommu' refused as identify "$D?vfio=iommufd"
chown 1000 /dev/iommu
shows 'who may, takes iommufd' 'over VFIO and iommufd' as perf "$D" -w randread -q 8 -t 1
ulimit -l 64
shows 'who may lock too little is told how much' '65536 bytes that may be locked' refused \
    as identify "$D"
cat /tmp/output
ulimit -l unlimited
check 'tenmil unbind --all' tenmil unbind --all
check 'the kernel has it again' within 20 there /dev/nvme0n1
both() { [ -n "$(place LAB1)" ] && [ -n "$(place LAB2)" ]; }
check 'and the other' within 20 both
