//! The record of a copy: what is surely on the target, and of which source and target that is true.
//!
//! ```text
//!   { "version": 1,
//!     "source": { "uri", "size_bytes", "block_size", "files": [ { "path", "device", … } ] },
//!     "target": …,
//!     "until": 1048576, "lost": [ [ 0, 512 ] ] }
//! ```
//!
//! A new one is written beside the old one, flushed, and takes its name: at any time there is one
//! that is whole.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use base::Limits;
use block::uri::Uri;
use host::holders::{Hardware, Place};
use host::machine::Machine;
use serde::{Deserialize, Serialize};

use super::outcome::{Tally, Which};
use super::pass::Keep;
use crate::Refused;
use crate::refused::reason;

/// A file that says how far a copy is.
#[derive(Debug)]
pub struct Record {
    path: PathBuf,
    contents: Contents,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Contents {
    version: u32,
    source: Identity,
    target: Identity,
    until: u64,
    lost: Vec<[u64; 2]>,
}

/// Which device it is: as much as can be known of it before it is read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    uri: String,
    size_bytes: u64,
    block_size: u32,
    files: Vec<Leaf>,
}

/// A file or a device of the kernel that it stands on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Leaf {
    path: String,
    /// Where the kernel keeps it, and when it was made; of a device, which one it is.
    which: String,
    /// When it was changed last; of the source only, since a copy changes its target.
    modified_ns: Option<String>,
}

const VERSION: u32 = 1;

impl Identity {
    /// The device that `uri` names, which has been opened.
    pub fn of(which: Which, uri: &Uri, limits: &Limits) -> Self {
        let leaf = |path: &PathBuf| Leaf {
            path: path.canonicalize().unwrap_or_else(|_| path.clone()).display().to_string(),
            which: describe(path).unwrap_or_default(),
            modified_ns: (which == Which::Source).then(|| modified_ns(path)).flatten(),
        };
        Self {
            uri: uri.to_string(),
            size_bytes: super::geometry::size_bytes(limits),
            block_size: limits.block_size,
            files: files_of(uri).iter().map(leaf).collect(),
        }
    }
}

/// The files and devices of the kernel that a device stands on.
pub fn files_of(uri: &Uri) -> Vec<PathBuf> {
    if uri.scheme() == "file" {
        return vec![uri.path().into()];
    }
    uri.children().iter().flat_map(files_of).collect()
}

/// The record of a copy to `target` where none is named: beside the first regular file that it
/// stands on.
pub fn usual_path(target: &Uri) -> Option<PathBuf> {
    let is_file = |path: &&PathBuf| path.metadata().is_ok_and(|found| found.is_file());
    let file = files_of(target).iter().find(is_file).cloned()?;
    let mut name = file.into_os_string();
    name.push(".resume");
    Some(name.into())
}

fn describe(path: &Path) -> Option<String> {
    let found = path.metadata().ok()?;
    if found.file_type().is_block_device() {
        let hardware = Hardware::of(&Machine::this(), &Place::of(path));
        let words = [hardware.model, hardware.serial, hardware.wwid];
        let words: Vec<String> = words.into_iter().flatten().collect();
        return Some(format!("device {:x} {}", found.rdev(), words.join(" ")));
    }
    let born = found.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let born = born.map_or_else(String::new, |born| format!(", made at {}", born.as_nanos()));
    Some(format!("inode {} of {:x}{born}", found.ino(), found.dev()))
}

fn modified_ns(path: &Path) -> Option<String> {
    let found = path.metadata().ok()?;
    found.is_file().then(|| format!("{}.{:09}", found.mtime(), found.mtime_nsec()))
}

impl Record {
    /// The record at `path` of a copy from `source` to `target`, and what had been done if there was
    /// one already.
    ///
    /// # Errors
    ///
    /// If there is one that does not fit.
    pub fn open(
        path: PathBuf,
        source: Identity,
        target: Identity,
    ) -> Result<(Self, Option<Tally>), Refused> {
        let contents = Contents { version: VERSION, source, target, until: 0, lost: Vec::new() };
        let found = match std::fs::read_to_string(&path) {
            Ok(text) => Some(text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                let (path, why) = (path.display(), reason(&error));
                return Err(Refused::caller(format!("read the record {path}: {why}")));
            }
        };
        let Some(text) = found else { return Ok((Self { path, contents }, None)) };
        let found = fit(&text, &contents).map_err(|why| {
            let shown = path.display();
            Refused::caller(format!("go on with the copy of {shown}: {why}")).with_hint(format!(
                "To begin anew, remove {shown}; to go on elsewhere, name another record with \
                 --resume."
            ))
        })?;
        let tally = Tally {
            until: found.until,
            lost: found.lost.iter().map(|[start, end]| *start..*end).collect(),
            ..Tally::default()
        };
        Ok((Self { path, contents: found }, Some(tally)))
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The copy is whole, and needs no record.
    ///
    /// # Errors
    ///
    /// A line, if the file stays.
    pub fn remove(self) -> Result<(), String> {
        match std::fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(format!("remove the record {}: {}", self.path.display(), reason(&error)))
            }
            _ => Ok(()),
        }
    }

    fn write(&self) -> io::Result<()> {
        let mut name = self.path.clone().into_os_string();
        name.push(".new");
        let beside = PathBuf::from(name);
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).open(&beside)?;
        let mut text = serde_json::to_string_pretty(&self.contents)?;
        text.push('\n');
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&beside, &self.path)?;
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or_else(|| Path::new("."));
        OpenOptions::new().read(true).open(parent)?.sync_all()
    }
}

