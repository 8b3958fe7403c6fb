//! Program that registers the key of a host and acquires or releases a reservation, with a new
//! connection for each attempt.

use tenmil_base::{CompletionBatch, Instant, IoStatus, Memory, Segment, Span};
use tenmil_dma::{CommandStore, DeviceKind, DevicePool, MemoryBacking, MemoryMapping, RegionTable};
use tenmil_nvme_fabrics::{
    ConnectingController, FabricsController, FabricsQueuePair, Options, TimeoutPolicy,
};
use tenmil_nvme_host::{
    ControllerOptions, ControllerState, FastPathOptions, QueuePairOptions, QueueSizes,
};
use tenmil_wire::io::reservation::{
    AcquireAction, AcquireKeys, ChangePersistence, RegisterAction, RegisterKeys, ReleaseAction,
    ReleaseKey, ReservationAcquire, ReservationRegister, ReservationRelease, ReservationType,
};
use tenmil_wire::register::ShutdownNotification;
use tenmil_wire::{Command, TypedCommand};

use crate::cluster_host::HostsShared;
use crate::cluster_network::ClusterNetwork;
use crate::cluster_simulation::RunFailure;
use crate::consistency_checker::ConsistencyChecker;
use crate::disk_access::{ExportAddress, host_id, host_nqn};
use crate::run_history::RecordScope;

/// Reservation program of one host on one disk.
pub(crate) struct ReservationClient {
    host: usize,
    disk: usize,
    requested: Option<DesiredReservation>,
    stage: ClientStage,
    /// Time at which the attempt is given up.
    until: Instant,
    memory: RegionTable,
    keys: Segment,
}

/// Requested state of the reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DesiredReservation {
    /// The host holds a Write Exclusive reservation that persists through power loss.
    Held,
    /// The same, and the reservation of this other host is preempted.
    Preempted(usize),
    /// The host holds no reservation.
    Released,
}

