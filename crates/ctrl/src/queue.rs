//! The I/O half of a controller: one completion queue and the submission queues that feed it.
//!
//! ```text
//!   tail doorbell ─▶ fetch ─▶ decode ─┬─ one request ───────▶ gather ─▶ submit ─┐
//!                                     └─ a job in a work area ◀──── drive ◀──┐  │
//!                                              │ host: lists, bytes          │  ▼
//!                                              └────────────────────────────▶│ medium
//!   head doorbell ─▶ places ◀── complete ◀───────────── poll ◀───────────────┴──┘
//! ```
//!
//! A queue is `Send`, owns a channel to every medium, and reads an immutable picture of the
//! namespaces, so it may live on any reactor. A turn does bounded work and never blocks. A place in
//! the completion queue is reserved before a command is taken: every command that was taken can be
//! answered.
//!
//! The fast path is a read or write in one page that the medium reaches where it lies. It has no
//! allocation, no division and, per command, no dynamic call: load the entry, look the namespace up
//! by index, check, resolve one address, gather. All else is a job in a work area.

/// What `shadow` takes its barrier from: a model checker's, in the model of the rings.
use core::sync::atomic as sync;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use base::{Answers, Fault, HostMemory, Instant};
use wire::{Command, Status};

use crate::buffers::Buffers;
use crate::controller::Bell;
use crate::controller::contract::{AdminEnd, ErrorReport, InvalidDoorbell, Traffic};
use crate::doorbell::DoorbellPage;
use crate::namespace::{Namespaces, Reader};
use area::Areas;
use cancel::PreemptedWrites;
use directory::Directory;
pub use floor::Floor;
use floor::Voice;
use fused::Pair;
use ring::{CompletionQueue, SubmissionQueue};
use shadow::Shadow;
use slot::Slots;

mod admit;
mod area;
mod cancel;
mod channel;
mod directory;
mod drive;
mod fast;
mod floor;
mod fused;
mod job;
pub(crate) mod ring;
mod shadow;
mod sleep;
mod slot;
#[cfg(test)]
mod tests;

/// A completion queue with its submission queues: nearly always exactly one.
#[derive(Debug)]
pub struct Queue<H: HostMemory> {
    submissions: Vec<SubmissionQueue<H::Entries>>,
    completion: CompletionQueue<H::Entries>,
    doorbells: Arc<DoorbellPage>,
    voice: Voice,
    /// The volatile write cache is switched off (feature 06h): every write is forced.
    is_write_through: Arc<AtomicBool>,
    namespaces: Reader<Namespaces>,
    directory: Directory,
    slots: Slots,
    host: H,
    answers: Answers,
    /// Commands taken from one submission queue at a time.
    burst: u32,
    page_bytes: u64,
    traffic: Tally,
    /// Completions stored since a turn last told; some are stored between turns.
    posted: u32,
    areas: Areas,
    /// Areas that wait for a bounce buffer, oldest first.
    want_buffer: VecDeque<u16>,
    /// Areas whose request the medium had no room for, oldest first.
    want_room: VecDeque<u16>,
    /// A command that was taken and cannot begin yet, with its submission queue. While there is
    /// one, no other is taken.
    held: Option<(usize, Command)>,
    pair: Option<Pair>,
    /// Commands that have been taken and do not run: halves of fused pairs that wait.
    paused: usize,
    letters: VecDeque<Letter>,
    /// What preemptions wait for.
    preempted: Vec<PreemptedWrites>,
    buffers: Buffers,
    /// Memory for one access, once a command has had an area.
    scratch: Box<[u8]>,
    /// Accesses to a remote ring that the host has not answered.
    ring_accesses: u32,
    page_shift: u8,
    transfer_bytes_max: u32,
    write_flags: base::Flags,
    is_stopping: bool,
    is_on_hold: bool,
}

/// What a queue is made with.
#[derive(Clone, Debug)]
pub struct QueueConfig {
    /// The completion queue's identifier, also the queue's own among those of its controller.
    pub cqid: u16,
    /// Entries of the completion queue: at least 2.
    pub entries: u32,
    /// IOVA of its first entry.
    pub address: u64,
    /// A page of host memory is `1 << page_shift` bytes: CC.MPS + 12.
    pub page_shift: u8,
    /// Bytes in the largest transfer (MDTS).
    pub transfer_bytes_max: u32,
    /// Commands that may be in flight: at least 2, for a fused pair.
    pub in_flight_max: u16,
    /// Of these, commands that may have a work area: at least 2.
    pub areas: u16,
    /// Commands taken from one submission queue at a time.
    pub burst: u32,
}

