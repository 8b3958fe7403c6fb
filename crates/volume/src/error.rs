//! What can go wrong, worded for whoever reads it.

use core::fmt;

use base::{Blame, Outcome};

use crate::devices::{DEVICES_MAX, Label, SPANS_MAX, TABLE_BYTES};
use crate::fence::Owner;
use crate::format::{Kind, VERSION};
use crate::volumes::VOLUMES_MAX;

/// A block of metadata that is not what it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Where it lies, in blocks of 4 KiB.
    pub address: u64,
    /// What it should be, if that is known.
    pub kind: Option<Kind>,
    /// The volume that it belongs to; zero if it serves all, or nobody knows.
    pub owner: u64,
    /// What is wrong with it.
    pub flaw: Flaw,
}

/// What is wrong with a block of metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// The device has not given it.
    Unread(Outcome),
    /// It does not begin like metadata.
    Magic,
    /// Its checksum.
    Checksum {
        /// What it says.
        found: u32,
        /// What its bytes give.
        expected: u32,
    },
    /// It says that it lies elsewhere: a write went astray.
    Address {
        /// Where it says.
        found: u64,
    },
    /// It belongs to another store.
    Store {
        /// Which one.
        found: u128,
    },
    /// It is of another kind, or another level, than what points to it says.
    Kind {
        /// What it says it is.
        found: Kind,
        /// The level it says.
        level: u8,
    },
    /// It is of another generation than what points to it says: a write was lost.
    Generation {
        /// What it says.
        found: u64,
        /// What points to it says.
        expected: u64,
    },
    /// What is in it is beyond the format's limits.
    Contents,
    /// Its records are out of order, overlap, or are beyond the format's limits.
    Records,
    /// Its keys are not those that its parent says, or it points out of the store.
    Bounds,
    /// The count of a block would fall below zero.
    Count,
}

/// Why something that was asked of a store has not been done.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreError {
    /// A block of metadata is damaged.
    Damaged(Damage),
    /// None of the superblocks can be read: here is what is wrong with each.
    NoStore(Vec<Damage>),
    /// The superblocks tell of different stores.
    TwoStores {
        /// One.
        first: u128,
        /// Another.
        second: u128,
    },
    /// The store has a format or features that this program does not know.
    Newer {
        /// Its version.
        version: u32,
        /// The bits that are not known.
        features: u64,
    },
    /// The device is shorter than the store.
    DeviceTooSmall {
        /// Blocks of the device.
        blocks: u64,
        /// Blocks that are needed.
        needed: u64,
    },
    /// The device is larger than any store.
    DeviceTooLarge {
        /// Blocks of the device.
        blocks: u64,
    },
    /// The device is not the first one of its store.
    NotFirst(Box<Label>),
    /// More devices, or longer names of them, than a superblock has room for.
    TooManyDevices {
        /// How many devices.
        devices: usize,
        /// In how many runs the blocks lie on them.
        runs: usize,
        /// Bytes that all but the first one take, names included.
        bytes: usize,
    },
    /// Nothing that a device of a store may be called.
    BadDevice {
        /// What it was called.
        uri: String,
    },
    /// Devices that do not have every block of the store where it lies.
    NotGrown {
        /// Blocks in the store.
        blocks: u64,
        /// Blocks on the devices.
        found: u64,
    },
    /// A volume of this name exists.
    NameTaken(String),
    /// The store has as many volumes as it can.
    TooManyVolumes,
    /// No volume may have this name.
    BadName(String),
    /// There is no such volume.
    NoVolume(String),
    /// A size beyond the limits, or that does not fit.
    BadSize {
        /// The volume.
        name: String,
        /// What was asked for, in blocks of 4 KiB.
        blocks: u64,
    },
    /// A unit of allocation beyond the limits.
    BadUnit(u64),
    /// Thresholds, in per cent, that are none.
    BadThresholds([u8; 2]),
    /// Blocks behind the end of the volume.
    OutOfRange {
        /// The volume.
        name: String,
        /// The first block that was asked for.
        block: u64,
        /// How many.
        count: u64,
        /// How many the volume has.
        blocks: u64,
    },
    /// Nothing can be written to a snapshot.
    ReadOnly(String),
    /// Only a snapshot of the volume can be gone back to.
    NotASnapshotOf {
        /// What was named.
        snapshot: String,
        /// The volume.
        volume: String,
    },
    /// Volumes were made from this snapshot.
    HasChildren {
        /// The snapshot.
        name: String,
        /// How many.
        children: u64,
    },
    /// There is no room.
    NoSpace {
        /// Blocks that are free.
        free: u64,
        /// Blocks of them that are kept for deletions, commits and thick volumes.
        kept: u64,
    },
    /// There is not as much room as a thick volume is to be promised.
    NoRoomForThick {
        /// The volume.
        name: String,
        /// Blocks that are wanted.
        wanted: u64,
        /// Blocks that are there to be promised.
        free: u64,
    },
    /// Nothing that a parent may be called, or be.
    BadParent {
        /// What it was called.
        uri: String,
    },
    /// Blocks of a volume are its parent's, and a thick one has all of its own.
    HasParent(String),
    /// A volume with checksums cannot be thick.
    ThickChecksums(String),
    /// Blocks of a volume are not what was written to them.
    Corrupt {
        /// The volume.
        name: String,
        /// The first block.
        block: u64,
        /// How many that follow one another.
        blocks: u64,
        /// The block of the store in which the first one lies.
        at: u64,
    },
    /// The device has not done what it was told.
    Device {
        /// What it was told.
        what: &'static str,
        /// Its answer.
        outcome: Outcome,
    },
    /// The device has lost completed writes, and what is durable cannot be read again.
    NotReread {
        /// Why, what was expected, and the fix.
        why: String,
    },
    /// Somebody else has the store open for writing, and may still be there.
    Owned {
        /// Who.
        by: Box<Owner>,
    },
    /// Somebody else owns the store by now, or has made another one in its place: nothing is written to
    /// it any more, nor read from it.
    TakenOver {
        /// Who, if that is known.
        by: Option<Box<Owner>>,
    },
    /// What was flushed is not on the device any more.
    WentBack {
        /// The newest generation that is there.
        found: u64,
        /// The one that was made durable.
        expected: u64,
    },
    /// A write of metadata went wrong earlier; the store takes no changes until it is opened anew.
    Stopped,
}

