//! The four reservation commands, which arrive through I/O queues and are executed by the controller
//! (Base 2.1 §7.5 to §7.8).

use tenmil_base::Instant;
use tenmil_wire::io::reservation::{
    AcquireAction, AcquireKeys, ChangePersistence, RegisterAction, RegisterKeys, Registrant,
    RegistrantExtended, ReleaseAction, ReleaseKey, ReservationAcquire, ReservationRegister,
    ReservationRelease, ReservationReport, ReservationStatus, ReservationStatusExtended,
    ReservationType,
};
use tenmil_wire::{Command, IoOpcode, Layout, Status, TypedCommand};

use super::change_queue::{ChangeKind, ChangeRequester, PendingChange, ReservationReplyTarget};
use super::{HostId, HostNqn, OriginRegistrantLimit, ReservationChangeEffects, Reservations};
use crate::controller::Controller;
use crate::controller::commands::with_dnr_unless_retryable;
use crate::controller::subsystem::SubsystemState;
use crate::controller::transport_interface::{
    AdminDataTransfer, AdminResult, QueueCommandId, ReservationCompletion,
};
use crate::namespace::ReservationKind;

impl Controller {
    /// Data length and direction of a reservation command, or the status that rejects it before any data
    /// moves.
    pub fn reservation_data_length(&self, command: &Command) -> Result<AdminDataTransfer, Status> {
        if !self.subsystem.constants().reservations {
            return Err(with_dnr_unless_retryable(Status::INVALID_OPCODE));
        }
        match IoOpcode::from_u8(command.opcode()) {
            Some(IoOpcode::ReservationRegister | IoOpcode::ReservationAcquire) => {
                Ok(AdminDataTransfer::FromHost(16))
            }
            Some(IoOpcode::ReservationRelease) => Ok(AdminDataTransfer::FromHost(8)),
            Some(IoOpcode::ReservationReport) => {
                let report = ReservationReport::parse(command)?;
                let len_bytes = (u64::from(report.numd) + 1) * 4;
                self.check_transfer_length(len_bytes)
                    .map(AdminDataTransfer::ToHost)
                    .map_err(with_dnr_unless_retryable)
            }
            _ => Err(with_dnr_unless_retryable(Status::INVALID_OPCODE)),
        }
    }

    /// Executes a reservation command. `data` holds the data from the host, or receives the data for it.
    /// Every queue of every controller sees the result in its namespace snapshot. Returns `None` if the
    /// change has to be made durable, or writes of preempted hosts have to end, first: the result then follows through
    /// [`next_reservation_completion`](Self::next_reservation_completion), unless the controller is reset or the queue [is
    /// removed](Self::drop_queue_reservation_commands).
    pub fn execute_reservation_command(
        &mut self,
        now: Instant,
        from: QueueCommandId,
        command: &Command,
        data: &mut Vec<u8>,
    ) -> Option<AdminResult> {
        self.note_io_activity(now);
        match self.change_reservation(from, command, data) {
            Ok(is_over) => is_over.then_some(AdminResult::OK),
            Err(status) => Some(AdminResult::failure(with_dnr_unless_conflict(status))),
        }
    }

    /// Next result of a deferred reservation command.
    #[inline]
    pub fn next_reservation_completion(&mut self) -> Option<ReservationCompletion> {
        if self.reservation_completions.is_empty() {
            None
        } else {
            self.reservation_completions.pop_front()
        }
    }

    /// Removes an I/O queue: its waiting reservation commands are dropped, and a change being written
    /// completes without a result.
    pub fn drop_queue_reservation_commands(&mut self, queue: u16) {
        let is_of_it = |origin: &QueueCommandId| origin.queue == queue;
        let is_removed = |requester: &ChangeRequester| matches!(&requester.reply, ReservationReplyTarget::Queue(origin) if is_of_it(origin));
        self.subsystem.lock_state().drop_requesters(self.config.cntlid, is_removed);
        self.reservation_completions
            .retain(|reservation_completions| !is_of_it(&reservation_completions.from));
        self.pending_preemptions.retain(|pending_preemptions| !is_of_it(&pending_preemptions.from));
    }

