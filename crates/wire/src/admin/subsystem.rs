//! Admin commands for the whole subsystem: capacity, lockdown, virtual functions, migration,
//! management (Base 2.1 §5).
//!
//! Where an operation defines dwords of its own, these are fields of a whole dword.

use crate::field_type::code;
use crate::opcode::AdminOpcode;
use crate::typed::commands;

commands! {
    /// Virtualization Management (Base 2.1 §5.2.6).
    pub struct VirtualizationManagement = AdminOpcode::VirtualizationManagement, "Virtualization Management" {
        /// Action.
        act @ 10[0..=3]: VirtualizationAction;
        /// Resource Type: 0 for queues, 1 for interrupts.
        rt @ 10[8..=10]: u8;
        /// Controller Identifier.
        cntlid @ 10[16..=31]: u16;
        /// Number of Controller Resources.
        nr @ 11[0..=15]: u16;
    }

    /// NVMe-MI Send; the dwords are a management request (Base 2.1 §5.1.19).
    pub struct NvmeMiSend = AdminOpcode::NvmeMiSend, "NVMe-MI Send" {
        /// Message type and lengths.
        cdw10 @ 10[0..=31]: u32;
        /// NVMe-MI opcode in bits 7 to 0.
        cdw11 @ 11[0..=31]: u32;
        /// NVMe Management Dword 0.
        nmd0 @ 12[0..=31]: u32;
        /// NVMe Management Dword 1.
        nmd1 @ 13[0..=31]: u32;
    }

    /// NVMe-MI Receive; the dwords are a management request (Base 2.1 §5.1.18).
    pub struct NvmeMiReceive = AdminOpcode::NvmeMiReceive, "NVMe-MI Receive" {
        /// Message type and lengths.
        cdw10 @ 10[0..=31]: u32;
        /// NVMe-MI opcode in bits 7 to 0.
        cdw11 @ 11[0..=31]: u32;
        /// NVMe Management Dword 0.
        nmd0 @ 12[0..=31]: u32;
        /// NVMe Management Dword 1.
        nmd1 @ 13[0..=31]: u32;
    }

    /// Capacity Management (Base 2.1 §5.1.3).
    pub struct CapacityManagement = AdminOpcode::CapacityManagement, "Capacity Management" {
        /// Operation.
        oper @ 10[0..=3]: CapacityOperation;
        /// Element Identifier.
        elid @ 10[16..=31]: u16;
        /// Capacity, in bytes: CAPL and CAPU.
        cap @ 11[0..=63]: u64;
    }

    /// Discovery Information Management (Base 2.1 §5.3.3).
    pub struct DiscoveryInformationManagement = AdminOpcode::DiscoveryInformationManagement, "Discovery Information Management" {
        /// Task: 0 register, 1 deregister, 2 update.
        tas @ 10[0..=3]: u8;
    }

    /// Lockdown (Base 2.1 §5.1.15).
    pub struct Lockdown = AdminOpcode::Lockdown, "Lockdown" {
        /// Scope: 0 admin commands, 2 features, 3 MI commands, 4 PCIe commands.
        scp @ 10[0..=3]: u8;
        /// Prohibit; clear to allow.
        prhbt @ 10[4]: bool;
        /// Interface: 0 admin queue, 1 both, 2 management endpoint.
        ifc @ 10[5..=6]: u8;
        /// Opcode or Feature Identifier.
        ofi @ 10[8..=15]: u8;
        /// UUID Index.
        uuid_index @ 14[0..=6]: u8;
    }

    /// Track Send (Base 2.1 §5.1.27).
    pub struct TrackSend = AdminOpcode::TrackSend, "Track Send" {
        /// Select: 0 log user data changes, 1 track memory changes.
        sel @ 10[0..=7]: u8;
        /// Management Operation Specific.
        mos @ 10[16..=31]: u16;
        /// Controller Data Queue Identifier.
        cdqid @ 11[0..=15]: u16;
    }

    /// Track Receive (Base 2.1 §5.1.26).
    pub struct TrackReceive = AdminOpcode::TrackReceive, "Track Receive" {
        /// Select: 0 tracked memory changes.
        sel @ 10[0..=7]: u8;
        /// Operation specific dword 11.
        cdw11 @ 11[0..=31]: u32;
        /// Number of Dwords, 0's based.
        numd @ 12[0..=31]: u32;
    }

    /// Migration Send (Base 2.1 §5.1.17).
    pub struct MigrationSend = AdminOpcode::MigrationSend, "Migration Send" {
        /// Select.
        sel @ 10[0..=7]: MigrationOperation;
        /// Management Operation Specific.
        mos @ 10[16..=31]: u16;
        /// Controller Identifier.
        cntlid @ 11[0..=15]: u16;
        /// Operation specific half of dword 11.
        cdw11_high @ 11[16..=31]: u16;
        /// Offset, in bytes.
        offset @ 12[0..=63]: u64;
        /// UUID Index.
        uuid_index @ 14[0..=6]: u8;
        /// Number of Dwords.
        numd @ 15[0..=31]: u32;
    }

    /// Migration Receive (Base 2.1 §5.1.16).
    pub struct MigrationReceive = AdminOpcode::MigrationReceive, "Migration Receive" {
        /// Select: 0 get controller state.
        sel @ 10[0..=7]: u8;
        /// Management Operation Specific: the state's format version.
        mos @ 10[16..=31]: u16;
        /// Controller Identifier.
        cntlid @ 11[0..=15]: u16;
        /// Controller State UUID Index.
        csuuidi @ 11[16..=23]: u8;
        /// Controller State UUID Index Parameter.
        csuidxp @ 11[24..=31]: u8;
        /// Offset, in bytes.
        offset @ 12[0..=63]: u64;
        /// UUID Index.
        uuid_index @ 14[0..=6]: u8;
        /// Number of Dwords, 0's based.
        numd @ 15[0..=31]: u32;
    }

    /// Controller Data Queue (Base 2.1 §5.1.4).
    pub struct ControllerDataQueue = AdminOpcode::ControllerDataQueue, "Controller Data Queue" {
        /// Select: 0 create, 1 delete.
        sel @ 10[0..=7]: u8;
        /// Management Operation Specific: the queue's type.
        mos @ 10[16..=31]: u16;
        /// Operation specific dword 11: PC and CQS, or the identifier.
        cdw11 @ 11[0..=31]: u32;
        /// Size, in dwords.
        cdqsize @ 12[0..=31]: u32;
    }
}

