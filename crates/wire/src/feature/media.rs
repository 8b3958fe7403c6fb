//! Features for the medium: ranges, errors, caches, atomicity, latency, sanitizing, placement.

use crate::field_type::code;
use crate::layout::layout;
use crate::log::event::PredictableLatencyEvents;

layout! {
    /// 03h: LBA Range Type (NVM 1.1 §4.1.3.1).
    pub struct LbaRangeType(u32) {
        /// Number of LBA Ranges, 0's based.
        num @ 0..=5: u8;
    }

    /// Data structure of 03h (NVM 1.1 §4.1.3.1).
    pub struct LbaRanges[4096] {
        /// Entries.
        entry @ 0: LbaRangeEntry[64];
    }

    /// A range of blocks and its type (NVM 1.1 §4.1.3.1).
    pub struct LbaRangeEntry[64] {
        /// Type: 0 general, 1 filesystem, 2 RAID, 3 cache, 4 swap.
        kind @ 0: u8;
        /// Attributes.
        attributes @ 1: u8 {
            /// The range may be overwritten.
            overwriteable @ 0: bool;
            /// The range should be hidden from the system.
            hidden @ 1: bool;
        };
        /// Starting LBA.
        slba @ 16: u64;
        /// Number of Logical Blocks, 0's based.
        nlb @ 24: u64;
        /// Unique Identifier.
        guid @ 32: [u8; 16];
    }

    /// 05h: Error Recovery (NVM 1.1 §4.1.3.2).
    pub struct ErrorRecovery(u32) {
        /// Time Limited Error Recovery, in units of 100 ms; 0 for no limit.
        tler @ 0..=15: u16;
        /// Deallocated or Unwritten Logical Block Error Enable.
        dulbe @ 16: bool;
    }

    /// 06h: Volatile Write Cache (Base 2.1 §5.1.25.1.4).
    pub struct VolatileWriteCache(u32) {
        /// Volatile Write Cache Enable.
        wce @ 0: bool;
    }

    /// 0Ah: Write Atomicity Normal (NVM 1.1 §4.1.3.3).
    pub struct WriteAtomicity(u32) {
        /// Disable Normal: AWUN and NAWUN do not apply.
        dn @ 0: bool;
    }

    /// 12h: Read Recovery Level Config, dword 11 (Base 2.1 §5.1.25.1.11).
    pub struct ReadRecoverySet(u32) {
        /// NVM Set Identifier.
        nvmsetid @ 0..=15: u16;
    }

    /// 12h: Read Recovery Level Config, dword 12 (Base 2.1 §5.1.25.1.11).
    pub struct ReadRecoveryLevel(u32) {
        /// Read Recovery Level.
        rrl @ 0..=3: u8;
    }

    /// 13h and 14h: Predictable Latency Mode, dword 11 (Base 2.1 §5.1.25.1.12).
    pub struct PredictableLatencySet(u32) {
        /// NVM Set Identifier.
        nvmsetid @ 0..=15: u16;
    }

    /// 13h: Predictable Latency Mode Config, dword 12 (Base 2.1 §5.1.25.1.12).
    pub struct PredictableLatencyConfig(u32) {
        /// Predictable Latency Enable.
        lpe @ 0: bool;
    }

    /// Data structure of 13h (Base 2.1 §5.1.25.1.12).
    pub struct PredictableLatencyThresholds[512] {
        /// Enable Event.
        ee @ 0: PredictableLatencyEvents;
        /// DTWIN Reads Threshold.
        dtwinrt @ 32: u64;
        /// DTWIN Writes Threshold.
        dtwinwt @ 40: u64;
        /// DTWIN Time Threshold.
        dtwintt @ 48: u64;
    }

    /// 14h: Predictable Latency Mode Window, dword 12 (Base 2.1 §5.1.25.1.13).
    pub struct PredictableLatencyWindow(u32) {
        /// Window Select: 1 deterministic, 2 non-deterministic.
        wsel @ 0..=2: u8;
    }

    /// 15h: LBA Status Information Attributes (NVM 1.1 §4.1.3.5).
    pub struct LbaStatusAttributes(u32) {
        /// LBA Status Information Report Interval, in units of 100 ms.
        lsiri @ 0..=15: u16;
        /// LBA Status Information Poll Interval, in units of 100 ms.
        lsipi @ 16..=31: u16;
    }

    /// 17h: Sanitize Config (Base 2.1 §5.1.25.1.15).
    pub struct SanitizeConfig(u32) {
        /// No-Deallocate Response Mode: a warning instead of an error.
        nodrm @ 0: bool;
    }

    /// 1Dh and 1Eh: the endurance group or handle, dword 11 (Base 2.1 §5.1.25.1.20).
    pub struct PlacementGroup(u32) {
        /// Endurance Group Identifier.
        endgid @ 0..=15: u16;
    }

    /// 1Dh: Flexible Data Placement, dword 12 (Base 2.1 §5.1.25.1.20).
    pub struct FlexibleDataPlacement(u32) {
        /// Flexible Data Placement Enable.
        fdpe @ 0: bool;
        /// Flexible Data Placement Configuration Index.
        fdpcidx @ 8..=15: u8;
    }

    /// 1Eh: Flexible Data Placement Events, dword 11 (Base 2.1 §5.1.25.1.21).
    pub struct PlacementEvents(u32) {
        /// Placement Handle.
        phndl @ 0..=15: u16;
        /// Number of FDP Event Types.
        noet @ 16..=23: u8;
    }

    /// 1Eh: Flexible Data Placement Events, dword 12 (Base 2.1 §5.1.25.1.21).
    pub struct PlacementEventsEnable(u32) {
        /// FDP Event Enable.
        fdpee @ 0: bool;
    }

    /// 84h: Namespace Write Protection Config (Base 2.1 §5.1.25.1.31).
    pub struct NamespaceWriteProtection(u32) {
        /// Write Protection State.
        wps @ 0..=2: WriteProtection;
    }

    /// 85h: Boot Partition Write Protection Config (Base 2.1 §5.1.25.1.32).
    pub struct BootPartitionWriteProtection(u32) {
        /// Boot Partition 0 Write Protection State.
        bp0wps @ 0..=2: u8;
        /// Boot Partition 1 Write Protection State.
        bp1wps @ 3..=5: u8;
    }
}

code! {
    /// Write protection state of a namespace (Base 2.1 §5.1.25.1.31).
    pub enum WriteProtection {
        /// No write protect.
        None = 0,
        /// Write protect.
        Protected = 1,
        /// Write protect until power cycle.
        UntilPowerCycle = 2,
        /// Permanent write protect.
        Permanent = 3,
    }
}
