//! All that is refused in a unit, field by field: what it is answered with, and where that is
//! written.
//!
//! Rules whose judge is the header are held by [`check`](super::check) and tested beside it; those
//! whose judge is the connection by `tcp`, which knows what came before.

use super::check::offset;
use super::{FatalStatus, PduType};

/// One row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// In which unit.
    pub pdu: PduType,
    /// Which field, as the specification calls it.
    pub field: &'static str,
    /// What is refused.
    pub refused: &'static str,
    /// With which FES.
    pub status: FatalStatus,
    /// With which FEI; `None` where it is no offset.
    pub offset: Option<u8>,
    /// Who knows.
    pub judge: Judge,
    /// Where it is written.
    pub section: &'static str,
}

/// Who knows whether a field is to be refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judge {
    /// Whoever sees the header.
    Header,
    /// Whoever knows what came before.
    Connection,
}

/// Rows of one unit.
macro_rules! rules {
    ($( $pdu:ident $section:literal {
        $( $judge:ident $field:literal $refused:literal => $status:ident $($offset:ident)?; )+
    } )+) => {
        /// The table.
        pub static RULES: &[Rule] = &[$($(
            Rule {
                pdu: PduType::$pdu,
                field: $field,
                refused: $refused,
                status: FatalStatus::$status,
                offset: rules!(@offset $($offset)?),
                judge: Judge::$judge,
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
        Header "DGST" "a digest that was not asked for" => InvalidHeaderField DGST;
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
        Connection "PDU-Type" "before ICResp, or for a command whose data are not to be asked for"
            => SequenceError;
        Connection "HDGST" "not that of the header" => HeaderDigestError;
    }
}
