//! Checkpoint file of a copy: how far it is durable, and which source and target it belongs to.
//!
//! ```text
//!   { "version": 1,
//!     "source": { "uri", "size_bytes", "block_size", "files": [ { "path", "device", … } ] },
//!     "target": …,
//!     "until": 1048576, "lost": [ [ 0, 512 ] ] }
//! ```
//!
//! An update is written to a new file, which is flushed and renamed over the old one, so that the file
//! is complete at any time.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tenmil_block::uri::Uri;
use tenmil_linux::random_seed;
use tenmil_linux::storage_file::path_or_proc_link;

use super::copy_engine::CheckpointSink;
use super::copy_result::{CopySide, CopyStats};
use super::device_identity::{DeviceIdentity, backing_files, device_and_inode, first_difference};
use tenmil_base::Error;
use tenmil_linux::storage_file::error_text;

/// Checkpoint file of a copy.
#[derive(Debug)]
pub struct CheckpointFile {
    path: PathBuf,
    contents: CheckpointContents,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct CheckpointContents {
    version: u32,
    source: DeviceIdentity,
    target: DeviceIdentity,
    until: u64,
    lost: Vec<[u64; 2]>,
}

const VERSION: u32 = 1;

/// Default path of the checkpoint of a copy to `target`: beside the first regular file below it.
pub fn default_path(target: &Uri) -> Option<PathBuf> {
    let is_file =
        |path: &&PathBuf| path_or_proc_link(path).metadata().is_ok_and(|found| found.is_file());
    let file = backing_files(target).iter().find(is_file).cloned()?;
    let mut name = file.into_os_string();
    name.push(".resume");
    Some(name.into())
}

impl CheckpointFile {
    /// Opens the checkpoint at `path` of a copy from `source` to `target`. Returns the progress if the
    /// file exists.
    ///
    /// # Errors
    ///
    /// If the file belongs to another copy, or `path` is no checkpoint file.
    pub fn open(
        path: PathBuf,
        source: DeviceIdentity,
        target: DeviceIdentity,
    ) -> Result<(Self, Option<CopyStats>), Error> {
        check_path_is_unused_or_checkpoint(
            &path,
            [(CopySide::Source, &source), (CopySide::Target, &target)],
        )?;
        let contents =
            CheckpointContents { version: VERSION, source, target, until: 0, lost: Vec::new() };
        let found = match std::fs::read_to_string(&path) {
            Ok(text) => Some(text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                let (path, why) = (path.display(), error_text(&error));
                return Err(Error::usage(format!("read the record {path}: {why}")));
            }
        };
        let Some(text) = found else { return Ok((Self { path, contents }, None)) };
        let found = parse_matching(&text, &contents).map_err(|why| {
            let shown = path.display();
            Error::usage(format!("resume the copy of {shown}: {why}")).with_hint(format!(
                "To start over, remove {shown}; to record elsewhere, name another record with \
                 --resume."
            ))
        })?;
        let tally = CopyStats {
            until: found.until,
            lost: found.lost.iter().map(|[start, end]| *start..*end).collect(),
            ..CopyStats::default()
        };
        Ok((Self { path, contents: found }, Some(tally)))
    }

    /// Path of the file.
    pub fn file_path(&self) -> &Path {
        &self.path
    }

    /// Files and devices of both sides without an identity, which the checkpoint cannot be matched to.
    pub fn unidentified_devices(&self) -> Vec<&str> {
        let CheckpointContents { source, target, .. } = &self.contents;
        source.unidentified_files().chain(target.unidentified_files()).collect()
    }

    /// Removes the file after a finished copy.
    ///
    /// # Errors
    ///
    /// If the file cannot be removed.
    pub fn remove(self) -> Result<(), String> {
        match std::fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(format!("remove the record {}: {}", self.path.display(), error_text(&error)))
            }
            _ => Ok(()),
        }
    }

    fn write_file(&self) -> io::Result<()> {
        // The name is random, because a file with a predictable name could belong to another user.
        let mut name = self.path.clone().into_os_string();
        name.push(format!(".{}-{:016x}.new", std::process::id(), random_seed()));
        let beside = PathBuf::from(name);
        let file = OpenOptions::new().write(true).create_new(true).open(&beside)?;
        let taken = self.write_content(file).and_then(|()| std::fs::rename(&beside, &self.path));
        if taken.is_err() {
            let _ = std::fs::remove_file(&beside);
        }
        taken?;
        // The rename is durable only after a sync of the directory.
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or_else(|| Path::new("."));
        OpenOptions::new().read(true).open(parent)?.sync_all()
    }

    fn write_content(&self, mut file: File) -> io::Result<()> {
        let mut text = serde_json::to_string_pretty(&self.contents)?;
        text.push('\n');
        file.write_all(text.as_bytes())?;
        file.sync_all()
    }
}

