//! Messages of DH-HMAC-CHAP (Base 2.2 §8.3.4.5), little-endian.
//!
//! ```text
//!            0    1    2    4     6    7    8      9      10      12       16
//! NEGOTIATE  type id   –    T_ID  SC_C NAPD descriptors of 64 bytes
//! CHALLENGE  type id   –    T_ID  HL   –    HashID DHgID  DHVLEN  SEQNUM   C1[HL] value[DHVLEN]
//! REPLY      type id   –    T_ID  HL   –    CVALID –      DHVLEN  SEQNUM   R1[HL] C2[HL] value
//! SUCCESS1   type id   –    T_ID  HL   –    RVALID –                       R2[HL]
//! SUCCESS2   type id   –    T_ID  –                                     16
//! FAILURE    type id   –    T_ID  RESCODE RESCODE_EXP
//!
//! descriptor  AUTHID 01, –, HALEN, DHLEN, hashes from byte 4, groups from byte 34
//! ```
//!
//! Their lengths vary, so they are functions and not layouts. Bytes after the end of a message are
//! ignored, because Authentication Receive transfers a buffer. Reserved bytes are ignored.

use core::fmt;

use tenmil_wire::TruncatedError;

use crate::{FailureReason, SecretBytes};

/// Security Protocol of Authentication Send and Receive (Base 2.2 §6.1).
pub const SECURITY_PROTOCOL: u8 = 0xe9;

/// Both Security Protocol Specific fields for DH-HMAC-CHAP (Base 2.2 §6.1).
pub const SECURITY_PROTOCOL_SPECIFIC: u8 = 1;

/// Length of the buffer of Authentication Receive. The longest CHALLENGE has 1104 bytes; Linux uses
/// as much.
pub const CHALLENGE_BUFFER_BYTES: usize = 4096;

const DESCRIPTOR_BYTES: usize = 64;
const DHCHAP: u8 = 1;
const IDS_MAX: usize = 30;
const HASHES_AT: usize = 4;
const GROUPS_AT: usize = HASHES_AT + IDS_MAX;
const VARIABLE_AT: usize = 16;
const SUCCESS2_BYTES: usize = 16;
const FAILURE_BYTES: usize = 8;
/// Only reason code of a failure: authentication failure.
const REASON_CODE: u8 = 1;

/// Types (byte 0) and identifiers (byte 1) of messages.
const NEGOTIATE: (u8, u8) = (0x00, 0x00);
const FAILURE2: (u8, u8) = (0x00, 0xf0);
const FAILURE1: (u8, u8) = (0x00, 0xf1);
const CHALLENGE: (u8, u8) = (0x01, 0x01);
const REPLY: (u8, u8) = (0x01, 0x02);
const SUCCESS1: (u8, u8) = (0x01, 0x03);
const SUCCESS2: (u8, u8) = (0x01, 0x04);

/// Message of DH-HMAC-CHAP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Host: offer of hash functions and groups.
    Negotiate(Negotiate),
    /// Controller: challenge for the host.
    Challenge(Challenge),
    /// Host: response, and its own challenge.
    Reply(Reply),
    /// Controller: the host is authenticated.
    Success1(Success1),
    /// Host: the controller is authenticated.
    Success2 {
        /// Transaction Identifier.
        transaction: u16,
    },
    /// Controller: the exchange has failed.
    Failure1(FailureMessage),
    /// Host: the exchange has failed.
    Failure2(FailureMessage),
}

/// Offer of a host. Identifiers may be unknown ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Negotiate {
    /// Transaction Identifier.
    pub transaction: u16,
    /// SC_C: secure channel concatenation.
    pub concatenation: u8,
    /// Offer for DH-HMAC-CHAP, or `None` if there are other protocols only.
    pub dhchap: Option<DescriptorLists>,
}

/// Authentication protocol descriptor of DH-HMAC-CHAP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DescriptorLists {
    /// Identifiers of hash functions, at most 30.
    pub hashes: Vec<u8>,
    /// Identifiers of groups, at most 30.
    pub groups: Vec<u8>,
}

/// Challenge of a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Challenge {
    /// Transaction Identifier.
    pub transaction: u16,
    /// Identifier of the hash function.
    pub hash: u8,
    /// Identifier of the group.
    pub group: u8,
    /// S1.
    pub sequence: u32,
    /// C1, as long as the hash function's output.
    pub challenge: Vec<u8>,
    /// g^x mod p, empty with the null group.
    pub public_value: Vec<u8>,
}

