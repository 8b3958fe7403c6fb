//! A driver and its ring, valid and invalid.

use tenmil_base::Random;

use super::{Bytes, GUEST, MEMORY_BYTES, USER, space};
use crate::{Chain, GuestMemory, InvalidAddress, Ring, RingAddresses, RingError};

/// Offsets of the parts of the ring in memory.
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x1002;
const USED: u64 = 0x2000;
/// Area for tables and data.
const ROOM: u64 = 0x3000;
const SIZE: u16 = 8;

/// Descriptor, as a driver writes it.
#[derive(Clone, Copy, Debug)]
struct Entry {
    address: u64,
    len_bytes: u32,
    flags: u16,
    next: u16,
}

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Driver side of the ring.
struct Driver {
    memory: Bytes,
    index: u16,
}

impl Driver {
    fn new(first: u16) -> Self {
        let driver = Self { memory: Bytes::new(), index: first };
        driver.memory.put(AVAILABLE + 2, &first.to_le_bytes());
        driver.memory.put(USED + 2, &first.to_le_bytes());
        driver
    }

    fn ring(&self, has_event_index: bool) -> Ring<Bytes> {
        let addresses = [USER + DESCRIPTORS, USER + AVAILABLE, USER + USED];
        let place = RingAddresses::new(&space(), SIZE, addresses).unwrap();
        Ring::new(self.memory.clone(), place, self.index, has_event_index).unwrap()
    }

    fn describe(&self, at: u64, entry: Entry) {
        let Entry { address, len_bytes, flags, next } = entry;
        let tail = [flags, next].map(u16::to_le_bytes).concat();
        self.memory
            .put(at, &[&address.to_le_bytes()[..], &len_bytes.to_le_bytes(), &tail].concat());
    }

    fn offer(&mut self, head: u16) {
        let slot = AVAILABLE + 4 + 2 * u64::from(self.index % SIZE);
        self.memory.put(slot, &head.to_le_bytes());
        self.index = self.index.wrapping_add(1);
        self.memory.put(AVAILABLE + 2, &self.index.to_le_bytes());
    }

    /// Requests a call when this index of the used ring is written.
    fn wants_call_at(&self, event: u16) {
        self.memory.put(AVAILABLE + 4 + 2 * u64::from(SIZE), &event.to_le_bytes());
    }
}

fn entry(address: u64, len_bytes: u32, flags: u16, next: u16) -> Entry {
    Entry { address: GUEST + address, len_bytes, flags, next }
}

/// Result of following a chain of these descriptors at head 0.
fn followed(entries: &[Entry]) -> Result<Chain, RingError> {
    let driver = Driver::new(0);
    for (entry, at) in entries.iter().zip(0_u64..) {
        driver.describe(DESCRIPTORS + at * 16, *entry);
    }
    let mut chain = Chain::default();
    driver.ring(false).follow(0, &space(), &mut chain).map(|()| chain)
}

#[test]
fn a_chain_is_what_its_descriptors_say_first_to_read_and_then_to_write() {
    let chain = followed(&[
        entry(ROOM, 16, NEXT, 3),
        entry(0, 0, 0, 0),
        entry(ROOM + 0x500, 1, WRITE, 7),
        entry(ROOM + 0x100, 512, NEXT, 2),
    ]);
    let chain = chain.unwrap();
    assert_eq!((chain.readable_bytes, chain.writable_bytes), (528, 1));
    let places: Vec<_> = chain.readable.iter().chain(&chain.writable).collect();
    let places: Vec<_> = places.iter().map(|piece| (piece.offset, piece.len_bytes)).collect();
    assert_eq!(places, [(ROOM, 16), (ROOM + 0x100, 512), (ROOM + 0x500, 1)]);
}

