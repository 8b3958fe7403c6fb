//! Namespace snapshot for a controller's queues, and its publication to them.
//!
//! ```text
//!   Controller ── publish ──▶ Versioned<Namespaces> ◀── one relaxed load per poll ── Queue
//!   (one thread)              generation, Arc                            (any reactor)
//! ```
//!
//! A snapshot is immutable. A change to a namespace, be it a resize, format, reservation or detachment,
//! creates a new snapshot of all namespaces; a queue finishes commands in progress with the old one.

use core::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tenmil_base::{BlockDevice, Limits};
use tenmil_wire::Status;
use tenmil_wire::cache_instance::CacheInstance;

/// Namespaces attached to one controller, by identifier.
#[derive(Clone, Debug, Default)]
pub struct NamespaceSnapshot {
    /// Entry `nsid - 1`.
    table: Vec<Option<Arc<Namespace>>>,
    nsid_max: u32,
}

/// One namespace as seen by one controller.
#[derive(Clone)]
pub struct Namespace {
    /// Namespace identifier: 1 to [`NamespaceSnapshot::nsid_max`].
    pub nsid: u32,
    /// Logical block size in bytes, as a power of two. The block device may have smaller blocks.
    pub block_shift: u8,
    /// Metadata bytes per block; zero means none.
    pub metadata_size: u16,
    /// Number of logical blocks (NSZE).
    pub block_count: u64,
    /// Writes are rejected (feature 84h, Base 2.1 §8.1.16), or this controller's host may only read.
    pub is_write_protected: bool,
    /// This controller's host may not change reservations.
    pub denies_reservations: bool,
    /// Status for every I/O command, if set: the namespace is being formatted, or is not ready.
    pub unavailable: Option<Status>,
    /// Reservation, relative to this controller's host.
    pub reservation: Option<Reservation>,
    /// Identifiers that are the same through every controller.
    pub identity: NamespaceIdentity,
    /// Limits of the Copy command.
    pub copy: CopyLimits,
    /// Limits of the block device, cached to save a call.
    pub limits: Limits,
    /// Block device that backs the namespace.
    pub device: Arc<dyn BlockDevice>,
    /// Cache instance of the block device, to detect a lost volatile cache.
    pub cache: Option<Arc<RevocableCacheInstance>>,
}

/// Cache instance of a block device: reports to reconnecting hosts that the volatile cache has lost
/// nothing, as long as no flush has failed.
#[derive(Debug)]
pub struct RevocableCacheInstance {
    instance: CacheInstance,
    is_revoked: AtomicBool,
}

/// Namespace identifiers that are the same from every controller (NVM 1.1 §4.1.5.1, Base 2.1
/// §5.1.13.2.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NamespaceIdentity {
    /// IEEE extended unique identifier; zeroes mean none.
    pub eui64: [u8; 8],
    /// Namespace globally unique identifier; zeroes mean none.
    pub nguid: [u8; 16],
    /// UUID; zeroes mean none.
    pub uuid: [u8; 16],
}

/// Limits of the Copy command (NVM 1.1 §4.1.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyLimits {
    /// MSSRL: blocks in one source range.
    pub range_blocks_max: u16,
    /// MCL: blocks in all source ranges together.
    pub blocks_max: u32,
    /// Source ranges: MSRC is one less.
    pub ranges_max: u16,
}

/// Reservation, and the relation of this controller's host to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// Reservation type.
    pub kind: ReservationKind,
    /// This host is a holder.
    pub is_holder: bool,
    /// This host is a registrant.
    pub is_registrant: bool,
}

/// Reservation type RTYPE (Base 2.1 §8.1.22, §7.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ReservationKind {
    /// Only the holder writes.
    WriteExclusive = 1,
    /// Only the holder reads and writes.
    ExclusiveAccess = 2,
    /// Only registrants write.
    WriteExclusiveRegistrantsOnly = 3,
    /// Only registrants read and write.
    ExclusiveAccessRegistrantsOnly = 4,
    /// Only registrants write, and each of them is a holder.
    WriteExclusiveAllRegistrants = 5,
    /// Only registrants read and write, and each of them is a holder.
    ExclusiveAccessAllRegistrants = 6,
}

/// Value that one thread replaces as a whole and other threads read (RCU-like).
#[derive(Debug)]
pub struct VersionedValue<T> {
    shared: Arc<VersionedValueState<T>>,
}

/// A reader's cached copy of a [`VersionedValue`] value.
#[derive(Debug)]
pub struct VersionedValueReader<T> {
    shared: Arc<VersionedValueState<T>>,
    generation: u64,
    value: Arc<T>,
}

