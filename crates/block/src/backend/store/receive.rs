//! A snapshot from a stream.
//!
//! What comes is written to a volume `NAME.incomplete`, that becomes the snapshot `NAME` once all of
//! it was right.

use std::io::{ErrorKind, Read};
use std::sync::Arc;

use base::{Blame, Span};
use volume::stream::{Contents, Event, Receiver, StreamError};
use volume::{Change, VolumeInfo};

use super::carrier::Carrier;
use super::scrub::STREAM_WAIT_MAX;
use super::send::{Carried, Watch};
use super::{OpenStore, PAGE_BYTES};
use crate::MediumError;

/// What is behind the name of a snapshot that has not arrived.
pub const INCOMPLETE: &str = ".incomplete";
/// The longest name of a volume.
const NAME_BYTES_MAX: usize = 128;
/// How long one who was cut may take to clear away what he wrote, before the next one is refused.
const CLEARING_MAX: Span = Span::from_secs(1);
const CLEARING_LOOK: Span = Span::from_ms(5);
/// How long the room of what was left behind may take to be given back.
const GIVING_BACK_MAX: Span = Span::from_secs(30);

/// A stream as it comes.
struct Source<'a> {
    input: &'a mut dyn Read,
    receiver: Receiver,
    bytes: Vec<u8>,
}

/// What a volume is called until all of it is there: by its number where its name is too long for more.
pub(super) fn incomplete(name: &str, uuid: u128) -> String {
    match name.len() + INCOMPLETE.len() {
        ..=NAME_BYTES_MAX => format!("{name}{INCOMPLETE}"),
        _ => format!("{uuid:032x}{INCOMPLETE}"),
    }
}

impl Source<'_> {
    /// What comes next. The bytes that say so are in `bytes`.
    fn next(&mut self) -> Result<Event, Broken> {
        self.bytes.resize(self.receiver.wants(), 0);
        match self.input.read_exact(&mut self.bytes) {
            Ok(()) => Ok(self.receiver.handle(&self.bytes)?),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                Err(self.receiver.cut().into())
            }
            Err(error) => Err(Broken::Input(error)),
        }
    }
}

/// A snapshot that is being received: by one at a time.
struct Arrival<'a> {
    open: &'a OpenStore,
    part: String,
}

impl Drop for Arrival<'_> {
    fn drop(&mut self) {
        self.open.shared.lock().arriving.retain(|part| *part != self.part);
    }
}

/// Why nothing more comes.
enum Broken {
    Stream(StreamError),
    Input(std::io::Error),
}

impl From<StreamError> for Broken {
    fn from(error: StreamError) -> Self {
        Self::Stream(error)
    }
}

impl OpenStore {
    /// Makes the snapshot `name` from a stream. What was received already is compared with its
    /// checksums, and left as it is.
    ///
    /// # Errors
    ///
    /// If the stream is not right or not whole, its base is not in the store, the name is in use, or
    /// there is no room. The store is as it was then; if it could not be cleared away, or the process
    /// was killed, there is a volume `name.incomplete`.
    pub fn receive(
        self: &Arc<Self>,
        name: &str,
        input: &mut dyn Read,
        watch: &mut Watch<'_>,
    ) -> Result<Carried, MediumError> {
        let mut source = Source { input, receiver: Receiver::new(), bytes: Vec::new() };
        let refuse = |broken| self.broken_stream(name, broken);
        let Event::Begun(contents) = source.next().map_err(refuse)? else {
            return Err(refuse(source.receiver.cut().into()));
        };
        let part = incomplete(name, contents.uuid);
        let arrival = self.arrive(name, &part)?;
        let volumes = self.list()?;
        if let Some(there) = volumes.iter().find(|one| one.name == name) {
            return self.compare(there, &contents, &mut source);
        }
        let base = self.base_of(&volumes, &contents)?;
        self.clear_away(&volumes, &part, &contents)?;
        let Contents { blocks, unit, uuid, has_checksums: checksums, .. } = contents;
        let made = match &base {
            None => Change::Create { name: part.clone(), blocks, unit, uuid, checksums },
            Some(base) => Change::Clone { from: base.name.clone(), name: part.clone(), uuid },
        };
        self.change(made)?;
        let filled = self.fill((name, &part), base.as_ref(), &contents, &mut source, watch);
        let filled = filled.inspect_err(|_| {
            // Why it was not received matters more than what is left of it.
            let _ = self.change(Change::Delete { name: part.clone(), orphan: false });
        });
        // Whoever receives it next does not wait for its room.
        drop(arrival);
        let (info, (data_blocks, hole_blocks)) = filled.inspect_err(|_| {
            self.settle(GIVING_BACK_MAX);
        })?;
        Ok(Carried { info, base, data_blocks, hole_blocks, was_there: false })
    }

