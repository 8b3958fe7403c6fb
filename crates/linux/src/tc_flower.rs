//! tc flower filters of a network card, read as `tc filter show` does.
//!
//! ```text
//!   request     nlmsghdr : 16 | tcmsg : 20                   for ingress filters
//!   reply       nlmsghdr : 16 | tcmsg : 20 | attributes      one message per filter
//!   attribute   length : 2 | type : 2 | value, padded to a multiple of 4
//! ```
//!
//! (`linux/rtnetlink.h`, `linux/pkt_cls.h`.) The query changes nothing and needs no privilege.

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recvfrom, sendto, socket_with,
};

use crate::Errno;

/// Flower filter, reduced to the relevant fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowerFilter {
    /// Matched TCP destination port, if any.
    pub tcp_port: Option<u16>,
    /// Hardware traffic class (queue set) selected, if any.
    pub queue_set: Option<u32>,
}

const GET: u16 = 46;
const NEW: u16 = 44;
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// Request flags: dump all.
const ALL: u16 = 0x301;
const HEADER: usize = 16;
const TRAFFIC: usize = 20;
/// Ingress parent (`TC_H_CLSACT`, `TC_H_MIN_INGRESS`).
const INGRESS: u32 = 0xffff_fff2;
/// Class of the first queue set (`TC_H_MIN_PRIORITY`).
const FIRST_SET: u32 = 0xffe0;

const KIND: u16 = 1;
const OPTIONS: u16 = 2;
const FLOWER_CLASS: u16 = 1;
const FLOWER_TCP_PORT: u16 = 19;
/// Type bits of an attribute's type field.
const TYPE_MASK: u16 = 0x3fff;
/// Maximum size of one reply part (`NLMSG_GOODSIZE`, and larger dumps).
const PART_MAX: usize = 32 << 10;
/// Maximum number of reply parts, far above any real number of filters.
const PARTS_MAX: usize = 4096;

/// Reads the filters of the card with this interface index.
pub fn flower_filters(card: u32) -> Result<Vec<FlowerFilter>, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    // Protocol 0 is NETLINK_ROUTE.
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
    sendto(
        &socket,
        &encode_filter_request(card),
        SendFlags::empty(),
        &SocketAddrNetlink::new(0, 0),
    )?;
    let (mut found, mut part) = (Vec::new(), vec![0; PART_MAX]);
    for _ in 0..PARTS_MAX {
        // The kernel produces the next part during the receive call, so this does not block.
        let (_, len, _) = recvfrom(&socket, &mut *part, RecvFlags::TRUNC)?;
        let message = part.get(..len).ok_or(Errno::MSGSIZE)?;
        if parse_reply_part(message, &mut found)? {
            return Ok(found);
        }
    }
    Err(Errno::MSGSIZE)
}

fn encode_filter_request(card: u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + TRAFFIC);
    bytes.extend_from_slice(&36_u32.to_ne_bytes());
    bytes.extend_from_slice(&GET.to_ne_bytes());
    bytes.extend_from_slice(&ALL.to_ne_bytes());
    // Sequence number and port identifier, then the family: unspecified.
    for word in [1, 0, 0, card, 0, INGRESS, 0] {
        bytes.extend_from_slice(&u32::to_ne_bytes(word));
    }
    bytes
}

/// Parses the filters of one reply part; returns whether it was the last part.
fn parse_reply_part(mut part: &[u8], found: &mut Vec<FlowerFilter>) -> Result<bool, Errno> {
    while let Some(header) = part.first_chunk::<HEADER>() {
        let len = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) as usize;
        let body = part.get(HEADER..len).ok_or(Errno::BADMSG)?;
        match u16::from_ne_bytes([header[4], header[5]]) {
            DONE => return Ok(true),
            ERROR => return parse_error_message(body),
            NEW => found.extend(body.get(TRAFFIC..).and_then(parse_flower)),
            _ => {}
        }
        part = part.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

fn parse_error_message(body: &[u8]) -> Result<bool, Errno> {
    let number = body.first_chunk().map_or(0, |bytes| i32::from_ne_bytes(*bytes));
    match number {
        0 => Ok(true),
        number => Err(Errno::from_raw_os_error(number.saturating_neg())),
    }
}

/// Parses the action of a flower filter. A filter without options is the head of a list.
fn parse_flower(attributes: &[u8]) -> Option<FlowerFilter> {
    let find = |wanted| NetlinkAttributes(attributes).find(|(kind, _)| *kind == wanted);
    let (_, kind) = find(KIND)?;
    let (_, options) = find(OPTIONS)?;
    let mut flower = (kind == b"flower\0").then(FlowerFilter::default)?;
    for (kind, value) in NetlinkAttributes(options) {
        match (kind, value) {
            (FLOWER_TCP_PORT, [high, low]) => {
                flower.tcp_port = Some(u16::from_be_bytes([*high, *low]));
            }
            (FLOWER_CLASS, [a, b, c, d]) => {
                let class = u32::from_ne_bytes([*a, *b, *c, *d]) & 0xffff;
                flower.queue_set = class.checked_sub(FIRST_SET);
            }
            _ => {}
        }
    }
    Some(flower)
}

/// Iterator over attributes, as type and value. Ends at a malformed one.
struct NetlinkAttributes<'a>(&'a [u8]);

