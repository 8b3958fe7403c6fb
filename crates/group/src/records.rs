//! Keys and values of the shared map.
//!
//! | key | value | ends with the lease |
//! |---|---|---|
//! | `member/NAME` | [`MemberRecord`] | yes |
//! | `group/ID` | [`GroupRecord`]: owner of an ANA group | no |
//! | `slot` | last slot of controller identifiers that was given to a member | no |
//! | `configuration` | configuration that all members share, in a text that they compare | no |
//! | `namespace/NQN/NSID` | [`NamespaceRecord`]: geometry, for members that do not have the device open | no |

use serde::{Deserialize, Serialize};
use tenmil_base::{Durability, Limits, Operation, OperationSet};

use super::store::Snapshot;

/// Member of the group that holds a lease.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberRecord {
    /// Number that distinguishes this membership from all others of the same name.
    pub incarnation: u64,
    /// Slot of its controller identifiers.
    pub slot: u16,
    /// Addresses at which hosts connect.
    pub addresses: Vec<String>,
    /// Whether it shall own no ANA group.
    #[serde(default)]
    pub is_draining: bool,
    /// Whether hosts have had the time to connect to it: others hand over ANA groups to it.
    #[serde(default)]
    pub is_settled: bool,
    /// ANA groups whose devices it cannot open now.
    #[serde(default)]
    pub refused: Vec<u32>,
}

/// Owner of an ANA group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupRecord {
    /// Membership that owns the group; none after a release.
    pub owner: Option<Owner>,
    /// Number of the ownership: each claim has a higher one.
    pub term: u64,
    /// Whether the owner has the devices open, and every medium has been fenced from earlier owners.
    #[serde(default)]
    pub is_open: bool,
    /// What the next owner has to fence: names of this owner and of earlier ones at the media.
    #[serde(default)]
    pub fences: Vec<String>,
}

/// Membership that owns an ANA group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// Name of the member.
    pub name: String,
    /// Incarnation of the member.
    pub incarnation: u64,
}

/// Geometry of a namespace, as its last owner has found it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceRecord {
    /// Bytes of a block.
    block_size: u32,
    block_count: u64,
    request_blocks_max: u32,
    segments_max: u16,
    optimal_boundary_blocks: u32,
    atomic_write_blocks: u32,
    depth_max: u32,
    durability: DurabilityName,
    /// Bits of [`OperationSet::bits`].
    operations: u16,
}

/// Durability of completed writes, by its name in the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum DurabilityName {
    Persistent,
    VolatileCache,
    NonPersistent,
}

impl NamespaceRecord {
    /// Record of a device with these limits.
    #[must_use]
    pub fn of_limits(limits: &Limits) -> Self {
        Self {
            block_size: limits.block_size,
            block_count: limits.block_count,
            request_blocks_max: limits.request_blocks_max,
            segments_max: limits.segments_max,
            optimal_boundary_blocks: limits.optimal_boundary_blocks,
            atomic_write_blocks: limits.atomic_write_blocks,
            depth_max: limits.depth_max,
            durability: match limits.durability {
                Durability::Persistent => DurabilityName::Persistent,
                Durability::VolatileCache => DurabilityName::VolatileCache,
                Durability::NonPersistent => DurabilityName::NonPersistent,
            },
            operations: limits.operations.bits(),
        }
    }

    /// Limits of the device. A record with a block size that is no power of two, or without blocks, is of no
    /// device.
    #[must_use]
    pub fn limits(&self) -> Option<Limits> {
        if !self.block_size.is_power_of_two() || self.request_blocks_max == 0 {
            return None;
        }
        let operations =
            Operation::ALL.into_iter().filter(|it| self.operations >> *it as u16 & 1 == 1);
        let operations: Vec<Operation> = operations.collect();
        Some(Limits {
            block_size: self.block_size,
            metadata_size: 0,
            block_count: self.block_count,
            request_blocks_max: self.request_blocks_max,
            segments_max: self.segments_max,
            optimal_boundary_blocks: self.optimal_boundary_blocks,
            atomic_write_blocks: self.atomic_write_blocks,
            depth_max: self.depth_max,
            durability: match self.durability {
                DurabilityName::Persistent => Durability::Persistent,
                DurabilityName::VolatileCache => Durability::VolatileCache,
                DurabilityName::NonPersistent => Durability::NonPersistent,
            },
            operations: OperationSet::from_operations(&operations),
        })
    }
}

