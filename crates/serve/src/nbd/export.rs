//! NBD export: the properties of a block device as the protocol describes them.

use std::sync::atomic::{AtomicU64, Ordering};

use tenmil_base::{Durability, Error, HoleReporting, Limits, Operation};
use tenmil_wire::nbd::{PAYLOAD_BYTES_MAX, TransmissionFlags};

use super::connection_memory::LARGE_BYTES;

/// Block device with its export name, size and transmission flags.
#[derive(Debug)]
pub struct Export {
    name: String,
    description: String,
    block_size: u32,
    /// Current number of blocks; the device may be resized while it is exported.
    block_count: AtomicU64,
    is_read_only: bool,
    flags: TransmissionFlags,
    piece_bytes: u32,
    holes: HoleReporting,
}

/// Block size that most file systems use.
const PREFERRED_BYTES: u32 = 4096;

impl Export {
    /// Creates an export of a device with these limits. Clients select it by `name`, or by the empty
    /// name if it is the only one.
    ///
    /// # Errors
    ///
    /// If such a device cannot be exported, or the name or the description is too long.
    pub fn new(
        name: impl Into<String>,
        description: impl Into<String>,
        limits: Limits,
        is_read_only: bool,
    ) -> Result<Self, Error> {
        let (name, description) = (name.into(), description.into());
        for text in [&name, &description] {
            if text.len() > NAME_BYTES_MAX || text.contains('\0') {
                return Err(Error::environment(format!(
                    "an export's description has {} bytes, expected at most {NAME_BYTES_MAX} and no NUL",
                    text.len()
                )));
            }
        }
        if limits.metadata_size != 0 {
            let found = limits.metadata_size;
            return Err(Error::environment(format!(
                "its blocks have {found} bytes of metadata, expected none"
            )));
        }
        let flags = transmission_flags(&limits, is_read_only);
        let piece_bytes = request_bytes_max(&limits);
        let (block_size, block_count) = (limits.block_size, AtomicU64::new(limits.block_count));
        Ok(Self {
            name,
            description,
            block_size,
            block_count,
            is_read_only,
            flags,
            piece_bytes,
            holes: HoleReporting::Never,
        })
    }

    /// Export name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Description for people.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// Current size in bytes.
    #[inline]
    pub fn size_bytes(&self) -> u64 {
        // Independent value: it orders no other access.
        self.block_count.load(Ordering::Relaxed) * u64::from(self.block_size)
    }

    /// Changes the number of blocks. It applies to later negotiations and to the range check of
    /// later requests. Connected clients are not notified, since the protocol has no message for it
    /// ("Transmission phase"), except for the reply to the client that requested the resize.
    pub fn set_block_count(&self, block_count: u64) {
        self.block_count.store(block_count, Ordering::Relaxed);
    }

    /// Smallest block size: offsets and lengths must be multiples of it.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Preferred block size.
    pub(super) fn preferred_bytes(&self) -> u32 {
        self.block_size.max(PREFERRED_BYTES)
    }

    /// Largest payload of a request.
    pub(super) const fn payload_bytes_max(&self) -> u32 {
        PAYLOAD_BYTES_MAX
    }

    /// Largest request that is submitted to the I/O channel, in bytes.
    pub(super) fn request_bytes_max(&self) -> u32 {
        self.piece_bytes
    }

    /// Which reads of the device are known to be of holes, for which no data is sent.
    pub(super) fn hole_reporting(&self) -> HoleReporting {
        self.holes
    }

    /// Sends no data for the holes that the device reports.
    #[must_use]
    pub fn with_hole_reporting(self, holes: HoleReporting) -> Self {
        Self { holes, ..self }
    }

    /// Removes the fast-zero flag, for a device that writes zeroes no faster than other data.
    #[must_use]
    pub fn without_fast_zero(mut self) -> Self {
        self.flags = self.flags.without(TransmissionFlags::SEND_FAST_ZERO);
        self
    }

    /// Allows clients to resize the export, unless it is read-only.
    #[must_use]
    pub fn with_resize_allowed(mut self) -> Self {
        self.flags = self.flags.union_if(!self.is_read_only, TransmissionFlags::SEND_RESIZE);
        self
    }

    /// Whether writes are rejected.
    pub fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    /// Transmission flags, with or without structured replies.
    pub fn transmission_flags(&self, structured: bool) -> TransmissionFlags {
        self.flags.union_if(structured, TransmissionFlags::SEND_DF)
    }
}

/// Longest name or description: two of them with their framing fit into one negotiation reply.
const NAME_BYTES_MAX: usize = tenmil_wire::nbd::STRING_BYTES_MAX;

