//! NVMe/TCP PDUs: encoding and decoding, without state.
//!
//! Sections are those of the NVM Express TCP Transport Specification, revision 1.0, which later
//! revisions keep for everything used here. All numbers are little-endian.
//!
//! ```text
//!   0       8          HLEN       (+4)      PDO            PDO + DATA   PLEN
//!   | CH    | PSH      | [HDGST]  | [PAD]   | [DATA]       | [DDGST]    |
//!
//!   CH: type, FLAGS, HLEN, PDO, PLEN
//! ```
//!
//! | module | content |
//! |---|---|
//! | [`pdu`] | header of each PDU, every field declared once |
//! | [`mod@pdu_validation`] | validation of a header by itself, with the fatal error status |
//! | [`validation_rules`] | table of all validation rules, with those of the connection state |
//! | [`Crc32c`] | digests of headers and data |
//!
//! The crate `tcp` implements the sequence of PDUs; this module only their encoding.

pub mod pdu;
pub mod pdu_validation;
#[cfg(test)]
mod tests;
pub mod validation_rules;

pub use pdu::{C2HData, CapsuleCmd, CapsuleResp, H2CData, IcReq, IcResp, R2t, TermReq};
/// Header and data digests (§3.3.1.1).
pub use tenmil_crc::{Crc32c, crc32c};

/// Length of the common header, which begins every PDU (§3.6.2.1).
pub const COMMON_BYTES: usize = 8;

/// Length of a digest (§3.3.1.1).
pub const DIGEST_BYTES: usize = 4;

/// Longest header: that of ICReq and ICResp (§3.6.2.2).
pub const HEADER_BYTES_MAX: usize = 128;

/// Maximum HPDA or CPDA: data begins at a multiple of 128 bytes (§3.6.2.2).
pub const ALIGNMENT_MAX: u8 = 31;

/// Maximum length of a termination request: its header, and 128 bytes of the rejected header
/// (§3.5).
pub const TERM_REQ_BYTES_MAX: usize = 152;

/// In-capsule data that an admin or fabrics command may always carry (§3.3.1).
pub const ADMIN_IN_CAPSULE_BYTES: u32 = 8192;

/// Minimum MAXH2CDATA (§3.6.2.3).
pub const H2C_DATA_BYTES_MIN: u32 = 4096;

/// The only PDU format version (§3.6.2.2).
pub const PFV: u16 = 0;

/// Default port of NVMe/TCP (§3.1.2).
pub const PORT: u16 = 4420;

/// Default port of the discovery service (§3.1.2).
pub const DISCOVERY_PORT: u16 = 8009;

/// Side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Host: connects and submits commands.
    Host,
    /// Controller: completes commands.
    Controller,
}

/// PDU type (§3.3, Figure 10).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum PduType {
    /// Initialize Connection Request.
    IcReq = 0x00,
    /// Initialize Connection Response.
    IcResp = 0x01,
    /// Host to Controller Terminate Connection Request.
    H2CTermReq = 0x02,
    /// Controller to Host Terminate Connection Request.
    C2HTermReq = 0x03,
    /// Command Capsule.
    CapsuleCmd = 0x04,
    /// Response Capsule.
    CapsuleResp = 0x05,
    /// Host to Controller Data.
    H2CData = 0x06,
    /// Controller to Host Data.
    C2HData = 0x07,
    /// Ready to Transfer.
    R2t = 0x09,
}

/// PDU framing of one direction, as negotiated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PduFraming {
    /// A digest follows each header.
    pub header_digest: bool,
    /// A digest follows all data.
    pub data_digest: bool,
    /// HPDA or CPDA of the receiving side: data begins at a multiple of this plus one, in dwords.
    pub alignment: u8,
}

/// FES: fatal error status (§3.6.2.4, §3.6.2.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FatalStatus {
    /// 01h: a field of the header is invalid; FEI is its offset.
    InvalidHeaderField,
    /// 02h: PDU sequence error.
    SequenceError,
    /// 03h: the header digest is wrong; FEI is the received digest.
    HeaderDigestError,
    /// 04h: data is outside of the requested range.
    OutOfRange,
    /// 05h: a limit is exceeded: data length of a PDU, or outstanding R2Ts.
    LimitExceeded,
    /// 06h: a parameter is not supported; FEI is its offset.
    UnsupportedParameter,
    /// A value that the specification does not name.
    Reserved(u16),
}

/// Fatal error: status and information of a termination request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FatalError {
    /// FES.
    pub status: FatalStatus,
    /// FEI.
    pub information: u32,
}

impl Role {
    /// The other side.
    #[must_use]
    pub const fn peer(self) -> Self {
        match self {
            Self::Host => Self::Controller,
            Self::Controller => Self::Host,
        }
    }
}

impl PduType {
    /// All types.
    pub const ALL: [Self; 9] = [
        Self::IcReq,
        Self::IcResp,
        Self::H2CTermReq,
        Self::C2HTermReq,
        Self::CapsuleCmd,
        Self::CapsuleResp,
        Self::H2CData,
        Self::C2HData,
        Self::R2t,
    ];

    /// Type of this number, if defined.
    #[inline]
    #[must_use]
    pub const fn from_u8(code: u8) -> Option<Self> {
        Some(match code {
            0x00 => Self::IcReq,
            0x01 => Self::IcResp,
            0x02 => Self::H2CTermReq,
            0x03 => Self::C2HTermReq,
            0x04 => Self::CapsuleCmd,
            0x05 => Self::CapsuleResp,
            0x06 => Self::H2CData,
            0x07 => Self::C2HData,
            0x09 => Self::R2t,
            _ => return None,
        })
    }

