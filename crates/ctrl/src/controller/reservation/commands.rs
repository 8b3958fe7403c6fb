//! The four reservation commands, which come through I/O queues and are decided here
//! (Base 2.1 §7.5 to §7.8).

use base::Instant;
use wire::io::reservation::{
    AcquireAction, AcquireKeys, ChangePersistence, RegisterAction, RegisterKeys, Registrant,
    RegistrantExtended, ReleaseAction, ReleaseKey, ReservationAcquire, ReservationRegister,
    ReservationRelease, ReservationReport, ReservationStatus, ReservationStatusExtended,
    ReservationType,
};
use wire::{Command, IoOpcode, Layout, Status, Typed};

use super::line::{Asker, Change, Reply, Wish};
use super::{Host, HostNqn, News, Reservations, Site};
use crate::controller::Controller;
use crate::controller::commands::settled;
use crate::controller::contract::{AdminData, AdminEnd, Decided, Origin};
use crate::controller::subsystem::State;
use crate::namespace::ReservationKind;

impl Controller {
    /// The data that goes with a reservation command, or why it is refused before any data moves.
    pub fn reservation_data(&self, command: &Command) -> Result<AdminData, Status> {
        if !self.subsystem.about().reservations {
            return Err(settled(Status::INVALID_OPCODE));
        }
        match IoOpcode::from_u8(command.opcode()) {
            Some(IoOpcode::ReservationRegister | IoOpcode::ReservationAcquire) => {
                Ok(AdminData::FromHost(16))
            }
            Some(IoOpcode::ReservationRelease) => Ok(AdminData::FromHost(8)),
            Some(IoOpcode::ReservationReport) => {
                let report = ReservationReport::parse(command)?;
                let len_bytes = (u64::from(report.numd) + 1) * 4;
                self.transfer(len_bytes).map(AdminData::ToHost).map_err(settled)
            }
            _ => Err(settled(Status::INVALID_OPCODE)),
        }
    }

    /// Carries out a reservation command. `data` holds what the host sent, or takes what it gets.
    /// Every queue of every controller sees the outcome in the picture it works from. `None` if it
    /// waits, for what it changes to be durable or for writes of hosts that it preempts: then it ends through
    /// [`next_decided`](Self::next_decided), unless its controller is reset or its queue
    /// [given up](Self::queue_gone).
    pub fn reservation(
        &mut self,
        now: Instant,
        from: Origin,
        command: &Command,
        data: &mut Vec<u8>,
    ) -> Option<AdminEnd> {
        self.io_command_seen(now);
        match self.reserve(from, command, data) {
            Ok(is_over) => is_over.then_some(AdminEnd::OK),
            Err(status) => Some(AdminEnd::refused(told(status))),
        }
    }

    /// The end of a reservation command that had to wait.
    pub fn next_decided(&mut self) -> Option<Decided> {
        self.decided.pop_front()
    }

    /// An I/O queue has gone: of its reservation commands those that have not begun never will, and
    /// nobody waits for the others.
    pub fn queue_gone(&mut self, queue: u16) {
        let is_of_it = |origin: &Origin| origin.queue == queue;
        let is_gone = |by: &Asker| matches!(&by.reply, Reply::Queue(origin) if is_of_it(origin));
        self.subsystem.lock().forget_askers(self.config.cntlid, is_gone);
        self.decided.retain(|decided| !is_of_it(&decided.from));
        self.preempting.retain(|preempting| !is_of_it(&preempting.from));
    }

    /// Whether it is over.
    fn reserve(
        &mut self,
        from: Origin,
        command: &Command,
        data: &mut Vec<u8>,
    ) -> Result<bool, Status> {
        let moves = self.reservation_data(command)?;
        if self.needs_host_identifier() && matches!(self.host, Host::Anonymous(_)) {
            return Err(Status::HOST_IDENTIFIER_NOT_INITIALIZED);
        }
        let subsystem = self.subsystem.clone();
        let mut state = subsystem.lock();
        let nsid = command.nsid();
        self.active(&state, nsid)?;
        state.may_reserve(self.config.cntlid, nsid, true)?;
        if let AdminData::ToHost(len_bytes) = moves {
            let report = ReservationReport::parse(command)?;
            return self.report(&state, &report, len_bytes, data).map(|()| true);
        }
        let by = Asker { cntlid: self.config.cntlid, reply: Reply::Queue(from) };
        let wish = Wish::Command(*command, core::mem::take(data));
        let (nqn, origin) = (self.nqn.clone(), self.origin.clone());
        let change = Change { by, host: self.host, nqn, origin, wish };
        let ended = subsystem.change_reservations(&mut state, nsid, change);
        subsystem.settle(state);
        ended.map_or(Ok(false), |end| end.map(|()| true))
    }