#[test]
fn a_table_of_descriptors_is_followed_also_across_two_stretches() {
    let at = MEMORY_BYTES / 2 - 24;
    let driver = Driver::new(0);
    driver.describe(DESCRIPTORS, entry(ROOM, 16, NEXT, 1));
    driver.describe(DESCRIPTORS + 16, entry(at, 48, INDIRECT, 0));
    driver.describe(at, entry(ROOM + 0x100, 512, NEXT, 2));
    driver.describe(at + 32, entry(ROOM + 0x200, 3, WRITE | NEXT, 1));
    driver.describe(at + 16, entry(ROOM + 0x300, 4, WRITE, 0));
    let mut chain = Chain::default();
    driver.ring(false).follow(0, &space(), &mut chain).unwrap();
    assert_eq!((chain.readable_bytes, chain.writable_bytes), (528, 7));
}

#[test]
fn a_chain_that_makes_no_sense_is_broken_and_says_how() {
    let size = SIZE;
    let outside = |address: u64, len_bytes: u64| {
        RingError::InvalidAddress(InvalidAddress { address: GUEST + address, len_bytes })
    };
    for (entries, expected) in [
        (vec![entry(ROOM, 16, NEXT, 0)], RingError::Long { head: 0, expected_max: 8 }),
        (vec![entry(ROOM, 16, NEXT, 8)], RingError::Descriptor { found: 8, size }),
        (vec![entry(ROOM, 16, NEXT, u16::MAX)], RingError::Descriptor { found: u16::MAX, size }),
        (vec![entry(ROOM, 1, NEXT | WRITE, 1), entry(ROOM, 1, 0, 0)], RingError::Order { head: 0 }),
        (vec![entry(MEMORY_BYTES, 1, 0, 0)], outside(MEMORY_BYTES, 1)),
        (vec![entry(MEMORY_BYTES - 1, 2, WRITE, 0)], outside(MEMORY_BYTES - 1, 2)),
        (vec![entry(ROOM, u32::MAX, 0, 0)], outside(ROOM, u32::MAX.into())),
        (vec![entry(ROOM, 0, INDIRECT, 0)], RingError::Indirect { head: 0, found: 0 }),
        (vec![entry(ROOM, 40, INDIRECT, 0)], RingError::Indirect { head: 0, found: 40 }),
        (vec![entry(ROOM, 16, INDIRECT | NEXT, 1)], RingError::Indirect { head: 0, found: 16 }),
        (
            vec![entry(ROOM, 16 * 1025, INDIRECT, 0)],
            RingError::Indirect { head: 0, found: 16 * 1025 },
        ),
        // A table outside memory, and one that extends beyond its end.
        (vec![entry(MEMORY_BYTES, 16, INDIRECT, 0)], outside(MEMORY_BYTES, 16)),
        (vec![entry(MEMORY_BYTES - 8, 16, INDIRECT, 0)], outside(MEMORY_BYTES - 8, 16)),
        // The descriptor table of the ring as an indirect table, whose first entry is indirect.
        (vec![entry(DESCRIPTORS, 16, INDIRECT, 0)], RingError::Indirect { head: 0, found: 16 }),
    ] {
        let found = followed(&entries).unwrap_err();
        assert_eq!(found, expected, "{entries:?}");
        assert!(!found.to_string().is_empty());
    }
}

#[test]
fn a_table_that_goes_round_ends_after_as_many_steps_as_it_has_entries() {
    let driver = Driver::new(0);
    driver.describe(DESCRIPTORS, entry(ROOM, 32, INDIRECT, 0));
    driver.describe(ROOM, entry(ROOM + 0x100, 1, NEXT, 1));
    driver.describe(ROOM + 16, entry(ROOM + 0x100, 1, NEXT, 0));
    let mut chain = Chain::default();
    let broken = driver.ring(false).follow(0, &space(), &mut chain).unwrap_err();
    assert_eq!(broken, RingError::Long { head: 0, expected_max: 2 });
    driver.describe(ROOM, entry(ROOM + 0x100, 1, NEXT, 2));
    let broken = driver.ring(false).follow(0, &space(), &mut chain).unwrap_err();
    assert_eq!(broken, RingError::Descriptor { found: 2, size: 2 });
}

