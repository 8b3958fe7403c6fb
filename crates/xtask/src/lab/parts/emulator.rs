//! QEMU: that of this system, or a newer one that lies unpacked beside its own libraries.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::suite::Suite;
use super::{version, write};

/// The suite whose QEMU has a client of vfio-user.
const SUITE: &str = "forky";
const PACKAGE: &str = "qemu-system-x86";
const PROGRAM: &str = "qemu-system-x86_64";

/// Which QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Emulator {
    /// The one that is installed.
    Installed,
    /// One that has a client of vfio-user.
    Newer,
}

impl Emulator {
    /// How it is started.
    pub(crate) fn command(self, room: &Path) -> Result<Command, String> {
        match self {
            Self::Installed => Ok(Command::new(PROGRAM)),
            Self::Newer => newer(&room.join("qemu")),
        }
    }

    /// What it says of its version.
    pub(crate) fn version(self, room: &Path) -> Option<String> {
        version(self.command(room).ok()?.arg("--version"))
    }
}

fn newer(root: &Path) -> Result<Command, String> {
    let unpacked = root.join("unpacked");
    if !unpacked.exists() {
        println!("lab: fetching {PACKAGE} of {SUITE}");
        // What an earlier try left is of no use.
        _ = std::fs::remove_dir_all(root);
        Suite::open(&root.join("apt"), SUITE)?.unpack_whole(PACKAGE, root)?;
        write(&unpacked, b"")?;
    }
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    let mut command = Command::new(first_of(root, &["usr/lib64", "lib64"]));
    command.arg("--library-path").arg(libraries).arg(root.join("usr/bin").join(PROGRAM));
    for firmware in ["qemu", "seabios"] {
        command.arg("-L").arg(root.join("usr/share").join(firmware));
    }
    Ok(command)
}

/// The loader, in whichever of these directories it is.
fn first_of(root: &Path, directories: &[&str]) -> PathBuf {
    let loader = |directory: &&str| root.join(directory).join("ld-linux-x86-64.so.2");
    directories.iter().map(loader).find(|path| path.exists()).unwrap_or_default()
}
