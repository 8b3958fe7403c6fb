//! Completion queue entry (Base 2.1 §4.2.1).
//!
//! ```text
//!  DW0   command specific
//!  DW1   command specific
//!  DW2   SQID 31:16 | SQHD 15:0
//!  DW3   status 31:17 | phase tag 16 | CID 15:0
//! ```

use core::fmt;

use crate::status::Status;

/// Completion queue entry.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(C, align(16))]
pub struct Completion(
    /// The four dwords.
    pub [u32; 4],
);

const _: () = assert!(size_of::<Completion>() == 16 && align_of::<Completion>() == 16);

impl Completion {
    /// Length in memory and in a capsule.
    pub const BYTES: usize = 16;

    /// Completion of command `cid`.
    #[inline]
    #[must_use]
    pub const fn new(cid: u16, status: Status) -> Self {
        Self([0, 0, 0, cid as u32 | (status.0 as u32) << 17])
    }

    /// Decodes little-endian bytes.
    #[inline]
    #[must_use]
    pub fn from_bytes(bytes: &[u8; 16]) -> Self {
        let mut dwords = [0; 4];
        for (dword, chunk) in dwords.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *dword = u32::from_le_bytes(*chunk);
        }
        Self(dwords)
    }

    /// Encodes to little-endian bytes.
    #[inline]
    #[must_use]
    pub fn to_bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        for (dword, chunk) in self.0.iter().zip(bytes.as_chunks_mut::<4>().0) {
            *chunk = dword.to_le_bytes();
        }
        bytes
    }

    /// DW0: command specific result.
    #[inline]
    #[must_use]
    pub const fn dw0(&self) -> u32 {
        self.0[0]
    }

    /// DW1: command specific result.
    #[inline]
    #[must_use]
    pub const fn dw1(&self) -> u32 {
        self.0[1]
    }

    /// DW0 and DW1 as one number, the result of a fabrics Property Get.
    #[inline]
    #[must_use]
    pub const fn result(&self) -> u64 {
        self.0[0] as u64 | (self.0[1] as u64) << 32
    }

    /// SQHD: submission queue head.
    #[inline]
    #[must_use]
    pub const fn sqhd(&self) -> u16 {
        low_word(self.0[2])
    }

    /// SQID: submission queue of the command.
    #[inline]
    #[must_use]
    pub const fn sqid(&self) -> u16 {
        low_word(self.0[2] >> 16)
    }

    /// CID: command identifier.
    #[inline]
    #[must_use]
    pub const fn cid(&self) -> u16 {
        low_word(self.0[3])
    }

    /// P: the phase tag.
    #[inline]
    #[must_use]
    pub const fn phase(&self) -> bool {
        self.0[3] & 1 << 16 != 0
    }

    /// Status of the command.
    #[inline]
    #[must_use]
    pub const fn status(&self) -> Status {
        Status(low_word(self.0[3] >> 17))
    }

    /// Sets DW0.
    #[inline]
    #[must_use]
    pub const fn with_dw0(mut self, dw0: u32) -> Self {
        self.0[0] = dw0;
        self
    }

    /// Sets DW1.
    #[inline]
    #[must_use]
    pub const fn with_dw1(mut self, dw1: u32) -> Self {
        self.0[1] = dw1;
        self
    }

    /// Sets DW0 and DW1.
    #[inline]
    #[must_use]
    #[allow(clippy::cast_possible_truncation, reason = "the two halves are taken apart")]
    pub const fn with_result(mut self, result: u64) -> Self {
        self.0[0] = result as u32;
        self.0[1] = (result >> 32) as u32;
        self
    }

    /// Sets the submission queue head.
    #[inline]
    #[must_use]
    pub const fn with_sqhd(mut self, sqhd: u16) -> Self {
        self.0[2] = self.0[2] & 0xffff_0000 | sqhd as u32;
        self
    }

    /// Sets the submission queue.
    #[inline]
    #[must_use]
    pub const fn with_sqid(mut self, sqid: u16) -> Self {
        self.0[2] = self.0[2] & 0xffff | (sqid as u32) << 16;
        self
    }

    /// Sets the command identifier.
    #[inline]
    #[must_use]
    pub const fn with_cid(mut self, cid: u16) -> Self {
        self.0[3] = self.0[3] & 0xffff_0000 | cid as u32;
        self
    }

    /// Sets the phase tag.
    #[inline]
    #[must_use]
    pub const fn with_phase(mut self, phase: bool) -> Self {
        self.0[3] = self.0[3] & !(1 << 16) | (phase as u32) << 16;
        self
    }

    /// Sets the status.
    #[inline]
    #[must_use]
    pub const fn with_status(mut self, status: Status) -> Self {
        self.0[3] = self.0[3] & 0x1_ffff | (status.0 as u32) << 17;
        self
    }
}

