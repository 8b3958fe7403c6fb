//! Fabrics Connect: checks and results (Base 2.1 §6.3).

use std::sync::Arc;

use tenmil_base::{Instant, SecureChannel, Span};
use tenmil_nvme_auth::{Concatenation, ControllerConfig};
use tenmil_nvme_controller::controller::HostIdentifierInUse;
use tenmil_nvme_controller::transport::fabrics::{CreateQueueError, FabricsTransport};
use tenmil_wire::fabrics::{CNTLID_DYNAMIC, Connect, ConnectData, InvalidParameter};
use tenmil_wire::{Command, Status, TypedCommand, nqn};

use super::association::{AdminQueueProof, Association, HostIds};
use super::audit::RefusalReason;
use super::authentication::AuthenticationProof;
use super::security::{ConnectingQueue, Credentials, Refusal, Requirement, SecurityState};
use super::service::{Service, peer_address_without_port};
use super::subsystem_export::{ControllerError, RequestedCntlid};

/// Resource granted to a Connect.
#[derive(Debug)]
pub(super) enum GrantedConnect {
    /// New controller.
    Admin(Arc<Association>),
    /// I/O queue of an existing controller.
    Io { association: Arc<Association>, qid: u16, credentials: Credentials },
    /// Discovery controller.
    Discovery(DiscoveryGrant),
    /// Nothing until the host has authenticated.
    Authenticate(Box<AuthenticationDemand>),
}

/// Discovery controller that a host may have.
#[derive(Debug)]
pub(super) struct DiscoveryGrant {
    pub(super) host: String,
    pub(super) credentials: Credentials,
    /// The host has generated a key for a TLS connection, which this one is not.
    pub(super) awaits_secure_channel: bool,
}

/// Authentication that a Connect needs.
#[derive(Debug)]
pub(super) struct AuthenticationDemand {
    /// Identifier of the controller, which is not created yet, or of the I/O queue's.
    pub(super) cntlid: u16,
    pub(super) config: ControllerConfig,
}

/// What a host has proved after Connect, and what it was promised.
#[derive(Clone, Debug)]
pub(super) struct ProvedConnect {
    pub(super) cntlid: u16,
    pub(super) proof: AuthenticationProof,
}

/// Rejection of a Connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ConnectError {
    pub(super) status: Status,
    /// Dword 0 of the completion.
    pub(super) result: u32,
    /// Message for the log.
    pub(super) why: String,
    /// Identifier for programs.
    pub(super) reason: RefusalReason,
    /// Whether a retry may succeed soon: the conflicting resource belongs to the same host and may
    /// be released.
    pub(super) is_transient: bool,
}

/// Field offsets in the command and in its data (Base 2.1 §6.3), for error completions.
const RECFMT: u16 = 40;
const QID: u16 = 42;
const SQSIZE: u16 = 44;
const KATO: u16 = 48;
const HOSTID: u16 = 0;
const CNTLID: u16 = 16;
const SUBNQN: u16 = 256;
const HOSTNQN: u16 = 512;

/// Connect command with its data and the connection it arrived on.
pub(super) struct ConnectRequest<'a> {
    pub(super) service: &'a Service,
    pub(super) port: u16,
    /// Peer address as reported by the stream.
    pub(super) peer: &'a str,
    pub(super) now: Instant,
    pub(super) connect: Connect,
    pub(super) data: &'a ConnectData,
    /// Secure channel of the connection, and whether its port accepts such connections.
    pub(super) channel: Option<&'a SecureChannel>,
    pub(super) accepts_tls: bool,
    /// Authentication that the host has completed for this Connect.
    pub(super) proved: Option<&'a ProvedConnect>,
}

impl ConnectError {
    pub(super) fn new(status: Status, why: impl Into<String>) -> Self {
        Self {
            status: status.with_dnr(),
            result: 0,
            why: why.into(),
            reason: RefusalReason::InvalidCommand,
            is_transient: false,
        }
    }

    fn with_reason(self, reason: RefusalReason) -> Self {
        Self { reason, ..self }
    }

    /// Rejects a host that has not proved what is required.
    fn of_refusal(refusal: Refusal) -> Self {
        let result = InvalidParameter(0).with(|dword| dword.ipo(HOSTNQN).in_data(true)).0;
        let error = Self::new(Status::CONNECT_INVALID_HOST, refusal.text);
        Self { result, reason: refusal.reason, ..error }
    }

