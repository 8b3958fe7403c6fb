//! A driver and its ring, valid and invalid.

use tenmil_base::Random;

use super::{GUEST, GuestBytes, MEMORY_BYTES, USER, two_region_memory};
use crate::{DescriptorChain, GuestMemory, InvalidAddress, Vring, VringAddresses, VringError};

/// Offsets of the parts of the ring in memory.
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x1002;
const USED: u64 = 0x2000;
/// Area for tables and data.
const ROOM: u64 = 0x3000;
const SIZE: u16 = 8;

/// Descriptor, as a driver writes it.
#[derive(Clone, Copy, Debug)]
struct DriverDescriptor {
    address: u64,
    len_bytes: u32,
    flags: u16,
    next: u16,
}

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Driver side of the ring.
struct FakeDriver {
    memory: GuestBytes,
    index: u16,
}

impl FakeDriver {
    fn new(first: u16) -> Self {
        let driver = Self { memory: GuestBytes::new(), index: first };
        driver.memory.write_bytes(AVAILABLE + 2, &first.to_le_bytes());
        driver.memory.write_bytes(USED + 2, &first.to_le_bytes());
        driver
    }

    fn open_vring(&self, has_event_index: bool) -> Vring<GuestBytes> {
        let addresses = [USER + DESCRIPTORS, USER + AVAILABLE, USER + USED];
        let place = VringAddresses::new(&two_region_memory(), SIZE, addresses).unwrap();
        Vring::new(self.memory.clone(), place, self.index, has_event_index).unwrap()
    }

    fn write_descriptor(&self, at: u64, entry: DriverDescriptor) {
        let DriverDescriptor { address, len_bytes, flags, next } = entry;
        let tail = [flags, next].map(u16::to_le_bytes).concat();
        self.memory.write_bytes(
            at,
            &[&address.to_le_bytes()[..], &len_bytes.to_le_bytes(), &tail].concat(),
        );
    }

    fn make_available(&mut self, head: u16) {
        let slot = AVAILABLE + 4 + 2 * u64::from(self.index % SIZE);
        self.memory.write_bytes(slot, &head.to_le_bytes());
        self.index = self.index.wrapping_add(1);
        self.memory.write_bytes(AVAILABLE + 2, &self.index.to_le_bytes());
    }

    /// Requests a call when this index of the used ring is written.
    fn set_used_event(&self, event: u16) {
        self.memory.write_bytes(AVAILABLE + 4 + 2 * u64::from(SIZE), &event.to_le_bytes());
    }
}

fn driver_descriptor(address: u64, len_bytes: u32, flags: u16, next: u16) -> DriverDescriptor {
    DriverDescriptor { address: GUEST + address, len_bytes, flags, next }
}

/// Result of following a chain of these descriptors at head 0.
fn resolved_chain(entries: &[DriverDescriptor]) -> Result<DescriptorChain, VringError> {
    let driver = FakeDriver::new(0);
    for (entry, at) in entries.iter().zip(0_u64..) {
        driver.write_descriptor(DESCRIPTORS + at * 16, *entry);
    }
    let mut chain = DescriptorChain::default();
    driver.open_vring(false).resolve_chain(0, &two_region_memory(), &mut chain).map(|()| chain)
}

#[test]
fn descriptor_chain_has_readable_then_writable_segments() {
    let chain = resolved_chain(&[
        driver_descriptor(ROOM, 16, NEXT, 3),
        driver_descriptor(0, 0, 0, 0),
        driver_descriptor(ROOM + 0x500, 1, WRITE, 7),
        driver_descriptor(ROOM + 0x100, 512, NEXT, 2),
    ]);
    let chain = chain.unwrap();
    assert_eq!((chain.readable_bytes, chain.writable_bytes), (528, 1));
    let places: Vec<_> = chain.readable.iter().chain(&chain.writable).collect();
    let places: Vec<_> = places.iter().map(|piece| (piece.offset, piece.len_bytes)).collect();
    assert_eq!(places, [(ROOM, 16), (ROOM + 0x100, 512), (ROOM + 0x500, 1)]);
}

#[test]
fn indirect_table_may_span_two_memory_regions() {
    let at = MEMORY_BYTES / 2 - 24;
    let driver = FakeDriver::new(0);
    driver.write_descriptor(DESCRIPTORS, driver_descriptor(ROOM, 16, NEXT, 1));
    driver.write_descriptor(DESCRIPTORS + 16, driver_descriptor(at, 48, INDIRECT, 0));
    driver.write_descriptor(at, driver_descriptor(ROOM + 0x100, 512, NEXT, 2));
    driver.write_descriptor(at + 32, driver_descriptor(ROOM + 0x200, 3, WRITE | NEXT, 1));
    driver.write_descriptor(at + 16, driver_descriptor(ROOM + 0x300, 4, WRITE, 0));
    let mut chain = DescriptorChain::default();
    driver.open_vring(false).resolve_chain(0, &two_region_memory(), &mut chain).unwrap();
    assert_eq!((chain.readable_bytes, chain.writable_bytes), (528, 7));
}