/// Translates device limits to transmission flags. Flush and FUA are not advertised for volatile storage,
/// where they would not help; for a device without a write cache they are, and cost little.
///
/// All channels of a device share its blocks and its cache, so a flush on one connection covers the
/// writes of all connections; therefore `NBD_FLAG_CAN_MULTI_CONN` is always set.
fn transmission_flags(limits: &Limits, is_read_only: bool) -> TransmissionFlags {
    use TransmissionFlags as Flags;
    let has = |operation| limits.operations.has(operation);
    let can_flush = limits.durability != Durability::NonPersistent && has(Operation::Flush);
    let can_zero = !is_read_only && has(Operation::WriteZeroes);
    Flags::HAS_FLAGS
        .union(Flags::CAN_MULTI_CONN)
        .union_if(is_read_only, Flags::READ_ONLY)
        .union_if(can_flush, Flags::SEND_FLUSH.union(Flags::SEND_FUA))
        .union_if(!is_read_only && has(Operation::Deallocate), Flags::SEND_TRIM)
        .union_if(can_zero, Flags::SEND_WRITE_ZEROES.union(Flags::SEND_FAST_ZERO))
        .union_if(has(Operation::Verify), Flags::SEND_CACHE)
}

/// Largest power of two that one device request can move in large buffers, so that no request has
/// more segments than the device accepts.
fn request_bytes_max(limits: &Limits) -> u32 {
    let by_blocks = limits.request_blocks_max.saturating_mul(limits.block_size);
    let by_segments = u32::from(limits.segments_max.max(1)).saturating_mul(LARGE_BYTES);
    let bytes = by_blocks.min(by_segments).clamp(limits.block_size, PIECE_BYTES_MAX);
    1 << bytes.ilog2()
}

/// Limit of a piece. Larger requests gain nothing.
const PIECE_BYTES_MAX: u32 = 1 << 20;

#[cfg(test)]
mod tests {
    use tenmil_base::{Durability, Limits, Operation, OperationSet};
    use tenmil_wire::nbd::TransmissionFlags as Flags;

    use super::Export;

    fn limits() -> Limits {
        Limits {
            block_size: 512,
            metadata_size: 0,
            block_count: 2048,
            request_blocks_max: 2048,
            segments_max: 257,
            optimal_boundary_blocks: 0,
            atomic_write_blocks: 1,
            depth_max: 32,
            durability: Durability::VolatileCache,
            operations: OperationSet::from_operations(&Operation::ALL),
        }
    }

    fn transmission_flags(limits: Limits, is_read_only: bool) -> Flags {
        Export::new("x", "", limits, is_read_only).unwrap().transmission_flags(false)
    }

    #[test]
    fn flags_offer_only_operations_that_the_device_supports() {
        let all = transmission_flags(limits(), false);
        assert_eq!(all.0, 0b1101_0110_1101, "{all:?}");
        let read_only = transmission_flags(limits(), true);
        assert_eq!(read_only.0, 0b0101_0000_1111, "{read_only:?}");
        let memory =
            transmission_flags(Limits { durability: Durability::NonPersistent, ..limits() }, false);
        assert!(!memory.has(Flags::SEND_FLUSH) && !memory.has(Flags::SEND_FUA));
        let stable =
            transmission_flags(Limits { durability: Durability::Persistent, ..limits() }, false);
        assert_eq!(stable, all);
        let operations = OperationSet::from_operations(&[Operation::Read, Operation::Write]);
        assert_eq!(
            transmission_flags(Limits { operations, ..limits() }, false).0,
            0b0001_0000_0001
        );
        let structured = Export::new("x", "", limits(), false).unwrap().transmission_flags(true);
        assert!(structured.has(Flags::SEND_DF) && !all.has(Flags::SEND_DF));
    }

    #[test]
    fn resize_is_offered_only_for_writable_exports_that_allow_it() {
        for (is_read_only, expected) in [(false, true), (true, false)] {
            let export = Export::new("x", "", limits(), is_read_only).unwrap();
            assert!(!export.transmission_flags(true).has(Flags::SEND_RESIZE));
            assert_eq!(
                export.with_resize_allowed().transmission_flags(true).has(Flags::SEND_RESIZE),
                expected
            );
        }
    }

    #[test]
    fn request_size_fits_the_block_device_limits() {
        for (blocks, segments, expected) in [
            (2048, 257, 1 << 20),
            (u32::MAX, 257, 1 << 20),
            (2047, 257, 1 << 19),
            (1, 1, 512),
            (2048, 1, 1 << 18),
        ] {
            let limits = Limits { request_blocks_max: blocks, segments_max: segments, ..limits() };
            let export = Export::new("x", "", limits, false).unwrap();
            assert_eq!(
                export.request_bytes_max(),
                expected,
                "{blocks} blocks, {segments} segments"
            );
        }
    }

    #[test]
    fn device_with_unusable_limits_is_rejected() {
        let metadata = Limits { metadata_size: 8, ..limits() };
        let refused = Export::new("x", "", metadata, false).unwrap_err();
        assert!(refused.text.contains("8 bytes of metadata, expected none"), "{refused}");
        assert!(Export::new("x".repeat(5000), "", limits(), false).is_err());
        assert!(Export::new("a\0", "", limits(), false).is_err());
    }
}
