//! Components of the guests: kernel, initramfs and programs.

mod built_kernel;
mod distro_packages;
mod guest_kernel;
mod guest_programs;
mod qemu_choice;
mod static_binary;
mod suite_programs;

use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) use guest_kernel::BUILT;
use guest_kernel::GuestKernel;
use guest_programs::GuestPrograms;
pub(crate) use qemu_choice::QemuChoice;
use suite_programs::{PROXY, RESERVATIONS, SECURE, SuitePrograms};

use super::check_totals::ScenarioError;
use super::cpio_archive::CpioArchive;
use super::scenario::{BEGINNING, INIT, LabScenario, SCENARIOS};

/// Components of all guests. Those that only some scenarios need are prepared on first use.
#[derive(Debug)]
pub(crate) struct GuestImages {
    room: PathBuf,
    /// Suite of the kernel, if a scenario names no other.
    suite: String,
    programs: GuestPrograms,
    /// Newer programs of that suite, or why they are unavailable.
    newer: Result<SuitePrograms, String>,
    /// Path of tenmil.
    tenmil: PathBuf,
    /// Path of the tenmil of scenarios with TLS.
    secure_tenmil: PathBuf,
    /// Images prepared so far.
    images: Vec<(ImageKind, Result<GuestImage, String>)>,
}

/// What distinguishes images.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ImageKind {
    /// Suite of the kernel.
    suite: String,
    /// Whether it has the programs for TLS and authentication, of the same suite.
    has_secure: bool,
    /// Whether it has the proxy.
    has_proxy: bool,
    /// Whether it has the CSI driver.
    has_csi: bool,
}

/// Kernel and initramfs of a guest, and the program of its companion.
#[derive(Clone, Debug)]
pub(crate) struct GuestImage {
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: PathBuf,
    pub(crate) tenmil: PathBuf,
}

impl GuestImages {
    /// Finds, downloads or builds the components that all guests need, and reports progress. The paths of
    /// `tenmil` are those of the program and of one with TLS, if they need not be built.
    pub(crate) fn prepare(
        room: &Path,
        suite: &str,
        tenmil: (Option<&Path>, Option<&Path>),
    ) -> Result<Self, ScenarioError> {
        let programs = GuestPrograms::find_programs()?;
        let newer = SuitePrograms::find_or_fetch(&RESERVATIONS, room, suite);
        let (tenmil, secure) = tenmil;
        let tenmil = match tenmil {
            Some(path) => path.to_owned(),
            None => static_binary::build_static_tenmil()?,
        };
        let secure_tenmil = secure.unwrap_or(&tenmil).to_owned();
        let (room, suite) = (room.to_owned(), suite.to_owned());
        Ok(Self { room, suite, programs, newer, tenmil, secure_tenmil, images: Vec::new() })
    }

    /// Versions of the programs of this machine that take part.
    pub(crate) fn tool_versions(&self) -> String {
        self.programs.program_versions()
    }

    /// The image of a scenario.
    pub(crate) fn image_of_scenario(
        &mut self,
        scenario: &LabScenario,
    ) -> Result<GuestImage, String> {
        if let (true, Err(why)) = (scenario.needs_newer, &self.newer) {
            return Err(why.clone());
        }
        let suite = scenario.suite.unwrap_or(&self.suite).to_owned();
        let (has_secure, has_proxy) = (scenario.needs_secure, scenario.needs_proxy);
        let kind = ImageKind { suite, has_secure, has_proxy, has_csi: scenario.needs_csi };
        if let Some((_, known)) = self.images.iter().find(|(of, _)| *of == kind) {
            return known.clone();
        }
        let made = self.build_image(&kind);
        self.images.push((kind, made.clone()));
        made
    }

