//! PDU headers, each field with its offset (§3.6.2).

use super::{FatalError, FatalStatus, PFV, PduFraming, PduType, TERM_REQ_BYTES_MAX};
use crate::command::Command;
use crate::completion::Completion;
use crate::layout::layout;

layout! {
    /// Initialize Connection Request: the whole PDU (§3.6.2.2).
    pub struct IcReq[128] {
        /// PDU type: 00h.
        pdu_type @ 0: u8;
        /// Flags: reserved.
        flags @ 1: u8;
        /// Header Length: 128.
        hlen @ 2: u8;
        /// PDU Data Offset: reserved.
        pdo @ 3: u8;
        /// PDU Length: 128.
        plen @ 4: u32;
        /// PDU Format Version: 0.
        pfv @ 8: u16;
        /// Host PDU Data Alignment, in dwords, 0's based.
        hpda @ 10: u8;
        /// Digests requested by the host.
        dgst @ 11: u8 {
            /// Header digest.
            hdgst @ 0: bool;
            /// Data digest.
            ddgst @ 1: bool;
        };
        /// Maximum Number of Outstanding R2Ts of a command, 0's based.
        maxr2t @ 12: u32;
    }

    /// Initialize Connection Response: the whole PDU (§3.6.2.3).
    pub struct IcResp[128] {
        /// PDU type: 01h.
        pdu_type @ 0: u8;
        /// Flags: reserved.
        flags @ 1: u8;
        /// Header Length: 128.
        hlen @ 2: u8;
        /// PDU Data Offset: reserved.
        pdo @ 3: u8;
        /// PDU Length: 128.
        plen @ 4: u32;
        /// PDU Format Version: 0.
        pfv @ 8: u16;
        /// Controller PDU Data Alignment, in dwords, 0's based.
        cpda @ 10: u8;
        /// Digests in use.
        dgst @ 11: u8 {
            /// Header digest.
            hdgst @ 0: bool;
            /// Data digest.
            ddgst @ 1: bool;
        };
        /// Maximum Host to Controller Data Length of one H2CData, in bytes.
        maxh2cdata @ 12: u32;
    }

    /// Header of a termination request, in either direction (§3.6.2.4, §3.6.2.5).
    pub struct TermReq[24] {
        /// PDU type: 02h or 03h.
        pdu_type @ 0: u8;
        /// Flags: reserved.
        flags @ 1: u8;
        /// Header Length: 24.
        hlen @ 2: u8;
        /// PDU Data Offset: reserved.
        pdo @ 3: u8;
        /// PDU Length: 152 at most.
        plen @ 4: u32;
        /// Fatal Error Status.
        fes @ 8: u16;
        /// Fatal Error Information.
        fei @ 10: u32;
    }

    /// Header of a command capsule (§3.6.2.6).
    pub struct CapsuleCmd[72] {
        /// PDU type: 04h.
        pdu_type @ 0: u8;
        /// Flags.
        flags @ 1: u8 {
            /// A header digest follows the header.
            hdgstf @ 0: bool;
            /// A data digest follows the data, if there are any.
            ddgstf @ 1: bool;
        };
        /// Header Length: 72.
        hlen @ 2: u8;
        /// PDU Data Offset.
        pdo @ 3: u8;
        /// PDU Length.
        plen @ 4: u32;
        /// Command Capsule Submission Queue Entry.
        ccsqe @ 8: [u8; 64];
    }

    /// Header of a response capsule (§3.6.2.7).
    pub struct CapsuleResp[24] {
        /// PDU type: 05h.
        pdu_type @ 0: u8;
        /// Flags.
        flags @ 1: u8 {
            /// A header digest follows the header.
            hdgstf @ 0: bool;
        };
        /// Header Length: 24.
        hlen @ 2: u8;
        /// PDU Data Offset: reserved.
        pdo @ 3: u8;
        /// PDU Length.
        plen @ 4: u32;
        /// Response Capsule Completion Queue Entry.
        rccqe @ 8: [u8; 16];
    }

    /// Header of H2CData (§3.6.2.8).
    pub struct H2CData[24] {
        /// PDU type: 06h.
        pdu_type @ 0: u8;
        /// Flags.
        flags @ 1: u8 {
            /// A header digest follows the header.
            hdgstf @ 0: bool;
            /// A data digest follows the data.
            ddgstf @ 1: bool;
            /// Last PDU of its R2T.
            last @ 2: bool;
        };
        /// Header Length: 24.
        hlen @ 2: u8;
        /// PDU Data Offset.
        pdo @ 3: u8;
        /// PDU Length.
        plen @ 4: u32;
        /// Command Capsule CID.
        cccid @ 8: u16;
        /// Transfer Tag.
        ttag @ 10: u16;
        /// Data Offset in the command's data.
        datao @ 12: u32;
        /// Data Length.
        datal @ 16: u32;
    }

    /// Header of C2HData (§3.6.2.9).
    pub struct C2HData[24] {
        /// PDU type: 07h.
        pdu_type @ 0: u8;
        /// Flags.
        flags @ 1: u8 {
            /// A header digest follows the header.
            hdgstf @ 0: bool;
            /// A data digest follows the data.
            ddgstf @ 1: bool;
            /// Last PDU of its command.
            last @ 2: bool;
            /// The command has succeeded, and no response capsule follows.
            success @ 3: bool;
        };
        /// Header Length: 24.
        hlen @ 2: u8;
        /// PDU Data Offset.
        pdo @ 3: u8;
        /// PDU Length.
        plen @ 4: u32;
        /// Command Capsule CID.
        cccid @ 8: u16;
        /// Data Offset in the command's data.
        datao @ 12: u32;
        /// Data Length.
        datal @ 16: u32;
    }

    /// Ready to Transfer: the controller requests data (§3.6.2.10).
    pub struct R2t[24] {
        /// PDU type: 09h.
        pdu_type @ 0: u8;
        /// Flags.
        flags @ 1: u8 {
            /// A header digest follows the header.
            hdgstf @ 0: bool;
        };
        /// Header Length: 24.
        hlen @ 2: u8;
        /// PDU Data Offset: reserved.
        pdo @ 3: u8;
        /// PDU Length.
        plen @ 4: u32;
        /// Command Capsule CID.
        cccid @ 8: u16;
        /// Transfer Tag.
        ttag @ 10: u16;
        /// Requested Data Offset in the command's data.
        r2to @ 12: u32;
        /// Requested Data Length.
        r2tl @ 16: u32;
    }
}

