//! QEMU: the installed one, or a newer one unpacked with its own libraries.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::distro_packages::DistroPackages;
use super::{program_version, write_file};

/// Suite whose QEMU has a vfio-user client.
const SUITE: &str = "forky";
const PACKAGE: &str = "qemu-system-x86";
const PROGRAM: &str = "qemu-system-x86_64";

/// Selection of the QEMU program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QemuChoice {
    /// The installed QEMU.
    Installed,
    /// A QEMU with a vfio-user client.
    Newer,
}

impl QemuChoice {
    /// The command that starts it.
    pub(crate) fn command(self, room: &Path) -> Result<Command, String> {
        match self {
            Self::Installed => Ok(Command::new(PROGRAM)),
            Self::Newer => newer_emulator(&room.join("qemu")),
        }
    }

    /// Its version.
    pub(crate) fn version(self, room: &Path) -> Option<String> {
        program_version(self.command(room).ok()?.arg("--version"))
    }
}

fn newer_emulator(root: &Path) -> Result<Command, String> {
    let unpacked = root.join("unpacked");
    if !unpacked.exists() {
        println!("lab: fetching {PACKAGE} of {SUITE}");
        // Removes the remains of an incomplete attempt.
        _ = std::fs::remove_dir_all(root);
        DistroPackages::open(&root.join("apt"), SUITE)?.unpack_whole(&[PACKAGE], root)?;
        write_file(&unpacked, b"")?;
    }
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    let mut command = Command::new(first_available(root, &["usr/lib64", "lib64"]));
    command.arg("--library-path").arg(libraries).arg(root.join("usr/bin").join(PROGRAM));
    for firmware in ["qemu", "seabios"] {
        command.arg("-L").arg(root.join("usr/share").join(firmware));
    }
    Ok(command)
}

/// The first of these directories that holds the dynamic loader.
fn first_available(root: &Path, directories: &[&str]) -> PathBuf {
    let loader = |directory: &&str| root.join(directory).join("ld-linux-x86-64.so.2");
    directories.iter().map(loader).find(|path| path.exists()).unwrap_or_default()
}
