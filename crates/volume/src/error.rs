//! Errors of a pool and their texts.

use core::fmt;

use tenmil_base::{ErrorCategory, IoStatus};

use crate::device_table::{DEVICES_MAX, DeviceLabel, SPANS_MAX, TABLE_BYTES};
use crate::format::{BlockKind, VERSION};
use crate::ownership::PoolOwner;
use crate::volume_catalog::VOLUMES_MAX;

/// Damaged metadata block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Corruption {
    /// Address in blocks of 4 KiB.
    pub address: u64,
    /// Expected kind, if known.
    pub kind: Option<BlockKind>,
    /// Owning volume; zero if it belongs to the pool or is unknown.
    pub owner: u64,
    /// Kind of damage.
    pub flaw: CorruptionKind,
}

/// Kind of damage of a metadata block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CorruptionKind {
    /// The device did not return it.
    ReadError(IoStatus),
    /// The header has no magic number.
    Magic,
    /// Wrong checksum.
    Checksum {
        /// Stored checksum.
        found: u32,
        /// Computed checksum.
        expected: u32,
    },
    /// It has another address in its header: a misdirected write.
    Address {
        /// Address in the header.
        found: u64,
    },
    /// It belongs to another pool.
    Store {
        /// UUID of that pool.
        found: u128,
    },
    /// Its kind or level is not that of the reference to it.
    Kind {
        /// Kind found.
        found: BlockKind,
        /// Level found.
        level: u8,
    },
    /// Its generation is not that of the reference to it: a lost write.
    Generation {
        /// Generation found.
        found: u64,
        /// Generation in the reference.
        expected: u64,
    },
    /// Its contents exceed the limits of the format.
    Contents,
    /// Its records are not in order, overlap, or exceed the limits of the format.
    Records,
    /// Its keys are outside the range of its parent, or it refers to blocks outside the pool.
    Bounds,
    /// A reference count would become negative.
    Count,
}