/// What a queue shares with the rest of its controller.
#[derive(Clone, Debug)]
pub struct QueueShared {
    /// Where the host rings.
    pub doorbells: Arc<DoorbellPage>,
    /// Who runs alone: one for all queues of a subsystem.
    pub floor: Arc<Floor>,
    /// The volatile write cache is switched off (feature 06h): every write is forced.
    pub is_write_through: Arc<AtomicBool>,
    /// Where data goes that a medium cannot reach in the host.
    pub buffers: Buffers,
}

/// What a turn of a queue has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Turned {
    /// Commands taken.
    pub taken: u32,
    /// Completions that the host can see since the last turn.
    pub posted: u32,
    /// Something was done, or is known to be there to do: turn again at once.
    pub is_busy: bool,
    /// Commands are in flight.
    pub is_pending: bool,
}

/// What a queue has to say to its controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Letter {
    /// A command ended badly.
    Error(ErrorReport),
    /// The host has rung what cannot be.
    InvalidDoorbell(InvalidDoorbell),
    /// A reservation command, with what it brought: answered with [`Queue::decide`].
    Reservation {
        /// Returned with the answer.
        ticket: u32,
        /// The command.
        command: Command,
        /// The keys it brought.
        bytes: Vec<u8>,
    },
    /// A medium could not be opened; its namespace is not ready.
    Trouble(String),
    /// A ring turned out not to be there: the queue has stopped, and the controller has failed.
    Broken(Fault),
}

/// Traffic since it was last told, by the two low bits of the opcode: 1 is write, 2 is read.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    commands: [u64; 4],
    bytes: [u64; 4],
    busy_ns: u64,
    busy_since: Option<Instant>,
}

/// As many bursts are taken in a turn, as long as each is answered at once.
const BURSTS: u32 = 4;
/// Letters that are kept for the controller. More errors than this in a turn lose their details.
const LETTERS_MAX: usize = 64;

/// Tickets: the upper bits say what for.
const TICKET_FETCH: u32 = 1 << 30;
const TICKET_POST: u32 = 2 << 30;
const TICKET_KIND: u32 = 3 << 30;
/// The lower four bits of an area's ticket are an access of its mover, or this: its list.
const TICKET_LIST: u32 = 0xf;

impl<H: HostMemory> Queue<H> {
    /// A queue with no submission queue yet. `host` is a channel of its own to the host's memory,
    /// with its own tickets.
    pub fn new(
        mut host: H,
        config: &QueueConfig,
        shared: QueueShared,
        namespaces: Reader<Namespaces>,
    ) -> Result<Self, Fault> {
        let completion =
            CompletionQueue::open(&mut host, config.cqid, config.entries, config.address)?;
        shared.doorbells.clear_head(config.cqid);
        let in_flight_max = config.in_flight_max.max(2);
        let areas = config.areas.clamp(2, in_flight_max);
        let mut queue = Self {
            submissions: Vec::new(),
            completion,
            doorbells: shared.doorbells,
            voice: shared.floor.join(),
            is_write_through: shared.is_write_through,
            namespaces,
            directory: Directory::new(in_flight_max.into()),
            slots: Slots::new(in_flight_max),
            host,
            answers: Answers::with_capacity(0),
            burst: config.burst.max(1),
            page_bytes: 1 << config.page_shift,
            traffic: Tally::default(),
            posted: 0,
            areas: Areas::new(areas, config.transfer_bytes_max),
            want_buffer: VecDeque::with_capacity(areas.into()),
            want_room: VecDeque::with_capacity(areas.into()),
            held: None,
            pair: None,
            paused: 0,
            letters: VecDeque::new(),
            preempted: Vec::new(),
            buffers: shared.buffers,
            scratch: Box::default(),
            ring_accesses: 0,
            page_shift: config.page_shift,
            transfer_bytes_max: config.transfer_bytes_max,
            write_flags: base::Flags::NONE,
            is_stopping: false,
            is_on_hold: false,
        };
        queue.renew();
        Ok(queue)
    }

    /// Its identifier: that of its completion queue.
    pub fn cqid(&self) -> u16 {
        self.completion.id
    }

