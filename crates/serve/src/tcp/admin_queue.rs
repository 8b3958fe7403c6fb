//! Admin queue of an association, on the target's end of the connection.

use std::sync::Arc;

use tenmil_base::{Instant, Memory, Span};
use tenmil_nvme_controller::controller::transport_interface::{AdminDataTransfer, AdminResult};
use tenmil_nvme_controller::transport::fabrics::{AssociationEndReason, DeferredResult};
use tenmil_nvme_tcp::ControllerConnection;
use tenmil_wire::admin::{
    CrossControllerReset, CrossResetResult, GetLogPage, Identify, SetFeatures,
};
use tenmil_wire::fabrics::{PropertyGet, PropertySet, PropertySize};
use tenmil_wire::feature::Feature;
use tenmil_wire::log::LogPage;
use tenmil_wire::opcode::FabricsType;
use tenmil_wire::{AdminOpcode, Command, Completion, Status, TypedCommand};

use super::association::Association;
use super::command_table::{CommandTable, DataDirection};
use super::service::{ForeignController, Service};
use super::subsystem_export::RESETS_MAX;

/// Admin queue.
#[derive(Debug)]
pub(super) struct AdminQueue {
    service: Service,
    association: Arc<Association>,
    bytes: Vec<u8>,
    /// When the association has to be polled next.
    wakes_at: Instant,
    /// Whether a command has changed something that the association must process.
    wants_iteration: bool,
    /// Time that the I/O queues of a reset controller may take to stop.
    quiesce: Span,
    /// Cross-Controller Resets in progress.
    resets: Vec<PendingCrossControllerReset>,
    /// Injected bug: a reset of an unknown controller is completed successfully.
    accepts_unknown_resets: bool,
    /// Whether the last command was a Keep Alive of a host with a long keep-alive timeout.
    is_last_command_keep_alive: bool,
}

/// Cross-Controller Reset in progress.
#[derive(Debug)]
struct PendingCrossControllerReset {
    /// Tag of the Cross-Controller Reset command.
    tag: u16,
    target: CrossControllerReset,
    /// Deadline for the named controller to be gone.
    until: Instant,
}

/// Shortest keep-alive timeout for which the wake-up of a Keep Alive may be coalesced with others.
/// It is many times the delay that coalescing adds.
const COALESCED_KEEP_ALIVE_MIN: Span = Span::from_ms(2_500);
const _: () = assert!(COALESCED_KEEP_ALIVE_MIN.ns >= 50 * tenmil_linux::COALESCE_DELAY.ns);

/// Longest wait for the end of the lease of another gateway, whose controller a reset names: a lease and the
/// time that its store takes to end it.
const FOREIGN_RESET_MAX: Span = Span::from_secs(20);

/// Interval at which pending resets are checked.
const RESET_CHECK_INTERVAL: Span = Span::from_ms(1);

impl AdminQueue {
    pub(super) fn new(service: &Service, association: Arc<Association>) -> Self {
        let limits = service.limits();
        Self {
            service: service.clone(),
            association,
            bytes: Vec::new(),
            wakes_at: Instant::default(),
            wants_iteration: true,
            quiesce: limits.quiesce,
            accepts_unknown_resets: limits.injected_bugs.unknown_resets_done,
            resets: Vec::new(),
            is_last_command_keep_alive: false,
        }
    }

    /// Starts a command that has all its data.
    pub(super) fn start_command(
        &mut self,
        now: Instant,
        commands: &mut CommandTable,
        end: &mut ControllerConnection,
        tag: u16,
    ) {
        self.wants_iteration = true;
        self.is_last_command_keep_alive = false;
        let command = *commands.command_of_tag(tag);
        let host_cid = command.cid();
        if command.opcode() == AdminOpcode::FabricsCommands.code() {
            let completion = self.execute_property(now, &command);
            commands.complete_with(end, tag, 0, completion);
            return;
        }
        if self.association.awaits_secure_channel() && !is_served_before_secure_channel(&command) {
            let status = Status::OPERATION_DENIED.with_dnr();
            commands.complete_with(end, tag, 0, Completion::new(0, status));
            return;
        }
        if let Some(status) = self.rejection_by_rights(&command) {
            commands.complete_with(end, tag, 0, Completion::new(0, status.with_dnr()));
            return;
        }
        // The command is executed under its tag, which is unique even if the host's command
        // identifiers are not.
        let command = abort_with_target_tag(commands, &command).with_cid(tag);
        let association = Arc::clone(&self.association);
        let mut transport = association.lock_transport();
        let data = transport
            .command_data_length(&command)
            .and_then(|data| self.load_host_data(commands, tag, data));
        let result = match data {
            Ok(()) => {
                let is_keep_alive = command.opcode() == AdminOpcode::KeepAlive.code();
                self.is_last_command_keep_alive =
                    is_keep_alive && transport.keep_alive_timeout() >= COALESCED_KEEP_ALIVE_MIN;
                transport.execute_admin(now, &command, host_cid, &mut self.bytes)
            }
            Err(status) => {
                transport.record_rejection(now, &command.with_cid(host_cid), status);
                Some(AdminResult::failure(status))
            }
        };
        drop(transport);
        self.begin_requested_resets(now);
        let Some(AdminResult { status, result }) = result else { return };
        let sent =
            if status.is_success() { self.store_response_data(commands, tag) } else { Ok(0) };
        let (status, len_bytes) = match sent {
            Ok(len_bytes) => (status, len_bytes),
            Err(why) => (why, 0),
        };
        let completion = Completion::new(0, status).with_dw0(result);
        commands.complete_with(end, tag, len_bytes, completion);
    }

