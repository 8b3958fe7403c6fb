//! I/O commands of the NVM command set (NVM 1.1 §3.3, Base 2.1 §7).
//!
//! Commands that transfer blocks share fields: see [`LbaRange`] for the common ones, and
//! [`crate::protection_information::ProtectionTags`] for the logical block tags that are spread over CDW2, CDW3 and
//! CDW14.

use crate::layout::layout;
use crate::opcode::IoOpcode;
use crate::typed::commands;

pub mod copy;
pub mod dataset;
pub mod reservation;

commands! {
    /// Flush (Base 2.1 §7.2).
    pub struct Flush = IoOpcode::Flush, "Flush" {
        /// Namespace Identifier: all ones for every namespace.
        nsid @ 1[0..=31]: u32;
    }

    /// Write (NVM 1.1 §3.3.6).
    pub struct Write = IoOpcode::Write, "Write" {
        /// Namespace Identifier.
        nsid @ 1[0..=31]: u32;
        /// Logical Block Tags, bits 79 to 64.
        lbt_79_64 @ 2[0..=15]: u16;
        /// Logical Block Tags, bits 63 to 32.
        lbt_63_32 @ 3[0..=31]: u32;
        /// Starting LBA.
        slba @ 10[0..=63]: u64;
        /// Number of Logical Blocks, 0's based.
        nlb @ 12[0..=15]: u16;
        /// Command Extension Type.
        cetype @ 12[16..=19]: u8;
        /// Directive Type.
        dtype @ 12[20..=23]: u8;
        /// Storage Tag Check.
        stc @ 12[24]: bool;
        /// Protection Information field.
        prinfo @ 12[26..=29]: ProtectionInformation;
        /// Force Unit Access.
        fua @ 12[30]: bool;
        /// Limited Retry.
        lr @ 12[31]: bool;
        /// Dataset Management hints, or the Command Extension Value.
        hints @ 13[0..=15]: Hints;
        /// Directive Specific.
        dspec @ 13[16..=31]: u16;
        /// Logical Block Tags, bits 31 to 0.
        lbt_31_0 @ 14[0..=31]: u32;
        /// Logical Block Application Tag.
        lbat @ 15[0..=15]: u16;
        /// Logical Block Application Tag Mask.
        lbatm @ 15[16..=31]: u16;
    }

    /// Read (NVM 1.1 §3.3.4).
    pub struct Read = IoOpcode::Read, "Read" {
        /// Namespace Identifier.
        nsid @ 1[0..=31]: u32;
        /// Expected Logical Block Tags, bits 79 to 64.
        lbt_79_64 @ 2[0..=15]: u16;
        /// Expected Logical Block Tags, bits 63 to 32.
        lbt_63_32 @ 3[0..=31]: u32;
        /// Starting LBA.
        slba @ 10[0..=63]: u64;
        /// Number of Logical Blocks, 0's based.
        nlb @ 12[0..=15]: u16;
        /// Command Extension Type.
        cetype @ 12[16..=19]: u8;
        /// Storage Tag Check.
        stc @ 12[24]: bool;
        /// Protection Information field.
        prinfo @ 12[26..=29]: ProtectionInformation;
        /// Force Unit Access.
        fua @ 12[30]: bool;
        /// Limited Retry.
        lr @ 12[31]: bool;
        /// Dataset Management hints, or the Command Extension Value.
        hints @ 13[0..=15]: Hints;
        /// Expected Logical Block Tags, bits 31 to 0.
        lbt_31_0 @ 14[0..=31]: u32;
        /// Expected Logical Block Application Tag.
        lbat @ 15[0..=15]: u16;
        /// Expected Logical Block Application Tag Mask.
        lbatm @ 15[16..=31]: u16;
    }

    /// Write Uncorrectable (NVM 1.1 §3.3.7).
    pub struct WriteUncorrectable = IoOpcode::WriteUncorrectable, "Write Uncorrectable" {
        /// Namespace Identifier.
        nsid @ 1[0..=31]: u32;
        /// Starting LBA.
        slba @ 10[0..=63]: u64;
        /// Number of Logical Blocks, 0's based.
        nlb @ 12[0..=15]: u16;
        /// Directive Type.
        dtype @ 12[20..=23]: u8;
        /// Directive Specific.
        dspec @ 13[16..=31]: u16;
    }

    /// Compare (NVM 1.1 §3.3.1).
    pub struct Compare = IoOpcode::Compare, "Compare" {
        /// Namespace Identifier.
        nsid @ 1[0..=31]: u32;
        /// Expected Logical Block Tags, bits 79 to 64.
        lbt_79_64 @ 2[0..=15]: u16;
        /// Expected Logical Block Tags, bits 63 to 32.
        lbt_63_32 @ 3[0..=31]: u32;
        /// Starting LBA.
        slba @ 10[0..=63]: u64;
        /// Number of Logical Blocks, 0's based.
        nlb @ 12[0..=15]: u16;
        /// Command Extension Type.
        cetype @ 12[16..=19]: u8;
        /// Storage Tag Check.
        stc @ 12[24]: bool;
        /// Protection Information field.
        prinfo @ 12[26..=29]: ProtectionInformation;
        /// Force Unit Access.
        fua @ 12[30]: bool;
        /// Limited Retry.
        lr @ 12[31]: bool;
        /// Command Extension Value.
        cev @ 13[0..=15]: u16;
        /// Expected Logical Block Tags, bits 31 to 0.
        lbt_31_0 @ 14[0..=31]: u32;
        /// Expected Logical Block Application Tag.
        lbat @ 15[0..=15]: u16;
        /// Expected Logical Block Application Tag Mask.
        lbatm @ 15[16..=31]: u16;
    }

    /// Write Zeroes (NVM 1.1 §3.3.8).
    pub struct WriteZeroes = IoOpcode::WriteZeroes, "Write Zeroes" {
        /// Namespace Identifier.
        nsid @ 1[0..=31]: u32;
        /// Logical Block Tags, bits 79 to 64.
        lbt_79_64 @ 2[0..=15]: u16;
        /// Logical Block Tags, bits 63 to 32.
        lbt_63_32 @ 3[0..=31]: u32;
        /// Starting LBA.
        slba @ 10[0..=63]: u64;
        /// Number of Logical Blocks, 0's based.
        nlb @ 12[0..=15]: u16;
        /// Command Extension Type.
        cetype @ 12[16..=19]: u8;
        /// Directive Type.
        dtype @ 12[20..=22]: u8;
        /// Namespace Zeroes: clear the whole namespace.
        nsz @ 12[23]: bool;
        /// Storage Tag Check.
        stc @ 12[24]: bool;
        /// Deallocate.
        deac @ 12[25]: bool;
        /// Protection Information field.
        prinfo @ 12[26..=29]: ProtectionInformation;
        /// Force Unit Access.
        fua @ 12[30]: bool;
        /// Limited Retry.
        lr @ 12[31]: bool;
        /// Dataset Management hints, or the Command Extension Value.
        hints @ 13[0..=15]: Hints;
        /// Directive Specific.
        dspec @ 13[16..=31]: u16;
        /// Logical Block Tags, bits 31 to 0.
        lbt_31_0 @ 14[0..=31]: u32;
        /// Logical Block Application Tag.
        lbat @ 15[0..=15]: u16;
        /// Logical Block Application Tag Mask.
        lbatm @ 15[16..=31]: u16;
    }

    /// Verify (NVM 1.1 §3.3.5).
    pub struct Verify = IoOpcode::Verify, "Verify" {
        /// Namespace Identifier.
        nsid @ 1[0..=31]: u32;
        /// Expected Logical Block Tags, bits 79 to 64.
        lbt_79_64 @ 2[0..=15]: u16;
        /// Expected Logical Block Tags, bits 63 to 32.
        lbt_63_32 @ 3[0..=31]: u32;
        /// Starting LBA.
        slba @ 10[0..=63]: u64;
        /// Number of Logical Blocks, 0's based.
        nlb @ 12[0..=15]: u16;
        /// Command Extension Type.
        cetype @ 12[16..=19]: u8;
        /// Storage Tag Check.
        stc @ 12[24]: bool;
        /// Protection Information field.
        prinfo @ 12[26..=29]: ProtectionInformation;
        /// Force Unit Access.
        fua @ 12[30]: bool;
        /// Limited Retry.
        lr @ 12[31]: bool;
        /// Command Extension Value.
        cev @ 13[0..=15]: u16;
        /// Expected Logical Block Tags, bits 31 to 0.
        lbt_31_0 @ 14[0..=31]: u32;
        /// Expected Logical Block Application Tag.
        lbat @ 15[0..=15]: u16;
        /// Expected Logical Block Application Tag Mask.
        lbatm @ 15[16..=31]: u16;
    }

    /// Cancel (Base 2.1 §7.1).
    pub struct Cancel = IoOpcode::Cancel, "Cancel" {
        /// Namespace Identifier.
        nsid @ 1[0..=31]: u32;
        /// Submission Queue Identifier: the one the command is in.
        sqid @ 10[0..=15]: u16;
        /// Command Identifier of the command to cancel; all ones for several.
        cancel_cid @ 10[16..=31]: u16;
        /// Action Code: 0 for one command, 1 for all of the namespace in the queue.
        action @ 11[0..=1]: u8;
    }

    /// I/O Management Receive (Base 2.1 §7.3).
    pub struct IoManagementReceive = IoOpcode::IoManagementReceive, "I/O Management Receive" {
        /// Namespace Identifier.
        nsid @ 1[0..=31]: u32;
        /// Management Operation: 1 for reclaim unit handle status.
        mo @ 10[0..=7]: u8;
        /// Management Operation Specific.
        mos @ 10[16..=31]: u16;
        /// Number of Dwords, 0's based.
        numd @ 11[0..=31]: u32;
    }

    /// I/O Management Send (Base 2.1 §7.4).
    pub struct IoManagementSend = IoOpcode::IoManagementSend, "I/O Management Send" {
        /// Namespace Identifier.
        nsid @ 1[0..=31]: u32;
        /// Management Operation: 1 for reclaim unit handle update.
        mo @ 10[0..=7]: u8;
        /// Management Operation Specific.
        mos @ 10[16..=31]: u16;
    }
}