#[derive(Debug)]
struct VersionedValueState<T> {
    /// Number of replacements. Stored with release order after the value: a reader that loads this number
    /// and then locks finds that value or a newer one.
    generation: AtomicU64,
    value: Mutex<Arc<T>>,
}

impl RevocableCacheInstance {
    /// Creates a voucher for a device that was opened now. `instance` is a random number.
    #[must_use]
    pub fn new(instance: CacheInstance) -> Arc<Self> {
        Arc::new(Self { instance, is_revoked: AtomicBool::new(false) })
    }

    /// Cache instance, if no cached data was lost.
    #[must_use]
    pub fn instance(&self) -> Option<CacheInstance> {
        (!self.is_revoked.load(Ordering::Acquire)).then_some(self.instance)
    }

    /// Revokes the instance after a failed flush: a reconnecting host may have lost writes.
    pub(crate) fn revoke(&self) {
        self.is_revoked.store(true, Ordering::Release);
    }
}

impl CopyLimits {
    /// 128 ranges of at most 65 535 blocks, 65 535 × 128 blocks in all.
    pub const DEFAULT: Self =
        Self { range_blocks_max: u16::MAX, blocks_max: 128 * u16::MAX as u32, ranges_max: 128 };
}

impl NamespaceSnapshot {
    /// Creates an empty snapshot; identifiers go up to `nsid_max` (NN).
    pub fn new(nsid_max: u32) -> Self {
        Self { table: Vec::new(), nsid_max }
    }

    /// Highest valid identifier (NN, Base 2.1 §5.1.13.2.1).
    pub fn nsid_max(&self) -> u32 {
        self.nsid_max
    }

    /// Adds a namespace, or replaces the one with the same identifier.
    ///
    /// # Panics
    ///
    /// The identifier is zero or above [`nsid_max`](Self::nsid_max).
    pub fn insert(&mut self, namespace: Arc<Namespace>) {
        let nsid = namespace.nsid;
        assert!((1..=self.nsid_max).contains(&nsid), "namespace {nsid} of {}", self.nsid_max);
        let index = namespace_table_index(nsid);
        if self.table.len() <= index {
            self.table.resize(index + 1, None);
        }
        self.table[index] = Some(namespace);
    }

    /// Removes a namespace and returns it.
    pub fn remove(&mut self, nsid: u32) -> Option<Arc<Namespace>> {
        self.table.get_mut(namespace_table_index(nsid))?.take()
    }

    /// Namespace with this identifier, if attached.
    pub fn get(&self, nsid: u32) -> Option<&Arc<Namespace>> {
        self.table.get(namespace_table_index(nsid))?.as_ref()
    }

    /// All namespaces in ascending order of their identifiers.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Namespace>> {
        self.table.iter().flatten()
    }

    /// Highest identifier in use plus one: the size of a table indexed by NSID.
    pub fn table_len(&self) -> usize {
        self.table.len() + 1
    }
}

impl Namespace {
    /// Blocks of the block device per logical block, as a power of two.
    pub fn device_blocks_per_block_shift(&self) -> u8 {
        let device_shift = self.limits.block_size.trailing_zeros();
        self.block_shift.saturating_sub(u8::try_from(device_shift).unwrap_or(u8::MAX))
    }
}

impl fmt::Debug for Namespace {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Namespace")
            .field("nsid", &self.nsid)
            .field("block_shift", &self.block_shift)
            .field("metadata_size", &self.metadata_size)
            .field("block_count", &self.block_count)
            .field("is_write_protected", &self.is_write_protected)
            .field("unavailable", &self.unavailable)
            .field("reservation", &self.reservation)
            .field("identity", &self.identity)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

impl Reservation {
    /// Whether read commands are rejected (Base 2.1 §8.1.22, command behavior table).
    pub const fn rejects_reads(self) -> bool {
        match self.kind {
            ReservationKind::WriteExclusive
            | ReservationKind::WriteExclusiveRegistrantsOnly
            | ReservationKind::WriteExclusiveAllRegistrants => false,
            ReservationKind::ExclusiveAccess => !self.is_holder,
            ReservationKind::ExclusiveAccessRegistrantsOnly
            | ReservationKind::ExclusiveAccessAllRegistrants => !self.is_registrant,
        }
    }

    /// Whether write commands are rejected (Base 2.1 §8.1.22, command behavior table).
    pub const fn rejects_writes(self) -> bool {
        match self.kind {
            ReservationKind::WriteExclusive | ReservationKind::ExclusiveAccess => !self.is_holder,
            _ => !self.is_registrant,
        }
    }
}

impl ReservationKind {
    /// All types, in the order of their codes.
    pub const ALL: [Self; 6] = [
        Self::WriteExclusive,
        Self::ExclusiveAccess,
        Self::WriteExclusiveRegistrantsOnly,
        Self::ExclusiveAccessRegistrantsOnly,
        Self::WriteExclusiveAllRegistrants,
        Self::ExclusiveAccessAllRegistrants,
    ];

