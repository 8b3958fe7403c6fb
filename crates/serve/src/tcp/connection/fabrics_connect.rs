//! Fabrics Connect on a new connection.

use std::sync::Arc;

use tenmil_base::{Instant, Memory, Span};
use tenmil_nvme_auth::ConcatenationPolicy;
use tenmil_nvme_tcp::QueueKind;
use tenmil_wire::fabrics::{Connect, ConnectData, Connected};
use tenmil_wire::opcode::FabricsType;
use tenmil_wire::{AdminOpcode, Completion, Status, nqn};

use super::{ConnectionRole, TargetConnection};
use crate::tcp::admin_queue::AdminQueue;
use crate::tcp::association::Association;
use crate::tcp::audit::ConnectionAudit;
use crate::tcp::buffer_pool::{HostClass, HostMemory};
use crate::tcp::command_table::{BufferAccess, DataDirection};
use crate::tcp::connect_validation::{
    AuthenticationDemand, ConnectError, ConnectRequest, DiscoveryGrant, GrantedConnect,
    ProvedConnect, connect_error_of_queue, parse_connect,
};
use crate::tcp::connection_handle::QueueInfo;
use crate::tcp::discovery::DiscoveryController;
use crate::tcp::event::{DisconnectReason, TargetEvent};
use crate::tcp::io_queue::IoQueue;

/// Connect that is retried: its queue still exists and may be about to end.
#[derive(Clone, Debug)]
pub(super) struct PendingConnect {
    /// Command that is completed with it: Connect, or the last one of an authentication.
    tag: u16,
    until: Instant,
    /// Deadline for the host to connect.
    connect_by: Instant,
    /// What the host has proved, and the message of the authentication's last command.
    proved: Option<Box<(ProvedConnect, Vec<u8>)>>,
}

/// Host to which a connection counts.
struct CountedHost {
    name: String,
    class: HostClass,
    bytes_max: Option<u64>,
}

