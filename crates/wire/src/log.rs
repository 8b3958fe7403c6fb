//! Log pages (Base 2.1 §5.1.12).
//!
//! [`LogPage`] lists them; each module contains the pages of one subject. A page of variable length
//! has a header structure and an iterator over its entries; the iterator stops at the header's
//! count or at the end of the bytes, whichever comes first.

use crate::field_type::code;

pub mod ana;
pub mod discovery;
pub mod effects;
pub mod error_information;
pub mod event;
pub mod firmware;
pub mod health;
pub mod lba;
pub mod persistent_events;
pub mod sanitize;
pub mod self_test;

code! {
    /// LID: log page identifier (Base 2.1 §5.1.12.1, Figure 202).
    pub enum LogPage {
        /// Supported Log Pages.
        SupportedLogPages = 0x00,
        /// Error Information.
        ErrorInformation = 0x01,
        /// SMART / Health Information.
        Health = 0x02,
        /// Firmware Slot Information.
        FirmwareSlot = 0x03,
        /// Changed Attached Namespace List.
        ChangedNamespaces = 0x04,
        /// Commands Supported and Effects.
        CommandEffects = 0x05,
        /// Device Self-test.
        SelfTest = 0x06,
        /// Telemetry Host-Initiated.
        TelemetryHost = 0x07,
        /// Telemetry Controller-Initiated.
        TelemetryController = 0x08,
        /// Endurance Group Information.
        EnduranceGroup = 0x09,
        /// Predictable Latency Per NVM Set.
        PredictableLatency = 0x0a,
        /// Predictable Latency Event Aggregate.
        PredictableLatencyEvents = 0x0b,
        /// Asymmetric Namespace Access.
        Ana = 0x0c,
        /// Persistent Event Log.
        PersistentEvents = 0x0d,
        /// LBA Status Information.
        LbaStatus = 0x0e,
        /// Endurance Group Event Aggregate.
        EnduranceGroupEvents = 0x0f,
        /// Media Unit Status.
        MediaUnitStatus = 0x10,
        /// Supported Capacity Configuration List.
        CapacityConfigurations = 0x11,
        /// Feature Identifiers Supported and Effects.
        FeatureEffects = 0x12,
        /// NVMe-MI Commands Supported and Effects.
        ManagementEffects = 0x13,
        /// Command and Feature Lockdown.
        Lockdown = 0x14,
        /// Boot Partition.
        BootPartition = 0x15,
        /// Rotational Media Information.
        RotationalMedia = 0x16,
        /// Dispersed Namespace Participating NVM Subsystems.
        DispersedNamespace = 0x17,
        /// Management Address List.
        ManagementAddresses = 0x18,
        /// Physical Interface Receiver Eye Opening Measurement.
        EyeOpening = 0x19,
        /// Reachability Groups.
        ReachabilityGroups = 0x1a,
        /// Reachability Associations.
        ReachabilityAssociations = 0x1b,
        /// Changed Allocated Namespace List.
        ChangedAllocatedNamespaces = 0x1c,
        /// FDP Configurations.
        PlacementConfigurations = 0x20,
        /// Reclaim Unit Handle Usage.
        ReclaimUnitHandles = 0x21,
        /// FDP Statistics.
        PlacementStatistics = 0x22,
        /// FDP Events.
        PlacementEvents = 0x23,
        /// Discovery.
        Discovery = 0x70,
        /// Host Discovery.
        HostDiscovery = 0x71,
        /// AVE Discovery.
        AveDiscovery = 0x72,
        /// Pull Model DDC Request.
        PullModelRequest = 0x73,
        /// Reservation Notification.
        ReservationNotification = 0x80,
        /// Sanitize Status.
        SanitizeStatus = 0x81,
        /// Changed Zone List.
        ChangedZones = 0xbf,
    }
}