impl Damage {
    /// Damage of a block of which nothing else is known.
    pub(crate) const fn at(address: u64, flaw: Flaw) -> Self {
        Self { address, kind: None, owner: 0, flaw }
    }
}

impl From<Damage> for StoreError {
    fn from(damage: Damage) -> Self {
        Self::Damaged(damage)
    }
}

impl StoreError {
    /// Whose move it is.
    pub const fn blame(&self) -> Blame {
        match self {
            Self::Damaged(_)
            | Self::Corrupt { .. }
            | Self::Device { .. }
            | Self::NotReread { .. }
            | Self::WentBack { .. }
            | Self::Stopped => Blame::Peer,
            Self::NoSpace { .. }
            | Self::NoRoomForThick { .. }
            | Self::TwoStores { .. }
            | Self::Owned { .. }
            | Self::TakenOver { .. } => Blame::Machine,
            _ => Blame::Caller,
        }
    }

    /// What a request for blocks is answered with.
    pub const fn outcome(&self) -> Outcome {
        match self {
            Self::Damaged(_) | Self::Corrupt { .. } => Outcome::UNRECOVERED_READ,
            Self::NoSpace { .. } | Self::NoRoomForThick { .. } => Outcome::CAPACITY_EXCEEDED,
            Self::OutOfRange { .. } => Outcome::LBA_OUT_OF_RANGE,
            Self::ReadOnly(_) => Outcome::WRITE_PROTECTED,
            Self::Device { outcome, .. } => *outcome,
            Self::Stopped | Self::WentBack { .. } | Self::NotReread { .. } => Outcome::WRITE_FAULT,
            Self::Owned { .. } | Self::TakenOver { .. } => Outcome::RESERVATION_CONFLICT,
            _ => Outcome::INTERNAL_ERROR,
        }
    }

