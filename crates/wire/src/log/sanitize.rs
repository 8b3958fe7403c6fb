//! 81h: Sanitize Status: progress of a sanitize operation (Base 2.1 §5.1.12.1.33).

use crate::field_type::code;
use crate::layout::layout;

/// Value of an estimated time that is not reported (Base 2.1 §5.1.12.1.33).
pub const NO_ESTIMATE: u32 = u32::MAX;

layout! {
    /// 81h: Sanitize Status (Base 2.1 §5.1.12.1.33).
    pub struct SanitizeStatus[512] {
        /// Sanitize Progress, in units of 1/65536; all ones if none is in progress.
        sprog @ 0: u16;
        /// Sanitize Status.
        sstat @ 2: u16 {
            /// Sanitize Operation Status.
            sos @ 0..=2: SanitizeOutcome;
            /// Overwrite Passes Completed.
            opc @ 3..=7: u8;
            /// Global Data Erased.
            gde @ 8: bool;
            /// Media Verification Canceled.
            mvcncled @ 9: bool;
        };
        /// Sanitize Command Dword 10 Information.
        scdw10 @ 4: u32;
        /// Estimated Time For Overwrite, in seconds.
        eto @ 8: u32;
        /// Estimated Time For Block Erase, in seconds.
        etbe @ 12: u32;
        /// Estimated Time For Crypto Erase, in seconds.
        etce @ 16: u32;
        /// Estimated Time For Overwrite With No-Deallocate, in seconds.
        etond @ 20: u32;
        /// Estimated Time For Block Erase With No-Deallocate, in seconds.
        etbend @ 24: u32;
        /// Estimated Time For Crypto Erase With No-Deallocate, in seconds.
        etcend @ 28: u32;
        /// Estimated Time For Post-Verification Deallocation, in seconds.
        etpvds @ 32: u32;
        /// Sanitize State Information.
        ssi @ 36: u8 {
            /// Sanitize State.
            sans @ 0..=3: SanitizeState;
            /// Failure State.
            fails @ 4..=7: SanitizeState;
        };
    }
}

code! {
    /// SOS: status of the most recent sanitize operation (Base 2.1 §5.1.12.1.33).
    pub enum SanitizeOutcome {
        /// Never sanitized.
        Never = 0,
        /// Sanitized.
        Sanitized = 1,
        /// Sanitizing.
        Sanitizing = 2,
        /// Sanitize failed.
        Failed = 3,
        /// Sanitized, with deallocation although No-Deallocate was requested.
        SanitizedDeallocated = 4,
    }

    /// SANS: state of the sanitize state machine (Base 2.1 §8.1.24.3).
    pub enum SanitizeState {
        /// Idle.
        Idle = 0,
        /// Restricted processing.
        RestrictedProcessing = 1,
        /// Restricted failure.
        RestrictedFailure = 2,
        /// Unrestricted processing.
        UnrestrictedProcessing = 3,
        /// Unrestricted failure.
        UnrestrictedFailure = 4,
        /// Media verification.
        MediaVerification = 5,
        /// Post-verification deallocation.
        PostVerificationDeallocation = 6,
    }
}

#[cfg(test)]
mod tests {
    use super::{SanitizeOutcome, SanitizeStatus};

    #[test]
    fn completed_sanitize_status_is_decoded() {
        let mut bytes = [0; 512];
        bytes[0..4].copy_from_slice(&[0xff, 0xff, 0x01, 0x01]);
        let status = SanitizeStatus::from_bytes(&bytes);
        assert_eq!((status.sos(), status.gde()), (SanitizeOutcome::Sanitized, true));
        assert_eq!(status.sprog(), u16::MAX);
    }
}
