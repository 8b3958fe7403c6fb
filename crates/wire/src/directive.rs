//! Directives and data placement: operations and data structures (Base 2.1 §8.1.8, §7.3).

use crate::field_type::code;
use crate::layout::{Layout, layout};

code! {
    /// DOPER of Directive Receive for the identify directive (Base 2.1 §8.1.8.2).
    pub enum IdentifyReceive {
        /// Return parameters.
        ReturnParameters = 1,
    }

    /// DOPER of Directive Send for the identify directive (Base 2.1 §8.1.8.2).
    pub enum IdentifySend {
        /// Enable a directive.
        Enable = 1,
    }

    /// DOPER of Directive Receive for streams (Base 2.1 §8.1.8.3).
    pub enum StreamsReceive {
        /// Return parameters.
        ReturnParameters = 1,
        /// Get status.
        GetStatus = 2,
        /// Allocate resources.
        AllocateResources = 3,
    }

    /// DOPER of Directive Send for streams (Base 2.1 §8.1.8.3).
    pub enum StreamsSend {
        /// Release an identifier.
        ReleaseIdentifier = 1,
        /// Release resources.
        ReleaseResources = 2,
    }
}

layout! {
    /// Dword 12 of Directive Send, identify, enable (Base 2.1 §8.1.8.2.2.1).
    pub struct EnableDirective(u32) {
        /// Enable Directive.
        endir @ 0: bool;
        /// Directive Type to enable or disable.
        dtype @ 8..=15: u8;
    }

    /// Data of the identify directive (Base 2.1 §8.1.8.2.1.1). Bit N is directive type N.
    pub struct DirectiveParameters[4096] {
        /// Directives Supported.
        supported @ 0: u32;
        /// Directives Enabled.
        enabled @ 32: u32;
        /// Directives that stay enabled across controller level resets.
        persistent @ 64: u32;
    }

    /// Data of the streams directive (Base 2.1 §8.1.8.3.1.1).
    pub struct StreamParameters[32] {
        /// Max Streams Limit.
        msl @ 0: u16;
        /// NVM Subsystem Streams Available.
        nssa @ 2: u16;
        /// NVM Subsystem Streams Open.
        nsso @ 4: u16;
        /// NVM Subsystem Stream Capability.
        nssc @ 6: u8 {
            /// Stream identifiers are shared by hosts that share a host identifier.
            ssid @ 0: bool;
        };
        /// Stream Write Size, in blocks.
        sws @ 16: u32;
        /// Stream Granularity Size, in units of SWS.
        sgs @ 20: u16;
        /// Namespace Streams Allocated.
        nsa @ 22: u16;
        /// Namespace Streams Open.
        nso @ 24: u16;
    }

    /// How the reclaim unit handle status of I/O Management Receive begins (Base 2.1 §7.3.1.1).
    pub struct ReclaimUnitHandleStatusHeader[16] {
        /// Number of Reclaim Unit Handle Status Descriptors.
        nruhsd @ 14: u16;
    }

    /// A reclaim unit handle (Base 2.1 §7.3.1.1).
    pub struct ReclaimUnitHandle[32] {
        /// Placement Identifier.
        pid @ 0: u16;
        /// Reclaim Unit Handle Identifier.
        ruhid @ 2: u16;
        /// Estimated Active Reclaim Unit Time Remaining, in seconds.
        earutr @ 4: u32;
        /// Reclaim Unit Available Media Writes, in blocks.
        ruamw @ 8: u64;
    }
}

/// Handles of a reclaim unit handle status, limited by its count and by the bytes available.
pub fn reclaim_unit_handles(answer: &[u8]) -> impl Iterator<Item = ReclaimUnitHandle> + '_ {
    let count = ReclaimUnitHandleStatusHeader::parse(answer).map_or(0, |status| status.nruhsd());
    let rest = answer.get(ReclaimUnitHandleStatusHeader::BYTES..).unwrap_or(&[]);
    rest.as_chunks::<32>().0.iter().map(ReclaimUnitHandle::from_bytes).take(count.into())
}

#[cfg(test)]
mod tests {
    use super::{ReclaimUnitHandle, ReclaimUnitHandleStatusHeader, reclaim_unit_handles};

    #[test]
    fn reclaim_unit_handles_are_limited_by_count_and_length() {
        let mut answer =
            ReclaimUnitHandleStatusHeader::zeroed().with(|it| it.nruhsd(2)).as_bytes().to_vec();
        for pid in [7, 8, 9] {
            answer.extend(ReclaimUnitHandle::zeroed().with(|it| it.pid(pid)).as_bytes());
        }
        let pids =
            |bytes: &[u8]| reclaim_unit_handles(bytes).map(|it| it.pid()).collect::<Vec<_>>();
        assert_eq!(pids(&answer), [7, 8]);
        assert_eq!(pids(&answer[..16 + 33]), [7]);
        assert_eq!(pids(&answer[..15]), []);
    }
}