    /// What can be done about it, if there is something.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::Damaged(_) => "what this block describes is lost; check the whole store.",
            Self::NoStore(_) => "name a device that a store was made on, or make one.",
            Self::TwoStores { .. } => "two stores claim the device; wipe the end of the older one.",
            Self::Newer { .. } => "open it with a newer tenmil.",
            Self::NotFirst(label) => {
                return Some(format!("name the first one: it was {} then.", label.first_uri));
            }
            Self::TooManyDevices { .. } => "give it fewer and larger devices, or shorter names.",
            Self::NameTaken(_) => "choose another name, or delete that volume first.",
            Self::TooManyVolumes => "delete volumes or snapshots that nobody needs.",
            Self::BadName(_) => "a name has 1 to 128 bytes and no control or format characters.",
            Self::BadSize { .. } => {
                "a volume has 1 block of 4 KiB at least and 2^60 bytes at most."
            }
            Self::BadUnit(_) => "a unit is 4, 8, 16, 32 or 64 KiB.",
            Self::ReadOnly(_) => "make a clone of it and write to that.",
            Self::HasChildren { .. } => {
                "delete those first, or say that they are to be on their own."
            }
            Self::NoSpace { .. } => {
                "delete volumes or trim them; nothing that was written is lost."
            }
            Self::NoRoomForThick { .. } => {
                "delete or trim other volumes, or give the device more room and say `tenmil store grow`; nothing was taken."
            }
            Self::BadParent { .. } => {
                "name a device of 4 KiB at least by 2048 bytes at most, without control characters."
            }
            Self::HasParent(_) => {
                "copy what it has from its parent first: `tenmil volume decouple`."
            }
            Self::ThickChecksums(_) => {
                "have it thick or with checksums: a block with a checksum moves whenever it is written."
            }
            Self::Corrupt { .. } => {
                "write these blocks anew from a copy; `tenmil store scrub` looks for others."
            }
            Self::Stopped => "see to the device; the store goes on by itself once it can be read.",
            Self::WentBack { .. } => {
                "the device has lost flushed writes; check the store, and restore what it lacks."
            }
            Self::Owned { .. } => {
                "end that process, or take the store over: `tenmil store takeover DEVICE`, which needs NVMe \
                 reservations; if it or its machine is gone for certain: `tenmil store takeover DEVICE \
                 --force`."
            }
            Self::TakenOver { .. } => {
                "what was not flushed before is not in the store; end what uses it here, and use it where \
                 it is open now."
            }
            _ => return None,
        };
        Some(text.into())
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = self.kind.map_or("block of metadata", Kind::name);
        write!(out, "{what} at block {}", self.address)?;
        if self.owner != 0 {
            write!(out, " (volume {})", self.owner)?;
        }
        write!(out, ": {}", self.flaw)
    }
}