#[test]
fn an_index_that_jumps_and_a_head_that_is_none_are_broken() {
    let mut driver = Driver::new(0xfffe);
    let mut ring = driver.ring(false);
    driver.memory.put(AVAILABLE + 2, &0xfffe_u16.wrapping_add(SIZE + 1).to_le_bytes());
    let jump = RingError::IndexJump { found: 7, taken: 0xfffe, size: SIZE };
    assert_eq!(ring.take(), Err(jump));
    driver.memory.put(AVAILABLE + 2, &0xfffd_u16.to_le_bytes());
    assert!(matches!(ring.take(), Err(RingError::IndexJump { .. })), "it goes back");
    driver.offer(SIZE);
    assert_eq!(ring.take(), Err(RingError::Descriptor { found: SIZE, size: SIZE }));
}

/// Ring as recovered by another process, with two heads in flight.
#[test]
fn a_ring_goes_on_behind_what_was_used_wherever_it_takes() {
    let driver = Driver::new(5);
    driver.memory.put(USED + 2, &3_u16.to_le_bytes());
    let mut ring = driver.ring(false);
    assert_eq!((ring.used(), ring.next()), (3, 5));
    ring.push(6, 7).unwrap();
    ring.publish().unwrap();
    assert_eq!(driver.memory.get(USED + 4 + 3 * 8), [6, 0, 0, 0, 7, 0, 0, 0]);
    assert_eq!(driver.memory.get(USED + 2), [4, 0]);
}

#[test]
fn a_ring_that_is_not_in_one_stretch_is_refused() {
    let half = USER + MEMORY_BYTES / 2;
    for addresses in [
        [half - 64, USER, USER],
        [USER, half - 8, USER],
        [USER, USER, half - 32],
        [0, USER, USER],
        [u64::MAX - 15, USER, USER],
    ] {
        assert!(RingAddresses::new(&space(), SIZE, addresses).is_err(), "{addresses:x?}");
    }
    assert!(RingAddresses::new(&GuestMemory::default(), SIZE, [USER; 3]).is_err());
}

#[test]
fn a_driver_that_polls_is_not_called_and_one_that_sleeps_is() {
    let driver = Driver::new(0);
    let mut ring = driver.ring(false);
    assert_eq!(driver.memory.get(USED), [1, 0], "no kicks are wanted");
    driver.memory.put(AVAILABLE, &[1, 0]);
    ring.push(0, 7).unwrap();
    ring.publish().unwrap();
    assert_eq!(ring.wants_call(), Ok(false));
    driver.memory.put(AVAILABLE, &[0, 0]);
    assert_eq!(ring.wants_call(), Ok(false), "there is nothing new");
    ring.push(5, 0x0102_0304).unwrap();
    assert_eq!(driver.memory.get(USED + 2), [1, 0], "not yet");
    ring.publish().unwrap();
    assert_eq!(ring.wants_call(), Ok(true));
    assert_eq!(
        driver.memory.get(USED),
        [1, 0, 2, 0, 0, 0, 0, 0, 7, 0, 0, 0, 5, 0, 0, 0, 4, 3, 2, 1]
    );
    assert_eq!(ring.enable_kicks(), Ok(false));
    assert_eq!(driver.memory.get(USED), [0, 0, 2, 0]);
    ring.disable_kicks().unwrap();
    assert_eq!(driver.memory.get(USED), [1, 0, 2, 0]);
}

/// Decision of the driver (virtio 2.7.10.1).
fn passes(event: u16, old: u16, new: u16) -> bool {
    let mut index = old;
    while index != new {
        if index == event {
            return true;
        }
        index = index.wrapping_add(1);
    }
    false
}