/// Reason why a request to a pool failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PoolError {
    /// A metadata block is damaged.
    Damaged(Corruption),
    /// No superblock is valid; each with its damage.
    NotAPool(Vec<Corruption>),
    /// The superblocks belong to different pools.
    MixedSuperblocks {
        /// One pool.
        first: u128,
        /// Another pool.
        second: u128,
    },
    /// The pool has an unsupported format version or feature.
    UnsupportedVersion {
        /// Version found.
        version: u32,
        /// Unsupported feature bits.
        features: u64,
    },
    /// The device is smaller than the pool.
    DeviceTooSmall {
        /// Blocks of the device.
        blocks: u64,
        /// Blocks needed.
        needed: u64,
    },
    /// The device exceeds the maximum size of a pool.
    DeviceTooLarge {
        /// Blocks of the device.
        blocks: u64,
    },
    /// The device is not the first one of its pool.
    NotFirst(Box<DeviceLabel>),
    /// The device table does not fit in a superblock.
    TooManyDevices {
        /// Number of devices.
        devices: usize,
        /// Number of runs on them.
        runs: usize,
        /// Bytes of the table, including names.
        bytes: usize,
    },
    /// Invalid device name.
    BadDevice {
        /// URI given.
        uri: String,
    },
    /// The devices do not have every block of the pool at its place.
    NotGrown {
        /// Blocks of the pool.
        blocks: u64,
        /// Blocks on the devices.
        found: u64,
    },
    /// A volume with this name exists.
    NameExists(String),
    /// The pool has the maximum number of volumes.
    TooManyVolumes,
    /// Invalid volume name.
    BadName(String),
    /// The volume does not exist.
    NoVolume(String),
    /// Invalid volume size.
    BadSize {
        /// Volume name.
        name: String,
        /// Size given, in blocks of 4 KiB.
        blocks: u64,
    },
    /// Invalid cluster size.
    BadUnit(u64),
    /// Invalid thresholds in percent.
    BadThresholds([u8; 2]),
    /// Blocks beyond the end of the volume.
    OutOfRange {
        /// Volume name.
        name: String,
        /// First block requested.
        block: u64,
        /// Number of blocks requested.
        count: u64,
        /// Blocks of the volume.
        blocks: u64,
    },
    /// The volume is a read-only snapshot.
    ReadOnly(String),
    /// A volume can be rolled back only to its own snapshot.
    NotOwnSnapshot {
        /// Snapshot given.
        snapshot: String,
        /// Volume name.
        volume: String,
    },
    /// Clones of this snapshot exist.
    HasChildren {
        /// Snapshot name.
        name: String,
        /// Number of clones.
        children: u64,
    },
    /// The pool is full.
    NoSpace {
        /// Free blocks.
        free: u64,
        /// Free blocks reserved for deletions, commits and thick volumes.
        kept: u64,
    },
    /// There is not enough space to reserve for a thick volume.
    NoSpaceForThick {
        /// Volume name.
        name: String,
        /// Blocks needed.
        wanted: u64,
        /// Blocks available for reservation.
        free: u64,
    },
    /// Invalid parent.
    BadParent {
        /// URI given.
        uri: String,
    },
    /// The volume still reads blocks from its parent, and a thick volume must own all its blocks.
    HasParent(String),
    /// A volume with checksums cannot be thick.
    ThickChecksums(String),
    /// The checksums of blocks do not match.
    Corrupt {
        /// Volume name.
        name: String,
        /// First block.
        block: u64,
        /// Number of adjacent blocks.
        blocks: u64,
        /// Pool block of the first one.
        at: u64,
    },
    /// A device operation failed.
    Device {
        /// Operation.
        what: &'static str,
        /// Status.
        status: IoStatus,
    },
    /// The device has lost completed writes, by its own count.
    WritesLost,
    /// The device has lost completed writes while blocks were read, so they may be older than the map.
    ReadInterrupted,
    /// The device has lost completed writes, and what is durable cannot be read again.
    NotReread {
        /// Why, what was expected, and the fix.
        why: String,
    },
    /// Another owner has the pool open for writing, and may still run.
    Owned {
        /// Its owner record.
        by: Box<PoolOwner>,
    },
    /// Another process owns the pool by now, or has created another pool in its place: the pool is
    /// neither written nor read anymore.
    TakenOver {
        /// New owner, if known.
        by: Option<Box<PoolOwner>>,
    },
    /// Flushed data are missing on the device.
    WentBack {
        /// Newest generation found.
        found: u64,
        /// Generation that was made durable.
        expected: u64,
    },
    /// A metadata write failed earlier; the pool accepts no changes until it is reopened.
    ReadOnlyAfterError,
}

impl Corruption {
    /// Damage of a block without further information.
    pub(crate) const fn at_address(address: u64, flaw: CorruptionKind) -> Self {
        Self { address, kind: None, owner: 0, flaw }
    }
}

impl From<Corruption> for PoolError {
    fn from(damage: Corruption) -> Self {
        Self::Damaged(damage)
    }
}

impl PoolError {
    /// Error category.
    pub const fn category(&self) -> ErrorCategory {
        match self {
            Self::Damaged(_)
            | Self::Corrupt { .. }
            | Self::Device { .. }
            | Self::WritesLost
            | Self::ReadInterrupted
            | Self::NotReread { .. }
            | Self::WentBack { .. }
            | Self::ReadOnlyAfterError => ErrorCategory::Remote,
            Self::NoSpace { .. }
            | Self::NoSpaceForThick { .. }
            | Self::MixedSuperblocks { .. }
            | Self::Owned { .. }
            | Self::TakenOver { .. } => ErrorCategory::Environment,
            _ => ErrorCategory::Usage,
        }
    }

    /// Status of an I/O request that fails with this error.
    pub const fn status(&self) -> IoStatus {
        match self {
            Self::Damaged(_) | Self::Corrupt { .. } => IoStatus::UNRECOVERED_READ,
            Self::NoSpace { .. } | Self::NoSpaceForThick { .. } => IoStatus::CAPACITY_EXCEEDED,
            Self::OutOfRange { .. } => IoStatus::LBA_OUT_OF_RANGE,
            Self::ReadOnly(_) => IoStatus::WRITE_PROTECTED,
            Self::Device { status, .. } => *status,
            Self::ReadOnlyAfterError
            | Self::WentBack { .. }
            | Self::WritesLost
            | Self::NotReread { .. } => IoStatus::WRITE_FAULT,
            // The host repeats the command.
            Self::ReadInterrupted => IoStatus::INTERRUPTED,
            Self::Owned { .. } | Self::TakenOver { .. } => IoStatus::RESERVATION_CONFLICT,
            _ => IoStatus::INTERNAL_ERROR,
        }
    }

