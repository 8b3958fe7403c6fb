//! A kernel of the distribution's source, with what none of its own kernels has: VFIO without an IOMMU,
//! and iommufd. It has little beside what guests need, so it is made in some minutes.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::suite::Suite;
use super::{make_parent, programs, run, write};

/// What its options are (`allnoconfig` and these).
const OPTIONS: &str = include_str!("kernel.config");
/// Whose source it is.
const SUITE: &str = "trixie";
const PACKAGE: &str = "linux-source";
/// What making it needs, and the package that brings each.
const NEEDED: [(&str, &str); 6] = [
    ("gcc", "gcc"),
    ("make", "make"),
    ("flex", "flex"),
    ("bison", "bison"),
    ("bc", "bc"),
    ("tar", "tar"),
];

/// Whether what was made in `root` was made with these options.
pub(super) fn is_current(root: &Path) -> bool {
    std::fs::read_to_string(options_in(root)).is_ok_and(|options| options == OPTIONS)
}

fn options_in(root: &Path) -> PathBuf {
    root.join("kernel.config")
}

/// Makes kernel and modules in `root`, as a package of the distribution would have them there.
pub(super) fn make(root: &Path) -> Result<(), String> {
    programs::need(&NEEDED)?;
    println!("lab: fetching {PACKAGE} of {SUITE}");
    let packages = Suite::open(&root.join("apt"), SUITE)?;
    let package = packages.needs(PACKAGE, "linux-source-")?.ok_or_else(|| {
        format!("{PACKAGE} of {SUITE}: needs no linux-source-*, expected that of a version")
    })?;
    packages.unpack(&package, root)?;
    let tree = root.join(&package);
    let archive = root.join(format!("usr/src/{package}.tar.xz"));
    run(Command::new("tar").arg("-C").arg(root).arg("-xf").arg(&archive))?;
    let options = options_in(root);
    write(&options, OPTIONS.as_bytes())?;
    let make = || {
        let mut make = Command::new("make");
        make.arg("-s").arg("-C").arg(&tree);
        make
    };
    run(make().env("KCONFIG_ALLCONFIG", &options).arg("allnoconfig"))?;
    check_options(&tree)?;
    let version = run(make().arg("kernelrelease"))?;
    println!("lab: building Linux {}", version.trim());
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    run(make().arg(format!("-j{jobs}")).args(["bzImage", "modules"]))?;
    let place = format!("INSTALL_MOD_PATH={}", root.display());
    run(make().arg(place).args(["INSTALL_MOD_STRIP=1", "modules_install"]))?;
    let image = root.join(format!("boot/vmlinuz-{}", version.trim()));
    make_parent(&image)?;
    std::fs::copy(tree.join("arch/x86/boot/bzImage"), &image)
        .map_err(|why| format!("copy the kernel to {}: {why}", image.display()))?;
    // What it was made of is large.
    _ = std::fs::remove_dir_all(tree);
    _ = std::fs::remove_file(archive);
    Ok(())
}

/// Whether the kernel will have what was asked for: an option that another one stands in the way of is
/// left out without a word.
fn check_options(tree: &Path) -> Result<(), String> {
    let path = tree.join(".config");
    let made =
        std::fs::read_to_string(&path).map_err(|why| format!("read {}: {why}", path.display()))?;
    match missing(OPTIONS, &made) {
        Some(option) => Err(format!("{}: lacks {option}, expected it", path.display())),
        None => Ok(()),
    }
}

/// The first option that was asked for and is not there.
fn missing<'a>(asked: &'a str, made: &str) -> Option<&'a str> {
    let options = asked.lines().filter(|line| line.starts_with("CONFIG_"));
    options.into_iter().find(|option| !made.lines().any(|line| line == *option))
}

#[cfg(test)]
mod tests {
    use super::{OPTIONS, is_current, missing, options_in};

    #[test]
    fn what_was_made_with_other_options_is_made_again() {
        let root = tempfile::tempdir().unwrap();
        assert!(!is_current(root.path()), "nothing was made");
        std::fs::write(options_in(root.path()), OPTIONS).unwrap();
        assert!(is_current(root.path()));
        std::fs::write(options_in(root.path()), "CONFIG_OTHER=y\n").unwrap();
        assert!(!is_current(root.path()));
    }

    #[test]
    fn an_option_that_is_not_as_asked_is_missed() {
        let made = "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=m\nCONFIG_DD=y\n";
        assert_eq!(missing("# The first.\nCONFIG_A=y\nCONFIG_C=m\n", made), None);
        assert_eq!(missing("CONFIG_A=y\nCONFIG_B=y\n", made), Some("CONFIG_B=y"));
        assert_eq!(missing("CONFIG_C=y\n", made), Some("CONFIG_C=y"));
        assert_eq!(missing("CONFIG_D=y\n", made), Some("CONFIG_D=y"));
    }
}