layout! {
    /// PRINFO: action and checks of protection information (NVM 1.1 §3.2.1).
    pub struct ProtectionInformation(u8) {
        /// PRCHK: check the reference tag.
        check_reference_tag @ 0: bool;
        /// PRCHK: check the application tag.
        check_application_tag @ 1: bool;
        /// PRCHK: check the guard.
        check_guard @ 2: bool;
        /// PRACT: insert on a write, strip on a read.
        action @ 3: bool;
    }

    /// DSM of Read and Write: expected use of the blocks (NVM 1.1 §3.3.4, Figure 53).
    pub struct Hints(u16) {
        /// Access Frequency.
        access_frequency @ 0..=3: u8;
        /// Access Latency: 1 idle, 2 normal, 3 low.
        access_latency @ 4..=5: u8;
        /// Sequential Request.
        sequential @ 6: bool;
        /// Incompressible.
        incompressible @ 7: bool;
    }
}

/// Common fields of all commands that act on a range of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LbaRange {
    /// The namespace.
    pub nsid: u32,
    /// The first block.
    pub slba: u64,
    /// Number of blocks, 1 to 65 536.
    pub count: u32,
}

impl LbaRange {
    /// Reads the range of any command that acts on one.
    #[inline]
    #[must_use]
    pub const fn from_command(command: &crate::Command) -> Self {
        Self { nsid: command.nsid(), slba: command.0[5], count: (command.cdw12() & 0xffff) + 1 }
    }