    /// Executes the command. Returns whether it has completed.
    fn change_reservation(
        &mut self,
        from: QueueCommandId,
        command: &Command,
        data: &mut Vec<u8>,
    ) -> Result<bool, Status> {
        let moves = self.reservation_data_length(command)?;
        if self.needs_host_identifier() && matches!(self.host, HostId::Anonymous(_)) {
            return Err(Status::HOST_IDENTIFIER_NOT_INITIALIZED);
        }
        let subsystem = self.subsystem.clone();
        let mut state = subsystem.lock_state();
        let nsid = command.nsid();
        self.attached_namespace(&state, nsid)?;
        state.check_reservation_access(self.config.cntlid, nsid, true)?;
        if let AdminDataTransfer::ToHost(len_bytes) = moves {
            let report = ReservationReport::parse(command)?;
            return self.build_reservation_report(&state, &report, len_bytes, data).map(|()| true);
        }
        let requester = ChangeRequester {
            cntlid: self.config.cntlid,
            reply: ReservationReplyTarget::Queue(from),
        };
        let kind = ChangeKind::Command(*command, core::mem::take(data));
        let (nqn, origin) = (self.nqn.clone(), self.origin.clone());
        let change = PendingChange { requester, host: self.host, nqn, origin, kind };
        let ended = subsystem.change_reservations(&mut state, nsid, change);
        subsystem.publish_and_notify(state);
        ended.map_or(Ok(false), |end| end.map(|()| true))
    }

    fn build_reservation_report(
        &self,
        state: &SubsystemState,
        report: &ReservationReport,
        len_bytes: u32,
        data: &mut Vec<u8>,
    ) -> Result<(), Status> {
        let record = self.attached_namespace(state, report.nsid)?;
        let reservations = &record.reservations;
        let is_short = |host| matches!(host, HostId::Short(_));
        let is_extended = |host| matches!(host, HostId::Extended(_));
        let mut hosts = reservations.registrants().map(|(host, _)| host).chain([self.host]);
        if hosts.any(|host| if report.eds { is_short(host) } else { is_extended(host) }) {
            return Err(Status::HOST_IDENTIFIER_INCONSISTENT_FORMAT);
        }
        let mut rows = report_entries(reservations, state);
        rows.sort_unstable_by_key(|row| row.cntlid);
        data.clear();
        if report.eds {
            append_extended_report(reservations, &rows, data)
        } else {
            append_report(reservations, &rows, data)
        }
        data.resize(len_bytes as usize, 0);
        Ok(())
    }
}

/// Adds Do Not Retry to a status, with two exceptions for which it makes no difference: Linux before 6.11
/// compares the whole status field.
pub(in crate::controller) fn with_dnr_unless_conflict(status: Status) -> Status {
    let bare = [Status::RESERVATION_CONFLICT, Status::HOST_IDENTIFIER_INCONSISTENT_FORMAT];
    if bare.iter().any(|&code| code.has_same_code_as(status)) {
        status
    } else {
        with_dnr_unless_retryable(status)
    }
}

/// Host of a command, and whether reservations of the namespace can persist.
#[derive(Clone, Copy)]
pub(super) struct RequestingHost<'a> {
    pub(super) host: HostId,
    pub(super) nqn: Option<&'a HostNqn>,
    pub(super) origin: Option<&'a OriginRegistrantLimit>,
    pub(super) can_persist: bool,
}

/// Applies a reservation command.
pub(super) fn apply_command(
    reservations: &mut Reservations,
    requester: RequestingHost<'_>,
    command: &Command,
    data: &[u8],
) -> Result<ReservationChangeEffects, Status> {
    match IoOpcode::from_u8(command.opcode()) {
        Some(IoOpcode::ReservationRegister) => {
            let command = ReservationRegister::parse(command)?;
            apply_register(reservations, requester, &command, data)
        }
        Some(IoOpcode::ReservationAcquire) => {
            apply_acquire(reservations, requester.host, &ReservationAcquire::parse(command)?, data)
        }
        Some(IoOpcode::ReservationRelease) => {
            apply_release(reservations, requester.host, &ReservationRelease::parse(command)?, data)
        }
        _ => Err(Status::INVALID_OPCODE),
    }
}

/// Executes Reservation Register. Where persistence is not supported (RESCAP.PTPLS is clear), CPTPL has
/// no effect: Linux sets it in every registration, whatever a namespace supports.
fn apply_register(
    reservations: &mut Reservations,
    RequestingHost { host, nqn, origin, can_persist }: RequestingHost<'_>,
    command: &ReservationRegister,
    data: &[u8],
) -> Result<ReservationChangeEffects, Status> {
    let keys = RegisterKeys::parse(data).map_err(|_| Status::INTERNAL_ERROR)?;
    let current = (!command.iekey).then_some(keys.crkey());
    let persists = match command.cptpl {
        ChangePersistence::None => None,
        ChangePersistence::Clear => Some(false),
        ChangePersistence::Persist => can_persist.then_some(true),
        ChangePersistence::Reserved(_) => return Err(Status::INVALID_FIELD),
    };
    let effects = match command.rrega {
        RegisterAction::Register => {
            origin.map_or(Ok(()), |origin| reservations.check_origin_limit(host, origin))?;
            let effects = reservations.register(host, nqn, keys.nrkey());
            if let (Ok(_), Some(origin)) = (&effects, origin) {
                reservations.set_origin(host, origin);
            }
            effects
        }
        RegisterAction::Unregister => reservations.unregister(host, current),
        RegisterAction::Replace => reservations.replace_key(host, current, keys.nrkey()),
        RegisterAction::Reserved(_) => Err(Status::INVALID_FIELD),
    }?;
    if let Some(persists) = persists {
        reservations.set_persists_through_power_loss(persists);
    }
    Ok(effects)
}

