# The CSI driver on a node with Linux's nvme-tcp and native multipath: the life of volumes with data, then
# csi-sanity with file systems and with block devices.

modprobe nvme-tcp
modprobe ext4
modprobe xfs || note 'no xfs in this kernel'
mkdir -p /tmp/t /tmp/volumes
cd /tmp/t || exit 1
tenmil pool create 'file:/tmp/t/pool?size=1g' >/dev/null
tenmil volume create /tmp/t/pool/keep --size 1m >/dev/null
cat >target.toml <<EOF
[[listener]]
address = "127.0.0.1:4420"

[[listener]]
address = "127.0.0.1:4421"

[[subsystem]]
nqn = "nqn.2026-01.org.tenmil:keep"
allowed-hosts = []

[[subsystem.namespace]]
uri = "volume:[file:/tmp/t/pool]/keep"
EOF
tenmil serve --config target.toml --control /tmp/t/control.sock >serve.log 2>&1 &
served() { tenmil get subsystems --control /tmp/t/control.sock | grep -q keep; }
check 'tenmil serves a pool' within 60 served || { cat serve.log; exit 1; }

tenmil-csi --controller --node --node-name guest --topology zone=guest --attach kernel \
    --endpoint unix:///tmp/t/csi.sock --control /tmp/t/control.sock >driver.log 2>&1 &
listens() { grep -q ready driver.log; }
check 'the driver listens' within 60 listens || { cat driver.log; exit 1; }

# Two paths of each volume, while it is staged.
paths() {
    while sleep 0.2; do
        for found in /sys/class/nvme/nvme*; do
            grep -h trsvcid= "$found/address" 2>/dev/null
        done | sort -u >>paths.log
    done
}
paths &
watching=$!
check 'data of volumes, snapshots, clones and expanded volumes' \
    tenmil-csi --self-test /tmp/volumes --endpoint unix:///tmp/t/csi.sock || cat driver.log
kill $watching
both() { grep -q trsvcid=4420 paths.log && grep -q trsvcid=4421 paths.log; }
check 'Linux was connected by both paths' both
gone() { [ "$(ls /sys/class/nvme | wc -l)" = 0 ]; }
check 'Linux is disconnected' gone

echo 'iops: "100000"' >mutable.yml
for access in mount block; do
    check "csi-sanity, $access" csi-sanity --csi.endpoint unix:///tmp/t/csi.sock --csi.mountdir /tmp/t/mount \
        --csi.stagingdir /tmp/t/staging --csi.testvolumeaccesstype $access --csi.testvolumesize 67108864 \
        --csi.testvolumeexpandsize 100663296 --csi.testvolumemutableparameters mutable.yml --ginkgo.no-color
    note "$(grep ' Passed | ' /tmp/output)"
done
check 'Linux is disconnected again' gone
