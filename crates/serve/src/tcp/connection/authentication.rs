//! Authentication Send and Receive on a connection, before there is a queue and later (Base 2.2 §6.1,
//! §6.2).

use tenmil_base::{Instant, Memory, SecureChannel};
use tenmil_nvme_auth::{
    Concatenation, ControllerConfig, SECURITY_PROTOCOL, SECURITY_PROTOCOL_SPECIFIC,
};
use tenmil_wire::fabrics::{AuthenticationReceive, AuthenticationSend, Connect, ConnectData};
use tenmil_wire::opcode::FabricsType;
use tenmil_wire::{AdminOpcode, Command, Completion, Status, TypedCommand, nqn};

use super::{ConnectionRole, TargetConnection};
use crate::tcp::audit::{AuthenticationAudit, ConnectionAudit, RefusalReason};
use crate::tcp::authentication::{
    AUTHENTICATION_TIMEOUT, AUTHENTICATION_TIMEOUT_CROWDED, AuthenticationAction,
    AuthenticationProof, QueueAuthentication,
};
use crate::tcp::buffer_pool::OWN_BYTES;
use crate::tcp::command_table::DataDirection;
use crate::tcp::connect_validation::{AuthenticationDemand, ConnectError, ProvedConnect};
use crate::tcp::event::{DisconnectReason, TargetEvent};
use crate::tcp::security::{ConnectingQueue, SecurityState};
use crate::tcp::service::peer_address_without_port;

/// Connect that was accepted, of a host that has not authenticated. Nothing of the subsystem belongs to
/// it yet.
#[derive(Debug)]
pub(super) struct UnauthenticatedQueue {
    pub(super) connect: Connect,
    pub(super) data: ConnectData,
    pub(super) cntlid: u16,
}

/// Host and subsystem of a queue, for its authentication.
struct QueueNames {
    host_nqn: String,
    subsystem_nqn: String,
    qid: u16,
}

impl TargetConnection {
    /// Waits for the host to authenticate.
    pub(super) fn await_authentication(
        &mut self,
        now: Instant,
        (connect, data): (Connect, ConnectData),
        demand: AuthenticationDemand,
    ) -> Result<(), ConnectError> {
        let AuthenticationDemand { cntlid, config } = demand;
        let mut authentication = QueueAuthentication::new(
            config,
            self.service.authentication_context(),
            peer_address_without_port(&self.peer),
            &self.handle,
        )
        .map_err(|error| ConnectError::new(Status::INTERNAL_ERROR, error.to_string()))?;
        let timeout = match self.admitted.is_crowded() {
            true => AUTHENTICATION_TIMEOUT_CROWDED,
            false => AUTHENTICATION_TIMEOUT,
        };
        authentication.set_deadline(now.after(timeout));
        self.authentication = Some(Box::new(authentication));
        let queue = UnauthenticatedQueue { connect, data, cntlid };
        self.role = ConnectionRole::AwaitingAuthentication(Box::new(queue));
        Ok(())
    }

    /// Handles a command of a host that must authenticate first: any but Authentication Send and Receive
    /// is rejected.
    #[cold]
    pub(super) fn start_unauthenticated(&mut self, now: Instant, tag: u16) {
        let is_open = self.pending_connect.is_none() && !self.ends_sent;
        if !is_open || !self.try_authentication_command(now, tag) {
            let status = Status::AUTHENTICATION_REQUIRED.with_dnr();
            self.commands.complete_with(&mut self.end, tag, 0, Completion::new(0, status));
        }
    }

