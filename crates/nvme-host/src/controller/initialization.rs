//! Controller start-up after CSTS.RDY: Identify and features, one command at a time.
//!
//! ```text
//!   Identify Controller --> its NVM page --> number of queues --> host behavior
//!      --> shadow doorbells --> event configuration --> keep-alive timeout --> namespaces --> Ready
//!                                  '-- rejected: --> notices only --^
//! ```
//!
//! A step that the controller does not support is skipped. After a reset, all steps are repeated, since
//! no setting survives.

use std::collections::BTreeSet;

use tenmil_base::{Dma, Instant, IoCompletion, Mmio};
use tenmil_wire::admin::{DoorbellBufferConfig, GetLogPage, SetFeatures};
use tenmil_wire::feature::Feature;
use tenmil_wire::feature::queue::{HostBehaviorSupport, NumberOfQueues};
use tenmil_wire::identify::controller::ControllerType;
use tenmil_wire::identify::{BYTES, Cns, CommandSet, IdentifyController, IdentifyControllerNvm};
use tenmil_wire::register::{CommandSetSelected, Version};
use tenmil_wire::{Command, Status, TypedCommand, admin};

use super::admin_queue_pair::AdminCommandPurpose;
use super::async_events::PendingLogPage;
use super::identity::Identity;
use super::namespace_scan::{NamespaceScan, ScanCapabilities, ScanError};
use super::{Controller, PAGE, Phase, QueueTransports};
use crate::error::{ControllerError, InvalidValue, ResetCause};
use crate::event::{Event, NamespaceError};

/// The driver's own outstanding query.
#[derive(Debug)]
pub(super) enum AdminQuery {
    /// A step of start-up.
    Step(StartupStep),
    /// A step of a namespace scan, at the end of start-up or later.
    Namespaces(Box<NamespaceScan>),
    /// Read of an event's log page.
    Log(PendingLogPage),
}

/// Steps of start-up, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StartupStep {
    Controller,
    ControllerNvm,
    QueueCount,
    HostBehavior,
    ShadowDoorbells,
    Events,
    /// Fallback to the notices that the controller supports, after it has rejected more.
    Notices,
    KeepAlive,
}

const STEPS: [StartupStep; 8] = [
    StartupStep::Controller,
    StartupStep::ControllerNvm,
    StartupStep::QueueCount,
    StartupStep::HostBehavior,
    StartupStep::ShadowDoorbells,
    StartupStep::Events,
    StartupStep::Notices,
    StartupStep::KeepAlive,
];

/// First version with command set specific Identify pages (Base 2.0).
const COMMAND_SET_PAGES_SINCE: Version = Version(0x0002_0000);

impl<M: Mmio, D: Dma, Q: QueueTransports<M, D>> Controller<M, D, Q> {
    /// Starts the first step.
    pub(super) fn begin_startup(&mut self, now: Instant) {
        self.admin.link.run(None);
        self.phase = Phase::Starting;
        self.event_requests = 0;
        self.events_refused = None;
        self.wanted.clear();
        self.keep_alive_at = Instant::NEVER;
        self.send_query(now, AdminQuery::Step(StartupStep::Controller));
        self.admin.pair.flush();
    }

    /// Sends a query with a zeroed data page: bytes that the controller does not write read as zeroes.
    pub(super) fn send_query(&mut self, now: Instant, ask: AdminQuery) {
        self.dma.fill(self.memory.page, 0).expect("the page was allocated for this");
        let (command, len_bytes) = match &ask {
            AdminQuery::Step(step) => self.step_command(*step),
            AdminQuery::Namespaces(scan) => match scan.next_identify() {
                Some(question) => (question.to_command(), PAGE),
                None => return,
            },
            AdminQuery::Log(log) => {
                let get = GetLogPage { nsid: u32::MAX, ..GetLogPage::new(log.id, log.len_bytes()) };
                (get.to_command(), log.len_bytes())
            }
        };
        self.asked = Some(ask);
        // A length of zero is a command without data.
        let data = self.memory.page.slice(0, len_bytes).filter(|data| data.len_bytes > 0);
        self.admin.submit_internal_with_data(now, AdminCommandPurpose::DriverQuery, command, data);
    }

