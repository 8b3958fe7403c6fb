//! Identity of the devices of a copy, as far as it is known before they are read.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tenmil_base::Limits;
use tenmil_block::uri::Uri;
use tenmil_linux::device_users::{DevicePath, device_identity, file_identity};
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_linux::storage_file::path_or_proc_link;

use super::copy_result::CopySide;

/// Identity of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceIdentity {
    uri: String,
    pub(super) size_bytes: u64,
    block_size: u32,
    files: Vec<BackingFile>,
}

/// File or kernel device below a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct BackingFile {
    /// Canonical path of a file; the URI of anything else.
    path: String,
    /// Identity of the file or device, if it has one.
    which: Option<String>,
    /// Modification time. Only of the source, because a copy changes its target, and only of files,
    /// because devices have none.
    modified_ns: Option<String>,
}

impl DeviceIdentity {
    /// The identity of the open device that `uri` names.
    pub fn from_device(which: CopySide, uri: &Uri, limits: &Limits) -> Self {
        Self {
            uri: uri.to_string(),
            size_bytes: super::request_sizes::size_bytes(limits),
            block_size: limits.block_size,
            files: leaf_devices(uri)
                .iter()
                .map(|leaf| BackingFile::from_uri(which, leaf))
                .collect(),
        }
    }

    /// Files and devices without an identity: they may have been replaced unnoticed.
    pub fn unidentified_files(&self) -> impl Iterator<Item = &str> {
        self.files.iter().filter(|leaf| leaf.which.is_none()).map(|leaf| &*leaf.path)
    }

    /// Whether the file with this file system and inode number is below the device.
    pub(super) fn includes_file(&self, (device, inode): (u64, u64)) -> bool {
        self.files
            .iter()
            .any(|leaf| device_and_inode(Path::new(&leaf.path)) == Some((device, inode)))
    }
}

impl BackingFile {
    fn from_uri(which: CopySide, uri: &Uri) -> Self {
        if uri.scheme() != "file" {
            return Self { path: uri.to_string(), which: None, modified_ns: None };
        }
        let path = Path::new(uri.path());
        Self {
            path: resolved_path(path).display().to_string(),
            which: storage_identity(path),
            modified_ns: (which == CopySide::Source)
                .then(|| modification_time_text(path))
                .flatten(),
        }
    }
}

/// Files and kernel devices below a device, without the devices of pools, which are not exclusive to
/// one volume.
pub fn backing_files(uri: &Uri) -> Vec<PathBuf> {
    leaf_devices(uri)
        .iter()
        .filter(|leaf| leaf.scheme() == "file")
        .map(|leaf| leaf.path().into())
        .collect()
}

/// Devices without devices below, and volumes: the identity of a pool's device does not identify its
/// volumes, which are created and deleted.
fn leaf_devices(uri: &Uri) -> Vec<&Uri> {
    match uri.children() {
        [] => vec![uri],
        _ if uri.scheme() == "volume" => vec![uri],
        children => children.iter().flat_map(leaf_devices).collect(),
    }
}

/// A path without links, also of a file that is made only once the copy is not refused.
fn resolved_path(path: &Path) -> PathBuf {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let beside = || {
        let directory = directory.unwrap_or(Path::new(".")).canonicalize().ok()?;
        Some(directory.join(path.file_name()?))
    };
    path.canonicalize().ok().or_else(beside).unwrap_or_else(|| path.into())
}

fn storage_identity(path: &Path) -> Option<String> {
    if path_or_proc_link(path).metadata().ok()?.file_type().is_block_device() {
        return device_identity(&KernelFiles::live_system(), &DevicePath::resolve(path));
    }
    file_identity(path)
}

fn modification_time_text(path: &Path) -> Option<String> {
    let found = path.metadata().ok()?;
    found.is_file().then(|| format!("{}.{:09}", found.mtime(), found.mtime_nsec()))
}

/// File system and inode number of a file.
pub(super) fn device_and_inode(path: &Path) -> Option<(u64, u64)> {
    path_or_proc_link(path).metadata().ok().map(|found| (found.dev(), found.ino()))
}

/// Describes the first difference.
pub(super) fn first_difference(found: &DeviceIdentity, expected: &DeviceIdentity) -> String {
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
            let which = |leaf: &BackingFile| leaf.which.clone().unwrap_or("not identified".into());
            let file = |leaf: &BackingFile| format!("{} ({})", leaf.path, which(leaf));
            return say("file", &file(found), &file(expected));
        }
        if found.modified_ns != expected.modified_ns {
            return format!("{} was changed since", expected.path);
        }
    }
    "the record is of other files".into()
}
