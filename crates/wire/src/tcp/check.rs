//! What is refused in a header for its own sake, whatever came before it.
//!
//! Fields are looked at in their order, so that of several errors the one with the lowest offset is
//! told (§3.6.2.4). Reserved bits and fields are not looked at. The whole table, with what depends
//! on a connection's state, is in [`rule`](super::rule).

use super::pdu::{C2HData, CapsuleCmd, CapsuleResp, H2CData, IcReq, IcResp, R2t, TermReq};
use super::{
    ALIGNMENT_MAX, End, Framing, H2C_DATA_BYTES_MIN, PFV, PduType, Refusal, TERMINATION_BYTES_MAX,
};

/// Offsets of fields, as FEI tells them (§3.6.2).
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

/// Where the data in a capsule are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InCapsule {
    /// How far behind the beginning of the unit.
    pub offset: u8,
    /// How many bytes; none if the capsule holds only a command.
    pub len_bytes: u32,
}

/// The type of a unit that came to `end` (§3.3): one that nobody sends it is refused.
#[inline]
pub fn pdu_type(end: End, code: u8) -> Result<PduType, Refusal> {
    match PduType::from_u8(code) {
        Some(kind) if kind.sender() as u8 != end as u8 => Ok(kind),
        _ => Err(Refusal::field(offset::TYPE)),
    }
}

#[inline]
const fn require(holds: bool, offset: u8) -> Result<(), Refusal> {
    if holds { Ok(()) } else { Err(Refusal::field(offset)) }
}

/// A header without data: HDGSTF, HLEN and PLEN (§3.6.2.7, §3.6.2.10).
#[inline]
fn bare(framing: Framing, hdgstf: bool, hlen: u8, plen: u32) -> Result<(), Refusal> {
    require(hdgstf == framing.header_digest, offset::FLAGS)?;
    require(hlen == 24, offset::HLEN)?;
    require(plen == u32::from(24 + framing.header_digest_bytes()), offset::PLEN)
}

/// PDO of a unit with data: behind the header, at a multiple of what was agreed upon (§3.3).
#[inline]
fn place(framing: Framing, header_bytes: u8, pdo: u8) -> Result<(), Refusal> {
    let least = framing.data_offset(header_bytes);
    let is_padded = || pdo > least && pdo.is_multiple_of((framing.alignment + 1) * 4);
    require(pdo == least || is_padded(), offset::PDO)
}

/// A header with data behind it (§3.6.2.8, §3.6.2.9).
#[inline]
fn data(
    framing: Framing,
    flags: u8,
    (hlen, pdo): (u8, u8),
    plen: u32,
    datal: u32,
) -> Result<(), Refusal> {
    require(flags & 0b11 == framing.data_flags(), offset::FLAGS)?;
    require(hlen == 24, offset::HLEN)?;
    place(framing, 24, pdo)?;
    let rest = u32::from(pdo) + u32::from(framing.data_digest_bytes());
    require(plen.checked_sub(rest) == Some(datal), offset::PLEN)
}

/// DATAO and DATAL, or R2TO and R2TL: dwords, and at least one (§3.6.2.8 to §3.6.2.10).
#[inline]
fn range(datao: u32, datal: u32) -> Result<(), Refusal> {
    require(datao & 3 == 0, offset::DATAO)?;
    require(datal & 3 == 0 && datal != 0, offset::DATAL)
}

impl IcReq {
    /// What a controller refuses in it (§3.1, §3.6.2.2).
    pub fn check(&self) -> Result<(), Refusal> {
        require(self.hlen() == 128, offset::HLEN)?;
        require(self.plen() == 128, offset::PLEN)?;
        if self.pfv() != PFV {
            return Err(Refusal::parameter(offset::PFV));
        }
        require(self.hpda() <= ALIGNMENT_MAX, offset::ALIGNMENT)
    }
}

