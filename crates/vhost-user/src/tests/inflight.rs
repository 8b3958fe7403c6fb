//! Inflight record, and its recovery by another process.

use tenmil_base::{RegionId, Segment};

use super::GuestBytes;
use crate::inflight::{InflightError, InflightLog, stride_bytes};

const SIZE: u16 = 4;
const AT: u64 = 0x40;

fn inflight_segment() -> Segment {
    Segment { region: RegionId(0), offset: AT, len_bytes: stride_bytes(SIZE) }
}

fn open_inflight_log(
    memory: &GuestBytes,
    used: u16,
) -> Result<(InflightLog<GuestBytes>, Vec<u16>), InflightError> {
    InflightLog::open(memory.clone(), inflight_segment(), SIZE, used)
}

#[test]
fn inflight_log_has_the_layout_of_the_protocol() {
    let memory = GuestBytes::new();
    let (mut record, heads) = open_inflight_log(&memory, 0x100).unwrap();
    assert!(heads.is_empty());
    // Features, version, entries, last of the batch, used index.
    let header = [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 4, 0, 0, 0, 0, 1];
    assert_eq!(memory.read_bytes(AT), header);
    record.mark_in_flight(2).unwrap();
    record.mark_in_flight(1).unwrap();
    assert_eq!(memory.read_bytes(AT + 48), [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(memory.read_bytes(AT + 32), [1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    record.add_to_batch(1).unwrap();
    record.add_to_batch(2).unwrap();
    // Each head is linked to the previous one, and still marked as in flight.
    assert_eq!(memory.read_bytes(AT + 48), [1, 0, 0, 0, 0, 0, 1, 0]);
    assert_eq!(memory.read_bytes(AT + 12), [2, 0, 0, 1]);
    record.publish_batch(0x102).unwrap();
    assert_eq!((memory.read_bytes(AT + 48), memory.read_bytes(AT + 32)), ([0], [0]));
    assert_eq!(memory.read_bytes(AT + 12), [2, 0, 2, 1]);
}

#[test]
fn chains_in_flight_are_recovered_in_order() {
    let memory = GuestBytes::new();
    let (mut record, _) = open_inflight_log(&memory, 7).unwrap();
    for head in [3, 0, 2, 1] {
        record.mark_in_flight(head).unwrap();
    }
    record.add_to_batch(0).unwrap();
    record.publish_batch(8).unwrap();
    drop(record);
    let (mut record, heads) = open_inflight_log(&memory, 8).unwrap();
    assert_eq!(heads, [3, 2, 1]);
    // The next head is newer than all of them.
    record.mark_in_flight(0).unwrap();
    let (_, heads) = open_inflight_log(&memory, 8).unwrap();
    assert_eq!(heads, [3, 2, 1, 0]);
}

#[test]
fn interrupted_batch_is_unmarked_on_reopen() {
    let memory = GuestBytes::new();
    let (mut record, _) = open_inflight_log(&memory, 0xffff).unwrap();
    for head in [0, 1, 2] {
        record.mark_in_flight(head).unwrap();
    }
    record.add_to_batch(2).unwrap();
    record.add_to_batch(0).unwrap();
    // The process was killed after the used ring was written.
    let (_, heads) = open_inflight_log(&memory, 1).unwrap();
    assert_eq!(heads, [1]);
    let (_, heads) = open_inflight_log(&memory, 1).unwrap();
    assert_eq!(heads, [1], "and once more");
}

#[test]
fn inflight_log_is_empty_after_a_driver_restart() {
    let memory = GuestBytes::new();
    let (mut record, _) = open_inflight_log(&memory, 0).unwrap();
    record.mark_in_flight(1).unwrap();
    record.add_to_batch(1).unwrap();
    record.publish_batch(1000).unwrap();
    let (_, heads) = open_inflight_log(&memory, 0).unwrap();
    assert!(heads.is_empty());
}

#[test]
fn invalid_inflight_log_is_rejected() {
    let of = |at: u64, bytes: &[u8]| {
        let memory = GuestBytes::new();
        let (mut record, _) = open_inflight_log(&memory, 0).unwrap();
        record.mark_in_flight(1).unwrap();
        memory.write_bytes(AT + at, bytes);
        open_inflight_log(&memory, 0).map(|(_, heads)| heads)
    };
    assert_eq!(of(8, &[2]), Err(InflightError::Version(2)));
    assert_eq!(of(10, &[5]), Err(InflightError::Entries(5)));
    assert_eq!(of(12, &[9, 0, 0xff, 0xff]), Err(InflightError::List(9)));
    assert_eq!(of(14, &[0, 1]), Err(InflightError::List(0xff00)));
    // One more than the number of descriptors.
    assert_eq!(of(14, &[0xfb, 0xff]), Err(InflightError::List(5)));
    // A list that forms a loop, and one with an index out of range.
    assert_eq!(of(12, &[1, 0, 0xfc, 0xff]), Ok(vec![]));
    let (memory, short) = (GuestBytes::new(), Segment { len_bytes: 20, ..inflight_segment() });
    let _ = InflightLog::open(memory.clone(), short, SIZE, 0).unwrap();
    let again = InflightLog::open(memory, short, SIZE, 0).map(|(_, heads)| heads);
    assert_eq!(again, Err(InflightError::Unmapped), "it is shorter than its queue");
}
