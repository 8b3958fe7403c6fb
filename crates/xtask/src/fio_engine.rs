//! `cargo xtask fio-engine`: an I/O engine of fio for any device URI, built for the fio that is installed.
//!
//! ```text
//!   apt-get source fio, of the installed version ─ configure ─▶ headers ─┐
//!   crates/capi/fio/tenmil_fio.c ────────────────────────────────────────┴ cc ─▶ libtenmil_fio.so ─ tar
//!   crates/capi ─ cargo rustc, staticlib ─▶ libtenmil.a ─────────────────┘
//! ```
//!
//! The headers of fio change from version to version, and distributions do not package them. Everything lies in
//! `target/fio-engine`, the tarball in `target/packages`. The engine is built without TLS.

mod engine_build;
mod engine_checks;
mod engine_rates;

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::package::output_of;

/// Options of `cargo xtask fio-engine`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask fio-engine                        build the engine for the fio that is installed, and run its checks
  cargo xtask fio-engine --source ../fio        for the fio that was built there
  cargo xtask fio-engine --no-build --rates     measure it beside engines of fio
Needs fio, and its source: dpkg-dev and a mirror of Debian, or --source.")]
pub(crate) struct FioEngineOptions {
    /// Directory with the source of fio, configured
    #[arg(long, value_name = "DIRECTORY")]
    source: Option<PathBuf>,
    /// fio to build for and to run
    #[arg(long, value_name = "PROGRAM", default_value = "fio")]
    fio: PathBuf,
    /// Program to serve a disk over NVMe/TCP
    #[arg(long, value_name = "PROGRAM", default_value = "target/release/tenmil")]
    binary: PathBuf,
    /// Use the engine that is built
    #[arg(long)]
    no_build: bool,
    /// Measure rates instead of running the checks
    #[arg(long)]
    rates: bool,
}

/// Directories and programs of a run.
struct Workplace {
    root: PathBuf,
    /// Where everything is made.
    room: PathBuf,
    fio: PathBuf,
    /// `fio-3.33`
    fio_version: String,
}

/// Makes the engine and checks it; returns false if a check fails.
pub(crate) fn run_fio_engine(options: &FioEngineOptions) -> Result<bool, String> {
    let root = crate::book::repository_root()?;
    std::env::set_current_dir(&root).map_err(|why| format!("enter {}: {why}", root.display()))?;
    let fio_version = output_of("find fio", Command::new(&options.fio).arg("--version"))
        .map_err(|why| format!("{why}; fix: apt-get install fio"))?;
    let room = crate::package::target_directory(&root).join("fio-engine");
    // Jobs run in a directory of their own.
    let fio = match options.fio.components().count() {
        1 => options.fio.clone(),
        _ => std::path::absolute(&options.fio)
            .map_err(|why| format!("find {}: {why}", options.fio.display()))?,
    };
    let place = Workplace { root, room, fio, fio_version };
    if !options.no_build {
        let tarball = engine_build::build_engine(&place, options.source.as_deref())?;
        println!("fio-engine: {} for {}", tarball.display(), place.fio_version);
    }
    if options.rates {
        return engine_rates::measure_rates(&place).map(|()| true);
    }
    let problems = engine_checks::check_engine(&place, &options.binary)?;
    for problem in &problems {
        println!("fio-engine: {problem}");
    }
    if problems.is_empty() {
        println!("fio-engine: all checks passed with {}", place.fio_version);
    }
    Ok(problems.is_empty())
}

impl Workplace {
    /// The engine.
    fn engine(&self) -> PathBuf {
        self.room.join("stage/libtenmil_fio.so")
    }

    /// A command that runs fio with one job of the engine, on no device if the URI is empty.
    fn job(&self, uri: &str, arguments: &[&str]) -> Command {
        let mut fio = Command::new(&self.fio);
        fio.arg("--name=job").arg(format!("--ioengine=external:{}", self.engine().display()));
        if !uri.is_empty() {
            fio.arg(format!("--uri={uri}"));
        }
        fio.args(arguments);
        fio
    }
}

/// Makes a directory and its parents.
fn make_directory(directory: &Path) -> Result<(), String> {
    std::fs::create_dir_all(directory).map_err(|why| format!("make {}: {why}", directory.display()))
}