impl IcResp {
    /// What a host that sent `request` refuses in it (§3.1, §3.3.1.1, §3.6.2.3).
    pub fn check(&self, request: &IcReq) -> Result<(), Refusal> {
        require(self.hlen() == 128, offset::HLEN)?;
        require(self.plen() == 128, offset::PLEN)?;
        if self.pfv() != PFV {
            return Err(Refusal::parameter(offset::PFV));
        }
        require(self.cpda() <= ALIGNMENT_MAX, offset::ALIGNMENT)?;
        let uninvited = self.dgst() & 0b11 & !request.dgst();
        require(uninvited == 0, offset::DGST)?;
        let limit = self.maxh2cdata();
        require(limit >= H2C_DATA_BYTES_MIN && limit & 3 == 0, offset::MAXH2CDATA)
    }
}

impl CapsuleCmd {
    /// What a controller refuses in it that takes `in_capsule_max` bytes in a capsule; where its
    /// data are, if it is taken (§3.3.1, §3.6.2.6).
    ///
    /// DDGSTF means nothing in a capsule without data.
    #[inline]
    pub fn check(&self, framing: Framing, in_capsule_max: u32) -> Result<InCapsule, Refusal> {
        require(self.hdgstf() == framing.header_digest, offset::FLAGS)?;
        let plen = self.plen();
        let has_data = plen != u32::from(72 + framing.header_digest_bytes());
        require(!has_data || self.ddgstf() == framing.data_digest, offset::FLAGS)?;
        require(self.hlen() == 72, offset::HLEN)?;
        if !has_data {
            return Ok(InCapsule::default());
        }
        let pdo = self.pdo();
        place(framing, 72, pdo)?;
        let rest = u32::from(pdo) + u32::from(framing.data_digest_bytes());
        let len_bytes = plen.saturating_sub(rest);
        require(len_bytes != 0 && len_bytes <= in_capsule_max, offset::PLEN)?;
        Ok(InCapsule { offset: pdo, len_bytes })
    }
}

impl CapsuleResp {
    /// What a host refuses in it (§3.6.2.7).
    #[inline]
    pub fn check(&self, framing: Framing) -> Result<(), Refusal> {
        bare(framing, self.hdgstf(), self.hlen(), self.plen())
    }
}

impl H2CData {
    /// What a controller refuses in it before it looks for whom it is (§3.6.2.8).
    #[inline]
    pub fn check(&self, framing: Framing) -> Result<(), Refusal> {
        data(framing, self.flags(), (self.hlen(), self.pdo()), self.plen(), self.datal())
    }

    /// What a controller refuses in its range (§3.6.2.8).
    #[inline]
    pub fn check_range(&self) -> Result<(), Refusal> {
        range(self.datao(), self.datal())
    }
}

impl C2HData {
    /// What a host refuses in it before it looks for whom it is (§3.3.2.1, §3.6.2.9).
    #[inline]
    pub fn check(&self, framing: Framing) -> Result<(), Refusal> {
        require(self.last() || !self.success(), offset::FLAGS)?;
        data(framing, self.flags(), (self.hlen(), self.pdo()), self.plen(), self.datal())
    }

    /// What a host refuses in its range (§3.6.2.9).
    #[inline]
    pub fn check_range(&self) -> Result<(), Refusal> {
        range(self.datao(), self.datal())
    }
}

impl R2t {
    /// What a host refuses in it before it looks for whom it is (§3.6.2.10).
    #[inline]
    pub fn check(&self, framing: Framing) -> Result<(), Refusal> {
        bare(framing, self.hdgstf(), self.hlen(), self.plen())
    }

    /// What a host refuses in its range (§3.6.2.10).
    #[inline]
    pub fn check_range(&self) -> Result<(), Refusal> {
        range(self.r2to(), self.r2tl())
    }
}

impl TermReq {
    /// Whether it is to be listened to. One that is not ends the connection all the same (§3.5).
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let plen = self.plen();
        self.hlen() == 24 && (24..=TERMINATION_BYTES_MAX).any(|len| u32::try_from(len) == Ok(plen))
    }
}