    /// Writes what comes to a volume that is there for it, and makes it the snapshot. Others who have the
    /// store open may give names to other volumes meanwhile.
    fn fill(
        self: &Arc<Self>,
        (name, part): (&str, &str),
        base: Option<&VolumeInfo>,
        contents: &Contents,
        source: &mut Source<'_>,
        watch: &mut Watch<'_>,
    ) -> Result<(VolumeInfo, (u64, u64)), MediumError> {
        let Contents { blocks, uuid, .. } = *contents;
        let other = |which: &str| {
            let text = format!(
                "{}: receive `{name}`: `{which}` has become another volume meanwhile, expected that \
                 it stays what it is",
                self.name
            );
            MediumError::new(Blame::Caller, text).with_hint("Send it again.".to_owned())
        };
        let there = self.find(part)?;
        if let Some(base) = base.filter(|base| base.id != there.origin) {
            return Err(other(&base.name));
        }
        if there.blocks != blocks {
            self.change(Change::Resize { name: part.to_owned(), blocks })?;
        }
        let carrier = Carrier::open(self, &self.find(part)?, None)?;
        let written = self.write_all(name, carrier, source, blocks, watch)?;
        if self.find(part)?.id != there.id {
            return Err(other(part));
        }
        let sealed = self.change(Change::Seal { name: part.to_owned(), to: name.into(), uuid })?;
        Ok((sealed.map_or_else(|| self.find(name), Ok)?, written))
    }

