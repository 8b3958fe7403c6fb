//! Programs of this machine: those that build and run guests, and those that are copied into guests
//! with their shared libraries.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{program_version, read_file, run_program};
use crate::lab::cpio_archive::CpioArchive;

/// Required programs with their packages.
const NEEDED: [(&str, &str); 10] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("busybox", "busybox-static"),
    ("depmod", "kmod"),
    ("modprobe", "kmod"),
    ("xz", "xz-utils"),
    ("dpkg", "dpkg"),
    ("fio", "fio"),
    ("nvme", "nvme-cli"),
    ("mkfs.ext4", "e2fsprogs"),
    ("e2fsck", "e2fsprogs"),
];
/// Programs copied into guests, besides busybox.
const IN_GUESTS: [&str; 4] = ["fio", "nvme", "mkfs.ext4", "e2fsck"];

/// Programs found.
#[derive(Debug)]
pub(crate) struct GuestPrograms {
    busybox: PathBuf,
    in_guests: Vec<PathBuf>,
}

impl GuestPrograms {
    /// Finds the programs; installs missing ones if it may.
    pub(super) fn find_programs() -> Result<Self, String> {
        install_missing_programs(&NEEDED)?;
        let busybox = find_required("busybox")?;
        let in_guests =
            IN_GUESTS.iter().map(|name| find_required(name)).collect::<Result<_, _>>()?;
        Ok(Self { busybox, in_guests })
    }

    /// Versions of the programs in guests.
    pub(super) fn program_versions(&self) -> String {
        let asked = [("fio", "--version"), ("nvme", "version"), ("mkfs.ext4", "-V")];
        let programs = self.in_guests.iter().filter_map(|program| {
            let (_, how) = asked.iter().find(|(name, _)| program.ends_with(name))?;
            program_version(Command::new(program).arg(how))
        });
        let busybox = program_version(&mut Command::new(&self.busybox));
        programs.chain(busybox).collect::<Vec<_>>().join(", ")
    }

    /// Adds the programs and `tenmil` to an archive.
    pub(super) fn pack_programs<W: Write>(
        &self,
        tenmil: &Path,
        further: &[PathBuf],
        archive: &mut CpioArchive<W>,
    ) -> Result<(), String> {
        let about = |why| format!("pack programs: {why}");
        archive.add_file("bin/busybox", &read_file(&self.busybox)?).map_err(about)?;
        for applet in run_program(Command::new(&self.busybox).arg("--list"))?.lines() {
            let is_further = further.iter().any(|program| program.ends_with(applet));
            if applet != "busybox" && !IN_GUESTS.contains(&applet) && !is_further {
                archive.add_symlink(&format!("bin/{applet}"), "busybox").map_err(about)?;
            }
        }
        archive.add_symlink("sbin", "bin").map_err(about)?;
        archive.add_file("bin/tenmil", &read_file(tenmil)?).map_err(about)?;
        // `ldd` fails for a static program.
        let mut libraries: BTreeSet<_> =
            needed_libraries(tenmil).unwrap_or_default().into_iter().collect();
        for program in self.in_guests.iter().chain(further) {
            let name = program.file_name().unwrap_or_default().to_string_lossy();
            archive.add_file(&format!("bin/{name}"), &read_file(program)?).map_err(about)?;
            libraries.extend(needed_libraries(program).unwrap_or_default());
        }
        for library in libraries {
            archive.add_file(&library, &read_file(Path::new(&library))?).map_err(about)?;
        }
        Ok(())
    }
}

/// The shared libraries of a program, by path.
fn needed_libraries(program: &Path) -> Result<Vec<String>, String> {
    let said = run_program(Command::new("ldd").arg(program))?;
    let path =
        |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(str::to_owned);
    Ok(said.lines().filter_map(path).collect())
}

/// Installs those of the programs that are missing, if it may; each has the package that provides it.
pub(super) fn install_missing_programs(programs: &[(&str, &'static str)]) -> Result<(), String> {
    let missing = programs.iter().filter(|(program, _)| find_program(program).is_none());
    let missing: BTreeSet<_> = missing.map(|(_, package)| *package).collect();
    if missing.is_empty() {
        return Ok(());
    }
    install_packages(&missing.into_iter().collect::<Vec<_>>())
}

fn install_packages(packages: &[&str]) -> Result<(), String> {
    let line = format!("apt-get install -y --no-install-recommends {}", packages.join(" "));
    if run_program(Command::new("id").arg("-u"))?.trim() != "0" {
        return Err(format!("missing {}: as root, run: {line}", packages.join(", ")));
    }
    println!("lab: {line}");
    let apt = |arguments: &mut dyn Iterator<Item = &str>| {
        let mut command = Command::new("apt-get");
        run_program(command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive")).map(drop)
    };
    let install = || apt(&mut line.split(' ').skip(1));
    // A fresh machine may have no package lists yet.
    install().or_else(|_| apt(&mut ["update"].into_iter()).and_then(|()| install()))
}

pub(super) fn find_required(name: &str) -> Result<PathBuf, String> {
    find_program(name).ok_or_else(|| format!("{name}: in no directory of PATH, /usr/sbin or /sbin"))
}

fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let sbin = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(sbin).map(|at| at.join(name)).find(|at| at.is_file())
}
