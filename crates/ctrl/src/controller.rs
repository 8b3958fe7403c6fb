//! The admin half of a controller: one thread, no transport, no I/O queues, time as an argument.
//!
//! What passes between it and the transport in front of it is drawn in [`contract`].
//!
//! ```text
//!   commands ──▶ queues · identify · log · features · format · management · self_test · firmware
//!                                     │
//!                      events ◀───────┼───────▶ subsystem ──▶ pictures for the queues
//!                  health, power,     │         (what controllers share)
//!                  keep_alive         └───────▶ reservation
//! ```

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use base::{Durability, Instant};
use wire::Status;
use wire::admin::{DeviceSelfTest, SelfTestCode};
use wire::feature::Feature;
use wire::log::event::ReservationEvent;
use wire::log::self_test::SelfTestOutcome;

use crate::namespace::{Namespaces, Published};
use crate::queue::Floor;
use commands::Step;
use contract::{
    AdminDone, AdminEnd, AdminStep, Arbitration, Coalescing, Decided, ErrorReport, InvalidDoorbell,
    Signal, Traffic,
};
use events::{Event, Events};
use features::commands::Timestamp;
use features::persistence::Persisting;
use features::{Key, Values, event_bit};
use firmware::Download;
use format::Format;
use health::{Health, WARNING_READ_ONLY, WARNING_RELIABILITY, WARNING_SPARE, WARNING_TEMPERATURE};
use keep_alive::KeepAlive;
use log::error::Errors;
use log::telemetry::Telemetry;
use power::Power;
use queues::Granted;
use reservation::line::Reply;
use reservation::preempted::Preempting;
pub(crate) use reservation::preempted::Writers;
use reservation::{Host, HostNqn, Site};
use self_test::SelfTests;
use subsystem::{Mail, NOTICES_MAX, Record, State};

mod commands;
mod config;
pub mod contract;
mod events;
mod features;
mod firmware;
mod format;
mod fuzz;
mod health;
mod identify;
mod keep_alive;
mod log;
mod management;
mod power;
mod queues;
mod reservation;
mod self_test;
mod subsystem;
mod sweep;
#[cfg(test)]
mod tests;

pub use config::{
    ControllerConfig, Instance, Keeper, MediumPool, NamespaceConfig, Persistence, SubsystemConfig,
    Transport,
};
pub use firmware::image as firmware_image;
pub use fuzz::fuzz;
pub use health::Vitals;
pub use reservation::Host as HostIdentity;
pub use reservation::preempted::Preempted;
pub use subsystem::{AnaState, Bell, HostInUse, Stored, Subsystem};

/// One controller: a host's view of a subsystem.
pub struct Controller {
    config: ControllerConfig,
    subsystem: Subsystem,
    published: Arc<Published<Namespaces>>,
    host: Host,
    /// The host's NQN, if the transport brings one.
    nqn: Option<HostNqn>,
    /// From where it comes, if hosts from there may have any name.
    origin: Option<Site>,
    values: Values,
    granted: Granted,
    events: Events,
    keep_alive: KeepAlive,
    power: Power,
    timestamp: Timestamp,
    /// The host understands retry delays (feature 16h, ACRE).
    has_advanced_retry: bool,
    health: Health,
    errors: Errors,
    telemetry: Telemetry,
    self_tests: SelfTests,
    download: Download,
    format: Option<Format>,
    /// Namespaces of which something has changed since the host last read the log page.
    changed: BTreeSet<u32>,
    /// Reservation notifications that the host has not read, oldest first.
    notices: VecDeque<(u32, ReservationEvent)>,
    /// How many there have been.
    notices_ever: u64,
    aborts: u16,
    mail_seen: u64,
    is_in_use: bool,
    done: VecDeque<AdminDone>,
    /// Reservation commands that had to wait and have ended.
    decided: VecDeque<Decided>,
    /// Features that are being made durable.
    persisting: Vec<Persisting>,
    /// How many there have been.
    persisted_ever: u64,
    signals: VecDeque<Signal>,
    /// Preemptions by this host that wait for writes of others.
    preempting: Vec<Preempting>,
    /// Preemptions of this host, which wait for its writes.
    preempted: Vec<Writers>,
}