#[test]
fn invalid_descriptor_chain_is_rejected_with_its_error() {
    let size = SIZE;
    let outside = |address: u64, len_bytes: u64| {
        VringError::InvalidAddress(InvalidAddress { address: GUEST + address, len_bytes })
    };
    for (entries, expected) in [
        (vec![driver_descriptor(ROOM, 16, NEXT, 0)], VringError::Long { head: 0, expected_max: 8 }),
        (vec![driver_descriptor(ROOM, 16, NEXT, 8)], VringError::Descriptor { found: 8, size }),
        (
            vec![driver_descriptor(ROOM, 16, NEXT, u16::MAX)],
            VringError::Descriptor { found: u16::MAX, size },
        ),
        (
            vec![driver_descriptor(ROOM, 1, NEXT | WRITE, 1), driver_descriptor(ROOM, 1, 0, 0)],
            VringError::Order { head: 0 },
        ),
        (vec![driver_descriptor(MEMORY_BYTES, 1, 0, 0)], outside(MEMORY_BYTES, 1)),
        (vec![driver_descriptor(MEMORY_BYTES - 1, 2, WRITE, 0)], outside(MEMORY_BYTES - 1, 2)),
        (vec![driver_descriptor(ROOM, u32::MAX, 0, 0)], outside(ROOM, u32::MAX.into())),
        (vec![driver_descriptor(ROOM, 0, INDIRECT, 0)], VringError::Indirect { head: 0, found: 0 }),
        (
            vec![driver_descriptor(ROOM, 40, INDIRECT, 0)],
            VringError::Indirect { head: 0, found: 40 },
        ),
        (
            vec![driver_descriptor(ROOM, 16, INDIRECT | NEXT, 1)],
            VringError::Indirect { head: 0, found: 16 },
        ),
        (
            vec![driver_descriptor(ROOM, 16 * 1025, INDIRECT, 0)],
            VringError::Indirect { head: 0, found: 16 * 1025 },
        ),
        // A table outside memory, and one that extends beyond its end.
        (vec![driver_descriptor(MEMORY_BYTES, 16, INDIRECT, 0)], outside(MEMORY_BYTES, 16)),
        (vec![driver_descriptor(MEMORY_BYTES - 8, 16, INDIRECT, 0)], outside(MEMORY_BYTES - 8, 16)),
        // The descriptor table of the ring as an indirect table, whose first entry is indirect.
        (
            vec![driver_descriptor(DESCRIPTORS, 16, INDIRECT, 0)],
            VringError::Indirect { head: 0, found: 16 },
        ),
    ] {
        let found = resolved_chain(&entries).unwrap_err();
        assert_eq!(found, expected, "{entries:?}");
        assert!(!found.to_string().is_empty());
    }
}

#[test]
fn descriptor_loop_is_detected() {
    let driver = FakeDriver::new(0);
    driver.write_descriptor(DESCRIPTORS, driver_descriptor(ROOM, 32, INDIRECT, 0));
    driver.write_descriptor(ROOM, driver_descriptor(ROOM + 0x100, 1, NEXT, 1));
    driver.write_descriptor(ROOM + 16, driver_descriptor(ROOM + 0x100, 1, NEXT, 0));
    let mut chain = DescriptorChain::default();
    let broken =
        driver.open_vring(false).resolve_chain(0, &two_region_memory(), &mut chain).unwrap_err();
    assert_eq!(broken, VringError::Long { head: 0, expected_max: 2 });
    driver.write_descriptor(ROOM, driver_descriptor(ROOM + 0x100, 1, NEXT, 2));
    let broken =
        driver.open_vring(false).resolve_chain(0, &two_region_memory(), &mut chain).unwrap_err();
    assert_eq!(broken, VringError::Descriptor { found: 2, size: 2 });
}

#[test]
fn invalid_available_index_and_head_are_rejected() {
    let mut driver = FakeDriver::new(0xfffe);
    let mut ring = driver.open_vring(false);
    driver.memory.write_bytes(AVAILABLE + 2, &0xfffe_u16.wrapping_add(SIZE + 1).to_le_bytes());
    let jump = VringError::IndexJump { found: 7, taken: 0xfffe, size: SIZE };
    assert_eq!(ring.take_head(), Err(jump));
    driver.memory.write_bytes(AVAILABLE + 2, &0xfffd_u16.to_le_bytes());
    assert!(matches!(ring.take_head(), Err(VringError::IndexJump { .. })), "it goes back");
    driver.make_available(SIZE);
    assert_eq!(ring.take_head(), Err(VringError::Descriptor { found: SIZE, size: SIZE }));
}

/// Ring as recovered by another process, with two heads in flight.
#[test]
fn virtqueue_resumes_after_the_used_index() {
    let driver = FakeDriver::new(5);
    driver.memory.write_bytes(USED + 2, &3_u16.to_le_bytes());
    let mut ring = driver.open_vring(false);
    assert_eq!((ring.used_index(), ring.next_available_index()), (3, 5));
    ring.write_used(6, 7).unwrap();
    ring.publish_used_index().unwrap();
    assert_eq!(driver.memory.read_bytes(USED + 4 + 3 * 8), [6, 0, 0, 0, 7, 0, 0, 0]);
    assert_eq!(driver.memory.read_bytes(USED + 2), [4, 0]);
}

