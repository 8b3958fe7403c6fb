//! Opcodes (Base 2.1 §3.1.3.4, §5, §6 and §7; NVM 1.1 §3.3).
//!
//! The two low bits of an opcode give the direction of the data transfer (Base 2.1 §4.1.1, Figure
//! 91).

/// Direction of a command's data transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransferDirection {
    /// 00b: no data.
    None,
    /// 01b: from host to controller.
    HostToController,
    /// 10b: from controller to host.
    ControllerToHost,
    /// 11b: either or both.
    Bidirectional,
}

impl TransferDirection {
    /// Direction encoded in an opcode.
    #[inline]
    #[must_use]
    pub const fn from_opcode(opcode: u8) -> Self {
        match opcode & 3 {
            0 => Self::None,
            1 => Self::HostToController,
            2 => Self::ControllerToHost,
            _ => Self::Bidirectional,
        }
    }
}

/// Declares the opcodes of one kind of queue.
macro_rules! opcodes {
    ($(
        $(#[$meta:meta])*
        pub enum $name:ident {
            $( $variant:ident = $code:literal $text:literal $section:literal; )+
        }
    )+) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum $name {
            $(
                #[doc = concat!($text, " (", $section, ").")]
                $variant = $code,
            )+
        }

        impl $name {
            /// All named opcodes.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Opcode with this number, if it is named.
            #[inline]
            #[must_use]
            pub const fn from_u8(code: u8) -> Option<Self> {
                match code {
                    $($code => Some(Self::$variant),)+
                    _ => None,
                }
            }

            /// Number of the opcode.
            #[inline]
            #[must_use]
            pub const fn code(self) -> u8 {
                self as u8
            }

            /// Name in the specification.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)+
                }
            }

            /// Direction of its data transfer.
            #[inline]
            #[must_use]
            pub const fn transfer(self) -> TransferDirection {
                TransferDirection::from_opcode(self as u8)
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                out.write_str(self.name())
            }
        }
    )+};
}