    /// Suggested remedy, if there is one.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::Damaged(_) => "what this block describes is lost; check the whole pool.",
            Self::NotAPool(_) => "name a device that a pool was made on, or make one.",
            Self::MixedSuperblocks { .. } => {
                "two pools claim the device; wipe the end of the older one."
            }
            Self::UnsupportedVersion { .. } => "open it with a newer tenmil.",
            Self::NotFirst(label) => {
                return Some(format!("name the first one: it was {} then.", label.first_uri));
            }
            Self::TooManyDevices { .. } => "give it fewer and larger devices, or shorter names.",
            Self::NameExists(_) => "choose another name, or delete that volume first.",
            Self::TooManyVolumes => "delete volumes or snapshots that are not needed.",
            Self::BadName(_) => "a name has 1 to 128 bytes and no control or format characters.",
            Self::BadSize { .. } => {
                "a volume has 1 block of 4 KiB at least and 2^60 bytes at most."
            }
            Self::BadUnit(_) => "a unit is 4, 8, 16, 32 or 64 KiB.",
            Self::ReadOnly(_) => "make a clone of it and write to that.",
            Self::HasChildren { .. } => "delete those first, or decouple them.",
            Self::NoSpace { .. } => {
                "delete volumes or trim them; nothing that was written is lost."
            }
            Self::NoSpaceForThick { .. } => {
                "delete or trim other volumes, or extend the device and run `tenmil pool grow`; nothing was allocated."
            }
            Self::BadParent { .. } => {
                "name a device of 4 KiB at least by 2048 bytes at most, without control characters."
            }
            Self::HasParent(_) => {
                "copy what it has from its parent first: `tenmil volume decouple`."
            }
            Self::ThickChecksums(_) => {
                "make it thick or give it checksums: a block with a checksum is reallocated whenever it is written."
            }
            Self::Corrupt { .. } => {
                "write these blocks anew from a copy; `tenmil pool scrub` looks for others."
            }
            Self::ReadOnlyAfterError => {
                "see to the device; the pool goes on by itself once it can be read."
            }
            Self::WentBack { .. } => {
                "the device has lost flushed writes; check the pool, and restore what it lacks."
            }
            Self::Owned { .. } => {
                "end that process, or take the pool over: `tenmil pool takeover DEVICE`, which needs NVMe \
                 reservations; if it or its machine has certainly ended: `tenmil pool takeover DEVICE \
                 --force`."
            }
            Self::TakenOver { .. } => {
                "what was not flushed before is not in the pool; end what uses it here, and use it where \
                 it is open now."
            }
            _ => return None,
        };
        Some(text.into())
    }
}

impl fmt::Display for Corruption {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = self.kind.map_or("block of metadata", BlockKind::name);
        write!(out, "{what} at block {}", self.address)?;
        if self.owner != 0 {
            write!(out, " (volume {})", self.owner)?;
        }
        write!(out, ": {}", self.flaw)
    }
}

impl fmt::Display for CorruptionKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ReadError(status) => write!(out, "the device returned {status}"),
            Self::Magic => write!(out, "it does not begin like metadata of a pool"),
            Self::Checksum { found, expected } => {
                write!(out, "its checksum is {found:#010x}, expected {expected:#010x}")
            }
            Self::Address { found } => write!(out, "its own address is block {found}"),
            Self::Store { found } => write!(out, "it belongs to pool {found:032x}"),
            Self::Kind { found, level } => {
                write!(out, "it is labeled a {} of level {level}", found.name())
            }
            Self::Generation { found, expected } => {
                write!(out, "its generation is {found}, expected {expected}")
            }
            Self::Contents => write!(out, "its contents exceed the limits of the format"),
            Self::Records => write!(out, "its records are out of order or beyond the limits"),
            Self::Bounds => write!(out, "its keys or children are not those its parent allows"),
            Self::Count => write!(out, "it is counted less often than it is used"),
        }
    }
}