code! {
    /// ACT of Virtualization Management (Base 2.1 §5.2.6).
    pub enum VirtualizationAction {
        /// Primary controller flexible allocation.
        PrimaryFlexible = 1,
        /// Secondary controller offline.
        SecondaryOffline = 7,
        /// Secondary controller assign.
        SecondaryAssign = 8,
        /// Secondary controller online.
        SecondaryOnline = 9,
    }

    /// OPER of Capacity Management (Base 2.1 §5.1.3).
    pub enum CapacityOperation {
        /// Select a capacity configuration.
        SelectConfiguration = 0,
        /// Create an endurance group.
        CreateEnduranceGroup = 1,
        /// Delete an endurance group.
        DeleteEnduranceGroup = 2,
        /// Create an NVM set.
        CreateNvmSet = 3,
        /// Delete an NVM set.
        DeleteNvmSet = 4,
    }

    /// SEL of Migration Send (Base 2.1 §5.1.17).
    pub enum MigrationOperation {
        /// Suspend.
        Suspend = 0,
        /// Resume.
        Resume = 1,
        /// Set controller state.
        SetState = 2,
    }
}

#[cfg(test)]
mod tests {
    use super::{CapacityManagement, CapacityOperation, Lockdown};
    use crate::typed::TypedCommand;

    #[test]
    fn capacity_management_uses_cdw11_and_cdw12() {
        let create = CapacityManagement {
            oper: CapacityOperation::CreateEnduranceGroup,
            cap: 0x1_0000_0002,
            ..CapacityManagement::default()
        };
        let command = create.to_command();
        assert_eq!((command.cdw10(), command.cdw11(), command.cdw12()), (1, 2, 1));
    }

    #[test]
    fn lockdown_packs_four_fields_into_cdw10() {
        let lock = Lockdown { scp: 2, prhbt: true, ifc: 1, ofi: 0x84, ..Lockdown::default() };
        assert_eq!(lock.to_command().cdw10(), 0x8432);
    }
}