/// Rejects a path that is in use for something else, which the checkpoint would replace.
fn check_path_is_unused_or_checkpoint(
    path: &Path,
    sides: [(CopySide, &DeviceIdentity); 2],
) -> Result<(), Error> {
    let refuse = |text: String| {
        Err(Error::usage(text).with_hint("Name a file for the record with --resume."))
    };
    let Some(own) = device_and_inode(path) else { return Ok(()) };
    let shown = path.display();
    for (which, identity) in sides {
        if identity.includes_file(own) {
            return refuse(format!(
                "keep the record: {shown} is what {which} stands on, expected a file of its own"
            ));
        }
    }
    if !path.is_file() {
        return refuse(format!(
            "keep the record in {shown}: it is no regular file, expected a file"
        ));
    }
    Ok(())
}

/// Parses a checkpoint, and checks that it belongs to this copy.
fn parse_matching(text: &str, expected: &CheckpointContents) -> Result<CheckpointContents, String> {
    let found: CheckpointContents =
        serde_json::from_str(text).map_err(|error| format!("it is not a record: {error}"))?;
    if found.version != VERSION {
        return Err(format!("it has version {}, expected {VERSION}", found.version));
    }
    let sides = [
        (CopySide::Source, &found.source, &expected.source),
        (CopySide::Target, &found.target, &expected.target),
    ];
    for (which, found, expected) in sides {
        if found != expected {
            return Err(format!("{which} is another: {}", first_difference(found, expected)));
        }
    }
    let is_whole = found.until <= found.source.size_bytes
        && found.lost.iter().all(|[start, end]| start < end && *end <= found.source.size_bytes);
    if !is_whole {
        return Err("its ranges exceed the size of the source".into());
    }
    let lost = found.lost.iter().filter(|[start, _]| *start < found.until);
    let lost = lost.map(|[start, end]| [*start, (*end).min(found.until)]).collect();
    Ok(CheckpointContents { lost, ..found })
}

impl CheckpointSink for CheckpointFile {
    fn store_checkpoint(&mut self, until: u64, lost: &[Range<u64>]) -> Result<(), String> {
        self.contents.until = until;
        self.contents.lost = lost.iter().map(|range| [range.start, range.end]).collect();
        self.write_file().map_err(|error| {
            format!("write the record {}: {}", self.path.display(), error_text(&error))
        })
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::BlockDevice;
    use tenmil_block::uri::Uri;
    use tenmil_drivers::NullDevice;

    use super::{CheckpointFile, default_path};
    use crate::copy::copy_engine::CheckpointSink;
    use crate::copy::copy_result::{CopySide, CopyStats};
    use crate::copy::device_identity::{DeviceIdentity, backing_files};

    struct World {
        root: tempfile::TempDir,
    }

    impl World {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            for name in ["source", "target"] {
                let file = std::fs::OpenOptions::new()
                    .write(true)
                    .create(true)
                    .truncate(true)
                    .open(root.path().join(name));
                file.unwrap().set_len(1 << 20).unwrap();
            }
            Self { root }
        }

        fn path(&self, name: &str) -> std::path::PathBuf {
            self.root.path().join(name)
        }

        fn identity(&self, which: CopySide, blocks: u64) -> DeviceIdentity {
            let name = if which == CopySide::Source { "source" } else { "target" };
            let uri = Uri::new("file", self.path(name).display().to_string());
            DeviceIdentity::from_device(
                which,
                &uri,
                &NullDevice::new(512, blocks).unwrap().limits(),
            )
        }

        fn open(&self) -> Result<(CheckpointFile, Option<CopyStats>), tenmil_base::Error> {
            let identity = |which| self.identity(which, 2048);
            CheckpointFile::open(
                self.path("record"),
                identity(CopySide::Source),
                identity(CopySide::Target),
            )
        }
    }

    #[test]
    fn stored_checkpoint_is_found_and_removed_after_completion() {
        let world = World::new();
        let (mut record, found) = world.open().unwrap();
        assert_eq!(found, None);
        record.store_checkpoint(4096, &[0..512, 2048..8192]).unwrap();
        let (again, found) = world.open().unwrap();
        let found = found.unwrap();
        assert_eq!((found.until, found.lost), (4096, vec![0..512, 2048..4096]), "and no further");
        again.remove().unwrap();
        assert_eq!(world.open().unwrap().1, None);
        assert_eq!(world.root.path().read_dir().unwrap().count(), 2, "nothing lies beside it");
    }