/// State, named for what is awaited.
enum ClientStage {
    /// The time of the next attempt.
    Pausing(Instant),
    /// The connection.
    Calling(Box<ConnectingController>),
    /// The controller to be ready.
    Enabling(Box<FabricsController>),
    /// The queue pair.
    Creating(Box<FabricsController>, u16),
    /// The completion of a command.
    Asking(Box<FabricsController>, Box<FabricsQueuePair>, ClientStep),
    /// The end of the shutdown.
    ShuttingDown(Box<FabricsController>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClientStep {
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
const fn reservation_key(host: usize) -> u64 {
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
        let mapping =
            MemoryMapping::new(4096, MemoryBacking::Private).map_err(|error| error.to_string())?;
        let keys = memory.add_mapping(mapping).map_err(|error| format!("{error:?}"))?;
        let keys = keys.slice(0, KEY_BYTES).ok_or("a page is shorter than a key")?;
        let (requested, stage) = (None, ClientStage::Pausing(Instant::default()));
        let until = Instant::NEVER;
        Ok(Self { host, disk, requested, stage, until, memory, keys })
    }

    /// Requests a state. Attempts are repeated until it is reached.
    pub(crate) fn set_requested(
        &mut self,
        requested: DesiredReservation,
        now: Instant,
        checker: &mut ConsistencyChecker,
    ) {
        if requested == DesiredReservation::Released {
            checker.record_release_begin(self.host, self.disk);
        }
        self.requested = Some(requested);
        if matches!(self.stage, ClientStage::Asking(..)) {
            // Commands in flight may still do the opposite.
            self.stage = ClientStage::Pausing(now.after(QUIET));
        }
    }

    /// Whether there is nothing left to do.
    pub(crate) fn is_done(&self) -> bool {
        self.requested.is_none() && matches!(self.stage, ClientStage::Pausing(_))
    }

    /// Whether the requested state is reached.
    pub(crate) fn has_reached_requested(&self) -> bool {
        self.requested.is_none()
    }

    /// Time at which it must be polled without an event.
    pub(crate) fn wake_at(&mut self, now: Instant) -> Instant {
        let next = match &mut self.stage {
            ClientStage::Pausing(until) if self.requested.is_some() => return *until,
            ClientStage::Pausing(_) => return Instant::NEVER,
            ClientStage::Calling(calling) => calling.wake_at(now),
            ClientStage::Enabling(remote)
            | ClientStage::Creating(remote, _)
            | ClientStage::ShuttingDown(remote) => remote.wake_at(now),
            ClientStage::Asking(remote, queue, _) => remote.wake_at(now).min(queue.wake_at()),
        };
        next.min(self.until)
    }

    /// Performs pending work. Returns true if there was any.
    ///
    /// # Errors
    ///
    /// The first violation.
    pub(crate) fn poll_client(
        &mut self,
        now: Instant,
        (address, network): (&ExportAddress, &ClusterNetwork),
        shared: &mut HostsShared<'_>,
    ) -> Result<bool, RunFailure> {
        if now >= self.until {
            self.abandon_attempt(now, "took too long", shared);
        }
        let stage = std::mem::replace(&mut self.stage, ClientStage::Pausing(Instant::NEVER));
        match stage {
            ClientStage::Pausing(until) => {
                self.stage = ClientStage::Pausing(until);
                if self.requested.is_none() || now < until {
                    return Ok(false);
                }
                self.start_connect(now, address, network)?;
                Ok(true)
            }
            ClientStage::Calling(mut calling) => {
                let ended = calling.poll(now);
                self.stage = ClientStage::Calling(calling);
                match ended {
                    None => return Ok(false),
                    Some(Ok(remote)) => self.stage = ClientStage::Enabling(Box::new(remote)),
                    Some(Err(_)) => self.abandon_attempt(now, "was not connected", shared),
                }
                Ok(true)
            }
            ClientStage::Enabling(remote) => Ok(self.enable_controller(now, remote)),
            ClientStage::Creating(remote, id) => {
                Ok(self.create_queue(now, remote, id, address, shared))
            }
            ClientStage::Asking(remote, queue, step) => {
                self.submit_command(now, (remote, queue, step), address, shared)
            }
            ClientStage::ShuttingDown(mut remote) => {
                let is_busy = remote.poll(now).is_some();
                if remote.controller().state() == ControllerState::ShuttingDown {
                    self.stage = ClientStage::ShuttingDown(remote);
                    return Ok(is_busy);
                }
                self.wait_before_retry(now);
                Ok(true)
            }
        }
    }

    fn start_connect(
        &mut self,
        now: Instant,
        address: &ExportAddress,
        network: &ClusterNetwork,
    ) -> Result<(), RunFailure> {
        let broken = |text: String| RunFailure { scope: RecordScope::host(self.host), text };
        let mapping = MemoryMapping::new(1 << 20, MemoryBacking::Private);
        let mapping = mapping.map_err(|error| broken(error.to_string()))?;
        // Each attempt has its own memory, since the memory of the last one may still be read.
        let regions = RegionTable::new(8);
        let memory = regions.add_mapping(mapping).map_err(|error| broken(format!("{error:?}")))?;
        let page = MemoryMapping::new(4096, MemoryBacking::Private)
            .map_err(|error| broken(error.to_string()))?;
        let keys = regions.add_mapping(page).map_err(|error| broken(format!("{error:?}")))?;
        self.keys = keys.slice(0, KEY_BYTES).unwrap_or(self.keys);
        self.memory = regions.clone();
        let store = CommandStore::for_device(DeviceKind::Emulated);
        let pool = DevicePool::new(regions.clone(), memory, DeviceKind::Emulated, store);
        pool.map_on_demand();
        let connector = network.connector(self.host, address.process, &regions);
        let mut options =
            Options::new(&address.subsystem, &host_nqn(self.host), host_id(self.host));
        options.policy = TimeoutPolicy { connect: Span::from_secs(1), ..TimeoutPolicy::default() };
        options.authentication = address.authentication.of_host(self.host);
        let wishes = ControllerOptions { queue_pairs: 1, ..ControllerOptions::default() };
        let calling = ConnectingController::begin(pool, connector, options, wishes, now);
        let calling = calling.map_err(|why| broken(format!("{why:?}")))?;
        self.until = now.after(ATTEMPT);
        self.stage = ClientStage::Calling(Box::new(calling));
        Ok(())
    }

    fn enable_controller(&mut self, now: Instant, mut remote: Box<FabricsController>) -> bool {
        let is_busy = remote.poll(now).is_some();
        let techniques = FastPathOptions::default();
        let options = QueuePairOptions { depth: 4, vector: None, techniques };
        let is_ready = remote.controller().state() == ControllerState::Ready;
        let asked = is_ready.then(|| remote.controller().create_queue_pair(now, options));
        match asked {
            Some(Ok(id)) => self.stage = ClientStage::Creating(remote, id),
            _ => self.stage = ClientStage::Enabling(remote),
        }
        is_busy || is_ready
    }

    fn create_queue(
        &mut self,
        now: Instant,
        mut remote: Box<FabricsController>,
        id: u16,
        address: &ExportAddress,
        shared: &mut HostsShared<'_>,
    ) -> bool {
        let is_busy = remote.poll(now).is_some();
        match remote.take_queue_pair(id, address.nsid, QueueSizes::default()) {
            Some(queue) => {
                let mut queue = Box::new(queue);
                let is_sent = self.send(now, &mut queue, (ClientStep::Register, address.nsid));
                self.record_event(now, "registers its key", shared);
                match is_sent {
                    true => self.stage = ClientStage::Asking(remote, queue, ClientStep::Register),
                    false => self.abandon_attempt(now, "could not send", shared),
                }
                true
            }
            None => {
                self.stage = ClientStage::Creating(remote, id);
                is_busy
            }
        }
    }

    fn submit_command(
        &mut self,
        now: Instant,
        (mut remote, mut queue, step): (Box<FabricsController>, Box<FabricsQueuePair>, ClientStep),
        address: &ExportAddress,
        shared: &mut HostsShared<'_>,
    ) -> Result<bool, RunFailure> {
        let is_busy = remote.poll(now).is_some();
        let mut completions = CompletionBatch::with_capacity(4);
        queue.poll_raw(now, &mut completions);
        queue.flush();
        let completion = completions.drain().next();
        let is_lost = remote.controller().state() != ControllerState::Ready;
        match completion {
            None if is_lost => self.abandon_attempt(now, "lost its connection", shared),
            None => self.stage = ClientStage::Asking(remote, queue, step),
            Some(completion) if !completion.status.is_success() => {
                let text = format!("{step:?} fails: {}", tenmil_wire::Status(completion.status.0));
                self.record_event(now, &text, shared);
                let is_certain = completion.status != IoStatus::ABORTED_BY_HOST;
                if is_certain
                    && let ClientStep::Preempt(_) = step
                    && self.send(now, &mut queue, (ClientStep::Acquire, address.nsid))
                {
                    // An earlier attempt, of which no completion was received, may have preempted it.
                    self.stage = ClientStage::Asking(remote, queue, ClientStep::Acquire);
                    return Ok(true);
                }
                if is_certain
                    && self.requested == Some(DesiredReservation::Held)
                    && step == ClientStep::Acquire
                {
                    // Another host holds a reservation, so the request is dropped.
                    self.requested = None;
                }
                drop(queue);
                match is_certain {
                    true => self.shut_down_controller(now, remote),
                    false => self.abandon_attempt(now, "lost its connection", shared),
                }
            }
            Some(_) => {
                let next = match (step, self.requested) {
                    (ClientStep::Register, Some(DesiredReservation::Held)) => {
                        Some(ClientStep::Acquire)
                    }
                    (ClientStep::Register, Some(DesiredReservation::Preempted(other))) => {
                        Some(ClientStep::Preempt(other))
                    }
                    (ClientStep::Register, Some(DesiredReservation::Released)) => {
                        Some(ClientStep::Release)
                    }
                    _ => None,
                };
                self.record_event(now, &format!("{step:?} ends"), shared);
                match next {
                    Some(next) if self.send(now, &mut queue, (next, address.nsid)) => {
                        self.record_event(now, &format!("{next:?} begins"), shared);
                        self.stage = ClientStage::Asking(remote, queue, next);
                    }
                    Some(_) => self.abandon_attempt(now, "could not send", shared),
                    None => {
                        let requested = self.requested.take();
                        if let Some(DesiredReservation::Preempted(_)) = requested {
                            shared.checker.record_preemption(self.host, self.disk, now);
                        } else if step == ClientStep::Acquire {
                            self.record_acquired(now, shared)?;
                        }
                        drop(queue);
                        self.shut_down_controller(now, remote);
                    }
                }
                return Ok(true);
            }
        }
        Ok(is_busy || completion.is_some())
    }

    fn record_acquired(
        &self,
        now: Instant,
        shared: &mut HostsShared<'_>,
    ) -> Result<(), RunFailure> {
        let Err(other) = shared.checker.record_reservation(self.host, self.disk, now) else {
            return Ok(());
        };
        Err(RunFailure {
            scope: RecordScope { host: None, disk: Some(self.disk), blocks: Some(0..0) },
            text: format!(
                "host {} has acquired a reservation on disk {}, which host {other} holds",
                self.host, self.disk
            ),
        })
    }

    /// Sends a command. Returns false if it was not accepted.
    fn send(
        &self,
        now: Instant,
        queue: &mut FabricsQueuePair,
        (step, nsid): (ClientStep, u32),
    ) -> bool {
        let key = reservation_key(self.host);
        let rtype = ReservationType::WriteExclusive;
        let (command, bytes): (Command, Vec<u8>) = match step {
            ClientStep::Register => {
                let (rrega, cptpl) = (RegisterAction::Register, ChangePersistence::Persist);
                let keys = RegisterKeys::zeroed().with(|keys| keys.nrkey(key));
                let command =
                    ReservationRegister { nsid, rrega, iekey: true, disnsrs: false, cptpl };
                (command.to_command(), keys.as_bytes().to_vec())
            }
            ClientStep::Preempt(_) | ClientStep::Acquire => {
                let (racqa, victim) = match step {
                    ClientStep::Preempt(other) => {
                        (AcquireAction::PreemptAndAbort, reservation_key(other))
                    }
                    _ => (AcquireAction::Acquire, 0),
                };
                let keys = AcquireKeys::zeroed().with(|keys| keys.crkey(key).prkey(victim));
                let command =
                    ReservationAcquire { nsid, racqa, iekey: false, disnsrs: false, rtype };
                (command.to_command(), keys.as_bytes().to_vec())
            }
            ClientStep::Release => {
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
        let sent = queue.driver_queue().submit_raw(now, 1, command, &[data], &[], None);
        queue.flush();
        is_stored && sent.is_ok()
    }

    /// Shuts the controller down.
    fn shut_down_controller(&mut self, now: Instant, mut remote: Box<FabricsController>) {
        let is_begun =
            remote.controller().start_shutdown(now, ShutdownNotification::Normal).is_ok();
        match is_begun {
            true => self.stage = ClientStage::ShuttingDown(remote),
            false => self.wait_before_retry(now),
        }
    }

    fn wait_before_retry(&mut self, now: Instant) {
        self.until = Instant::NEVER;
        self.stage = ClientStage::Pausing(now.after(Span::from_ms(100)));
    }

    /// Abandons the attempt. Its commands may still take effect for a while.
    fn abandon_attempt(&mut self, now: Instant, why: &str, shared: &mut HostsShared<'_>) {
        self.record_event(now, &format!("gives this attempt up: it {why}"), shared);
        self.until = Instant::NEVER;
        let pause = match self.stage {
            ClientStage::Calling(_) => Span::from_ms(200),
            _ => QUIET,
        };
        self.stage = ClientStage::Pausing(now.after(pause));
    }

    fn record_event(&self, now: Instant, what: &str, shared: &mut HostsShared<'_>) {
        let (host, disk) = (self.host, self.disk);
        let scope = RecordScope { host: None, disk: Some(disk), blocks: None };
        shared.add_record(
            now,
            scope,
            format!("host {host}: the reservation of disk {disk} {what}"),
        );
    }
}
