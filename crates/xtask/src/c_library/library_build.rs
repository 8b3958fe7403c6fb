//! Archive, shared library and tarball.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::header::HEADER;
use super::{Workplace, make_empty};
use crate::package::{output_of, run_command, target_directory, version};

/// Symbol versions.
const VERSION_SCRIPT: &str = "crates/capi/libtenmil.map";
/// Libraries of the system that the Rust standard library needs.
pub(crate) const SYSTEM_LIBRARIES: [&str; 6] =
    ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl"];
/// Version of the interface: changes when programs have to be compiled again.
const SO_VERSION: &str = "0";

/// Builds everything, and returns the path of the tarball.
pub(super) fn build_library(place: &Workplace, is_built: bool) -> Result<PathBuf, String> {
    let archive = build_archive(&place.root, is_built)?;
    let stage = place.room.join(format!("tenmil-c-{}", version()));
    make_empty(&stage)?;
    for directory in ["lib/pkgconfig", "include", "share/doc/tenmil-c/examples"] {
        make_empty(&stage.join(directory))?;
    }
    copy(&archive, &stage.join("lib/libtenmil.a"))?;
    strip(&stage.join("lib/libtenmil.a"))?;
    link_shared_library(place, &stage)?;
    copy(&place.root.join(HEADER), &stage.join("include/tenmil.h"))?;
    let pc = stage.join("lib/pkgconfig/tenmil.pc");
    fs::write(&pc, pkg_config_file()).map_err(|why| format!("write {}: {why}", pc.display()))?;
    let documents = stage.join("share/doc/tenmil-c");
    for (from, to) in [
        ("docs/user/c-library.md", "c-library.md"),
        ("LICENSE-MIT", "LICENSE-MIT"),
        ("LICENSE-APACHE", "LICENSE-APACHE"),
    ] {
        copy(&place.root.join(from), &documents.join(to))?;
    }
    for example in super::program_checks::examples(&place.root)? {
        let name = example.file_name().ok_or("an example has no name")?;
        copy(&example, &documents.join("examples").join(name))?;
    }
    make_tarball(place, &stage)
}

/// Builds the archive unless it is built, and returns its path.
pub(crate) fn build_archive(root: &Path, is_built: bool) -> Result<PathBuf, String> {
    if !is_built {
        let mut cargo = Command::new("cargo");
        cargo.args(["rustc", "--package", "tenmil-capi", "--lib", "--release"]);
        // Only here: a test build of the workspace makes no archive.
        cargo.args(["--crate-type", "staticlib"]);
        run_command("build the archive", &mut cargo)?;
    }
    Ok(target_directory(root).join("release/libtenmil_capi.a"))
}

fn link_shared_library(place: &Workplace, stage: &Path) -> Result<(), String> {
    let (soname, file) =
        (format!("libtenmil.so.{SO_VERSION}"), format!("libtenmil.so.{}", version()));
    let library = stage.join("lib").join(&file);
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-o"]).arg(&library);
    cc.arg(format!("-Wl,-soname,{soname}"));
    cc.arg(format!("-Wl,--version-script={}", place.root.join(VERSION_SCRIPT).display()));
    cc.args(["-Wl,--gc-sections", "-Wl,-z,defs", "-Wl,-z,relro,-z,now", "-Wl,--whole-archive"]);
    cc.arg(stage.join("lib/libtenmil.a"));
    cc.arg("-Wl,--no-whole-archive").args(SYSTEM_LIBRARIES);
    run_command("link libtenmil.so", &mut cc)?;
    strip(&library)?;
    for (to, name) in [(&file, &soname), (&soname, &"libtenmil.so".to_owned())] {
        symlink(to, stage.join("lib").join(name)).map_err(|why| format!("link {name}: {why}"))?;
    }
    Ok(())
}

fn strip(file: &Path) -> Result<(), String> {
    run_command("strip", Command::new("strip").arg("--strip-debug").arg(file))
}

fn pkg_config_file() -> String {
    format!(
        "prefix=/usr/local\n\
         libdir=${{prefix}}/lib\n\
         includedir=${{prefix}}/include\n\
         \n\
         Name: tenmil\n\
         Description: Storage stack in user space: NVMe, NVMe/TCP, files and volumes by URI\n\
         Version: {}\n\
         Libs: -L${{libdir}} -ltenmil\n\
         Libs.private: {}\n\
         Cflags: -I${{includedir}}\n",
        version(),
        SYSTEM_LIBRARIES.join(" ")
    )
}

/// Packs the directory, with the same bytes for the same files.
fn make_tarball(place: &Workplace, stage: &Path) -> Result<PathBuf, String> {
    let packages = target_directory(&place.root).join("packages");
    fs::create_dir_all(&packages).map_err(|why| format!("make {}: {why}", packages.display()))?;
    let machine = output_of("read the machine", Command::new("uname").arg("-m"))?;
    let tarball = packages.join(format!("tenmil-c-{}-{machine}.tar.gz", version()));
    let mut tar = Command::new("tar");
    tar.args(["--create", "--gzip", "--owner=0", "--group=0", "--sort=name", "--mtime=@0"]);
    tar.arg("--file").arg(&tarball).arg("--directory").arg(&place.room);
    tar.args(stage.file_name());
    run_command("pack the tarball", &mut tar)?;
    Ok(tarball)
}

/// Unpacks the tarball into an empty directory.
pub(super) fn install_tarball(place: &Workplace, tarball: &Path) -> Result<(), String> {
    make_empty(&place.prefix)?;
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--strip-components=1", "--file"]).arg(tarball);
    tar.arg("--directory").arg(&place.prefix);
    run_command("unpack the tarball", &mut tar)
}

fn copy(from: &Path, to: &Path) -> Result<(), String> {
    fs::copy(from, to)
        .map(drop)
        .map_err(|why| format!("copy {} to {}: {why}", from.display(), to.display()))
}
