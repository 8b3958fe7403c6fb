//! The admin queue: one command at a time from the ring to its completion.
//!
//! ```text
//!   fetch ─▶ data? ─┬─ walk ─▶ from host ─▶ execute ─────────────────▶ complete
//!                   ├─ walk ──────────────▶ execute ─▶ to host ──────▶ complete
//!                   └─────────────────────▶ execute ─▶ parked, later, deleting … ─▶ complete
//! ```
//!
//! What waits for others (event requests, long commands, deletions) does not hold up the next
//! command. Completions wait for a place in an outbox; while there is one in it, nothing is fetched.

use std::collections::VecDeque;

use base::{Ended, Fault, HostMemory, Progress, Ticket, entry_from_dwords};
use wire::{Command, Completion, DataPointer, Status};

use crate::controller::contract::{AdminData, AdminEnd, ErrorReport, InvalidDoorbell};
use crate::doorbell::DoorbellPage;
use crate::queue::ring::{CompletionQueue, SubmissionQueue};
use crate::transfer::{
    ACCESS_BYTES_MAX, Direction, LIST_BYTES_MAX, Moved, Mover, Next, Pieces, Target, Walk,
};

/// The admin queue pair.
pub(super) struct AdminQueue<H: HostMemory> {
    host: H,
    submission: SubmissionQueue<H::Entries>,
    completion: CompletionQueue<H::Entries>,
    page_shift: u8,
    current: Option<Current>,
    /// Commands that end later.
    waiting: Vec<Command>,
    /// Event requests among them, oldest first.
    parked: VecDeque<u16>,
    outbox: VecDeque<Completion>,
    pieces: Pieces,
    mover: Mover,
    scratch: Box<[u8]>,
    /// Accesses to remote rings that the host has not answered.
    ring_accesses: u32,
    posted: u32,
    is_stopping: bool,
    broken: Option<Fault>,
}

/// The command at work.
#[derive(Debug)]
struct Current {
    command: Command,
    wait: Wait,
    walk: Walk,
    direction: Direction,
    bytes: Vec<u8>,
}

/// What it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    /// For the decision how much data it has.
    Data,
    /// For a part of a PRP list or an SGL.
    List { len_bytes: u32 },
    /// For its bytes from the host.
    FromHost,
    /// For execution.
    Execution,
    /// For its bytes to reach the host.
    ToHost { result: u32 },
}

/// What the queue wants of its front end.
#[derive(Debug)]
pub(super) enum Wanted {
    /// How much data goes with this command: answer with [`AdminQueue::begin`].
    Data(Command),
    /// The command executed on its bytes: answer with [`AdminQueue::executed`] or
    /// [`AdminQueue::waits`].
    Execution(Command, Vec<u8>),
    /// This told, for the error log.
    Report(ErrorReport),
    /// This told as well.
    InvalidDoorbell(InvalidDoorbell),
}

const TICKET_LIST: u32 = 0xf;
const TICKET_FETCH: u32 = 1 << 30;
const TICKET_POST: u32 = 2 << 30;

impl<H: HostMemory> AdminQueue<H> {
    /// The queue that AQA, ASQ and ACQ describe.
    pub(super) fn open(
        mut host: H,
        (entries, address): (u32, u64),
        (completion_entries, completion_address): (u32, u64),
        page_shift: u8,
        transfer_bytes_max: u32,
    ) -> Result<Self, Fault> {
        let submission = SubmissionQueue::open(&mut host, 0, entries, address)?;
        let completion =
            CompletionQueue::open(&mut host, 0, completion_entries, completion_address)?;
        let pieces_max = ((transfer_bytes_max >> 12) as usize + 2).max(256);
        Ok(Self {
            host,
            submission,
            completion,
            page_shift,
            current: None,
            waiting: Vec::new(),
            parked: VecDeque::new(),
            outbox: VecDeque::new(),
            pieces: Pieces::at_most(pieces_max),
            mover: Mover::new(),
            scratch: vec![0; ACCESS_BYTES_MAX.max(LIST_BYTES_MAX)].into(),
            ring_accesses: 0,
            posted: 0,
            is_stopping: false,
            broken: None,
        })
    }

