//! Programs of a suite that this machine lacks or has in an older version. They need the C library of
//! that suite, so guests get them with their libraries and their loader, in a directory of their own.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::distro_packages::DistroPackages;
use super::{read_file, run_program, write_file};
use crate::lab::cpio_archive::CpioArchive;

/// Programs that are downloaded together.
#[derive(Debug)]
pub(super) struct ProgramSet {
    /// Suffix of the directory of the unpacked packages, and directory in the guest below `lab`.
    name: &'static str,
    /// Packages; their dependencies are added.
    packages: &'static [&'static str],
    /// Paths of the programs in the packages.
    programs: &'static [&'static str],
    /// Directory in the guest of the scripts that start them.
    starters: &'static str,
}

/// Reservations by the kernel's ioctls.
pub(super) const RESERVATIONS: ProgramSet = ProgramSet {
    name: "programs",
    packages: &["util-linux-extra"],
    programs: &["usr/sbin/blkpr"],
    starters: "bin",
};

/// TLS and authentication: the program that makes the kernel's TLS handshakes, the one that shows its
/// keyrings, and an nvme-cli that knows both. Its `nvme` is not the default one of a guest.
pub(super) const SECURE: ProgramSet = ProgramSet {
    name: "secure",
    packages: &["ktls-utils", "keyutils", "nvme-cli"],
    programs: &["usr/sbin/tlshd", "usr/bin/keyctl", "usr/sbin/nvme"],
    starters: "lab/secure/bin",
};

/// A proxy that replaces bytes of connections. Not every suite has it.
pub(super) const PROXY: ProgramSet = ProgramSet {
    name: "proxy",
    packages: &["netsed"],
    programs: &["usr/bin/netsed"],
    starters: "lab/secure/bin",
};

/// File with the names of the packages, written when all are unpacked.
const UNPACKED: &str = "unpacked";
const LOADER: &str = "ld-linux-x86-64.so.2";
/// Directory of the libraries in the packages.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

/// Unpacked programs with their libraries.
#[derive(Debug)]
pub(super) struct SuitePrograms {
    set: &'static ProgramSet,
    root: PathBuf,
}

impl SuitePrograms {
    /// Finds the programs in `room`, or downloads them from a suite.
    pub(super) fn find_or_fetch(
        set: &'static ProgramSet,
        room: &Path,
        suite: &str,
    ) -> Result<Self, String> {
        let root = room.join(format!("{suite}-{}", set.name));
        let unpacked = std::fs::read_to_string(root.join(UNPACKED)).unwrap_or_default();
        if unpacked != set.packages.join(" ") {
            fetch_packages(set, &root, suite)?;
        }
        Ok(Self { set, root })
    }

    /// Name of the set.
    pub(super) fn name(&self) -> &'static str {
        self.set.name
    }

    /// Adds the programs to an archive, each with a script that starts it through its own loader.
    pub(super) fn pack_files<W: Write>(&self, archive: &mut CpioArchive<W>) -> Result<(), String> {
        let about = |why| format!("pack programs: {why}");
        let place = format!("lab/{}", self.set.name);
        let libraries = self.root.join(LIBRARIES);
        let mut files = BTreeSet::from([libraries.join(LOADER)]);
        for program in self.set.programs {
            let path = self.root.join(program);
            files.extend(self.libraries_of(&path)?);
            files.insert(path);
            let name = file_name(program);
            let starter = starter_script(&place, name);
            archive
                .add_file(&format!("{}/{name}", self.set.starters), starter.as_bytes())
                .map_err(about)?;
        }
        for file in files {
            let name = file.to_string_lossy();
            archive
                .add_file(&format!("{place}/{}", file_name(&name)), &read_file(&file)?)
                .map_err(about)?;
        }
        Ok(())
    }

    /// The shared libraries of a program, as the loader of its suite finds them.
    fn libraries_of(&self, program: &Path) -> Result<Vec<PathBuf>, String> {
        let at = self.root.join(LIBRARIES);
        let said = run_program(
            Command::new(at.join(LOADER)).arg("--library-path").arg(&at).arg("--list").arg(program),
        )?;
        listed_libraries(&said, &at)
            .map_err(|library| format!("{}: no package has {library}", program.display()))
    }
}

/// The libraries in the output of the loader (`NAME => PATH (ADDRESS)`), or the name of the first one
/// that is not in `at`.
fn listed_libraries(said: &str, at: &Path) -> Result<Vec<PathBuf>, String> {
    let found = said.lines().filter_map(|line| line.split_once(" => "));
    found
        .map(|(name, place)| {
            let path = PathBuf::from(place.split_whitespace().next().unwrap_or_default());
            if path.starts_with(at) { Ok(path) } else { Err(name.trim().to_owned()) }
        })
        .collect()
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn starter_script(place: &str, program: &str) -> String {
    format!("#!/bin/sh\nexec /{place}/{LOADER} --library-path /{place} /{place}/{program} \"$@\"\n")
}

fn fetch_packages(set: &ProgramSet, root: &Path, suite: &str) -> Result<(), String> {
    // Removes the remains of an incomplete attempt.
    _ = std::fs::remove_dir_all(root);
    println!("lab: fetching {} of {suite}", set.packages.join(", "));
    DistroPackages::open(&root.join("apt"), suite)?.unpack_whole(set.packages, root)?;
    write_file(&root.join(UNPACKED), set.packages.join(" ").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_of_the_suite_are_found_and_others_refused_by_name() {
        let at = Path::new("/room/forky-secure/usr/lib/x86_64-linux-gnu");
        let said = "\tlinux-vdso.so.1 (0x7f)\n\
             \tlibc.so.6 => /room/forky-secure/usr/lib/x86_64-linux-gnu/libc.so.6 (0x7f)\n";
        assert_eq!(listed_libraries(said, at), Ok(vec![at.join("libc.so.6")]));
        for place in ["/lib/x86_64-linux-gnu/libz.so.1 (0x7f)", "not found"] {
            let said = format!("{said}\tlibz.so.1 => {place}\n");
            assert_eq!(listed_libraries(&said, at), Err("libz.so.1".to_owned()));
        }
    }

    #[test]
    fn programs_start_through_the_loader_beside_them() {
        assert_eq!(
            starter_script("lab/secure", file_name("usr/sbin/tlshd")),
            "#!/bin/sh\nexec /lab/secure/ld-linux-x86-64.so.2 --library-path /lab/secure \
             /lab/secure/tlshd \"$@\"\n"
        );
    }
}
