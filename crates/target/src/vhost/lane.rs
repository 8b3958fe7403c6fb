//! A queue on a reactor: what is looked at when, and how it sleeps.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use base::{Answers, Backend, Instant, Span, WakeSource};
use dma::Regions;
use host::Line;
use host::watch::{Interest, Watch};
use reactor::{Context, Found, MeanLatency, Parting, Poller, WokenBy};

use super::memory::Table;
use super::post::{Ended, Orders, Post};
use super::slots::{Fault, Slots};

/// A queue, and the backend that it works with. Its light thread ends when it is told to, or its ring
/// makes no sense, once the backend has answered.
pub(super) struct Lane {
    /// Goes first: when it is dropped, nobody touches the memory any more.
    backend: Box<dyn Backend>,
    /// None once it touches nothing any more.
    work: Option<Work>,
    /// What the driver kicks, if it does.
    kick: Option<Line>,
    /// Whom it calls.
    call: Option<Line>,
    post: Arc<Post>,
    phase: Phase,
    answers: Answers,
    watch: Watch,
    /// Of the backend.
    latency: MeanLatency,
    turns: u32,
}

/// What it works on.
struct Work {
    slots: Slots<Regions>,
    table: Arc<Table>,
}

#[derive(Debug, PartialEq, Eq)]
enum Phase {
    /// It takes what comes.
    Running,
    /// It takes nothing new, and answers what it has.
    Ending,
    /// It answers nobody any more, for this reason.
    Broken(String),
}

/// What a lane is made of.
pub(super) struct LaneParts {
    pub(super) backend: Box<dyn Backend>,
    pub(super) slots: Slots<Regions>,
    pub(super) table: Arc<Table>,
    pub(super) kick: Option<Arc<OwnedFd>>,
    pub(super) call: Option<Line>,
    pub(super) post: Arc<Post>,
}

/// Answers that are taken from the backend at once.
const BATCH: usize = 256;
const KICK: u64 = 0;
const BACKEND: u64 = 1;
const READABLE: Interest = Interest { readable: true, writable: false };
/// Memory that was taken back is looked for every so many turns; a power of two.
const MEMORY_TURNS: u32 = 256;

impl Lane {
    pub(super) fn new(parts: LaneParts) -> io::Result<Self> {
        let LaneParts { backend, slots, table, kick, call, post } = parts;
        let watch = Watch::new()?;
        let kick = kick.map(|kick| Line::new(kick.try_clone()?)).transpose()?;
        if let Some(kick) = &kick {
            watch.add(kick, KICK, READABLE)?;
        }
        if let WakeSource::Descriptor(descriptor) = backend.wake_source() {
            watch.add(descriptor, BACKEND, READABLE)?;
        }
        Ok(Self {
            backend,
            work: Some(Work { slots, table }),
            kick,
            call,
            post,
            phase: Phase::Running,
            answers: Answers::with_capacity(BATCH),
            watch,
            latency: MeanLatency::default(),
            turns: 0,
        })
    }

    /// What wakes it: the driver and its backend.
    pub(super) fn woken_by(&self) -> io::Result<WokenBy> {
        WokenBy::of(WakeSource::Descriptor(self.watch.as_fd()))
    }

    /// Whether looking is of no use, since the kernel brings the answers.
    pub(super) fn is_done_by_kernel(&self) -> bool {
        self.backend.is_done_by_kernel()
    }

    fn in_flight(&self) -> usize {
        self.work.as_ref().map_or(0, |work| work.slots.in_flight())
    }

    #[cold]
    fn obey(&mut self, Orders { ends, call, block_count }: Orders) {
        if let Some((work, block_count)) = self.work.as_mut().zip(block_count) {
            work.slots.resize(block_count);
        }
        if let Some(call) = call {
            self.call = call;
            // What was called by the old way may not have been seen.
            self.signal();
        }
        if ends && self.phase == Phase::Running {
            self.phase = Phase::Ending;
        }
    }

    fn signal(&self) {
        if let Some(call) = &self.call {
            call.signal();
        }
    }

    /// Takes what the driver asks for, has it done, and tells what has ended.
    #[inline]
    fn work(&mut self, now: Instant) -> Result<usize, Fault> {
        let Some(Work { slots, table }) = &mut self.work else { return Ok(0) };
        let is_over = matches!(self.phase, Phase::Broken(_));
        let mut count = 0;
        if !is_over {
            count += slots.receive(table.space(), self.phase == Phase::Running)?;
        }
        let (requests, segments) = slots.requests();
        if !requests.is_empty() {
            let taken = self.backend.submit(now, requests, segments);
            slots.taken(taken);
            count += taken;
        }
        if slots.in_flight() > 0 {
            let ended = self.backend.poll(now, &mut self.answers);
            self.latency.end(ended);
            count += ended;
            let mut told = Ok(());
            for answer in self.answers.drain() {
                // Each is counted, also behind one that could not be told.
                told = told.and(slots.answered(answer, is_over || told.is_err()));
            }
            told?;
        }
        if !is_over && slots.publish()? {
            self.signal();
        }
        Ok(count)
    }

