//! Tests with a simulated front end and driver, which are not always well-behaved.

mod inflight;
mod invalid_messages;
mod layouts;
mod messages;
mod virtqueues;

use std::sync::{Arc, Mutex};

use tenmil_base::{InvalidSegment, Memory, RegionId, Segment};

use crate::{GuestMemory, GuestRegion};

/// Guest memory: one region.
#[derive(Clone, Debug)]
struct GuestBytes {
    bytes: Arc<Mutex<Vec<u8>>>,
}

/// Its guest address and its address in the front end's process.
const GUEST: u64 = 0x1_0000;
const USER: u64 = 0x7f00_0000_0000;
const MEMORY_BYTES: u64 = 1 << 16;

impl GuestBytes {
    fn new() -> Self {
        let bytes = vec![0; usize::try_from(MEMORY_BYTES).unwrap()];
        Self { bytes: Arc::new(Mutex::new(bytes)) }
    }

    fn write_bytes(&self, at: u64, bytes: &[u8]) {
        let at = usize::try_from(at).unwrap();
        self.bytes.lock().unwrap()[at..][..bytes.len()].copy_from_slice(bytes);
    }

    fn read_bytes<const N: usize>(&self, at: u64) -> [u8; N] {
        let at = usize::try_from(at).unwrap();
        *self.bytes.lock().unwrap()[at..].first_chunk().unwrap()
    }
}

impl Memory for GuestBytes {
    fn load(&self, segment: Segment, into: &mut [u8]) -> Result<(), InvalidSegment> {
        let from = usize::try_from(segment.offset).unwrap();
        let bytes = self.bytes.lock().unwrap();
        let found = bytes.get(from..from + segment.len_bytes as usize);
        into.copy_from_slice(found.ok_or(InvalidSegment(segment))?);
        Ok(())
    }

    fn store(&self, segment: Segment, from: &[u8]) -> Result<(), InvalidSegment> {
        let at = usize::try_from(segment.offset).unwrap();
        let mut bytes = self.bytes.lock().unwrap();
        let found = bytes.get_mut(at..at + segment.len_bytes as usize);
        found.ok_or(InvalidSegment(segment))?.copy_from_slice(from);
        Ok(())
    }

    fn fill(&self, segment: Segment, byte: u8) -> Result<(), InvalidSegment> {
        self.store(segment, &vec![byte; segment.len_bytes as usize])
    }
}

/// The memory as two regions, adjacent for the guest and far apart here.
fn two_region_memory() -> GuestMemory {
    let half = MEMORY_BYTES / 2;
    let area = |index: u64| GuestRegion {
        guest: GUEST + index * half,
        user: USER + index * (half + 0x10_0000),
        len_bytes: half,
        region: RegionId(3),
        offset: index * half,
    };
    GuestMemory::new(vec![area(1), area(0)]).unwrap()
}
