//! Log pages of notifications: changed namespaces, ANA, reservations (Base 2.1 §5.1.12.1.5, §5.1.12.1.13,
//! §5.1.12.1.32).

use std::collections::BTreeMap;

use tenmil_wire::identify::NamespaceList;
use tenmil_wire::log::ana::{self, AnaGroup, AnaHeader};
use tenmil_wire::log::event::ReservationNotification;

use crate::controller::Controller;
use crate::controller::events::AsyncEvent;

impl Controller {
    /// Changed Namespace List; a single FFFFFFFFh if there are more than fit (Base 2.1 §5.1.12.1.5).
    pub(super) fn changed_namespace_list_page(&self) -> Vec<u8> {
        let list = if self.changed.len() > NamespaceList::CAPACITY {
            NamespaceList::new([u32::MAX])
        } else {
            NamespaceList::new(self.changed.iter().copied())
        };
        list.as_bytes().to_vec()
    }

    /// Asymmetric Namespace Access page: every group with namespaces, its state and, unless `groups_only`, its
    /// namespaces.
    pub(super) fn ana_log_page(&self, groups_only: bool) -> Vec<u8> {
        let state = self.subsystem.lock_state();
        let Some(entry) = state.controllers.get(&self.config.cntlid) else { return Vec::new() };
        let mut groups = BTreeMap::<u32, Vec<u32>>::new();
        for record in state.attached_namespaces(self.config.cntlid) {
            let nsids = groups.entry(record.ana_group).or_default();
            if !groups_only {
                nsids.push(record.nsid);
            }
        }
        let header = AnaHeader::zeroed().with(|header| {
            let count = u16::try_from(groups.len()).unwrap_or(u16::MAX);
            header.chgcnt(entry.ana_change_count()).ngrps(count)
        });
        let mut page = header.as_bytes().to_vec();
        for (grpid, nsids) in groups {
            let group = AnaGroup::zeroed().with(|group| {
                let state = ana::AnaState::from_code(entry.ana_state(grpid) as u8);
                group.grpid(grpid).chgcnt(entry.ana_change_count()).state(state)
            });
            ana::append_ana_group(group, &nsids, &mut page);
        }
        // Tools read the length that a page may have, in pieces, and a piece behind the end would be an error.
        let constants = self.subsystem.constants();
        let (groups, nsids) = (constants.ana_groups as usize, constants.nsid_max as usize);
        page.resize(AnaHeader::BYTES + groups * AnaGroup::BYTES + nsids * size_of::<u32>(), 0);
        page
    }

    /// Oldest unread notification, and the number of unread ones.
    pub(super) fn reservation_notification_page(&self) -> Vec<u8> {
        let mut page = ReservationNotification::zeroed();
        if let Some(&(nsid, notice)) = self.notices.front() {
            let waiting = u8::try_from(self.notices.len()).unwrap_or(u8::MAX);
            let number = self.notices_total - u64::from(waiting) + 1;
            page.set().lpc(number).rnlpt(notice).nalp(waiting).nsid(nsid);
        }
        page.as_bytes().to_vec()
    }

    /// Removes the oldest notification, which the host has read, and announces the next one.
    pub(super) fn pop_reservation_notification(&mut self) {
        self.notices.pop_front();
        if !self.notices.is_empty() {
            self.events.raise_event(AsyncEvent::RESERVATION);
        }
    }
}