    /// Executes Authentication Send or Receive. Returns false if the command is another one, or the host
    /// has no secret.
    #[cold]
    pub(super) fn try_authentication_command(&mut self, now: Instant, tag: u16) -> bool {
        let command = *self.commands.command_of_tag(tag);
        if command.opcode() != AdminOpcode::FabricsCommands.code() {
            return false;
        }
        let kind = FabricsType::from_u8(command.nsid().to_le_bytes()[0]);
        let is_send = match kind {
            Some(FabricsType::AuthenticationSend) => true,
            Some(FabricsType::AuthenticationReceive) => false,
            _ => return false,
        };
        if !self.prepare_authentication() {
            return false;
        }
        let action = match is_send {
            true => self.authentication_send(now, tag, &command),
            false => self.authentication_receive(tag, &command),
        };
        let action =
            action.unwrap_or_else(|status| AuthenticationAction::Complete(status.with_dnr()));
        self.apply_authentication_action(now, tag, action);
        self.poll_authentication(now);
        self.publish_exchange();
        true
    }

    /// Tells the association whether an authentication of its queue is in progress, which delays the
    /// effect of a removed secret.
    fn publish_exchange(&self) {
        let is_in_progress = self.authentication.as_ref().is_some_and(|one| one.is_in_progress());
        match &self.role {
            ConnectionRole::Admin(admin) => {
                admin.association().set_authenticating(0, is_in_progress);
            }
            ConnectionRole::Io(io) => io.association().set_authenticating(io.qid(), is_in_progress),
            ConnectionRole::AwaitingConnect
            | ConnectionRole::AwaitingAuthentication(_)
            | ConnectionRole::Discovery(_)
            | ConnectionRole::Closed => {}
        }
    }

    /// Creates the authentication of the queue, or updates its secrets. Returns false if the host has
    /// none.
    fn prepare_authentication(&mut self) -> bool {
        if matches!(self.role, ConnectionRole::AwaitingAuthentication(_)) {
            return self.authentication.is_some();
        }
        let is_in_progress = self.authentication.as_ref().is_some_and(|one| one.is_in_progress());
        if is_in_progress {
            return true;
        }
        let Some(config) = self.authentication_config() else { return false };
        match &mut self.authentication {
            Some(authentication) => authentication.refresh_config(config).is_ok(),
            None => {
                let authentication = QueueAuthentication::new(
                    config,
                    self.service.authentication_context(),
                    peer_address_without_port(&self.peer),
                    &self.handle,
                );
                self.authentication = authentication.ok().map(Box::new);
                self.authentication.is_some()
            }
        }
    }

    /// Configuration of a further authentication of a connected queue.
    fn authentication_config(&self) -> Option<ControllerConfig> {
        let QueueNames { host_nqn, subsystem_nqn, qid } = self.queue_names()?;
        let queue = ConnectingQueue {
            now: self.worked_at,
            host_nqn: &host_nqn,
            subsystem_nqn: &subsystem_nqn,
            qid,
            peer: &self.peer,
            channel: self.secure_channel(),
            accepts_tls: self.service.port_security(self.port).accepts_tls(),
        };
        match &self.role {
            ConnectionRole::Admin(admin) => {
                let export = admin.association().export();
                export.with_security(|security| security.controller_config(&queue, true))
            }
            ConnectionRole::Io(io) => {
                let export = io.association().export();
                export.with_security(|security| security.controller_config(&queue, true))
            }
            ConnectionRole::Discovery(_) => self
                .service
                .with_discovery_security(|security| security.controller_config(&queue, true)),
            ConnectionRole::AwaitingConnect
            | ConnectionRole::AwaitingAuthentication(_)
            | ConnectionRole::Closed => None,
        }
    }

    /// Names of the queue as its Connect gave them.
    fn queue_names(&self) -> Option<QueueNames> {
        let info = self.handle.lock_info();
        let queue = info.queue.as_ref()?;
        Some(QueueNames {
            host_nqn: queue.host.clone(),
            subsystem_nqn: queue.subsystem.clone(),
            qid: queue.qid,
        })
    }

    /// Secure channel of the connection.
    pub(super) fn secure_channel(&self) -> Option<&SecureChannel> {
        self.stream.as_ref().and_then(|stream| stream.secure_channel())
    }

