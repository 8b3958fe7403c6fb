//! NBD workload of writes, forced writes (FUA), zeroes, reads and flushes, with several requests in
//! flight.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use tenmil_base::Random;

use super::crash_test_stack::RoundHistory;
use super::nbd_client::{NbdClient, NbdCommand, NbdReply};
use super::round_plan::RoundPlan;
use super::volume_model::{BLOCK_BYTES, FlushSet, VolumeModel, WrongSector};

/// Response timeout of a request, longer than every timeout of tenmil.
const RESPONSE_MAX: Duration = Duration::from_secs(90);
const STEP: Duration = Duration::from_millis(10);
/// Number of errors after which no new operation starts.
const ERRORS_MAX: u64 = 6;
const BLOCKS_MAX: u64 = 8;

/// Reason for the end of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WorkloadEnd {
    /// All requests were completed.
    Reply,
    /// The server closed the connection.
    Gone,
}

/// Operations of a round.
#[derive(Debug)]
pub(super) struct CrashWorkload {
    random: Random,
    operations: u64,
    left: u64,
    depth: usize,
    errors: u64,
    flight: BTreeMap<u64, WorkloadOperation>,
    /// Time of the last reply.
    heard: Instant,
}

#[derive(Debug)]
enum WorkloadOperation {
    Write { blocks: Range<usize>, version: u64, forced: bool },
    Read { blocks: Range<usize> },
    Flush { promise: FlushSet },
}

impl WorkloadOperation {
    fn blocks(&self) -> Range<usize> {
        match self {
            Self::Write { blocks, .. } | Self::Read { blocks } => blocks.clone(),
            Self::Flush { .. } => 0..0,
        }
    }
}

impl CrashWorkload {
    pub(super) fn new(plan: &RoundPlan) -> Self {
        Self {
            random: Random::new(plan.seed),
            operations: plan.operations,
            left: plan.operations,
            depth: plan.depth,
            errors: 0,
            flight: BTreeMap::new(),
            heard: Instant::now(),
        }
    }

    pub(super) fn is_half_done(&self) -> bool {
        self.left * 2 < self.operations
    }

    /// Submits requests up to the queue depth and handles one reply. `exact` is evaluated after the
    /// reply arrived; while it is true no data can have been lost, so no request may fail.
    pub(super) fn submit_and_receive(
        &mut self,
        client: &mut NbdClient,
        model: &mut VolumeModel,
        history: &mut RoundHistory,
        exact: &dyn Fn() -> bool,
    ) -> Result<Option<WorkloadEnd>, String> {
        while self.left > 0 && self.flight.len() < self.depth {
            self.left -= 1;
            if self.begin_operation(client, model, history).is_err() {
                return Ok(Some(self.handle_closed(model, history)));
            }
        }
        if self.flight.is_empty() && self.left == 0 {
            return Ok(Some(WorkloadEnd::Reply));
        }
        match client.next_reply(STEP) {
            Ok(Some((handle, answer))) => {
                self.heard = Instant::now();
                let Some(operation) = self.flight.remove(&handle) else { return Ok(None) };
                self.end_operation(&operation, &answer, model, history, exact())?;
                Ok(None)
            }
            Ok(None) if self.heard.elapsed() > RESPONSE_MAX => {
                Err(format!("no request was answered within {RESPONSE_MAX:?}: {:?}", self.flight))
            }
            Ok(None) => Ok(None),
            Err(_) => Ok(Some(self.handle_closed(model, history))),
        }
    }

    fn handle_closed(
        &mut self,
        model: &mut VolumeModel,
        history: &mut RoundHistory,
    ) -> WorkloadEnd {
        history.add_entry(&format!("connection lost, {} requests in flight", self.flight.len()));
        model.mark_doubtful();
        WorkloadEnd::Gone
    }

    fn begin_operation(
        &mut self,
        client: &mut NbdClient,
        model: &mut VolumeModel,
        history: &mut RoundHistory,
    ) -> Result<(), super::nbd_client::ConnectionClosed> {
        let kind = self.random.below(20);
        // A flush covers the writes that completed before its submission.
        if kind < 4 {
            let promise = model.writes_covered_by_flush();
            let handle = client.submit(&NbdCommand::Flush)?;
            history.add_entry(&format!("flush #{handle}"));
            self.flight.insert(handle, WorkloadOperation::Flush { promise });
            return Ok(());
        }
        let blocks = self.pick_blocks(model.block_count());
        let Some(blocks) = blocks else { return Ok(()) };
        let offset = (blocks.start * BLOCK_BYTES) as u64;
        let len = u32::try_from(blocks.len() * BLOCK_BYTES).unwrap_or(0);
        if kind < 7 {
            let handle = client.submit(&NbdCommand::Read { offset, len })?;
            self.flight.insert(handle, WorkloadOperation::Read { blocks });
            return Ok(());
        }
        let (zero, forced) = (kind < 9, self.random.chance(1, 8));
        let version = model.begin_write(blocks.clone(), zero);
        let command = if zero {
            let keep = self.random.chance(1, 2);
            NbdCommand::WriteZeroes { offset, len, forced, keep }
        } else {
            NbdCommand::Write { offset, bytes: model.stamped_data(blocks.clone(), version), forced }
        };
        let what = if zero { "zero" } else { "write" };
        let force = if forced { ", forced" } else { "" };
        let handle = client.submit(&command)?;
        history.add_entry(&format!("{what} {version} #{handle}, blocks {blocks:?}{force}"));
        self.flight.insert(handle, WorkloadOperation::Write { blocks, version, forced });
        Ok(())
    }

