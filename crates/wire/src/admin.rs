//! Admin commands (Base 2.1 §5).
//!
//! Each is a structure of its fields; [`TypedCommand`](crate::TypedCommand) converts it to a
//! command. Extensive code sets (log pages, features, Identify structures) are numbers here and are
//! named in the modules of their data structures.

use crate::field_type::code;
use crate::layout::layout;
use crate::opcode::AdminOpcode;
use crate::typed::commands;

pub mod subsystem;

commands! {
    /// Delete I/O Submission Queue (Base 2.1 §5.2.4).
    pub struct DeleteIoSubmissionQueue = AdminOpcode::DeleteIoSubmissionQueue, "Delete I/O Submission Queue" {
        /// Queue Identifier.
        qid @ 10[0..=15]: u16;
    }

    /// Create I/O Submission Queue (Base 2.1 §5.2.2).
    pub struct CreateIoSubmissionQueue = AdminOpcode::CreateIoSubmissionQueue, "Create I/O Submission Queue" {
        /// Queue Identifier.
        qid @ 10[0..=15]: u16;
        /// Queue Size, 0's based.
        qsize @ 10[16..=31]: u16;
        /// Physically Contiguous: PRP1 is the queue and not a list.
        pc @ 11[0]: bool;
        /// Queue Priority.
        qprio @ 11[1..=2]: QueuePriority;
        /// Completion Queue Identifier.
        cqid @ 11[16..=31]: u16;
        /// NVM Set Identifier.
        nvmsetid @ 12[0..=15]: u16;
    }

    /// Get Log Page (Base 2.1 §5.1.12).
    pub struct GetLogPage = AdminOpcode::GetLogPage, "Get Log Page" {
        /// Namespace Identifier.
        nsid @ 1[0..=31]: u32;
        /// Log Page Identifier.
        lid @ 10[0..=7]: u8;
        /// Log Specific Parameter.
        lsp @ 10[8..=14]: u8;
        /// Retain Asynchronous Event.
        rae @ 10[15]: bool;
        /// Number of Dwords, 0's based: NUMDL and NUMDU.
        numd @ 10[16..=47]: u32;
        /// Log Specific Identifier.
        lsi @ 11[16..=31]: u16;
        /// Log Page Offset: in bytes, or an index if OT is set.
        lpo @ 12[0..=63]: u64;
        /// UUID Index.
        uuid_index @ 14[0..=6]: u8;
        /// Offset Type: LPO is an index.
        ot @ 14[23]: bool;
        /// Command Set Identifier.
        csi @ 14[24..=31]: u8;
    }

    /// Delete I/O Completion Queue (Base 2.1 §5.2.3).
    pub struct DeleteIoCompletionQueue = AdminOpcode::DeleteIoCompletionQueue, "Delete I/O Completion Queue" {
        /// Queue Identifier.
        qid @ 10[0..=15]: u16;
    }

    /// Create I/O Completion Queue (Base 2.1 §5.2.1).
    pub struct CreateIoCompletionQueue = AdminOpcode::CreateIoCompletionQueue, "Create I/O Completion Queue" {
        /// Queue Identifier.
        qid @ 10[0..=15]: u16;
        /// Queue Size, 0's based.
        qsize @ 10[16..=31]: u16;
        /// Physically Contiguous: PRP1 is the queue and not a list.
        pc @ 11[0]: bool;
        /// Interrupts Enabled.
        ien @ 11[1]: bool;
        /// Interrupt Vector.
        iv @ 11[16..=31]: u16;
    }

    /// Identify (Base 2.1 §5.1.13).
    pub struct Identify = AdminOpcode::Identify, "Identify" {
        /// Namespace Identifier.
        nsid @ 1[0..=31]: u32;
        /// Controller or Namespace Structure.
        cns @ 10[0..=7]: u8;
        /// Controller Identifier.
        cntid @ 10[16..=31]: u16;
        /// CNS Specific Identifier.
        cnssid @ 11[0..=15]: u16;
        /// Command Set Identifier.
        csi @ 11[24..=31]: u8;
        /// UUID Index.
        uuid_index @ 14[0..=6]: u8;
    }

    /// Abort (Base 2.1 §5.1.1).
    pub struct Abort = AdminOpcode::Abort, "Abort" {
        /// Submission Queue Identifier.
        sqid @ 10[0..=15]: u16;
        /// Command Identifier of the command to abort.
        abort_cid @ 10[16..=31]: u16;
    }

    /// Cross-Controller Reset (Base 2.3 §5.4.3, TP8028).
    pub struct CrossControllerReset = AdminOpcode::CrossControllerReset, "Cross-Controller Reset" {
        /// Impacted Controller Identifier: the controller to reset.
        icid @ 10[0..=15]: u16;
        /// Controller Instance Uniquifier.
        ciu @ 10[16..=23]: u8;
        /// Controller Instance Random Number.
        cirn @ 12[0..=63]: u64;
    }

    /// Set Features (Base 2.1 §5.1.25).
    pub struct SetFeatures = AdminOpcode::SetFeatures, "Set Features" {
        /// Namespace Identifier.
        nsid @ 1[0..=31]: u32;
        /// Feature Identifier.
        fid @ 10[0..=7]: u8;
        /// Save: the value survives resets.
        sv @ 10[31]: bool;
        /// Feature specific dword 11.
        cdw11 @ 11[0..=31]: u32;
        /// Feature specific dword 12.
        cdw12 @ 12[0..=31]: u32;
        /// Feature specific dword 13.
        cdw13 @ 13[0..=31]: u32;
        /// Feature specific dword 14; for most features bits 6 to 0 are the UUID Index.
        cdw14 @ 14[0..=31]: u32;
        /// Feature specific dword 15.
        cdw15 @ 15[0..=31]: u32;
    }

    /// Get Features (Base 2.1 §5.1.11).
    pub struct GetFeatures = AdminOpcode::GetFeatures, "Get Features" {
        /// Namespace Identifier.
        nsid @ 1[0..=31]: u32;
        /// Feature Identifier.
        fid @ 10[0..=7]: u8;
        /// Select: attribute of the value.
        sel @ 10[8..=10]: FeatureSelect;
        /// Feature specific dword 11.
        cdw11 @ 11[0..=31]: u32;
        /// UUID Index.
        uuid_index @ 14[0..=6]: u8;
    }

    /// Asynchronous Event Request (Base 2.1 §5.1.2).
    pub struct AsynchronousEventRequest = AdminOpcode::AsynchronousEventRequest, "Asynchronous Event Request" {
    }

    /// Namespace Management (Base 2.1 §5.1.21).
    pub struct NamespaceManagement = AdminOpcode::NamespaceManagement, "Namespace Management" {
        /// Namespace Identifier: of the one to delete, 0 to create.
        nsid @ 1[0..=31]: u32;
        /// Select: create or delete.
        sel @ 10[0..=3]: ManagementSelect;
        /// Command Set Identifier of the namespace to create.
        csi @ 11[24..=31]: u8;
    }

    /// Firmware Commit (Base 2.1 §5.1.8).
    pub struct FirmwareCommit = AdminOpcode::FirmwareCommit, "Firmware Commit" {
        /// Firmware Slot.
        fs @ 10[0..=2]: u8;
        /// Commit Action.
        ca @ 10[3..=5]: CommitAction;
        /// Boot Partition ID.
        bpid @ 10[31]: bool;
    }

    /// Firmware Image Download (Base 2.1 §5.1.9).
    pub struct FirmwareImageDownload = AdminOpcode::FirmwareImageDownload, "Firmware Image Download" {
        /// Number of Dwords, 0's based.
        numd @ 10[0..=31]: u32;
        /// Offset, in dwords.
        ofst @ 11[0..=31]: u32;
    }

    /// Device Self-test (Base 2.1 §5.1.5).
    pub struct DeviceSelfTest = AdminOpcode::DeviceSelfTest, "Device Self-test" {
        /// Namespace Identifier: 0 for the controller alone, all ones for every namespace too.
        nsid @ 1[0..=31]: u32;
        /// Self-test Code.
        stc @ 10[0..=3]: SelfTestCode;
        /// Device Self-test Parameter.
        dstp @ 15[0..=15]: u16;
    }

    /// Namespace Attachment (Base 2.1 §5.1.20).
    pub struct NamespaceAttachment = AdminOpcode::NamespaceAttachment, "Namespace Attachment" {
        /// Namespace Identifier.
        nsid @ 1[0..=31]: u32;
        /// Select: attach or detach.
        sel @ 10[0..=3]: AttachmentSelect;
    }

    /// Keep Alive (Base 2.1 §5.1.14).
    pub struct KeepAlive = AdminOpcode::KeepAlive, "Keep Alive" {
    }

    /// Directive Send (Base 2.1 §5.1.7).
    pub struct DirectiveSend = AdminOpcode::DirectiveSend, "Directive Send" {
        /// Namespace Identifier.
        nsid @ 1[0..=31]: u32;
        /// Number of Dwords, 0's based.
        numd @ 10[0..=31]: u32;
        /// Directive Operation.
        doper @ 11[0..=7]: u8;
        /// Directive Type.
        dtype @ 11[8..=15]: DirectiveType;
        /// Directive Specific.
        dspec @ 11[16..=31]: u16;
        /// Operation specific dword 12.
        cdw12 @ 12[0..=31]: u32;
        /// Operation specific dword 13.
        cdw13 @ 13[0..=31]: u32;
    }

    /// Directive Receive (Base 2.1 §5.1.6).
    pub struct DirectiveReceive = AdminOpcode::DirectiveReceive, "Directive Receive" {
        /// Namespace Identifier.
        nsid @ 1[0..=31]: u32;
        /// Number of Dwords, 0's based.
        numd @ 10[0..=31]: u32;
        /// Directive Operation.
        doper @ 11[0..=7]: u8;
        /// Directive Type.
        dtype @ 11[8..=15]: DirectiveType;
        /// Directive Specific.
        dspec @ 11[16..=31]: u16;
        /// Operation specific dword 12.
        cdw12 @ 12[0..=31]: u32;
        /// Operation specific dword 13.
        cdw13 @ 13[0..=31]: u32;
    }

    /// Doorbell Buffer Config: PRP1 is the shadow doorbells, PRP2 the event indexes (Base 2.1 §5.2.5).
    pub struct DoorbellBufferConfig = AdminOpcode::DoorbellBufferConfig, "Doorbell Buffer Config" {
        /// PRP1: address of the shadow doorbell buffer.
        shadow_doorbells @ 6[0..=63]: u64;
        /// PRP2: address of the event index buffer.
        event_indexes @ 8[0..=63]: u64;
    }

    /// Format NVM (Base 2.1 §5.1.10).
    pub struct FormatNvm = AdminOpcode::FormatNvm, "Format NVM" {
        /// Namespace Identifier: all ones for every namespace.
        nsid @ 1[0..=31]: u32;
        /// LBA Format Lower: bits 3 to 0 of the format's index.
        lbafl @ 10[0..=3]: u8;
        /// Metadata Settings: metadata follows the data of each block.
        mset @ 10[4]: bool;
        /// Protection Information: type 0 (none) to 3.
        pi @ 10[5..=7]: u8;
        /// Protection Information Location: in the first bytes of the metadata.
        pil @ 10[8]: bool;
        /// Secure Erase Settings.
        ses @ 10[9..=11]: SecureErase;
        /// LBA Format Upper: bits 5 and 4 of the format's index.
        lbafu @ 10[12..=13]: u8;
    }

    /// Security Send (Base 2.1 §5.1.24).
    pub struct SecuritySend = AdminOpcode::SecuritySend, "Security Send" {
        /// Namespace Identifier.
        nsid @ 1[0..=31]: u32;
        /// NVMe Security Specific Field.
        nssf @ 10[0..=7]: u8;
        /// SP Specific.
        spsp @ 10[8..=23]: u16;
        /// Security Protocol.
        secp @ 10[24..=31]: u8;
        /// Transfer Length, in bytes.
        tl @ 11[0..=31]: u32;
    }

    /// Security Receive (Base 2.1 §5.1.23).
    pub struct SecurityReceive = AdminOpcode::SecurityReceive, "Security Receive" {
        /// Namespace Identifier.
        nsid @ 1[0..=31]: u32;
        /// NVMe Security Specific Field.
        nssf @ 10[0..=7]: u8;
        /// SP Specific.
        spsp @ 10[8..=23]: u16;
        /// Security Protocol.
        secp @ 10[24..=31]: u8;
        /// Allocation Length, in bytes.
        al @ 11[0..=31]: u32;
    }

    /// Sanitize (Base 2.1 §5.1.22).
    pub struct Sanitize = AdminOpcode::Sanitize, "Sanitize" {
        /// Sanitize Action.
        sanact @ 10[0..=2]: SanitizeAction;
        /// Allow Unrestricted Sanitize Exit.
        ause @ 10[3]: bool;
        /// Overwrite Pass Count; 0 means 16.
        owpass @ 10[4..=7]: u8;
        /// Overwrite Invert Pattern Between Passes.
        oipbp @ 10[8]: bool;
        /// No-Deallocate After Sanitize.
        ndas @ 10[9]: bool;
        /// Enter Media Verification State.
        emvs @ 10[10]: bool;
        /// Overwrite Pattern.
        ovrpat @ 11[0..=31]: u32;
    }

    /// Get LBA Status (NVM 1.1 §4.2.1).
    pub struct GetLbaStatus = AdminOpcode::GetLbaStatus, "Get LBA Status" {
        /// Namespace Identifier.
        nsid @ 1[0..=31]: u32;
        /// Starting LBA.
        slba @ 10[0..=63]: u64;
        /// Maximum Number of Dwords, 0's based.
        mndw @ 12[0..=31]: u32;
        /// Range Length, in logical blocks; 0 for up to the end.
        rl @ 13[0..=15]: u16;
        /// Action Type.
        atype @ 13[24..=31]: LbaStatusAction;
    }
}