opcodes! {
    /// Opcodes of the admin queue.
    pub enum AdminOpcode {
        DeleteIoSubmissionQueue = 0x00 "Delete I/O Submission Queue" "Base 2.1 §5.2.4";
        CreateIoSubmissionQueue = 0x01 "Create I/O Submission Queue" "Base 2.1 §5.2.2";
        GetLogPage = 0x02 "Get Log Page" "Base 2.1 §5.1.12";
        DeleteIoCompletionQueue = 0x04 "Delete I/O Completion Queue" "Base 2.1 §5.2.3";
        CreateIoCompletionQueue = 0x05 "Create I/O Completion Queue" "Base 2.1 §5.2.1";
        Identify = 0x06 "Identify" "Base 2.1 §5.1.13";
        Abort = 0x08 "Abort" "Base 2.1 §5.1.1";
        SetFeatures = 0x09 "Set Features" "Base 2.1 §5.1.25";
        GetFeatures = 0x0a "Get Features" "Base 2.1 §5.1.11";
        AsynchronousEventRequest = 0x0c "Asynchronous Event Request" "Base 2.1 §5.1.2";
        NamespaceManagement = 0x0d "Namespace Management" "Base 2.1 §5.1.21";
        FirmwareCommit = 0x10 "Firmware Commit" "Base 2.1 §5.1.8";
        FirmwareImageDownload = 0x11 "Firmware Image Download" "Base 2.1 §5.1.9";
        DeviceSelfTest = 0x14 "Device Self-test" "Base 2.1 §5.1.5";
        NamespaceAttachment = 0x15 "Namespace Attachment" "Base 2.1 §5.1.20";
        KeepAlive = 0x18 "Keep Alive" "Base 2.1 §5.1.14";
        DirectiveSend = 0x19 "Directive Send" "Base 2.1 §5.1.7";
        DirectiveReceive = 0x1a "Directive Receive" "Base 2.1 §5.1.6";
        VirtualizationManagement = 0x1c "Virtualization Management" "Base 2.1 §5.2.6";
        NvmeMiSend = 0x1d "NVMe-MI Send" "Base 2.1 §5.1.19";
        NvmeMiReceive = 0x1e "NVMe-MI Receive" "Base 2.1 §5.1.18";
        CapacityManagement = 0x20 "Capacity Management" "Base 2.1 §5.1.3";
        DiscoveryInformationManagement = 0x21 "Discovery Information Management" "Base 2.1 §5.3.3";
        FabricZoningReceive = 0x22 "Fabric Zoning Receive" "Base 2.1 §5.3.5";
        Lockdown = 0x24 "Lockdown" "Base 2.1 §5.1.15";
        FabricZoningLookup = 0x25 "Fabric Zoning Lookup" "Base 2.1 §5.3.4";
        ClearExportedNvmResourceConfiguration = 0x28
            "Clear Exported NVM Resource Configuration" "Base 2.1 §5.3.1";
        FabricZoningSend = 0x29 "Fabric Zoning Send" "Base 2.1 §5.3.6";
        CreateExportedNvmSubsystem = 0x2a "Create Exported NVM Subsystem" "Base 2.1 §5.3.2";
        ManageExportedNvmSubsystem = 0x2d "Manage Exported NVM Subsystem" "Base 2.1 §5.3.8";
        ManageExportedNamespace = 0x31 "Manage Exported Namespace" "Base 2.1 §5.3.7";
        ManageExportedPort = 0x35 "Manage Exported Port" "Base 2.1 §5.3.9";
        CrossControllerReset = 0x38 "Cross-Controller Reset" "Base 2.3 §5.4.3";
        SendDiscoveryLogPage = 0x39 "Send Discovery Log Page" "Base 2.1 §5.3.10";
        TrackSend = 0x3d "Track Send" "Base 2.1 §5.1.27";
        TrackReceive = 0x3e "Track Receive" "Base 2.1 §5.1.26";
        MigrationSend = 0x41 "Migration Send" "Base 2.1 §5.1.17";
        MigrationReceive = 0x42 "Migration Receive" "Base 2.1 §5.1.16";
        ControllerDataQueue = 0x45 "Controller Data Queue" "Base 2.1 §5.1.4";
        DoorbellBufferConfig = 0x7c "Doorbell Buffer Config" "Base 2.1 §5.2.5";
        FabricsCommands = 0x7f "Fabrics Commands" "Base 2.1 §6";
        FormatNvm = 0x80 "Format NVM" "Base 2.1 §5.1.10";
        SecuritySend = 0x81 "Security Send" "Base 2.1 §5.1.24";
        SecurityReceive = 0x82 "Security Receive" "Base 2.1 §5.1.23";
        Sanitize = 0x84 "Sanitize" "Base 2.1 §5.1.22";
        LoadProgram = 0x85 "Load Program" "Computational Programs 1.0 §4.1";
        GetLbaStatus = 0x86 "Get LBA Status" "NVM 1.1 §4.2.1";
        ProgramActivationManagement = 0x88
            "Program Activation Management" "Computational Programs 1.0 §4.1";
        MemoryRangeSetManagement = 0x89
            "Memory Range Set Management" "Computational Programs 1.0 §4.1";
    }

    /// Opcodes of the NVM command set's I/O queues.
    pub enum IoOpcode {
        Flush = 0x00 "Flush" "Base 2.1 §7.2";
        Write = 0x01 "Write" "NVM 1.1 §3.3.6";
        Read = 0x02 "Read" "NVM 1.1 §3.3.4";
        WriteUncorrectable = 0x04 "Write Uncorrectable" "NVM 1.1 §3.3.7";
        Compare = 0x05 "Compare" "NVM 1.1 §3.3.1";
        WriteZeroes = 0x08 "Write Zeroes" "NVM 1.1 §3.3.8";
        DatasetManagement = 0x09 "Dataset Management" "NVM 1.1 §3.3.3";
        Verify = 0x0c "Verify" "NVM 1.1 §3.3.5";
        ReservationRegister = 0x0d "Reservation Register" "Base 2.1 §7.6";
        ReservationReport = 0x0e "Reservation Report" "Base 2.1 §7.8";
        ReservationAcquire = 0x11 "Reservation Acquire" "Base 2.1 §7.5";
        IoManagementReceive = 0x12 "I/O Management Receive" "Base 2.1 §7.3";
        ReservationRelease = 0x15 "Reservation Release" "Base 2.1 §7.7";
        Cancel = 0x18 "Cancel" "Base 2.1 §7.1";
        Copy = 0x19 "Copy" "NVM 1.1 §3.3.2";
        IoManagementSend = 0x1d "I/O Management Send" "Base 2.1 §7.4";
        FabricsCommands = 0x7f "Fabrics Commands" "Base 2.1 §6";
    }

    /// FCTYPE of a fabrics command, which occupies the low byte of NSID.
    pub enum FabricsType {
        PropertySet = 0x00 "Property Set" "Base 2.1 §6.6";
        Connect = 0x01 "Connect" "Base 2.1 §6.3";
        PropertyGet = 0x04 "Property Get" "Base 2.1 §6.5";
        AuthenticationSend = 0x05 "Authentication Send" "Base 2.1 §6.2";
        AuthenticationReceive = 0x06 "Authentication Receive" "Base 2.1 §6.1";
        Disconnect = 0x08 "Disconnect" "Base 2.1 §6.4";
    }
}

#[cfg(test)]
mod tests {
    use super::{AdminOpcode, FabricsType, IoOpcode, TransferDirection};

    #[test]
    fn opcode_values_round_trip() {
        for code in 0..=u8::MAX {
            assert!(AdminOpcode::from_u8(code).is_none_or(|opcode| opcode.code() == code));
            assert!(IoOpcode::from_u8(code).is_none_or(|opcode| opcode.code() == code));
            assert!(FabricsType::from_u8(code).is_none_or(|kind| kind.code() == code));
        }
        for &opcode in AdminOpcode::ALL {
            assert_eq!(AdminOpcode::from_u8(opcode.code()), Some(opcode));
        }
        for &opcode in IoOpcode::ALL {
            assert_eq!(IoOpcode::from_u8(opcode.code()), Some(opcode));
        }
        for &kind in FabricsType::ALL {
            assert_eq!(FabricsType::from_u8(kind.code()), Some(kind));
        }
    }

    #[test]
    fn low_opcode_bits_are_the_transfer_direction() {
        assert_eq!(IoOpcode::Flush.transfer(), TransferDirection::None);
        assert_eq!(IoOpcode::Write.transfer(), TransferDirection::HostToController);
        assert_eq!(IoOpcode::Read.transfer(), TransferDirection::ControllerToHost);
        assert_eq!(AdminOpcode::Identify.transfer(), TransferDirection::ControllerToHost);
        assert_eq!(AdminOpcode::SetFeatures.transfer(), TransferDirection::HostToController);
        assert_eq!(AdminOpcode::FabricsCommands.transfer(), TransferDirection::Bidirectional);
        assert_eq!(FabricsType::Connect.transfer(), TransferDirection::HostToController);
    }
}
