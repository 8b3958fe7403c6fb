//! Features (Base 2.1 §5.1.25, NVM 1.1 §4.1.3).
//!
//! A feature's value is dword 11 of Set Features and DW0 of Get Features' completion; some have more
//! dwords, and some a page of data. Each such value is a structure here, in the module of its
//! subject.

use crate::field_type::code;
use crate::layout::layout;

pub mod identity;
pub mod media;
pub mod power;
pub mod queue;

code! {
    /// FID: feature identifier (Base 2.1 §5.1.25.1, Figure 403).
    pub enum Feature {
        /// Arbitration.
        Arbitration = 0x01,
        /// Power Management.
        PowerManagement = 0x02,
        /// LBA Range Type.
        LbaRangeType = 0x03,
        /// Temperature Threshold.
        TemperatureThreshold = 0x04,
        /// Error Recovery.
        ErrorRecovery = 0x05,
        /// Volatile Write Cache.
        VolatileWriteCache = 0x06,
        /// Number of Queues.
        NumberOfQueues = 0x07,
        /// Interrupt Coalescing.
        InterruptCoalescing = 0x08,
        /// Interrupt Vector Configuration.
        InterruptVectorConfiguration = 0x09,
        /// Write Atomicity Normal.
        WriteAtomicity = 0x0a,
        /// Asynchronous Event Configuration.
        AsynchronousEventConfiguration = 0x0b,
        /// Autonomous Power State Transition.
        AutonomousPowerStateTransition = 0x0c,
        /// Host Memory Buffer.
        HostMemoryBuffer = 0x0d,
        /// Timestamp.
        Timestamp = 0x0e,
        /// Keep Alive Timer.
        KeepAliveTimer = 0x0f,
        /// Host Controlled Thermal Management.
        HostControlledThermalManagement = 0x10,
        /// Non-Operational Power State Config.
        NonOperationalPowerState = 0x11,
        /// Read Recovery Level Config.
        ReadRecoveryLevel = 0x12,
        /// Predictable Latency Mode Config.
        PredictableLatencyConfig = 0x13,
        /// Predictable Latency Mode Window.
        PredictableLatencyWindow = 0x14,
        /// LBA Status Information Attributes.
        LbaStatusAttributes = 0x15,
        /// Host Behavior Support.
        HostBehaviorSupport = 0x16,
        /// Sanitize Config.
        SanitizeConfig = 0x17,
        /// Endurance Group Event Configuration.
        EnduranceGroupEvents = 0x18,
        /// I/O Command Set Profile.
        CommandSetProfile = 0x19,
        /// Spinup Control.
        SpinupControl = 0x1a,
        /// Power Loss Signaling Config.
        PowerLossSignaling = 0x1b,
        /// Performance Characteristics.
        PerformanceCharacteristics = 0x1c,
        /// Flexible Data Placement.
        FlexibleDataPlacement = 0x1d,
        /// Flexible Data Placement Events.
        FlexibleDataPlacementEvents = 0x1e,
        /// Namespace Admin Label.
        NamespaceAdminLabel = 0x1f,
        /// Key Value Configuration.
        KeyValueConfiguration = 0x20,
        /// Controller Data Queue.
        ControllerDataQueue = 0x21,
        /// Embedded Management Controller Address.
        EmbeddedManagementAddress = 0x78,
        /// Host Management Agent Address.
        HostManagementAddress = 0x79,
        /// Enhanced Controller Metadata.
        EnhancedControllerMetadata = 0x7d,
        /// Controller Metadata.
        ControllerMetadata = 0x7e,
        /// Namespace Metadata.
        NamespaceMetadata = 0x7f,
        /// Software Progress Marker.
        SoftwareProgressMarker = 0x80,
        /// Host Identifier.
        HostIdentifier = 0x81,
        /// Reservation Notification Mask.
        ReservationNotificationMask = 0x82,
        /// Reservation Persistence.
        ReservationPersistence = 0x83,
        /// Namespace Write Protection Config.
        NamespaceWriteProtection = 0x84,
        /// Boot Partition Write Protection Config.
        BootPartitionWriteProtection = 0x85,
    }
}

layout! {
    /// DW0 of Get Features when SEL requests capabilities (Base 2.1 §5.1.11).
    pub struct FeatureCapabilities(u32) {
        /// Saveable.
        saveable @ 0: bool;
        /// Namespace Specific.
        namespace_specific @ 1: bool;
        /// Changeable.
        changeable @ 2: bool;
    }
}

impl Feature {
    /// Length of the data structure of Set Features and Get Features; 0 for none.
    ///
    /// `extended` is EXHID of the Host Identifier feature (Base 2.1 §5.1.25.1).
    #[must_use]
    pub const fn len_bytes(self, extended: bool) -> usize {
        match self {
            Self::LbaRangeType
            | Self::HostMemoryBuffer
            | Self::EnhancedControllerMetadata
            | Self::ControllerMetadata
            | Self::NamespaceMetadata
            | Self::PerformanceCharacteristics => 4096,
            Self::AutonomousPowerStateTransition | Self::NamespaceAdminLabel => 256,
            Self::PredictableLatencyConfig
            | Self::HostBehaviorSupport
            | Self::EmbeddedManagementAddress
            | Self::HostManagementAddress => 512,
            Self::Timestamp => 8,
            Self::HostIdentifier => {
                if extended {
                    16
                } else {
                    8
                }
            }
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Feature;

    #[test]
    fn host_identifier_length_depends_on_exhid() {
        assert_eq!(Feature::HostIdentifier.len_bytes(false), 8);
        assert_eq!(Feature::HostIdentifier.len_bytes(true), 16);
        assert_eq!(Feature::Arbitration.len_bytes(true), 0);
        assert_eq!(Feature::AutonomousPowerStateTransition.len_bytes(false), 32 * 8);
    }
}
