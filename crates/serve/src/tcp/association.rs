//! Association of a host and a controller, with the connections between them (Base 2.1 §1.5, §3.3).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_nvme_auth::ChapSecret;
use tenmil_nvme_controller::controller::{ControllerInstance, HostIdentity};
use tenmil_nvme_controller::transport::fabrics::{AssociationEndReason, FabricsTransport};
use tenmil_wire::admin::CrossControllerReset;

use super::security::{ConnectedQueue, Credentials, SecurityState};
use super::subsystem_export::SubsystemExport;

/// State that the connections of one host to one controller share. The association ends with its
/// last connection, and the controller with it.
pub(super) struct Association {
    pub(super) cntlid: u16,
    pub(super) host: HostIds,
    /// Port of the service that the host connected to.
    pub(super) port: u16,
    /// Instance of the controller under this identifier.
    instance: Option<ControllerInstance>,
    transport: Mutex<FabricsTransport>,
    /// Address of the peer of the admin queue.
    admin_peer: String,
    /// The host has generated a key for a TLS connection, which its admin connection is not.
    awaits_secure_channel: bool,
    /// What the host has proved on each queue, and the address of its peer.
    credentials: Mutex<BTreeMap<u16, (Credentials, String)>>,
    /// Last field, so it is dropped last: the controller identifier is released only when the
    /// controller is gone.
    cntlid_lease: CntlidLease,
}

/// Controller identifier reserved in a subsystem.
struct CntlidLease {
    export: Arc<SubsystemExport>,
    cntlid: u16,
    /// Instance of the controller, if it is gone with no command outstanding.
    ended: Option<ControllerInstance>,
}

/// Host identity given with Connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HostIds {
    /// HOSTNQN; empty if the host gives none.
    pub(super) nqn: String,
    /// HOSTID; zero identifies no host.
    pub(super) identifier: u128,
}

/// What a host has proved on an admin queue.
#[derive(Debug, Default)]
pub(super) struct AdminQueueProof {
    pub(super) credentials: Credentials,
    pub(super) peer: String,
    /// The host has generated a key for a TLS connection, which this one is not.
    pub(super) awaits_secure_channel: bool,
}

impl HostIds {
    /// Whether two controllers belong to the same host. A host without an identifier equals no
    /// other (Base 2.1 §5.1.25.1.28).
    pub(super) fn is_same_host(&self, other: &Self) -> bool {
        self.identifier != 0 && self == other
    }

    /// NQN for messages.
    pub(super) fn display_name(&self) -> &str {
        if self.nqn.is_empty() { "a host without an NQN" } else { &self.nqn }
    }

    /// Host identifier for messages, in the format of nvme-cli.
    pub(super) fn display_identifier(&self) -> String {
        HostIdentity::Extended(self.identifier).to_string()
    }
}

impl Association {
    pub(super) fn new(
        export: Arc<SubsystemExport>,
        cntlid: u16,
        (host, port): (HostIds, u16),
        admin: AdminQueueProof,
        mut transport: FabricsTransport,
    ) -> Arc<Self> {
        let cntlid_lease = CntlidLease { export, cntlid, ended: None };
        let instance = transport.controller().configuration().instance;
        Arc::new(Self {
            cntlid,
            host,
            port,
            instance,
            transport: Mutex::new(transport),
            admin_peer: admin.peer.clone(),
            awaits_secure_channel: admin.awaits_secure_channel,
            credentials: Mutex::new(BTreeMap::from([(0, (admin.credentials, admin.peer))])),
            cntlid_lease,
        })
    }

    /// Peer of the admin queue.
    pub(super) fn admin_peer(&self) -> &str {
        &self.admin_peer
    }

    /// Whether the host must open a TLS connection with a key that it has generated: this controller
    /// then describes itself only.
    pub(super) const fn awaits_secure_channel(&self) -> bool {
        self.awaits_secure_channel
    }

    /// What the host has proved on its admin queue.
    pub(super) fn admin_credentials(&self) -> Credentials {
        self.lock_credentials().get(&0).cloned().unwrap_or_default().0
    }

    /// Records what the host has proved on a queue.
    pub(super) fn set_credentials(&self, qid: u16, credentials: Credentials, peer: &str) {
        self.lock_credentials().insert(qid, (credentials, peer.to_owned()));
    }

    /// Records that a queue was authenticated again.
    pub(super) fn set_secret(&self, qid: u16, secret: ChapSecret) {
        if let Some((credentials, _)) = self.lock_credentials().get_mut(&qid) {
            credentials.set_secret(secret);
        }
    }

    /// Records that the admin queue was authenticated again, and with it the queues that were
    /// authenticated before: a host need not repeat it for each of them.
    pub(super) fn set_secret_of_all(&self, secret: &ChapSecret) {
        for (credentials, _) in self.lock_credentials().values_mut() {
            if credentials.has_authenticated() {
                credentials.set_secret(secret.clone());
            }
        }
    }

    /// Forgets a queue.
    pub(super) fn remove_credentials(&self, qid: u16) {
        self.lock_credentials().remove(&qid);
    }

    /// Whether all queues may stay.
    pub(super) fn is_permitted(&self, security: &SecurityState) -> bool {
        self.lock_credentials().iter().all(|(qid, (credentials, peer))| {
            let (host_nqn, awaits_secure_channel) = (&self.host.nqn, self.awaits_secure_channel);
            let queue = ConnectedQueue { host_nqn, qid: *qid, peer, awaits_secure_channel };
            security.permits(credentials, &queue)
        })
    }

    /// Ends the association if a queue may not stay.
    pub(super) fn end_unless_permitted(&self) {
        if !self.export().with_security(|security| self.is_permitted(security)) {
            self.lock_transport().end_association(AssociationEndReason::CredentialsRevoked);
        }
    }

    fn lock_credentials(&self) -> MutexGuard<'_, BTreeMap<u16, (Credentials, String)>> {
        self.credentials.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a Cross-Controller Reset names exactly this instance of the controller.
    pub(super) fn is_target_of_reset(&self, reset: &CrossControllerReset) -> bool {
        self.cntlid == reset.icid
            && self.instance.is_some_and(|ControllerInstance { uniquifier, random, .. }| {
                (uniquifier, random) == (reset.ciu, reset.cirn)
            })
    }

    /// Locked front end of the controller. It is not used on the I/O path.
    pub(super) fn lock_transport(&self) -> MutexGuard<'_, FabricsTransport> {
        self.transport.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn export(&self) -> &Arc<SubsystemExport> {
        &self.cntlid_lease.export
    }
}

impl Drop for Association {
    fn drop(&mut self) {
        let transport = self.transport.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Commands that were abandoned may still take effect, so the instance counts as ended only
        // when drained.
        self.cntlid_lease.ended = self.instance.filter(|_| transport.has_no_io_queues());
    }
}

impl Drop for CntlidLease {
    fn drop(&mut self) {
        self.export.release_cntlid(self.cntlid, self.ended);
    }
}

impl fmt::Debug for Association {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Association")
            .field("cntlid", &self.cntlid)
            .field("host", &self.host)
            .field("subsystem", &self.cntlid_lease.export.nqn())
            .finish_non_exhaustive()
    }
}