    fn report(
        &self,
        state: &State,
        report: &ReservationReport,
        len_bytes: u32,
        data: &mut Vec<u8>,
    ) -> Result<(), Status> {
        let record = self.active(state, report.nsid)?;
        let reservations = &record.reservations;
        let is_short = |host| matches!(host, Host::Short(_));
        let is_extended = |host| matches!(host, Host::Extended(_));
        let mut hosts = reservations.registrants().map(|(host, _)| host).chain([self.host]);
        if hosts.any(|host| if report.eds { is_short(host) } else { is_extended(host) }) {
            return Err(Status::HOST_IDENTIFIER_INCONSISTENT_FORMAT);
        }
        let mut rows = rows(reservations, state);
        rows.sort_by_key(|row| row.cntlid);
        data.clear();
        if report.eds {
            extended(reservations, &rows, data)
        } else {
            short(reservations, &rows, data)
        }
        data.resize(len_bytes as usize, 0);
        Ok(())
    }
}

/// A refusal as the host gets it. Two come without Do Not Retry, which changes nothing for whoever
/// reserves: Linux before 6.11 knows them by the whole of the status field.
pub(in crate::controller) fn told(status: Status) -> Status {
    let bare = [Status::RESERVATION_CONFLICT, Status::HOST_IDENTIFIER_INCONSISTENT_FORMAT];
    if bare.iter().any(|&code| code.is(status)) { status } else { settled(status) }
}

/// Whose command it is, and whether reservations can persist where it goes.
#[derive(Clone, Copy)]
pub(super) struct Requester<'a> {
    pub(super) host: Host,
    pub(super) nqn: Option<&'a HostNqn>,
    pub(super) origin: Option<&'a Site>,
    pub(super) can_persist: bool,
}

/// Carries out what changes something.
pub(super) fn change(
    reservations: &mut Reservations,
    by: Requester<'_>,
    command: &Command,
    data: &[u8],
) -> Result<News, Status> {
    match IoOpcode::from_u8(command.opcode()) {
        Some(IoOpcode::ReservationRegister) => {
            let command = ReservationRegister::parse(command)?;
            register(reservations, by, &command, data)
        }
        Some(IoOpcode::ReservationAcquire) => {
            acquire(reservations, by.host, &ReservationAcquire::parse(command)?, data)
        }
        Some(IoOpcode::ReservationRelease) => {
            release(reservations, by.host, &ReservationRelease::parse(command)?, data)
        }
        _ => Err(Status::INVALID_OPCODE),
    }
}

/// Where nothing persists (RESCAP.PTPLS is clear) a wish for it changes nothing: Linux adds it to
/// every registration, whatever a namespace can do.
fn register(
    reservations: &mut Reservations,
    Requester { host, nqn, origin, can_persist }: Requester<'_>,
    command: &ReservationRegister,
    data: &[u8],
) -> Result<News, Status> {
    let keys = RegisterKeys::parse(data).map_err(|_| Status::INTERNAL_ERROR)?;
    let current = (!command.iekey).then_some(keys.crkey());
    let persists = match command.cptpl {
        ChangePersistence::None => None,
        ChangePersistence::Clear => Some(false),
        ChangePersistence::Persist => can_persist.then_some(true),
        ChangePersistence::Reserved(_) => return Err(Status::INVALID_FIELD),
    };
    let news = match command.rrega {
        RegisterAction::Register => {
            origin.map_or(Ok(()), |origin| reservations.check_origin(host, origin))?;
            let news = reservations.register(host, nqn, keys.nrkey());
            if let (Ok(_), Some(origin)) = (&news, origin) {
                reservations.came_from(host, origin);
            }
            news
        }
        RegisterAction::Unregister => reservations.unregister(host, current),
        RegisterAction::Replace => reservations.replace(host, current, keys.nrkey()),
        RegisterAction::Reserved(_) => Err(Status::INVALID_FIELD),
    }?;
    if let Some(persists) = persists {
        reservations.set_persists(persists);
    }
    Ok(news)
}

