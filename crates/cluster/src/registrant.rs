//! Program that registers the key of a host and acquires or releases a reservation, with a new
//! connection for each attempt.

use tenmil_base::{CompletionBatch, Instant, IoStatus, Memory, Segment, Span};
use tenmil_dma::{Backing, CommandStore, DeviceKind, DevicePool, Mapping, RegionTable};
use tenmil_nvme_fabrics::{
    Connecting, FabricsController, FabricsQueuePair, Options, TimeoutPolicy,
};
use tenmil_nvme_host::{ControllerOptions, FastPathOptions, QueuePairOptions, QueueSizes, State};
use tenmil_wire::io::reservation::{
    AcquireAction, AcquireKeys, ChangePersistence, RegisterAction, RegisterKeys, ReleaseAction,
    ReleaseKey, ReservationAcquire, ReservationRegister, ReservationRelease, ReservationType,
};
use tenmil_wire::register::ShutdownNotification;
use tenmil_wire::{Command, TypedCommand};

use crate::checker::Checker;
use crate::history::Scope;
use crate::host::Shared;
use crate::link::{Address, host_id, host_nqn};
use crate::network::Network;
use crate::world::Failure;

/// Reservation program of one host on one disk.
pub(crate) struct ReservationClient {
    host: usize,
    disk: usize,
    requested: Option<RequestedState>,
    stage: Stage,
    /// Time at which the attempt is given up.
    until: Instant,
    memory: RegionTable,
    keys: Segment,
}

/// Requested state of the reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestedState {
    /// The host holds a Write Exclusive reservation that persists through power loss.
    Held,
    /// The same, and the reservation of this other host is preempted.
    Preempted(usize),
    /// The host holds no reservation.
    Released,
}

/// State, named for what is awaited.
enum Stage {
    /// The time of the next attempt.
    Pausing(Instant),
    /// The connection.
    Calling(Box<Connecting>),
    /// The controller to be ready.
    Enabling(Box<FabricsController>),
    /// The queue pair.
    Creating(Box<FabricsController>, u16),
    /// The completion of a command.
    Asking(Box<FabricsController>, Box<FabricsQueuePair>, Step),
    /// The end of the shutdown.
    ShuttingDown(Box<FabricsController>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Register,
    Preempt(usize),
    Acquire,
    Release,
}

/// Timeout of an attempt.
const ATTEMPT: Span = Span::from_secs(5);
/// Time after which an abandoned attempt cannot take effect any more.
const QUIET: Span = Span::from_secs(8);
const KEY_BYTES: u32 = 16;

/// Reservation key of a host.
const fn key_of(host: usize) -> u64 {
    0x1000 + host as u64
}

impl ReservationClient {
    /// Creates a program that is idle until a state is [requested](Self::set_requested).
    ///
    /// # Errors
    ///
    /// If the memory cannot be mapped.
    pub(crate) fn new(host: usize, disk: usize) -> Result<Self, String> {
        let memory = RegionTable::new(8);
        let mapping = Mapping::new(4096, Backing::Private).map_err(|error| error.to_string())?;
        let keys = memory.add(mapping).map_err(|error| format!("{error:?}"))?;
        let keys = keys.slice(0, KEY_BYTES).ok_or("a page is shorter than a key")?;
        let (requested, stage) = (None, Stage::Pausing(Instant::default()));
        let until = Instant::NEVER;
        Ok(Self { host, disk, requested, stage, until, memory, keys })
    }

    /// Requests a state. Attempts are repeated until it is reached.
    pub(crate) fn set_requested(
        &mut self,
        requested: RequestedState,
        now: Instant,
        checker: &mut Checker,
    ) {
        if requested == RequestedState::Released {
            checker.release_begins(self.host, self.disk);
        }
        self.requested = Some(requested);
        if matches!(self.stage, Stage::Asking(..)) {
            // Commands in flight may still do the opposite.
            self.stage = Stage::Pausing(now.after(QUIET));
        }
    }

