//! From "ready" as the registers mean it to ready as a host means it: one question at a time.
//!
//! ```text
//!   Identify Controller --> its NVM page --> number of queues --> host behaviour
//!      --> shadow doorbells --> event configuration --> keep-alive time --> namespaces --> Ready
//!                                  '-- refused: --> notices alone --^
//! ```
//!
//! A question that the controller is not made for is skipped. After a reset everything is asked
//! again, since nothing that was set has survived.

use std::collections::BTreeSet;

use base::{Answer, Dma, Instant, Mmio};
use wire::admin::{DoorbellBufferConfig, GetLogPage, SetFeatures};
use wire::feature::Feature;
use wire::feature::queue::{HostBehaviorSupport, NumberOfQueues};
use wire::identify::controller::ControllerType;
use wire::identify::{BYTES, Cns, CommandSet, IdentifyController, IdentifyControllerNvm};
use wire::register::{CommandSetSelected, Version};
use wire::{Command, Status, Typed, admin};

use super::admin::Purpose;
use super::identity::Identity;
use super::notices::LogPage;
use super::scan::{Manner, Scan, ScanError};
use super::{Controller, PAGE, Phase};
use crate::data_pointer::SglSupport;
use crate::error::{ControllerError, Lie, ResetCause};
use crate::event::{Event, Unusable};

/// The question that is open.
#[derive(Debug)]
pub(super) enum Ask {
    /// One of start-up.
    Step(Step),
    /// One of a search for namespaces; the search that start-up ends with, or a later one.
    Namespaces(Box<Scan>),
    /// A log page that an event has pointed to.
    Log(LogPage),
}

/// The questions of start-up, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Controller,
    ControllerNvm,
    QueueCount,
    HostBehavior,
    ShadowDoorbells,
    Events,
    /// What the controller says it has, after it has refused more.
    Notices,
    KeepAlive,
}

const STEPS: [Step; 8] = [
    Step::Controller,
    Step::ControllerNvm,
    Step::QueueCount,
    Step::HostBehavior,
    Step::ShadowDoorbells,
    Step::Events,
    Step::Notices,
    Step::KeepAlive,
];

/// The first version with pages of the command sets' own (Base 2.0).
const COMMAND_SET_PAGES_SINCE: Version = Version(0x0002_0000);

impl<M: Mmio, D: Dma> Controller<M, D> {
    /// Begins to ask.
    pub(super) fn start_up(&mut self, now: Instant) {
        self.admin.link.give(crate::link::Order::Run);
        self.phase = Phase::Starting;
        self.event_requests = 0;
        self.events_refused = None;
        self.wanted.clear();
        self.keep_alive_at = Instant::NEVER;
        self.ask(now, Ask::Step(Step::Controller));
        self.admin.pair.flush();
    }

    /// Asks, with the answer's place cleared: what the controller does not write reads as zeroes.
    pub(super) fn ask(&mut self, now: Instant, ask: Ask) {
        // Memory that was allocated for this cannot be missing; the answer would read as zeroes.
        let _ = self.dma.fill(self.memory.page, 0);
        let command = match &ask {
            Ask::Step(step) => self.command_of(*step),
            Ask::Namespaces(scan) => match scan.question() {
                Some(question) => self.at_page(question.to_command(), PAGE),
                None => return,
            },
            Ask::Log(log) => {
                let get = GetLogPage { nsid: u32::MAX, ..GetLogPage::new(log.id, log.len_bytes()) };
                self.at_page(get.to_command(), log.len_bytes())
            }
        };
        self.asked = Some(ask);
        self.admin.send(now, Purpose::Asked, command);
    }

    /// `command`, with the first `len_bytes` of the page for answers as its data.
    fn at_page(&self, command: Command, len_bytes: u32) -> Command {
        let page = self.dma.iova(self.memory.page).unwrap_or(0);
        self.options.admin_pointers().pointer(page, len_bytes).put_in(command)
    }