/// First controller identifier of a slot, and their number.
#[must_use]
pub const fn controller_ids_of_slot(slot: u16) -> (u16, u16) {
    (1 + (slot % SLOTS) * SLOT_LEN, SLOT_LEN)
}

/// Slot of a controller identifier; none of those that no slot has.
#[must_use]
pub const fn slot_of_controller_id(cntlid: u16) -> Option<u16> {
    if cntlid == 0 || cntlid > SLOTS * SLOT_LEN { None } else { Some((cntlid - 1) / SLOT_LEN) }
}

/// Number of slots. A slot is given again after all others have been.
pub const SLOTS: u16 = 31;
/// Controller identifiers of a slot.
const SLOT_LEN: u16 = 2048;
// CNTLID: FFF0h and higher are reserved (Base 2.1, Figure 312).
const _: () = assert!(SLOTS as u32 * (SLOT_LEN as u32) < 0xfff0);

/// Key of a member.
pub(crate) fn member_key(name: &str) -> String {
    format!("{MEMBER}{name}")
}

/// Key of an ANA group.
pub(crate) fn group_key(group: u32) -> String {
    format!("{GROUP}{group}")
}

/// Key of a namespace.
#[must_use]
pub fn namespace_key(nqn: &str, nsid: u32) -> String {
    format!("namespace/{nqn}/{nsid}")
}

pub(crate) const SLOT_KEY: &str = "slot";
pub(crate) const CONFIGURATION_KEY: &str = "configuration";
const MEMBER: &str = "member/";
const GROUP: &str = "group/";

/// Members that hold a lease, by name.
pub(crate) fn members(snapshot: &Snapshot) -> impl Iterator<Item = (&str, MemberRecord)> + use<'_> {
    let entries = snapshot.entries.iter();
    entries.filter_map(|(key, entry)| Some((key.strip_prefix(MEMBER)?, decode(&entry.value)?)))
}

/// Record of an ANA group; the default one if there is none.
pub(crate) fn group(snapshot: &Snapshot, group: u32) -> GroupRecord {
    let entry = snapshot.entries.get(&group_key(group));
    entry.and_then(|entry| decode(&entry.value)).unwrap_or_default()
}

/// Record of a namespace.
#[must_use]
pub fn namespace(snapshot: &Snapshot, nqn: &str, nsid: u32) -> Option<NamespaceRecord> {
    decode(&snapshot.entries.get(&namespace_key(nqn, nsid))?.value)
}

/// Text of a record.
#[must_use]
pub fn encode<T: Serialize>(record: &T) -> String {
    serde_json::to_string(record).unwrap_or_default()
}

fn decode<T: for<'a> Deserialize<'a>>(text: &str) -> Option<T> {
    serde_json::from_str(text).ok()
}

#[cfg(test)]
mod tests {
    use super::{SLOTS, controller_ids_of_slot, slot_of_controller_id};

    #[test]
    fn each_controller_id_belongs_to_one_slot() {
        let mut next = 1;
        for slot in 0..SLOTS {
            let (first, count) = controller_ids_of_slot(slot);
            assert_eq!(first, next);
            for cntlid in [first, first + count - 1] {
                assert_eq!(slot_of_controller_id(cntlid), Some(slot));
            }
            next = first + count;
        }
        assert_eq!(slot_of_controller_id(0), None);
        assert_eq!(slot_of_controller_id(next), None);
    }
}