    /// The command of a step, and the length of its data, which are at the start of the data page.
    fn step_command(&self, step: StartupStep) -> (Command, u32) {
        let identify = |cns: Cns| {
            let csi = CommandSet::Nvm.code();
            let identify = admin::Identify { cns: cns.code(), csi, ..admin::Identify::default() };
            (identify.to_command(), PAGE)
        };
        let set_with = |feature: Feature, cdw11, len_bytes| {
            let set = SetFeatures { fid: feature.code(), cdw11, ..SetFeatures::default() };
            (set.to_command(), len_bytes)
        };
        let set = |feature, cdw11| set_with(feature, cdw11, 0);
        match step {
            StartupStep::Controller => identify(Cns::Controller),
            StartupStep::ControllerNvm => identify(Cns::CommandSetController),
            StartupStep::QueueCount => {
                let wanted = NumberOfQueues::from_queue_pair_count(self.options.queue_pairs.into());
                set(Feature::NumberOfQueues, wanted.0)
            }
            StartupStep::HostBehavior => {
                let behavior = HostBehaviorSupport::zeroed().with(|behavior| behavior.lbafee(1));
                if let Some(place) = self.memory.page.slice(0, BEHAVIOR_BYTES) {
                    let stored = self.dma.store(place, behavior.as_bytes());
                    stored.expect("the page was allocated for this");
                }
                set_with(Feature::HostBehaviorSupport, 0, BEHAVIOR_BYTES)
            }
            StartupStep::ShadowDoorbells => {
                let [shadows, indexes] = self.memory.shadows.unwrap_or_default();
                for buffer in [shadows, indexes] {
                    let _ = self.dma.fill(buffer, 0);
                }
                let [shadow_doorbells, event_indexes] =
                    [shadows, indexes].map(|buffer| self.dma.iova(buffer).unwrap_or(0));
                (DoorbellBufferConfig { shadow_doorbells, event_indexes }.to_command(), 0)
            }
            StartupStep::Events => {
                set(Feature::AsynchronousEventConfiguration, self.event_configuration().0)
            }
            StartupStep::Notices => {
                set(Feature::AsynchronousEventConfiguration, self.supported_notices().0)
            }
            StartupStep::KeepAlive => {
                let time = self.keep_alive_timeout().ns / 1_000_000;
                set(Feature::KeepAliveTimer, u32::try_from(time).unwrap_or(u32::MAX))
            }
        }
    }

    /// Whether the step applies to this controller.
    fn is_step_applicable(&self, step: StartupStep) -> bool {
        let Some(identity) = &self.identity else { return true };
        let has_queues = self.has_io_queues();
        match step {
            StartupStep::Controller => true,
            StartupStep::ControllerNvm => has_queues && self.has_command_set_pages(),
            StartupStep::QueueCount => has_queues,
            StartupStep::HostBehavior => identity.page.elbas(),
            StartupStep::ShadowDoorbells => {
                self.memory.shadows.is_some()
                    && identity.page.doorbell_buffer()
                    && !self.options.quirks.broken_shadow_doorbells
            }
            StartupStep::Events => true,
            StartupStep::Notices => self.events_refused.is_some(),
            StartupStep::KeepAlive => self.keep_alive_timeout().ns > 0,
        }
    }

    /// Handles the completion of the outstanding query.
    pub(super) fn handle_query_response(&mut self, now: Instant, answer: IoCompletion) {
        let Some(ask) = self.asked.take() else { return };
        let status = Status(answer.status.0);
        let mut page = [0; BYTES];
        self.dma.load(self.memory.page, &mut page).expect("the page was allocated for this");
        match ask {
            AdminQuery::Step(step) => {
                match self.handle_step_result(step, status, answer.result, &page) {
                    Ok(()) => self.send_next(now, step),
                    Err(error) => self.fail_start_up(now, error),
                }
            }
            AdminQuery::Namespaces(mut scan) => match scan.handle_result(status, &page) {
                Ok(()) => self.continue_namespace_scan(now, scan),
                Err(error) => self.abandon_namespace_scan(now, error),
            },
            AdminQuery::Log(log) => self.handle_event_log_page(now, log, status, &page),
        }
    }

