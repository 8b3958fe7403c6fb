//! Receives a snapshot from a stream.
//!
//! Data is written to a volume `NAME.incomplete`, which becomes the snapshot `NAME` once the stream is
//! complete and valid.

use std::io::{ErrorKind, Read};
use std::sync::Arc;

use tenmil_base::{ErrorCategory, Span};
use tenmil_volume::snapshot_stream::{StreamError, StreamEvent, StreamInfo, StreamParser};
use tenmil_volume::{VolumeInfo, VolumeOp};

use super::blocking_volume_io::BlockingVolumeIo;
use super::scrub::STREAM_WAIT_MAX;
use super::send_stream::{ProgressFn, TransferSummary};
use super::{OpenPool, PAGE_BYTES};
use tenmil_base::Error;

/// Suffix of the name of a snapshot that is being received.
pub const INCOMPLETE: &str = ".incomplete";
/// Maximum length of a volume name.
const NAME_BYTES_MAX: usize = 128;
/// How long an interrupted receive may take to clean up before the next one is rejected.
const CLEARING_MAX: Span = Span::from_secs(1);
const CLEARING_LOOK: Span = Span::from_ms(5);
/// Maximum wait for the space of leftovers to be freed.
const GIVING_BACK_MAX: Span = Span::from_secs(30);

/// An incoming stream.
struct StreamReader<'a> {
    input: &'a mut dyn Read,
    receiver: StreamParser,
    bytes: Vec<u8>,
}

/// Name of a volume while it is received; its UUID replaces a name that is too long for the suffix.
pub(super) fn incomplete_name(name: &str, uuid: u128) -> String {
    match name.len() + INCOMPLETE.len() {
        ..=NAME_BYTES_MAX => format!("{name}{INCOMPLETE}"),
        _ => format!("{uuid:032x}{INCOMPLETE}"),
    }
}

impl StreamReader<'_> {
    /// The next event. Its bytes are in `bytes`.
    fn next_event(&mut self) -> Result<StreamEvent, StreamReadError> {
        self.bytes.resize(self.receiver.bytes_needed(), 0);
        match self.input.read_exact(&mut self.bytes) {
            Ok(()) => Ok(self.receiver.handle(&self.bytes)?),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                Err(self.receiver.truncated_error().into())
            }
            Err(error) => Err(StreamReadError::Input(error)),
        }
    }
}

/// A snapshot that is being received: one at a time per name.
struct ReceiveGuard<'a> {
    open: &'a OpenPool,
    part: String,
}

impl Drop for ReceiveGuard<'_> {
    fn drop(&mut self) {
        self.open.shared.lock().arriving.retain(|part| *part != self.part);
    }
}

/// Why a stream ends early.
enum StreamReadError {
    Stream(StreamError),
    Input(std::io::Error),
}

impl From<StreamError> for StreamReadError {
    fn from(error: StreamError) -> Self {
        Self::Stream(error)
    }
}

impl OpenPool {
    /// Receives the snapshot `name` from a stream. A snapshot that exists already is verified: the stream
    /// is read with its checksums, and nothing is written.
    ///
    /// # Errors
    ///
    /// If the stream is invalid or incomplete, its base is not in the pool, the name is in use, or the
    /// pool is full. The pool is then unchanged. If the cleanup failed, or the process was killed, a
    /// volume `name.incomplete` remains.
    pub fn receive_stream(
        self: &Arc<Self>,
        name: &str,
        input: &mut dyn Read,
        watch: &mut ProgressFn<'_>,
    ) -> Result<TransferSummary, Error> {
        let mut source = StreamReader { input, receiver: StreamParser::new(), bytes: Vec::new() };
        let refuse = |broken| self.receive_error(name, broken);
        let StreamEvent::Begun(contents) = source.next_event().map_err(refuse)? else {
            return Err(refuse(source.receiver.truncated_error().into()));
        };
        let part = incomplete_name(name, contents.uuid);
        let arrival = self.register_receive_by_name(name, &part)?;
        let volumes = self.list_volumes()?;
        if let Some(there) = volumes.iter().find(|one| one.name == name) {
            return self.receive_as_existing(there, &contents, &mut source);
        }
        let base = self.incremental_base(&volumes, &contents)?;
        self.delete_incomplete(&volumes, &part, &contents)?;
        let StreamInfo { blocks, unit, uuid, has_checksums: checksums, .. } = contents;
        let made = match &base {
            None => VolumeOp::Create { name: part.clone(), blocks, unit, uuid, checksums },
            Some(base) => VolumeOp::Clone { from: base.name.clone(), name: part.clone(), uuid },
        };
        self.execute_volume_op(made)?;
        let filled =
            self.receive_into_volume((name, &part), base.as_ref(), &contents, &mut source, watch);
        let filled = filled.inspect_err(|_| {
            // The cause of the failure matters more than the leftovers.
            let _ = self.execute_volume_op(VolumeOp::Delete { name: part.clone(), orphan: false });
        });
        // The next receive does not wait for the space to be freed.
        drop(arrival);
        let (info, (data_blocks, hole_blocks)) = filled.inspect_err(|_| {
            self.wait_for_reclaim(GIVING_BACK_MAX);
        })?;
        Ok(TransferSummary { info, base, data_blocks, hole_blocks, was_there: false })
    }

