//! A controller behind registers and rings: what a PCI function, real or emulated, is made of.
//!
//! ```text
//!   host        stores CC, AQA, …, rings          loads CSTS         vectors
//!                     │                               ▲                 ▲
//!   Bar         ──────┼──── atomics ──────────────────┤                 │
//!                     ▼                               │                 │
//!   turn(now)   life (enable, stop, shut down) ── admin queue ── I/O queues
//!                                                     │
//!                                                 Controller
//! ```
//!
//! A host in the same process holds a [`HostBar`] and shares its memory; one whose accesses are
//! trapped is served through [`MemoryFrontEnd::read`] and [`MemoryFrontEnd::write`]. Both store into
//! the same [`Bar`] and nothing happens before the next [`turn`](MemoryFrontEnd::turn), as on a real
//! device.
//!
//! When CC.EN is cleared, CSTS.RDY stays until nothing that was begun can touch the host any more:
//! neither an access that its memory has not answered, nor a request that a medium has not.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use base::{HostMemory, Instant, Interrupts, Span};
use wire::register::{Capabilities, ReadyTimeouts, TIMEOUT_UNIT_MS};

use crate::buffers::Buffers;
use crate::controller::Controller;
use crate::controller::contract::{Decided, InvalidDoorbell, Origin, Signal};
use crate::doorbell::STRIDE;
use crate::queue::{Letter, Queue};
use admin::AdminQueue;
use bar::Stored;
pub use bar::{Bar, HostBar};
use life::Life;
use shutdown::Shutdown;
use vectors::Vectors;

mod admin;
mod bar;
mod commands;
pub mod fabrics;
mod life;
mod queues;
mod shutdown;
mod sleep;
#[cfg(test)]
mod tests;
mod vectors;

/// A controller behind registers and rings.
pub struct MemoryFrontEnd<H: HostMemory + Clone, I: Interrupts> {
    bar: Arc<Bar>,
    controller: Controller,
    host: H,
    vectors: Vectors<I>,
    buffers: Buffers,
    config: FrontEndConfig,
    /// I/O queues, in the order of their creation.
    queues: Vec<Served<H>>,
    admin: Option<AdminQueue<H>>,
    /// The volatile write cache is switched off: queues look at it.
    is_write_through: Arc<AtomicBool>,
    life: Life,
    shutdown: Option<Shutdown>,
    /// Queues that the host has deleted and that are not empty yet, with the command to answer.
    deletions: Vec<Deletion>,
    /// Shadow doorbells and event indices (Base 2.1 §5.2.5).
    shadow: Option<(u64, u64)>,
    changes_seen: u32,
    turns: u32,
    tended_at: Instant,
    /// When the controller wants to be turned, as of then.
    controller_wakes_at: Instant,
    /// An admin command was executed: there may be events, signals, ends of long commands.
    wants_tending: bool,
    has_io: bool,
    is_on_hold: bool,
    /// How often queues have come and gone.
    queue_changes: u32,
    /// Completions of I/O queues since somebody asked.
    ended: u64,
    /// The last thing that went wrong and that no status tells.
    trouble: Option<String>,
}

/// An I/O queue and the vector it is signalled by.
struct Served<H: HostMemory> {
    queue: Queue<H>,
    vector: Option<u16>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deletion {
    Submission { cid: u16, cqid: u16, sqid: u16 },
    Completion { cid: u16, cqid: u16 },
}

/// Limits of a front end, set at start.
#[derive(Clone, Debug)]
pub struct FrontEndConfig {
    /// Commands in flight per I/O queue.
    pub in_flight_max: u16,
    /// Of these, commands that need more than one request.
    pub areas: u16,
    /// Commands taken from one submission queue at a time, unless the host wants fewer: a host that
    /// has more than that in flight works on one part while the controller works on another.
    pub burst: u32,
    /// CAP.TO and CRTO: how long the controller may take to become ready, or to stop.
    pub ready_timeout: Span,
    /// MSI-X begins enabled with every vector unmasked: nobody plays the PCI core.
    pub vectors_armed: bool,
}

/// When to turn again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// At once: something was done, or is known to be there to do.
    Busy,
    /// Soon, and at the latest then: a medium or the host owes an answer.
    Pending(Instant),
    /// When the host has done something, and at the latest then.
    Idle(Instant),
}

