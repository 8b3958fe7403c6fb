//! Asynchronous events, and the log pages with their details (Base 2.1 §5.1.2).
//!
//! An event is reported in DW0 of the completion of an Asynchronous Event Request. Reading the named
//! log page with RAE clear unmasks the next event of its type.

use crate::field_type::code;
use crate::layout::layout;

layout! {
    /// DW0 of an Asynchronous Event Request's completion (Base 2.1 §5.1.2.1).
    pub struct EventResult(u32) {
        /// Asynchronous Event Type.
        aet @ 0..=2: EventType;
        /// Asynchronous Event Information.
        aei @ 8..=15: u8;
        /// Log Page Identifier.
        lid @ 16..=23: u8;
    }

    /// 80h: Reservation Notification (Base 2.1 §5.1.12.1.32).
    pub struct ReservationNotification[64] {
        /// Log Page Count: incremented by every notification.
        lpc @ 0: u64;
        /// Reservation Notification Log Page Type.
        rnlpt @ 8: ReservationEvent;
        /// Number of Available Log Pages.
        nalp @ 9: u8;
        /// Namespace ID.
        nsid @ 12: u32;
    }

    /// 0Ah: Predictable Latency Per NVM Set (Base 2.1 §5.1.12.1.11).
    pub struct PredictableLatency[512] {
        /// Status.
        status @ 0: u8 {
            /// Window: 0 not enabled, 1 deterministic, 2 non-deterministic.
            window @ 0..=2: u8;
        };
        /// Event Type.
        event_type @ 2: PredictableLatencyEvents;
        /// DTWIN Reads Typical, in units of 4 KiB.
        dtwin_reads_typical @ 32: u64;
        /// DTWIN Writes Typical.
        dtwin_writes_typical @ 40: u64;
        /// DTWIN Time Maximum, in milliseconds.
        dtwin_time_maximum @ 48: u64;
        /// NDWIN Time Minimum High, in milliseconds.
        ndwin_time_minimum_high @ 56: u64;
        /// NDWIN Time Minimum Low, in milliseconds.
        ndwin_time_minimum_low @ 64: u64;
        /// DTWIN Reads Estimate.
        dtwin_reads_estimate @ 128: u64;
        /// DTWIN Writes Estimate.
        dtwin_writes_estimate @ 136: u64;
        /// DTWIN Time Estimate, in milliseconds.
        dtwin_time_estimate @ 144: u64;
    }

    /// Event type of a predictable latency window (Base 2.1 §5.1.12.1.11).
    pub struct PredictableLatencyEvents(u16) {
        /// DTWIN Reads Warning.
        reads_warning @ 0: bool;
        /// DTWIN Writes Warning.
        writes_warning @ 1: bool;
        /// DTWIN Time Warning.
        time_warning @ 2: bool;
        /// The window ended because a value was exceeded.
        exceeded @ 14: bool;
        /// The window ended by a deterministic excursion.
        excursion @ 15: bool;
    }
}

code! {
    /// AET: asynchronous event type (Base 2.1 §5.1.2.1).
    pub enum EventType {
        /// Error status.
        Error = 0,
        /// SMART / health status.
        Health = 1,
        /// Notice.
        Notice = 2,
        /// Immediate.
        Immediate = 3,
        /// One-shot.
        OneShot = 4,
        /// I/O command specific status.
        CommandSet = 6,
        /// Vendor specific.
        Vendor = 7,
    }

    /// AEI of an error (Base 2.1 §5.1.2.1, Figure 149).
    pub enum ErrorEvent {
        /// Write to invalid doorbell register.
        InvalidDoorbell = 0x00,
        /// Invalid doorbell write value.
        InvalidDoorbellValue = 0x01,
        /// Diagnostic failure.
        DiagnosticFailure = 0x02,
        /// Persistent internal error.
        PersistentInternalError = 0x03,
        /// Transient internal error.
        TransientInternalError = 0x04,
        /// Firmware image load error.
        FirmwareLoadError = 0x05,
    }

    /// AEI of SMART / health (Base 2.1 §5.1.2.1, Figure 150).
    pub enum HealthEvent {
        /// NVM subsystem reliability.
        Reliability = 0x00,
        /// Temperature threshold.
        Temperature = 0x01,
        /// Spare below threshold.
        Spare = 0x02,
    }

    /// AEI of a notice (Base 2.1 §5.1.2.1, Figure 151).
    pub enum NoticeEvent {
        /// Attached namespace attribute changed.
        NamespaceChanged = 0x00,
        /// Firmware activation starting.
        FirmwareActivation = 0x01,
        /// Telemetry log changed.
        Telemetry = 0x02,
        /// Asymmetric namespace access change.
        Ana = 0x03,
        /// Predictable latency event aggregate log change.
        PredictableLatency = 0x04,
        /// LBA status information alert.
        LbaStatus = 0x05,
        /// Endurance group event aggregate log page change.
        EnduranceGroup = 0x06,
        /// Reachability group change.
        ReachabilityGroup = 0x07,
        /// Reachability association change.
        ReachabilityAssociation = 0x08,
        /// Allocated namespace attribute changed.
        AllocatedNamespaceChanged = 0x09,
        /// Zone descriptor changed.
        ZoneDescriptor = 0xef,
        /// Discovery log page change.
        Discovery = 0xf0,
        /// Host discovery log page change.
        HostDiscovery = 0xf1,
        /// AVE discovery log page change.
        AveDiscovery = 0xf2,
        /// Pull model DDC request log page change.
        PullModelRequest = 0xf3,
    }

    /// AEI of an immediate event (Base 2.1 §5.1.2.1, Figure 153).
    pub enum ImmediateEvent {
        /// Normal NVM subsystem shutdown.
        NormalShutdown = 0x00,
        /// Temperature threshold hysteresis recovery.
        TemperatureRecovery = 0x01,
    }

    /// AEI of I/O command specific status (Base 2.1 §5.1.2.1, Figure 152).
    pub enum CommandSetEvent {
        /// Reservation log page available.
        Reservation = 0x00,
        /// Sanitize operation completed.
        SanitizeCompleted = 0x01,
        /// Sanitize operation completed with unexpected deallocation.
        SanitizeCompletedDeallocated = 0x02,
        /// Sanitize operation entered media verification state.
        SanitizeVerification = 0x03,
    }

    /// AEI of a one-shot event (Base 2.1 §5.1.2.1, Figure 154).
    pub enum OneShotEvent {
        /// Controller data queue tail pointer.
        DataQueueTail = 0x00,
        /// Controller data queue full error.
        DataQueueFull = 0x01,
    }

    /// RNLPT: type of a reservation notification (Base 2.1 §5.1.12.1.32).
    pub enum ReservationEvent {
        /// The page is empty.
        None = 0,
        /// Registration preempted.
        RegistrationPreempted = 1,
        /// Reservation released.
        ReservationReleased = 2,
        /// Reservation preempted.
        ReservationPreempted = 3,
    }
}

