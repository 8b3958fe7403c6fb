//! Features for queues, interrupts, events and host behavior.

use crate::layout::layout;
use crate::log::health::{CriticalWarning, EnduranceGroupWarning};

layout! {
    /// 01h: Arbitration (Base 2.1 §5.1.25.1.1).
    pub struct Arbitration(u32) {
        /// Arbitration Burst, as a power of two; 7 for no limit.
        ab @ 0..=2: u8;
        /// Low Priority Weight, 0's based.
        lpw @ 8..=15: u8;
        /// Medium Priority Weight, 0's based.
        mpw @ 16..=23: u8;
        /// High Priority Weight, 0's based.
        hpw @ 24..=31: u8;
    }

    /// 07h: Number of Queues, requested and allocated (Base 2.1 §5.1.25.2.1).
    pub struct NumberOfQueues(u32) {
        /// Number of I/O Submission Queues, 0's based.
        nsq @ 0..=15: u16;
        /// Number of I/O Completion Queues, 0's based.
        ncq @ 16..=31: u16;
    }

    /// 08h: Interrupt Coalescing (Base 2.1 §5.1.25.2.2).
    pub struct InterruptCoalescing(u32) {
        /// Aggregation Threshold, in completions, 0's based.
        thr @ 0..=7: u8;
        /// Aggregation Time, in units of 100 µs.
        time @ 8..=15: u8;
    }

    /// 09h: Interrupt Vector Configuration (Base 2.1 §5.1.25.2.3).
    pub struct InterruptVectorConfiguration(u32) {
        /// Interrupt Vector.
        iv @ 0..=15: u16;
        /// Coalescing Disable.
        cd @ 16: bool;
    }

    /// 0Bh: Asynchronous Event Configuration (Base 2.1 §5.1.25.1.5).
    pub struct AsynchronousEventConfiguration(u32) {
        /// SMART / Health Critical Warnings.
        critical_warnings @ 0..=7: CriticalWarning;
        /// Attached Namespace Attribute Notices.
        namespace_attribute_notices @ 8: bool;
        /// Firmware Activation Notices.
        firmware_activation_notices @ 9: bool;
        /// Telemetry Log Notices.
        telemetry_notices @ 10: bool;
        /// ANA Change Notices.
        ana_change_notices @ 11: bool;
        /// Predictable Latency Event Aggregate Log Change Notices.
        predictable_latency_notices @ 12: bool;
        /// LBA Status Information Alert Notices.
        lba_status_notices @ 13: bool;
        /// Endurance Group Event Aggregate Log Change Notices.
        endurance_group_notices @ 14: bool;
        /// Normal NVM Subsystem Shutdown.
        normal_shutdown_notices @ 15: bool;
        /// Temperature Threshold Hysteresis Recovery.
        temperature_recovery_notices @ 16: bool;
        /// Reachability Groups Change Notices.
        reachability_notices @ 17: bool;
        /// Allocated Namespace Attribute Notices.
        allocated_namespace_notices @ 19: bool;
        /// Zone Descriptor Changed Notices.
        zone_descriptor_notices @ 27: bool;
        /// Discovery Log Page Change Notification.
        discovery_notices @ 31: bool;
    }

    /// 0Fh: Keep Alive Timer (Base 2.1 §5.1.25.1.8).
    pub struct KeepAliveTimer(u32) {
        /// Keep Alive Timeout, in milliseconds; 0 for none.
        kato @ 0..=31: u32;
    }

    /// 16h: Host Behavior Support (Base 2.1 §5.1.25.1.14).
    pub struct HostBehaviorSupport[512] {
        /// Advanced Command Retry Enable.
        acre @ 0: u8;
        /// Extended Telemetry Data Area 4 Supported.
        etdas @ 1: u8;
        /// LBA Format Extension Enable.
        lbafee @ 2: u8;
        /// Host Dispersed Namespace Support.
        hdisns @ 3: u8;
        /// Copy Descriptor Formats Enable.
        cdfe @ 4: u16 {
            /// Copy Descriptor Format 2h Enable.
            cdf2e @ 2: bool;
            /// Copy Descriptor Format 3h Enable.
            cdf3e @ 3: bool;
            /// Copy Descriptor Format 4h Enable.
            cdf4e @ 4: bool;
        };
    }

    /// 18h: Endurance Group Event Configuration (Base 2.1 §5.1.25.1.16).
    pub struct EnduranceGroupEvents(u32) {
        /// Endurance Group Identifier.
        endgid @ 0..=15: u16;
        /// Endurance Group Critical Warnings.
        egcw @ 16..=23: EnduranceGroupWarning;
    }

    /// 19h: I/O Command Set Profile (Base 2.1 §5.1.25.1.17).
    pub struct CommandSetProfile(u32) {
        /// I/O Command Set Combination Index.
        iocsci @ 0..=8: u16;
    }
}

impl NumberOfQueues {
    /// `count` queue pairs, 1 to 65 536.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, reason = "cut to the width of the field")]
    pub fn from_queue_pair_count(count: u32) -> Self {
        let based = count.saturating_sub(1).min(0xffff) as u16;
        Self::zeroed().with(|queues| queues.nsq(based).ncq(based))
    }

    /// Number of queue pairs: the smaller of both numbers.
    #[must_use]
    pub fn queue_pair_count(&self) -> u32 {
        u32::from(self.nsq().min(self.ncq())) + 1
    }
}

#[cfg(test)]
mod tests {
    use super::{AsynchronousEventConfiguration, NumberOfQueues};

    #[test]
    fn number_of_queues_is_zero_based() {
        assert_eq!(NumberOfQueues::from_queue_pair_count(1).0, 0);
        assert_eq!(NumberOfQueues::from_queue_pair_count(64).0, 0x003f_003f);
        assert_eq!(NumberOfQueues::from_queue_pair_count(1 << 20).queue_pair_count(), 65_536);
        assert_eq!(NumberOfQueues(0x0003_0007).queue_pair_count(), 4);
    }

    #[test]
    fn async_event_notices_of_linux_are_bits_8_9_and_11() {
        let wanted = AsynchronousEventConfiguration::zeroed().with(|events| {
            events
                .namespace_attribute_notices(true)
                .firmware_activation_notices(true)
                .ana_change_notices(true)
        });
        assert_eq!(wanted.0, 0x0b00);
    }
}
