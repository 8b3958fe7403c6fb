//! A disk on its own reactors, and a front end that simulates a virtual machine.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use tenmil_base::{BlockDevice, RegionId, Span};
use tenmil_dma::{Region, RegionTable};
use tenmil_drivers::RamDevice;
use tenmil_linux::local_socket::{LocalConnection, RecvResult};
use tenmil_linux::socket_stream::{ListenAddress, StreamListener};
use tenmil_linux::{Clock, RemoteEventFd};
use tenmil_reactor::{PollMode, Reactors};

use super::virtio_driver::{GUEST, MEMORY_BYTES, SIZE, USER, VirtioBlkDriver, queue_addresses};
use crate::endpoint_event::EndpointEvent;
pub(super) use crate::test_reactors::TIME_LIMIT;
use crate::test_reactors::{await_event, reactors_on};
use crate::vhost_user::{Server, ServerConfig, device_id_of_uri};

/// Server served by a light thread.
pub(super) struct TestServer {
    pub(super) regions: RegionTable,
    pub(super) clock: Clock,
    pub(super) server: Server,
    reactors: Option<Reactors>,
    directory: tempfile::TempDir,
}

/// Front end with 1 MiB of memory.
pub(super) struct TestFrontEnd {
    pub(super) connection: LocalConnection,
    pub(super) regions: RegionTable,
    pub(super) memory: Region,
    pub(super) clock: Clock,
    pub(super) features: u64,
}

/// Running queue.
pub(super) struct TestQueue {
    pub(super) driver: VirtioBlkDriver<RegionTable>,
    pub(super) kicked: RemoteEventFd,
    pub(super) call: RemoteEventFd,
    pub(super) has_event_index: bool,
    pub(super) kicks: usize,
    clock: Clock,
}

pub(super) const BLOCKS: u64 = 4096;
/// Protocol features that every machine negotiates.
const PROTOCOL: u64 = 1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 12 | 1 << 15;
pub(super) const EVENT_INDEX: u64 = 1 << 29;
const BASIC: u64 = 1 << 32 | 1 << 30 | 1 << 28 | 1 << 9;

impl TestServer {
    pub(super) fn new(poll: PollMode) -> Self {
        Self::with_device(poll, |regions| Arc::new(RamDevice::new(regions, 512, BLOCKS).unwrap()))
    }

    /// Same, over another device.
    pub(super) fn with_device(
        poll: PollMode,
        medium: impl FnOnce(&RegionTable) -> Arc<dyn BlockDevice>,
    ) -> Self {
        let (regions, clock) = (RegionTable::new(64), Clock::start());
        let reactors = reactors_on(2, poll, &clock);
        let directory = tempfile::tempdir().unwrap();
        let listen_socket =
            StreamListener::open(&ListenAddress::Path(directory.path().join("disk"))).unwrap();
        let medium = medium(&regions);
        let server = Server::start(ServerConfig {
            listen_socket,
            medium,
            is_read_only: false,
            id: device_id_of_uri("ram:"),
            regions: regions.clone(),
            reactors: Arc::clone(reactors.registry()),
        });
        let server = server.unwrap();
        Self { regions, clock, server, reactors: Some(reactors), directory }
    }

    pub(super) fn connect_unnegotiated(&self) -> TestFrontEnd {
        let connection = LocalConnection::connect(&self.directory.path().join("disk"), TIME_LIMIT);
        let regions = RegionTable::shared(4);
        let memory = regions.allocate_region(usize::try_from(MEMORY_BYTES).unwrap()).unwrap();
        let (connection, clock) = (connection.unwrap(), self.clock);
        TestFrontEnd { connection, regions, memory, clock, features: 0 }
    }

    /// Front end that has negotiated all features and shared its memory.
    pub(super) fn connect_and_negotiate(&self, more_features: u64) -> TestFrontEnd {
        let mut machine = self.connect_unnegotiated();
        machine.negotiate(more_features);
        machine.send_memory_table();
        machine
    }

