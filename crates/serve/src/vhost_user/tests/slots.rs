//! Requests of one queue without a server: results, and recovery after another process.

use tenmil_base::{IoCompletion, IoStatus, RegionId};
use tenmil_dma::{Region, RegionTable};
use tenmil_vhost_user::inflight::{InflightLog, stride_bytes};
use tenmil_vhost_user::{GuestMemory, GuestRegion, Vring, VringAddresses, VringError};

use super::super::slots::{QueueParts, RequestTable};
use super::driver::{Asked, Driver, GUEST, MEMORY_BYTES, SIZE, USER, addresses, read, write};
use super::rig::segment;
use super::{disk, limits};

/// Offset of the inflight record.
const RECORD: u64 = MEMORY_BYTES - 0x4000;
const DISCARD: u32 = 11;

/// Guest, and its queue as opened by a process that found these heads in flight.
struct Guest {
    driver: Driver<RegionTable>,
    space: GuestMemory,
    regions: RegionTable,
    region: RegionId,
    /// Keeps the memory allocated.
    _memory: Region,
}

impl Guest {
    fn new() -> Self {
        let regions = RegionTable::new(1);
        let memory = regions.allocate(usize::try_from(MEMORY_BYTES).unwrap()).unwrap();
        let region = memory.id();
        let area =
            GuestRegion { guest: GUEST, user: USER, len_bytes: MEMORY_BYTES, region, offset: 0 };
        let space = GuestMemory::new(vec![area]).unwrap();
        let driver = Driver::new(regions.clone(), region, 0);
        Self { driver, space, regions, region, _memory: memory }
    }

    fn slots(&self, again: &[u16]) -> Result<RequestTable<RegionTable>, VringError> {
        let memory = self.regions.clone();
        let place = VringAddresses::new(&self.space, SIZE, addresses(0)).unwrap();
        let next = u16::try_from(again.len()).unwrap();
        let ring = Vring::new(memory.clone(), place, next, false)?;
        let record = segment(self.region, RECORD, stride_bytes(SIZE));
        let (record, _) = InflightLog::open(memory.clone(), record, SIZE, 0).unwrap();
        let record = Some((record, again.to_vec()));
        RequestTable::new(QueueParts {
            memory,
            disk: disk(limits()),
            features: 1 << 9,
            ring,
            size: SIZE,
            record,
        })
    }

    /// Executes one request with this device status; returns its status, the number of bytes
    /// written, and whether the backend was used.
    fn one(&mut self, asked: Asked, status: IoStatus) -> (u8, u32, bool) {
        let mut slots = self.slots(&[]).unwrap();
        self.driver.ask(0, asked);
        assert_eq!(slots.receive(&self.space, true).unwrap(), 1);
        let count = slots.requests().0.len();
        slots.taken(count);
        if count > 0 {
            slots.completed(IoCompletion { token: 0, status, result: 0 }, false).unwrap();
        }
        slots.publish().unwrap();
        assert!(slots.is_drained());
        let (_, written) = self.driver.take().unwrap();
        (self.driver.status(0), written, count > 0)
    }
}

#[test]
fn a_head_that_is_no_descriptor_cannot_have_been_in_flight() {
    let endpoint = Guest::new();
    let refused = endpoint.slots(&[0, SIZE]).unwrap_err();
    assert_eq!(refused, VringError::Descriptor { found: SIZE, size: SIZE });
    assert!(endpoint.slots(&[0, SIZE - 1]).is_ok());
}

/// The driver may trust as many bytes as the used length says.
#[test]
fn a_read_that_went_wrong_has_written_nothing_but_its_status() {
    assert_eq!(Guest::new().one(read(0, 4096), IoStatus::SUCCESS), (0, 4097, true));
    assert_eq!(Guest::new().one(read(0, 4096), IoStatus::WRITE_FAULT), (1, 1, true));
    assert_eq!(Guest::new().one(write(0, 4096), IoStatus::SUCCESS), (0, 1, true));
}

#[test]
fn a_discard_has_one_stretch_and_neither_more_nor_less() {
    let of = |len_bytes| {
        let mut endpoint = Guest::new();
        // Eight sectors from the eighth one on, followed by further data.
        let stretch = [&8_u64.to_le_bytes()[..], &8_u32.to_le_bytes(), &[0; 4]].concat();
        endpoint.driver.put(endpoint.driver.data(0), &[&stretch[..], &stretch].concat());
        let asked = Asked { kind: DISCARD, sector: 0, len_bytes, is_read: false };
        endpoint.one(asked, IoStatus::SUCCESS)
    };
    assert_eq!(of(16), (0, 1, true));
    for len_bytes in [8, 24, 32] {
        assert_eq!(of(len_bytes), (2, 1, false), "{len_bytes} bytes");
    }
}

/// No kick arrives for requests taken by the previous process.
#[test]
fn what_was_in_flight_keeps_a_queue_awake_until_it_is_done() {
    let mut endpoint = Guest::new();
    endpoint.driver.ask(3, write(0, 4096));
    let mut slots = endpoint.slots(&[3]).unwrap();
    assert!(!slots.is_drained(), "it would end without having done it");
    assert!(slots.enable_kicks().unwrap(), "it would sleep");
    // Even if new requests are not accepted any more.
    assert_eq!(slots.receive(&endpoint.space, false).unwrap(), 1);
    assert!(!slots.is_drained() && !slots.enable_kicks().unwrap());
    slots.taken(1);
    let completion = IoCompletion { token: 3, status: IoStatus::SUCCESS, result: 0 };
    slots.completed(completion, false).unwrap();
    slots.publish().unwrap();
    assert!(slots.is_drained());
    assert_eq!(endpoint.driver.take(), Some((3, 1)));
}