    #[test]
    fn failed_checkpoint_write_leaves_no_temporary_file() {
        let world = World::new();
        let mut record = world.open().unwrap().0;
        std::fs::create_dir(world.path("record")).unwrap();
        std::fs::rename(world.path("source"), world.path("record.new")).unwrap();
        let text = record.store_checkpoint(0, &[]).unwrap_err();
        assert!(text.starts_with("write the record "), "{text}");
        assert_eq!(world.root.path().read_dir().unwrap().count(), 3);
        assert_eq!(
            world.path("record.new").metadata().unwrap().len(),
            1 << 20,
            "a foreign file is unchanged"
        );
        let refused = world.open().unwrap_err();
        assert!(refused.text.ends_with("it is no regular file, expected a file"), "{refused}");
    }

    #[test]
    fn checkpoint_path_must_not_be_a_copied_device() {
        let world = World::new();
        std::fs::hard_link(world.path("target"), world.path("link")).unwrap();
        for (name, which) in [("source", "source"), ("target", "target"), ("link", "target")] {
            let identity = |which| world.identity(which, 2048);
            let (source, target) = (identity(CopySide::Source), identity(CopySide::Target));
            let refused = CheckpointFile::open(world.path(name), source, target).unwrap_err();
            assert!(refused.text.contains(&format!("is what the {which} stands on")), "{refused}");
        }
    }

    #[test]
    fn devices_without_identity_are_named() {
        let world = World::new();
        let (mut record, _) = world.open().unwrap();
        assert_eq!(record.unidentified_devices(), [""; 0]);
        let uri = "mirror:[ram:1m],[null:1m]".parse().unwrap();
        let limits = NullDevice::new(512, 2048).unwrap().limits();
        record.contents.target = DeviceIdentity::from_device(CopySide::Target, &uri, &limits);
        assert_eq!(record.unidentified_devices(), ["ram:1m", "null:1m"]);
    }

    #[test]
    fn checkpoint_of_another_copy_is_rejected() {
        let world = World::new();
        world.open().unwrap().0.store_checkpoint(0, &[]).unwrap();
        let other = CheckpointFile::open(
            world.path("record"),
            world.identity(CopySide::Source, 4096),
            world.identity(CopySide::Target, 2048),
        );
        let refused = other.unwrap_err();
        assert!(
            refused
                .text
                .ends_with("the source is another: the record is of size 1048576, found 2097152")
        );
        assert!(refused.hint.unwrap().contains("remove "));

        std::fs::rename(world.path("source"), world.path("old")).unwrap();
        std::fs::copy(world.path("old"), world.path("source")).unwrap();
        let refused = world.open().unwrap_err();
        assert!(
            refused.text.contains("the source is another: the record is of file "),
            "{refused}"
        );
        std::fs::rename(world.path("old"), world.path("source")).unwrap();
        world.open().unwrap();

        std::fs::OpenOptions::new()
            .write(true)
            .open(world.path("source"))
            .unwrap()
            .set_modified(std::time::UNIX_EPOCH)
            .unwrap();
        let refused = world.open().unwrap_err();
        assert!(refused.text.ends_with("was changed since"), "{refused}");
        std::fs::OpenOptions::new()
            .write(true)
            .open(world.path("record"))
            .unwrap()
            .set_len(40)
            .unwrap();
        let refused = world.open().unwrap_err();
        assert!(refused.text.contains("it is not a record: "), "{refused}");
    }

    #[test]
    fn target_may_be_modified_by_its_own_copy() {
        let world = World::new();
        world.open().unwrap().0.store_checkpoint(512, &[]).unwrap();
        std::fs::OpenOptions::new()
            .write(true)
            .open(world.path("target"))
            .unwrap()
            .set_modified(std::time::UNIX_EPOCH)
            .unwrap();
        assert_eq!(world.open().unwrap().1.unwrap().until, 512);
    }

    #[test]
    fn default_checkpoint_is_beside_the_target_file() {
        let world = World::new();
        let target = world.path("target").display().to_string();
        let uri: Uri = format!("delay:[split:[file:{target}]?parts=2&part=0]").parse().unwrap();
        assert_eq!(backing_files(&uri), [world.path("target")]);
        assert_eq!(default_path(&uri), Some(world.path("target.resume")));
        assert_eq!(default_path(&"ram:1m".parse().unwrap()), None);
        assert_eq!(default_path(&"file:/dev/null".parse().unwrap()), None);
    }
}
