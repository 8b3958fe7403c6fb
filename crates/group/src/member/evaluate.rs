//! Decisions of a member on a snapshot of the map.

use std::collections::BTreeMap;

use tenmil_base::Instant;

use super::{Action, GroupPhase, InjectedBug, Member, MemberState, OpenedGroup, SETTLE};
use crate::assignment::assign_groups;
use crate::records::{
    self, CONFIGURATION_KEY, GroupRecord, MemberRecord, Owner, SLOT_KEY, SLOTS, encode, group_key,
    member_key,
};
use crate::store::{Condition, Put, StoreOperation, Transaction};

impl Member {
    /// Decides on the snapshot that has just arrived. No read or transaction is in flight.
    pub(super) fn evaluate(&mut self, now: Instant) {
        match self.state {
            MemberState::AwaitingName
            | MemberState::AwaitingConfiguration
            | MemberState::AwaitingEntry => self.enter(now),
            MemberState::Joined | MemberState::Leaving => self.evaluate_groups(now),
            MemberState::AwaitingLease | MemberState::AwaitingClose | MemberState::Left => {}
        }
    }

    /// Writes the entry of this member, unless the name is in use.
    fn enter(&mut self, now: Instant) {
        let members = self.members();
        match members.get(&self.config.name) {
            Some(record) if record.incarnation == self.incarnation => {
                self.state = MemberState::Joined;
                self.slot = record.slot;
                self.own_slots.insert(record.slot);
                self.shared.handle_joined();
                self.settles_at = now.after(SETTLE);
                self.evaluate_groups(now);
            }
            Some(_) => self.state = MemberState::AwaitingName,
            None => {
                let Some(slot) = self.next_free_slot(&members) else { return };
                if !self.agrees_with_group(now, members.is_empty()) {
                    self.state = MemberState::AwaitingConfiguration;
                    return;
                }
                self.slot = slot;
                self.state = MemberState::AwaitingEntry;
                let key = member_key(&self.config.name);
                let conditions = vec![
                    self.unchanged(&key),
                    self.unchanged(SLOT_KEY),
                    self.unchanged(CONFIGURATION_KEY),
                ];
                let mut puts = vec![
                    Put { key, value: encode(&self.record()), lease: self.lease },
                    Put { key: SLOT_KEY.to_owned(), value: slot.to_string(), lease: None },
                ];
                puts.extend(self.shared.put_unless_written(&self.snapshot));
                self.commit(now, Transaction { conditions, puts });
            }
        }
    }

    /// The slot after the one that was given last, so that one is given again as late as possible.
    fn next_free_slot(&self, members: &BTreeMap<String, MemberRecord>) -> Option<u16> {
        let last = self.snapshot.entries.get(SLOT_KEY);
        let last: u16 = last.and_then(|entry| entry.value.parse().ok()).unwrap_or(SLOTS - 1);
        let is_free = |slot: &u16| members.values().all(|member| member.slot != *slot);
        (1..=SLOTS).map(|step| (last % SLOTS + step) % SLOTS).find(is_free)
    }