impl Controller {
    fn open(subsystem: Subsystem, now: Instant, config: ControllerConfig) -> Result<Self, String> {
        let published = subsystem.enter(config.cntlid)?;
        Ok(Self {
            host: Host::Anonymous(config.cntlid),
            nqn: None,
            origin: None,
            values: Values::default(),
            granted: Granted::new(config.io_queues_max),
            events: Events::new(config.event_requests_max),
            keep_alive: KeepAlive::new(&config),
            power: Power::new(now),
            timestamp: Timestamp::default(),
            has_advanced_retry: false,
            health: Health::new(now, config.temperature_kelvin),
            errors: Errors::new(config.error_entries.into()),
            telemetry: Telemetry::default(),
            self_tests: SelfTests::default(),
            download: Download::new(config.firmware_bytes_max),
            format: None,
            changed: BTreeSet::new(),
            notices: VecDeque::new(),
            notices_ever: 0,
            aborts: 0,
            mail_seen: 0,
            is_in_use: false,
            done: VecDeque::new(),
            decided: VecDeque::new(),
            persisting: Vec::new(),
            persisted_ever: 0,
            signals: VecDeque::new(),
            preempting: Vec::new(),
            preempted: Vec::new(),
            config,
            subsystem,
            published,
        })
    }

    /// Does a bounded amount of work that nobody has asked for just now: timers, formats,
    /// self-tests, what other controllers have done.
    pub fn turn(&mut self, now: Instant) {
        if self.keep_alive.expired(now) {
            self.signals.push_back(Signal::KeepAliveExpired);
        }
        self.power.turn(now);
        self.turn_format(now);
        self.turn_self_test(now);
        self.read_mail(now);
        self.turn_preemptions(now);
    }

    /// When to be turned even if nothing else happens.
    pub fn wake_at(&self, now: Instant) -> Instant {
        let format = self.format.as_ref().map_or(Instant::NEVER, |format| format.wake_at(now));
        let timers = self.keep_alive.wake_at().min(self.power.wake_at());
        let preemptions = self.preemptions_wake_at(now);
        timers.min(format).min(self.self_tests.wake_at(now)).min(preemptions)
    }

    /// The end of a command that had answered [`AdminStep::Later`].
    pub fn next_done(&mut self) -> Option<AdminDone> {
        self.done.pop_front()
    }

    /// Dword 0 for the oldest parked Asynchronous Event Request, if there is something to report.
    pub fn next_event(&mut self) -> Option<u32> {
        self.events.next()
    }

    /// Something to act upon that is no answer to a command.
    pub fn next_signal(&mut self) -> Option<Signal> {
        self.signals.pop_front()
    }

    /// Takes note of a completion with an error status.
    pub fn report_error(&mut self, _now: Instant, report: &ErrorReport) {
        // Status code type 2h: media and data integrity errors (Base 2.1 §4.2.3.3).
        if report.status.sct() == 2 {
            self.health.media_errors += 1;
        }
        self.errors.push(report);
    }

    /// Takes note of a doorbell write that cannot be.
    pub fn invalid_doorbell(&mut self, now: Instant, doorbell: InvalidDoorbell) {
        let (event, status) = match doorbell {
            InvalidDoorbell::Register => {
                (Event::INVALID_DOORBELL, Status::INVALID_QUEUE_IDENTIFIER)
            }
            InvalidDoorbell::Value => (Event::INVALID_DOORBELL_VALUE, Status::INVALID_FIELD),
        };
        let no_command =
            ErrorReport { sqid: u16::MAX, cid: u16::MAX, opcode: 0, status, lba: 0, nsid: 0 };
        self.report_error(now, &no_command);
        self.events.happened(event);
    }

    /// Adds what I/O queues have done.
    pub fn add_traffic(&mut self, traffic: &Traffic) {
        self.health.add(traffic);
    }

    /// I/O commands have arrived since this was last called.
    pub fn io_command_seen(&mut self, now: Instant) {
        self.keep_alive.heard();
        self.power.worked(now);
    }

    /// An I/O queue exists: the number of queues is fixed until the next reset.
    pub fn queue_created(&mut self) {
        self.granted.is_fixed = true;
    }

    /// The front end has answered an Abort command.
    pub fn abort_ended(&mut self) {
        self.aborts = self.aborts.saturating_sub(1);
    }

    /// The front end has ended a parked Asynchronous Event Request by itself.
    pub fn event_request_aborted(&mut self) {
        self.events.request_aborted();
    }

