//! Kernel of a distribution, with the modules that scenarios need.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::distro_packages::DistroPackages;
use super::{built_kernel, make_parent, read_file, run_program, write_file};
use crate::lab::cpio_archive::CpioArchive;

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
/// Optional modules: a scenario skips checks without them. The kernel built here lacks them, and newer
/// kernels have some of the algorithms built in. The kernel loads `tls` and the algorithms on demand
/// (`crypto-gcm(aes)`), so no module depends on them.
const MODULES_MAYBE: [&str; 9] =
    ["xfs", "veth", "tls", "gcm", "ctr", "ccm", "aesni-intel", "ghash-generic", "dh_generic"];
/// Name in place of a suite for the kernel that is built here.
pub(crate) const BUILT: &str = "built";
const PACKAGE: &str = "linux-image-amd64";
/// Name prefixes of the packages into which newer suites split the kernel package.
const PARTS: [&str; 3] = ["linux-base-", "linux-binary-", "linux-modules-"];

/// Unpacked kernel.
#[derive(Debug)]
pub(crate) struct GuestKernel {
    pub(crate) version: String,
    pub(crate) image: PathBuf,
    /// The directory that has `lib/modules/VERSION`.
    root: PathBuf,
}

impl GuestKernel {
    /// Finds the kernel in `room`, or downloads it from a suite, or builds it.
    pub(super) fn find_or_fetch(room: &Path, suite: &str) -> Result<Self, String> {
        let root = room.join(suite);
        let is_current = suite != BUILT || built_kernel::is_kernel_current(&root);
        if !root.join("unpacked").exists() || !is_current {
            // Removes the remains of an incomplete attempt.
            _ = std::fs::remove_dir_all(&root);
            match suite {
                BUILT => built_kernel::build_kernel(&root)?,
                suite => fetch_packages(&root, suite)?,
            }
            write_file(&root.join("unpacked"), b"")?;
        }
        let modules = root.join("lib/modules");
        let version = single_entry(&modules)?;
        let image = kernel_image(&root, &version);
        Ok(Self { version, image, root })
    }

    pub(super) fn pack_modules<W: Write>(
        &self,
        archive: &mut CpioArchive<W>,
    ) -> Result<(), String> {
        let about = |why| format!("pack modules: {why}");
        let plain = self.root.join("plain");
        let place = format!("lib/modules/{}", self.version);
        for module in self.wanted_modules()? {
            let mut within = module.strip_prefix(&self.root).unwrap_or(&module).to_owned();
            if is_compressed(&module) {
                within.set_extension("");
            }
            let bytes = unpack_module(&module)?;
            let copy = plain.join(&within);
            make_parent(&copy)?;
            write_file(&copy, &bytes)?;
            archive.add_file(&within.to_string_lossy(), &bytes).map_err(about)?;
        }
        for list in ["modules.builtin", "modules.order", "modules.builtin.modinfo"] {
            write_file(
                &plain.join(&place).join(list),
                &read_file(&self.root.join(&place).join(list))?,
            )?;
        }
        run_program(Command::new("depmod").arg("-b").arg(&plain).arg(&self.version))?;
        for list in ["modules.dep", "modules.alias", "modules.softdep", "modules.builtin"] {
            let bytes = read_file(&plain.join(&place).join(list))?;
            archive.add_file(&format!("{place}/{list}"), &bytes).map_err(about)?;
        }
        Ok(())
    }

    /// Files of the needed modules and their dependencies.
    fn wanted_modules(&self) -> Result<BTreeSet<PathBuf>, String> {
        let mut files = BTreeSet::new();
        let depends = |name: &str| {
            run_program(
                Command::new("modprobe")
                    .args(["--show-depends", "-S", &self.version, "-d"])
                    .arg(&self.root)
                    .arg(name),
            )
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

fn fetch_packages(root: &Path, suite: &str) -> Result<(), String> {
    println!("lab: fetching {PACKAGE} of {suite}");
    let packages = DistroPackages::open(&root.join("apt"), suite)?;
    let image = packages.dependency_with_prefix(PACKAGE, "linux-image-")?.ok_or_else(|| {
        format!("{PACKAGE} of {suite}: needs no linux-image-*, expected the kernel of a version")
    })?;
    packages.unpack(&image, root)?;
    for part in PARTS {
        if let Some(part) = packages.dependency_with_prefix(&image, part)? {
            packages.unpack(&part, root)?;
        }
    }
    link_lib_to_usr_lib(root)?;
    run_program(
        Command::new("depmod").arg("-b").arg(root).arg(single_entry(&root.join("lib/modules"))?),
    )?;
    Ok(())
}

/// Path of the kernel image: in newer suites it is beside its modules.
fn kernel_image(root: &Path, version: &str) -> PathBuf {
    let beside = root.join(format!("lib/modules/{version}/vmlinuz"));
    if beside.exists() { beside } else { root.join(format!("boot/vmlinuz-{version}")) }
}

/// Packages for a merged `/usr` have their modules in `usr/lib` only; links `lib` there.
fn link_lib_to_usr_lib(root: &Path) -> Result<(), String> {
    let lib = root.join("lib");
    if lib.exists() {
        return Ok(());
    }
    std::os::unix::fs::symlink("usr/lib", &lib)
        .map_err(|why| format!("link {}: {why}", lib.display()))
}

fn is_compressed(module: &Path) -> bool {
    module.extension().is_some_and(|extension| extension == "xz")
}

fn unpack_module(module: &Path) -> Result<Vec<u8>, String> {
    if !is_compressed(module) {
        return read_file(module);
    }
    let output = Command::new("xz").arg("-dc").arg(module).output();
    let output = output.map_err(|why| format!("start xz: {why}"))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(format!("unpack {}: {}", module.display(), output.status))
}

fn single_entry(directory: &Path) -> Result<String, String> {
    let about = |why| format!("list {}: {why}", directory.display());
    let mut entries = std::fs::read_dir(directory).map_err(about)?;
    match (entries.next(), entries.next()) {
        (Some(entry), None) => Ok(entry.map_err(about)?.file_name().to_string_lossy().into_owned()),
        _ => Err(format!("{}: has not exactly one kernel", directory.display())),
    }
}