    fn evaluate_groups(&mut self, now: Instant) {
        let members = self.members();
        let key = member_key(&self.config.name);
        let own = members.get(&self.config.name);
        let Some(own) = own.filter(|own| own.incarnation == self.incarnation) else {
            return self.lose_lease();
        };
        let mut transaction = Transaction::default();
        // The lease of this member is in force when the store executes the transaction.
        transaction.conditions.push(self.unchanged(&key));
        if *own != self.record() {
            transaction.puts.push(Put { key, value: encode(&self.record()), lease: self.lease });
        }
        self.evaluate_configuration(now, &mut transaction);
        let records: BTreeMap<u32, GroupRecord> = self
            .config
            .groups
            .iter()
            .map(|group| (*group, records::group(&self.snapshot, *group)))
            .collect();
        let owners = records.iter().map(|(group, record)| {
            let owner = record.owner.as_ref().filter(|owner| is_member(&members, owner));
            (*group, owner.map(|owner| owner.name.clone()))
        });
        let owners: BTreeMap<u32, Option<String>> = owners.collect();
        let assigned = assign_groups(&members, &owners);
        for (group, record) in records {
            let assigned_to = assigned.get(&group).and_then(Option::as_deref);
            let is_assigned =
                self.state == MemberState::Joined && assigned_to == Some(self.config.name.as_str());
            let is_orphan = owners.get(&group).is_none_or(Option::is_none);
            if let Some(new) = self.evaluate_group(group, record, is_assigned, is_orphan) {
                let key = group_key(group);
                transaction.conditions.push(self.unchanged(&key));
                transaction.puts.push(Put { key, value: encode(&new), lease: None });
            }
            if let Some(GroupPhase::Opened(opened)) = self.phases.get(&group) {
                let puts = opened.records.iter().map(|(key, value)| Put {
                    key: key.clone(),
                    value: value.clone(),
                    lease: None,
                });
                transaction.puts.extend(puts);
            }
        }
        let has_no_groups = || self.phases.values().all(|phase| *phase == GroupPhase::Idle);
        if !transaction.puts.is_empty() {
            self.commit(now, transaction);
        } else if self.state == MemberState::Leaving && has_no_groups() {
            self.lose_lease();
        }
    }

    /// Decides on one group. Returns its new record, if it is to be written.
    fn evaluate_group(
        &mut self,
        group: u32,
        record: GroupRecord,
        is_assigned: bool,
        is_orphan: bool,
    ) -> Option<GroupRecord> {
        let me = self.identity();
        let is_mine = record.owner.as_ref() == Some(&me);
        let is_injected = |bug| self.config.injected_bug == Some(bug);
        let is_claimable = is_orphan || is_injected(InjectedBug::ClaimWithoutExpiry);
        match self.phase(group) {
            GroupPhase::Idle if is_mine && is_assigned => {
                self.begin_takeover(group, record.fences);
                None
            }
            GroupPhase::Idle if is_claimable && is_assigned => {
                let GroupRecord { term, fences, .. } = record;
                Some(GroupRecord { owner: Some(me), term: term + 1, is_open: false, fences })
            }
            // Another member has claimed it, or the release was executed.
            GroupPhase::Closed if !is_mine => {
                self.set_phase(group, GroupPhase::Idle);
                None
            }
            GroupPhase::Idle | GroupPhase::Closed if is_mine => {
                // What was open is closed: the next owner need not fence it.
                let fences = if record.is_open { Vec::new() } else { record.fences };
                Some(GroupRecord { owner: None, is_open: false, fences, ..record })
            }
            GroupPhase::Opened(_) | GroupPhase::Active if !is_mine || !is_assigned => {
                self.close(group);
                None
            }
            GroupPhase::Opened(_) if record.is_open => {
                self.set_phase(group, GroupPhase::Active);
                self.actions.push_back(Action::Activate { group });
                None
            }
            GroupPhase::Opened(OpenedGroup { names, .. }) => {
                Some(GroupRecord { is_open: true, fences: names, ..record })
            }
            _ => None,
        }
    }

    fn begin_takeover(&mut self, group: u32, names: Vec<String>) {
        if names.is_empty() {
            return self.open(group);
        }
        if self.config.injected_bug == Some(InjectedBug::FenceAfterTakeover) {
            self.open(group);
        } else {
            self.set_phase(group, GroupPhase::Fencing);
        }
        self.actions.push_back(Action::Fence { group, names });
    }

    pub(super) fn members(&self) -> BTreeMap<String, MemberRecord> {
        let members = records::members(&self.snapshot);
        members.map(|(name, record)| (name.to_owned(), record)).collect()
    }

    /// Condition that a key has not changed since the snapshot.
    pub(super) fn unchanged(&self, key: &str) -> Condition {
        Condition { key: key.to_owned(), revision: self.snapshot.revision_of(key) }
    }

    fn commit(&mut self, now: Instant, transaction: Transaction) {
        self.pending = Some(self.send(now, StoreOperation::Commit(transaction)));
    }
}

/// Whether an owner is a member now.
pub(super) fn is_member(members: &BTreeMap<String, MemberRecord>, owner: &Owner) -> bool {
    members.get(&owner.name).is_some_and(|member| member.incarnation == owner.incarnation)
}