    /// Whether the last command was a Keep Alive whose completion may be delayed.
    pub(super) fn is_last_command_keep_alive(&self) -> bool {
        self.is_last_command_keep_alive
    }

    /// Status that rejects an admin command of a host that may only read some namespaces, if the
    /// command changes what others use.
    fn rejection_by_rights(&self, command: &Command) -> Option<Status> {
        let is_change = match AdminOpcode::from_u8(command.opcode())? {
            AdminOpcode::FormatNvm
            | AdminOpcode::Sanitize
            | AdminOpcode::NamespaceManagement
            | AdminOpcode::NamespaceAttachment
            | AdminOpcode::FirmwareImageDownload
            | AdminOpcode::FirmwareCommit => true,
            AdminOpcode::SetFeatures => SetFeatures::parse(command)
                .is_ok_and(|set| Feature::from_code(set.fid) == Feature::NamespaceWriteProtection),
            _ => false,
        };
        if !is_change {
            return None;
        }
        let rights = self.association.export().rights_of_host(&self.association.host.nqn);
        (!rights.read_only.is_empty()).then_some(Status::NAMESPACE_WRITE_PROTECTED)
    }

    /// Executes Property Get and Property Set (Base 2.1 §6.5, §6.6); other Fabrics commands are
    /// rejected.
    fn execute_property(&self, now: Instant, command: &Command) -> Completion {
        let mut transport = self.association.lock_transport();
        let bytes = |size| if size == PropertySize::Eight { 8 } else { 4 };
        let kind = FabricsType::from_u8(command.nsid().to_le_bytes()[0]);
        let value = match kind {
            Some(FabricsType::PropertyGet) => PropertyGet::parse(command)
                .and_then(|get| transport.property_get(now, get.ofst, bytes(get.size))),
            Some(FabricsType::PropertySet) => PropertySet::parse(command).and_then(|set| {
                transport.property_set(now, set.ofst, bytes(set.size), set.value).map(|()| 0)
            }),
            // A queue is connected only once (Base 2.1 §6.3).
            Some(FabricsType::Connect) => Err(Status::COMMAND_SEQUENCE_ERROR),
            // Only I/O queues can be disconnected individually (Base 2.1 §6.4).
            Some(FabricsType::Disconnect) => Err(Status::INVALID_QUEUE_TYPE),
            _ => Err(Status::INVALID_OPCODE),
        };
        match value {
            Ok(value) => Completion::new(0, Status::SUCCESS).with_result(value),
            Err(status) => {
                let status = status.with_dnr();
                transport.record_rejection(now, command, status);
                Completion::new(0, status)
            }
        }
    }

    /// Copies the data that the host sent, if their length and direction match the command.
    fn load_host_data(
        &mut self,
        commands: &CommandTable,
        tag: u16,
        data: AdminDataTransfer,
    ) -> Result<(), Status> {
        let wrong = Status::DATA_SGL_LENGTH_INVALID.with_dnr();
        let (direction, len_bytes) = commands.data_direction_and_len(tag);
        self.bytes.clear();
        match data {
            AdminDataTransfer::None => Ok(()),
            AdminDataTransfer::ToHost(need)
                if direction == DataDirection::ToHost && len_bytes >= need =>
            {
                Ok(())
            }
            // Excess data are ignored, as on I/O queues.
            AdminDataTransfer::FromHost(need)
                if direction == DataDirection::FromHost && len_bytes >= need =>
            {
                self.bytes.resize(need as usize, 0);
                let segment = commands.data_segment(tag, need).ok_or(wrong)?;
                let loaded = commands.buffer_pool().regions().load(segment, &mut self.bytes);
                loaded.map_err(|_| Status::INTERNAL_ERROR)
            }
            AdminDataTransfer::ToHost(_) | AdminDataTransfer::FromHost(_) => Err(wrong),
        }
    }