    /// Takes what sensors say, and warns the host of it if it wants to be.
    pub fn set_vitals(&mut self, now: Instant, vitals: Vitals) {
        self.health.set(now, vitals);
        self.look_at_health();
    }

    /// The transport knows the host by its NQN, which may be empty, and by an identifier, unless that
    /// is zero (fabrics Connect, Base 2.1 §6.3).
    ///
    /// # Errors
    ///
    /// If the identifier belongs to a host of another NQN.
    pub fn connect_host(&mut self, nqn: &str, identifier: u128) -> Result<(), HostInUse> {
        let host = match identifier {
            0 => Host::Anonymous(self.config.cntlid),
            _ => Host::Extended(identifier),
        };
        let nqn = HostNqn::from(nqn);
        self.subsystem.bind_host(self.config.cntlid, host, &nqn)?;
        self.host = host;
        self.nqn = Some(nqn);
        Ok(())
    }

    /// The host may have any name. Such hosts from `origin`, an address, are at most `registrants_max`
    /// registrants of a namespace together.
    pub fn limit_registrants(&mut self, origin: &str, registrants_max: usize) {
        self.origin = Some(Site { name: origin.into(), most: registrants_max });
    }

    /// The transport, which has no host NQNs, knows the identifier of the host.
    pub fn set_host(&mut self, host: Host) {
        self.host = host;
        let mut state = self.subsystem.lock();
        if let Some(seat) = state.seats.get_mut(&self.config.cntlid) {
            seat.host = host;
        }
        self.subsystem.settle(state);
    }

    /// Whether hosts reserve by their identifier alone (CTRATT.RHII). Where Connect brings it, a host
    /// that leaves it zero cannot be told from others that do; on a bus it is whoever has this
    /// controller.
    fn needs_host_identifier(&self) -> bool {
        self.is_fabrics()
    }

    /// Sets the keep-alive time-out that came with the connection (fabrics Connect, Base 2.1 §6.3).
    pub fn set_keep_alive(&mut self, now: Instant, timeout_ms: u32) -> Result<(), Status> {
        self.keep_alive.set(now, timeout_ms)
    }

    /// How long its host may be silent, in milliseconds; zero is for ever.
    pub fn keep_alive_ms(&self) -> u32 {
        self.keep_alive.timeout_ms()
    }

    /// The controller is ready: from now on its host has to be heard of, if it has a keep-alive
    /// time-out (Base 2.1 §3.9.2).
    pub fn enabled(&mut self, now: Instant) {
        self.keep_alive.restart(now);
    }

    /// Who of the subsystem's queues runs alone.
    pub(crate) fn floor(&self) -> Arc<Floor> {
        Arc::clone(self.subsystem.floor())
    }

    /// Has `bell` called when another controller has left mail for this one, so that a thread that
    /// sleeps can be woken to turn.
    pub fn ring_on_mail(&self, bell: Bell) {
        if let Some(seat) = self.subsystem.lock().seats.get_mut(&self.config.cntlid) {
            seat.bell = Some(bell);
        }
    }

    /// A controller level reset: CC.EN went to 0, or the association ended (Base 2.1 §3.7.2).
    pub fn reset(&mut self, now: Instant) {
        self.values.reset();
        self.granted = Granted::new(self.config.io_queues_max);
        self.events.reset();
        if self.is_fabrics() {
            // Connect has set it, for as long as the association lasts (Base 2.1 §3.9, §6.3).
            self.keep_alive.suspend();
        } else {
            self.keep_alive = KeepAlive::new(&self.config);
        }
        self.power = Power::new(now);
        // A state that is not there cannot have been saved, so this changes nothing if it fails.
        let saved = self.values.current(Key { feature: Feature::PowerManagement, of: 0 });
        let _ = self.power.set(now, saved.to_le_bytes()[0] & 0x1f);
        self.has_advanced_retry = false;
        self.download.reset();
        if self.self_tests.is_ended_by_reset() {
            self.self_tests.abort(SelfTestOutcome::AbortedByReset, self.health.hours(now));
        }
        if let Some(format) = &mut self.format {
            format.orphan();
        }
        self.changed.clear();
        self.notices.clear();
        self.aborts = 0;
        self.done.clear();
        self.decided.clear();
        self.persisting.clear();
        self.reset_preemptions();
        self.forget_host();
    }

