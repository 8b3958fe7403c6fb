//! Kernel built from the distribution's source, with features that its own kernels lack: VFIO without
//! an IOMMU (noiommu), and iommufd. It has few other options, so it builds within minutes.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::distro_packages::DistroPackages;
use super::{guest_programs, make_parent, run_program, write_file};

/// Kernel configuration: `allnoconfig` and these options.
const OPTIONS: &str = include_str!("kernel.config");
/// Suite of the source.
const SUITE: &str = "trixie";
const PACKAGE: &str = "linux-source";
/// Tools needed for the build, with their packages.
const NEEDED: [(&str, &str); 6] = [
    ("gcc", "gcc"),
    ("make", "make"),
    ("flex", "flex"),
    ("bison", "bison"),
    ("bc", "bc"),
    ("tar", "tar"),
];

/// Whether the kernel in `root` was built with these options.
pub(super) fn is_kernel_current(root: &Path) -> bool {
    std::fs::read_to_string(options_path(root)).is_ok_and(|options| options == OPTIONS)
}

fn options_path(root: &Path) -> PathBuf {
    root.join("kernel.config")
}

/// Builds kernel and modules into `root`, in the layout of a distribution package.
pub(super) fn build_kernel(root: &Path) -> Result<(), String> {
    guest_programs::install_missing_programs(&NEEDED)?;
    println!("lab: fetching {PACKAGE} of {SUITE}");
    let packages = DistroPackages::open(&root.join("apt"), SUITE)?;
    let package = packages.dependency_with_prefix(PACKAGE, "linux-source-")?.ok_or_else(|| {
        format!("{PACKAGE} of {SUITE}: needs no linux-source-*, expected that of a version")
    })?;
    packages.unpack(&package, root)?;
    let tree = root.join(&package);
    let archive = root.join(format!("usr/src/{package}.tar.xz"));
    run_program(Command::new("tar").arg("-C").arg(root).arg("-xf").arg(&archive))?;
    let options = options_path(root);
    write_file(&options, OPTIONS.as_bytes())?;
    let make = || {
        let mut make = Command::new("make");
        make.arg("-s").arg("-C").arg(&tree);
        make
    };
    run_program(make().env("KCONFIG_ALLCONFIG", &options).arg("allnoconfig"))?;
    check_options(&tree)?;
    let version = run_program(make().arg("kernelrelease"))?;
    println!("lab: building Linux {}", version.trim());
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    run_program(make().arg(format!("-j{jobs}")).args(["bzImage", "modules"]))?;
    let place = format!("INSTALL_MOD_PATH={}", root.display());
    run_program(make().arg(place).args(["INSTALL_MOD_STRIP=1", "modules_install"]))?;
    let image = root.join(format!("boot/vmlinuz-{}", version.trim()));
    make_parent(&image)?;
    std::fs::copy(tree.join("arch/x86/boot/bzImage"), &image)
        .map_err(|why| format!("copy the kernel to {}: {why}", image.display()))?;
    // The build tree is large.
    _ = std::fs::remove_dir_all(tree);
    _ = std::fs::remove_file(archive);
    Ok(())
}

/// Checks that the configuration has all options: Kconfig drops an option with an unmet dependency
/// silently.
fn check_options(tree: &Path) -> Result<(), String> {
    let path = tree.join(".config");
    let made =
        std::fs::read_to_string(&path).map_err(|why| format!("read {}: {why}", path.display()))?;
    match missing_option(OPTIONS, &made) {
        Some(option) => Err(format!("{}: lacks {option}, expected it", path.display())),
        None => Ok(()),
    }
}

/// The first option that is missing.
fn missing_option<'a>(asked: &'a str, made: &str) -> Option<&'a str> {
    let options = asked.lines().filter(|line| line.starts_with("CONFIG_"));
    options.into_iter().find(|option| !made.lines().any(|line| line == *option))
}

#[cfg(test)]
mod tests {
    use super::{OPTIONS, is_kernel_current, missing_option, options_path};

    #[test]
    fn kernel_with_other_options_is_rebuilt() {
        let root = tempfile::tempdir().unwrap();
        assert!(!is_kernel_current(root.path()), "nothing was made");
        std::fs::write(options_path(root.path()), OPTIONS).unwrap();
        assert!(is_kernel_current(root.path()));
        std::fs::write(options_path(root.path()), "CONFIG_OTHER=y\n").unwrap();
        assert!(!is_kernel_current(root.path()));
    }

    #[test]
    fn option_with_another_value_is_missing() {
        let made = "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=m\nCONFIG_DD=y\n";
        assert_eq!(missing_option("# The first.\nCONFIG_A=y\nCONFIG_C=m\n", made), None);
        assert_eq!(missing_option("CONFIG_A=y\nCONFIG_B=y\n", made), Some("CONFIG_B=y"));
        assert_eq!(missing_option("CONFIG_C=y\n", made), Some("CONFIG_C=y"));
        assert_eq!(missing_option("CONFIG_D=y\n", made), Some("CONFIG_D=y"));
    }
}