/// A turn at least this long after the last looks after timers and news of other controllers.
const TEND_INTERVAL: Span = Span::from_us(100);
/// So does every such turn, whatever the clock says; a power of two.
const TEND_TURNS: u32 = 1024;
/// While there are I/Os, every such turn looks at the admin queue; a power of two.
const ADMIN_TURNS: u32 = 8;

impl Default for FrontEndConfig {
    /// 256 commands in flight, half of them large, 64 taken at a time; ready within ten seconds.
    fn default() -> Self {
        Self {
            in_flight_max: 256,
            areas: 128,
            burst: 64,
            ready_timeout: Span::from_secs(10),
            vectors_armed: true,
        }
    }
}

impl<H: HostMemory + Clone, I: Interrupts> MemoryFrontEnd<H, I> {
    /// A disabled controller. Each clone of `host` is a channel of its own to the host's memory,
    /// with its own tickets; `buffers` serve data that media cannot reach there.
    pub fn new(
        controller: Controller,
        host: H,
        interrupts: I,
        buffers: Buffers,
        config: FrontEndConfig,
    ) -> Self {
        let limits = controller.configuration();
        let (queues, vectors) = (limits.io_queues_max, limits.vectors);
        let units = config.ready_timeout.ns.div_ceil(u64::from(TIMEOUT_UNIT_MS) * 1_000_000);
        let to = u8::try_from(units.clamp(1, 255)).unwrap_or(u8::MAX);
        let mqes = u16::try_from(limits.queue_entries_max - 1).unwrap_or(u16::MAX);
        let capabilities = Capabilities(0).with(|cap| {
            cap.mqes(mqes)
                .cqr(true)
                .to(to)
                .dstrd(STRIDE)
                .nssrs(true)
                .css_nvm(true)
                .css_io(true)
                .mpsmax(life::PAGE_SHIFT_MAX - life::PAGE_SHIFT_MIN)
                .crwms(true)
        });
        let ready = ReadyTimeouts(0).with(|ready| ready.crwmt(to.into()));
        let bar = Bar::new(capabilities.0, ready.0, queues, vectors);
        if config.vectors_armed {
            bar.arm_vectors();
        }
        let mut front = Self {
            changes_seen: bar.changes(),
            vectors: Vectors::new(interrupts, vectors, controller.coalescing()),
            is_write_through: Arc::default(),
            bar,
            controller,
            host,
            buffers,
            config,
            queues: Vec::new(),
            admin: None,
            life: Life::Disabled,
            shutdown: None,
            deletions: Vec::new(),
            shadow: None,
            turns: 0,
            tended_at: Instant::default(),
            controller_wakes_at: Instant::default(),
            wants_tending: false,
            has_io: false,
            is_on_hold: false,
            queue_changes: 0,
            ended: 0,
            trouble: None,
        };
        front.configure();
        front
    }

    /// The registers, to be shared with the host.
    pub fn bar(&self) -> &Arc<Bar> {
        &self.bar
    }

    /// The admin half.
    pub fn controller(&mut self) -> &mut Controller {
        &mut self.controller
    }

