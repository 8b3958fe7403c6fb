//! Which controllers see a namespace, and which have it attached.
//!
//! Every Identify structure, log page, admin command and picture for the queues asks here.

use std::collections::BTreeSet;

use super::{Record, State};

/// The controllers that a namespace is attached to, and those that must not know of it. A controller
/// in neither set sees an allocated namespace that is not attached to it (Base 2.1 §3.2.1).
#[derive(Clone, Debug, Default)]
pub(in crate::controller) struct Visibility {
    attached: BTreeSet<u16>,
    hidden: BTreeSet<u16>,
}

impl Visibility {
    /// Whether a controller may know that the namespace exists.
    pub(in crate::controller) fn is_visible_to(&self, cntlid: u16) -> bool {
        !self.hidden.contains(&cntlid)
    }

    /// Whether the namespace is attached to a controller, which then may use it.
    pub(in crate::controller) fn is_attached_to(&self, cntlid: u16) -> bool {
        self.is_visible_to(cntlid) && self.attached.contains(&cntlid)
    }

    /// The controllers that it is attached to, from this identifier on.
    pub(in crate::controller) fn attached_from(&self, first: u16) -> impl Iterator<Item = u16> {
        self.attached.range(first..).copied()
    }

    /// How many controllers it is attached to.
    pub(in crate::controller) fn attached_count(&self) -> usize {
        self.attached.len()
    }

    /// Attaches it to a controller, unless it is hidden from that one.
    pub(super) fn attach(&mut self, cntlid: u16) {
        if self.is_visible_to(cntlid) {
            self.attached.insert(cntlid);
        }
    }

    pub(super) fn detach(&mut self, cntlid: u16) {
        self.attached.remove(&cntlid);
    }

    /// Hides it from a controller, which it is not attached to any more.
    pub(super) fn hide(&mut self, cntlid: u16) {
        self.hidden.insert(cntlid);
        self.attached.remove(&cntlid);
    }

    pub(super) fn reveal(&mut self, cntlid: u16) {
        self.hidden.remove(&cntlid);
    }

    /// A controller is gone: the next under its identifier begins without history.
    pub(super) fn forget(&mut self, cntlid: u16) {
        self.attached.remove(&cntlid);
        self.hidden.remove(&cntlid);
    }
}

impl State {
    /// The namespace, if this controller may know of it.
    pub(in crate::controller) fn visible(&self, cntlid: u16, nsid: u32) -> Option<&Record> {
        self.records.get(&nsid).filter(|record| record.visibility.is_visible_to(cntlid))
    }

    /// The namespace, if this controller has it attached.
    pub(in crate::controller) fn attached(&self, cntlid: u16, nsid: u32) -> Option<&Record> {
        self.records.get(&nsid).filter(|record| record.visibility.is_attached_to(cntlid))
    }

    /// Every namespace that this controller may know of, by rising identifier.
    pub(in crate::controller) fn all_visible(&self, cntlid: u16) -> impl Iterator<Item = &Record> {
        self.records.values().filter(move |record| record.visibility.is_visible_to(cntlid))
    }

    /// Every namespace that this controller has attached, by rising identifier.
    pub(in crate::controller) fn all_attached(&self, cntlid: u16) -> impl Iterator<Item = &Record> {
        self.records.values().filter(move |record| record.visibility.is_attached_to(cntlid))
    }
}
