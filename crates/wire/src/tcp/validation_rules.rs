//! Table of all PDU validation rules, field by field: fatal error status and section of the
//! specification.
//!
//! Rules checked by the header parser are implemented and tested in [`pdu_validation`](super::pdu_validation); those
//! checked by the connection are implemented in the crate `tcp`, which knows the connection state.

use super::pdu_validation::offset;
use super::{FatalStatus, PduType};

/// One validation rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValidationRule {
    /// PDU type.
    pub pdu: PduType,
    /// Field name in the specification.
    pub field: &'static str,
    /// Rejected values.
    pub rejected: &'static str,
    /// FES.
    pub status: FatalStatus,
    /// FEI; `None` if it is not an offset.
    pub offset: Option<u8>,
    /// Component that checks the rule.
    pub checked_by: CheckedBy,
    /// Section of the specification.
    pub section: &'static str,
}

/// Component that checks a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckedBy {
    /// The header parser.
    Header,
    /// The connection, with its state.
    Connection,
}

/// Rules of one PDU type.
macro_rules! rules {
    ($( $pdu:ident $section:literal {
        $( $checker:ident $field:literal $rejected:literal => $status:ident $($offset:ident)?; )+
    } )+) => {
        /// All rules.
        pub static RULES: &[ValidationRule] = &[$($(
            ValidationRule {
                pdu: PduType::$pdu,
                field: $field,
                rejected: $rejected,
                status: FatalStatus::$status,
                offset: rules!(@offset $($offset)?),
                checked_by: CheckedBy::$checker,
                section: $section,
            },
        )+)+];
    };
    (@offset) => { None };
    (@offset $offset:ident) => { Some(offset::$offset) };
}