    /// Executes Authentication Send.
    fn authentication_send(
        &mut self,
        now: Instant,
        tag: u16,
        command: &Command,
    ) -> Result<AuthenticationAction, Status> {
        let AuthenticationSend { spsp0, spsp1, secp, tl } = AuthenticationSend::parse(command)?;
        check_protocol(secp, (spsp0, spsp1), tl)?;
        if self.commands.data_direction_and_len(tag) != (DataDirection::FromHost, tl) {
            return Err(Status::DATA_SGL_LENGTH_INVALID);
        }
        let mut message = vec![0; tl as usize];
        let segment = self.commands.data_segment(tag, tl).ok_or(Status::INTERNAL_ERROR)?;
        let loaded = self.commands.buffer_pool().regions().load(segment, &mut message);
        loaded.map_err(|_| Status::INTERNAL_ERROR)?;
        let authentication = self.authentication.as_mut().ok_or(Status::INTERNAL_ERROR)?;
        Ok(authentication.handle_send(now, &message))
    }

    /// Executes Authentication Receive.
    fn authentication_receive(
        &mut self,
        tag: u16,
        command: &Command,
    ) -> Result<AuthenticationAction, Status> {
        let AuthenticationReceive { spsp0, spsp1, secp, al } =
            AuthenticationReceive::parse(command)?;
        check_protocol(secp, (spsp0, spsp1), al)?;
        let (direction, len_bytes) = self.commands.data_direction_and_len(tag);
        if direction != DataDirection::ToHost || len_bytes < al {
            return Err(Status::DATA_SGL_LENGTH_INVALID);
        }
        let authentication = self.authentication.as_mut().ok_or(Status::INTERNAL_ERROR)?;
        Ok(authentication.handle_receive(tag, al as usize))
    }

    fn apply_authentication_action(
        &mut self,
        now: Instant,
        tag: u16,
        action: AuthenticationAction,
    ) {
        match action {
            AuthenticationAction::Complete(status) => {
                self.complete_authentication_command(tag, status, &[]);
            }
            AuthenticationAction::Transfer(message) => {
                self.complete_authentication_command(tag, Status::SUCCESS, &message);
            }
            AuthenticationAction::Hold => {}
            AuthenticationAction::Authenticated { message, proof } => {
                self.handle_authenticated(now, tag, message, *proof);
            }
            AuthenticationAction::Fail { message, failure } => {
                self.complete_authentication_command(tag, Status::SUCCESS, &message);
                self.end_unauthenticated(now, failure.to_string());
            }
        }
    }

    /// Completes Authentication Send or Receive; the message of a Receive is padded with zeros.
    pub(super) fn complete_authentication_command(
        &mut self,
        tag: u16,
        status: Status,
        message: &[u8],
    ) {
        let (mut status, mut len_bytes) = (status, 0);
        let (direction, capacity) = self.commands.data_direction_and_len(tag);
        if direction == DataDirection::ToHost && status.is_success() {
            let allocated = AuthenticationReceive::parse(self.commands.command_of_tag(tag))
                .map_or(0, |it| it.al);
            let mut bytes = message.to_vec();
            bytes.resize(allocated.min(capacity) as usize, 0);
            len_bytes = allocated.min(capacity);
            let segment = self.commands.data_segment(tag, len_bytes);
            let regions = self.commands.buffer_pool().regions();
            let is_stored = segment.is_some_and(|segment| regions.store(segment, &bytes).is_ok());
            if !is_stored {
                (status, len_bytes) = (Status::INTERNAL_ERROR, 0);
            }
        }
        self.commands.complete_with(&mut self.end, tag, len_bytes, Completion::new(0, status));
    }

