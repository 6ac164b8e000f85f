#!/bin/busybox sh
# The whole initrd: load the disk and network drivers, mount the root file system, go.
/bin/busybox mount -t devtmpfs devtmpfs /dev
while read -r module; do
    /bin/busybox insmod "/modules/$module"
done </modules/order
/bin/busybox mount -t ext4 -o rw,noatime,discard,errors=remount-ro /dev/vda /root || exec /bin/busybox sh
/bin/busybox mount -o move /dev /root/dev
exec /bin/busybox switch_root /root /sbin/init