    pub(super) fn await_event(&self, is_it: impl FnMut(&EndpointEvent) -> bool) -> EndpointEvent {
        await_event(&self.clock, || self.server.next_event(), is_it)
    }

    /// Reason for which the front end was disconnected.
    pub(super) fn await_disconnect_event(&self) -> Option<String> {
        match self.await_event(|new_events| matches!(new_events, EndpointEvent::Disconnected(_))) {
            EndpointEvent::Disconnected(why) => why,
            _ => None,
        }
    }

    /// Waits until all memory of all front ends is unmapped.
    pub(super) fn await_region_count(&self, count: usize) {
        let end = self.clock.now().after(TIME_LIMIT);
        while self.regions.region_count() != count {
            assert!(self.clock.now() < end, "{} regions are left", self.regions.region_count());
            tenmil_linux::named_thread::sleep(Span::from_us(100));
        }
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        if let Some(reactors) = self.reactors.take() {
            reactors.stop();
        }
    }
}

impl TestFrontEnd {
    /// Sends a message.
    pub(super) fn send_message(
        &self,
        code: u32,
        flags: u32,
        payload: &[u8],
        files: &[BorrowedFd<'_>],
    ) {
        let size = u32::try_from(payload.len()).unwrap();
        let mut bytes = [code, flags, size].map(u32::to_le_bytes).concat();
        bytes.extend_from_slice(payload);
        let sent = self.connection.send_files(&bytes, files).unwrap();
        assert_eq!(sent, bytes.len());
    }

    /// Payload of the next reply, and its descriptors. `None` once the server has closed.
    pub(super) fn receive_reply(&self) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
        let mut header = [0; 12];
        let mut files = Vec::new();
        self.receive_exact(&mut header, &mut files)?;
        let size = u32::from_le_bytes(*header.last_chunk().unwrap());
        let mut payload = vec![0; size as usize];
        self.receive_exact(&mut payload, &mut files)?;
        Some((payload, files))
    }

    fn receive_exact(&self, into: &mut [u8], files: &mut Vec<OwnedFd>) -> Option<()> {
        let end = self.clock.now().after(TIME_LIMIT);
        let mut filled = 0;
        while filled < into.len() {
            match self.connection.receive_files(&mut into[filled..], files, 8).unwrap() {
                RecvResult::Bytes(count) => filled += count,
                RecvResult::Eof => return None,
                RecvResult::WouldBlock => {
                    assert!(self.clock.now() < end, "no answer");
                    self.connection.wait_to_receive(Span::from_ms(100)).unwrap();
                }
            }
        }
        Some(())
    }

