//! Persistent record of reservations.
//!
//! ```text
//!   "TMLRSV03" │ generation u32 │ type u8 │ holder: host │ count u16 │ registrant × count │ CRC-32C
//!   registrant: host │ key u64 │ NQN: length u8, bytes of UTF-8; length 255 if unknown
//!   host: kind u8 (0 none, 1 short, 2 extended) │ identifier u128
//! ```
//!
//! All numbers are little-endian. "TMLRSV02" has no NQNs, and "TMLRSV01" additionally has the extended
//! identifiers in reverse byte order. These records can be read, and the next change writes the current
//! format. Hosts without an identifier are not stored, because they cannot return.

use std::collections::BTreeMap;
use tenmil_base::Error;

use tenmil_wire::tcp::crc32c;

use super::{
    ActiveReservation, HostId, HostNqn, REGISTRANTS_MAX, Registrant, Reservations,
    is_all_registrants_type,
};
use crate::namespace::ReservationKind;

const MAGIC: [u8; 8] = *b"TMLRSV03";
const MAGIC_WITHOUT_NQNS: [u8; 8] = *b"TMLRSV02";
const MAGIC_REVERSED: [u8; 8] = *b"TMLRSV01";
const NO_HOLDER: u8 = 0;
const SHORT: u8 = 1;
const EXTENDED: u8 = 2;
/// Length that marks an unknown NQN.
const NQN_UNKNOWN: u8 = u8::MAX;

impl Reservations {
    /// Encodes the reservations.
    pub(super) fn to_record(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.generation.to_le_bytes());
        let is_persistent_host = |host: &HostId| !matches!(host, HostId::Anonymous(_));
        let persistable = || self.registrants.iter().filter(|(host, _)| is_persistent_host(host));
        let is_persistable = |held: &ActiveReservation| match held.holder {
            Some(holder) => is_persistent_host(&holder),
            None => persistable().next().is_some(),
        };
        let held = self.active.filter(is_persistable);
        bytes.push(held.map_or(0, |held| held.kind as u8));
        encode_host_id(held.and_then(|held| held.holder), &mut bytes);
        let count = u16::try_from(persistable().count()).unwrap_or(u16::MAX);
        bytes.extend(count.to_le_bytes());
        for (host, Registrant { key, nqn, .. }) in persistable() {
            encode_host_id(Some(*host), &mut bytes);
            bytes.extend(key.to_le_bytes());
            encode_nqn(nqn.as_ref(), &mut bytes);
        }
        let digest = crc32c(&bytes);
        bytes.extend(digest.to_le_bytes());
        bytes
    }

    /// Decodes a record. The error has the value found and the value expected.
    pub(in crate::controller) fn from_record(record: &[u8]) -> Result<Self, Error> {
        let (bytes, digest) =
            record.split_last_chunk().ok_or("it is too short").map_err(Error::environment)?;
        let (found, expected) = (crc32c(bytes), u32::from_le_bytes(*digest));
        if found != expected {
            return Err(Error::environment(format!(
                "its CRC-32C is {found:08x}, expected {expected:08x}"
            )));
        }
        let mut rest = bytes;
        let (is_reversed, has_nqns) = match split_off_array::<8>(&mut rest)? {
            MAGIC => (false, true),
            MAGIC_WITHOUT_NQNS => (false, false),
            MAGIC_REVERSED => (true, false),
            _ => {
                return Err(Error::environment(
                    "it does not begin with TMLRSV01 to TMLRSV03".to_owned(),
                ));
            }
        };
        let read_host = |rest: &mut &[u8]| {
            decode_host_id(rest).map(|host| match host {
                Some(HostId::Extended(id)) if is_reversed => {
                    Some(HostId::Extended(id.swap_bytes()))
                }
                host => host,
            })
        };
        let generation = u32::from_le_bytes(split_off_array(&mut rest)?);
        let [code] = split_off_array(&mut rest)?;
        let holder = read_host(&mut rest)?;
        let kind = ReservationKind::from_code(code);
        let held = match (code, kind) {
            (0, _) => None,
            (_, None) => {
                return Err(Error::environment(format!("its type is {code}, expected 0 to 6")));
            }
            // The all-registrants types have no single holder; all other types have one.
            (_, Some(kind)) if holder.is_none() != is_all_registrants_type(kind) => {
                let held = if holder.is_none() { "no host" } else { "one host" };
                let text = format!("a reservation of type {code} is held by {held}");
                return Err(Error::environment(format!("{text}, expected the other")));
            }
            (_, Some(kind)) => Some(ActiveReservation { kind, holder }),
        };
        let count = u16::from_le_bytes(split_off_array(&mut rest)?);
        let mut registrants = BTreeMap::new();
        for _ in 0..count {
            let host = read_host(&mut rest)?
                .ok_or("a registrant has no identifier")
                .map_err(Error::environment)?;
            let key = u64::from_le_bytes(split_off_array(&mut rest)?);
            let nqn = if has_nqns { decode_nqn(&mut rest)? } else { None };
            registrants.insert(host, Registrant { key, nqn, origin: None });
        }
        if !rest.is_empty() || registrants.len() > REGISTRANTS_MAX {
            return Err(Error::environment(format!(
                "{} bytes follow {} registrants, expected none and at most {REGISTRANTS_MAX}",
                rest.len(),
                registrants.len()
            )));
        }
        let is_orphaned = holder.is_some_and(|holder| !registrants.contains_key(&holder));
        if held.is_some() && (is_orphaned || registrants.is_empty()) {
            return Err(Error::environment("its holder is not registered".to_owned()));
        }
        Ok(Self { registrants, active: held, generation, persists_through_power_loss: true })
    }
}

