//! Fabrics Connect on a new connection.

use std::sync::Arc;

use tenmil_base::{Instant, Memory, Span};
use tenmil_nvme_tcp::QueueKind;
use tenmil_wire::fabrics::{ConnectData, Connected};
use tenmil_wire::opcode::FabricsType;
use tenmil_wire::{AdminOpcode, Command, Completion, Status, nqn};

use super::{ConnectionRole, TargetConnection};
use crate::tcp::admin::Admin;
use crate::tcp::association::Association;
use crate::tcp::command_table::{BufferAccess, DataDirection};
use crate::tcp::connect::{ConnectError, ConnectGrant, ConnectRequest, no_queue, parse};
use crate::tcp::connection_handle::QueueInfo;
use crate::tcp::discovery::Discovery;
use crate::tcp::event::TargetEvent;
use crate::tcp::io::Io;
use crate::tcp::memory::Standing;

/// Connect that is retried: its queue still exists and may be about to end.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingConnect {
    tag: u16,
    until: Instant,
    /// Deadline for the host to connect.
    connect_by: Instant,
}

/// Interval between retries.
const POLL_INTERVAL: Span = Span::from_ms(1);

impl TargetConnection {
    /// Handles the first command of a connection.
    #[cold]
    pub(super) fn connect(&mut self, now: Instant, tag: u16) {
        if self.patient.is_some() {
            let status = Status::COMMAND_SEQUENCE_ERROR.with_dnr();
            self.rooms.finish(&mut self.end, tag, 0, Completion::new(0, status));
            return;
        }
        let until = now.after(self.service.limits().quiesce);
        self.try_connect(now, PendingConnect { tag, until, connect_by: self.connect_by });
    }

    /// Retries a pending Connect. Returns false if there is none.
    #[cold]
    pub(super) fn connect_again(&mut self, now: Instant) -> bool {
        let Some(patient) = self.patient.take() else { return false };
        self.try_connect(now, patient);
        true
    }

    fn try_connect(&mut self, now: Instant, patient: PendingConnect) {
        let tag = patient.tag;
        let command = *self.rooms.command(tag);
        let completion = match self.granted(now, tag, &command) {
            Err(ConnectError { is_transient: true, .. }) if now < patient.until => {
                self.patient = Some(patient);
                self.connect_by = now.after(POLL_INTERVAL);
                return;
            }
            Ok(cntlid) => {
                self.connect_by = Instant::NEVER;
                let result = Connected(0).with(|connected| connected.cntlid(cntlid)).0;
                Completion::new(0, Status::SUCCESS).with_dw0(result)
            }
            Err(ConnectError { status, result, why, .. }) => {
                self.connect_by = patient.connect_by;
                let (connection, peer) = (self.id, self.peer.clone());
                self.service.emit(TargetEvent::Refused { connection, peer, why });
                Completion::new(0, status).with_dw0(result)
            }
        };
        self.rooms.finish(&mut self.end, tag, 0, completion);
    }