    /// Sends a message with a requested reply; returns zero for success.
    pub(super) fn send_for_ack(&self, code: u32, payload: &[u8], files: &[BorrowedFd<'_>]) -> u64 {
        self.send_message(code, 9, payload, files);
        let (completion, _) = self.receive_reply().expect("the server has gone");
        u64::from_le_bytes(completion.try_into().unwrap())
    }

    /// Waits until the server has closed its end.
    pub(super) fn await_connection_close(&self) {
        while self.receive_reply().is_some() {}
    }

    pub(super) fn negotiate(&mut self, more_features: u64) {
        self.send_message(16, 1, &PROTOCOL.to_le_bytes(), &[]);
        self.features = BASIC | more_features;
        self.send_message(1, 1, &[], &[]);
        let (offered, _) = self.receive_reply().unwrap();
        let offered = u64::from_le_bytes(offered.try_into().unwrap());
        self.features &= offered;
        assert_eq!(self.send_for_ack(2, &self.features.to_le_bytes(), &[]), 0);
    }

    pub(super) fn memory_file(&self) -> OwnedFd {
        self.regions.descriptor(self.memory.id()).unwrap()
    }

    pub(super) fn send_memory_table(&self) {
        assert_eq!(self.send_for_ack(5, &memory_table_payload(), &[self.memory_file().as_fd()]), 0);
    }

    /// Starts queue `number` at index zero.
    pub(super) fn start_queue(&self, number: u32) -> TestQueue {
        let driver = VirtioBlkDriver::new(self.regions.clone(), self.memory.id(), number.into());
        self.start_queue_at(number, driver)
    }

    /// Starts a queue at the index of its driver.
    pub(super) fn start_queue_at(
        &self,
        number: u32,
        driver: VirtioBlkDriver<RegionTable>,
    ) -> TestQueue {
        let ((kick, kicked), (calls, call)) =
            (RemoteEventFd::pair().unwrap(), RemoteEventFd::pair().unwrap());
        let base = u32::from(driver.next);
        for (code, payload) in [
            (8, u32_payload(&[number, SIZE.into()])),
            (10, u32_payload(&[number, base])),
            (9, vring_addresses_payload(number)),
        ] {
            assert_eq!(self.send_for_ack(code, &payload, &[]), 0, "{code}");
        }
        let index = u64::from(number).to_le_bytes();
        assert_eq!(self.send_for_ack(13, &index, &[calls.as_fd()]), 0);
        assert_eq!(self.send_for_ack(12, &index, &[kick.as_fd()]), 0);
        assert_eq!(self.send_for_ack(18, &u32_payload(&[number, 1]), &[]), 0);
        let (has_event_index, clock) = (self.features & EVENT_INDEX != 0, self.clock);
        TestQueue { driver, kicked, call, has_event_index, kicks: 0, clock }
    }

    /// Disconnects abruptly. The memory stays mapped as long as the returned value exists, as after
    /// a kill of the process.
    pub(super) fn close_connection(self) -> (RegionTable, Region) {
        (self.regions, self.memory)
    }

    /// Stops a queue; returns its next available index.
    pub(super) fn stop_queue(&self, number: u32) -> u32 {
        self.send_message(11, 1, &u32_payload(&[number, 0]), &[]);
        let (completion, _) = self.receive_reply().expect("the server has gone");
        u32::from_le_bytes(*completion.last_chunk().unwrap())
    }
}

impl TestQueue {
    /// Sends a kick if the device wants one.
    pub(super) fn kick_queue(&mut self) {
        if self.driver.wants_kick(self.has_event_index) {
            self.kicks += 1;
            self.kicked.signal();
        }
    }

    /// Waits for the next used head.
    pub(super) fn await_used(&mut self) -> (u16, u32) {
        let end = self.clock.now().after(TIME_LIMIT);
        loop {
            if let Some(used) = self.driver.take_used() {
                return used;
            }
            assert!(self.clock.now() < end, "nothing is used");
            tenmil_linux::named_thread::yield_cpu();
        }
    }

    /// Waits for a call.
    pub(super) fn await_call(&self) {
        let end = self.clock.now().after(TIME_LIMIT);
        while !self.call.clear_signals() {
            assert!(self.clock.now() < end, "no call arrives");
            tenmil_linux::named_thread::sleep(Span::from_us(50));
        }
    }

    /// Executes one request; returns its status and the number of bytes written.
    pub(super) fn execute_request(
        &mut self,
        asked: super::virtio_driver::DriverRequest,
    ) -> (u8, u32) {
        self.driver.submit_request(0, asked);
        self.kick_queue();
        let (head, written) = self.await_used();
        assert_eq!(head, 0);
        (self.driver.request_status(0), written)
    }
}

pub(super) fn u32_payload(halves: &[u32]) -> Vec<u8> {
    halves.iter().flat_map(|half| half.to_le_bytes()).collect()
}

pub(super) fn u64_payload(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Memory table with one area, the whole memory of a machine.
pub(super) fn memory_table_payload() -> Vec<u8> {
    [u32_payload(&[1, 0]), u64_payload(&[GUEST, MEMORY_BYTES, USER, 0])].concat()
}

pub(super) fn vring_addresses_payload(number: u32) -> Vec<u8> {
    let [descriptors, available, used] = queue_addresses(number.into());
    [u32_payload(&[number, 0]), u64_payload(&[descriptors, used, available, 0])].concat()
}

pub(super) fn segment_of(region: RegionId, offset: u64, len_bytes: u32) -> tenmil_base::Segment {
    tenmil_base::Segment { region, offset, len_bytes }
}
