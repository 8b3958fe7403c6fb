//! Status field of a completion (Base 2.1 §4.2.3).
//!
//! ```text
//!  14    13   12:11   10:8   7:0
//!  DNR   M    CRD     SCT    SC
//! ```
//!
//! A [`Status`] holds these 15 bits, without the phase tag below them. [`table`] contains the
//! tables of status codes.

use core::fmt;

mod table;

pub use table::{StatusEntry, TABLE};

/// Status of a command: the 15-bit status field.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(transparent)]
pub struct Status(
    /// The bits, right-aligned.
    pub u16,
);

/// SCT: status code type, which selects the table (Base 2.1 §4.2.3, Figure 101).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StatusCodeType {
    /// 0h: generic command status.
    Generic,
    /// 1h: command specific status.
    CommandSpecific,
    /// 2h: media and data integrity errors.
    MediaAndDataIntegrity,
    /// 3h: path related status.
    PathRelated,
    /// 7h: vendor specific.
    VendorSpecific,
    /// 4h to 6h.
    Reserved(u8),
}

impl Status {
    const CODE: u16 = 0x7ff;
    const CRD_SHIFT: u16 = 11;
    const CRD: u16 = 0b11 << Self::CRD_SHIFT;
    const MORE: u16 = 1 << 13;
    const DNR: u16 = 1 << 14;

    /// Creates the status with code `sc` of type `sct`.
    #[inline]
    #[must_use]
    pub const fn new(sct: u8, sc: u8) -> Self {
        Self((sct as u16 & 7) << 8 | sc as u16)
    }

    /// SC: the status code.
    #[inline]
    #[must_use]
    pub const fn sc(self) -> u8 {
        self.0.to_le_bytes()[0]
    }

    /// SCT: the status code type, as a number.
    #[inline]
    #[must_use]
    pub const fn sct(self) -> u8 {
        self.0.to_le_bytes()[1] & 7
    }

    /// SCT: the status code type.
    #[must_use]
    pub const fn code_type(self) -> StatusCodeType {
        match self.sct() {
            0 => StatusCodeType::Generic,
            1 => StatusCodeType::CommandSpecific,
            2 => StatusCodeType::MediaAndDataIntegrity,
            3 => StatusCodeType::PathRelated,
            7 => StatusCodeType::VendorSpecific,
            other => StatusCodeType::Reserved(other),
        }
    }

    /// CRD: index of the retry delay, 0 for none.
    #[inline]
    #[must_use]
    pub const fn crd(self) -> u8 {
        ((self.0 & Self::CRD) >> Self::CRD_SHIFT).to_le_bytes()[0]
    }

    /// M: the Error Information log page contains details.
    #[inline]
    #[must_use]
    pub const fn has_more_information(self) -> bool {
        self.0 & Self::MORE != 0
    }

    /// DNR: do not retry; the same command would fail again.
    #[inline]
    #[must_use]
    pub const fn dnr(self) -> bool {
        self.0 & Self::DNR != 0
    }

    /// Without CRD, M and DNR, for comparison with the constants.
    #[inline]
    #[must_use]
    pub const fn without_crd_more_dnr(self) -> Self {
        Self(self.0 & Self::CODE)
    }

    /// Whether status code and type are those of `other`; ignores CRD, M and DNR.
    #[inline]
    #[must_use]
    pub const fn has_same_code_as(self, other: Self) -> bool {
        (self.0 ^ other.0) & Self::CODE == 0
    }

    /// Whether the command succeeded.
    #[inline]
    #[must_use]
    pub const fn is_success(self) -> bool {
        self.0 & Self::CODE == 0
    }

    /// Whether the same command may succeed when it is submitted again to the same controller.
    ///
    /// DNR forbids it; a path error without DNR requires another path first (Base 2.1 §4.2.3.4).
    #[inline]
    #[must_use]
    pub const fn is_retryable(self) -> bool {
        !self.is_success() && !self.dnr()
    }

    /// Whether the path failed and another one may work.
    #[inline]
    #[must_use]
    pub const fn is_path_error(self) -> bool {
        self.sct() == 3
    }

    /// Sets DNR: the same command would fail again.
    #[inline]
    #[must_use]
    pub const fn with_dnr(self) -> Self {
        Self(self.0 | Self::DNR)
    }

    /// Sets M: the Error Information log page contains details.
    #[inline]
    #[must_use]
    pub const fn with_more(self) -> Self {
        Self(self.0 | Self::MORE)
    }

    /// Sets the retry delay index, 0 to 3.
    #[inline]
    #[must_use]
    pub const fn with_crd(self, crd: u8) -> Self {
        Self(self.0 & !Self::CRD | (crd as u16 & 3) << Self::CRD_SHIFT)
    }