    /// Rejects for lack of a resource; the host may retry.
    pub(super) fn controller_busy(why: &str) -> Self {
        let (status, reason) = (Status::CONNECT_CONTROLLER_BUSY, RefusalReason::Unavailable);
        Self { status, reason, ..Self::new(status, why) }
    }

    /// Rejects because a limit of connections is reached; the host may retry.
    pub(super) fn of_limit(why: &str) -> Self {
        Self { reason: RefusalReason::Limit, ..Self::controller_busy(why) }
    }

    /// Rejects an invalid field of the command.
    fn invalid_command_field(offset: u16, why: impl Into<String>) -> Self {
        let result = InvalidParameter(0).with(|dword| dword.ipo(offset)).0;
        Self { result, ..Self::new(InvalidParameter::STATUS, why) }
    }

    /// Rejects an invalid field of the data.
    fn invalid_data_field(offset: u16, why: impl Into<String>) -> Self {
        let result = InvalidParameter(0).with(|dword| dword.ipo(offset).in_data(true)).0;
        Self { result, ..Self::new(InvalidParameter::STATUS, why) }
    }
}

/// Parses a Connect command.
pub(super) fn parse_connect(command: &Command) -> Result<Connect, ConnectError> {
    let connect = Connect::parse(command)
        .map_err(|status| ConnectError::new(status, "its Connect command is invalid"))?;
    if connect.recfmt != 0 {
        let why = format!("RECFMT is {}, expected 0", connect.recfmt);
        let result = InvalidParameter(0).with(|dword| dword.ipo(RECFMT)).0;
        return Err(ConnectError {
            result,
            ..ConnectError::new(Status::CONNECT_INCOMPATIBLE_FORMAT, why)
        });
    }
    Ok(connect)
}

