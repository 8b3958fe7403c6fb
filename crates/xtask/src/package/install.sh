# Runs in a chroot: installs, upgrades, removes and purges the package.
. /packages/checks.sh

# Files and their rights.
installed() {
    check 'the program runs' tenmil --version
    check 'the user exists' getent passwd tenmil
    check 'nobody logs in as it' sh -c 'getent passwd tenmil | grep -q nologin$'
    check 'the configuration is the service'"'"'s alone' owner 'tenmil:tenmil 640' /etc/tenmil/target.toml
    check 'so is its directory' owner 'tenmil:tenmil 750' /etc/tenmil
    check 'so are the keys' owner 'tenmil:tenmil 700' /etc/tenmil/keys
    check 'and the state' owner 'tenmil:tenmil 700' /var/lib/tenmil
    check 'the program is root'"'"'s' owner 'root:root 755' /usr/bin/tenmil
    check 'the unit is valid' systemd-analyze verify --man=no tenmil.service
    check 'the unit is hardened' systemd-analyze security --offline=true --threshold=20 /usr/lib/systemd/system/tenmil.service
    refuse 'the service is not enabled' test -e /etc/systemd/system/multi-user.target.wants/tenmil.service
    check 'the configuration file is one of dpkg' sh -c 'dpkg-query -W -f "\${Conffiles}" tenmil | grep -q target.toml'
    check 'there are pages of the manual' test -e /usr/share/man/man1/tenmil-serve.1.gz -o -e /etc/dpkg/dpkg.cfg.d/excludes
}

echo '== a new installation'
check 'install' dpkg -i new.deb
installed
echo '== installed again'
sed -i 's/^buffer-memory.*/buffer-memory = "64m"/' /etc/tenmil/target.toml
chmod 600 /etc/tenmil/target.toml
check 'install again' dpkg -i --force-confold new.deb
check 'a changed configuration stays' grep -q '^buffer-memory = "64m"' /etc/tenmil/target.toml
check 'its mode stays' owner 'tenmil:tenmil 600' /etc/tenmil/target.toml
echo '== removed, and installed again'
touch /etc/tenmil/keys/key /var/lib/tenmil/disk.img
check 'remove' dpkg -r tenmil
refuse 'the program is gone' test -e /usr/bin/tenmil
check 'the configuration stays' grep -q '^buffer-memory = "64m"' /etc/tenmil/target.toml
check 'the keys stay' test -e /etc/tenmil/keys/key
check 'install' dpkg -i --force-confold new.deb
check 'the configuration is the same' grep -q '^buffer-memory = "64m"' /etc/tenmil/target.toml
echo '== purged'
check 'purge' dpkg -P tenmil
refuse 'configuration and keys are gone' test -e /etc/tenmil
check 'disks stay' test -e /var/lib/tenmil/disk.img
refuse 'no unit is left' test -e /usr/lib/systemd/system/tenmil.service
rm -f /var/lib/tenmil/disk.img

for old in old-*.deb; do
    [ -e "$old" ] || continue
    echo "== upgrade from $old"
    check 'install the earlier version' dpkg -i "$old"
    sed -i 's/^buffer-memory.*/buffer-memory = "32m"/' /etc/tenmil/target.toml
    check 'upgrade' dpkg -i --force-confold new.deb
    installed
    check 'a changed configuration stays' grep -q '^buffer-memory = "32m"' /etc/tenmil/target.toml
    check 'purge' dpkg -P tenmil
    refuse 'an empty state directory goes' test -e /var/lib/tenmil
done
echo "$checks checks passed"