    /// The last thing that went wrong and that no status tells, in a line.
    pub fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }

    /// Loads `size` bytes at `offset`: 1, 2, 4 or 8.
    pub fn read(&self, offset: u32, size: u32) -> u64 {
        self.bar.read(offset, size)
    }

    /// Stores 4 or 8 bytes at `offset`. What it means happens at the next turn.
    pub fn write(&mut self, now: Instant, offset: u32, size: u32, value: u64) {
        let is_missing = match self.bar.store(offset, size, value) {
            Stored::Register => false,
            Stored::NoDoorbell => true,
            Stored::Doorbell(index) => !self.has_doorbell(index),
        };
        if is_missing && self.life == Life::Enabled {
            self.controller.invalid_doorbell(now, InvalidDoorbell::Register);
        }
    }

    /// Rings doorbell `index`: twice the queue identifier, plus one for a completion queue.
    pub fn ring(&mut self, now: Instant, index: u32, value: u32) {
        let at = index.checked_mul(4 << STRIDE).and_then(|distance| distance.checked_add(0x1000));
        if let Some(at) = at {
            self.write(now, at, 4, value.into());
        }
    }

    /// Takes no new commands from now on, or takes them again. What was taken goes on, until the
    /// controller [is quiet](Self::is_quiet): then nothing touches the memory of the host, but for
    /// shadow doorbells, and some of it may be taken away.
    pub fn hold(&mut self, is_on_hold: bool) {
        self.is_on_hold = is_on_hold;
        self.queues.iter_mut().for_each(|served| served.queue.hold(is_on_hold));
    }

    /// How often queues have come and gone: whoever keeps something for each looks again when this
    /// has changed.
    pub fn queue_changes(&self) -> u32 {
        self.queue_changes
    }

    /// Whether no command is under way, and no access to the memory of the host. Half a fused pair is
    /// not: it waits for a host that may never send the other half.
    pub fn is_quiet(&self) -> bool {
        let is_admin_quiet = self.admin.as_ref().is_none_or(|admin| admin.is_drained());
        is_admin_quiet && self.queues.iter().all(|served| served.queue.is_at_rest())
    }

    /// I/O commands that are worked on.
    pub fn in_flight(&self) -> usize {
        self.queues.iter().map(|served| served.queue.in_flight()).sum()
    }

    /// How many I/O commands have ended since this was asked last.
    pub fn take_ended(&mut self) -> u64 {
        core::mem::take(&mut self.ended)
    }

    /// Does a bounded amount of work.
    pub fn turn(&mut self, now: Instant) -> Wait {
        let changes = self.bar.changes();
        let has_changed = changes != self.changes_seen;
        if has_changed {
            self.changes_seen = changes;
            self.registers_changed(now);
        }
        let (is_busy, is_pending) = self.turn_queues(now);
        let mut is_busy = is_busy | has_changed;
        self.turns = self.turns.wrapping_add(1);
        let is_every = |turns| self.turns & (turns - 1) == 0;
        let (wants_admin, wants_tending) = (is_every(ADMIN_TURNS), is_every(TEND_TURNS));
        let may_take = self.life == Life::Enabled && !self.is_on_hold;
        if may_take && (!is_busy || has_changed || wants_admin) {
            is_busy |= self.turn_admin(now);
        }
        if wants_tending || (!is_busy && self.is_due(now)) {
            is_busy |= self.tend(now);
        }
        is_busy |= self.vectors.turn(now, &self.bar);
        if is_busy {
            return Wait::Busy;
        }
        let is_pending = is_pending
            || self.is_in_motion()
            || self.admin.as_ref().is_some_and(|admin| admin.is_pending());
        self.wait(is_pending)
    }

    #[inline]
    fn is_due(&self, now: Instant) -> bool {
        let is_time = now.since(self.tended_at) >= TEND_INTERVAL || now >= self.controller_wakes_at;
        is_time || self.wants_tending || self.is_in_motion()
    }

    /// Looks after everything that a turn looks after only now and then: timers, long commands,
    /// events, deletions, and news of other controllers. True if anything was done.
    pub fn tend(&mut self, now: Instant) -> bool {
        (self.tended_at, self.wants_tending) = (now, false);
        if core::mem::take(&mut self.has_io) {
            self.controller.io_command_seen(now);
        }
        self.controller.turn(now);
        let mut is_busy = self.turn_life(now);
        // Nothing else would end a wait for the last access.
        self.wants_tending = self.heed_cut(now);
        while let Some(signal) = self.controller.next_signal() {
            is_busy |= signal != Signal::CheckPreempted;
            match signal {
                Signal::KeepAliveExpired => {
                    self.fail(now, "the host has not been heard of in time")
                }
                Signal::AbortNamespace { nsid, preempted } => {
                    for served in &mut self.queues {
                        served.queue.abort_namespace(now, nsid, &preempted);
                    }
                }
                Signal::CheckPreempted => {
                    self.queues.iter_mut().for_each(|served| served.queue.check_preempted());
                }
                Signal::NotKept { why } => self.trouble = Some(why),
            }
        }
        while let Some(Decided { from, end }) = self.controller.next_decided() {
            is_busy = true;
            if let Some(served) = self.find(from.queue) {
                served.queue.decide(now, from.ticket, end, &[]);
            }
        }
        is_busy |= self.tend_admin(now);
        self.controller_wakes_at = self.controller.wake_at(now);
        is_busy
    }

    fn turn_queues(&mut self, now: Instant) -> (bool, bool) {
        let (mut is_busy, mut is_pending, mut has_letters) = (false, false, false);
        for served in &mut self.queues {
            let turned = served.queue.turn(now);
            is_busy |= turned.is_busy;
            is_pending |= turned.is_pending;
            self.has_io |= turned.taken > 0;
            has_letters |= served.queue.has_letters();
            if turned.posted > 0 {
                self.ended += u64::from(turned.posted);
                if let Some(vector) = served.vector {
                    self.vectors.posted(now, &self.bar, vector, turned.posted);
                }
            }
        }
        if has_letters {
            self.read_letters(now);
        }
        (is_busy, is_pending)
    }

    #[cold]
    fn read_letters(&mut self, now: Instant) {
        let Self { queues, controller, trouble, .. } = self;
        let mut broken = None;
        for served in queues {
            let queue = served.queue.cqid();
            while let Some(letter) = served.queue.next_letter() {
                match letter {
                    Letter::Error(report) => controller.report_error(now, &report),
                    Letter::InvalidDoorbell(kind) => controller.invalid_doorbell(now, kind),
                    Letter::Reservation { ticket, command, mut bytes } => {
                        let from = Origin { queue, ticket };
                        let end = controller.reservation(now, from, &command, &mut bytes);
                        if let Some(end) = end {
                            served.queue.decide(now, ticket, end, &bytes);
                        }
                    }
                    Letter::Trouble(what) => *trouble = Some(what),
                    Letter::Broken(fault) => broken = Some(fault),
                }
            }
        }
        if let Some(fault) = broken {
            self.fail(now, &format!("a ring at {:#x} is not there any more", fault.iova));
        }
    }

    fn wait(&self, is_pending: bool) -> Wait {
        let until = self.controller_wakes_at.min(self.vectors.wake_at());
        if !is_pending {
            return Wait::Idle(until);
        }
        let media = self.queues.iter().map(|served| served.queue.wake_at()).min();
        Wait::Pending(media.map_or(until, |media| media.min(until)))
    }

    /// Takes over what the host has set by features.
    fn configure(&mut self) {
        let controller = &self.controller;
        let is_write_through = !controller.write_cache_enabled();
        self.is_write_through.store(is_write_through, Ordering::Relaxed);
        let is_exempt = |vector| controller.is_coalescing_disabled(vector);
        self.vectors.configure(controller.coalescing(), is_exempt);
        let burst = self.burst();
        for served in &mut self.queues {
            served.queue.set_burst(burst);
        }
    }

    fn burst(&self) -> u32 {
        let asked = self.controller.arbitration().burst.map_or(self.config.burst, u32::from);
        asked.min(self.config.burst)
    }
}
