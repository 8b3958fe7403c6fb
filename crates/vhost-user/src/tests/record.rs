//! Inflight record, and its recovery by another process.

use tenmil_base::{RegionId, Segment};

use super::Bytes;
use crate::inflight::{InflightError, InflightLog, stride_bytes};

const SIZE: u16 = 4;
const AT: u64 = 0x40;

fn place() -> Segment {
    Segment { region: RegionId(0), offset: AT, len_bytes: stride_bytes(SIZE) }
}

fn open(memory: &Bytes, used: u16) -> Result<(InflightLog<Bytes>, Vec<u16>), InflightError> {
    InflightLog::open(memory.clone(), place(), SIZE, used)
}

#[test]
fn a_record_lies_in_memory_as_the_protocol_draws_it() {
    let memory = Bytes::new();
    let (mut record, heads) = open(&memory, 0x100).unwrap();
    assert!(heads.is_empty());
    // Features, version, entries, last of the batch, used index.
    let header = [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 4, 0, 0, 0, 0, 1];
    assert_eq!(memory.get(AT), header);
    record.begin(2).unwrap();
    record.begin(1).unwrap();
    assert_eq!(memory.get(AT + 48), [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(memory.get(AT + 32), [1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    record.push(1).unwrap();
    record.push(2).unwrap();
    // Each head is linked to the previous one, and still marked as in flight.
    assert_eq!(memory.get(AT + 48), [1, 0, 0, 0, 0, 0, 1, 0]);
    assert_eq!(memory.get(AT + 12), [2, 0, 0, 1]);
    record.publish(0x102).unwrap();
    assert_eq!((memory.get(AT + 48), memory.get(AT + 32)), ([0], [0]));
    assert_eq!(memory.get(AT + 12), [2, 0, 2, 1]);
}

#[test]
fn what_was_taken_and_not_used_is_found_again_oldest_first() {
    let memory = Bytes::new();
    let (mut record, _) = open(&memory, 7).unwrap();
    for head in [3, 0, 2, 1] {
        record.begin(head).unwrap();
    }
    record.push(0).unwrap();
    record.publish(8).unwrap();
    drop(record);
    let (mut record, heads) = open(&memory, 8).unwrap();
    assert_eq!(heads, [3, 2, 1]);
    // The next head is newer than all of them.
    record.begin(0).unwrap();
    let (_, heads) = open(&memory, 8).unwrap();
    assert_eq!(heads, [3, 2, 1, 0]);
}

#[test]
fn marks_of_a_batch_that_the_driver_saw_are_taken_away_by_the_next() {
    let memory = Bytes::new();
    let (mut record, _) = open(&memory, 0xffff).unwrap();
    for head in [0, 1, 2] {
        record.begin(head).unwrap();
    }
    record.push(2).unwrap();
    record.push(0).unwrap();
    // The process was killed after the used ring was written.
    let (_, heads) = open(&memory, 1).unwrap();
    assert_eq!(heads, [1]);
    let (_, heads) = open(&memory, 1).unwrap();
    assert_eq!(heads, [1], "and once more");
}

#[test]
fn a_driver_that_began_anew_finds_a_record_with_nothing_in_it() {
    let memory = Bytes::new();
    let (mut record, _) = open(&memory, 0).unwrap();
    record.begin(1).unwrap();
    record.push(1).unwrap();
    record.publish(1000).unwrap();
    let (_, heads) = open(&memory, 0).unwrap();
    assert!(heads.is_empty());
}

#[test]
fn what_is_no_record_is_refused() {
    let of = |at: u64, bytes: &[u8]| {
        let memory = Bytes::new();
        let (mut record, _) = open(&memory, 0).unwrap();
        record.begin(1).unwrap();
        memory.put(AT + at, bytes);
        open(&memory, 0).map(|(_, heads)| heads)
    };
    assert_eq!(of(8, &[2]), Err(InflightError::Version(2)));
    assert_eq!(of(10, &[5]), Err(InflightError::Entries(5)));
    assert_eq!(of(12, &[9, 0, 0xff, 0xff]), Err(InflightError::List(9)));
    assert_eq!(of(14, &[0, 1]), Err(InflightError::List(0xff00)));
    // One more than the number of descriptors.
    assert_eq!(of(14, &[0xfb, 0xff]), Err(InflightError::List(5)));
    // A list that forms a loop, and one with an index out of range.
    assert_eq!(of(12, &[1, 0, 0xfc, 0xff]), Ok(vec![]));
    let (memory, short) = (Bytes::new(), Segment { len_bytes: 20, ..place() });
    let _ = InflightLog::open(memory.clone(), short, SIZE, 0).unwrap();
    let again = InflightLog::open(memory, short, SIZE, 0).map(|(_, heads)| heads);
    assert_eq!(again, Err(InflightError::Unmapped), "it is shorter than its queue");
}