    /// Writes the stream to the volume `part`, and converts it to the snapshot. Concurrent changes by
    /// other clients are detected.
    fn receive_into_volume(
        self: &Arc<Self>,
        (name, part): (&str, &str),
        base: Option<&VolumeInfo>,
        contents: &StreamInfo,
        source: &mut StreamReader<'_>,
        watch: &mut ProgressFn<'_>,
    ) -> Result<(VolumeInfo, (u64, u64)), Error> {
        let StreamInfo { blocks, uuid, .. } = *contents;
        let other = |which: &str| {
            let text = format!(
                "{}: receive `{name}`: `{which}` has become another volume meanwhile, expected that \
                 it stays what it is",
                self.name
            );
            Error::new(ErrorCategory::Usage, text).with_hint("Send it again.".to_owned())
        };
        let there = self.find_volume(part)?;
        if let Some(base) = base.filter(|base| base.id != there.origin) {
            return Err(other(&base.name));
        }
        if there.blocks != blocks {
            self.execute_volume_op(VolumeOp::Resize { name: part.to_owned(), blocks })?;
        }
        let carrier = BlockingVolumeIo::open(self, &self.find_volume(part)?, None)?;
        let written = self.write_stream_data(name, carrier, source, blocks, watch)?;
        if self.find_volume(part)?.id != there.id {
            return Err(other(part));
        }
        let sealed = self.execute_volume_op(VolumeOp::ConvertToSnapshot {
            name: part.to_owned(),
            to: name.into(),
            uuid,
        })?;
        Ok((sealed.map_or_else(|| self.find_volume(name), Ok)?, written))
    }

