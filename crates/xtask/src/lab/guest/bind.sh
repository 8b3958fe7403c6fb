# An SSD behind an IOMMU goes from the kernel to vfio-pci and back; a disk in use is not taken.

modprobe nvme
modprobe ext4
within 20 there /dev/nvme0n1
SSD=$(cat /sys/class/nvme/nvme0/address)
FUNCTION=/sys/bus/pci/devices/$SSD

driver_is() { [ "$(basename "$(readlink -f $FUNCTION/driver)")" = "$1" ]; }
override_is() { [ "$(cat $FUNCTION/driver_override)" = "$1" ]; }
# refuses WHAT PATTERN COMMAND...: passes if the command fails and says something that fits.
refused() { ! "$@"; }
refuses() {
    what=$1 pattern=$2
    shift 2
    shows "$what" "$pattern" refused "$@" && check "$what, and leaves it" driver_is nvme
}

shows 'tenmil list tells what it is' 'serial LAB1, driver nvme, IOMMU group' tenmil list || exit 1
refuses 'without vfio-pci' 'modprobe vfio-pci' tenmil bind $SSD
modprobe vfio-pci
shows 'tenmil doctor finds the IOMMU' 'good  *IOMMU: on' tenmil doctor
shows 'and the driver' 'good  *driver vfio-pci: loaded' tenmil doctor
shows 'and the size of its read requests' "$SSD PCIe read request: [0-9]" tenmil doctor

refuses 'a wrong address' 'expected one of' tenmil bind 0000:00:1f.7
check 'a file system' mkfs.ext4 -q -F /dev/nvme0n1
mount -t ext4 /dev/nvme0n1 /mnt
refuses 'a mounted disk' 'nvme0n1 is mounted at /mnt' tenmil bind $SSD
# Mounted in another mount namespace alone: not visible here, but the kernel has the disk in use.
unshare -m sleep 100 &
sleep 1
umount /mnt
refuses 'a disk mounted elsewhere' 'the kernel has nvme0n1 in use\|open' tenmil bind $SSD
kill $!
wait
within 20 mkswap /dev/nvme0n1
within 20 swapon /dev/nvme0n1
refuses 'swap' 'nvme0n1 is swapped to' tenmil bind $SSD
swapoff /dev/nvme0n1
sleep 100 </dev/nvme0n1 &
refuses 'a disk that a process has open' '(sleep) has nvme0n1 open' tenmil bind $SSD
kill $!
wait

shows 'a dry run shows the steps' "echo $SSD > /sys/bus/pci/drivers/nvme/unbind" \
    tenmil bind $SSD --dry-run
check 'which changes nothing' driver_is nvme
shows 'it is taken' 'bound to vfio-pci, before to nvme' tenmil bind $SSD --owner 1000
check 'and has the driver' driver_is vfio-pci
GROUP=/dev/vfio/$(basename "$(readlink -f $FUNCTION/iommu_group)")
check 'and a group node' there "$GROUP"
check 'that is its owner'"'"'s' test "$(stat -c %u "$GROUP")" = 1000
shows 'taken again it says so' 'already' tenmil bind $SSD
shows 'tenmil list tells who has it' 'driver vfio-pci' tenmil list
sleep 100 <"$GROUP" &
sleep 1
shows 'while it is driven it is not given back' '(sleep) has vfio/' refused tenmil unbind --all
kill $!
wait
check 'it is given back' tenmil unbind --all
check 'to the driver that had it' driver_is nvme
check 'without an override' override_is '(null)'
check 'and is a disk again' within 20 there /dev/nvme0n1

# Crashes: what they leave is made by hand.
tenmil bind $SSD >/dev/null
echo $SSD >/sys/bus/pci/drivers/vfio-pci/unbind
check 'a function without a driver is given back' tenmil unbind --all
check 'to nvme' driver_is nvme
tenmil bind $SSD >/dev/null
echo >$FUNCTION/driver_override
echo $SSD >/sys/bus/pci/drivers/vfio-pci/unbind
echo $SSD >/sys/bus/pci/drivers_probe
within 20 there /dev/nvme0n1
check 'what has its driver already is only forgotten' tenmil unbind --all
check 'and nothing is left' test -z "$(ls /run/tenmil)"

mkfs.ext4 -q -F /dev/nvme0n1
mount -t ext4 /dev/nvme0n1 /mnt
refuses 'another serial number' 'expected the serial number' tenmil bind $SSD --even-if-in-use LAB2
check 'its own takes it from a mount' tenmil bind $SSD --even-if-in-use LAB1
check 'and it has the driver' driver_is vfio-pci
umount /mnt
check 'and is given back' tenmil unbind $SSD
check 'to nvme again' driver_is nvme
tenmil list | grep -A 3 "$SSD"
