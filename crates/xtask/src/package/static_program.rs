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

/// Options of the compiler that make the program smaller: relative relocations are packed, and functions whose code
/// is identical exist once. The linker that does it comes with the compiler.
pub(super) fn link_flags() -> Result<String, String> {
    let print = |what: &[&str]| output_of("ask the compiler", Command::new("rustc").args(what));
    let sysroot = print(&["--print", "sysroot"])?;
    let version = print(&["-vV"])?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    let host = host.ok_or_else(|| format!("no host in `{version}` of rustc -vV"))?;
    Ok(format!(
        "-C link-arg=-fuse-ld=lld -C link-arg=-B{sysroot}/lib/rustlib/{host}/bin/gcc-ld \
         -C link-arg=-Wl,--icf=all -C link-arg=-Wl,-z,pack-relative-relocs"
    ))
}
