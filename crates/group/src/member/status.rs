//! What a member knows of its group, for reports and for the target.

use std::collections::BTreeMap;

use tenmil_base::Instant;

use super::evaluate::is_member;
use super::{GroupPhase, Member, MemberState};
use crate::records::{self, GroupRecord, MemberRecord};
use crate::store::Snapshot;

/// What a member knows of its group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberStatus {
    /// Name of the member.
    pub name: String,
    /// State of its membership.
    pub state: MemberState,
    /// Slot of its controller identifiers, while it is a member.
    pub slot: Option<u16>,
    /// Members that hold a lease, by name.
    pub members: BTreeMap<String, MemberRecord>,
    /// Records of the ANA groups, each with whether its owner is a member.
    pub groups: BTreeMap<u32, (GroupRecord, bool)>,
    /// Phases of the ANA groups at this member.
    pub phases: BTreeMap<u32, GroupPhase>,
    /// Cause of the last operation without a reply, until one has a reply.
    pub store_trouble: Option<String>,
}

impl Member {
    /// What this member knows of its group.
    #[must_use]
    pub fn status(&self) -> MemberStatus {
        let members = self.members();
        let groups = self.config.groups.iter().map(|group| {
            let record = records::group(&self.snapshot, *group);
            let is_owned = record.owner.as_ref().is_some_and(|owner| is_member(&members, owner));
            (*group, (record, is_owned))
        });
        MemberStatus {
            name: self.config.name.clone(),
            state: self.state,
            slot: matches!(self.state, MemberState::Joined | MemberState::Leaving)
                .then_some(self.slot),
            groups: groups.collect(),
            members,
            phases: self.phases.clone(),
            store_trouble: self.store_trouble.clone(),
        }
    }

    /// The last snapshot of the map.
    #[must_use]
    pub const fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// Whether the controllers of a slot cannot execute a command any more, because no member has the slot:
    /// former members have stopped before their leases have ended. False without a recent snapshot, and for the
    /// slots of this process, which knows its controllers itself.
    #[must_use]
    pub fn has_slot_ended(&self, now: Instant, slot: u16) -> bool {
        let is_recent =
            self.snapshot_sent.is_some_and(|sent| now.since(sent) <= self.config.timing.lease);
        is_recent
            && self.state == MemberState::Joined
            && !self.own_slots.contains(&slot)
            && self.members().values().all(|member| member.slot != slot)
    }
}
