//! Validation of a PDU header by itself, independent of the connection state.
//!
//! Fields are checked in order, so that of several errors the one with the lowest offset is
//! reported (§3.6.2.4). Reserved bits and fields are not checked. The whole table, including rules
//! that depend on the connection state, is in [`validation_rules`](super::validation_rules).

use super::pdu::{C2HData, CapsuleCmd, CapsuleResp, H2CData, IcReq, IcResp, R2t, TermReq};
use super::{
    ALIGNMENT_MAX, FatalError, H2C_DATA_BYTES_MIN, PFV, PduFraming, PduType, Role,
    TERM_REQ_BYTES_MAX,
};

/// Field offsets, as reported in FEI (§3.6.2).
pub mod offset {
    /// PDU type.
    pub const TYPE: u8 = 0;
    /// FLAGS.
    pub const FLAGS: u8 = 1;
    /// HLEN.
    pub const HLEN: u8 = 2;
    /// PDO.
    pub const PDO: u8 = 3;
    /// PLEN.
    pub const PLEN: u8 = 4;
    /// PFV.
    pub const PFV: u8 = 8;
    /// HPDA or CPDA.
    pub const ALIGNMENT: u8 = 10;
    /// DGST.
    pub const DGST: u8 = 11;
    /// MAXH2CDATA.
    pub const MAXH2CDATA: u8 = 12;
    /// CCCID of data and of R2T.
    pub const CCCID: u8 = 8;
    /// TTAG of data.
    pub const TTAG: u8 = 10;
    /// DATAO, or R2TO.
    pub const DATAO: u8 = 12;
    /// DATAL, or R2TL.
    pub const DATAL: u8 = 16;
    /// CID of the completion in a response capsule: 12 bytes into an entry that begins at 8.
    pub const RCCQE_CID: u8 = 20;
}

/// Position of in-capsule data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InCapsuleData {
    /// Offset from the beginning of the PDU.
    pub offset: u8,
    /// Length; zero if the capsule holds only a command.
    pub len_bytes: u32,
}

/// Type of a PDU received by `end` (§3.3): types that are not sent to this side are rejected.
#[inline]
pub fn received_pdu_type(end: Role, code: u8) -> Result<PduType, FatalError> {
    match PduType::from_u8(code) {
        Some(kind) if kind.sender() as u8 != end as u8 => Ok(kind),
        _ => Err(FatalError::invalid_field(offset::TYPE)),
    }
}

#[inline]
const fn require_field(holds: bool, offset: u8) -> Result<(), FatalError> {
    if holds { Ok(()) } else { Err(FatalError::invalid_field(offset)) }
}

/// Checks a header without data: HDGSTF, HLEN and PLEN (§3.6.2.7, §3.6.2.10).
#[inline]
fn check_without_data(
    framing: PduFraming,
    hdgstf: bool,
    hlen: u8,
    plen: u32,
) -> Result<(), FatalError> {
    require_field(hdgstf == framing.header_digest, offset::FLAGS)?;
    require_field(hlen == 24, offset::HLEN)?;
    require_field(plen == u32::from(24 + framing.header_digest_bytes()), offset::PLEN)
}

/// Checks PDO of a PDU with data: after the header, at a multiple of the negotiated alignment
/// (§3.3).
#[inline]
fn check_data_offset(framing: PduFraming, header_bytes: u8, pdo: u8) -> Result<(), FatalError> {
    let least = framing.data_offset(header_bytes);
    let is_padded = || pdo > least && pdo.is_multiple_of((framing.alignment + 1) * 4);
    require_field(pdo == least || is_padded(), offset::PDO)
}

/// Checks a header followed by data (§3.6.2.8, §3.6.2.9).
#[inline]
fn check_with_data(
    framing: PduFraming,
    flags: u8,
    (hlen, pdo): (u8, u8),
    plen: u32,
    datal: u32,
) -> Result<(), FatalError> {
    require_field(flags & 0b11 == framing.data_flags(), offset::FLAGS)?;
    require_field(hlen == 24, offset::HLEN)?;
    check_data_offset(framing, 24, pdo)?;
    let rest = u32::from(pdo) + u32::from(framing.data_digest_bytes());
    require_field(plen.checked_sub(rest) == Some(datal), offset::PLEN)
}

/// Checks DATAO and DATAL, or R2TO and R2TL: multiples of dwords, not empty (§3.6.2.8 to
/// §3.6.2.10).
#[inline]
fn check_data_range(datao: u32, datal: u32) -> Result<(), FatalError> {
    require_field(datao & 3 == 0, offset::DATAO)?;
    require_field(datal & 3 == 0 && datal != 0, offset::DATAL)
}