#[test]
fn virtqueue_across_memory_regions_is_rejected() {
    let half = USER + MEMORY_BYTES / 2;
    for addresses in [
        [half - 64, USER, USER],
        [USER, half - 8, USER],
        [USER, USER, half - 32],
        [0, USER, USER],
        [u64::MAX - 15, USER, USER],
    ] {
        assert!(
            VringAddresses::new(&two_region_memory(), SIZE, addresses).is_err(),
            "{addresses:x?}"
        );
    }
    assert!(VringAddresses::new(&GuestMemory::default(), SIZE, [USER; 3]).is_err());
}

#[test]
fn driver_is_interrupted_unless_it_suppresses_interrupts() {
    let driver = FakeDriver::new(0);
    let mut ring = driver.open_vring(false);
    assert_eq!(driver.memory.read_bytes(USED), [1, 0], "no kicks are wanted");
    driver.memory.write_bytes(AVAILABLE, &[1, 0]);
    ring.write_used(0, 7).unwrap();
    ring.publish_used_index().unwrap();
    assert_eq!(ring.needs_interrupt(), Ok(false));
    driver.memory.write_bytes(AVAILABLE, &[0, 0]);
    assert_eq!(ring.needs_interrupt(), Ok(false), "there is nothing new");
    ring.write_used(5, 0x0102_0304).unwrap();
    assert_eq!(driver.memory.read_bytes(USED + 2), [1, 0], "not yet");
    ring.publish_used_index().unwrap();
    assert_eq!(ring.needs_interrupt(), Ok(true));
    assert_eq!(
        driver.memory.read_bytes(USED),
        [1, 0, 2, 0, 0, 0, 0, 0, 7, 0, 0, 0, 5, 0, 0, 0, 4, 3, 2, 1]
    );
    assert_eq!(ring.enable_kicks(), Ok(false));
    assert_eq!(driver.memory.read_bytes(USED), [0, 0, 2, 0]);
    ring.disable_kicks().unwrap();
    assert_eq!(driver.memory.read_bytes(USED), [1, 0, 2, 0]);
}

/// Decision of the driver (virtio 2.7.10.1).
fn vring_need_event(event: u16, old: u16, new: u16) -> bool {
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
fn interrupt_is_sent_exactly_when_used_event_is_passed() {
    let mut random = Random::new(0xca11);
    for _ in 0..2_000 {
        let first = u16::try_from(random.below(0x1_0000)).unwrap();
        let driver = FakeDriver::new(first);
        let mut ring = driver.open_vring(true);
        let count = u16::try_from(random.below(9)).unwrap();
        let near = u16::try_from(random.below(20)).unwrap();
        let event = first.wrapping_sub(6).wrapping_add(near);
        driver.set_used_event(event);
        for _ in 0..count {
            ring.write_used(0, 0).unwrap();
        }
        ring.publish_used_index().unwrap();
        let expected = vring_need_event(event, first, first.wrapping_add(count));
        assert_eq!(ring.needs_interrupt(), Ok(expected), "{event} {first} {count}");
    }
}

#[test]
fn enabling_kicks_publishes_avail_event_and_rechecks_the_ring() {
    let mut driver = FakeDriver::new(0xffff);
    let mut ring = driver.open_vring(true);
    let event = || -> [u8; 4] { avail_event(&driver) };
    fn avail_event(driver: &FakeDriver) -> [u8; 4] {
        driver.memory.read_bytes(USED + 4 + 8 * u64::from(SIZE))
    }
    driver.memory.write_bytes(USED + 4 + 8 * u64::from(SIZE), &[0, 0, 0x77, 0x77]);
    assert_eq!(ring.enable_kicks(), Ok(false));
    assert_eq!(event(), [0xff, 0xff, 0x77, 0x77], "and nothing behind it");
    driver.make_available(3);
    assert_eq!(ring.enable_kicks(), Ok(true));
    assert_eq!(ring.take_head(), Ok(Some(3)));
    assert_eq!(ring.take_head(), Ok(None));
    assert_eq!(ring.enable_kicks(), Ok(false));
    assert_eq!(avail_event(&driver), [0, 0, 0x77, 0x77]);
}

/// Random memory content: no chain leaves the memory or is endless.
#[test]
fn random_descriptors_yield_bounded_chains_in_guest_memory() {
    for seed in 0..400 {
        let mut random = Random::new(seed);
        let mut driver = FakeDriver::new(0);
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
            driver.write_descriptor(at * 16, DriverDescriptor { address, len_bytes, flags, next });
        }
        let mut ring = driver.open_vring(seed % 2 == 0);
        let mut chain = DescriptorChain::default();
        for _ in 0..20 {
            driver.make_available(u16::try_from(random.below(9)).unwrap());
            let Ok(Some(head)) = ring.take_head() else { break };
            if ring.resolve_chain(head, &two_region_memory(), &mut chain).is_err() {
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