code! {
    /// QPRIO: priority class of a submission queue (Base 2.1 §5.2.2).
    pub enum QueuePriority {
        /// Urgent.
        Urgent = 0,
        /// High.
        High = 1,
        /// Medium.
        Medium = 2,
        /// Low.
        Low = 3,
    }

    /// SEL of Get Features (Base 2.1 §5.1.11).
    pub enum FeatureSelect {
        /// Current value.
        Current = 0,
        /// Default value.
        Default = 1,
        /// Saved value, restored by a reset.
        Saved = 2,
        /// Supported capabilities.
        SupportedCapabilities = 3,
    }

    /// SEL of Namespace Management (Base 2.1 §5.1.21).
    pub enum ManagementSelect {
        /// Create.
        Create = 0,
        /// Delete.
        Delete = 1,
    }

    /// SEL of Namespace Attachment (Base 2.1 §5.1.20).
    pub enum AttachmentSelect {
        /// Attach the namespace to the controllers of the list.
        Attach = 0,
        /// Detach the namespace from the controllers of the list.
        Detach = 1,
    }

    /// CA of Firmware Commit (Base 2.1 §5.1.8).
    pub enum CommitAction {
        /// Replace the image of the slot.
        Replace = 0,
        /// Replace the image of the slot and activate it at the next reset.
        ReplaceAndActivate = 1,
        /// Activate the image of the slot at the next reset.
        Activate = 2,
        /// Replace the image of the slot, if one was downloaded, and activate it now.
        ActivateNow = 3,
        /// Replace a boot partition.
        ReplaceBootPartition = 6,
        /// Make a boot partition the active one.
        ActivateBootPartition = 7,
    }

    /// STC of Device Self-test (Base 2.1 §5.1.5).
    pub enum SelfTestCode {
        /// None in progress.
        None = 0x0,
        /// Start a short self-test.
        Short = 0x1,
        /// Start an extended self-test.
        Extended = 0x2,
        /// Start a host-initiated refresh.
        HostInitiatedRefresh = 0x3,
        /// Vendor specific.
        Vendor = 0xe,
        /// Abort the self-test in progress.
        Abort = 0xf,
    }

    /// DTYPE: directive type (Base 2.1 §8.1.8).
    pub enum DirectiveType {
        /// Identify.
        Identify = 0,
        /// Streams.
        Streams = 1,
        /// Data placement.
        DataPlacement = 2,
    }

    /// SES of Format NVM (Base 2.1 §5.1.10).
    pub enum SecureErase {
        /// No secure erase.
        None = 0,
        /// User data erase.
        UserData = 1,
        /// Cryptographic erase.
        Cryptographic = 2,
    }

    /// SANACT of Sanitize (Base 2.1 §5.1.22).
    pub enum SanitizeAction {
        /// Exit failure mode.
        ExitFailureMode = 1,
        /// Block erase.
        BlockErase = 2,
        /// Overwrite.
        Overwrite = 3,
        /// Crypto erase.
        CryptoErase = 4,
        /// Exit media verification state.
        ExitMediaVerification = 5,
    }

    /// ATYPE of Get LBA Status (NVM 1.1 §4.2.1).
    pub enum LbaStatusAction {
        /// Allocated blocks.
        Allocated = 0x02,
        /// Scan, then blocks that may be unrecoverable.
        ScanUnrecoverable = 0x10,
        /// Blocks that may be unrecoverable.
        Unrecoverable = 0x11,
    }
}

