//! Which device a copy reads or writes: as much as can be known of it before it is read.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use base::Limits;
use block::uri::Uri;
use host::file::reach;
use host::holders::{Place, device_mark, file_mark};
use host::machine::Machine;
use serde::{Deserialize, Serialize};

use super::outcome::Which;

/// Which device it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    uri: String,
    pub(super) size_bytes: u64,
    block_size: u32,
    files: Vec<Leaf>,
}

/// A file or a device that it stands on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Leaf {
    /// The path of what the kernel has; the name of anything else.
    path: String,
    /// Which file or device it is, if anything tells it from others.
    which: Option<String>,
    /// When it was changed last; of the source only, since a copy changes its target, and of files
    /// only, since of a device nobody knows.
    modified_ns: Option<String>,
}

impl Identity {
    /// The device that `uri` names, which has been opened.
    pub fn of(which: Which, uri: &Uri, limits: &Limits) -> Self {
        Self {
            uri: uri.to_string(),
            size_bytes: super::geometry::size_bytes(limits),
            block_size: limits.block_size,
            files: leaves(uri).iter().map(|leaf| Leaf::of(which, leaf)).collect(),
        }
    }

    /// Those of its files and devices that nothing tells from others: another may have taken their
    /// place without a trace.
    pub fn unmarked(&self) -> impl Iterator<Item = &str> {
        self.files.iter().filter(|leaf| leaf.which.is_none()).map(|leaf| &*leaf.path)
    }

    /// Whether the file of this file system and number is one that it stands on.
    pub(super) fn stands_on(&self, (device, inode): (u64, u64)) -> bool {
        self.files.iter().any(|leaf| number(Path::new(&leaf.path)) == Some((device, inode)))
    }
}

impl Leaf {
    fn of(which: Which, uri: &Uri) -> Self {
        if uri.scheme() != "file" {
            return Self { path: uri.to_string(), which: None, modified_ns: None };
        }
        let path = Path::new(uri.path());
        Self {
            path: whole(path).display().to_string(),
            which: mark(path),
            modified_ns: (which == Which::Source).then(|| modified_ns(path)).flatten(),
        }
    }
}

/// The files and devices of the kernel that a device stands on; not those with stores, which are not
/// a volume's alone.
pub fn files_of(uri: &Uri) -> Vec<PathBuf> {
    leaves(uri)
        .iter()
        .filter(|leaf| leaf.scheme() == "file")
        .map(|leaf| leaf.path().into())
        .collect()
}

/// What stands on nothing else, and volumes: what is known of the device of a store says nothing of
/// its volumes, which come and go.
fn leaves(uri: &Uri) -> Vec<&Uri> {
    match uri.children() {
        [] => vec![uri],
        _ if uri.scheme() == "volume" => vec![uri],
        children => children.iter().flat_map(leaves).collect(),
    }
}

/// A path without links, also of a file that is made only once the copy is not refused.
fn whole(path: &Path) -> PathBuf {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let beside = || {
        let directory = directory.unwrap_or(Path::new(".")).canonicalize().ok()?;
        Some(directory.join(path.file_name()?))
    };
    path.canonicalize().ok().or_else(beside).unwrap_or_else(|| path.into())
}

fn mark(path: &Path) -> Option<String> {
    if reach(path).metadata().ok()?.file_type().is_block_device() {
        return device_mark(&Machine::this(), &Place::of(path));
    }
    file_mark(path)
}

fn modified_ns(path: &Path) -> Option<String> {
    let found = path.metadata().ok()?;
    found.is_file().then(|| format!("{}.{:09}", found.mtime(), found.mtime_nsec()))
}

/// The file system and the number of a file.
pub(super) fn number(path: &Path) -> Option<(u64, u64)> {
    reach(path).metadata().ok().map(|found| (found.dev(), found.ino()))
}

/// What differs first, in words.
pub(super) fn difference(found: &Identity, expected: &Identity) -> String {
    let say = |what: &str, found: &dyn std::fmt::Display, expected: &dyn std::fmt::Display| {
        format!("the record is of {what} {found}, found {expected}")
    };
    if found.uri != expected.uri {
        return say("device", &found.uri, &expected.uri);
    }
    if found.size_bytes != expected.size_bytes {
        return say("size", &found.size_bytes, &expected.size_bytes);
    }
    if found.block_size != expected.block_size {
        return say("block size", &found.block_size, &expected.block_size);
    }
    for (found, expected) in found.files.iter().zip(&expected.files) {
        if found.path != expected.path || found.which != expected.which {
            let which = |leaf: &Leaf| leaf.which.clone().unwrap_or("nothing tells which".into());
            let file = |leaf: &Leaf| format!("{} ({})", leaf.path, which(leaf));
            return say("file", &file(found), &file(expected));
        }
        if found.modified_ns != expected.modified_ns {
            return format!("{} was changed since", expected.path);
        }
    }
    "the record is of other files".into()
}
