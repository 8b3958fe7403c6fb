//! A distribution's kernel and those of its modules that scenarios want.
//!
//! It is fetched by the system's own package tools from the mirror that the system uses, with lists
//! and a cache of its own: what the system has installed, and knows of, stays as it is.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{read, run};
use crate::lab::archive::Archive;

/// What scenarios load; what these stand on comes with them.
const MODULES: [&str; 9] = [
    "nvme-tcp",
    "nvmet-tcp",
    "nvme",
    "null_blk",
    "ublk_drv",
    "vfio-pci",
    "ext4",
    "loop",
    "configfs",
];
const PACKAGE: &str = "linux-image-amd64";

/// A kernel, unpacked.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) version: String,
    pub(crate) image: PathBuf,
    /// The directory that has `lib/modules/VERSION`.
    root: PathBuf,
}

impl Kernel {
    /// Finds it in `room`, or fetches it there from a suite.
    pub(super) fn find(room: &Path, suite: &str) -> Result<Self, String> {
        let root = room.join(suite);
        if !root.join("unpacked").exists() {
            fetch(&root, suite)?;
        }
        let modules = root.join("lib/modules");
        let version = only_entry(&modules)?;
        let image = root.join(format!("boot/vmlinuz-{version}"));
        Ok(Self { version, image, root })
    }

    pub(super) fn pack<W: Write>(&self, archive: &mut Archive<W>) -> Result<(), String> {
        let about = |why| format!("pack modules: {why}");
        let plain = self.root.join("plain");
        let place = format!("lib/modules/{}", self.version);
        for module in self.wanted()? {
            let mut within = module.strip_prefix(&self.root).unwrap_or(&module).to_owned();
            if is_packed(&module) {
                within.set_extension("");
            }
            let bytes = unpack(&module)?;
            let copy = plain.join(&within);
            make_parent(&copy)?;
            write(&copy, &bytes)?;
            archive.file(&within.to_string_lossy(), &bytes).map_err(about)?;
        }
        for list in ["modules.builtin", "modules.order", "modules.builtin.modinfo"] {
            write(&plain.join(&place).join(list), &read(&self.root.join(&place).join(list))?)?;
        }
        run(Command::new("depmod").arg("-b").arg(&plain).arg(&self.version))?;
        for list in ["modules.dep", "modules.alias", "modules.softdep", "modules.builtin"] {
            let bytes = read(&plain.join(&place).join(list))?;
            archive.file(&format!("{place}/{list}"), &bytes).map_err(about)?;
        }
        Ok(())
    }

    /// Files of the modules that are wanted.
    fn wanted(&self) -> Result<BTreeSet<PathBuf>, String> {
        let mut files = BTreeSet::new();
        for name in MODULES {
            let said = run(Command::new("modprobe")
                .args(["--show-depends", "-S", &self.version, "-d"])
                .arg(&self.root)
                .arg(name))?;
            files.extend(said.lines().filter_map(|line| {
                line.strip_prefix("insmod ")?.split_whitespace().next().map(PathBuf::from)
            }));
        }
        Ok(files)
    }
}

fn fetch(root: &Path, suite: &str) -> Result<(), String> {
    println!("lab: fetching {PACKAGE} of {suite}");
    // What an earlier try left is of no use.
    _ = std::fs::remove_dir_all(root);
    let apt = std::path::absolute(root.join("apt")).map_err(|why| format!("find {why}"))?;
    for part in ["parts", "lists/partial", "cache/archives/partial"] {
        make_parent(&apt.join(part).join("."))?;
    }
    let at = apt.display();
    write(&apt.join("sources.list"), format!("deb {} {suite} main\n", mirror()?).as_bytes())?;
    let configuration = format!(
        "Dir::Etc::sourcelist \"{at}/sources.list\";\nDir::Etc::sourceparts \"{at}/parts\";\n\
         Dir::State::Lists \"{at}/lists\";\nDir::Cache \"{at}/cache\";\n\
         APT::Sandbox::User \"\";\nAcquire::Languages \"none\";\n"
    );
    write(&apt.join("apt.conf"), configuration.as_bytes())?;
    let with = |program: &str, arguments: &[&str]| {
        let mut command = Command::new(program);
        command.args(arguments).env("APT_CONFIG", apt.join("apt.conf")).current_dir(&apt);
        run(&mut command)
    };
    with("apt-get", &["update"])?;
    let depends = with("apt-cache", &["depends", PACKAGE])?;
    let image = depends
        .lines()
        .find_map(|line| line.trim().strip_prefix("Depends: linux-image-"))
        .ok_or_else(|| format!("{PACKAGE} of {suite}: stands on no kernel: {depends}"))?;
    with("apt-get", &["download", &format!("linux-image-{image}")])?;
    let package = std::fs::read_dir(&apt)
        .map_err(|why| format!("list {at}: {why}"))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .ok_or_else(|| format!("{at}: no package was fetched"))?;
    run(Command::new("dpkg").arg("-x").arg(&package).arg(root))?;
    lead_to_modules(root)?;
    run(Command::new("depmod").arg("-b").arg(root).arg(only_entry(&root.join("lib/modules"))?))?;
    write(&root.join("unpacked"), b"")
}

/// A package for a system whose `/lib` is in `/usr` has its modules there only.
fn lead_to_modules(root: &Path) -> Result<(), String> {
    let lib = root.join("lib");
    if lib.exists() {
        return Ok(());
    }
    std::os::unix::fs::symlink("usr/lib", &lib)
        .map_err(|why| format!("link {}: {why}", lib.display()))
}

/// The mirror that this system takes its packages from.
fn mirror() -> Result<String, String> {
    let said = run(Command::new("apt-get").args([
        "indextargets",
        "--format",
        "$(REPO_URI)",
        "Created-By: Packages",
        "Label: Debian",
    ]))?;
    let first = said.lines().next().map(|uri| uri.trim_end_matches('/').to_owned());
    first.ok_or_else(|| "this system takes no packages from a mirror of Debian".to_owned())
}

fn is_packed(module: &Path) -> bool {
    module.extension().is_some_and(|extension| extension == "xz")
}

fn unpack(module: &Path) -> Result<Vec<u8>, String> {
    if !is_packed(module) {
        return read(module);
    }
    let output = Command::new("xz").arg("-dc").arg(module).output();
    let output = output.map_err(|why| format!("start xz: {why}"))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(format!("unpack {}: {}", module.display(), output.status))
}

fn only_entry(directory: &Path) -> Result<String, String> {
    let about = |why| format!("list {}: {why}", directory.display());
    let mut entries = std::fs::read_dir(directory).map_err(about)?;
    match (entries.next(), entries.next()) {
        (Some(entry), None) => Ok(entry.map_err(about)?.file_name().to_string_lossy().into_owned()),
        _ => Err(format!("{}: has not exactly one kernel", directory.display())),
    }
}

fn make_parent(path: &Path) -> Result<(), String> {
    let parent = path.parent().unwrap_or(path);
    std::fs::create_dir_all(parent).map_err(|why| format!("make {}: {why}", parent.display()))
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), String> {
    make_parent(path)?;
    std::fs::write(path, bytes).map_err(|why| format!("write {}: {why}", path.display()))
}