    fn handle_step_result(
        &mut self,
        step: StartupStep,
        status: Status,
        result: u32,
        page: &[u8; BYTES],
    ) -> Result<(), ControllerError> {
        let refused = |command| Err(ControllerError::CommandFailed { command, status });
        match (step, status.is_success()) {
            (StartupStep::Controller, true) => self.store_identity(page)?,
            (StartupStep::Controller, false) => return refused("identify controller"),
            (StartupStep::ControllerNvm, true) => {
                if let Some(identity) = &mut self.identity {
                    identity.add_nvm_limits(&IdentifyControllerNvm::from_bytes(page));
                }
            }
            (StartupStep::QueueCount, true) => {
                self.granted = granted_queue_pairs(result, self.options.queue_pairs)?
            }
            (StartupStep::QueueCount, false) => return refused("set number of queues"),
            (StartupStep::ShadowDoorbells, works) => {
                // Queue pairs created with shadow doorbells would continue to write them.
                if !works && self.uses_shadow_doorbells {
                    return refused("doorbell buffer config");
                }
                self.uses_shadow_doorbells = works;
            }
            (StartupStep::Events, true) => self.event_requests = self.wanted_event_request_count(),
            (StartupStep::Events, false) => self.events_refused = Some(status),
            (StartupStep::Notices, is_set) => self.fall_back_to_notices(is_set),
            (StartupStep::KeepAlive, _)
            | (StartupStep::HostBehavior, _)
            | (StartupStep::ControllerNvm, false) => {}
        }
        Ok(())
    }

    fn store_identity(&mut self, page: &[u8; BYTES]) -> Result<(), ControllerError> {
        let identity = Identity::from_identify(
            IdentifyController::from_bytes(page),
            self.options.is_discovery,
        )?;
        if let Some(before) = &self.identity
            && !before.is_same_controller(&identity)
        {
            let field = "identify controller: SN, MN";
            return Err(InvalidValue {
                field,
                found: 0,
                expected: "what they were before the reset",
            }
            .into());
        }
        self.identity = Some(identity);
        Ok(())
    }

    fn send_next(&mut self, now: Instant, step: StartupStep) {
        let rest = STEPS.iter().skip_while(|other| **other != step).skip(1);
        let next = rest.copied().find(|step| self.is_step_applicable(*step));
        let was_set = self.options.keep_alive_is_set && self.keep_alive_at == Instant::NEVER;
        if step == StartupStep::KeepAlive || was_set && step == StartupStep::Controller {
            self.begin_keep_alive(now);
        }
        match next {
            Some(next) => self.send_query(now, AdminQuery::Step(next)),
            None if !self.has_io_queues() => self.become_ready(),
            None => self.start_namespace_scan(now, BTreeSet::new()),
        }
    }

    /// Starts a namespace scan; the namespaces in `kept` are known to be unchanged.
    pub(super) fn start_namespace_scan(&mut self, now: Instant, kept: BTreeSet<u32>) {
        let Some(identity) = &self.identity else { return };
        let manner = ScanCapabilities {
            version: self.version(),
            highest: identity.page.nn(),
            namespaces_max: self.options.namespaces_max,
            has_nvm_page: self.has_command_set_pages(),
        };
        self.continue_namespace_scan(now, Box::new(NamespaceScan::new(manner, kept)));
    }

    fn continue_namespace_scan(&mut self, now: Instant, scan: Box<NamespaceScan>) {
        if scan.next_identify().is_some() {
            return self.send_query(now, AdminQuery::Namespaces(scan));
        }
        let events = scan.finish(&mut self.namespaces);
        self.events.extend(events);
        if matches!(self.phase, Phase::Starting) {
            // Checked before any queue pair runs again.
            match self.check_expected_namespace() {
                Ok(()) => self.become_ready(),
                Err(lie) => self.fail_start_up(now, lie.into()),
            }
        }
    }