    /// Starts the Cross-Controller Resets that the host has requested.
    fn begin_requested_resets(&mut self, now: Instant) {
        // The lock on this association's front end is released before the other one's is taken: two
        // controllers that reset each other would deadlock.
        while let Some((tag, target)) =
            { self.association.lock_transport().next_cross_controller_reset() }
        {
            if let Some(end) = self.begin_reset(now, tag, target) {
                self.association.lock_transport().complete_cross_controller_reset(now, tag, end);
            }
        }
    }

    /// Starts one reset. Returns its completion if there is nothing to wait for.
    fn begin_reset(
        &mut self,
        now: Instant,
        tag: u16,
        target: CrossControllerReset,
    ) -> Option<AdminResult> {
        let found = self.association.export().association_of_cntlid(target.icid);
        let Some(other) = found.filter(|other| other.is_target_of_reset(&target)) else {
            let export = self.association.export();
            match self.service.foreign_controller(now, target.icid) {
                ForeignController::Ended => return Some(successful_reset_result()),
                ForeignController::MayRun if self.resets.len() < usize::from(RESETS_MAX) => {
                    let until = now.after(FOREIGN_RESET_MAX);
                    self.resets.push(PendingCrossControllerReset { tag, target, until });
                    return None;
                }
                ForeignController::MayRun | ForeignController::No => {}
            }
            // An unknown controller may belong to another process or to an earlier run of this one,
            // and may still write, so the reset must not be reported as done.
            return Some(match export.has_instance_ended(&target) || self.accepts_unknown_resets {
                true => successful_reset_result(),
                false => AdminResult::failure(Status::INVALID_CONTROLLER_IDENTIFIER.with_dnr()),
            });
        };
        if !other.host.is_same_host(&self.association.host) {
            return Some(AdminResult::failure(Status::INVALID_CONTROLLER_IDENTIFIER.with_dnr()));
        }
        if self.resets.len() >= usize::from(RESETS_MAX) {
            return Some(AdminResult::failure(Status::CROSS_CONTROLLER_RESET_LIMIT_EXCEEDED));
        }
        other.lock_transport().end_association(AssociationEndReason::Reset);
        self.resets.push(PendingCrossControllerReset {
            tag,
            target,
            until: now.after(self.quiesce),
        });
        None
    }

    /// Completes resets whose controller is gone. A controller ends with the last connection of its
    /// association, and a connection only once none of its commands is outstanding in a device. A
    /// controller that takes longer than the advertised quiesce time is not reported as reset.
    fn complete_finished_resets(&mut self, now: Instant) {
        let Self { association, resets, service, .. } = self;
        resets.retain(|PendingCrossControllerReset { tag, target, until }| {
            let found = association.export().association_of_cntlid(target.icid);
            let is_there = found.is_some_and(|other| other.is_target_of_reset(target));
            let has_ended = || {
                association.export().has_instance_ended(target)
                    || service.foreign_controller(now, target.icid) == ForeignController::Ended
            };
            let is_gone = !is_there && has_ended();
            if is_gone {
                association.lock_transport().complete_cross_controller_reset(
                    now,
                    *tag,
                    successful_reset_result(),
                );
            } else if now >= *until {
                let timeout = AdminResult::failure(Status::INTERNAL_ERROR);
                association.lock_transport().complete_cross_controller_reset(now, *tag, timeout);
            }
            !is_gone && now < *until
        });
    }

    /// Copies the data for the host into the command's buffer. Returns their length.
    fn store_response_data(&self, commands: &CommandTable, tag: u16) -> Result<u32, Status> {
        let (direction, capacity) = commands.data_direction_and_len(tag);
        let len_bytes = u32::try_from(self.bytes.len()).unwrap_or(u32::MAX);
        if direction != DataDirection::ToHost || len_bytes == 0 {
            return Ok(0);
        }
        let segment = commands.data_segment(tag, len_bytes).filter(|_| len_bytes <= capacity);
        let segment = segment.ok_or(Status::INTERNAL_ERROR)?;
        let stored = commands.buffer_pool().regions().store(segment, &self.bytes);
        stored.map(|()| len_bytes).map_err(|_| Status::INTERNAL_ERROR)
    }