impl ConnectRequest<'_> {
    /// Grants or rejects the Connect.
    pub(super) fn grant_or_reject(&self) -> Result<GrantedConnect, ConnectError> {
        let limit = self.service.limits().queue_entries;
        let entries = u32::from(self.connect.sqsize) + 1;
        if entries < 2 || entries > limit.into() {
            let why = format!("its queue has {entries} entries, expected 2 to {limit}");
            return Err(ConnectError::invalid_command_field(SQSIZE, why));
        }
        let host = self.host_ids()?;
        let longest = self.service.limits().admission_limits().keep_alive_max;
        if self.connect.qid == 0 && Span::from_ms(self.connect.kato.into()) > longest {
            let why = format!(
                "its keep-alive time-out is {} ms, expected at most {longest}",
                self.connect.kato
            );
            return Err(ConnectError::invalid_command_field(KATO, why));
        }
        let field = self.data.subnqn();
        if nqn::parse_nqn_field(&field.0).is_ok_and(|name| self.service.is_discovery_nqn(name)) {
            return self.grant_discovery_controller(host);
        }
        if self.connect.qid == 0 {
            self.grant_admin_queue(host)
        } else {
            self.grant_io_queue(&host)
        }
    }

    /// Checks what the host has proved. Returns its credentials, or the authentication that it still
    /// needs.
    fn check_security(
        &self,
        host_nqn: &str,
        security: &SecurityState,
    ) -> Result<Result<Credentials, Box<ControllerConfig>>, ConnectError> {
        let field = self.data.subnqn();
        let subsystem_nqn = nqn::parse_nqn_field(&field.0).unwrap_or_default();
        let queue = ConnectingQueue {
            now: self.now,
            host_nqn,
            subsystem_nqn,
            qid: self.connect.qid,
            peer: self.peer,
            channel: self.channel,
            accepts_tls: self.accepts_tls,
        };
        let Requirement { mut credentials, authentication } =
            security.requirement(&queue).map_err(ConnectError::of_refusal)?;
        let Some(config) = authentication else { return Ok(Ok(credentials)) };
        let Some(ProvedConnect { proof, .. }) = self.proved else { return Ok(Err(config)) };
        // The secret may have been removed during the exchange.
        if !config.host_secrets.contains(&proof.secret) {
            let text = "the secret by which the host has authenticated was removed";
            return Err(ConnectError::of_refusal(Refusal {
                reason: RefusalReason::AuthenticationFailed,
                text: text.to_owned(),
            }));
        }
        credentials.set_secret(proof.secret.clone());
        Ok(Ok(credentials))
    }

    /// Whether the host has generated a key for a TLS connection, which this connection is not.
    fn awaits_secure_channel(&self) -> bool {
        self.proved
            .is_some_and(|proved| proved.proof.outcome.concatenation == Concatenation::NewTlsPsk)
    }

    /// Host identity of the request. An empty HOSTNQN is a host that no list can contain; it may
    /// use what any host may use.
    fn host_ids(&self) -> Result<HostIds, ConnectError> {
        let field = self.data.hostnqn();
        let name = match field.0.first() {
            Some(0) => "",
            _ => nqn::parse_host_nqn_field(&field.0)
                .map_err(|why| ConnectError::invalid_data_field(HOSTNQN, format!("host {why}")))?,
        };
        // Same byte order as in feature 81h and in reservation reports.
        Ok(HostIds { nqn: name.to_owned(), identifier: u128::from_le_bytes(self.data.hostid()) })
    }

    fn find_export(&self) -> Result<Arc<super::subsystem_export::SubsystemExport>, ConnectError> {
        let field = self.data.subnqn();
        let name = nqn::parse_nqn_field(&field.0);
        let name = name
            .map_err(|why| ConnectError::invalid_data_field(SUBNQN, format!("subsystem {why}")))?;
        self.service.find_export(name, self.port).ok_or_else(|| {
            ConnectError::invalid_data_field(
                SUBNQN,
                format!("it requests {name}, which is not exported at this port"),
            )
            .with_reason(RefusalReason::NoSuchSubsystem)
        })
    }

    /// Grants a discovery controller: to any host, without I/O queues (Base 2.1 §3.1.3.3).
    fn grant_discovery_controller(&self, host: HostIds) -> Result<GrantedConnect, ConnectError> {
        if self.connect.qid != 0 {
            let why = format!(
                "it requests queue {} of a discovery controller, expected 0",
                self.connect.qid
            );
            return Err(ConnectError::invalid_command_field(QID, why));
        }
        if self.data.cntlid() != CNTLID_DYNAMIC {
            let why = format!("it requests discovery controller {:#x}", self.data.cntlid());
            return Err(ConnectError::invalid_data_field(
                CNTLID,
                format!("{why}, expected any, 0xffff"),
            ));
        }
        let checked = self
            .service
            .with_discovery_security(|security| self.check_security(&host.nqn, security))?;
        Ok(match checked {
            Ok(credentials) => GrantedConnect::Discovery(DiscoveryGrant {
                host: host.nqn,
                credentials,
                awaits_secure_channel: self.awaits_secure_channel(),
            }),
            Err(config) => {
                let cntlid = self.service.next_discovery_cntlid();
                GrantedConnect::Authenticate(Box::new(AuthenticationDemand {
                    cntlid,
                    config: *config,
                }))
            }
        })
    }

    fn grant_admin_queue(&self, host: HostIds) -> Result<GrantedConnect, ConnectError> {
        let export = self.find_export()?;
        let requested = self.data.cntlid();
        let limits = self.service.limits();
        if !export.allows_host(&host.nqn) {
            return Err(connect_error_of_controller(ControllerError::Host, &host));
        }
        let checked = export.with_security(|security| self.check_security(&host.nqn, security))?;
        let credentials = match checked {
            Ok(credentials) => credentials,
            Err(config) => {
                let cntlid = export.propose_cntlid(requested);
                let cntlid = cntlid.map_err(|why| connect_error_of_controller(why, &host))?;
                return Ok(GrantedConnect::Authenticate(Box::new(AuthenticationDemand {
                    cntlid,
                    config: *config,
                })));
            }
        };
        let requested = match self.proved {
            Some(proved) => RequestedCntlid::Proposed(proved.cntlid),
            None => RequestedCntlid::OfHost(requested),
        };
        let opened =
            export.create_controller(self.now, requested, (self.port, &host, self.peer), limits);
        let mut controller = opened.map_err(|why| connect_error_of_controller(why, &host))?;
        let cntlid = controller.configuration().cntlid;
        let kato = controller.set_keep_alive(self.now, self.connect.kato);
        let transport = FabricsTransport::new(controller, self.now);
        let admin = AdminQueueProof {
            credentials,
            peer: self.peer.to_owned(),
            awaits_secure_channel: self.awaits_secure_channel(),
        };
        let association =
            Association::new(Arc::clone(&export), cntlid, (host, self.port), admin, transport);
        kato.map_err(|_| {
            ConnectError::invalid_command_field(KATO, "its keep-alive time-out is too long")
        })?;
        export
            .add_association(&association)
            .map_err(|why| connect_error_of_controller(why, &association.host))?;
        Ok(GrantedConnect::Admin(association))
    }

    fn grant_io_queue(&self, host: &HostIds) -> Result<GrantedConnect, ConnectError> {
        let export = self.find_export()?;
        let (cntlid, qid) = (self.data.cntlid(), self.connect.qid);
        let association = export.association_of_cntlid(cntlid).ok_or_else(|| {
            ConnectError::invalid_data_field(
                CNTLID,
                format!("it has no controller {cntlid} of {}", export.nqn()),
            )
        })?;
        association.host.check_same_host_for_queue(host, cntlid)?;
        let checked = export.with_security(|security| self.check_security(&host.nqn, security))?;
        let credentials = match checked {
            Ok(credentials) => credentials,
            Err(config) => {
                return Ok(GrantedConnect::Authenticate(Box::new(AuthenticationDemand {
                    cntlid,
                    config: *config,
                })));
            }
        };
        self.check_same_channel(&association, &credentials, host)?;
        let may_create = association.lock_transport().check_create_queue(qid);
        may_create.map_err(connect_error_of_queue)?;
        Ok(GrantedConnect::Io { association, qid, credentials })
    }

    /// Checks that an I/O queue has proved as much as the admin queue of its controller.
    fn check_same_channel(
        &self,
        association: &Association,
        credentials: &Credentials,
        host: &HostIds,
    ) -> Result<(), ConnectError> {
        let cntlid = association.cntlid;
        let refuse = |reason, text: String| Err(ConnectError::of_refusal(Refusal { reason, text }));
        if association.awaits_secure_channel() {
            let text = format!(
                "controller {cntlid} has no I/O queues: its host has generated a TLS key, expected a \
                 TLS connection with it"
            );
            return refuse(RefusalReason::SecureChannelRequired, text);
        }
        let admin = association.admin_credentials();
        if admin.is_secure() && !credentials.is_secure() {
            let text = format!(
                "its connection is plaintext, expected TLS as for the admin queue of controller \
                 {cntlid}"
            );
            return refuse(RefusalReason::SecureChannelRequired, text);
        }
        // Without a proof of its own, the queue must come from where the admin queue came from, and know
        // the host identifier.
        let is_unproved = admin.prove_host() && !credentials.prove_host();
        let is_same = association.host.is_same_host(host)
            && is_same_address(association.admin_peer(), self.peer);
        if is_unproved && !is_same {
            let text = format!(
                "its queue is not authenticated, expected the address and the host identifier of \
                 the admin queue of controller {cntlid}"
            );
            return refuse(RefusalReason::IdentityMismatch, text);
        }
        Ok(())
    }
}

