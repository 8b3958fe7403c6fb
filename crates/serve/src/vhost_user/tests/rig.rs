//! A disk on its own reactors, and a front end that simulates a virtual machine.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use tenmil_base::{BlockDevice, RegionId, Span};
use tenmil_dma::{Region, RegionTable};
use tenmil_drivers::RamDevice;
use tenmil_linux::local_socket::{Connection, RecvResult};
use tenmil_linux::stream::{Address, StreamListener};
use tenmil_linux::{Clock, RemoteEventFd};
use tenmil_reactor::{PollMode, Reactors};

use super::driver::{Driver, GUEST, MEMORY_BYTES, SIZE, USER, addresses};
use crate::endpoint_event::EndpointEvent;
pub(super) use crate::test_rig::TIME_LIMIT;
use crate::test_rig::{await_event, reactors_on};
use crate::vhost_user::{Server, ServerConfig, id};

/// Server served by a light thread.
pub(super) struct Rig {
    pub(super) regions: RegionTable,
    pub(super) clock: Clock,
    pub(super) server: Server,
    reactors: Option<Reactors>,
    directory: tempfile::TempDir,
}

/// Front end with 1 MiB of memory.
pub(super) struct Machine {
    pub(super) connection: Connection,
    pub(super) regions: RegionTable,
    pub(super) memory: Region,
    pub(super) clock: Clock,
    pub(super) features: u64,
}

/// Running queue.
pub(super) struct Queue {
    pub(super) driver: Driver<RegionTable>,
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

impl Rig {
    pub(super) fn new(poll: PollMode) -> Self {
        Self::of(poll, |regions| Arc::new(RamDevice::new(regions, 512, BLOCKS).unwrap()))
    }

    /// Same, over another device.
    pub(super) fn of(
        poll: PollMode,
        medium: impl FnOnce(&RegionTable) -> Arc<dyn BlockDevice>,
    ) -> Self {
        let (regions, clock) = (RegionTable::new(64), Clock::start());
        let reactors = reactors_on(2, poll, &clock);
        let directory = tempfile::tempdir().unwrap();
        let listen_socket =
            StreamListener::open(&Address::Path(directory.path().join("disk"))).unwrap();
        let medium = medium(&regions);
        let server = Server::start(ServerConfig {
            listen_socket,
            medium,
            is_read_only: false,
            id: id("ram:"),
            regions: regions.clone(),
            reactors: Arc::clone(reactors.registry()),
        });
        let server = server.unwrap();
        Self { regions, clock, server, reactors: Some(reactors), directory }
    }

    pub(super) fn connect(&self) -> Machine {
        let connection = Connection::connect(&self.directory.path().join("disk"), TIME_LIMIT);
        let regions = RegionTable::shared(4);
        let memory = regions.allocate(usize::try_from(MEMORY_BYTES).unwrap()).unwrap();
        let (connection, clock) = (connection.unwrap(), self.clock);
        Machine { connection, regions, memory, clock, features: 0 }
    }

    /// Front end that has negotiated all features and shared its memory.
    pub(super) fn machine(&self, more_features: u64) -> Machine {
        let mut machine = self.connect();
        machine.agree(more_features);
        machine.share();
        machine
    }

    pub(super) fn await_event(&self, is_it: impl FnMut(&EndpointEvent) -> bool) -> EndpointEvent {
        await_event(&self.clock, || self.server.next_event(), is_it)
    }

    /// Reason for which the front end was disconnected.
    pub(super) fn await_leaving(&self) -> Option<String> {
        match self.await_event(|new_events| matches!(new_events, EndpointEvent::Disconnected(_))) {
            EndpointEvent::Disconnected(why) => why,
            _ => None,
        }
    }

    /// Waits until all memory of all front ends is unmapped.
    pub(super) fn await_regions(&self, count: usize) {
        let end = self.clock.now().after(TIME_LIMIT);
        while self.regions.count() != count {
            assert!(self.clock.now() < end, "{} regions are left", self.regions.count());
            tenmil_linux::thread::sleep(Span::from_us(100));
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if let Some(reactors) = self.reactors.take() {
            reactors.stop();
        }
    }
}

impl Machine {
    /// Sends a message.
    pub(super) fn send(&self, code: u32, flags: u32, payload: &[u8], files: &[BorrowedFd<'_>]) {
        let size = u32::try_from(payload.len()).unwrap();
        let mut bytes = [code, flags, size].map(u32::to_le_bytes).concat();
        bytes.extend_from_slice(payload);
        let sent = self.connection.send_files(&bytes, files).unwrap();
        assert_eq!(sent, bytes.len());
    }

    /// Payload of the next reply, and its descriptors. `None` once the server has closed.
    pub(super) fn receive(&self) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
        let mut header = [0; 12];
        let mut files = Vec::new();
        self.receive_all(&mut header, &mut files)?;
        let size = u32::from_le_bytes(*header.last_chunk().unwrap());
        let mut payload = vec![0; size as usize];
        self.receive_all(&mut payload, &mut files)?;
        Some((payload, files))
    }

