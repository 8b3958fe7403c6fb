//! Reservations: commands and their data structures (Base 2.1 §7.5 to §7.8, §8.1.22).

use crate::field_type::code;
use crate::layout::{Layout, layout};
use crate::opcode::IoOpcode;
use crate::typed::commands;

commands! {
    /// Reservation Register (Base 2.1 §7.6). Its data structure is [`RegisterKeys`].
    pub struct ReservationRegister = IoOpcode::ReservationRegister, "Reservation Register" {
        /// Namespace Identifier.
        nsid @ 1[0..=31]: u32;
        /// Reservation Register Action.
        rrega @ 10[0..=2]: RegisterAction;
        /// Ignore Existing Key.
        iekey @ 10[3]: bool;
        /// Dispersed Namespace Reservation Support.
        disnsrs @ 10[4]: bool;
        /// Change Persist Through Power Loss State.
        cptpl @ 10[30..=31]: ChangePersistence;
    }

    /// Reservation Report (Base 2.1 §7.8). It returns [`ReservationStatus`].
    pub struct ReservationReport = IoOpcode::ReservationReport, "Reservation Report" {
        /// Namespace Identifier.
        nsid @ 1[0..=31]: u32;
        /// Number of Dwords, 0's based.
        numd @ 10[0..=31]: u32;
        /// Extended Data Structure: host identifiers of 16 bytes.
        eds @ 11[0]: bool;
        /// Dispersed Namespace Reservation Support.
        disnsrs @ 11[1]: bool;
    }

    /// Reservation Acquire (Base 2.1 §7.5). Its data structure is [`AcquireKeys`].
    pub struct ReservationAcquire = IoOpcode::ReservationAcquire, "Reservation Acquire" {
        /// Namespace Identifier.
        nsid @ 1[0..=31]: u32;
        /// Reservation Acquire Action.
        racqa @ 10[0..=2]: AcquireAction;
        /// Ignore Existing Key.
        iekey @ 10[3]: bool;
        /// Dispersed Namespace Reservation Support.
        disnsrs @ 10[4]: bool;
        /// Reservation Type.
        rtype @ 10[8..=15]: ReservationType;
    }

    /// Reservation Release (Base 2.1 §7.7). Its data structure is [`ReleaseKey`].
    pub struct ReservationRelease = IoOpcode::ReservationRelease, "Reservation Release" {
        /// Namespace Identifier.
        nsid @ 1[0..=31]: u32;
        /// Reservation Release Action.
        rrela @ 10[0..=2]: ReleaseAction;
        /// Ignore Existing Key.
        iekey @ 10[3]: bool;
        /// Dispersed Namespace Reservation Support.
        disnsrs @ 10[4]: bool;
        /// Reservation Type.
        rtype @ 10[8..=15]: ReservationType;
    }
}

code! {
    /// RREGA: register action (Base 2.1 §7.6).
    pub enum RegisterAction {
        /// Register a key.
        Register = 0,
        /// Unregister the key.
        Unregister = 1,
        /// Replace the key.
        Replace = 2,
    }

    /// CPTPL: change of the persistence of reservations (Base 2.1 §7.6).
    pub enum ChangePersistence {
        /// No change.
        None = 0,
        /// Reservations are released and registrants cleared on power on.
        Clear = 2,
        /// Reservations and registrants persist across a power loss.
        Persist = 3,
    }

    /// RACQA: acquire action (Base 2.1 §7.5).
    pub enum AcquireAction {
        /// Acquire.
        Acquire = 0,
        /// Preempt.
        Preempt = 1,
        /// Preempt and abort.
        PreemptAndAbort = 2,
    }

    /// RRELA: release action (Base 2.1 §7.7).
    pub enum ReleaseAction {
        /// Release.
        Release = 0,
        /// Clear.
        Clear = 1,
    }

    /// RTYPE: reservation type, which determines the access of other hosts (Base 2.1 §7.5, Figure
    /// 605).
    pub enum ReservationType {
        /// No reservation.
        None = 0,
        /// Write exclusive.
        WriteExclusive = 1,
        /// Exclusive access.
        ExclusiveAccess = 2,
        /// Write exclusive, registrants only.
        WriteExclusiveRegistrants = 3,
        /// Exclusive access, registrants only.
        ExclusiveAccessRegistrants = 4,
        /// Write exclusive, all registrants hold it.
        WriteExclusiveAllRegistrants = 5,
        /// Exclusive access, all registrants hold it.
        ExclusiveAccessAllRegistrants = 6,
    }
}

impl ReservationType {
    /// Whether a registrant that does not hold the reservation may write.
    #[must_use]
    pub const fn allows_registrant_writes(self) -> bool {
        matches!(self.code(), 3..=6)
    }

    /// Whether every registrant holds the reservation.
    #[must_use]
    pub const fn is_held_by_all_registrants(self) -> bool {
        matches!(self.code(), 5 | 6)
    }

    /// Whether hosts that are not registered may read.
    #[must_use]
    pub const fn allows_unregistered_reads(self) -> bool {
        matches!(self.code(), 0 | 1 | 3 | 5)
    }
}