/// `pdu_len` of a PDU with `len_bytes` of data that begin at `pdo`. It cannot overflow: the limits of
/// both sides are far below.
#[inline]
fn pdu_len(framing: PduFraming, pdo: u8, len_bytes: u32) -> u32 {
    len_bytes.saturating_add(u32::from(pdo) + u32::from(framing.data_digest_bytes()))
}

impl IcReq {
    /// Request of a host.
    #[must_use]
    pub fn new(hpda: u8, header_digest: bool, data_digest: bool, maxr2t: u32) -> Self {
        Self::zeroed().with(|pdu| {
            pdu.pdu_type(PduType::IcReq as u8)
                .hlen(128)
                .plen(128)
                .pfv(PFV)
                .hpda(hpda)
                .hdgst(header_digest)
                .ddgst(data_digest)
                .maxr2t(maxr2t)
        })
    }
}

impl IcResp {
    /// Response of a controller.
    #[must_use]
    pub fn new(cpda: u8, header_digest: bool, data_digest: bool, maxh2cdata: u32) -> Self {
        Self::zeroed().with(|pdu| {
            pdu.pdu_type(PduType::IcResp as u8)
                .hlen(128)
                .plen(128)
                .pfv(PFV)
                .cpda(cpda)
                .hdgst(header_digest)
                .ddgst(data_digest)
                .maxh2cdata(maxh2cdata)
        })
    }
}

impl CapsuleCmd {
    /// Command capsule with `len_bytes` of in-capsule data.
    #[inline]
    #[must_use]
    pub fn new(framing: PduFraming, command: &Command, len_bytes: u32) -> Self {
        let mut pdu = Self::zeroed();
        let (flags, pdo, plen) = if len_bytes == 0 {
            let header = 72 + framing.header_digest_bytes();
            (u8::from(framing.header_digest), 0, u32::from(header))
        } else {
            let pdo = framing.data_offset(72);
            (framing.data_flags(), pdo, pdu_len(framing, pdo, len_bytes))
        };
        pdu.set()
            .pdu_type(PduType::CapsuleCmd as u8)
            .flags(flags)
            .hlen(72)
            .pdo(pdo)
            .plen(plen)
            .ccsqe(command.to_bytes());
        pdu
    }

