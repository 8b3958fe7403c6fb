//! `cargo xtask package`: what is installed: a Debian package, a static program and a container image.
//!
//! ```text
//!   cargo build (glibc, TLS) ─ strip ─▶ stage/tenmil ─┬─ man pages, completions ─▶ cargo deb ─▶ tenmil_*.deb
//!   cargo build (musl, TLS) ── strip ─▶ tenmil-*-static ─▶ buildah, from scratch ─▶ tenmil-*.oci.tar
//! ```
//!
//! All of it lies in `target/packages`. `--test` installs, upgrades and purges the Debian package in a chroot.

mod debian_package;
mod image;
mod installation_test;
mod service_unit;
mod static_program;

use std::path::{Path, PathBuf};
use std::process::Command;

/// Directory of everything that is made here.
const ROOM: &str = "target/packages";
/// Longest program that is shipped.
const PROGRAM_BYTES_MAX: u64 = 15_000_000;
/// Features of the program that is shipped.
const FEATURES: &str = "crypt,tls";

/// Options of `cargo xtask package`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask package                         all packages, in target/packages: some 15 minutes on two cores
  cargo xtask package --only deb              one of them
  cargo xtask package --only deb --binary target/release/tenmil
                                              of a program that is built
  cargo xtask package --test                  install, upgrade and purge target/packages/*.deb in a chroot
  cargo xtask package --check                 the unit file alone, in a second")]
pub(crate) struct PackageOptions {
    /// Make only this, may be repeated
    #[arg(long, value_name = "KIND")]
    only: Vec<PackageKind>,
    /// Cargo profile of the programs
    #[arg(long, value_name = "NAME", default_value = "dist")]
    profile: String,
    /// Program of the Debian package, instead of building one
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,
    /// Static program, instead of building one
    #[arg(long, value_name = "PATH")]
    static_binary: Option<PathBuf>,
    /// Check the unit file, and make nothing
    #[arg(long, conflicts_with_all = ["only", "test", "record"])]
    check: bool,
    /// Install, upgrade and purge the Debian package in a chroot; needs root and debootstrap
    #[arg(long, conflicts_with_all = ["only", "record"])]
    test: bool,
    /// Write files and maintainer scripts of the Debian package to packaging/debian/released, for upgrade tests of
    /// later versions
    #[arg(long, conflicts_with = "only")]
    record: bool,
}

/// What is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum PackageKind {
    /// Debian package.
    Deb,
    /// Static program.
    Static,
    /// Container image.
    Image,
}

/// Makes, checks or tests the packages; returns false if a check fails.
pub(crate) fn run_package(options: &PackageOptions) -> Result<bool, String> {
    let root = crate::book::repository_root()?;
    std::env::set_current_dir(&root).map_err(|why| format!("enter {}: {why}", root.display()))?;
    let mut problems: Vec<String> = service_unit::check_unit()?.into_iter().collect();
    let room = root.join(ROOM);
    if options.test {
        problems.extend(installation_test::test_installation(&root, &room)?);
    } else if options.record {
        debian_package::record_release(&root, &room)?;
    } else if !options.check {
        std::fs::create_dir_all(&room).map_err(|why| format!("make {ROOM}: {why}"))?;
        problems.extend(make_packages(options, &root, &room)?);
    }
    for problem in &problems {
        println!("package: {problem}");
    }
    Ok(problems.is_empty())
}

fn make_packages(
    options: &PackageOptions,
    root: &Path,
    room: &Path,
) -> Result<Vec<String>, String> {
    let is_wanted = |kind| options.only.is_empty() || options.only.contains(&kind);
    let mut problems = Vec::new();
    if is_wanted(PackageKind::Deb) {
        let built = match &options.binary {
            Some(binary) => binary.clone(),
            None => build_program(root, &options.profile, None)?,
        };
        problems.extend(debian_package::make_package(root, room, &built)?);
    }
    if is_wanted(PackageKind::Static) || is_wanted(PackageKind::Image) {
        let program =
            static_program::make_program(root, room, &options.profile, &options.static_binary)?;
        problems.extend(check_program_size(&program)?);
        if is_wanted(PackageKind::Image) {
            problems.extend(image::make_image(root, room, &program)?);
        }
    }
    Ok(problems)
}

/// The Debian package of this version.
pub(crate) fn find_package(root: &Path) -> Result<PathBuf, String> {
    debian_package::find_package(&root.join(ROOM))
}

/// Builds the program, for another target if one is given, and returns its path.
fn build_program(root: &Path, profile: &str, target: Option<&str>) -> Result<PathBuf, String> {
    let mut cargo = Command::new("cargo");
    cargo.args(["build", "--package", "tenmil-cli", "--bin", "tenmil", "--features", FEATURES]);
    cargo.args(["--profile", profile]);
    let directory = if profile == "dev" { "debug" } else { profile };
    let mut path = target_directory(root);
    // The flags reach no build script if a target is named. A program for tests is built with nothing special.
    let host = host_target()?;
    let target = target.or_else(|| (profile != "dev").then_some(&*host));
    if let Some(target) = target {
        cargo.args(["--target", target]);
        cargo.env("RUSTFLAGS", link_flags(&host)?);
        path.push(target);
    }
    run_command("build tenmil", &mut cargo)?;
    Ok(path.join(directory).join("tenmil"))
}

/// Target of the programs that this compiler builds without being told one.
fn host_target() -> Result<String, String> {
    let version = output_of("ask the compiler", Command::new("rustc").arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).ok_or_else(|| format!("no host in `{version}` of rustc -vV"))
}

/// Options of the compiler that make the program smaller: relative relocations are packed, and functions whose code
/// is identical exist once. The linker that does it comes with the compiler.
fn link_flags(host: &str) -> Result<String, String> {
    let sysroot =
        output_of("ask the compiler", Command::new("rustc").args(["--print", "sysroot"]))?;
    Ok(format!(
        "-C link-arg=-fuse-ld=lld -C link-arg=-B{sysroot}/lib/rustlib/{host}/bin/gcc-ld \
         -C link-arg=-Wl,--icf=all -C link-arg=-Wl,-z,pack-relative-relocs"
    ))
}

pub(crate) fn target_directory(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from)
}

/// Version of the program.
pub(crate) fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// Copies a program and removes its symbols.
fn copy_stripped(from: &Path, to: &Path) -> Result<(), String> {
    std::fs::copy(from, to)
        .map_err(|why| format!("copy {} to {}: {why}", from.display(), to.display()))?;
    run_command("strip the program", Command::new("strip").arg("--strip-all").arg(to))
}

/// Checks that a program is not larger than what is shipped.
fn check_program_size(program: &Path) -> Result<Option<String>, String> {
    let found =
        std::fs::metadata(program).map_err(|why| format!("{}: {why}", program.display()))?;
    println!("package: {} has {:.1} MB", program.display(), megabytes(found.len()));
    Ok((found.len() > PROGRAM_BYTES_MAX).then(|| {
        format!(
            "{} has {:.1} MB, expected at most {:.1}",
            program.display(),
            megabytes(found.len()),
            megabytes(PROGRAM_BYTES_MAX)
        )
    }))
}

#[expect(clippy::cast_precision_loss, reason = "sizes of files, for people")]
fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

/// Runs a command, which has to succeed.
pub(crate) fn run_command(what: &str, command: &mut Command) -> Result<(), String> {
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{what}: {} {status}", command.get_program().display())),
        Err(why) => Err(start_error(what, command, &why)),
    }
}

/// Runs a command, which has to succeed, and returns its standard output without the last line end.
pub(crate) fn output_of(what: &str, command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|why| start_error(what, command, &why))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned()),
        false => Err(format!(
            "{what}: {} {}: {}",
            command.get_program().display(),
            output.status,
            errors.trim()
        )),
    }
}

fn start_error(what: &str, command: &Command, why: &std::io::Error) -> String {
    let program = command.get_program().display();
    let fix = match command.get_program().to_str() {
        Some("buildah" | "debootstrap" | "strip" | "dpkg-deb") => {
            format!("; fix: apt-get install {}", debian_package_of(command))
        }
        _ => String::new(),
    };
    format!("{what}: run {program}: {why}{fix}")
}

fn debian_package_of(command: &Command) -> String {
    match command.get_program().to_str() {
        Some("strip") => "binutils".to_owned(),
        Some("dpkg-deb") => "dpkg".to_owned(),
        _ => command.get_program().display().to_string(),
    }
}

/// Whether a program is in the path.
fn is_installed(program: &str) -> bool {
    let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output();
    found.is_ok_and(|found| found.status.success())
}
