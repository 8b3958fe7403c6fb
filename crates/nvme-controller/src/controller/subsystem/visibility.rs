//! Visibility of a namespace: which controllers see it, and which have it attached.
//!
//! Every Identify structure, log page, admin command and namespace snapshot uses these functions.

use std::collections::BTreeSet;

use super::{NamespaceEntry, SubsystemState};

/// Controllers to which a namespace is attached, and controllers from which it is hidden. No controller is
/// in both sets. A controller in neither sees an allocated namespace that is not attached to it (Base 2.1
/// §3.2.1).
#[derive(Clone, Debug, Default)]
pub(in crate::controller) struct NamespaceVisibility {
    attached: BTreeSet<u16>,
    hidden: BTreeSet<u16>,
}

impl NamespaceVisibility {
    /// Whether a controller can see the namespace.
    pub(in crate::controller) fn is_visible_to(&self, cntlid: u16) -> bool {
        !self.hidden.contains(&cntlid)
    }

    /// Whether the namespace is attached to a controller.
    pub(in crate::controller) fn is_attached_to(&self, cntlid: u16) -> bool {
        self.attached.contains(&cntlid)
    }

    /// Controllers to which it is attached, from this identifier on.
    pub(in crate::controller) fn attached_cntlids_from(
        &self,
        first: u16,
    ) -> impl Iterator<Item = u16> {
        self.attached.range(first..).copied()
    }

    /// Number of controllers to which it is attached.
    pub(in crate::controller) fn attached_count(&self) -> usize {
        self.attached.len()
    }

    /// Attaches it to a controller, unless it is hidden from that controller.
    pub(super) fn attach(&mut self, cntlid: u16) {
        if self.is_visible_to(cntlid) {
            self.attached.insert(cntlid);
        }
    }

    pub(super) fn detach(&mut self, cntlid: u16) {
        self.attached.remove(&cntlid);
    }

    /// Hides it from a controller and detaches it.
    pub(super) fn hide(&mut self, cntlid: u16) {
        self.hidden.insert(cntlid);
        self.attached.remove(&cntlid);
    }

    pub(super) fn reveal(&mut self, cntlid: u16) {
        self.hidden.remove(&cntlid);
    }

    /// Removes a controller: the next one with its identifier starts without history.
    pub(super) fn remove_controller(&mut self, cntlid: u16) {
        self.attached.remove(&cntlid);
        self.hidden.remove(&cntlid);
    }
}

impl SubsystemState {
    /// Namespace, if visible to this controller.
    pub(in crate::controller) fn visible_namespace(
        &self,
        cntlid: u16,
        nsid: u32,
    ) -> Option<&NamespaceEntry> {
        self.records.get(&nsid).filter(|record| record.visibility.is_visible_to(cntlid))
    }

    /// Namespace, if attached to this controller.
    pub(in crate::controller) fn attached_namespace(
        &self,
        cntlid: u16,
        nsid: u32,
    ) -> Option<&NamespaceEntry> {
        self.records.get(&nsid).filter(|record| record.visibility.is_attached_to(cntlid))
    }

    /// Namespaces visible to this controller, in ascending order of their identifiers.
    pub(in crate::controller) fn visible_namespaces(
        &self,
        cntlid: u16,
    ) -> impl Iterator<Item = &NamespaceEntry> {
        self.records.values().filter(move |record| record.visibility.is_visible_to(cntlid))
    }

    /// Namespaces attached to this controller, in ascending order of their identifiers.
    pub(in crate::controller) fn attached_namespaces(
        &self,
        cntlid: u16,
    ) -> impl Iterator<Item = &NamespaceEntry> {
        self.records.values().filter(move |record| record.visibility.is_attached_to(cntlid))
    }
}

#[cfg(test)]
mod tests {
    use super::NamespaceVisibility;

    #[test]
    fn hidden_namespace_is_not_attached() {
        let mut visibility = NamespaceVisibility::default();
        visibility.attach(1);
        assert!(visibility.is_attached_to(1));
        visibility.hide(1);
        assert!(!visibility.is_visible_to(1) && !visibility.is_attached_to(1));
        assert_eq!(
            (visibility.attached_cntlids_from(0).count(), visibility.attached_count()),
            (0, 0)
        );
        visibility.attach(1);
        assert!(!visibility.is_attached_to(1));
        visibility.reveal(1);
        assert!(visibility.is_visible_to(1) && !visibility.is_attached_to(1));
        // The next controller with the identifier is another one.
        for end in [NamespaceVisibility::attach, NamespaceVisibility::hide] {
            end(&mut visibility, 1);
            visibility.remove_controller(1);
            assert!(visibility.is_visible_to(1) && !visibility.is_attached_to(1));
        }
    }
}
