#!/usr/bin/env bash
# build.sh FOLDER SUITE: a Debian for a virtual machine, with the cloud kernel: FOLDER/disk.img, vmlinuz, initrd.gz and key.
# It can be an NFS server and a client, has qemu's tools, LVM with thin pools and multipath, and lets in who has the key.
# Its kernel has nbd and the device mapper as modules, and ZFS, which is compiled here (in about five minutes).
set -euo pipefail
cd "$1"
umask 022
command -v mmdebstrap >/dev/null || apt-get install -y -q mmdebstrap
suite=$2
packages=linux-image-cloud-amd64,systemd-sysv,dbus,udev,kmod,iproute2,openssh-server,python3,qemu-utils
packages=$packages,nfs-kernel-server,nfs-common,procps,busybox-static,xz-utils,e2fsprogs
packages=$packages,lvm2,thin-provisioning-tools,multipath-tools,zfsutils-linux
mirror=$(apt-get indextargets 'Identifier: Packages' 'Origin: Debian' 'Codename: bookworm' --format '$(REPO_URI)' | head -n 1)
[ -n "$mirror" ] || { echo 'apt here knows no Debian bookworm: add it to its sources' >&2; exit 1; }
echo "deb $mirror $suite main contrib" >debian.list # it has to end so
[ -f key ] || ssh-keygen -q -t ed25519 -N '' -f key

# The kernel has the filesystem built in, but not the disk.
cat >init <<'END'
#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
for module in virtio_ring virtio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci virtio_blk; do
    [ ! -e /modules/$module.ko ] || /bin/busybox insmod /modules/$module.ko # some kernels have it built in
done
until [ -b /dev/vda ]; do /bin/busybox usleep 20000; done
/bin/busybox mount -t ext4 /dev/vda /root && exec /bin/busybox switch_root /root /sbin/init
END
cat >inside <<'END'
set -eu
drivers=$(echo /lib/modules/*-cloud-*/kernel/drivers)
mkdir -p /first/bin /first/dev /first/root /first/modules
cp /bin/busybox /first/bin/
mv /init /first/init
chmod 755 /first/init
for module in block/virtio_blk virtio/virtio virtio/virtio_ring virtio/virtio_pci virtio/virtio_pci_modern_dev \
    virtio/virtio_pci_legacy_dev; do
    cp "$drivers/$module".ko* /first/modules/ 2>/dev/null || true # or built in
done
find /first/modules -name '*.xz' -exec xz -d {} +
(cd /first && find . | busybox cpio -o -H newc | gzip -1) >/boot/initrd.gz
rm -r /first
printf '[Match]\nName=eth0\n[Network]\nAddress=10.0.2.15/24\nLinkLocalAddressing=no\n' >/etc/systemd/network/eth0.network
printf '/dev/vda / ext4 rw 0 1\n' >/etc/fstab
printf '127.0.0.1 localhost machine\n10.9.0.1 machine1\n10.9.0.2 machine2\n' >/etc/hosts
printf 'machine\n' >/etc/hostname
printf 'UseDNS no\nMaxSessions 100\nMaxStartups 100\n' >/etc/ssh/sshd_config.d/machine.conf
mkdir -p /srv/images /var/lib/libvirt/images
printf '/srv 10.9.0.0/24(rw,sync,no_root_squash,no_subtree_check,fsid=0)\n' >/etc/exports
# For so long a server that starts gives neither locks nor leases; 90 s by itself.
printf '[nfsd]\ngrace-time=10\nlease-time=10\n[lockd]\ngrace-time=10\n' >/etc/nfs.conf.d/machine.conf
systemctl -q enable systemd-networkd rpcbind nfs-server rpc-statd
systemctl -q disable apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer fstrim.timer e2scrub_reap.service
systemctl -q mask systemd-networkd-wait-online.service rpc-gssd.service nfs-blkmap.service
systemctl -q mask zfs-import-cache.service zfs-load-module.service zfs-mount.service zfs-share.service \
    zfs-volume-wait.service zfs-zed.service # who needs ZFS loads it
depmod "$(basename /lib/modules/*-cloud-*)"
END
debian() { # debian FOLDER PACKAGES OPTIONS…
    mmdebstrap --quiet --variant=minbase --include="$2" --aptopt='Apt::Install-Recommends "false"' \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        "${@:3}" "$suite" "$1" debian.list
}
rm -rf root modules disk.img
# dpkg has dkms compile the module for the kernel whose headers are there.
debian modules linux-headers-cloud-amd64,dkms \
    --customize-hook='chroot "$1" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q zfs-dkms >/dev/null'
debian root "$packages" \
    --setup-hook='mkdir -p "$1/etc"; echo do_initrd=no >"$1/etc/kernel-img.conf"' \
    --customize-hook='install -D -m 600 key.pub "$1/root/.ssh/authorized_keys"; cp init inside "$1/"' \
    --customize-hook='cp -r modules/lib/modules/*/updates "$1"/lib/modules/*-cloud-*/' \
    --customize-hook='chroot "$1" sh /inside; rm "$1/inside"' \
    --customize-hook='cp "$1"/boot/vmlinuz-*-cloud-* vmlinuz; cp "$1/boot/initrd.gz" .'
truncate -s 4G disk.img
/usr/sbin/mkfs.ext4 -q -F -d root disk.img
rm -r root modules init inside debian.list