impl IcReq {
    /// Validation by the controller (§3.1, §3.6.2.2).
    pub fn check(&self) -> Result<(), FatalError> {
        require_field(self.hlen() == 128, offset::HLEN)?;
        require_field(self.plen() == 128, offset::PLEN)?;
        if self.pfv() != PFV {
            return Err(FatalError::unsupported_parameter(offset::PFV));
        }
        require_field(self.hpda() <= ALIGNMENT_MAX, offset::ALIGNMENT)
    }
}

impl IcResp {
    /// Validation by the host that sent `request` (§3.1, §3.3.1.1, §3.6.2.3).
    pub fn check(&self, request: &IcReq) -> Result<(), FatalError> {
        require_field(self.hlen() == 128, offset::HLEN)?;
        require_field(self.plen() == 128, offset::PLEN)?;
        if self.pfv() != PFV {
            return Err(FatalError::unsupported_parameter(offset::PFV));
        }
        require_field(self.cpda() <= ALIGNMENT_MAX, offset::ALIGNMENT)?;
        let uninvited = self.dgst() & 0b11 & !request.dgst();
        require_field(uninvited == 0, offset::DGST)?;
        let limit = self.maxh2cdata();
        require_field(limit >= H2C_DATA_BYTES_MIN && limit & 3 == 0, offset::MAXH2CDATA)
    }
}

impl CapsuleCmd {
    /// Validation by a controller that accepts `in_capsule_max` bytes of in-capsule data; returns
    /// its position (§3.3.1, §3.6.2.6).
    ///
    /// DDGSTF has no meaning in a capsule without data.
    #[inline]
    pub fn check(
        &self,
        framing: PduFraming,
        in_capsule_max: u32,
    ) -> Result<InCapsuleData, FatalError> {
        require_field(self.hdgstf() == framing.header_digest, offset::FLAGS)?;
        let plen = self.plen();
        let has_data = plen != u32::from(72 + framing.header_digest_bytes());
        require_field(!has_data || self.ddgstf() == framing.data_digest, offset::FLAGS)?;
        require_field(self.hlen() == 72, offset::HLEN)?;
        if !has_data {
            return Ok(InCapsuleData::default());
        }
        let pdo = self.pdo();
        check_data_offset(framing, 72, pdo)?;
        let rest = u32::from(pdo) + u32::from(framing.data_digest_bytes());
        let len_bytes = plen.saturating_sub(rest);
        require_field(len_bytes != 0 && len_bytes <= in_capsule_max, offset::PLEN)?;
        Ok(InCapsuleData { offset: pdo, len_bytes })
    }
}

impl CapsuleResp {
    /// Validation by the host (§3.6.2.7).
    #[inline]
    pub fn check(&self, framing: PduFraming) -> Result<(), FatalError> {
        check_without_data(framing, self.hdgstf(), self.hlen(), self.plen())
    }
}

impl H2CData {
    /// Validation by the controller, before its command is looked up (§3.6.2.8).
    #[inline]
    pub fn check_header(&self, framing: PduFraming) -> Result<(), FatalError> {
        check_with_data(framing, self.flags(), (self.hlen(), self.pdo()), self.plen(), self.datal())
    }

    /// Validation of its range by the controller (§3.6.2.8).
    #[inline]
    pub fn check_range(&self) -> Result<(), FatalError> {
        check_data_range(self.datao(), self.datal())
    }
}

impl C2HData {
    /// Validation by the host, before its command is looked up (§3.3.2.1, §3.6.2.9).
    #[inline]
    pub fn check_header(&self, framing: PduFraming) -> Result<(), FatalError> {
        require_field(self.last() || !self.success(), offset::FLAGS)?;
        check_with_data(framing, self.flags(), (self.hlen(), self.pdo()), self.plen(), self.datal())
    }

    /// Validation of its range by the host (§3.6.2.9).
    #[inline]
    pub fn check_range(&self) -> Result<(), FatalError> {
        check_data_range(self.datao(), self.datal())
    }
}

impl R2t {
    /// Validation by the host, before its command is looked up (§3.6.2.10).
    #[inline]
    pub fn check_header(&self, framing: PduFraming) -> Result<(), FatalError> {
        check_without_data(framing, self.hdgstf(), self.hlen(), self.plen())
    }

    /// Validation of its range by the host (§3.6.2.10).
    #[inline]
    pub fn check_range(&self) -> Result<(), FatalError> {
        check_data_range(self.r2to(), self.r2tl())
    }
}

impl TermReq {
    /// Whether the request is well-formed. An invalid one ends the connection too (§3.5).
    #[must_use]
    pub fn is_valid(&self) -> bool {
        let plen = self.plen();
        self.hlen() == 24 && (24..=TERM_REQ_BYTES_MAX).any(|len| u32::try_from(len) == Ok(plen))
    }
}
