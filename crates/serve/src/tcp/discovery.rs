//! Discovery controller: lists the subsystems and their addresses (Base 2.1 §3.1.3.3).
//!
//! It has no namespaces, no I/O queues and no persistent state. A host only sees the subsystems
//! that it is allowed to use.

use std::collections::VecDeque;
use std::net::SocketAddr;

use tenmil_base::{Instant, Memory, Span};
use tenmil_nvme_auth::ChapSecret;
use tenmil_nvme_controller::transport::fabrics::property_value;
use tenmil_nvme_tcp::ControllerConnection;
use tenmil_wire::admin::{GetFeatures, GetLogPage, Identify, SetFeatures};
use tenmil_wire::fabrics::{PropertyGet, PropertySet, PropertySize};
use tenmil_wire::feature::Feature;
use tenmil_wire::identify::IdentifyController;
use tenmil_wire::identify::controller::ControllerType;
use tenmil_wire::layout::Ascii;
use tenmil_wire::log::LogPage;
use tenmil_wire::log::event::{EventResult, EventType, NoticeEvent};
use tenmil_wire::opcode::FabricsType;
use tenmil_wire::register::{
    Configuration, ControllerStatus, ShutdownNotification, ShutdownStatus,
};
use tenmil_wire::register::{VERSION_2_1, offset};
use tenmil_wire::{AdminOpcode, Command, Completion, Status, TypedCommand};

use super::buffer_pool::OWN_BYTES;
use super::command_table::{CommandTable, DataDirection};
use super::connect_validation::DiscoveryGrant;
use super::security::{ConnectedQueue, Credentials, SecretRemoval};
use super::service::Service;

/// Discovery controller of one host.
#[derive(Debug)]
pub(super) struct DiscoveryController {
    service: Service,
    host: String,
    /// NQN that its Connect names, if the connection is a TLS connection. It is then reported in place
    /// of the unique NQN: its TLS key belongs to this NQN, and a host that went on to the other one, as
    /// Linux does, would need a key for that, too.
    tls_nqn: Option<String>,
    /// Port of the service that the host connected to, and the local address that it used.
    port: u16,
    local_address: Option<SocketAddr>,
    cntlid: u16,
    /// What the host has proved, and the address of its peer.
    credentials: Credentials,
    peer: String,
    removal: SecretRemoval,
    /// When the host must have authenticated after the removal of its secret.
    removal_ends_at: Instant,
    /// The host has generated a key for a TLS connection, which this one is not: the controller
    /// describes itself only.
    awaits_secure_channel: bool,
    configuration: Configuration,
    /// End of the interval in which a command must arrive (Base 2.1 §3.9.4).
    silence_ends: Instant,
    has_received: bool,
    /// Keep-alive timeout; zero if the host set none.
    keep_alive: Span,
    /// Asynchronous Event Configuration, feature 0Bh.
    event_configuration: u32,
    /// Tags of outstanding Asynchronous Event Requests, oldest first.
    event_requests: VecDeque<u16>,
    /// Generation of the log page that the host was notified of, or has read, last.
    generation: u64,
    /// Whether a notification was sent and the log page not read since.
    is_notified: bool,
    /// Whether a notification may be due.
    wants_iteration: bool,
}

/// Longest silence of a host without a keep-alive timeout (Base 2.1 §3.1.3.3.2).
const SILENCE_MAX: Span = Span::from_secs(120);
/// Largest number of outstanding Asynchronous Event Requests.
const EVENT_REQUESTS: usize = 4;
/// Discovery Log Page Change bit in feature 0Bh and in OAES.
const LOG_CHANGE: u32 = 1 << 31;
/// KAS: granularity of keep-alive timeouts, in units of 100 ms.
const KEEP_ALIVE_UNITS: u16 = 10;
const PAGE_BYTES: u32 = 4096;

/// Result dwords and data of a command.
type CommandResult = Result<(u64, Vec<u8>), Status>;

impl DiscoveryController {
    pub(super) fn new(
        service: Service,
        (grant, tls_nqn): (DiscoveryGrant, Option<String>),
        (peer, port, local_address): (String, u16, Option<SocketAddr>),
        (cntlid, kato): (u16, u32),
        now: Instant,
    ) -> Self {
        let DiscoveryGrant { host, credentials, awaits_secure_channel } = grant;
        let mut discovery = Self {
            generation: service.discovery_generation(),
            service,
            host,
            tls_nqn,
            port,
            local_address,
            cntlid,
            credentials,
            peer,
            removal: SecretRemoval::None,
            removal_ends_at: Instant::NEVER,
            awaits_secure_channel,
            configuration: Configuration(0),
            silence_ends: now,
            has_received: false,
            keep_alive: Span::default(),
            event_configuration: 0,
            event_requests: VecDeque::new(),
            is_notified: false,
            wants_iteration: false,
        };
        discovery.set_keep_alive(kato);
        discovery.restart_keep_alive_interval(now);
        discovery
    }