/// Response and challenge of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Transaction Identifier.
    pub transaction: u16,
    /// S2: 0 if the controller need not respond.
    pub sequence: u32,
    /// R1.
    pub response: SecretBytes,
    /// C2, as long as R1, if it is valid.
    pub challenge: Option<Vec<u8>>,
    /// g^y mod p, empty with the null group.
    pub public_value: Vec<u8>,
}

/// Success of a host, and response of a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Success1 {
    /// Transaction Identifier.
    pub transaction: u16,
    /// Length of the hash function's output.
    pub hash_len_bytes: u8,
    /// R2, if it is valid.
    pub response: Option<SecretBytes>,
}

/// Failure of an exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailureMessage {
    /// Transaction Identifier.
    pub transaction: u16,
    /// Reason code explanation.
    pub reason: FailureReason,
}

/// A message is malformed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageError {
    /// It is shorter than its fields require.
    Truncated(TruncatedError),
    /// It is of no known type.
    Unknown {
        /// AUTH_TYPE.
        kind: u8,
        /// AUTH_ID.
        id: u8,
    },
    /// A field has a value that is not permitted.
    Field {
        /// Message and field.
        field: &'static str,
        /// Value that was found.
        found: u32,
        /// Permitted values.
        expected: &'static str,
    },
}

impl MessageError {
    /// Reason to report to the peer.
    #[must_use]
    pub const fn reason(&self) -> FailureReason {
        match self {
            Self::Unknown { .. } => FailureReason::IncorrectMessage,
            Self::Truncated(_) | Self::Field { .. } => FailureReason::IncorrectPayload,
        }
    }
}

impl fmt::Display for MessageError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated(error) => error.fmt(out),
            Self::Unknown { kind, id } => {
                write!(out, "parse message: found type {kind:02x} and id {id:02x}, not known")
            }
            Self::Field { field, found, expected } => {
                write!(out, "parse {field}: found {found}, expected {expected}")
            }
        }
    }
}

impl core::error::Error for MessageError {}

impl From<TruncatedError> for MessageError {
    fn from(error: TruncatedError) -> Self {
        Self::Truncated(error)
    }
}

impl Message {
    /// Parses a message from the beginning of `bytes`.
    ///
    /// # Errors
    ///
    /// If `bytes` are too short, of an unknown type, or a field is not permitted.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        let fields = Fields { what: "message", bytes };
        fields.check(FAILURE_BYTES)?;
        let transaction = fields.u16(4)?;
        match (fields.u8(0)?, fields.u8(1)?) {
            NEGOTIATE => Negotiate::decode(transaction, bytes).map(Self::Negotiate),
            CHALLENGE => Challenge::decode(transaction, bytes).map(Self::Challenge),
            REPLY => Reply::decode(transaction, bytes).map(Self::Reply),
            SUCCESS1 => Success1::decode(transaction, bytes).map(Self::Success1),
            SUCCESS2 => {
                Fields { what: "SUCCESS2", bytes }.check(SUCCESS2_BYTES)?;
                Ok(Self::Success2 { transaction })
            }
            FAILURE1 => FailureMessage::decode(transaction, bytes).map(Self::Failure1),
            FAILURE2 => FailureMessage::decode(transaction, bytes).map(Self::Failure2),
            (kind, id) => Err(MessageError::Unknown { kind, id }),
        }
    }

    /// Bytes of the message. Lists of more than 30 identifiers are cut, and so is a challenge, a
    /// response or a public value that no length field can count.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Negotiate(message) => message.encode(),
            Self::Challenge(message) => message.encode(),
            Self::Reply(message) => message.encode(),
            Self::Success1(message) => message.encode(),
            Self::Success2 { transaction } => {
                let mut bytes = header(SUCCESS2, *transaction);
                bytes.resize(SUCCESS2_BYTES, 0);
                bytes
            }
            Self::Failure1(message) => message.encode(FAILURE1),
            Self::Failure2(message) => message.encode(FAILURE2),
        }
    }

    /// Transaction Identifier.
    #[must_use]
    pub const fn transaction(&self) -> u16 {
        match self {
            Self::Negotiate(message) => message.transaction,
            Self::Challenge(message) => message.transaction,
            Self::Reply(message) => message.transaction,
            Self::Success1(message) => message.transaction,
            Self::Success2 { transaction } => *transaction,
            Self::Failure1(message) | Self::Failure2(message) => message.transaction,
        }
    }

    /// Name in the specification.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Negotiate(_) => "NEGOTIATE",
            Self::Challenge(_) => "CHALLENGE",
            Self::Reply(_) => "REPLY",
            Self::Success1(_) => "SUCCESS1",
            Self::Success2 { .. } => "SUCCESS2",
            Self::Failure1(_) => "FAILURE1",
            Self::Failure2(_) => "FAILURE2",
        }
    }
}