    /// Begins to receive a snapshot, unless somebody else does and goes on with it.
    fn arrive(&self, name: &str, part: &str) -> Result<Arrival<'_>, MediumError> {
        let until = self.clock.now().after(CLEARING_MAX);
        while !self.shared.lock().begin_to_arrive(part) {
            if self.clock.now() > until {
                return Err(self.arrives_already(name));
            }
            host::thread::rest(CLEARING_LOOK);
        }
        Ok(Arrival { open: self, part: part.to_owned() })
    }

    fn arrives_already(&self, name: &str) -> MediumError {
        let text = format!(
            "{}: receive `{name}`: it is being received already, expected once at a time",
            self.name
        );
        let hint = "Wait for the other one to end, or stop it: see `tenmil get jobs`.";
        MediumError::new(Blame::Caller, text).with_hint(hint)
    }

    /// Writes what comes until it has ended. Returns how many blocks of data and of holes there were.
    fn write_all(
        &self,
        name: &str,
        mut carrier: Carrier,
        source: &mut Source<'_>,
        blocks: u64,
        watch: &mut Watch<'_>,
    ) -> Result<(u64, u64), MediumError> {
        let page = u64::from(PAGE_BYTES);
        let (mut data_blocks, mut hole_blocks) = (0, 0);
        loop {
            let at = match source.next().map_err(|broken| self.broken_stream(name, broken))? {
                Event::Data { block } => {
                    self.write_politely(&mut carrier, block, &source.bytes)?;
                    let count = source.bytes.len() as u64 / page;
                    data_blocks += count;
                    block + count
                }
                Event::Hole { block, blocks } => {
                    carrier.trim(block, blocks)?;
                    hole_blocks += blocks;
                    block + blocks
                }
                Event::Ended => return Ok((data_blocks, hole_blocks)),
                Event::Begun(_) | Event::More => continue,
            };
            if !watch((at * page, blocks * page)) {
                return Err(self.interrupted());
            }
        }
    }

    /// Writes blocks behind others who have I/O under way.
    fn write_politely(
        &self,
        carrier: &mut Carrier,
        block: u64,
        bytes: &[u8],
    ) -> Result<(), MediumError> {
        let page = PAGE_BYTES as usize;
        let (mut at, mut left) = (block, bytes);
        while !left.is_empty() {
            let polite = self.let_others_go_first(STREAM_WAIT_MAX);
            let count = (left.len() / page).min(usize::try_from(polite).unwrap_or(usize::MAX));
            let (now, then) = left.split_at(count * page);
            carrier.write(at, now)?;
            (at, left) = (at + count as u64, then);
        }
        Ok(())
    }

    /// There is something of this name already.
    fn compare(
        &self,
        there: &VolumeInfo,
        contents: &Contents,
        source: &mut Source<'_>,
    ) -> Result<Carried, MediumError> {
        if there.uuid != contents.uuid || !there.is_read_only {
            let text = format!(
                "{}: `{}`: the name is in use, by {:032x}, expected none or {:032x}",
                self.name, there.name, there.uuid, contents.uuid
            );
            let hint = "Receive it under another name.".to_owned();
            return Err(MediumError::new(Blame::Caller, text).with_hint(hint));
        }
        loop {
            let event = source.next().map_err(|broken| self.broken_stream(&there.name, broken))?;
            if event == Event::Ended {
                let info = there.clone();
                let (base, data_blocks, hole_blocks) = (None, 0, 0);
                return Ok(Carried { info, base, data_blocks, hole_blocks, was_there: true });
            }
        }
    }

    /// The snapshot that the stream differs from.
    fn base_of(
        &self,
        volumes: &[VolumeInfo],
        contents: &Contents,
    ) -> Result<Option<VolumeInfo>, MediumError> {
        let Some((uuid, name)) = &contents.base else { return Ok(None) };
        let snapshots = || volumes.iter().filter(|one| one.is_read_only);
        if let Some(base) = snapshots().find(|one| one.uuid == *uuid) {
            return Ok(Some(base.clone()));
        }
        let found = match snapshots().find(|one| one.name == *name) {
            Some(other) => format!("found `{name}`, which is {:032x}", other.uuid),
            None => match snapshots().next_back() {
                Some(last) => {
                    format!("found {} others, the last `{}`", snapshots().count(), last.name)
                }
                None => "found no snapshot at all".into(),
            },
        };
        let text = format!(
            "{}: the stream has what `{}` has that `{name}` has not: {found}, expected snapshot \
             {uuid:032x}",
            self.name, contents.name
        );
        let hint = format!(
            "Receive `{name}` first, or send `{}` without --from; nothing was changed.",
            contents.name
        );
        Err(MediumError::new(Blame::Caller, text).with_hint(hint))
    }

    /// Deletes what an earlier receive of the same snapshot has left behind.
    fn clear_away(
        &self,
        volumes: &[VolumeInfo],
        part: &str,
        contents: &Contents,
    ) -> Result<(), MediumError> {
        let Some(left) = volumes.iter().find(|one| one.name == part) else { return Ok(()) };
        if left.uuid != contents.uuid {
            let text = format!(
                "{}: `{part}` is {:032x}, expected what an earlier receive of {:032x} has left",
                self.name, left.uuid, contents.uuid
            );
            let hint =
                format!("Delete `{part}` if nobody needs it, or receive under another name.");
            return Err(MediumError::new(Blame::Caller, text).with_hint(hint));
        }
        self.change(Change::Delete { name: part.into(), orphan: false })?;
        self.settle(GIVING_BACK_MAX);
        Ok(())
    }

    fn broken_stream(&self, name: &str, broken: Broken) -> MediumError {
        let from = format!("{}: receive `{name}`", self.name);
        match broken {
            Broken::Stream(error) => {
                MediumError::new(error.blame(), format!("{from}: {error}")).with_hint(error.hint())
            }
            Broken::Input(error) => {
                MediumError::new(Blame::Machine, format!("{from}: read the stream: {error}"))
            }
        }
    }
}
