//! The Debian package, by cargo-deb; its metadata are in `crates/cli/Cargo.toml`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{check_program_size, copy_stripped, is_installed, output_of, run_command, version};

/// Scripts, conffiles and file list of released packages, by version.
const RELEASED: &str = "packaging/debian/released";
/// Files of a package's control archive that a later upgrade meets.
const CONTROL_FILES: [&str; 6] = ["control", "conffiles", "preinst", "postinst", "prerm", "postrm"];
/// Shells with a completion script, and its file name.
const SHELLS: [(&str, &str); 3] = [("bash", "tenmil"), ("zsh", "_tenmil"), ("fish", "tenmil.fish")];

/// Makes the package of the program `built`; returns what is wrong with it.
pub(super) fn make_package(root: &Path, room: &Path, built: &Path) -> Result<Vec<String>, String> {
    if !is_installed("cargo-deb") {
        return Err("there is no cargo-deb; fix: cargo install cargo-deb --locked".to_owned());
    }
    // The paths of Cargo.toml lead here.
    let stage = room.join("stage");
    let _ = fs::remove_dir_all(&stage);
    for directory in ["man", "completions"] {
        let directory = stage.join(directory);
        fs::create_dir_all(&directory)
            .map_err(|why| format!("make {}: {why}", directory.display()))?;
    }
    let program = stage.join("tenmil");
    copy_stripped(built, &program)?;
    output_of("write the manual", Command::new(&program).arg("man").arg(stage.join("man")))?;
    for (shell, file) in SHELLS {
        let mut completions = Command::new(&program);
        let script = output_of(shell, completions.args(["completions", shell]))?;
        let path = stage.join("completions").join(file);
        fs::write(&path, script + "\n")
            .map_err(|why| format!("write {}: {why}", path.display()))?;
    }
    let mut deb = Command::new("cargo");
    deb.args(["deb", "--package", "tenmil-cli", "--no-build", "--no-strip", "--output"]).arg(room);
    // Times of files, so that two packages of one commit are equal.
    deb.env("SOURCE_DATE_EPOCH", commit_time(root)?);
    run_command("make the Debian package", &mut deb)?;
    let package = find_package(room)?;
    let mut problems: Vec<String> = check_program_size(&program)?.into_iter().collect();
    problems.extend(missing_files(&package)?);
    println!("package: {}", package.display());
    Ok(problems)
}

/// The Debian package of this version in a directory.
pub(super) fn find_package(room: &Path) -> Result<PathBuf, String> {
    let wanted = format!("tenmil_{}", version());
    let entries = fs::read_dir(room).map_err(|why| format!("read {}: {why}", room.display()))?;
    let paths = entries.flatten().map(|entry| entry.path());
    let mut packages: Vec<PathBuf> = paths
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(&wanted) && name.ends_with(".deb")
        })
        .collect();
    packages.sort();
    packages.pop().ok_or_else(|| {
        format!("no {wanted}*.deb in {}; fix: cargo xtask package --only deb", room.display())
    })
}

/// Files that the package has to contain and does not.
fn missing_files(package: &Path) -> Result<Vec<String>, String> {
    let list = files_of(package)?;
    let expected = [
        "./usr/bin/tenmil",
        "./usr/share/man/man1/tenmil.1.gz",
        "./usr/share/man/man1/tenmil-serve.1.gz",
        "./usr/share/bash-completion/completions/tenmil",
        "./usr/share/zsh/vendor-completions/_tenmil",
        "./usr/share/fish/vendor_completions.d/tenmil.fish",
        "./usr/lib/systemd/system/tenmil.service",
        "./usr/lib/sysusers.d/tenmil.conf",
        "./usr/share/doc/tenmil/copyright",
        "./etc/tenmil/target.toml",
    ];
    let is_missing = |path: &&str| !list.iter().any(|found| found == path);
    let missing = expected.into_iter().filter(is_missing);
    Ok(missing.map(|path| format!("{}: lacks {path}", package.display())).collect())
}

/// Paths of the files of a package.
fn files_of(package: &Path) -> Result<Vec<String>, String> {
    let mut list = Command::new("sh");
    list.args(["-c", "dpkg-deb --fsys-tarfile \"$0\" | tar -t"]).arg(package);
    Ok(output_of("list the package", &mut list)?.lines().map(str::to_owned).collect())
}

/// Writes what a later upgrade from this version meets: its control files, its configuration and its file list.
pub(super) fn record_release(root: &Path, room: &Path) -> Result<(), String> {
    let package = find_package(room)?;
    let record = root.join(RELEASED).join(version());
    let _ = fs::remove_dir_all(&record);
    let control = record.join("control");
    let mut extract = Command::new("dpkg-deb");
    fs::create_dir_all(&record).map_err(|why| format!("make {}: {why}", record.display()))?;
    run_command("extract the control files", extract.arg("-e").arg(&package).arg(&control))?;
    for entry in fs::read_dir(&control).map_err(|why| format!("read the control files: {why}"))? {
        let path = entry.map_err(|why| format!("read the control files: {why}"))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !CONTROL_FILES.contains(&name.as_str()) {
            fs::remove_file(&path).map_err(|why| format!("remove {}: {why}", path.display()))?;
        }
    }
    let files = files_of(&package)?.join("\n") + "\n";
    let write = |name: &str, text: &str| {
        let path = record.join(name);
        fs::write(&path, text).map_err(|why| format!("write {}: {why}", path.display()))
    };
    write("files", &files)?;
    let configuration = fs::read_to_string(root.join("packaging/config/target.toml"))
        .map_err(|why| format!("read the configuration: {why}"))?;
    write("target.toml", &configuration)?;
    println!("package: recorded {}", record.display());
    Ok(())
}

/// Versions that are recorded, with their directories.
pub(super) fn recorded_releases(root: &Path) -> Vec<(String, PathBuf)> {
    let Ok(entries) = fs::read_dir(root.join(RELEASED)) else { return Vec::new() };
    let paths = entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir());
    let named = paths.filter_map(|path| Some((path.file_name()?.to_str()?.to_owned(), path)));
    let mut releases: Vec<_> = named.collect();
    releases.sort();
    releases
}

/// Time of the last commit, in seconds.
pub(super) fn commit_time(root: &Path) -> Result<String, String> {
    let mut git = Command::new("git");
    output_of(
        "read the time of the commit",
        git.current_dir(root).args(["log", "-1", "--format=%ct"]),
    )
}
