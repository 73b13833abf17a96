#!/bin/sh
# ceph.sh: a cluster of Ceph out of one monitor, one manager and one OSD on a file, with the pools vms and other.
# It is for a network namespace of its own, in which it is the only one at this port.
set -eu
ip link set lo up 2>/dev/null || true
mkdir -p /etc/ceph /run/ceph /var/log/ceph /var/lib/ceph/mon/ceph-a /var/lib/ceph/mgr/ceph-x /var/lib/ceph/osd/ceph-0
cat >/etc/ceph/ceph.conf <<'END'
[global]
fsid = aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee
mon host = v2:127.0.0.1:33001
mon initial members = a
public addr = 127.0.0.1
cluster addr = 127.0.0.1
run dir = /run/ceph
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd memory target = 939524096
bluestore block size = 3221225472
bluestore block create = true
mon allow pool size one = true
mon data avail crit = 1
mon osd full ratio = 0.97
END
key() { ceph-authtool -C "$1" --gen-key -n "$2" --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'; }
{
    key /etc/ceph/mon.keyring mon.
    key /etc/ceph/ceph.client.admin.keyring client.admin
    ceph-authtool /etc/ceph/mon.keyring --import-keyring /etc/ceph/ceph.client.admin.keyring
    monmaptool --create --addv a '[v2:127.0.0.1:33001]' --fsid aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee --clobber /root/monmap
    ceph-mon --mkfs -i a --monmap /root/monmap --keyring /etc/ceph/mon.keyring
    ceph-mon -i a
    ceph auth get-or-create mgr.x mon 'allow profile mgr' osd 'allow *' >/var/lib/ceph/mgr/ceph-x/keyring
    ceph-mgr -i x
    uuid=$(cat /proc/sys/kernel/random/uuid) secret=$(ceph-authtool --gen-print-key)
    echo "{\"cephx_secret\": \"$secret\"}" | ceph osd new "$uuid" -i -
    ceph-authtool -C /var/lib/ceph/osd/ceph-0/keyring -n osd.0 --add-key "$secret"
    ceph-osd -i 0 --mkfs --osd-uuid "$uuid"
    ceph-osd -i 0
    until ceph osd stat | grep -q '1 up'; do sleep 0.5; done
    for pool in vms other; do
        ceph osd pool create $pool 8
        rbd pool init $pool
    done
} >/var/log/ceph/up.log 2>&1