    /// Adds an empty submission queue.
    pub fn add_submission_queue(
        &mut self,
        sqid: u16,
        entries: u32,
        address: u64,
    ) -> Result<(), Fault> {
        let queue = SubmissionQueue::open(&mut self.host, sqid, entries, address)?;
        self.doorbells.clear_tail(sqid);
        // Most have one, and a list that grows by itself begins with room for four.
        self.submissions.reserve_exact(1);
        self.submissions.push(queue);
        Ok(())
    }

    /// The identifiers of its submission queues.
    pub fn submission_queues(&self) -> impl Iterator<Item = u16> + '_ {
        self.submissions.iter().map(|queue| queue.id)
    }

    /// From now on the doorbell of submission queue `sqid`, or the queue's head doorbell, is where
    /// the host says. Fails if the memory is not there; `Ok(false)` if it is not shared.
    pub fn set_shadow(
        &mut self,
        sqid: Option<u16>,
        doorbell: u64,
        event_index: u64,
    ) -> Result<bool, Fault> {
        let Some(shadow) = Shadow::open(&mut self.host, doorbell, event_index)? else {
            return Ok(false);
        };
        match sqid {
            None => self.completion.set_shadow(shadow),
            Some(sqid) => {
                if let Some(queue) = self.submissions.iter_mut().find(|queue| queue.id == sqid) {
                    queue.set_shadow(shadow);
                }
            }
        }
        Ok(true)
    }

    /// Has `bell` called when a turn is waited for by another queue of the subsystem, which has a fused
    /// pair.
    pub fn set_bell(&self, bell: Bell) {
        self.voice.set_bell(bell);
    }

    /// Sets how many commands are taken from one submission queue at a time (feature 01h).
    pub fn set_burst(&mut self, burst: u32) {
        self.burst = burst.max(1);
    }

    /// Takes no new commands from now on, or takes them again. What was taken goes on.
    pub fn hold(&mut self, is_on_hold: bool) {
        self.is_on_hold = is_on_hold;
    }

    /// Does a bounded amount of work.
    pub fn turn(&mut self, now: Instant) -> Turned {
        if self.namespaces.refresh() {
            self.renew();
        }
        let before = self.slots.taken();
        if before == 0 {
            self.traffic.rest(now);
        }
        let mut is_busy = false;
        if !self.areas.is_idle() || self.ring_accesses > 0 {
            is_busy |= self.hear_host(now);
            self.revive(now);
        }
        let mut taken = 0;
        for _ in 0..BURSTS {
            let count = self.take(now);
            if count > 0 && before == 0 {
                self.traffic.work(now);
            }
            taken += count;
            if self.slots.taken() > 0 {
                self.submit(now);
                is_busy |= self.poll(now);
            }
            // What has been answered at once is the host's to work on while more is taken.
            if count < self.burst || self.slots.taken() > 0 {
                break;
            }
        }
        let is_pending = self.slots.taken() > 0 || self.ring_accesses > 0;
        is_busy |= taken > 0 || self.posted > 0;
        // One that has stopped looks at the host's memory no more.
        if !is_busy && !self.is_stopping {
            is_busy = self.rest();
        }
        Turned { taken, posted: core::mem::take(&mut self.posted), is_busy, is_pending }
    }

    /// Takes a burst of commands, if any may be taken now. Returns how many.
    #[inline(always)]
    fn take(&mut self, now: Instant) -> u32 {
        let takes_none = self.is_stopping || self.is_on_hold;
        if self.voice.is_floor_taken() {
            self.fetch_beside(now, takes_none)
        } else if takes_none {
            0
        } else {
            self.fetch(now, None)
        }
    }

    /// The next thing the queue has to say.
    #[inline]
    pub fn next_letter(&mut self) -> Option<Letter> {
        self.letters.pop_front()
    }

    /// The controller's answer to [`Letter::Reservation`], with the bytes of a report.
    pub fn decide(&mut self, now: Instant, ticket: u32, end: AdminEnd, bytes: &[u8]) {
        if let Some((index, area)) = self.areas.find(ticket)
            && area.wait == area::Wait::Controller
        {
            area.bytes.clear();
            area.bytes.extend_from_slice(bytes);
            self.drive(now, index, job::Event::Decided(end.status, end.result));
        }
    }

    /// In place of a turn, for one who knows that there is no command.
    #[inline]
    pub fn stand_idle(&mut self, now: Instant) {
        self.traffic.rest(now);
    }

    /// Whether commands have gone through the queue since [`take_traffic`](Self::take_traffic).
    pub fn has_traffic(&self) -> bool {
        self.traffic.commands != [0; 4]
    }

    /// What went through the queue since this was last asked.
    pub fn take_traffic(&mut self, now: Instant) -> Traffic {
        self.traffic.take(now)
    }

    /// The first deadline of a medium that owes an answer.
    pub fn wake_at(&self) -> Instant {
        self.directory.wake_at()
    }

    /// Whether the queue has something to say.
    #[inline]
    pub fn has_letters(&self) -> bool {
        !self.letters.is_empty()
    }

    /// Whether it has to turn though there may be no command: it has something to say, or another queue
    /// waits for it.
    #[inline]
    pub fn wants_turn(&self) -> bool {
        self.has_letters() || self.voice.owes_word()
    }

    /// Opens channels for a new picture of the namespaces.
    #[cold]
    fn renew(&mut self) {
        let namespaces = self.namespaces.get().clone();
        for trouble in self.directory.renew(&namespaces) {
            self.write(Letter::Trouble(trouble));
        }
    }

    /// Before it rests, the queue tells the host how far it has seen. True if there is news.
    #[inline]
    fn rest(&mut self) -> bool {
        self.directory.sweep(|channel| self.areas.use_channel(channel));
        let mut has_news = false;
        for queue in &mut self.submissions {
            has_news |= queue.rest() && self.held.is_none();
        }
        // The head matters only to a queue that waits for places; then it is taken over, and what
        // room it makes is worth a turn.
        let room = self.completion.room();
        if self.completion.rest() && room as usize <= self.slots.taken() {
            if self.completion.look(&self.doorbells).is_some() {
                self.write(Letter::InvalidDoorbell(InvalidDoorbell::Value));
            }
            has_news |= self.completion.room() > room;
        }
        has_news
    }

    /// Errors are many and are dropped when there are too many; the rest is bounded by itself.
    #[cold]
    fn write(&mut self, letter: Letter) {
        if self.letters.len() < LETTERS_MAX || !matches!(letter, Letter::Error(_)) {
            self.letters.push_back(letter);
        }
    }

    /// A ring is not there any more.
    #[cold]
    fn break_down(&mut self, fault: Fault) {
        if !self.is_stopping {
            self.is_stopping = true;
            self.write(Letter::Broken(fault));
        }
    }

    #[cold]
    fn report(&mut self, slot: slot::Slot, status: Status) {
        let queue = self.submissions.get(usize::from(slot.submission()));
        let report = ErrorReport {
            sqid: queue.map_or(0xffff, |queue| queue.id),
            cid: slot.cid(),
            opcode: slot.opcode(),
            status,
            lba: slot.lba,
            nsid: self.directory.nsid_of(slot.channel()),
        };
        self.write(Letter::Error(report));
    }
}