#[test]
fn an_event_index_is_called_for_exactly_when_it_is_passed() {
    let mut random = Random::new(0xca11);
    for _ in 0..2_000 {
        let first = u16::try_from(random.below(0x1_0000)).unwrap();
        let driver = Driver::new(first);
        let mut ring = driver.ring(true);
        let count = u16::try_from(random.below(9)).unwrap();
        let near = u16::try_from(random.below(20)).unwrap();
        let event = first.wrapping_sub(6).wrapping_add(near);
        driver.wants_call_at(event);
        for _ in 0..count {
            ring.push(0, 0).unwrap();
        }
        ring.publish().unwrap();
        let expected = passes(event, first, first.wrapping_add(count));
        assert_eq!(ring.wants_call(), Ok(expected), "{event} {first} {count}");
    }
}

#[test]
fn who_asks_for_a_kick_says_after_which_index_and_finds_what_came_before() {
    let mut driver = Driver::new(0xffff);
    let mut ring = driver.ring(true);
    let event = || -> [u8; 4] { driver_event(&driver) };
    fn driver_event(driver: &Driver) -> [u8; 4] {
        driver.memory.get(USED + 4 + 8 * u64::from(SIZE))
    }
    driver.memory.put(USED + 4 + 8 * u64::from(SIZE), &[0, 0, 0x77, 0x77]);
    assert_eq!(ring.enable_kicks(), Ok(false));
    assert_eq!(event(), [0xff, 0xff, 0x77, 0x77], "and nothing behind it");
    driver.offer(3);
    assert_eq!(ring.enable_kicks(), Ok(true));
    assert_eq!(ring.take(), Ok(Some(3)));
    assert_eq!(ring.take(), Ok(None));
    assert_eq!(ring.enable_kicks(), Ok(false));
    assert_eq!(driver_event(&driver), [0, 0, 0x77, 0x77]);
}

/// Random memory content: no chain leaves the memory or is endless.
#[test]
fn whatever_lies_in_memory_a_chain_has_an_end_and_lies_inside() {
    for seed in 0..400 {
        let mut random = Random::new(seed);
        let mut driver = Driver::new(0);
        let odd = |random: &mut Random| match random.below(6) {
            0 => GUEST + random.below(MEMORY_BYTES + 64),
            1 => random.next_u64(),
            _ => GUEST + ROOM + random.below(0x800) * 16,
        };
        for at in 0..(MEMORY_BYTES / 16) {
            if (AVAILABLE / 16..ROOM / 16).contains(&at) {
                continue;
            }
            let address = odd(&mut random);
            let len_bytes = match random.below(4) {
                0 => u32::try_from(random.below(1 << 32)).unwrap(),
                1 => u32::try_from(random.below(40)).unwrap() * 16,
                _ => u32::try_from(random.below(4096)).unwrap(),
            };
            let flags = [0, NEXT, NEXT, NEXT, WRITE, NEXT | WRITE, INDIRECT, 7];
            let flags = flags[usize::try_from(random.below(8)).unwrap()];
            let next = u16::try_from(random.below(10)).unwrap();
            driver.describe(at * 16, Entry { address, len_bytes, flags, next });
        }
        let mut ring = driver.ring(seed % 2 == 0);
        let mut chain = Chain::default();
        for _ in 0..20 {
            driver.offer(u16::try_from(random.below(9)).unwrap());
            let Ok(Some(head)) = ring.take() else { break };
            if ring.follow(head, &space(), &mut chain).is_err() {
                continue;
            }
            let pieces = || chain.readable.iter().chain(&chain.writable);
            assert!(
                pieces().all(|piece| piece.offset + u64::from(piece.len_bytes) <= MEMORY_BYTES)
            );
            let bytes: u64 = pieces().map(|piece| u64::from(piece.len_bytes)).sum();
            assert_eq!(bytes, chain.readable_bytes + chain.writable_bytes);
            assert!(pieces().count() <= 2 * (1024 + 64));
        }
    }
}
