//! Association of a host and a controller, with the connections between them (Base 2.1 §1.5, §3.3).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::Instant;
use tenmil_nvme_auth::ChapSecret;
use tenmil_nvme_controller::IoStatsSource;
use tenmil_nvme_controller::controller::{ControllerInstance, HostIdentity};
use tenmil_nvme_controller::transport::fabrics::{AssociationEndReason, FabricsTransport};
use tenmil_wire::admin::CrossControllerReset;

use super::event::AssociationTotals;
use super::security::{ConnectedQueue, Credentials, SecretRemoval, SecurityState, Verdict};
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
    io_stats: IoStatsSource,
    /// The host has generated a key for a TLS connection, which its admin connection is not.
    awaits_secure_channel: bool,
    proofs: Mutex<AssociationProofs>,
    /// Last field, so it is dropped last: the controller identifier is released only when the
    /// controller is gone.
    cntlid_lease: CntlidLease,
}

/// What the host has proved on each queue, by queue identifier.
#[derive(Debug, Default)]
struct AssociationProofs {
    queues: BTreeMap<u16, QueueProof>,
    removal: SecretRemoval,
}

/// What the host has proved on a queue.
#[derive(Debug)]
struct QueueProof {
    credentials: Credentials,
    /// Address of its peer.
    peer: String,
    /// Whether an authentication is in progress.
    is_authenticating: bool,
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
        let io_stats = cntlid_lease.export.io_stats().source(&host.nqn, cntlid);
        transport.set_io_stats(io_stats.clone());
        let AdminQueueProof { credentials, peer, awaits_secure_channel } = admin;
        let admin_peer = peer.clone();
        let queues = BTreeMap::from([(0, QueueProof::new(credentials, peer))]);
        Arc::new(Self {
            cntlid,
            host,
            port,
            instance,
            transport: Mutex::new(transport),
            admin_peer,
            io_stats,
            awaits_secure_channel,
            proofs: Mutex::new(AssociationProofs { queues, removal: SecretRemoval::None }),
            cntlid_lease,
        })
    }

    /// Peer of the admin queue.
    pub(super) fn admin_peer(&self) -> &str {
        &self.admin_peer
    }

    /// Totals of the I/O queues that are closed.
    pub(super) fn totals_of_closed_queues(&self) -> AssociationTotals {
        AssociationTotals::of_stats(&self.io_stats.closed_queues())
    }

    /// Whether the host must open a TLS connection with a key that it has generated: this controller
    /// then describes itself only.
    pub(super) const fn awaits_secure_channel(&self) -> bool {
        self.awaits_secure_channel
    }

    /// What the host has proved on its admin queue.
    pub(super) fn admin_credentials(&self) -> Credentials {
        self.lock_proofs().queues.get(&0).map(|queue| queue.credentials.clone()).unwrap_or_default()
    }

    /// Records what the host has proved on a queue.
    pub(super) fn set_credentials(&self, qid: u16, credentials: Credentials, peer: &str) {
        let queue = QueueProof::new(credentials, peer.to_owned());
        self.lock_proofs().queues.insert(qid, queue);
    }

    /// Records that a queue was authenticated again.
    pub(super) fn set_secret(&self, qid: u16, secret: ChapSecret) {
        if let Some(queue) = self.lock_proofs().queues.get_mut(&qid) {
            queue.credentials.set_secret(secret);
        }
    }

    /// Records that the admin queue was authenticated again, and with it the queues that were
    /// authenticated before: a host need not repeat it for each of them.
    pub(super) fn set_secret_of_all(&self, secret: &ChapSecret) {
        for queue in self.lock_proofs().queues.values_mut() {
            if queue.credentials.has_authenticated() {
                queue.credentials.set_secret(secret.clone());
            }
        }
    }

    /// Records whether an authentication of a queue is in progress.
    pub(super) fn set_authenticating(&self, qid: u16, is_authenticating: bool) {
        let mut proofs = self.lock_proofs();
        if let Some(queue) = proofs.queues.get_mut(&qid) {
            queue.is_authenticating = is_authenticating;
        }
        self.wake_admin_queue_if_removal(proofs);
    }

    /// Forgets a queue.
    pub(super) fn remove_credentials(&self, qid: u16) {
        let mut proofs = self.lock_proofs();
        proofs.queues.remove(&qid);
        self.wake_admin_queue_if_removal(proofs);
    }

    /// Whether all queues may stay.
    pub(super) fn judge_queues(&self, security: &SecurityState) -> Verdict {
        let proofs = self.lock_proofs();
        let verdicts = proofs.queues.iter().map(|(qid, QueueProof { credentials, peer, .. })| {
            let (host_nqn, awaits_secure_channel) = (&self.host.nqn, self.awaits_secure_channel);
            let queue = ConnectedQueue { host_nqn, qid: *qid, peer, awaits_secure_channel };
            security.judge_queue(credentials, &queue)
        });
        verdicts.max().unwrap_or(Verdict::Permitted)
    }

    /// Ends the association if a queue may not stay; after the removal of a secret, as
    /// [`poll_secret_removal`](Self::poll_secret_removal) decides.
    pub(super) fn end_unless_permitted(&self) {
        match self.export().with_security(|security| self.judge_queues(security)) {
            Verdict::Permitted => {}
            Verdict::SecretRemoved => {
                let mut proofs = self.lock_proofs();
                proofs.removal.note();
                self.wake_admin_queue_if_removal(proofs);
            }
            Verdict::Refused => self.revoke(),
        }
    }

    /// Ends the association once the time has passed that a host has after the removal of its secret.
    /// Returns when to call it again. The admin connection calls it.
    pub(super) fn poll_secret_removal(&self, now: Instant) -> Instant {
        if !self.lock_proofs().removal.is_pending() {
            return Instant::NEVER;
        }
        let verdict = self.export().with_security(|security| self.judge_queues(security));
        let mut proofs = self.lock_proofs();
        let is_authenticating = proofs.queues.values().any(|queue| queue.is_authenticating);
        let has_ended = proofs.removal.ends_queues(now, verdict, is_authenticating);
        let ends_at = proofs.removal.ends_at(is_authenticating);
        drop(proofs);
        if has_ended {
            self.revoke();
            return Instant::NEVER;
        }
        ends_at
    }

    fn revoke(&self) {
        self.lock_transport().end_association(AssociationEndReason::CredentialsRevoked);
    }

    /// Has the admin connection poll the removal of a secret, if there is one.
    fn wake_admin_queue_if_removal(&self, proofs: MutexGuard<'_, AssociationProofs>) {
        let is_pending = proofs.removal.is_pending();
        drop(proofs);
        if is_pending {
            self.lock_transport().wake_owner();
        }
    }

    fn lock_proofs(&self) -> MutexGuard<'_, AssociationProofs> {
        self.proofs.lock().unwrap_or_else(PoisonError::into_inner)
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

impl QueueProof {
    const fn new(credentials: Credentials, peer: String) -> Self {
        Self { credentials, peer, is_authenticating: false }
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