    /// Whether there is nothing left to do.
    pub(crate) fn is_done(&self) -> bool {
        self.requested.is_none() && matches!(self.stage, Stage::Pausing(_))
    }

    /// Whether the requested state is reached.
    pub(crate) fn is_reached(&self) -> bool {
        self.requested.is_none()
    }

    /// Time at which it must be polled without an event.
    pub(crate) fn wake_at(&mut self, now: Instant) -> Instant {
        let next = match &mut self.stage {
            Stage::Pausing(until) if self.requested.is_some() => return *until,
            Stage::Pausing(_) => return Instant::NEVER,
            Stage::Calling(calling) => calling.wake_at(now),
            Stage::Enabling(remote) | Stage::Creating(remote, _) | Stage::ShuttingDown(remote) => {
                remote.wake_at(now)
            }
            Stage::Asking(remote, queue, _) => remote.wake_at(now).min(queue.wake_at()),
        };
        next.min(self.until)
    }

    /// Performs pending work. Returns true if there was any.
    ///
    /// # Errors
    ///
    /// The first violation.
    pub(crate) fn step(
        &mut self,
        now: Instant,
        (address, network): (&Address, &Network),
        shared: &mut Shared<'_>,
    ) -> Result<bool, Failure> {
        if now >= self.until {
            self.give_up(now, "took too long", shared);
        }
        let stage = std::mem::replace(&mut self.stage, Stage::Pausing(Instant::NEVER));
        match stage {
            Stage::Pausing(until) => {
                self.stage = Stage::Pausing(until);
                if self.requested.is_none() || now < until {
                    return Ok(false);
                }
                self.call(now, address, network)?;
                Ok(true)
            }
            Stage::Calling(mut calling) => {
                let ended = calling.poll(now);
                self.stage = Stage::Calling(calling);
                match ended {
                    None => return Ok(false),
                    Some(Ok(remote)) => self.stage = Stage::Enabling(Box::new(remote)),
                    Some(Err(_)) => self.give_up(now, "was not connected", shared),
                }
                Ok(true)
            }
            Stage::Enabling(remote) => Ok(self.enable(now, remote)),
            Stage::Creating(remote, id) => Ok(self.create(now, remote, id, address, shared)),
            Stage::Asking(remote, queue, step) => {
                self.submit(now, (remote, queue, step), address, shared)
            }
            Stage::ShuttingDown(mut remote) => {
                let is_busy = remote.poll(now).is_some();
                if remote.controller().state() == State::ShuttingDown {
                    self.stage = Stage::ShuttingDown(remote);
                    return Ok(is_busy);
                }
                self.rest(now);
                Ok(true)
            }
        }
    }

    fn call(&mut self, now: Instant, address: &Address, network: &Network) -> Result<(), Failure> {
        let broken = |text: String| Failure { scope: Scope::host(self.host), text };
        let mapping = Mapping::new(1 << 20, Backing::Private);
        let mapping = mapping.map_err(|error| broken(error.to_string()))?;
        // Each attempt has its own memory, since the memory of the last one may still be read.
        let regions = RegionTable::new(8);
        let memory = regions.add(mapping).map_err(|error| broken(format!("{error:?}")))?;
        let page =
            Mapping::new(4096, Backing::Private).map_err(|error| broken(error.to_string()))?;
        let keys = regions.add(page).map_err(|error| broken(format!("{error:?}")))?;
        self.keys = keys.slice(0, KEY_BYTES).unwrap_or(self.keys);
        self.memory = regions.clone();
        let store = CommandStore::for_device(DeviceKind::Emulated);
        let pool = DevicePool::new(regions.clone(), memory, DeviceKind::Emulated, store);
        pool.map_on_demand();
        let connector = network.dial(self.host, address.process, &regions);
        let mut options =
            Options::new(&address.subsystem, &host_nqn(self.host), host_id(self.host));
        options.policy = TimeoutPolicy { connect: Span::from_secs(1), ..TimeoutPolicy::default() };
        let wishes = ControllerOptions { queue_pairs: 1, ..ControllerOptions::default() };
        let calling = Connecting::begin(pool, connector, options, wishes, now);
        let calling = calling.map_err(|why| broken(format!("{why:?}")))?;
        self.until = now.after(ATTEMPT);
        self.stage = Stage::Calling(Box::new(calling));
        Ok(())
    }