    /// Handles a completed authentication: creates the queue, if there is none yet.
    fn handle_authenticated(
        &mut self,
        now: Instant,
        tag: u16,
        message: Vec<u8>,
        proof: AuthenticationProof,
    ) {
        if let ConnectionRole::AwaitingAuthentication(queue) = &self.role {
            let proved = ProvedConnect { cntlid: queue.cntlid, proof };
            return self.connect_authenticated(now, tag, message, proved);
        }
        self.connect_by = Instant::NEVER;
        if !self.is_valid_secret(&proof) {
            let status = Status::AUTHENTICATION_REQUIRED.with_dnr();
            self.complete_authentication_command(tag, status, &[]);
            let why = "the secret by which the host has authenticated was removed";
            return self.end_unauthenticated(now, why.to_owned());
        }
        self.record_generated_psk(now, &proof);
        let secret = proof.secret.clone();
        match &mut self.role {
            ConnectionRole::Admin(admin) => admin.association().set_secret_of_all(&secret),
            ConnectionRole::Io(io) => {
                let qid = io.qid();
                io.association().set_secret(qid, secret);
            }
            ConnectionRole::Discovery(discovery) => discovery.set_secret(secret),
            ConnectionRole::AwaitingConnect
            | ConnectionRole::AwaitingAuthentication(_)
            | ConnectionRole::Closed => {}
        }
        let audit = self.audit(Some(&proof));
        self.handle.lock_info().authentication.clone_from(&audit.authentication);
        self.service.emit(TargetEvent::Authenticated(Box::new(audit)));
        self.complete_authentication_command(tag, Status::SUCCESS, &message);
    }

    /// Whether the secret by which the host of a connected queue has authenticated is still there: it may
    /// have been removed during the exchange.
    fn is_valid_secret(&self, proof: &AuthenticationProof) -> bool {
        let is_valid =
            |host_nqn: &str, security: &SecurityState| security.has_secret(host_nqn, &proof.secret);
        match &self.role {
            ConnectionRole::Admin(admin) => {
                let association = admin.association();
                association.export().with_security(|it| is_valid(&association.host.nqn, it))
            }
            ConnectionRole::Io(io) => {
                let association = io.association();
                association.export().with_security(|it| is_valid(&association.host.nqn, it))
            }
            ConnectionRole::Discovery(discovery) => {
                self.service.with_discovery_security(|it| is_valid(discovery.host(), it))
            }
            ConnectionRole::AwaitingConnect
            | ConnectionRole::AwaitingAuthentication(_)
            | ConnectionRole::Closed => false,
        }
    }

    /// Makes the key usable that an authentication has generated.
    pub(super) fn record_generated_psk(&mut self, now: Instant, proof: &AuthenticationProof) {
        let AuthenticationProof { outcome, secret } = proof;
        if outcome.concatenation == Concatenation::None {
            return;
        }
        let Some(QueueNames { host_nqn, subsystem_nqn, .. }) = self.queue_names() else { return };
        let replaced = match outcome.concatenation {
            Concatenation::ReplaceTlsPsk => {
                self.secure_channel().and_then(|channel| channel.psk_identity.clone())
            }
            Concatenation::None | Concatenation::NewTlsPsk => None,
        };
        let names = (host_nqn.as_str(), subsystem_nqn.as_str());
        let insert = |psks: &mut crate::tcp::security::GeneratedPsks| {
            psks.insert(now, names, outcome, secret.clone(), replaced.as_deref())
        };
        match &self.role {
            ConnectionRole::Admin(admin) => {
                admin.association().export().with_generated_psks(insert);
            }
            ConnectionRole::Discovery(_) => {
                self.service.with_discovery_psks(insert);
            }
            ConnectionRole::AwaitingConnect
            | ConnectionRole::AwaitingAuthentication(_)
            | ConnectionRole::Io(_)
            | ConnectionRole::Closed => {}
        }
    }

    /// Ends the connection once the failure message has been sent.
    fn end_unauthenticated(&mut self, now: Instant, why: String) {
        self.ends_sent = true;
        self.end_reason = Some(DisconnectReason::AuthenticationFailed(why.clone()));
        let audit = self.audit(None);
        self.service.emit_refusal(now, audit, RefusalReason::AuthenticationFailed, why);
    }

