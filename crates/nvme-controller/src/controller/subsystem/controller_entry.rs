//! Subsystem state for one controller.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use tenmil_wire::Status;
use tenmil_wire::log::event::ReservationEvent;

use crate::controller::reservation::change_queue::ReservationReplyTarget;
use crate::controller::reservation::preempt_abort::{PreemptedWriterGuard, PreemptedWriterTracker};
use crate::controller::reservation::{HostId, HostNqn};
use crate::namespace::{Namespace, NamespaceSnapshot, VersionedValue};

/// Callback that wakes a controller's thread, called from any thread when updates are pending.
pub type WakeFn = Arc<dyn Fn() + Send + Sync>;

/// Subsystem's state for one controller.
pub(in crate::controller) struct ControllerEntry {
    published: Arc<VersionedValue<NamespaceSnapshot>>,
    /// Namespace snapshot published last.
    published_snapshot: Arc<NamespaceSnapshot>,
    /// Wakes the controller's thread.
    pub(in crate::controller) waker: Option<WakeFn>,
    pub(in crate::controller) host: HostId,
    /// Host NQN, if the transport supplies one.
    pub(in crate::controller) nqn: Option<HostNqn>,
    pub(in crate::controller) updates: PendingUpdates,
    /// The host has sent commands since the last reset and has not shut the controller down.
    pub(in crate::controller) is_in_use: bool,
    /// ANA groups whose state is not Optimized.
    ana_state: BTreeMap<u32, AnaState>,
    /// Number of ANA state changes.
    ana_changes: u64,
    rights: NamespaceRights,
}

/// Rights of a controller's host. The default is unlimited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceRights {
    /// Namespaces that the host may only read: it changes no data and no reservations of them.
    pub read_only: NamespaceSelection,
    /// Whether the host may register and hold reservations.
    pub reservations: bool,
}

/// Selection of namespaces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum NamespaceSelection {
    /// No namespace.
    #[default]
    None,
    /// All namespaces.
    All,
    /// Namespaces with these identifiers.
    Listed(BTreeSet<u32>),
}

/// Updates that a controller has not processed.
#[derive(Debug, Default)]
pub(in crate::controller) struct PendingUpdates {
    /// Namespaces that have changed.
    pub(in crate::controller) changed: BTreeSet<u32>,
    /// Reservation notifications with their namespaces, oldest first.
    pub(in crate::controller) notices: VecDeque<(u32, ReservationEvent)>,
    /// Namespaces whose outstanding commands are to be aborted.
    pub(in crate::controller) aborts: Vec<(u32, PreemptedWriterGuard)>,
    /// An ANA state has changed.
    pub(in crate::controller) is_ana_changed: bool,
    /// Firmware is about to be activated.
    pub(in crate::controller) is_activating_firmware: bool,
    /// Results of reservation changes that it has requested.
    pub(in crate::controller) results: Vec<(ReservationReplyTarget, ReservationResult)>,
    /// Reason why one of them could not be made durable.
    pub(in crate::controller) persist_error: Option<String>,
}

/// Result of a reservation change, with the tracker of preempted hosts that may still write.
pub(in crate::controller) type ReservationResult = Result<Option<PreemptedWriterTracker>, Status>;

/// Asymmetric namespace access state (Base 2.1 §8.1.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum AnaState {
    /// Preferred path.
    #[default]
    Optimized = 0x1,
    /// Usable path, not preferred.
    NonOptimized = 0x2,
    /// Not usable at present.
    Inaccessible = 0x3,
    /// Permanently not usable.
    PersistentLoss = 0x4,
    /// In transition to another state.
    Change = 0xf,
}

/// Notifications kept for a host that does not read them: the page has one byte for their number (Base
/// 2.1 §5.1.12.1.32).
pub(in crate::controller) const NOTICES_MAX: usize = 255;

impl PendingUpdates {
    /// Adds a notification, and drops the oldest if there are too many.
    pub(super) fn push_notice(&mut self, nsid: u32, notice: ReservationEvent) {
        if self.notices.len() >= NOTICES_MAX {
            self.notices.pop_front();
        }
        self.notices.push_back((nsid, notice));
    }