    /// Sending side, given by the lowest bit (§3.3, Figure 10).
    #[inline]
    #[must_use]
    pub const fn sender(self) -> Role {
        if self as u8 & 1 == 0 { Role::Host } else { Role::Controller }
    }

    /// HLEN: length of its header without a digest (§3.6.2).
    #[inline]
    #[must_use]
    pub const fn header_bytes(self) -> u8 {
        match self {
            Self::IcReq | Self::IcResp => 128,
            Self::CapsuleCmd => 72,
            _ => 24,
        }
    }

    /// Whether a digest follows its header if digests are negotiated (§3.3.1.1).
    #[inline]
    #[must_use]
    pub const fn has_digest(self) -> bool {
        !matches!(self, Self::IcReq | Self::IcResp | Self::H2CTermReq | Self::C2HTermReq)
    }

    /// Name in the specification.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::IcReq => "ICReq",
            Self::IcResp => "ICResp",
            Self::H2CTermReq => "H2CTermReq",
            Self::C2HTermReq => "C2HTermReq",
            Self::CapsuleCmd => "CapsuleCmd",
            Self::CapsuleResp => "CapsuleResp",
            Self::H2CData => "H2CData",
            Self::C2HData => "C2HData",
            Self::R2t => "R2T",
        }
    }
}

impl PduFraming {
    /// Length of the digest after each header.
    #[inline]
    #[must_use]
    pub const fn header_digest_bytes(self) -> u8 {
        if self.header_digest { 4 } else { 0 }
    }

    /// Length of the digest after all data.
    #[inline]
    #[must_use]
    pub const fn data_digest_bytes(self) -> u8 {
        if self.data_digest { 4 } else { 0 }
    }

    /// PDO: offset of data after a header of `header_bytes`, with minimum padding (§3.3).
    #[inline]
    #[must_use]
    pub const fn data_offset(self, header_bytes: u8) -> u8 {
        let end = header_bytes + self.header_digest_bytes();
        end.next_multiple_of((self.alignment + 1) * 4)
    }

    /// FLAGS of a PDU with data (§3.6.2.6 to §3.6.2.9).
    #[inline]
    #[must_use]
    pub const fn data_flags(self) -> u8 {
        self.header_digest as u8 | (self.data_digest as u8) << 1
    }
}

impl FatalStatus {
    /// All named values.
    pub const ALL: [Self; 6] = [
        Self::InvalidHeaderField,
        Self::SequenceError,
        Self::HeaderDigestError,
        Self::OutOfRange,
        Self::LimitExceeded,
        Self::UnsupportedParameter,
    ];

    /// Decodes a value.
    #[must_use]
    pub const fn from_code(code: u16) -> Self {
        match code {
            1 => Self::InvalidHeaderField,
            2 => Self::SequenceError,
            3 => Self::HeaderDigestError,
            4 => Self::OutOfRange,
            5 => Self::LimitExceeded,
            6 => Self::UnsupportedParameter,
            other => Self::Reserved(other),
        }
    }

    /// Value on the wire.
    #[must_use]
    pub const fn code(self) -> u16 {
        match self {
            Self::InvalidHeaderField => 1,
            Self::SequenceError => 2,
            Self::HeaderDigestError => 3,
            Self::OutOfRange => 4,
            Self::LimitExceeded => 5,
            Self::UnsupportedParameter => 6,
            Self::Reserved(other) => other,
        }
    }

    /// Name in the specification.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::InvalidHeaderField => "Invalid PDU Header Field",
            Self::SequenceError => "PDU Sequence Error",
            Self::HeaderDigestError => "Header Digest Error",
            Self::OutOfRange => "Data Transfer Out of Range",
            Self::LimitExceeded => "R2T or Data Transfer Limit Exceeded",
            Self::UnsupportedParameter => "Unsupported Parameter",
            Self::Reserved(_) => "reserved",
        }
    }
}

impl FatalError {
    /// PDU sequence error (§3.3.2).
    pub const SEQUENCE: Self = Self { status: FatalStatus::SequenceError, information: 0 };
    /// Data outside of the requested range (§3.3.2).
    pub const RANGE: Self = Self { status: FatalStatus::OutOfRange, information: 0 };
    /// Negotiated limit exceeded (§3.3.2.2).
    pub const LIMIT: Self = Self { status: FatalStatus::LimitExceeded, information: 0 };

    /// The field at `offset` is invalid.
    #[must_use]
    pub const fn invalid_field(offset: u8) -> Self {
        Self { status: FatalStatus::InvalidHeaderField, information: offset as u32 }
    }

    /// The parameter at `offset` is not supported.
    #[must_use]
    pub const fn unsupported_parameter(offset: u8) -> Self {
        Self { status: FatalStatus::UnsupportedParameter, information: offset as u32 }
    }

    /// The received header digest is `found`, which is wrong.
    #[must_use]
    pub const fn header_digest_error(found: u32) -> Self {
        Self { status: FatalStatus::HeaderDigestError, information: found }
    }
}

impl core::fmt::Display for FatalError {
    fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { status, information } = self;
        write!(out, "{} (FES {:#x}", status.name(), status.code())?;
        match status {
            FatalStatus::InvalidHeaderField | FatalStatus::UnsupportedParameter => {
                write!(out, ", offset {information})")
            }
            FatalStatus::HeaderDigestError => write!(out, ", digest {information:#010x})"),
            _ => out.write_str(")"),
        }
    }
}

impl core::error::Error for FatalError {}
