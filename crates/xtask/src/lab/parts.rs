//! Components of the guests: kernel, initramfs and programs.

mod binary;
mod built;
mod distro_packages;
mod emulator;
mod kernel;
mod newer;
mod programs;

use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) use emulator::Emulator;
pub(crate) use kernel::BUILT;
use kernel::Kernel;
use newer::NewerUserland;
use programs::Programs;

use super::archive::Archive;
use super::scenario::{BEGINNING, INIT, SCENARIOS, Scenario};
use super::totals::ScenarioError;

/// Components of all guests. Those that only some scenarios need are prepared on first use.
#[derive(Debug)]
pub(crate) struct GuestImages {
    room: PathBuf,
    /// Suite of the kernel, if a scenario names no other.
    suite: String,
    programs: Programs,
    /// Newer programs of that suite, or why they are unavailable.
    newer: Result<NewerUserland, String>,
    /// Path of the static tenmil.
    tenmil: PathBuf,
    /// Images prepared so far, by suite.
    images: Vec<(String, Result<Image, String>)>,
}

/// Kernel and initramfs of a guest, and the program of its companion.
#[derive(Clone, Debug)]
pub(crate) struct Image {
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: PathBuf,
    pub(crate) tenmil: PathBuf,
}

impl GuestImages {
    /// Finds, downloads or builds the components that all guests need, and reports progress.
    pub(crate) fn gather(
        room: &Path,
        suite: &str,
        tenmil: Option<&Path>,
    ) -> Result<Self, ScenarioError> {
        let programs = Programs::find()?;
        let newer = NewerUserland::find(room, suite);
        let tenmil = match tenmil {
            Some(path) => path.to_owned(),
            None => binary::build()?,
        };
        let (room, suite) = (room.to_owned(), suite.to_owned());
        Ok(Self { room, suite, programs, newer, tenmil, images: Vec::new() })
    }

    /// Versions of the programs of this machine that take part.
    pub(crate) fn versions(&self) -> String {
        self.programs.versions()
    }

    /// The image of a scenario.
    pub(crate) fn image(&mut self, scenario: &Scenario) -> Result<Image, String> {
        if let (true, Err(why)) = (scenario.needs_newer, &self.newer) {
            return Err(why.clone());
        }
        let suite = scenario.suite.unwrap_or(&self.suite).to_owned();
        if let Some((_, known)) = self.images.iter().find(|(of, _)| *of == suite) {
            return known.clone();
        }
        let made = self.make(&suite);
        self.images.push((suite, made.clone()));
        made
    }

    fn make(&self, suite: &str) -> Result<Image, String> {
        let kernel = Kernel::find(&self.room, suite)?;
        let initramfs = self.room.join(format!("initramfs-{suite}"));
        let bytes = self.pack(&kernel, &initramfs)?;
        println!("  note: Linux {}, initramfs of {} MiB", kernel.version, bytes >> 20);
        Ok(Image { kernel: kernel.image, initramfs, tenmil: self.tenmil.clone() })
    }

    /// Writes the initramfs of all scenarios for a kernel; returns its size in bytes.
    fn pack(&self, kernel: &Kernel, image: &Path) -> Result<usize, String> {
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
        if let Ok(newer) = &self.newer {
            newer.pack(&mut archive)?;
        }
        kernel.pack(&mut archive)?;
        archive.end().map_err(about)
    }
}

/// Runs a program to its end and returns its output.
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

/// First line of the version output of a program, on standard output or standard error.
fn version(command: &mut Command) -> Option<String> {
    let output = command.output().ok()?;
    let said = [output.stdout, output.stderr].concat();
    String::from_utf8_lossy(&said).lines().next().map(|line| line.trim().to_owned())
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