    fn is_empty(&self) -> bool {
        let Self { changed, notices, aborts, results, .. } = self;
        let Self { is_ana_changed, is_activating_firmware, persist_error, .. } = self;
        changed.is_empty()
            && notices.is_empty()
            && aborts.is_empty()
            && results.is_empty()
            && persist_error.is_none()
            && !is_ana_changed
            && !is_activating_firmware
    }
}

impl Default for NamespaceRights {
    fn default() -> Self {
        Self { read_only: NamespaceSelection::None, reservations: true }
    }
}

impl NamespaceSelection {
    /// Whether it contains a namespace.
    #[must_use]
    pub fn contains(&self, nsid: u32) -> bool {
        match self {
            Self::None => false,
            Self::All => true,
            Self::Listed(nsids) => nsids.contains(&nsid),
        }
    }

    /// Whether it contains no namespace.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        match self {
            Self::None => true,
            Self::All => false,
            Self::Listed(nsids) => nsids.is_empty(),
        }
    }
}

impl AnaState {
    /// Status that rejects commands to the namespace, if any.
    pub const fn rejection_status(self) -> Option<Status> {
        match self {
            Self::Optimized | Self::NonOptimized => None,
            Self::Inaccessible => Some(Status::ANA_INACCESSIBLE),
            Self::PersistentLoss => Some(Status::ANA_PERSISTENT_LOSS),
            Self::Change => Some(Status::ANA_TRANSITION),
        }
    }
}

impl ControllerEntry {
    pub(super) fn new(cntlid: u16, published: Arc<VersionedValue<NamespaceSnapshot>>) -> Self {
        let host = HostId::Anonymous(cntlid);
        Self {
            published_snapshot: published.reader().get().clone(),
            published,
            waker: None,
            host,
            nqn: None,
            updates: PendingUpdates::default(),
            is_in_use: false,
            ana_state: BTreeMap::new(),
            ana_changes: 0,
            rights: NamespaceRights::default(),
        }
    }

    /// Rights of the host.
    pub(in crate::controller) const fn rights(&self) -> &NamespaceRights {
        &self.rights
    }

    /// Sets the rights of the host. Returns whether they have changed.
    pub(super) fn set_rights(&mut self, rights: NamespaceRights) -> bool {
        let has_changed = self.rights != rights;
        self.rights = rights;
        has_changed
    }

    /// ANA state of a group.
    pub(in crate::controller) fn ana_state(&self, group: u32) -> AnaState {
        self.ana_state.get(&group).copied().unwrap_or_default()
    }

    /// Number of ANA state changes.
    pub(in crate::controller) const fn ana_change_count(&self) -> u64 {
        self.ana_changes
    }

    /// Publishes a snapshot, unless it equals the last one.
    pub(super) fn publish_if_changed(&mut self, namespaces: NamespaceSnapshot) {
        let is_same = self.published_snapshot.iter().count() == namespaces.iter().count()
            && self
                .published_snapshot
                .iter()
                .zip(namespaces.iter())
                .all(|(old, new)| is_unchanged_for_queues(old, new));
        if !is_same {
            self.published_snapshot = Arc::new(namespaces);
            self.published.publish(self.published_snapshot.clone());
        }
    }

    /// Waker to call, if updates are pending and a waker is set.
    pub(super) fn waker_if_pending(&self) -> Option<WakeFn> {
        self.waker.clone().filter(|_| !self.updates.is_empty())
    }

    pub(super) fn set_ana_state(&mut self, group: u32, state: AnaState) {
        if self.ana_state(group) == state {
            return;
        }
        self.ana_state.insert(group, state);
        self.ana_changes += 1;
        self.updates.is_ana_changed = true;
    }
}

/// Whether queues would treat the two namespaces alike.
fn is_unchanged_for_queues(old: &Namespace, new: &Namespace) -> bool {
    old.nsid == new.nsid
        && old.block_shift == new.block_shift
        && old.block_count == new.block_count
        && old.is_write_protected == new.is_write_protected
        && old.denies_reservations == new.denies_reservations
        && old.unavailable == new.unavailable
        && old.reservation == new.reservation
        && old.identity == new.identity
        && old.limits == new.limits
        && Arc::ptr_eq(&old.device, &new.device)
}