    /// Whether there is nothing to do and nothing to tell, as at nearly every look.
    #[inline]
    pub(super) fn is_at_rest(&self, doorbells: &DoorbellPage) -> bool {
        let has_none = self.current.is_none() && self.outbox.is_empty();
        let is_still = self.ring_accesses == 0 && self.posted == 0;
        has_none && is_still && self.submission.is_caught_up(doorbells)
    }

    /// Does what can be done until something is wanted. `None` means that nothing is.
    pub(super) fn next_wanted(&mut self, doorbells: &DoorbellPage) -> Option<Wanted> {
        let is_waiting = self.current.is_some() || self.ring_accesses > 0;
        if is_waiting && let Some(wanted) = self.hear_host() {
            return Some(wanted);
        }
        if let Some(invalid) = self.post(doorbells) {
            return Some(invalid);
        }
        if self.current.is_some() {
            return self.go_on();
        }
        if self.is_stopping || !self.outbox.is_empty() {
            return None;
        }
        self.fetch(doorbells)
    }

    /// The answer to [`Wanted::Data`].
    pub(super) fn begin(&mut self, data: Result<AdminData, Status>) -> Option<Wanted> {
        let current = self.current.as_mut()?;
        let (len_bytes, direction) = match data {
            Err(status) => return self.fail(status),
            Ok(AdminData::None) => {
                current.wait = Wait::Execution;
                return None;
            }
            Ok(AdminData::FromHost(len_bytes)) => (len_bytes, Direction::FromHost),
            Ok(AdminData::ToHost(len_bytes)) => (len_bytes, Direction::ToHost),
        };
        current.direction = direction;
        if direction == Direction::FromHost {
            current.bytes.resize(len_bytes as usize, 0);
        }
        let (command, shift) = (current.command, self.page_shift);
        // Admin commands of a memory transport use PRPs (Base 2.1 §4.3.2, PCIe 1.1 §3.2).
        if command.psdt() != DataPointer::Prp {
            return self.fail(Status::INVALID_FIELD.with_dnr());
        }
        match Walk::start(&command, len_bytes, direction, shift, &mut self.pieces) {
            Ok((walk, next)) => {
                current.walk = walk;
                self.follow(next)
            }
            Err(status) => self.fail(status),
        }
    }

    /// The answer to [`Wanted::Execution`] of a command that has ended.
    pub(super) fn executed(&mut self, end: AdminEnd, bytes: Vec<u8>) -> Option<Wanted> {
        let current = self.current.as_mut()?;
        let sends = current.direction == Direction::ToHost && !self.pieces.as_slice().is_empty();
        if end.status.is_success() && sends && !bytes.is_empty() {
            let len_bytes = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
            current.bytes = bytes;
            current.wait = Wait::ToHost { result: end.result };
            self.mover = Mover::new();
            self.mover.begin(len_bytes);
            return self.move_bytes();
        }
        self.finish_current(end)
    }

    /// The answer to [`Wanted::Execution`] of a command that ends later: the front end keeps its
    /// identifier.
    pub(super) fn waits(&mut self) {
        self.waiting.extend(self.current.take().map(|current| current.command));
    }

    /// As [`waits`](Self::waits), for an event request.
    pub(super) fn park(&mut self, cid: u16) {
        self.waits();
        self.parked.push_back(cid);
    }

    /// The oldest event request.
    pub(super) fn take_parked(&mut self) -> Option<u16> {
        self.parked.pop_front()
    }

    pub(super) fn has_parked(&self) -> bool {
        !self.parked.is_empty()
    }

    /// Takes a particular event request out. False if there is none.
    pub(super) fn unpark(&mut self, cid: u16) -> bool {
        let at = self.parked.iter().position(|parked| *parked == cid);
        at.is_some_and(|at| self.parked.remove(at).is_some())
    }

    /// Ends a command that was waiting. What is returned has to be told.
    #[must_use]
    pub(super) fn complete(&mut self, cid: u16, end: AdminEnd) -> Option<Wanted> {
        let at = self.waiting.iter().position(|command| command.cid() == cid)?;
        let command = self.waiting.swap_remove(at);
        self.answer(&command, end)
    }

