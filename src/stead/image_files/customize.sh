#!/bin/sh
# Runs at the end of mmdebstrap, outside the chroot: customize.sh ROOT STAGE FILES OUT
# STAGE is copied over ROOT; the kernel and the initrd are put in OUT.
set -eu
root=$1 stage=$2 files=$3 out=$4

cp -a --remove-destination --no-target-directory "$stage" "$root"
chroot "$root" update-ca-certificates

chroot "$root" git lfs install --system --skip-repo

in_guest() { chroot "$root" systemctl --quiet "$@"; }

# One sshd for each connection, so that new host keys need no restart.
ln -s /usr/lib/systemd/system/sshd@.service "$root/etc/systemd/system/ssh@.service"
in_guest enable stead-agent.service ssh.socket
in_guest disable ssh.service getty@.service
in_guest set-default multi-user.target

# An idle machine must be idle: hundreds of them may be emulated on one host.
in_guest mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer fstrim.timer \
    logrotate.timer man-db.timer systemd-tmpfiles-clean.timer
# Network, names, time and identity come from the agent; /tmp is on disk because memory is small;
# a seed file would be the same in every clone.
in_guest mask systemd-networkd.service systemd-networkd.socket systemd-networkd-wait-online.service \
    systemd-network-generator.service systemd-resolved.service systemd-timesyncd.service sshd-keygen.service \
    systemd-firstboot.service systemd-machine-id-commit.service systemd-random-seed.service \
    systemd-journal-flush.service tmp.mount console-getty.service serial-getty@ttyS0.service
# What is of no use on this hardware only makes an emulated boot longer.
in_guest mask systemd-creds.socket systemd-sysext.socket systemd-pcrextend.socket systemd-pcrlock.socket \
    systemd-pcrmachine.service systemd-pcrphase.service systemd-pcrphase-sysinit.service \
    systemd-tpm2-setup.service systemd-tpm2-setup-early.service systemd-hibernate-clear.service \
    systemd-pstore.service systemd-udev-load-credentials.service systemd-hwdb-update.service \
    systemd-ask-password-console.path systemd-ask-password-wall.path e2scrub_reap.service \
    dev-hugepages.mount sys-kernel-config.mount sys-kernel-debug.mount sys-kernel-tracing.mount \
    modprobe@configfs.service modprobe@drm.service modprobe@efi_pstore.service
mkdir -p "$root/etc/systemd/system-generators"
for generator in debug getty gpt-auto hibernate-resume rc-local run ssh system-update tpm2; do
    ln -s /dev/null "$root/etc/systemd/system-generators/systemd-$generator-generator"
done
rm -f "$root"/usr/lib/binfmt.d/python*.conf
for service in journald logind udevd; do
    install -D -m 0644 "$files/no-watchdog.conf" "$root/etc/systemd/system/systemd-$service.service.d/stead.conf"
done

# The host boots the kernel it kept beside the disk, so a newer one in the guest would only take its modules away.
chroot "$root" dpkg-query --show --showformat='${Package}\n' 'linux-image-*' | chroot "$root" xargs apt-mark hold

# The initrd is made with the guest's own tools, so the host needs none.
kernel=$(basename "$(echo "$root"/lib/modules/*)")
initrd=$root/tmp/initrd
mkdir -p "$initrd/bin" "$initrd/dev" "$initrd/root" "$initrd/modules"
cp "$root/bin/busybox" "$initrd/bin/"
install -m 0755 "$files/init.sh" "$initrd/init"
chroot "$root" modprobe --set-version "$kernel" --show-depends --all virtio_blk virtio_net |
    awk '$1 == "insmod" && !seen[$2]++ { print $2 }' |
    while read -r module; do
        base=$(basename "$module" .xz)
        chroot "$root" xz -dc "$module" >"$initrd/modules/$base"
        echo "$base" >>"$initrd/modules/order"
    done
chroot "$root" sh -c 'cd /tmp/initrd && find . | LC_ALL=C sort | cpio --quiet -o -H newc | gzip -9n' >"$out/initrd"
rm -r "$initrd"
mv "$root/boot/vmlinuz-$kernel" "$out/kernel"
chroot "$root" dpkg --purge busybox-static

# New VMs install packages at once: the package lists and apt's index of them are part of the image.
chmod 0755 "$root/usr/local/sbin/apt-get" "$root/usr/local/bin/fetch-ssh-keys"
ln -s apt-get "$root/usr/local/sbin/apt"
rm -f "$root/etc/apt/apt.conf.d/99mmdebstrap"
chroot "$root" apt-get clean
chroot "$root" apt-cache gencaches
touch "$root/var/lib/apt/stead-lists-updated"

rm -rf "$root"/etc/ssh/ssh_host_* "$root"/var/lib/systemd/random-seed "$root"/var/lib/dbus/machine-id \
    "$root"/boot/initrd* \
    "$root"/vmlinuz* "$root"/initrd.img* "$root"/etc/.pwd.lock \
    "$root"/var/cache/debconf/*-old "$root"/var/lib/dpkg/*-old
mv "$root/etc/dpkg/dpkg.cfg.d/99mmdebstrap" "$root/etc/dpkg/dpkg.cfg.d/stead"
# Empty means: make one, but this is not the first boot.
: >"$root/etc/machine-id"
find "$root/var/log" -type f -delete
# Newer than /usr, so that no boot thinks that caches have to be made again.
touch "$root/etc/.updated" "$root/var/.updated"