    fn granted(&mut self, now: Instant, tag: u16, command: &Command) -> Result<u16, ConnectError> {
        let refuse = |status: Status, why: &str| ConnectError {
            status: status.with_dnr(),
            result: 0,
            why: why.to_owned(),
            is_transient: false,
        };
        let is_fabrics = command.opcode() == AdminOpcode::FabricsCommands.code();
        let kind = FabricsType::from_u8(command.nsid().to_le_bytes()[0]);
        if !is_fabrics || kind != Some(FabricsType::Connect) {
            let why = "its first command is not Connect";
            return Err(refuse(Status::COMMAND_SEQUENCE_ERROR, why));
        }
        let connect = parse(command)?;
        let mut data = ConnectData::zeroed();
        let len = u32::try_from(ConnectData::BYTES).unwrap_or(u32::MAX);
        if self.rooms.data(tag) != (DataDirection::FromHost, len) {
            let why =
                format!("its Connect has {} bytes of data, expected {len}", self.rooms.data(tag).1);
            return Err(refuse(Status::DATA_SGL_LENGTH_INVALID, &why));
        }
        let mut bytes = [0; ConnectData::BYTES];
        if let Some(segment) = self.rooms.front_of(tag, len) {
            let loaded = self.rooms.budget().regions().load(segment, &mut bytes);
            loaded.map_err(|_| refuse(Status::INTERNAL_ERROR, "its data lie nowhere"))?;
            data = ConnectData::from_bytes(&bytes);
        }
        let (service, port, peer) = (&self.service, self.port, self.peer.as_str());
        let asked = ConnectRequest { service, port, peer, now, connect, data: &data };
        let granted = asked.decide()?;
        let standing = self.count(&granted)?;
        let entries = connect.sqsize + 1;
        let flow_control = !connect.disable_sq_flow_control;
        match granted {
            ConnectGrant::Admin(association) => {
                self.end.set_queue_kind(QueueKind::Admin { entries, flow_control });
                let waker = Arc::clone(&self.handle);
                association.front().set_waker(Arc::new(move || waker.ring()));
                let cntlid = association.cntlid;
                self.service.emit(TargetEvent::Associated {
                    connection: self.id,
                    peer: self.peer.clone(),
                    host: association.host.nqn.clone(),
                    subsystem: association.offer().nqn().to_owned(),
                    cntlid,
                });
                if association.host.nqn.is_empty() {
                    let (peer, nqn) = (&self.peer, association.offer().nqn());
                    self.service.emit(TargetEvent::Notice(format!(
                        "connection {}: {peer} connected without a host NQN to {nqn}, which any host \
                         may use",
                        self.id
                    )));
                }
                self.show(&association, 0);
                self.rooms.admit(BufferAccess::OwnFirst, (&association.host.nqn, standing));
                self.role =
                    ConnectionRole::Admin(Box::new(Admin::new(association, self.service.limits())));
                Ok(cntlid)
            }
            ConnectGrant::Discovery(host) => {
                self.end.set_queue_kind(QueueKind::Admin { entries, flow_control });
                let cntlid = self.service.discover(&self.handle);
                self.handle.shown().queue = Some(QueueInfo {
                    host: host.clone(),
                    subsystem: nqn::DISCOVERY.to_owned(),
                    cntlid,
                    qid: 0,
                });
                let here = self.stream.as_ref().and_then(|stream| stream.local_address());
                let (came_by, known) = ((self.port, here), (cntlid, connect.kato));
                let discovery = Discovery::new(self.service.clone(), host, came_by, known, now);
                self.role = ConnectionRole::Discovery(Box::new(discovery));
                Ok(cntlid)
            }
            ConnectGrant::Io { association, qid } => {
                let cntlid = association.cntlid;
                let depth = self.service.limits().queue_entries;
                let io = Io::new(&self.service, association, (qid, depth), &self.rooms, now);
                let io = io.map_err(no_queue)?;
                let waker = Arc::clone(&self.handle);
                io.link().set_waker(Arc::new(move || waker.ring()));
                self.end.set_queue_kind(QueueKind::Io { entries, flow_control });
                self.show(io.association(), qid);
                self.rooms.admit(BufferAccess::Pool, (&io.association().host.nqn, standing));
                self.role = ConnectionRole::Io(Box::new(io));
                Ok(cntlid)
            }
        }
    }

    /// Counts the connection as what it asks to be, if there may be one more of that. What its host
    /// may have of the memory.
    fn count(&mut self, granted: &ConnectGrant) -> Result<Standing, ConnectError> {
        let names_hosts = self.service.names_hosts();
        let mut is_named = false;
        let counted = match granted {
            ConnectGrant::Discovery(_) => self.admitted.discovers(names_hosts),
            ConnectGrant::Admin(association) | ConnectGrant::Io { association, .. } => {
                is_named = association.offer().names_hosts();
                self.admitted.belongs_to(&association.host.nqn, is_named, names_hosts)
            }
        };
        counted.map_err(|why| ConnectError::busy(&why.to_string()))?;
        Ok(Standing::new(is_named, names_hosts))
    }

    /// Publishes the queue's identity.
    fn show(&self, association: &Association, qid: u16) {
        self.handle.shown().queue = Some(QueueInfo {
            host: association.host.nqn.clone(),
            subsystem: association.offer().nqn().to_owned(),
            cntlid: association.cntlid,
            qid,
        });
    }
}
