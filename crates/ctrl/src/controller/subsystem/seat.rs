//! One controller's place in its subsystem.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use wire::Status;
use wire::log::event::ReservationEvent;

use crate::controller::reservation::line::Reply;
use crate::controller::reservation::preempted::{Preempted, Writers};
use crate::controller::reservation::{Host, HostNqn};
use crate::namespace::{Namespace, Namespaces, Published};

/// Called, on whichever thread it happens, when a controller has mail and its thread may sleep.
pub type Bell = Arc<dyn Fn() + Send + Sync>;

/// What the subsystem keeps for one controller.
pub(in crate::controller) struct Seat {
    published: Arc<Published<Namespaces>>,
    /// The picture last published.
    shown: Arc<Namespaces>,
    /// How to wake the controller's thread.
    pub(in crate::controller) bell: Option<Bell>,
    pub(in crate::controller) host: Host,
    /// Its NQN, if its transport brings one.
    pub(in crate::controller) nqn: Option<HostNqn>,
    pub(in crate::controller) mail: Mail,
    /// Its host has sent commands since it was reset and has not shut it down.
    pub(in crate::controller) is_in_use: bool,
    /// Groups whose state is not Optimized.
    ana: BTreeMap<u32, AnaState>,
    /// How often any state has changed.
    ana_changes: u64,
}

/// What others did that this controller has not seen yet.
#[derive(Debug, Default)]
pub(in crate::controller) struct Mail {
    /// Namespaces of which something has changed.
    pub(in crate::controller) changed: BTreeSet<u32>,
    /// Reservations that are not what they were, by namespace, oldest first.
    pub(in crate::controller) notices: VecDeque<(u32, ReservationEvent)>,
    /// Namespaces whose outstanding commands are to be aborted.
    pub(in crate::controller) aborts: Vec<(u32, Preempted)>,
    /// An ANA state has changed.
    pub(in crate::controller) is_ana_changed: bool,
    /// Firmware is about to be activated.
    pub(in crate::controller) is_activating_firmware: bool,
    /// How changes of reservations ended that it has asked for.
    pub(in crate::controller) ends: Vec<(Reply, End)>,
    /// Why one of them could not be made durable.
    pub(in crate::controller) trouble: Option<String>,
}

/// How a change of reservations ended, and what of preempted hosts may still write.
pub(in crate::controller) type End = Result<Option<Writers>, Status>;

/// Asymmetric namespace access state (Base 2.1 §8.1.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum AnaState {
    /// The best way.
    #[default]
    Optimized = 0x1,
    /// A way.
    NonOptimized = 0x2,
    /// Not now.
    Inaccessible = 0x3,
    /// Never again.
    PersistentLoss = 0x4,
    /// About to be another.
    Change = 0xf,
}

/// Reservation notifications kept for a host that does not read them: how many there are is told in
/// a byte (Base 2.1 §5.1.12.1.32).
pub(in crate::controller) const NOTICES_MAX: usize = 255;

impl Mail {
    /// Adds a notification, forgetting the oldest if there are too many.
    pub(super) fn push_notice(&mut self, nsid: u32, notice: ReservationEvent) {
        if self.notices.len() >= NOTICES_MAX {
            self.notices.pop_front();
        }
        self.notices.push_back((nsid, notice));
    }

    fn is_empty(&self) -> bool {
        let Self { changed, notices, aborts, ends, .. } = self;
        let Self { is_ana_changed, is_activating_firmware, trouble, .. } = self;
        changed.is_empty()
            && notices.is_empty()
            && aborts.is_empty()
            && ends.is_empty()
            && trouble.is_none()
            && !is_ana_changed
            && !is_activating_firmware
    }
}

impl AnaState {
    /// What a command to the namespace is answered with, if it is refused.
    pub const fn refusal(self) -> Option<Status> {
        match self {
            Self::Optimized | Self::NonOptimized => None,
            Self::Inaccessible => Some(Status::ANA_INACCESSIBLE),
            Self::PersistentLoss => Some(Status::ANA_PERSISTENT_LOSS),
            Self::Change => Some(Status::ANA_TRANSITION),
        }
    }
}

impl Seat {
    pub(super) fn new(cntlid: u16, published: Arc<Published<Namespaces>>) -> Self {
        let host = Host::Anonymous(cntlid);
        Self {
            shown: published.reader().get().clone(),
            published,
            bell: None,
            host,
            nqn: None,
            mail: Mail::default(),
            is_in_use: false,
            ana: BTreeMap::new(),
            ana_changes: 0,
        }
    }

    /// How this controller reaches a group.
    pub(in crate::controller) fn ana(&self, group: u32) -> AnaState {
        self.ana.get(&group).copied().unwrap_or_default()
    }

    /// How often that has changed.
    pub(in crate::controller) const fn ana_changes(&self) -> u64 {
        self.ana_changes
    }

    /// Publishes a picture, unless it is the one that was published last.
    pub(super) fn show(&mut self, namespaces: Namespaces) {
        let is_same = self.shown.iter().count() == namespaces.iter().count()
            && self.shown.iter().zip(namespaces.iter()).all(|(old, new)| looks_alike(old, new));
        if !is_same {
            self.shown = Arc::new(namespaces);
            self.published.publish(self.shown.clone());
        }
    }

    /// The bell to ring, if there is mail and somebody to hear it.
    pub(super) fn bell(&self) -> Option<Bell> {
        self.bell.clone().filter(|_| !self.mail.is_empty())
    }

    pub(super) fn set_ana(&mut self, group: u32, state: AnaState) {
        if self.ana(group) == state {
            return;
        }
        self.ana.insert(group, state);
        self.ana_changes += 1;
        self.mail.is_ana_changed = true;
    }
}

/// Whether queues would treat the two alike.
fn looks_alike(old: &Namespace, new: &Namespace) -> bool {
    old.nsid == new.nsid
        && old.block_shift == new.block_shift
        && old.block_count == new.block_count
        && old.is_write_protected == new.is_write_protected
        && old.unavailable == new.unavailable
        && old.reservation == new.reservation
        && old.identity == new.identity
        && old.limits == new.limits
        && Arc::ptr_eq(&old.medium, &new.medium)
}