/// What a record says, if it is one of this copy.
fn fit(text: &str, expected: &Contents) -> Result<Contents, String> {
    let found: Contents =
        serde_json::from_str(text).map_err(|error| format!("it is not a record: {error}"))?;
    if found.version != VERSION {
        return Err(format!("it has version {}, expected {VERSION}", found.version));
    }
    let sides = [
        (Which::Source, &found.source, &expected.source),
        (Which::Target, &found.target, &expected.target),
    ];
    for (which, found, expected) in sides {
        if found != expected {
            return Err(format!("{which} is another: {}", difference(found, expected)));
        }
    }
    let is_whole = found.until <= found.source.size_bytes
        && found.lost.iter().all(|[start, end]| start < end && *end <= found.source.size_bytes);
    if !is_whole {
        return Err("it says more than there is on the source".into());
    }
    let lost = found.lost.iter().filter(|[start, _]| *start < found.until);
    let lost = lost.map(|[start, end]| [*start, (*end).min(found.until)]).collect();
    Ok(Contents { lost, ..found })
}

/// What differs first, in words.
fn difference(found: &Identity, expected: &Identity) -> String {
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
            let file = |leaf: &Leaf| format!("{} ({})", leaf.path, leaf.which);
            return say("file", &file(found), &file(expected));
        }
        if found.modified_ns != expected.modified_ns {
            return format!("{} was changed since", expected.path);
        }
    }
    "the record is of other files".into()
}

impl Keep for Record {
    fn keep(&mut self, until: u64, lost: &[Range<u64>]) -> Result<(), String> {
        self.contents.until = until;
        self.contents.lost = lost.iter().map(|range| [range.start, range.end]).collect();
        self.write().map_err(|error| {
            format!("write the record {}: {}", self.path.display(), reason(&error))
        })
    }
}

#[cfg(test)]
mod tests {
    use base::Medium;
    use block::Null;
    use block::uri::Uri;

    use super::{Identity, Record, files_of, usual_path};
    use crate::copy::outcome::{Tally, Which};
    use crate::copy::pass::Keep;

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

        fn identity(&self, which: Which, blocks: u64) -> Identity {
            let name = if which == Which::Source { "source" } else { "target" };
            let uri = Uri::new("file", self.path(name).display().to_string());
            Identity::of(which, &uri, &Null::new(512, blocks).unwrap().limits())
        }

        fn open(&self) -> Result<(Record, Option<Tally>), crate::Refused> {
            let identity = |which| self.identity(which, 2048);
            Record::open(self.path("record"), identity(Which::Source), identity(Which::Target))
        }
    }

    #[test]
    fn what_was_kept_is_found_again_and_gone_when_it_is_done() {
        let world = World::new();
        let (mut record, found) = world.open().unwrap();
        assert_eq!(found, None);
        record.keep(4096, &[0..512, 2048..8192]).unwrap();
        let (again, found) = world.open().unwrap();
        let found = found.unwrap();
        assert_eq!((found.until, found.lost), (4096, vec![0..512, 2048..4096]), "and no further");
        again.remove().unwrap();
        assert_eq!(world.open().unwrap().1, None);
        assert!(!world.path("record.new").exists());
    }

    #[test]
    fn a_record_of_something_else_is_refused() {
        let world = World::new();
        world.open().unwrap().0.keep(0, &[]).unwrap();
        let other = Record::open(
            world.path("record"),
            world.identity(Which::Source, 4096),
            world.identity(Which::Target, 2048),
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
    fn a_target_may_be_changed_by_its_copy() {
        let world = World::new();
        world.open().unwrap().0.keep(512, &[]).unwrap();
        std::fs::OpenOptions::new()
            .write(true)
            .open(world.path("target"))
            .unwrap()
            .set_modified(std::time::UNIX_EPOCH)
            .unwrap();
        assert_eq!(world.open().unwrap().1.unwrap().until, 512);
    }

    #[test]
    fn a_record_lies_beside_the_file_it_is_about() {
        let world = World::new();
        let target = world.path("target").display().to_string();
        let uri: Uri = format!("delay:[split:[file:{target}]?parts=2&part=0]").parse().unwrap();
        assert_eq!(files_of(&uri), [world.path("target")]);
        assert_eq!(usual_path(&uri), Some(world.path("target.resume")));
        assert_eq!(usual_path(&"ram:1m".parse().unwrap()), None);
        assert_eq!(usual_path(&"file:/dev/null".parse().unwrap()), None);
    }
}