rules! {
    IcReq "TCP 1.0 §3.6.2.2" {
        Header "PDU-Type" "another unit, or one of the wrong direction" => InvalidHeaderField TYPE;
        Header "HLEN" "not 128" => InvalidHeaderField HLEN;
        Header "PLEN" "not 128" => InvalidHeaderField PLEN;
        Header "PFV" "not 0" => UnsupportedParameter PFV;
        Header "HPDA" "above 31" => InvalidHeaderField ALIGNMENT;
        Connection "PDU-Type" "a second one" => SequenceError;
    }
    IcResp "TCP 1.0 §3.6.2.3" {
        Header "PDU-Type" "another unit, or one of the wrong direction" => InvalidHeaderField TYPE;
        Header "HLEN" "not 128" => InvalidHeaderField HLEN;
        Header "PLEN" "not 128" => InvalidHeaderField PLEN;
        Header "PFV" "not 0" => UnsupportedParameter PFV;
        Header "CPDA" "above 31" => InvalidHeaderField ALIGNMENT;
        Header "DGST" "a digest that was not negotiated" => InvalidHeaderField DGST;
        Header "MAXH2CDATA" "below 4096, or no multiple of 4" => InvalidHeaderField MAXH2CDATA;
        Connection "DGST" "a digest refused without which the host does not go on"
            => UnsupportedParameter DGST;
        Connection "PDU-Type" "a second one" => SequenceError;
    }
    CapsuleCmd "TCP 1.0 §3.6.2.6" {
        Header "PDU-Type" "another unit, or one of the wrong direction" => InvalidHeaderField TYPE;
        Header "FLAGS" "a digest bit that is not as agreed" => InvalidHeaderField FLAGS;
        Header "HLEN" "not 72" => InvalidHeaderField HLEN;
        Header "PDO" "within the header, or no multiple of CPDA" => InvalidHeaderField PDO;
        Header "PLEN" "not that of the header, of data that are agreed, or of any"
            => InvalidHeaderField PLEN;
        Connection "PDU-Type" "before ICReq, or more than the queue holds" => SequenceError;
        Connection "HDGST" "not that of the header" => HeaderDigestError;
    }
    CapsuleResp "TCP 1.0 §3.6.2.7" {
        Header "PDU-Type" "another unit, or one of the wrong direction" => InvalidHeaderField TYPE;
        Header "FLAGS" "HDGSTF that is not as agreed" => InvalidHeaderField FLAGS;
        Header "HLEN" "not 24" => InvalidHeaderField HLEN;
        Header "PLEN" "not that of the header" => InvalidHeaderField PLEN;
        Connection "RCCQE.CID" "of no outstanding command" => InvalidHeaderField RCCQE_CID;
        Connection "PDU-Type" "before ICResp" => SequenceError;
        Connection "HDGST" "not that of the header" => HeaderDigestError;
    }
    H2CData "TCP 1.0 §3.3.2.2, §3.6.2.8" {
        Header "PDU-Type" "another unit, or one of the wrong direction" => InvalidHeaderField TYPE;
        Header "FLAGS" "a digest bit that is not as agreed" => InvalidHeaderField FLAGS;
        Header "HLEN" "not 24" => InvalidHeaderField HLEN;
        Header "PDO" "within the header, or no multiple of CPDA" => InvalidHeaderField PDO;
        Header "PLEN" "not that of header, data and digest" => InvalidHeaderField PLEN;
        Header "DATAO" "no multiple of 4" => InvalidHeaderField DATAO;
        Header "DATAL" "0, or no multiple of 4" => InvalidHeaderField DATAL;
        Connection "CCCID" "not the one of the R2T" => InvalidHeaderField CCCID;
        Connection "TTAG" "of no outstanding R2T" => InvalidHeaderField TTAG;
        Connection "DATAL" "above MAXH2CDATA" => LimitExceeded;
        Connection "DATAO" "a range that is not within the R2T's" => OutOfRange;
        Connection "DATAO" "not the end of the data before" => SequenceError;
        Connection "FLAGS" "LAST_PDU elsewhere than at the end of the R2T" => SequenceError;
        Connection "PDU-Type" "before ICReq" => SequenceError;
        Connection "HDGST" "not that of the header" => HeaderDigestError;
    }
    C2HData "TCP 1.0 §3.3.2.1, §3.6.2.9" {
        Header "PDU-Type" "another unit, or one of the wrong direction" => InvalidHeaderField TYPE;
        Header "FLAGS" "a digest bit that is not as agreed, or SUCCESS without LAST_PDU"
            => InvalidHeaderField FLAGS;
        Header "HLEN" "not 24" => InvalidHeaderField HLEN;
        Header "PDO" "within the header, or no multiple of HPDA" => InvalidHeaderField PDO;
        Header "PLEN" "not that of header, data and digest" => InvalidHeaderField PLEN;
        Header "DATAO" "no multiple of 4" => InvalidHeaderField DATAO;
        Header "DATAL" "0, or no multiple of 4" => InvalidHeaderField DATAL;
        Connection "CCCID" "of no outstanding command" => InvalidHeaderField CCCID;
        Connection "DATAO" "a range that is not within the command's data" => OutOfRange;
        Connection "DATAO" "not the end of the data before" => SequenceError;
        Connection "PDU-Type" "before ICResp, behind LAST_PDU, or for a command that reads nothing"
            => SequenceError;
        Connection "HDGST" "not that of the header" => HeaderDigestError;
    }
    R2t "TCP 1.0 §3.3.2.2, §3.6.2.10" {
        Header "PDU-Type" "another unit, or one of the wrong direction" => InvalidHeaderField TYPE;
        Header "FLAGS" "HDGSTF that is not as agreed" => InvalidHeaderField FLAGS;
        Header "HLEN" "not 24" => InvalidHeaderField HLEN;
        Header "PLEN" "not that of the header" => InvalidHeaderField PLEN;
        Header "R2TO" "no multiple of 4" => InvalidHeaderField DATAO;
        Header "R2TL" "0, or no multiple of 4" => InvalidHeaderField DATAL;
        Connection "CCCID" "of no outstanding command" => InvalidHeaderField CCCID;
        Connection "PDU-Type" "more than MAXR2T for a command" => LimitExceeded;
        Connection "R2TO" "a range that is not within the command's data" => OutOfRange;
        Connection "R2TO" "not the end of the range before" => SequenceError;
        Connection "PDU-Type" "before ICResp, or for a command whose data must not be requested"
            => SequenceError;
        Connection "HDGST" "not that of the header" => HeaderDigestError;
    }
}