    /// Polls the association if it is due. Returns why it has ended, once it has.
    pub(super) fn poll_association(
        &mut self,
        now: Instant,
        is_wakeup_pending: bool,
        commands: &mut CommandTable,
        end: &mut ControllerConnection,
    ) -> AdminPollResult {
        if !self.wants_iteration && !is_wakeup_pending && now < self.wakes_at {
            return AdminPollResult::default();
        }
        self.wants_iteration = false;
        self.complete_finished_resets(now);
        let removal_ends_at = self.association.poll_secret_removal(now);
        let mut transport = self.association.lock_transport();
        let is_busy = transport.poll(now);
        let mut count = usize::from(is_busy);
        while let Some((tag, result)) = transport.next_deferred_result() {
            count += 1;
            // An event completion is followed by a request for details, so the host is no longer
            // idle.
            self.is_last_command_keep_alive = false;
            match result {
                _ if !commands.is_executing(tag) => {}
                DeferredResult::Completed(AdminResult { status, result }) => {
                    commands.complete_with(
                        end,
                        tag,
                        0,
                        Completion::new(0, status).with_dw0(result),
                    );
                }
                DeferredResult::Dropped => commands.drop_command(end, tag),
            }
        }
        let error = transport.take_error();
        self.wakes_at = transport.wake_at(now).min(removal_ends_at);
        if !self.resets.is_empty() {
            self.wakes_at = self.wakes_at.min(now.after(RESET_CHECK_INTERVAL));
        }
        AdminPollResult { count, end_reason: transport.end_reason(), error }
    }

    pub(super) fn association(&self) -> &Arc<Association> {
        &self.association
    }

    /// Ends the association, because its admin connection ends.
    pub(super) fn end_association(&mut self) {
        self.association.lock_transport().end_association(AssociationEndReason::ConnectionLost);
    }

    /// Whether no I/O queue of the association is left.
    pub(super) fn are_io_queues_gone(&self) -> bool {
        self.association.lock_transport().has_no_io_queues()
    }

    pub(super) fn wake_at(&self) -> Instant {
        self.wakes_at
    }

    pub(super) fn needs_iteration(&self) -> bool {
        self.wants_iteration
    }
}

/// Returns the command with the tag of the command that it aborts, if that was received on the same
/// connection. The front end identifies commands by tag; an Abort names the host's command
/// identifier (Base 2.1 §5.1.1).
fn abort_with_target_tag(commands: &CommandTable, command: &Command) -> Command {
    if command.opcode() != AdminOpcode::Abort.code() || command.cdw10() & 0xffff != 0 {
        return *command;
    }
    let [_, _, low, high] = command.cdw10().to_le_bytes();
    let found = commands.find_by_cid(u16::from_le_bytes([low, high]));
    // No command has this tag.
    let tag = found.map_or(u16::MAX, |(tag, _)| tag);
    command.with_cdw10(u32::from(tag) << 16)
}

/// Whether a controller executes a command whose host has generated a key for a TLS connection, and sends
/// it on the connection before. Linux initializes the controller there before it opens the TLS
/// connection, so the controller describes itself; it changes nothing and shows no namespace.
fn is_served_before_secure_channel(command: &Command) -> bool {
    match AdminOpcode::from_u8(command.opcode()) {
        Some(AdminOpcode::Identify) => Identify::parse(command).is_ok_and(|identify| {
            matches!(identify.cns, CNS_CONTROLLER | CNS_COMMAND_SET_CONTROLLER)
        }),
        Some(AdminOpcode::GetLogPage) => GetLogPage::parse(command).is_ok_and(|get| {
            matches!(
                LogPage::from_code(get.lid),
                LogPage::SupportedLogPages
                    | LogPage::Health
                    | LogPage::CommandEffects
                    | LogPage::Ana
            )
        }),
        Some(AdminOpcode::GetFeatures | AdminOpcode::KeepAlive | AdminOpcode::Abort) => true,
        _ => false,
    }
}

/// CNS of the Identify Controller data structure (Base 2.2 §5.2.13.2.1).
const CNS_CONTROLLER: u8 = 0x01;
/// CNS of the I/O Command Set specific Identify Controller data structure (Base 2.2 §5.2.13.2.6).
const CNS_COMMAND_SET_CONTROLLER: u8 = 0x06;

/// Completion of a successful Cross-Controller Reset.
fn successful_reset_result() -> AdminResult {
    AdminResult::success_with(CrossResetResult(0).with(|result| result.is_reset(true)).0)
}

/// Result of polling the admin queue.
#[derive(Debug, Default)]
pub(super) struct AdminPollResult {
    pub(super) count: usize,
    pub(super) end_reason: Option<AssociationEndReason>,
    pub(super) error: Option<String>,
}