    fn receive_all(&self, into: &mut [u8], files: &mut Vec<OwnedFd>) -> Option<()> {
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
    pub(super) fn ask(&self, code: u32, payload: &[u8], files: &[BorrowedFd<'_>]) -> u64 {
        self.send(code, 9, payload, files);
        let (completion, _) = self.receive().expect("the server has gone");
        u64::from_le_bytes(completion.try_into().unwrap())
    }

    /// Waits until the server has closed its end.
    pub(super) fn await_end(&self) {
        while self.receive().is_some() {}
    }

    pub(super) fn agree(&mut self, more_features: u64) {
        self.send(16, 1, &PROTOCOL.to_le_bytes(), &[]);
        self.features = BASIC | more_features;
        self.send(1, 1, &[], &[]);
        let (offered, _) = self.receive().unwrap();
        let offered = u64::from_le_bytes(offered.try_into().unwrap());
        self.features &= offered;
        assert_eq!(self.ask(2, &self.features.to_le_bytes(), &[]), 0);
    }

    pub(super) fn file(&self) -> OwnedFd {
        self.regions.descriptor(self.memory.id()).unwrap()
    }

    pub(super) fn share(&self) {
        assert_eq!(self.ask(5, &table(), &[self.file().as_fd()]), 0);
    }

    /// Starts queue `number` at index zero.
    pub(super) fn start(&self, number: u32) -> Queue {
        let driver = Driver::new(self.regions.clone(), self.memory.id(), number.into());
        self.go_on(number, driver)
    }

    /// Starts a queue at the index of its driver.
    pub(super) fn go_on(&self, number: u32, driver: Driver<RegionTable>) -> Queue {
        let ((kick, kicked), (calls, call)) =
            (RemoteEventFd::pair().unwrap(), RemoteEventFd::pair().unwrap());
        let base = u32::from(driver.next);
        for (code, payload) in [
            (8, halves(&[number, SIZE.into()])),
            (10, halves(&[number, base])),
            (9, address_payload(number)),
        ] {
            assert_eq!(self.ask(code, &payload, &[]), 0, "{code}");
        }
        let index = u64::from(number).to_le_bytes();
        assert_eq!(self.ask(13, &index, &[calls.as_fd()]), 0);
        assert_eq!(self.ask(12, &index, &[kick.as_fd()]), 0);
        assert_eq!(self.ask(18, &halves(&[number, 1]), &[]), 0);
        let (has_event_index, clock) = (self.features & EVENT_INDEX != 0, self.clock);
        Queue { driver, kicked, call, has_event_index, kicks: 0, clock }
    }

    /// Disconnects abruptly. The memory stays mapped as long as the returned value exists, as after
    /// a kill of the process.
    pub(super) fn hang_up(self) -> (RegionTable, Region) {
        (self.regions, self.memory)
    }

    /// Stops a queue; returns its next available index.
    pub(super) fn stop(&self, number: u32) -> u32 {
        self.send(11, 1, &halves(&[number, 0]), &[]);
        let (completion, _) = self.receive().expect("the server has gone");
        u32::from_le_bytes(*completion.last_chunk().unwrap())
    }
}

impl Queue {
    /// Sends a kick if the device wants one.
    pub(super) fn kick(&mut self) {
        if self.driver.wants_kick(self.has_event_index) {
            self.kicks += 1;
            self.kicked.signal();
        }
    }

    /// Waits for the next used head.
    pub(super) fn await_used(&mut self) -> (u16, u32) {
        let end = self.clock.now().after(TIME_LIMIT);
        loop {
            if let Some(used) = self.driver.take() {
                return used;
            }
            assert!(self.clock.now() < end, "nothing is used");
            tenmil_linux::thread::yield_now();
        }
    }

    /// Waits for a call.
    pub(super) fn await_call(&self) {
        let end = self.clock.now().after(TIME_LIMIT);
        while !self.call.clear() {
            assert!(self.clock.now() < end, "nobody calls");
            tenmil_linux::thread::sleep(Span::from_us(50));
        }
    }

    /// Executes one request; returns its status and the number of bytes written.
    pub(super) fn one(&mut self, asked: super::driver::Asked) -> (u8, u32) {
        self.driver.ask(0, asked);
        self.kick();
        let (head, written) = self.await_used();
        assert_eq!(head, 0);
        (self.driver.status(0), written)
    }
}

pub(super) fn halves(halves: &[u32]) -> Vec<u8> {
    halves.iter().flat_map(|half| half.to_le_bytes()).collect()
}

pub(super) fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Memory table with one area, the whole memory of a machine.
pub(super) fn table() -> Vec<u8> {
    [halves(&[1, 0]), words(&[GUEST, MEMORY_BYTES, USER, 0])].concat()
}

pub(super) fn address_payload(number: u32) -> Vec<u8> {
    let [descriptors, available, used] = addresses(number.into());
    [halves(&[number, 0]), words(&[descriptors, used, available, 0])].concat()
}

pub(super) fn segment(region: RegionId, offset: u64, len_bytes: u32) -> tenmil_base::Segment {
    tenmil_base::Segment { region, offset, len_bytes }
}
