//! Programs of the kernel's suite that this machine may lack. They need a newer C library, so guests
//! get them with that library and its loader, in a directory of their own.

use std::io::Write;
use std::path::{Path, PathBuf};

use super::distro_packages::DistroPackages;
use super::{read_file, write_file};
use crate::lab::cpio_archive::CpioArchive;

/// Programs with their packages.
const PROGRAMS: [(&str, &str); 1] = [("blkpr", "util-linux-extra")];
/// Package of the C library.
const C_LIBRARY: &str = "libc6";
const LOADER: &str = "ld-linux-x86-64.so.2";
const LIBRARIES: [&str; 2] = [LOADER, "libc.so.6"];
/// Directory in the guest.
const PLACE: &str = "lab/newer";

/// Unpacked programs with their own C library.
#[derive(Debug)]
pub(super) struct NewerUserland {
    root: PathBuf,
}

impl NewerUserland {
    /// Finds the programs in `room`, or downloads them from a suite.
    pub(super) fn find_or_fetch(room: &Path, suite: &str) -> Result<Self, String> {
        let root = room.join(format!("{suite}-programs"));
        if !root.join("unpacked").exists() {
            fetch_packages(&root, suite)?;
        }
        Ok(Self { root })
    }

    /// Adds the programs to an archive, each with a script that starts it through its own loader.
    pub(super) fn pack_files<W: Write>(&self, archive: &mut CpioArchive<W>) -> Result<(), String> {
        let about = |why| format!("pack programs: {why}");
        let libraries = self.root.join("usr/lib/x86_64-linux-gnu");
        for library in LIBRARIES {
            let bytes = read_file(&libraries.join(library))?;
            archive.add_file(&format!("{PLACE}/{library}"), &bytes).map_err(about)?;
        }
        for (program, _) in PROGRAMS {
            let bytes = read_file(&self.root.join("usr/sbin").join(program))?;
            archive.add_file(&format!("{PLACE}/{program}"), &bytes).map_err(about)?;
            archive
                .add_file(&format!("bin/{program}"), starter_script(program).as_bytes())
                .map_err(about)?;
        }
        Ok(())
    }
}

fn starter_script(program: &str) -> String {
    format!("#!/bin/sh\nexec /{PLACE}/{LOADER} --library-path /{PLACE} /{PLACE}/{program} \"$@\"\n")
}

fn fetch_packages(root: &Path, suite: &str) -> Result<(), String> {
    // Removes the remains of an incomplete attempt.
    _ = std::fs::remove_dir_all(root);
    let packages = DistroPackages::open(&root.join("apt"), suite)?;
    for package in [C_LIBRARY].into_iter().chain(PROGRAMS.map(|(_, package)| package)) {
        println!("lab: fetching {package} of {suite}");
        packages.unpack(package, root)?;
    }
    write_file(&root.join("unpacked"), b"")
}