    /// The host has said that it will stop (CC.SHN): nothing is lost when the power goes now.
    pub fn shutdown(&mut self) {
        self.is_in_use = false;
        self.tell_seat_in_use();
    }

    /// What it was opened with.
    pub fn configuration(&self) -> &ControllerConfig {
        &self.config
    }

    /// How many I/O submission and completion queues the host may have.
    pub fn queues_granted(&self) -> (u16, u16) {
        (self.granted.submission, self.granted.completion)
    }

    /// Whether the volatile write cache is on; if not, every write is to be forced.
    pub fn write_cache_enabled(&self) -> bool {
        self.values.write_cache_enabled()
    }

    /// When completions of I/O queues are signalled.
    pub fn coalescing(&self) -> Coalescing {
        self.values.coalescing()
    }

    /// Whether a vector is exempt from that.
    pub fn is_coalescing_disabled(&self, vector: u16) -> bool {
        self.values.is_coalescing_disabled(vector)
    }

    /// How submission queues are served.
    pub fn arbitration(&self) -> Arbitration {
        self.values.arbitration()
    }

    /// What this controller's queues may touch; replaced as a whole whenever something changes.
    pub fn namespaces(&self) -> &Published<Namespaces> {
        &self.published
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        if let Some(format) = &mut self.format {
            format.give_up(&self.subsystem);
        }
        self.subsystem.leave(self.config.cntlid);
    }
}

impl Controller {
    fn is_fabrics(&self) -> bool {
        matches!(self.config.transport, Transport::Fabrics { .. })
    }

    fn manages_namespaces(&self) -> bool {
        self.offers(wire::AdminOpcode::NamespaceManagement)
    }

    /// Whether some namespace of the subsystem may lose a completed write with power (VWC): one with a
    /// volatile cache, and one in memory, all of which is such a cache to its host. What is attached
    /// later must not surprise a host that found no cache and sends no flush.
    fn has_volatile_cache(&self) -> bool {
        let state = self.subsystem.lock();
        state.records.values().any(|record| record.limits.durability != Durability::Stable)
    }

