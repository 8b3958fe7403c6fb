//! Fabrics Connect on a new connection.

use std::sync::Arc;

use tenmil_base::{Instant, Memory, Span};
use tenmil_nvme_tcp::QueueKind;
use tenmil_wire::fabrics::{ConnectData, Connected};
use tenmil_wire::opcode::FabricsType;
use tenmil_wire::{AdminOpcode, Command, Completion, Status, nqn};

use super::{ConnectionRole, TargetConnection};
use crate::tcp::admin_queue::AdminQueue;
use crate::tcp::association::Association;
use crate::tcp::buffer_pool::HostClass;
use crate::tcp::command_table::{BufferAccess, DataDirection};
use crate::tcp::connect_validation::{
    ConnectError, ConnectRequest, GrantedConnect, connect_error_of_queue, parse_connect,
};
use crate::tcp::connection_handle::QueueInfo;
use crate::tcp::discovery::DiscoveryController;
use crate::tcp::event::TargetEvent;
use crate::tcp::io_queue::IoQueue;

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
    pub(super) fn handle_connect(&mut self, now: Instant, tag: u16) {
        if self.pending_connect.is_some() {
            let status = Status::COMMAND_SEQUENCE_ERROR.with_dnr();
            self.commands.complete_with(&mut self.end, tag, 0, Completion::new(0, status));
            return;
        }
        let until = now.after(self.service.limits().quiesce);
        self.try_connect(now, PendingConnect { tag, until, connect_by: self.connect_by });
    }

    /// Retries a pending Connect. Returns false if there is none.
    #[cold]
    pub(super) fn retry_pending_connect(&mut self, now: Instant) -> bool {
        let Some(pending_connect) = self.pending_connect.take() else { return false };
        self.try_connect(now, pending_connect);
        true
    }

    fn try_connect(&mut self, now: Instant, pending_connect: PendingConnect) {
        let tag = pending_connect.tag;
        let command = *self.commands.command_of_tag(tag);
        let completion = match self.create_queue(now, tag, &command) {
            Err(ConnectError { is_transient: true, .. }) if now < pending_connect.until => {
                self.pending_connect = Some(pending_connect);
                self.connect_by = now.after(POLL_INTERVAL);
                return;
            }
            Ok(cntlid) => {
                self.connect_by = Instant::NEVER;
                let result = Connected(0).with(|connected| connected.cntlid(cntlid)).0;
                Completion::new(0, Status::SUCCESS).with_dw0(result)
            }
            Err(ConnectError { status, result, why, .. }) => {
                self.connect_by = pending_connect.connect_by;
                let (connection, peer) = (self.id, self.peer.clone());
                self.service.emit(TargetEvent::Rejected { connection, peer, why });
                Completion::new(0, status).with_dw0(result)
            }
        };
        self.commands.complete_with(&mut self.end, tag, 0, completion);
    }

    fn create_queue(
        &mut self,
        now: Instant,
        tag: u16,
        command: &Command,
    ) -> Result<u16, ConnectError> {
        let refuse = |status: Status, why: &str| ConnectError {
            status: status.with_dnr(),
            result: 0,
            why: why.to_owned(),
            is_transient: false,
        };
        // Before Connect has created the queue, any other command is out of sequence.
        let is_fabrics = command.opcode() == AdminOpcode::FabricsCommands.code();
        let kind = FabricsType::from_u8(command.nsid().to_le_bytes()[0]);
        if !is_fabrics || kind != Some(FabricsType::Connect) {
            let why = "its first command is not Connect";
            return Err(refuse(Status::COMMAND_SEQUENCE_ERROR, why));
        }
        let connect = parse_connect(command)?;
        let mut data = ConnectData::zeroed();
        let len = u32::try_from(ConnectData::BYTES).unwrap_or(u32::MAX);
        if self.commands.data_direction_and_len(tag) != (DataDirection::FromHost, len) {
            let why = format!(
                "its Connect has {} bytes of data, expected {len}",
                self.commands.data_direction_and_len(tag).1
            );
            return Err(refuse(Status::DATA_SGL_LENGTH_INVALID, &why));
        }
        let mut bytes = [0; ConnectData::BYTES];
        if let Some(segment) = self.commands.data_segment(tag, len) {
            let loaded = self.commands.buffer_pool().regions().load(segment, &mut bytes);
            loaded.map_err(|_| {
                refuse(Status::INTERNAL_ERROR, "its data lie outside the buffer pool")
            })?;
            data = ConnectData::from_bytes(&bytes);
        }
        let (service, port, peer) = (&self.service, self.port, self.peer.as_str());
        let request = ConnectRequest { service, port, peer, now, connect, data: &data };
        let grant = request.grant_or_reject()?;
        // Only now is the host identified to which the connection counts.
        let host_class = self.count_in_category(&grant)?;
        let entries = connect.sqsize + 1;
        let flow_control = !connect.disable_sq_flow_control;
        match grant {
            GrantedConnect::Admin(association) => {
                self.end.set_queue_kind(QueueKind::Admin { entries, flow_control });
                // I/O queues of the association run on other threads and wake this connection.
                let waker = Arc::clone(&self.handle);
                association.lock_transport().set_waker(Arc::new(move || waker.wake_connection()));
                let cntlid = association.cntlid;
                self.service.emit(TargetEvent::Associated {
                    connection: self.id,
                    peer: self.peer.clone(),
                    host: association.host.nqn.clone(),
                    subsystem: association.export().nqn().to_owned(),
                    cntlid,
                });
                if association.host.nqn.is_empty() {
                    let (peer, nqn) = (&self.peer, association.export().nqn());
                    self.service.emit(TargetEvent::Notice(format!(
                        "connection {}: {peer} connected without a host NQN to {nqn}, which any host \
                         may use",
                        self.id
                    )));
                }
                self.publish_queue_info(&association, 0);
                self.commands
                    .set_buffer_access(BufferAccess::OwnFirst, (&association.host.nqn, host_class));
                self.role = ConnectionRole::Admin(Box::new(AdminQueue::new(
                    association,
                    self.service.limits(),
                )));
                Ok(cntlid)
            }
            GrantedConnect::Discovery(host) => {
                self.end.set_queue_kind(QueueKind::Admin { entries, flow_control });
                let cntlid = self.service.allocate_discovery_cntlid(&self.handle);
                self.handle.lock_info().queue = Some(QueueInfo {
                    host: host.clone(),
                    subsystem: nqn::DISCOVERY.to_owned(),
                    cntlid,
                    qid: 0,
                });
                let local_address = self.stream.as_ref().and_then(|stream| stream.local_address());
                let (port_and_address, identity) =
                    ((self.port, local_address), (cntlid, connect.kato));
                let discovery = DiscoveryController::new(
                    self.service.clone(),
                    host,
                    port_and_address,
                    identity,
                    now,
                );
                self.role = ConnectionRole::Discovery(Box::new(discovery));
                Ok(cntlid)
            }
            GrantedConnect::Io { association, qid } => {
                let cntlid = association.cntlid;
                let depth = self.service.limits().queue_entries;
                // The last step that may fail: it registers the queue with the association.
                let io =
                    IoQueue::new(&self.service, association, (qid, depth), &self.commands, now);
                let mut io = io.map_err(connect_error_of_queue)?;
                if !self.handle.lock_info().data_digest {
                    io.allow_in_place_reads();
                }
                let waker = Arc::clone(&self.handle);
                io.queue_link().set_waker(Arc::new(move || waker.wake_connection()));
                self.end.set_queue_kind(QueueKind::Io { entries, flow_control });
                self.publish_queue_info(io.association(), qid);
                self.commands.set_buffer_access(
                    BufferAccess::Pool,
                    (&io.association().host.nqn, host_class),
                );
                self.role = ConnectionRole::Io(Box::new(io));
                Ok(cntlid)
            }
        }
    }

    /// Counts the connection in its category, unless a limit is reached. Returns the memory class of its
    /// host.
    fn count_in_category(&mut self, grant: &GrantedConnect) -> Result<HostClass, ConnectError> {
        let lists_hosts = self.service.has_access_list();
        let mut is_listed = false;
        let counted = match grant {
            GrantedConnect::Discovery(_) => self.admitted.count_as_discovery(lists_hosts),
            GrantedConnect::Admin(association) | GrantedConnect::Io { association, .. } => {
                is_listed = association.export().has_host_list();
                self.admitted.count_as_host_queue(&association.host.nqn, is_listed, lists_hosts)
            }
        };
        counted.map_err(|why| ConnectError::controller_busy(&why.to_string()))?;
        Ok(HostClass::new(is_listed, lists_hosts))
    }

    /// Publishes the queue's identity.
    fn publish_queue_info(&self, association: &Association, qid: u16) {
        self.handle.lock_info().queue = Some(QueueInfo {
            host: association.host.nqn.clone(),
            subsystem: association.export().nqn().to_owned(),
            cntlid: association.cntlid,
            qid,
        });
    }
}
