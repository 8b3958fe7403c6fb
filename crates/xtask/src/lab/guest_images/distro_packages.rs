//! Packages of a distribution suite, downloaded and unpacked but not installed.
//!
//! The system's package tools download them from the system's mirror, with package lists and a cache of
//! their own, so that the package state of the system is not changed.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{make_parent, run_program, write_file};

/// Suite, with the directory of its packages.
pub(super) struct DistroPackages {
    at: PathBuf,
}

impl DistroPackages {
    /// Downloads the package lists of `suite` into `at`.
    pub(super) fn open(at: &Path, suite: &str) -> Result<Self, String> {
        let (at, shown) = (at.to_owned(), at.display());
        for part in ["parts", "lists/partial", "cache/archives/partial"] {
            make_parent(&at.join(part).join("."))?;
        }
        let sources = format!("deb {} {suite} main\n", apt_mirror_url()?);
        write_file(&at.join("sources.list"), sources.as_bytes())?;
        // An empty status file: nothing counts as installed, so all dependencies are downloaded.
        write_file(&at.join("status"), b"")?;
        let configuration = format!(
            "Dir::Etc::sourcelist \"{shown}/sources.list\";\n\
             Dir::Etc::sourceparts \"{shown}/parts\";\nDir::State::Lists \"{shown}/lists\";\n\
             Dir::State::status \"{shown}/status\";\nDir::Cache \"{shown}/cache\";\n\
             APT::Sandbox::User \"\";\nAPT::Get::Assume-Yes \"true\";\n\
             APT::Install-Recommends \"false\";\nAcquire::Languages \"none\";\n"
        );
        write_file(&at.join("apt.conf"), configuration.as_bytes())?;
        let suite = Self { at };
        suite.run_apt("apt-get", &["update"])?;
        Ok(suite)
    }

    /// The first dependency of `package` with this name prefix, if there is one.
    pub(super) fn dependency_with_prefix(
        &self,
        package: &str,
        beginning: &str,
    ) -> Result<Option<String>, String> {
        let said = self.run_apt("apt-cache", &["depends", package])?;
        let mut names = said.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
        Ok(names.find(|name| name.starts_with(beginning)).map(str::to_owned))
    }

    /// Unpacks one package into `root`.
    pub(super) fn unpack(&self, package: &str, root: &Path) -> Result<(), String> {
        self.run_apt("apt-get", &["download", package])?;
        self.unpack_all(&self.at, root)
    }

    /// Unpacks packages and all their dependencies into `root`.
    pub(super) fn unpack_whole(&self, packages: &[&str], root: &Path) -> Result<(), String> {
        self.run_apt("apt-get", &[&["install", "--download-only"], packages].concat())?;
        self.unpack_all(&self.at.join("cache/archives"), root)
    }

    fn unpack_all(&self, from: &Path, root: &Path) -> Result<(), String> {
        let about = |why| format!("list {}: {why}", from.display());
        for entry in std::fs::read_dir(from).map_err(about)? {
            let package = entry.map_err(about)?.path();
            if package.extension().is_some_and(|extension| extension == "deb") {
                run_program(Command::new("dpkg").arg("-x").arg(&package).arg(root))?;
            }
        }
        Ok(())
    }

    fn run_apt(&self, program: &str, arguments: &[&str]) -> Result<String, String> {
        let mut command = Command::new(program);
        command.args(arguments).env("APT_CONFIG", self.at.join("apt.conf")).current_dir(&self.at);
        run_program(&mut command)
    }
}

/// The mirror that this system uses.
fn apt_mirror_url() -> Result<String, String> {
    let said = run_program(Command::new("apt-get").args([
        "indextargets",
        "--format",
        "$(REPO_URI)",
        "Created-By: Packages",
        "Label: Debian",
    ]))?;
    let first = said.lines().next().map(|uri| uri.trim_end_matches('/').to_owned());
    first.ok_or_else(|| "this system takes no packages from a mirror of Debian".to_owned())
}