    /// Checks that the namespace in use is the one from before the reset. A missing namespace is not in
    /// use.
    fn check_expected_namespace(&self) -> Result<(), InvalidValue> {
        let Some((id, names)) = self.expected else { return Ok(()) };
        match self.namespaces.get(&id) {
            Some(found) if found.names != names => Err(InvalidValue {
                field: "identify namespace: UUID, NGUID, EUI64 of namespace",
                found: id.into(),
                expected: "those that it had before the reset",
            }),
            _ => Ok(()),
        }
    }

    fn abandon_namespace_scan(&mut self, now: Instant, error: ScanError) {
        if matches!(self.phase, Phase::Starting) {
            let command = "identify active namespaces";
            let error = match error {
                ScanError::Lie(lie) => lie.into(),
                ScanError::Refused(status) => ControllerError::CommandFailed { command, status },
            };
            return self.fail_start_up(now, error);
        }
        let why = match error {
            ScanError::Lie(lie) => NamespaceError::InvalidData(lie),
            ScanError::Refused(status) => NamespaceError::IdentifyFailed(status),
        };
        self.push_event(Event::NamespaceListUnusable { why });
    }

    fn become_ready(&mut self) {
        self.phase = Phase::Ready;
        let was_ready = core::mem::replace(&mut self.has_been_ready, true);
        self.push_event(if was_ready { Event::Recovered } else { Event::Ready });
    }

    /// Handles a failed start-up: a controller that was never ready fails permanently; otherwise it is
    /// reset again, up to the reset limit.
    fn fail_start_up(&mut self, now: Instant, error: ControllerError) {
        match error {
            ControllerError::CommandFailed { command, status } if self.has_been_ready => {
                self.reset_with_cause(now, ResetCause::CommandFailed { command, status });
            }
            ControllerError::InvalidData(lie) if self.has_been_ready => {
                self.reset_with_cause(now, ResetCause::InvalidData(lie));
            }
            error => self.fail_permanently(now, error),
        }
    }

    fn version(&self) -> Version {
        self.capabilities.map_or(Version::zeroed(), |capabilities| capabilities.version)
    }

    fn command_sets(&self) -> CommandSetSelected {
        let selected = self.capabilities.map(|capabilities| capabilities.command_sets);
        selected.unwrap_or(CommandSetSelected::AdminOnly)
    }

    /// Whether the controller has I/O queues. A discovery controller has none, whatever CAP.CSS reports
    /// (Base 2.1 §3.1.3.3), and whether or not it identifies itself as one.
    fn has_io_queues(&self) -> bool {
        let kind = self.identity.as_ref().map(|identity| identity.page.cntrltype());
        let is_discovery = self.options.is_discovery || kind == Some(ControllerType::Discovery);
        self.command_sets() != CommandSetSelected::AdminOnly && !is_discovery
    }

    fn has_command_set_pages(&self) -> bool {
        self.command_sets() == CommandSetSelected::All || self.version() >= COMMAND_SET_PAGES_SINCE
    }
}

/// Decodes the granted I/O queue pairs (Base 2.1 §5.1.25.2.1): both counts are 0's based.
fn granted_queue_pairs(result: u32, wanted: u16) -> Result<u16, InvalidValue> {
    let count = NumberOfQueues(result).queue_pair_count();
    match u16::try_from(count) {
        Ok(granted) => Ok(granted.min(wanted)),
        Err(_) => {
            let (field, expected) = ("number of queues", "at most 65534, zero-based");
            Err(InvalidValue { field, found: result.into(), expected })
        }
    }
}

/// Length of the Host Behavior Support data (Base 2.1 §5.1.25.1.14).
const BEHAVIOR_BYTES: u32 = 512;

const _: () = assert!(BYTES == PAGE as usize, "an answer to Identify fills the page for it");