    fn build_image(&self, kind: &ImageKind) -> Result<GuestImage, String> {
        let suite = &kind.suite;
        let kernel = GuestKernel::find_or_fetch(&self.room, suite)?;
        let sets = [(kind.has_secure, &SECURE), (kind.has_proxy, &PROXY)];
        let sets = sets.into_iter().filter_map(|(is_needed, set)| is_needed.then_some(set));
        let added = sets.map(|set| SuitePrograms::find_or_fetch(set, &self.room, suite));
        let added = added.collect::<Result<Vec<_>, _>>()?;
        let name: String = added.iter().map(|programs| format!("-{}", programs.name())).collect();
        let csi = if kind.has_csi { csi_programs(&self.room)? } else { Vec::new() };
        let name = if kind.has_csi { format!("{name}-csi") } else { name };
        let initramfs = self.room.join(format!("initramfs-{suite}{name}"));
        let tenmil = if kind.has_secure { &self.secure_tenmil } else { &self.tenmil };
        let bytes = self.write_initramfs(&kernel, &added, &csi, tenmil, &initramfs)?;
        println!("  note: Linux {}, initramfs of {} MiB", kernel.version, bytes >> 20);
        Ok(GuestImage { kernel: kernel.image, initramfs, tenmil: tenmil.clone() })
    }

    /// Writes the initramfs of all scenarios for a kernel; returns its size in bytes.
    fn write_initramfs(
        &self,
        kernel: &GuestKernel,
        added: &[SuitePrograms],
        csi: &[PathBuf],
        tenmil: &Path,
        image: &Path,
    ) -> Result<usize, String> {
        let about = |why| format!("write {}: {why}", image.display());
        let file = File::create(image).map_err(about)?;
        let mut archive = CpioArchive::new(BufWriter::new(file));
        for directory in ["dev", "proc", "sys", "tmp", "run", "mnt", "root", "etc", "lab"] {
            archive.add_directory(directory).map_err(about)?;
        }
        archive.add_file("init", INIT.as_bytes()).map_err(about)?;
        archive.add_file("lab/lab.sh", BEGINNING.as_bytes()).map_err(about)?;
        for scenario in &SCENARIOS {
            let path = format!("lab/{}.sh", scenario.name);
            archive.add_file(&path, scenario.script.as_bytes()).map_err(about)?;
        }
        self.programs.pack_programs(tenmil, csi, &mut archive)?;
        for programs in self.newer.iter().chain(added) {
            programs.pack_files(&mut archive)?;
        }
        kernel.pack_modules(&mut archive)?;
        archive.finish().map_err(about)
    }
}

/// The CSI driver, csi-sanity, and the programs that the driver runs.
fn csi_programs(room: &Path) -> Result<Vec<PathBuf>, String> {
    let built = Path::new("target/debug/tenmil-csi");
    if !built.exists() {
        return Err("target/debug/tenmil-csi: no such program; cargo build --bin tenmil-csi".into());
    }
    // Symbols would take memory of the guest.
    let driver = room.join("tenmil-csi");
    run_program(Command::new("strip").arg("-o").arg(&driver).arg(built))?;
    let directory = crate::book::repository_root()?.join(crate::csi::DIRECTORY);
    let sanity = crate::csi::find_or_build_sanity(&directory)?;
    let found = ["mount", "umount", "blkid", "resize2fs", "mkfs.xfs", "xfs_growfs"]
        .iter()
        .map(|name| guest_programs::find_required(name));
    [Ok(driver), Ok(sanity)].into_iter().chain(found).collect()
}

/// Runs a program to its end and returns its output.
fn run_program(command: &mut Command) -> Result<String, String> {
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
fn program_version(command: &mut Command) -> Option<String> {
    let output = command.output().ok()?;
    let said = [output.stdout, output.stderr].concat();
    String::from_utf8_lossy(&said).lines().next().map(|line| line.trim().to_owned())
}

fn read_file(path: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|why| format!("read {}: {why}", path.display()))
}

fn make_parent(path: &Path) -> Result<(), String> {
    let parent = path.parent().unwrap_or(path);
    std::fs::create_dir_all(parent).map_err(|why| format!("make {}: {why}", parent.display()))
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<(), String> {
    make_parent(path)?;
    std::fs::write(path, bytes).map_err(|why| format!("write {}: {why}", path.display()))
}
