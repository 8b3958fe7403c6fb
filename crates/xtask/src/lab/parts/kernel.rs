//! Kernel of a distribution, with the modules that scenarios need.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::distro_packages::DistroPackages;
use super::{built, make_parent, read, run, write};
use crate::lab::archive::Archive;

/// Modules that scenarios load; their dependencies are added.
const MODULES: [&str; 12] = [
    "nvme-tcp",
    "nvmet-tcp",
    "nvme",
    "null_blk",
    "ublk_drv",
    "virtio_pci",
    "virtio_blk",
    "vfio-pci",
    "vfio_iommu_type1",
    "ext4",
    "loop",
    "configfs",
];
/// Optional modules: a scenario skips checks without them. The kernel built here lacks them.
const MODULES_MAYBE: [&str; 1] = ["veth"];
/// Name in place of a suite for the kernel that is [built] here.
pub(crate) const BUILT: &str = "built";
const PACKAGE: &str = "linux-image-amd64";
/// Name prefixes of the packages into which newer suites split the kernel package.
const PARTS: [&str; 3] = ["linux-base-", "linux-binary-", "linux-modules-"];

/// Unpacked kernel.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) version: String,
    pub(crate) image: PathBuf,
    /// The directory that has `lib/modules/VERSION`.
    root: PathBuf,
}

impl Kernel {
    /// Finds the kernel in `room`, or downloads it from a suite, or builds it.
    pub(super) fn find(room: &Path, suite: &str) -> Result<Self, String> {
        let root = room.join(suite);
        let is_current = suite != BUILT || built::is_current(&root);
        if !root.join("unpacked").exists() || !is_current {
            // Removes the remains of an incomplete attempt.
            _ = std::fs::remove_dir_all(&root);
            match suite {
                BUILT => built::make(&root)?,
                suite => fetch(&root, suite)?,
            }
            write(&root.join("unpacked"), b"")?;
        }
        let modules = root.join("lib/modules");
        let version = only_entry(&modules)?;
        let image = image(&root, &version);
        Ok(Self { version, image, root })
    }

    pub(super) fn pack<W: Write>(&self, archive: &mut Archive<W>) -> Result<(), String> {
        let about = |why| format!("pack modules: {why}");
        let plain = self.root.join("plain");
        let place = format!("lib/modules/{}", self.version);
        for module in self.wanted()? {
            let mut within = module.strip_prefix(&self.root).unwrap_or(&module).to_owned();
            if is_packed(&module) {
                within.set_extension("");
            }
            let bytes = unpack(&module)?;
            let copy = plain.join(&within);
            make_parent(&copy)?;
            write(&copy, &bytes)?;
            archive.file(&within.to_string_lossy(), &bytes).map_err(about)?;
        }
        for list in ["modules.builtin", "modules.order", "modules.builtin.modinfo"] {
            write(&plain.join(&place).join(list), &read(&self.root.join(&place).join(list))?)?;
        }
        run(Command::new("depmod").arg("-b").arg(&plain).arg(&self.version))?;
        for list in ["modules.dep", "modules.alias", "modules.softdep", "modules.builtin"] {
            let bytes = read(&plain.join(&place).join(list))?;
            archive.file(&format!("{place}/{list}"), &bytes).map_err(about)?;
        }
        Ok(())
    }

    /// Files of the needed modules and their dependencies.
    fn wanted(&self) -> Result<BTreeSet<PathBuf>, String> {
        let mut files = BTreeSet::new();
        let depends = |name: &str| {
            run(Command::new("modprobe")
                .args(["--show-depends", "-S", &self.version, "-d"])
                .arg(&self.root)
                .arg(name))
        };
        let must = MODULES.iter().map(|name| depends(name));
        let may = MODULES_MAYBE.iter().map(|name| depends(name)).filter(Result::is_ok);
        for said in must.chain(may) {
            let said = said?;
            files.extend(said.lines().filter_map(|line| {
                line.strip_prefix("insmod ")?.split_whitespace().next().map(PathBuf::from)
            }));
        }
        Ok(files)
    }
}

fn fetch(root: &Path, suite: &str) -> Result<(), String> {
    println!("lab: fetching {PACKAGE} of {suite}");
    let packages = DistroPackages::open(&root.join("apt"), suite)?;
    let image = packages.needs(PACKAGE, "linux-image-")?.ok_or_else(|| {
        format!("{PACKAGE} of {suite}: needs no linux-image-*, expected the kernel of a version")
    })?;
    packages.unpack(&image, root)?;
    for part in PARTS {
        if let Some(part) = packages.needs(&image, part)? {
            packages.unpack(&part, root)?;
        }
    }
    lead_to_modules(root)?;
    run(Command::new("depmod").arg("-b").arg(root).arg(only_entry(&root.join("lib/modules"))?))?;
    Ok(())
}

/// Path of the kernel image: in newer suites it is beside its modules.
fn image(root: &Path, version: &str) -> PathBuf {
    let beside = root.join(format!("lib/modules/{version}/vmlinuz"));
    if beside.exists() { beside } else { root.join(format!("boot/vmlinuz-{version}")) }
}

/// Packages for a merged `/usr` have their modules in `usr/lib` only; links `lib` there.
fn lead_to_modules(root: &Path) -> Result<(), String> {
    let lib = root.join("lib");
    if lib.exists() {
        return Ok(());
    }
    std::os::unix::fs::symlink("usr/lib", &lib)
        .map_err(|why| format!("link {}: {why}", lib.display()))
}

fn is_packed(module: &Path) -> bool {
    module.extension().is_some_and(|extension| extension == "xz")
}

fn unpack(module: &Path) -> Result<Vec<u8>, String> {
    if !is_packed(module) {
        return read(module);
    }
    let output = Command::new("xz").arg("-dc").arg(module).output();
    let output = output.map_err(|why| format!("start xz: {why}"))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(format!("unpack {}: {}", module.display(), output.status))
}

fn only_entry(directory: &Path) -> Result<String, String> {
    let about = |why| format!("list {}: {why}", directory.display());
    let mut entries = std::fs::read_dir(directory).map_err(about)?;
    match (entries.next(), entries.next()) {
        (Some(entry), None) => Ok(entry.map_err(about)?.file_name().to_string_lossy().into_owned()),
        _ => Err(format!("{}: has not exactly one kernel", directory.display())),
    }
}
