//! Admin command set of a controller: runs on one thread, has no transport and no I/O queues, and
//! receives the current time as an argument.
//!
//! The interface to the transport in front of it is drawn in [`transport_interface`].
//!
//! ```text
//!   commands ──▶ queues · identify · log · features · format · management · self_test · firmware
//!                                     │
//!                      events ◀───────┼───────▶ subsystem ──▶ namespace snapshots for the queues
//!                  health, power,     │         (state that controllers share)
//!                  keep_alive         └───────▶ reservation
//! ```

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use tenmil_base::{Durability, Error, Instant};
use tenmil_wire::Status;
use tenmil_wire::admin::{DeviceSelfTest, SelfTestCode};
use tenmil_wire::feature::Feature;
use tenmil_wire::log::event::ReservationEvent;
use tenmil_wire::log::self_test::SelfTestOutcome;

use crate::executor::FusedArbiter;
use crate::namespace::{NamespaceSnapshot, VersionedValue};
use commands::CommandResult;
use events::{AsyncEvent, AsyncEventQueue};
use features::commands::Timestamp;
use features::reservation_persistence::PendingFeatureSave;
use features::{FeatureKey, FeatureValues, event_bit};
use firmware::FirmwareDownload;
use format::FormatInProgress;
use health::{Health, WARNING_READ_ONLY, WARNING_RELIABILITY, WARNING_SPARE, WARNING_TEMPERATURE};
use io_queue_commands::GrantedQueues;
use keep_alive::KeepAlive;
use log::error_information::ErrorLog;
use log::telemetry::Telemetry;
use power::PowerManagement;
use reservation::change_queue::ReservationReplyTarget;
use reservation::preempt_abort::PendingPreemption;
pub(crate) use reservation::preempt_abort::PreemptedWriterTracker;
use reservation::{HostId, HostNqn, OriginRegistrantLimit};
use self_test::SelfTests;
use subsystem::{NOTICES_MAX, NamespaceEntry, PendingUpdates, SubsystemState};
use transport_interface::{
    AdminCompletion, AdminOutcome, AdminResult, Arbitration, ErrorReport, InvalidDoorbell,
    IoQueueCoalescing, IoTotals, ReservationCompletion, TransportAction,
};

mod commands;
mod config;
mod events;
mod features;
mod firmware;
mod format;
mod fuzz;
mod health;
mod identify;
mod io_queue_commands;
mod keep_alive;
mod log;
mod namespace_management;
mod power;
mod range_operation;
mod reservation;
mod self_test;
mod subsystem;
#[cfg(test)]
mod tests;
pub mod transport_interface;

pub use config::{
    ControllerConfig, ControllerInstance, NamespaceConfig, NamespacePool,
    ReservationPersistenceMode, ReservationStore, SubsystemConfig, TransportModel,
};
pub use firmware::build_firmware_image as firmware_image;
pub use fuzz::fuzz_admin_commands;
pub use health::SensorReadings;
pub use reservation::HostId as HostIdentity;
pub use reservation::preempt_abort::PreemptedWriterGuard;
pub use subsystem::{
    AnaState, HostIdentifierInUse, NamespaceRights, NamespaceSelection, PersistRequest, Subsystem,
    WakeFn,
};