/// An event, by its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// Error: invalid use of the controller by the host, or an internal error.
    Error(ErrorEvent),
    /// SMART / health: the medium needs attention.
    Health(HealthEvent),
    /// Notice: something has changed.
    Notice(NoticeEvent),
    /// Immediate: there is no log page to read.
    Immediate(ImmediateEvent),
    /// One-shot: requested by the host.
    OneShot(OneShotEvent),
    /// Reservations and sanitize operations.
    CommandSet(CommandSetEvent),
    /// Vendor specific.
    Vendor(u8),
    /// Reserved type.
    Unknown {
        /// AET.
        kind: u8,
        /// AEI.
        information: u8,
    },
}

impl EventResult {
    /// Decodes the event.
    #[must_use]
    pub fn event(&self) -> AsyncEvent {
        let aei = self.aei();
        match self.aet() {
            EventType::Error => AsyncEvent::Error(ErrorEvent::from_code(aei)),
            EventType::Health => AsyncEvent::Health(HealthEvent::from_code(aei)),
            EventType::Notice => AsyncEvent::Notice(NoticeEvent::from_code(aei)),
            EventType::Immediate => AsyncEvent::Immediate(ImmediateEvent::from_code(aei)),
            EventType::OneShot => AsyncEvent::OneShot(OneShotEvent::from_code(aei)),
            EventType::CommandSet => AsyncEvent::CommandSet(CommandSetEvent::from_code(aei)),
            EventType::Vendor => AsyncEvent::Vendor(aei),
            EventType::Reserved(kind) => AsyncEvent::Unknown { kind, information: aei },
        }
    }

    /// DW0 that reports the event and names the log page to read.
    #[must_use]
    pub fn new(event: AsyncEvent, lid: u8) -> Self {
        let (aet, aei) = match event {
            AsyncEvent::Error(event) => (EventType::Error, event.code()),
            AsyncEvent::Health(event) => (EventType::Health, event.code()),
            AsyncEvent::Notice(event) => (EventType::Notice, event.code()),
            AsyncEvent::Immediate(event) => (EventType::Immediate, event.code()),
            AsyncEvent::OneShot(event) => (EventType::OneShot, event.code()),
            AsyncEvent::CommandSet(event) => (EventType::CommandSet, event.code()),
            AsyncEvent::Vendor(information) => (EventType::Vendor, information),
            AsyncEvent::Unknown { kind, information } => {
                (EventType::from_code(kind & 7), information)
            }
        };
        Self::zeroed().with(|result| result.aet(aet).aei(aei).lid(lid))
    }
}

#[cfg(test)]
mod tests {
    use super::{AsyncEvent, EventResult, NoticeEvent};
    use crate::log::LogPage;

    #[test]
    fn namespace_change_notice_has_the_dword_that_linux_expects() {
        let notice = AsyncEvent::Notice(NoticeEvent::NamespaceChanged);
        let result = EventResult::new(notice, LogPage::ChangedNamespaces.code());
        assert_eq!(result.0, 0x0004_0002);
        assert_eq!(EventResult(0x000c_0302).event(), AsyncEvent::Notice(NoticeEvent::Ana));
    }

    #[test]
    fn async_events_round_trip() {
        for aet in 0..8 {
            for aei in 0..=u8::MAX {
                let result = EventResult(aet | u32::from(aei) << 8 | 0x0070_0000);
                assert_eq!(EventResult::new(result.event(), result.lid()), result);
            }
        }
    }
}
