//! Handshake messages after the handshake (RFC 8446 §4.6): KeyUpdate and NewSessionTicket.
//!
//! ```text
//!  | type : 1 | length : 3 | body |        KeyUpdate  | 24 | 0 0 1 | request : 1 |
//! ```

use super::Side;
use crate::record::RecordViolation;

/// Incremental parser of messages, which may be split over records.
pub(super) struct PostHandshake {
    side: Side,
    awaited: Awaited,
}

/// Next element of the messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaited {
    /// Bytes of the header so far.
    Header { filled: usize, header: [u8; MESSAGE_HEADER_BYTES] },
    /// Request of a KeyUpdate.
    Request,
    /// Body of a NewSessionTicket, which is skipped.
    Ticket { left_bytes: usize },
}

/// KeyUpdate of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KeyUpdate {
    /// Whether the peer requests one of ours.
    pub(super) is_request: bool,
}

const MESSAGE_HEADER_BYTES: usize = 4;
const MESSAGE_NEW_SESSION_TICKET: u8 = 4;
const MESSAGE_KEY_UPDATE: u8 = 24;
/// Largest NewSessionTicket (RFC 8446 §4.6.1): lifetime and age, nonce, ticket, extensions.
const TICKET_BYTES_MAX: usize = 8 + (1 + 0xff) + (2 + 0xffff) + (2 + 0xffff);

/// Length of a KeyUpdate.
pub(super) const KEY_UPDATE_BYTES: usize = MESSAGE_HEADER_BYTES + 1;

/// KeyUpdate that requests one of the peer, if `request` is 1, or none, if it is 0.
pub(super) const fn key_update(request: u8) -> [u8; KEY_UPDATE_BYTES] {
    [MESSAGE_KEY_UPDATE, 0, 0, 1, request]
}

impl PostHandshake {
    pub(super) const fn new(side: Side) -> Self {
        Self { side, awaited: Awaited::START }
    }

    /// Whether a message has begun and not ended.
    pub(super) fn is_within_message(&self) -> bool {
        self.awaited != Awaited::START
    }

    /// Parses the content of a record. Returns the KeyUpdate at its end, if there is one: the next record
    /// has the next key.
    ///
    /// # Errors
    ///
    /// If a message is not permitted, or the record does not end with a KeyUpdate.
    pub(super) fn parse(&mut self, content: &[u8]) -> Result<Option<KeyUpdate>, RecordViolation> {
        let mut rest = content;
        while let Some((&byte, behind)) = rest.split_first() {
            rest = behind;
            match &mut self.awaited {
                Awaited::Header { filled, header } => {
                    header[*filled] = byte;
                    *filled += 1;
                    if *filled == MESSAGE_HEADER_BYTES {
                        self.awaited = Awaited::after(*header, self.side)?;
                    }
                }
                Awaited::Request => {
                    self.awaited = Awaited::START;
                    let is_request = match byte {
                        0 => false,
                        1 => true,
                        _ => return Err(RecordViolation::KeyUpdateRequest(byte)),
                    };
                    if !rest.is_empty() {
                        return Err(RecordViolation::MessageSpansKeys);
                    }
                    return Ok(Some(KeyUpdate { is_request }));
                }
                Awaited::Ticket { left_bytes } => {
                    // This byte, and those that follow it.
                    let count = rest.len().min(*left_bytes - 1);
                    rest = &rest[count..];
                    *left_bytes -= 1 + count;
                    if *left_bytes == 0 {
                        self.awaited = Awaited::START;
                    }
                }
            }
        }
        Ok(None)
    }
}

impl Awaited {
    const START: Self = Self::Header { filled: 0, header: [0; MESSAGE_HEADER_BYTES] };

    /// State after the header of a message.
    fn after(header: [u8; MESSAGE_HEADER_BYTES], side: Side) -> Result<Self, RecordViolation> {
        let [kind, high, mid, low] = header;
        let len = u32::from_be_bytes([0, high, mid, low]) as usize;
        match kind {
            MESSAGE_KEY_UPDATE if len == 1 => Ok(Self::Request),
            MESSAGE_NEW_SESSION_TICKET if side == Side::Client => match len {
                1..=TICKET_BYTES_MAX => Ok(Self::Ticket { left_bytes: len }),
                _ => Err(RecordViolation::MessageLength),
            },
            MESSAGE_KEY_UPDATE => Err(RecordViolation::MessageLength),
            _ => Err(RecordViolation::Message(kind)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{KeyUpdate, PostHandshake, Side, TICKET_BYTES_MAX};
    use crate::record::RecordViolation;

    fn parse(side: Side, records: &[&[u8]]) -> Result<Option<KeyUpdate>, RecordViolation> {
        let mut parser = PostHandshake::new(side);
        let mut last = Ok(None);
        for record in records {
            assert_eq!(last, Ok(None));
            last = parser.parse(record);
        }
        assert!(last.is_err() || last == Ok(None) || !parser.is_within_message());
        last
    }

    #[test]
    fn key_updates_may_be_split_and_end_their_record() {
        for side in [Side::Client, Side::Server] {
            for (request, is_request) in [(0, false), (1, true)] {
                let message = [24, 0, 0, 1, request];
                let expected = Ok(Some(KeyUpdate { is_request }));
                assert_eq!(parse(side, &[&message]), expected);
                for cut in 1..5 {
                    assert_eq!(parse(side, &[&message[..cut], &message[cut..]]), expected);
                }
            }
            let spans = Err(RecordViolation::MessageSpansKeys);
            assert_eq!(parse(side, &[&[24, 0, 0, 1, 0, 24]]), spans);
            let request = Err(RecordViolation::KeyUpdateRequest(2));
            assert_eq!(parse(side, &[&[24, 0, 0, 1, 2]]), request);
            let length = Err(RecordViolation::MessageLength);
            assert_eq!(parse(side, &[&[24, 0, 0, 0]]), length);
            assert_eq!(parse(side, &[&[24, 0, 0, 2]]), length);
        }
    }

    #[test]
    fn tickets_are_skipped_by_clients_and_other_messages_refused() {
        let ticket = [&[4, 0, 1, 0][..], &[24; 256]].concat();
        assert_eq!(parse(Side::Server, &[&ticket]), Err(RecordViolation::Message(4)));
        assert_eq!(parse(Side::Client, &[&ticket]), Ok(None));
        let parts: Vec<&[u8]> = ticket.chunks(7).collect();
        assert_eq!(parse(Side::Client, &parts), Ok(None));
        let followed = [&ticket[..], &ticket, &[24, 0, 0, 1, 1]].concat();
        let expected = Ok(Some(KeyUpdate { is_request: true }));
        assert_eq!(parse(Side::Client, &[&followed]), expected);
        let mut parser = PostHandshake::new(Side::Client);
        assert_eq!(parser.parse(&ticket[..259]), Ok(None));
        assert!(parser.is_within_message());
        assert_eq!(parser.parse(&ticket[259..]), Ok(None));
        assert!(!parser.is_within_message());
        let [_, high, mid, low] = u32::try_from(TICKET_BYTES_MAX + 1).unwrap().to_be_bytes();
        for header in [[4, high, mid, low], [4, 0, 0, 0]] {
            assert_eq!(parse(Side::Client, &[&header]), Err(RecordViolation::MessageLength));
        }
        for kind in (0..=255).filter(|kind| ![4, 24].contains(kind)) {
            for side in [Side::Client, Side::Server] {
                let expected = Err(RecordViolation::Message(kind));
                assert_eq!(parse(side, &[&[kind, 0, 0, 1, 0]]), expected);
            }
        }
    }
}
