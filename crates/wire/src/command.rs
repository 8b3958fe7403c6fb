//! Submission queue entry (Base 2.1 §4.1).
//!
//! ```text
//!  word   bits 63:32            bits 31:0
//!   0     NSID                  CDW0: CID 31:16 | PSDT 15:14 | FUSE 9:8 | OPC 7:0
//!   1     CDW3                  CDW2
//!   2     MPTR
//!   3     PRP1, or the low half of SGL1
//!   4     PRP2, or the high half of SGL1
//!   5     CDW11                 CDW10
//!   6     CDW13                 CDW12
//!   7     CDW15                 CDW14
//! ```
//!
//! It is one cache line and is handled as eight words, so that a builder compiles to shifts and one
//! store per word. The words are native numbers; [`Command::to_bytes`] makes them little-endian.

use core::fmt;

use crate::layout::{extract_bits, low_bits_mask};
use crate::sgl::Descriptor;

/// Submission queue entry.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(C, align(64))]
pub struct Command(
    /// The eight words.
    pub [u64; 8],
);

const _: () = assert!(size_of::<Command>() == 64 && align_of::<Command>() == 64);

/// PSDT: kind of the data pointer (Base 2.1 §4.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DataPointer {
    /// 00b: PRPs for data, a contiguous buffer for metadata.
    Prp = 0,
    /// 01b: an SGL for data, a contiguous buffer for metadata.
    Sgl = 1,
    /// 10b: an SGL for data, and MPTR points to an SGL for metadata.
    SglAndMetadataSgl = 2,
    /// 11b.
    Reserved = 3,
}

/// FUSE: role in a fused operation (Base 2.1 §4.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Fuse {
    /// 00b: not fused.
    Normal = 0,
    /// 01b: first command of a fused operation.
    First = 1,
    /// 10b: second command of a fused operation.
    Second = 2,
    /// 11b.
    Reserved = 3,
}

impl Command {
    /// Length in memory and in a capsule.
    pub const BYTES: usize = 64;

    /// Creates a command with only the opcode set.
    #[inline]
    #[must_use]
    pub const fn new(opcode: u8) -> Self {
        Self([opcode as u64, 0, 0, 0, 0, 0, 0, 0])
    }