/// Admin controller: one host's view of an NVM subsystem.
pub struct Controller {
    config: ControllerConfig,
    subsystem: Subsystem,
    published: Arc<VersionedValue<NamespaceSnapshot>>,
    host: HostId,
    /// Host NQN, if the transport supplies one.
    nqn: Option<HostNqn>,
    /// Network origin of the host, set if hosts from there may use any host NQN.
    origin: Option<OriginRegistrantLimit>,
    values: FeatureValues,
    granted: GrantedQueues,
    events: AsyncEventQueue,
    keep_alive: KeepAlive,
    power: PowerManagement,
    timestamp: Timestamp,
    /// The host supports retry delays (feature 16h, ACRE).
    has_advanced_retry: bool,
    health: Health,
    errors: ErrorLog,
    telemetry: Telemetry,
    self_tests: SelfTests,
    download: FirmwareDownload,
    format: Option<FormatInProgress>,
    /// Namespaces that have changed since the host last read the Changed Namespace List.
    changed: BTreeSet<u32>,
    /// Reservation notifications not yet read by the host, oldest first.
    notices: VecDeque<(u32, ReservationEvent)>,
    /// Total number of reservation notifications.
    notices_total: u64,
    aborts: u16,
    updates_seen: u64,
    is_in_use: bool,
    deferred_completions: VecDeque<AdminCompletion>,
    /// Results of reservation commands that were deferred.
    reservation_completions: VecDeque<ReservationCompletion>,
    /// Set Features commands whose values are being made durable.
    pending_saves: Vec<PendingFeatureSave>,
    /// Total number of such commands; numbers them.
    saves_total: u64,
    signals: VecDeque<TransportAction>,
    /// Preemptions by this host that wait for writes of others.
    pending_preemptions: Vec<PendingPreemption>,
    /// Preemptions of this host, which wait for its writes.
    preempted_writers: Vec<PreemptedWriterTracker>,
}

impl Controller {
    fn open(subsystem: Subsystem, now: Instant, config: ControllerConfig) -> Result<Self, Error> {
        let published = subsystem.add_controller(config.cntlid)?;
        Ok(Self {
            host: HostId::Anonymous(config.cntlid),
            nqn: None,
            origin: None,
            values: FeatureValues::default(),
            granted: GrantedQueues::new(config.io_queues_max),
            events: AsyncEventQueue::new(config.event_requests_max),
            keep_alive: KeepAlive::new(&config),
            power: PowerManagement::new(now),
            timestamp: Timestamp::default(),
            has_advanced_retry: false,
            health: Health::new(now, config.temperature_kelvin),
            errors: ErrorLog::new(config.error_entries.into()),
            telemetry: Telemetry::default(),
            self_tests: SelfTests::default(),
            download: FirmwareDownload::new(config.firmware_bytes_max),
            format: None,
            changed: BTreeSet::new(),
            notices: VecDeque::new(),
            notices_total: 0,
            aborts: 0,
            updates_seen: 0,
            is_in_use: false,
            deferred_completions: VecDeque::new(),
            reservation_completions: VecDeque::new(),
            pending_saves: Vec::new(),
            saves_total: 0,
            signals: VecDeque::new(),
            pending_preemptions: Vec::new(),
            preempted_writers: Vec::new(),
            config,
            subsystem,
            published,
        })
    }

    /// Performs a bounded amount of background work: timers, formats, self-tests, and updates from other
    /// controllers.
    #[inline]
    pub fn poll(&mut self, now: Instant) {
        if self.keep_alive.take_expiration(now) {
            self.signals.push_back(TransportAction::KeepAliveExpired);
        }
        self.power.poll(now);
        self.poll_format(now);
        self.poll_self_test(now);
        self.poll_posted_updates(now);
        self.poll_preemptions(now);
    }

    /// Latest time of the next [`poll`](Self::poll), even if nothing else happens.
    #[inline]
    pub fn wake_at(&self, now: Instant) -> Instant {
        let format = self.format.as_ref().map_or(Instant::NEVER, |format| format.wake_at(now));
        let timers = self.keep_alive.wake_at().min(self.power.wake_at());
        let preemptions = self.preemptions_wake_at(now);
        timers.min(format).min(self.self_tests.wake_at(now)).min(preemptions)
    }

    /// Next completion of a command for which [`AdminOutcome::Deferred`] was returned.
    #[inline]
    pub fn next_deferred_completion(&mut self) -> Option<AdminCompletion> {
        if self.deferred_completions.is_empty() {
            None
        } else {
            self.deferred_completions.pop_front()
        }
    }

    /// Dword 0 for the oldest outstanding Asynchronous Event Request, if an event is pending.
    #[inline]
    pub fn next_async_event_dword0(&mut self) -> Option<u32> {
        self.events.next_reported_event()
    }

    /// Next action for the transport that is not a completion.
    #[inline]
    pub fn next_transport_action(&mut self) -> Option<TransportAction> {
        if self.signals.is_empty() { None } else { self.signals.pop_front() }
    }