fn encode_host_id(host: Option<HostId>, bytes: &mut Vec<u8>) {
    let (kind, id) = match host {
        None | Some(HostId::Anonymous(_)) => (NO_HOLDER, 0),
        Some(HostId::Short(id)) => (SHORT, id.into()),
        Some(HostId::Extended(id)) => (EXTENDED, id),
    };
    bytes.push(kind);
    bytes.extend(id.to_le_bytes());
}

fn decode_host_id(rest: &mut &[u8]) -> Result<Option<HostId>, Error> {
    let [kind] = split_off_array(rest)?;
    let id = u128::from_le_bytes(split_off_array(rest)?);
    match (kind, u64::try_from(id)) {
        (NO_HOLDER, Ok(0)) => Ok(None),
        (SHORT, Ok(id)) => Ok(Some(HostId::Short(id))),
        (EXTENDED, _) => Ok(Some(HostId::Extended(id))),
        _ => Err(Error::environment(format!(
            "a host is {kind}, {id:x}, expected none, a short or an extended one"
        ))),
    }
}

/// Encodes an NQN. A name longer than the maximum is stored as unknown: no host can use it.
fn encode_nqn(nqn: Option<&HostNqn>, bytes: &mut Vec<u8>) {
    let len = nqn.and_then(|nqn| u8::try_from(nqn.len()).ok()).filter(|len| *len != NQN_UNKNOWN);
    bytes.push(len.unwrap_or(NQN_UNKNOWN));
    bytes.extend(nqn.filter(|_| len.is_some()).into_iter().flat_map(|nqn| nqn.bytes()));
}

fn decode_nqn(rest: &mut &[u8]) -> Result<Option<HostNqn>, Error> {
    let [len] = split_off_array(rest)?;
    if len == NQN_UNKNOWN {
        return Ok(None);
    }
    let (name, others) =
        rest.split_at_checked(len.into()).ok_or("it ends too early").map_err(Error::environment)?;
    *rest = others;
    let name = core::str::from_utf8(name)
        .map_err(|_| "the NQN of a registrant is not UTF-8")
        .map_err(Error::environment)?;
    Ok(Some(HostNqn::from(name)))
}