#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "the low half is wanted")]
const fn low_word(dword: u32) -> u16 {
    dword as u16
}

impl fmt::Debug for Completion {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Completion")
            .field("cid", &self.cid())
            .field("status", &self.status())
            .field("phase", &self.phase())
            .field("sqid", &self.sqid())
            .field("sqhd", &self.sqhd())
            .field("result", &format_args!("{:#x}", self.result()))
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::Completion;
    use crate::status::Status;

    #[test]
    fn completion_fields_are_at_the_offsets_of_the_specification() {
        let completion = Completion::from_bytes(&[
            0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0x09, 0x0a, 0x0b, 0x0c, 0x0d,
            0x0f, 0x0e,
        ]);
        assert_eq!(completion.dw0(), 0x0302_0100);
        assert_eq!(completion.dw1(), 0x0706_0504);
        assert_eq!(completion.result(), 0x0706_0504_0302_0100);
        assert_eq!(completion.sqhd(), 0x0908);
        assert_eq!(completion.sqid(), 0x0b0a);
        assert_eq!(completion.cid(), 0x0d0c);
        assert!(completion.phase());
        assert_eq!(completion.status(), Status(0x0e0f >> 1));
        assert_eq!(Completion::from_bytes(&completion.to_bytes()), completion);
    }

    #[test]
    fn every_bit_of_every_completion_field_round_trips() {
        for start in [Completion([0; 4]), Completion([u32::MAX; 4])] {
            let mut seen = [0_u32; 4];
            let mut check = |changed: Completion, back: bool| {
                let flipped: Vec<u32> =
                    start.0.iter().zip(changed.0).map(|(was, is)| was ^ is).collect();
                assert_eq!(flipped.iter().map(|dword| dword.count_ones()).sum::<u32>(), 1);
                assert!(back);
                seen.iter_mut().zip(flipped).for_each(|(seen, flip)| *seen |= flip);
            };
            for bit in 0..32 {
                let value = start.dw0() ^ 1 << bit;
                check(start.with_dw0(value), start.with_dw0(value).dw0() == value);
                let value = start.dw1() ^ 1 << bit;
                check(start.with_dw1(value), start.with_dw1(value).dw1() == value);
            }
            for bit in 0..64 {
                let value = start.result() ^ 1 << bit;
                check(start.with_result(value), start.with_result(value).result() == value);
            }
            for bit in 0..16 {
                let value = start.sqhd() ^ 1 << bit;
                check(start.with_sqhd(value), start.with_sqhd(value).sqhd() == value);
                let value = start.sqid() ^ 1 << bit;
                check(start.with_sqid(value), start.with_sqid(value).sqid() == value);
                let value = start.cid() ^ 1 << bit;
                check(start.with_cid(value), start.with_cid(value).cid() == value);
            }
            for bit in 0..15 {
                let value = Status(start.status().0 ^ 1 << bit);
                check(start.with_status(value), start.with_status(value).status() == value);
            }
            let value = !start.phase();
            check(start.with_phase(value), start.with_phase(value).phase() == value);
            assert_eq!(seen, [u32::MAX; 4], "every bit belongs to a field");
        }
    }
}