    /// Records a completion with an error status.
    pub fn record_error_completion(&mut self, _now: Instant, report: &ErrorReport) {
        // Status code type 2h: media and data integrity errors (Base 2.1 §4.2.3.3).
        if report.status.sct() == 2 {
            self.health.media_errors += 1;
        }
        self.errors.push(report);
    }

    /// Records an invalid doorbell write and raises the event for it.
    pub fn record_invalid_doorbell(&mut self, now: Instant, doorbell: InvalidDoorbell) {
        let (event, status) = match doorbell {
            InvalidDoorbell::Register => {
                (AsyncEvent::INVALID_DOORBELL, Status::INVALID_QUEUE_IDENTIFIER)
            }
            InvalidDoorbell::Value => (AsyncEvent::INVALID_DOORBELL_VALUE, Status::INVALID_FIELD),
        };
        let no_command =
            ErrorReport { sqid: u16::MAX, cid: u16::MAX, opcode: 0, status, lba: 0, nsid: 0 };
        self.record_error_completion(now, &no_command);
        self.events.raise_event(event);
    }

    /// Adds I/O totals of the I/O queues to the SMART counters.
    pub fn add_io_totals(&mut self, more: &IoTotals) {
        self.health.traffic.add(more);
    }

    /// Sets the SMART counters to the totals of all I/O queues since the controller was created.
    pub fn set_io_totals(&mut self, totals: &IoTotals) {
        self.health.traffic = *totals;
    }

    /// Records that I/O commands have arrived since the last call.
    pub fn note_io_activity(&mut self, now: Instant) {
        self.keep_alive.note_activity();
        self.power.note_activity(now);
    }

    /// Records that an I/O queue was created: the number of queues is fixed until the next reset.
    pub fn note_queue_created(&mut self) {
        self.granted.is_fixed = true;
    }

    /// Records that the transport has completed an Abort command.
    pub fn note_abort_completed(&mut self) {
        self.aborts = self.aborts.saturating_sub(1);
    }

    /// Records that the transport itself has completed an outstanding Asynchronous Event Request.
    pub fn note_event_request_aborted(&mut self) {
        self.events.note_request_aborted();
    }

    /// Sets the sensor readings and raises the enabled health events.
    pub fn set_sensor_readings(&mut self, now: Instant, sensors: SensorReadings) {
        self.health.set_sensor_readings(now, sensors);
        self.raise_health_events();
    }

    /// Binds the controller to a host by its NQN, which may be empty, and its identifier, unless that is
    /// zero (fabrics Connect, Base 2.1 §6.3).
    ///
    /// # Errors
    ///
    /// The identifier belongs to a host with another NQN.
    pub fn connect_host(&mut self, nqn: &str, identifier: u128) -> Result<(), HostIdentifierInUse> {
        let host = match identifier {
            0 => HostId::Anonymous(self.config.cntlid),
            _ => HostId::Extended(identifier),
        };
        let nqn = HostNqn::from(nqn);
        self.subsystem.bind_host(self.config.cntlid, host, &nqn)?;
        self.host = host;
        self.nqn = Some(nqn);
        Ok(())
    }

    /// Limits the registrants of hosts that may use any NQN: all hosts from `origin`, an address,
    /// together have at most `registrants_max` registrations in a namespace.
    pub fn limit_origin_registrants(&mut self, origin: &str, registrants_max: usize) {
        self.origin =
            Some(OriginRegistrantLimit { name: origin.into(), count_max: registrants_max });
    }

    /// Sets the host identifier, for a transport that has no host NQN.
    pub fn set_host(&mut self, host: HostId) {
        self.host = host;
        let mut state = self.subsystem.lock_state();
        if let Some(entry) = state.controllers.get_mut(&self.config.cntlid) {
            entry.host = host;
        }
        self.subsystem.publish_and_notify(state);
    }

    /// Whether reservations require a host identifier (CTRATT.RHII). Over fabrics, hosts that leave the
    /// identifier of Connect zero cannot be told apart. On a bus, the host is identified by the
    /// controller it uses.
    fn needs_host_identifier(&self) -> bool {
        self.is_fabrics()
    }

