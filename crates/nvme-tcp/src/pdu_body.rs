//! Body of a PDU: padding, data and digest.

use tenmil_wire::tcp::{Crc32c, crc32c};

/// Why a position in a receive buffer is a `u32`.
const SHORT: &str = "a receive buffer is shorter than 4 GiB";

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
    pub(crate) is_wanted: bool,
    /// Offset of the next byte in the command's data.
    pub(crate) offset: u32,
    /// Remaining data bytes.
    pub(crate) left: u32,
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
pub(crate) enum BodyProgress {
    /// More bytes are needed.
    Partly,
    /// Complete; `is_intact` is the result of the digest check.
    Whole { is_intact: bool },
}

impl PduBody {
    /// Continues at `at`, and calls `place` with received data and their position in `bytes`.
    #[inline]
    pub(crate) fn read(
        &mut self,
        bytes: &[u8],
        at: &mut usize,
        place: impl FnOnce(DataPlacement, u32),
    ) -> BodyProgress {
        let rest = bytes.len() - *at;
        let skipped = rest.min(self.padding.into());
        *at += skipped;
        self.padding -= u8::try_from(skipped).unwrap_or(self.padding);
        let count = u32::try_from(bytes.len() - *at).unwrap_or(u32::MAX).min(self.left);
        if count > 0 {
            let here = u32::try_from(*at).expect(SHORT);
            if self.has_digest {
                self.digest.update(&bytes[*at..*at + count as usize]);
            }
            if self.is_wanted {
                place(DataPlacement { tag: self.tag, offset: self.offset, len_bytes: count }, here);
            }
            self.advance(count);
            *at += count as usize;
        }
        if self.left > 0 || self.padding > 0 {
            return BodyProgress::Partly;
        }
        if !self.has_digest {
            return BodyProgress::Whole { is_intact: true };
        }
        let Some(found) = bytes[*at..].first_chunk::<4>() else { return BodyProgress::Partly };
        *at += 4;
        BodyProgress::Whole { is_intact: u32::from_le_bytes(*found) == self.digest.value() }
    }

    /// Receives all of it, if it is all there at `at` and not empty. Returns where the data begin, where the body
    /// ends, and whether the data are intact.
    #[inline(always)]
    pub(crate) fn read_whole(&self, bytes: &[u8], at: usize) -> Option<(u32, usize, bool)> {
        let begin = at + usize::from(self.padding);
        let end = begin + self.left as usize;
        if end > bytes.len() || self.left == 0 {
            return None;
        }
        let here = u32::try_from(begin).expect(SHORT);
        if !self.has_digest {
            return Some((here, end, true));
        }
        let found = bytes[end..].first_chunk::<4>()?;
        Some((here, end + 4, u32::from_le_bytes(*found) == crc32c(&bytes[begin..end])))
    }

    /// Records that `count` bytes were stored in place.
    #[inline]
    pub(crate) fn advance(&mut self, count: u32) {
        self.offset += count;
        self.left -= count;
    }

    /// Its data from `offset` on.
    #[inline]
    pub(crate) const fn placement(&self) -> DataPlacement {
        DataPlacement { tag: self.tag, offset: self.offset, len_bytes: self.left }
    }

    /// Remaining data, if they can be received directly into place: not with a digest, which is
    /// computed as the bytes pass through.
    #[inline]
    pub(crate) fn direct(&self) -> Option<DataPlacement> {
        let is_plain = self.is_wanted && !self.has_digest && self.padding == 0 && self.left > 0;
        is_plain.then_some(self.placement())
    }

    /// Number of bytes in front of data that can be received [directly](Self::direct); zero if none
    /// can.
    pub(crate) fn before_direct(&self) -> usize {
        if self.is_wanted && !self.has_digest { self.padding.into() } else { 0 }
    }
}
