//! What is served: a medium in the words of the protocol.

use std::sync::atomic::{AtomicU64, Ordering};

use base::{Durability, Limits, Operation};
use wire::nbd::{PAYLOAD_BYTES_MAX, TransmissionFlags};

use super::memory::LARGE_BYTES;

/// A medium by the names that clients know it by.
#[derive(Debug)]
pub struct Export {
    name: String,
    description: String,
    block_size: u32,
    /// How many there are now: a device may become larger or smaller.
    block_count: AtomicU64,
    is_read_only: bool,
    flags: TransmissionFlags,
    piece_bytes: u32,
}

/// What most file systems work with.
const PREFERRED_BYTES: u32 = 4096;

impl Export {
    /// A medium with these limits, by the name `name` and by none.
    ///
    /// # Errors
    ///
    /// If such a medium cannot be served, or such a name cannot be told.
    pub fn new(
        name: impl Into<String>,
        description: impl Into<String>,
        limits: Limits,
        is_read_only: bool,
    ) -> Result<Self, String> {
        let (name, description) = (name.into(), description.into());
        for text in [&name, &description] {
            if text.len() > NAME_BYTES_MAX || text.contains('\0') {
                return Err(format!(
                    "an export is told by {} bytes, expected at most {NAME_BYTES_MAX} and no NUL",
                    text.len()
                ));
            }
        }
        if limits.metadata_size != 0 {
            let found = limits.metadata_size;
            return Err(format!("its blocks have {found} bytes of metadata, expected none"));
        }
        let flags = flags(&limits, is_read_only);
        let piece_bytes = piece_bytes(&limits);
        let (block_size, block_count) = (limits.block_size, AtomicU64::new(limits.block_count));
        Ok(Self { name, description, block_size, block_count, is_read_only, flags, piece_bytes })
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it is, for people.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// How long it is now.
    #[inline]
    pub fn size_bytes(&self) -> u64 {
        // A number by itself: it orders nothing.
        self.block_count.load(Ordering::Relaxed) * u64::from(self.block_size)
    }

    /// It has so many blocks now. Whoever asks from now on is told, and requests are held to it; who
    /// has chosen it before is not told, since the protocol has no way to ("Transmission phase"), but
    /// for the answer to whoever asked for it.
    pub fn resize(&self, block_count: u64) {
        self.block_count.store(block_count, Ordering::Relaxed);
    }

    /// What requests must be multiples of.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// What requests are best multiples of.
    pub(super) fn preferred_bytes(&self) -> u32 {
        self.block_size.max(PREFERRED_BYTES)
    }

    /// The most that a request may move.
    pub(super) const fn payload_bytes_max(&self) -> u32 {
        PAYLOAD_BYTES_MAX
    }

    /// What the backend gets at once.
    pub(super) fn piece_bytes(&self) -> u32 {
        self.piece_bytes
    }

    /// The same, where zeroes are written like anything else: no client is told that they are faster.
    #[must_use]
    pub fn with_slow_zeroes(mut self) -> Self {
        self.flags = self.flags.without(TransmissionFlags::SEND_FAST_ZERO);
        self
    }

    /// The same, where clients may change the size, unless nobody may write.
    #[must_use]
    pub fn with_resize(mut self) -> Self {
        self.flags = self.flags.and_if(!self.is_read_only, TransmissionFlags::SEND_RESIZE);
        self
    }

    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    /// What it can do, on a connection with structured replies or without.
    pub fn flags(&self, structured: bool) -> TransmissionFlags {
        self.flags.and_if(structured, TransmissionFlags::SEND_DF)
    }

    /// Whether it is called `name`.
    pub(super) fn is_called(&self, name: &str) -> bool {
        name.is_empty() || name == self.name
    }
}

/// Two such texts and their frame fit into what the handshake may answer at once.
const NAME_BYTES_MAX: usize = wire::nbd::STRING_BYTES_MAX;

/// What a medium can do is told as it is: without a cache there is nothing to flush, and where
/// nothing survives, no flush would help.
///
/// All channels of a medium share its blocks and its cache, so a flush on one connection covers the
/// writes of all.
fn flags(limits: &Limits, is_read_only: bool) -> TransmissionFlags {
    use TransmissionFlags as Flags;
    let has = |operation| limits.support.has(operation);
    let can_flush = limits.durability != Durability::None && has(Operation::Flush);
    let can_zero = !is_read_only && has(Operation::WriteZeroes);
    Flags::HAS_FLAGS
        .and(Flags::CAN_MULTI_CONN)
        .and_if(is_read_only, Flags::READ_ONLY)
        .and_if(can_flush, Flags::SEND_FLUSH.and(Flags::SEND_FUA))
        .and_if(!is_read_only && has(Operation::Deallocate), Flags::SEND_TRIM)
        .and_if(can_zero, Flags::SEND_WRITE_ZEROES.and(Flags::SEND_FAST_ZERO))
        .and_if(has(Operation::Verify), Flags::SEND_CACHE)
}

/// The largest power of two that fits into a request, its memory being in large pieces: so no
/// request has more segments than the backend takes.
fn piece_bytes(limits: &Limits) -> u32 {
    let by_blocks = limits.request_blocks_max.saturating_mul(limits.block_size);
    let by_segments = u32::from(limits.segments_max.max(1)).saturating_mul(LARGE_BYTES);
    let bytes = by_blocks.min(by_segments).clamp(limits.block_size, PIECE_BYTES_MAX);
    1 << bytes.ilog2()
}

/// Larger requests win nothing.
const PIECE_BYTES_MAX: u32 = 1 << 20;

#[cfg(test)]
mod tests {
    use base::{Durability, Limits, Operation, Support};
    use wire::nbd::TransmissionFlags as Flags;

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
            support: Support::of(&Operation::ALL),
        }
    }

    fn flags(limits: Limits, is_read_only: bool) -> Flags {
        Export::new("x", "", limits, is_read_only).unwrap().flags(false)
    }

    #[test]
    fn only_what_the_medium_can_do_is_told() {
        let all = flags(limits(), false);
        assert_eq!(all.0, 0b1101_0110_1101, "{all:?}");
        let read_only = flags(limits(), true);
        assert_eq!(read_only.0, 0b0101_0000_1111, "{read_only:?}");
        let memory = flags(Limits { durability: Durability::None, ..limits() }, false);
        assert!(!memory.has(Flags::SEND_FLUSH) && !memory.has(Flags::SEND_FUA));
        let support = Support::of(&[Operation::Read, Operation::Write]);
        assert_eq!(flags(Limits { support, ..limits() }, false).0, 0b0001_0000_0001);
        let structured = Export::new("x", "", limits(), false).unwrap().flags(true);
        assert!(structured.has(Flags::SEND_DF) && !all.has(Flags::SEND_DF));
    }

    #[test]
    fn another_size_may_be_asked_for_only_where_that_is_allowed_and_one_may_write() {
        for (is_read_only, expected) in [(false, true), (true, false)] {
            let export = Export::new("x", "", limits(), is_read_only).unwrap();
            assert!(!export.flags(true).has(Flags::SEND_RESIZE));
            assert_eq!(export.with_resize().flags(true).has(Flags::SEND_RESIZE), expected);
        }
    }

    #[test]
    fn a_piece_fits_the_backend() {
        for (blocks, segments, expected) in [
            (2048, 257, 1 << 20),
            (u32::MAX, 257, 1 << 20),
            (2047, 257, 1 << 19),
            (1, 1, 512),
            (2048, 1, 1 << 18),
        ] {
            let limits = Limits { request_blocks_max: blocks, segments_max: segments, ..limits() };
            let export = Export::new("x", "", limits, false).unwrap();
            assert_eq!(export.piece_bytes(), expected, "{blocks} blocks, {segments} segments");
        }
    }

    #[test]
    fn what_cannot_be_served_is_refused() {
        let metadata = Limits { metadata_size: 8, ..limits() };
        let refused = Export::new("x", "", metadata, false).unwrap_err();
        assert!(refused.contains("8 bytes of metadata, expected none"), "{refused}");
        assert!(Export::new("x".repeat(5000), "", limits(), false).is_err());
        assert!(Export::new("a\0", "", limits(), false).is_err());
    }
}