    /// Sets the keep-alive timeout given in the Connect command (fabrics, Base 2.1 §6.3).
    pub fn set_keep_alive(&mut self, now: Instant, timeout_ms: u32) -> Result<(), Status> {
        self.keep_alive.set_timeout(now, timeout_ms)
    }

    /// Keep-alive timeout in milliseconds; zero disables it.
    pub fn keep_alive_ms(&self) -> u32 {
        self.keep_alive.timeout_ms()
    }

    /// Records that the controller is ready: from now on the keep-alive timer runs, if the host has set a
    /// timeout (Base 2.1 §3.9.2).
    pub fn note_enabled(&mut self, now: Instant) {
        self.keep_alive.restart(now);
    }

    /// Fused-command arbiter of the subsystem.
    pub(crate) fn fused_arbiter(&self) -> Arc<FusedArbiter> {
        Arc::clone(self.subsystem.fused_arbiter())
    }

    /// Sets the callback that wakes this controller's thread when another controller has posted updates
    /// for it.
    pub fn set_waker(&self, waker: WakeFn) {
        if let Some(entry) = self.subsystem.lock_state().controllers.get_mut(&self.config.cntlid) {
            entry.waker = Some(waker);
        }
    }

    /// Performs a controller level reset: CC.EN was cleared, or the association ended (Base 2.1 §3.7.2).
    pub fn reset(&mut self, now: Instant) {
        self.values.reset();
        self.granted = GrantedQueues::new(self.config.io_queues_max);
        self.events.reset();
        if self.is_fabrics() {
            // Connect has set the timeout for the lifetime of the association (Base 2.1 §3.9, §6.3).
            self.keep_alive.suspend();
        } else {
            self.keep_alive = KeepAlive::new(&self.config);
        }
        self.power = PowerManagement::new(now);
        // An unsupported power state cannot have been saved, so an error changes nothing.
        let saved =
            self.values.current(FeatureKey { feature: Feature::PowerManagement, selector: 0 });
        let _ = self.power.set_state(now, saved.to_le_bytes()[0] & 0x1f);
        self.has_advanced_retry = false;
        self.download.reset();
        if self.self_tests.is_ended_by_reset() {
            self.self_tests.abort(SelfTestOutcome::AbortedByReset, self.health.power_on_hours(now));
        }
        if let Some(format) = &mut self.format {
            format.drop_requester();
        }
        self.changed.clear();
        self.notices.clear();
        self.aborts = 0;
        self.deferred_completions.clear();
        self.reservation_completions.clear();
        self.pending_saves.clear();
        self.drop_own_preemptions();
        self.remove_anonymous_host();
    }

    /// Records that the host has announced a shutdown (CC.SHN): power loss is not an unsafe shutdown
    /// anymore.
    pub fn note_host_shutdown(&mut self) {
        self.is_in_use = false;
        self.publish_power_loss_unsafe();
    }

    /// Configuration that the controller was opened with.
    pub fn configuration(&self) -> &ControllerConfig {
        &self.config
    }

    /// I/O submission and completion queues granted to the host.
    pub fn granted_queue_counts(&self) -> (u16, u16) {
        (self.granted.submission, self.granted.completion)
    }

    /// Whether the volatile write cache is enabled; if it is disabled, every write is FUA.
    pub fn write_cache_enabled(&self) -> bool {
        self.values.write_cache_enabled()
    }

    /// Interrupt coalescing of the I/O queues.
    pub fn coalescing(&self) -> IoQueueCoalescing {
        self.values.coalescing()
    }

    /// Whether coalescing is disabled for a vector.
    pub fn is_coalescing_disabled(&self, vector: u16) -> bool {
        self.values.is_coalescing_disabled(vector)
    }

    /// Arbitration of the submission queues.
    pub fn arbitration(&self) -> Arbitration {
        self.values.arbitration()
    }

    /// Namespaces visible to this controller's queues; replaced as a whole at every change.
    pub fn namespaces(&self) -> &VersionedValue<NamespaceSnapshot> {
        &self.published
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        if let Some(format) = &mut self.format {
            format.release_remaining_namespaces(&self.subsystem);
        }
        self.subsystem.remove_controller(self.config.cntlid);
    }
}

impl Controller {
    fn is_fabrics(&self) -> bool {
        matches!(self.config.transport, TransportModel::Fabrics { .. })
    }

