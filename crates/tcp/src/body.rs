//! What follows the header of a unit: padding, data, digest.

use wire::tcp::Crc32c;

/// The data that are being read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Body {
    /// Whose data they are.
    pub(crate) tag: u16,
    /// The unit's FLAGS.
    pub(crate) flags: u8,
    /// Zeros that come first.
    pub(crate) padding: u8,
    /// A digest comes last.
    pub(crate) has_digest: bool,
    /// Somebody wants the data.
    pub(crate) is_wanted: bool,
    /// Where the next byte belongs in the command's data.
    pub(crate) offset: u32,
    /// Bytes that are still to come.
    pub(crate) left: u32,
    /// The digest of those that came.
    pub(crate) digest: Crc32c,
}

/// A stretch of bytes, and where it belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Whose data they are.
    pub tag: u16,
    /// Where they belong in the command's data.
    pub offset: u32,
    /// How many.
    pub len_bytes: u32,
}

/// How far reading got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Read {
    /// More bytes are needed.
    Partly,
    /// All is there. Whether the digest is that of the data.
    Whole { is_intact: bool },
}

impl Body {
    /// Reads on at `at`, and calls `place` with data that have come and where they lie.
    #[inline]
    pub(crate) fn read(
        &mut self,
        bytes: &[u8],
        at: &mut usize,
        place: impl FnOnce(Place, u32),
    ) -> Read {
        let rest = bytes.len() - *at;
        let skipped = rest.min(self.padding.into());
        *at += skipped;
        self.padding -= u8::try_from(skipped).unwrap_or(self.padding);
        let count = u32::try_from(bytes.len() - *at).unwrap_or(u32::MAX).min(self.left);
        if count > 0 {
            let here = u32::try_from(*at).expect("a receive buffer is shorter than 4 GiB");
            if self.has_digest {
                self.digest.update(&bytes[*at..*at + count as usize]);
            }
            if self.is_wanted {
                place(Place { tag: self.tag, offset: self.offset, len_bytes: count }, here);
            }
            self.advance(count);
            *at += count as usize;
        }
        if self.left > 0 || self.padding > 0 {
            return Read::Partly;
        }
        if !self.has_digest {
            return Read::Whole { is_intact: true };
        }
        let Some(found) = bytes[*at..].first_chunk::<4>() else { return Read::Partly };
        *at += 4;
        Read::Whole { is_intact: u32::from_le_bytes(*found) == self.digest.value() }
    }

    /// So many bytes are where they belong.
    #[inline]
    pub(crate) fn advance(&mut self, count: u32) {
        self.offset += count;
        self.left -= count;
    }

    /// What is still to come, if it can be read straight to where it belongs: its digest is
    /// computed as it comes, so there must be none.
    #[inline]
    pub(crate) fn direct(&self) -> Option<Place> {
        let is_plain = self.is_wanted && !self.has_digest && self.padding == 0 && self.left > 0;
        is_plain.then_some(Place { tag: self.tag, offset: self.offset, len_bytes: self.left })
    }

    /// How many bytes come before those that can be read [straight](Self::direct) to where they
    /// belong; zero if none can.
    pub(crate) fn before_direct(&self) -> usize {
        if self.is_wanted && !self.has_digest { self.padding.into() } else { 0 }
    }
}
