//! Reservation file of one namespace: its format and its atomic replacement.

use std::io;
use tenmil_base::Error;

/// File operations that the store needs.
pub(super) trait StateFs: Send {
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>>;
    /// Writes the content of a file. It may be lost until `sync`.
    fn write_pending(&mut self, name: &str, bytes: &[u8]) -> io::Result<()>;
    fn sync(&mut self, name: &str) -> io::Result<()>;
    /// Renames a file. The old or the new name may survive a power loss until `sync_directory`.
    fn rename(&mut self, from: &str, to: &str) -> io::Result<()>;
    fn remove(&mut self, name: &str) -> io::Result<()>;
    fn sync_directory(&mut self) -> io::Result<()>;
}

/// Location of a namespace's reservations.
#[derive(Clone)]
pub(super) struct RecordFile<D> {
    pub(super) disk: D,
    pub(super) name: String,
    pub(super) owner: RecordOwner,
    /// Path for messages.
    pub(super) shown: String,
}

/// Owner of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RecordOwner {
    pub(super) nqn: String,
    pub(super) nsid: u32,
    /// Identity of the disk: one line that no other disk has.
    pub(super) disk: String,
}

/// Format and version.
const FIRST_LINE: &[u8] = b"tenmil reservations 2\n";

impl RecordOwner {
    fn header_lines(&self) -> Vec<u8> {
        let Self { nqn, nsid, disk } = self;
        let lines = format!("subsystem {nqn}\nnamespace {nsid}\ndisk {disk}\n");
        [FIRST_LINE, lines.as_bytes()].concat()
    }
}

impl<D: StateFs> RecordFile<D> {
    pub(super) fn read_record(&self) -> Result<Option<Vec<u8>>, Error> {
        let found = self.disk.read(&self.name);
        let found = found
            .map_err(|error| format!("read {}: {error}", self.shown))
            .map_err(Error::environment)?;
        let Some(bytes) = found else { return Ok(None) };
        self.extract_record(&bytes).map(Some)
    }

    /// Rewrites the file, if it exists, for this disk.
    pub(super) fn adopt_for_disk(&mut self) -> Result<(), Error> {
        let found = self.disk.read(&self.name);
        let found = found
            .map_err(|error| format!("adopt {}: {error}", self.shown))
            .map_err(Error::environment)?;
        let Some(bytes) = found else { return Ok(()) };
        let (found, record) = self.parse_file(&bytes).map_err(Error::environment)?;
        if found.as_ref() == Some(&self.owner) { Ok(()) } else { self.write_record(Some(record)) }
    }

    /// Extracts the record, if the file belongs to this disk.
    fn extract_record(&self, bytes: &[u8]) -> Result<Vec<u8>, Error> {
        let (found, record) = self.parse_file(bytes).map_err(Error::environment)?;
        let Self { name, owner, shown, .. } = self;
        let RecordOwner { nqn, nsid, disk } = owner;
        let adopt = format!(
            "start once with `--adopt-reservations {name}`; or, to begin without reservations, `rm {shown}`"
        );
        match found {
            Some(found) if found == *owner => Ok(record.to_vec()),
            Some(found) => Err(Error::environment(format!(
                "read {shown}: it holds the reservations of disk `{}`, and namespace {nsid} of {nqn} is \
                 disk `{disk}`, expected the same disk: export that one as namespace {nsid}; or, if it \
                 was copied or restored to this one, {adopt}",
                found.disk
            ))),
            None => Err(Error::environment(format!(
                "read {shown}: its format is 1, which does not name the disk, expected \
                 disk `{disk}`: if that is the disk whose reservations they are, {adopt}"
            ))),
        }
    }

    /// Parses a file into its owner, if it names one, and the record.
    fn parse_file<'a>(&self, bytes: &'a [u8]) -> Result<(Option<RecordOwner>, &'a [u8]), String> {
        let Self { owner, shown, .. } = self;
        let wrong = |found: &str| {
            format!(
                "read {shown}: {found}, expected namespace {} of {}: `rm {shown}` to begin without \
                 reservations",
                owner.nsid, owner.nqn
            )
        };
        let old =
            bytes.strip_prefix(owner.nqn.as_bytes()).and_then(|rest| rest.strip_prefix(b"\n"));
        if let Some(record) = old {
            return Ok((None, record));
        }
        let rest = bytes.strip_prefix(FIRST_LINE).ok_or_else(|| {
            wrong("its first line is neither `tenmil reservations 2` nor the name of the subsystem")
        })?;
        let mut rest = rest;
        let mut field = |key: &str| -> Option<&'a str> {
            let end = rest.iter().position(|byte| *byte == b'\n')?;
            let (line, behind) = rest.split_at_checked(end)?;
            rest = behind.get(1..)?;
            core::str::from_utf8(line).ok()?.strip_prefix(key)?.strip_prefix(' ')
        };
        let nqn = field("subsystem");
        let nsid = field("namespace").and_then(|nsid| nsid.parse::<u32>().ok());
        let (Some(nqn), Some(nsid), Some(disk)) = (nqn, nsid, field("disk")) else {
            return Err(wrong("its lines for subsystem, namespace and disk cannot be read"));
        };
        if nqn != owner.nqn || nsid != owner.nsid {
            return Err(wrong(&format!("it is of namespace {nsid} of {nqn}")));
        }
        let found = RecordOwner { nqn: nqn.to_owned(), nsid, disk: disk.to_owned() };
        Ok((Some(found), rest))
    }

    pub(super) fn write_record(&mut self, record: Option<&[u8]>) -> Result<(), Error> {
        let Self { disk, name, owner, shown } = self;
        let wrong = |error: io::Error| format!("write {shown}: {error}");
        let before = disk.read(name).map_err(wrong).map_err(Error::environment)?;
        let bytes = record.map(|record| [&owner.header_lines(), record].concat());
        replace_file(disk, name, bytes.as_deref()).map_err(wrong).map_err(Error::environment)?;
        let Err(error) = disk.sync_directory() else { return Ok(()) };
        // The rename may have become durable. Restore the old file, or a restart would find a
        // change that was reported as failed.
        let back = replace_file(disk, name, before.as_deref()).and_then(|()| disk.sync_directory());
        Err(match back {
            Ok(()) => Error::environment(wrong(error)),
            Err(worse) => Error::environment(format!(
                "write {shown}: {error}; the previous content could not be restored ({worse}), so a \
                 restart may find the change that is rejected now"
            )),
        })
    }
}

/// Replaces a file atomically, or removes it. The caller makes it durable with `sync_directory`.
fn replace_file(disk: &mut impl StateFs, name: &str, bytes: Option<&[u8]>) -> io::Result<()> {
    let Some(bytes) = bytes else { return disk.remove(name) };
    let temporary = format!("{name}.new");
    disk.write_pending(&temporary, bytes)?;
    disk.sync(&temporary)?;
    disk.rename(&temporary, name)
}