/// Whether two peers have the same address.
fn is_same_address(peer: &str, other: &str) -> bool {
    peer_address_without_port(peer) == peer_address_without_port(other)
}

impl HostIds {
    /// Checks that an I/O queue belongs to the host of the controller: same NQN, and the same host
    /// identifier or none (Base 2.1 §6.3).
    fn check_same_host_for_queue(&self, other: &Self, cntlid: u16) -> Result<(), ConnectError> {
        if self.nqn != other.nqn {
            let why = format!(
                "controller {cntlid} belongs to {}, not to {}",
                self.display_name(),
                other.display_name()
            );
            return Err(ConnectError::invalid_data_field(HOSTNQN, why));
        }
        if other.identifier == self.identifier || other.identifier == 0 {
            return Ok(());
        }
        let expected = match self.identifier {
            0 => "0".to_owned(),
            _ => format!("{} or 0", self.display_identifier()),
        };
        let found = other.display_identifier();
        let why = format!(
            "its host identifier is {found}, expected {expected} as for the admin queue of controller {cntlid}"
        );
        Err(ConnectError::invalid_data_field(HOSTID, why))
    }
}

fn connect_error_of_controller(why: ControllerError, host: &HostIds) -> ConnectError {
    match why {
        ControllerError::Host => {
            let why = format!("{} is not among the hosts that may", host.display_name());
            let result = InvalidParameter(0).with(|dword| dword.ipo(HOSTNQN).in_data(true)).0;
            let reason = RefusalReason::HostNotAllowed;
            ConnectError { result, reason, ..ConnectError::new(Status::CONNECT_INVALID_HOST, why) }
        }
        ControllerError::OtherIdentifier(connected) => {
            let text = format!(
                "{} gives host identifier {}, expected {} as for its other controllers",
                host.display_name(),
                host.display_identifier(),
                HostIds { identifier: connected, nqn: String::new() }.display_identifier()
            );
            // Without Do Not Retry: the other controllers may end.
            let error = ConnectError::invalid_data_field(HOSTID, text);
            let (status, reason) = (InvalidParameter::STATUS, RefusalReason::HostIdentifier);
            ConnectError { status, reason, ..error }
        }
        ControllerError::Identifier(requested) => ConnectError::invalid_data_field(
            CNTLID,
            format!(
                "it requests controller {requested:#x}, expected an existing one, or 0xffff for any"
            ),
        ),
        ControllerError::HostInUse(why) => connect_error_of_hostid_in_use(&why, host),
        ControllerError::Busy => ConnectError::controller_busy("all controllers are in use"),
        ControllerError::NoMember => ConnectError {
            is_transient: true,
            ..ConnectError::controller_busy("the gateway is no member of its group at present")
        },
        ControllerError::Unstopped(cntlid) => ConnectError {
            is_transient: true,
            ..ConnectError::controller_busy(&format!(
                "controller {cntlid} has ended, but its queues have not stopped"
            ))
        },
        ControllerError::Trouble(text) => {
            ConnectError::new(Status::INTERNAL_ERROR, text).with_reason(RefusalReason::Internal)
        }
    }
}