impl Tally {
    /// A command of this class, 1 for writes and 2 for reads, moves so many bytes.
    #[inline]
    fn count(&mut self, class: usize, bytes: u64) {
        self.commands[class & 3] += 1;
        self.bytes[class & 3] += bytes;
    }

    /// `count` commands of this class have moved so many bytes.
    #[inline]
    fn add(&mut self, class: usize, count: u32, bytes: u64) {
        self.commands[class & 3] += u64::from(count);
        self.bytes[class & 3] += bytes;
    }

    /// A verify takes bytes from the medium, and is no read.
    fn add_read_bytes(&mut self, bytes: u64) {
        self.bytes[2] += bytes;
    }

    fn work(&mut self, now: Instant) {
        self.busy_since.get_or_insert(now);
    }

    #[inline]
    fn rest(&mut self, now: Instant) {
        if let Some(since) = self.busy_since.take() {
            self.busy_ns += now.since(since).ns;
        }
    }

    fn take(&mut self, now: Instant) -> Traffic {
        let is_working = self.busy_since.is_some();
        self.rest(now);
        self.busy_since = is_working.then_some(now);
        let traffic = Traffic {
            read_bytes: self.bytes[2],
            written_bytes: self.bytes[1],
            read_commands: self.commands[2],
            write_commands: self.commands[1],
            busy: base::Span { ns: self.busy_ns },
        };
        *self = Self { busy_since: self.busy_since, ..Self::default() };
        traffic
    }
}
