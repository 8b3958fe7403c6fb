//! `cargo xtask api`: the public API of the crate `tenmil`, as text.
//!
//! ```text
//!   src/lib.rs ── pub mod a ──▶ src/a.rs, src/a/… ── public items, without bodies
//!              └─ pub use b::C ─▶ src/b.rs ── C alone, with its implementations
//! ```
//!
//! The list is kept in docs/api.txt, so that a change of the public API is visible in a diff.

mod surface;

use std::fs;
use std::path::PathBuf;

use clap::Args;

/// Write docs/api.txt, or check that it is up to date.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Write nothing, and fail if the file is out of date
    #[arg(long)]
    check: bool,
}

/// Runs the task; returns false if the check finds a difference.
pub(crate) fn run(options: &Options) -> Result<bool, String> {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let list = root.join("docs/api.txt");
    let surface = surface::of(&root.join("crates/tenmil/src"), "tenmil")?;
    if !options.check {
        fs::write(&list, surface).map_err(|error| format!("write {}: {error}", list.display()))?;
        return Ok(true);
    }
    let listed =
        fs::read_to_string(&list).map_err(|error| format!("read {}: {error}", list.display()))?;
    for line in listed.lines().filter(|line| !surface.lines().any(|other| other == *line)) {
        println!("- {line}");
    }
    for line in surface.lines().filter(|line| !listed.lines().any(|other| other == *line)) {
        println!("+ {line}");
    }
    if listed == surface {
        return Ok(true);
    }
    println!("docs/api.txt is not what the crate offers; `cargo xtask api` writes it anew");
    Ok(false)
}