fn apply_acquire(
    reservations: &mut Reservations,
    host: HostId,
    command: &ReservationAcquire,
    data: &[u8],
) -> Result<ReservationChangeEffects, Status> {
    let keys = AcquireKeys::parse(data).map_err(|_| Status::INTERNAL_ERROR)?;
    let kind = parse_reservation_type(command.rtype)?;
    // Acquire must not ignore the key (Base 2.1 §7.5, IEKEY).
    if command.iekey {
        return Err(Status::INVALID_FIELD);
    }
    let (current, victim) = (keys.crkey(), keys.prkey());
    match command.racqa {
        AcquireAction::Acquire => reservations.acquire(host, current, kind),
        AcquireAction::Preempt => reservations.preempt(host, current, victim, kind, false),
        AcquireAction::PreemptAndAbort => reservations.preempt(host, current, victim, kind, true),
        AcquireAction::Reserved(_) => Err(Status::INVALID_FIELD),
    }
}

fn apply_release(
    reservations: &mut Reservations,
    host: HostId,
    command: &ReservationRelease,
    data: &[u8],
) -> Result<ReservationChangeEffects, Status> {
    let current = ReleaseKey::parse(data).map_err(|_| Status::INTERNAL_ERROR)?.crkey();
    // Release must not ignore the key (Base 2.1 §7.7, IEKEY).
    if command.iekey {
        return Err(Status::INVALID_FIELD);
    }
    match command.rrela {
        ReleaseAction::Release => reservations.release_and_unregister(
            host,
            current,
            parse_reservation_type(command.rtype)?,
        ),
        ReleaseAction::Clear => reservations.clear(host, current),
        ReleaseAction::Reserved(_) => Err(Status::INVALID_FIELD),
    }
}

fn parse_reservation_type(rtype: ReservationType) -> Result<ReservationKind, Status> {
    ReservationKind::from_code(rtype.code()).ok_or(Status::INVALID_FIELD)
}

/// Entry of a report: a registrant and one of its controllers.
struct ReportEntry {
    cntlid: u16,
    host: HostId,
    key: u64,
    is_holder: bool,
}

/// Entries of all registrants and their controllers; FFFFh for a registrant without a controller.
fn report_entries(reservations: &Reservations, state: &SubsystemState) -> Vec<ReportEntry> {
    let mut rows = Vec::new();
    for (host, key) in reservations.registrants() {
        let is_holder = reservations.is_holder(host);
        let controllers = state.controllers.iter().filter(|(_, entry)| entry.host == host);
        let before = rows.len();
        rows.extend(controllers.map(|(&cntlid, _)| ReportEntry { cntlid, host, key, is_holder }));
        if rows.len() == before {
            rows.push(ReportEntry { cntlid: u16::MAX, host, key, is_holder });
        }
    }
    rows
}

fn active_reservation_type(reservations: &Reservations) -> ReservationType {
    let code = reservations.active_reservation().map_or(0, |held| held.kind as u8);
    ReservationType::from_code(code)
}

fn append_report(reservations: &Reservations, rows: &[ReportEntry], data: &mut Vec<u8>) {
    let count = u16::try_from(rows.len()).unwrap_or(u16::MAX);
    let header = ReservationStatus::zeroed().with(|header| {
        header
            .generation(reservations.generation())
            .rtype(active_reservation_type(reservations))
            .regstrnt(count)
            .ptpls(reservations.persists_through_power_loss().into())
    });
    data.extend(header.as_bytes());
    for row in rows {
        let id = if let HostId::Short(id) = row.host { id } else { 0 };
        let entry = Registrant::zeroed()
            .with(|entry| entry.cntlid(row.cntlid).holds(row.is_holder).hostid(id).rkey(row.key));
        data.extend(entry.as_bytes());
    }
}

fn append_extended_report(reservations: &Reservations, rows: &[ReportEntry], data: &mut Vec<u8>) {
    let count = u16::try_from(rows.len()).unwrap_or(u16::MAX);
    let header = ReservationStatusExtended::zeroed().with(|header| {
        header
            .generation(reservations.generation())
            .rtype(active_reservation_type(reservations))
            .regstrnt(count)
            .ptpls(reservations.persists_through_power_loss().into())
    });
    data.extend(header.as_bytes());
    for row in rows {
        let id = if let HostId::Extended(id) = row.host { id.to_le_bytes() } else { [0; 16] };
        let entry = RegistrantExtended::zeroed()
            .with(|entry| entry.cntlid(row.cntlid).holds(row.is_holder).hostid(id).rkey(row.key));
        data.extend(entry.as_bytes());
    }
}