impl<'a> Iterator for NetlinkAttributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let [a, b, c, d] = *self.0.first_chunk()?;
        let len = usize::from(u16::from_ne_bytes([a, b]));
        let value = self.0.get(4..len)?;
        self.0 = self.0.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes([c, d]) & TYPE_MASK, value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let len = u16::try_from(4 + value.len()).unwrap();
        let mut bytes = [len.to_ne_bytes(), kind.to_ne_bytes()].concat();
        bytes.extend_from_slice(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn test_message(kind: u16, body: &[u8]) -> Vec<u8> {
        let len = u32::try_from(HEADER + body.len()).unwrap();
        let mut bytes = len.to_ne_bytes().to_vec();
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.resize(HEADER, 0);
        bytes.extend_from_slice(body);
        bytes
    }

    fn test_filter(kind: &str, options: Option<Vec<u8>>) -> Vec<u8> {
        let mut body = vec![0; TRAFFIC];
        body.extend(test_attribute(KIND, format!("{kind}\0").as_bytes()));
        // The chain, which is not evaluated.
        body.extend(test_attribute(11, &[0; 4]));
        body.extend(options.into_iter().flat_map(|options| test_attribute(OPTIONS, &options)));
        test_message(NEW, &body)
    }

    fn test_flower_filter(port: u16, set: u32) -> Vec<u8> {
        let mut options =
            test_attribute(FLOWER_CLASS, &(0xffff_0000 | (FIRST_SET + set)).to_ne_bytes());
        // IPv4, TCP.
        options.extend(test_attribute(8, &[8, 0]));
        options.extend(test_attribute(9, &[6]));
        options.extend(test_attribute(FLOWER_TCP_PORT, &port.to_be_bytes()));
        options
    }

    #[test]
    fn request_matches_the_netlink_format() {
        let bytes = encode_filter_request(7);
        let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!((bytes.len(), word(0), word(4)), (36, 36, u32::from(ALL) << 16 | 46));
        assert_eq!((word(20), word(28)), (7, 0xffff_fff2));
    }

    #[test]
    fn flower_filters_are_found_in_all_reply_parts() {
        let mut found = Vec::new();
        let first =
            [test_filter("flower", None), test_filter("flower", Some(test_flower_filter(4420, 1)))]
                .concat();
        assert_eq!(parse_reply_part(&first, &mut found), Ok(false));
        let any = test_filter("flower", Some(test_attribute(8, &[8, 0])));
        let second = [
            test_filter("u32", Some(test_flower_filter(4420, 1))),
            any,
            test_message(DONE, &[0; 4]),
        ]
        .concat();
        assert_eq!(parse_reply_part(&second, &mut found), Ok(true));
        let leads = FlowerFilter { tcp_port: Some(4420), queue_set: Some(1) };
        assert_eq!(found, [leads, FlowerFilter::default()]);
    }

    #[test]
    fn kernel_error_is_returned_and_a_truncated_message_rejected() {
        let mut found = Vec::new();
        let refused = test_message(ERROR, &(-19_i32).to_ne_bytes());
        assert_eq!(parse_reply_part(&refused, &mut found), Err(Errno::NODEV));
        let whole = test_filter("flower", Some(test_flower_filter(4420, 1)));
        for len in HEADER..whole.len() {
            assert_eq!(parse_reply_part(&whole[..len], &mut found), Err(Errno::BADMSG), "{len}");
        }
        assert_eq!(found, []);
        // An attribute with an excessive length ends the list.
        let mut bent = test_flower_filter(4420, 1);
        bent[0] = 200;
        assert_eq!(parse_reply_part(&test_filter("flower", Some(bent)), &mut found), Ok(false));
        assert_eq!(found, [FlowerFilter::default()]);
    }

    #[test]
    fn this_kernel_reports_no_filters_and_an_unknown_card() {
        // Where netlink is not available, the query fails.
        let Ok(none) = flower_filters(1) else { return };
        assert_eq!(none, [], "the loopback has none");
        let absent = flower_filters(0x7fff_fff0);
        assert!(absent.as_ref().map_or(true, Vec::is_empty), "{absent:?}");
    }
}
