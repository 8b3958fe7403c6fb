//! Headers of fio, the engine and its tarball.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Workplace, make_directory};
use crate::c_library::{SYSTEM_LIBRARIES, build_archive};
use crate::package::{output_of, run_command, target_directory, version};

/// The engine, in the repository.
const ENGINE: &str = "crates/capi/fio/tenmil_fio.c";

/// Builds the engine, and returns the path of its tarball.
pub(super) fn build_engine(place: &Workplace, source: Option<&Path>) -> Result<PathBuf, String> {
    let source = match source {
        Some(source) => source.to_owned(),
        None => fetch_source(place)?,
    };
    let configured = source.join("config-host.h");
    if !configured.exists() {
        let mut configure = Command::new("./configure");
        configure.current_dir(&source).stdout(std::process::Stdio::null());
        run_command("configure fio", &mut configure)?;
    }
    let archive = build_archive(&place.root, false)?;
    let stage = place.room.join("stage");
    crate::c_library::make_empty(&stage)?;
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-O2", "-g", "-fPIC", "-shared", "-D_GNU_SOURCE"]);
    // Functions of the engine have parameters that fio passes to all.
    cc.args(["-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]);
    cc.arg("-include").arg(&configured).arg("-isystem").arg(&source);
    cc.arg("-Icrates/capi/include").arg("-o").arg(place.engine()).arg(ENGINE).arg(&archive);
    // Only what fio looks up is visible: symbols of the library would meet those of other engines.
    cc.args(["-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-Wl,-z,relro,-z,now"]);
    run_command("compile the engine", cc.args(SYSTEM_LIBRARIES))?;
    run_command("strip", Command::new("strip").arg("--strip-debug").arg(place.engine()))?;
    for (from, to) in [
        ("docs/user/fio.md", "fio.md"),
        ("LICENSE-MIT", "LICENSE-MIT"),
        ("LICENSE-APACHE", "LICENSE-APACHE"),
    ] {
        fs::copy(place.root.join(from), stage.join(to))
            .map_err(|why| format!("copy {from} to {}: {why}", stage.display()))?;
    }
    make_tarball(place, &stage)
}

/// Source of the fio that is installed, from the mirror of this system.
fn fetch_source(place: &Workplace) -> Result<PathBuf, String> {
    let number = place.fio_version.trim_start_matches("fio-");
    let source = place.room.join("source");
    if let Some(found) = source_in(&source, number) {
        return Ok(found);
    }
    let mut query = Command::new("dpkg-query");
    query.args(["--show", "--showformat", "${source:Version}", "fio"]);
    let package = output_of("find the package of fio", &mut query)
        .map_err(|why| format!("{why}; fix: --source DIRECTORY, for a fio of another origin"))?;
    make_directory(&source.join("lists/partial"))?;
    make_directory(&source.join("parts"))?;
    let sources = source_lines()?;
    let shown = source.display();
    let configuration = format!(
        "Dir::Etc::sourcelist \"{shown}/sources.list\";\nDir::Etc::sourceparts \"{shown}/parts\";\n\
         Dir::State::Lists \"{shown}/lists\";\nDir::Cache \"{shown}\";\nAPT::Sandbox::User \"\";\n\
         Acquire::Languages \"none\";\n"
    );
    for (name, text) in [("sources.list", &sources), ("apt.conf", &configuration)] {
        let file = source.join(name);
        fs::write(&file, text).map_err(|why| format!("write {}: {why}", file.display()))?;
    }
    for arguments in [&["update"][..], &["source", &format!("fio={package}")]] {
        let mut apt = Command::new("apt-get");
        apt.args(arguments).current_dir(&source).env("APT_CONFIG", source.join("apt.conf"));
        output_of("fetch the source of fio", &mut apt).map_err(|why| {
            format!("{why}; fix: apt-get install dpkg-dev, or --source DIRECTORY")
        })?;
    }
    source_in(&source, number).ok_or_else(|| {
        format!("{shown}: no directory fio-{number}, expected that of the source package {package}")
    })
}

/// Directory of this version, if it is there.
fn source_in(source: &Path, number: &str) -> Option<PathBuf> {
    let directory = source.join(format!("fio-{number}"));
    directory.join("ioengines.h").exists().then_some(directory)
}

/// The mirrors of this system, as lines for source packages.
fn source_lines() -> Result<String, String> {
    let mut targets = Command::new("apt-get");
    targets.args(["indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)"]);
    targets.args(["Created-By: Packages", "Label: Debian"]);
    let found = output_of("list the mirrors of this system", &mut targets)?;
    let mut lines: Vec<String> = found.lines().map(|line| format!("deb-src {line}\n")).collect();
    lines.sort();
    lines.dedup();
    match lines.is_empty() {
        true => Err("no mirror of Debian is configured; fix: --source DIRECTORY".to_owned()),
        false => Ok(lines.concat()),
    }
}

/// Packs the directory, with the same bytes for the same files.
fn make_tarball(place: &Workplace, stage: &Path) -> Result<PathBuf, String> {
    let packages = target_directory(&place.root).join("packages");
    make_directory(&packages)?;
    let machine = output_of("read the machine", Command::new("uname").arg("-m"))?;
    let name = format!("tenmil-fio-{}-{}-{machine}.tar.gz", version(), place.fio_version);
    let tarball = packages.join(&name);
    let inside = name.trim_end_matches(".tar.gz");
    let mut tar = Command::new("tar");
    tar.args(["--create", "--gzip", "--owner=0", "--group=0", "--sort=name", "--mtime=@0"]);
    tar.arg(format!("--transform=s,^\\.,{inside},")).arg("--file").arg(&tarball);
    run_command("pack the tarball", tar.arg("--directory").arg(stage).arg("."))?;
    Ok(tarball)
}