layout! {
    /// DW0 of an Abort's completion (Base 2.1 §5.1.1.1).
    pub struct AbortResult(u32) {
        /// Immediate Abort Not Performed: the command was not aborted, or was already done.
        not_aborted @ 0: bool;
    }

    /// DW0 of a Cross-Controller Reset's completion (Base 2.3 §5.4.3).
    pub struct CrossResetResult(u32) {
        /// Immediate Reset Successful: the impacted controller has been reset.
        is_reset @ 0: bool;
    }

    /// DW0 of a Firmware Commit's completion (Base 2.1 §5.1.8.1).
    pub struct CommitResult(u32) {
        /// Multiple Update Detected: downloads of a firmware image overlapped.
        firmware_overlap @ 0: bool;
        /// Multiple Update Detected: downloads of a boot partition overlapped.
        boot_partition_overlap @ 1: bool;
    }
}

impl GetLogPage {
    /// `len_bytes` (a multiple of 4, not 0) of log page `lid`.
    #[must_use]
    pub fn new(lid: u8, len_bytes: u32) -> Self {
        Self { lid, numd: numd_of_bytes(len_bytes), ..Self::default() }
    }

    /// Length of the requested data.
    #[must_use]
    pub const fn len_bytes(&self) -> u64 {
        (self.numd as u64 + 1) * 4
    }
}

