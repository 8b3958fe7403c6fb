//! Requests of one queue without a server: results, and recovery after another process.

use tenmil_base::{IoCompletion, IoStatus, RegionId};
use tenmil_dma::{Region, RegionTable};
use tenmil_vhost_user::inflight::{InflightLog, stride_bytes};
use tenmil_vhost_user::{GuestMemory, GuestRegion, Vring, VringAddresses, VringError};

use super::super::request_table::{QueueParts, RequestTable};
use super::test_front_end::segment_of;
use super::virtio_driver::{
    DriverRequest, GUEST, MEMORY_BYTES, SIZE, USER, VirtioBlkDriver, queue_addresses, read_request,
    write_request,
};
use super::{device_limits, test_disk};

/// Offset of the inflight record.
const RECORD: u64 = MEMORY_BYTES - 0x4000;
const DISCARD: u32 = 11;

/// Guest, and its queue as opened by a process that found these heads in flight.
struct TestGuest {
    driver: VirtioBlkDriver<RegionTable>,
    space: GuestMemory,
    regions: RegionTable,
    region: RegionId,
    /// Keeps the memory allocated.
    _memory: Region,
}

impl TestGuest {
    fn new() -> Self {
        let regions = RegionTable::new(1);
        let memory = regions.allocate_region(usize::try_from(MEMORY_BYTES).unwrap()).unwrap();
        let region = memory.id();
        let area =
            GuestRegion { guest: GUEST, user: USER, len_bytes: MEMORY_BYTES, region, offset: 0 };
        let space = GuestMemory::new(vec![area]).unwrap();
        let driver = VirtioBlkDriver::new(regions.clone(), region, 0);
        Self { driver, space, regions, region, _memory: memory }
    }

    fn request_table(&self, again: &[u16]) -> Result<RequestTable<RegionTable>, VringError> {
        let memory = self.regions.clone();
        let place = VringAddresses::new(&self.space, SIZE, queue_addresses(0)).unwrap();
        let next = u16::try_from(again.len()).unwrap();
        let ring = Vring::new(memory.clone(), place, next, false)?;
        let record = segment_of(self.region, RECORD, stride_bytes(SIZE));
        let (record, _) = InflightLog::open(memory.clone(), record, SIZE, 0).unwrap();
        let record = Some((record, again.to_vec()));
        RequestTable::new(QueueParts {
            memory,
            disk: test_disk(device_limits()),
            features: 1 << 9,
            ring,
            size: SIZE,
            record,
        })
    }

    /// Executes one request with this device status; returns its status, the number of bytes
    /// written, and whether the backend was used.
    fn run_one_request(&mut self, asked: DriverRequest, status: IoStatus) -> (u8, u32, bool) {
        let mut slots = self.request_table(&[]).unwrap();
        self.driver.submit_request(0, asked);
        assert_eq!(slots.receive_chains(&self.space, true).unwrap(), 1);
        let count = slots.pending_requests().0.len();
        slots.record_submitted(count);
        if count > 0 {
            slots.handle_completion(IoCompletion { token: 0, status, result: 0 }, false).unwrap();
        }
        slots.publish_used().unwrap();
        assert!(slots.is_drained());
        let (_, written) = self.driver.take_used().unwrap();
        (self.driver.request_status(0), written, count > 0)
    }
}

#[test]
fn inflight_entry_with_invalid_head_is_rejected() {
    let endpoint = TestGuest::new();
    let refused = endpoint.request_table(&[0, SIZE]).unwrap_err();
    assert_eq!(refused, VringError::Descriptor { found: SIZE, size: SIZE });
    assert!(endpoint.request_table(&[0, SIZE - 1]).is_ok());
}

/// The driver may trust as many bytes as the used length says.
#[test]
fn failed_read_writes_only_its_status_byte() {
    assert_eq!(
        TestGuest::new().run_one_request(read_request(0, 4096), IoStatus::SUCCESS),
        (0, 4097, true)
    );
    assert_eq!(
        TestGuest::new().run_one_request(read_request(0, 4096), IoStatus::WRITE_FAULT),
        (1, 1, true)
    );
    assert_eq!(
        TestGuest::new().run_one_request(write_request(0, 4096), IoStatus::SUCCESS),
        (0, 1, true)
    );
}

#[test]
fn discard_has_exactly_one_segment() {
    let of = |len_bytes| {
        let mut endpoint = TestGuest::new();
        // Eight sectors from the eighth one on, followed by further data.
        let stretch = [&8_u64.to_le_bytes()[..], &8_u32.to_le_bytes(), &[0; 4]].concat();
        endpoint
            .driver
            .store_bytes(endpoint.driver.data_offset(0), &[&stretch[..], &stretch].concat());
        let asked = DriverRequest { kind: DISCARD, sector: 0, len_bytes, is_read: false };
        endpoint.run_one_request(asked, IoStatus::SUCCESS)
    };
    assert_eq!(of(16), (0, 1, true));
    for len_bytes in [8, 24, 32] {
        assert_eq!(of(len_bytes), (2, 1, false), "{len_bytes} bytes");
    }
}

/// No kick arrives for requests taken by the previous process.
#[test]
fn adopted_inflight_requests_keep_a_queue_awake() {
    let mut endpoint = TestGuest::new();
    endpoint.driver.submit_request(3, write_request(0, 4096));
    let mut slots = endpoint.request_table(&[3]).unwrap();
    assert!(!slots.is_drained(), "it would end without having done it");
    assert!(slots.enable_kicks().unwrap(), "it would sleep");
    // Even if new requests are not accepted any more.
    assert_eq!(slots.receive_chains(&endpoint.space, false).unwrap(), 1);
    assert!(!slots.is_drained() && !slots.enable_kicks().unwrap());
    slots.record_submitted(1);
    let completion = IoCompletion { token: 3, status: IoStatus::SUCCESS, result: 0 };
    slots.handle_completion(completion, false).unwrap();
    slots.publish_used().unwrap();
    assert!(slots.is_drained());
    assert_eq!(endpoint.driver.take_used(), Some((3, 1)));
}
