//! `cargo xtask c-library`: libtenmil, its header and its tarball, checked where they are installed.
//!
//! ```text
//!   crates/capi ─ cbindgen ─▶ include/tenmil.h
//!       └─ cargo rustc, staticlib ─▶ libtenmil.a ─ cc, libtenmil.map ─▶ libtenmil.so.0.2.0 ─ tar ─▶ tenmil-c-*.tar.gz
//!                                                                                            │
//!   examples, conformance cases, random calls ─ cc and c++ with pkg-config ◀─ a clean prefix ┘
//! ```
//!
//! The tarball lies in `target/packages`, everything else in `target/c-library`.

mod abi;
mod conformance_table;
mod header;
mod library_build;
mod program_checks;

use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) use library_build::{SYSTEM_LIBRARIES, build_archive};

/// Options of `cargo xtask c-library`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask c-library                 make the library, and run its checks: some minutes
  cargo xtask c-library --header        write the header alone
  cargo xtask c-library --record        record symbols and layouts, after a change that keeps old programs working
  cargo xtask c-library --no-build      check the library that is built")]
pub(crate) struct CLibraryOptions {
    /// Write the header, and make nothing else
    #[arg(long, conflicts_with_all = ["record", "no_build"])]
    header: bool,
    /// Record the symbols and the layouts of structures, instead of comparing them
    #[arg(long)]
    record: bool,
    /// Check the archive that is built, instead of building one
    #[arg(long)]
    no_build: bool,
    /// Seed of the random calls; another one each time if it is missing
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
}

/// Directories of a run.
struct Workplace {
    root: PathBuf,
    /// Where everything is made.
    room: PathBuf,
    /// Where the tarball is installed.
    prefix: PathBuf,
}

/// Makes and checks the library; returns false if a check fails.
pub(crate) fn run_c_library(options: &CLibraryOptions) -> Result<bool, String> {
    let root = crate::book::repository_root()?;
    std::env::set_current_dir(&root).map_err(|why| format!("enter {}: {why}", root.display()))?;
    if options.header {
        return Ok(header::write_header(&root, false)?.is_none());
    }
    let room = crate::package::target_directory(&root).join("c-library");
    let place = Workplace { prefix: room.join("prefix"), root, room };
    let mut problems: Vec<String> = header::write_header(&place.root, true)?.into_iter().collect();
    let tarball = library_build::build_library(&place, options.no_build)?;
    library_build::install_tarball(&place, &tarball)?;
    problems.extend(abi::check_abi(&place, options.record)?);
    problems.extend(program_checks::check_programs(&place, options.seed)?);
    for problem in &problems {
        println!("c-library: {problem}");
    }
    if problems.is_empty() {
        println!("c-library: {} passed all checks", tarball.display());
    }
    Ok(problems.is_empty())
}

/// Builds the shared library unless it is built, and returns its path.
pub(crate) fn build_shared_library(root: &Path, is_built: bool) -> Result<PathBuf, String> {
    let room = crate::package::target_directory(root).join("c-library");
    let place = Workplace { root: root.to_owned(), prefix: room.join("prefix"), room };
    let tarball = library_build::build_library(&place, is_built)?;
    library_build::install_tarball(&place, &tarball)?;
    Ok(place.prefix.join("lib/libtenmil.so"))
}

impl Workplace {
    /// Compiler flags for the installed library, as its pkg-config file has them.
    fn flags(&self) -> Result<Vec<String>, String> {
        let mut command = Command::new("pkg-config");
        command.args(["--cflags", "--libs", "tenmil"]);
        command.env("PKG_CONFIG_PATH", self.prefix.join("lib/pkgconfig"));
        command.env("PKG_CONFIG_LIBDIR", self.prefix.join("lib/pkgconfig"));
        // The file has the prefix `/usr/local`; the tarball may be unpacked anywhere.
        command.arg(format!("--define-variable=prefix={}", self.prefix.display()));
        let flags = crate::package::output_of("find libtenmil", &mut command)?;
        Ok(flags.split_whitespace().map(str::to_owned).collect())
    }
}

/// Removes a directory with everything in it, and makes it again.
pub(crate) fn make_empty(directory: &Path) -> Result<(), String> {
    let refuse = |why: std::io::Error| format!("empty {}: {why}", directory.display());
    match std::fs::remove_dir_all(directory) {
        Err(why) if why.kind() != std::io::ErrorKind::NotFound => return Err(refuse(why)),
        _ => {}
    }
    std::fs::create_dir_all(directory).map_err(refuse)
}