    fn supports_namespace_management(&self) -> bool {
        self.supports_admin_opcode(tenmil_wire::AdminOpcode::NamespaceManagement)
    }

    /// Whether a namespace of the subsystem may lose a completed write at power loss (VWC): one with a
    /// volatile cache, or one in memory, which is all cache to its host. All namespaces count, because a
    /// host that found no cache sends no Flush to a namespace attached later.
    fn has_volatile_cache(&self) -> bool {
        let state = self.subsystem.lock_state();
        state.records.values().any(|record| record.limits.durability != Durability::Persistent)
    }

    /// Looks up a namespace that must be attached to this controller (Base 2.1 §3.2.1.5).
    fn attached_namespace<'a>(
        &self,
        state: &'a SubsystemState,
        nsid: u32,
    ) -> Result<&'a NamespaceEntry, Status> {
        if nsid == 0 || nsid > self.subsystem.constants().nsid_max {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT);
        }
        state.attached_namespace(self.config.cntlid, nsid).ok_or(Status::INVALID_FIELD)
    }

    /// Namespaces selected by an NSID: one, or every attached namespace for FFFFFFFFh.
    fn selected_nsids(&self, state: &SubsystemState, nsid: u32) -> Result<Vec<u32>, Status> {
        if nsid == u32::MAX {
            return Ok(state
                .attached_namespaces(self.config.cntlid)
                .map(|record| record.nsid)
                .collect());
        }
        self.attached_namespace(state, nsid).map(|record| vec![record.nsid])
    }

    /// Records that a command has arrived: power loss without a prior shutdown is now an unsafe shutdown.
    fn mark_power_loss_unsafe(&mut self) {
        if !self.is_in_use {
            self.is_in_use = true;
            self.publish_power_loss_unsafe();
        }
    }

    fn publish_power_loss_unsafe(&self) {
        if let Some(entry) = self.subsystem.lock_state().controllers.get_mut(&self.config.cntlid) {
            entry.is_in_use = self.is_in_use;
        }
    }

    /// Removes the host identifier: a host without one counts as another host after a reset, and one that
    /// set it by a feature has to set it again (Base 2.1 §5.1.25.1.28).
    fn remove_anonymous_host(&mut self) {
        let anonymous = HostId::Anonymous(self.config.cntlid);
        if !self.is_fabrics() {
            self.host = anonymous;
        }
        let mut state = self.subsystem.lock_state();
        state.firmware.activate();
        state.drop_requesters(self.config.cntlid, |_| true);
        state.remove_anonymous_host(anonymous);
        if let Some(entry) = state.controllers.get_mut(&self.config.cntlid) {
            entry.host = self.host;
        }
        self.subsystem.publish_and_notify(state);
    }

    /// Raises events for new critical warnings that the host has enabled (Base 2.1 §5.1.2.1, Figure 152).
    fn raise_health_events(&mut self) {
        let new = self.health.take_new_warnings(self.values.temperature_thresholds());
        for (warning, event) in [
            (WARNING_SPARE, AsyncEvent::SPARE),
            (WARNING_TEMPERATURE, AsyncEvent::TEMPERATURE),
            (WARNING_RELIABILITY, AsyncEvent::RELIABILITY),
            (WARNING_READ_ONLY, AsyncEvent::RELIABILITY),
        ] {
            if new & warning != 0 && self.values.is_event_enabled(warning.into()) {
                self.events.raise_event(event);
            }
        }
    }

    fn execute_device_self_test(
        &mut self,
        now: Instant,
        command: &DeviceSelfTest,
    ) -> CommandResult {
        match command.stc {
            SelfTestCode::Abort => {
                self.self_tests
                    .abort(SelfTestOutcome::AbortedByCommand, self.health.power_on_hours(now));
            }
            SelfTestCode::Short | SelfTestCode::Extended => {
                if self.self_tests.is_running() {
                    return Err(Status::SELF_TEST_IN_PROGRESS);
                }
                let subsystem = self.subsystem.clone();
                let state = subsystem.lock_state();
                let nsids = match command.nsid {
                    // The lock is held from the check for a format to the start of the test: no format
                    // begins between.
                    0 => Vec::new(),
                    nsid => self.selected_nsids(&state, nsid)?,
                };
                let is_formatting = |nsid| {
                    state
                        .records
                        .get(nsid)
                        .is_some_and(|record: &NamespaceEntry| record.is_formatting)
                };
                if nsids.iter().any(is_formatting) {
                    return Err(Status::FORMAT_IN_PROGRESS);
                }
                self.self_tests.start_test(command.stc, command.nsid, &nsids, &state);
            }
            _ => return Err(Status::INVALID_FIELD),
        }
        Ok(AdminOutcome::Done(AdminResult::OK))
    }

    #[inline]
    fn poll_self_test(&mut self, now: Instant) {
        if self.self_tests.is_running() {
            self.advance_self_test(now);
        }
    }

    fn advance_self_test(&mut self, now: Instant) {
        let result = self.self_tests.poll(
            now,
            self.health.power_on_hours(now),
            (&self.subsystem, self.config.cntlid),
        );
        if result.is_some_and(|result| result.outcome != SelfTestOutcome::Passed) {
            self.events.raise_event(AsyncEvent::DIAGNOSTIC_FAILURE);
        }
    }

    /// Reads the updates posted by other controllers and turns them into events and signals.
    #[inline]
    fn poll_posted_updates(&mut self, now: Instant) {
        let posted = self.subsystem.posted_update_count();
        if posted != self.updates_seen {
            self.apply_posted_updates(now, posted);
        }
    }

    fn apply_posted_updates(&mut self, now: Instant, posted: u64) {
        self.updates_seen = posted;
        // The lock is released before the updates are processed: that calls back into the subsystem.
        let updates = {
            let mut state = self.subsystem.lock_state();
            let entry = state.controllers.get_mut(&self.config.cntlid);
            let updates = entry
                .map_or_else(PendingUpdates::default, |entry| core::mem::take(&mut entry.updates));
            for &nsid in updates.changed.iter().filter(|nsid| !state.records.contains_key(nsid)) {
                self.values.forget_namespace(nsid);
            }
            updates
        };
        self.raise_change_events(&updates);
        for (nsid, notice) in updates.notices {
            self.queue_reservation_notification(nsid, notice);
        }
        for (nsid, preempted) in updates.aborts {
            self.preempted_writers.push(preempted.tracker());
            self.signals.push_back(TransportAction::AbortNamespace { nsid, preempted });
        }
        self.signals
            .extend(updates.persist_error.map(|why| TransportAction::PersistFailed { why }));
        for (reply, end) in updates.results {
            match reply {
                ReservationReplyTarget::Queue(from) => {
                    self.finish_reservation_command(now, from, end)
                }
                ReservationReplyTarget::Feature(number) => {
                    self.handle_persist_result(number, end.map(|_| ()))
                }
            }
        }
    }

    fn raise_change_events(&mut self, updates: &PendingUpdates) {
        if !updates.changed.is_empty() {
            self.changed.extend(&updates.changed);
            if self.values.is_event_enabled(event_bit::NAMESPACE) {
                self.events.raise_event(AsyncEvent::NAMESPACE_CHANGED);
            }
        }
        if updates.is_ana_changed && self.values.is_event_enabled(event_bit::ANA) {
            self.events.raise_event(AsyncEvent::ANA_CHANGED);
        }
        if updates.is_activating_firmware && self.values.is_event_enabled(event_bit::FIRMWARE) {
            self.events.raise_event(AsyncEvent::FIRMWARE_ACTIVATION);
        }
    }

    /// Records a reservation notification for the log page, unless it is masked (Base 2.1 §5.1.25.1.29).
    fn queue_reservation_notification(&mut self, nsid: u32, notice: ReservationEvent) {
        let mask = self
            .values
            .current(FeatureKey { feature: Feature::ReservationNotificationMask, selector: nsid });
        if mask & 1 << notice.code() != 0 {
            return;
        }
        if self.notices.len() >= NOTICES_MAX {
            self.notices.pop_front();
        }
        self.notices.push_back((nsid, notice));
        self.notices_total += 1;
        self.events.raise_event(AsyncEvent::RESERVATION);
    }
}