impl Negotiate {
    fn decode(transaction: u16, bytes: &[u8]) -> Result<Self, MessageError> {
        let fields = Fields { what: "NEGOTIATE", bytes };
        let (concatenation, count) = (fields.u8(6)?, usize::from(fields.u8(7)?));
        let descriptors = fields.slice(8, count * DESCRIPTOR_BYTES)?;
        let dhchap = descriptors
            .chunks_exact(DESCRIPTOR_BYTES)
            .find(|descriptor| descriptor[0] == DHCHAP)
            .map(DescriptorLists::decode)
            .transpose()?;
        Ok(Self { transaction, concatenation, dhchap })
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = header(NEGOTIATE, self.transaction);
        bytes.extend([self.concatenation, u8::from(self.dhchap.is_some())]);
        if let Some(lists) = &self.dhchap {
            let mut descriptor = [0; DESCRIPTOR_BYTES];
            descriptor[0] = DHCHAP;
            descriptor[2] = put_ids(&mut descriptor[HASHES_AT..], &lists.hashes);
            descriptor[3] = put_ids(&mut descriptor[GROUPS_AT..], &lists.groups);
            bytes.extend(descriptor);
        }
        bytes
    }
}

impl DescriptorLists {
    fn decode(descriptor: &[u8]) -> Result<Self, MessageError> {
        let ids = |field, count: u8, at| {
            let fields = Fields { what: "descriptor", bytes: descriptor };
            if usize::from(count) > IDS_MAX {
                let (found, expected) = (u32::from(count), "at most 30");
                return Err(MessageError::Field { field, found, expected });
            }
            Ok(fields.slice(at, count.into())?.to_vec())
        };
        Ok(Self {
            hashes: ids("HALEN of NEGOTIATE", descriptor[2], HASHES_AT)?,
            groups: ids("DHLEN of NEGOTIATE", descriptor[3], GROUPS_AT)?,
        })
    }
}

impl Challenge {
    fn decode(transaction: u16, bytes: &[u8]) -> Result<Self, MessageError> {
        let fields = Fields { what: "CHALLENGE", bytes };
        let (hash_len, value_len) = (usize::from(fields.u8(6)?), usize::from(fields.u16(10)?));
        Ok(Self {
            transaction,
            hash: fields.u8(8)?,
            group: fields.u8(9)?,
            sequence: fields.u32(12)?,
            challenge: fields.slice(VARIABLE_AT, hash_len)?.to_vec(),
            public_value: fields.slice(VARIABLE_AT + hash_len, value_len)?.to_vec(),
        })
    }

    fn encode(&self) -> Vec<u8> {
        let (hash_len, challenge) = counted_u8(&self.challenge);
        let (value_len, value) = counted_u16(&self.public_value);
        let mut bytes = header(CHALLENGE, self.transaction);
        bytes.extend([hash_len, 0, self.hash, self.group]);
        bytes.extend(value_len.to_le_bytes());
        bytes.extend(self.sequence.to_le_bytes());
        bytes.extend_from_slice(challenge);
        bytes.extend_from_slice(value);
        bytes
    }
}

impl Reply {
    fn decode(transaction: u16, bytes: &[u8]) -> Result<Self, MessageError> {
        let fields = Fields { what: "REPLY", bytes };
        let (hash_len, value_len) = (usize::from(fields.u8(6)?), usize::from(fields.u16(10)?));
        let valid = fields.flag(8, "CVALID of REPLY")?;
        let response = fields.slice(VARIABLE_AT, hash_len)?;
        let challenge = fields.slice(VARIABLE_AT + hash_len, hash_len)?;
        Ok(Self {
            transaction,
            sequence: fields.u32(12)?,
            response: SecretBytes::new(response.to_vec()),
            challenge: valid.then(|| challenge.to_vec()),
            public_value: fields.slice(VARIABLE_AT + 2 * hash_len, value_len)?.to_vec(),
        })
    }