    /// Decodes little-endian bytes.
    #[inline]
    #[must_use]
    pub fn from_bytes(bytes: &[u8; 64]) -> Self {
        let mut words = [0; 8];
        for (word, chunk) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*chunk);
        }
        Self(words)
    }

    /// Encodes to little-endian bytes.
    #[inline]
    #[must_use]
    pub fn to_bytes(&self) -> [u8; 64] {
        let mut bytes = [0; 64];
        for (word, chunk) in self.0.iter().zip(bytes.as_chunks_mut::<8>().0) {
            *chunk = word.to_le_bytes();
        }
        bytes
    }

    /// OPC: opcode.
    #[inline]
    #[must_use]
    #[allow(clippy::cast_possible_truncation, reason = "the low byte is the field")]
    pub const fn opcode(&self) -> u8 {
        self.0[0] as u8
    }

    /// FUSE: role in a fused operation.
    #[inline]
    #[must_use]
    pub const fn fuse(&self) -> Fuse {
        match extract_bits(self.0[0], 8, 2) {
            0 => Fuse::Normal,
            1 => Fuse::First,
            2 => Fuse::Second,
            _ => Fuse::Reserved,
        }
    }

    /// PSDT: PRPs or SGL as the data pointer.
    #[inline]
    #[must_use]
    pub const fn psdt(&self) -> DataPointer {
        match extract_bits(self.0[0], 14, 2) {
            0 => DataPointer::Prp,
            1 => DataPointer::Sgl,
            2 => DataPointer::SglAndMetadataSgl,
            _ => DataPointer::Reserved,
        }
    }

    /// CID: command identifier, returned in the completion.
    #[inline]
    #[must_use]
    #[allow(clippy::cast_possible_truncation, reason = "shifted so that the field is low")]
    pub const fn cid(&self) -> u16 {
        (self.0[0] >> 16) as u16
    }

    /// NSID: namespace identifier.
    #[inline]
    #[must_use]
    pub const fn nsid(&self) -> u32 {
        high_dword(self.0[0])
    }

    /// CDW2.
    #[inline]
    #[must_use]
    pub const fn cdw2(&self) -> u32 {
        low_dword(self.0[1])
    }

    /// CDW3.
    #[inline]
    #[must_use]
    pub const fn cdw3(&self) -> u32 {
        high_dword(self.0[1])
    }

    /// MPTR: metadata pointer.
    #[inline]
    #[must_use]
    pub const fn mptr(&self) -> u64 {
        self.0[2]
    }

    /// PRP entry 1.
    #[inline]
    #[must_use]
    pub const fn prp1(&self) -> u64 {
        self.0[3]
    }

    /// PRP entry 2.
    #[inline]
    #[must_use]
    pub const fn prp2(&self) -> u64 {
        self.0[4]
    }

    /// SGL1: first SGL descriptor.
    #[inline]
    #[must_use]
    pub const fn sgl1(&self) -> Descriptor {
        Descriptor([self.0[3], self.0[4]])
    }

    /// CDW10.
    #[inline]
    #[must_use]
    pub const fn cdw10(&self) -> u32 {
        low_dword(self.0[5])
    }

    /// CDW11.
    #[inline]
    #[must_use]
    pub const fn cdw11(&self) -> u32 {
        high_dword(self.0[5])
    }

    /// CDW12.
    #[inline]
    #[must_use]
    pub const fn cdw12(&self) -> u32 {
        low_dword(self.0[6])
    }

    /// CDW13.
    #[inline]
    #[must_use]
    pub const fn cdw13(&self) -> u32 {
        high_dword(self.0[6])
    }

    /// CDW14.
    #[inline]
    #[must_use]
    pub const fn cdw14(&self) -> u32 {
        low_dword(self.0[7])
    }

    /// CDW15.
    #[inline]
    #[must_use]
    pub const fn cdw15(&self) -> u32 {
        high_dword(self.0[7])
    }

    /// Sets the opcode.
    #[inline]
    #[must_use]
    pub const fn with_opcode(self, opcode: u8) -> Self {
        self.with_bits(0, 8, opcode as u64)
    }

    /// Sets the role in a fused operation.
    #[inline]
    #[must_use]
    pub const fn with_fuse(self, fuse: Fuse) -> Self {
        self.with_bits(8, 2, fuse as u64)
    }

    /// Sets the kind of data pointer.
    #[inline]
    #[must_use]
    pub const fn with_psdt(self, psdt: DataPointer) -> Self {
        self.with_bits(14, 2, psdt as u64)
    }

    /// Sets the command identifier.
    #[inline]
    #[must_use]
    pub const fn with_cid(self, cid: u16) -> Self {
        self.with_bits(16, 16, cid as u64)
    }

    /// Sets the namespace identifier.
    #[inline]
    #[must_use]
    pub const fn with_nsid(self, nsid: u32) -> Self {
        self.with_bits(32, 32, nsid as u64)
    }

    /// Sets CDW2.
    #[inline]
    #[must_use]
    pub const fn with_cdw2(self, cdw2: u32) -> Self {
        self.with_bits(64, 32, cdw2 as u64)
    }

    /// Sets CDW3.
    #[inline]
    #[must_use]
    pub const fn with_cdw3(self, cdw3: u32) -> Self {
        self.with_bits(96, 32, cdw3 as u64)
    }

    /// Sets the metadata pointer.
    #[inline]
    #[must_use]
    pub const fn with_mptr(mut self, mptr: u64) -> Self {
        self.0[2] = mptr;
        self
    }

    /// Sets both PRP entries, and PSDT.
    #[inline]
    #[must_use]
    pub const fn with_prp(mut self, prp1: u64, prp2: u64) -> Self {
        self.0[3] = prp1;
        self.0[4] = prp2;
        self.with_psdt(DataPointer::Prp)
    }

    /// Sets SGL1, and PSDT.
    #[inline]
    #[must_use]
    pub const fn with_sgl1(mut self, sgl1: Descriptor) -> Self {
        self.0[3] = sgl1.0[0];
        self.0[4] = sgl1.0[1];
        self.with_psdt(DataPointer::Sgl)
    }

    /// Sets CDW10.
    #[inline]
    #[must_use]
    pub const fn with_cdw10(self, cdw10: u32) -> Self {
        self.with_bits(320, 32, cdw10 as u64)
    }

    /// Sets CDW11.
    #[inline]
    #[must_use]
    pub const fn with_cdw11(self, cdw11: u32) -> Self {
        self.with_bits(352, 32, cdw11 as u64)
    }

    /// Sets CDW12.
    #[inline]
    #[must_use]
    pub const fn with_cdw12(self, cdw12: u32) -> Self {
        self.with_bits(384, 32, cdw12 as u64)
    }

    /// Sets CDW13.
    #[inline]
    #[must_use]
    pub const fn with_cdw13(self, cdw13: u32) -> Self {
        self.with_bits(416, 32, cdw13 as u64)
    }

    /// Sets CDW14.
    #[inline]
    #[must_use]
    pub const fn with_cdw14(self, cdw14: u32) -> Self {
        self.with_bits(448, 32, cdw14 as u64)
    }

    /// Sets CDW15.
    #[inline]
    #[must_use]
    pub const fn with_cdw15(self, cdw15: u32) -> Self {
        self.with_bits(480, 32, cdw15 as u64)
    }

    /// Extracts `width` bits (64 at most) from bit `at` of the 512.
    #[inline(always)]
    #[must_use]
    pub const fn bits(&self, at: usize, width: u32) -> u64 {
        let (word, shift) = (at / 64, at % 64);
        let mut value = self.0[word] >> shift;
        if shift + width as usize > 64 {
            value |= self.0[word + 1] << (64 - shift);
        }
        value & low_bits_mask(width)
    }

    /// Replaces `width` bits (64 at most) from bit `at` of the 512.
    #[inline(always)]
    #[must_use]
    pub const fn with_bits(mut self, at: usize, width: u32, value: u64) -> Self {
        debug_assert!(value & !low_bits_mask(width) == 0, "the value is wider than its field");
        let (word, shift) = (at / 64, at % 64);
        let value = value & low_bits_mask(width);
        self.0[word] = (self.0[word] & !(low_bits_mask(width) << shift)) | (value << shift);
        if shift + width as usize > 64 {
            let rest = 64 - shift;
            self.0[word + 1] =
                (self.0[word + 1] & !(low_bits_mask(width) >> rest)) | (value >> rest);
        }
        self
    }
}