    /// The ring makes no sense, or its memory is gone: nothing there is touched any more.
    #[cold]
    fn break_off(&mut self, why: String) {
        if let Some(work) = &mut self.work {
            work.slots.forget_requests();
        }
        if !matches!(self.phase, Phase::Broken(_)) {
            self.phase = Phase::Broken(why);
        }
    }

    /// Looks whether the front end has taken memory back, which explains whatever else is found.
    fn look_after_memory(&mut self) {
        let failed = self.work.as_ref().and_then(|work| work.table.failed());
        if let Some(guest) = failed {
            self.break_off(format!("memory at {guest:#x} was made shorter than it was said to be"));
        }
    }

    #[cold]
    fn fail(&mut self, fault: Fault) {
        self.look_after_memory();
        self.break_off(fault.to_string());
    }

    /// Lets go of everything once the backend has answered, and says so. Whether it has.
    fn is_over(&mut self) -> bool {
        if self.phase == Phase::Running {
            return false;
        }
        let Some(work) = self.work.take_if(|work| work.slots.is_still()) else {
            return self.work.is_none();
        };
        let next = work.slots.next();
        drop(work);
        self.kick = None;
        self.call = None;
        let why = match std::mem::replace(&mut self.phase, Phase::Ending) {
            Phase::Broken(why) => Some(why),
            _ => None,
        };
        self.post.end(Ended { next, why });
        true
    }
}

impl Poller for Lane {
    fn poll(&mut self, context: &mut Context<'_>) -> Found {
        let now = context.now();
        self.latency.pass(now, self.in_flight());
        if let Some(orders) = self.post.orders() {
            self.obey(orders);
        }
        let mut count = match self.work(now) {
            Ok(count) => count,
            Err(fault) => {
                self.fail(fault);
                1
            }
        };
        self.turns = self.turns.wrapping_add(1);
        if self.turns & (MEMORY_TURNS - 1) == 0 {
            self.look_after_memory();
        }
        if self.is_over() {
            context.end();
            count += 1;
        }
        Found::from_count(count)
    }

    fn flush(&mut self) {
        self.backend.flush();
    }

    fn arm(&mut self) -> Found {
        self.look_after_memory();
        // Old signals would end every sleep at once.
        if let Some(kick) = &self.kick {
            kick.clear();
        }
        let has_answer = self.backend.arm() && self.in_flight() > 0;
        let is_running = self.phase == Phase::Running;
        let mut stays_awake = has_answer || (is_running && self.kick.is_none());
        if let Some(Work { slots, .. }) = &mut self.work {
            // A backend that refuses although it has nothing announces nothing.
            let is_refused = !slots.requests().0.is_empty() && slots.in_flight() == 0;
            stays_awake |= is_refused && self.backend.wake_at() == Instant::NEVER;
            match slots.ask_for_kicks() {
                Ok(has_more) => stays_awake |= has_more && is_running,
                Err(fault) => self.fail(fault),
            }
        }
        // Whoever ends with nothing in flight is woken by nobody.
        stays_awake |= self.phase != Phase::Running && self.in_flight() == 0;
        Found::from_count(usize::from(stays_awake))
    }

    fn disarm(&mut self) {
        self.backend.disarm();
        if let Some(Work { slots, .. }) = &mut self.work
            && let Err(fault) = slots.want_no_kicks()
        {
            self.fail(fault);
        }
    }

    fn wake_at(&self) -> Instant {
        let is_waiting = self.work.as_ref().is_some_and(|work| !work.slots.is_still());
        if is_waiting { self.backend.wake_at() } else { Instant::NEVER }
    }

    fn expected_latency(&self) -> Option<Span> {
        self.latency.mean().filter(|_| self.in_flight() > 0)
    }

    fn detach(&mut self, parting: Parting) -> bool {
        if parting == Parting::Ends && self.phase == Phase::Running {
            self.phase = Phase::Ending;
        }
        match parting {
            Parting::Moves => self.in_flight() == 0,
            Parting::Ends => self.is_over(),
        }
    }
}

impl Drop for Lane {
    /// Whoever waits for its end learns of it in any case.
    fn drop(&mut self) {
        if let Some(work) = self.work.take() {
            let next = work.slots.next();
            drop(work);
            self.post.end(Ended { next, why: Some("its thread has ended".to_owned()) });
        }
    }
}