fn acquire(
    reservations: &mut Reservations,
    host: Host,
    command: &ReservationAcquire,
    data: &[u8],
) -> Result<News, Status> {
    let keys = AcquireKeys::parse(data).map_err(|_| Status::INTERNAL_ERROR)?;
    let kind = kind_of(command.rtype)?;
    // An acquire that ignores the key is not allowed (Base 2.1 §7.5, IEKEY).
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

fn release(
    reservations: &mut Reservations,
    host: Host,
    command: &ReservationRelease,
    data: &[u8],
) -> Result<News, Status> {
    let current = ReleaseKey::parse(data).map_err(|_| Status::INTERNAL_ERROR)?.crkey();
    // A release that ignores the key is not allowed (Base 2.1 §7.7, IEKEY).
    if command.iekey {
        return Err(Status::INVALID_FIELD);
    }
    match command.rrela {
        ReleaseAction::Release => reservations.release(host, current, kind_of(command.rtype)?),
        ReleaseAction::Clear => reservations.clear(host, current),
        ReleaseAction::Reserved(_) => Err(Status::INVALID_FIELD),
    }
}

fn kind_of(rtype: ReservationType) -> Result<ReservationKind, Status> {
    ReservationKind::from_code(rtype.code()).ok_or(Status::INVALID_FIELD)
}

/// One line of a report: a controller of a registrant.
struct Row {
    cntlid: u16,
    host: Host,
    key: u64,
    is_holder: bool,
}

/// Each registrant's controllers; FFFFh for one that has none at the moment.
fn rows(reservations: &Reservations, state: &State) -> Vec<Row> {
    let mut rows = Vec::new();
    for (host, key) in reservations.registrants() {
        let is_holder = reservations.is_holder(host);
        let seats = state.seats.iter().filter(|(_, seat)| seat.host == host);
        let before = rows.len();
        rows.extend(seats.map(|(&cntlid, _)| Row { cntlid, host, key, is_holder }));
        if rows.len() == before {
            rows.push(Row { cntlid: u16::MAX, host, key, is_holder });
        }
    }
    rows
}

fn rtype_of(reservations: &Reservations) -> ReservationType {
    let code = reservations.held().map_or(0, |held| held.kind as u8);
    ReservationType::from_code(code)
}

fn short(reservations: &Reservations, rows: &[Row], data: &mut Vec<u8>) {
    let count = u16::try_from(rows.len()).unwrap_or(u16::MAX);
    let header = ReservationStatus::zeroed().with(|header| {
        header
            .generation(reservations.generation())
            .rtype(rtype_of(reservations))
            .regstrnt(count)
            .ptpls(reservations.persists().into())
    });
    data.extend(header.as_bytes());
    for row in rows {
        let id = if let Host::Short(id) = row.host { id } else { 0 };
        let entry = Registrant::zeroed()
            .with(|entry| entry.cntlid(row.cntlid).holds(row.is_holder).hostid(id).rkey(row.key));
        data.extend(entry.as_bytes());
    }
}

fn extended(reservations: &Reservations, rows: &[Row], data: &mut Vec<u8>) {
    let count = u16::try_from(rows.len()).unwrap_or(u16::MAX);
    let header = ReservationStatusExtended::zeroed().with(|header| {
        header
            .generation(reservations.generation())
            .rtype(rtype_of(reservations))
            .regstrnt(count)
            .ptpls(reservations.persists().into())
    });
    data.extend(header.as_bytes());
    for row in rows {
        let id = if let Host::Extended(id) = row.host { id.to_le_bytes() } else { [0; 16] };
        let entry = RegistrantExtended::zeroed()
            .with(|entry| entry.cntlid(row.cntlid).holds(row.is_holder).hostid(id).rkey(row.key));
        data.extend(entry.as_bytes());
    }
}