    /// The block after the last one. `None` on overflow.
    #[inline]
    #[must_use]
    pub const fn end_lba(&self) -> Option<u64> {
        self.slba.checked_add(self.count as u64)
    }

    /// Builds a read or write of these blocks.
    ///
    /// Only the low 16 bits of `count - 1` are kept.
    #[inline]
    #[must_use]
    pub const fn to_command(&self, opcode: IoOpcode) -> crate::Command {
        let nlb = self.count.wrapping_sub(1) & 0xffff;
        let word0 = opcode.code() as u64 | (self.nsid as u64) << 32;
        crate::Command([word0, 0, 0, 0, 0, self.slba, nlb as u64, 0])
    }
}

#[cfg(test)]
mod tests {
    use super::{Hints, LbaRange, ProtectionInformation, Read, Write, WriteZeroes};
    use crate::opcode::IoOpcode;
    use crate::typed::TypedCommand;

    #[test]
    fn write_flags_are_at_the_bits_of_the_specification() {
        let write = Write {
            nsid: 1,
            slba: 0x1_2345_6789,
            nlb: 7,
            fua: true,
            prinfo: ProtectionInformation::zeroed().with(|info| info.action(true)),
            hints: Hints::zeroed().with(|hints| hints.sequential(true)),
            ..Write::default()
        };
        let command = write.to_command();
        assert_eq!((command.cdw10(), command.cdw11()), (0x2345_6789, 1));
        assert_eq!((command.cdw12(), command.cdw13()), (0x6000_0007, 0x40));
        let deallocate = WriteZeroes { deac: true, ..WriteZeroes::default() };
        assert_eq!(deallocate.to_command().cdw12(), 1 << 25);
    }

    #[test]
    fn lba_range_and_typed_command_encode_the_same_read() {
        for count in [1, 8, 65_536] {
            let blocks = LbaRange { nsid: 3, slba: u64::MAX - 5, count };
            let nlb = u16::try_from(count - 1).unwrap();
            let read = Read { nsid: 3, slba: u64::MAX - 5, nlb, ..Read::default() };
            assert_eq!(blocks.to_command(IoOpcode::Read), read.to_command());
            assert_eq!(LbaRange::from_command(&read.to_command()), blocks);
        }
    }

    #[test]
    fn lba_range_beyond_the_last_lba_has_no_end() {
        assert_eq!(LbaRange { nsid: 1, slba: u64::MAX - 1, count: 1 }.end_lba(), Some(u64::MAX));
        assert_eq!(LbaRange { nsid: 1, slba: u64::MAX, count: 1 }.end_lba(), None);
    }
}