    fn encode(&self) -> Vec<u8> {
        let (hash_len, response) = counted_u8(self.response.expose());
        let (value_len, value) = counted_u16(&self.public_value);
        let mut bytes = header(REPLY, self.transaction);
        bytes.extend([hash_len, 0, u8::from(self.challenge.is_some()), 0]);
        bytes.extend(value_len.to_le_bytes());
        bytes.extend(self.sequence.to_le_bytes());
        bytes.extend_from_slice(response);
        let mut challenge = self.challenge.clone().unwrap_or_default();
        challenge.resize(response.len(), 0);
        bytes.extend_from_slice(&challenge);
        bytes.extend_from_slice(value);
        bytes
    }
}

impl Success1 {
    fn decode(transaction: u16, bytes: &[u8]) -> Result<Self, MessageError> {
        let fields = Fields { what: "SUCCESS1", bytes };
        fields.check(VARIABLE_AT)?;
        let hash_len_bytes = fields.u8(6)?;
        // Linux transfers no response if it is not valid.
        let response = if fields.flag(8, "RVALID of SUCCESS1")? {
            let response = fields.slice(VARIABLE_AT, hash_len_bytes.into())?;
            Some(SecretBytes::new(response.to_vec()))
        } else {
            None
        };
        Ok(Self { transaction, hash_len_bytes, response })
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = header(SUCCESS1, self.transaction);
        bytes.extend([self.hash_len_bytes, 0, u8::from(self.response.is_some())]);
        bytes.resize(VARIABLE_AT, 0);
        if let Some(response) = &self.response {
            bytes.extend_from_slice(response.expose());
        }
        bytes.resize(VARIABLE_AT + usize::from(self.hash_len_bytes), 0);
        bytes
    }
}

impl FailureMessage {
    fn decode(transaction: u16, bytes: &[u8]) -> Result<Self, MessageError> {
        let fields = Fields { what: "FAILURE", bytes };
        let code = fields.u8(6)?;
        if code != REASON_CODE {
            let (field, found, expected) = ("reason code of FAILURE", u32::from(code), "1");
            return Err(MessageError::Field { field, found, expected });
        }
        Ok(Self { transaction, reason: FailureReason::from_code(fields.u8(7)?) })
    }

    fn encode(&self, kind: (u8, u8)) -> Vec<u8> {
        let mut bytes = header(kind, self.transaction);
        bytes.extend([REASON_CODE, self.reason.code()]);
        bytes
    }
}

/// Bytes of a message, whose ends are checked.
struct Fields<'a> {
    what: &'static str,
    bytes: &'a [u8],
}

impl<'a> Fields<'a> {
    fn check(&self, need_bytes: usize) -> Result<(), TruncatedError> {
        TruncatedError::check_length(self.what, self.bytes.len(), need_bytes)
    }

    fn slice(&self, at: usize, len: usize) -> Result<&'a [u8], TruncatedError> {
        self.check(at + len)?;
        Ok(&self.bytes[at..at + len])
    }

    fn array<const N: usize>(&self, at: usize) -> Result<[u8; N], TruncatedError> {
        let mut array = [0; N];
        array.copy_from_slice(self.slice(at, N)?);
        Ok(array)
    }

    fn u8(&self, at: usize) -> Result<u8, TruncatedError> {
        self.array(at).map(u8::from_le_bytes)
    }

    fn u16(&self, at: usize) -> Result<u16, TruncatedError> {
        self.array(at).map(u16::from_le_bytes)
    }

    fn u32(&self, at: usize) -> Result<u32, TruncatedError> {
        self.array(at).map(u32::from_le_bytes)
    }

    fn flag(&self, at: usize, field: &'static str) -> Result<bool, MessageError> {
        match self.u8(at)? {
            0 => Ok(false),
            1 => Ok(true),
            other => {
                let (found, expected) = (u32::from(other), "0 or 1");
                Err(MessageError::Field { field, found, expected })
            }
        }
    }
}

/// First 6 bytes of a message.
fn header((kind, id): (u8, u8), transaction: u16) -> Vec<u8> {
    let [low, high] = transaction.to_le_bytes();
    vec![kind, id, 0, 0, low, high]
}

/// Stores identifiers and returns their number.
fn put_ids(field: &mut [u8], ids: &[u8]) -> u8 {
    let ids = &ids[..ids.len().min(IDS_MAX)];
    field[..ids.len()].copy_from_slice(ids);
    counted_u8(ids).0
}

fn counted_u8(bytes: &[u8]) -> (u8, &[u8]) {
    let count = u8::try_from(bytes.len()).unwrap_or(u8::MAX);
    (count, &bytes[..count.into()])
}

fn counted_u16(bytes: &[u8]) -> (u16, &[u8]) {
    let count = u16::try_from(bytes.len()).unwrap_or(u16::MAX);
    (count, &bytes[..count.into()])
}