    fn enable(&mut self, now: Instant, mut remote: Box<FabricsController>) -> bool {
        let is_busy = remote.poll(now).is_some();
        let techniques = FastPathOptions::default();
        let options = QueuePairOptions { depth: 4, vector: None, techniques };
        let is_ready = remote.controller().state() == State::Ready;
        let asked = is_ready.then(|| remote.controller().create_queue_pair(now, options));
        match asked {
            Some(Ok(id)) => self.stage = Stage::Creating(remote, id),
            _ => self.stage = Stage::Enabling(remote),
        }
        is_busy || is_ready
    }

    fn create(
        &mut self,
        now: Instant,
        mut remote: Box<FabricsController>,
        id: u16,
        address: &Address,
        shared: &mut Shared<'_>,
    ) -> bool {
        let is_busy = remote.poll(now).is_some();
        match remote.take_queue_pair(id, address.nsid, QueueSizes::default()) {
            Some(queue) => {
                let mut queue = Box::new(queue);
                let is_sent = self.send(now, &mut queue, (Step::Register, address.nsid));
                self.note(now, "registers its key", shared);
                match is_sent {
                    true => self.stage = Stage::Asking(remote, queue, Step::Register),
                    false => self.give_up(now, "could not send", shared),
                }
                true
            }
            None => {
                self.stage = Stage::Creating(remote, id);
                is_busy
            }
        }
    }

    fn submit(
        &mut self,
        now: Instant,
        (mut remote, mut queue, step): (Box<FabricsController>, Box<FabricsQueuePair>, Step),
        address: &Address,
        shared: &mut Shared<'_>,
    ) -> Result<bool, Failure> {
        let is_busy = remote.poll(now).is_some();
        let mut completions = CompletionBatch::with_capacity(4);
        queue.poll_raw(now, &mut completions);
        queue.flush();
        let completion = completions.drain().next();
        let is_lost = remote.controller().state() != State::Ready;
        match completion {
            None if is_lost => self.give_up(now, "lost its connection", shared),
            None => self.stage = Stage::Asking(remote, queue, step),
            Some(completion) if !completion.status.is_success() => {
                let text = format!("{step:?} fails: {}", tenmil_wire::Status(completion.status.0));
                self.note(now, &text, shared);
                let is_certain = completion.status != IoStatus::ABORTED_BY_HOST;
                if is_certain
                    && let Step::Preempt(_) = step
                    && self.send(now, &mut queue, (Step::Acquire, address.nsid))
                {
                    // An earlier attempt, of which no completion was received, may have preempted it.
                    self.stage = Stage::Asking(remote, queue, Step::Acquire);
                    return Ok(true);
                }
                if is_certain
                    && self.requested == Some(RequestedState::Held)
                    && step == Step::Acquire
                {
                    // Another host holds a reservation, so the request is dropped.
                    self.requested = None;
                }
                drop(queue);
                match is_certain {
                    true => self.part(now, remote),
                    false => self.give_up(now, "lost its connection", shared),
                }
            }
            Some(_) => {
                let next = match (step, self.requested) {
                    (Step::Register, Some(RequestedState::Held)) => Some(Step::Acquire),
                    (Step::Register, Some(RequestedState::Preempted(other))) => {
                        Some(Step::Preempt(other))
                    }
                    (Step::Register, Some(RequestedState::Released)) => Some(Step::Release),
                    _ => None,
                };
                self.note(now, &format!("{step:?} ends"), shared);
                match next {
                    Some(next) if self.send(now, &mut queue, (next, address.nsid)) => {
                        self.note(now, &format!("{next:?} begins"), shared);
                        self.stage = Stage::Asking(remote, queue, next);
                    }
                    Some(_) => self.give_up(now, "could not send", shared),
                    None => {
                        let requested = self.requested.take();
                        if let Some(RequestedState::Preempted(_)) = requested {
                            shared.checker.preempted(self.host, self.disk, now);
                        } else if step == Step::Acquire {
                            self.acquired(now, shared)?;
                        }
                        drop(queue);
                        self.part(now, remote);
                    }
                }
                return Ok(true);
            }
        }
        Ok(is_busy || completion.is_some())
    }

