//! The static program: musl, so that it runs on any Linux and resolves names without libraries.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{build_program, copy_stripped, is_installed, output_of, version};

/// Target of the static program.
const TARGET: &str = "x86_64-unknown-linux-musl";

/// Builds the static program, unless one is given, and returns its stripped copy.
pub(super) fn make_program(
    root: &Path,
    room: &Path,
    profile: &str,
    given: &Option<PathBuf>,
) -> Result<PathBuf, String> {
    let built = match given {
        Some(given) => given.clone(),
        None => {
            let installed = output_of(
                "list the targets of the compiler",
                Command::new("rustup").args(["target", "list", "--installed"]),
            )?;
            if !installed.lines().any(|line| line == TARGET) {
                return Err(format!(
                    "no standard library for {TARGET}; fix: rustup target add {TARGET}"
                ));
            }
            // Of the cipher and TLS, which are C.
            if !is_installed("musl-gcc") {
                return Err("there is no musl-gcc; fix: apt-get install musl-tools".to_owned());
            }
            build_program(root, profile, Some(TARGET))?
        }
    };
    let program = room.join(format!("tenmil-{}-{TARGET}", version()));
    copy_stripped(&built, &program)?;
    let said = output_of("run the static program", Command::new(&program).arg("--version"))?;
    println!("package: {}: {said}", program.display());
    Ok(program)
}