    /// Submission queue entry in the capsule.
    #[inline]
    #[must_use]
    pub fn command(&self) -> Command {
        Command::from_bytes(&self.ccsqe())
    }
}

impl CapsuleResp {
    /// Response capsule for a completion.
    #[inline]
    #[must_use]
    pub fn new(framing: PduFraming, completion: &Completion) -> Self {
        let mut pdu = Self::zeroed();
        pdu.set()
            .pdu_type(PduType::CapsuleResp as u8)
            .flags(u8::from(framing.header_digest))
            .hlen(24)
            .plen(u32::from(24 + framing.header_digest_bytes()))
            .rccqe(completion.to_bytes());
        pdu
    }

    /// Completion queue entry in the capsule.
    #[inline]
    #[must_use]
    pub fn completion(&self) -> Completion {
        Completion::from_bytes(&self.rccqe())
    }
}

impl H2CData {
    /// `len_bytes` of a command's data from `offset` on, requested by the R2T with `ttag`.
    #[inline]
    #[must_use]
    pub fn new(
        framing: PduFraming,
        (cccid, ttag): (u16, u16),
        offset: u32,
        len_bytes: u32,
        last: bool,
    ) -> Self {
        let mut pdu = Self::zeroed();
        let pdo = framing.data_offset(24);
        pdu.set()
            .pdu_type(PduType::H2CData as u8)
            .flags(framing.data_flags() | u8::from(last) << 2)
            .hlen(24)
            .pdo(pdo)
            .plen(pdu_len(framing, pdo, len_bytes))
            .cccid(cccid)
            .ttag(ttag)
            .datao(offset)
            .datal(len_bytes);
        pdu
    }
}

impl C2HData {
    /// `len_bytes` of a command's data from `offset` on.
    #[inline]
    #[must_use]
    pub fn new(
        framing: PduFraming,
        cccid: u16,
        offset: u32,
        len_bytes: u32,
        (last, success): (bool, bool),
    ) -> Self {
        let mut pdu = Self::zeroed();
        let pdo = framing.data_offset(24);
        pdu.set()
            .pdu_type(PduType::C2HData as u8)
            .flags(framing.data_flags() | u8::from(last) << 2 | u8::from(success) << 3)
            .hlen(24)
            .pdo(pdo)
            .plen(pdu_len(framing, pdo, len_bytes))
            .cccid(cccid)
            .datao(offset)
            .datal(len_bytes);
        pdu
    }
}

impl R2t {
    /// Requests `len_bytes` of a command's data from `offset` on.
    #[inline]
    #[must_use]
    pub fn new(
        framing: PduFraming,
        (cccid, ttag): (u16, u16),
        offset: u32,
        len_bytes: u32,
    ) -> Self {
        let mut pdu = Self::zeroed();
        pdu.set()
            .pdu_type(PduType::R2t as u8)
            .flags(u8::from(framing.header_digest))
            .hlen(24)
            .plen(u32::from(24 + framing.header_digest_bytes()))
            .cccid(cccid)
            .ttag(ttag)
            .r2to(offset)
            .r2tl(len_bytes);
        pdu
    }
}

impl TermReq {
    /// Complete termination request for the rejected `header`, of which at most 128 bytes are
    /// included, and its length (§3.5).
    #[must_use]
    pub fn build(
        kind: PduType,
        refusal: FatalError,
        header: &[u8],
    ) -> ([u8; TERM_REQ_BYTES_MAX], usize) {
        let mut bytes = [0; TERM_REQ_BYTES_MAX];
        let header = &header[..header.len().min(TERM_REQ_BYTES_MAX - Self::BYTES)];
        let whole = Self::BYTES + header.len();
        let pdu = Self::zeroed().with(|pdu| {
            pdu.pdu_type(kind as u8)
                .hlen(24)
                .plen(u32::try_from(whole).unwrap_or(0))
                .fes(refusal.status.code())
                .fei(refusal.information)
        });
        bytes[..Self::BYTES].copy_from_slice(pdu.as_bytes());
        bytes[Self::BYTES..whole].copy_from_slice(header);
        (bytes, whole)
    }

    /// Fatal error in the request.
    #[must_use]
    pub fn fatal_error(&self) -> FatalError {
        FatalError { status: FatalStatus::from_code(self.fes()), information: self.fei() }
    }
}