    /// Starts a receive, unless another one of the same name is in progress.
    fn register_receive_by_name(&self, name: &str, part: &str) -> Result<ReceiveGuard<'_>, Error> {
        let until = self.clock.now().after(CLEARING_MAX);
        while !self.shared.lock().register_receive(part) {
            if self.clock.now() > until {
                return Err(self.already_receiving_error(name));
            }
            tenmil_linux::named_thread::sleep(CLEARING_LOOK);
        }
        Ok(ReceiveGuard { open: self, part: part.to_owned() })
    }

    fn already_receiving_error(&self, name: &str) -> Error {
        let text = format!(
            "{}: receive `{name}`: it is being received already, expected once at a time",
            self.name
        );
        let hint = "Wait for the other one to end, or stop it: see `tenmil get jobs`.";
        Error::new(ErrorCategory::Usage, text).with_hint(hint)
    }

    /// Writes the stream until its end. Returns the number of blocks of data and of holes.
    fn write_stream_data(
        &self,
        name: &str,
        mut carrier: BlockingVolumeIo,
        source: &mut StreamReader<'_>,
        blocks: u64,
        watch: &mut ProgressFn<'_>,
    ) -> Result<(u64, u64), Error> {
        let page = u64::from(PAGE_BYTES);
        let (mut data_blocks, mut hole_blocks) = (0, 0);
        loop {
            let at = match source.next_event().map_err(|broken| self.receive_error(name, broken))? {
                StreamEvent::Data { block } => {
                    self.write_with_low_priority(&mut carrier, block, &source.bytes)?;
                    let count = source.bytes.len() as u64 / page;
                    data_blocks += count;
                    block + count
                }
                StreamEvent::Hole { block, blocks } => {
                    carrier.deallocate(block, blocks)?;
                    hole_blocks += blocks;
                    block + blocks
                }
                StreamEvent::Ended => return Ok((data_blocks, hole_blocks)),
                StreamEvent::Begun(_) | StreamEvent::More => continue,
            };
            if !watch((at * page, blocks * page)) {
                return Err(self.interrupted_error());
            }
        }
    }

    /// Writes blocks with priority for foreground I/O.
    fn write_with_low_priority(
        &self,
        carrier: &mut BlockingVolumeIo,
        block: u64,
        bytes: &[u8],
    ) -> Result<(), Error> {
        let page = PAGE_BYTES as usize;
        let (mut at, mut left) = (block, bytes);
        while !left.is_empty() {
            let polite = self.wait_for_foreground_idle(STREAM_WAIT_MAX);
            let count = (left.len() / page).min(usize::try_from(polite).unwrap_or(usize::MAX));
            let (now, then) = left.split_at(count * page);
            carrier.write(at, now)?;
            (at, left) = (at + count as u64, then);
        }
        Ok(())
    }

    /// A volume of this name exists already.
    fn receive_as_existing(
        &self,
        there: &VolumeInfo,
        contents: &StreamInfo,
        source: &mut StreamReader<'_>,
    ) -> Result<TransferSummary, Error> {
        if there.uuid != contents.uuid || !there.is_read_only {
            let text = format!(
                "{}: `{}`: the name is in use, by {:032x}, expected none or {:032x}",
                self.name, there.name, there.uuid, contents.uuid
            );
            let hint = "Receive it under another name.".to_owned();
            return Err(Error::new(ErrorCategory::Usage, text).with_hint(hint));
        }
        loop {
            let event =
                source.next_event().map_err(|broken| self.receive_error(&there.name, broken))?;
            if event == StreamEvent::Ended {
                let info = there.clone();
                let (base, data_blocks, hole_blocks) = (None, 0, 0);
                return Ok(TransferSummary {
                    info,
                    base,
                    data_blocks,
                    hole_blocks,
                    was_there: true,
                });
            }
        }
    }

    /// The snapshot that an incremental stream is based on.
    fn incremental_base(
        &self,
        volumes: &[VolumeInfo],
        contents: &StreamInfo,
    ) -> Result<Option<VolumeInfo>, Error> {
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
        Err(Error::new(ErrorCategory::Usage, text).with_hint(hint))
    }

    /// Deletes the leftovers of an earlier receive of the same snapshot.
    fn delete_incomplete(
        &self,
        volumes: &[VolumeInfo],
        part: &str,
        contents: &StreamInfo,
    ) -> Result<(), Error> {
        let Some(left) = volumes.iter().find(|one| one.name == part) else { return Ok(()) };
        if left.uuid != contents.uuid {
            let text = format!(
                "{}: `{part}` is {:032x}, expected what an earlier receive of {:032x} has left",
                self.name, left.uuid, contents.uuid
            );
            let hint =
                format!("Delete `{part}` if it is not needed, or receive under another name.");
            return Err(Error::new(ErrorCategory::Usage, text).with_hint(hint));
        }
        self.execute_volume_op(VolumeOp::Delete { name: part.into(), orphan: false })?;
        self.wait_for_reclaim(GIVING_BACK_MAX);
        Ok(())
    }

    fn receive_error(&self, name: &str, broken: StreamReadError) -> Error {
        let from = format!("{}: receive `{name}`", self.name);
        match broken {
            StreamReadError::Stream(error) => {
                Error::new(error.category(), format!("{from}: {error}")).with_hint(error.hint())
            }
            StreamReadError::Input(error) => {
                Error::new(ErrorCategory::Environment, format!("{from}: read the stream: {error}"))
            }
        }
    }
}