    fn acquired(&self, now: Instant, shared: &mut Shared<'_>) -> Result<(), Failure> {
        let Err(other) = shared.checker.reserved(self.host, self.disk, now) else { return Ok(()) };
        Err(Failure {
            scope: Scope { host: None, disk: Some(self.disk), blocks: Some(0..0) },
            text: format!(
                "host {} has acquired a reservation on disk {}, which host {other} holds",
                self.host, self.disk
            ),
        })
    }

    /// Sends a command. Returns false if it was not accepted.
    fn send(&self, now: Instant, queue: &mut FabricsQueuePair, (step, nsid): (Step, u32)) -> bool {
        let key = key_of(self.host);
        let rtype = ReservationType::WriteExclusive;
        let (command, bytes): (Command, Vec<u8>) = match step {
            Step::Register => {
                let (rrega, cptpl) = (RegisterAction::Register, ChangePersistence::Persist);
                let keys = RegisterKeys::zeroed().with(|keys| keys.nrkey(key));
                let command =
                    ReservationRegister { nsid, rrega, iekey: true, disnsrs: false, cptpl };
                (command.to_command(), keys.as_bytes().to_vec())
            }
            Step::Preempt(_) | Step::Acquire => {
                let (racqa, victim) = match step {
                    Step::Preempt(other) => (AcquireAction::PreemptAndAbort, key_of(other)),
                    _ => (AcquireAction::Acquire, 0),
                };
                let keys = AcquireKeys::zeroed().with(|keys| keys.crkey(key).prkey(victim));
                let command =
                    ReservationAcquire { nsid, racqa, iekey: false, disnsrs: false, rtype };
                (command.to_command(), keys.as_bytes().to_vec())
            }
            Step::Release => {
                let rrela = ReleaseAction::Release;
                let keys = ReleaseKey::zeroed().with(|keys| keys.crkey(key));
                let command =
                    ReservationRelease { nsid, rrela, iekey: false, disnsrs: false, rtype };
                (command.to_command(), keys.as_bytes().to_vec())
            }
        };
        let len = u32::try_from(bytes.len()).unwrap_or(0);
        let Some(data) = self.keys.slice(0, len) else { return false };
        let is_stored = self.memory.store(data, &bytes).is_ok();
        let sent = queue.queue().submit_raw(now, 1, command, &[data], &[], None);
        queue.flush();
        is_stored && sent.is_ok()
    }

    /// Shuts the controller down.
    fn part(&mut self, now: Instant, mut remote: Box<FabricsController>) {
        let is_begun = remote.controller().shut_down(now, ShutdownNotification::Normal).is_ok();
        match is_begun {
            true => self.stage = Stage::ShuttingDown(remote),
            false => self.rest(now),
        }
    }

    fn rest(&mut self, now: Instant) {
        self.until = Instant::NEVER;
        self.stage = Stage::Pausing(now.after(Span::from_ms(100)));
    }

    /// Abandons the attempt. Its commands may still take effect for a while.
    fn give_up(&mut self, now: Instant, why: &str, shared: &mut Shared<'_>) {
        self.note(now, &format!("gives this attempt up: it {why}"), shared);
        self.until = Instant::NEVER;
        let pause = match self.stage {
            Stage::Calling(_) => Span::from_ms(200),
            _ => QUIET,
        };
        self.stage = Stage::Pausing(now.after(pause));
    }

    fn note(&self, now: Instant, what: &str, shared: &mut Shared<'_>) {
        let (host, disk) = (self.host, self.disk);
        let scope = Scope { host: None, disk: Some(disk), blocks: None };
        shared.note(now, scope, format!("host {host}: the reservation of disk {disk} {what}"));
    }
}