    /// Executes a command that has all its data.
    pub(super) fn execute_command(
        &mut self,
        now: Instant,
        commands: &mut CommandTable,
        end: &mut ControllerConnection,
        tag: u16,
    ) {
        self.has_received = true;
        self.wants_iteration = true;
        let command = *commands.command_of_tag(tag);
        if AdminOpcode::from_u8(command.opcode()) == Some(AdminOpcode::AsynchronousEventRequest)
            && self.is_ready()
            && self.event_requests.len() < EVENT_REQUESTS
        {
            self.event_requests.push_back(tag);
            return;
        }
        let (direction, capacity) = commands.data_direction_and_len(tag);
        let result = self.dispatch_command(now, &command).and_then(|(result, bytes)| {
            let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
            if len > 0 && (direction != DataDirection::ToHost || len > capacity) {
                return Err(Status::DATA_SGL_LENGTH_INVALID);
            }
            Ok((result, bytes, len))
        });
        if !self.is_ready() {
            self.reset(commands, end);
        }
        let (status, result, len_bytes) = match result {
            Ok((result, bytes, len)) => (store_response_data(commands, tag, &bytes), result, len),
            Err(status) => (status.with_dnr(), 0, 0),
        };
        let len_bytes = if status.is_success() { len_bytes } else { 0 };
        let completion = Completion::new(0, status).with_result(result);
        commands.complete_with(end, tag, len_bytes, completion);
    }

    fn dispatch_command(&mut self, now: Instant, command: &Command) -> CommandResult {
        let opcode = AdminOpcode::from_u8(command.opcode()).ok_or(Status::INVALID_OPCODE)?;
        if opcode == AdminOpcode::FabricsCommands {
            return self.execute_property(command).map(|value| (value, Vec::new()));
        }
        if !self.is_ready() {
            return Err(Status::COMMAND_SEQUENCE_ERROR);
        }
        match opcode {
            AdminOpcode::Identify => self.identify_controller(command),
            AdminOpcode::GetLogPage => self.get_log_page(&GetLogPage::parse(command)?),
            AdminOpcode::GetFeatures => self.get_feature(&GetFeatures::parse(command)?),
            AdminOpcode::SetFeatures => self.set_feature(now, &SetFeatures::parse(command)?),
            AdminOpcode::KeepAlive => {
                self.restart_keep_alive_interval(now);
                Ok((0, Vec::new()))
            }
            AdminOpcode::AsynchronousEventRequest => Err(Status::AER_LIMIT_EXCEEDED),
            _ => Err(Status::INVALID_OPCODE),
        }
    }

    fn execute_property(&mut self, command: &Command) -> Result<u64, Status> {
        let bytes = |size| if size == PropertySize::Eight { 8 } else { 4 };
        match FabricsType::from_u8(command.nsid().to_le_bytes()[0]) {
            Some(FabricsType::PropertyGet) => {
                let get = PropertyGet::parse(command)?;
                let entries = self.service.limits().queue_entries;
                let known = (self.configuration, self.controller_status());
                property_value(entries.into(), known, get.ofst, bytes(get.size))
            }
            Some(FabricsType::PropertySet) => {
                let set = PropertySet::parse(command)?;
                if (set.ofst as usize, bytes(set.size)) != (offset::CC, 4) {
                    return Err(Status::INVALID_FIELD);
                }
                let value = u32::try_from(set.value).map_err(|_| Status::INVALID_FIELD)?;
                self.configuration = Configuration(value);
                Ok(0)
            }
            Some(FabricsType::Connect) => Err(Status::COMMAND_SEQUENCE_ERROR),
            Some(FabricsType::Disconnect) => Err(Status::INVALID_QUEUE_TYPE),
            _ => Err(Status::INVALID_OPCODE),
        }
    }

    /// Clears event configuration and outstanding event requests, as a controller reset does (Base
    /// 2.1 §3.7.2).
    fn reset(&mut self, commands: &mut CommandTable, end: &mut ControllerConnection) {
        self.event_requests.drain(..).for_each(|tag| commands.drop_command(end, tag));
        (self.event_configuration, self.is_notified) = (0, false);
    }