    fn command_of(&self, step: Step) -> Command {
        let identify = |cns: Cns| {
            let csi = CommandSet::Nvm.code();
            let identify = admin::Identify { cns: cns.code(), csi, ..admin::Identify::default() };
            self.at_page(identify.to_command(), PAGE)
        };
        let set = |feature: Feature, cdw11| {
            SetFeatures { fid: feature.code(), cdw11, ..SetFeatures::default() }.to_command()
        };
        match step {
            Step::Controller => identify(Cns::Controller),
            Step::ControllerNvm => identify(Cns::CommandSetController),
            Step::QueueCount => {
                let wanted = NumberOfQueues::pairs(self.options.queue_pairs.into());
                set(Feature::NumberOfQueues, wanted.0)
            }
            Step::HostBehavior => {
                let behavior = HostBehaviorSupport::zeroed().with(|behavior| behavior.lbafee(1));
                if let Some(place) = self.memory.page.slice(0, BEHAVIOR_BYTES) {
                    // As above: it cannot be missing.
                    let _ = self.dma.store(place, behavior.as_bytes());
                }
                self.at_page(set(Feature::HostBehaviorSupport, 0), BEHAVIOR_BYTES)
            }
            Step::ShadowDoorbells => {
                let [shadows, indexes] = self.memory.shadows.unwrap_or_default();
                for buffer in [shadows, indexes] {
                    let _ = self.dma.fill(buffer, 0);
                }
                let [shadow_doorbells, event_indexes] =
                    [shadows, indexes].map(|buffer| self.dma.iova(buffer).unwrap_or(0));
                DoorbellBufferConfig { shadow_doorbells, event_indexes }.to_command()
            }
            Step::Events => {
                set(Feature::AsynchronousEventConfiguration, self.event_configuration().0)
            }
            Step::Notices => set(Feature::AsynchronousEventConfiguration, self.notices().0),
            Step::KeepAlive => {
                let time = self.keep_alive_time().ns / 1_000_000;
                set(Feature::KeepAliveTimer, u32::try_from(time).unwrap_or(u32::MAX))
            }
        }
    }

    /// Whether this controller is asked this question.
    fn is_asked(&self, step: Step) -> bool {
        let Some(identity) = &self.identity else { return true };
        let has_queues = self.has_io_queues();
        match step {
            Step::Controller => true,
            Step::ControllerNvm => has_queues && self.has_command_set_pages(),
            Step::QueueCount => has_queues,
            Step::HostBehavior => identity.page.elbas(),
            Step::ShadowDoorbells => {
                self.memory.shadows.is_some()
                    && identity.page.doorbell_buffer()
                    && !self.options.quirks.broken_shadow_doorbells
            }
            Step::Events => true,
            Step::Notices => self.events_refused.is_some(),
            Step::KeepAlive => self.keep_alive_time().ns > 0,
        }
    }

    /// The answer to the open question has come.
    pub(super) fn handle_asked(&mut self, now: Instant, answer: Answer) {
        let Some(ask) = self.asked.take() else { return };
        let status = Status(answer.outcome.0);
        let mut page = [0; BYTES];
        // As in `ask`: it cannot be missing.
        let _ = self.dma.load(self.memory.page, &mut page);
        match ask {
            Ask::Step(step) => match self.handle_step(step, status, answer.result, &page) {
                Ok(()) => self.ask_after(now, step),
                Err(error) => self.fail_start_up(now, error),
            },
            Ask::Namespaces(mut scan) => match scan.handle(status, &page) {
                Ok(()) => self.go_on_scanning(now, scan),
                Err(error) => self.abandon_scan(now, error),
            },
            Ask::Log(log) => self.handle_log(now, log, status, &page),
        }
    }

    fn handle_step(
        &mut self,
        step: Step,
        status: Status,
        result: u32,
        page: &[u8; BYTES],
    ) -> Result<(), ControllerError> {
        let refused = |command| Err(ControllerError::Refused { command, status });
        match (step, status.is_success()) {
            (Step::Controller, true) => self.learn_identity(page)?,
            (Step::Controller, false) => return refused("identify controller"),
            (Step::ControllerNvm, true) => {
                if let Some(identity) = &mut self.identity {
                    identity.add_nvm(&IdentifyControllerNvm::from_bytes(page));
                }
            }
            (Step::QueueCount, true) => self.granted = granted(result, self.options.queue_pairs)?,
            (Step::QueueCount, false) => return refused("set number of queues"),
            (Step::ShadowDoorbells, works) => {
                // Queue pairs that were made with shadows would go on writing to them.
                if !works && self.uses_shadow_doorbells {
                    return refused("doorbell buffer config");
                }
                self.uses_shadow_doorbells = works;
            }
            (Step::Events, true) => self.event_requests = self.event_requests_wanted(),
            (Step::Events, false) => self.events_refused = Some(status),
            (Step::Notices, is_set) => self.settle_for_notices(is_set),
            (Step::KeepAlive, _) | (Step::HostBehavior, _) | (Step::ControllerNvm, false) => {}
        }
        Ok(())
    }

    fn learn_identity(&mut self, page: &[u8; BYTES]) -> Result<(), ControllerError> {
        let mut identity =
            Identity::check(IdentifyController::from_bytes(page), self.options.is_discovery)?;
        if self.options.sgl_only {
            identity.limits.sgl = SglSupport::Only;
        }
        if let Some(before) = &self.identity
            && !before.is_same(&identity)
        {
            let field = "identify controller: SN, MN";
            return Err(Lie { field, found: 0, expected: "what they were before the reset" }.into());
        }
        self.identity = Some(identity);
        Ok(())
    }