impl FirmwareImageDownload {
    /// Length of the image part.
    #[must_use]
    pub const fn len_bytes(&self) -> u64 {
        (self.numd as u64 + 1) * 4
    }

    /// Offset in the image.
    #[must_use]
    pub const fn offset_bytes(&self) -> u64 {
        self.ofst as u64 * 4
    }
}

impl FormatNvm {
    /// The index of the LBA format, LBAFL and LBAFU together.
    #[must_use]
    pub const fn lba_format_index(&self) -> u8 {
        self.lbafu << 4 | self.lbafl
    }

    /// Sets the index of the LBA format, 0 to 63.
    #[must_use]
    pub const fn with_lba_format_index(mut self, format: u8) -> Self {
        (self.lbafl, self.lbafu) = (format & 0xf, format >> 4 & 3);
        self
    }
}

/// Converts a length in bytes to a 0's based number of dwords.
#[must_use]
pub const fn numd_of_bytes(len_bytes: u32) -> u32 {
    (len_bytes / 4).saturating_sub(1)
}

#[cfg(test)]
mod tests {
    use super::{FormatNvm, GetLogPage, Identify, numd_of_bytes};
    use crate::typed::TypedCommand;

    #[test]
    fn numd_is_split_into_numdl_and_numdu() {
        let page = GetLogPage { rae: true, lpo: 0x1_0000_0002, ..GetLogPage::new(2, 512 << 20) };
        let command = page.to_command();
        assert_eq!((command.cdw10(), command.cdw11()), (0xffff_8002, 0x07ff));
        assert_eq!((command.cdw12(), command.cdw13()), (2, 1));
        assert_eq!((page.len_bytes(), numd_of_bytes(4), numd_of_bytes(0)), (512 << 20, 0, 0));
    }

    #[test]
    fn identify_has_the_dwords_that_linux_sends() {
        let identify = Identify { nsid: 1, cns: 0x05, csi: 2, cntid: 7, ..Identify::default() };
        let command = identify.to_command();
        assert_eq!(command.nsid(), 1);
        assert_eq!((command.cdw10(), command.cdw11()), (0x0007_0005, 0x0200_0000));
    }

    #[test]
    fn lba_format_index_is_split_into_lower_and_upper_bits() {
        for format in 0..64 {
            assert_eq!(
                FormatNvm::default().with_lba_format_index(format).lba_format_index(),
                format
            );
        }
        assert_eq!(FormatNvm::default().with_lba_format_index(0x21).to_command().cdw10(), 0x2001);
    }
}