#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "the low half is wanted")]
const fn low_dword(word: u64) -> u32 {
    word as u32
}

#[inline(always)]
const fn high_dword(word: u64) -> u32 {
    low_dword(word >> 32)
}

impl fmt::Debug for Command {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Command")
            .field("opcode", &format_args!("{:#04x}", self.opcode()))
            .field("cid", &self.cid())
            .field("nsid", &self.nsid())
            .field("words", &format_args!("{:x?}", &self.0[1..]))
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::{Command, DataPointer, Fuse};
    use crate::sgl::Descriptor;

    /// Byte `n` of the entry is `n`, so that a value reveals its offset.
    fn command_with_numbered_bytes() -> Command {
        let mut bytes = [0; 64];
        for (at, byte) in (0..64).zip(&mut bytes) {
            *byte = at;
        }
        Command::from_bytes(&bytes)
    }

    #[test]
    fn command_fields_are_at_the_offsets_of_figures_91_and_92() {
        let command = command_with_numbered_bytes();
        assert_eq!(command.opcode(), 0x00);
        assert_eq!(command.cid(), 0x0302);
        assert_eq!(command.nsid(), 0x0706_0504);
        assert_eq!(command.cdw2(), 0x0b0a_0908);
        assert_eq!(command.cdw3(), 0x0f0e_0d0c);
        assert_eq!(command.mptr(), 0x1716_1514_1312_1110);
        assert_eq!(command.prp1(), 0x1f1e_1d1c_1b1a_1918);
        assert_eq!(command.prp2(), 0x2726_2524_2322_2120);
        assert_eq!(command.cdw10(), 0x2b2a_2928);
        assert_eq!(command.cdw11(), 0x2f2e_2d2c);
        assert_eq!(command.cdw12(), 0x3332_3130);
        assert_eq!(command.cdw13(), 0x3736_3534);
        assert_eq!(command.cdw14(), 0x3b3a_3938);
        assert_eq!(command.cdw15(), 0x3f3e_3d3c);
        assert_eq!(Command::from_bytes(&command.to_bytes()), command);
    }