    fn ask_after(&mut self, now: Instant, step: Step) {
        let rest = STEPS.iter().skip_while(|other| **other != step).skip(1);
        let next = rest.copied().find(|step| self.is_asked(*step));
        let was_set = self.options.keep_alive_is_set && self.keep_alive_at == Instant::NEVER;
        if step == Step::KeepAlive || was_set && step == Step::Controller {
            self.begin_keep_alive(now);
        }
        match next {
            Some(next) => self.ask(now, Ask::Step(next)),
            None if !self.has_io_queues() => self.become_ready(),
            None => self.scan(now, BTreeSet::new()),
        }
    }

    /// Looks for namespaces; what is in `kept` is known to be as it was.
    pub(super) fn scan(&mut self, now: Instant, kept: BTreeSet<u32>) {
        let Some(identity) = &self.identity else { return };
        let manner = Manner {
            version: self.version(),
            highest: identity.page.nn(),
            namespaces_max: self.options.namespaces_max,
            has_nvm_page: self.has_command_set_pages(),
        };
        self.go_on_scanning(now, Box::new(Scan::new(manner, kept)));
    }

    fn go_on_scanning(&mut self, now: Instant, scan: Box<Scan>) {
        if scan.question().is_some() {
            return self.ask(now, Ask::Namespaces(scan));
        }
        let events = scan.finish(&mut self.namespaces);
        self.events.extend(events);
        if matches!(self.phase, Phase::Starting) {
            // Before any queue pair runs again.
            match self.check_namespace() {
                Ok(()) => self.become_ready(),
                Err(lie) => self.fail_start_up(now, lie.into()),
            }
        }
    }

    /// Whether the namespace that is used is the one from before the reset. One that is not there is not
    /// used.
    fn check_namespace(&self) -> Result<(), Lie> {
        let Some((id, names)) = self.expected else { return Ok(()) };
        match self.namespaces.get(&id) {
            Some(found) if found.names != names => Err(Lie {
                field: "identify namespace: UUID, NGUID, EUI64 of namespace",
                found: id.into(),
                expected: "those that it had before the reset",
            }),
            _ => Ok(()),
        }
    }

    fn abandon_scan(&mut self, now: Instant, error: ScanError) {
        if matches!(self.phase, Phase::Starting) {
            let command = "identify active namespaces";
            let error = match error {
                ScanError::Lie(lie) => lie.into(),
                ScanError::Refused(status) => ControllerError::Refused { command, status },
            };
            return self.fail_start_up(now, error);
        }
        let why = match error {
            ScanError::Lie(lie) => Unusable::Lie(lie),
            ScanError::Refused(status) => Unusable::Refused(status),
        };
        self.tell(Event::NamespaceListUnusable { why });
    }

    fn become_ready(&mut self) {
        self.phase = Phase::Ready;
        let was_ready = core::mem::replace(&mut self.has_been_ready, true);
        self.tell(if was_ready { Event::Recovered } else { Event::Ready });
    }

    /// A controller that never worked is given up; one that did gets another reset, if it has not
    /// had too many.
    fn fail_start_up(&mut self, now: Instant, error: ControllerError) {
        match error {
            ControllerError::Refused { command, status } if self.has_been_ready => {
                self.reset_because(now, ResetCause::Refused { command, status });
            }
            ControllerError::Lie(lie) if self.has_been_ready => {
                self.reset_because(now, ResetCause::Lie(lie));
            }
            error => self.die(now, error),
        }
    }

    fn version(&self) -> Version {
        self.capabilities.map_or(Version::zeroed(), |capabilities| capabilities.version)
    }

    fn command_sets(&self) -> CommandSetSelected {
        let selected = self.capabilities.map(|capabilities| capabilities.command_sets);
        selected.unwrap_or(CommandSetSelected::AdminOnly)
    }

    /// Whether there is anything but an admin queue: a discovery controller has none, whatever CAP.CSS
    /// says (Base 2.1 §3.1.3.3), and whether or not it says that it is one.
    fn has_io_queues(&self) -> bool {
        let kind = self.identity.as_ref().map(|identity| identity.page.cntrltype());
        let is_discovery = self.options.is_discovery || kind == Some(ControllerType::Discovery);
        self.command_sets() != CommandSetSelected::AdminOnly && !is_discovery
    }

    fn has_command_set_pages(&self) -> bool {
        self.command_sets() == CommandSetSelected::All || self.version() >= COMMAND_SET_PAGES_SINCE
    }
}

/// How many I/O queue pairs there can be (Base 2.1 §5.1.25.2.1): both numbers are zeroes-based.
fn granted(result: u32, wanted: u16) -> Result<u16, Lie> {
    let count = NumberOfQueues(result).count();
    match u16::try_from(count) {
        Ok(granted) => Ok(granted.min(wanted)),
        Err(_) => {
            let (field, expected) = ("number of queues", "at most 65534, zero-based");
            Err(Lie { field, found: result.into(), expected })
        }
    }
}

/// The length of the Host Behavior Support data (Base 2.1 §5.1.25.1.14).
const BEHAVIOR_BYTES: u32 = 512;

const _: () = assert!(BYTES == PAGE as usize, "an answer to Identify fills the page for it");