impl fmt::Display for PoolError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Damaged(damage) => write!(out, "{damage}"),
            Self::NotAPool(found) => {
                write!(out, "open the pool: no superblock can be read")?;
                found.iter().try_for_each(|damage| write!(out, "; {damage}"))
            }
            Self::MixedSuperblocks { first, second } => {
                write!(out, "open the pool: found both {first:032x} and {second:032x}")
            }
            Self::UnsupportedVersion { version, features } => write!(
                out,
                "open the pool: version {version} with unknown features {features:#x}, expected version {VERSION} and none"
            ),
            Self::DeviceTooSmall { blocks, needed } => {
                write!(out, "the device has {blocks} blocks of 4 KiB, expected {needed} at least")
            }
            Self::DeviceTooLarge { blocks } => {
                write!(out, "the device has {blocks} blocks of 4 KiB, expected 2^48 at most")
            }
            Self::NotFirst(label) => {
                let DeviceLabel { store, name, number, .. } = &**label;
                write!(
                    out,
                    "open the pool: it is device {number} of pool `{name}` ({store:032x}), expected the \
                     first one, which is device 0"
                )
            }
            Self::TooManyDevices { devices, runs, bytes } => write!(
                out,
                "{devices} devices with {runs} runs of blocks, and {bytes} bytes to describe them, expected \
                 {DEVICES_MAX} devices, {} runs and {TABLE_BYTES} bytes at most",
                SPANS_MAX + 1
            ),
            Self::BadDevice { uri } => {
                write!(out, "device `{uri}`: its name is empty, too long or has control characters")
            }
            Self::NotGrown { blocks, found } => write!(
                out,
                "devices with {found} blocks of 4 KiB that do not have the {blocks} of the pool as they \
                 lie, expected these and more behind them"
            ),
            Self::NameExists(name) => write!(out, "volume `{name}`: the name is in use"),
            Self::TooManyVolumes => {
                write!(
                    out,
                    "the pool has {VOLUMES_MAX} volumes and snapshots, the maximum"
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
            Self::NotOwnSnapshot { snapshot, volume } => {
                write!(out, "volume `{volume}`: `{snapshot}` is not a snapshot of it")
            }
            Self::HasChildren { name, children } => {
                write!(out, "delete `{name}`: {children} volumes were made from it")
            }
            Self::NoSpace { free, kept } if free > kept => write!(
                out,
                "the pool is full: {free} blocks of 4 KiB are free, {kept} of them reserved for deletions \
                 and thick volumes, but not as many in one piece as a unit has"
            ),
            Self::NoSpace { free, kept } => write!(
                out,
                "the pool is full: {free} blocks of 4 KiB are free, and {kept} are reserved for deletions \
                 and thick volumes"
            ),
            Self::NoSpaceForThick { name, wanted: needed, free } => write!(
                out,
                "volume `{name}`: to be thick it needs {needed} more blocks of 4 KiB, found {free} that \
                 are free and not reserved for others"
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
                "volume `{name}`: {blocks} blocks from block {block} on, at block {at} of the pool: \
                 what is there does not have the checksum on record"
            ),
            Self::Device { what, status } => {
                write!(out, "{what}: the device returned {status}")
            }
            Self::WritesLost => {
                out.write_str("the device lost completed writes that were not flushed")
            }
            Self::ReadInterrupted => out.write_str(
                "read blocks of a volume: the device lost completed writes meanwhile, so the blocks may \
                 be older than the map of the volume",
            ),
            Self::NotReread { why } => {
                write!(
                    out,
                    "the device lost completed writes, and the pool is not recovered: {why}"
                )
            }
            Self::Owned { by } => {
                write!(out, "open the pool for writing: {by} has it open, expected no owner")
            }
            Self::TakenOver { by: Some(by) } => {
                write!(out, "the pool was taken over by {by}: it is not used here any more")
            }
            Self::TakenOver { by: None } => write!(
                out,
                "the pool was taken over or recreated by another process: it is not used here any more"
            ),
            Self::WentBack { found, expected } => write!(
                out,
                "the device has generation {found} of the pool, expected {expected}, which was flushed"
            ),
            Self::ReadOnlyAfterError => {
                write!(out, "the pool is read-only since a write failed")
            }
        }
    }
}

impl core::error::Error for PoolError {}