    /// Type with this code.
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1..=6 => Some(Self::ALL[code as usize - 1]),
            _ => None,
        }
    }
}

impl<T> VersionedValue<T> {
    /// Creates it with an initial value.
    pub fn new(value: Arc<T>) -> Self {
        let shared =
            VersionedValueState { generation: AtomicU64::new(0), value: Mutex::new(value) };
        Self { shared: Arc::new(shared) }
    }

    /// Replaces the value. Readers see it at their next refresh.
    pub fn publish(&self, value: Arc<T>) {
        let mut slot = self.shared.value.lock().unwrap_or_else(PoisonError::into_inner);
        *slot = value;
        // Under the lock, so that generations and values have the same order.
        self.shared.generation.fetch_add(1, Ordering::Release);
    }

    /// Creates a reader that has the current value.
    pub fn reader(&self) -> VersionedValueReader<T> {
        let value = self.shared.value.lock().unwrap_or_else(PoisonError::into_inner);
        let generation = self.shared.generation.load(Ordering::Relaxed);
        VersionedValueReader { shared: self.shared.clone(), generation, value: value.clone() }
    }
}

impl<T> VersionedValueReader<T> {
    /// Value as of the last refresh.
    #[inline]
    pub fn get(&self) -> &Arc<T> {
        &self.value
    }

    /// Fetches a newer value and returns whether there was one. Costs one relaxed load if not.
    #[inline]
    pub fn refresh(&mut self) -> bool {
        self.shared.generation.load(Ordering::Relaxed) != self.generation && self.reload_value()
    }

    #[cold]
    fn reload_value(&mut self) -> bool {
        let value = self.shared.value.lock().unwrap_or_else(PoisonError::into_inner);
        self.generation = self.shared.generation.load(Ordering::Relaxed);
        self.value = value.clone();
        true
    }
}

/// Table index of an NSID; 0 wraps to an index beyond every table.
fn namespace_table_index(nsid: u32) -> usize {
    nsid.wrapping_sub(1) as usize
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{Reservation, ReservationKind, VersionedValue};

    #[test]
    fn reader_keeps_its_version_until_refreshed() {
        let published = VersionedValue::new(Arc::new(1));
        let mut reader = published.reader();
        assert!(!reader.refresh(), "nothing is newer than the first");
        published.publish(Arc::new(2));
        published.publish(Arc::new(3));
        assert_eq!(**reader.get(), 1);
        assert!(reader.refresh());
        assert_eq!(**reader.get(), 3);
        assert!(!reader.refresh());
        assert_eq!(**published.reader().get(), 3);
    }

    /// The complete command behavior table of the reservations section: type by role, and the rejected
    /// commands.
    #[test]
    fn reservation_rejects_reads_and_writes_as_its_type_requires() {
        let standings = [(true, true), (false, true), (false, false)];
        let table = [
            // holder, registrant, neither: (reads refused, writes refused)
            (ReservationKind::WriteExclusive, [(false, false), (false, true), (false, true)]),
            (ReservationKind::ExclusiveAccess, [(false, false), (true, true), (true, true)]),
            (
                ReservationKind::WriteExclusiveRegistrantsOnly,
                [(false, false), (false, false), (false, true)],
            ),
            (
                ReservationKind::ExclusiveAccessRegistrantsOnly,
                [(false, false), (false, false), (true, true)],
            ),
            (
                ReservationKind::WriteExclusiveAllRegistrants,
                [(false, false), (false, false), (false, true)],
            ),
            (
                ReservationKind::ExclusiveAccessAllRegistrants,
                [(false, false), (false, false), (true, true)],
            ),
        ];
        for (kind, rows) in table {
            for ((is_holder, is_registrant), expected) in standings.into_iter().zip(rows) {
                let seen = Reservation { kind, is_holder, is_registrant };
                assert_eq!((seen.rejects_reads(), seen.rejects_writes()), expected, "{seen:?}");
            }
        }
    }

    #[test]
    fn reservation_kind_codes_round_trip() {
        for kind in ReservationKind::ALL {
            assert_eq!(ReservationKind::from_code(kind as u8), Some(kind));
        }
        assert_eq!(ReservationKind::from_code(0), None);
        assert_eq!(ReservationKind::from_code(7), None);
    }
}
