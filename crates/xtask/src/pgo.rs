//! `cargo xtask pgo`: compares build variants: without link-time optimization, with it, and with a
//! profile.
//!
//! ```text
//!   target/pgo/no-lto/tenmil ─┐
//!   target/pgo/lto/tenmil ────┼─▶ tenmil reproduce --builds target/pgo
//!   target/pgo/pgo/tenmil ────┘
//!       ▲ -Cprofile-use=…/merged ◀─ llvm-profdata ◀─ perf runs of a build with -Cprofile-generate
//! ```

use std::path::{Path, PathBuf};
use std::process::Command;

/// Directory of builds and profiles.
const ROOM: &str = "target/pgo";
/// Training workloads: the standard workload, depth 1, moved data, and the block layer.
const TRAINING: [&str; 4] = [
    "emu:null?count=21 -t 3",
    "emu:null -q 1 -t 1",
    "emu:ram?count=4&size=16m -w randrw -t 2",
    "null: -t 1",
];

/// Options of `cargo xtask pgo`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask pgo                 three builds of several minutes, then the comparison
  cargo xtask pgo --only-compare  the comparison alone, of what lies in target/pgo")]
pub(crate) struct PgoOptions {
    /// Compare existing builds only
    #[arg(long)]
    only_compare: bool,
    /// Compare for a shorter time
    #[arg(long)]
    quick: bool,
}

/// Build variant.
struct BuildVariant<'a> {
    name: &'static str,
    profile: &'static str,
    /// Compiler flags besides those of the profile.
    flags: &'a str,
}

/// Builds and compares the variants. Returns true, because a comparison does not fail.
pub(crate) fn run_pgo(options: &PgoOptions) -> Result<bool, String> {
    std::fs::create_dir_all(ROOM).map_err(|why| format!("make {ROOM}: {why}"))?;
    let room = Path::new(ROOM).canonicalize().map_err(|why| format!("find {ROOM}: {why}"))?;
    if !options.only_compare {
        // The tool is checked before the builds, which take long.
        let merger = profile_merger()?;
        build_variant(
            &room,
            &BuildVariant { name: "no-lto", profile: "release-no-lto", flags: "" },
        )?;
        build_variant(&room, &BuildVariant { name: "lto", profile: "dist", flags: "" })?;
        let profile = take_profile(&room, &merger)?;
        let flags = format!("-Cprofile-use={profile}");
        build_variant(&room, &BuildVariant { name: "pgo", profile: "dist", flags: &flags })?;
    }
    let mut compare = Command::new(room.join("lto/tenmil"));
    compare.args(["reproduce", "--only", "link-time-optimization", "profile-guided", "--builds"]);
    compare.arg(&room).arg("--out").arg(room.join("report"));
    if options.quick {
        compare.arg("--quick");
    }
    run_command("compare", &mut compare)?;
    Ok(true)
}

/// Builds a variant of `tenmil` into the directory of its name.
fn build_variant(room: &Path, way: &BuildVariant<'_>) -> Result<(), String> {
    println!("pgo: building {}", way.name);
    let built = room.join("build").join(way.name);
    let mut cargo = Command::new("cargo");
    cargo.args(["build", "--package", "tenmil-cli", "--bin", "tenmil", "--profile", way.profile]);
    cargo.arg("--target-dir").arg(&built).env("RUSTFLAGS", way.flags);
    run_command(&format!("build {}", way.name), &mut cargo)?;
    let to = room.join(way.name);
    std::fs::create_dir_all(&to).map_err(|why| format!("make {}: {why}", to.display()))?;
    let from = built.join(way.profile).join("tenmil");
    std::fs::copy(&from, to.join("tenmil"))
        .map(drop)
        .map_err(|why| format!("copy {}: {why}", from.display()))
}

/// Runs the training workloads and returns the path of the merged profile.
fn take_profile(room: &Path, merger: &Path) -> Result<String, String> {
    let raw = room.join("raw");
    // Profiles of an earlier build do not match this code.
    let _ = std::fs::remove_dir_all(&raw);
    let flags = format!("-Cprofile-generate={}", raw.display());
    build_variant(room, &BuildVariant { name: "training", profile: "dist", flags: &flags })?;
    for words in TRAINING {
        println!("pgo: tenmil perf {words}");
        let mut perf = Command::new(room.join("training/tenmil"));
        perf.arg("perf").args(words.split_whitespace());
        run_command(words, perf.arg(format!("--json={}", room.join("training.json").display())))?;
    }
    let merged = room.join("merged.profdata");
    let mut merge = Command::new(merger);
    merge.arg("merge").arg("-o").arg(&merged).arg(&raw);
    run_command("merge the profile", &mut merge)?;
    Ok(merged.display().to_string())
}

/// The profile merge tool of the compiler's toolchain.
fn profile_merger() -> Result<PathBuf, String> {
    let said = Command::new("rustc").args(["--print", "target-libdir"]).output();
    let said = said.map_err(|why| format!("run rustc: {why}"))?;
    let libraries = String::from_utf8_lossy(&said.stdout).trim().to_owned();
    let tool = Path::new(&libraries).parent().map(|up| up.join("bin/llvm-profdata"));
    tool.filter(|tool| tool.exists()).ok_or_else(|| {
        format!(
            "no llvm-profdata beside {libraries}, expected one; `rustup component add llvm-tools`"
        )
    })
}

/// Runs a command, which has to succeed.
fn run_command(what: &str, command: &mut Command) -> Result<(), String> {
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{what}: {status}, expected it to end well")),
        Err(why) => Err(format!("{what}: {why}")),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::run_command;

    #[test]
    fn failed_step_is_named() {
        assert_eq!(run_command("all", &mut Command::new("true")), Ok(()));
        let why = run_command("build lto", &mut Command::new("false")).unwrap_err();
        assert!(why.starts_with("build lto: exit status: 1"), "{why}");
        let why = run_command("merge", &mut Command::new("/nowhere/at/all")).unwrap_err();
        assert!(why.starts_with("merge: "), "{why}");
    }
}
