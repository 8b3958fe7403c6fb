//! Programs of this machine: those that build and run guests, and those that are copied into guests
//! with their shared libraries.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{read, run, version};
use crate::lab::archive::Archive;

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
pub(crate) struct Programs {
    busybox: PathBuf,
    in_guests: Vec<PathBuf>,
}

impl Programs {
    /// Finds the programs; installs missing ones if it may.
    pub(super) fn find() -> Result<Self, String> {
        need(&NEEDED)?;
        let busybox = must_find("busybox")?;
        let in_guests = IN_GUESTS.iter().map(|name| must_find(name)).collect::<Result<_, _>>()?;
        Ok(Self { busybox, in_guests })
    }

    /// Versions of the programs in guests.
    pub(super) fn versions(&self) -> String {
        let asked = [("fio", "--version"), ("nvme", "version"), ("mkfs.ext4", "-V")];
        let programs = self.in_guests.iter().filter_map(|program| {
            let (_, how) = asked.iter().find(|(name, _)| program.ends_with(name))?;
            version(Command::new(program).arg(how))
        });
        let busybox = version(&mut Command::new(&self.busybox));
        programs.chain(busybox).collect::<Vec<_>>().join(", ")
    }

    /// Adds the programs and `tenmil` to an archive.
    pub(super) fn pack<W: Write>(
        &self,
        tenmil: &Path,
        archive: &mut Archive<W>,
    ) -> Result<(), String> {
        let about = |why| format!("pack programs: {why}");
        archive.file("bin/busybox", &read(&self.busybox)?).map_err(about)?;
        for applet in run(Command::new(&self.busybox).arg("--list"))?.lines() {
            if applet != "busybox" && !IN_GUESTS.contains(&applet) {
                archive.link(&format!("bin/{applet}"), "busybox").map_err(about)?;
            }
        }
        archive.link("sbin", "bin").map_err(about)?;
        archive.file("bin/tenmil", &read(tenmil)?).map_err(about)?;
        // `ldd` fails for a static program.
        let mut libraries: BTreeSet<_> = needs(tenmil).unwrap_or_default().into_iter().collect();
        for program in &self.in_guests {
            let name = program.file_name().unwrap_or_default().to_string_lossy();
            archive.file(&format!("bin/{name}"), &read(program)?).map_err(about)?;
            libraries.extend(needs(program)?);
        }
        for library in libraries {
            archive.file(&library, &read(Path::new(&library))?).map_err(about)?;
        }
        Ok(())
    }
}

/// The shared libraries of a program, by path.
fn needs(program: &Path) -> Result<Vec<String>, String> {
    let said = run(Command::new("ldd").arg(program))?;
    let path =
        |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(str::to_owned);
    Ok(said.lines().filter_map(path).collect())
}

/// Installs those of the programs that are missing, if it may; each has the package that provides it.
pub(super) fn need(programs: &[(&str, &'static str)]) -> Result<(), String> {
    let missing = programs.iter().filter(|(program, _)| find(program).is_none());
    let missing: BTreeSet<_> = missing.map(|(_, package)| *package).collect();
    if missing.is_empty() {
        return Ok(());
    }
    install(&missing.into_iter().collect::<Vec<_>>())
}

fn install(packages: &[&str]) -> Result<(), String> {
    let line = format!("apt-get install -y --no-install-recommends {}", packages.join(" "));
    if run(Command::new("id").arg("-u"))?.trim() != "0" {
        return Err(format!("missing {}: as root, run: {line}", packages.join(", ")));
    }
    println!("lab: {line}");
    let apt = |arguments: &mut dyn Iterator<Item = &str>| {
        let mut command = Command::new("apt-get");
        run(command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive")).map(drop)
    };
    let install = || apt(&mut line.split(' ').skip(1));
    // A fresh machine may have no package lists yet.
    install().or_else(|_| apt(&mut ["update"].into_iter()).and_then(|()| install()))
}

fn must_find(name: &str) -> Result<PathBuf, String> {
    find(name).ok_or_else(|| format!("{name}: in no directory of PATH, /usr/sbin or /sbin"))
}

fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let sbin = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(sbin).map(|at| at.join(name)).find(|at| at.is_file())
}
