//! `cargo xtask api`: what the crate `tenmil` promises to those who build on it, as text.
//!
//! ```text
//!   src/lib.rs ── pub mod a ──▶ src/a.rs, src/a/… ── what is public there, without bodies
//!              └─ pub use b::C ─▶ src/b.rs ── C alone, and what is implemented for it
//! ```
//!
//! The list lies in docs/api.txt. A change of the surface is then a change of that file, which
//! somebody reads.

mod surface;

use std::fs;
use std::path::PathBuf;

use clap::Args;

/// Write docs/api.txt, or say whether it is what it should be.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Write nothing, and fail if something would change
    #[arg(long)]
    check: bool,
}

/// Does it. False if a check finds a difference.
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