fn split_off_array<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], Error> {
    let (first, others) =
        rest.split_first_chunk().ok_or("it ends too early").map_err(Error::environment)?;
    *rest = others;
    Ok(*first)
}

#[cfg(test)]
mod tests {
    use super::{EXTENDED, HostId, HostNqn, ReservationKind, Reservations, crc32c};

    /// Two registrants, one of which holds the reservation.
    fn sample_reservations(kind: ReservationKind) -> Reservations {
        let mut reservations = Reservations::default();
        let nqn = HostNqn::from("nqn.2026-01.org.tenmil:host");
        reservations.register(HostId::Extended(7), Some(&nqn), 1).unwrap();
        reservations.register(HostId::Short(8), None, 2).unwrap();
        reservations.acquire(HostId::Extended(7), 1, kind).unwrap();
        reservations.set_persists_through_power_loss(true);
        reservations
    }

    #[test]
    fn persistent_reservation_record_round_trips() {
        for code in 1..=6 {
            let before = sample_reservations(ReservationKind::from_code(code).unwrap());
            assert_eq!(Reservations::from_record(&before.to_record()), Ok(before));
        }
        let mut none = Reservations::default();
        none.set_persists_through_power_loss(true);
        assert_eq!(Reservations::from_record(&none.to_record()), Ok(none));
    }

    #[test]
    fn anonymous_hosts_are_not_recorded() {
        let mut reservations = sample_reservations(ReservationKind::WriteExclusive);
        let without = reservations.to_record();
        reservations.register(HostId::Anonymous(1), None, 3).unwrap();
        let with = Reservations::from_record(&reservations.to_record()).unwrap();
        assert_eq!(with.registrants, Reservations::from_record(&without).unwrap().registrants);
    }

    #[test]
    fn version_1_record_is_read_with_its_host_identifiers() {
        let id = *b"0123456789abcdef";
        // One registrant, which holds the reservation.
        let record = |magic: &[u8; 8], id: [u8; 16], nqn: &[u8]| {
            let host = [&[EXTENDED][..], &id].concat();
            let key = 5_u64.to_le_bytes();
            let bytes = [&magic[..], &[1, 0, 0, 0, 1], &host, &[1, 0], &host, &key, nqn].concat();
            let digest = crc32c(&bytes).to_le_bytes();
            [bytes, digest.to_vec()].concat()
        };
        let now = record(b"TMLRSV03", id, &[255]);
        let old = record(b"TMLRSV02", id, &[]);
        let oldest = record(b"TMLRSV01", core::array::from_fn(|at| id[15 - at]), &[]);
        let read = Reservations::from_record(&oldest).unwrap();
        assert_eq!(Reservations::from_record(&old), Ok(read.clone()));
        assert_eq!(Reservations::from_record(&now), Ok(read.clone()));
        assert_eq!(read.to_record(), now);
        assert!(Reservations::from_record(&record(b"TMLRSV04", id, &[255])).is_err());
        let named = record(b"TMLRSV03", id, b"\x03abc");
        let read = Reservations::from_record(&named).unwrap();
        assert_eq!(read.nqn_of(HostId::Extended(u128::from_le_bytes(id))).unwrap().as_ref(), "abc");
        assert_eq!(read.to_record(), named);
        for nqn in [&b"\x04abc"[..], b"\x02abc", b"\x01\xff"] {
            assert!(Reservations::from_record(&record(b"TMLRSV03", id, nqn)).is_err(), "{nqn:?}");
        }
    }

    #[test]
    fn truncated_or_modified_record_is_rejected() {
        let record = sample_reservations(ReservationKind::ExclusiveAccess).to_record();
        for len in 0..record.len() {
            assert!(Reservations::from_record(&record[..len]).is_err(), "{len} bytes");
        }
        for at in 0..record.len() {
            let mut changed = record.clone();
            changed[at] ^= 0x10;
            assert!(Reservations::from_record(&changed).is_err(), "byte {at}");
        }
    }
}
