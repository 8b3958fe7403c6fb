#!/bin/sh
# The first process of a guest: what every scenario finds, then its script, then the end.
export PATH=/bin:/sbin HOME=/root
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm /tmp /run /mnt /etc/nvme
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mount -t tmpfs shm /dev/shm
ifconfig lo 127.0.0.1 up
cd /tmp
echo "@@ note Linux $(uname -rv)"
name=$(tr ' ' '\n' </proc/cmdline | sed -n 's/^lab=//p')
cat /lab/lab.sh "/lab/$name.sh" >/tmp/script.sh
sh /tmp/script.sh && echo '@@ end'
dmesg | tail -n 60
poweroff -f