impl CountedHost {
    fn as_host_memory(&self) -> HostMemory<'_> {
        HostMemory { name: &self.name, class: self.class, bytes_max: self.bytes_max }
    }
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
        let connect_by = self.connect_by;
        self.try_connect(now, PendingConnect { tag, until, connect_by, proved: None });
    }

    /// Creates the queue of a host that has authenticated. The last command of the authentication, `tag`,
    /// is completed with the result.
    #[cold]
    pub(super) fn connect_authenticated(
        &mut self,
        now: Instant,
        tag: u16,
        message: Vec<u8>,
        proved: ProvedConnect,
    ) {
        let until = now.after(self.service.limits().quiesce);
        let (connect_by, proved) = (Instant::NEVER, Some(Box::new((proved, message))));
        self.try_connect(now, PendingConnect { tag, until, connect_by, proved });
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
        let created = match &pending_connect.proved {
            None => self
                .connect_of_command(tag)
                .and_then(|request| self.create_queue(now, request, None)),
            Some(proved) => match &self.role {
                ConnectionRole::AwaitingAuthentication(queue) => {
                    let request = (queue.connect, queue.data.clone());
                    self.create_queue(now, request, Some(&proved.0))
                }
                // The connection is closing.
                _ => return,
            },
        };
        if created.as_ref().is_err_and(|error| error.is_transient) && now < pending_connect.until {
            self.pending_connect = Some(pending_connect);
            self.connect_by = now.after(POLL_INTERVAL);
            return;
        }
        self.connect_by = match (&created, &self.authentication) {
            (Ok(_), Some(authentication)) => authentication.wake_at(now),
            (Ok(_), None) => Instant::NEVER,
            (Err(_), _) => pending_connect.connect_by,
        };
        match &created {
            Ok(connected) if !connected.authentication_required() => {
                let proof = pending_connect.proved.as_ref().map(|proved| &proved.0.proof);
                let audit = self.audit(proof);
                let mut info = self.handle.lock_info();
                info.authentication.clone_from(&audit.authentication);
                info.tls_key.clone_from(&audit.tls_key);
                info.cipher_suite =
                    audit.secure_channel.as_ref().map(|channel| channel.cipher_suite);
                drop(info);
                self.service.emit(TargetEvent::Accepted(Box::new(audit)));
            }
            Ok(_) => {}
            Err(error) => {
                let proof = pending_connect.proved.as_ref().map(|proved| &proved.0.proof);
                let audit = match &self.role {
                    ConnectionRole::AwaitingConnect => self.audit_of_command(tag),
                    _ => self.audit(proof),
                };
                self.service.emit_refusal(now, audit, error.reason, error.why.clone());
            }
        }
        match (created, pending_connect.proved) {
            (Ok(connected), None) => {
                let completion = Completion::new(0, Status::SUCCESS).with_dw0(connected.0);
                self.commands.complete_with(&mut self.end, tag, 0, completion);
            }
            (Err(ConnectError { status, result, .. }), None) => {
                let completion = Completion::new(0, status).with_dw0(result);
                self.commands.complete_with(&mut self.end, tag, 0, completion);
            }
            (Ok(_), Some(proved)) => {
                let (ProvedConnect { proof, .. }, message) = *proved;
                self.record_generated_psk(now, &proof);
                self.complete_authentication_command(tag, Status::SUCCESS, &message);
            }
            (Err(ConnectError { status, why, .. }), Some(_)) => {
                self.complete_authentication_command(tag, status, &[]);
                self.ends_sent = true;
                self.end_reason = Some(DisconnectReason::Refused(why));
            }
        }
    }

    /// What is known about the connection of a rejected Connect.
    fn audit_of_command(&self, tag: u16) -> ConnectionAudit {
        let audit = self.audit(None);
        let Ok((connect, data)) = self.connect_of_command(tag) else { return audit };
        let (host, subsystem) = (data.hostnqn(), data.subnqn());
        let name = |field: &[u8; 256]| nqn::parse_nqn_field(field).unwrap_or_default().to_owned();
        let mut audit = ConnectionAudit {
            host: name(&host.0),
            subsystem: name(&subsystem.0),
            queue: Some(connect.qid),
            ..audit
        };
        self.name_keys(&mut audit, None);
        audit
    }

    /// Connect command and its data.
    fn connect_of_command(&self, tag: u16) -> Result<(Connect, ConnectData), ConnectError> {
        let command = self.commands.command_of_tag(tag);
        // Before Connect has created the queue, any other command is out of sequence.
        let is_fabrics = command.opcode() == AdminOpcode::FabricsCommands.code();
        let kind = FabricsType::from_u8(command.nsid().to_le_bytes()[0]);
        if !is_fabrics || kind != Some(FabricsType::Connect) {
            let why = "its first command is not Connect";
            return Err(ConnectError::new(Status::COMMAND_SEQUENCE_ERROR, why));
        }
        let connect = parse_connect(command)?;
        let mut data = ConnectData::zeroed();
        let len = u32::try_from(ConnectData::BYTES).unwrap_or(u32::MAX);
        if self.commands.data_direction_and_len(tag) != (DataDirection::FromHost, len) {
            let why = format!(
                "its Connect has {} bytes of data, expected {len}",
                self.commands.data_direction_and_len(tag).1
            );
            return Err(ConnectError::new(Status::DATA_SGL_LENGTH_INVALID, why));
        }
        let mut bytes = [0; ConnectData::BYTES];
        if let Some(segment) = self.commands.data_segment(tag, len) {
            let loaded = self.commands.buffer_pool().regions().load(segment, &mut bytes);
            loaded.map_err(|_| {
                let why = "its data lie outside the buffer pool";
                ConnectError::new(Status::INTERNAL_ERROR, why)
            })?;
            data = ConnectData::from_bytes(&bytes);
        }
        Ok((connect, data))
    }

    /// Creates the queue of a Connect, or waits for the host to authenticate. Returns dword 0 of the
    /// completion of Connect.
    fn create_queue(
        &mut self,
        now: Instant,
        (connect, data): (Connect, ConnectData),
        proved: Option<&ProvedConnect>,
    ) -> Result<Connected, ConnectError> {
        let (service, port, peer) = (&self.service, self.port, self.peer.as_str());
        let request = ConnectRequest {
            service,
            port,
            peer,
            now,
            connect,
            data: &data,
            channel: self.secure_channel(),
            accepts_tls: service.port_security(port).accepts_tls(),
            proved,
        };
        let grant = match request.grant_or_reject()? {
            GrantedConnect::Authenticate(demand) => {
                return self.demand_authentication(now, (connect, data), *demand);
            }
            grant => grant,
        };
        // Only now is the host identified to which the connection counts.
        let memory = self.count_in_category(&grant)?;
        let entries = connect.sqsize + 1;
        let flow_control = !connect.disable_sq_flow_control;
        let cntlid = match grant {
            GrantedConnect::Admin(association) => {
                self.end.set_queue_kind(QueueKind::Admin { entries, flow_control });
                self.create_admin_queue(association, &memory)
            }
            GrantedConnect::Discovery(grant) => {
                self.end.set_queue_kind(QueueKind::Admin { entries, flow_control });
                self.create_discovery_controller(now, (connect, &data), grant, proved)
            }
            GrantedConnect::Io { association, qid, credentials } => {
                let cntlid = association.cntlid;
                let depth = self.service.limits().queue_entries;
                // The last step that may fail: it registers the queue with the association.
                let io = IoQueue::new(
                    (&self.service, &self.handle),
                    association,
                    &self.peer,
                    (qid, depth),
                    &self.commands,
                    now,
                );
                let mut io = io.map_err(connect_error_of_queue)?;
                if !self.handle.lock_info().data_digest {
                    io.allow_in_place_reads();
                }
                io.association().set_credentials(qid, credentials, &self.peer);
                io.association().end_unless_permitted();
                let waker = Arc::clone(&self.handle);
                io.queue_link().set_waker(Arc::new(move || waker.wake_connection()));
                self.end.set_queue_kind(QueueKind::Io { entries, flow_control });
                self.publish_queue_info(io.association(), qid);
                self.commands.set_buffer_access(BufferAccess::Pool, memory.as_host_memory());
                // After the queue was registered, so that no later change is missed.
                io.fetch_slow_io(&mut self.commands);
                io.fetch_limiters(&mut self.commands);
                self.role = ConnectionRole::Io(Box::new(io));
                cntlid
            }
            GrantedConnect::Authenticate(demand) => demand.cntlid,
        };
        Ok(Connected(0).with(|connected| connected.cntlid(cntlid)))
    }

    /// Accepts a Connect whose host must authenticate before there is a queue.
    fn demand_authentication(
        &mut self,
        now: Instant,
        (connect, data): (Connect, ConnectData),
        demand: AuthenticationDemand,
    ) -> Result<Connected, ConnectError> {
        let (entries, flow_control) = (connect.sqsize + 1, !connect.disable_sq_flow_control);
        let cntlid = demand.cntlid;
        let generates_key = demand.config.policy.concatenation == ConcatenationPolicy::Required
            && !demand.config.secure_channel
            && connect.qid == 0;
        self.await_authentication(now, (connect, data), demand)?;
        self.end.set_queue_kind(match connect.qid {
            0 => QueueKind::Admin { entries, flow_control },
            _ => QueueKind::Io { entries, flow_control },
        });
        Ok(Connected(0).with(|connected| {
            connected
                .cntlid(cntlid)
                .authentication_required(true)
                .secure_channel_required(generates_key)
        }))
    }

    fn create_admin_queue(&mut self, association: Arc<Association>, memory: &CountedHost) -> u16 {
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
                "connection {}: {peer} connected without a host NQN to {nqn}, which any host may use",
                self.id
            )));
        }
        self.publish_queue_info(&association, 0);
        self.commands.set_buffer_access(BufferAccess::OwnFirst, memory.as_host_memory());
        let admin = AdminQueue::new(&self.service, association);
        self.role = ConnectionRole::Admin(Box::new(admin));
        cntlid
    }

    fn create_discovery_controller(
        &mut self,
        now: Instant,
        (connect, data): (Connect, &ConnectData),
        grant: DiscoveryGrant,
        proved: Option<&ProvedConnect>,
    ) -> u16 {
        let cntlid = match proved {
            Some(proved) => proved.cntlid,
            None => self.service.next_discovery_cntlid(),
        };
        self.service.add_discovery_connection(&self.handle);
        let field = data.subnqn();
        let subsystem = nqn::parse_nqn_field(&field.0).unwrap_or(nqn::DISCOVERY);
        let tls_nqn = self.secure_channel().map(|_| subsystem.to_owned());
        self.handle.lock_info().queue = Some(QueueInfo {
            host: grant.host.clone(),
            subsystem: subsystem.to_owned(),
            cntlid,
            qid: 0,
        });
        let local_address = self.stream.as_ref().and_then(|stream| stream.local_address());
        let addresses = (self.peer.clone(), self.port, local_address);
        let identity = (cntlid, connect.kato);
        let discovery = DiscoveryController::new(
            self.service.clone(),
            (grant, tls_nqn),
            addresses,
            identity,
            now,
        );
        self.role = ConnectionRole::Discovery(Box::new(discovery));
        // The security may have changed before the connection was registered.
        self.handle.wake_connection();
        cntlid
    }

    /// Counts the connection in its category, unless a limit is reached. Returns to whom its memory is
    /// charged.
    fn count_in_category(&mut self, grant: &GrantedConnect) -> Result<CountedHost, ConnectError> {
        let lists_hosts = self.service.has_access_list();
        let (mut is_listed, mut name, mut bytes_max) = (false, String::new(), None);
        let counted = match grant {
            GrantedConnect::Authenticate(_) => Ok(()),
            GrantedConnect::Discovery(_) => self.admitted.count_as_discovery(lists_hosts),
            GrantedConnect::Admin(association) | GrantedConnect::Io { association, .. } => {
                let nqn = &association.host.nqn;
                let is_proved = association.admin_credentials().prove_host();
                is_listed = association.export().has_host_list() || is_proved;
                // A host that has proved its NQN is not counted with one that only claims it.
                name = if is_proved { format!("{nqn} authenticated") } else { nqn.clone() };
                let rights = association.export().rights_of_host(nqn);
                bytes_max = rights.memory_bytes_max;
                let category = (is_listed, rights.connections_max);
                self.admitted.count_as_host_queue(&name, category, lists_hosts)
            }
        };
        counted.map_err(|why| ConnectError::of_limit(&why.to_string()))?;
        let class = HostClass::new(is_listed, lists_hosts);
        Ok(CountedHost { name, class, bytes_max })
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