    /// Table entry. `None` for a reserved or vendor specific code.
    ///
    /// Where fabrics commands share a code with the NVM command set, this is the NVM entry.
    #[must_use]
    pub fn table_entry(self) -> Option<&'static StatusEntry> {
        TABLE.iter().find(|entry| !entry.is_fabrics && entry.status == self.without_crd_more_dnr())
    }

    /// Table entry for a status of a fabrics command.
    #[must_use]
    pub fn fabrics_table_entry(self) -> Option<&'static StatusEntry> {
        let code = self.without_crd_more_dnr();
        let fabrics = TABLE.iter().find(|entry| entry.is_fabrics && entry.status == code);
        fabrics.or_else(|| self.table_entry())
    }

    /// Name in the specification. Of a code that fabrics commands share with the NVM command set, it is the
    /// name there; [`fabrics_table_entry`](Self::fabrics_table_entry) has the other one.
    #[must_use]
    pub fn name(self) -> &'static str {
        let entry = self.table_entry().or_else(|| self.fabrics_table_entry());
        match (entry, self.code_type(), self.sc()) {
            (Some(entry), _, _) => entry.name,
            (None, StatusCodeType::VendorSpecific, _) | (None, _, 0xc0..) => "Vendor Specific",
            (None, _, _) => "Reserved",
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} (SCT {:#x}, SC {:#04x}", self.name(), self.sct(), self.sc())?;
        if self.crd() != 0 {
            write!(out, ", CRD {}", self.crd())?;
        }
        out.write_str(if self.has_more_information() { ", more" } else { "" })?;
        out.write_str(if self.dnr() { ", do not retry)" } else { ")" })
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, out)
    }
}

impl core::error::Error for Status {}

#[cfg(test)]
mod tests {
    use super::{Status, TABLE};

    #[test]
    fn status_fields_round_trip() {
        for bits in 0..1 << 15 {
            let status = Status(bits);
            let mut again = Status::new(status.sct(), status.sc()).with_crd(status.crd());
            again = if status.has_more_information() { again.with_more() } else { again };
            again = if status.dnr() { again.with_dnr() } else { again };
            assert_eq!(again, status);
            assert!(status.has_same_code_as(status.without_crd_more_dnr()));
        }
        assert_eq!((Status(0x7ff).sct(), Status(0x7ff).sc()), (7, 0xff));
        assert_eq!(
            (Status(0x1800).crd(), Status(0x2000).has_more_information(), Status(0x4000).dnr()),
            (3, true, true)
        );
    }

    #[test]
    fn status_tables_have_no_duplicate_code() {
        for (index, entry) in TABLE.iter().enumerate() {
            let same = |other: &&super::StatusEntry| {
                other.status == entry.status && other.is_fabrics == entry.is_fabrics
            };
            assert_eq!(TABLE[..index].iter().find(same), None, "{}", entry.name);
            assert_eq!(entry.status, entry.status.without_crd_more_dnr());
        }
    }

    #[test]
    fn every_status_entry_is_found_and_has_a_description() {
        for entry in TABLE {
            let found = if entry.is_fabrics {
                entry.status.fabrics_table_entry()
            } else {
                entry.status.with_dnr().with_more().with_crd(2).table_entry()
            };
            assert_eq!(found, Some(entry));
            assert!(entry.section.contains('§') && entry.meaning.ends_with('.'), "{}", entry.name);
        }
    }

    #[test]
    fn status_is_printed_with_name_and_codes() {
        assert_eq!(
            Status::INVALID_FIELD.with_dnr().to_string(),
            "Invalid Field in Command (SCT 0x0, SC 0x02, do not retry)"
        );
        assert_eq!(
            Status::NAMESPACE_NOT_READY.with_crd(1).with_more().to_string(),
            "Namespace Not Ready (SCT 0x0, SC 0x82, CRD 1, more)"
        );
        assert_eq!(
            Status::AUTHENTICATION_REQUIRED.with_dnr().to_string(),
            "Authentication Required (SCT 0x1, SC 0x91, do not retry)"
        );
        assert_eq!(Status::new(7, 1).name(), "Vendor Specific");
        assert_eq!(Status::new(1, 0xc1).name(), "Vendor Specific");
        assert_eq!(Status::new(5, 1).name(), "Reserved");
    }

    /// Base 2.1 §6.1: the codes from 180h to 185h have another meaning in the NVM command set.
    #[test]
    fn status_of_fabrics_commands_has_its_name() {
        let names = [
            (0x80, "Incompatible Format", "Conflicting Attributes"),
            (0x81, "Controller Busy", "Invalid Protection Information"),
            (0x82, "Connect Invalid Parameters", "Attempted Write to Read Only Range"),
            (0x83, "Connect Restart Discovery", "Command Size Limit Exceeded"),
            (0x84, "Connect Invalid Host", "Invalid Command ID"),
            (0x85, "Invalid Queue Type", "Incompatible Namespace or Format"),
            (0x90, "Discover Restart", "Discover Restart"),
            (0x91, "Authentication Required", "Authentication Required"),
        ];
        for (code, of_fabrics, name) in names {
            let status = Status::new(1, code);
            let entry = status.fabrics_table_entry().unwrap();
            assert_eq!((entry.name, status.name()), (of_fabrics, name), "{code:#x}");
        }
        assert_eq!(TABLE.iter().filter(|entry| entry.is_fabrics).count(), names.len());
        assert_eq!(Status::new(1, 0x92).name(), "Reserved");
    }

    #[test]
    fn only_a_failure_without_dnr_is_retryable() {
        assert!(Status::COMMAND_INTERRUPTED.is_retryable());
        assert!(!Status::COMMAND_INTERRUPTED.with_dnr().is_retryable());
        assert!(!Status::SUCCESS.is_retryable());
        assert!(Status::ANA_INACCESSIBLE.is_path_error());
        assert!(!Status::COMPARE_FAILURE.is_path_error());
    }
}
