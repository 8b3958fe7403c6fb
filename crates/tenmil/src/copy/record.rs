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

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use block::uri::Uri;
use host::file::reach;
use host::random_seed;
use serde::{Deserialize, Serialize};

use super::identity::{Identity, difference, files_of, number};
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

const VERSION: u32 = 1;

/// The record of a copy to `target` where none is named: beside the first regular file that it
/// stands on.
pub fn usual_path(target: &Uri) -> Option<PathBuf> {
    let is_file = |path: &&PathBuf| reach(path).metadata().is_ok_and(|found| found.is_file());
    let file = files_of(target).iter().find(is_file).cloned()?;
    let mut name = file.into_os_string();
    name.push(".resume");
    Some(name.into())
}

impl Record {
    /// The record at `path` of a copy from `source` to `target`, and what had been done if there was
    /// one already.
    ///
    /// # Errors
    ///
    /// If there is one that does not fit, or something else has its place.
    pub fn open(
        path: PathBuf,
        source: Identity,
        target: Identity,
    ) -> Result<(Self, Option<Tally>), Refused> {
        check_place(&path, [(Which::Source, &source), (Which::Target, &target)])?;
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

    /// What of both sides nothing tells from others, so that the record may be of another.
    pub fn unmarked(&self) -> Vec<&str> {
        let Contents { source, target, .. } = &self.contents;
        source.unmarked().chain(target.unmarked()).collect()
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
        // A name that nobody has: a file that lies beside the record may be anybody's.
        let mut name = self.path.clone().into_os_string();
        name.push(format!(".{}-{:016x}.new", std::process::id(), random_seed()));
        let beside = PathBuf::from(name);
        let file = OpenOptions::new().write(true).create_new(true).open(&beside)?;
        let taken = self.fill(file).and_then(|()| std::fs::rename(&beside, &self.path));
        if taken.is_err() {
            let _ = std::fs::remove_file(&beside);
        }
        taken?;
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or_else(|| Path::new("."));
        OpenOptions::new().read(true).open(parent)?.sync_all()
    }

    fn fill(&self, mut file: File) -> io::Result<()> {
        let mut text = serde_json::to_string_pretty(&self.contents)?;
        text.push('\n');
        file.write_all(text.as_bytes())?;
        file.sync_all()
    }
}

/// Refuses a record in the place of something else, which it would take.
fn check_place(path: &Path, sides: [(Which, &Identity); 2]) -> Result<(), Refused> {
    let refuse = |text: String| {
        Err(Refused::caller(text).with_hint("Name a file for the record with --resume."))
    };
    let Some(own) = number(path) else { return Ok(()) };
    let shown = path.display();
    for (which, identity) in sides {
        if identity.stands_on(own) {
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

    use super::{Record, usual_path};
    use crate::copy::identity::{Identity, files_of};
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
        assert_eq!(world.root.path().read_dir().unwrap().count(), 2, "nothing lies beside it");
    }

    #[test]
    fn a_record_that_cannot_be_kept_leaves_nothing_beside_it() {
        let world = World::new();
        let mut record = world.open().unwrap().0;
        std::fs::create_dir(world.path("record")).unwrap();
        std::fs::rename(world.path("source"), world.path("record.new")).unwrap();
        let text = record.keep(0, &[]).unwrap_err();
        assert!(text.starts_with("write the record "), "{text}");
        assert_eq!(world.root.path().read_dir().unwrap().count(), 3);
        assert_eq!(world.path("record.new").metadata().unwrap().len(), 1 << 20, "somebody's");
        let refused = world.open().unwrap_err();
        assert!(refused.text.ends_with("it is no regular file, expected a file"), "{refused}");
    }

    #[test]
    fn a_record_does_not_take_the_place_of_what_is_copied() {
        let world = World::new();
        std::fs::hard_link(world.path("target"), world.path("link")).unwrap();
        for (name, which) in [("source", "source"), ("target", "target"), ("link", "target")] {
            let identity = |which| world.identity(which, 2048);
            let (source, target) = (identity(Which::Source), identity(Which::Target));
            let refused = Record::open(world.path(name), source, target).unwrap_err();
            assert!(refused.text.contains(&format!("is what the {which} stands on")), "{refused}");
        }
    }

    #[test]
    fn what_nothing_tells_from_others_is_named() {
        let world = World::new();
        let (mut record, _) = world.open().unwrap();
        assert_eq!(record.unmarked(), [""; 0]);
        let uri = "mirror:[ram:1m],[null:1m]".parse().unwrap();
        let limits = Null::new(512, 2048).unwrap().limits();
        record.contents.target = Identity::of(Which::Target, &uri, &limits);
        assert_eq!(record.unmarked(), ["ram:1m", "null:1m"]);
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
