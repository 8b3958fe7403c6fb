//! Identify data structures (Base 2.1 §5.1.13, NVM 1.1 §4.1.5).
//!
//! Every data structure has 4096 bytes; [`Cns`] selects it.

use crate::field_type::code;

pub mod controller;
pub mod limits;
pub mod list;
pub mod namespace;
pub mod namespace_identification_descriptor;
pub mod power;
pub mod resource;

pub use controller::IdentifyController;
pub use limits::IdentifyControllerNvm;
pub use list::{CommandSetVector, CommandSets, ControllerList, NamespaceList};
pub use namespace::{
    IdentifyNamespace, IdentifyNamespaceIndependent, IdentifyNamespaceNvm, LbaFormat,
};
pub use namespace_identification_descriptor::{NamespaceIdentifier, namespace_identifiers};
pub use power::PowerState;

/// Length of every data structure (Base 2.1 §5.1.13).
pub const BYTES: usize = 4096;

/// The namespace identifier that means all of them (Base 2.1 §3.2.1.2).
pub const NSID_ALL: u32 = 0xffff_ffff;

/// The highest identifier a namespace may have (Base 2.1 §3.2.1.2).
pub const NSID_MAX: u32 = 0xffff_fffe;

/// What all controllers and commands mean by "no controller" (Base 2.1 §5.1.13.1).
pub const CNTLID_NONE: u16 = 0xffff;

code! {
    /// CNS: Identify data structure (Base 2.1 §5.1.13.1, Figure 310).
    pub enum Cns {
        /// Identify Namespace.
        Namespace = 0x00,
        /// Identify Controller.
        Controller = 0x01,
        /// Active Namespace ID list.
        ActiveNamespaces = 0x02,
        /// Namespace Identification Descriptor list.
        Descriptors = 0x03,
        /// NVM Set List.
        NvmSets = 0x04,
        /// I/O Command Set specific Identify Namespace.
        CommandSetNamespace = 0x05,
        /// I/O Command Set specific Identify Controller.
        CommandSetController = 0x06,
        /// I/O Command Set specific Active Namespace ID list.
        CommandSetActiveNamespaces = 0x07,
        /// I/O Command Set Independent Identify Namespace.
        IndependentNamespace = 0x08,
        /// Identify Namespace for one user data format.
        NamespaceFormat = 0x09,
        /// I/O Command Set specific Identify Namespace for one user data format.
        CommandSetNamespaceFormat = 0x0a,
        /// Allocated Namespace ID list.
        AllocatedNamespaces = 0x10,
        /// Identify Namespace of an allocated namespace.
        AllocatedNamespace = 0x11,
        /// Controller List of those attached to a namespace.
        NamespaceControllers = 0x12,
        /// Controller List of the NVM subsystem.
        SubsystemControllers = 0x13,
        /// Primary Controller Capabilities.
        PrimaryCapabilities = 0x14,
        /// Secondary Controller list.
        SecondaryControllers = 0x15,
        /// Namespace Granularity List.
        NamespaceGranularity = 0x16,
        /// UUID List.
        Uuids = 0x17,
        /// Domain List.
        Domains = 0x18,
        /// Endurance Group List.
        EnduranceGroups = 0x19,
        /// I/O Command Set specific Allocated Namespace ID list.
        CommandSetAllocatedNamespaces = 0x1a,
        /// I/O Command Set specific Identify Namespace of an allocated namespace.
        CommandSetAllocatedNamespace = 0x1b,
        /// Identify I/O Command Set.
        CommandSets = 0x1c,
        /// Underlying Namespace List.
        UnderlyingNamespaces = 0x1d,
        /// Ports List.
        Ports = 0x1e,
        /// I/O Command Set Independent Identify Namespace of an allocated namespace.
        IndependentAllocatedNamespace = 0x1f,
        /// Supported Controller State Formats.
        ControllerStateFormats = 0x20,
    }

    /// CSI: I/O command set (Base 2.1 §5.1.13.1, Figure 311).
    pub enum CommandSet {
        /// NVM Command Set.
        Nvm = 0x00,
        /// Key Value Command Set.
        KeyValue = 0x01,
        /// Zoned Namespace Command Set.
        Zoned = 0x02,
        /// Subsystem Local Memory Command Set.
        LocalMemory = 0x03,
        /// Computational Programs Command Set.
        ComputationalPrograms = 0x04,
    }
}