    /// Completions that the host can see since this was last asked.
    #[inline]
    pub(super) fn take_posted(&mut self) -> u32 {
        core::mem::take(&mut self.posted)
    }

    /// Whether anything is waited for: a place, a host.
    pub(super) fn is_pending(&self) -> bool {
        self.current.is_some() || self.ring_accesses > 0 || !self.outbox.is_empty()
    }

    /// From now on nothing is fetched and nothing answered.
    pub(super) fn stop(&mut self) {
        self.is_stopping = true;
        self.outbox.clear();
        self.parked.clear();
        self.waiting.clear();
        let is_touched = matches!(
            self.current.as_ref().map(|current| current.wait),
            Some(Wait::List { .. } | Wait::FromHost | Wait::ToHost { .. })
        );
        if !is_touched {
            self.current = None;
        }
    }

    /// Whether the host owes no answer.
    pub(super) fn is_drained(&self) -> bool {
        self.current.is_none() && self.ring_accesses == 0
    }

    pub(super) fn broken(&self) -> Option<Fault> {
        self.broken
    }

    fn fetch(&mut self, doorbells: &DoorbellPage) -> Option<Wanted> {
        let (waiting, invalid) = self.submission.look(doorbells);
        if invalid.is_some() {
            return Some(Wanted::InvalidDoorbell(InvalidDoorbell::Value));
        }
        if waiting == 0 || (self.completion.room() == 0 && self.look_at_head(doorbells).is_none()) {
            return None;
        }
        let taken = if self.submission.is_shared() {
            self.submission.take().map(Some)
        } else {
            let was_open = self.submission.is_fetching();
            let taken = self.submission.take_remote(&mut self.host, Ticket(TICKET_FETCH));
            self.ring_accesses += u32::from(self.submission.is_fetching() && !was_open);
            taken
        };
        match taken {
            Ok(Some(words)) => {
                let command = Command(words);
                let direction = Direction::FromHost;
                let (wait, walk, bytes) = (Wait::Data, Walk::idle(), Vec::new());
                self.pieces.clear();
                self.current = Some(Current { command, wait, walk, direction, bytes });
                Some(Wanted::Data(command))
            }
            Ok(None) => None,
            Err(fault) => {
                self.broken = Some(fault);
                None
            }
        }
    }

    /// `None` if there is still no place; otherwise how many.
    fn look_at_head(&mut self, doorbells: &DoorbellPage) -> Option<u32> {
        let _ = self.completion.look(doorbells);
        Some(self.completion.room()).filter(|room| *room > 0)
    }

    /// Posts what waits for a place.
    fn post(&mut self, doorbells: &DoorbellPage) -> Option<Wanted> {
        while let Some(completion) = self.outbox.front().copied() {
            if self.completion.room() == 0 {
                if self.completion.look(doorbells).is_some() {
                    return Some(Wanted::InvalidDoorbell(InvalidDoorbell::Value));
                }
                if self.completion.room() == 0 {
                    return None;
                }
            }
            self.outbox.pop_front();
            let mut entry = completion.0;
            entry[2] = self.submission.head() & 0xffff;
            let entry = entry_from_dwords(entry);
            match self.completion.store(&mut self.host, Ticket(TICKET_POST), entry) {
                Ok(Progress::Done) => self.posted += 1,
                Ok(Progress::Later) => self.ring_accesses += 1,
                Err(fault) => self.broken = Some(fault),
            }
        }
        None
    }

    /// Goes on with the current command if it waits for its front end.
    fn go_on(&mut self) -> Option<Wanted> {
        let current = self.current.as_mut()?;
        (current.wait == Wait::Execution)
            .then(|| Wanted::Execution(current.command, core::mem::take(&mut current.bytes)))
    }

    fn follow(&mut self, mut next: Next) -> Option<Wanted> {
        loop {
            let current = self.current.as_mut()?;
            let Next::List { iova, len_bytes } = next else { return self.walked() };
            let list = &mut self.scratch[..len_bytes as usize];
            let failure = match self.host.read(Ticket(TICKET_LIST), iova, list) {
                Ok(Progress::Done) => match current.walk.feed(list, &mut self.pieces) {
                    Ok(following) => {
                        next = following;
                        continue;
                    }
                    Err(status) => status,
                },
                Ok(Progress::Later) => {
                    current.wait = Wait::List { len_bytes };
                    return None;
                }
                Err(_) => Status::DATA_TRANSFER_ERROR,
            };
            return self.fail(failure);
        }
    }