    fn controller_status(&self) -> ControllerStatus {
        let is_shut = matches!(
            self.configuration.shn(),
            ShutdownNotification::Normal | ShutdownNotification::Abrupt
        );
        let shutdown = if is_shut { ShutdownStatus::Complete } else { ShutdownStatus::None };
        ControllerStatus(0).with(|status| status.rdy(self.configuration.en()).shst(shutdown))
    }

    fn is_ready(&self) -> bool {
        self.configuration.en()
    }

    fn get_log_page(&mut self, get: &GetLogPage) -> CommandResult {
        let limit = u64::from(OWN_BYTES);
        let len_bytes = get.len_bytes();
        if get.ot || !get.lpo.is_multiple_of(4) || len_bytes > limit {
            return Err(Status::INVALID_FIELD);
        }
        let page = match LogPage::from_code(get.lid) {
            LogPage::Discovery if self.awaits_secure_channel => {
                return Err(Status::OPERATION_DENIED);
            }
            LogPage::Discovery => {
                let (generation, page) = self.service.build_discovery_log_page(
                    &self.host,
                    (self.port, self.local_address),
                    self.tls_nqn.as_deref(),
                );
                if !get.rae {
                    (self.generation, self.is_notified) = (generation, false);
                }
                page
            }
            LogPage::SupportedLogPages => supported_log_pages(),
            _ => return Err(Status::INVALID_LOG_PAGE),
        };
        let first = usize::try_from(get.lpo).map_err(|_| Status::INVALID_FIELD)?;
        let rest = page.get(first..).ok_or(Status::INVALID_FIELD)?;
        let len = usize::try_from(len_bytes).map_err(|_| Status::INVALID_FIELD)?;
        let mut bytes: Vec<u8> = rest.iter().copied().take(len).collect();
        bytes.resize(len, 0);
        Ok((0, bytes))
    }

    /// Builds the Identify Controller structure; other CNS values are rejected (Base 2.1 §5.1.13.2.1).
    fn identify_controller(&self, command: &Command) -> CommandResult {
        let requested = Identify::parse(command)?;
        if requested.cns != 1 {
            return Err(Status::INVALID_FIELD);
        }
        let (limits, name) = (self.service.limits(), self.service.discovery_name());
        let nqn = self.tls_nqn.as_deref().unwrap_or(&name.nqn);
        let pages = OWN_BYTES / PAGE_BYTES;
        let page = IdentifyController::zeroed().with(|page| {
            page.sn(Ascii::new(&name.serial))
                .fr(Ascii::new(concat!("t", env!("CARGO_PKG_VERSION"))))
                .mn(Ascii::new("tenmil discovery"))
                .subnqn(Ascii::nul_padded(nqn))
                .cntlid(self.cntlid)
                .ver(VERSION_2_1)
                .cntrltype(ControllerType::Discovery)
                .oaes(LOG_CHANGE)
                .lpeds(true)
                .mdts(u8::try_from(pages.trailing_zeros()).unwrap_or(0))
                .aerl(u8::try_from(EVENT_REQUESTS - 1).unwrap_or(0))
                .kas(KEEP_ALIVE_UNITS)
                .tbkas(true)
                .maxcmd(limits.queue_entries)
                .sgls(1 | 1 << 20 | 1 << 21)
                .ioccsz(4)
                .iorcsz(1)
                .msdbd(1)
        });
        Ok((0, page.as_bytes().to_vec()))
    }

    fn get_feature(&self, get: &GetFeatures) -> CommandResult {
        let value = match Feature::from_code(get.fid) {
            Feature::AsynchronousEventConfiguration => self.event_configuration,
            Feature::KeepAliveTimer => {
                u32::try_from(self.keep_alive.ns / 1_000_000).unwrap_or(u32::MAX)
            }
            _ => return Err(Status::INVALID_FIELD),
        };
        Ok((value.into(), Vec::new()))
    }

    fn set_feature(&mut self, now: Instant, set: &SetFeatures) -> CommandResult {
        match Feature::from_code(set.fid) {
            Feature::AsynchronousEventConfiguration => {
                self.event_configuration = set.cdw11 & LOG_CHANGE
            }
            Feature::KeepAliveTimer => {
                let keep_alive_max = self.service.limits().admission_limits().keep_alive_max;
                if Span::from_ms(set.cdw11.into()) > keep_alive_max {
                    return Err(Status::KEEP_ALIVE_TIMEOUT_INVALID);
                }
                self.set_keep_alive(set.cdw11);
                self.restart_keep_alive_interval(now);
            }
            _ => return Err(Status::INVALID_FIELD),
        }
        Ok((0, Vec::new()))
    }