/// Rejects a host identifier that another host uses. If that host is only connected, not
/// registered, the conflict may go away.
fn connect_error_of_hostid_in_use(why: &HostIdentifierInUse, host: &HostIds) -> ConnectError {
    let text = format!(
        "{} gives host identifier {}, which {why}, expected an identifier of its own \
         (`nvme connect --hostid`)",
        host.display_name(),
        host.display_identifier()
    );
    let refused =
        ConnectError::invalid_data_field(HOSTID, text).with_reason(RefusalReason::HostIdentifier);
    match why.registered_in {
        Some(_) => refused,
        None => ConnectError { status: InvalidParameter::STATUS, ..refused },
    }
}

/// Translates a queue creation error into a rejection.
pub(super) fn connect_error_of_queue(why: CreateQueueError) -> ConnectError {
    match why {
        CreateQueueError::NotEnabled => ConnectError::invalid_command_field(
            QID,
            "its controller is not enabled, expected CC.EN 1, IOSQES 6 and IOCQES 4",
        ),
        CreateQueueError::Identifier { qid, granted } => ConnectError::invalid_command_field(
            QID,
            format!("it requests queue {qid}, expected 1 to {granted}"),
        ),
        CreateQueueError::Exists { qid, is_ending } => {
            connect_error_of_existing_queue(qid, is_ending)
        }
    }
}

/// Rejects a queue that exists already (Base 2.1 §3.3.2.3). A host that closes a connection may
/// reopen the same queue at once, and its Connect can arrive before the end of the old connection
/// is noticed; so the rejection is transient.
fn connect_error_of_existing_queue(qid: u16, is_ending: bool) -> ConnectError {
    let status = Status::COMMAND_SEQUENCE_ERROR;
    let (status, which) = match is_ending {
        true => (status, "whose commands have not ended"),
        false => (status.with_dnr(), "which exists"),
    };
    let why = format!("it requests queue {qid}, {which}");
    let reason = RefusalReason::Unavailable;
    ConnectError { status, reason, is_transient: true, ..ConnectError::new(status, why) }
}