    fn walked(&mut self) -> Option<Wanted> {
        let current = self.current.as_mut()?;
        if current.direction == Direction::ToHost {
            current.wait = Wait::Execution;
            return None;
        }
        current.wait = Wait::FromHost;
        self.mover = Mover::new();
        self.mover.begin(u32::try_from(current.bytes.len()).unwrap_or(u32::MAX));
        self.move_bytes()
    }

    fn move_bytes(&mut self) -> Option<Wanted> {
        let current = self.current.as_mut()?;
        let mut target = Target::Bytes(&mut current.bytes);
        let (direction, scratch) = (current.direction, &mut self.scratch);
        let moved =
            self.mover.run(&mut self.host, 0, &self.pieces, direction, &mut target, scratch);
        match (moved, current.wait) {
            (Moved::Waiting, _) => None,
            (Moved::Failed, _) => self.fail(Status::DATA_TRANSFER_ERROR),
            (Moved::Whole, Wait::ToHost { result }) => self.finish_current(AdminEnd::with(result)),
            (Moved::Whole, _) if self.is_stopping => self.finish_current(AdminEnd::OK),
            (Moved::Whole, _) => {
                current.wait = Wait::Execution;
                None
            }
        }
    }

    fn fail(&mut self, status: Status) -> Option<Wanted> {
        self.finish_current(AdminEnd::refused(status))
    }

    /// Ends the current command; if the queue is stopping, without a word.
    fn finish_current(&mut self, end: AdminEnd) -> Option<Wanted> {
        let current = self.current.take()?;
        if self.is_stopping { None } else { self.answer(&current.command, end) }
    }

    fn answer(&mut self, command: &Command, end: AdminEnd) -> Option<Wanted> {
        self.outbox.push_back(Completion::new(command.cid(), end.status).with_dw0(end.result));
        (!end.status.is_success()).then_some(Wanted::Report(ErrorReport {
            sqid: 0,
            cid: command.cid(),
            opcode: command.opcode(),
            status: end.status,
            lba: 0,
            nsid: command.nsid(),
        }))
    }

    /// Takes what the host has answered.
    fn hear_host(&mut self) -> Option<Wanted> {
        while let Some(ended) = self.host.poll() {
            let wanted = match ended.ticket.0 {
                TICKET_FETCH => {
                    self.ring_ended(ended);
                    self.submission.fetched(&mut self.host, ended);
                    None
                }
                TICKET_POST => {
                    self.ring_ended(ended);
                    self.posted += u32::from(ended.result.is_ok());
                    None
                }
                _ => self.data_ended(ended),
            };
            if wanted.is_some() {
                return wanted;
            }
        }
        None
    }

    fn ring_ended(&mut self, ended: Ended) {
        self.ring_accesses = self.ring_accesses.saturating_sub(1);
        if let Err(fault) = ended.result {
            self.broken = Some(fault);
        }
    }

    fn data_ended(&mut self, ended: Ended) -> Option<Wanted> {
        let current = self.current.as_mut()?;
        match (current.wait, ended.ticket.0) {
            (Wait::List { len_bytes }, TICKET_LIST) => {
                if ended.result.is_err() {
                    return self.fail(Status::DATA_TRANSFER_ERROR);
                }
                let list = &mut self.scratch[..len_bytes as usize];
                self.host.collect(ended.ticket, list);
                if self.is_stopping {
                    return self.finish_current(AdminEnd::OK);
                }
                match current.walk.feed(list, &mut self.pieces) {
                    Ok(next) => self.follow(next),
                    Err(status) => self.fail(status),
                }
            }
            (Wait::FromHost | Wait::ToHost { .. }, _) => {
                let mut target = Target::Bytes(&mut current.bytes);
                let (direction, scratch) = (current.direction, &mut self.scratch);
                self.mover.end(&mut self.host, ended, direction, &mut target, scratch);
                if self.is_stopping {
                    self.mover.abandon();
                }
                self.move_bytes()
            }
            _ => None,
        }
    }
}