    /// The namespace of an identifier that has to be attached to this controller
    /// (Base 2.1 §3.2.1.5).
    fn active<'a>(&self, state: &'a State, nsid: u32) -> Result<&'a Record, Status> {
        if nsid == 0 || nsid > self.subsystem.about().nsid_max {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT);
        }
        state.attached(self.config.cntlid, nsid).ok_or(Status::INVALID_FIELD)
    }

    /// The namespaces an identifier means: one, or with all ones every one that is attached.
    fn targets(&self, state: &State, nsid: u32) -> Result<Vec<u32>, Status> {
        if nsid == u32::MAX {
            return Ok(state.all_attached(self.config.cntlid).map(|record| record.nsid).collect());
        }
        self.active(state, nsid).map(|record| vec![record.nsid])
    }

    /// A command has arrived: if the power goes without a shutdown now, that is noticed.
    fn in_use(&mut self) {
        if !self.is_in_use {
            self.is_in_use = true;
            self.tell_seat_in_use();
        }
    }

    fn tell_seat_in_use(&self) {
        if let Some(seat) = self.subsystem.lock().seats.get_mut(&self.config.cntlid) {
            seat.is_in_use = self.is_in_use;
        }
    }

    /// A host without an identifier is another host after a reset, and one that gave it by a
    /// feature has to give it again (Base 2.1 §5.1.25.1.28).
    fn forget_host(&mut self) {
        let nobody = Host::Anonymous(self.config.cntlid);
        if !self.is_fabrics() {
            self.host = nobody;
        }
        let mut state = self.subsystem.lock();
        state.firmware.activate();
        state.forget_askers(self.config.cntlid, |_| true);
        state.forget_host(nobody);
        if let Some(seat) = state.seats.get_mut(&self.config.cntlid) {
            seat.host = self.host;
        }
        self.subsystem.settle(state);
    }

    /// Tells the host of warnings that are new, as far as it wants to hear (Base 2.1 §5.1.2.1,
    /// Figure 152).
    fn look_at_health(&mut self) {
        let new = self.health.new_warnings(self.values.thresholds());
        for (warning, event) in [
            (WARNING_SPARE, Event::SPARE),
            (WARNING_TEMPERATURE, Event::TEMPERATURE),
            (WARNING_RELIABILITY, Event::RELIABILITY),
            (WARNING_READ_ONLY, Event::RELIABILITY),
        ] {
            if new & warning != 0 && self.values.wants_event(warning.into()) {
                self.events.happened(event);
            }
        }
    }

    fn device_self_test(&mut self, now: Instant, command: &DeviceSelfTest) -> Step {
        match command.stc {
            SelfTestCode::Abort => {
                self.self_tests.abort(SelfTestOutcome::AbortedByCommand, self.health.hours(now));
            }
            SelfTestCode::Short | SelfTestCode::Extended => {
                if self.self_tests.is_running() {
                    return Err(Status::SELF_TEST_IN_PROGRESS);
                }
                let subsystem = self.subsystem.clone();
                let state = subsystem.lock();
                let nsids = match command.nsid {
                    0 => Vec::new(),
                    nsid => self.targets(&state, nsid)?,
                };
                let is_formatting = |nsid| {
                    state.records.get(nsid).is_some_and(|record: &Record| record.is_formatting)
                };
                if nsids.iter().any(is_formatting) {
                    return Err(Status::FORMAT_IN_PROGRESS);
                }
                self.self_tests.start(command.stc, command.nsid, &nsids, &state);
            }
            _ => return Err(Status::INVALID_FIELD),
        }
        Ok(AdminStep::Done(AdminEnd::OK))
    }

    fn turn_self_test(&mut self, now: Instant) {
        if !self.self_tests.is_running() {
            return;
        }
        let ending = self.self_tests.turn(
            now,
            self.health.hours(now),
            (&self.subsystem, self.config.cntlid),
        );
        if ending.is_some_and(|ending| ending.outcome != SelfTestOutcome::Passed) {
            self.events.happened(Event::DIAGNOSTIC_FAILURE);
        }
    }

    /// Takes what others did out of the mailbox and turns it into events and signals.
    fn read_mail(&mut self, now: Instant) {
        let posted = self.subsystem.posted();
        if posted == self.mail_seen {
            return;
        }
        self.mail_seen = posted;
        let mail = {
            let mut state = self.subsystem.lock();
            let seat = state.seats.get_mut(&self.config.cntlid);
            let mail = seat.map_or_else(Mail::default, |seat| core::mem::take(&mut seat.mail));
            for &nsid in mail.changed.iter().filter(|nsid| !state.records.contains_key(nsid)) {
                self.values.forget_namespace(nsid);
            }
            mail
        };
        self.take_changes(&mail);
        for (nsid, notice) in mail.notices {
            self.take_notice(nsid, notice);
        }
        for (nsid, preempted) in mail.aborts {
            self.preempted.push(preempted.writers());
            self.signals.push_back(Signal::AbortNamespace { nsid, preempted });
        }
        self.signals.extend(mail.trouble.map(|why| Signal::NotKept { why }));
        for (reply, end) in mail.ends {
            match reply {
                Reply::Queue(from) => self.end_reservation(now, from, end),
                Reply::Feature(number) => self.persisted(number, end.map(|_| ())),
            }
        }
    }

    fn take_changes(&mut self, mail: &Mail) {
        if !mail.changed.is_empty() {
            self.changed.extend(&mail.changed);
            if self.values.wants_event(event_bit::NAMESPACE) {
                self.events.happened(Event::NAMESPACE_CHANGED);
            }
        }
        if mail.is_ana_changed && self.values.wants_event(event_bit::ANA) {
            self.events.happened(Event::ANA_CHANGED);
        }
        if mail.is_activating_firmware && self.values.wants_event(event_bit::FIRMWARE) {
            self.events.happened(Event::FIRMWARE_ACTIVATION);
        }
    }

    /// A reservation is not what it was: for the log page, unless masked (Base 2.1 §5.1.25.1.29).
    fn take_notice(&mut self, nsid: u32, notice: ReservationEvent) {
        let mask =
            self.values.current(Key { feature: Feature::ReservationNotificationMask, of: nsid });
        if mask & 1 << notice.code() != 0 {
            return;
        }
        if self.notices.len() >= NOTICES_MAX {
            self.notices.pop_front();
        }
        self.notices.push_back((nsid, notice));
        self.notices_ever += 1;
        self.events.happened(Event::RESERVATION);
    }
}