impl fmt::Display for Flaw {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unread(outcome) => write!(out, "the device answered {outcome}"),
            Self::Magic => write!(out, "it does not begin like metadata of a store"),
            Self::Checksum { found, expected } => {
                write!(out, "its checksum is {found:#010x}, expected {expected:#010x}")
            }
            Self::Address { found } => write!(out, "it says that it lies at block {found}"),
            Self::Store { found } => write!(out, "it belongs to store {found:032x}"),
            Self::Kind { found, level } => {
                write!(out, "it says that it is a {} of level {level}", found.name())
            }
            Self::Generation { found, expected } => {
                write!(out, "its generation is {found}, expected {expected}")
            }
            Self::Contents => write!(out, "what it holds is beyond the limits of the format"),
            Self::Records => write!(out, "its records are out of order or beyond the limits"),
            Self::Bounds => write!(out, "its keys or children are not those its parent allows"),
            Self::Count => write!(out, "it is counted less often than it is used"),
        }
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Damaged(damage) => write!(out, "{damage}"),
            Self::NoStore(found) => {
                write!(out, "open the store: no superblock can be read")?;
                found.iter().try_for_each(|damage| write!(out, "; {damage}"))
            }
            Self::TwoStores { first, second } => {
                write!(out, "open the store: found both {first:032x} and {second:032x}")
            }
            Self::Newer { version, features } => write!(
                out,
                "open the store: version {version} with unknown features {features:#x}, expected version {VERSION} and none"
            ),
            Self::DeviceTooSmall { blocks, needed } => {
                write!(out, "the device has {blocks} blocks of 4 KiB, expected {needed} at least")
            }
            Self::DeviceTooLarge { blocks } => {
                write!(out, "the device has {blocks} blocks of 4 KiB, expected 2^48 at most")
            }
            Self::NotFirst(label) => {
                let Label { store, name, number, .. } = &**label;
                write!(
                    out,
                    "open the store: it is device {number} of store `{name}` ({store:032x}), expected the \
                     first one, which is device 0"
                )
            }
            Self::TooManyDevices { devices, runs, bytes } => write!(
                out,
                "{devices} devices with {runs} runs of blocks, and {bytes} bytes to say which, expected \
                 {DEVICES_MAX} devices, {} runs and {TABLE_BYTES} bytes at most",
                SPANS_MAX + 1
            ),
            Self::BadDevice { uri } => {
                write!(out, "device `{uri}`: its name is empty, too long or has control characters")
            }
            Self::NotGrown { blocks, found } => write!(
                out,
                "devices with {found} blocks of 4 KiB that do not have the {blocks} of the store as they \
                 lie, expected these and more behind them"
            ),
            Self::NameTaken(name) => write!(out, "volume `{name}`: the name is in use"),
            Self::TooManyVolumes => {
                write!(
                    out,
                    "the store has {VOLUMES_MAX} volumes and snapshots, and no room for more"
                )
            }
            Self::BadName(name) => write!(out, "volume `{}`: not a name", name.escape_debug()),
            Self::NoVolume(name) => write!(out, "volume `{name}`: there is none"),
            Self::BadSize { name, blocks } => {
                write!(out, "volume `{name}`: it cannot have {blocks} blocks of 4 KiB")
            }
            Self::BadThresholds([low, high]) => write!(
                out,
                "thresholds of {low} and {high} per cent, expected 100 at most, the lower one first"
            ),
            Self::BadUnit(blocks) => write!(out, "a unit cannot have {blocks} blocks of 4 KiB"),
            Self::OutOfRange { name, block, count, blocks } => write!(
                out,
                "volume `{name}`: {count} blocks from block {block} on, expected an end at {blocks} at most"
            ),
            Self::ReadOnly(name) => write!(out, "volume `{name}`: it is a snapshot"),
            Self::NotASnapshotOf { snapshot, volume } => {
                write!(out, "volume `{volume}`: `{snapshot}` is not a snapshot of it")
            }
            Self::HasChildren { name, children } => {
                write!(out, "delete `{name}`: {children} volumes were made from it")
            }
            Self::NoSpace { free, kept } if free > kept => write!(
                out,
                "the store is full: {free} blocks of 4 KiB are free, {kept} of them kept for deletions \
                 and thick volumes, but not as many in one piece as a unit has"
            ),
            Self::NoSpace { free, kept } => write!(
                out,
                "the store is full: {free} blocks of 4 KiB are free, and {kept} are kept for deletions \
                 and thick volumes"
            ),
            Self::NoRoomForThick { name, wanted, free } => write!(
                out,
                "volume `{name}`: to be thick it wants {wanted} blocks of 4 KiB more, found {free} that \
                 are free and not kept for others"
            ),
            Self::BadParent { uri } => {
                write!(out, "parent `{uri}`: no volume can be made over it")
            }
            Self::HasParent(name) => {
                write!(out, "volume `{name}`: blocks of it are its parent's, expected all its own")
            }
            Self::ThickChecksums(name) => {
                write!(out, "volume `{name}`: it has checksums, expected none in one that is thick")
            }
            Self::Corrupt { name, block, blocks, at } => write!(
                out,
                "volume `{name}`: {blocks} blocks from block {block} on, at block {at} of the store: \
                 what is there does not have the checksum on record"
            ),
            Self::Device { what, outcome } => {
                write!(out, "{what}: the device answered {outcome}")
            }
            Self::NotReread { why } => {
                write!(
                    out,
                    "the device lost completed writes, and the store is not recovered: {why}"
                )
            }
            Self::Owned { by } => {
                write!(out, "open the store for writing: {by} has it open, expected nobody")
            }
            Self::TakenOver { by: Some(by) } => {
                write!(out, "the store was taken over by {by}: it is not used here any more")
            }
            Self::TakenOver { by: None } => write!(
                out,
                "the store was taken over or made anew by somebody else: it is not used here any more"
            ),
            Self::WentBack { found, expected } => write!(
                out,
                "the device has generation {found} of the store, expected {expected}, which was flushed"
            ),
            Self::Stopped => write!(out, "the store takes no changes since a write went wrong"),
        }
    }
}

impl core::error::Error for StoreError {}
