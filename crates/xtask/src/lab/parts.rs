//! What a guest is made of, and where it comes from.

mod binary;
mod built;
mod emulator;
mod kernel;
mod newer;
mod programs;
mod suite;

use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) use emulator::Emulator;
pub(crate) use kernel::{BUILT, Kernel};
use newer::Newer;
use programs::Programs;

use super::archive::Archive;
use super::scenario::{BEGINNING, INIT, SCENARIOS};

/// Everything that a guest is made of.
#[derive(Debug)]
pub(crate) struct Parts {
    /// The suites that kernels come from, and the kernel of each.
    kernels: Vec<(String, Kernel)>,
    programs: Programs,
    newer: Newer,
    /// Our own.
    pub(crate) tenmil: PathBuf,
}

impl Parts {
    /// Finds what is there, and fetches or builds what is not; says so while it does.
    /// Programs are those that go with the first of `suites`.
    pub(crate) fn gather(
        room: &Path,
        suites: &[&str],
        tenmil: Option<&Path>,
    ) -> Result<Self, String> {
        let programs = Programs::find()?;
        let kernel = |suite: &&str| Ok((suite.to_string(), Kernel::find(room, suite)?));
        let kernels: Vec<_> = suites.iter().map(kernel).collect::<Result<_, String>>()?;
        let first = suites.first().ok_or("no suite was named, expected one for kernels")?;
        let newer = Newer::find(room, first)?;
        let tenmil = match tenmil {
            Some(path) => path.to_owned(),
            None => binary::build()?,
        };
        Ok(Self { kernels, programs, newer, tenmil })
    }

    /// The kernel of a suite that was named.
    pub(crate) fn kernel(&self, suite: &str) -> Result<&Kernel, String> {
        let found = self.kernels.iter().find(|(of, _)| of == suite);
        found.map(|(_, kernel)| kernel).ok_or_else(|| format!("no kernel of {suite} was fetched"))
    }

    /// Writes the initramfs for the kernel of a suite; how many bytes it has.
    pub(crate) fn pack(&self, suite: &str, image: &Path) -> Result<usize, String> {
        let about = |why| format!("write {}: {why}", image.display());
        let file = File::create(image).map_err(about)?;
        let mut archive = Archive::new(BufWriter::new(file));
        for directory in ["dev", "proc", "sys", "tmp", "run", "mnt", "root", "etc", "lab"] {
            archive.directory(directory).map_err(about)?;
        }
        archive.file("init", INIT.as_bytes()).map_err(about)?;
        archive.file("lab/lab.sh", BEGINNING.as_bytes()).map_err(about)?;
        for scenario in &SCENARIOS {
            let path = format!("lab/{}.sh", scenario.name);
            archive.file(&path, scenario.script.as_bytes()).map_err(about)?;
        }
        self.programs.pack(&self.tenmil, &mut archive)?;
        self.newer.pack(&mut archive)?;
        self.kernel(suite)?.pack(&mut archive)?;
        archive.end().map_err(about)
    }
}

/// Runs a program to its end; what it said.
fn run(command: &mut Command) -> Result<String, String> {
    let name = format!("{:?}", command.get_program());
    let output = command.output().map_err(|why| format!("start {name}: {why}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let complaint = String::from_utf8_lossy(&output.stderr);
    let last: Vec<_> = complaint.lines().rev().take(3).collect();
    Err(format!("{name}: {}: {}", output.status, last.join("; ")))
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|why| format!("read {}: {why}", path.display()))
}

fn make_parent(path: &Path) -> Result<(), String> {
    let parent = path.parent().unwrap_or(path);
    std::fs::create_dir_all(parent).map_err(|why| format!("make {}: {why}", parent.display()))
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), String> {
    make_parent(path)?;
    std::fs::write(path, bytes).map_err(|why| format!("write {}: {why}", path.display()))
}