    #[test]
    fn each_command_setter_changes_only_its_own_bits() {
        let full = Command([u64::MAX; 8]);
        let checks: [(Command, usize, usize); 16] = [
            (full.with_opcode(0), 0, 8),
            (full.with_fuse(Fuse::Normal), 8, 2),
            (full.with_psdt(DataPointer::Prp), 14, 2),
            (full.with_cid(0), 16, 16),
            (full.with_nsid(0), 32, 32),
            (full.with_cdw2(0), 64, 32),
            (full.with_cdw3(0), 96, 32),
            (full.with_mptr(0), 128, 64),
            (full.with_cdw10(0), 320, 32),
            (full.with_cdw11(0), 352, 32),
            (full.with_cdw12(0), 384, 32),
            (full.with_cdw13(0), 416, 32),
            (full.with_cdw14(0), 448, 32),
            (full.with_cdw15(0), 480, 32),
            (full.with_prp(0, 0).with_psdt(DataPointer::Reserved), 192, 128),
            (full.with_sgl1(Descriptor([0, 0])).with_psdt(DataPointer::Reserved), 192, 128),
        ];
        for (command, at, width) in checks {
            for bit in 0..512 {
                let inside = (at..at + width).contains(&bit);
                assert_eq!(command.bits(bit, 1) == 0, inside, "bit {bit} of the field at {at}");
            }
        }
    }

    #[test]
    fn a_range_of_bits_may_cross_words() {
        for at in 0..=448 {
            for width in [1, 7, 31, 33, 63, 64] {
                let ones = crate::layout::low_bits_mask(width);
                let command = Command::default().with_bits(at, width, ones);
                assert_eq!(command.bits(at, width), ones);
                let set: u32 = command.0.iter().map(|word| word.count_ones()).sum();
                assert_eq!(set, width);
                let holed = Command([u64::MAX; 8]).with_bits(at, width, 0);
                assert_eq!(holed.bits(at, width), 0);
                let left: u32 = holed.0.iter().map(|word| word.count_ones()).sum();
                assert_eq!(left, 512 - width);
            }
        }
    }

    #[test]
    fn psdt_and_fuse_codes_round_trip() {
        for psdt in [DataPointer::Prp, DataPointer::Sgl, DataPointer::SglAndMetadataSgl] {
            assert_eq!(Command::new(1).with_psdt(psdt).psdt(), psdt);
        }
        for fuse in [Fuse::Normal, Fuse::First, Fuse::Second, Fuse::Reserved] {
            assert_eq!(Command::new(1).with_fuse(fuse).fuse(), fuse);
        }
        assert_eq!(Command::new(1).with_psdt(DataPointer::Reserved).0[0], 0xc001);
        assert_eq!(Command::new(2).with_prp(1, 2).psdt(), DataPointer::Prp);
        assert_eq!(Command::new(2).with_sgl1(Descriptor([1, 2])).psdt(), DataPointer::Sgl);
    }
}
