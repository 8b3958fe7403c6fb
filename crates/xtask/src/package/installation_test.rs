//! Installation, upgrade, removal and purge of the Debian package in a chroot, and its service under systemd.
//!
//! ```text
//!   debootstrap ─▶ target/packages/debian (kept) ─┬─ overlay ─▶ chroot: install.sh
//!                                                └─ overlay ─▶ systemd as first process: service.sh
//! ```
//!
//! Upgrades begin from every version in `packaging/debian/released`. A program of 10 MB a version does not belong into
//! the repository, and an upgrade does not run the old one: so a package is made of the recorded maintainer
//! scripts, configuration and file list, with empty files in place of the others.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::debian_package::{find_package, recorded_releases};
use super::{is_installed, output_of, run_command};

/// Debian suite of the chroot.
const SUITE: &str = "bookworm";
/// Mirror of the suite.
const MIRROR: &str = "http://deb.debian.org/debian";
/// Installed beside the required packages.
const INCLUDE: &str = "systemd,util-linux,procps";
/// Makes a system that can be written to, in namespaces of mounts, processes and network: arguments are the base
/// and a directory, which is `/packages` there.
const OVERLAY: &str = r#"
set -eu
base=$1 work=$2
layer=$work/layer
mkdir -p "$layer"
mount -t tmpfs none "$layer"
mkdir "$layer/upper" "$layer/inner" "$layer/root"
root=$layer/root
mount -t overlay overlay -o "lowerdir=$base,upperdir=$layer/upper,workdir=$layer/inner" "$root"
mkdir -p "$root/packages"
mount --bind "$work" "$root/packages"
mount -t proc proc "$root/proc"
ip link set lo up
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root DEBIAN_FRONTEND=noninteractive
"#;
/// Runs the first script in a chroot without a service manager.
const IN_CHROOT: &str = r#"
mount --rbind /dev "$root/dev"
# No service is started or restarted here.
printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
chmod 755 "$root/usr/sbin/policy-rc.d"
chroot "$root" sh -eu /packages/install.sh
"#;
/// Runs the second script as a service of systemd, which is the first process of the namespace.
const IN_SYSTEMD: &str = r#"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 none "$root/sys/fs/cgroup"
mount -t tmpfs none "$root/run"
mount -t tmpfs -o mode=755 none "$root/dev"
for device in null zero full random urandom tty; do
    : >"$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
: >"$root/dev/console"
mount --bind /dev/null "$root/dev/console"
ln -s /proc/self/fd "$root/dev/fd"
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
mount -t tmpfs none "$root/tmp"
echo 0123456789abcdef0123456789abcdef >"$root/etc/machine-id"
cat >"$root/etc/systemd/system/test.target" <<'UNIT'
[Unit]
Requires=test.service systemd-journald.service
AllowIsolate=yes
UNIT
cat >"$root/etc/systemd/system/test.service" <<'UNIT'
[Unit]
DefaultDependencies=no
After=systemd-journald.service
[Service]
Type=oneshot
Environment=HOME=/root DEBIAN_FRONTEND=noninteractive
StandardOutput=append:/packages/service.log
StandardError=append:/packages/service.log
ExecStart=/bin/sh -eu /packages/service.sh
ExecStopPost=/bin/systemctl --no-block poweroff -f
UNIT
exec env -i container=docker PATH="$PATH" chroot "$root" /lib/systemd/systemd --system --unit=test.target --show-status=0 >"$work/systemd.log" 2>&1
"#;
/// Scripts, as files in `/packages`. The packages are `old-*.deb` and `new.deb` there.
const SCRIPTS: [(&str, &str); 3] = [
    ("checks.sh", include_str!("checks.sh")),
    ("install.sh", include_str!("install.sh")),
    ("service.sh", include_str!("service.sh")),
];

/// Runs the tests; returns what failed.
pub(super) fn test_installation(root: &Path, room: &Path) -> Result<Vec<String>, String> {
    let package = find_package(room)?;
    let base = prepare_base(room)?;
    let work = room.join("installation");
    let _ = fs::remove_dir_all(&work);
    fs::create_dir_all(&work).map_err(|why| format!("make {}: {why}", work.display()))?;
    let copied = fs::copy(&package, work.join("new.deb"));
    copied.map_err(|why| format!("copy {}: {why}", package.display()))?;
    for (version, record) in recorded_releases(root) {
        make_recorded_package(&record, &work.join(format!("old-{version}.deb")))?;
    }
    for (name, script) in SCRIPTS {
        let path = work.join(name);
        fs::write(&path, script).map_err(|why| format!("write {}: {why}", path.display()))?;
    }
    let mut problems = Vec::new();
    if let Err(why) = run_command("test the package", &mut in_namespaces(&base, &work, IN_CHROOT)) {
        problems.push(why);
    }
    // The first process is stopped at the end, so its exit status says nothing.
    let _ = in_namespaces(&base, &work, IN_SYSTEMD).status();
    let log = fs::read_to_string(work.join("service.log")).unwrap_or_default();
    print!("{log}");
    if !log.trim_end().ends_with("checks passed") {
        let name = work.join("systemd.log");
        problems.push(format!("test the service: see above, and {}", name.display()));
    }
    Ok(problems)
}

/// A command that runs `script` in namespaces of its own.
fn in_namespaces(base: &Path, work: &Path, script: &str) -> Command {
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "300", "unshare", "--mount", "--propagation", "private", "--net"]);
    command.args(["--pid", "--fork", "--ipc", "--uts", "--cgroup", "--kill-child", "--"]);
    command.args(["sh", "-c", &format!("{OVERLAY}{script}"), "sh"]).arg(base).arg(work);
    command
}

/// A Debian system for chroots, made once.
fn prepare_base(room: &Path) -> Result<std::path::PathBuf, String> {
    let base = room.join("debian");
    if base.join("usr/bin/dpkg").exists() {
        return Ok(base);
    }
    if !is_installed("debootstrap") {
        return Err("there is no debootstrap; fix: apt-get install debootstrap".to_owned());
    }
    let partial = room.join("debian.partial");
    let _ = fs::remove_dir_all(&partial);
    let mut bootstrap = Command::new("debootstrap");
    bootstrap.args(["--variant=minbase", &format!("--include={INCLUDE}"), SUITE]);
    bootstrap.arg(&partial).arg(MIRROR);
    output_of("make a Debian system (root is needed)", &mut bootstrap)?;
    fs::rename(&partial, &base).map_err(|why| format!("rename {}: {why}", partial.display()))?;
    Ok(base)
}

/// Makes a package of a recorded version: its scripts, its configuration, and empty files.
fn make_recorded_package(record: &Path, to: &Path) -> Result<(), String> {
    let script = r#"
set -eu
record=$1 to=$2
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
chmod 755 "$tree"
while read -r path; do
    case $path in
        */) mkdir -p "$tree/$path" ;;
        *) mkdir -p "$tree/$(dirname "$path")"; : >"$tree/$path" ;;
    esac
done <"$record/files"
cp "$record/target.toml" "$tree/etc/tenmil/target.toml"
cp -r "$record/control" "$tree/DEBIAN"
chmod 755 "$tree/DEBIAN"
for script in preinst postinst prerm postrm; do
    if [ -e "$tree/DEBIAN/$script" ]; then chmod 755 "$tree/DEBIAN/$script"; fi
done
dpkg-deb --root-owner-group --build "$tree" "$to" >/dev/null
"#;
    let mut build = Command::new("sh");
    build.args(["-c", script, "sh"]).arg(record).arg(to);
    run_command("make a package of an earlier version", &mut build)
}
