//! Body of a PDU: padding, data and digest.

use tenmil_wire::tcp::{Crc32c, crc32c};

/// Panic message: positions in a receive buffer are `u32`.
const BUFFER_BELOW_4_GIB: &str = "a receive buffer is shorter than 4 GiB";

/// Body of the PDU that is being received.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PduBody {
    /// Tag of the command that the data belong to.
    pub(crate) tag: u16,
    /// FLAGS of the PDU.
    pub(crate) flags: u8,
    /// Padding bytes still to be skipped.
    pub(crate) padding: u8,
    /// Whether a data digest follows.
    pub(crate) has_digest: bool,
    /// Whether the owner still needs the data.
    pub(crate) is_needed: bool,
    /// Offset of the next byte in the command's data.
    pub(crate) offset: u32,
    /// Remaining data bytes.
    pub(crate) remaining: u32,
    /// Digest of the data received so far.
    pub(crate) digest: Crc32c,
}

/// Range of a command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataPlacement {
    /// Tag of the command.
    pub tag: u16,
    /// Offset in the command's data.
    pub offset: u32,
    /// Length in bytes.
    pub len_bytes: u32,
}

/// Progress of receiving a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PduBodyProgress {
    /// More bytes are needed.
    Partial,
    /// Complete; `is_intact` is the result of the digest check.
    Complete { is_intact: bool },
}

impl PduBody {
    /// Continues at `at`, and calls `deliver` with received data and their position in `bytes`.
    #[inline]
    pub(crate) fn receive(
        &mut self,
        bytes: &[u8],
        at: &mut usize,
        deliver: impl FnOnce(DataPlacement, u32),
    ) -> PduBodyProgress {
        let rest = bytes.len() - *at;
        let skipped = rest.min(self.padding.into());
        *at += skipped;
        self.padding -= u8::try_from(skipped).unwrap_or(self.padding);
        let count = u32::try_from(bytes.len() - *at).unwrap_or(u32::MAX).min(self.remaining);
        if count > 0 {
            let data_at = u32::try_from(*at).expect(BUFFER_BELOW_4_GIB);
            if self.has_digest {
                self.digest.update(&bytes[*at..*at + count as usize]);
            }
            if self.is_needed {
                let (tag, offset) = (self.tag, self.offset);
                deliver(DataPlacement { tag, offset, len_bytes: count }, data_at);
            }
            self.record_direct_bytes(count);
            *at += count as usize;
        }
        if self.remaining > 0 || self.padding > 0 {
            return PduBodyProgress::Partial;
        }
        if !self.has_digest {
            return PduBodyProgress::Complete { is_intact: true };
        }
        let Some(found) = bytes[*at..].first_chunk::<4>() else { return PduBodyProgress::Partial };
        *at += 4;
        PduBodyProgress::Complete { is_intact: u32::from_le_bytes(*found) == self.digest.value() }
    }

    /// Receives the body at `at`, if it is there as a whole and not empty. Returns the position of the data,
    /// the end of the body, and whether the data are intact.
    #[inline(always)]
    pub(crate) fn receive_if_whole(&self, bytes: &[u8], at: usize) -> Option<(u32, usize, bool)> {
        let begin = at + usize::from(self.padding);
        let end = begin + self.remaining as usize;
        if end > bytes.len() || self.remaining == 0 {
            return None;
        }
        let data_at = u32::try_from(begin).expect(BUFFER_BELOW_4_GIB);
        if !self.has_digest {
            return Some((data_at, end, true));
        }
        let found = bytes[end..].first_chunk::<4>()?;
        Some((data_at, end + 4, u32::from_le_bytes(*found) == crc32c(&bytes[begin..end])))
    }

    /// Records that `count` bytes were stored in place.
    #[inline]
    pub(crate) fn record_direct_bytes(&mut self, count: u32) {
        self.offset += count;
        self.remaining -= count;
    }

    /// Range of the remaining data.
    #[inline]
    pub(crate) const fn remaining_placement(&self) -> DataPlacement {
        DataPlacement { tag: self.tag, offset: self.offset, len_bytes: self.remaining }
    }

    /// Remaining data, if they can be received directly into place: not with a digest, which is
    /// computed as the bytes pass through.
    #[inline]
    pub(crate) fn direct_placement(&self) -> Option<DataPlacement> {
        let is_direct =
            self.is_needed && !self.has_digest && self.padding == 0 && self.remaining > 0;
        is_direct.then_some(self.remaining_placement())
    }

    /// Number of bytes to the end of the body, with its padding and digest.
    pub(crate) fn remaining_bytes(&self) -> usize {
        let digest = if self.has_digest { 4 } else { 0 };
        usize::from(self.padding) + self.remaining as usize + digest
    }

    /// Number of bytes in front of data that can be received [directly](Self::direct_placement); zero if none
    /// can.
    pub(crate) fn padding_before_direct_data(&self) -> usize {
        if self.is_needed && !self.has_digest { self.padding.into() } else { 0 }
    }
}