    /// What is known about the connection, and what its host has proved.
    pub(super) fn audit(&self, proof: Option<&AuthenticationProof>) -> ConnectionAudit {
        let mut audit = ConnectionAudit::of_peer(Some(self.id), &self.peer, self.port);
        audit.secure_channel = self.secure_channel().cloned();
        if let ConnectionRole::AwaitingAuthentication(queue) = &self.role {
            let (host, subsystem) = (queue.data.hostnqn(), queue.data.subnqn());
            let name =
                |field: &[u8; 256]| nqn::parse_nqn_field(field).unwrap_or_default().to_owned();
            (audit.host, audit.subsystem) = (name(&host.0), name(&subsystem.0));
            (audit.queue, audit.cntlid) = (Some(queue.connect.qid), Some(queue.cntlid));
        } else if let Some(queue) = &self.handle.lock_info().queue {
            (audit.host, audit.subsystem) = (queue.host.clone(), queue.subsystem.clone());
            (audit.queue, audit.cntlid) = (Some(queue.qid), Some(queue.cntlid));
        }
        self.name_keys(&mut audit, proof);
        audit
    }

    /// Adds the keys of an audit, by the names that they have now.
    pub(super) fn name_keys(
        &self,
        audit: &mut ConnectionAudit,
        proof: Option<&AuthenticationProof>,
    ) {
        let host_nqn = audit.host.clone();
        let identity = audit.secure_channel.as_ref().and_then(|one| one.psk_identity.clone());
        let named = self.service.with_security_of(&audit.subsystem, |security| {
            let tls_key =
                identity.and_then(|identity| security.tls_key_names(self.worked_at, &identity));
            let of_proof = |proof| AuthenticationAudit::of_proof(proof, &host_nqn, security);
            (tls_key, proof.map(of_proof))
        });
        (audit.tls_key, audit.authentication) = named.unwrap_or_default();
    }

    /// Continues an authentication whose job has ended, if the connection was woken.
    #[inline]
    pub(super) fn poll_authentication_if(
        &mut self,
        now: Instant,
        is_wakeup_pending: bool,
    ) -> usize {
        match is_wakeup_pending && self.authentication.is_some() {
            true => self.poll_authentication(now),
            false => 0,
        }
    }

    /// Continues an authentication whose job has ended, and sets the time of the next check. Returns the
    /// amount of work.
    #[cold]
    pub(super) fn poll_authentication(&mut self, now: Instant) -> usize {
        let Some(authentication) = &mut self.authentication else { return 0 };
        let receive = authentication.take_ready_receive();
        if let Some(tag) = receive.filter(|tag| self.commands.is_executing(*tag)) {
            let command = *self.commands.command_of_tag(tag);
            let action = self.authentication_receive(tag, &command);
            let action =
                action.unwrap_or_else(|status| AuthenticationAction::Complete(status.with_dnr()));
            self.apply_authentication_action(now, tag, action);
            self.publish_exchange();
        }
        if let Some(authentication) = &self.authentication
            && self.pending_connect.is_none()
        {
            self.connect_by = authentication.wake_at(now);
        }
        usize::from(receive.is_some())
    }

    /// Handles the time of a check of an authentication. Returns false if there is none.
    #[cold]
    pub(super) fn check_authentication(&mut self, now: Instant) -> bool {
        let Some(authentication) = &self.authentication else { return false };
        if let Some(reason) = self.end_reason.take() {
            // The host does not read the failure message.
            self.start_closing(now, reason);
            return true;
        }
        if authentication.is_expired(now) {
            let (audit, reason) = (self.audit(None), RefusalReason::AuthenticationTimeout);
            let why = "it has not completed the authentication in time".to_owned();
            self.service.emit_refusal(now, audit, reason, why);
            self.start_closing(now, DisconnectReason::Timeout("authenticate"));
            return true;
        }
        self.poll_authentication(now);
        true
    }
}

/// Checks the fields that Authentication Send and Receive have in common.
fn check_protocol(secp: u8, spsp: (u8, u8), len_bytes: u32) -> Result<(), Status> {
    let specific = SECURITY_PROTOCOL_SPECIFIC;
    let is_valid = (secp, spsp) == (SECURITY_PROTOCOL, (specific, specific))
        && (1..=OWN_BYTES).contains(&len_bytes);
    if is_valid { Ok(()) } else { Err(Status::INVALID_FIELD) }
}