layout! {
    /// Data structure of Reservation Register (Base 2.1 §7.6).
    #[derive(Copy)]
    pub struct RegisterKeys[16] {
        /// Current Reservation Key.
        crkey @ 0: u64;
        /// New Reservation Key.
        nrkey @ 8: u64;
    }

    /// Data structure of Reservation Acquire (Base 2.1 §7.5).
    #[derive(Copy)]
    pub struct AcquireKeys[16] {
        /// Current Reservation Key.
        crkey @ 0: u64;
        /// Preempt Reservation Key.
        prkey @ 8: u64;
    }

    /// Data structure of Reservation Release (Base 2.1 §7.7).
    #[derive(Copy)]
    pub struct ReleaseKey[8] {
        /// Current Reservation Key.
        crkey @ 0: u64;
    }

    /// Header of the Reservation Status data structure when EDS is clear (Base 2.1 §7.8).
    pub struct ReservationStatus[24] {
        /// Generation: counts changes of registrations and reservations.
        generation @ 0: u32;
        /// Reservation Type.
        rtype @ 4: ReservationType;
        /// Number of Registrants.
        regstrnt @ 5: u16;
        /// Persist Through Power Loss State.
        ptpls @ 9: u8;
    }

    /// Header of the Reservation Status data structure when EDS is set (Base 2.1 §7.8).
    pub struct ReservationStatusExtended[64] {
        /// Generation: counts changes of registrations and reservations.
        generation @ 0: u32;
        /// Reservation Type.
        rtype @ 4: ReservationType;
        /// Number of Registrants.
        regstrnt @ 5: u16;
        /// Persist Through Power Loss State.
        ptpls @ 9: u8;
    }

    /// One registrant when EDS is clear (Base 2.1 §7.8).
    pub struct Registrant[24] {
        /// Controller ID: all ones for one that is not known here.
        cntlid @ 0: u16;
        /// Reservation Status.
        rcsts @ 2: u8 {
            /// The host holds the reservation.
            holds @ 0: bool;
        };
        /// Host Identifier.
        hostid @ 8: u64;
        /// Reservation Key.
        rkey @ 16: u64;
    }

    /// One registrant when EDS is set (Base 2.1 §7.8).
    pub struct RegistrantExtended[64] {
        /// Controller ID: all ones for one that is not known here.
        cntlid @ 0: u16;
        /// Reservation Status.
        rcsts @ 2: u8 {
            /// The host holds the reservation.
            holds @ 0: bool;
        };
        /// Reservation Key.
        rkey @ 8: u64;
        /// Host Identifier.
        hostid @ 16: [u8; 16];
    }
}

/// Registrants of a report, limited by its count and by the bytes available.
pub fn report_registrants(report: &[u8]) -> impl Iterator<Item = Registrant> + '_ {
    let count = ReservationStatus::parse(report).map_or(0, |status| status.regstrnt());
    let rest = report.get(ReservationStatus::BYTES..).unwrap_or(&[]);
    rest.as_chunks::<24>().0.iter().map(Registrant::from_bytes).take(count.into())
}

/// Registrants of an extended report, limited by its count and by the bytes available.
pub fn report_registrants_extended(report: &[u8]) -> impl Iterator<Item = RegistrantExtended> + '_ {
    let count = ReservationStatusExtended::parse(report).map_or(0, |status| status.regstrnt());
    let rest = report.get(ReservationStatusExtended::BYTES..).unwrap_or(&[]);
    rest.as_chunks::<64>().0.iter().map(RegistrantExtended::from_bytes).take(count.into())
}

#[cfg(test)]
mod tests {
    use super::{
        AcquireAction, Registrant, ReservationAcquire, ReservationStatus, ReservationType,
        report_registrants, report_registrants_extended,
    };
    use crate::typed::TypedCommand;

    #[test]
    fn reservation_report_is_bounded_by_count_and_length() {
        let mut report = ReservationStatus::zeroed().with(|it| it.regstrnt(2)).as_bytes().to_vec();
        for rkey in 1..=3 {
            report.extend(Registrant::zeroed().with(|it| it.rkey(rkey)).as_bytes());
        }
        let keys =
            |report: &[u8]| report_registrants(report).map(|it| it.rkey()).collect::<Vec<_>>();
        assert_eq!(keys(&report), [1, 2]);
        assert_eq!(keys(&report[..24 + 30]), [1]);
        assert_eq!(keys(&report[..10]), []);
        assert_eq!(report_registrants_extended(&report).count(), 0);
    }

    #[test]
    fn reservation_acquire_has_the_bits_that_linux_sends() {
        let acquire = ReservationAcquire {
            nsid: 1,
            racqa: AcquireAction::PreemptAndAbort,
            rtype: ReservationType::WriteExclusiveRegistrants,
            ..ReservationAcquire::default()
        };
        assert_eq!(acquire.to_command().cdw10(), 0x302);
    }

    #[test]
    fn reservation_type_permissions_follow_from_its_name() {
        use ReservationType as Type;
        assert!(
            Type::WriteExclusive.allows_unregistered_reads()
                && !Type::ExclusiveAccess.allows_unregistered_reads()
        );
        assert!(Type::WriteExclusiveRegistrants.allows_registrant_writes());
        assert!(!Type::WriteExclusive.allows_registrant_writes());
        assert!(Type::ExclusiveAccessAllRegistrants.is_held_by_all_registrants());
        assert!(!Type::ExclusiveAccessRegistrants.is_held_by_all_registrants());
    }
}