    fn set_keep_alive(&mut self, timeout_ms: u32) {
        let step = Span::from_ms(100 * u64::from(KEEP_ALIVE_UNITS)).ns;
        let requested = Span::from_ms(timeout_ms.into()).ns;
        self.keep_alive = Span { ns: requested.next_multiple_of(step) };
    }

    fn restart_keep_alive_interval(&mut self, now: Instant) {
        let silence = if self.keep_alive.ns == 0 { SILENCE_MAX } else { self.keep_alive };
        self.silence_ends = now.after(silence);
    }

    /// Completes an event request if the log page changed and the host enabled the notice. Returns
    /// the amount of work.
    pub(super) fn poll_event_requests(
        &mut self,
        is_wakeup_pending: bool,
        commands: &mut CommandTable,
        end: &mut ControllerConnection,
    ) -> usize {
        if !core::mem::take(&mut self.wants_iteration) && !is_wakeup_pending {
            return 0;
        }
        let generation = self.service.discovery_generation();
        let is_event_enabled = self.event_configuration & LOG_CHANGE != 0 && !self.is_notified;
        if !is_event_enabled || generation == self.generation {
            return 0;
        }
        let Some(tag) = self.event_requests.pop_front() else { return 0 };
        (self.generation, self.is_notified) = (generation, true);
        let result = EventResult::zeroed().with(|result| {
            result
                .aet(EventType::Notice)
                .aei(NoticeEvent::Discovery.code())
                .lid(LogPage::Discovery.code())
        });
        commands.complete_with(end, tag, 0, Completion::new(0, Status::SUCCESS).with_dw0(result.0));
        1
    }

    /// NQN of the host.
    pub(super) fn host(&self) -> &str {
        &self.host
    }

    /// Records that the queue was authenticated again.
    pub(super) fn set_secret(&mut self, secret: ChapSecret) {
        self.credentials.set_secret(secret);
    }

    /// Whether the host may not stay connected. It is evaluated when keys may have changed, and when the
    /// time has passed that the host has after the removal of its secret.
    pub(super) fn is_revoked(
        &mut self,
        now: Instant,
        is_wakeup_pending: bool,
        is_authenticating: bool,
    ) -> bool {
        if !is_wakeup_pending && now < self.removal_ends_at {
            return false;
        }
        let queue = ConnectedQueue {
            host_nqn: &self.host,
            qid: 0,
            peer: &self.peer,
            awaits_secure_channel: self.awaits_secure_channel,
        };
        let verdict = self
            .service
            .with_discovery_security(|security| security.judge_queue(&self.credentials, &queue));
        let is_revoked = self.removal.ends_queues(now, verdict, is_authenticating);
        self.removal_ends_at = self.removal.ends_at(is_authenticating);
        is_revoked
    }

    /// Whether no command arrived for a whole interval.
    pub(super) fn is_keep_alive_expired(&mut self, now: Instant) -> bool {
        if now < self.silence_ends {
            return false;
        }
        let has_received = core::mem::take(&mut self.has_received);
        if has_received {
            self.restart_keep_alive_interval(now);
        }
        !has_received
    }

    pub(super) fn wake_at(&self) -> Instant {
        self.silence_ends.min(self.removal_ends_at)
    }
}

/// Copies the data for the host into the command's buffer.
fn store_response_data(commands: &CommandTable, tag: u16, bytes: &[u8]) -> Status {
    if bytes.is_empty() {
        return Status::SUCCESS;
    }
    let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    let Some(segment) = commands.data_segment(tag, len) else { return Status::INTERNAL_ERROR };
    let stored = commands.buffer_pool().regions().store(segment, bytes);
    stored.map_or(Status::INTERNAL_ERROR, |()| Status::SUCCESS)
}

/// Supported Log Pages (Base 2.1 §5.1.12.1.1).
fn supported_log_pages() -> Vec<u8> {
    let mut page = vec![0; 1024];
    for lid in [LogPage::SupportedLogPages, LogPage::Discovery] {
        // LSUPP, bit 0 of the dword of a log page.
        page[4 * usize::from(lid.code())] = 1;
    }
    page
}