    /// Picks blocks that no request in flight touches, often in a few places, so that they are
    /// rewritten.
    fn pick_blocks(&mut self, blocks: usize) -> Option<Range<usize>> {
        let most = blocks as u64 - BLOCKS_MAX;
        let first = match self.random.below(4) {
            0 => self.random.below(most),
            _ => self.random.below(8) * (most / 8) + self.random.below(24),
        };
        let first = usize::try_from(first).unwrap_or(0);
        let count = usize::try_from(1 + self.random.below(BLOCKS_MAX)).unwrap_or(1);
        let place = first..first + count;
        let overlaps = |other: Range<usize>| place.start < other.end && other.start < place.end;
        let free = !self.flight.values().any(|operation| overlaps(operation.blocks()));
        free.then_some(place)
    }

    fn end_operation(
        &mut self,
        operation: &WorkloadOperation,
        answer: &NbdReply,
        model: &mut VolumeModel,
        history: &mut RoundHistory,
        exact: bool,
    ) -> Result<(), String> {
        let described = reply_text(answer);
        if answer.is_err() {
            self.errors += 1;
            if self.errors >= ERRORS_MAX {
                self.left = 0;
            }
        }
        // A request may fail only if an event may have affected it.
        let complain = |what: String| if exact { Err(what) } else { Ok(()) };
        match operation {
            WorkloadOperation::Flush { promise } => {
                history.add_entry(&format!("  flush: {described}"));
                if answer.is_ok() {
                    model.complete_flush(promise);
                    return Ok(());
                }
                model.mark_doubtful();
                complain(format!("a flush fails though nothing can be lost: {described}"))
            }
            WorkloadOperation::Write { blocks, version, forced } => {
                history.add_entry(&format!("  write {version}: {described}"));
                if answer.is_ok() {
                    model.end_write(blocks.clone(), *version, *forced);
                    return Ok(());
                }
                model.fail_write(blocks.clone(), *version);
                complain(format!("write {version} fails though nothing is broken: {described}"))
            }
            WorkloadOperation::Read { blocks } => match answer {
                Ok(bytes) => {
                    let wrong = model.check_read(blocks.start, bytes, exact);
                    wrong.first().map_or(Ok(()), |first| Err(wrong_sectors_text(&wrong, first)))
                }
                Err(_) => {
                    history.add_entry(&format!("  read of blocks {blocks:?}: {described}"));
                    complain(format!("a read fails though nothing is broken: {described}"))
                }
            },
        }
    }
}

/// `success`, or the error.
pub(super) fn reply_text(answer: &NbdReply) -> String {
    answer.as_ref().map_or_else(|error| format!("error {error}"), |_| "success".into())
}

/// Describes the first wrong sector and the number of wrong sectors.
pub(super) fn wrong_sectors_text(all: &[WrongSector], first: &WrongSector) -> String {
    format!("{first} ({} sectors are wrong)", all.len().max(1))
}

/// Submits one request and waits for its reply.
fn execute_command(client: &mut NbdClient, command: &NbdCommand) -> Result<NbdReply, String> {
    let begun = Instant::now();
    let lost =
        |why: super::nbd_client::ConnectionClosed| format!("the connection is lost: {}", why.0);
    let handle = client.submit(command).map_err(lost)?;
    loop {
        match client.next_reply(STEP).map_err(lost)? {
            Some((found, answer)) if found == handle => return Ok(answer),
            Some(_) => {}
            None if begun.elapsed() > RESPONSE_MAX => {
                let what = if *command == NbdCommand::Flush { "a flush" } else { "a read" };
                return Err(format!("{what} is not answered within {RESPONSE_MAX:?}"));
            }
            None => {}
        }
    }
}

/// Flushes with no other request in flight.
pub(super) fn flush_export(
    client: &mut NbdClient,
    model: &mut VolumeModel,
) -> Result<NbdReply, String> {
    let promise = model.writes_covered_by_flush();
    let answer = execute_command(client, &NbdCommand::Flush)?;
    match &answer {
        Ok(_) => model.complete_flush(&promise),
        Err(_) => model.mark_doubtful(),
    }
    Ok(answer)
}

/// Reads the whole export in pieces of this many bytes.
pub(super) fn read_all(
    client: &mut NbdClient,
    len: usize,
    piece: usize,
) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        let count = piece.min(len - bytes.len());
        let count = u32::try_from(count).unwrap_or(0);
        let command = NbdCommand::Read { offset: bytes.len() as u64, len: count };
        let answer = execute_command(client, &command)?;
        let offset = bytes.len();
        bytes.extend(answer.map_err(|error| format!("read at byte {offset}: error {error}"))?);
    }
    Ok(bytes)
}
